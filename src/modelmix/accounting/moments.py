r"""Moments of the likelihood ratio of one coordinate: the only integrals the accountant needs.

For a law f and a shift s,  A_k = \int f(x - s)^k f(x)^(1 - k) dx  (Equation 17 of the paper) and h_k(s) = log A_k.

Everything is summed in the form A_k - 1 = \int f(x) [r^k - 1 - k(r - 1)] dx with r = f(x - s)/f(x): the bracket is
never negative, so nothing cancels, and a moment of 1 + 1e-20 keeps its digits. The results are **upper bounds**: the
error of the rule, what the rule leaves out and the rounding of the logarithms are added (``quadrature`` has the proof).
"""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np

from modelmix.accounting.functions import Array, log_bracket
from modelmix.accounting.laws import Law, Mixed, known
from modelmix.accounting.quadrature import Rule, panel_rule, rule_is_proved, strip_rule
from modelmix.errors import ModelMixError, UnprovedError

_EPS = float(np.finfo(np.float64).eps)
_ROUNDING = 8 * _EPS  # error granted to a difference of two log-densities, per unit of what is summed in them
_CLOSED_FORM = 1e-13  # added to the logarithm of a closed form, for the rounding of small ones
_PANEL_TOLERANCE = 1e-11
_PANEL_SAFETY = 10.0
_PANEL_WORST = 1e-6
_MOST_HALVINGS = 7
_DENSE, _FAR, _TOO_FAR = 256.0, 60.0, 2e4
"""Peaks (k * shift, in scales) beyond _FAR are summed for orders up to _DENSE only, and never beyond _TOO_FAR."""
_NEGLIGIBLE = 1e-12  # shifts and widths below this many scales are lost in rounding
_BLOCK = 2_000_000  # entries of the order-by-point matrix held at a time


def log_moments(law: Law, shift: float, orders: Array) -> Array:
    """Upper bounds on log A_k(shift) for every order k (real, at least 1).

    Guarantee: never below the true value. Above A_k - 1, relatively, by about 1e-12 + 1e-14/shift (in scales), most of
    it rounding; proved for Gaussian noise, estimated by panel halving for other laws.
    """
    return np.logaddexp(0.0, log_excess(law, shift, orders))


def log_excess(law: Law, shift: float, orders: Array) -> Array:
    """Upper bounds on log(A_k(shift) - 1), which keeps its digits when A_k is close to 1."""
    k = np.atleast_1d(np.asarray(orders, dtype=np.float64))
    if np.any(~(k >= 1)):
        raise ModelMixError("moments are defined for orders 1 and above.")
    out = np.full(k.shape, -np.inf)
    above = k > 1
    if shift == 0 or not above.any():
        return out
    # Both replacements err upwards: moments grow with the shift, and mixing (post-processing) only lowers them.
    shift = max(abs(float(shift)), _NEGLIGIBLE * law.scale)
    if type(law) is Mixed and law.omega < _NEGLIGIBLE * law.scale:
        law = law.base
    bound = np.full(k.shape, np.inf)
    noise = known(law)
    if noise is not None:
        bound[above] = _rounded_up(noise.exact_log_excess(shift, k[above]))
        if noise is law:
            return np.where(above, bound, out)
        # Deep in the tail the unmixed law, an upper bound because mixing is post-processing, is as good and free.
        far = k * shift / law.scale
        above &= (far <= _FAR) | ((k <= _DENSE) & (far <= _TOO_FAR))
    # One set of points serves a factor of four in k: small orders deserve wide steps.
    lower = 1.0
    while lower < k.max():
        upper = max(16.0, 4 * lower)
        chosen = above & (k > lower) & (k <= upper)
        if chosen.any():
            bound[chosen] = np.minimum(bound[chosen], _summed(law, shift, k[chosen]))
        lower = upper
    return np.where(k > 1, bound, out)


def sampled_log_moments(law: Law, shift: float, orders: Array, sample_rate: float) -> Array:
    r"""log \int f(x) (1 - q + q f(x-s)/f(x))^alpha dx for one coordinate, at any real orders alpha > 1.

    At whole orders this is the sum of the Corollary for p = 1. That the same gradient is the worst in between is proved
    for orders from 1.04 on (docs/proofs.md), but no numerical error is added here, so that it never enters an epsilon
    of this package: it serves to reproduce published figures.
    """
    alpha = np.asarray(orders, dtype=np.float64)
    top = float(alpha.max())
    rule = strip_rule(law, abs(shift), top) if rule_is_proved(law) else panel_rule(law, abs(shift), top, 2)
    return np.logaddexp(0.0, _sum(law, abs(shift), alpha, rule, sample_rate)[0])


def sampled_moment_bounds(law: Law, shift: float, orders: Array, sample_rate: float) -> Array:
    """Upper bounds on ``sampled_log_moments`` for Gaussian noise, mixed or plain, with every error added.

    The rule's error is relative to the sampled moment, 1 and the order: their sum is below A - 1 + 4 * order. Tails:
    the bracket of 1 - q + q r is at most q times that of r, by convexity.
    """
    alpha, shift = np.asarray(orders, dtype=np.float64), abs(float(shift))
    if not rule_is_proved(law):
        raise ModelMixError(f"{law} has no proved rule at orders between whole numbers.")
    if type(law) is Mixed and law.omega < _NEGLIGIBLE * law.scale:  # mixing, post-processing, only lowers moments
        law = law.base
    rule = strip_rule(law, shift, float(alpha.max()), sampled=True)
    rule = replace(rule, relative=2 * rule.relative)
    return np.logaddexp(0.0, _sum(law, shift, alpha, rule, sample_rate)[1])


def _summed(law: Law, shift: float, k: Array) -> Array:
    top = float(k.max())
    if rule_is_proved(law):
        return _sum(law, shift, k, strip_rule(law, shift, top))[1]
    coarse, _ = _sum(law, shift, k, panel_rule(law, shift, top, 0))
    for halvings in range(1, _MOST_HALVINGS + 1):
        fine, bound = _sum(law, shift, k, panel_rule(law, shift, top, halvings))
        if np.all(np.isposinf(fine)):
            return fine
        with np.errstate(invalid="ignore", over="ignore"):
            change = np.nan_to_num(np.abs(np.expm1(coarse - fine)), nan=np.inf)
            rounding = np.expm1(bound - fine)
        settled = change <= np.maximum(_PANEL_TOLERANCE, rounding)
        if np.all(settled) or (halvings == _MOST_HALVINGS and np.all(change < _PANEL_WORST)):
            return bound + np.log1p(_PANEL_SAFETY * change)
        coarse = fine
    raise UnprovedError(
        "the moments of the noise are known with an error bound",
        f"the moment integrals of {law} did not settle.",
        "Give the law its kinks and a scale that matches it, or use Gaussian or Laplace noise.",
    )


def _sum(law: Law, shift: float, k: Array, rule: Rule, sample_rate: float = 1.0) -> tuple[Array, Array]:
    """Logs of the weighted sum of f [r^k - 1 - k(r - 1)] over the points of the rule, and of its upper bound.

    With a sample rate below 1, r is replaced by 1 - q + q r.
    """
    log_f = np.concatenate([law.log_density(p.x, p.origin) for p in rule.pieces])
    log_shifted = np.concatenate([law.log_density(p.x - shift, p.origin) for p in rule.pieces])
    log_weight = np.log(np.concatenate([p.weight for p in rule.pieces]))
    if not np.all(np.isfinite(log_f) & np.isfinite(log_shifted)):
        # A density that is exactly 0 where the shifted one is not has no bounded moment; both 0 is no event.
        if np.any(np.isnan(log_f) | np.isnan(log_shifted) | (np.isneginf(log_f) & ~np.isneginf(log_shifted))):
            return np.full(k.shape, np.inf), np.full(k.shape, np.inf)
        keep = ~np.isneginf(log_f)
        log_f, log_weight = log_f[keep], log_weight[keep]
        log_shifted = np.maximum(log_shifted[keep], -1e300)
    u = log_shifted - log_f
    constants = abs(math.log(law.scale)) + (abs(math.log(law.omega)) if isinstance(law, Mixed) else 0.0)
    blur = _ROUNDING * (1 + np.abs(log_f) + np.abs(log_shifted) + constants)
    if sample_rate < 1:
        sampled = np.logaddexp(np.log1p(-sample_rate), np.log(sample_rate) + u)
        near = np.abs(u) < 1
        sampled[near] = np.log1p(sample_rate * np.expm1(u[near]))
        blur = blur * np.exp(np.log(sample_rate) + u - sampled) + _ROUNDING * np.abs(sampled)
        u = sampled
    # d/du of the bracket is at most (2/|u| + k) times the bracket.
    columns = np.stack([np.ones_like(u), 2 * blur / np.maximum(np.abs(u), blur), blur], axis=1)
    lost = float(np.max(blur[np.abs(u) <= blur], initial=0.0))  # where the ratio drowns in rounding
    base = log_f + log_weight

    value, bound = np.empty_like(k), np.empty_like(k)
    per_block = max(1, _BLOCK // max(1, u.size))
    for start in range(0, k.size, per_block):
        block = slice(start, start + per_block)
        kk = k[block, None]
        log_g = base + log_bracket(kk, u)
        top = np.max(log_g, axis=1, keepdims=True)
        top = np.where(np.isfinite(top), top, 0.0)
        sums = np.exp(log_g - top) @ columns
        relative = (sums[:, 1] + kk[:, 0] * sums[:, 2]) / sums[:, 0] + u.size * _EPS
        log_sum = top[:, 0] + np.log(sums[:, 0])
        missing = rule.flat + 2 * (kk[:, 0] * lost) ** 2 + 2 * kk[:, 0] * rule.relative
        missing = np.maximum(missing, 1e-300) + rule.relative
        log_error = np.logaddexp(np.log(missing), np.log(max(rule.relative, 1e-300)) + log_sum)
        if rule.relative > 0:
            log_error = np.logaddexp(log_error, _log_tails(law, shift, kk[:, 0], rule))
        value[block] = log_sum
        bound[block] = np.logaddexp(log_sum + np.log1p(relative), log_error)
    return value, bound


def _log_tails(law: Law, shift: float, k: Array, rule: Rule) -> Array:
    """What lies outside the outermost points, for Gaussian noise, mixed or plain.

    With y the distance beyond the edge in standard deviations, d/dx of the log integrand is at most -(y - k*s) on the
    right and -y on the left, so the tail is at most its first value over that slope; f itself falls like -y.
    """
    sigma, s = law.scale, shift / law.scale
    total = np.full(k.shape, -np.inf)
    half = law.omega / 2 if isinstance(law, Mixed) else 0.0
    ends = [(p.origin, p.x[i]) for p in rule.pieces for i in (0, -1)]
    rightmost = max(ends, key=lambda e: e[0] + e[1])
    leftmost = min(ends, key=lambda e: e[0] + e[1])
    for (origin, x), side in ((rightmost, 1), (leftmost, -1)):
        at = np.array([x])
        log_f, log_shifted = law.log_density(at, origin)[0], law.log_density(at - shift, origin)[0]
        y = (side * (x + origin) - half) / sigma
        slope = y - k * s if side > 0 else np.full(k.shape, y)
        log_g = np.maximum(k * log_shifted - (k - 1) * log_f, log_f + np.log(k)) + np.log(2.0)
        total = np.logaddexp(total, log_g - np.log(np.maximum(slope, 1e-3)) + np.log(sigma))
    return total


def _rounded_up(logarithm: Array) -> Array:
    """A closed form plus many times its rounding, which grows with the size of a logarithm."""
    return logarithm + _CLOSED_FORM + _ROUNDING * np.abs(logarithm)

r"""Where to evaluate the moment integrals, and how wrong the answer can be.

The integral of interest is A_k - 1, for a law f, a shift s and an order k:

    A_k = \int f(x - s)^k f(x)^(1 - k) dx.

Two rules are offered.

**The strip rule** (Gaussian noise, mixed or plain) is the trapezoidal rule on the whole line with a proved error. Put
sigma = 1. f(x + iy) = exp(y^2/2) f(x) E[exp(-iyX)], where X is a Gaussian truncated to an interval. Its variance is at
most 1, so |E exp(-iyX)| >= 1 - y^2/2, and for every |y| < sqrt(2)

    |f(x + iy)| <= exp(y^2/2) f(x),      |f(x + iy)| >= exp(y^2/2) (1 - y^2/2) f(x).

Hence the integrand g is analytic in that strip with |g(x + iy)| <= C(y) g(x), C(y) = exp(y^2/2) (1 - y^2/2)^(1 - k),
and the classical theorem (Trefethen and Weideman 2014, Theorem 5.1) bounds the *relative* error of step h by

    2 C(a) / (exp(2 pi a / h) - 1)       for every 0 < a < sqrt(2),

whatever the width and the shift. The parts of the line left out are bounded as well: outside, the logarithm of g falls
at least like that of a Gaussian centred at k*s beyond the edge; between the edges f is flat.

**The panel rule** (every other law) puts Gauss-Legendre points between the kinks of f(x) and f(x - s), on panels that
grow away from the kinks. Its error is estimated by doing everything again on halved panels.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from modelmix.accounting.functions import Array
from modelmix.accounting.laws import Gaussian, Law, Mixed, known
from modelmix.errors import UnprovedError

_POINTS, _WEIGHTS = np.polynomial.legendre.leggauss(24)
_DEPTH = 60.0  # panels go on until the integrand has fallen by exp(-60) from its peak
_MOST_PANELS = 300
_ROUNDED_AWAY = 1e-13  # kinks nearer than this many scales coincide but for rounding


@dataclass(frozen=True)
class Piece:
    """Quadrature points ``origin + x`` with weights; the origin is kept apart to avoid rounding (see ``Law``)."""

    origin: float
    x: Array
    weight: Array


@dataclass(frozen=True)
class Rule:
    """Points for the orders up to some k, and what a sum over them can miss.

    ``relative`` bounds the error of the sum as a fraction of A_k + 2k; ``flat`` bounds what lies between the pieces.
    """

    pieces: tuple[Piece, ...]
    relative: float
    flat: float


def strip_rule(law: Law, shift: float, k: float, sampled: bool = False) -> Rule:
    """The trapezoidal rule with a proved error, for Gaussian noise mixed or plain, good for all orders up to ``k``.

    With ``sampled``, for real powers of the mixture X = (1-q) f + q f(. - s), which must have no zero in the strip: the
    arguments of f and f(. - s) at x + iy differ by at most |y| s + 2 arccos(1 - y^2/2), because f(x+iy) is
    exp(y^2/2) f(x) E exp(-iyU) with E U = V'(x), and 0 <= V'(x) - V'(x-s) <= s. Below pi they cannot cancel, |X(x+iy)|
    is at most exp(y^2/2) X(x), and the bound above holds for X^k f^(1-k) as it stands.

    The relative error of A_k - 1 that is aimed at is below 1e-13. A_2 - 1 is at least shift^2 / variance
    (Hammersley, Chapman and Robbins), which says how small the absolute error must be.
    """
    sigma = law.scale
    omega = law.omega if isinstance(law, Mixed) else 0.0
    width, s = omega / sigma, shift / sigma
    smallest = min(1.0, s * s / (1 + width * width / 12))
    exponent = 33.0 - math.log(smallest) + math.log(2 * k + 1)

    a = np.linspace(0.005, 1.405, 281)
    if sampled:
        a = a[a * s + 2 * np.arccos(1 - 0.5 * a * a) < 0.999 * math.pi]
    log_c = 0.5 * a * a - (k - 1) * np.log1p(-0.5 * a * a)
    h = float(np.max(2 * math.pi * a / (exponent + log_c)))
    reach = math.sqrt(2 * exponent) + 1.0  # how far into a tail
    inside = math.sqrt(exponent + 2 * math.log(k)) + 1.0  # how far into the flat part
    peak = k * s

    if width > 2 * inside + s + 2 * h:
        h = width / math.ceil(width / h)  # both edges must lie on one lattice
        right = h * np.arange(-math.ceil(inside / h), math.ceil((peak + reach) / h) + 1)
        left = h * np.arange(-math.ceil(reach / h), math.ceil((inside + s) / h) + 1)
        windows = [(0.5 * omega, right), (-0.5 * omega, left)]
        # In between both densities are within 2*Phi(-inside) of flat, so |log ratio| <= 2.01 * 2*Phi(-inside).
        log_ratio = 2.01 * math.exp(-0.5 * inside * inside)
        flat = (k * log_ratio) ** 2
    else:
        reach_left, reach_right = 0.5 * width + reach, 0.5 * width + peak + reach
        windows = [(0.0, h * np.arange(-math.ceil(reach_left / h), math.ceil(reach_right / h) + 1))]
        flat = 0.0

    # h may have shrunk, which only helps; the bound is taken for the step that is used.
    gain = 2 * math.pi * a / h - log_c
    relative = 2 * math.exp(-float(np.max(gain))) * 1.01
    pieces = tuple(Piece(origin, np.asarray(sigma * x), np.full(x.shape, sigma * h)) for origin, x in windows)
    return Rule(pieces, relative, flat)


def panel_rule(law: Law, shift: float, k: float, halvings: int) -> Rule:
    """Gauss-Legendre panels between the kinks; no proved error (``relative`` is 0), see ``moments``.

    Each panel is cut into 2**halvings. Panel widths start at half the law's scale (or a quarter of the gap between two
    kinks if that is smaller) and double away from the kinks.
    """
    breaks = sorted(((kink, off) for kink in law.kinks for off in {0.0, shift}), key=sum)
    (first, first_off), (last, last_off) = breaks[0], breaks[-1]
    pieces = [
        _outwards(law, shift, k, first, first_off, -1, halvings),
        _outwards(law, shift, k, last, last_off, 1, halvings),
    ]
    for (lower, lower_off), (upper, upper_off) in pairwise(breaks):
        gap = upper_off - lower_off if upper == lower else upper - lower + (upper_off - lower_off)
        if gap <= _ROUNDED_AWAY * law.scale:
            continue
        middle = 0.5 * gap
        edges = [0.0]
        step = min(0.5 * law.scale, 0.5 * middle)
        while edges[-1] < middle:
            # A last sliver of rounding would be a panel of no width.
            edges.append(edges[-1] + step if edges[-1] + step < middle * (1 - 1e-9) else middle)
            step *= 2
        pieces.append(_panels(lower, lower_off + np.array(edges), halvings))
        pieces.append(_panels(upper, upper_off - np.array(edges)[::-1], halvings))
    return Rule(tuple(pieces), 0.0, 0.0)


def _panels(origin: float, edges: Array, halvings: int) -> Piece:
    parts = 2**halvings
    fractions = np.arange(parts) / parts
    starts = (edges[:-1, None] + np.diff(edges)[:, None] * fractions).ravel()
    half = 0.5 * np.repeat(np.diff(edges) / parts, parts)
    x = (starts + half)[:, None] + half[:, None] * _POINTS
    weight = half[:, None] * _WEIGHTS
    return Piece(origin, x.ravel(), weight.ravel())


def _outwards(law: Law, shift: float, k: float, origin: float, start: float, side: int, halvings: int) -> Piece:
    """Panels from the outermost kink outwards until the integrand has fallen by exp(-_DEPTH) from its peak."""
    edges = [0.0]
    step = 0.5 * law.scale
    peak = -math.inf
    for _ in range(_MOST_PANELS):
        edges.append(edges[-1] + step)
        x = start + side * np.array([edges[-2], edges[-1]])
        log_f, log_shifted = law.log_density(x, origin), law.log_density(x - shift, origin)
        log_g = np.maximum(k * log_shifted - (k - 1) * log_f, log_f)
        peak = max(peak, float(np.max(log_g)))
        if log_g[1] < log_g[0] and log_g[1] + math.log(step) < peak - _DEPTH:
            break
        if len(edges) > 8:
            step *= 1.5
    else:
        raise UnprovedError(
            "the moments of the noise are known with an error bound",
            f"the moment integrals of {law} do not fall off.",
            "Use a law whose tails fall at least like a power, or Gaussian or Laplace noise.",
        )
    outward = np.array(edges)
    return _panels(origin, start + (outward if side > 0 else -outward[::-1]), halvings)


def rule_is_proved(law: Law) -> bool:
    """Whether ``strip_rule`` serves this law."""
    return isinstance(known(law), Gaussian)

"""Renyi curves: from moments to the divergence of a Poisson-sampled step, and from there to (epsilon, delta).

A curve is stored as kappa(alpha) = (alpha - 1) * D_alpha, an upper bound, at increasing whole orders:

    kappa(alpha) = log( sum_k C(alpha, k) (1-q)^(alpha-k) q^k A_k )             (Corollary 4.1, sign corrected)

kappa is convex in alpha for every pair of datasets and kappa(1) = 0, so straight lines between computed orders stay
above it: that is how orders between whole numbers, and between the sparse large orders, are covered. For the
same reason A_k is computed at sparse large k only: log A_k is convex in k.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from typing import Literal

import numpy as np
from scipy import special

from modelmix.accounting.facts import require_facts
from modelmix.accounting.functions import Array, log_expm1
from modelmix.accounting.laws import Gaussian, Laplace, known
from modelmix.accounting.mechanism import Mechanism
from modelmix.accounting.moments import log_moments, sampled_moment_bounds
from modelmix.errors import ModelMixError

Conversion = Literal["improved", "classic"]

REAL_ORDERS = np.array([1.04, 1.06, 1.08, *np.arange(1.1, 1.95, 0.05), 2.25, 2.5, 2.75, 3.25, 3.5, 3.75])
"""Orders between whole numbers at which a sampled moment is computed where one coordinate is the worst gradient."""
_LEAST_SHIFT, _MOST_SHIFT = 1e-3, 40.0  # in standard deviations; beyond the second, whole orders alone
_EPS = float(np.finfo(np.float64).eps)
_TOPS = (64, 256, 4096, 32768, 131072)
LAST_LEVEL = len(_TOPS) - 1
"""The order grid can grow this many times; its last order leaves log(1/delta)/131071 on the classic conversion."""


@lru_cache(maxsize=8)
def orders_at(level: int) -> Array:
    """Whole orders of one grid: every one up to 256, then 32 to each doubling."""
    top = _TOPS[level]
    dense = np.arange(2, min(top, 256) + 1)
    steps = np.arange(1, round(32 * math.log2(top / 256)) + 1) if top > 256 else np.array([])
    orders = np.unique(np.concatenate([dense, np.round(256 * 2 ** (steps / 32))])).astype(np.float64)
    orders.setflags(write=False)  # shared by every caller
    return orders


@lru_cache(maxsize=8)
def _log_factorial(level: int) -> Array:
    return np.asarray(special.gammaln(np.arange(_TOPS[level] + 1) + 1.0))


@lru_cache(maxsize=512)
def step_curve(mechanism: Mechanism, level: int) -> Array:
    """kappa of one step at ``orders_at(level)``; upper bounds, infinity where nothing finite is known."""
    kappa = _step_curve(mechanism, level)
    kappa.setflags(write=False)  # shared by every caller
    return kappa


def _step_curve(mechanism: Mechanism, level: int) -> Array:
    require_facts(mechanism)
    orders = orders_at(level)
    with np.errstate(over="ignore"):
        log_a = np.full_like(orders, np.inf)
        for parts in mechanism.moment_bounds:
            bound = np.zeros_like(orders)
            for law, shift, count in parts:
                bound += count * log_moments(law, shift, orders)
            bound[~np.isfinite(bound)] = np.inf
            log_a = np.minimum(log_a, bound)
    return sampled_curve(log_a, mechanism.sample_rate, level)


def sampled_curve(log_a: Array, sample_rate: float, level: int) -> Array:
    """kappa at ``orders_at(level)`` from upper bounds on log A_k at the same orders, under Poisson sampling."""
    orders = orders_at(level)
    log_a = np.where(np.isfinite(log_a), log_a, np.inf)
    q = sample_rate
    if q == 1:
        return log_a

    k = np.arange(2, _TOPS[level] + 1, dtype=np.float64)
    finite = np.isfinite(log_a)
    full = np.interp(k, np.append(1.0, orders[finite]), np.append(0.0, log_a[finite]))
    if not finite.all():
        full[k > (orders[finite][-1] if finite.any() else 1)] = np.inf
    log_fact = _log_factorial(level)
    log_q, log_keep = math.log(q), math.log1p(-q)
    with np.errstate(invalid="ignore"):
        weighted = log_expm1(full) - log_fact[2:] + k * log_q
    kappa = np.empty_like(orders)
    for i, order in enumerate(orders.astype(int)):
        terms = weighted[: order - 1] - log_fact[order - 2 :: -1] + log_keep * (order - k[: order - 1])
        top = float(np.max(terms))
        if not math.isfinite(top):
            kappa[i] = math.inf
            continue
        total = log_fact[order] + top + math.log(float(np.sum(np.exp(terms - top))))
        total += 8 * _EPS * (log_fact[order] + order * (abs(log_q) + 1))
        kappa[i] = np.logaddexp(0.0, total)
    return kappa


@lru_cache(maxsize=512)
def real_curve(mechanism: Mechanism) -> Array | None:
    """kappa of one step at ``REAL_ORDERS``, for a gradient under Gaussian noise with one bound; None for others.

    What several coordinates of a bounded size can do, one of the same l2 norm can: it is the worst gradient of a larger
    set. That it is the worst at real orders from 1.04 on, sampled or not, is proved in docs/proofs.md.
    """
    ((law, size, count), *others), *more = mechanism.moment_bounds
    shift = max(size * math.sqrt(count) * (1 + 4 * _EPS), _LEAST_SHIFT * law.scale)  # moments grow with the shift
    if others or more or not isinstance(known(law), Gaussian) or shift > _MOST_SHIFT * law.scale:
        return None
    kappa = sampled_moment_bounds(law, shift, REAL_ORDERS, mechanism.sample_rate)
    kappa.setflags(write=False)
    return kappa


def at_real_orders(orders: Array, steps: Sequence[tuple[Array, Array | None, float]]) -> Array:
    """kappa of a composition at ``REAL_ORDERS``.

    ``steps`` holds for each phase its curve at ``orders``, that at ``REAL_ORDERS`` if it has one, and a factor: others
    take the straight lines, from 0 at order 1.
    """
    total = np.zeros_like(REAL_ORDERS)
    for whole, real, factor in steps:
        line = np.interp(REAL_ORDERS, np.append(1.0, orders), np.append(0.0, whole))
        total += factor * (line if real is None else np.minimum(line, real))
    return total


def worst_loss(mechanism: Mechanism) -> float:
    """D_infinity of one step: log(1 + q(exp(L) - 1)), L the largest log-ratio; infinite but for Laplace noise."""
    noise = known(mechanism.coordinate_law)
    if not isinstance(noise, Laplace):
        return math.inf
    largest = sum(count * noise.max_log_ratio(shift) for shift, count in mechanism.worst_gradient)
    return float(np.logaddexp(0.0, math.log(mechanism.sample_rate) + log_expm1(np.array(largest * (1 + 8 * _EPS)))))


def refine(orders: Array, kappa: Array) -> tuple[Array, Array]:
    """Adds quarter orders below 16 by the straight-line bound; they matter to the improved conversion only.

    ``kappa`` may have further axes after the first.
    """
    low = int(np.searchsorted(orders, 16.0, side="right"))
    left_orders, left = np.append(1.0, orders[: low - 1]), np.concatenate([np.zeros_like(kappa[:1]), kappa[: low - 1]])
    right = kappa[:low]
    fractions = np.array([0.25, 0.5, 0.75])
    new_orders = (left_orders[:, None] + fractions).ravel()
    shape = (1, 3) + (1,) * (kappa.ndim - 1)
    weight = fractions.reshape(shape)
    new_kappa = ((1 - weight) * left[:, None] + weight * right[:, None]).reshape((-1, *kappa.shape[1:]))
    all_orders, all_kappa = np.append(orders, new_orders), np.concatenate([kappa, new_kappa])
    sort = np.argsort(all_orders, kind="stable")
    return all_orders[sort], all_kappa[sort]


def epsilons(orders: Array, kappa: Array, delta: float, conversion: Conversion) -> Array:
    """The epsilon each order proves at ``delta``; the smallest is the answer.

    classic:  D + log(1/delta)/(alpha-1)                                          (Mironov 2017)
    improved: D + log(1 - 1/alpha) - log(delta*alpha)/(alpha-1)                   (Canonne, Kamath, Steinke 2020)
    The improved one also knows that epsilon is 0 once 1 - exp(-D) <= delta^2     (Bretagnolle and Huber).
    """
    a = orders.reshape((-1,) + (1,) * (kappa.ndim - 1))
    d = kappa / (a - 1)
    if conversion == "classic":
        return np.asarray(d - math.log(delta) / (a - 1))
    if conversion != "improved":
        raise ModelMixError(f"conversion = {conversion!r} is unknown: choose improved or classic.")
    out = d + np.log1p(-1 / a) - (math.log(delta) + np.log(a)) / (a - 1)
    out = np.where(-np.expm1(-d) <= delta**2, 0.0, out)
    return np.maximum(out, 0.0)


def total_variation(orders: Array, kappa: Array) -> float:
    """sqrt(1 - exp(-D)), a delta that holds with epsilon = 0 (Bretagnolle and Huber; D_alpha is above D_1)."""
    return math.sqrt(-math.expm1(-float(np.min(kappa / (orders - 1)))))


def log_deltas(orders: Array, kappa: Array, epsilon: float, conversion: Conversion) -> Array:
    """The log(delta) each order proves at ``epsilon``; inverse of ``epsilons``, at most 0."""
    a = orders
    with np.errstate(over="ignore"):
        paid = np.minimum((a - 1) * epsilon, 1e300)  # finite, so that an infinite kappa proves nothing
    out = kappa - paid
    if conversion == "improved":
        out = out + (a - 1) * np.log1p(-1 / a) - np.log(a)
    elif conversion != "classic":
        raise ModelMixError(f"conversion = {conversion!r} is unknown: choose improved or classic.")
    return np.minimum(out, 0.0)

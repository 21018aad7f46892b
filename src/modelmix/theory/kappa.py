r"""The tail of the sampling noise: the constant kappa of Assumption 2.1, estimated.

Assumption 2.1 asks Pr(|xi| >= t) <= exp(-t/kappa) for every t > 0, xi = grad f(w, x, y) - grad F(w). No finite data set
satisfies it as printed unless one sample has no noise at all: at the smallest |xi| the left side is 1. The proofs use
it for t >= c/4 only, and the theorem asks for c >= 4 kappa log 10, so what is needed, and what is estimated here, is

    Pr(|xi| >= t) <= exp(-t/kappa)        for every t >= kappa log 10.

The paper's sentence that a larger kappa means stronger concentration has it the wrong way round.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from modelmix.errors import ModelMixError

Array = NDArray[np.float64]
START = math.log(10)
"""The bound is asked for from kappa * START on."""


def tail_constant(noise: ArrayLike, weights: ArrayLike | None = None) -> float:
    """The smallest kappa for which the bound holds on these noise norms |xi_i|, of equal weight if none is given.

    With t_1 <= ... <= t_n and tails (n-i+1)/n: the largest of t_i / log(1/tail) where the tail is at most 1/10, and of
    t_i / log 10 where it is more.
    """
    t = np.asarray(noise, dtype=np.float64).ravel()
    share = np.ones_like(t) if weights is None else np.asarray(weights, dtype=np.float64).ravel()
    order = np.argsort(t[share > 0])
    t, share = _sorted(t[share > 0]), share[share > 0][order]
    tail = np.minimum(1.0, np.cumsum(share[::-1])[::-1] / share.sum())
    return float(np.max(t / np.maximum(-np.log(tail), START)))


@dataclass(frozen=True, eq=False)
class TailFit:
    """kappa and how well exp(-t/kappa) describes the tail it bounds.

    ``mean_excess`` is the mean of |xi| - u over the noise beyond u, the upper tenth: kappa of an exponential tail, by
    maximum likelihood. ``distance`` is the Kolmogorov-Smirnov distance of that tail to the exponential law, ``chance``
    the probability of a larger one if the tail were exponential (Monte Carlo with the mean estimated, as in Lilliefors'
    test).
    """

    noise: Array
    kappa: float
    start: float
    mean_excess: float
    distance: float
    chance: float


def fit_tail(noise: ArrayLike, *, seed: int = 0, draws: int = 400) -> TailFit:
    """kappa, and a test of the assumption that the tail is exponential, from the norms of the sampling noise."""
    t = _sorted(noise)
    if t.size < 50:
        raise ModelMixError(f"{t.size} samples are too few to look at a tail: give 50 or more.")
    start = float(np.quantile(t, 0.9))
    beyond = t[t > start] - start
    if beyond.size < 3 or beyond.mean() == 0:
        raise ModelMixError("the noise has no tail: its upper tenth is one value. Is every sample the same?")
    rng = np.random.default_rng(seed)
    distance = _distance(beyond)
    drawn = [_distance(np.sort(rng.exponential(size=beyond.size))) for _ in range(draws)]
    chance = (1 + sum(d >= distance for d in drawn)) / (1 + draws)
    return TailFit(t, tail_constant(t), start, float(beyond.mean()), distance, chance)


def _distance(beyond: Array) -> float:
    """Kolmogorov-Smirnov distance of sorted values to the exponential law of their mean."""
    n = beyond.size
    law = -np.expm1(-beyond / beyond.mean())
    rank = np.arange(n)
    return float(max(np.max(law - rank / n), np.max((rank + 1) / n - law)))


def _sorted(noise: ArrayLike) -> Array:
    t = np.sort(np.asarray(noise, dtype=np.float64).ravel())
    if t.size == 0 or not np.isfinite(t).all() or t[0] < 0:
        raise ModelMixError("the norms of the sampling noise must be finite numbers, 0 or more, and at least one.")
    return t

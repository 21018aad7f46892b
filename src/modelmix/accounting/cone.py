r"""The cone of functions for which one gradient is the worst, and epsilon by the best of them.

For mixed Gaussian noise the gradient of p equal coordinates is not the worst for the hockey stick (t - e^epsilon)_+.
It is for every function phi of the cone that docs/proofs.md calls K: then E[phi(likelihood ratio of all releases)] is
at most E[phi(t_1 ... t_T)] for independent t_k of that gradient, whatever the gradients were and in both directions.
So

    delta(epsilon) <= E[phi(t_1 ... t_T)]        for every phi of the cone with phi(t) >= (t - e^epsilon)_+.

Powers t^alpha give Renyi accounting. Used here is, for x >= 1 and 0 below,

    Psi''(x) = x^(-24/25) - x^(-77/50),   Psi(1) = Psi'(1) = 0,
    phi(t) = kappa Psi(t/kappa) / Psi'(x0),   kappa = e^epsilon / (x0 - Psi(x0)/Psi'(x0)),

the tangent of which at t = kappa x0 is the hockey stick; phi is convex, so it lies above. x0 > 1 is free and is
minimised over. In losses L = log t under the law with the sample, with y = L - log kappa and y0 = log x0,

    delta <= E[G(y)] / Psi'(x0),      G(y) = Psi(e^y) e^(-y), which does not fall in y.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from modelmix.accounting.functions import Array
from modelmix.accounting.loss_distribution import EXTRA, LossDistribution

_B1, _B2 = 24 / 25, 77 / 50
_A1, _A2 = 2 - _B1, 2 - _B2  # the exponents of Psi
_C1, _C2 = 1 / ((1 - _B1) * _A1), 1 / ((1 - _B2) * _A2)
_LINE = 1 / (1 - _B1) - 1 / (1 - _B2)
# Psi(e^y) = sum over n >= 3 of d_n y^n / n!, all positive; d_0 = d_1 = d_2 = 0.
_SERIES = [(_C1 * _A1**n - _C2 * _A2**n - _LINE) / math.factorial(n) for n in range(26)]
_SERIES[:3] = [0.0, 0.0, 0.0]
_SERIES[3] = (_B2 - _B1) / 6
_SMALL = 1.0
_LARGEST_Y = 25.0
_GROUPS = 800
_UP = 1 + 1e-9  # sums of a million positive numbers, each rounded a few times, and Psi'(x0) for small y0


def growth(y: Array) -> Array:
    """G(y) = Psi(e^y) e^(-y) for y >= 0, and 0 below."""
    out = np.zeros_like(y)
    small, large = (y > 0) & (y < _SMALL), y >= _SMALL
    s, t = y[small], y[large]
    total = np.zeros_like(s)
    for coefficient in _SERIES[:2:-1]:
        total = total * s + coefficient
    out[small] = total * s**3 * np.exp(-s)
    out[large] = _C1 * np.exp((_A1 - 1) * t) - _C2 * np.exp((_A2 - 1) * t) - _LINE - (_C1 - _C2 - _LINE) * np.exp(-t)
    return out


def slope(y0: Array) -> Array:
    """Psi'(x0) at x0 = e^y0."""
    return np.asarray(np.expm1((1 - _B1) * y0) / (1 - _B1) - np.expm1((1 - _B2) * y0) / (1 - _B2))


def offset(y0: Array) -> Array:
    """epsilon - log kappa = log(x0 - Psi(x0)/Psi'(x0))."""
    return np.asarray(y0 + np.log1p(-growth(y0) / slope(y0)))


class Bound(Protocol):
    """A function that is 0 below some ratio, above the hockey stick, and what it proves of the law of a loss."""

    def delta(self, loss: LossDistribution, epsilon: float) -> float: ...

    def least(self, loss: LossDistribution) -> float:
        """The smallest epsilon that the grid can answer for."""
        ...

    def epsilon(self, loss: LossDistribution, delta: float) -> float:
        """The least epsilon from there on; infinity if there is none."""
        ...


@dataclass(frozen=True)
class HockeyStick:
    """The hockey stick itself: exact for a pair that is the worst for every divergence."""

    def delta(self, loss: LossDistribution, epsilon: float) -> float:
        value = loss.expectation(lambda x: -np.expm1(np.minimum(epsilon - x, 0.0)))
        value += max(
            0.0, -math.expm1(min(0.0, epsilon - float(loss.losses[0])))
        )  # for all that may lie left of the grid
        return value * _UP + loss.tail

    def least(self, loss: LossDistribution) -> float:
        return max(0.0, float(loss.losses[0]))

    def epsilon(self, loss: LossDistribution, delta: float) -> float:
        return _least(lambda e: self.delta(loss, e), delta, self.least(loss), float(loss.losses[-1]))


@dataclass(frozen=True)
class Cone:
    """The function phi of this module at one x0 = exp(y0)."""

    y0: float

    @property
    def offset(self) -> float:
        return float(offset(np.array([self.y0]))[0])

    def delta(self, loss: LossDistribution, epsilon: float) -> float:
        """E[phi(e^L)], with the tail: G(y) <= C1 exp(EXTRA y)."""
        log_kappa = epsilon - self.offset - 1e-14 * (1 + abs(epsilon))
        value = loss.expectation(lambda x: growth(x - log_kappa))
        value += float(growth(loss.losses[:1] - log_kappa)[0])  # for all that may lie left of the grid
        tail = _C1 * math.exp(-EXTRA * log_kappa) * loss.tail
        return (value + tail) / float(slope(np.array([self.y0]))[0]) * _UP

    def least(self, loss: LossDistribution) -> float:
        return max(0.0, float(loss.losses[0]) + self.offset)

    def epsilon(self, loss: LossDistribution, delta: float) -> float:
        low = self.least(loss)
        return _least(lambda e: self.delta(loss, e), delta, low, max(low, float(loss.losses[-1])))


def best_for_delta(loss: LossDistribution, delta: float, steepness: float) -> Cone:
    """About the x0 with the smallest epsilon. Any is sound, so that sums over groups of losses do to choose it."""
    mass, centres = _groups(loss)
    points = np.linspace(centres[0], centres[-1], 100)
    with np.errstate(divide="ignore"):
        values = np.log(np.sum(growth(centres - points[:, None]) * mass, axis=1))  # log E[G(L - k)] falls in k
    held = np.isfinite(values)
    if not held.any():
        return Cone(1.0)  # of no use, and sound
    y0 = _candidates(loss, steepness, 60)
    kappas = np.interp(-np.log(delta * slope(y0)), -np.minimum.accumulate(values[held]), points[held])
    rough = Cone(float(y0[np.argmin(kappas + offset(y0))])).epsilon(loss, delta)
    return best_for_epsilon(loss, rough, steepness) if math.isfinite(rough) else Cone(float(y0[0]))


def best_for_epsilon(loss: LossDistribution, epsilon: float, steepness: float) -> Cone:
    """About the x0 with the smallest delta at ``epsilon``: first by groups of losses, then by all."""
    mass, centres = _groups(loss)
    y0 = _candidates(loss, steepness, 90)
    with np.errstate(over="ignore"):
        deltas = np.sum(growth(centres - (epsilon - offset(y0))[:, None]) * mass, axis=1) / slope(y0)
    best = int(np.argmin(deltas))
    near = np.log(y0[[max(best - 1, 0), best, min(best + 1, y0.size - 1)]])
    for _ in range(3):  # a parabola through three points, whose middle one is the best so far
        values = [math.log(Cone(math.exp(float(x))).delta(loss, epsilon) + 1e-300) for x in near]
        (left, middle, right), (low, here, high) = near, values
        curve = (middle - left) * (here - high) - (middle - right) * (here - low)
        if curve == 0:
            break
        step = (middle - left) ** 2 * (here - high) - (middle - right) ** 2 * (here - low)
        vertex = float(np.clip(middle - 0.5 * step / curve, left, right))
        width = 0.25 * (right - left) / 2
        near = np.array([vertex - width, vertex, vertex + width])
    return Cone(math.exp(float(near[1])))


def _candidates(loss: LossDistribution, steepness: float, count: int) -> Array:
    # For a tail exp(-k L) with a large k the best y0 is 3/k, and k may be larger than the tilt says.
    most = min(30 / steepness, _LARGEST_Y)
    return np.geomspace(min(max(1.5 * loss.step, 1e-4), 0.1 * most), most, count)


def _groups(loss: LossDistribution) -> tuple[Array, Array]:
    group = max(1, loss.mass.size // _GROUPS)
    size = loss.mass.size // group * group
    return loss.mass[:size].reshape(-1, group).sum(axis=1), loss.losses[:size].reshape(-1, group).mean(axis=1)


def _least(value: object, target: float, low: float, high: float) -> float:
    """The least epsilon in [low, high] with value(epsilon) <= target, from above; infinity if there is none."""
    assert callable(value)
    if value(low) <= target:
        return low
    over, under = math.log(max(value(low), 1e-300)), value(high)
    if not under <= target:
        return math.inf
    goal = math.log(target)
    under = math.log(max(under, 1e-300))
    for look in range(60):
        if high - low <= 1e-9 * (1e-3 + high):
            break
        middle = (low + high) / 2
        if look % 3 != 2 and over > under:
            # The logarithm of delta is nearly a line; a little past its guess, in turns on either side.
            guess = low + (high - low) * (over - goal) / (over - under)
            nudge = 1e-7 * (1 if look % 3 else -1) * (1e-3 + high)
            middle = min(max(guess + nudge, low + 1e-3 * (high - low)), high - 1e-3 * (high - low))
        found = value(middle)
        if found <= target:
            high, under = middle, math.log(max(found, 1e-300))
        else:
            low, over = middle, math.log(found)
    return high

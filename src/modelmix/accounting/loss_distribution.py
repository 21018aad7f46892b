r"""Privacy losses on a grid that dominate the true ones, and their sums, rounded upward.

A pair of laws P (without the sample) and Q (with it) is known by the law of its loss log dQ/dP. A ``LossDistribution``
holds masses under Q at the losses k * step, k a whole number, so that 0 and every sum of losses are grid points. The
mass under P of an entry is its mass under Q times exp(-loss).

**It dominates.** Where a loss lies between two grid points, its masses under both laws are spread over the two so that
both totals are kept. For a convex function phi of the ratio r = dQ/dP that raises E_P[phi(r)] (Jensen), whatever
further independent factors r is multiplied with. Hence it stays an upper bound through sums, sampling and composition.

**It errs upward.** For phi >= 0 more mass is a larger expectation. Each stored mass is at least that of one dominating
law: every error (quadrature, rounding, noise of the Fourier transforms) is bounded and added, none is subtracted. What
lies beyond the grid on the right is kept as ``tail``, a bound on E_Q[r^0.04] over it; what has r = 0, as ``zero``.

**Fourier noise.** A transform of length N has a relative error of at most e = 8 eps log2(N) in the Euclidean norm: that
is more than twice the bound for radix 2 with accurate weights (Higham, *Accuracy and Stability of Numerical
Algorithms*, Theorem 24.2). For a nonnegative vector m of sum at most 1, ||m^||_2 = sqrt(N) ||m||_2; raising to the
power T multiplies an error of a frequency by at most T (1 + e sqrt(N) ||m||_2)^(T-1), each multiplication adds 2 eps,
and the inverse transform divides by sqrt(N) again. So the T-fold sum is off in the Euclidean norm, hence in every
entry, by at most

    eta = (1 + e sqrt(N) ||m||_2)^(T-1) ||m||_2 (T (e + 2 eps) + 2 e).

The sum is taken of the tilted masses m_k exp(theta * loss_k) / M(theta): tilting back, the noise is eta M(theta)^T
exp(-theta * loss), which is small against the mass wherever the tilted sum is centred. For each entry the best of
several tilts counts. What a circular sum wraps around is mass added in the wrong place: it errs upward as well.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from modelmix.accounting.functions import Array

EXTRA = 0.04
"""Tails are bounded by E_Q[r^EXTRA]: the functions of ``cone`` grow like the power 1 + EXTRA of the ratio."""
_EPS = float(np.finfo(np.float64).eps)
_LOG_LOST = -90.0  # of the mass beyond a window that is to keep everything
_MOST_POINTS = 2**20
_FINE_POINTS = 2**16  # from here on sums of sums, on a coarser grid each time, are faster
_LOG_LEFT, _LOG_RIGHT = -32.0, -28.0  # of the shares of a tilted sum that lie left and right of its window
_TILTS = 9
_PER_DEVIATION = 280.0  # grid points for each standard deviation of a sum that is put on a coarser grid


class TooLarge(Exception):  # noqa: N818
    """These losses cannot be handled on a grid of bearable size; the text says why."""


@dataclass(frozen=True)
class LossDistribution:
    """Masses at the losses (first + i) * step, each at least that of one law that dominates.

    Args:
        step: the distance of two losses.
        first: the number of the first grid point.
        mass: masses under Q, the law with the sample.
        zero: mass under P where the ratio is 0.
        tail: bound on E_Q[r^EXTRA] over all that is not on the grid; it has r >= 1.
        noise: where given, what the masses may lack is noise * v for some v with |v|_2 <= 1, and has not been added.
    """

    step: float
    first: int
    mass: Array
    zero: float = 0.0
    tail: float = 0.0
    noise: Array | None = None

    @cached_property
    def losses(self) -> Array:
        return np.asarray(self.step * np.arange(self.first, self.first + self.mass.size), np.float64)

    @property
    def last(self) -> int:
        return self.first + self.mass.size - 1

    def log_moment(self, theta: float) -> float:
        """log E_Q[exp(theta * loss)] over the grid, with the rounding of a sum of positive numbers."""
        with np.errstate(divide="ignore", under="ignore"):
            terms = np.log(self.mass) + theta * self.losses
            top = float(terms.max())
            return top + math.log(float(np.exp(terms - top).sum())) + 1e-14 * (1 + abs(top))

    @cached_property
    def deviation(self) -> float:
        """Standard deviation of the loss under Q."""
        total = float(self.mass.sum())
        mean = float(np.sum(self.mass * self.losses)) / total
        return math.sqrt(float(np.sum(self.mass * (self.losses - mean) ** 2)) / total)

    def with_noise(self) -> LossDistribution:
        """The same with the noise added to every mass."""
        return self if self.noise is None else replace(self, mass=self.mass + self.noise, noise=None)

    def expectation(self, weights: Callable[[Array], Array]) -> float:
        """Upper bound on E_Q[w(loss)] over the grid, w >= 0; with the noise, by Cauchy and Schwarz."""
        weight = weights(self.losses)
        value = float(np.sum(self.mass * weight))
        return value if self.noise is None else value + math.sqrt(float(np.sum((self.noise * weight) ** 2)))

    def pruned(self, lost: float) -> LossDistribution:
        """Without what is negligible at both ends: on the right it goes into the tail, on the left it moves right."""
        with np.errstate(over="ignore", under="ignore"):
            heavy = self.mass * np.exp(np.minimum(EXTRA * self.losses, 600.0))
        from_right = np.cumsum(heavy[::-1])[::-1]
        keep = max(int(np.searchsorted(-from_right, -lost)), 1, 1 - self.first)
        left = int(np.searchsorted(np.cumsum(np.maximum(self.mass, self._mass_without)), lost))
        left = min(left, keep - 1, max(0, -self.first))
        mass = self.mass[left:keep].copy()
        mass[0] += float(self.mass[:left].sum())
        zero = self.zero + float(self._mass_without[:left].sum())
        tail = self.tail + (float(from_right[keep]) * (1 + 1e-12) if keep < self.mass.size else 0.0)
        return LossDistribution(self.step, self.first + left, mass, zero, tail)

    @cached_property
    def _mass_without(self) -> Array:
        with np.errstate(over="ignore", under="ignore"):
            return np.asarray(self.mass * np.exp(np.minimum(-self.losses, 700.0)))


Part = tuple[LossDistribution, int]
"""How often an independent loss is added."""


def on_grid(losses: Array, mass: Array, step: float, zero: float = 0.0, tail: float = 0.0) -> LossDistribution:
    """Spread masses at any losses to the grid points on either side, keeping the totals under both laws.

    A loss is taken to be off by at most 60 eps of its size; that, and the rounding of its distance to the grid point,
    is 64 eps |loss| / step of a cell. So much more goes to the upper end; what that leaves behind under P goes to
    ``zero``.
    """
    index = np.floor(losses / step)
    low, high = float(index.min()), float(index.max())
    if high - low > 4 * _MOST_POINTS:
        raise TooLarge(f"a loss distribution would need {high - low:.1e} points")
    rest = np.clip(losses - index * step, 0.0, step)
    up = np.expm1(-rest) / np.expm1(-step)
    slack = 64 * _EPS * (2 + np.abs(index))
    place = (index - low).astype(np.int64)
    size = int(high - low) + 2
    share = np.minimum(1.0, up + slack)
    out = np.asarray(np.bincount(place, mass * (1 - share), size) + np.bincount(place + 1, mass * share, size), float)
    left_behind = float(np.sum(mass * slack * step * np.exp(np.minimum(-step * index, 700.0))))
    crowd = int(np.bincount(place).max())
    return LossDistribution(step, int(low), out * (1 + 2 * _EPS * (crowd + 4)), zero + left_behind, tail)


def regridded(loss: LossDistribution, step: float) -> LossDistribution:
    """The same losses on another grid; still dominating."""
    if step == loss.step:
        return loss
    held = loss.mass > 0
    return on_grid(loss.losses[held], loss.mass[held], step, loss.zero, loss.tail)


def total(parts: Sequence[Part]) -> LossDistribution:
    """The sum of independent losses, each entry accurate relative to its size, both under Q and under P.

    Sums that need many points are made in stages, of sums on a grid that is coarser by their standard deviation.
    """
    if len(parts) == 1 and parts[0][1] == 1:
        return parts[0][0]
    if len(parts) > 1:
        sums = [total([part]) for part in parts]
        step = max(max(loss.step for loss in sums), max(loss.deviation for loss in sums) / _PER_DEVIATION)
        step = min(step, min(loss.step * 64 for loss in sums))
        return _summed([(regridded(loss, step), 1) for loss in sums])
    ((loss, count),) = parts
    low, high = _window(parts)
    points = high - low + 1
    if points <= _FINE_POINTS:
        return _summed(parts)
    share = max(2, int(count * (_FINE_POINTS / (1.2 * points)) ** 2))  # widths grow like the root of the count
    if share < count:
        block = total([(loss, share)]).pruned(math.exp(_LOG_LOST))
        step = block.deviation / _PER_DEVIATION
        if step > 1.5 * loss.step:
            rest = count % share
            blocks = total([(regridded(block, step), count // share)])
            if not rest:
                return blocks
            return _summed([(blocks, 1), (regridded(total([(loss, rest)]), blocks.step), 1)])
    if points > _MOST_POINTS:
        raise TooLarge(f"a loss distribution would need {points:.1e} points")
    return _summed(parts)


def _table(parts: Sequence[Part]) -> tuple[Array, Array, Array]:
    """Tilts on both sides of the middle between Q (0) and P (-1), log-moments of the sum, and its tilted means."""
    reach = max(max(abs(loss.first), abs(loss.last)) * loss.step for loss, _ in parts)
    spread = math.sqrt(sum(count * loss.deviation**2 for loss, count in parts)) or reach
    away = np.geomspace(min(0.05, 0.2 / spread), max(600.0 / reach, 40 / spread, 2.0), 28)
    tilts = np.concatenate([-0.5 - away[::-1], -0.5 + away, [-1.0, 0.0]])
    tilts.sort()
    moments, means = np.zeros_like(tilts), np.zeros_like(tilts)
    with np.errstate(divide="ignore", under="ignore"):
        for loss, count in parts:
            held = loss.mass > 0
            log_mass, losses = np.log(loss.mass[held]), loss.losses[held]
            for i, theta in enumerate(tilts):
                terms = log_mass + theta * losses
                top = float(terms.max())
                weight = np.exp(terms - top)
                whole = float(weight.sum())
                moments[i] += count * (top + math.log(whole) + 1e-14 * (1 + abs(top)))
                means[i] += count * float(np.sum(weight * losses)) / whole
    return tilts, moments, means


def _window(parts: Sequence[Part], table: tuple[Array, Array, Array] | None = None) -> tuple[int, int]:
    """Grid points beyond which, by Chernoff's bound, less than exp(_LOG_LOST) lies under either law."""
    tilts, moments, _ = table if table is not None else _table(parts)
    step = parts[0][0].step
    right, left = tilts > 0.3, tilts < -1.3
    high = float(np.min((moments[right] - _LOG_LOST) / (tilts[right] - EXTRA)))
    low = float(np.max((moments[left] - _LOG_LOST) / (tilts[left] + 1)))
    first, last = (sum(count * end for end, count in ends) for ends in _ends(parts))
    return max(first, math.floor(low / step)), min(last, math.ceil(max(high, step) / step))


def _ends(parts: Sequence[Part]) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
    return [(loss.first, count) for loss, count in parts], [(loss.last, count) for loss, count in parts]


def _summed(parts: Sequence[Part]) -> LossDistribution:
    """The whole sum at once, with several tilts."""
    step = parts[0][0].step
    table = _table(parts)
    tilts, moments, means = table
    low, high = _window(parts, table)
    if not 0 <= high - low < 2 * _MOST_POINTS:
        raise TooLarge(f"a loss distribution would need {abs(high - low):.1e} points")
    centres = np.linspace(low * step, high * step, _TILTS + 2)[1:-1]
    # Any tilt is right; these have their means spread over the window.
    chosen = np.unique(np.concatenate([[-1.0, 0.0], np.interp(centres, means, tilts)]))
    mass = np.full(high - low + 1, np.inf)
    for theta in chosen:
        np.minimum(mass, np.add(*tilted_sum(parts, float(theta), low, high)), out=mass)
    # Nothing has more mass than everything.
    mass = np.minimum(mass, 1.01 * math.exp(min(600.0, sum(c * part.log_moment(0.0) for part, c in parts))))
    left = tilts < -1.3
    log_zero = float(np.min(moments[left] - (tilts[left] + 1) * (low * step)))
    at_p = math.exp(min(600.0, sum(c * part.log_moment(-1.0) for part, c in parts)))
    zero = 1.01 * sum(c * part.zero for part, c in parts) * max(1.0, at_p)
    first = sum(c * part.first for part, c in parts)
    if low > first:  # what is left of the window goes to the ratio 0 under P, and right under Q
        zero += math.exp(min(600.0, log_zero))
        below = tilts < -0.01
        mass[0] += math.exp(min(0.0, float(np.min(moments[below] - tilts[below] * (low * step)))))
    return LossDistribution(step, low, mass, zero, added_tail(parts, high, tilts))


def added_tail(parts: Sequence[Part], last: int, tilts: Array) -> float:
    """Bound on E_Q[r^EXTRA] over the tails of a sum, and by Chernoff over what is on the grid past ``last``."""
    log_all = sum(count * math.log(math.exp(part.log_moment(EXTRA)) + part.tail) for part, count in parts)
    tail = sum(count * part.tail for part, count in parts) * math.exp(min(600.0, max(0.0, log_all))) * (1 + 1e-9)
    if last >= sum(count * part.last for part, count in parts):
        return tail
    step = parts[0][0].step
    exponents = [
        sum(count * part.log_moment(float(theta)) for part, count in parts) - (theta - EXTRA) * last * step
        for theta in tilts[tilts > EXTRA]
    ]
    return tail + math.exp(min(600.0, float(min(exponents))))


def tilted_total(parts: Sequence[Part], tilt: float, beyond: float, more_tilts: int = 0) -> LossDistribution:
    """The sum of independent losses, accurate where ``tilt`` centres it and right, rounded up, everywhere.

    What lies right of the window that is kept is at most about ``beyond`` and goes into the tail; a share of the tilted
    sum lies left of it and moves to its left end. Both are also wrapped around. For what depends on the masses under Q
    alone: ``zero`` is left out. Each entry is taken from the tilt with the least noise there; with k tilts the noise
    is k vectors, and sqrt(k) bounds the sum of their norms.
    """
    low, high, tilts = tilted_window(parts, tilt, beyond)
    if high - low > _MOST_POINTS:
        raise TooLarge(f"a loss distribution would need {high - low:.1e} points")
    step = parts[0][0].step
    mass, noise = tilted_sum(parts, tilt, low, high)
    more = tilt * 2.0 ** np.arange(1, more_tilts + 1)
    for theta in more:
        other_mass, other_noise = tilted_sum(parts, float(theta), low, high)
        better = other_noise < noise
        mass, noise = np.where(better, other_mass, mass), np.where(better, other_noise, noise)
    noise = noise * math.sqrt(1 + more.size)
    if low > sum(count * part.first for part, count in parts):
        lighter = [theta for theta in tilts if theta < 0] or [-0.1 * abs(tilt), -tilt]
        mass[0] += min(1.01, *(math.exp(min(600.0, _log_moment(parts, t) - t * low * step)) for t in lighter))
    return LossDistribution(step, low, mass, 0.0, added_tail(parts, high, np.array(tilts)), noise)


def _log_moment(parts: Sequence[Part], theta: float) -> float:
    return sum(count * part.log_moment(theta) for part, count in parts)


def tilted_window(parts: Sequence[Part], tilt: float, beyond: float) -> tuple[int, int, list[float]]:
    """Where the tilted sum lies, up to where ``beyond`` bounds the rest, and the tilts of Chernoff's bounds on that."""
    step = parts[0][0].step
    nudge = 1e-3 * tilt
    here, up, down = (_log_moment(parts, theta) for theta in (tilt, tilt + nudge, tilt - nudge))
    mean = (up - down) / (2 * nudge)
    spread = math.sqrt(max((up - 2 * here + down) / nudge**2, (10 * step) ** 2))
    low, high, share = -math.inf, math.inf, math.inf
    tilts = []
    for away in np.geomspace(0.3, 30, 12) / spread:
        tilts += [tilt - float(away), tilt + float(away)]
        below, above = (_log_moment(parts, theta) - here for theta in tilts[-2:])
        low, share = max(low, (_LOG_LEFT - below) / float(away)), min(share, (above - _LOG_RIGHT) / float(away))
    tilts += [float(theta) for theta in np.geomspace(min(0.1, tilt), tilt, 6)]
    for theta in tilts:
        if theta > 2 * EXTRA:
            high = min(high, (_log_moment(parts, theta) - math.log(beyond)) / (theta - EXTRA))
    low, high = min(low, mean - 4 * spread), max(high, share, mean + 3 * spread, step)
    if not (math.isfinite(low) and math.isfinite(high)):
        raise TooLarge("the losses reach too far for a grid")
    first, last = (sum(count * end for end, count in ends) for ends in _ends(parts))
    return max(first, math.floor(low / step)), min(last, math.ceil(high / step)), tilts


def tilted_sum(parts: Sequence[Part], theta: float, low: int, high: int) -> tuple[Array, Array]:
    """Upper bounds on the masses of a sum at the points ``low`` to ``high``, sharp where tilting by theta centres it.

    All parts lie on one grid. The second result is what the masses may lack: see the module, and ``noise``.
    """
    size = 2 ** max(4, math.ceil(math.log2(high - low + 1)))
    step = parts[0][0].step
    transform = 8 * _EPS * math.log2(size)
    product = None
    noise, growth, scale, rounding, offset, norms = 0.0, 0.0, 0.0, 0.0, 0, []
    for part, count in parts:
        moment = part.log_moment(theta)
        exponent = theta * part.losses - moment
        with np.errstate(under="ignore", over="ignore"):
            mass = part.mass * np.exp(np.minimum(exponent, 700.0))
        folded = _folded(mass, size)
        norm = math.sqrt(float(np.sum(folded * folded))) * (1 + 1e-12)
        norms.append(norm)
        biggest = float(folded.sum()) * (1 + 1e-14) + transform * math.sqrt(size) * norm
        growth += count * math.log(max(1.0, biggest))
        noise += count * (transform + 2 * _EPS) * norm
        rounding += count * 4 * _EPS * (1 + abs(moment) + abs(theta) * float(np.max(np.abs(part.losses[mass > 1e-25]))))
        scale += count * moment
        offset += count * part.first
        factor = np.fft.rfft(folded)
        if count > 1:
            factor = _power(factor, count)
        product = factor if product is None else product * factor
    assert product is not None
    noise = 1.01 * (noise + 2 * transform * max(norms)) * math.exp(min(600.0, growth))
    found = np.maximum(np.fft.irfft(product, size), 0.0)
    numbers = np.arange(low, high + 1)
    back = scale - theta * step * numbers
    back += rounding + 8 * _EPS * (4 + abs(scale) + np.abs(theta * step * numbers))
    with np.errstate(over="ignore", under="ignore"):
        scales = np.exp(np.minimum(back, 700.0))
        return np.asarray(np.take(found, (numbers - offset) % size) * scales), np.asarray(noise * scales)


def _power(values: NDArray[np.complex128], count: int) -> NDArray[np.complex128]:
    """values^count by repeated squaring, count - 1 products at most in relative error."""
    out: NDArray[np.complex128] | None = None
    with np.errstate(under="ignore"):
        while count:
            if count & 1:
                out = values.copy() if out is None else out * values
            count >>= 1
            if count:
                values = values * values
    assert out is not None
    return out


def _folded(mass: Array, size: int) -> Array:
    """The masses around a circle of some points."""
    if mass.size <= size:
        return np.concatenate([mass, np.zeros(size - mass.size)])
    missing = -mass.size % size
    return np.asarray(np.concatenate([mass, np.zeros(missing)]).reshape(-1, size).sum(axis=0))

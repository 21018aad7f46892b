r"""Privacy of several phases by the laws of their losses: one sampled step, all steps, delta and epsilon.

For each mechanism the losses of its worst gradient's coordinates are added up (``loss_distribution``), then sampled,

    r  ->  t = 1 - q + q r,

and the steps are added up. A sampled pair is (P, X), X = (1-q) P + q Q. *Removing* tests X against P:
losses log t under X. *Adding* it tests P against X: losses -log t under P. The coordinates' pair is its own mirror
image, so one law of losses serves both directions: under P with r = exp(-loss) for adding.

- Gaussian noise, mixed or plain, in any phase: the vertex is the worst for the functions of ``cone`` alone. Removing
  bounds adding as well, for all of them.
- Laplace noise in every phase: the vertex is the worst for every divergence, so the hockey stick of the larger
  direction is exact but for the grid.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np

from modelmix.accounting.cone import Bound, HockeyStick, best_for_delta, best_for_epsilon
from modelmix.accounting.coordinate_losses import coordinate
from modelmix.accounting.functions import Array
from modelmix.accounting.laws import Gaussian, Laplace, known
from modelmix.accounting.ledger import Phase
from modelmix.accounting.loss_distribution import (
    EXTRA,
    LossDistribution,
    Part,
    TooLarge,
    on_grid,
    regridded,
    tilted_total,
    tilted_window,
    total,
)
from modelmix.accounting.mechanism import Bound as Vertex
from modelmix.accounting.mechanism import Mechanism

FINE, ROUGH = 2e-5, 1e-3
"""What the grid of the steps may add to epsilon, as a fraction of it."""
_MOST_MECHANISMS = 128
_STAGE_POINTS = 2**18
_FEW = 8
_LARGEST_EPSILON = 3000.0  # exponentials of more overflow
_SMALLEST_STEP = 1e-9
_LEAST_LOG_MASS = -110.0
_LEAST_LOG_DELTA = -90.0
_LOOKS = 8
_FINE_ENOUGH = 0.6  # of a grid that would be taken had one known the answer
_LOST = 1e-9  # of delta, into the tails of single steps
_MORE_TILTS = 5
_EPS = float(np.finfo(np.float64).eps)


@dataclass(frozen=True)
class SampledLosses:
    """Losses of one sampled step, not yet on a grid; masses under the law that is tested, and its tail."""

    losses: Array
    mass: Array
    tail: float

    def log_moment(self, theta: float) -> float:
        """log E[exp(theta * loss)], without the tail; to find out where to look."""
        terms = self._log_mass + theta * self.losses
        top = float(terms.max())
        return top + math.log(float(np.exp(terms - top).sum()))

    @property
    def _log_mass(self) -> Array:
        return np.log(self.mass)

    def extra_variance(self, step: float) -> float:
        """What spreading to a grid adds to the variance of the loss."""
        rest = np.mod(self.losses, step)
        return float(np.sum(self.mass * rest * (step - rest)))


@lru_cache(maxsize=160)
def gradient_losses(vertex: Vertex) -> LossDistribution:
    """The losses of a whole gradient: of all its coordinates, and of its embedding if it has one.

    Under plain Gaussian noise only the l2 norm counts.
    """
    parts = [
        (law, size * math.sqrt(count) * (1 + 4 * _EPS), 1) if type(law) is Gaussian else (law, size, count)
        for law, size, count in vertex
    ]
    return total([(coordinate(law, size), count) for law, size, count in parts])


@lru_cache(maxsize=160)
def sampled_losses(vertex: Vertex, sample_rate: float, adding: bool = False) -> SampledLosses:
    """Losses of one step with Poisson sampling; rounded upward."""
    loss, q = gradient_losses(vertex), sample_rate
    with np.errstate(divide="ignore"):
        held = np.log(loss.mass) + np.maximum(0.0, -loss.losses) > _LEAST_LOG_MASS
    held |= np.arange(held.size) == 0
    # What is too light to matter moves to the next larger loss that stays, and into the tail beyond the last.
    place = np.minimum(np.searchsorted(np.flatnonzero(held), np.arange(held.size)), int(held.sum()))
    ratios = loss.losses[held]
    mass: Array = np.bincount(place, loss.mass, ratios.size + 1)[:-1].astype(np.float64)
    beyond = np.flatnonzero(held)[-1] + 1
    tail = loss.tail + float(np.sum(loss.mass[beyond:] * np.exp(EXTRA * loss.losses[beyond:]))) * (1 + 1e-12)
    zero = loss.zero + float(np.sum(loss.mass[~held] * np.exp(np.minimum(-loss.losses[~held], 700.0))))
    if adding:
        return _without_excess(-_sampled_log(-ratios, q), mass, tail)  # what is in ``zero`` has no mass under P
    losses = _sampled_log(ratios, q)
    with np.errstate(over="ignore"):
        mass = mass * (q + (1 - q) * np.exp(np.minimum(-ratios, 700.0))) * (1 + 4 * _EPS * (2 + np.abs(ratios)))
    if q < 1:
        losses, mass = np.append(math.log1p(-q), losses), np.append((1 - q) * zero, mass)
    return _without_excess(losses, mass, tail)


def _sampled_log(ratios: Array, q: float) -> Array:
    """log(1 - q + q exp(ratio))."""
    if q == 1:
        return ratios
    out = np.logaddexp(math.log1p(-q), math.log(q) + ratios)
    near = np.abs(ratios) < 1
    out[near] = np.log1p(q * np.expm1(ratios[near]))
    return out


def _without_excess(losses: Array, mass: Array, tail: float) -> SampledLosses:
    """Drop the smallest losses until all masses, which are upper bounds, sum to 1: the worst such law is left."""
    order = np.argsort(losses, kind="stable")
    losses, mass = losses[order], mass[order]
    from_right = np.cumsum(mass[::-1])[::-1]
    most = 1 + 2 * _EPS * losses.size  # the sum itself is rounded
    keep = np.append(from_right[1:], 0.0) < most
    losses, mass, from_right = losses[keep], mass[keep].copy(), from_right[keep]
    mass[0] = min(mass[0], max(0.0, most - float(np.append(from_right, 0.0)[1])))
    positive = mass > 0
    return SampledLosses(losses[positive], mass[positive], tail)


Steps = list[tuple[SampledLosses, int]]
"""Losses of one step, and of how many."""


def _chernoff(steps: Steps, delta: float | None, epsilon: float | None) -> tuple[float, float]:
    """(tilt, epsilon) where Chernoff's bound is best at a delta or at an epsilon: about where the answer will be."""
    rough = [(_grouped(losses), count) for losses, count in steps]

    def log_moment(theta: float) -> float:
        return sum(count * losses.log_moment(theta) for losses, count in rough)

    def worth(theta: float) -> float:
        if delta is None:
            assert epsilon is not None
            return max(log_moment(theta) - theta * epsilon, _LEAST_LOG_DELTA)
        order = 1 + theta
        return (log_moment(theta) + theta * math.log1p(-1 / order) - math.log(delta * order)) / theta

    tilts = list(np.geomspace(1e-3, 1e7, 41))
    for _ in range(5):
        values = [worth(theta) for theta in tilts]
        least = float(np.nanmin(values))
        # Losses with a largest one have ever better tilts; none is worth a finer grid.
        best = int(np.argmax(np.array(values) <= least + 1e-5 * abs(least)))
        found = float(tilts[best]), float(values[best])
        tilts = list(np.geomspace(tilts[max(best - 1, 0)], tilts[min(best + 1, len(tilts) - 1)], 7))
    return found[0], found[1] if epsilon is None else epsilon


def _grouped(losses: SampledLosses, most: int = 1500) -> SampledLosses:
    """About the same law with fewer losses."""
    group = losses.losses.size // most + 1
    starts = np.arange(0, losses.losses.size, group)
    mass = np.add.reduceat(losses.mass, starts)
    return SampledLosses(np.add.reduceat(losses.mass * losses.losses, starts) / mass, mass, 0.0)


@dataclass(frozen=True)
class _Look:
    """Where to look: a tilt that centres the sum there, about epsilon, how steeply delta falls, what may be lost."""

    tilt: float
    epsilon: float
    steepness: float
    delta: float
    tolerance: float
    more_tilts: int = 0

    def grid_step(self, steps: Steps) -> float:
        """The coarsest grid that adds at most a fraction to epsilon: half the added variance times the order."""
        order = 1 + self.steepness
        allowed = 2 * self.tolerance * max(self.epsilon, 0.05 / order) / order
        # A spread over steps of h adds at most h^2/4 to a variance.
        step = best = 2 * math.sqrt(allowed / sum(count for _, count in steps))
        for larger in step * 1.5 ** np.arange(1, 12):
            if sum(count * losses.extra_variance(float(larger)) for losses, count in steps) > allowed:
                break
            best = float(larger)
        return max(min(best, 0.3 / order), _SMALLEST_STEP)


def _composed(steps: Steps, look: _Look, step: float) -> LossDistribution:
    """The law of the sum of all steps' losses, where one looks."""
    if not look.epsilon < _LARGEST_EPSILON:
        raise TooLarge(f"loss distributions are not asked where epsilon is about {look.epsilon:.1e}")
    # What goes into tails counts many times where delta falls steeply; rare large losses, if kept, need wide windows.
    lost = max(_LOST * look.delta / max(1.0, look.steepness / 100), 1e-280)
    each = lost / sum(count for _, count in steps)
    parts = [(on_grid(s.losses, s.mass, step, 0.0, s.tail).pruned(each), n) for s, n in steps]
    while True:
        low, high, _ = tilted_window(parts, look.tilt, lost)
        most = max(n for _, n in parts)
        if high - low <= _STAGE_POINTS or most < _FEW:
            return tilted_total(parts, look.tilt, lost, look.more_tilts)
        # Widths grow like the root of the count.
        share = min(most * (_STAGE_POINTS / (1.2 * (high - low))) ** 2, most / 4)
        parts = _blocks(parts, max(2, int(share)), look.tilt, lost)


def _blocks(parts: Sequence[Part], share: int, tilt: float, lost: float) -> list[Part]:
    """Sums of ``share`` steps each on a grid coarser by the root of that, which adds as little to the variance."""
    step = parts[0][0].step * math.sqrt(share)
    beyond = lost / sum(count for _, count in parts)
    out = []
    for loss, count in parts:
        for steps, times in ((share, count // share), (count % share, 1)):
            if steps and times:
                block = loss if steps == 1 else tilted_total([(loss, steps)], tilt, beyond).with_noise()
                out.append((regridded(block, step), times))
    return out


def unusable(phases: Sequence[Phase]) -> str | None:
    """Why losses are not asked about these phases; None if they are. Leaving them out never makes epsilon too small."""
    if any(known(phase.mechanism.coordinate_law) is None for phase in phases):
        return "the worst gradient of a noise law of one's own is not known but for Renyi moments"
    if len({phase.mechanism for phase in phases}) > _MOST_MECHANISMS:
        return f"loss distributions are asked for up to {_MOST_MECHANISMS} different mechanisms"
    return None


def hockey_stick_is_sound(phases: Sequence[Phase]) -> bool:
    """Whether one gradient is the worst for every divergence: for Laplace noise throughout."""
    return all(type(known(phase.mechanism.coordinate_law)) is Laplace for phase in phases)


def _vertices(mechanism: Mechanism, which: int) -> Vertex:
    bounds = mechanism.moment_bounds
    return bounds[min(which, len(bounds) - 1)]


def _directions(phases: Sequence[Phase], which: int) -> list[tuple[Steps, bool]]:
    """The steps of each direction that has to be looked at, and whether the hockey stick is sound for them."""
    exact = hockey_stick_is_sound(phases)
    counts: dict[tuple[Vertex, float], int] = {}
    for phase in phases:
        key = (_vertices(phase.mechanism, which), phase.mechanism.sample_rate)
        counts[key] = counts.get(key, 0) + phase.steps
    removing = [(sampled_losses(vertex, q), n) for (vertex, q), n in counts.items()]
    if not exact or all(q == 1 for _, q in counts):
        return [(removing, exact)]
    return [(removing, exact), ([(sampled_losses(vertex, q, True), n) for (vertex, q), n in counts.items()], exact)]


def _choices(phases: Sequence[Phase]) -> range:
    return range(max(len(phase.mechanism.moment_bounds) for phase in phases))


@lru_cache(maxsize=512)
def loss_epsilon(phases: tuple[Phase, ...], delta: float, tolerance: float = FINE) -> tuple[float, str | None]:
    """epsilon at ``delta`` by the law of the losses, an upper bound; infinity and why where they are not usable."""
    why = unusable(phases)
    if why is not None:
        return math.inf, why
    if sum(phase.steps * phase.mechanism.sample_rate for phase in phases) <= delta:
        return 0.0, None  # the sample is drawn at all with at most this probability
    try:
        with np.errstate(all="ignore"):
            ways = [_directions(phases, which) for which in _choices(phases)]
            found = min(max(_epsilon(*direction, delta, tolerance) for direction in way) for way in ways)
    except TooLarge as error:
        return math.inf, str(error)
    return (found, None) if math.isfinite(found) else (math.inf, "the losses reach beyond their grid")


def _epsilon(steps: Steps, exact: bool, delta: float, tolerance: float) -> float:
    tilt, guess = _chernoff(steps, delta, None)
    look, found = _Look(tilt, max(guess, 0.0), tilt, delta, tolerance), math.inf
    step = look.grid_step(steps)
    for _ in range(_LOOKS):
        loss = _composed(steps, look, step)
        bound: Bound = HockeyStick() if exact else best_for_delta(loss, delta, look.tilt)
        found, least = min(found, bound.epsilon(loss, delta)), bound.least(loss)
        if found <= least and least > 0:  # Chernoff's bound was far off: further left
            tilt, guess = _chernoff(steps, None, least / 2)
            look = replace(look, tilt=tilt, epsilon=guess)
        else:
            look = replace(look, epsilon=found, steepness=max(look.tilt, _steepness(loss, found)))
        finer, noisy = look.grid_step(steps), _noisy(bound, loss, found) and not look.more_tilts
        if finer > _FINE_ENOUGH * step and not noisy and (found > least or least == 0):
            break
        step, look = min(step, finer), replace(look, more_tilts=_MORE_TILTS if noisy else look.more_tilts)
    return found


def _noisy(bound: Bound, loss: LossDistribution, epsilon: float) -> bool:
    """Whether Fourier noise is a noticeable part of delta."""
    return bound.delta(replace(loss, noise=None), epsilon) < (1 - 1e-4) * bound.delta(loss, epsilon)


def _steepness(loss: LossDistribution, epsilon: float) -> float:
    """About the slope of log delta."""
    away = max(3 * loss.step, 1e-3 * epsilon)
    here, there = (HockeyStick().delta(loss, e) for e in (epsilon, epsilon + away))
    return math.log(here / there) / away if there > 0 else 1 / away


@lru_cache(maxsize=512)
def loss_delta(phases: tuple[Phase, ...], epsilon: float, tolerance: float = FINE) -> float:
    """delta at ``epsilon`` by the law of the losses, an upper bound; 1 where they are not usable."""
    if unusable(phases) is not None:
        return 1.0
    drawn = sum(phase.steps * phase.mechanism.sample_rate for phase in phases)
    try:
        with np.errstate(all="ignore"):
            ways = [_directions(phases, which) for which in _choices(phases)]
            found = min(max(_delta(*direction, epsilon, tolerance) for direction in way) for way in ways)
    except TooLarge:
        found = 1.0
    return min(1.0, drawn, found) if not math.isnan(found) else min(1.0, drawn)


def _delta(steps: Steps, exact: bool, epsilon: float, tolerance: float) -> float:
    tilt, _ = _chernoff(steps, None, epsilon)
    look, found = _Look(tilt, epsilon, tilt, 1e-11, ROUGH), math.inf
    for _ in range(_LOOKS):
        loss = _composed(steps, look, look.grid_step(steps))
        bound: Bound = HockeyStick() if exact else best_for_epsilon(loss, epsilon, look.tilt)
        last, found = found, min(found, bound.delta(loss, epsilon))
        noisy = _noisy(bound, loss, epsilon) and not look.more_tilts
        if not 1e-250 < found < (1.01 if noisy else 0.99) * last:
            break
        tilt, _ = _chernoff(steps, min(found, 0.5), None)
        steepness = max(tilt, _steepness(loss, epsilon))
        more = _MORE_TILTS if noisy else look.more_tilts
        look = _Look(tilt, epsilon, steepness, min(found, 1.0), tolerance, more)
    return found

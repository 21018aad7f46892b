"""Solving for one number of a mechanism so that a target epsilon holds. The answer is always on the safe side."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from modelmix._checks import positive, whole
from modelmix.accounting.adjacency import Adjacency
from modelmix.accounting.embedding import EmbeddingMechanism
from modelmix.accounting.guarantee import By
from modelmix.accounting.guarantee import epsilon as proved_epsilon
from modelmix.accounting.laws import Law
from modelmix.accounting.mechanism import Mechanism
from modelmix.errors import ModelMixError

_LEAST, _MOST = 1e-9, 1e12
_LARGEST_COUNT = 2**50
_CLOSE = 3e-5  # as a fraction of epsilon; the rounding of privacy-loss distributions makes steps of a few parts in 10^6
_LOOKS = 8


class OutOfReach(ModelMixError):  # noqa: N818, as ``BudgetExceeded``
    """A target epsilon that no value of the unknown reaches."""


def smallest_safe(
    value: Callable[[float], float], target: float, *, start: float, tolerance: float, name: str
) -> float:
    """The smallest x (within ``tolerance``, rounded up) with value(x) <= target, for a falling function.

    The answer is always an x whose value was looked at. Between the ends it goes by straight lines in logarithms, which
    close in within a few looks on a smooth function, and by halves where that does not help.
    """
    high = start
    above = value(high)
    low, over = high, above
    while not above <= target:
        low, over = high, above
        high *= 2
        if high > _MOST:
            raise OutOfReach(f"epsilon = {target:g} cannot be reached with any {name} up to {_MOST:g}.")
        above = value(high)
    while low == high or over <= target:
        if low < _LEAST:
            return high
        if over <= target:
            high, above = low, over
        low = high / 2
        over = value(low)
    nudge, width, stuck = 1.0, math.log(high / low), False
    while high / low > 1 + tolerance:
        middle = math.sqrt(low * high)
        if not stuck and 0 < above < math.inf and 0 < over < math.inf and over > above:
            part = math.log(over / target) / math.log(over / above)
            # A little past the line's guess, in turns on either side, so that both ends close in.
            guess = low * (high / low) ** part * (1 + 0.4 * nudge * tolerance)
            nudge = -nudge
            if low < guess < high:
                middle = guess
        if not low < middle < high:
            break
        found = value(middle)
        if found <= target:
            high, above = middle, found
        else:
            low, over = middle, found
        stuck = math.log(high / low) > 0.5 * width and not stuck
        width = math.log(high / low)
    return high


def smallest_by_best(
    value: Callable[[float], float], guide: Callable[[float], float], target: float, **how: Any
) -> float:
    """``smallest_safe`` of a ``value`` that takes its time, led by a cheap falling function that is never below it.

    The ratio of the two changes slowly, so that the place where the guide has the target's share of it is almost the
    answer: three to five looks at ``value``. The answer is an x whose value was looked at and is at most the target,
    by a few parts in 10^5.
    """
    solve = {**how, "tolerance": min(max(how["tolerance"], 1e-9), 1e-6)}
    x = smallest_safe(guide, target, **solve)
    safe, unsafe, seen = x, 0.0, Looks(target * (1 - _CLOSE / 2))
    for _ in range(_LOOKS):
        found = value(x)
        if found <= target:
            safe = x
            if found >= target * (1 - _CLOSE):
                return safe
        else:
            unsafe = x
        goal = seen.next_goal(guide(x), found)
        if goal is None:
            break
        x = smallest_safe(guide, goal, **{**solve, "start": x})
        if not unsafe < x < safe:
            break
    return smallest_safe(value, target, **{**how, "start": safe, "tolerance": max(how["tolerance"], _CLOSE)})


class Looks:
    """Where the guide should be for the value to be at its target: on the line, in logarithms, of the last two looks.

    >>> round(Looks(4.0).next_goal(10.0, 5.0), 6)
    8.0
    """

    def __init__(self, target: float) -> None:
        self.target = math.log(target)
        self.last: tuple[float, float] | None = None

    def next_goal(self, guide: float, value: float) -> float | None:
        if not (0 < value < math.inf and 0 < guide < math.inf):
            return None
        at, slope = (math.log(guide), math.log(value)), 1.0
        if self.last is not None and self.last[1] != at[1]:
            slope = (at[0] - self.last[0]) / (at[1] - self.last[1])
            slope = slope if 0.2 < slope < 5 else 1.0
        self.last = at
        return math.exp(at[0] + slope * (self.target - at[1]))


def _first(holds: Callable[[int], bool]) -> int | None:
    """The smallest whole number from 1 on for which ``holds`` is true and stays so; None past any use."""
    high = 1
    while not holds(high):
        high *= 2
        if high > _LARGEST_COUNT:
            return None
    low = high // 2
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if holds(middle) else (middle, high)
    return high


def calibrate(
    *,
    epsilon: float,
    delta: float,
    noise_multiplier: float | None = None,
    sample_rate: float | None = None,
    steps: int | None = None,
    mixing_width: float | None = 0.0,
    p: int | None = 1,
    law: str | Callable[[float], Law] = "gaussian",
    dimension: int | None = None,
    clip_ratio: float | None = None,
    by: By = "best",
    adjacency: Adjacency | None = None,
    tolerance: float = 1e-6,
) -> Mechanism:
    """Return a mechanism whose epsilon after ``steps`` steps is at most the target, with one number solved for.

    Exactly one of noise_multiplier, mixing_width, sample_rate, p must be None. ``max_steps`` solves for the steps.
    The answer is the least noise (or the largest sampling rate), rounded to the safe side within ``tolerance``. With a
    clip_ratio it is an ``EmbeddingMechanism``.
    """
    given: dict[str, Any] = {
        "noise_multiplier": noise_multiplier,
        "mixing_width": mixing_width,
        "sample_rate": sample_rate,
        "p": p,
    }
    missing = [name for name, value in given.items() if value is None]
    if len(missing) != 1 or steps is None:
        raise ModelMixError(
            "calibrate solves for one unknown: leave out exactly one of noise_multiplier, mixing_width, sample_rate, p "
            "and give steps (max_steps solves for the steps)."
        )
    epsilon = positive("epsilon", epsilon, "the target epsilon")
    positive("tolerance", tolerance, "the tolerance", most=1.0)
    steps = whole("steps", steps, "the number of steps", least=1)
    unknown = missing[0]
    probe = {"noise_multiplier": 1.0, "mixing_width": 0.0, "sample_rate": 1.0, "p": 1}
    known = Mechanism(**{**given, unknown: probe[unknown]}, law=law, dimension=dimension)
    if clip_ratio is not None:
        known = EmbeddingMechanism(**known.as_dict(), clip_ratio=clip_ratio)  # type: ignore[arg-type]

    def with_unknown(x: float) -> Mechanism:
        change: dict[str, Any] = {unknown: x}
        return replace(known, **change)

    def value(x: float, by: By = by) -> float:
        return proved_epsilon(with_unknown(x), delta, steps=steps, by=by, adjacency=adjacency)

    def smallest(start: float, name: str, of: Callable[[float], float] = float) -> float:
        how: dict[str, Any] = {"start": start, "tolerance": tolerance, "name": name}
        if by != "best":
            return smallest_safe(lambda x: value(of(x)), epsilon, **how)
        return smallest_by_best(lambda x: value(of(x)), lambda x: value(of(x), "renyi"), epsilon, **how)

    if unknown == "noise_multiplier":
        answer: float = smallest(1.0, "z")
    elif unknown == "mixing_width":
        answer = 0.0 if value(0.0) <= epsilon else smallest(1.0, "omega")
    elif unknown == "sample_rate":
        answer = 1.0 if value(1.0) <= epsilon else 1 / smallest(2.0, "1/q", lambda x: 1 / x)
    else:
        p_enough = _first(lambda p: value(p) <= epsilon)
        if p_enough is None:
            raise ModelMixError(
                f"epsilon = {epsilon:g} cannot be reached with any p: truncation alone is not enough; "
                "use more noise or wider mixing."
            )
        answer = p_enough
    return with_unknown(answer)


def max_steps(
    mechanism: Mechanism, *, epsilon: float, delta: float, by: By = "best", adjacency: Adjacency | None = None
) -> int:
    """The largest number of steps whose epsilon is at most the target: one step more costs more than it.

    Counts are not looked at above 2^50. Where that many are allowed, 2^50 is returned, and more may be allowed.
    """
    epsilon = positive("epsilon", epsilon, "the target epsilon")

    def cost(steps: int, by: By = by) -> float:
        return proved_epsilon(mechanism, delta, steps=steps, by=by, adjacency=adjacency)

    def most(target: float, by: By) -> int:
        too_many = _first(lambda t: not cost(t, by) <= target)
        return _LARGEST_COUNT if too_many is None else too_many - 1

    steps = most(epsilon, "renyi" if by == "best" else by)
    if by == "best" and steps < _LARGEST_COUNT:
        steps = _most_by_best(cost, most, max(1, steps), epsilon)
    if steps == 0:
        raise ModelMixError(f"epsilon = {epsilon:g} cannot be reached even with steps = 1: use more noise.")
    return steps


def _most_by_best(cost: Callable[..., float], most: Callable[[float, By], int], guess: int, target: float) -> int:
    """The largest count that ``cost`` allows, led by moments: the ratio of the two accountants changes slowly."""
    enough, too_many, seen = 0, _LARGEST_COUNT, Looks(target)
    for look in itertools.count():
        found = cost(guess)
        if found <= target:
            enough = guess
        else:
            too_many = guess
        if too_many - enough <= 1 or too_many == 1:
            return enough
        goal = seen.next_goal(cost(guess, "renyi"), found) if look < _LOOKS else None
        if goal is not None:
            guess = min(max(most(goal, "renyi"), enough + 1), too_many - 1)
        else:
            guess = (enough + too_many) // 2 if too_many < _LARGEST_COUNT else 2 * enough + 1
    raise AssertionError

"""Solving for one number of a mechanism so that a target epsilon holds. The answer is always on the safe side."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from modelmix.accounting.accountant import epsilon as renyi_epsilon
from modelmix.accounting.embedding import EmbeddingMechanism
from modelmix.accounting.laws import Law
from modelmix.accounting.mechanism import Mechanism
from modelmix.accounting.renyi import Conversion
from modelmix.accounting.validation import positive, whole
from modelmix.errors import ModelMixError

_LEAST, _MOST = 1e-9, 1e12
_LARGEST_COUNT = 2**50


def smallest_safe(
    value: Callable[[float], float], target: float, *, start: float, tolerance: float, name: str
) -> float:
    """The smallest x (within ``tolerance``, rounded up) with value(x) <= target, for a falling function."""
    high = start
    while not value(high) <= target:
        high *= 2
        if high > _MOST:
            raise ModelMixError(f"epsilon = {target:g} cannot be reached with any {name} up to {_MOST:g}.")
    low = high / 2
    while value(low) <= target:
        high, low = low, low / 2
        if low < _LEAST:
            return high
    while high / low > 1 + tolerance:
        middle = math.sqrt(low * high)
        if not low < middle < high:
            break
        if value(middle) <= target:
            high = middle
        else:
            low = middle
    return high


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
    conversion: Conversion = "improved",
    tolerance: float = 1e-6,
) -> Mechanism:
    """A mechanism whose epsilon after ``steps`` steps is at most the target, with one number solved for.

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

    def value(x: float) -> float:
        return renyi_epsilon(with_unknown(x), delta, steps=steps, conversion=conversion)

    if unknown == "noise_multiplier":
        answer: float = smallest_safe(value, epsilon, start=1.0, tolerance=tolerance, name="z")
    elif unknown == "mixing_width":
        if value(0.0) <= epsilon:
            answer = 0.0
        else:
            answer = smallest_safe(value, epsilon, start=1.0, tolerance=tolerance, name="omega")
    elif unknown == "sample_rate":
        if value(1.0) <= epsilon:
            answer = 1.0
        else:
            answer = 1 / smallest_safe(lambda x: value(1 / x), epsilon, start=2.0, tolerance=tolerance, name="1/q")
    else:
        p_enough = _first(lambda p: value(p) <= epsilon)
        if p_enough is None:
            raise ModelMixError(
                f"epsilon = {epsilon:g} cannot be reached with any p: truncation alone is not enough; "
                "use more noise or wider mixing."
            )
        answer = p_enough
    return with_unknown(answer)


def max_steps(mechanism: Mechanism, *, epsilon: float, delta: float, conversion: Conversion = "improved") -> int:
    """The largest number of steps whose epsilon is at most the target."""
    epsilon = positive("epsilon", epsilon, "the target epsilon")
    too_many = _first(lambda t: not renyi_epsilon(mechanism, delta, steps=t, conversion=conversion) <= epsilon)
    if too_many == 1:
        raise ModelMixError(f"epsilon = {epsilon:g} cannot be reached even with steps = 1: use more noise.")
    return _LARGEST_COUNT if too_many is None else too_many - 1

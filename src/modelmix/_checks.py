"""Checks of single inputs. Each failure is one line: what is wrong, what is allowed."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from numbers import Integral, Real

from modelmix.errors import ModelMixError

LARGEST = 1e100
"""Lengths beyond this have no use and would overflow when squared."""

_LARGEST_COUNT = 10**18
_LARGEST_DELTA = 0.01


def _number(name: str, value: object, meaning: str, allowed: str) -> float:
    try:
        if isinstance(value, Real) and not isinstance(value, bool) and math.isfinite(value):
            return float(value)
    except OverflowError:  # a whole number past the range of floats
        value = "a number of hundreds of digits"
    raise ModelMixError(f"{name} = {value!r} is not a finite number: {meaning} must be {allowed}.")


def _checked(name: str, value: object, meaning: str, allowed: str, holds: Callable[[float], bool]) -> float:
    number = _number(name, value, meaning, allowed)
    if not holds(number):
        raise ModelMixError(f"{name} = {number:g} is not allowed: {meaning} must be {allowed}.")
    return number


def positive(name: str, value: object, meaning: str, most: float = math.inf) -> float:
    allowed = "greater than 0" if math.isinf(most) else f"greater than 0 and at most {most:g}"
    return _checked(name, value, meaning, allowed, lambda number: 0 < number <= most)


def at_least_zero(name: str, value: object, meaning: str, most: float = math.inf) -> float:
    allowed = "0 or more" if math.isinf(most) else f"0 or more and at most {most:g}"
    return _checked(name, value, meaning, allowed, lambda number: 0 <= number <= most)


def rate(name: str, value: object, meaning: str) -> float:
    return positive(name, value, meaning, most=1.0)


def probability(name: str, value: object, meaning: str) -> float:
    return _checked(name, value, meaning, "strictly between 0 and 1", lambda number: 0 < number < 1)


def whole(name: str, value: object, meaning: str, least: int) -> int:
    """A whole number; 5.0 is taken as 5, 2.5 is refused."""
    allowed = f"a whole number, {least} or more"
    number = _checked(name, value, meaning, allowed, lambda number: number >= least and number == math.floor(number))
    if number > _LARGEST_COUNT:
        raise ModelMixError(f"{name} = {number:g} is not allowed: {meaning} must be at most {_LARGEST_COUNT:.0e}.")
    return int(value) if isinstance(value, Integral) else int(number)


def check_delta(delta: float, populations: Iterable[int] = ()) -> None:
    """Refuse a delta that allows one sample of a population to be published outright."""
    if delta > _LARGEST_DELTA:
        raise ModelMixError(
            f"delta = {delta:g} is not allowed: above {_LARGEST_DELTA:g} a guarantee says next to nothing; take less "
            "than one over the number of samples."
        )
    population = max(populations, default=None)
    if population is not None and delta >= 1 / population:
        raise ModelMixError(
            f"delta = {delta:g} is not allowed: with {population:,} samples it must be below 1/{population} = "
            f"{1 / population:.2g}, or publishing one sample at random would count as private."
        )

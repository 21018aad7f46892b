"""A number that changes with the step, as data: it is written into the run's settings and compared on resuming."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from modelmix._checks import positive, whole
from modelmix.errors import ModelMixError

_SHAPES = ("pieces", "linear", "cosine")


@dataclass(frozen=True)
class Schedule:
    """A value for every step, steps counted from 1.

    Use ``pieces({1: .15, 3001: .015})``, ``linear(start, end, steps)`` or ``cosine(start, end, steps)``; after
    ``steps`` the value stays at ``end``.
    """

    shape: str
    points: tuple[tuple[int, float], ...]

    def __post_init__(self) -> None:
        if self.shape not in _SHAPES:
            raise ModelMixError(f"schedule {self.shape!r} is unknown: choose one of {', '.join(_SHAPES)}.")
        points = tuple(
            (whole("step", step, "a step of a schedule", least=1), positive("value", value, "a scheduled value"))
            for step, value in self.points
        )
        object.__setattr__(self, "points", tuple(sorted(points)))
        steps = [step for step, _ in self.points]
        if not steps or steps[0] != 1 or len(set(steps)) != len(steps):
            raise ModelMixError("a schedule begins at step 1 and names every step once, as in {1: 0.15, 3001: 0.015}.")

    @classmethod
    def pieces(cls, values: Mapping[int, float]) -> Schedule:
        """The value of the last named step that is not later."""
        return cls("pieces", tuple(values.items()))

    @classmethod
    def linear(cls, start: float, end: float, steps: int) -> Schedule:
        """From ``start`` at step 1 to ``end`` at step ``steps`` in a straight line."""
        return cls("linear", ((1, start), (max(2, whole("steps", steps, "the length", least=1)), end)))

    @classmethod
    def cosine(cls, start: float, end: float, steps: int) -> Schedule:
        """From ``start`` at step 1 to ``end`` at step ``steps`` along half a cosine."""
        return cls("cosine", ((1, start), (max(2, whole("steps", steps, "the length", least=1)), end)))

    def at(self, step: int) -> float:
        """The value at a step."""
        if self.shape == "pieces":
            return next(value for first, value in reversed(self.points) if first <= step)
        (first, start), (last, end) = self.points
        done = min(1.0, (step - first) / (last - first))
        if self.shape == "cosine":
            done = 0.5 - 0.5 * math.cos(math.pi * done)
        return start + (end - start) * done

    def as_dict(self) -> dict[str, object]:
        return {"schedule": self.shape, "points": [list(point) for point in self.points]}


def schedule(name: str, value: float | Schedule, meaning: str) -> Schedule:
    """A schedule from a schedule or from one number."""
    if isinstance(value, Schedule):
        return value
    if isinstance(value, Mapping):
        raise ModelMixError(f"{name} is a number or a Schedule: give mm.Schedule.pieces({value!r}) for instance.")
    return Schedule.pieces({1: positive(name, value, meaning)})

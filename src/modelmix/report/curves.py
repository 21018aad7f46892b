"""Epsilon against the number of steps or the mixing width, ModelMix beside its yardsticks."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from modelmix.errors import ModelMixError
from modelmix.privacy.accountant import epsilon
from modelmix.privacy.comparison import best_epsilon, equal_variance, unmixed
from modelmix.privacy.functions import Array
from modelmix.privacy.ledger import Ledger
from modelmix.privacy.mechanism import Mechanism
from modelmix.privacy.validation import positive
from modelmix.report import style

_POINTS = 25
_YARDSTICK_EVERY = 2  # a privacy-loss distribution costs a fraction of a second


@dataclass(frozen=True)
class Curve:
    """Lines over one axis; the first line is the mechanism itself."""

    axis: str
    title: str
    x: Array
    lines: dict[str, Array]


def over_steps(mechanism: Mechanism, first: float, last: float, delta: float) -> Curve:
    """epsilon after each of some step counts."""
    x = np.unique(np.round(_grid(max(1.0, first), last)))
    title = (
        f"z = {mechanism.noise_multiplier:.4g}, omega = {mechanism.mixing_width:.4g}, q = {mechanism.sample_rate:.4g}"
    )
    return _curve("steps", title, x, delta, lambda t: (mechanism, int(t)))


def over_width(mechanism: Mechanism, steps: int, first: float, last: float, delta: float, unit: float | None) -> Curve:
    """epsilon against omega, or against tau/eta where ``unit`` gives omega per tau/eta."""
    axis = "mixing width omega" if unit is None else "mixing threshold tau / eta"
    title = f"z = {mechanism.noise_multiplier:.4g}, q = {mechanism.sample_rate:.4g}, {steps:,} steps"
    scale = 1.0 if unit is None else unit

    def at(x: float) -> tuple[Mechanism, int]:
        return replace(mechanism, mixing_width=scale * x), steps

    return _curve(axis, title, _grid(first, last), delta, at)


def _grid(first: float, last: float) -> Array:
    positive("--from", first, "the first value")
    if not last > first:
        raise ModelMixError(f"--to = {last:g} is not allowed: it must be greater than --from = {first:g}.")
    return np.geomspace(first, last, _POINTS)


def _curve(axis: str, title: str, x: Array, delta: float, at: Callable[[float], tuple[Mechanism, int]]) -> Curve:
    runs = [at(value) for value in x]
    p = runs[0][0].p
    lines = {f"ModelMix, p = {p}": [epsilon(m, delta, steps=t) for m, t in runs]}
    if p > 1:
        lines["ModelMix, p = 1"] = [epsilon(replace(m, p=1, dimension=None), delta, steps=t) for m, t in runs]
    for name, change in (("same noise, no mixing", unmixed), ("Gaussian of equal variance", equal_variance)):
        lines[name] = [
            best_epsilon(change(Ledger().add(m, t)), delta).epsilon if i % _YARDSTICK_EVERY == 0 else math.nan
            for i, (m, t) in enumerate(runs)
        ]
    return Curve(axis, f"{title}, delta = {delta:g}", x, {name: np.array(y) for name, y in lines.items()})


def draw(curve: Curve, path: Path) -> list[Path]:
    """The plot, as PNG and SVG."""
    with style.look():
        from matplotlib import pyplot

        figure, axes = pyplot.subplots(figsize=(6.4, 4.2))
        looks = [(style.MIXED, "-"), (style.MIXED_25, "-."), (style.PLAIN, "--"), (style.TWIN, ":")]
        if len(curve.lines) < len(looks):
            del looks[1]
        for (name, y), (colour, shape) in zip(curve.lines.items(), looks, strict=True):
            shown = y > 0  # neither 0 nor unknown
            axes.plot(curve.x[shown], y[shown], shape, color=colour, label=name)
        axes.set(xscale="log", yscale="log", xlabel=curve.axis, ylabel="epsilon", title=curve.title)
        axes.legend()
        return style.save(figure, path)

"""Epsilon against the number of steps or the mixing width, ModelMix beside its yardsticks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from modelmix._checks import positive
from modelmix._format import up_digits
from modelmix.accounting.functions import Array
from modelmix.accounting.guarantee import Guarantee, guarantee, quick_epsilon
from modelmix.accounting.ledger import Ledger
from modelmix.accounting.mechanism import Mechanism
from modelmix.accounting.pld import equal_variance, unmixed
from modelmix.errors import ModelMixError
from modelmix.report import style

_STEP_POINTS, _WIDTH_POINTS = 17, 33  # a privacy-loss distribution costs a fraction of a second
_MIXED_LOOKS = ((style.MIXED, "-"), (style.MIXED_25, "-."))
_YARDSTICK_LOOKS = {
    "no mixing": (style.PLAIN, "--"),
    "same noise, no mixing": (style.PLAIN, "--"),
    "Gaussian of equal variance": (style.TWIN, ":"),
}


@dataclass(frozen=True)
class Curve:
    """Lines over one axis; the first line is the mechanism itself, and ``end`` what holds at its last point."""

    axis: str
    title: str
    x: Array
    lines: dict[str, Array]
    end: Guarantee


def over_steps(ledger: Ledger, first: float, last: float, delta: float) -> Curve:
    """Compute epsilon after each of some step counts, for the one mechanism and the claim of a ledger."""
    (phase,) = ledger.phases
    mechanism = phase.mechanism
    x = np.unique(np.round(_grid(max(1.0, first), last, _STEP_POINTS)))
    title = (
        f"z = {mechanism.noise_multiplier:.4g}, omega = {mechanism.mixing_width:.4g}, q = {mechanism.sample_rate:.4g}"
    )
    return _curve(ledger, "steps", title, x, delta, lambda t: (mechanism, int(t)))


def over_width(ledger: Ledger, first: float, last: float, delta: float, unit: float | None) -> Curve:
    """Compute epsilon against omega, or against tau/eta where ``unit`` gives omega per tau/eta."""
    axis = "mixing width omega" if unit is None else "mixing threshold tau / eta"
    (phase,) = ledger.phases
    mechanism = phase.mechanism
    title = f"z = {mechanism.noise_multiplier:.4g}, q = {mechanism.sample_rate:.4g}, {phase.steps:,} steps"
    scale = 1.0 if unit is None else unit

    def at(x: float) -> tuple[Mechanism, int]:
        return replace(mechanism, mixing_width=scale * x), phase.steps

    return _curve(ledger, axis, title, _grid(first, last, _WIDTH_POINTS), delta, at)


def _grid(first: float, last: float, points: int) -> Array:
    positive("--from", first, "the first value")
    if not last > first:
        raise ModelMixError(f"--to = {last:g} is not allowed: it must be greater than --from = {first:g}.")
    return np.geomspace(first, last, points)


def _curve(
    ledger: Ledger, axis: str, title: str, x: Array, delta: float, at: Callable[[float], tuple[Mechanism, int]]
) -> Curve:
    books = [replace(ledger, phases=()).add(*at(value)) for value in x]
    found = guarantee(books[-1], delta)  # first: nothing is drawn of what is not proved
    last = books[-1].phases[-1].mechanism

    def line(change: Callable[[Ledger], Ledger]) -> Array:
        changed = [change(book) for book in books]
        end = guarantee(changed[-1], delta).epsilon
        return np.array([*(quick_epsilon(book, delta) for book in changed[:-1]), end])

    if last.mixed:
        lines = {f"ModelMix, p = {last.p}": line(lambda book: book)}
        if last.p > 1:
            lines["ModelMix, p = 1"] = line(_untruncated)
        lines["same noise, no mixing"] = line(unmixed)
    else:
        lines = {"no mixing": line(lambda book: book)}
    lines["Gaussian of equal variance"] = line(equal_variance)
    seeded = ", seeded" if found.seeded else ""
    return Curve(axis, f"{last.law}, {title}, delta = {up_digits(delta)}{seeded}", x, lines, found)


def _untruncated(book: Ledger) -> Ledger:
    phase = book.phases[0]
    return replace(book, phases=()).add(replace(phase.mechanism, p=1, dimension=None), phase.steps)


def draw(curve: Curve, path: Path) -> list[Path]:
    """Draw the plot, as PNG and SVG."""
    with style.look():
        from matplotlib import pyplot

        figure, axes = pyplot.subplots(figsize=(6.4, 4.6), layout="constrained")
        mixed_looks = iter(_MIXED_LOOKS)
        for name, y in curve.lines.items():
            shown = y > 0
            colour, shape = _YARDSTICK_LOOKS.get(name) or next(mixed_looks)
            axes.plot(curve.x[shown], y[shown], shape, color=colour, label=name)
        axes.set(xscale="log", yscale="log", xlabel=curve.axis, ylabel="epsilon", title=curve.title)
        figure.legend(loc="outside lower center", ncols=2)
        return style.save(figure, path)

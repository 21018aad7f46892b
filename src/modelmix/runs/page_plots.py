"""The plots of a run's page, as SVG text. No text of a user is drawn."""

from __future__ import annotations

import io
import re
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from modelmix.accounting.functions import Array
from modelmix.accounting.guarantee import Guarantee, epsilon, quick_epsilon
from modelmix.accounting.ledger import Ledger
from modelmix.report import style

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_POINTS = 16
_SIZE = (4.2, 2.9)  # inches; small, so that the letters stay readable on a phone
_UNDATED: dict[str, Any] = {"Date": None, "Creator": None, "Format": None, "Type": None}


def accuracy(lines: Mapping[str, Sequence[tuple[float, float]]]) -> str:
    """Draw accuracy in percent against steps, one line per name; a name without points is left out."""
    looks = iter(((style.MIXED, "-"), (style.MIXED_25, "--")))

    def draw(axes: Axes) -> None:
        for name, points in lines.items():
            colour, shape = next(looks)
            if points:
                steps, values = zip(*points, strict=True)
                marker = "o" if len(points) < 15 else ""
                axes.plot(steps, 100 * np.array(values), shape, color=colour, label=name, marker=marker, markersize=3.5)
        axes.set(xlabel="steps", ylabel="accuracy on the test set, %")
        axes.set_xlim(left=0)
        axes.legend(loc="best")

    return _svg("accuracy", "Accuracy on the test set against steps", draw)


def epsilon_curve(ledger: Ledger, delta: float, best: Guarantee) -> str | None:
    """Draw epsilon after every part of the ledger, ending at ``best``; None if there is no finite value."""
    steps, values = epsilon_points(ledger, delta, best)
    finite = np.isfinite(values)
    if not finite.any():
        return None

    def draw(axes: Axes) -> None:
        axes.plot(steps[finite], values[finite], "-o", color=style.MIXED_100, markersize=3.5)
        axes.set(xlabel="steps", ylabel=f"epsilon at delta = {delta!r}")
        axes.set_xlim(left=0)
        axes.set_ylim(bottom=0)

    return _svg("epsilon", "Epsilon against steps", draw)


def epsilon_points(ledger: Ledger, delta: float, best: Guarantee) -> tuple[Array, Array]:
    """Return step counts and the epsilon after each, by the accountant of ``best`` (with fewer buckets for PLD)."""
    if not ledger.phases:
        return np.array([]), np.array([])
    different = len({phase.mechanism for phase in ledger.phases}) if best.accountant.startswith("PLD") else 1
    points = max(4, _POINTS // different)
    steps = np.unique(np.linspace(1, ledger.steps, points).round()).astype(int)
    books = [prefix(ledger, int(t)) for t in steps]
    find = quick_epsilon if best.accountant.startswith("PLD") else partial(epsilon, by="renyi")
    values = np.array([*(find(book, delta) for book in books[:-1]), best.epsilon])
    return steps, np.minimum(values, best.epsilon)


def prefix(ledger: Ledger, steps: int) -> Ledger:
    """Return the first ``steps`` steps of a ledger."""
    out = Ledger(unproved=ledger.unproved)
    for phase in ledger.phases:
        taken = min(phase.steps, steps - out.steps)
        if taken > 0:
            out = out.add(phase.mechanism, taken)
    return out


def norms(edges: Sequence[float], counts: Sequence[float], clip: float | None, norm: str) -> str:
    """Draw the histogram of gradient norms before clipping, with the clip as a line."""
    filled = np.flatnonzero(counts)
    first, last = (filled[0], filled[-1] + 1) if filled.size else (0, len(counts))
    shown_edges, shown = np.array(edges[first : last + 1]), np.array(counts[first:last])

    def draw(axes: Axes) -> None:
        axes.stairs(shown, shown_edges, fill=True, color=style.MIXED, alpha=0.75)
        if clip is not None and clip > 0:
            axes.axvline(clip, color=style.INK, linestyle="--", label=f"clip c = {clip:g}")
            axes.legend(loc="best")
        axes.set(xscale="log", xlabel=f"{norm} norm of a sample's gradient", ylabel="samples")
        axes.set_ylim(bottom=0)
        axes.set_axisbelow(True)

    return _svg("norms", "Histogram of the gradient norms before clipping", draw)


def _svg(name: str, title: str, draw: Callable[[Axes], None]) -> str:
    """Draw one small plot. ``name`` keeps the ids of several plots in one page apart."""
    with style.look():
        import matplotlib
        from matplotlib.figure import Figure

        with matplotlib.rc_context({"svg.hashsalt": f"modelmix-{name}", "font.size": 9, "axes.labelsize": 9}):
            figure = Figure(figsize=_SIZE, layout="constrained")
            draw(figure.subplots())
            out = io.StringIO()
            figure.savefig(out, format="svg", metadata=_UNDATED)
    return _inline(out.getvalue(), title)


def _inline(svg: str, title: str) -> str:
    """Cut out the <svg> element, without the ids of groups, which nothing refers to and several plots would share."""
    element = svg[svg.index("<svg") :].strip()
    element = re.sub(r'<g id="[^"]*"', "<g", element)
    return element.replace("<svg", f'<svg role="img" aria-label="{title}"', 1)

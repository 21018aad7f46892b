"""Randomness beyond noise, drawn: epsilon over the size of what is added."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from modelmix.report import style

if TYPE_CHECKING:
    from modelmix_lab.experiments.other_randomness import Line

_LOOKS = (
    (style.PLAIN, "-"),
    (style.MIXED_100, "--"),
    (style.MIXED, "-"),
    (style.TWIN, "-."),
    ("#D55E00", "-"),
)


def draw(lines: Sequence[Line], without: float, title: str, path: Path) -> list[Path]:
    """Draw epsilon over the size; a cross ends a line where the worst gradient is no longer known."""
    with style.look():
        from matplotlib import pyplot

        figure, axes = pyplot.subplots(figsize=(6.6, 4.8), layout="constrained")
        axes.axhline(without, color=style.INK, linewidth=1, linestyle=(0, (1, 3)), label="noise alone: always holds")
        for line, (colour, shape) in zip(lines, _LOOKS, strict=True):
            axes.plot(line.std, line.epsilon, shape, color=colour, label=line.name)
            known = np.flatnonzero(np.isfinite(line.epsilon))
            if known.size < line.std.size and known.size:
                end = known[-1]
                axes.plot(line.std[end], line.epsilon[end], "x", color=colour, markersize=8)
        axes.set(xscale="log", yscale="log", xlabel="added standard deviation of a coordinate / clip")
        axes.set(ylabel="epsilon", title=title)
        axes.set_xticks([0.2, 0.5, 1, 2, 5], ["0.2", "0.5", "1", "2", "5"])
        axes.set_yticks([1, 2, 3, 5], ["1", "2", "3", "5"])
        axes.minorticks_off()
        figure.legend(loc="outside lower center", ncols=3)
        return style.save(figure, path)

"""Figure 3 of the paper, drawn again: epsilon against steps for two sampling rates and three mixing thresholds."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from modelmix.report import style

if TYPE_CHECKING:
    from modelmix_lab.experiments.fig3 import Panel

_NUDGE = {1: 0, 25: 5, 100: -5}
_COLOURS = {1: style.MIXED, 25: style.MIXED_25, 100: style.MIXED_100}


def draw(panels: Sequence[Panel], path: Path) -> list[Path]:
    """Draw six subfigures. Solid: as the paper computes it; dotted: proved, by the distribution of the losses."""
    with style.look():
        from matplotlib import pyplot
        from matplotlib.lines import Line2D

        figure, grid = pyplot.subplots(2, 3, figsize=(11, 6.4), sharex=True, sharey=True, layout="constrained")
        for axes, panel, letter in zip(grid.ravel(), panels, "abcdef", strict=True):
            axes.plot(panel.steps, panel.plain, "--", color=style.PLAIN, label="DP-SGD")
            for p, line in panel.lines.items():
                axes.plot(panel.steps, line, color=_COLOURS[p], label=f"ModelMix, p = {p}")
                axes.plot(panel.steps, panel.proved[p], ":", color=_COLOURS[p], linewidth=1.4)
                if p in panel.paper:
                    axes.plot(panel.steps[-1], panel.paper[p], "x", color=style.INK, markersize=6, clip_on=False)
                axes.annotate(
                    f"{line[-1]:.1f}", (panel.steps[-1], line[-1]), xytext=(3, _NUDGE[p]), textcoords="offset points",
                    fontsize=8, color=_COLOURS[p], va="center", annotation_clip=False,
                )  # fmt: skip
            axes.set(yscale="log", title=f"({letter}) q = {panel.sample_rate:g}, tau = {panel.tau:g} eta")
        for axes in grid[-1]:
            axes.set_xlabel("steps")
        for axes in grid[:, 0]:
            axes.set_ylabel("epsilon at delta = 1e-5")
        handles, labels = grid[0, 0].get_legend_handles_labels()
        handles.append(Line2D([], [], color=style.INK, linestyle=":", linewidth=1.4))
        labels.append("proved")
        handles.append(Line2D([], [], color=style.INK, linestyle="", marker="x"))
        labels.append("printed in the paper")
        figure.legend(handles, labels, loc="outside lower center", ncols=6, columnspacing=1.2, handlelength=1.6)
        return style.save(figure, path)

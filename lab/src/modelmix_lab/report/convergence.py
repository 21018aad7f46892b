"""Theorem 3.1 drawn: measured loss of Algorithm 1 beside its bounds, over the number of steps."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from modelmix.report import style

if TYPE_CHECKING:
    from modelmix_lab.experiments.convergence import Line

_TITLES = {"squares": "clipped least squares", "logistic": "logistic regression"}


def draw(lines: Sequence[Line], path: Path) -> list[Path]:
    """Draw one panel a problem. Bars are two standard errors of the mean."""
    with style.look():
        from matplotlib import pyplot

        figure, grid = pyplot.subplots(1, len(lines), figsize=(9.6, 4.4), sharey=True, layout="constrained")
        for axes, line in zip(np.atleast_1d(grid), lines, strict=True):
            t = np.array(line.steps, dtype=float)
            axes.plot(t, line.printed, "--", color=style.PLAIN, label="Theorem 3.1 as printed")
            axes.plot(t, line.proved, "-", color=style.MIXED, label="Theorem 3.1, constants that hold")
            for values, errors, colour, name in (
                (line.along, line.along_error, style.MIXED_25, "measured: mean of F along the way"),
                (line.final, line.final_error, style.MIXED_100, "measured: F at the average of states"),
            ):
                axes.errorbar(t, values, 2 * np.array(errors), fmt="o-", color=colour, markersize=4, label=name)
            axes.plot(t, line.along[0] * np.sqrt(t[0] / t) * 0.6, ":", color=style.INK, label="slope of 1/sqrt(T)")
            axes.set(xscale="log", yscale="log", xlabel="steps T", title=_TITLES.get(line.loss, line.loss))
        np.atleast_1d(grid)[0].set_ylabel("loss above the optimum")
        handles, labels = np.atleast_1d(grid)[0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside lower center", ncols=3)
        return style.save(figure, path)

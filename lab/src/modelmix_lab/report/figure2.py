"""Figure 2 of the paper, drawn again: test accuracy along the runs, without noise and with it, spread over seeds."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from modelmix._format import up
from modelmix.report import style

if TYPE_CHECKING:
    from modelmix_lab.experiments.fig2 import Curve

_LOOKS = {
    (False, 0): (style.PLAIN, "-"),
    (False, 1): (style.MIXED_100, "-"),
    (False, 2): (style.MIXED, "-"),
    (True, 0): (style.PLAIN, "-"),
    (True, 1): ("#D55E00", "--"),
    (True, 2): (style.MIXED_100, "-"),
    (True, 3): (style.MIXED, "-"),
}


def draw(curves: Sequence[Curve], title: str, path: Path) -> list[Path]:
    """Draw medians, in bands from the smallest to the largest of the seeds."""
    with style.look():
        from matplotlib import pyplot

        figure, grid = pyplot.subplots(1, 2, figsize=(10, 4.9), sharey=True, layout="constrained")
        for axes, private in zip(grid, (False, True), strict=True):
            chosen = [curve for curve in curves if curve.arm.private == private]
            for i, curve in enumerate(chosen):
                colour, shape = _LOOKS[private, i]
                rows = 100 * np.array(curve.accuracy)
                name = curve.arm.name + (f" (epsilon {up(curve.epsilon, 2)})" if private else "")
                axes.fill_between(curve.steps, rows.min(0), rows.max(0), color=colour, alpha=0.15, linewidth=0)
                axes.plot(curve.steps, np.median(rows, axis=0), shape, color=colour, label=name)
            axes.set(xlabel="steps", title="with noise" if private else "without noise")
            axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.15), fontsize=9)
        grid[0].set_ylabel("test accuracy, %")
        figure.suptitle(title)
        return style.save(figure, path)

"""Test accuracy against epsilon: our runs over the paper's lines, one panel for every data set and network."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from modelmix.report import style
from modelmix_lab.experiments import tables
from modelmix_lab.experiments.tables import KINDS, Row
from modelmix_lab.report.results_page import HEADINGS
from modelmix_lab.report.summary import Summary

_LOOKS = {
    "released": (style.MIXED_25, "^"),
    "paper": (style.MIXED, "o"),
    "plain": (style.PLAIN, "s"),
    "gaussian": (style.TWIN, "D"),
    "best": (style.MIXED_100, "*"),
}


def draw(summary: Summary, path: Path) -> list[Path]:
    """Draw lines through medians over seeds, bars from the lowest to the highest; dashed what the paper prints."""
    panels: dict[str, list[Row]] = {}
    for name in tables.TABLES:
        table = tables.table(name)
        for row in (row for row in table.rows if math.isfinite(row.epsilon)):
            panels.setdefault(f"{row.data}, {table.network}", []).append(row)
    with style.look():
        from matplotlib import pyplot

        down = -(-len(panels) // 2)
        figure, grid = pyplot.subplots(down, 2, figsize=(9.5, 3.6 * down), layout="constrained")
        for axes in grid.ravel()[len(panels) :]:
            axes.set_axis_off()
        for axes, (title, rows) in zip(grid.ravel(), panels.items(), strict=False):
            _panel(axes, sorted(rows, key=lambda row: row.epsilon), summary)
            axes.set(title=title, xlabel="epsilon at delta = 1e-5", ylabel="test accuracy, %")
        lines: dict[str, Any] = {}
        for axes in grid.ravel():
            handles, labels = axes.get_legend_handles_labels()
            lines |= dict(zip(labels, handles, strict=True))
        figure.legend(lines.values(), lines.keys(), loc="outside lower center", ncols=4, columnspacing=1.4)
        return style.save(figure, path)


def _panel(axes: Any, rows: list[Row], summary: Summary) -> None:
    axes.plot([row.epsilon for row in rows], [row.accuracy for row in rows], "--", color=style.MIXED, lw=1.2,
              label="ModelMix, printed")  # fmt: skip
    # Table 3 prints plain DP-SGD at epsilons around 100, which would leave no room for the rest.
    plain = [row for row in rows if row.plain_epsilon == row.epsilon]
    told = [row for row in plain if row.plain_accuracy is not None]
    axes.plot([row.epsilon for row in told], [row.plain_accuracy for row in told], "--", color=style.PLAIN, lw=1.2,
              label="plain DP-SGD, printed")  # fmt: skip
    for kind in KINDS:
        cells = [cell for row in (plain if kind == "plain" else rows) if (cell := summary.cell(row, kind)) is not None]
        if not cells:
            continue
        colour, marker = _LOOKS[kind]
        x, y = [cell.row.target(kind) for cell in cells], [cell.middle.reported for cell in cells]
        bars = [[v - c.spread[0] for c, v in zip(cells, y, strict=True)],
                [c.spread[1] - v for c, v in zip(cells, y, strict=True)]]  # fmt: skip
        axes.errorbar(x, y, bars, color=colour, marker=marker, markersize=5, capsize=2, label=HEADINGS[kind])

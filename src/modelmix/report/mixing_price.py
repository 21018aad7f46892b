"""The price of mixing drawn: a map over epsilon, q, T and p, and its growth with the share of mixing."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from modelmix.report import style

if TYPE_CHECKING:
    from modelmix.theory.mixing_price import Cell

_LOOKS = ((style.MIXED, "-"), (style.MIXED_25, "--"), (style.MIXED_100, "-."))


def draw(
    cells: Sequence[Cell],
    by_share: dict[int, list[Cell]],
    limit: tuple[Sequence[float], Sequence[float]],
    path: Path,
) -> list[Path]:
    """Draw a heat map for every p, and the price over the share beside the limit of Fisher information."""
    with style.look():
        from matplotlib import pyplot
        from matplotlib.colors import LogNorm

        truncations = sorted({cell.p for cell in cells})
        runs = list(dict.fromkeys((cell.sample_rate, cell.steps) for cell in cells))
        epsilons = sorted({cell.epsilon for cell in cells})
        columns = len(truncations)
        figure, grid = pyplot.subplots(
            1, columns + 1, figsize=(3.7 * columns + 4, 4.2), layout="constrained", width_ratios=[1] * columns + [0.9]
        )
        most = max(cell.price for cell in cells)
        for axes, p in zip(grid, truncations, strict=False):
            table = np.full((len(runs), len(epsilons)), np.nan)
            for cell in cells:
                if cell.p == p:
                    table[runs.index((cell.sample_rate, cell.steps)), epsilons.index(cell.epsilon)] = cell.price
            axes.imshow(table, cmap="YlGnBu", norm=LogNorm(1, 1.6 * most), aspect="auto")
            for (row, column), value in np.ndenumerate(table):
                ink = "white" if value > most**0.65 else style.INK
                text = f"{value:.1f}" if value >= 9.995 else f"{value:.2f}"
                axes.text(column, row, text, ha="center", va="center", fontsize=7.5, color=ink)
            axes.set_xticks(range(len(epsilons)), [f"{e:g}" for e in epsilons])
            names = [f"q = {q:g}, T = {t:,}" for q, t in runs] if axes is grid[0] else [""] * len(runs)
            axes.set_yticks(range(len(runs)), names)
            axes.grid(False)
            axes.set(xlabel="epsilon", title=f"p = {p}")
        last = grid[-1]
        for (p, line), (colour, shape) in zip(by_share.items(), _LOOKS, strict=False):
            last.plot([c.share for c in line], [c.price for c in line], shape, color=colour, label=f"p = {p}")
        last.plot(*limit, ":", color=style.INK, label="Fisher information")
        last.axhline(1, color=style.PLAIN, linewidth=1)
        first = next(iter(by_share.values()))[0]
        setting = f"eps = {first.epsilon:g}, q = {first.sample_rate:g}, T = {first.steps:,}"
        last.set(yscale="log", xlabel="share of the variance from mixing", title=setting)
        last.set_yticks([1, 2, 5, 10], ["1", "2", "5", "10"])
        last.legend(loc="upper left")
        figure.suptitle(f"noise with mixing / noise without, at equal epsilon ({cells[0].share:.0%} of it from mixing)")
        return style.save(figure, path)

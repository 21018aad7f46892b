"""Theorem 4.2 drawn: epsilon over the mixing width by each proof, and the power of the width it falls with."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from modelmix._format import up_digits
from modelmix.report import style

if TYPE_CHECKING:
    from modelmix_lab.experiments.amplification import Composition, Slope

_LOOKS = ((style.MIXED, "-"), (style.MIXED_100, "-"), (style.MIXED_25, "--"), (style.TWIN, "-."))


def draw(found: Composition, slopes: Sequence[Slope], path: Path) -> list[Path]:
    with style.look():
        from matplotlib import pyplot

        figure, (left, right) = pyplot.subplots(1, 2, figsize=(10.4, 5.4), layout="constrained")
        x = found.omega
        left.axvspan(*found.window, color="#eef3f7", zorder=0, label="where 1/sqrt(omega) is expected")
        left.axhline(
            found.pure, color=style.PLAIN, linestyle="--", linewidth=1.2, label="worst case of every step, T/z"
        )
        left.plot(x, found.lemma, "-.", color=style.TWIN, label="Bernstein, the paper's lemma")
        left.plot(x, found.bernstein, "-", color=style.MIXED_25, label="Bernstein, exact mean and variance")
        left.plot(x, found.renyi, "-", color=style.MIXED, label="Renyi accountant")
        inside = (x >= found.window[0]) & (x <= found.window[1])
        anchor = found.renyi[inside][0]
        left.plot(
            x[inside], 0.45 * anchor * np.sqrt(x[inside][0] / x[inside]), ":", color=style.INK, label="slope -1/2"
        )
        left.set(
            xscale="log",
            yscale="log",
            xlabel="mixing width omega",
            ylabel=f"epsilon at delta = {up_digits(found.delta)}",
        )
        left.set(xlim=(x[0], x[-1]), title=f"Laplace, z = {found.z:g}, q = 1, T = {found.steps:,}")
        left.legend(loc="upper center", bbox_to_anchor=(0.5, -0.14), fontsize=8.5, ncols=2)
        for line, (colour, shape) in zip(slopes, _LOOKS, strict=True):
            right.plot(line.omega, line.slope, shape, color=colour, label=line.name)
        right.axhline(-0.5, color=style.INK, linestyle=":", label="slope -1/2: the law of Theorem 4.2")
        right.set(xscale="log", xlabel="mixing width omega", ylabel="d log epsilon / d log omega", ylim=(-1.6, 0.05))
        right.set(title="power of omega, Renyi accountant")
        right.legend(loc="upper center", bbox_to_anchor=(0.5, -0.14), fontsize=8.5)
        return style.save(figure, path)

"""Gradient norms, the tail of the sampling noise and the bias of clipping, with the clip that is advised."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from modelmix.report import style

if TYPE_CHECKING:
    from modelmix.theory.clipping import Bias, NormHistogram
    from modelmix.theory.kappa import TailFit


def draw(
    norms: NormHistogram,
    clip: float,
    threshold: float,
    path: Path,
    *,
    tail: TailFit | None = None,
    bias: Sequence[Bias] = (),
) -> list[Path]:
    """Draw one panel for a noisy histogram; three where the samples themselves may be looked at."""
    with style.look():
        from matplotlib import pyplot

        panels = 1 if tail is None else 3
        figure, grid = pyplot.subplots(1, panels, figsize=(4.6 * panels, 4.3), layout="constrained", squeeze=False)
        _norms(grid[0, 0], norms, threshold)
        if tail is not None:
            _tail(grid[0, 1], tail)
            _bias(grid[0, 2], bias)
        for axes in (grid[0, 0], grid[0, 2]) if tail is not None else (grid[0, 0],):
            axes.axvline(clip, color=style.MIXED_100, label=f"advised clip {clip:.3g}")
            axes.axvline(threshold, color=style.TWIN, linestyle="--", label=f"the paper's threshold {threshold:.3g}")
            axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.16), fontsize=9)
        return style.save(figure, path)


def _norms(axes: Any, norms: NormHistogram, threshold: float) -> None:
    counts, uppers = norms.counts, norms.uppers
    lowers = np.append(uppers[0] ** 2 / uppers[1], uppers[:-1])
    shown = np.flatnonzero(norms.kept)
    axes.bar(lowers, counts, uppers - lowers, align="edge", color=style.MIXED)
    if norms.noise_std:
        axes.axhline(norms.floor, color=style.INK, linestyle=":", linewidth=1.2, label="below: taken for noise")
    span = lowers[shown[0]] / 2, max(uppers[shown[-1]], threshold) * 1.5
    axes.set_axisbelow(True)
    kind = "noisy count" if norms.noise_std else "samples"
    axes.set(xscale="log", xlim=span, xlabel="gradient norm |g|", ylabel=kind, title="per-sample gradient norms")


def _tail(axes: Any, tail: TailFit) -> None:
    n = tail.noise.size
    axes.step(tail.noise, np.arange(n, 0, -1) / n, where="pre", color=style.MIXED, label="samples")
    t = np.linspace(0, tail.noise[-1] * 1.1, 100)
    axes.plot(t, np.exp(-t / tail.kappa), "--", color=style.TWIN, label=f"exp(-t/kappa), kappa = {tail.kappa:.3g}")
    beyond = t[t >= tail.start]
    fitted = 0.1 * np.exp(-(beyond - tail.start) / tail.mean_excess)
    name = f"exponential fit of the upper tenth, p = {tail.chance:.2g}"
    axes.plot(beyond, fitted, ":", color=style.INK, label=name)
    axes.set(
        yscale="log", ylim=(0.5 / n, 1.5), xlabel="sampling noise t = |g - grad F|", ylabel="share of samples beyond t",
        title="the tail that Assumption 2.1 bounds",
    )  # fmt: skip
    axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.16), fontsize=9)


def _bias(axes: Any, bias: Sequence[Bias]) -> None:
    c = [row.clip for row in bias]
    whole = bias[0].gradient
    axes.plot(c, [row.bias / whole for row in bias], color=style.MIXED, label="bias / |grad F|")
    axes.plot(c, [row.clipped for row in bias], "-.", color=style.MIXED_25, label="share of samples clipped")
    axes.set(xscale="log", ylim=(0, 1.05), xlabel="clip c", title="bias of the clipped mean")

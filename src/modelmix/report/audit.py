"""The two worlds of an audit, as a plot."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from modelmix.report import style


def draw(without: NDArray[np.float64], with_canary: NDArray[np.float64], title: str, path: Path) -> list[Path]:
    """Draw histograms of the attacker's scores without and with the canary, as PNG and SVG."""
    with style.look():
        from matplotlib import pyplot

        figure, axes = pyplot.subplots(figsize=(6.4, 4.0), layout="constrained")
        both = np.concatenate([without, with_canary])
        low, high = np.quantile(both, [1e-4, 1 - 1e-4])
        bins = np.linspace(low, high if high > low else low + 1, 80)
        for scores, name in ((without, "without the canary"), (with_canary, "with the canary")):
            axes.hist(np.clip(scores, low, high), bins=bins.tolist(), alpha=0.6, density=True, label=name)
        axes.set(yscale="log", xlabel="log-likelihood ratio of the run", ylabel="density", title=title)
        axes.legend()
        return style.save(figure, path)

"""One look for every figure: quiet axes, colours that survive greyscale printing and colour blindness."""

from __future__ import annotations

from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from modelmix.errors import ModelMixError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from matplotlib.figure import Figure

INK = "#333333"
PLAIN, MIXED, MIXED_25, MIXED_100, TWIN = "#444444", "#0072B2", "#E69F00", "#009E73", "#CC79A7"

_STYLE: dict[Any, Any] = {
    "figure.dpi": 100,
    "savefig.dpi": 160,
    "font.size": 10,
    "axes.titlesize": 10.5,
    "axes.labelcolor": INK,
    "axes.edgecolor": "#888888",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.color": "#dddddd",
    "grid.linewidth": 0.6,
    "xtick.color": INK,
    "ytick.color": INK,
    "text.color": INK,
    "legend.frameon": False,
    "lines.linewidth": 1.8,
    "svg.fonttype": "none",
    "svg.hashsalt": "modelmix",
}


@contextmanager
def look() -> Iterator[None]:
    """The house style, without touching the user's settings or needing a screen."""
    import matplotlib

    matplotlib.use("Agg")
    with matplotlib.rc_context(_STYLE):
        yield


def save(figure: Figure, path: Path) -> list[Path]:
    """Writes PNG and SVG beside each other and returns both paths."""
    from matplotlib import pyplot

    written = [path.with_suffix(suffix) for suffix in (".png", ".svg")]
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        for target in written:
            figure.savefig(target, bbox_inches="tight", metadata={"Date": None} if target.suffix == ".svg" else None)
    except OSError as error:
        raise ModelMixError(f"cannot write {path}: {error.strerror}.") from None
    finally:
        pyplot.close(figure)
    return written

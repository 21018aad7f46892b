"""One look for every figure: quiet axes, colours that survive greyscale printing and colour blindness."""

from __future__ import annotations

import os
from contextlib import contextmanager
from importlib.util import find_spec
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


def require() -> None:
    """Refuse to draw where matplotlib is not installed."""
    if not _installed("matplotlib"):
        raise ModelMixError("plots need matplotlib: install it with pip install 'modelmix[report]'.")


def available() -> bool:
    """Return whether the page of a run can be made: it needs matplotlib and jinja2, the extra ``report``."""
    return _installed("matplotlib") and _installed("jinja2")


def _installed(package: str) -> bool:
    try:
        return find_spec(package) is not None
    except ValueError:  # taken out by hand
        return False


@contextmanager
def look() -> Iterator[None]:
    """Apply the house style within, without touching the user's settings or needing a screen."""
    require()
    import matplotlib

    matplotlib.use("Agg")
    with matplotlib.rc_context(_STYLE):
        yield


def prepare(path: Path) -> None:
    """Make the folder of a plot and refuse a name that cannot be drawn to, before anything is computed."""
    require()
    if path.suffix not in (".png", ".svg", ".pdf"):
        raise ModelMixError(f"cannot draw {path}: the name must end in .png, .svg or .pdf.")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ModelMixError(f"cannot write {path}: {error.strerror}.") from None
    if not os.access(path.parent, os.W_OK):
        raise ModelMixError(f"cannot write {path}: the folder is not writable.")


def save(figure: Figure, path: Path) -> list[Path]:
    """Write PNG and SVG beside each other, and PDF where the name asks for it; return the paths."""
    from matplotlib import pyplot

    prepare(path)
    written = [path.with_suffix(suffix) for suffix in dict.fromkeys((".png", ".svg", path.suffix))]
    undated: dict[str, dict[str, Any]] = {".png": {}, ".svg": {"Date": None}, ".pdf": {"CreationDate": None}}
    try:
        for target in written:
            figure.savefig(target, bbox_inches="tight", metadata=undated[target.suffix])
    except OSError as error:
        raise ModelMixError(f"cannot write {path}: {error.strerror}.") from None
    finally:
        pyplot.close(figure)
    return written

"""``modelmix-lab reproduce fig2``: training runs, so a file of its own."""

from __future__ import annotations

import math
import sys
from dataclasses import asdict
from pathlib import Path

from modelmix._checks import whole
from modelmix.cli import show
from modelmix.errors import ModelMixError
from modelmix_lab.experiments import fig2

DEFAULT = "fashion-mini"


def reproduce_fig2(
    out: Path,
    *,
    data: str | None = None,
    data_dir: Path | None = None,
    model: str | None = None,
    seeds: int | None = None,
    steps: int | None = None,
    device: str | None = None,
    json: bool = False,
) -> None:
    """Trains, draws and prints Figure 2 on one data set."""
    try:
        from modelmix.data import load
    except ModuleNotFoundError as error:
        raise ModelMixError(f"training needs {error.name}: install it with pip install 'modelmix[train]'.") from None
    from modelmix.report import style
    from modelmix_lab.report import figure2

    name = DEFAULT if data is None else data
    setup = fig2.setup_for(name, model, steps)
    count = whole("seeds", 3 if seeds is None else seeds, "the number of seeds", least=1)
    tail = "" if name == DEFAULT else f"-{Path(name).stem}"
    picture, numbers = out / f"fig2{tail}.png", out / f"fig2{tail}.json"
    style.prepare(picture)
    found = fig2.curves(
        load(name, data_dir, test_public=True), setup, range(1, count + 1), numbers, device=device, told=_tell
    )
    title = f"{name}, {setup.model}, q = {setup.sample_rate:g}, {count} seed{'s' if count > 1 else ''}"
    written = [str(path) for path in (*figure2.draw(found, title, picture), numbers)]
    if json:
        lines = [{**asdict(curve), "final": curve.final} for curve in found]
        print(show.as_json({"settings": asdict(setup), "data": name, "curves": lines, "files": written}))
        return
    rows = []
    for curve in found:
        middle, low, high = curve.final
        private = math.isfinite(curve.epsilon)
        rows.append(
            [("with noise: " if curve.arm.private else "without: ") + curve.arm.name, f"{100 * middle:.1f}",
             f"{100 * low:.1f} to {100 * high:.1f}", show.up(curve.epsilon, 2) if private else "-",
             show.up(curve.equal_variance_epsilon, 2) if private else "-"]
        )  # fmt: skip
    columns = ["", "accuracy, %", "of the seeds", "epsilon", "equal variance"]
    notes = [*fig2.HOW, f"written: {', '.join(written)}"]
    show.table(f"Figure 2: {title}, {setup.steps} steps, clip {setup.clip:g}", columns, rows, notes)


def _tell(run: str) -> None:
    print(f"modelmix-lab: training {run}", file=sys.stderr)

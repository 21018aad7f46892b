"""``modelmix reproduce``: the paper's figures with our numbers beside the printed ones."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from modelmix.cli import show
from modelmix.cli.data import DataDir
from modelmix.cli.options import Json
from modelmix.errors import ModelMixError


def reproduce(
    what: Annotated[str, typer.Argument(help="fig2 or fig3", metavar="WHAT")],
    data_set: Annotated[
        str | None,
        typer.Option("--data", help="fig2: cifar10, svhn, ...; left out, the embedded images.", show_default=False),
    ] = None,
    data_dir: DataDir = None,
    model: Annotated[str | None, typer.Option(help="fig2: another network.", show_default=False)] = None,
    seeds: Annotated[int | None, typer.Option(help="fig2: runs of every line; default 3.", show_default=False)] = None,
    steps: Annotated[int | None, typer.Option(help="fig2: fewer or more steps.", show_default=False)] = None,
    out: Annotated[Path, typer.Option(help="Folder for the figure and the numbers.")] = Path("results"),
    json: Json = False,
) -> None:
    """Recompute a figure of the paper and set our numbers beside the printed ones."""
    if what == "fig2":
        from modelmix.cli.fig2 import reproduce_fig2

        reproduce_fig2(out, data=data_set, data_dir=data_dir, model=model, seeds=seeds, steps=steps, json=json)
        return
    if what != "fig3":
        raise ModelMixError(f"{what!r} cannot be reproduced: choose fig2 or fig3.")
    if any(given is not None for given in (data_set, data_dir, model, seeds, steps)):
        raise ModelMixError("fig3 trains nothing: leave out --data, --data-dir, --model, --seeds and --steps.")
    from modelmix.experiments import fig3
    from modelmix.report import figure3

    points = fig3.points()
    written = figure3.draw(fig3.panels(), out / "fig3.png")
    data = {
        "how": fig3.HOW,
        "noise_multiplier": {f"{q:g}": fig3.noise_multiplier(q) for q in fig3.RATES},
        "points": [asdict(point) for point in points],
    }
    numbers = out / "fig3.json"
    numbers.write_text(show.as_json(data) + "\n", encoding="utf-8")
    written = [*written, numbers]
    if json:
        print(show.as_json({**data, "files": [str(path) for path in written]}))
        return
    rows = [
        [
            f"{p.sample_rate:g}", f"{p.tau:g}", str(p.p),
            "-" if p.paper is None else f"{p.paper:.1f}",
            f"{p.ours:.2f}",
            "-" if p.paper is None else f"{100 * (p.ours / p.paper - 1):+.1f} %",
            show.up(p.proved_classic, 2), show.up(p.proved, 2),
        ]
        for p in points
    ]  # fmt: skip
    columns = ["q", "tau/eta", "p", "paper", "ours", "off by", "proved, classic", "proved, improved"]
    show.table("Figure 3: epsilon at delta = 1e-05 after 5,000 steps", columns, rows, [
        *fig3.HOW, f"written: {', '.join(map(str, written))}",
    ])  # fmt: skip

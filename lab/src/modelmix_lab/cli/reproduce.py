"""``modelmix-lab reproduce``: the paper's figures and tables with our numbers beside the printed ones."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from modelmix.cli import show
from modelmix.cli.options import Chunk, Compiled, DataDir, Device, Engine, Json, Knobs, Precision
from modelmix.errors import ModelMixError
from modelmix_lab.cli.tables import Choice, print_recipe, run_table
from modelmix_lab.experiments.tables import KINDS, TABLES

_FIGURES = ("fig2", "fig3")
_TABLE, _FIG2, _REHEARSAL = "Runs of a table", "Runs of fig2", "Rehearsal (never shown as a result)"


def _option(names: str, text: str, panel: str = _TABLE) -> Any:
    return typer.Option(*names.split(","), help=text, rich_help_panel=panel)


def reproduce(
    what: Annotated[str, typer.Argument(help=f"{', '.join((*_FIGURES, *TABLES))}.", metavar="WHAT")],
    row: Annotated[list[str] | None, _option("--row", "Only this row; may be given several times.")] = None,
    kind: Annotated[
        list[str] | None, _option("--kind", f"Only this kind, of {', '.join(KINDS)}; may be given several times.")
    ] = None,
    seeds: Annotated[
        int | None, _option("--seeds", "How many runs of each, with seeds counted up; default 1, for fig2 3.")
    ] = None,
    first_seed: Annotated[int, _option("--first-seed", "The first of the seeds.")] = 1,
    data_set: Annotated[
        str | None, _option("--data", "cifar10, svhn, ...; left out, the embedded images.", _FIG2)
    ] = None,
    model: Annotated[str | None, _option("--model", "Another network.", _FIG2)] = None,
    data_dir: DataDir = None,
    out: Annotated[Path, typer.Option(help="Folder for figures, numbers and results.")] = Path("results"),
    steps: Annotated[int | None, _option("--steps", "So many steps instead of the row's.", _REHEARSAL)] = None,
    batch: Annotated[
        float | None, _option("--batch", "So many samples a step instead of the row's.", _REHEARSAL)
    ] = None,
    print_recipe_only: Annotated[
        bool, _option("--print-recipe", "Print the recipe of one run, as modelmix-lab train takes it, and stop.")
    ] = False,
    device: Device = None,
    engine: Engine = "auto",
    chunk: Chunk = None,
    precision: Precision = None,
    compiled: Compiled = None,
    json: Json = False,
) -> None:
    """Recompute a figure of the paper, or train the runs of a table, and set our numbers beside the printed ones.

    Runs of a table that are finished are skipped, and one that was interrupted goes on where it stopped: give the same
    command again. What another row has trained with the same recipe and seed is taken from there. modelmix-lab results
    shows the tables.

    \b
    modelmix-lab reproduce fig2
    modelmix-lab reproduce fig3
    modelmix-lab reproduce table2 --row cifar10-eps8 --kind paper --kind plain --seeds 3 --data-dir data
    modelmix-lab reproduce embedding --kind paper --data-dir data
    modelmix-lab reproduce table1 --steps 2                      (a rehearsal)
    modelmix-lab reproduce table2 --row cifar10-eps8 --kind paper --print-recipe > paper.toml
    """
    if what != "fig2" and (data_set or model):
        raise ModelMixError(f"--data and --model are for fig2: {what} says what it trains, if anything.")
    if what in TABLES:
        choice = Choice(row or (), kind or (), 1 if seeds is None else seeds, first_seed, steps, batch)
        if print_recipe_only:
            print_recipe(what, choice)
        else:
            run_table(what, choice, out, data_dir, Knobs(device, engine, precision, compiled, chunk), json)
        return
    if what not in _FIGURES:
        raise ModelMixError(f"{what!r} cannot be reproduced: choose one of {', '.join((*_FIGURES, *TABLES))}.")
    if what == "fig3" and (row or kind or steps or seeds or batch or print_recipe_only):
        raise ModelMixError(f"{what} is a figure and has no runs: leave out --row, --kind, --steps and the like.")
    if row or kind or batch or print_recipe_only:
        raise ModelMixError("fig2 has no rows: leave out --row, --kind, --batch and --print-recipe.")
    if what == "fig2":
        from modelmix_lab.cli.fig2 import reproduce_fig2

        reproduce_fig2(
            out, data=data_set, data_dir=data_dir, model=model, seeds=seeds, steps=steps, device=device, json=json
        )
        return
    _fig3(out, json)


def _fig3(out: Path, json: bool) -> None:
    from modelmix_lab.experiments import fig3
    from modelmix_lab.report import figure3

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
    columns = ["q", "tau/eta", "p", "paper", "ours", "off by", "proved, classic", "proved, best"]
    show.table("Figure 3: epsilon at delta = 1e-05 after 5,000 steps", columns, rows, [
        *fig3.HOW, f"written: {', '.join(map(str, written))}",
    ])  # fmt: skip

"""``modelmix-lab results``: what was reproduced, beside what the paper prints."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.text import Text

from modelmix._files import write_atomically
from modelmix.cli import show
from modelmix.cli.options import Json
from modelmix_lab.experiments import tables
from modelmix_lab.experiments.results import read
from modelmix_lab.experiments.tables import KINDS, Row, Table
from modelmix_lab.report import results_page
from modelmix_lab.report.summary import Cell, Summary, summarise

_WIDE = 150  # columns of a terminal
_PLACES = (Path("docs") / "results", Path("results"))


def results(
    folders: Annotated[
        list[Path] | None,
        typer.Argument(help="Folders of results; default: docs/results, or results.", metavar="[DIR]..."),
    ] = None,
    markdown: Annotated[Path | None, typer.Option(help="Write the page with all tables to this file.")] = None,
    figure: Annotated[
        Path | None, typer.Option(help="Draw accuracy against epsilon to this file, as PNG and SVG.")
    ] = None,
    json: Json = False,
) -> None:
    """Show Tables 1, 2 and 3, and Section 5.3, with our runs beside the printed numbers.

    A cell is the median over seeds (lowest-highest, number of runs); green reaches the printed number, an arrow does
    not, a dash has not been run.

    \b
    modelmix-lab results
    modelmix-lab results results --markdown results.md --figure accuracy.png
    """
    places = folders or [folder for folder in _PLACES if folder.is_dir()][:1]
    results = read(places)
    if not results:
        looked = ", ".join(map(str, places or _PLACES))
        print(f"modelmix-lab: no results in {looked}: modelmix-lab reproduce writes TABLE/ROW/*.json.", file=sys.stderr)
    found = summarise(results)
    written = []
    if figure is not None:
        from modelmix_lab.report import accuracy

        written += accuracy.draw(found, figure)
    if markdown is not None:
        write_atomically(markdown, results_page.render(found, markdown.parent, figure))
        written.append(markdown)
    for result in found.outdated:
        print(f"modelmix-lab: left out {result.path}: its recipe is no longer that of the row.", file=sys.stderr)
    if json:
        print(show.as_json({**_data(found), "files": [str(path) for path in written]}))
        return
    spread = Console().width >= _WIDE
    for name in tables.TABLES:
        _show(tables.table(name), found, spread)
    print("\n" + "\n".join(f"{kind}: {text}" for kind, text in KINDS.items()))
    if not spread:
        print(f"Medians over seeds; {_WIDE} columns or more show lowest, highest and number of runs as well.")
    if written:
        print(f"written: {', '.join(map(str, written))}")


def _show(table: Table, found: Summary, spread: bool) -> None:
    def cell(row: Row, kind: str) -> str | Text:
        one = found.cell(row, kind)
        text = results_page.cell_text(one)
        text = text if spread else text.split(" ", 1)[0]
        if one is None:
            return text
        if one.reaches is None:
            return text
        return show.bold(text, "green") if one.reaches else f"{text}{results_page.BELOW}"

    columns = ["row", "printed", "plain printed", *KINDS]
    rows = [[row.name, *results_page.printed(row), *(cell(row, kind) for kind in KINDS)] for row in table.rows]
    notes = [*results_page.notes(table), *results_page.lost(table, found), *_efforts(table, found)]
    show.table(f"\n{table.title}", columns, rows, notes)


def _efforts(table: Table, found: Summary) -> list[str]:
    """What the runs of every kind took, in one line."""
    out = []
    for kind in KINDS:
        cells = [cell for row in table.rows if (cell := found.cell(row, kind)) is not None]
        if cells:
            steps = _range([result.steps for cell in cells for result in cell.results])
            seconds = _range([round(cell.seconds) for cell in cells])
            machines = " / ".join(dict.fromkeys(cell.hardware for cell in cells))
            out.append(f"{kind}: {steps} steps, {seconds} s a run, {machines}")
    return out


def _range(values: list[int]) -> str:
    low, high = min(values), max(values)
    return f"{low:,}" if low == high else f"{low:,} to {high:,}"


def _data(found: Summary) -> dict[str, Any]:
    return {
        "tables": {name: [_row(row, found) for row in tables.rows(name)] for name in tables.TABLES},
        "outdated": [str(result.path) for result in found.outdated],
    }


def _row(row: Row, found: Summary) -> dict[str, Any]:
    cells = {kind: cell for kind in row.kinds if (cell := found.cell(row, kind)) is not None}
    return {
        "row": row.name,
        "epsilon": row.epsilon,
        "paper_accuracy": row.accuracy,
        "plain_epsilon": row.plain_epsilon,
        "paper_plain_accuracy": row.plain_accuracy,
        "runs": {kind: _numbers(cell) for kind, cell in cells.items()},
    }


def _numbers(cell: Cell) -> dict[str, Any]:
    return {
        "median": cell.middle.reported,
        "lowest": cell.spread[0],
        "highest": cell.spread[1],
        "seeds": [result.seed for result in cell.results],
        "reaches_paper": cell.reaches,
        "proved_epsilon": cell.epsilon,
        "too_expensive": cell.too_expensive,
        "seconds": cell.seconds,
        "hardware": cell.hardware,
        "files": [str(result.path) for result in cell.results],
    }

"""The page of all results: the paper's tables with our runs beside the printed numbers, as Markdown."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Sequence
from pathlib import Path

from modelmix._format import up
from modelmix_lab.experiments import tables
from modelmix_lab.experiments.tables import KINDS, Row, Table
from modelmix_lab.report.summary import Cell, Summary

HEADINGS = {
    "released": "released, not proved",
    "paper": "Algorithm 1",
    "plain": "plain DP-SGD",
    "gaussian": "Gaussian instead",
    "best": "best proved",
}
"""kind -> heading of its column."""

_NO_PRIVACY = 1e6  # an epsilon beyond which it says nothing

BELOW = "↓"
"""Stands behind what does not reach the printed number."""

_INTRODUCTION = """# Results

Test accuracy in per cent beside the numbers printed in the paper. This page is written by `modelmix-lab results`; do
not edit it. To run what is missing, and to write it again:

    modelmix-lab reproduce table2 --seeds 5 --out docs/results   # and table1, table3, transfer, embedding
    modelmix-lab results --markdown docs/results.md --figure docs/figures/accuracy.png

A cell is the median over seeds (of an even number the worse of the two in the middle) with a link to the file of that
run; in brackets the lowest, the highest and the number of runs, where there are several. **Bold** reaches the number
printed for the same epsilon, {below} does not, and a dash is a run that was not made or a number that was not printed.
The test set was read once a run, after the last step; a run that keeps an average of its states reports the average,
any other the last state. Every epsilon is recomputed from the ledger in the file, at delta = 1e-5, and named in the
cell if it is above that of the row. Seeds make runs repeatable, which is right for public data and for nothing else.
Rows that ask for the same training may share one run: the file of one then names the other's as `same_run_as`.

| column | what |
| --- | --- |
{kinds}
"""


def render(summary: Summary, folder: Path, figure: Path | None = None) -> str:
    """Render the page as text.

    Args:
        folder: where the page will lie; links are relative to it.
        figure: of accuracy against epsilon, to be shown.
    """
    kinds = "\n".join(f"| {HEADINGS[kind]} | {text} |" for kind, text in KINDS.items())
    parts = [_INTRODUCTION.format(below=BELOW, kinds=kinds)]
    if figure is not None:
        parts.append(f"![test accuracy against epsilon]({_link(figure.with_suffix('.svg'), folder)})\n")
    for name in tables.TABLES:
        parts += _table(tables.table(name), summary, folder)
    parts += _runs(summary, folder)
    return "\n".join(parts)


def cell_text(cell: Cell | None) -> str:
    """Format a cell without links and marks: median (lowest-highest, runs); one run has no spread."""
    if cell is None:
        return "-"
    low, high = cell.spread
    dear = f", epsilon {up(cell.epsilon or 0.0, 2)}" if cell.too_expensive else ""
    runs = f"{low:.1f}-{high:.1f}, {len(cell.results)}" if len(cell.results) > 1 else "1 run"
    return f"{cell.middle.reported:.1f} ({runs}{dear})"


def printed(row: Row) -> tuple[str, str]:
    """Format what the paper prints for its method and for plain DP-SGD; with epsilon where the two differ in it."""
    if row.plain_accuracy is None:
        return f"{row.accuracy:.1f}", "-"
    if row.epsilon == row.plain_epsilon:
        return f"{row.accuracy:.1f}", f"{row.plain_accuracy:.1f}"
    return f"{row.accuracy:.1f} at {row.epsilon:g}", f"{row.plain_accuracy:.1f} at {row.plain_epsilon:g}"


def notes(table: Table) -> list[str]:
    """Collect what a reader of the table must know."""
    out = [table.note] if table.note else []
    out += [f"No {kind} runs: {why}." for kind, why in table.absent.items()]
    for text in dict.fromkeys(row.note for row in table.rows if row.note):
        out.append(f"{', '.join(row.name for row in table.rows if row.note == text)}: {text}")
    return out


def lost(table: Table, summary: Summary) -> list[str]:
    """Compute what privacy costs beside the same features without it, in points of the medians; where both were run."""
    out = []
    free = {row.data: summary.cell(row, "best") for row in table.rows if math.isinf(row.epsilon)}
    for row in table.rows:
        without = free.get(row.data)
        cells = [cell for kind in row.kinds if (cell := summary.cell(row, kind)) is not None]
        if without is None or math.isinf(row.epsilon) or not cells:
            continue
        best = without.middle.reported
        points = ", ".join(f"{HEADINGS[cell.kind]} {best - cell.middle.reported:.2f}" for cell in cells)
        out.append(f"{row.name}: points below {best:.2f}, the best run without privacy: {points}.")
    return out


def _table(table: Table, summary: Summary, folder: Path) -> Iterator[str]:
    yield f"## {table.title}\n"
    header = ["row", "epsilon", "paper", "paper's plain", *(HEADINGS[kind] for kind in KINDS)]
    rows = [
        [row.name, f"{row.epsilon:g}", *printed(row), *(_marked(summary.cell(row, kind), folder) for kind in KINDS)]
        for row in table.rows
    ]
    yield _grid(header, rows)
    yield from (f"{note}\n" for note in (*notes(table), *lost(table, summary)))


def _marked(cell: Cell | None, folder: Path) -> str:
    if cell is None:
        return "-"
    number, rest = cell_text(cell).split(" ", 1)
    number = f"[{number}]({_link(cell.middle.path, folder)})"
    if cell.reaches is None:
        return f"{number} {rest}"
    return f"**{number}** {rest}" if cell.reaches else f"{number} {BELOW} {rest}"


def _runs(summary: Summary, folder: Path) -> Iterator[str]:
    yield "## Every run\n"
    if not summary.cells:
        yield "No runs yet.\n"
        return
    header = ["row", "kind", "accuracy, seed by seed", "epsilon", "steps", "seconds a run", "data", "hardware"]
    rows = []
    for table in tables.TABLES:
        for row in tables.rows(table):
            cells = [cell for cell in (summary.cell(row, kind) for kind in row.kinds) if cell is not None]
            rows += [[f"{table} {row.name}", cell.kind, *_details(cell, folder)] for cell in cells]
    yield _grid(header, rows)


def _details(cell: Cell, folder: Path) -> list[str]:
    links = [f"[{result.reported:.2f}]({_link(result.path, folder)})" for result in cell.results]
    epsilon = "not proved" if cell.epsilon is None else _spent(cell.epsilon)
    data = " / ".join(sorted({str(result.data["name"]) for result in cell.results}))
    return [", ".join(links), epsilon, f"{cell.middle.steps:,}", f"{cell.seconds:.0f}", data, cell.hardware]


def _spent(epsilon: float) -> str:
    return "no privacy" if epsilon > _NO_PRIVACY else up(epsilon)


def _grid(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def _link(path: Path | None, folder: Path) -> str:
    assert path is not None
    return Path(os.path.relpath(path, folder)).as_posix()

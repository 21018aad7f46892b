"""How numbers and tables look. An epsilon is always rounded up."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from decimal import Decimal
from typing import Any, Literal

from rich.console import Console
from rich.table import Table
from rich.text import Text

from modelmix._format import up, up_digits
from modelmix.accounting.embedding import EmbeddingMechanism
from modelmix.accounting.ledger import Phase
from modelmix.accounting.mechanism import Mechanism

__all__ = ["as_json", "bold", "describe", "phase_line", "rounded", "table", "up", "up_digits"]


def rounded(value: float, direction: str, digits: int = 7) -> float:
    """``value`` to some significant digits, in the direction that is safe for what it is."""
    exact = Decimal(value)
    return float(exact.quantize(Decimal(1).scaleb(exact.adjusted() - digits + 1), direction)) if value else 0.0


def as_json(data: Any) -> str:
    """Strict JSON; an infinity, which JSON lacks, becomes the string "inf"."""

    def clean(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: clean(entry) for key, entry in value.items()}
        if isinstance(value, (list, tuple)):
            return [clean(entry) for entry in value]
        if isinstance(value, float) and not math.isfinite(value):
            return None if math.isnan(value) else "inf"
        return value

    return json.dumps(clean(data), indent=1, allow_nan=False)


def describe(mechanism: Mechanism) -> str:
    """A mechanism in one line."""
    parts = [f"{mechanism.law}, z = {mechanism.noise_multiplier:.7g}", f"q = {mechanism.sample_rate:.7g}"]
    if mechanism.mixed:
        parts.insert(1, f"omega = {mechanism.mixing_width:.7g}")
    if mechanism.p > 1:
        parts.append(f"p = {mechanism.p}")
    if mechanism.dimension is not None:
        parts.append(f"d = {mechanism.dimension}")
    if isinstance(mechanism, EmbeddingMechanism):
        parts.append(f"embedded, c0/c1 = {mechanism.clip_ratio:.7g}")
    return ", ".join(parts)


def phase_line(phase: Phase) -> str:
    """A phase in one line, for the notes under a table."""
    return f"phase: {phase.steps:,} steps of {describe(phase.mechanism)}"


def bold(text: str, colour: str = "") -> Text:
    """A cell that stands out."""
    return Text(text, style=f"bold {colour}".strip())


def table(title: str, columns: Sequence[str], rows: Sequence[Sequence[str | Text]], notes: Sequence[str] = ()) -> None:
    """A table with notes under it; columns after the first are numbers unless they start with a space.

    Texts are printed as they are: names come from files, and markup in them could hide what is said about them.
    """
    console = Console()
    console.print(Text(title, style="bold"), soft_wrap=True)
    out = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    names = not any(" " in row[0] for row in rows)  # a name that is cut off names nothing
    for i, column in enumerate(columns):
        justify: Literal["left", "right"] = "left" if i == 0 or column.startswith(" ") else "right"
        out.add_column(Text(column.strip()), justify=justify, no_wrap=names and i == 0)
    for row in rows:
        out.add_row(*(Text(cell) if isinstance(cell, str) else cell for cell in row))
    console.print(out, highlight=False)
    for note in notes:
        console.print(Text(note, style="dim"), soft_wrap=True)

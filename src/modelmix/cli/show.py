"""How numbers and tables look. An epsilon is always rounded up."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

from modelmix.privacy.mechanism import Mechanism

GUARANTEE = (
    "Holds when one sample is added or removed, for Poisson sampling, against one who sees every released state."
)


def up(value: float, decimals: int = 4) -> str:
    """A privacy number, rounded up in its last digit."""
    if math.isnan(value):
        return "-"
    if math.isinf(value):
        return "inf"
    if value >= 1e6:
        exponent = math.floor(math.log10(value))
        return f"{math.ceil(value / 10 ** (exponent - 5)) / 10**5:.5f}e{exponent}"
    return f"{math.ceil(value * 10**decimals - 1e-9) / 10**decimals:.{decimals}f}"


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
    parts = [f"{mechanism.law}, z = {mechanism.noise_multiplier:.6g}", f"q = {mechanism.sample_rate:.6g}"]
    if mechanism.mixed:
        parts.insert(1, f"omega = {mechanism.mixing_width:.6g}")
    if mechanism.p > 1:
        parts.append(f"p = {mechanism.p}")
    if mechanism.dimension is not None:
        parts.append(f"d = {mechanism.dimension}")
    return ", ".join(parts)


def table(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]], notes: Sequence[str] = ()) -> None:
    """A table with notes under it; columns after the first are numbers unless they start with a space."""
    console = Console()
    console.print(title, style="bold", highlight=False, soft_wrap=True)
    out = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for i, column in enumerate(columns):
        out.add_column(column.strip(), justify="left" if i == 0 or column.startswith(" ") else "right")
    for row in rows:
        out.add_row(*row)
    console.print(out)
    for note in notes:
        console.print(note, style="dim", highlight=False, soft_wrap=True)

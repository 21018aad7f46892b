"""The files of a run folder, read and checked. What is broken is refused in one line; what is missing stays missing."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any

from modelmix.accounting.ledger import Ledger, read_ledger
from modelmix.accounting.runs import Claim, claim_of, read_config, read_object
from modelmix.errors import ModelMixError
from modelmix.runs.formatting import number


@dataclass(frozen=True)
class Run:
    """One run: how it was set up, what it cost, how well it did, and what the data holder saw on the way."""

    config: dict[str, Any]
    ledger: Ledger
    rows: list[dict[str, Any]] = field(default_factory=list)
    diagnostics: dict[str, Any] | None = None

    @property
    def name(self) -> str:
        return str(self.config.get("name") or "a run without a name")

    @property
    def delta(self) -> float:
        return float(self.config["delta"])

    @property
    def settings(self) -> dict[str, Any]:
        settings: dict[str, Any] = self.config["settings"]
        return settings

    @property
    def recipe(self) -> dict[str, Any]:
        """The recipe of the run; empty if it had none."""
        found = self.config.get("recipe")
        return found if isinstance(found, dict) else {}

    @cached_property
    def claim(self) -> Claim:
        """What the run counts as: all that it planned, however early it stopped."""
        return claim_of(self.config, self.ledger)

    @property
    def test_public(self) -> bool:
        """Whether the test set was declared public."""
        return self.config.get("test_public") is True

    @property
    def planned(self) -> Ledger:
        """Everything that counts."""
        return self.claim.ledger

    @property
    def unproved(self) -> tuple[str, ...]:
        """Why no epsilon is proved; empty where one is."""
        return self.ledger.unproved

    def series(self, key: str) -> list[tuple[float, float]]:
        """Return (step, value) of every metrics row that has both."""
        pairs = [(number(row.get("step")), number(row.get(key))) for row in self.rows]
        return [(step, value) for step, value in pairs if step is not None and value is not None]


def read_run(folder: Path) -> Run:
    """Read the run in ``folder``. Config and ledger must be there; metrics and diagnostics may be missing."""
    if not folder.is_dir():
        raise ModelMixError(f"cannot read {folder}: there is no such folder; give the folder of a run.")
    config = read_config(folder / "config.json")
    ledger = read_ledger(folder / "ledger.json")
    metrics, diagnostics = folder / "metrics.json", folder / "diagnostics.json"
    return Run(
        config,
        ledger,
        _rows(metrics) if metrics.exists() else [],
        _diagnostics(diagnostics) if diagnostics.exists() else None,
    )


def _rows(path: Path) -> list[dict[str, Any]]:
    rows = read_object(path).get("rows", [])
    if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
        raise ModelMixError(f'{path}: "rows" must be a list of objects.')
    return rows


def _diagnostics(path: Path) -> dict[str, Any]:
    out = read_object(path)
    histogram = out.get("norm_histogram")
    if histogram is not None and not _is_histogram(histogram):
        raise ModelMixError(
            f'{path}: "norm_histogram" must have rising positive "edges", and "counts", one fewer, of 0 or more.'
        )
    return out


def _is_histogram(value: object) -> bool:
    if not isinstance(value, dict):
        return False
    lists = [value.get(key) for key in ("edges", "counts")]
    if not all(isinstance(entries, list) for entries in lists):
        return False
    edges, counts = ([number(entry) for entry in entries] for entries in lists)  # type: ignore[union-attr]
    if None in edges or None in counts or len(edges) != len(counts) + 1 or not counts:
        return False
    rising = all(a < b for a, b in pairwise(edges))  # type: ignore[operator]
    return rising and edges[0] > 0 and min(counts) >= 0  # type: ignore[operator, type-var]

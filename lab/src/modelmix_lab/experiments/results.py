"""The result of one run as a file: everything needed to print it, to check its epsilon and to run it again."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from modelmix._files import write_atomically
from modelmix.accounting.guarantee import By, epsilon, guarantee
from modelmix.accounting.ledger import Ledger
from modelmix.errors import ModelMixError
from modelmix_lab.experiments.tables import KINDS, TABLES

SCHEMA, VERSION = "modelmix-result", 2
_BY: Mapping[By, str] = {"renyi": "Renyi, improved conversion", "classic": "Renyi, classic conversion"}
_LOSSES = {"PLD": "privacy-loss distribution", "PLD cone": "distribution of losses, cone function"}

_SECTIONS = {
    "table": str,
    "row": str,
    "kind": str,
    "seed": int,
    "rehearsal": bool,
    "recipe": dict,
    "data": dict,
    "accuracy": dict,
    "epsilon": dict,
    "ledger": dict,
    "steps": int,
    "seconds": dict,
    "hardware": str,
    "performance": dict,
    "versions": dict,
    "date": str,
}
_OPTIONAL = {"same_run_as": str}


@dataclass(frozen=True)
class Result:
    """One finished run.

    Args:
        table, row, kind, seed: which run of the paper's tables it is.
        rehearsal: cut short to try things out; never shown as a result.
        recipe: complete, as ``Recipe.from_mapping`` takes it.
        data: name and sizes of what it was trained and tested on.
        accuracy: on the test set, 0 to 1, of the "last" state and of the "average" of states where one was kept.
            "reported" names the one that counts: the average if the recipe keeps one. It is never chosen by accuracy.
        epsilon: see ``account``.
        ledger: what was spent, as in ``ledger.json``.
        seconds: "training": the steps and checkpoints; "total": with loading and the test.
        same_run_as: the file, within the folder of results, of the row whose training this is; None if it is its own.
    """

    table: str
    row: str
    kind: str
    seed: int
    rehearsal: bool
    recipe: Mapping[str, Any]
    data: Mapping[str, Any]
    accuracy: Mapping[str, Any]
    epsilon: Mapping[str, Any]
    ledger: Mapping[str, Any]
    steps: int
    seconds: Mapping[str, float]
    hardware: str
    performance: Mapping[str, Any]
    versions: Mapping[str, str]
    date: str
    same_run_as: str | None = None
    path: Path | None = field(default=None, compare=False)

    @property
    def reported(self) -> float:
        """The test accuracy that counts, in per cent."""
        return 100 * float(self.accuracy[self.accuracy["reported"]])

    def proved_epsilon(self) -> float | None:
        """Return the epsilon that is proved, recomputed from the ledger; None where no proof covers the run."""
        ledger = Ledger.from_json(json.dumps(self.ledger))
        return None if ledger.unproved else epsilon(ledger, float(self.recipe["privacy"].get("delta", 1e-5)))

    def save(self, path: Path) -> None:
        """Written whole or not at all."""
        left_out = {"path"} | {name for name in _OPTIONAL if getattr(self, name) is None}
        body = {name: value for name, value in asdict(self).items() if name not in left_out}
        write_atomically(path, json.dumps({"schema": SCHEMA, "version": VERSION, **body}, indent=1) + "\n")

    @classmethod
    def load(cls, path: Path) -> Result:
        """Refuses in one line what this program did not write."""
        try:
            found = json.loads(path.read_text(encoding="utf-8"))
        except OSError as error:
            raise ModelMixError(f"cannot read {path}: {error.strerror}.") from None
        except (ValueError, RecursionError):
            raise ModelMixError(f"{path} is not whole JSON: it was cut off or edited; restore it.") from None
        if not isinstance(found, dict) or found.pop("schema", None) != SCHEMA:
            raise ModelMixError(f"{path} is not the result of a run: move it away.")
        if (version := found.pop("version", None)) != VERSION:
            raise ModelMixError(
                f"{path} is of version {version!r} and this program reads version {VERSION}: use the program that "
                "wrote it, or move it away."
            )
        sections = _SECTIONS | {name: kind for name, kind in _OPTIONAL.items() if name in found}
        odd = [name for name, kind in sections.items() if type(found.get(name)) is not kind]
        odd += [name for name in found if name not in sections]
        if odd:
            raise ModelMixError(f"{path} was edited: {', '.join(odd)} cannot be right; restore it.")
        result = cls(**found, path=path)
        try:
            ledger = Ledger.from_json(json.dumps(result.ledger))
            known = result.table in TABLES and result.kind in KINDS and 0 <= result.reported <= 100
            # What was released before training, for private normalisation, is in the ledger as well.
            taken = result.recipe["privacy"]["steps"] == result.steps <= ledger.steps
            numbers = isinstance(result.accuracy[result.accuracy["reported"]], float) and result.data["train"] > 0
            timed = all(float(result.seconds[name]) >= 0 for name in ("training", "total"))
            if not (known and taken and numbers and timed):
                raise ValueError
        except ModelMixError as error:
            raise ModelMixError(f"{path}: {error}") from None
        except (KeyError, TypeError, ValueError, OverflowError):
            raise ModelMixError(f"{path} was edited: its numbers cannot be right; restore it.") from None
        return result


def place(table: str, row: str, kind: str, seed: int) -> Path:
    """Where the result of a run lies within a folder of results."""
    return Path(table) / row / f"{kind}-{seed}.json"


def read(folders: Iterable[Path]) -> list[Result]:
    """All results in some folders, ordered by their names. Rehearsals are elsewhere and none of them."""
    found = []
    for folder in folders:
        if not os.path.isdir(folder):  # also False for a name that no disk takes
            raise ModelMixError(f"{folder} is not a folder of results: give one that modelmix-lab reproduce wrote.")
        found += _require_twins(folder, [Result.load(path) for path in _files(folder)])
    return [result for result in found if not result.rehearsal]


def _files(folder: Path) -> list[Path]:
    """Results in a folder by their names; what cannot be looked into is no empty folder."""
    try:
        tables = [folder / table for table in TABLES if (folder / table).is_dir()]
        rows = [row for table in tables for row in sorted(table.iterdir()) if row.is_dir()]
        return [path for row in rows for path in sorted(row.iterdir()) if path.suffix == ".json"]
    except OSError as error:
        raise ModelMixError(f"cannot read {error.filename}: {error.strerror}.") from None


def _require_twins(folder: Path, results: list[Result]) -> list[Result]:
    """Files that name another as the same run must say the same of it, if that one is there."""
    places = {result.path: result for result in results}
    for result in results:
        origin = None if result.same_run_as is None else places.get(folder / result.same_run_as)
        if origin is not None and (origin.accuracy, origin.ledger) != (result.accuracy, result.ledger):
            raise ModelMixError(
                f"{result.path} says that it is the same run as {origin.path}, and their numbers differ: restore both."
            )
    return results


def account(ledger: Ledger, delta: float) -> dict[str, Any]:
    """What is known of a run's epsilon, and by which conversions.

    For an honest run the smallest proved epsilon; for one that broke a rule of the proof what it would claim, under
    that name, by its authors' conversion.
    """
    if ledger.unproved:
        classic = epsilon(replace(ledger, unproved=()), delta, by="classic")
        return {"status": "not proved", "delta": delta, "claimed": classic, "by": _BY["classic"],
                "broken": list(ledger.unproved)}  # fmt: skip
    found = {name: epsilon(ledger, delta, by=by) for by, name in _BY.items()}
    best = guarantee(ledger, delta)
    by = _LOSSES.get(best.accountant) or min(found, key=lambda name: found[name])
    return {"status": "proved", "delta": delta, "value": best.epsilon, "by": by, "all": {**found, by: best.epsilon}}

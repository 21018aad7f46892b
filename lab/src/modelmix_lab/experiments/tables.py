"""The paper's results as data: what every row prints, and how each kind of run of it is trained.

Beside Tables 1, 2 and 3 there are the numbers of Section 5.3, which the paper prints in its text.

A row is a file ``recipes/TABLE/ROW.toml``: the printed numbers, and one section for every kind of run. A section holds
the tables of a recipe; ``extends`` names files of ``recipes/base``, of which later ones go over earlier ones and the
section over all. Without a noise multiplier the noise is calibrated to the row's epsilon.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from modelmix.config.recipe import Recipe
from modelmix.config.tables import nearest, read_toml
from modelmix.errors import ModelMixError

RECIPES = Path(__file__).parent / "recipes"
TABLES = ("table1", "table2", "table3", "transfer", "embedding")
"""The paper's tables, and what stands in the text of its Section 5.3."""

KINDS = {
    "released": "the authors' configuration; its epsilon is claimed, not proved",
    "paper": "Algorithm 1 as printed, with the paper's settings",
    "plain": "plain DP-SGD, with the paper's settings for it",
    "gaussian": "Algorithm 1 with the mixing replaced by Gaussian noise of the same epsilon",
    "best": "the strongest proved run, by what was tried on held-out training images",
}
"""The kinds of runs, in the order of the columns."""

_ABOUT = "table"  # recipes/TABLE/table.toml: what holds for all rows


@dataclass(frozen=True)
class Table:
    """One table of the paper.

    Args:
        name: one of ``TABLES``.
        title: its number and subject.
        network: what is trained.
        absent: kind -> why this table has no run of it.
        rows: in the order of the paper.
        note: what a reader of the table must know.
    """

    name: str
    title: str
    network: str
    absent: Mapping[str, str]
    rows: tuple[Row, ...]
    note: str = ""


@dataclass(frozen=True)
class Row:
    """One printed number and the runs that stand beside it. Accuracies are in per cent.

    Args:
        table: the name of its table.
        name: the name of its file.
        data: the data set, in words.
        epsilon: at which the paper prints ``accuracy``, and of every run but plain ones; infinite without privacy.
        accuracy: printed for the paper's method.
        plain_accuracy: printed for plain DP-SGD; Table 1 quotes Tramer and Boneh. None where nothing is printed.
        plain_epsilon: at which the paper prints ``plain_accuracy``, and of plain runs.
        sections: kind -> what its recipe says.
        note: what a reader of the row must know.
    """

    table: str
    name: str
    data: str
    epsilon: float
    accuracy: float
    plain_accuracy: float | None
    plain_epsilon: float
    sections: Mapping[str, Mapping[str, Any]] = field(repr=False)
    note: str = ""

    @property
    def kinds(self) -> tuple[str, ...]:
        return tuple(kind for kind in KINDS if kind in self.sections)

    def target(self, kind: str) -> float:
        """The epsilon of a kind of run."""
        return self.plain_epsilon if kind == "plain" else self.epsilon

    def printed(self, kind: str) -> float | None:
        """The paper's accuracy that a kind of run is compared with, if there is one."""
        return self.plain_accuracy if kind == "plain" else self.accuracy

    def recipe(self, kind: str, seed: int | None = None) -> Recipe:
        """The recipe of one run."""
        if kind not in KINDS:
            raise ModelMixError(f"there is no kind {kind!r}: {nearest(kind, KINDS)}")
        if kind not in self.sections:
            why = _table(RECIPES, self.table).absent.get(kind, f"the row has {', '.join(self.kinds)}")
            raise ModelMixError(f"{self.table}, {self.name} has no {kind} run: {why}.")
        found = _extended(self.sections[kind])
        if "noise_multiplier" not in found.setdefault("privacy", {}):
            found["privacy"]["epsilon"] = self.target(kind)
        found.setdefault("run", {}).update(name=f"{self.table}/{self.name}/{kind}", seed=seed)
        return Recipe.from_mapping(found)


def table(name: str) -> Table:
    """A table by its name."""
    if name not in TABLES:
        raise ModelMixError(f"there is no {name!r}: {nearest(name, TABLES)}")
    return _table(RECIPES, name)


def rows(name: str) -> tuple[Row, ...]:
    """The rows of a table, in the order of the paper."""
    return table(name).rows


def row(name: str, wanted: str) -> Row:
    """A row of a table by its name."""
    found = {row.name: row for row in rows(name)}
    if wanted not in found:
        raise ModelMixError(f"{name} has no row {wanted!r}: {nearest(wanted, found)}")
    return found[wanted]


@functools.lru_cache(maxsize=8)
def _table(root: Path, name: str) -> Table:
    folder = root / name
    about = _checked(folder / f"{_ABOUT}.toml", {"title": str, "network": str}, {"absent": dict, "note": str})
    found = [_row(name, path) for path in folder.glob("*.toml") if path.stem != _ABOUT]
    order = sorted(found, key=lambda row: (row.data, row.epsilon))
    return Table(name, rows=tuple(order), **{"absent": {}, **about})


def _row(table: str, path: Path) -> Row:
    needed = {"data": str, "epsilon": float, "accuracy": float}
    numbers = {"plain_accuracy": float, "plain_epsilon": float}
    found = _checked(path, needed, {**numbers, "note": str, **dict.fromkeys(KINDS, dict)})
    sections = {kind: found.pop(kind) for kind in KINDS if kind in found}
    defaults = {"plain_accuracy": None, "plain_epsilon": found["epsilon"]}
    return Row(table, path.stem, **{**defaults, **found}, sections=sections)


def _checked(path: Path, needed: Mapping[str, type], allowed: Mapping[str, type]) -> dict[str, Any]:
    """The content of a file that has all of ``needed``, maybe some of ``allowed``, and nothing else."""
    found = read_toml(path)
    kinds = {**needed, **allowed}
    for name, value in found.items():
        if name not in kinds:
            raise ModelMixError(f"{path} has an unknown {name!r}: {nearest(name, kinds)}")
        if not isinstance(value, kinds[name]):
            raise ModelMixError(f"{path}: {name} = {value!r} is not of the right kind.")
    if missing := [name for name in needed if name not in found]:
        raise ModelMixError(f"{path} does not say {', '.join(missing)}.")
    return found


def _extended(section: Mapping[str, Any], through: tuple[str, ...] = ()) -> dict[str, Any]:
    """A section with everything it extends, table by table, and without the word."""
    names = section.get("extends", [])
    out: dict[str, Any] = {}
    for name in [names] if isinstance(names, str) else names:
        if name in through:
            raise ModelMixError(f"recipes extend each other in a circle: {', '.join((*through, name))}.")
        _lay_over(out, _extended(read_toml(RECIPES / "base" / f"{name}.toml"), (*through, name)))
    return _lay_over(out, {name: value for name, value in section.items() if name != "extends"})


def _lay_over(tables: dict[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    for name, values in over.items():
        tables[name] = {**tables.get(name, {}), **values} if isinstance(values, Mapping) else values
    return tables

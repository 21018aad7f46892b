"""Many results in few numbers: for every row and kind the median over seeds, the spread, and whether it counts."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from modelmix.config.recipe import Recipe
from modelmix.errors import ModelMixError
from modelmix_lab.experiments import tables
from modelmix_lab.experiments.results import Result
from modelmix_lab.experiments.tables import Row

Place = tuple[str, str, str]
"""Table, row, kind."""


@dataclass(frozen=True)
class Cell:
    """The runs of one kind of one row, in the order of their seeds.

    Args:
        row, kind: which.
        results: at least one.
        epsilon: the largest epsilon of them, recomputed from their ledgers; None where it is not proved.
    """

    row: Row
    kind: str
    results: tuple[Result, ...]
    epsilon: float | None

    @property
    def middle(self) -> Result:
        """The run whose accuracy is the median; of an even number of runs the worse one in the middle."""
        return sorted(self.results, key=lambda result: result.reported)[(len(self.results) - 1) // 2]

    @property
    def spread(self) -> tuple[float, float]:
        """The lowest and the highest accuracy, in per cent."""
        found = [result.reported for result in self.results]
        return min(found), max(found)

    @property
    def too_expensive(self) -> bool:
        """More than the row's epsilon was spent, so that the accuracy does not belong into the row."""
        return self.epsilon is not None and self.epsilon > self.row.target(self.kind)

    @property
    def reaches(self) -> bool | None:
        """At least the printed accuracy, as it is printed, for no more than the printed epsilon; None if none is."""
        printed = self.row.printed(self.kind)
        if printed is None:
            return None
        return not self.too_expensive and round(self.middle.reported, 1) >= printed

    @property
    def seconds(self) -> float:
        """Median time of a run, with loading and the test."""
        return statistics.median(result.seconds["total"] for result in self.results)

    @property
    def hardware(self) -> str:
        return " / ".join(sorted({result.hardware for result in self.results}))


@dataclass(frozen=True)
class Summary:
    """All cells that have runs, and the results that belong to none.

    Args:
        cells: by place.
        outdated: results of a recipe that is no longer that of their row.
    """

    cells: Mapping[Place, Cell] = field(default_factory=dict)
    outdated: tuple[Result, ...] = ()

    def cell(self, row: Row, kind: str) -> Cell | None:
        return self.cells.get((row.table, row.name, kind))


def summarise(results: Iterable[Result]) -> Summary:
    """Group results by their places. Two of the same run are refused: which of them counts would be a choice."""
    seen: dict[tuple[Place, int], Result] = {}
    outdated = []
    for result in results:
        if not _current(result):
            outdated.append(result)
            continue
        key = (result.table, result.row, result.kind), result.seed
        if key in seen:
            raise ModelMixError(f"{seen[key].path} and {result.path} are results of the same run: keep one of them.")
        seen[key] = result
    places: dict[Place, list[Result]] = {}
    for (place, _), result in sorted(seen.items(), key=lambda item: item[0]):
        places.setdefault(place, []).append(result)
    return Summary({place: _cell(place, found) for place, found in places.items()}, tuple(outdated))


def _current(result: Result) -> bool:
    """Return whether the recipe that was run is still the one of its row."""
    try:
        recipe = tables.row(result.table, result.row).recipe(result.kind, result.seed)
        return Recipe.from_mapping(result.recipe) == recipe
    except ModelMixError:  # the row, the kind or a name in the recipe is gone
        return False


def _cell(place: Place, results: list[Result]) -> Cell:
    row, kind = tables.row(place[0], place[1]), place[2]
    spent = [result.proved_epsilon() for result in results]
    proved = [epsilon for epsilon in spent if epsilon is not None]
    return Cell(row, kind, tuple(results), max(proved) if len(proved) == len(spent) else None)

"""``modelmix-lab reproduce`` a table, transfer or embedding: every chosen run, begun, resumed, skipped or shared."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import typer

from modelmix._checks import whole
from modelmix.cli import show
from modelmix.cli.options import Knobs
from modelmix.cli.start import needs_torch, plain_warnings
from modelmix.errors import ModelMixError
from modelmix_lab.experiments import tables
from modelmix_lab.experiments.results import Result

if TYPE_CHECKING:
    from modelmix_lab.experiments.reproduction import Run
    from modelmix_lab.experiments.store import Store


class Choice(NamedTuple):
    """Which runs of a table.

    Args:
        rows, kinds: by name; all if empty.
        seeds, first_seed: so many, counted up from the first.
        steps, batch: of a rehearsal; None for the real thing.
    """

    rows: Sequence[str]
    kinds: Sequence[str]
    seeds: int
    first_seed: int
    steps: int | None
    batch: float | None


def print_recipe(table: str, choice: Choice) -> None:
    """The one chosen run, as a file that ``modelmix-lab train`` takes."""
    if len(choice.rows) != 1 or len(choice.kinds) != 1:
        raise ModelMixError("--print-recipe is for one run: give one --row and one --kind.")
    recipe = tables.row(table, choice.rows[0]).recipe(choice.kinds[0], choice.first_seed)
    cut = {"privacy.steps": choice.steps, "privacy.batch": choice.batch}
    print("# The seed is for public data only: whoever knows it can take the noise away.")
    print(recipe.changed({place: value for place, value in cut.items() if value is not None}).as_toml(), end="")


def run_table(table: str, choice: Choice, out: Path, data_dir: Path | None, knobs: Knobs, json: bool) -> None:
    """Carries out the chosen runs. One that fails is named and the next begins; the exit code is then 1."""
    chosen = [tables.row(table, name) for name in dict.fromkeys(choice.rows)] or list(tables.rows(table))
    seeds = range(choice.first_seed, choice.first_seed + whole("--seeds", choice.seeds, "the number of seeds", least=1))
    kinds = dict.fromkeys(choice.kinds)
    pairs = [(row, kind) for row in chosen for kind in kinds or row.kinds]
    if not choice.rows and all(any(kind in row.kinds for row in chosen) for kind in kinds):
        pairs = [(row, kind) for row, kind in pairs if kind in row.kinds]  # some rows of a table have fewer kinds
    for row, kind in pairs:
        row.recipe(kind)  # a name that does not exist is refused before anything begins
    with needs_torch():
        from modelmix.training import Performance
        from modelmix_lab.experiments.reproduction import Run

    performance = Performance(**knobs._asdict())
    performance.find_device()  # one that is not there is refused before anything begins
    # Seeds last: a table fills row by row, and runs that share data and a network follow each other.
    runs = [Run.of(row, kind, seed, choice.steps, choice.batch) for row, kind in pairs for seed in seeds]
    _require_place(out)
    done, failed = _carry_out(runs, out, data_dir, performance)
    if json:
        results = [{"file": str(result.path), **_brief(result)} for result in done]
        print(show.as_json({"table": table, "results": results, "failed": failed}))
    elif not choice.steps and not choice.batch:
        _say(f"{len(done)} of {len(runs)} runs have a result. Tables of all of them: modelmix-lab results {out}")
    if failed:
        raise typer.Exit(1)


def _require_place(out: Path) -> None:
    """Refuses a folder that cannot be written to before a run is trained for it; makes none."""
    there = next(place for place in (out, *out.absolute().parents) if os.path.exists(place))
    if not there.is_dir() or not os.access(there, os.W_OK | os.X_OK):
        why = "may not be written to" if there.is_dir() else "is not a folder"
        raise ModelMixError(f"cannot write results to {out}: {there} {why}. Choose another --out.")


def _carry_out(
    runs: Sequence[Run], out: Path, data_dir: Path | None, performance: Any
) -> tuple[list[Result], list[dict[str, str]]]:
    from modelmix_lab.experiments.reproduction import adopt, carry_out, reason, tidy
    from modelmix_lab.experiments.store import Store

    _plan(runs, out)
    store = Store(data_dir, performance)
    done: list[Result] = []
    failed: list[dict[str, str]] = []
    absent: dict[str, str] = {}  # data sets that cannot be read, and why: said once for all their runs
    for i, run in enumerate(runs, start=1):
        head, data = f"[{i}/{len(runs)}] {run.name}", run.recipe.data.source
        try:
            if (found := run.finished(out)) is not None:
                done.append(found)
                continue
            if (twin := run.twin(out)) is not None:
                done.append(adopt(run, twin, out))
                _say(f"{head}: taken from {twin.path}, which is the same training: {_outcome(twin)}")
                continue
            if data not in absent and (why := _unreadable(store, run)) is not None:
                absent[data] = why
                _say(f"no run on {data} can be made: {why}")
            if data in absent:
                failed.append({"run": run.name, "why": absent[data]})
                continue
            _say(f"{head}: {_work(run)}")
            with plain_warnings():
                done.append(carry_out(run, out, store, performance))
            _say(f"{head}: {_outcome(done[-1])}")
        except KeyboardInterrupt:
            _say(f"stopped in {run.name}: nothing is lost; the same command goes on here.")
            raise typer.Exit(130) from None
        except Exception as error:  # whatever it was, it must not cost the runs that follow
            failed.append({"run": run.name, "why": reason(error)})
            _say(f"{head}: FAILED: {failed[-1]['why']}")
            store.forget_engines()  # what it left in them, or the memory they hold, may be the reason
        tidy(store.device)
    return done, failed


def _unreadable(store: Store, run: Run) -> str | None:
    """Why the data of a run cannot be read, if so."""
    from modelmix_lab.experiments.reproduction import reason

    try:
        store.data(run.recipe)
    except ModelMixError as error:
        return reason(error)
    return None


def _plan(runs: Sequence[Run], out: Path) -> None:
    waiting = [run for run in runs if not os.path.exists(run.file(out)) or run.rehearsal]
    steps = sum(run.recipe.privacy.steps for run in waiting)
    said = f"{len(runs)} runs, {len(runs) - len(waiting)} of them done; {steps:,} steps to take at most"
    if any(run.rehearsal for run in runs):
        said = f"REHEARSAL, no results: {said}"
    _say(f"{said}. Results go to {out}.")


def _work(run: Run) -> str:
    privacy, data = run.recipe.privacy, run.recipe.data
    size = f"{privacy.batch:,.0f}" if privacy.batch is not None else f"q = {privacy.sample_rate:g}"
    copies = f" x {data.multiplicity}" if data.multiplicity > 1 else ""
    return f"{privacy.steps:,} steps of {size}{copies}, {run.recipe.model.kind} on {data.source}"


def _outcome(result: Result) -> str:
    known = result.epsilon
    epsilon = (
        f"epsilon {show.up(known['value'])} by {known['by']}"
        if known["status"] == "proved"
        else f"epsilon not proved, {show.up(known['claimed'])} claimed"
    )
    test = "not a result, a rehearsal: " if result.rehearsal else ""
    return f"{test}{result.reported:.2f} % on the test set; {epsilon}; {result.seconds['total']:.0f} s"


def _brief(result: Result) -> dict[str, Any]:
    names = ("row", "kind", "seed", "rehearsal", "accuracy", "epsilon", "steps", "seconds")
    return {name: getattr(result, name) for name in names}


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)

"""Runs of the paper's tables, one after the other: begun, resumed or skipped, and each with a result at the end.

Rows of different tables may ask for the same training; it is made once.

The test set is read once a run, after its last step: nothing in training can depend on it.
"""

from __future__ import annotations

import gc
import json
import os
import platform
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from datetime import datetime, timezone
from pathlib import Path

import numpy as np
import torch

from modelmix._version import __version__
from modelmix.config.preparation import Prepared
from modelmix.config.recipe import Recipe
from modelmix.errors import ModelMixError
from modelmix.training import Performance, Trainer
from modelmix_lab.experiments.results import Result, account, place
from modelmix_lab.experiments.store import Store
from modelmix_lab.experiments.tables import TABLES, Row, rows

REHEARSALS = "rehearsals"
"""The folder, beside the results, of what is no result."""

_CHECKPOINTS = 10  # in a run


@dataclass(frozen=True)
class Run:
    """One run of a row.

    Args:
        row, kind, seed: which.
        recipe: what is trained.
        rehearsal: the recipe was cut short.
    """

    row: Row
    kind: str
    seed: int
    recipe: Recipe
    rehearsal: bool = False

    @classmethod
    def of(cls, row: Row, kind: str, seed: int, steps: int | None = None, batch: float | None = None) -> Run:
        """A run as its row says, or a rehearsal of fewer steps or smaller batches."""
        recipe = row.recipe(kind, seed)
        cut = {"privacy.steps": steps, "privacy.batch": batch}
        changes = {place: value for place, value in cut.items() if value is not None}
        return cls(row, kind, seed, recipe.changed(changes), bool(changes))

    @property
    def name(self) -> str:
        return f"{self.row.table} {self.row.name} {self.kind}, seed {self.seed}"

    @property
    def place(self) -> Path:
        """Where its result lies within a folder of results."""
        return place(self.row.table, self.row.name, self.kind, self.seed)

    def file(self, out: Path) -> Path:
        """Where its result goes."""
        return (out / REHEARSALS if self.rehearsal else out) / self.place

    def finished(self, out: Path) -> Result | None:
        """Its result, if it is there; refused if it is that of another recipe or row, or a rehearsal."""
        path = self.file(out)
        if self.rehearsal:
            return None
        try:
            os.stat(path)
        except (FileNotFoundError, NotADirectoryError):
            return None
        except OSError as error:
            raise ModelMixError(
                f"cannot look for {path}: {error.strerror}. Open its folder, or choose another --out."
            ) from None
        found = Result.load(path)
        if found.rehearsal:
            raise ModelMixError(f"{path} is a rehearsal and no result: move it away, or choose another --out.")
        misplaced = place(found.table, found.row, found.kind, found.seed) != self.place
        if misplaced or Recipe.from_mapping(found.recipe) != self.recipe:
            raise ModelMixError(
                f"{path} is the result of another recipe or row: move it away, or choose another --out."
            )
        return found

    def twin(self, out: Path) -> Result | None:
        """The result of another run with this recipe in all but the name, seed included: the same training.

        It is one that its own run would accept as finished; any other file is passed over. A rehearsal has none.
        """
        if self.rehearsal:
            return None
        for other in (Run.of(row, kind, self.seed) for table in TABLES for row in rows(table) for kind in row.kinds):
            if other.place != self.place and other.recipe.changed({"run.name": self.recipe.run.name}) == self.recipe:
                with suppress(ModelMixError, OSError):  # what is wrong with it is for its own run to say
                    if (found := other.finished(out)) is not None:
                        return found
        return None


@contextmanager
def _folder(run: Run, out: Path) -> Iterator[Path]:
    """The run folder; a rehearsal's goes when it is over."""
    if not run.rehearsal:
        yield out / "runs" / run.row.table / run.row.name / f"{run.kind}-{run.seed}"
        return
    with tempfile.TemporaryDirectory() as temporary:
        yield Path(temporary) / "run"


def adopt(run: Run, twin: Result, out: Path) -> Result:
    """Writes the result of a run from that of its twin, and in it whose training it is; nothing is trained."""
    own, trained = run.place.as_posix(), place(twin.table, twin.row, twin.kind, twin.seed).as_posix()
    origin = twin.same_run_as or trained
    result = replace(
        twin,
        table=run.row.table,
        row=run.row.name,
        kind=run.kind,
        recipe={**twin.recipe, "run": {**twin.recipe["run"], "name": run.recipe.run.name}},
        same_run_as=None if origin == own else origin,  # own: the twin was written from this run, whose file is gone
        path=run.file(out),
    )
    result.save(run.file(out))
    return result


def carry_out(run: Run, out: Path, store: Store, performance: Performance) -> Result:
    """Trains where the run stands, tests the end, and writes the result."""
    began = time.monotonic()
    with _folder(run, out) as folder:
        prepared = store.prepared(run.recipe, folder)
        trainer = run.recipe.trainer(
            prepared,
            folder=folder,
            resume=True,
            performance=performance,
            tested=False,
            engine=store.engine(run.recipe, prepared),
        )
        ready, every = time.monotonic(), -(-run.recipe.privacy.steps // _CHECKPOINTS)
        trainer.run(evaluate_every=every)
        # A run that was interrupted has trained before: only its loading and testing are of this process.
        result = _result(run, trainer, prepared, performance, began + time.monotonic() - ready)
    path = run.file(out)
    result.save(path)
    return replace(result, path=path)


def _result(run: Run, trainer: Trainer, prepared: Prepared, performance: Performance, began: float) -> Result:
    recipe, trained = run.recipe, float(trainer.seconds)
    accuracy = {
        "reported": "last" if recipe.optimizer.ema is None else "average",
        "last": trainer.evaluate(prepared.test)["accuracy"],
        "average": None if recipe.optimizer.ema is None else trainer.evaluate(prepared.test, averaged=True)["accuracy"],
    }
    data = prepared.data
    return Result(
        table=run.row.table,
        row=run.row.name,
        kind=run.kind,
        seed=run.seed,
        rehearsal=run.rehearsal,
        recipe=recipe.as_dict(),
        data={"name": data.name, "train": len(data.train), "test": len(data.test)},
        accuracy=accuracy,
        epsilon=account(trainer.ledger, recipe.privacy.delta),
        ledger=json.loads(trainer.ledger.to_json()),
        steps=trainer.step,
        seconds={"training": trained, "total": round(trained + time.monotonic() - began, 3)},
        hardware=hardware(prepared.device),
        performance={
            "device": prepared.device.type,
            "engine": trainer.engine,
            "precision": performance.precision or "float32",
            "compiled": performance.compiled,
            "chunk": performance.chunk,
        },
        versions={
            "modelmix": __version__,
            "torch": torch.__version__,
            "numpy": np.__version__,
            "python": platform.python_version(),
        },
        date=datetime.now(timezone.utc).isoformat(timespec="seconds"),
    )


def hardware(device: torch.device) -> str:
    """The machine in words."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{platform.machine()}, {os.cpu_count()} cores"


def tidy(device: torch.device) -> None:
    """Gives back what the last run held, so that the next one finds a free device."""
    if device.type == "cuda":
        gc.collect()
        torch.cuda.empty_cache()


def reason(error: Exception) -> str:
    """Why a run failed, in one line."""
    text = " ".join(str(error).split())
    if isinstance(error, ModelMixError):
        return text
    if isinstance(error, torch.OutOfMemoryError):
        return "the device has not enough memory: give a smaller --chunk."
    return f"{type(error).__name__}: {text[:300]}"

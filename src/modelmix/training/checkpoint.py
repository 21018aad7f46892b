"""What a run keeps in its folder, and how it is taken up again: ledger first, then the state, then what people see."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from modelmix._version import __version__
from modelmix.accounting.guarantee import Guarantee, quick_epsilon
from modelmix.accounting.guarantee import epsilon as ledger_epsilon
from modelmix.accounting.ledger import Ledger
from modelmix.accounting.plan import Plan
from modelmix.accounting.runs import KEEPS_NOTHING, Claim, excluded_by
from modelmix.errors import ModelMixError
from modelmix.gradients.clip import Clip
from modelmix.runs.callbacks import Callback, writers
from modelmix.runs.record import Record
from modelmix.training.diagnostics import Diagnostics
from modelmix.training.options import RunOptions
from modelmix.training.randomness import Randomness
from modelmix.training.rules import State
from modelmix.training.sampling import Source
from modelmix.training.step import PrivateStep, RunAccount
from modelmix.training.task import TrainingTask


class RunFiles:
    """The files of a run, if it has a folder, and what may be seen of it.

    Args:
        folder: where the run is kept; None keeps nothing.
        task: what is trained on what.
        step: whose state, key and ledger are kept.
        options: of the run.
    """

    def __init__(self, folder: str | Path | None, task: TrainingTask, step: PrivateStep, options: RunOptions) -> None:
        self._task, self._step, self._options = task, step, options
        self.seconds = 0.0
        self._rows: list[dict[str, Any]] = []
        self._unpriced: dict[int, Ledger] = {}  # ledgers of rows whose epsilon nobody has asked for yet
        self.diagnostics = Diagnostics(Clip.of(step.plan.phases[0].mechanism, step.clip), task.flat.size)
        self._kept = step.state
        self._planned: tuple[Plan, Guarantee] | None = None
        self._restrictions: dict[str, Any] = {
            "assumed": [*_assumed(task), *options.about.get("assumed", ())],
            "excluded": [*excluded_by(options.test_public, options.nonfinite)],
            "test_public": bool(options.test_public),
        }
        self.record: Record | None = None
        self.writers: tuple[Callback, ...] = ()
        """Write the files that people read."""
        if folder is None:
            return
        self.record = Record(folder, task.settings(), step.plan, options.seed, task.fingerprint)
        if options.resume and self.record.folder.holds_a_run:
            self._restore(self.record.resume())
            self._restrictions = self.record.restrict(self._restrictions)
        else:
            about = {**options.about, "name": options.name, **task.facts(step.plan), **self._restrictions}
            self.record.begin(about)
        self.writers = writers(self.record)

    @property
    def shown(self) -> State:
        """The state that may be seen: with a folder the one that is kept."""
        return self._step.state if self.record is None else self._kept

    @property
    def test_public(self) -> bool:
        """Whether metrics of the test set may be published."""
        return bool(self._restrictions["test_public"])

    @property
    def planned(self) -> Guarantee:
        """What holds for the whole plan."""
        if self._planned is None or self._planned[0] is not self._step.plan:
            self._planned = self._step.plan, self._step.plan.guarantee()
        return self._planned[1]

    @property
    def guarantee(self) -> Guarantee:
        """What holds for the whole plan, with everything that is said of this run in particular."""
        ledger = self._step.account.ledger
        ledger.require_proof()
        assumed, excluded = (tuple(self._restrictions[name]) for name in ("assumed", "excluded"))
        claimed = replace(self._step.plan.ledger, seeded=ledger.seeded)
        return Claim(claimed, ledger, assumed=assumed, excluded=excluded).qualified(self.planned)

    def measure(self, test: Source | None) -> None:
        """Measure what people will see of the present state, once it is kept."""
        state = self._step.state
        row: dict[str, Any] = {"step": state.step, "lr": self._task.lr.at(state.step)}
        row |= {"seconds": round(self.seconds, -1), "epsilon": None}
        if test is not None:
            found = self._task.evaluate(state.last, test)
            row |= {"test_accuracy": found["accuracy"], "test_loss": found["loss"]}
            if state.average is not None:
                row["ema_accuracy"] = self._task.evaluate(state.average, test)["accuracy"]
        self._rows = [old for old in self._rows if old["step"] < state.step] + [row]
        self._unpriced[state.step] = self._step.account.ledger

    def rows(self, until: int | None = None) -> list[dict[str, Any]]:
        """Return what was measured, up to a step, with the epsilon of that moment.

        It is computed when somebody reads it, which can take longer than a step.
        """
        plan = self._step.plan
        for row in self._rows:
            ledger = self._unpriced.pop(row["step"], None)
            if ledger is not None and not ledger.unproved:
                last = row["step"] == plan.steps
                row["epsilon"] = self.planned.epsilon if last else quick_epsilon(ledger, plan.delta)
        return [dict(row) for row in self._rows if until is None or row["step"] <= until]

    def has_row(self, step: int) -> bool:
        """Whether a step was measured."""
        return any(row["step"] == step for row in self._rows)

    def keep(self) -> None:
        """Keep ledger and state; only then may anybody see it."""
        if self.record is None:
            return
        state, randomness = self._step.state, self._step.randomness
        arrays = {"last": state.last, "previous": state.previous, "velocity": state.velocity}
        if state.average is not None:
            arrays["average"] = state.average
        meta = {
            "step": state.step,
            "randomness": randomness.state(),
            "diagnostics": self.diagnostics.state(),
            "metrics": self.rows(),
            "seconds": self.seconds,
            "arithmetic": self._task.arithmetic() if randomness.seeded else "",
        }
        self.record.keep(self._step.account.ledger, arrays, meta)
        self._kept = state

    def keep_or_forget(self) -> None:
        """Keep the last whole state, or go back to the last one that is kept.

        Whoever resumes repeats what was not kept with other noise, so nobody may have seen it.
        """
        try:
            self.keep()
        except BaseException:
            self._step.state = self._kept
            self._rows = [row for row in self._rows if row["step"] <= self._kept.step]
            raise

    def _restore(self, found: tuple[dict[str, Tensor], dict[str, Any], Ledger] | None) -> None:
        """Go on from a checkpoint and its ledger."""
        if found is None:
            return
        arrays, meta, ledger = found
        step, task, spent = self._step, self._task, self._step.plan.spent
        vectors = {name: t.to(task.gradients.device) for name, t in arrays.items()}
        names = {"last", "previous", "velocity", *(["average"] if step.rule.ema is not None else [])}
        if set(vectors) != names or any(t.shape != (task.flat.size,) for t in vectors.values()):
            raise ModelMixError("the checkpoint is not of this model and rule: choose another folder.")
        same_claim = replace(ledger, phases=()) == replace(step.account.ledger, phases=())
        if not same_claim or not ledger.starts_with(spent) or not step.plan.ledger.starts_with(ledger):
            raise ModelMixError("the ledger is not of this run: restore ledger.json.")
        step.account = RunAccount(ledger, spent.steps)
        try:
            step.randomness = Randomness.from_state(meta["randomness"])
            self.diagnostics.restore(meta["diagnostics"])
            self._rows = [dict(row) for row in meta["metrics"]]
            self.seconds = float(meta["seconds"])
            step.state = State(step=int(meta["step"]), **vectors)
            arithmetic = str(meta["arithmetic"])
        except (AttributeError, KeyError, TypeError, ValueError):
            raise ModelMixError("the checkpoint is not readable: restore checkpoint.npz.") from None
        # The key of a step serves one computation: only a seeded run that is in all we can see the same repeats it.
        # The repeated states of the others have noise of their own, and nobody has seen the first ones (keep).
        if not step.randomness.seeded or arithmetic != task.arithmetic() or task.source.repeatable() is None:
            step.randomness.refresh()
        self._kept = step.state

    def finish(self) -> None:
        """Write the models, the diagnostics and the certificate."""
        if self.record is None:
            return
        state = self._step.state
        models = {"model.pt": self._task.state_dict(state.last)}
        if state.average is not None:
            models["model-ema.pt"] = self._task.state_dict(state.average)
        self.record.finish(models, self.diagnostics.as_dict(), self._certificate())

    def _certificate(self) -> dict[str, Any] | None:
        """Return what the data holder may sign; None for a run that proves nothing to others."""
        ledger, plan, taken = self._step.account.ledger, self._step.plan, self._step.number
        if ledger.unproved or ledger.seeded or not math.isfinite(self.planned.epsilon):
            return None
        return {
            "guarantee": self.guarantee.as_dict(),
            "steps_planned": plan.steps,
            "steps_taken": taken,
            "epsilon_if_stopping_was_fixed_beforehand": (
                None if taken == plan.steps else ledger_epsilon(ledger, plan.delta)
            ),
            "software": {"modelmix": __version__, "torch": torch.__version__},
            "ledger_digest": ledger.digest,
        }


def _assumed(task: TrainingTask) -> tuple[str, ...]:
    """Return what nobody can prove from outside of how a run takes its gradients."""
    return () if task.gradients.engine.name == "hooks" else (KEEPS_NOTHING,)

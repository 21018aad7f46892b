"""The ledger of a private loop, which other loops may have begun and a file may keep."""

from __future__ import annotations

import json
import math
import os
import uuid
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from os import PathLike
from pathlib import Path
from typing import Any

from modelmix._files import write_atomically
from modelmix._format import up
from modelmix.accounting.guarantee import Guarantee
from modelmix.accounting.guarantee import epsilon as ledger_epsilon
from modelmix.accounting.ledger import Ledger, append_to_ledger, read_ledger
from modelmix.accounting.mechanism import Mechanism
from modelmix.accounting.plan import Plan
from modelmix.accounting.runs import Claim, plan_beside, read_object, restrictions
from modelmix.errors import BudgetExceeded, ModelMixError, UnprovedError
from modelmix.training.rules import State


class LoopAccount:
    """What a loop has run, and what loops whose state it was given ran before it, each counted once.

    Args:
        plan: what may run.
        seeded: whether the loop is repeatable.
        said: what the guarantee of this loop assumes and excludes, besides what that of any ledger does.
        file: gets every line before its step is taken; one that exists is continued.
    """

    def __init__(
        self, plan: Plan, seeded: bool, said: Mapping[str, tuple[str, ...]], file: str | PathLike[str] | None
    ) -> None:
        self.plan = plan
        self.name = uuid.uuid4().hex
        self.claim = replace(plan.ledger, phases=(), seeded=seeded)
        self.earlier = self._before()  # what ran before this loop was made
        self.own = self.claim  # what ran in it
        self.runs: dict[str, float] = {self.name: math.inf}  # how many lines of each run are in either
        self.base: str | None = None  # the run that all of ``earlier`` is of, where it is of one
        self.said = dict(said)
        self._planned: tuple[Plan, Guarantee] | None = None
        self._file = None if file is None else Path(os.path.realpath(file))  # the plan lies beside the real one
        self._written: Ledger | None = None
        if self._file is not None and self._file.exists():
            self._continue(self._file)

    def _continue(self, file: Path) -> None:
        self._written = read_ledger(file)
        if plan_beside(file).exists():
            before = read_object(plan_beside(file))
            self._require_goes_on(Plan.from_dict(before))
            then = zip(self.said, restrictions({"test_public": True, **before}), strict=True)
            self.said = {name: tuple(dict.fromkeys((*lines, *self.said[name]))) for name, lines in then}
        self._count(self._written, same=True)
        with suppress(OSError, ValueError, TypeError):
            self.runs |= {str(k): int(v) for k, v in json.loads(_names(file).read_text(encoding="utf-8")).items()}

    @property
    def ledger(self) -> Ledger:
        """What ran, in this loop and in those whose state it was given."""
        return self.earlier.then(self.own)

    @property
    def steps(self) -> int:
        """Steps that ran, but for what was spent before the plan."""
        return self.ledger.steps - self.plan.spent.steps

    @property
    def planned(self) -> Guarantee:
        """What holds for the whole plan."""
        if self._planned is None or self._planned[0] is not self.plan:
            self._planned = self.plan, self.plan.guarantee()
        return self._planned[1]

    @property
    def guarantee(self) -> Guarantee:
        """What holds for the whole plan, with everything that is said of this loop in particular."""
        planned = replace(self.plan.ledger, seeded=self.ledger.seeded)
        claim = Claim(planned, self.ledger, assumed=self.said["assumed"], excluded=self.said["excluded"])
        return claim.qualified(self.planned)

    def taken(self, state: State) -> int:
        """Return the steps that have a line: a line that is written counts, whatever became of its step."""
        return self.steps

    def add(self, step: int, mechanism: Mechanism) -> None:
        """Write the line of a step before it exists; refuse one past the plan, and a file that another has written."""
        self.plan.require(self.steps + 1)
        if step != self.steps + 1:
            raise UnprovedError(
                "a step runs the mechanism that its ledger line names",
                f"step {step} was prepared where step {self.steps + 1} is due.",
                "Take one batch from the loader for every step.",
            )
        self.own = self.own.add(mechanism)
        if self._file is None:
            return
        self._written = append_to_ledger(self._file, self._extended)
        write_atomically(_names(self._file), json.dumps({**self.runs, self.name: self.ledger.steps}, sort_keys=True))

    def _extended(self, now: Ledger | None) -> Ledger:
        """Return the ledger to be written over what the file holds now; the plan is on disk before it."""
        assert self._file is not None
        if now != self._written:
            raise UnprovedError(
                "everything that is released about the same samples adds up",
                f"{self._file} was written to by another loop.",
                "Give every loop a ledger file of its own, and the earlier ones as spent in its plan.",
            )
        write_atomically(plan_beside(self._file), json.dumps({**self.plan.as_dict(), **self.said}, indent=1) + "\n")
        return self.ledger

    def as_dict(self) -> dict[str, Any]:
        """Return what a saved state says of what ran."""
        return {
            "ledger": self.ledger.to_json(),
            "run": self.name,
            "spent": self.plan.spent.to_json(),
            "plan": self.plan.as_dict(),
        }

    def take_on(self, state: Mapping[str, Any]) -> None:
        """Count what another loop, or this one before, has run, as its state says."""
        ledger, run, spent = Ledger.from_json(state["ledger"]), str(state["run"]), str(state["spent"])
        if ledger.steps <= self.runs.get(run, -1):
            return  # all of it is counted already, with what has run since
        self._require_goes_on(Plan.from_dict(state["plan"]))
        first = spent == self.plan.spent.to_json() and self.earlier == self._before()
        self._count(ledger, same=first or run == self.base)
        self.base = run if self.earlier == ledger else None
        self.runs[run] = ledger.steps

    def _require_goes_on(self, before: Plan) -> None:
        """Refuse a plan that does not go on with an earlier loop's.

        A loop that was stopped counts as its plan: its number of steps may have been chosen by looking at them.
        """
        if not self.plan.extends(before):
            raise BudgetExceeded(
                f"an earlier loop over these samples planned {before.steps:,} steps, and this plan does not go on with "
                "that one: make the plan it was made with, or a longer one (plan.extended). Or begin a new loop with "
                "another ledger file, with the model's weights alone and with what the earlier one counts as "
                "(mm.load_claim(FILE), optimizer.plan.ledger) as spent in mm.plan(...)."
            )

    def _before(self) -> Ledger:
        return self.plan.spent.then(self.claim)

    def _count(self, ledger: Ledger, same: bool) -> None:
        """Count another ledger: in place of what was spent, if it begins with that, or after all that is known."""
        ledger.require_proof()
        earlier = ledger if same and ledger.starts_with(self.earlier) else self.earlier.then(ledger)
        if ledger.phases and (earlier.adjacency, earlier.unit) != (self.claim.adjacency, self.claim.unit):
            raise ModelMixError("this state is of a run that claims something else: make the plan it was made with.")
        left = self.plan.after(earlier.steps - self.plan.spent.steps)
        cost = ledger_epsilon(earlier.then(self.own).then(left), self.plan.delta)
        if cost > self.planned.epsilon * (1 + 1e-9):
            raise BudgetExceeded(
                f"what has run costs epsilon {up(cost, 6)} with this plan, which foresees "
                f"{up(self.planned.epsilon, 6)}: give what it counts as (mm.load_claim(FILE), optimizer.plan.ledger) "
                "as spent in mm.plan(...), or the plan it was run with."
            )
        self.earlier = earlier


def _names(ledger: Path) -> Path:
    """Return where the runs lie whose lines a ledger file has."""
    return ledger.with_name(ledger.name + ".runs")

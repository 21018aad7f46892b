"""The trainer: draws, clipped sums, private steps, checkpoints, in one direction."""

from __future__ import annotations

import copy
import threading
import time
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from modelmix._checks import whole
from modelmix._format import up, up_digits
from modelmix.accounting.guarantee import Guarantee
from modelmix.accounting.guarantee import epsilon as ledger_epsilon
from modelmix.accounting.ledger import Ledger
from modelmix.accounting.mechanism import Mechanism
from modelmix.accounting.plan import Plan
from modelmix.errors import BudgetExceeded, ModelMixError, UnprovedError
from modelmix.gradients import Loss
from modelmix.gradients.clip import ClippedSum
from modelmix.gradients.memory import Watch, WatchedFunction
from modelmix.runs.callbacks import Callback, RunView, notify, notify_finish
from modelmix.training.augment import Augment
from modelmix.training.checkpoint import RunFiles
from modelmix.training.diagnostics import Diagnostics
from modelmix.training.embedding import Embedding
from modelmix.training.guard import (
    check_model,
    require_one_process,
)
from modelmix.training.options import RunOptions, require_type
from modelmix.training.progress import Progress
from modelmix.training.randomness import Randomness
from modelmix.training.rules import Rule, State
from modelmix.training.sampling import Chunk, Prefetched, Source, as_source
from modelmix.training.schedules import Schedule
from modelmix.training.step import PrivateStep, RunAccount, require_honest
from modelmix.training.task import TrainingTask

_EVALUATIONS = 20


class Trainer:
    """Trains a model privately and keeps the account.

    Guarantee: the states it releases, taken together, are (epsilon, delta)-differentially private with the epsilon of
    its plan, for the neighbours that the plan claims; so is everything computed from them, however early the run is
    stopped. What a step runs is the mechanism that its ledger line names. ``guarantee`` states all of it.

    Args:
        model: any module without batch statistics; what requires a gradient is trained.
        loss: ``loss(outputs, targets)``. It is given one sample at a time, so it cannot make samples meet.
        train_set: (inputs, targets) as tensors or arrays, or a map-style ``Dataset``.
        plan: what may run, see ``mm.plan`` and ``Plan``. Going past its end raises ``BudgetExceeded``; ``extend`` adds
            steps. Its population, a public number, is what q, B and tau are derived from; without one, the number of
            samples is, and is then public.
        clip: c, the bound on the norm of a sample's gradient (l2; l1 for Laplace noise). With an embedding c1, the
            bound of residuals; embeddings are clipped to the mechanism's clip_ratio times that.
        lr: eta, a number or a ``Schedule``. The mixing threshold follows it: tau = omega * c * eta / B.
        rule: how a step combines released states: mixing, momentum, weight decay, averages. See ``Rule``.
        augment: augmented copies of every sample. See ``Augment``.
        embedding: public samples in whose directions gradients are embedded (Section 5.3), for an
            ``EmbeddingMechanism``.
        test_set: held-out samples for reporting.
        folder: where the run is kept; with ``RunOptions(resume=True)`` a run that is there goes on where it stopped.
        options: seed, callbacks, speed and the like. See ``RunOptions``.

    Raises:
        UnprovedError: if no proof covers what is asked for; it names the rule, the reason and a way out.

    Example:
        >>> import torch, modelmix as mm
        >>> x, y = torch.randn(300, 4), torch.arange(300) % 2
        >>> plan = mm.plan(epsilon=3, delta=1e-4, samples=300, batch=100, steps=5)
        >>> run = mm.Trainer(torch.nn.Linear(4, 2), torch.nn.CrossEntropyLoss(), (x, y), plan, clip=1.0, lr=0.5).run()
        >>> run.step
        5
    """

    def __init__(
        self,
        model: nn.Module,
        loss: Loss,
        train_set: Any,
        plan: Plan,
        clip: float,
        lr: float | Schedule,
        *,
        rule: Rule | None = None,
        augment: Augment | None = None,
        embedding: Embedding | None = None,
        test_set: Any = None,
        folder: str | Path | None = None,
        options: RunOptions | None = None,
    ) -> None:
        require_one_process()
        if not isinstance(plan, Plan):
            raise ModelMixError(
                f"{plan!r} is not a Plan: make one with mm.plan(epsilon=..., ...) or mm.Plan.of(mechanism, steps)."
            )
        self._options = options = RunOptions() if options is None else options
        rule, augment = Rule() if rule is None else rule, Augment() if augment is None else augment
        require_honest(rule)
        require_type("augment", augment, Augment, "mm.Augment(function, copies=4)")
        require_type("options", options, RunOptions, "mm.RunOptions(seed=1)")
        self._task, plan = TrainingTask.of(model, loss, train_set, plan, clip, lr, rule, augment, embedding, options)
        task, rule = self._task, self._task.rule
        self._test = None if test_set is None else self._as_test(test_set)
        if self._test is not None:
            task.check_test(self._test, options.test_public)
        start = task.flat.read()
        other = None if rule.previous is None else task.flat.read_from(rule.previous)
        state = State.start(start, other, averaged=rule.ema is not None)
        plan = replace(plan, unproved=rule.unproved)
        seeded = options.seed is not None or plan.spent.seeded
        ledger = replace(plan.ledger, phases=plan.spent.phases, unproved=rule.unproved, seeded=seeded)
        account = RunAccount(ledger, ledger.steps)
        self._step = PrivateStep(plan, rule, task.gradients.clip, state, Randomness(options.seed), account)
        self._files = RunFiles(folder, task, self._step, options)
        self._write_model()
        self._watch = Watch(model)
        self._alone = threading.Lock()

    def __setattr__(self, name: str, value: Any) -> None:
        if not name.startswith("_"):
            raise UnprovedError(
                "a step runs the mechanism that its ledger line names",
                f"{name} cannot be changed on a trainer.",
                "Give a Schedule for lr or tau, a Plan of several phases, or make a new trainer.",
            )
        super().__setattr__(name, value)

    # What the world may see.

    @property
    def model(self) -> nn.Module:
        """The model, at the last state that this object wrote to it."""
        return self._task.model

    @property
    def ledger(self) -> Ledger:
        """What ran, what was spent before included; while more is planned, ``plan.ledger`` is what counts."""
        ledger = self._step.account.ledger
        return ledger if self.step == self.plan.steps else replace(ledger, stopped="trainer", live=True)

    @property
    def state(self) -> State:
        """The released states: ``last`` is w_k and ``previous`` w_{k-1}, as flat float64 vectors.

        While a run with a folder goes on, those that are kept there: a state that is not kept is taken again, with
        other noise, if the process dies, so nobody may have seen it.
        """
        return self._files.shown

    @property
    def metrics(self) -> list[dict[str, Any]]:
        """What was measured on the test set, with an upper bound on the epsilon of that moment.

        That "epsilon" holds if it was fixed beforehand to stop there, and has that in its name in files; ``guarantee``
        has the one of the plan.
        """
        return self._files.rows(self.state.step)

    @property
    def step(self) -> int:
        """Steps taken so far."""
        return self._step.number

    @property
    def engine(self) -> str:
        """The name of the engine that computes per-sample gradients."""
        return self._task.gradients.engine.name

    @property
    def plan(self) -> Plan:
        """What may run, with every step's own mixing width."""
        return self._step.plan

    @property
    def folder(self) -> Path | None:
        """Where the run is kept."""
        return None if self._files.record is None else self._files.record.folder.path

    @property
    def test_public(self) -> bool:
        """Whether metrics of the test set may be published."""
        return self._files.test_public

    @property
    def seconds(self) -> float:
        """How long the run has taken, for the data holder: it depends on the data."""
        return self._files.seconds

    @property
    def expected_batch(self) -> float:
        """B = q * population, by which sums are divided, whatever size was drawn."""
        return self.plan.expected_batch(max(1, self.step))

    @property
    def guarantee(self) -> Guarantee:
        """What holds for everything this run releases: the epsilon of the whole plan, however early it is stopped."""
        return self._files.guarantee

    @property
    def summary(self) -> str:
        """The planned epsilon in a few words."""
        if self.ledger.unproved:
            return "epsilon: not proved"
        note = ", seeded" if self.ledger.seeded else ""
        return f"epsilon {up(self._files.planned.epsilon, 3)} planned at delta {up_digits(self.plan.delta)}{note}"

    def epsilon(self, delta: float | None = None) -> float:
        """Return epsilon of the steps so far, from the ledger; ``UnprovedError`` where nothing is proved.

        It holds if the number of steps was fixed beforehand. Whoever stops because of what was seen has the epsilon of
        the plan, which is that of ``guarantee``.
        """
        return ledger_epsilon(self.ledger, self.plan.delta if delta is None else delta)

    def mechanism_at(self, step: int) -> Mechanism:
        """Return what a step runs, and what its ledger line says; steps count from 1."""
        return self.plan.mechanism_at(step)

    def extend(self, steps: int) -> Trainer:
        """Plan ``steps`` more steps of the last mechanism; the guarantee becomes that of the longer plan."""
        if self._alone.locked():
            raise ModelMixError("a run is going on: extend the plan when it has ended.")
        self._step.plan = self.plan.extended(steps)
        if self._files.record is not None:
            with self._files.record as record:
                record.replan(self.plan)
        return self

    def state_dict(self) -> dict[str, Tensor]:
        """Return the model's state dict at the released state."""
        return self._task.state_dict(self.state.last)

    def averaged_state_dict(self) -> dict[str, Tensor]:
        """Return the model's state dict with the average of released states in place of the last one."""
        return self._task.state_dict(_average_of(self.state))

    def evaluate(self, test_set: Any = None, *, averaged: bool = False) -> dict[str, float | None]:
        """Return accuracy and loss on held-out samples."""
        if self._alone.locked():
            raise ModelMixError("a run is going on: read metrics, or evaluate when it has ended.")
        source = self._test if test_set is None else self._as_test(test_set)
        if source is None:
            raise ModelMixError("there is nothing to evaluate on: give test_set.")
        return self._task.evaluate(_average_of(self.state) if averaged else self.state.last, source)

    def _as_test(self, samples: Any) -> Source:
        return as_source(samples, self._options.performance.workers).to(self._task.gradients.device)

    # Training.

    def run(
        self, steps: int | None = None, *, evaluate_every: int | None = None, progress: bool | None = None
    ) -> Trainer:
        """Take ``steps`` more steps, or all that are planned; 0 takes none and completes the files of the run folder.

        Args:
            steps: at most what the plan has left, or ``BudgetExceeded`` is raised.
            evaluate_every: steps between evaluations on the test set, each with a checkpoint; None does 20.
            progress: None shows a bar if stderr is a terminal.
        """
        left = self.plan.steps - self.step
        steps = left if steps is None else whole("steps", steps, "the number of steps", least=0)
        every = (
            max(1, steps // _EVALUATIONS)
            if evaluate_every is None
            else whole("evaluate_every", evaluate_every, "the number of steps between evaluations", least=1)
        )
        if not self._alone.acquire(blocking=False):
            raise ModelMixError("this trainer is running in another thread: a draw makes one step, in one thread.")
        try:
            self._check_untouched()
            if steps > left:
                raise BudgetExceeded(
                    f"{steps:,} more steps go past the end of the plan: {left:,} of its {self.plan.steps:,} are left. "
                    "Run those, or plan more with trainer.extend(steps), at a larger epsilon."
                )
            callbacks = (*self._files.writers, Progress(progress), *self._options.callbacks)
            with self._files.record or nullcontext():
                self._loop(self.step + steps, every, callbacks)
        finally:
            self._alone.release()
        return self

    def _loop(self, end: int, every: int, callbacks: tuple[Callback, ...]) -> None:
        files, view = self._files, RunView(self, end)
        began = time.monotonic() - files.seconds
        if self.step > 0 and (self.step % every == 0 or end == self.step) and not files.has_row(self.step):
            files.measure(self._test)  # an interrupt came between the state and its evaluation
        files.keep()
        self._checkpointed(callbacks, view)
        task = self._task
        task.gradients.engine.remember()
        augment = task.gradients.augment.function
        memory = None if augment is None else WatchedFunction(augment, "augment", task.model)
        try:
            notify(callbacks, "on_start", view)
            for chunks in self._draws(end - self.step):
                self._take_step(chunks)
                if memory is not None:
                    memory.check()
                files.seconds = time.monotonic() - began
                notify(callbacks, "on_step", view)
                if self.step % every == 0 or self.step == end:
                    files.measure(self._test)
                    files.keep()
                    self._checkpointed(callbacks, view)
                    notify(callbacks, "on_evaluate", view)
            self._write_model()
            files.finish()
        except BaseException:
            view.interrupted = True
            files.keep_or_forget()
            self._checkpointed(callbacks, view)
            raise
        finally:
            self._coming = Prefetched(())  # it holds keys, and none may outlive the state that used it
            self._write_model()
            notify_finish(callbacks, view)

    def _checkpointed(self, callbacks: tuple[Callback, ...], view: RunView) -> None:
        if self._files.record is not None:
            notify(callbacks, "on_checkpoint", view)

    def _draws(self, steps: int) -> Iterator[Iterator[Chunk]]:
        """Yield the samples of the coming draws, read ahead of time."""
        task = self._task
        self._coming = Prefetched(draw for _, draw in self._step.coming(task.source.n, steps))
        seeds = (draws.generator("items").initial_seed() for draws in self._step.randomness.coming_steps())
        return task.source.steps(self._coming, task.gradients.chunk, task.gradients.engine.fixed_shapes, seeds)

    def _take_step(self, chunks: Iterator[Chunk]) -> None:
        step, mechanism, draws = self._step, self._step.mechanism, self._step.randomness.step()
        parameters = self._task.flat.views(step.rule.gradient_point(step.state))
        met = self._task.gradients(chunks, parameters, mechanism, draws)
        self._watch.check()
        diagnostics = self._files.diagnostics

        def look() -> None:
            nonlocal diagnostics
            self._coming.prefetch()
            diagnostics = self._diagnosed(met.to_cpu())

        step.take(met.total, self._task.lr.at(step.number + 1), mechanism, draws=draws, meanwhile=look)
        self._files.diagnostics = diagnostics

    def _diagnosed(self, met: ClippedSum) -> Diagnostics:
        """Add what clipping has met; refuse a step with a gradient that is not finite, if so wanted."""
        if self._options.nonfinite == "stop" and not bool(torch.isfinite(met.norms).all()):
            raise ModelMixError(
                f"step {self.step + 1}: the loss or gradient of a sample is not finite; the step was not taken and the "
                f"run stands at step {self.step}. Lower lr, or let such samples count as zero with "
                'nonfinite="drop".'
            )
        diagnostics = copy.deepcopy(self._files.diagnostics)
        diagnostics.add(met)
        diagnostics.add_draw(met.norms.numel())
        return diagnostics

    def _check_untouched(self) -> None:
        check_model(self.model)
        self._watch.check()
        if self._task.flat.versions() != self._written:
            raise UnprovedError(
                "released states come from noisy, mixed steps only",
                "the model's trained weights were changed from outside since the trainer last wrote them.",
                "Make a new trainer for a model with other weights.",
            )

    def _write_model(self) -> None:
        """Write the present state into the model."""
        self._task.flat.write(self._step.state.last)
        self._written = self._task.flat.versions()


def _average_of(state: State) -> Tensor:
    if state.average is None:
        raise ModelMixError("this run keeps no average: give Rule(ema=...), for instance 0.99.")
    return state.average

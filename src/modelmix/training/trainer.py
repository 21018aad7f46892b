"""The trainer: draws, clipped sums, noisy mixed steps, ledger lines, checkpoints, in one direction."""

from __future__ import annotations

import copy
import hashlib
import json
import math
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from modelmix._checks import whole
from modelmix._format import up, up_digits
from modelmix._version import __version__
from modelmix.accounting.embedding import EmbeddingMechanism
from modelmix.accounting.guarantee import Guarantee, quick_epsilon
from modelmix.accounting.guarantee import epsilon as ledger_epsilon
from modelmix.accounting.ledger import Ledger, Phase
from modelmix.accounting.mechanism import Mechanism, mixing_width
from modelmix.accounting.plan import Plan
from modelmix.accounting.runs import KEEPS_NOTHING, Claim, excluded_by
from modelmix.errors import BudgetExceeded, ModelMixError, UnprovedError
from modelmix.gradients import Batch, Engine, Loss
from modelmix.gradients.clip import Clip, ClippedSum
from modelmix.gradients.device import preserve_torch_rng, to_device_async
from modelmix.gradients.memory import Watch, WatchedFunction
from modelmix.gradients.parameters import FlatParameters
from modelmix.runs.record import Record
from modelmix.training.augment import apply_augmentation
from modelmix.training.diagnostics import Diagnostics
from modelmix.training.embedding import Basis, Embedding, EmbeddingClip, find_basis
from modelmix.training.evaluation import evaluate
from modelmix.training.guard import (
    check_mechanism,
    check_model,
    check_public_model,
    require_not_private,
    require_one_process,
)
from modelmix.training.identity import code_digest
from modelmix.training.labels import Labels
from modelmix.training.performance import Performance
from modelmix.training.progress import Progress
from modelmix.training.randomness import Randomness, StepRandomness
from modelmix.training.rules import Rule, State, propose_step
from modelmix.training.sampling import Ahead, Chunk, DatasetSource, Source, TensorSource, as_source, check_items_alone
from modelmix.training.schedules import Schedule, schedule

Augment = Callable[[Any, torch.Generator], Any]
_EVALUATIONS = 20
_PARTS = 15  # draws that make up a step of the authors' code
_NORM_LAYERS = (nn.GroupNorm, nn.LayerNorm, nn.modules.instancenorm._InstanceNorm)


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
        tau: a number or a ``Schedule`` in place of the plan's mixing width; every step's own omega is accounted.
        rule: "mix", "alternate", "average", "plain" or "released"; None takes "mix" if the mechanism mixes and "plain"
            if not. See ``rules.Rule``, also for padding, momentum, weight_decay and ema.
        previous: the second initial state w_{-1}, as a model or a state dict; None takes w_{-1} = w_0.
        augment: ``augment(inputs, generator)`` applied to every sample ``multiplicity`` times, one sample at a time
            unless it is one of ours; gradients are averaged over the copies of a sample before clipping.
        embedding: public samples in whose directions gradients are embedded (Section 5.3), for an
            ``EmbeddingMechanism``.
        nonfinite: what to do when a sample's gradient is not finite: "drop" (it counts as zero, which the proof
            covers), or "stop" before the step: that depends on the data outside the mechanism, so that the guarantee
            then does not cover whether and when the run stopped.
        test_set: held-out samples for reporting.
        test_public: whether the test set is public; only then may what is measured on it be published.
        seed: makes the run repeatable, for tests only: no certificate is made of it.
        folder: where the run is kept; with ``resume`` a run that is there goes on where it stopped.
        performance: speed and memory.
        engine: made earlier for a model of the same builder and these samples, with what it has compiled; None makes
            one.
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
        tau: float | Schedule | None = None,
        rule: str | None = None,
        padding: str = "exact",
        momentum: float = 0.0,
        weight_decay: float = 0.0,
        ema: float | None = None,
        previous: nn.Module | Mapping[str, Tensor] | None = None,
        augment: Augment | None = None,
        multiplicity: int = 1,
        embedding: Embedding | None = None,
        nonfinite: str = "drop",
        test_set: Any = None,
        test_public: bool = False,
        seed: int | None = None,
        folder: str | Path | None = None,
        resume: bool = False,
        name: str = "run",
        about: Mapping[str, Any] | None = None,
        performance: Performance | None = None,
        engine: Engine | None = None,
    ) -> None:
        require_one_process()
        if not isinstance(plan, Plan):
            raise ModelMixError(
                f"{plan!r} is not a Plan: make one with mm.plan(epsilon=..., ...) or mm.Plan.of(mechanism, steps)."
            )
        self._performance = performance or Performance()
        self._device = self._performance.find_device()
        self._model, self._loss = model.to(self._device), loss
        self._source = as_source(train_set, self._performance.workers).to(self._device)
        self._test = None if test_set is None else as_source(test_set, self._performance.workers).to(self._device)
        self._flat = FlatParameters(model)
        check_model(model)
        require_not_private(model)
        self._lr = schedule("lr", lr, "the learning rate")
        self._tau = None if tau is None else schedule("tau", tau, "the mixing threshold")
        self._clip = Clip(clip).c
        self._plan = self._resolved(plan.bound_to(self._source.n))
        self._plan.require_signal()
        self._multiplicity = whole("multiplicity", multiplicity, "the number of copies of a sample", least=1)
        if augment is None and self._multiplicity > 1:
            raise ModelMixError(
                "multiplicity > 1 needs augment: copies of a sample must differ to be worth their time."
            )
        if nonfinite not in ("stop", "drop"):
            raise ModelMixError(f"nonfinite = {nonfinite!r} is unknown: choose stop or drop.")
        self._augment, self._nonfinite, self._test_public = augment, nonfinite, bool(test_public)
        self._embedding = embedding
        mechanisms = [phase.mechanism for phase in self._plan.phases]
        for one in mechanisms:
            check_mechanism(one, self._flat.size, embedded=embedding is not None)
        rule = rule or ("mix" if any(one.mixed for one in mechanisms) else "plain")
        unmixed = self._norm_layers() if rule == "released" and embedding is None else None
        self._rule = Rule(rule, padding, momentum, weight_decay, ema, unmixed, embedded=embedding is not None)
        for one in mechanisms:
            self._rule.check(one)
        if isinstance(self._source, DatasetSource):
            check_items_alone(self._source.looked_at)
        check_public_model(model, self._source.arrays())
        self._labels = Labels(model, loss, self._source.head(1))
        self._check_samples()
        if engine is not None:
            engine.require_fit(model)
        self._engine = engine or Engine(
            model,
            loss,
            self._source.head(3),
            name=self._performance.engine,
            precision=self._performance.precision,
            compiled=self._performance.compiled,
        )
        start = self._flat.read()
        other = start if previous is None else self._flat.read_from(previous)
        self._state = State(start, other, torch.zeros_like(start), start.clone() if ema is not None else None)
        self._spent = self._plan.spent
        self._randomness = Randomness(seed)
        self._ledger = replace(
            self._plan.ledger,
            phases=self._spent.phases,
            unproved=self._rule.unproved,
            seeded=seed is not None or self._spent.seeded,
        )
        self._diagnostics = Diagnostics(Clip.of(mechanisms[0], self._clip), self._flat.size)
        self._metrics: list[dict[str, Any]] = []
        self._unpriced: dict[int, Ledger] = {}  # ledgers of rows whose epsilon nobody has asked for yet
        self._seconds = 0.0
        self._watch = Watch(model)
        self._written = self._flat.versions()
        self._kept = self._state
        self._alone = threading.Lock()
        about = dict(about or {})
        self._restrictions: dict[str, Any] = {
            "assumed": [*self._preconditions(), *about.pop("assumed", ())],
            "excluded": [*excluded_by(self._test_public, self._nonfinite)],
        }
        self._record: Record | None = None
        if folder is not None:
            self._record = Record(folder, self._settings(), self._plan, seed, self._fingerprint)
            if resume and self._record.folder.holds_a_run:
                self._restore(self._record.resume())
                both = self._record.restrict({**self._restrictions, "test_public": self._test_public})
                self._test_public = both.pop("test_public")
                self._restrictions = both
            else:
                self._record.begin({"name": name, **self._facts(), **about, **self._restrictions})

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
        return self._model

    @property
    def ledger(self) -> Ledger:
        return self._ledger

    @property
    def state(self) -> State:
        """The released states: ``last`` is w_k and ``previous`` w_{k-1}, as flat float64 vectors.

        While a run with a folder goes on, those that are kept there: a state that is not kept is taken again, with
        other noise, if the process dies, so nobody may have seen it.
        """
        return self._kept if self._record is not None else self._state

    @property
    def metrics(self) -> list[dict[str, Any]]:
        """What was measured on the test set, with an upper bound on the epsilon of that moment.

        That "epsilon" holds if it was fixed beforehand to stop there, and has that in its name in files; ``guarantee``
        has the one of the plan.
        """
        self._price()
        return [dict(row) for row in self._metrics if self._record is None or row["step"] <= self._kept.step]

    @property
    def step(self) -> int:
        return self._state.step

    @property
    def engine(self) -> str:
        return self._engine.name

    @property
    def plan(self) -> Plan:
        """What may run, with every step's own mixing width."""
        return self._plan

    @property
    def seconds(self) -> float:
        """How long the run has taken, for the data holder: it depends on the data."""
        return self._seconds

    @property
    def expected_batch(self) -> float:
        """B = q * population, by which sums are divided, whatever size was drawn."""
        return self._plan.expected_batch(max(1, self.step))

    @property
    def guarantee(self) -> Guarantee:
        """What holds for everything this run releases: the epsilon of the whole plan, however early it is stopped."""
        self._ledger.require_proof()
        assumed, excluded = (tuple(self._restrictions[name]) for name in ("assumed", "excluded"))
        planned = replace(self._plan.ledger, seeded=self._ledger.seeded)
        return Claim(planned, self._ledger, assumed=assumed, excluded=excluded).qualified(self._planned)

    def epsilon(self, delta: float | None = None) -> float:
        """epsilon of the steps so far, from the ledger; ``UnprovedError`` where nothing is proved.

        It holds if the number of steps was fixed beforehand. Whoever stops because of what was seen has the epsilon of
        the plan, which is that of ``guarantee``.
        """
        return ledger_epsilon(self._ledger, self._plan.delta if delta is None else delta)

    def extend(self, steps: int) -> Trainer:
        """Plan ``steps`` more steps of the last mechanism; the guarantee becomes that of the longer plan."""
        self._plan = self._plan.extended(steps)
        self.__dict__.pop("_planned", None)
        if self._record is not None:
            with self._record:
                self._record.replan(self._plan)
        return self

    def averaged_state_dict(self) -> dict[str, Tensor]:
        """The model's state dict with the average of released states in place of the last one."""
        return self._state_dict(self._average_of(self.state))

    def evaluate(self, test_set: Any = None, *, averaged: bool = False) -> dict[str, float | None]:
        """Accuracy and loss on held-out samples."""
        if self._alone.locked():
            raise ModelMixError("a run is going on: read metrics, or evaluate when it has ended.")
        source = self._test if test_set is None else as_source(test_set).to(self._device)
        if source is None:
            raise ModelMixError("there is nothing to evaluate on: give test_set.")
        return self._evaluated(source, self.state, averaged)

    def _evaluated(self, source: Source, state: State, averaged: bool = False) -> dict[str, float | None]:
        vector = self._average_of(state) if averaged else state.last
        return evaluate(self._model, self._loss, self._flat.views(vector), source, self._device)

    @staticmethod
    def _average_of(state: State) -> Tensor:
        if state.average is None:
            raise ModelMixError("this run keeps no average: give ema, for instance ema=0.99.")
        return state.average

    # Training.

    def run(
        self,
        steps: int | None = None,
        *,
        evaluate_every: int | None = None,
        progress: bool | None = None,
    ) -> Trainer:
        """Takes ``steps`` more steps, or all that are planned; 0 takes none and completes the files of the run folder.

        Args:
            steps: at most what the plan has left, or ``BudgetExceeded`` is raised.
            evaluate_every: steps between evaluations on the test set, each with a checkpoint; None does 20.
            progress: None shows a bar if stderr is a terminal.
        """
        left = self._plan.steps - self.step
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
                    f"{steps:,} more steps go past the end of the plan: {left:,} of its {self._plan.steps:,} are left. "
                    "Run those, or plan more with trainer.extend(steps), at a larger epsilon."
                )
            end = self.step + steps
            if self._record is None:
                self._loop(end, every, progress)
            else:
                with self._record:
                    self._loop(end, every, progress)
                    self._finish()
        finally:
            self._alone.release()
        return self

    def _loop(self, end: int, every: int, progress: bool | None) -> None:
        began, before, steps = time.monotonic(), self._seconds, end - self.step
        due = self.step > 0 and (self.step % every == 0 or not steps)
        if due and not any(row["step"] == self.step for row in self._metrics):
            self._measure()  # an interrupt came between the state and its evaluation
        self._keep()
        self._engine.remember()
        memory = None if self._augment is None else WatchedFunction(self._augment, "augment", self._model)
        self._coming = Ahead(self._draws(steps))
        try:
            with Progress(steps, self._describe, progress) as bar:
                seeds = (draws.generator("items").initial_seed() for draws in self._randomness.coming_steps())
                size, padded = self._chunk_size(), self._engine.fixed_shapes
                for chunks in self._source.steps(self._coming, size, padded, seeds):
                    self._one_step(chunks)
                    if memory is not None:
                        memory.check()
                    self._seconds = before + time.monotonic() - began
                    bar.advance()
                    if self.step % every == 0 or self.step == end:
                        self._measure()
                        self._keep()
        except BaseException:
            self._keep_or_forget()
            raise
        finally:
            self._coming = Ahead(())  # it holds keys, and none may outlive the state that used it
            self._write_model()

    def _keep_or_forget(self) -> None:
        """Keep the last whole state, or go back to the last one that is kept.

        Whoever resumes repeats what was not kept with other noise, so nobody may have seen it.
        """
        try:
            self._keep()
        except BaseException:
            self._state = self._kept
            self._metrics = [row for row in self._metrics if row["step"] <= self._kept.step]
            raise

    def _draws(self, steps: int) -> Iterator[Tensor]:
        step = self.step
        for ahead, draws in zip(range(1, steps + 1), self._randomness.coming_steps(), strict=False):
            q = self.mechanism_at(step + ahead).sample_rate
            if self._rule.name == "released" and self._embedding is None:
                parts = [draws.poisson_indices(f"sampling {i}", self._source.n, q / _PARTS) for i in range(_PARTS)]
                yield torch.cat(parts)
            else:
                yield draws.poisson_indices("sampling", self._source.n, q)

    def _one_step(self, chunks: Iterator[Chunk]) -> None:
        step = self.step + 1
        mechanism, eta, draws = self.mechanism_at(step), self._lr.at(step), self._randomness.step()
        total, met = self._clipped_sum(chunks, mechanism, draws)
        proposed = propose_step(
            self._state,
            total,
            draws,
            rule=self._rule,
            mechanism=mechanism,
            clip=self._clip,
            eta=eta,
            expected_batch=self._plan.expected_batch(step),
        )
        # All the work is handed over before its outcome is looked at: an accelerator does not wait for the next draw.
        self._coming.look()
        diagnostics = self._diagnosed(met.to_cpu())
        self._account(step, mechanism)
        state = proposed.accepted()
        self._randomness.advance()  # first, so that wherever an interrupt falls no key outlives the state that used it
        self._state, self._diagnostics = state, diagnostics

    def _diagnosed(self, met: ClippedSum) -> Diagnostics:
        """What clipping has met with this step; refuses a step with a gradient that is not finite, if so wanted."""
        if self._nonfinite == "stop" and not bool(torch.isfinite(met.norms).all()):
            raise ModelMixError(
                f"step {self.step + 1}: the loss or gradient of a sample is not finite; the step was not taken and the "
                f"run stands at step {self.step}. Lower lr, or let such samples count as zero with "
                'nonfinite="drop".'
            )
        diagnostics = copy.deepcopy(self._diagnostics)
        diagnostics.add(met)
        diagnostics.add_draw(met.norms.numel())
        return diagnostics

    def _clipped_sum(
        self, chunks: Iterator[Chunk], mechanism: Mechanism, draws: StepRandomness
    ) -> tuple[Tensor, ClippedSum]:
        """The sum of clipped gradients, and what clipping met.

        With an embedding the sum is of residuals and of embeddings with the noise of those.
        """
        parameters = self._flat.views(self._rule.gradient_point(self._state))
        clip = self._clip_of(mechanism)
        total = torch.zeros_like(self._state.last)
        generator = draws.generator("augment", self._device)
        parts: list[ClippedSum] = []
        with preserve_torch_rng(self._device):
            # Dropout and the like draw from torch's own generator; seeded here, they repeat when a run is resumed.
            torch.manual_seed(draws.generator("model").initial_seed())
            basis = None if self._embedding is None else self._find_basis(self._embedding, parameters, draws)
            embedded = 0 if basis is None else torch.zeros(basis.size, dtype=torch.float64, device=self._device)
            for chunk in chunks:
                inputs, targets, weights = tree_map(
                    partial(to_device_async, device=self._device), (chunk.inputs, chunk.targets, chunk.weights)
                )
                if isinstance(self._source, DatasetSource):
                    targets, weights = self._labels.without_unknown(targets, weights)
                if self._augment is not None:
                    inputs, targets = tree_map(lambda t: t.repeat_interleave(self._multiplicity, 0), (inputs, targets))
                    inputs = apply_augmentation(self._augment, inputs, generator)
                batch = Batch(inputs, targets, weights, self._multiplicity)
                if isinstance(clip, Clip):
                    parts.append(self._engine(parameters, batch, clip))
                else:
                    assert basis is not None
                    gradients = self._engine.gradients(parameters, batch)
                    more, part = clip.sum(gradients, basis, weights)
                    del gradients  # what layers saw, before the next chunk
                    embedded += more
                    parts.append(part)
                total += parts[-1].total
        self._watch.check()
        met = ClippedSum.concatenate(total, parts)
        if basis is None or not isinstance(clip, EmbeddingClip):
            return total, met
        noise = draws.gaussian("embedding noise", basis.size, self._device)
        return total + basis.reconstruct(embedded + mechanism.noise_multiplier * clip.c0 * noise), met

    def _clip_of(self, mechanism: Mechanism) -> Clip | EmbeddingClip:
        if isinstance(mechanism, EmbeddingMechanism):
            found = EmbeddingClip.of(mechanism, self._clip)
            return replace(found, p=1, c=math.inf) if self._rule.name == "released" else found
        clip = Clip.of(mechanism, self._clip)
        return replace(clip, p=1) if self._rule.name == "released" else clip

    def _find_basis(self, embedding: Embedding, parameters: dict[str, Tensor], draws: StepRandomness) -> Basis:
        """The basis of a step, from public samples and a released state alone."""
        chunks = embedding.chunks(self._chunk_size(), self._device, padded=self._engine.fixed_shapes)
        public = (self._engine.gradients(parameters, Batch(x, y)).first(count) for x, y, count in chunks)
        layout = embedding.layout(self._flat.size)
        return find_basis(layout, public, draws.generator("basis", self._device), self._engine.precision)

    def _account(self, step: int, mechanism: Mechanism) -> None:
        """The ledger line of a step, before its state exists."""
        line = self._spent.steps + step
        if line <= self._ledger.steps:
            # Written before the process stopped, for a state that was never kept and that nobody has seen.
            if self._ledger.mechanism_at(line) != mechanism:
                raise UnprovedError(
                    "a step runs the mechanism that its ledger line names",
                    f"step {step} was accounted with another mechanism.",
                    "Resume with the settings the run was begun with.",
                )
            return
        self._ledger = self._ledger.add(mechanism)

    def mechanism_at(self, step: int) -> Mechanism:
        """What a step runs, and what its ledger line says; steps count from 1."""
        return self._plan.mechanism_at(step)

    def _resolved(self, plan: Plan) -> Plan:
        """The plan with the mixing width that tau and eta give every step."""
        if self._tau is None:
            return plan
        phases, step = [], 0
        for phase in plan.phases:
            for _ in range(phase.steps):
                step += 1
                width = mixing_width(self._clip, self._tau.at(step), self._lr.at(step), plan.expected_batch(step))
                phases.append(Phase(replace(phase.mechanism, mixing_width=width), 1))
        return plan.with_phases(phases)

    @cached_property
    def _planned(self) -> Guarantee:
        return self._plan.guarantee()

    def _preconditions(self) -> list[str]:
        """What nobody can prove from outside of how this run takes its gradients."""
        if self._engine.name == "hooks":
            return []
        return [KEEPS_NOTHING]

    def _chunk_size(self) -> int:
        """By the largest batch of the whole plan: augmentation is drawn chunk by chunk, wherever a run is resumed."""
        assert self._plan.population is not None
        batch = max(phase.mechanism.sample_rate for phase in self._plan.phases) * self._plan.population
        return self._performance.chunk_for(batch, self._flat.size, self._multiplicity)

    def _norm_layers(self) -> Tensor:
        """1 for every coordinate of a norm layer."""
        inside = {id(p) for m in self._model.modules() if isinstance(m, _NORM_LAYERS) for p in m.parameters()}
        named = {name: id(p) in inside for name, p in self._model.named_parameters() if p.requires_grad}
        flags = [
            torch.full((size,), named[name], device=self._device)
            for name, size in zip(self._flat.names, self._flat.sizes, strict=True)
        ]
        return torch.cat(flags)

    # Checks.

    def _check_samples(self) -> None:
        batch = self._plan.expected_batch(1)
        if batch < 1:
            warnings.warn(
                f"the expected batch q*n = {batch:.3g} is below 1: most draws will be empty, and each still costs a "
                "step of privacy. Raise the sampling rate.",
                stacklevel=3,
            )
        if isinstance(self._source, TensorSource):
            self._labels.check(self._source.targets)
        if self._test is not None:
            tested = Labels(self._model, self._loss, self._test.head(1))
            if isinstance(self._test, TensorSource):
                tested.check(self._test.targets, "test")
        if self._embedding is not None:
            self._labels.check(self._embedding.source.targets, "public")
            self._embedding.layout(self._flat.size)

    def _check_untouched(self) -> None:
        check_model(self._model)
        self._watch.check()
        if self._flat.versions() != self._written:
            raise UnprovedError(
                "released states come from noisy, mixed steps only",
                "the model's trained weights were changed from outside since the trainer last wrote them.",
                "Make a new trainer for a model with other weights.",
            )

    # Keeping.

    def _settings(self) -> dict[str, Any]:
        """Everything a step's outcome depends on, besides plan, data and randomness."""
        return {
            "rule": self._rule.name,
            "padding": self._rule.padding,
            "clip": self._clip,
            "lr": self._lr.as_dict(),
            "tau": None if self._tau is None else self._tau.as_dict(),
            "momentum": self._rule.momentum,
            "weight_decay": self._rule.weight_decay,
            "ema": self._rule.ema,
            "multiplicity": self._multiplicity,
            "augment": None if self._augment is None else _name(self._augment),
            "nonfinite": self._nonfinite,
            "loss": _name(self._loss),
            **({} if self._embedding is None else {"embedding": self._embedding.as_dict()}),
            "parameters": self._flat.shapes,
        }

    def _facts(self) -> dict[str, Any]:
        """What is public about the run: sizes and choices that no private value has touched."""
        return {
            "device": str(self._device),
            "engine": self._engine.name,
            "population": self._plan.population,
            "adjacency": self._plan.ledger.adjacency,
            "unit": self._plan.unit,
            "parameters": self._flat.size,
            "delta": self._plan.delta,
            "test_public": self._test_public,
        }

    def _arithmetic(self) -> str:
        """A digest of all we can see of how a step is computed: whoever repeats a key must repeat this."""
        seen = {
            "engine": self._engine.name,
            "precision": str(self._engine.precision),
            "chunk": self._chunk_size(),
            "compiled": self._performance.compiled,
            "device": str(self._device),
            "threads": torch.get_num_threads(),
            "versions": [torch.__version__, __version__, sys.version],
            "code": [code_digest(each) for each in (self._model, self._loss, self._augment)],
            "data": self._source.repeatable(),
        }
        return hashlib.sha256(json.dumps(seen, sort_keys=True).encode()).hexdigest()

    def _fingerprint(self, salt: bytes) -> str:
        """Of the data and of all that is not trained. The salt is secret, so the digest tells an outsider nothing."""
        digest = hashlib.blake2b(self._source.fingerprint(salt).encode(), key=salt, digest_size=16)
        trained = set(self._flat.names)
        for name, value in [*self._model.named_parameters(), *self._model.named_buffers()]:
            if name not in trained:
                digest.update(name.encode())
                digest.update(value.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
        return digest.hexdigest()

    def _restore(self, found: tuple[dict[str, Tensor], dict[str, Any], Ledger] | None) -> None:
        if found is None:
            return
        arrays, meta, ledger = found
        vectors = {name: t.to(self._device) for name, t in arrays.items()}
        names = {"last", "previous", "velocity", *(["average"] if self._rule.ema is not None else [])}
        if set(vectors) != names or any(t.shape != (self._flat.size,) for t in vectors.values()):
            raise ModelMixError("the checkpoint is not of this model and rule: choose another folder.")
        same_claim = replace(ledger, phases=()) == replace(self._ledger, phases=())
        if not same_claim or not ledger.starts_with(self._spent) or not self._plan.ledger.starts_with(ledger):
            raise ModelMixError("the ledger is not of this run: restore ledger.json.")
        self._ledger = ledger
        try:
            self._randomness = Randomness.from_state(meta["randomness"])
            self._diagnostics.restore(meta["diagnostics"])
            self._metrics = [dict(row) for row in meta["metrics"]]
            self._seconds = float(meta["seconds"])
            self._state = State(step=int(meta["step"]), **vectors)
            arithmetic = str(meta["arithmetic"])
        except (AttributeError, KeyError, TypeError, ValueError):
            raise ModelMixError("the checkpoint is not readable: restore checkpoint.npz.") from None
        # The key of a step serves one computation: only a seeded run that is in all we can see the same repeats it.
        # The repeated states of the others have noise of their own, and nobody has seen the first ones (_keep).
        if not self._randomness.seeded or arithmetic != self._arithmetic() or self._source.repeatable() is None:
            self._randomness.refresh()
        self._kept = self._state
        self._write_model()

    def _keep(self) -> None:
        if self._record is None:
            return
        self._price()
        arrays = {"last": self._state.last, "previous": self._state.previous, "velocity": self._state.velocity}
        if self._state.average is not None:
            arrays["average"] = self._state.average
        meta = {
            "step": self.step,
            "randomness": self._randomness.state(),
            "diagnostics": self._diagnostics.state(),
            "metrics": self._metrics,
            "seconds": self._seconds,
            "arithmetic": self._arithmetic() if self._randomness.seeded else "",
        }
        self._record.keep(self._ledger, arrays, meta)
        self._kept = self._state

    def _measure(self) -> None:
        """What people will see of the present state, once it is kept."""
        row: dict[str, Any] = {"step": self.step, "lr": self._lr.at(self.step), "seconds": round(self._seconds, -1)}
        row["epsilon"] = None
        self._unpriced[self.step] = self._ledger
        if self._test is not None:
            found = self._evaluated(self._test, self._state)
            row |= {"test_accuracy": found["accuracy"], "test_loss": found["loss"]}
            if self._state.average is not None:
                row["ema_accuracy"] = self._evaluated(self._test, self._state, averaged=True)["accuracy"]
        self._metrics = [old for old in self._metrics if old["step"] < self.step] + [row]

    def _price(self) -> None:
        """Write epsilon into the rows that somebody is about to read: it can take longer than a step."""
        for row in self._metrics:
            ledger = self._unpriced.pop(row["step"], None)
            if ledger is not None and not ledger.unproved:
                last = row["step"] == self._plan.steps
                row["epsilon"] = self._planned.epsilon if last else quick_epsilon(ledger, self._plan.delta)

    def _finish(self) -> None:
        assert self._record is not None
        models = {"model.pt": self._state_dict(self._state.last)}
        if self._state.average is not None:
            models["model-ema.pt"] = self._state_dict(self._state.average)
        self._record.finish(models, self._diagnostics.as_dict(), self._certificate())

    def _certificate(self) -> dict[str, Any] | None:
        """What the data holder may sign; None for a run that proves nothing to others."""
        if self._ledger.unproved or self._ledger.seeded or not math.isfinite(self._planned.epsilon):
            return None
        whole = self.step == self._plan.steps
        return {
            "guarantee": self.guarantee.as_dict(),
            "steps_planned": self._plan.steps,
            "steps_taken": self.step,
            "epsilon_if_stopping_was_fixed_beforehand": None if whole else self.epsilon(),
            "software": {"modelmix": __version__, "torch": torch.__version__},
            "ledger_digest": self._ledger.digest,
        }

    def _state_dict(self, vector: Tensor) -> dict[str, Tensor]:
        views = self._flat.views(vector)
        state = dict(self._model.state_dict())
        # A tied parameter has several keys and one value.
        same = {id(p): name for name, p in self._model.named_parameters()}
        for key, value in self._model.state_dict(keep_vars=True).items():
            if id(value) in same and same[id(value)] in views:
                state[key] = views[same[id(value)]].detach().clone()
        return state

    def _write_model(self) -> None:
        """The present state becomes the model's weights."""
        self._flat.write(self._state.last)
        self._written = self._flat.versions()

    def _describe(self) -> str:
        if self._ledger.unproved:
            return "epsilon: not proved"
        note = ", seeded" if self._ledger.seeded else ""
        return f"epsilon {up(self._planned.epsilon, 3)} planned at delta {up_digits(self._plan.delta)}{note}"


def _name(function: Any) -> str:
    return str(getattr(function, "__name__", type(function).__name__))

"""The trainer: draws, clipped sums, noisy mixed steps, ledger lines, checkpoints, in one direction."""

from __future__ import annotations

import copy
import hashlib
import math
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from itertools import chain, repeat
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from modelmix.accounting.accountant import epsilon as ledger_epsilon
from modelmix.accounting.embedding import EmbeddingMechanism
from modelmix.accounting.ledger import Ledger
from modelmix.accounting.mechanism import Mechanism, mixing_width
from modelmix.accounting.validation import probability, whole
from modelmix.errors import ModelMixError, UnprovedError
from modelmix.report.words import up
from modelmix.training import engines
from modelmix.training.clipping import Clip, ClippedSum
from modelmix.training.diagnostics import Diagnostics
from modelmix.training.embedding import Basis, Embedding, EmbeddingClip, find_basis
from modelmix.training.evaluation import evaluate, is_classification
from modelmix.training.guard import Watch, check_mechanism, check_model
from modelmix.training.parameters import FlatParameters
from modelmix.training.performance import Performance
from modelmix.training.progress import Progress
from modelmix.training.randomness import Randomness, StepRandomness, draws_apart
from modelmix.training.record import Record
from modelmix.training.rules import Rule, State, propose_step
from modelmix.training.sampling import Ahead, Chunk, TensorSource, as_source
from modelmix.training.schedules import Schedule, schedule
from modelmix.training.sending import sent

Augment = Callable[[Any, torch.Generator], Any]
_EVALUATIONS = 20
_PARTS = 15  # draws that make up a step of the authors' code
_NORM_LAYERS = (nn.GroupNorm, nn.LayerNorm, nn.modules.instancenorm._InstanceNorm)


class Trainer:
    """Trains a model privately and keeps the account.

    Guarantee: the states it releases, taken together, are (epsilon, delta)-differentially private under adding or
    removing one sample of ``train_set``, with the epsilon of its ledger; so is everything computed from them. What a
    step runs is the mechanism that its ledger line names.

    Args:
        model: any module without batch statistics; what requires a gradient is trained.
        loss: ``loss(outputs, targets)``. It is given one sample at a time, so it cannot make samples meet.
        train_set: (inputs, targets) as tensors or arrays, or a map-style ``Dataset``.
        mechanism: noise, mixing width, truncation and sampling rate of every step; or a ``Ledger`` whose phases are run
            in order.
        clip: c, the bound on the norm of a sample's gradient (l2; l1 for Laplace noise). With an embedding c1, the
            bound of residuals; embeddings are clipped to the mechanism's clip_ratio times that.
        lr: eta, a number or a ``Schedule``. The mixing threshold follows it: tau = omega * c * eta / (q*n).
        spent: what was released about the same samples before, private statistics for instance: a ledger whose phases
            come first in this run's. The caller answers for it being all there is.
        tau: a number or a ``Schedule`` in place of the mechanism's mixing width; every step's own omega is accounted.
        rule: "mix", "alternate", "average", "plain" or "released"; None takes "mix" if the mechanism mixes and "plain"
            if not. See ``rules.Rule``, also for padding, momentum, weight_decay and ema.
        previous: the second initial state w_{-1}, as a model or a state dict; None takes w_{-1} = w_0.
        augment: ``augment(inputs, generator)`` applied to every sample ``multiplicity`` times; gradients are averaged
            over the copies of a sample before clipping.
        embedding: public samples in whose directions gradients are embedded (Section 5.3), for an
            ``EmbeddingMechanism``.
        nonfinite: what to do when a sample's gradient is not finite: "stop" before the step, or "drop" (it counts as
            zero, which the proof covers).
        test_set: held-out samples for reporting.
        delta: at which epsilon is shown.
        seed: makes the run repeatable, for tests only.
        folder: where the run is kept; with ``resume`` a run that is there goes on where it stopped.
        performance: speed and memory.
        engine: made earlier for a model of the same builder and these samples, with what it has compiled; None makes
            one.
    """

    def __init__(
        self,
        model: nn.Module,
        loss: engines.Loss,
        train_set: Any,
        mechanism: Mechanism | Ledger,
        clip: float,
        lr: float | Schedule,
        *,
        spent: Ledger | None = None,
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
        nonfinite: str = "stop",
        test_set: Any = None,
        delta: float = 1e-5,
        seed: int | None = None,
        folder: str | Path | None = None,
        resume: bool = False,
        name: str = "run",
        about: Mapping[str, Any] | None = None,
        performance: Performance | None = None,
        engine: engines.Engine | None = None,
    ) -> None:
        self._performance = performance or Performance()
        self._device = self._performance.find_device()
        self._model, self._loss = model.to(self._device), loss
        self._source = as_source(train_set, self._performance.workers).to(self._device)
        self._test = None if test_set is None else as_source(test_set, self._performance.workers).to(self._device)
        self._flat = FlatParameters(model)
        check_model(model)
        self._lr = schedule("lr", lr, "the learning rate")
        self._tau = None if tau is None else schedule("tau", tau, "the mixing threshold")
        self._plan = mechanism
        self._delta = probability("delta", delta, "the failure probability")
        self._clip = Clip(clip).c
        self._multiplicity = whole("multiplicity", multiplicity, "the number of copies of a sample", least=1)
        if augment is None and self._multiplicity > 1:
            raise ModelMixError(
                "multiplicity > 1 needs augment: copies of a sample must differ to be worth their time."
            )
        if nonfinite not in ("stop", "drop"):
            raise ModelMixError(f"nonfinite = {nonfinite!r} is unknown: choose stop or drop.")
        self._augment, self._nonfinite = augment, nonfinite
        self._embedding = embedding
        for one in self._plan_mechanisms():
            check_mechanism(one, self._flat.size, embedded=embedding is not None)
        rule = rule or ("mix" if self._tau is not None or any(m.mixed for m in self._plan_mechanisms()) else "plain")
        unmixed = self._norm_layers() if rule == "released" and embedding is None else None
        self._rule = Rule(rule, padding, momentum, weight_decay, ema, unmixed, embedded=embedding is not None)
        first = self.mechanism_at(1)
        self._rule.check(first)
        self._classes = self._count_classes()
        self._check_samples()
        if engine is not None:
            engine.require_fit(model)
        self._engine = engine or engines.Engine(
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
        self._spent = Ledger() if spent is None else spent
        self._spent.require_proof()
        self._ledger = Ledger(self._spent.phases, self._rule.unproved)
        self._randomness = Randomness(seed)
        self._diagnostics = Diagnostics(Clip.of(first, self._clip), self._flat.size)
        self._metrics: list[dict[str, Any]] = []
        self._seconds = 0.0
        self._watch = Watch(model)
        self._written = self._flat.versions()
        self._record: Record | None = None
        if folder is not None:
            self._record = Record(folder, self._settings(), seed, self._fingerprint, self._spent.steps)
            if resume and self._record.folder.holds_a_run:
                self._restore(self._record.resume())
            else:
                self._record.begin({"name": name, **self._facts(), **(about or {})})

    def __setattr__(self, name: str, value: Any) -> None:
        if not name.startswith("_"):
            raise UnprovedError(
                "a step runs the mechanism that its ledger line names",
                f"{name} cannot be changed on a trainer.",
                "Give a Schedule for lr or tau, a Ledger of phases for the mechanism, or make a new trainer.",
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
        """The released states: ``last`` is w_k and ``previous`` w_{k-1}, as flat float64 vectors."""
        return self._state

    @property
    def metrics(self) -> list[dict[str, Any]]:
        """What was measured on the test set, with the epsilon of that moment."""
        return [dict(row) for row in self._metrics]

    @property
    def step(self) -> int:
        return self._state.step

    @property
    def engine(self) -> str:
        return self._engine.name

    @property
    def expected_batch(self) -> float:
        """B = q*n, by which sums are divided, whatever size was drawn."""
        return self.mechanism_at(max(1, self.step)).sample_rate * self._source.n

    def epsilon(self, delta: float | None = None) -> float:
        """epsilon of the run so far, from its ledger; ``UnprovedError`` where nothing is proved."""
        return ledger_epsilon(self._ledger, self._delta if delta is None else delta)

    def averaged_state_dict(self) -> dict[str, Tensor]:
        """The model's state dict with the average of released states in place of the last one."""
        if self._state.average is None:
            raise ModelMixError("this run keeps no average: give ema, for instance ema=0.99.")
        return self._state_dict(self._state.average)

    def evaluate(self, test_set: Any = None, *, averaged: bool = False) -> dict[str, float | None]:
        """Accuracy and loss on held-out samples."""
        source = self._test if test_set is None else as_source(test_set).to(self._device)
        if source is None:
            raise ModelMixError("there is nothing to evaluate on: give test_set.")
        vector = self._state.last
        if averaged:
            if self._state.average is None:
                raise ModelMixError("this run keeps no average: give ema, for instance ema=0.99.")
            vector = self._state.average
        return evaluate(self._model, self._loss, self._flat.views(vector), source, self._device)

    # Training.

    def run(
        self,
        steps: int,
        *,
        evaluate_every: int | None = None,
        progress: bool | None = None,
    ) -> Trainer:
        """Takes ``steps`` more steps; 0 takes none and completes the files of the run folder.

        Args:
            evaluate_every: steps between evaluations on the test set, each with a checkpoint; None does 20.
            progress: None shows a bar if stderr is a terminal.
        """
        steps = whole("steps", steps, "the number of steps", least=0)
        every = (
            max(1, steps // _EVALUATIONS)
            if evaluate_every is None
            else whole("evaluate_every", evaluate_every, "the number of steps between evaluations", least=1)
        )
        self._check_untouched()
        self.mechanism_at(self.step + steps)  # a plan that is too short is refused before any work
        end = self.step + steps
        if self._record is None:
            self._loop(end, every, progress)
        else:
            with self._record:
                self._loop(end, every, progress)
                self._finish()
        return self

    def _loop(self, end: int, every: int, progress: bool | None) -> None:
        began, before, steps = time.monotonic(), self._seconds, end - self.step
        due = self.step > 0 and (self.step % every == 0 or not steps)
        if due and not any(row["step"] == self.step for row in self._metrics):
            self._measure()  # an interrupt came between the state and its evaluation
        self._keep()
        self._coming = Ahead(self._draws(steps))
        try:
            with Progress(steps, self._describe, progress) as bar:
                for chunks in self._source.steps(self._coming, self._chunk_size(), self._engine.fixed_shapes):
                    self._one_step(chunks)
                    self._seconds = before + time.monotonic() - began
                    bar.advance()
                    if self.step % every == 0 or self.step == end:
                        self._measure()
                        self._keep()
        except BaseException:
            self._keep()  # the last whole state; what failed has changed nothing
            raise
        finally:
            self._coming = Ahead(())  # it holds keys, and none may outlive the state that used it
            self._write_model()

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
            expected_batch=mechanism.sample_rate * self._source.n,
        )
        # All the work is handed over before its outcome is looked at: an accelerator does not wait for the next draw.
        self._coming.look()
        diagnostics = self._diagnosed(met.on_processor())
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
        with draws_apart(self._device):
            # Dropout and the like draw from torch's own generator; seeded here, they repeat when a run is resumed.
            torch.manual_seed(draws.generator("model").initial_seed())
            basis = None if self._embedding is None else self._find_basis(self._embedding, parameters, draws)
            embedded = 0 if basis is None else torch.zeros(basis.size, dtype=torch.float64, device=self._device)
            for chunk in chunks:
                inputs, targets, weights = tree_map(
                    lambda t: sent(t, self._device), (chunk.inputs, chunk.targets, chunk.weights)
                )
                if not isinstance(self._source, TensorSource):
                    self._check_targets(targets)
                if self._augment is not None:
                    inputs, targets = tree_map(lambda t: t.repeat_interleave(self._multiplicity, 0), (inputs, targets))
                    inputs = self._augment(inputs, generator)
                if isinstance(clip, Clip):
                    parts.append(self._engine(parameters, inputs, targets, weights, clip, self._multiplicity))
                else:
                    assert basis is not None
                    gradients = self._engine.gradients(parameters, inputs, targets, self._multiplicity)
                    more, part = clip.sum(gradients, basis, weights)
                    del gradients  # what layers saw, before the next chunk
                    embedded += more
                    parts.append(part)
                total += parts[-1].total
        self._watch.check()
        met = ClippedSum.joined(total, parts)
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
        public = (self._engine.gradients(parameters, inputs, targets).first(count) for inputs, targets, count in chunks)
        layout = embedding.layout(self._flat.size)
        return find_basis(layout, public, draws.generator("basis", self._device), self._engine.precision)

    def _account(self, step: int, mechanism: Mechanism) -> None:
        """The ledger line of a step, before its state exists."""
        line = self._spent.steps + step
        if line <= self._ledger.steps:
            # Written before the process stopped, for a state that was never kept. The same randomness and data give
            # the same state again, so nothing more is spent.
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
        mechanism = self._plan.mechanism_at(step) if isinstance(self._plan, Ledger) else self._plan
        if self._tau is None:
            return mechanism
        batch = mechanism.sample_rate * self._source.n
        return replace(mechanism, mixing_width=mixing_width(self._clip, self._tau.at(step), self._lr.at(step), batch))

    def _plan_mechanisms(self) -> list[Mechanism]:
        if isinstance(self._plan, Ledger):
            if not self._plan.phases:
                raise ModelMixError("the plan has no phase: use Ledger().add(mechanism, steps).")
            return [phase.mechanism for phase in self._plan.phases]
        return [self._plan]

    def _chunk_size(self) -> int:
        """By the largest batch of the whole plan: augmentation is drawn chunk by chunk, wherever a run is resumed."""
        plan = [phase.mechanism for phase in self._plan.phases] if isinstance(self._plan, Ledger) else [self._plan]
        batch = max(mechanism.sample_rate for mechanism in plan) * self._source.n
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
        batch = self.mechanism_at(1).sample_rate * self._source.n
        if batch < 1:
            warnings.warn(
                f"q*n = {batch:.3g} is below 1: most draws will be empty, and each still costs a step of privacy. "
                "Raise the sampling rate.",
                stacklevel=3,
            )
        if isinstance(self._source, TensorSource):
            self._check_targets(self._source.targets)
        if isinstance(self._test, TensorSource):
            self._check_targets(self._test.targets, "test")
        if self._embedding is not None:
            self._check_targets(self._embedding.source.targets, "public")
            self._embedding.layout(self._flat.size)

    def _check_targets(self, targets: Any, split: str = "training") -> None:
        """Labels that the model has no output for: an index error at best, on a GPU a dead process."""
        if (
            self._classes is None
            or not isinstance(targets, Tensor)
            or targets.dim() != 1
            or targets.is_floating_point()
        ):
            return
        ignored = getattr(self._loss, "ignore_index", -100)
        kept = targets[targets != ignored]
        low, high = (int(kept.min()), int(kept.max())) if kept.numel() else (0, 0)
        if low < 0 or high >= self._classes:
            raise ModelMixError(
                f"the {split} labels run from {low} to {high} and the model has {self._classes} outputs: labels must "
                f"be 0 to {self._classes - 1}."
            )

    def _count_classes(self) -> int | None:
        """The number of labels the loss can take, for the losses that take labels."""
        name = getattr(self._loss, "__name__", type(self._loss).__name__)
        if name not in ("cross_entropy", "CrossEntropyLoss", "nll_loss", "NLLLoss"):
            return None
        inputs, targets = tree_map(lambda t: t.to(self._device), self._source.head(1))
        with torch.no_grad():
            outputs = engines.universal.call(self._model, inputs)
        return int(outputs.shape[1]) if is_classification(outputs, targets) else None

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
        """Everything a step's outcome depends on, besides data and randomness, and the delta of its metrics."""
        plan = (
            [phase.as_dict() for phase in self._plan.phases] if isinstance(self._plan, Ledger) else self._plan.as_dict()
        )
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
            "augment": None
            if self._augment is None
            else getattr(self._augment, "__name__", type(self._augment).__name__),
            "nonfinite": self._nonfinite,
            "loss": getattr(self._loss, "__name__", type(self._loss).__name__),
            "delta": self._delta,
            "mechanism": plan,
            **({} if self._embedding is None else {"embedding": self._embedding.as_dict()}),
            **({"spent": [phase.as_dict() for phase in self._spent.phases]} if self._spent.phases else {}),
            "samples": self._source.n,
            "parameters": self._flat.shapes,
        }

    def _facts(self) -> dict[str, Any]:
        return {
            "device": str(self._device),
            "engine": self._engine.name,
            "samples": self._source.n,
            "parameters": self._flat.size,
            "delta": self._delta,
        }

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
        before, ran = _mechanisms(self._spent), _mechanisms(ledger)
        # Takes as many lines off ``ran`` as were spent; the steps follow.
        same = all(mine == theirs for mine, theirs in zip(before, ran, strict=False))
        if (
            not same
            or ledger.unproved != self._rule.unproved
            or any(m != self.mechanism_at(k) for k, m in enumerate(ran, 1))
        ):
            raise ModelMixError("the ledger is not of this run: restore ledger.json.")
        self._ledger = ledger
        try:
            self._randomness = Randomness.from_state(meta["randomness"])
            self._diagnostics.restore(meta["diagnostics"])
            self._metrics = [dict(row) for row in meta["metrics"]]
            self._seconds = float(meta["seconds"])
            self._state = State(step=int(meta["step"]), **vectors)
        except (AttributeError, KeyError, TypeError, ValueError):
            raise ModelMixError("the checkpoint is not readable: restore checkpoint.npz.") from None
        self._write_model()

    def _keep(self) -> None:
        if self._record is None:
            return
        arrays = {"last": self._state.last, "previous": self._state.previous, "velocity": self._state.velocity}
        if self._state.average is not None:
            arrays["average"] = self._state.average
        meta = {
            "step": self.step,
            "randomness": self._randomness.state(),
            "diagnostics": self._diagnostics.state(),
            "metrics": self._metrics,
            "seconds": self._seconds,
        }
        self._record.keep(self._ledger, arrays, meta)

    def _measure(self) -> None:
        """What people will see of the present state, once it is kept."""
        row: dict[str, Any] = {"step": self.step, "lr": self._lr.at(self.step), "seconds": round(self._seconds, 3)}
        row["epsilon"] = None if self._ledger.unproved else self.epsilon()
        if self._test is not None:
            found = self.evaluate()
            row |= {"test_accuracy": found["accuracy"], "test_loss": found["loss"]}
            if self._state.average is not None:
                row["ema_accuracy"] = self.evaluate(averaged=True)["accuracy"]
        self._metrics = [old for old in self._metrics if old["step"] < self.step] + [row]

    def _finish(self) -> None:
        assert self._record is not None
        models = {"model.pt": self._state_dict(self._state.last)}
        if self._state.average is not None:
            models["model-ema.pt"] = self._state_dict(self._state.average)
        self._record.finish(models, self._diagnostics.as_dict())

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
        note = ", seeded" if self._randomness.seeded else ""
        return f"epsilon {up(self.epsilon(), 3)} at delta {self._delta:g}{note}"


def _mechanisms(ledger: Ledger) -> Iterator[Mechanism]:
    """One for every step."""
    return chain.from_iterable(repeat(phase.mechanism, phase.steps) for phase in ledger.phases)

"""What is trained, on what and how: everything a step's outcome depends on, besides plan and randomness."""

from __future__ import annotations

import hashlib
import json
import sys
import warnings
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from modelmix._version import __version__
from modelmix.accounting.ledger import Phase
from modelmix.accounting.mechanism import mixing_width
from modelmix.accounting.plan import Plan
from modelmix.gradients import Engine, Loss
from modelmix.gradients.clip import Clip
from modelmix.gradients.parameters import FlatParameters
from modelmix.training.augment import Augment
from modelmix.training.digests import code_digest
from modelmix.training.embedding import Embedding
from modelmix.training.evaluation import evaluate
from modelmix.training.guard import (
    check_mechanism,
    check_model,
    check_public_model,
    require_not_private,
    require_other_samples,
)
from modelmix.training.item_checks import check_items_independent
from modelmix.training.labels import Labels
from modelmix.training.options import RunOptions
from modelmix.training.performance import Performance
from modelmix.training.rules import Rule
from modelmix.training.sampling import DatasetSource, Source, TensorSource, as_source
from modelmix.training.schedules import Schedule, schedule
from modelmix.training.sums import GradientSum


@dataclass(frozen=True)
class TrainingTask:
    """A model, its samples, and how a step is made of them.

    Args:
        model, loss, source: what is trained on what.
        flat: the model's trained parameters.
        gradients: how clipped gradients are summed.
        rule: how released states are combined.
        lr, tau: learning rate and mixing threshold of every step; no tau where the plan gives the mixing width.
        nonfinite: what to do with a gradient that is not finite.
        performance: speed and memory.
    """

    model: nn.Module
    loss: Any
    source: Source
    flat: FlatParameters
    gradients: GradientSum
    rule: Rule
    lr: Schedule
    tau: Schedule | None
    nonfinite: str
    performance: Performance

    @classmethod
    def of(
        cls,
        model: nn.Module,
        loss: Loss,
        train_set: Any,
        plan: Plan,
        clip: float,
        lr: float | Schedule,
        rule: Rule,
        augment: Augment,
        embedding: Embedding | None,
        options: RunOptions,
    ) -> tuple[TrainingTask, Plan]:
        """Return the task and the plan with every step's mixing width; refuse what no proof covers."""
        performance = options.performance
        device = performance.find_device()
        source = as_source(train_set, performance.workers).to(device)
        flat = FlatParameters(model.to(device))
        check_model(model)
        require_not_private(model)
        lr = schedule("lr", lr, "the learning rate")
        tau = None if rule.tau is None else schedule("tau", rule.tau, "the mixing threshold")
        clip = Clip(clip).c
        plan = resolve_plan(plan.bound_to(source.n), clip, lr, tau)
        plan.require_signal()
        mechanisms = [phase.mechanism for phase in plan.phases]
        for one in mechanisms:
            check_mechanism(one, flat.size, embedded=embedding is not None)
        if rule.name is None:
            rule = replace(rule, name="mix" if any(one.mixed for one in mechanisms) else "plain")
        for one in mechanisms:
            rule.check(one)
        if isinstance(source, DatasetSource):
            check_items_independent(source.probed)
        check_public_model(model, source.arrays())
        labels = Labels(model, loss, source.head(1))
        if plan.expected_batch(1) < 1:
            warnings.warn(
                f"the expected batch q*n = {plan.expected_batch(1):.3g} is below 1: most draws will be empty, and each "
                "still costs a step of privacy. Raise the sampling rate.",
                stacklevel=3,
            )
        if isinstance(source, TensorSource):
            labels.check(source.targets)
        if embedding is not None:
            labels.check(embedding.source.targets, "public")
            require_other_samples("the public set", embedding.source.arrays(), source.arrays())
            embedding.layout(flat.size)
        if options.engine is not None:
            options.engine.require_fit(model)
        engine = options.engine or Engine(
            model,
            loss,
            source.head(3),
            name=performance.engine,
            precision=performance.precision,
            compiled=performance.compiled,
        )
        chunk = performance.chunk_for(largest_batch(plan), flat.size, augment.copies)
        unsure = labels if isinstance(source, DatasetSource) else None
        gradients = GradientSum(engine, clip, device, rule, unsure, augment, embedding, chunk)
        return cls(model, loss, source, flat, gradients, rule, lr, tau, options.nonfinite, performance), plan

    def settings(self) -> dict[str, Any]:
        """Return what a resumed run must have again, as plain data."""
        rule, augment, embedding = self.rule, self.gradients.augment, self.gradients.embedding
        return {
            "rule": rule.name,
            "padding": rule.padding,
            "clip": self.gradients.clip,
            "lr": self.lr.as_dict(),
            "tau": None if self.tau is None else self.tau.as_dict(),
            "momentum": rule.momentum,
            "weight_decay": rule.weight_decay,
            "ema": rule.ema,
            "multiplicity": augment.copies,
            "augment": None if augment.function is None else _name(augment.function),
            "nonfinite": self.nonfinite,
            "loss": _name(self.loss),
            **({} if embedding is None else {"embedding": embedding.as_dict()}),
            "parameters": self.flat.shapes,
        }

    def arithmetic(self) -> str:
        """Return a digest of all we can see of how a step is computed: whoever repeats a key must repeat this."""
        engine = self.gradients.engine
        seen = {
            "engine": engine.name,
            "precision": str(engine.precision),
            "chunk": self.gradients.chunk,
            "compiled": self.performance.compiled,
            "device": str(self.gradients.device),
            "threads": torch.get_num_threads(),
            "versions": [torch.__version__, __version__, sys.version],
            "code": [code_digest(each) for each in (self.model, self.loss, self.gradients.augment.function)],
            "data": self.source.repeatable(),
        }
        return hashlib.sha256(json.dumps(seen, sort_keys=True).encode()).hexdigest()

    def fingerprint(self, salt: bytes) -> str:
        """Return a digest of the data and of all that is not trained.

        The salt is secret, so the digest tells an outsider nothing.
        """
        digest = hashlib.blake2b(self.source.fingerprint(salt).encode(), key=salt, digest_size=16)
        trained = set(self.flat.names)
        for name, value in [*self.model.named_parameters(), *self.model.named_buffers()]:
            if name not in trained:
                digest.update(name.encode())
                digest.update(value.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
        return digest.hexdigest()

    def facts(self, plan: Plan) -> dict[str, Any]:
        """Return what is public about the run: sizes and choices that no private value has touched."""
        return {
            "device": str(self.gradients.device),
            "engine": self.gradients.engine.name,
            "population": plan.population,
            "adjacency": plan.ledger.adjacency,
            "unit": plan.unit,
            "parameters": self.flat.size,
            "delta": plan.delta,
        }

    def state_dict(self, vector: Tensor) -> dict[str, Tensor]:
        """Return the model's state dict with the trained parameters at a state."""
        views, state = self.flat.views(vector), dict(self.model.state_dict())
        # A tied parameter has several keys and one value.
        same = {id(p): name for name, p in self.model.named_parameters()}
        for key, value in self.model.state_dict(keep_vars=True).items():
            if id(value) in same and same[id(value)] in views:
                state[key] = views[same[id(value)]].detach().clone()
        return state

    def evaluate(self, vector: Tensor, source: Source) -> dict[str, float | None]:
        """Return accuracy and loss of a state on held-out samples."""
        return evaluate(self.model, self.loss, self.flat.views(vector), source, self.gradients.device)

    def check_test(self, test: Source, public: bool) -> None:
        """Refuse test labels that the model has no output for, and training samples that are declared public."""
        labels = Labels(self.model, self.loss, test.head(1))
        if isinstance(test, TensorSource):
            labels.check(test.targets, "test")
        if public:
            require_other_samples("the test set", test.arrays(), self.source.arrays())


def resolve_plan(plan: Plan, clip: float, lr: Schedule, tau: Schedule | None) -> Plan:
    """Return the plan with the mixing width that tau and eta give every step."""
    if tau is None:
        return plan
    phases, step = [], 0
    for phase in plan.phases:
        for _ in range(phase.steps):
            step += 1
            width = mixing_width(clip, tau.at(step), lr.at(step), plan.expected_batch(step))
            phases.append(Phase(replace(phase.mechanism, mixing_width=width), 1))
    return plan.with_phases(phases)


def largest_batch(plan: Plan) -> float:
    """Return the largest expected batch of a plan; chunks have one size, wherever a run is resumed."""
    assert plan.population is not None
    return max(phase.mechanism.sample_rate for phase in plan.phases) * plan.population


def _name(function: Any) -> str:
    return str(getattr(function, "__name__", type(function).__name__))

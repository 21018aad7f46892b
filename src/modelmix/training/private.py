"""``make_private``: an existing training loop, made private by two changed lines.

    model, optimizer, loader = mm.make_private(model, optimizer, loader, mechanism=mechanism, clip=1.0)
    ...
    optimizer.epsilon(delta=1e-5)

The loop stays as it is: zero_grad, forward, backward, step. The loader now gives Poisson draws, backward collects
every sample's gradient, and step clips, sums, adds noise, mixes, and writes the ledger line. The model keeps its class
and its state-dict keys.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import SGD, Optimizer
from torch.utils._pytree import tree_leaves
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, RandomSampler, SequentialSampler

from modelmix.accounting.accountant import epsilon as ledger_epsilon
from modelmix.accounting.ledger import Ledger
from modelmix.accounting.mechanism import Mechanism, mixing_width
from modelmix.accounting.validation import positive, whole
from modelmix.errors import ModelMixError, UnprovedError
from modelmix.training import engines
from modelmix.training.clipping import Clip
from modelmix.training.engines.hooks import Capture
from modelmix.training.gradients import Dense
from modelmix.training.guard import ALONE, SAME_SET, Watch, check_mechanism, check_model
from modelmix.training.parameters import FlatParameters
from modelmix.training.randomness import Randomness, StepRandomness
from modelmix.training.rules import Rule, State, noise, take_step
from modelmix.training.sampling import POISSON, _Lazy, _pair

ONE_DRAW = "every step uses one fresh draw, and every draw is a step"


def make_private(
    model: nn.Module,
    optimizer: Optimizer,
    loader: DataLoader[Any],
    *,
    mechanism: Mechanism,
    clip: float,
    tau: float | None = None,
    padding: str = "exact",
    momentum: float = 0.0,
    loss_reduction: str = "mean",
    chunk: int | None = None,
    seed: int | None = None,
) -> tuple[nn.Module, PrivateOptimizer, PrivateLoader]:
    """(model, optimizer, loader) for a private training loop.

    Guarantee: the weights after every ``optimizer.step()``, together, are (epsilon, delta)-differentially private under
    adding or removing one sample of ``loader.dataset``, with the epsilon of ``optimizer.ledger`` -- provided that the
    loss is a mean or a sum of losses of single samples, which a loop of your own must see to (``Trainer`` enforces it).

    Args:
        model: made of layers with one tensor in and one out wherever something is trained; no batch statistics.
        optimizer: with mixing, plain ``torch.optim.SGD`` (weight decay allowed), because what other optimizers remember
            is not mixed; without mixing, any optimizer.
        loader: its dataset, collate function and workers are kept; its batches are replaced by Poisson draws at the
            mechanism's rate. An epoch is about 1/q draws.
        mechanism: noise, mixing width, truncation and sampling rate.
        clip: c, the bound on the norm of a sample's gradient.
        tau: a fixed mixing threshold in place of the mechanism's mixing width; omega then follows the learning rate.
        padding: "exact" or "paper", see ``mixing``.
        momentum: from released states, for mixing.
        loss_reduction: "mean" or "sum", what the loop's loss does over the batch.
        chunk: give a draw in parts of at most this many samples; ``step`` acts on the last part. Saves memory.
        seed: makes the run repeatable, for tests only.
    """
    loop = _Loop(model, optimizer, loader, mechanism, clip, tau, padding, momentum, loss_reduction, chunk, seed)
    return model, PrivateOptimizer(loop, optimizer), PrivateLoader(loop, loader)


@dataclass(frozen=True)
class _Part:
    """Some samples of a draw: the ``number``-th part of it, and whether it is the last."""

    draws: StepRandomness
    number: int
    last: bool
    weights: Tensor


class _Loop:
    """What the optimizer and the loader of one private loop share."""

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        loader: DataLoader[Any],
        mechanism: Mechanism,
        clip: float,
        tau: float | None,
        padding: str,
        momentum: float,
        loss_reduction: str,
        chunk: int | None,
        seed: int | None,
    ) -> None:
        _check_loader(loader)
        check_model(model)
        self.flat = FlatParameters(model)
        check_mechanism(mechanism, self.flat.size)
        self.n = len(loader.dataset)  # type: ignore[arg-type]
        if self.n == 0:
            raise ModelMixError("the training set is empty: it needs at least one sample.")
        if loss_reduction not in ("mean", "sum"):
            raise ModelMixError(f"loss_reduction = {loss_reduction!r} is unknown: choose mean or sum.")
        asked = loader.batch_size
        if asked is not None and asked < self.n and abs(asked - mechanism.sample_rate * self.n) >= 1:
            raise ModelMixError(
                f"the loader's batch size {asked} means q = {asked / self.n:.6g}, and the mechanism says "
                f"q = {mechanism.sample_rate:.6g}: make them agree."
            )
        self.model, self.mechanism, self.clip, self.tau = model, mechanism, Clip(clip).c, tau
        if tau is not None:
            positive("tau", tau, "the mixing threshold")
        self.mean = loss_reduction == "mean"
        self.chunk = None if chunk is None else whole("chunk", chunk, "the samples given at once", least=1)
        self.rule = Rule("mix" if mechanism.mixed or tau is not None else "plain", padding, momentum)
        if self.rule.name == "plain" and momentum:
            raise ModelMixError(
                "without mixing, momentum belongs to the optimizer: torch.optim.SGD(..., momentum=...)."
            )
        _check_optimizer(optimizer, model, self.rule)
        _check_model_with_hooks(model, loader)
        self.batch = mechanism.sample_rate * self.n
        self.randomness = Randomness(seed)
        self.ledger = Ledger()
        start = self.flat.read()
        self.state = State(start, start, torch.zeros_like(start))
        self.total = torch.zeros_like(start)
        self.added = 0  # parts of the present draw that are in the total
        self.pending: _Part | None = None  # what was given out and is not stepped on yet
        self.capture = Capture(model)
        self.capture.attach()
        # A layer inside may see samples times positions; how many samples there are is seen at the model's own input.
        model.register_forward_pre_hook(self._count_samples, with_kwargs=True)
        for p in model.parameters():
            if p.requires_grad:
                # Ordinary gradients of private data are never kept, so that nobody uses one by mistake.
                p.register_post_accumulate_grad_hook(_forget)  # type: ignore[no-untyped-call]
        self.watch = Watch(model)
        self.written = self.flat.versions()

    def _count_samples(self, model: nn.Module, arguments: tuple[Any, ...], named: dict[str, Any]) -> None:
        leaves = [t for t in tree_leaves((arguments, named)) if isinstance(t, Tensor) and t.dim()]
        self.capture.samples = leaves[0].shape[0] if leaves else None

    def step_mechanism(self, eta: float) -> Mechanism:
        if self.tau is None:
            return self.mechanism
        return replace(self.mechanism, mixing_width=mixing_width(self.clip, self.tau, eta, self.batch))


def _forget(p: Tensor) -> None:
    p.grad = None


class PrivateLoader:
    """Poisson draws from a loader's dataset, as batches its loop understands.

    An empty draw comes as one sample that is given the weight 0: it must be stepped on like any other.
    """

    def __init__(self, loop: _Loop, loader: DataLoader[Any]) -> None:
        self._loop, self._loader = loop, loader
        self.dataset = loader.dataset

    def __len__(self) -> int:
        """Draws in an epoch, about 1/q: a convention without weight for privacy."""
        return max(1, round(1 / self._loop.mechanism.sample_rate))

    def __iter__(self) -> Iterator[Any]:
        loop, loader = self._loop, self._loader
        parts: deque[_Part] = deque()
        begun = loop.added

        def ordered() -> Iterator[list[int]]:
            for k, draws in zip(range(len(self)), loop.randomness.coming_steps(), strict=False):
                indices = draws.poisson_indices("sampling", loop.n, loop.mechanism.sample_rate)
                weight = 1.0 if indices.numel() else 0.0
                given = indices if weight else torch.zeros(1, dtype=torch.int64, device="cpu")
                pieces = torch.split(given, loop.chunk or given.numel())
                for i, piece in enumerate(pieces):
                    if k == 0 and i < begun:
                        continue  # a loop that was left in the middle of a draw has stepped on it
                    weights = torch.full((piece.numel(),), weight, dtype=torch.float64, device="cpu")
                    parts.append(_Part(draws, i, i + 1 == len(pieces), weights))
                    yield piece.tolist()

        batches = DataLoader(
            loader.dataset,
            batch_sampler=_Lazy(ordered()),
            num_workers=loader.num_workers,
            collate_fn=loader.collate_fn,
            pin_memory=loader.pin_memory,
            worker_init_fn=loader.worker_init_fn,
        )
        for batch in batches:
            if loop.pending is not None:
                raise UnprovedError(
                    ONE_DRAW,
                    "the last draw was not stepped on before the next was asked for.",
                    "Call optimizer.step() for every batch; leaving draws out depends on the data.",
                )
            part = parts.popleft()
            if part.number != loop.added or not loop.randomness.comes_to(part.draws):
                raise UnprovedError(
                    ONE_DRAW,
                    "another loop over the loader, or a step that failed, has used this draw or put it out of turn.",
                    "Loop over the loader anew, and in one loop at a time.",
                )
            loop.pending = part
            yield batch


class PrivateOptimizer(Optimizer):
    """The optimizer of a private loop. ``ledger`` and ``epsilon`` say what was spent."""

    def __init__(self, loop: _Loop, optimizer: Optimizer) -> None:
        self._ready = False
        super().__init__(optimizer.param_groups, optimizer.defaults)
        self._loop, self._original = loop, optimizer
        self.state = optimizer.state
        self._ready = True

    @property
    def ledger(self) -> Ledger:
        return self._loop.ledger

    def epsilon(self, delta: float = 1e-5) -> float:
        """epsilon of all the steps so far."""
        return ledger_epsilon(self._loop.ledger, delta)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        if self._ready:
            raise UnprovedError(
                SAME_SET,
                "a parameter group was added after the optimizer was made private.",
                "Make the optimizer with all its parameters first.",
            )
        super().add_param_group(param_group)

    def zero_grad(self, set_to_none: bool = True) -> None:
        if getattr(self, "_ready", False):
            self._loop.capture.clear()
        super().zero_grad(set_to_none)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """One private step from the gradients that backward collected; the last part of a draw completes it."""
        loop = self._loop
        if closure is not None:
            raise UnprovedError(
                ONE_DRAW, "a closure would evaluate the batch several times.", "Call step() without one."
            )
        if loop.pending is None:
            raise UnprovedError(
                ONE_DRAW,
                "there was no fresh draw since the last step.",
                "Take one batch from the loader for every step.",
            )
        check_model(loop.model)
        loop.watch.check()
        _check_optimizer(self._original, loop.model, loop.rule)
        part = loop.pending
        self._add_part(part.weights)
        if part.last:
            self._complete()
        loop.capture.clear()

    def _add_part(self, weights: Tensor) -> None:
        loop = self._loop
        found = loop.capture.gradients
        m = weights.numel()
        if not found:
            raise ModelMixError("step() found no gradients: call loss.backward() first, with gradients enabled.")
        counts = {g.samples for g in found.values()}
        if counts != {m}:
            raise UnprovedError(
                ONE_DRAW,
                f"backward saw {sorted(counts)} samples and the draw has {m}.",
                "Run the loader's batch, all of it and nothing else, through the model before each step.",
            )
        views = loop.flat.views(loop.state.last)
        scale = m if loop.mean else 1
        gradients = [
            found[name].times(scale) if name in found else Dense(p.new_zeros(m, *p.shape)) for name, p in views.items()
        ]
        part = Clip.of(loop.mechanism, loop.clip).sum(gradients, weights)
        if not bool(torch.isfinite(part.norms).all()):
            loop.capture.clear()
            raise ModelMixError(
                "the loss or gradient of a sample is not finite: no step was taken. Lower the learning rate or mend "
                "the data."
            )
        # In this order: wherever an interrupt falls, no part is added twice.
        loop.pending, loop.added, loop.total = None, loop.added + 1, loop.total + part.total

    def _complete(self) -> None:
        loop = self._loop
        total, loop.total, loop.added = loop.total, torch.zeros_like(loop.total), 0
        eta = float(self.param_groups[0]["lr"])
        mechanism = loop.step_mechanism(eta)
        draws = loop.randomness.step()
        loop.ledger = loop.ledger.add(mechanism)
        if loop.rule.name == "mix":
            if loop.flat.versions() != loop.written:
                raise UnprovedError(
                    "released states come from noisy, mixed steps only",
                    "the model's trained weights were changed from outside since the last step.",
                    "Load weights before make_private, or load the optimizer's state after the model's.",
                )
            rule = Rule(
                "mix", loop.rule.padding, loop.rule.momentum, float(self.param_groups[0].get("weight_decay", 0.0))
            )
            state = take_step(
                loop.state,
                total,
                draws,
                rule=rule,
                mechanism=mechanism,
                clip=loop.clip,
                eta=eta,
                expected_batch=loop.batch,
            )
            loop.randomness.advance()  # first: whatever fails or interrupts from here, this noise is not used again
            loop.state = state
            loop.flat.write(loop.state.last)
            loop.written = loop.flat.versions()
        else:
            sigma = loop.clip / loop.batch
            noisy = total / loop.batch + sigma * noise(mechanism, draws, loop.flat.size).to(total.device)
            loop.randomness.advance()
            for name, p in loop.model.named_parameters():
                if p.requires_grad:
                    p.grad = loop.flat.views(noisy)[name].clone()
            self._original.step()

    def state_dict(self) -> dict[str, Any]:
        """The optimizer's own state dict, and under "modelmix" the ledger, the states and the randomness.

        Secret, like any checkpoint of a private run: it holds the noise of the steps to come.
        """
        loop = self._loop
        if loop.pending is not None or loop.added:
            raise ModelMixError("a draw is half done: save after optimizer.step().")
        private = {
            "ledger": loop.ledger.to_json(),
            "randomness": loop.randomness.state(),
            "last": loop.state.last.clone(),
            "previous": loop.state.previous.clone(),
            "velocity": loop.state.velocity.clone(),
        }
        return {**self._original.state_dict(), "modelmix": private}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        loop = self._loop
        if "modelmix" not in state_dict:
            raise ModelMixError("this state dict has no ledger: it is not one of a private optimizer.")
        private = state_dict["modelmix"]
        self._original.load_state_dict({key: value for key, value in state_dict.items() if key != "modelmix"})
        self.param_groups, self.state = self._original.param_groups, self._original.state
        loop.ledger = Ledger.from_json(private["ledger"])
        loop.randomness = Randomness.from_state(private["randomness"])
        device = loop.state.last.device
        last, previous, velocity = (private[name].to(device) for name in ("last", "previous", "velocity"))
        loop.state = State(last, previous, velocity, step=loop.ledger.steps)
        loop.total, loop.added, loop.pending = torch.zeros_like(last), 0, None
        if loop.rule.name == "mix":
            loop.flat.write(last)
            loop.written = loop.flat.versions()


def _check_loader(loader: Any) -> None:
    if not isinstance(loader, DataLoader):
        raise ModelMixError(
            f"{type(loader).__name__} is not a DataLoader: give the loop's torch.utils.data.DataLoader."
        )
    fix = "Use a plain DataLoader over a map-style dataset; every sample must have the same chance."
    if isinstance(loader.dataset, IterableDataset):
        raise UnprovedError(POISSON, "an IterableDataset decides itself which sample comes next.", fix)
    if type(loader.batch_sampler) is not BatchSampler:
        raise UnprovedError(POISSON, "the loader has a batch sampler of its own.", fix)
    sampler = loader.sampler
    usual = type(sampler) is SequentialSampler or (type(sampler) is RandomSampler and not sampler.replacement)
    if not usual or len(sampler) != len(loader.dataset):  # type: ignore[arg-type]
        raise UnprovedError(POISSON, f"the loader draws with a {type(sampler).__name__} of its own.", fix)


def _check_optimizer(optimizer: Optimizer, model: nn.Module, rule: Rule) -> None:
    held = {id(p) for group in optimizer.param_groups for p in group["params"]}
    for name, p in model.named_parameters():
        if p.requires_grad and id(p) not in held:
            raise UnprovedError(
                SAME_SET, f"{name} is trainable and not in the optimizer.", "Freeze it, or give it to the optimizer."
            )
    own = {id(p) for p in model.parameters() if p.requires_grad}
    if held - own:
        raise UnprovedError(
            SAME_SET, "the optimizer holds parameters that the model does not train.", "Give it the model's only."
        )
    if rule.name != "mix":
        return
    state = "no state may carry an unmixed noisy gradient across steps"
    if type(optimizer) is not SGD:
        raise UnprovedError(
            state,
            f"{type(optimizer).__name__} remembers gradients, or may.",
            "Use torch.optim.SGD without momentum, or a mechanism without mixing.",
        )
    for group in optimizer.param_groups:
        if group["momentum"] or group["nesterov"]:
            raise UnprovedError(
                state,
                f"SGD's momentum {group['momentum']:g} is a buffer of unmixed noisy gradients.",
                "Use SGD without momentum and make_private(..., momentum=...), which is computed from released states.",
            )
        if group.get("maximize"):
            raise ModelMixError("maximize=True is not supported: negate the loss.")
    if len({(float(group["lr"]), float(group["weight_decay"])) for group in optimizer.param_groups}) != 1:
        raise UnprovedError(
            "one step has one mixing width in units of its learning rate",
            "the optimizer's groups have different learning rates or weight decays.",
            "Use one for all groups.",
        )


def _check_model_with_hooks(model: nn.Module, loader: DataLoader[Any]) -> None:
    """A few samples, compared with the universal engine: are the hooks right for this model?"""
    dataset: Any = loader.dataset
    inputs, _ = _pair(loader.collate_fn([dataset[i % len(dataset)] for i in range(3)]))

    def probe(outputs: Any, _: Any) -> Tensor:
        return torch.stack([t.square().sum() for t in tree_leaves(outputs)]).sum()

    dummy = torch.zeros(engines.rows(inputs), device=tree_leaves(inputs)[0].device)
    if engines.choose(model, probe, inputs, dummy) != "hooks":
        raise UnprovedError(
            ALONE,
            "the gradients that hooks see are not those of single samples (samples meet, or a weight is used outside "
            "of its layer).",
            "Use Trainer, whose universal engine runs every sample alone.",
        )

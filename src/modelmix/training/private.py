"""``make_private``: an existing training loop, made private by one line before it.

    model, optimizer, loader, criterion = mm.make_private(
        model, optimizer, loader, criterion, epsilon=3, delta=1e-5, epochs=20, clip=1.0)
    for x, y in loader:
        optimizer.zero_grad()
        criterion(model(x), y).backward()
        optimizer.step()
    optimizer.guarantee

The loop stays as it is. The loader gives Poisson draws; the model, called on a draw, runs the private pass of the
engine, in which no sample can see another, and returns its outputs; the criterion returns their loss; step clips, sums,
adds noise, mixes, and writes the ledger line. Nothing else that the loop computes from the outputs reaches the weights:
gradients that did not come from the criterion are refused. The model keeps its class and its state-dict keys.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import threading
import types
import uuid
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import SGD, Optimizer
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map, tree_unflatten
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, RandomSampler, SequentialSampler

from modelmix._checks import positive, whole
from modelmix._files import write_atomically
from modelmix._format import up
from modelmix.accounting.guarantee import Guarantee
from modelmix.accounting.guarantee import epsilon as ledger_epsilon
from modelmix.accounting.ledger import Ledger, append_to_ledger, read_ledger
from modelmix.accounting.mechanism import Mechanism, mixing_width
from modelmix.accounting.plan import Plan, plan_for_loop
from modelmix.accounting.runs import KEEPS_NOTHING, Claim, plan_beside, read_object, restrictions
from modelmix.errors import BudgetExceeded, ModelMixError, UnprovedError
from modelmix.gradients import Batch, Engine, Loss, count_rows
from modelmix.gradients.clip import Clip, ClippedSum
from modelmix.gradients.device import preserve_torch_rng
from modelmix.gradients.memory import ALONE, SAME_SET, Watch, tensor_contents
from modelmix.gradients.parameters import FlatParameters
from modelmix.training.guard import (
    PrivateForward,
    check_mechanism,
    check_model,
    check_public_model,
    require_not_private,
    require_one_process,
)
from modelmix.training.labels import Labels
from modelmix.training.randomness import Randomness, StepRandomness
from modelmix.training.rules import Rule, State, noise, take_step
from modelmix.training.sampling import (
    POISSON,
    Items,
    SeparateCollate,
    _Lazy,
    _pair,
    arrays_of,
    check_items_alone,
    copy_to_look_at,
)

ONE_DRAW = "every step uses one fresh draw, and every draw is a step"
_LOOP = (
    "what the loop prints or does with training samples, their outputs and losses: for instance learning rates and "
    "settings of the optimizer chosen by them, by ReduceLROnPlateau or by the size of a batch, and what it writes into "
    "the dataset or the collate function"
)
_CRITERION = (
    "Use the model, loader and criterion that make_private returned, on the loader's batches as they are: "
    "transformations of them belong into the model, the dataset or the criterion."
)


def make_private(
    model: nn.Module,
    optimizer: Optimizer,
    loader: DataLoader[Any],
    criterion: Loss,
    *,
    clip: float,
    plan: Plan | None = None,
    epsilon: float | None = None,
    delta: float = 1e-5,
    epochs: float | None = None,
    population: int | None = None,
    tau: float | None = None,
    padding: str = "exact",
    momentum: float = 0.0,
    chunk: int | None = None,
    seed: int | None = None,
    ledger: str | Path | None = None,
) -> tuple[nn.Module, PrivateOptimizer, PrivateLoader, PrivateCriterion]:
    """(model, optimizer, loader, criterion) for a private training loop.

    Guarantee: the weights after every ``optimizer.step()``, together, are (epsilon, delta)-differentially private with
    the epsilon of the plan, for the neighbours it claims; ``optimizer.guarantee`` states all of it. A sample's gradient
    is computed where no other sample can be seen; going past the plan raises ``BudgetExceeded``.

    Args:
        model: any module without batch statistics; what requires a gradient is trained.
        optimizer: with mixing, plain ``torch.optim.SGD`` (weight decay allowed), because what other optimizers remember
            is not mixed; without mixing, any optimizer.
        loader: its dataset, collate function and workers are kept; its batches, pairs (inputs, targets), are replaced
            by Poisson draws. An epoch is about 1/q draws.
        criterion: ``criterion(outputs, targets)``. It is given one sample at a time, so it cannot make samples meet;
            a mean over the batch, a class weight or a mean over tokens is therefore one over that sample alone.
        clip: c, the bound on the norm of a sample's gradient.
        plan: what may run, see ``mm.plan``. Or give epsilon, delta and epochs: plain DP-SGD with the loader's batch
            size as the expected batch.
        population: with epsilon, a public constant in place of the number of samples, see ``mm.plan``.
        tau: a fixed mixing threshold; omega then follows the learning rate and may not fall below the plan's.
        padding: "exact" or "paper", see ``mixing``.
        momentum: from released states, for mixing.
        chunk: give a draw in parts of at most this many samples; ``step`` acts on the last part. Saves memory.
        seed: makes the run repeatable, for tests only.
        ledger: a file that gets every ledger line before its step is taken, so that a loop that dies loses none; a
            file that exists is continued. Beside it lies FILE.plan, because a loop that is stopped counts as its plan.
            Without it, keep the optimizer's state with every saved model.

    Example:
        >>> import torch, modelmix as mm
        >>> data = torch.utils.data.TensorDataset(torch.randn(200, 4), torch.arange(200) % 2)
        >>> loader, model = torch.utils.data.DataLoader(data, batch_size=50), torch.nn.Linear(4, 2)
        >>> model, optimizer, loader, criterion = mm.make_private(
        ...     model, torch.optim.SGD(model.parameters(), lr=0.5), loader, torch.nn.CrossEntropyLoss(),
        ...     epsilon=3, delta=1e-4, epochs=2, clip=1.0)
        >>> for x, y in loader:
        ...     optimizer.zero_grad()
        ...     criterion(model(x), y).backward()
        ...     optimizer.step()
        >>> optimizer.ledger.steps
        4
    """
    require_one_process()
    _check_loader(loader)
    n = len(loader.dataset)  # type: ignore[arg-type]
    if n == 0:
        raise ModelMixError("the training set is empty: it needs at least one sample.")
    if plan is None:
        if epsilon is None or epochs is None:
            raise ModelMixError("give a plan (mm.plan(...)), or epsilon, delta and epochs.")
        many = {"samples": n} if population is None else {"population": population}
        plan = plan_for_loop(loader.batch_size, epochs, epsilon=epsilon, delta=delta, **many)
    elif not isinstance(plan, Plan):
        raise ModelMixError(f"{plan!r} is not a Plan: make one with mm.plan(...) or Plan.of(mechanism, steps).")
    elif epsilon is not None or epochs is not None or population is not None:
        given = {"epsilon": epsilon, "epochs": epochs, "population": population}
        said = " and ".join(name for name, value in given.items() if value is not None)
        raise ModelMixError(f"plan already contains {said}: give either plan or {said}.")
    loop = _Loop(
        model, optimizer, loader, criterion, plan.bound_to(n), n,
        Clip(clip).c, tau, padding, momentum, chunk, seed, ledger,
    )  # fmt: skip
    return model, PrivateOptimizer(loop, optimizer), PrivateLoader(loop, loader), PrivateCriterion(loop)


@dataclass(frozen=True)
class _Part:
    """Some samples of a draw: the ``number``-th part of it, and whether it is the last."""

    draws: StepRandomness
    number: int
    last: bool
    weights: Tensor


@dataclass
class _Pass:
    """The private pass over one part, and how far the loop has come with it."""

    summed: ClippedSum
    outputs: Any
    losses: Tensor
    finished: bool = False  # backward was called


class _Loop:
    """What the model, the optimizer, the loader and the criterion of one private loop share."""

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        loader: DataLoader[Any],
        loss: Loss,
        plan: Plan,
        n: int,
        clip: float,
        tau: float | None,
        padding: str,
        momentum: float,
        chunk: int | None,
        seed: int | None,
        ledger: str | Path | None,
    ) -> None:
        check_model(model)
        require_not_private(model)
        if not callable(loss):
            raise ModelMixError(
                "criterion must be a function of outputs and targets, nn.CrossEntropyLoss() for instance."
            )
        self.flat = FlatParameters(model)
        for phase in plan.phases:
            check_mechanism(phase.mechanism, self.flat.size)
        plan.require_signal()
        self.n, self.plan, self.model, self.loss, self.optimizer = n, plan, model, loss, optimizer
        self.alone = threading.Lock()
        asked, expected = loader.batch_size, plan.expected_batch(1)
        if asked is not None and asked < n and abs(asked - expected) >= 1:
            raise ModelMixError(
                f"the loader's batch size is {asked} and the plan's expected batch {expected:.6g}: make them agree."
            )
        self.clip, self.tau = clip, None if tau is None else positive("tau", tau, "the mixing threshold")
        self.chunk = None if chunk is None else whole("chunk", chunk, "the samples given at once", least=1)
        mixed = tau is not None or any(phase.mechanism.mixed for phase in plan.phases)
        self.rule = Rule("mix" if mixed else "plain", padding, momentum)
        if self.rule.name == "plain" and momentum:
            raise ModelMixError(
                "without mixing, momentum belongs to the optimizer: torch.optim.SGD(..., momentum=...)."
            )
        _check_optimizer(optimizer, model, self.rule)
        looked_at = copy_to_look_at(loader.dataset) if loader.num_workers else loader.dataset
        check_items_alone(looked_at)
        check_public_model(model, arrays_of(loader.dataset, n))
        self.collate = SeparateCollate(loader.collate_fn, looked_at[0])
        probe = _pair(self.collate([looked_at[0]])[0])  # its shapes and dtypes, which are public
        self.modes: list[bool] | None = None  # of all modules, as they were before the first draw was seen
        self.taken: Any = None  # which tensors of a batch the model is given, as in the first pass
        self.labels = Labels(model, loss, probe)
        self.engine = Engine(model, loss, probe)
        alone = () if self.engine.name == "hooks" else (KEEPS_NOTHING,)
        self.said: dict[str, tuple[str, ...]] = {"assumed": alone, "excluded": (_LOOP,)}
        self.randomness = Randomness(seed)
        self.name = uuid.uuid4().hex
        self.claim = replace(plan.ledger, phases=(), seeded=seed is not None)
        self.earlier = self._before()  # what ran before this loop was made
        self.own = self.claim  # what ran in it
        self.runs: dict[str, float] = {self.name: math.inf}  # how many lines of each run are in either
        self.base: str | None = None  # the run that all of ``earlier`` is of, where it is of one
        self.file = None if ledger is None else Path(os.path.realpath(ledger))  # the plan lies beside the real one
        self.written_ledger: Ledger | None = None
        if self.file is not None and self.file.exists():
            self.written_ledger = read_ledger(self.file)
            if plan_beside(self.file).exists():
                before = read_object(plan_beside(self.file))
                self._require_goes_on(Plan.from_dict(before))
                then = zip(self.said, restrictions({"test_public": True, **before}), strict=True)
                self.said = {name: tuple(dict.fromkeys((*lines, *self.said[name]))) for name, lines in then}
            self._take_on(self.written_ledger, same=True)
            with suppress(OSError, ValueError, TypeError):
                self.runs |= {str(k): int(v) for k, v in json.loads(self._names().read_text(encoding="utf-8")).items()}
        start = self.flat.read()
        self.state = State(start, start, torch.zeros_like(start))
        self.forget_draw()
        self.inside = False
        self.original = model.forward
        model.forward = _Forward(self)
        for p in model.parameters():
            if p.requires_grad:
                p.register_post_accumulate_grad_hook(_refuse_gradient)  # type: ignore[no-untyped-call]
        self.watch = Watch(model)
        self.wrote()

    def forget_draw(self) -> None:
        self.total = torch.zeros_like(self.state.last)
        self.added = 0  # parts of the present draw that are in the total
        self.pending: _Part | None = None  # what was given out and is not stepped on yet
        self.batch: tuple[Any, Any] | None = None  # its samples
        self.passed: _Pass | None = None

    def wrote(self) -> None:
        """Remember the trained weights and the optimizer's memory as a step, or the loading of a state, left them."""
        self.values = self._values()

    def _values(self) -> Any:
        """What changes with any trained weight and any entry of the optimizer's memory, however it was written to."""
        weights = [p.detach() for p in self.model.parameters() if p.requires_grad]
        memory = tree_leaves([self.optimizer.state.get(p, {}) for p in self.model.parameters() if p.requires_grad])
        tensors = [t for t in memory if isinstance(t, Tensor)]
        found = [value for _, value in tensor_contents([*weights, *tensors])]
        rest = [value for value in memory if not isinstance(value, Tensor)]
        return found[: len(weights)], (found[len(weights) :], rest)

    def require_own_weights(self) -> None:
        """Refuse weights that no step has made: they may have been written by looking at the batch."""
        if self._values() != self.values:
            raise UnprovedError(
                "released states come from noisy, mixed steps only",
                "the model's trained weights, or what the optimizer remembers of them, were changed from outside since "
                "the last step.",
                "Load weights before make_private, or load the optimizer's state after the model's.",
            )

    @property
    def ledger(self) -> Ledger:
        return self.earlier.then(self.own)

    def take_on(self, private: dict[str, Any]) -> None:
        """Count what another loop, or this one before, has run, as its state says."""
        ledger, run, spent = Ledger.from_json(private["ledger"]), str(private["run"]), str(private["spent"])
        if ledger.steps <= self.runs.get(run, -1):
            return  # all of it is counted already, with what has run since
        self._require_goes_on(Plan.from_dict(private["plan"]))
        first = spent == self.plan.spent.to_json() and self.earlier == self._before()
        self._take_on(ledger, same=first or run == self.base)
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

    def _take_on(self, ledger: Ledger, same: bool) -> None:
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

    def _names(self) -> Path:
        assert self.file is not None
        return self.file.with_name(self.file.name + ".runs")

    @contextmanager
    def held(self) -> Iterator[None]:
        """Hold the loop for one thread: a draw makes one step, in one thread."""
        if not self.alone.acquire(blocking=False):
            raise ModelMixError("this loop is running in another thread: a draw makes one step, in one thread.")
        try:
            yield
        finally:
            self.alone.release()

    def seal(self, private: dict[str, Any], own: dict[str, Any]) -> str:
        """A digest of a saved state; it catches changes, not forgery.

        Args:
            own: the state dict of the optimizer within, of which its memory counts and its settings do not.
        """
        return _digest([*(value for name, value in private.items() if name != "digest"), own.get("state")])

    def weights(self) -> str:
        """A digest of the trained weights, which tells whether they belong to a saved state."""
        return _digest([p for p in self.model.parameters() if p.requires_grad])

    def require_weights_of(self, private: dict[str, Any]) -> None:
        """Refuse weights that are neither those of a saved state nor those that the last step has left."""
        if self.rule.name != "mix" and self._values()[0] != self.values[0] and self.weights() != private["weights"]:
            raise UnprovedError(
                "released states come from noisy, mixed steps only",
                "the model's weights were changed and are not those of this state.",
                "Load the model's weights of the same moment first, then the optimizer's state.",
            )

    def save_ledger(self) -> None:
        """Write the ledger before a step exists; refuse if somebody else has written to the file."""
        if self.file is None:
            return
        self.written_ledger = append_to_ledger(self.file, self._extended_ledger)
        write_atomically(self._names(), json.dumps({**self.runs, self.name: self.ledger.steps}, sort_keys=True))

    def _extended_ledger(self, now: Ledger | None) -> Ledger:
        """The ledger to be written over what the file holds now; the plan is on disk before it."""
        assert self.file is not None
        if now != self.written_ledger:
            raise UnprovedError(
                "everything that is released about the same samples adds up",
                f"{self.file} was written to by another loop.",
                "Give every loop a ledger file of its own, and the earlier ones as spent in its plan.",
            )
        write_atomically(plan_beside(self.file), json.dumps({**self.plan.as_dict(), **self.said}, indent=1) + "\n")
        return self.ledger

    @cached_property
    def planned(self) -> Guarantee:
        return self.plan.guarantee()

    def step_mechanism(self, eta: float) -> Mechanism:
        """What the coming step runs; ``BudgetExceeded`` past the plan, or if it would cost more than planned."""
        planned = self.coming_mechanism()
        if self.tau is None:
            return planned
        width = mixing_width(self.clip, self.tau, eta, self.expected_batch(planned))
        if width < planned.mixing_width * (1 - 1e-12):
            raise BudgetExceeded(
                f"tau = {self.tau:g} at a learning rate of {eta:g} mixes over {width:.4g} clips and the plan counts on "
                f"{planned.mixing_width:.4g}: lower the learning rate, raise tau, or plan for the smaller width."
            )
        return replace(planned, mixing_width=width)

    def coming_mechanism(self) -> Mechanism:
        return self.plan.mechanism_at(self.ledger.steps - self.plan.spent.steps + 1)

    def expected_batch(self, mechanism: Mechanism) -> float:
        assert self.plan.population is not None
        return mechanism.sample_rate * self.plan.population

    def forward(self, arguments: tuple[Any, ...], named: dict[str, Any]) -> Any:
        """The model's forward: the private pass if it is given the draw of the moment, its own otherwise."""
        if self.inside or not torch.is_grad_enabled() or self.pending is None or self.batch is None:
            return self.original(*arguments, **named)
        if arguments and named:
            raise ModelMixError("give the model its inputs all by position or all by name in a private loop.")
        inputs: Any = named or (arguments[0] if len(arguments) == 1 else arguments)
        places = _places_in(inputs, self.batch)
        if places is None:
            return self.original(*arguments, **named)
        with self.held():
            if self.passed is None:
                self._require_one_way(places)
                form, indices = self.taken
                own = [t for t in tree_leaves(self.batch) if isinstance(t, Tensor)]
                self.passed = self._private_pass(tree_unflatten([own[min(i)] for i in indices], form))
            return self.passed.outputs

    def _require_one_way(self, places: Any) -> None:
        """Refuse a pass that is not made as the first one was: the choice may hang on what is in the batch."""
        before, now = self.taken or places, places
        both = [a & b for a, b in zip(before[1], now[1], strict=False)]  # equal tensors may be told apart later
        self.taken = before[0], both
        if before[0] != now[0] or len(before[1]) != len(now[1]) or not all(both):
            raise UnprovedError(
                ALONE,
                "the model is given other parts of the batch than in the first pass.",
                "Give it the same ones in every step; what depends on a sample belongs into the model or the dataset.",
            )
        if self.modes != _modes(self.model):
            raise UnprovedError(
                ALONE,
                "a module was put into another mode (train or eval) than it was in before the first draw.",
                "Call model.train() before the loop over the loader, and before every further one.",
            )

    def _private_pass(self, inputs: Any) -> _Pass:
        assert self.pending is not None
        assert self.batch is not None
        check_model(self.model)
        self.watch.check()
        self.require_own_weights()
        device = self.state.last.device
        inputs, targets, weights = tree_map(lambda t: t.to(device), (inputs, self.batch[1], self.pending.weights))
        targets, weights = self.labels.without_unknown(targets, weights)
        here = self.state.last if self.rule.name == "mix" else self.flat.read()
        self.inside = True
        try:
            with preserve_torch_rng(device):
                torch.manual_seed(self.pending.draws.generator("model").initial_seed())
                summed, outputs, losses = self.engine.with_outputs(
                    self.flat.views(here), Batch(inputs, targets, weights), Clip.of(self.coming_mechanism(), self.clip)
                )
        finally:
            self.inside = False
        anchor = torch.zeros((), device=device, requires_grad=True)
        guarded = tree_map(lambda t: _guarded(t, anchor), outputs)
        drawn = losses[weights > 0]
        return _Pass(summed, guarded, drawn if drawn.numel() else losses * 0)

    def loss_of(self, outputs: Any, targets: Any) -> Tensor:
        """The loss of the draw of the moment, whose backward lets ``step`` use the private pass.

        Of anything else it is the ordinary loss, whose backward is refused by whatever it meets first.
        """
        passed, batch = self.passed, self.batch
        ours = passed is not None and _identical(outputs, passed.outputs) and torch.is_grad_enabled()
        if not ours or passed is None or _places_in(targets, batch) is None:
            value: Tensor = self.loss(outputs, targets)
            return value
        reduction = getattr(self.loss, "reduction", "mean")
        losses = passed.losses
        value = losses if reduction == "none" else losses.sum() if reduction == "sum" else losses.mean()
        found: Tensor = _Loss.apply(value, torch.zeros((), requires_grad=True), passed)  # type: ignore[no-untyped-call]
        return found


def _digest(tree: Any) -> str:
    """Of tensors and of whatever has a printed form, in their order."""
    digest = hashlib.sha256()
    for part in tree_leaves(tree):
        if isinstance(part, Tensor):
            flat = part.detach().cpu().contiguous().reshape(-1)
            digest.update(f"{part.dtype}{tuple(part.shape)}".encode() + flat.view(torch.uint8).numpy().tobytes())
        else:
            digest.update(repr(part).encode())
    return digest.hexdigest()


def _places_in(given: Any, batch: Any) -> Any:
    """Which tensors of the batch may be given, and in which structure; None if one is no tensor of it.

    A tensor of the batch is one that is whole and unchanged, perhaps a copy on another device. What is computed from
    the batch, converted to another type or put together of it, is not.
    """
    have = [t for t in tree_leaves(batch) if isinstance(t, Tensor)]
    leaves, form = tree_flatten(given)
    found = [{i for i, t in enumerate(have) if isinstance(v, Tensor) and _equal(v, t)} for v in leaves]
    return (form, found) if leaves and all(found) else None


def _equal(t: Tensor, other: Tensor) -> bool:
    if t.shape != other.shape or t.dtype != other.dtype:
        return False
    other = other.to(t.device)
    return torch.equal(t, other) or bool(((t == other) | ((t != t) & (other != other))).all())


def _modes(model: nn.Module) -> list[bool]:
    return [module.training for module in model.modules()]


def _identical(given: Any, returned: Any) -> bool:
    mine, ours = tree_leaves(given), tree_leaves(returned)
    return len(mine) == len(ours) and all(a is b for a, b in zip(mine, ours, strict=True))


class _Guarded(torch.autograd.Function):
    """An output of the private pass: a number to look at, which no gradient passes."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, anchor: Tensor) -> Tensor:
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        raise UnprovedError(
            ALONE,
            "backward was called on something other than the criterion's loss of the model's outputs.",
            _CRITERION,
        )


def _guarded(t: Any, anchor: Tensor) -> Any:
    if not isinstance(t, Tensor) or not t.is_floating_point():
        return t
    return _Guarded.apply(t.detach(), anchor)  # type: ignore[no-untyped-call]


class _Loss(torch.autograd.Function):
    """The loss of a part. Its backward computes nothing: the gradients of single samples are in the pass already."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, anchor: Tensor, passed: _Pass) -> Tensor:
        ctx.passed, ctx.rows = passed, max(1, passed.losses.numel())
        return value.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        (given,) = gradients
        allowed = [1.0] if given.dim() == 0 else [1.0, 1.0 / ctx.rows]
        if not any(torch.equal(given, torch.full_like(given, value)) for value in allowed):
            raise UnprovedError(
                ALONE,
                "the loss was scaled, weighted or added up before backward, by something that may depend on the batch.",
                "Call backward on what the criterion returns; to give a draw in parts, as accumulation does, give "
                "make_private(..., chunk=...).",
            )
        ctx.passed.finished = True
        return None, None, None


def _refuse_gradient(p: Tensor) -> None:
    p.grad = None
    raise UnprovedError(
        ALONE,
        "a gradient reached a trained parameter and did not come from the criterion. (A batch of the loader that was "
        "there before, or one that was changed, gives such gradients.)",
        _CRITERION,
    )


class _Forward(PrivateForward):
    """The forward of a private model, until it is copied or saved: a copy is an ordinary model."""

    def __init__(self, loop: _Loop) -> None:
        self._loop = loop

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        return self._loop.forward(arguments, named)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        copied = memo.get(id(self._loop.model))
        return self if copied is None else types.MethodType(type(copied).forward, copied)

    def __reduce__(self) -> Any:
        return getattr, (self._loop.model, "forward")


class PrivateLoader:
    """Poisson draws from a loader's dataset, as batches its loop understands.

    An empty draw comes as one sample that is given the weight 0: it must be stepped on like any other.
    """

    def __init__(self, loop: _Loop, loader: DataLoader[Any]) -> None:
        self._loop, self._loader = loop, loader
        self.dataset = loader.dataset

    def __len__(self) -> int:
        """Draws in an epoch, about 1/q: a convention without weight for privacy."""
        return max(1, round(1 / self._loop.plan.phases[0].mechanism.sample_rate))

    def __iter__(self) -> Iterator[Any]:
        loop, loader = self._loop, self._loader
        parts: deque[_Part] = deque()
        with loop.held():
            begun, first = loop.added, loop.ledger.steps - loop.plan.spent.steps + 1
        loop.plan.require(first)
        count = min(len(self), loop.plan.steps - first + 1)  # an epoch, or what is left of the plan

        def ordered() -> Iterator[list[tuple[int, int]]]:
            for k, draws in zip(range(count), loop.randomness.coming_steps(), strict=False):
                q = loop.plan.mechanism_at(first + k).sample_rate
                indices = draws.poisson_indices("sampling", loop.n, q)
                weight = 1.0 if indices.numel() else 0.0
                given = indices if weight else torch.zeros(1, dtype=torch.int64, device="cpu")
                pieces = torch.split(given, loop.chunk or given.numel())
                for i, piece in enumerate(pieces):
                    if k == 0 and i < begun:
                        continue  # a loop that was left in the middle of a draw has stepped on it
                    weights = torch.full((piece.numel(),), weight, dtype=torch.float64, device="cpu")
                    parts.append(_Part(draws, i, i + 1 == len(pieces), weights))
                    seed = draws.generator("items").initial_seed()
                    yield [(index, seed) for index in piece.tolist()]

        batches = DataLoader(
            Items(loader.dataset),
            batch_sampler=_Lazy(ordered()),
            num_workers=loader.num_workers,
            collate_fn=loop.collate,
            pin_memory=loader.pin_memory,
            worker_init_fn=loader.worker_init_fn,
        )
        for batch, fits in batches:
            self._give_out(parts, batch, fits)
            yield batch

    def _give_out(self, parts: deque[_Part], batch: Any, fits: Tensor) -> None:
        """Make a batch that has arrived the draw of the moment."""
        loop = self._loop
        with loop.held():
            if loop.pending is not None:
                raise UnprovedError(
                    ONE_DRAW,
                    "the last draw was not stepped on before the next was asked for.",
                    "Call step() of the optimizer that make_private returned, for every batch; to stop early take the "
                    "batches from itertools.islice(loader, k), and to save memory give make_private(..., chunk=...).",
                )
            part = parts.popleft()
            if part.number != loop.added or not loop.randomness.comes_to(part.draws):
                raise UnprovedError(
                    ONE_DRAW,
                    "another loop over the loader, or a step that failed, has used this draw or put it out of turn.",
                    "Loop over the loader anew, and in one loop at a time.",
                )
            inputs, targets = _pair(batch)
            if count_rows((inputs, targets)) != part.weights.numel():
                raise UnprovedError(
                    ONE_DRAW,
                    "collate_fn gives another number of rows than it is given samples.",
                    "Return one row for every sample.",
                )
            loop.collate.say_what_does_not_fit(fits)
            if loop.modes is None:  # before the loop has seen a sample
                loop.modes = _modes(loop.model)
                loop.engine.remember()
            loop.pending, loop.passed = replace(part, weights=part.weights * fits), None
            # Copies of our own: what the loop does to its batch in place must not pass for the batch.
            loop.batch = tree_map(lambda t: t.clone() if isinstance(t, Tensor) else t, (inputs, targets))


class PrivateCriterion:
    """The criterion of a private loop: the loss of the model's outputs, sample by sample.

    On other outputs, without gradients, it is the criterion it was made of: for evaluation.
    """

    def __init__(self, loop: _Loop) -> None:
        self._loop = loop

    def __call__(self, outputs: Any, targets: Any) -> Tensor:
        return self._loop.loss_of(outputs, targets)


class PrivateOptimizer(Optimizer):
    """The optimizer of a private loop. ``guarantee``, ``ledger`` and ``epsilon`` say what is and was spent."""

    def __init__(self, loop: _Loop, optimizer: Optimizer) -> None:
        self._ready = False
        super().__init__(optimizer.param_groups, optimizer.defaults)
        self._loop, self._original = loop, optimizer
        self.state = optimizer.state
        self._ready = True

    @property
    def ledger(self) -> Ledger:
        """What ran, in this loop and in those whose state it was given."""
        return self._loop.ledger

    @property
    def plan(self) -> Plan:
        """What may run."""
        return self._loop.plan

    @property
    def guarantee(self) -> Guarantee:
        """What holds for everything this loop releases, however early it is stopped: the epsilon of the plan."""
        loop = self._loop
        planned = replace(loop.plan.ledger, seeded=loop.ledger.seeded)
        claim = Claim(planned, loop.ledger, assumed=loop.said["assumed"], excluded=loop.said["excluded"])
        return claim.qualified(loop.planned)

    def epsilon(self, delta: float | None = None) -> float:
        """epsilon of the steps so far; it holds if their number was fixed beforehand, see ``guarantee``."""
        return ledger_epsilon(self._loop.ledger, self._loop.plan.delta if delta is None else delta)

    def extend(self, steps: int) -> None:
        """Plan ``steps`` more steps of the last mechanism; the guarantee becomes that of the longer plan."""
        self._loop.plan = self._loop.plan.extended(steps)
        self._loop.__dict__.pop("planned", None)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        raise ModelMixError("a private optimizer cannot be copied: its noise would be used twice. Keep state_dict().")

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise ModelMixError("a private optimizer cannot be pickled: save optimizer.state_dict().")

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        if self._ready:
            raise UnprovedError(
                SAME_SET,
                "a parameter group was added after the optimizer was made private.",
                "Make the optimizer with all its parameters first.",
            )
        super().add_param_group(param_group)

    def zero_grad(self, set_to_none: bool = True) -> None:
        if getattr(self, "_ready", False) and self._loop.passed is not None:
            self._loop.passed.finished = False
        super().zero_grad(set_to_none)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """One private step from the pass that backward finished; the last part of a draw completes it."""
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
        if loop.passed is None:
            raise UnprovedError(
                ONE_DRAW,
                "the model was not run on the loader's batch.",
                "Call the model on the batch as the loader gives it, all of it and nothing else, before each step.",
            )
        if not loop.passed.finished:
            raise ModelMixError("step() found no gradients: call backward() on the criterion's loss first.")
        with loop.held():
            part, passed = loop.pending, loop.passed
            if part is None or passed is None:
                raise ModelMixError("another thread has stepped on this draw: a draw makes one step, in one thread.")
            if part.last:
                self._check_settings()
            # In this order: wherever an interrupt falls, no part is added twice.
            loop.pending, loop.passed, loop.batch = None, None, None
            loop.added, loop.total = loop.added + 1, loop.total + passed.summed.total
            if part.last:
                self._complete()

    def _check_settings(self) -> None:
        """Refuse settings that make no step, before the draw is used up: throwing draws away is a choice among them."""
        group = self.param_groups[0]
        eta, decay = float(group["lr"]), float(group.get("weight_decay", 0.0))
        if self._loop.rule.name == "mix" and not 0 < eta < math.inf:
            raise ModelMixError(f"a learning rate of {eta:g} makes no step: it must be above 0.")
        if not 0 <= decay < math.inf:
            raise ModelMixError(f"weight_decay = {decay:g} is not allowed: it must be at least 0 and finite.")
        self._loop.step_mechanism(eta)

    def _complete(self) -> None:
        loop = self._loop
        total, loop.total, loop.added = loop.total, torch.zeros_like(loop.total), 0
        eta = float(self.param_groups[0]["lr"])
        mechanism = loop.step_mechanism(eta)
        batch = loop.expected_batch(mechanism)
        draws = loop.randomness.step()
        mix = loop.rule.name == "mix"
        loop.require_own_weights()
        loop.own = loop.own.add(mechanism)
        loop.save_ledger()
        loop.randomness.advance()  # first: whatever fails or interrupts from here, this noise is not used again
        if mix:
            decay = float(self.param_groups[0].get("weight_decay", 0.0))
            loop.state = take_step(
                loop.state,
                total,
                draws,
                rule=Rule("mix", loop.rule.padding, loop.rule.momentum, decay),
                mechanism=mechanism,
                clip=loop.clip,
                eta=eta,
                expected_batch=batch,
            )
            loop.flat.write(loop.state.last)
            loop.wrote()
        else:
            sigma = loop.clip / batch
            noisy = total / batch + sigma * noise(mechanism, draws, loop.flat.size).to(total.device)
            gradients = loop.flat.views(noisy)
            for name, p in loop.model.named_parameters():
                if p.requires_grad:
                    p.grad = gradients[name].clone()
            self._original.step()
            loop.wrote()

    def state_dict(self) -> dict[str, Any]:
        """The optimizer's own state dict, and under "modelmix" the ledger and the released states; no key.

        Whoever goes on from it has fresh noise. It is no secret: everything in it was released.
        """
        loop = self._loop
        if loop.pending is not None or loop.added:
            raise ModelMixError("a draw is half done: save after optimizer.step().")
        if loop.rule.name != "mix":  # with mixing the weights are those of the state
            loop.require_own_weights()
        private = {
            "ledger": loop.ledger.to_json(),
            "run": loop.name,
            "spent": loop.plan.spent.to_json(),
            "plan": loop.plan.as_dict(),
            "last": loop.state.last.clone(),
            "previous": loop.state.previous.clone(),
            "velocity": loop.state.velocity.clone(),
            "weights": loop.weights(),
        }
        own = self._original.state_dict()
        private["digest"] = loop.seal(private, own)
        return {**own, "modelmix": private}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on from a state, here or elsewhere, with fresh noise; what ran since it was saved stays in the ledger."""
        loop = self._loop
        if not isinstance(state_dict.get("modelmix"), dict):
            raise ModelMixError("this state dict has no ledger: it is not one of a private optimizer.")
        private = state_dict["modelmix"]
        if loop.pending is not None or loop.added:
            raise UnprovedError(
                ONE_DRAW,
                "a draw was given out and is not stepped on: loading a state now would throw it away.",
                "Take the step and load then; which draws count must not depend on what is in them.",
            )
        loop.randomness.refresh()  # before anything else: the key of a step serves one computation
        own = {key: value for key, value in state_dict.items() if key != "modelmix"}
        known = ("ledger", "run", "spent", "plan", "last", "previous", "velocity", "weights")
        if missing := [name for name in known if name not in private]:
            raise ModelMixError(f"this state dict has no {missing[0]!r}: it is not one of a private optimizer.")
        if private.get("digest") != loop.seal(private, own):
            raise UnprovedError(
                "released states come from noisy, mixed steps only",
                "this state was changed since it was saved.",
                "Load it as optimizer.state_dict() gave it; learning rates may be changed after loading.",
            )
        loop.require_weights_of(private)
        loop.take_on(private)
        self._original.load_state_dict(own)
        self.param_groups, self.state = self._original.param_groups, self._original.state
        device = loop.state.last.device
        last, previous, velocity = (private[name].to(device) for name in ("last", "previous", "velocity"))
        if any(t.shape != loop.state.last.shape for t in (last, previous, velocity)):
            raise ModelMixError("this state dict is of another model: its states have other sizes.")
        loop.state = State(last, previous, velocity, step=loop.ledger.steps)
        loop.forget_draw()
        if loop.rule.name == "mix":
            loop.flat.write(last)
        loop.wrote()


def _check_loader(loader: Any) -> None:
    if not isinstance(loader, DataLoader):
        raise ModelMixError(
            f"{type(loader).__name__} is not a DataLoader: give the loop's torch.utils.data.DataLoader."
        )
    fix = "Use a plain DataLoader over a map-style dataset; every sample must have the same chance."
    if type(loader).__iter__ is not DataLoader.__iter__:
        raise UnprovedError(POISSON, f"{type(loader).__name__} has a way of its own to make batches.", fix)
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
    if held - {id(p) for p in model.parameters()}:  # what is frozen gets no gradient, so that nothing happens to it
        raise UnprovedError(
            SAME_SET, "the optimizer holds parameters that are not the model's.", "Give it the model's only."
        )
    every = (
        optimizer._optimizer_step_pre_hooks,
        optimizer._optimizer_step_post_hooks,
        _global_optimizer_pre_hooks,
        _global_optimizer_post_hooks,
    )
    if any(every):
        raise UnprovedError(
            "released states come from noisy, mixed steps only",
            "there are hooks around the optimizer's step, of its own or for all optimizers, which may write to the "
            "weights.",
            "Remove them, and do what they do after step().",
        )
    if isinstance(optimizer, torch.optim.LBFGS):
        raise UnprovedError(
            ONE_DRAW, "LBFGS evaluates a batch several times in one step.", "Use an optimizer without a closure."
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

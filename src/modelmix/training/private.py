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

import math
from collections import deque
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._pytree import tree_map
from torch.utils.data import DataLoader

from modelmix.accounting.guarantee import Guarantee
from modelmix.accounting.guarantee import epsilon as ledger_epsilon
from modelmix.accounting.ledger import Ledger
from modelmix.accounting.plan import Plan, plan_for_loop
from modelmix.errors import ModelMixError, UnprovedError
from modelmix.gradients import Loss, count_rows
from modelmix.gradients.clip import Clip
from modelmix.gradients.memory import SAME_SET
from modelmix.training.guard import check_model, require_one_process
from modelmix.training.items import Items, as_pair
from modelmix.training.loop import PrivateLoop
from modelmix.training.loop_checks import ONE_DRAW, check_loader, check_optimizer
from modelmix.training.loop_pass import DrawPart, modes_of
from modelmix.training.options import LoopOptions, require_type
from modelmix.training.rules import Rule, State
from modelmix.training.sampling import LazyBatches


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
    rule: Rule | None = None,
    options: LoopOptions | None = None,
) -> tuple[nn.Module, PrivateOptimizer, PrivateLoader, PrivateCriterion]:
    """Return (model, optimizer, loader, criterion) for a private training loop.

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
        rule: padding, momentum and a fixed threshold tau for mixing; with tau, omega follows the learning rate and may
            not fall below the plan's. See ``Rule``.
        options: parts of a draw, seed, ledger file. See ``LoopOptions``.

    Raises:
        UnprovedError: if no proof covers what is asked for; it names the rule, the reason and a way out.

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
    check_loader(loader)
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
    options = LoopOptions() if options is None else options
    require_type("options", options, LoopOptions, "mm.LoopOptions(chunk=64)")
    loop = PrivateLoop(
        model, optimizer, loader, criterion, plan.bound_to(n), Clip(clip).c, Rule() if rule is None else rule, options
    )
    return model, PrivateOptimizer(loop, optimizer), PrivateLoader(loop, loader), PrivateCriterion(loop)


class PrivateLoader:
    """Poisson draws from a loader's dataset, as batches its loop understands.

    An empty draw comes as one sample that is given the weight 0: it must be stepped on like any other.
    """

    def __init__(self, loop: PrivateLoop, loader: DataLoader[Any]) -> None:
        self._loop, self._loader = loop, loader
        self.dataset = loader.dataset

    def __len__(self) -> int:
        """Draws in an epoch, about 1/q: a convention without weight for privacy."""
        return max(1, round(1 / self._loop.step.plan.phases[0].mechanism.sample_rate))

    def __iter__(self) -> Iterator[Any]:
        loop, loader = self._loop, self._loader
        parts: deque[DrawPart] = deque()
        with loop.held():
            begun, step = loop.added, loop.step
        step.plan.require(step.number + 1)
        count = min(len(self), step.plan.steps - step.number)  # an epoch, or what is left of the plan

        def ordered() -> Iterator[list[tuple[int, int]]]:
            for k, (draws, indices) in enumerate(step.coming(loop.samples, count)):
                weight = 1.0 if indices.numel() else 0.0
                given = indices if weight else torch.zeros(1, dtype=torch.int64, device="cpu")
                pieces = torch.split(given, loop.chunk or given.numel())
                for i, piece in enumerate(pieces):
                    if k == 0 and i < begun:
                        continue  # a loop that was left in the middle of a draw has stepped on it
                    weights = torch.full((piece.numel(),), weight, dtype=torch.float64, device="cpu")
                    parts.append(DrawPart(draws, i, i + 1 == len(pieces), weights))
                    seed = draws.generator("items").initial_seed()
                    yield [(index, seed) for index in piece.tolist()]

        batches = DataLoader(
            Items(loader.dataset),
            batch_sampler=LazyBatches(ordered()),
            num_workers=loader.num_workers,
            collate_fn=loop.collate,
            pin_memory=loader.pin_memory,
            worker_init_fn=loader.worker_init_fn,
        )
        arriving = iter(batches)
        while True:
            loop.reading = True  # from here there is a draw, whether or not its items can be read
            try:
                batch, fits = next(arriving)
            except StopIteration:
                loop.reading = False
                return
            self._give_out(parts, batch, fits)
            loop.reading = False
            yield batch

    def _give_out(self, parts: deque[DrawPart], batch: Any, fits: Tensor) -> None:
        """Make a batch that has arrived the draw of the moment."""
        loop = self._loop
        with loop.held():
            if loop.pending is not None:
                raise UnprovedError(
                    ONE_DRAW,
                    "the last draw was not stepped on before the next was asked for.",
                    "Call step() of the optimizer that make_private returned, for every batch; to stop early take the "
                    "batches from itertools.islice(loader, k), and to save memory give make_private(..., "
                    "options=mm.LoopOptions(chunk=...)).",
                )
            part = parts.popleft()
            if part.number != loop.added or not loop.step.randomness.comes_to(part.draws):
                raise UnprovedError(
                    ONE_DRAW,
                    "another loop over the loader, or a step that failed, has used this draw or put it out of turn.",
                    "Loop over the loader anew, and in one loop at a time.",
                )
            inputs, targets = as_pair(batch)
            if count_rows((inputs, targets)) != part.weights.numel():
                raise UnprovedError(
                    ONE_DRAW,
                    "collate_fn gives another number of rows than it is given samples.",
                    "Return one row for every sample.",
                )
            loop.collate.warn_of_misfits(fits)
            if loop.modes is None:  # before the loop has seen a sample
                loop.modes = modes_of(loop.model)
                loop.engine.remember()
            loop.pending, loop.passed = replace(part, weights=part.weights * fits), None
            # Copies of our own: what the loop does to its batch in place must not pass for the batch.
            loop.batch = tree_map(lambda t: t.clone() if isinstance(t, Tensor) else t, (inputs, targets))


class PrivateCriterion:
    """The criterion of a private loop: the loss of the model's outputs, sample by sample.

    On other outputs, without gradients, it is the criterion it was made of: for evaluation.
    """

    def __init__(self, loop: PrivateLoop) -> None:
        self._loop = loop

    def __call__(self, outputs: Any, targets: Any) -> Tensor:
        return self._loop.loss_of(outputs, targets)


class PrivateOptimizer(Optimizer):
    """The optimizer of a private loop. ``guarantee``, ``ledger`` and ``epsilon`` say what is and was spent."""

    def __init__(self, loop: PrivateLoop, optimizer: Optimizer) -> None:
        self._ready = False
        super().__init__(optimizer.param_groups, optimizer.defaults)
        self._loop, self._original = loop, optimizer
        self.state = optimizer.state
        self._ready = True

    @property
    def ledger(self) -> Ledger:
        """What ran, here and in loops whose state was given; while more is planned, ``plan.ledger`` is what counts."""
        account = self._loop.account
        return (
            account.ledger
            if account.steps == self.plan.steps
            else replace(account.ledger, stopped="optimizer", live=True)
        )

    @property
    def plan(self) -> Plan:
        """What may run."""
        return self._loop.step.plan

    @property
    def guarantee(self) -> Guarantee:
        """What holds for everything this loop releases, however early it is stopped: the epsilon of the plan."""
        return self._loop.account.guarantee

    def epsilon(self, delta: float | None = None) -> float:
        """epsilon of the steps so far; it holds if their number was fixed beforehand, see ``guarantee``."""
        return ledger_epsilon(self.ledger, self.plan.delta if delta is None else delta)

    def extend(self, steps: int) -> None:
        """Plan ``steps`` more steps of the last mechanism; the guarantee becomes that of the longer plan."""
        self._loop.extend(steps)

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
        check_optimizer(self._original, loop.model, loop.step.rule)
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
        if self._loop.step.rule.mixes and not 0 < eta < math.inf:
            raise ModelMixError(f"a learning rate of {eta:g} makes no step: it must be above 0.")
        if not 0 <= decay < math.inf:
            raise ModelMixError(f"weight_decay = {decay:g} is not allowed: it must be at least 0 and finite.")
        self._loop.mechanism_for(eta)

    def _complete(self) -> None:
        loop, group = self._loop, self.param_groups[0]
        mean = loop.take_step(float(group["lr"]), float(group.get("weight_decay", 0.0)))
        if mean is not None:
            gradients = loop.flat.views(mean)
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
        if not loop.step.rule.mixes:  # with mixing the weights are those of the state
            loop.require_own_weights()
        state = loop.step.state
        private = {
            **loop.account.as_dict(),
            "last": state.last.clone(),
            "previous": state.previous.clone(),
            "velocity": state.velocity.clone(),
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
        if loop.pending is not None or loop.added or loop.reading:
            raise UnprovedError(
                ONE_DRAW,
                "a draw was begun and is not stepped on: loading a state now would throw it away.",
                "Loop over the loader, take the step and load then; which draws count must not depend on what is in "
                "them.",
            )
        loop.step.randomness.refresh()  # before anything else: the key of a step serves one computation
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
        present = loop.step.state.last
        device = present.device
        last, previous, velocity = (private[name].to(device) for name in ("last", "previous", "velocity"))
        if any(t.shape != present.shape for t in (last, previous, velocity)):
            raise ModelMixError("this state dict is of another model: its states have other sizes.")
        loop.account.take_on(private)
        self._original.load_state_dict(own)
        self.param_groups, self.state = self._original.param_groups, self._original.state
        loop.step.state = State(last, previous, velocity, step=loop.account.steps)
        loop.forget_draw()
        if loop.step.rule.mixes:
            loop.flat.write(last)
        loop.wrote()

"""The shared state of a private loop: what its model, loader, criterion and optimizer know of each other.

The model, called on the draw of the moment, runs the private pass of the engine; the criterion returns the loss of that
pass; nothing else that the loop computes from the outputs reaches the weights.
"""

from __future__ import annotations

import threading
import types
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves, tree_map, tree_unflatten
from torch.utils.data import DataLoader

from modelmix._checks import positive
from modelmix.accounting.mechanism import Mechanism, mixing_width
from modelmix.accounting.plan import Plan
from modelmix.accounting.runs import KEEPS_NOTHING
from modelmix.errors import BudgetExceeded, ModelMixError, UnprovedError
from modelmix.gradients import Batch, Engine, Loss
from modelmix.gradients.clip import Clip
from modelmix.gradients.device import preserve_torch_rng
from modelmix.gradients.memory import ALONE, Watch, tensor_contents
from modelmix.gradients.parameters import FlatParameters
from modelmix.training.guard import (
    PrivateForward,
    check_mechanism,
    check_model,
    check_public_model,
    require_not_private,
)
from modelmix.training.item_checks import arrays_of, check_items_independent, copy_for_probing
from modelmix.training.items import Items, SeparateCollate, as_pair
from modelmix.training.labels import Labels
from modelmix.training.loop_account import LoopAccount
from modelmix.training.loop_checks import check_optimizer
from modelmix.training.loop_pass import (
    DrawPart,
    PrivateLoss,
    PrivatePass,
    are_identical,
    digest_of,
    guard,
    modes_of,
    places_in,
    refuse_gradient,
)
from modelmix.training.options import LoopOptions
from modelmix.training.randomness import Randomness
from modelmix.training.rules import Rule, State
from modelmix.training.step import PrivateStep, require_honest

_COVERS_NOT = (
    "what the loop prints or does with training samples, their outputs and losses: for instance learning rates and "
    "settings of the optimizer chosen by them, by ReduceLROnPlateau or by the size of a batch, and what it writes into "
    "the dataset or the collate function"
)


class PrivateLoop:
    """One private loop, whose steps are those of a ``PrivateStep``.

    Args:
        model, optimizer, loader, loss: of the loop.
        plan: what may run, bound to the number of samples.
        clip: c.
        rule: how a step combines the released states.
        options: of the loop.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        loader: DataLoader[Any],
        loss: Loss,
        plan: Plan,
        clip: float,
        rule: Rule,
        options: LoopOptions,
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
        self.samples = n = len(loader.dataset)  # type: ignore[arg-type]
        self.model, self.loss, self.optimizer, self.chunk = model, loss, optimizer, options.chunk
        self.alone = threading.Lock()
        asked, expected = loader.batch_size, plan.expected_batch(1)
        if asked is not None and asked < n and abs(asked - expected) >= 1:
            raise ModelMixError(
                f"the loader's batch size is {asked} and the plan's expected batch {expected:.6g}: make them agree."
            )
        self.tau, rule = _rule_of_loop(rule, plan)
        check_optimizer(optimizer, model, rule)
        probed = copy_for_probing(loader.dataset) if loader.num_workers else loader.dataset
        check_items_independent(probed)
        check_public_model(model, arrays_of(loader.dataset, n))
        first = Items(probed)[0]
        self.collate = SeparateCollate(loader.collate_fn, first)
        probe = as_pair(self.collate([first])[0])  # its shapes and dtypes, which are public
        self.modes: list[bool] | None = None  # of all modules, as they were before the first draw was seen
        self.taken: Any = None  # which tensors of a batch the model is given, as in the first pass
        self.labels = Labels(model, loss, probe)
        self.engine = Engine(model, loss, probe)
        own = () if self.engine.name == "hooks" else (KEEPS_NOTHING,)
        self.account = LoopAccount(
            plan, options.seed is not None, {"assumed": own, "excluded": (_COVERS_NOT,)}, options.ledger
        )
        state = State.start(self.flat.read(), step=self.account.steps)
        self.step = PrivateStep(plan, rule, clip, state, Randomness(options.seed), self.account)
        self.forget_draw()
        self.reading = False  # whether the items of a draw are being read, or could not be
        self.inside = False
        self.original = model.forward
        model.forward = _Forward(self)
        for p in model.parameters():
            if p.requires_grad:
                p.register_post_accumulate_grad_hook(refuse_gradient)  # type: ignore[no-untyped-call]
        self.watch = Watch(model)
        self.wrote()

    def forget_draw(self) -> None:
        """Begin a draw anew."""
        self.total = torch.zeros_like(self.step.state.last)
        self.added = 0  # parts of the present draw that are in the total
        self.pending: DrawPart | None = None  # what was given out and is not stepped on yet
        self.batch: tuple[Any, Any] | None = None  # its samples
        self.passed: PrivatePass | None = None

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
        return digest_of([*(value for name, value in private.items() if name != "digest"), own.get("state")])

    def weights(self) -> str:
        """A digest of the trained weights, which tells whether they belong to a saved state."""
        return digest_of([p for p in self.model.parameters() if p.requires_grad])

    def require_weights_of(self, private: dict[str, Any]) -> None:
        """Refuse weights that are neither those of a saved state nor those that the last step has left."""
        if not self.step.rule.mixes and self._values()[0] != self.values[0] and self.weights() != private["weights"]:
            raise UnprovedError(
                "released states come from noisy, mixed steps only",
                "the model's weights were changed and are not those of this state.",
                "Load the model's weights of the same moment first, then the optimizer's state.",
            )

    def extend(self, steps: int) -> None:
        """Plan more steps of the last mechanism."""
        self.step.plan = self.account.plan = self.step.plan.extended(steps)

    def mechanism_for(self, eta: float) -> Mechanism:
        """Return what the coming step runs; ``BudgetExceeded`` past the plan, or if it would cost more than planned."""
        planned = self.step.mechanism
        if self.tau is None:
            return planned
        width = mixing_width(self.step.clip, self.tau, eta, self.step.expected_batch(planned))
        if width < planned.mixing_width * (1 - 1e-12):
            raise BudgetExceeded(
                f"tau = {self.tau:g} at a learning rate of {eta:g} mixes over {width:.4g} clips and the plan counts on "
                f"{planned.mixing_width:.4g}: lower the learning rate, raise tau, or plan for the smaller width."
            )
        return replace(planned, mixing_width=width)

    def take_total(self) -> Tensor:
        """Return the sum of the draw, which is used once, whatever fails from here."""
        total, self.total, self.added = self.total, torch.zeros_like(self.total), 0
        return total

    def take_step(self, eta: float, decay: float) -> Tensor | None:
        """Release a step from the draw's sum: a mixed state, or a noisy mean for the optimizer of the loop."""
        step, total, mechanism = self.step, self.take_total(), self.mechanism_for(eta)
        self.require_own_weights()
        try:
            if not step.rule.mixes:
                return step.release_mean(total, mechanism)
            step.rule = replace(step.rule, weight_decay=decay)
            self.flat.write(step.take(total, eta, mechanism).last)
            return None
        finally:  # a line that is written counts, whatever became of its step
            step.state = replace(step.state, step=self.account.steps)

    def forward(self, arguments: tuple[Any, ...], named: dict[str, Any]) -> Any:
        """The model's forward: the private pass if it is given the draw of the moment, its own otherwise."""
        if self.inside or not torch.is_grad_enabled() or self.pending is None or self.batch is None:
            return self.original(*arguments, **named)
        if arguments and named:
            raise ModelMixError("give the model its inputs all by position or all by name in a private loop.")
        inputs: Any = named or (arguments[0] if len(arguments) == 1 else arguments)
        places = places_in(inputs, self.batch)
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
        if self.modes != modes_of(self.model):
            raise UnprovedError(
                ALONE,
                "a module was put into another mode (train or eval) than it was in before the first draw.",
                "Call model.train() before the loop over the loader, and before every further one.",
            )

    def _private_pass(self, inputs: Any) -> PrivatePass:
        assert self.pending is not None
        assert self.batch is not None
        check_model(self.model)
        self.watch.check()
        self.require_own_weights()
        device = self.step.state.last.device
        inputs, targets, weights = tree_map(lambda t: t.to(device), (inputs, self.batch[1], self.pending.weights))
        targets, weights = self.labels.without_unknown(targets, weights)
        here = self.step.state.last if self.step.rule.mixes else self.flat.read()
        self.inside = True
        try:
            with preserve_torch_rng(device):
                torch.manual_seed(self.pending.draws.generator("model").initial_seed())
                summed, outputs, losses = self.engine.with_outputs(
                    self.flat.views(here), Batch(inputs, targets, weights), Clip.of(self.step.mechanism, self.step.clip)
                )
        finally:
            self.inside = False
        anchor = torch.zeros((), device=device, requires_grad=True)
        guarded = tree_map(lambda t: guard(t, anchor), outputs)
        drawn = losses[weights > 0]
        return PrivatePass(summed, guarded, drawn if drawn.numel() else losses * 0)

    def loss_of(self, outputs: Any, targets: Any) -> Tensor:
        """The loss of the draw of the moment, whose backward lets ``step`` use the private pass.

        Of anything else it is the ordinary loss, whose backward is refused by whatever it meets first.
        """
        passed, batch = self.passed, self.batch
        ours = passed is not None and are_identical(outputs, passed.outputs) and torch.is_grad_enabled()
        if not ours or passed is None or places_in(targets, batch) is None:
            value: Tensor = self.loss(outputs, targets)
            return value
        reduction = getattr(self.loss, "reduction", "mean")
        losses = passed.losses
        value = losses if reduction == "none" else losses.sum() if reduction == "sum" else losses.mean()
        found: Tensor = PrivateLoss.apply(value, torch.zeros((), requires_grad=True), passed)  # type: ignore[no-untyped-call]
        return found


def _rule_of_loop(rule: Rule, plan: Plan) -> tuple[float | None, Rule]:
    """Return the fixed threshold of a loop, if it has one, and its rule; refuse what a loop cannot do."""
    require_honest(rule)
    if rule.tau is not None and not isinstance(rule.tau, (int, float)):
        raise ModelMixError("tau of a loop is a number: give a plan of several phases in place of a schedule.")
    tau = None if rule.tau is None else positive("tau", rule.tau, "the mixing threshold")
    mixed = tau is not None or any(phase.mechanism.mixed for phase in plan.phases)
    name: Literal["mix", "plain"] = "mix" if mixed else "plain"
    if rule.name not in (None, name) or rule.ema is not None or rule.previous is not None or rule.weight_decay:
        raise ModelMixError(
            "a loop takes padding, momentum and tau from its Rule: weight decay belongs to the optimizer, and other "
            "rules, averages and second starts to a Trainer."
        )
    if name == "plain" and rule.momentum:
        raise ModelMixError("without mixing, momentum belongs to the optimizer: torch.optim.SGD(..., momentum=...).")
    return tau, replace(rule, name=name)


class _Forward(PrivateForward):
    """The forward of a private model, until it is copied or saved: a copy is an ordinary model."""

    def __init__(self, loop: PrivateLoop) -> None:
        self._loop = loop

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        return self._loop.forward(arguments, named)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        copied = memo.get(id(self._loop.model))
        return self if copied is None else types.MethodType(type(copied).forward, copied)

    def __reduce__(self) -> Any:
        return getattr, (self._loop.model, "forward")

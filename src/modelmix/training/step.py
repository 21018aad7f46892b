"""The private step: the only place where a released state is made.

The way of a step: sum of clipped gradients -> noise -> mixing -> proposed state -> ledger line -> next key -> released
state. The ledger line comes before the state it pays for, and no key outlives the state that used it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor

from modelmix.accounting.ledger import Ledger
from modelmix.accounting.mechanism import Mechanism
from modelmix.accounting.plan import Plan
from modelmix.errors import ModelMixError, UnprovedError
from modelmix.training.randomness import Randomness, StepRandomness
from modelmix.training.rules import EVERY_COORDINATE_MIXED, Rule, State


class Account(Protocol):
    """The ledger of what ran."""

    @property
    def ledger(self) -> Ledger:
        """Everything that was released about the samples, what was spent before included."""

    def taken(self, state: State) -> int:
        """Return how many steps of the plan were taken."""

    def add(self, step: int, mechanism: Mechanism) -> None:
        """Write the line of a step before its state exists."""


class RunAccount:
    """The ledger of a run whose steps are numbered: a step that is taken again has one line.

    Args:
        ledger: what was spent before, what the run claims, and its lines so far.
        before: how many of the lines were spent before.
    """

    def __init__(self, ledger: Ledger, before: int) -> None:
        self.ledger = ledger
        self._before = before

    def taken(self, state: State) -> int:
        """Return the steps of the state: a line may be ahead of it, of a step that is taken again."""
        return state.step

    def add(self, step: int, mechanism: Mechanism) -> None:
        """Add the line of a step, unless it was written for a state that was never kept and that nobody has seen."""
        line = self._before + step
        if line > self.ledger.steps:
            self.ledger = self.ledger.add(mechanism)
        elif self.ledger.mechanism_at(line) != mechanism:
            raise UnprovedError(
                "a step runs the mechanism that its ledger line names",
                f"step {step} was accounted with another mechanism.",
                "Resume with the settings the run was begun with.",
            )


class PrivateStep:
    """Own the released state, the plan, the key and the ledger of one training, and take its steps.

    Guarantee: the states it releases, taken together, are (epsilon, delta)-differentially private with the epsilon of
    the plan, if every total it is given is a sum of one clipped gradient for each sample of ``coming`` draws, in their
    order. ``Trainer`` and ``make_private`` see to that; both release what is released here and nothing else.

    Args:
        plan: what may run. Going past its end raises ``BudgetExceeded``.
        rule: how a step combines the released states.
        clip: c, the bound on the norm of a sample's gradient.
        state: the initial state, which must be public.
        randomness: the key.
        account: the ledger, which gets a line before every state.
    """

    def __init__(
        self, plan: Plan, rule: Rule, clip: float, state: State, randomness: Randomness, account: Account
    ) -> None:
        require_honest(rule)
        if rule.unproved and not plan.unproved:
            raise UnprovedError(
                "a step does what its mechanism says",
                f"this rule of a step breaks the proof ({rule.unproved[0]}), and the plan does not say so.",
                "Use mm.Rule, or a Trainer, which marks its plan and proves nothing.",
            )
        self.plan, self.rule, self.clip = plan, rule, clip
        self.state, self.randomness, self.account = state, randomness, account

    @property
    def number(self) -> int:
        """Steps taken so far."""
        return self.account.taken(self.state)

    @property
    def mechanism(self) -> Mechanism:
        """What the coming step runs; ``BudgetExceeded`` past the plan."""
        return self.plan.mechanism_at(self.number + 1)

    def expected_batch(self, mechanism: Mechanism) -> float:
        """Return B = q * population, by which sums are divided, whatever size was drawn."""
        if self.plan.population is None:
            raise ModelMixError("this plan is not bound to a number of samples yet: give samples or population.")
        return mechanism.sample_rate * self.plan.population

    def coming(self, samples: int, count: int) -> Iterator[tuple[StepRandomness, Tensor]]:
        """Yield the randomness and the draw of the coming steps, for reading samples ahead of time."""
        first = self.number + 1
        for step, draws in zip(range(first, first + count), self.randomness.coming_steps(), strict=False):
            yield draws, self.rule.draw(draws, samples, self.plan.mechanism_at(step).sample_rate)

    def take(
        self,
        total: Tensor,
        eta: float,
        mechanism: Mechanism | None = None,
        *,
        draws: StepRandomness | None = None,
        meanwhile: Callable[[], None] | None = None,
    ) -> State:
        """Release the next state.

        Args:
            total: the sum of clipped gradients of the step's draw.
            eta: the learning rate.
            mechanism: what runs, and what the ledger line says; None takes the plan's.
            draws: of this step, if some were used for the sum.
            meanwhile: called once all work is handed over and before its outcome is looked at: an accelerator does not
                wait for it. If it raises, no step was taken.
        """
        mechanism = self.mechanism if mechanism is None else mechanism
        proposed = propose_step(
            self.state,
            total,
            self.randomness.step() if draws is None else draws,
            rule=self.rule,
            mechanism=mechanism,
            clip=self.clip,
            eta=eta,
            expected_batch=self.expected_batch(mechanism),
        )
        if meanwhile is not None:
            meanwhile()
        self.account.add(self.number + 1, mechanism)
        state = proposed.accepted()
        self.randomness.advance()  # first, so that wherever an interrupt falls no key outlives the state that used it
        self.state = state
        return state

    def release_mean(self, total: Tensor, mechanism: Mechanism | None = None) -> Tensor:
        """Release the noisy mean of clipped gradients of a step without mixing, for an optimizer of one's own."""
        mechanism = self.mechanism if mechanism is None else mechanism
        if mechanism.mixed:
            raise UnprovedError(
                EVERY_COORDINATE_MIXED,
                f"the mechanism counts on a mixing width of {mechanism.mixing_width:g}, and a mean is not mixed.",
                "Take a step, which mixes, or use a mechanism with mixing_width = 0.",
            )
        mean = noisy_mean(total, self.randomness.step(), mechanism, self.clip, self.expected_batch(mechanism))
        self.account.add(self.number + 1, mechanism)
        self.randomness.advance()  # before anybody has seen the noise
        self.state = replace(self.state, step=self.state.step + 1)
        return mean


def require_honest(rule: object) -> None:
    """Refuse a rule of one's own that does not say what it breaks: what it does is not what was proved."""
    if not isinstance(rule, Rule):
        raise ModelMixError(f"rule = {rule!r} is not a Rule: give mm.Rule(...), for instance mm.Rule(momentum=0.9).")
    if type(rule) is not Rule and not rule.unproved:
        raise UnprovedError(
            "a step does what its mechanism says",
            f"{type(rule).__name__} is a rule of your own, and no proof covers what it overrides.",
            "Use mm.Rule, or let its unproved name what it breaks: its runs train, and prove nothing.",
        )


def noise(mechanism: Mechanism, draws: StepRandomness, count: int, device: torch.device | str = "cpu") -> Tensor:
    """Draw the noise of one step in units of the clip: the mechanism's own law."""
    if mechanism.law == "gaussian":
        return mechanism.noise_multiplier * draws.gaussian("noise", count, device)
    if mechanism.law == "laplace":
        return mechanism.noise_multiplier * draws.laplace("noise", count, device)
    raise ModelMixError("a law of your own can be accounted for but not trained with: use gaussian or laplace.")


def noisy_mean(
    total: Tensor, draws: StepRandomness, mechanism: Mechanism, clip: float, expected_batch: float
) -> Tensor:
    """Return total/B plus clip/B times the noise of the mechanism."""
    return total / expected_batch + clip / expected_batch * noise(mechanism, draws, total.numel(), total.device)


@dataclass(frozen=True)
class ProposedStep:
    """A step that is computed, and what must have held for it to be taken.

    Looking at it waits for an accelerator; whoever has more work to hand over should do that first.

    Args:
        finite: whether the sum of clipped gradients and the new state are. The second is noisy, hence public.
        mixed: whether every coordinate was mixed over the width that the account counts on; None if it counts on none.
    """

    state: State
    finite: Tensor
    mixed: Tensor | None

    def accepted(self) -> State:
        """Return the next state. Refuse a step that was not what its account says: its state is for nobody's eyes."""
        if not bool(self.finite):
            raise ModelMixError(
                "the sum of clipped gradients or the new state is not finite: no step was taken. Use a lower lr."
            )
        if self.mixed is not None and not bool(self.mixed):
            raise UnprovedError(
                EVERY_COORDINATE_MIXED,
                "a coordinate would have been mixed over less than tau.",
                'Use Rule("mix") or Rule("alternate") with finite weights.',
            )
        return self.state


def propose_step(
    state: State,
    total: Tensor,
    draws: StepRandomness,
    *,
    rule: Rule,
    mechanism: Mechanism,
    clip: float,
    eta: float,
    expected_batch: float,
) -> ProposedStep:
    """Compute the step from a sum of clipped gradients.

    The law: (centre - w_k)/eta - total/B is (clip/B) times one draw of ``mechanism.coordinate_law`` in every coordinate
    whose gap was padded; where the natural gap is wider, the uniform part is wider too.
    """
    count, device = state.last.numel(), state.last.device
    if not 0 < eta < math.inf:
        raise ModelMixError(f"a learning rate of {eta:g} makes no step: it must be above 0.")
    unit = clip / expected_batch
    tau = mechanism.mixing_width * unit * eta
    centre, gap = rule.propose(state, eta, tau)
    mixed = _is_mixed(gap, tau) if mechanism.mixed and not rule.unproved else None
    noisy = noisy_mean(total, draws, mechanism, clip, expected_batch)
    new = centre - eta * noisy
    if gap is not None:
        new += (draws.uniform("mixing", count, device) - 0.5) * gap
    velocity = state.velocity
    if rule.momentum:
        velocity = rule.momentum * velocity + rule.remembered_gradient(centre, new, eta, noisy)
    step = state.step + 1
    average = state.average
    if rule.ema is not None and average is not None:
        decay = min(rule.ema, (1 + step) / (10 + step))  # a short memory while there is little to remember
        average = decay * average + (1 - decay) * new
    then = replace(state, last=new, previous=state.last, velocity=velocity, average=average, step=step)
    return ProposedStep(then, torch.isfinite(total).all() & torch.isfinite(new).all(), mixed)


def _is_mixed(gap: Tensor | None, tau: float) -> Tensor:
    return torch.tensor(False) if gap is None or not tau > 0 else (gap.abs() >= tau * (1 - 1e-12)).all()

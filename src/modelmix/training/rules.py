"""Where a step starts from: public functions of the states released so far.

A step releases w_k = centre + (alpha - 1/2) * gap - eta * (G/B + noise), with alpha uniform on (0, 1) in every
coordinate. Centre and gap may depend on released states in any way, for those are public; the proof asks only that
every gap is tau wide. This is why momentum is computed from released gradients (centre - w_k)/eta: their history is
free, while a buffer of unmixed noisy gradients would carry them past the mixing.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from modelmix._checks import at_least_zero
from modelmix.accounting.mechanism import Mechanism
from modelmix.errors import ModelMixError, UnprovedError
from modelmix.training.mixing import PADDINGS, midpoint, padded_gap
from modelmix.training.randomness import StepRandomness

RULES = ("mix", "alternate", "average", "plain", "released")
_MIXING = ("mix", "alternate", "released")
EVERY_COORDINATE_MIXED = "every trained coordinate is mixed over a width of tau or more at every step"

_RELEASED_BREAKS = (
    "momentum carries unmixed noisy gradients across steps",
    "parameters of norm layers are not mixed",
    "gradients are not truncated coordinate by coordinate",
    "a step makes fifteen draws at a fifteenth of the rate",
)
_EMBEDDED_BREAKS = (
    "momentum carries unmixed noisy gradients across steps",
    "residuals are not truncated, nor whole contributions bounded, coordinate by coordinate",
    "how the two sums of a step were accounted for is not published",
)


@dataclass(frozen=True)
class State:
    """Everything that was released, as far as later steps use it. All vectors are float64."""

    last: Tensor
    previous: Tensor
    velocity: Tensor
    average: Tensor | None = None
    step: int = 0


@dataclass(frozen=True)
class Rule:
    """How a step combines the released states.

    Args:
        name: "mix" (Algorithm 1), "alternate" (two models in turns, Equations 3 and 4: the gradient is taken at the
            older state), "average" (the plain average of the last two states, no mixing), "plain" (DP-SGD), or
            "released" (the authors' code: trains, and proves nothing).
        padding: how small gaps are widened, see ``mixing``.
        momentum: factor of the sum of past released gradients.
        weight_decay: lambda; eta * lambda * w_{k-1} is taken off.
        ema: decay of the average of released states; None for no average.
        unmixed: for "released" only: 1 for the coordinates its code leaves unmixed.
        embedded: whether gradients are embedded; "released" then breaks other rules.
    """

    name: str
    padding: str = "exact"
    momentum: float = 0.0
    weight_decay: float = 0.0
    ema: float | None = None
    unmixed: Tensor | None = None
    embedded: bool = False

    def __post_init__(self) -> None:
        if self.name not in RULES:
            raise ModelMixError(f"rule = {self.name!r} is unknown: choose one of {', '.join(RULES)}.")
        if self.padding not in PADDINGS:
            raise ModelMixError(f"padding = {self.padding!r} is unknown: choose one of {', '.join(PADDINGS)}.")
        at_least_zero("weight_decay", self.weight_decay, "the weight decay")
        for name, value in (("momentum", self.momentum), ("ema", 0.0 if self.ema is None else self.ema)):
            if not 0 <= value < 1:
                raise ModelMixError(f"{name} = {value:g} is not allowed: it must be at least 0 and below 1.")

    @property
    def unproved(self) -> tuple[str, ...]:
        """The rules of the proof it breaks, in words."""
        if self.name != "released":
            return ()
        return _EMBEDDED_BREAKS if self.embedded else _RELEASED_BREAKS

    def check(self, mechanism: Mechanism) -> None:
        """Refuses a mechanism whose account counts on a mixing that does not happen."""
        if mechanism.mixed and self.name not in _MIXING:
            raise UnprovedError(
                EVERY_COORDINATE_MIXED,
                f'the mechanism counts on a mixing width of {mechanism.mixing_width:g}, and the rule "{self.name}" '
                "does not mix.",
                'Use rule="mix", or a mechanism with mixing_width = 0.',
            )

    def gradient_point(self, state: State) -> Tensor:
        """The state at which the gradient is taken."""
        return state.previous if self.name == "alternate" else state.last

    def propose(self, state: State, eta: float, tau: float) -> tuple[Tensor, Tensor | None]:
        """(centre, gap) of the coming step; no gap where nothing is mixed."""
        gap = None
        centre = state.last.clone() if self.name == "plain" else midpoint(state.last, state.previous)
        if self.name in _MIXING:
            gap = padded_gap(state.last, state.previous, tau, self.padding)
        if self.name == "released" and self.unmixed is not None and gap is not None:
            centre = torch.where(self.unmixed, state.last, centre)
            gap = torch.where(self.unmixed, 0.0, gap)
        if self.weight_decay:
            centre -= eta * self.weight_decay * state.last
        if self.momentum:
            centre -= eta * self.momentum * state.velocity
        return centre, gap


def noise(mechanism: Mechanism, draws: StepRandomness, count: int, device: torch.device | str = "cpu") -> Tensor:
    """The noise of one step in units of the clip: the mechanism's own law."""
    if mechanism.law == "gaussian":
        return mechanism.noise_multiplier * draws.gaussian("noise", count, device)
    if mechanism.law == "laplace":
        return mechanism.noise_multiplier * draws.laplace("noise", count, device)
    raise ModelMixError("a law of your own can be accounted for but not trained with: use gaussian or laplace.")


@dataclass(frozen=True)
class Proposed:
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
        """The next state. Refuses a step that was not what its account says: its state is for nobody's eyes."""
        if not bool(self.finite):
            raise ModelMixError(
                "the sum of clipped gradients or the new state is not finite: no step was taken. Use a lower lr."
            )
        if self.mixed is not None and not bool(self.mixed):
            raise UnprovedError(
                EVERY_COORDINATE_MIXED,
                "a coordinate would have been mixed over less than tau.",
                'Use rule="mix" or "alternate" with finite weights.',
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
) -> Proposed:
    """The step from a sum of clipped gradients.

    The law: (centre - w_k)/eta - total/B is (clip/B) times one draw of ``mechanism.coordinate_law`` in every coordinate
    whose gap was padded; where the natural gap is wider, the uniform part is wider too.
    """
    count, device = state.last.numel(), state.last.device
    if not 0 < eta < math.inf:
        raise ModelMixError(f"a learning rate of {eta:g} makes no step: it must be above 0.")
    unit = clip / expected_batch
    tau = mechanism.mixing_width * unit * eta
    centre, gap = rule.propose(state, eta, tau)
    mixed = _mixed(gap, tau) if mechanism.mixed and not rule.unproved else None
    noisy = total / expected_batch + unit * noise(mechanism, draws, count, device)
    new = centre - eta * noisy
    if gap is not None:
        new += (draws.uniform("mixing", count, device) - 0.5) * gap
    seen = noisy if rule.name == "released" else (centre - new) / eta
    velocity = rule.momentum * state.velocity + seen if rule.momentum else state.velocity
    step = state.step + 1
    average = state.average
    if rule.ema is not None and average is not None:
        decay = min(rule.ema, (1 + step) / (10 + step))  # a short memory while there is little to remember
        average = decay * average + (1 - decay) * new
    then = replace(state, last=new, previous=state.last, velocity=velocity, average=average, step=step)
    return Proposed(then, torch.isfinite(total).all() & torch.isfinite(new).all(), mixed)


def take_step(state: State, total: Tensor, draws: StepRandomness, **how: Any) -> State:
    """``propose_step``, accepted."""
    return propose_step(state, total, draws, **how).accepted()


def _mixed(gap: Tensor | None, tau: float) -> Tensor:
    return torch.tensor(False) if gap is None or not tau > 0 else (gap.abs() >= tau * (1 - 1e-12)).all()

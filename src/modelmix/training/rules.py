"""Where a step starts from: public functions of the states released so far, and the mixing of Algorithm 1.

A step releases w_k = centre + (alpha - 1/2) * gap - eta * (G/B + noise), with alpha uniform on (0, 1) in every
coordinate. Centre and gap may depend on released states in any way, for those are public; the proof asks only that
every gap is tau wide: small gaps are widened about the same midpoint. This is why momentum is computed from released
gradients (centre - w_k)/eta: their history is free, while a buffer of unmixed noisy gradients would carry them past
the mixing.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal, TypeVar

import torch
from torch import Tensor, nn

from modelmix._checks import at_least_zero
from modelmix.accounting.mechanism import Mechanism
from modelmix.errors import ModelMixError, UnprovedError

if TYPE_CHECKING:
    from modelmix.gradients.clip import Clip
    from modelmix.training.embedding import EmbeddingClip
    from modelmix.training.randomness import StepRandomness
    from modelmix.training.schedules import Schedule

AnyClip = TypeVar("AnyClip", "Clip", "EmbeddingClip")
PADDINGS = ("exact", "paper")
EVERY_COORDINATE_MIXED = "every trained coordinate is mixed over a width of tau or more at every step"


@dataclass(frozen=True)
class State:
    """Everything that was released, as far as later steps use it. All vectors are float64."""

    last: Tensor
    previous: Tensor
    velocity: Tensor
    average: Tensor | None = None
    step: int = 0

    @classmethod
    def start(cls, last: Tensor, previous: Tensor | None = None, *, averaged: bool = False, step: int = 0) -> State:
        """Return the state before the first step, which is public."""
        average = last.clone() if averaged else None
        return cls(last, last if previous is None else previous, torch.zeros_like(last), average, step)


@dataclass(frozen=True)
class Rule:
    """How a step combines the released states.

    Args:
        name: "mix" (Algorithm 1), "alternate" (two models in turns, Equations 3 and 4: the gradient is taken at the
            older state), "average" (the plain average of the last two states, no mixing) or "plain" (DP-SGD). None
            takes "mix" if the mechanism mixes and "plain" if not.
        padding: how gaps below tau are widened: "exact" to tau, "paper" to |gap| + tau.
        momentum: factor of the sum of past released gradients.
        weight_decay: lambda; eta * lambda * w_{k-1} is taken off.
        ema: decay of the average of released states; None for no average.
        tau: the mixing threshold, a number or a ``Schedule``, in place of the plan's mixing width; every step's own
            omega is accounted. None takes tau = omega * c * eta / B.
        previous: the second initial state w_{-1}, as a model or a state dict; None takes w_{-1} = w_0.

    Example:
        >>> Rule(momentum=0.9, ema=0.99).padding
        'exact'
    """

    name: Literal["mix", "alternate", "average", "plain"] | None = None
    padding: Literal["exact", "paper"] = "exact"
    momentum: float = 0.0
    weight_decay: float = 0.0
    ema: float | None = None
    tau: float | Schedule | None = None
    previous: nn.Module | Mapping[str, Tensor] | None = None

    NAMES: ClassVar[tuple[str, ...]] = ("mix", "alternate", "average", "plain")

    def __post_init__(self) -> None:
        if self.name is not None and self.name not in self.NAMES:
            raise ModelMixError(f"rule = {self.name!r} is unknown: choose one of {', '.join(self.NAMES)}.")
        if self.padding not in PADDINGS:
            raise ModelMixError(f"padding = {self.padding!r} is unknown: choose one of {', '.join(PADDINGS)}.")
        at_least_zero("weight_decay", self.weight_decay, "the weight decay")
        for name, value in (("momentum", self.momentum), ("ema", 0.0 if self.ema is None else self.ema)):
            if not isinstance(value, (int, float)) or not 0 <= value < 1:
                raise ModelMixError(f"{name} = {value} is not allowed: it must be at least 0 and below 1.")

    @property
    def unproved(self) -> tuple[str, ...]:
        """The rules of the proof that a subclass breaks, in words: its runs train, and prove nothing."""
        return ()

    @property
    def mixes(self) -> bool:
        """Whether every coordinate is moved between two released states."""
        return self.name in ("mix", "alternate")

    def check(self, mechanism: Mechanism) -> None:
        """Refuse a mechanism whose account counts on a mixing that does not happen."""
        if mechanism.mixed and not self.mixes:
            raise UnprovedError(
                EVERY_COORDINATE_MIXED,
                f'the mechanism counts on a mixing width of {mechanism.mixing_width:g}, and the rule "{self.name}" '
                "does not mix.",
                'Use Rule("mix"), or a mechanism with mixing_width = 0.',
            )

    def gradient_point(self, state: State) -> Tensor:
        """Return the state at which the gradient is taken."""
        return state.previous if self.name == "alternate" else state.last

    def start(self, state: State, tau: float) -> tuple[Tensor, Tensor | None]:
        """Return (centre, gap) without momentum and weight decay."""
        centre = state.last.clone() if self.name == "plain" else midpoint(state.last, state.previous)
        return centre, padded_gap(state.last, state.previous, tau, self.padding) if self.mixes else None

    def propose(self, state: State, eta: float, tau: float) -> tuple[Tensor, Tensor | None]:
        """Return (centre, gap) of the coming step; no gap where nothing is mixed."""
        centre, gap = self.start(state, tau)
        if self.weight_decay:
            centre -= eta * self.weight_decay * state.last
        if self.momentum:
            centre -= eta * self.momentum * state.velocity
        return centre, gap

    # What the proof fixes; runs that prove nothing may differ here.

    def draw(self, draws: StepRandomness, count: int, rate: float) -> Tensor:
        """Return the samples of a step: each with probability ``rate`` on its own coin."""
        return draws.poisson_indices("sampling", count, rate)

    def bound(self, clip: AnyClip) -> AnyClip:
        """Return how gradients are clipped, of what the account counts on."""
        return clip

    def remembered_gradient(self, centre: Tensor, new: Tensor, eta: float, noisy: Tensor) -> Tensor:
        """Return what momentum sums up: what anybody can compute from released states."""
        return (centre - new) / eta


def midpoint(last: Tensor, previous: Tensor) -> Tensor:
    """Return (w_{k-1} + w_{k-2}) / 2, which is public because both states are."""
    return 0.5 * (last + previous)


def padded_gap(last: Tensor, previous: Tensor, tau: float, padding: str) -> Tensor:
    """Return w_{k-1} - w_{k-2} with gaps below tau widened.

    "exact" widens to tau, as the authors' code does; "paper" widens to |gap| + tau, as lines 6 to 8 of Algorithm 1 say.
    Both are covered by the proof; the first adds less noise. The states themselves are kept as they were released.
    """
    if padding not in PADDINGS:
        raise ModelMixError(f"padding = {padding!r} is unknown: choose one of {', '.join(PADDINGS)}.")
    if not tau >= 0:
        raise ModelMixError(f"a mixing threshold of {tau:g} widens nothing: it must be at least 0.")
    gap = last - previous
    # sign(0) is +1: two equal coordinates must be mixed as well.
    sign = torch.where(gap >= 0, 1.0, -1.0).to(gap.dtype)
    widened = sign * tau if padding == "exact" else gap + sign * tau
    return torch.where(gap.abs() < tau, widened, gap)

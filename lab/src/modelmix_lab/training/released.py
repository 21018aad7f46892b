"""The step of the authors' released code, for comparison: it trains, and proves nothing."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn

from modelmix.training.embedding import EmbeddingClip
from modelmix.training.randomness import StepRandomness
from modelmix.training.rules import AnyClip, Rule, State

_PARTS = 15  # draws that make up a step of the authors' code
_NORM_LAYERS = (nn.GroupNorm, nn.LayerNorm, nn.modules.instancenorm._InstanceNorm)
_BREAKS = (
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
class ReleasedRule(Rule):
    """Combine released states as the authors' code does.

    Args:
        unmixed: 1 for the coordinates its code leaves unmixed, those of norm layers.
        embedded: whether gradients are embedded; it then breaks other rules of the proof.
    """

    name: Literal["released"] = "released"  # type: ignore[assignment]
    unmixed: Tensor | None = None
    embedded: bool = False

    NAMES: ClassVar[tuple[str, ...]] = ("released",)

    @classmethod
    def of(cls, model: nn.Module, embedded: bool, **fields: Any) -> ReleasedRule:
        """Return the rule for a model; ``fields`` are those of ``Rule``."""
        return cls(unmixed=None if embedded else _norm_layers(model), embedded=embedded, **fields)

    @property
    def unproved(self) -> tuple[str, ...]:
        """The rules of the proof that it breaks."""
        return _EMBEDDED_BREAKS if self.embedded else _BREAKS

    @property
    def mixes(self) -> bool:
        """Whether coordinates are mixed, but for those of norm layers."""
        return True

    def start(self, state: State, tau: float) -> tuple[Tensor, Tensor | None]:
        """Return (centre, gap), with no gap in norm layers."""
        centre, gap = super().start(state, tau)
        if self.unmixed is None or gap is None:
            return centre, gap
        unmixed = self.unmixed.to(centre.device)
        return torch.where(unmixed, state.last, centre), torch.where(unmixed, 0.0, gap)

    def draw(self, draws: StepRandomness, count: int, rate: float) -> Tensor:
        """Return fifteen draws at a fifteenth of the rate, in which a sample can be twice."""
        if self.embedded:
            return super().draw(draws, count, rate)
        return torch.cat([draws.poisson_indices(f"sampling {i}", count, rate / _PARTS) for i in range(_PARTS)])

    def bound(self, clip: AnyClip) -> AnyClip:
        """Return the clip without truncation, nor a bound on whole contributions."""
        return replace(clip, p=1, c=math.inf) if isinstance(clip, EmbeddingClip) else replace(clip, p=1)

    def remembered_gradient(self, centre: Tensor, new: Tensor, eta: float, noisy: Tensor) -> Tensor:
        """Return the noisy gradient itself, which was not mixed."""
        return noisy


def _norm_layers(model: nn.Module) -> Tensor:
    """Return 1 for every trained coordinate of a norm layer."""
    inside = {id(p) for m in model.modules() if isinstance(m, _NORM_LAYERS) for p in m.parameters()}
    trained = [p for p in model.parameters() if p.requires_grad]
    return torch.cat([torch.full((p.numel(),), id(p) in inside, device=p.device) for p in trained])

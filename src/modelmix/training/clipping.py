"""Algorithm 2 on every sample's gradient: the norm to c, then every coordinate to c/sqrt(p).

What is summed obeys the bounds, not only what was meant. Gradients are widened to float64 first, whatever the model's
precision, and scale and truncation stay ``MARGIN`` below the bounds. With u = 2^-53 that pays for two roundings: the
norm of d coordinates is off by at most d*u of itself, and one sample more or less in a sum of m moves it by that
sample's clipped gradient and at most 2*m^2*u*c of rounding, in whichever order it is summed. Together they are below
the margin for d = 2^30 coordinates and batches of m = 2^15.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from modelmix.errors import ModelMixError
from modelmix.privacy.mechanism import Mechanism
from modelmix.privacy.validation import positive, whole

MARGIN = 2.0**-20

_SMALLEST = 1e-100  # a gradient that would have to be clipped to less can have squares that are no longer numbers
_CACHE = 4 * 2**20  # bytes of float64 that a processor core works on at once
_DEVICE = 2**28  # likewise for an accelerator, where few large operations are better


@dataclass(frozen=True)
class Clip:
    """How one sample's gradient is bounded.

    Args:
        c: the bound on its norm.
        p: every coordinate is at most c/sqrt(p) afterwards; 1 is no truncation.
        norm: 2 for Gaussian noise, 1 for Laplace noise.
    """

    c: float
    p: int = 1
    norm: int = 2

    def __post_init__(self) -> None:
        object.__setattr__(self, "c", positive("c", self.c, "the clip"))
        object.__setattr__(self, "p", whole("p", self.p, "the truncation parameter", least=1))
        if self.c < _SMALLEST:
            raise ModelMixError(f"c = {self.c:g} is not allowed: the clip must be at least {_SMALLEST:g}.")
        if self.norm not in (1, 2):
            raise ModelMixError(f"norm = {self.norm!r} is not allowed: gradients are clipped in the norm 1 or 2.")

    @classmethod
    def of(cls, mechanism: Mechanism, c: float) -> Clip:
        """The clip that a mechanism's proof asks for."""
        return cls(c, mechanism.p, mechanism.coordinate_law.norm)

    @property
    def coordinate_bound(self) -> float:
        return self.c / math.sqrt(self.p)

    @torch.no_grad()
    def sum(self, gradients: Sequence[Tensor], weights: Tensor) -> ClippedSum:
        """The sum of clipped gradients.

        Args:
            gradients: one m x (shape) tensor for every parameter; row i belongs to sample i.
            weights: m numbers, 1 for a sample that was drawn and 0 for padding.
        """
        m = weights.shape[0]
        if any(g.shape[0] != m for g in gradients):
            raise ModelMixError(
                f"gradients of {sorted({g.shape[0] for g in gradients})} samples cannot be summed with {m} weights."
            )
        rows = [g.reshape(m, g.shape[1:].numel()) for g in gradients]
        sizes = [g.shape[1] for g in rows]
        device = rows[0].device
        drawn = (weights > 0).to(device)
        total = torch.zeros(sum(sizes), dtype=torch.float64, device=device)
        norms = torch.zeros(m, dtype=torch.float64, device=device)
        truncated = torch.zeros(m, dtype=torch.int64, device=device)
        # Few samples at a time through one small buffer: widening costs hardly anything while it stays in the cache.
        room = _CACHE * min(4, torch.get_num_threads()) if device.type == "cpu" else _DEVICE
        block = max(1, min(m, room // (8 * max(1, total.numel()))))
        buffer = torch.empty(block, total.numel(), dtype=torch.float64, device=device)
        for start in range(0, m, block):
            part = slice(start, min(start + block, m))
            wide = buffer[: part.stop - start]
            for g, piece in zip(rows, torch.split(wide, sizes, 1), strict=True):
                piece.copy_(g[part])
            norms[part] = torch.linalg.vector_norm(wide, dim=1) if self.norm == 2 else wide.abs().sum(1)
            # A gradient that is not finite is no gradient: it adds nothing, and the caller is told.
            finite = torch.isfinite(norms[part])
            if not bool(finite.all()):
                wide[~finite] = 0.0
            scale = (self.c * (1 - MARGIN) / norms[part].clamp_min(1e-300)).clamp_max(1.0)
            scale = torch.where(finite & drawn[part], scale, 0.0)
            if self.p == 1:
                total += scale @ wide
            else:
                bound = self.coordinate_bound * (1 - MARGIN)
                cut = wide.mul_(scale[:, None]).clamp(-bound, bound)
                total += cut.sum(0)
                truncated[part] = wide.ne_(cut).sum(1).long()
        return ClippedSum(total, norms[drawn], truncated[drawn])


@dataclass(frozen=True)
class ClippedSum:
    """A sum of clipped gradients, in float64, and what clipping met on the way.

    ``norms`` (before clipping) and ``truncated`` (coordinates cut, for every sample) are computed from private data
    without noise: they serve the data holder's diagnostics and nothing else.
    """

    total: Tensor
    norms: Tensor
    truncated: Tensor

r"""Algorithm 2 on every sample's gradient: the norm to c, then every coordinate to c/sqrt(p).

What is summed obeys the bounds, not only what was meant: norms are accumulated in float64, and the scale and the
truncation stay ``MARGIN`` below, which is more than the rounding of one float32 product.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from modelmix.privacy.mechanism import Mechanism
from modelmix.privacy.validation import positive, whole

MARGIN = 2.0**-20


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

    @classmethod
    def of(cls, mechanism: Mechanism, c: float) -> Clip:
        """The clip that a mechanism's proof asks for."""
        return cls(c, mechanism.p, mechanism.coordinate_law.norm)

    @property
    def coordinate_bound(self) -> float:
        return self.c / math.sqrt(self.p)

    def sum(self, gradients: Sequence[Tensor], weights: Tensor) -> ClippedSum:
        """The weighted sum of clipped gradients.

        Args:
            gradients: one m x (coordinates) matrix for every parameter; row i belongs to sample i.
            weights: m numbers, 1 for a sample that was drawn and 0 for padding.
        """
        rows = [g.reshape(g.shape[0], -1) for g in gradients]
        norms = self._norms(rows)
        # A gradient that is not finite is no gradient: it adds nothing, and the caller is told.
        finite = torch.isfinite(norms)
        scale = torch.where(finite, (self.c * (1 - MARGIN) / norms.clamp_min(1e-300)).clamp_max(1.0), 0.0) * weights
        scale = scale.to(rows[0].dtype)
        if not bool(finite.all()):
            rows = [torch.where(finite[:, None], g, 0.0) for g in rows]
        if self.p == 1:
            total = torch.cat([scale @ g for g in rows])
            truncated = torch.zeros_like(norms, dtype=torch.int64)
        else:
            bound = self.coordinate_bound * (1 - MARGIN)
            scaled = [g * scale[:, None] for g in rows]
            truncated = torch.stack([(g.abs() > bound).sum(1) for g in scaled]).sum(0)
            total = torch.cat([g.clamp(-bound, bound).sum(0) for g in scaled])
        drawn = weights > 0
        return ClippedSum(total.double(), norms[drawn], truncated[drawn])

    def _norms(self, rows: Sequence[Tensor]) -> Tensor:
        if self.norm == 1:
            return torch.stack([g.abs().sum(1, dtype=torch.float64) for g in rows]).sum(0)
        squares = [torch.linalg.vector_norm(g, dim=1, dtype=torch.float64).square() for g in rows]
        return torch.stack(squares).sum(0).sqrt()


@dataclass(frozen=True)
class ClippedSum:
    """A sum of clipped gradients, in float64, and what clipping met on the way.

    ``norms`` (before clipping) and ``truncated`` (coordinates cut, for every sample) are computed from private data
    without noise: they serve the data holder's diagnostics and nothing else.
    """

    total: Tensor
    norms: Tensor
    truncated: Tensor

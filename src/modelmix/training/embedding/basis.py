"""The basis of a step: a few directions that public samples suggest, orthonormalised."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from modelmix.errors import ModelMixError
from modelmix.gradients.device import allow_tf32
from modelmix.gradients.lazy import LazyGradients

# What gradients in float32 say about directions they do not have: squared in exact products, else lost in rounding.
_NOTHING = {torch.float64: 1e-12, torch.float32: 1e-6}
_ALIKE = 1e-6  # below this, squares of lengths no longer tell directions apart in float64
# How far from orthonormal columns may be, by the precision that they come in; 0 asks for all that float64 can do.
_ENOUGH = {torch.float64: 0.0, torch.float32: 2.0**-14}
_TILE = 8  # matrices whose sizes are multiples of it are multiplied several times faster on accelerators


@dataclass(frozen=True)
class Basis:
    """V, block by block: a float64 matrix for each contiguous part of the flat vector; columns are orthonormal or 0."""

    parts: tuple[tuple[slice, Tensor], ...]

    @property
    def device(self) -> torch.device:
        return self.parts[0][1].device

    @cached_property
    def padded(self) -> tuple[Tensor, ...]:
        """The matrices with zeros up to the next sizes that the device likes."""
        return tuple(_to_size(v, *(_padded(n, v.device) for n in v.shape)) for _, v in self.parts)

    @cached_property
    def factors(self) -> tuple[Tensor, ...]:
        """The same in the precision in which gradients are taken apart."""
        kind = _precision(self.device)
        return tuple(_to_size(v.to(kind), *(_padded(n, v.device) for n in v.shape)) for _, v in self.parts)

    @property
    def size(self) -> int:
        return sum(v.shape[1] for _, v in self.parts)

    def reconstruct(self, embedding: Tensor) -> Tensor:
        """V times a vector of embeddings, as a flat vector."""
        pieces = torch.split(embedding, [v.shape[1] for _, v in self.parts])
        return torch.cat([v @ piece for (_, v), piece in zip(self.parts, pieces, strict=True)])


@torch.no_grad()
def find_basis(
    layout: Sequence[tuple[slice, int]],
    chunks: Iterable[LazyGradients],
    generator: torch.Generator,
    precision: torch.dtype | None = None,
) -> Basis:
    """One power iteration: the columns of G^T (G start), orthonormalised, G the public gradients of a group.

    The sum over public samples is taken chunk by chunk and group by group: of G, one group of a chunk is held.

    Args:
        layout: of ``Embedding``.
        chunks: the gradients of the public samples, some samples at a time.
        generator: of the Gaussian start. Privacy does not rest on it.
        precision: in which the model ran; where products of bfloat16 are fast, what ran in it is multiplied in it.
    """
    device = generator.device
    sizes = [(_padded(part.stop - part.start, device), _padded(k, device)) for part, k in layout]
    starts = [torch.randn(size, generator=generator, device=device, dtype=_precision(device)) for size in sizes]
    sums, kind = [torch.zeros_like(start) for start in starts], _multiplied_in(precision, device)
    starts = [start.to(kind) for start in starts]
    for gradients in chunks:
        for group, (part, _) in enumerate(layout):
            g = columns(gradients, part, kind)
            with allow_tf32(device):
                _add_product(sums[group], g.T, g @ starts[group])
            del g  # before those of the next group
        del gradients  # and what layers saw, before the next chunk
    starts.clear()
    tops = [torch.linalg.vector_norm(total, ord=math.inf) for total in sums]
    if not bool(torch.isfinite(torch.stack(tops)).all()):
        raise ModelMixError("the loss or gradient of a public sample is not finite: no step was taken. Lower lr.")
    found = [total[: part.stop - part.start, :k] for (part, k), total in zip(layout, sums, strict=True)]
    return Basis(tuple((part, _orthonormal(total)) for (part, _), total in zip(layout, found, strict=True)))


def _precision(device: torch.device) -> torch.dtype:
    """In which gradients are taken apart: accelerators are many times faster in float32."""
    return torch.float64 if device.type == "cpu" else torch.float32


def _multiplied_in(precision: torch.dtype | None, device: torch.device) -> torch.dtype:
    """In which public gradients are multiplied.

    Nothing but bfloat16 has both the range of float32 and products that are summed in it.
    """
    return torch.bfloat16 if precision == torch.bfloat16 and device.type == "cuda" else _precision(device)


def _add_product(total: Tensor, a: Tensor, b: Tensor) -> None:
    """total += a b; sums of products of bfloat16 are kept in full."""
    if a.dtype == total.dtype:
        total.addmm_(a, b)
    else:
        total += torch.mm(a, b, out_dtype=total.dtype)


def _padded(size: int, device: torch.device) -> int:
    """The next size that the device likes."""
    return size if device.type == "cpu" else -(-size // _TILE) * _TILE


def _to_size(t: Tensor, *sizes: int) -> Tensor:
    """A matrix with zeros below and to the right of it."""
    return torch.nn.functional.pad(t, (0, sizes[1] - t.shape[1], 0, sizes[0] - t.shape[0]))


def _orthonormal(vectors: Tensor) -> Tensor:
    """Orthonormal columns of the same span; zeros for directions that are seen to be rounding and nothing else."""
    kind = vectors.dtype
    if kind == torch.float64:  # squares of what comes in float32 stay within range
        vectors = vectors / vectors.abs().max().clamp_min(1e-300)
    vectors = vectors.double()
    quick = _by_cholesky(vectors, _ENOUGH[kind])
    if quick is not None:
        return quick
    found = torch.linalg.qr(vectors)
    sizes = found.R.diagonal().abs()
    kept: Tensor = found.Q * (sizes > _NOTHING[kind] * sizes.max())
    return kept


def _by_cholesky(vectors: Tensor, enough: float) -> Tensor | None:
    """Orthonormal columns by products of matrices, which accelerators are good at; None if the columns are too alike.

    A round leaves of rounding in the Gram matrix as much as the square of the condition number makes of it, a second
    one next to nothing (Yamamoto et al. 2015). Norms of the factor and its inverse bound that number.
    """
    for _ in range(2):
        factor, failed = torch.linalg.cholesky_ex(vectors.T @ vectors)
        sizes = factor.diagonal()
        if bool(failed) or not bool(sizes.min() >= _ALIKE * sizes.max()):
            return None
        one = torch.eye(len(factor), dtype=factor.dtype, device=factor.device)
        inverse = torch.linalg.solve_triangular(factor, one, upper=False)
        vectors = vectors @ inverse.T  # a product of large matrices where solving would be many small ones
        if bool((factor.norm() * inverse.norm()).square() * torch.finfo(torch.float64).eps <= enough):
            break
    return vectors


def columns(gradients: LazyGradients, part: slice, kind: torch.dtype | None = None) -> Tensor:
    """m x coordinates: a contiguous part of every sample's flat gradient, and zeros up to ``_padded``.

    Args:
        kind: the precision; None is that in which gradients are taken apart.
    """
    device = gradients.device
    return gradients.columns(part, kind or _precision(device), _padded(part.stop - part.start, device))

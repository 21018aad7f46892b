"""Gradient embedding (Yu et al. 2021): a few directions that public samples suggest, and what they leave over.

Every step has a basis V of its own, computed from public samples at the released state. So V is public: given what was
released before, it is a constant, and the two sums of a step are bounded sums like any other. Embeddings V^T g get
noise in proportion to their number of coordinates, residuals g - V V^T g have a smaller clip.

What is summed obeys the bounds that ``EmbeddingMechanism`` counts on, whatever V is: nothing here rests on its columns
being orthonormal to the last bit, only utility does. Everything is float64, and the margin is that of ``clipping``.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from modelmix.errors import ModelMixError
from modelmix.privacy.embedding import EmbeddingMechanism
from modelmix.privacy.validation import whole
from modelmix.training.clipping import MARGIN, Clip, ClippedSum
from modelmix.training.gradients import Gradients
from modelmix.training.sampling import TensorSource

_NOTHING = 1e-12  # the square of what gradients in float32 know about a direction they do not have
_ALIKE = 1e-6  # below this, squares of lengths no longer tell directions apart in float64

Flat = Sequence[tuple[Gradients, int]]
"""The gradients of some samples for every parameter, each with its number of coordinates."""


class Embedding:
    """Public samples and the size of the basis that they give.

    Guarantee: none is needed. The samples must be public: epsilon says nothing about them.

    Args:
        public: (inputs, targets) of samples as the model takes them. Targets need not mean anything: see
            ``random_labels``.
        size: basis vectors in all.
        groups: contiguous parts of the flat parameter vector, each with a basis of its own. The numbers of basis
            vectors are in proportion to the square roots of their sizes.
    """

    def __init__(self, public: tuple[Any, Any], size: int = 1000, groups: int = 3) -> None:
        self.source = TensorSource(*public)
        self.size = whole("size", size, "the number of basis vectors", least=1)
        self.groups = whole("groups", groups, "the number of groups", least=1)
        if self.source.n == 0:
            raise ModelMixError("there is no public sample: gradient embedding needs some.")

    def as_dict(self) -> dict[str, Any]:
        """What a resumed run must have again."""
        digest = hashlib.sha256()
        for leaf in tree_leaves((self.source.inputs, self.source.targets)):
            digest.update(f"{leaf.dtype}{tuple(leaf.shape)}".encode())
            digest.update(leaf.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
        return {"size": self.size, "groups": self.groups, "samples": self.source.n, "public": digest.hexdigest()}

    def chunks(self, size: int, device: torch.device) -> Iterable[tuple[Any, Any]]:
        """All public samples, some at a time."""
        for start in range(0, self.source.n, size):
            yield tree_map(
                lambda t, start=start: t[start : start + size].to(device), (self.source.inputs, self.source.targets)
            )

    def layout(self, coordinates: int) -> list[tuple[slice, int]]:
        """(part of the flat vector, basis vectors) of every group."""
        if self.groups > coordinates:
            raise ModelMixError(f"groups = {self.groups} is too many for {coordinates} coordinates.")
        ends = [coordinates * i // self.groups for i in range(self.groups + 1)]
        parts = [slice(a, b) for a, b in pairwise(ends)]
        roots = [math.sqrt(part.stop - part.start) for part in parts]
        wanted = [max(1, int(self.size * root / sum(roots) + 1e-9)) for root in roots]
        # More vectors than coordinates there cannot be, and more than samples say nothing.
        return [(part, min(k, part.stop - part.start, self.source.n)) for part, k in zip(parts, wanted, strict=True)]


def random_labels(count: int, classes: int, seed: int = 0) -> Tensor:
    """Fixed labels for public samples: any will do, since it is the directions of gradients that are wanted."""
    generator = torch.Generator("cpu").manual_seed(seed)
    return torch.randint(classes, (count,), generator=generator, device="cpu")


@dataclass(frozen=True)
class Basis:
    """V, block by block: a float64 matrix for each contiguous part of the flat vector; columns are orthonormal or 0."""

    parts: tuple[tuple[slice, Tensor], ...]

    @property
    def size(self) -> int:
        return sum(v.shape[1] for _, v in self.parts)

    def reconstruct(self, embedding: Tensor) -> Tensor:
        """V times a vector of embeddings, as a flat vector."""
        pieces = torch.split(embedding, [v.shape[1] for _, v in self.parts])
        return torch.cat([v @ piece for (_, v), piece in zip(self.parts, pieces, strict=True)])


@torch.no_grad()
def find_basis(layout: Sequence[tuple[slice, int]], chunks: Iterable[Flat], generator: torch.Generator) -> Basis:
    """One power iteration: the columns of G^T (G start), orthonormalised, G the public gradients of a group.

    The sum over public samples is taken chunk by chunk, so that G is never held.

    Args:
        layout: of ``Embedding``.
        chunks: the gradients of the public samples for every parameter, some samples at a time.
        generator: of the Gaussian start. Privacy does not rest on it.
    """
    device = generator.device
    starts = [
        torch.randn(part.stop - part.start, k, generator=generator, device=device, dtype=torch.float64)
        for part, k in layout
    ]
    sums = [torch.zeros_like(start) for start in starts]
    for gradients in chunks:
        for (part, _), start, total in zip(layout, starts, sums, strict=True):
            g = columns(gradients, part)
            total += g.T @ (g @ start)
    starts.clear()
    if not all(bool(torch.isfinite(total).all()) for total in sums):
        raise ModelMixError("the loss or gradient of a public sample is not finite: no step was taken. Lower lr.")
    return Basis(tuple((part, _orthonormal(total)) for (part, _), total in zip(layout, sums, strict=True)))


def _orthonormal(vectors: Tensor) -> Tensor:
    """Orthonormal columns of the same span; zeros for the directions that are rounding and nothing else."""
    vectors = vectors / vectors.abs().max().clamp_min(1e-300)
    quick = _by_cholesky(vectors)
    if quick is not None:
        return quick
    found = torch.linalg.qr(vectors)
    sizes = found.R.diagonal().abs()
    kept: Tensor = found.Q * (sizes > _NOTHING * sizes.max())
    return kept


def _by_cholesky(vectors: Tensor) -> Tensor | None:
    """Orthonormal columns by products of matrices, which accelerators are good at; None if the columns are too alike.

    What the first round leaves of the rounding in a Gram matrix, the second removes (Yamamoto et al. 2015).
    """
    for _ in range(2):
        factor, failed = torch.linalg.cholesky_ex(vectors.T @ vectors)
        sizes = factor.diagonal()
        if bool(failed) or not bool(sizes.min() >= _ALIKE * sizes.max()):
            return None
        vectors = torch.linalg.solve_triangular(factor, vectors.T, upper=False).T
    return vectors


def columns(gradients: Flat, part: slice) -> Tensor:
    """m x coordinates in float64: a contiguous part of every sample's flat gradient, and nothing else of it."""
    first, start = gradients[0][0], 0
    out = torch.empty(first.samples, part.stop - part.start, dtype=torch.float64, device=first.device)
    for g, size in gradients:
        low, high = max(part.start - start, 0), min(part.stop - start, size)
        if low < high:
            at = start + low - part.start
            out[:, at : at + high - low] = g.dense().reshape(g.samples, size)[:, low:high]
        start += size
    return out


@dataclass(frozen=True)
class EmbeddingClip:
    """How one sample's embedding e, residual r and whole contribution V e + r are bounded.

    Args:
        c0: the bound on |e|.
        c1: the bound on |r|.
        p: every coordinate of r is at most c1/sqrt(p) afterwards; 1 is no truncation.
        c: the bound on |V e + r|, of which every coordinate is at most c/sqrt(p); infinite where no account counts on
            it.
    """

    c0: float
    c1: float
    p: int = 1
    c: float = math.inf

    def __post_init__(self) -> None:
        for c in (self.c0, self.c1):
            Clip(c, self.p)  # refuses what cannot be measured

    @classmethod
    def of(cls, mechanism: EmbeddingMechanism, c1: float) -> EmbeddingClip:
        """The clip that a mechanism's proof asks for."""
        whole_bound = c1 * mechanism.whole_bound if mechanism.mixed else math.inf
        return cls(c1 * mechanism.clip_ratio, c1, mechanism.p, whole_bound)

    @torch.no_grad()
    def sum(self, gradients: Flat, basis: Basis, weights: Tensor) -> tuple[Tensor, ClippedSum]:
        """The sum of clipped embeddings, and that of clipped residuals with what clipping met there.

        In two passes over the groups, each of which holds the coordinates of one: lengths, then sums. Where V e + r
        sticks out for some sample, there is a third, which sums what is shrunk. Whatever is summed is measured in the
        same pass: if it exceeded a bound, the sum is not a number, and no step takes it.

        Args:
            gradients: row i belongs to sample i.
            weights: m numbers, 1 for a sample that was drawn and 0 for padding.
        """
        drawn = weights.to(basis.parts[0][1].device) > 0
        found, squares = [], torch.zeros_like(drawn, dtype=torch.float64)
        for part, v in basis.parts:
            g = columns(gradients, part)
            found.append(g @ v)
            squares += (g - found[-1] @ v.T).square_().sum(1)  # as in _piece, to the last bit
        lengths, norms = torch.cat(found, 1).square().sum(1).sqrt(), squares.sqrt()
        # A gradient that is not finite is no gradient: it adds nothing, and the caller is told.
        fine = torch.isfinite(lengths) & torch.isfinite(norms)
        rows = (fine & drawn)[:, None]
        shorter, smaller = (
            _scale(c, torch.where(fine, size, 1.0))[:, None] for c, size in ((self.c0, lengths), (self.c1, norms))
        )
        embeddings = [torch.where(rows, e, 0.0) for e in found]

        def summed(shrink: Tensor | None) -> _Summed:
            pieces = (
                self._piece(columns(gradients, part), e, v, rows, shorter, smaller)
                for (part, v), e in zip(basis.parts, embeddings, strict=True)
            )
            return _Summed.of(pieces, shrink, whole=self.c < math.inf)

        shrink = torch.ones_like(norms)
        out = summed(None)
        fits = self._fits(out.whole, self.c)
        if not bool(fits.all()):
            power, top = out.whole
            smaller_still = _scale(self.c, power.sqrt()).minimum(_scale(self.c / math.sqrt(self.p), top))
            shrink = torch.where(fits, shrink, smaller_still)
            out = summed(shrink[:, None])
        released = torch.cat(embeddings, 1) * shorter * shrink[:, None]
        ok = (released.square().sum(1).sqrt() <= self.c0 * (1 - MARGIN / 2)).all()
        ok = ok & self._fits(out.residual, self.c1).all() & self._fits(out.whole, self.c).all()
        total = torch.where(ok, out.total, torch.nan)
        return released.sum(0), ClippedSum(total, torch.where(fine, norms, torch.nan), out.cuts, drawn)

    def _fits(self, sizes: tuple[Tensor, Tensor], c: float) -> Tensor:
        """Which rows have norms below c, with half the margin left, and coordinates below c/sqrt(p)."""
        power, top = sizes
        return (power.sqrt() <= c * (1 - MARGIN / 2)) & (top <= c / math.sqrt(self.p))

    def _piece(
        self, g: Tensor, e: Tensor, v: Tensor, rows: Tensor, shorter: Tensor, smaller: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Of one group: V times the clipped embedding, the clipped and truncated residual, and coordinates cut."""
        image = e @ v.T
        r = torch.where(rows, g - image, 0.0).mul_(smaller)
        cut = torch.zeros_like(rows[:, 0], dtype=torch.int64)
        if self.p > 1:
            bound = self.c1 / math.sqrt(self.p) * (1 - MARGIN)
            cut = (r.abs() > bound).sum(1)
            r.clamp_(-bound, bound)
        return image.mul_(shorter), r, cut


@dataclass(frozen=True)
class _Summed:
    """The sum of residuals, coordinates cut of each, and (sum of squares, largest coordinate) of r and of V e + r."""

    total: Tensor
    cuts: Tensor
    residual: tuple[Tensor, Tensor]
    whole: tuple[Tensor, Tensor]

    @classmethod
    def of(cls, pieces: Iterable[tuple[Tensor, Tensor, Tensor]], shrink: Tensor | None, whole: bool) -> _Summed:
        """From V e, r and coordinates cut, group by group, each scaled by ``shrink`` if there is one."""
        totals, cuts, residuals, wholes = [], [], [], []
        for image, r, cut in pieces:
            if shrink is not None:
                image.mul_(shrink)
                r.mul_(shrink)
            totals.append(r.sum(0))
            cuts.append(cut)
            residuals.append(_size(r))
            wholes.append(_size(image.add_(r)) if whole else (torch.zeros_like(r[:, 0]),) * 2)
        return cls(torch.cat(totals), torch.stack(cuts).sum(0), _together(residuals), _together(wholes))


def _scale(bound: float, sizes: Tensor) -> Tensor:
    """What brings sizes down to the bound less the margin."""
    return (bound * (1 - MARGIN) / sizes.clamp_min(1e-300)).clamp_max(1.0)


def _size(rows: Tensor) -> tuple[Tensor, Tensor]:
    """The sum of squares and the largest coordinate of every row."""
    return rows.square().sum(1), torch.linalg.vector_norm(rows, ord=math.inf, dim=1)


def _together(sizes: Sequence[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """Those of rows of which each group has a part."""
    powers, tops = zip(*sizes, strict=True)
    return torch.stack(powers).sum(0), torch.stack(tops).amax(0)

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
    found = torch.linalg.qr(vectors / vectors.abs().max().clamp_min(1e-300))
    sizes = found.R.diagonal().abs()
    kept: Tensor = found.Q * (sizes > _NOTHING * sizes.max())
    return kept


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

        In three passes over the groups, each of which holds the coordinates of one: lengths; how far V e + r sticks
        out; sums. The last measures again what it sums: if that exceeded a bound, the sum is not a number, and no step
        takes it.

        Args:
            gradients: row i belongs to sample i.
            weights: m numbers, 1 for a sample that was drawn and 0 for padding.
        """
        drawn = weights.to(basis.parts[0][1].device) > 0
        found, squares = [], torch.zeros_like(drawn, dtype=torch.float64)
        for part, v in basis.parts:
            g = columns(gradients, part)
            found.append(g @ v)
            squares += (g - found[-1] @ v.T).square_().sum(1)
        lengths, norms = torch.cat(found, 1).square().sum(1).sqrt(), squares.sqrt()
        # A gradient that is not finite is no gradient: it adds nothing, and the caller is told.
        fine = torch.isfinite(lengths) & torch.isfinite(norms)
        rows = (fine & drawn)[:, None]
        shorter, smaller = (
            _scale(c, torch.where(fine, size, 1.0))[:, None] for c, size in ((self.c0, lengths), (self.c1, norms))
        )
        embeddings = [torch.where(rows, e, 0.0) for e in found]
        clipped = (rows, shorter, smaller)

        shrink = torch.ones_like(norms)
        if self.c < math.inf:
            power, top = torch.zeros_like(norms), torch.zeros_like(norms)
            for (part, v), e in zip(basis.parts, embeddings, strict=True):
                image, r, _ = self._piece(columns(gradients, part), e, v, *clipped)
                _add_size(image.add_(r), power, top)
            shrink = _scale(self.c, power.sqrt()).minimum(_scale(self.c / math.sqrt(self.p), top))

        sums, cuts = [], torch.zeros_like(norms, dtype=torch.int64)
        sizes = {name: (torch.zeros_like(norms), torch.zeros_like(norms)) for name in ("residual", "whole")}
        for (part, v), e in zip(basis.parts, embeddings, strict=True):
            image, r, cut = self._piece(columns(gradients, part), e, v, *clipped)
            r.mul_(shrink[:, None])
            sums.append(r.sum(0))
            cuts += cut
            _add_size(r, *sizes["residual"])
            if self.c < math.inf:
                _add_size(image.mul_(shrink[:, None]).add_(r), *sizes["whole"])
        released = torch.cat(embeddings, 1) * shorter * shrink[:, None]
        ok = (released.square().sum(1).sqrt() <= self.c0 * (1 - MARGIN / 2)).all()
        for name, c in (("residual", self.c1), ("whole", self.c)):
            power, top = sizes[name]
            ok = ok & (power.sqrt() <= c * (1 - MARGIN / 2)).all() & (top <= c / math.sqrt(self.p)).all()
        total = torch.where(ok, torch.cat(sums), torch.nan)
        return released.sum(0), ClippedSum(total, torch.where(fine, norms, torch.nan), cuts, drawn)

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


def _scale(bound: float, sizes: Tensor) -> Tensor:
    """What brings sizes down to the bound less the margin."""
    return (bound * (1 - MARGIN) / sizes.clamp_min(1e-300)).clamp_max(1.0)


def _add_size(rows: Tensor, power: Tensor, top: Tensor) -> None:
    """Adds the squares of a group's coordinates to ``power`` and looks for a larger one than ``top``."""
    power += rows.square().sum(1)
    torch.maximum(top, torch.linalg.vector_norm(rows, ord=math.inf, dim=1), out=top)

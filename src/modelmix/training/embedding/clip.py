"""How one sample's embedding, residual and whole contribution are bounded and summed."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from modelmix.accounting.embedding import EmbeddingMechanism
from modelmix.errors import ModelMixError
from modelmix.gradients import forms, kernels
from modelmix.gradients.clip import MARGIN, Clip, ClippedSum, flush_tiny_scales
from modelmix.gradients.device import allow_tf32
from modelmix.gradients.forms import DenseGradients
from modelmix.gradients.lazy import LazyGradients
from modelmix.training.embedding.basis import Basis, columns

# Of a gradient: less of it than this may be what products of matrices round away.
_ROUNDING = {torch.float64: 2.0**-10, torch.float32: 2.0**-5}
_ROOM = 2.0**-8  # left below a bound where sizes are foreseen from products of factors of 11 bits


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
    def sum(self, gradients: LazyGradients, basis: Basis, weights: Tensor) -> tuple[Tensor, ClippedSum]:
        """The sum of clipped embeddings, and that of clipped residuals with what clipping met there.

        In passes over the groups, of which one is held at a time: lengths; where V e + r is bounded, how far it would
        stick out; then sums. Where it does stick out for some sample, there is another, which sums what is shrunk
        more. What is summed is what was measured: if it exceeded a bound, the sum is not a number, and no step takes
        it.

        Args:
            gradients: row i belongs to sample i.
            weights: m numbers, 1 for a sample that was drawn and 0 for padding.
        """
        m = weights.shape[0]
        if gradients.samples != m:  # one weight for several would let a sample add several times
            raise ModelMixError(f"gradients of {gradients.samples} samples cannot be summed with {m} weights.")
        drawn = weights.to(basis.device) > 0
        apart = _Apart(gradients, basis)
        found, squares = [], torch.zeros_like(drawn, dtype=torch.float64)
        for group in range(len(basis.parts)):
            e, more = apart.first(group)
            found.append(e.double())
            squares += more
        embeddings = torch.cat(found, 1)
        lengths, norms = torch.linalg.vector_norm(embeddings, dim=1), squares.sqrt()
        # A gradient that is not finite is no gradient: it adds nothing, and the caller is told.
        fine = torch.isfinite(lengths) & torch.isfinite(norms)
        rows = fine & drawn
        embeddings = torch.where(rows[:, None], embeddings, 0.0)
        # Rounding hangs on where in a batch a row stands, so on other samples. Of a long gradient that the basis holds
        # nothing but rounding is left over: kept up to the bound, as much would change with one sample more or less.
        least = _ROUNDING[basis.factors[0].dtype] * torch.hypot(lengths, norms)
        shorter, smaller = (
            torch.where(rows, flush_tiny_scales(_scale(c, torch.where(fine, size.maximum(least), 1.0))), 0.0)
            for c, size in ((self.c0, lengths), (self.c1, norms))
        )
        if self.c < math.inf:
            shrink = self._foreseen(apart, embeddings, shorter, smaller)
            shorter, smaller = flush_tiny_scales(shorter * shrink), flush_tiny_scales(smaller * shrink)
        out = self._summed(apart, embeddings, shorter, smaller)
        if self.c < math.inf:
            # As much as it sticks out; where truncation did not shrink along, as much as is enough for certain.
            for enough in (self._in_proportion, self._for_certain):
                fits = self._fits(out, 3 * MARGIN / 4)
                if bool(fits.all()):
                    break
                shrink = torch.where(fits, 1.0, enough(out, smaller * torch.where(fine, norms, 0.0)))
                shorter, smaller = flush_tiny_scales(shorter * shrink), flush_tiny_scales(smaller * shrink)
                out = self._summed(apart, embeddings, shorter, smaller)
        released = embeddings * shorter[:, None]
        ok = (torch.linalg.vector_norm(released, dim=1) <= self.c0 * (1 - MARGIN / 2)).all()
        residuals = torch.where(rows, out.squares.sqrt() * smaller, 0.0)
        ok = ok & (residuals <= self.c1 * (1 - MARGIN / 2)).all() & self._fits(out, MARGIN / 2).all()
        total = torch.where(ok, out.total, torch.nan)
        return _without_padding(released.sum(0), basis), ClippedSum(
            total, torch.where(fine, norms, torch.nan), out.cuts, drawn
        )

    def _foreseen(self, apart: _Apart, embeddings: Tensor, shorter: Tensor, smaller: Tensor) -> Tensor:
        """What brings V e + r below its bounds, as far as allow_tf32 products show: V e is g - r."""
        basis = apart.basis
        limit = self.c1 / math.sqrt(self.p)
        c = self.c * (1 - (MARGIN if basis.factors[0].dtype == torch.float64 else _ROOM))
        bound = c / math.sqrt(self.p)
        most, squares, pieces = torch.zeros_like(smaller), torch.zeros_like(smaller), _split(embeddings, basis)
        for group in apart.groups():
            excess, more = _excess(*apart.both(group, pieces[group]), shorter, smaller, limit, bound)
            most, squares = most.maximum(excess), squares + more
        return 1 / most.maximum(squares.sqrt() / c).clamp_min(1.0)

    def _summed(self, apart: _Apart, embeddings: Tensor, shorter: Tensor, smaller: Tensor) -> _Summed:
        """The sum of residuals, scaled by ``smaller`` and truncated, and the sizes of all there is a bound on."""
        basis = apart.basis
        _, bound = Clip(self.c1, self.p).limits_on(basis.device)
        total = torch.zeros(basis.parts[-1][0].stop, dtype=torch.float64, device=basis.device)
        cuts, squares, images, wholes, pieces = [], [], [], [], _split(embeddings, basis)
        for group in apart.groups():
            e, (part, v) = pieces[group], basis.parts[group]
            r = apart.residual(group, e)
            summed, cut = r.clipped_sum(smaller, None if self.p == 1 else bound)
            total[part] = summed[: v.shape[0]]
            cuts.append(torch.zeros_like(smaller, dtype=torch.int64) if cut is None else cut)
            squares.append(r.powers(2))
            if self.c < math.inf:
                own, whole = _sizes(e.double() @ basis.padded[group].T, r.values, shorter, smaller, bound)
                images.append(own)
                wholes.append(whole)
            del r  # before those of the next group
        nothing = [(torch.zeros_like(smaller), torch.zeros_like(smaller))]
        return _Summed(
            total,
            torch.stack(cuts).sum(0),
            torch.stack(squares).sum(0),
            _together(images or nothing),
            _together(wholes or nothing),
        )

    def _fits(self, out: _Summed, margin: float) -> Tensor:
        """Which V e + r have norms below c and coordinates below c/sqrt(p), with a margin."""
        (length, top), c = out.whole, self.c * (1 - margin)
        return (length <= c) & (top <= c / math.sqrt(self.p))

    def _in_proportion(self, out: _Summed, norms: Tensor) -> Tensor:
        """Enough for V e + r if all of it shrinks alike."""
        length, top = out.whole
        return _scale(self.c, length).minimum(_scale(self.c / math.sqrt(self.p), top))

    def _for_certain(self, out: _Summed, norms: Tensor) -> Tensor:
        """Enough for V e + r because it is for the sum of their sizes; coordinates of r are below c1/sqrt(p) anyway."""
        length, top = out.image
        left = max(0.0, self.c - self.c1) / math.sqrt(self.p)
        return _scale(self.c, length + norms).minimum(_scale(left, top))


class _Apart:
    """The gradients of a chunk, taken apart group by group: g, and r = g - V e.

    Every pass has those of one group at a time written down anew, from the same numbers in the same way. The residuals
    of the last group stay, and the next pass begins with them.
    """

    def __init__(self, gradients: LazyGradients, basis: Basis) -> None:
        self.basis = basis
        self._gradients = gradients
        self._last: tuple[int, DenseGradients] | None = None

    def groups(self) -> list[int]:
        """In the order of a pass that follows another."""
        ahead = list(range(len(self.basis.parts)))
        return ahead[::-1] if self._last is not None and self._last[0] == ahead[-1] else ahead

    def first(self, group: int) -> tuple[Tensor, Tensor]:
        """The embeddings of a group, and the squares of its residuals."""
        g = self._columns(group)
        with allow_tf32(self.basis.device):
            e = g @ self.basis.factors[group]
        r = self._keep(group, self._in_place(group, g, e))
        return e, r.powers(2)

    def both(self, group: int, e: Tensor) -> tuple[Tensor, Tensor]:
        """g and r."""
        g = self._columns(group)
        with allow_tf32(g.device):
            r = torch.addmm(g, e, self.basis.factors[group].T, alpha=-1)
        return g, self._keep(group, r).values

    def residual(self, group: int, e: Tensor) -> DenseGradients:
        if self._last is not None and self._last[0] == group:
            return self._last[1]
        return self._keep(group, self._in_place(group, self._columns(group), e))

    def _columns(self, group: int) -> Tensor:
        self._last = None
        return columns(self._gradients, self.basis.parts[group][0])

    def _in_place(self, group: int, g: Tensor, e: Tensor) -> Tensor:
        with allow_tf32(g.device):
            return g.addmm_(e, self.basis.factors[group].T, alpha=-1)

    def _keep(self, group: int, r: Tensor) -> DenseGradients:
        self._last = group, DenseGradients(r)
        return self._last[1]


@dataclass(frozen=True)
class _Summed:
    """The sum of residuals; of each sample coordinates cut, |r|^2 unscaled, (norm, top coordinate) of V e, V e + r."""

    total: Tensor
    cuts: Tensor
    squares: Tensor
    image: tuple[Tensor, Tensor]
    whole: tuple[Tensor, Tensor]


def _scale(bound: float, sizes: Tensor) -> Tensor:
    """What brings sizes down to the bound less the margin."""
    return (bound * (1 - MARGIN) / sizes.clamp_min(1e-300)).clamp_max(1.0)


def _split(embeddings: Tensor, basis: Basis) -> list[Tensor]:
    """Those of every group, as ``Basis.factors`` gave them."""
    parts = torch.split(embeddings, [v.shape[1] for v in basis.factors], 1)
    return [e.to(v.dtype) for e, v in zip(parts, basis.factors, strict=True)]


def _without_padding(embedding: Tensor, basis: Basis) -> Tensor:
    """The vector that ``Basis.reconstruct`` takes."""
    parts = torch.split(embedding, [v.shape[1] for v in basis.factors])
    return torch.cat([e[: v.shape[1]] for e, (_, v) in zip(parts, basis.parts, strict=True)])


def _sizes(
    image: Tensor, r: Tensor, shorter: Tensor, smaller: Tensor, bound: Tensor
) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """The ``_size`` of shorter * V e, and of that plus smaller * r, truncated."""
    if forms.has_kernels(r):
        return kernels.sizes(image, r, shorter, smaller, bound)
    image = torch.where(shorter[:, None] > 0, image * shorter[:, None], 0.0)
    own = _size(image)
    scaled = torch.where(smaller[:, None] > 0, r * smaller[:, None], 0.0)
    return own, _size(image.add_(scaled.clamp_(-bound, bound)))


def _excess(
    g: Tensor, r: Tensor, shorter: Tensor, smaller: Tensor, limit: float, bound: float
) -> tuple[Tensor, Tensor]:
    """Of a v + s r with v = g - r, s r cut to +-limit: how many times the bound is the largest coordinate, and |.|^2.

    With both shrunk alike it is enough that |a v| + |s r| is below the bound, or |a v| below what truncation leaves of
    it; where they have different signs, that |a v| - |s r| is below the bound, and |a v| below that and the limit.
    """
    if forms.has_kernels(r):
        return kernels.excess(g, r, shorter, smaller, limit, bound)
    live = ((shorter > 0) & (smaller > 0))[:, None]
    v, r = (torch.where(live, t * scale[:, None], 0.0) for t, scale in ((g - r, shorter), (r, smaller)))
    alike = ((v.abs() + r.abs()) / bound).minimum(v.abs() / max(bound - limit, 1e-30))
    against = ((v.abs() - r.abs()) / bound).maximum(v.abs() / (bound + limit))
    most = torch.where(v * r > 0, alike, against).amax(1)
    return most, (v + r.clamp(-limit, limit)).square().sum(1)


def _size(rows: Tensor) -> tuple[Tensor, Tensor]:
    """The norm and the largest coordinate of every row."""
    return torch.linalg.vector_norm(rows, dim=1), torch.linalg.vector_norm(rows, ord=math.inf, dim=1)


def _together(sizes: Sequence[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """Those of rows of which each group has a part."""
    norms, tops = (torch.stack(parts) for parts in zip(*sizes, strict=True))
    return torch.linalg.vector_norm(norms, dim=0), tops.amax(0)

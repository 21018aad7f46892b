"""Gradient embedding (Yu et al. 2021): a few directions that public samples suggest, and what they leave over.

Every step has a basis V of its own, computed from public samples at the released state. So V is public: given what was
released before, it is a constant, and the two sums of a step are bounded sums like any other. Embeddings V^T g get
noise in proportion to their number of coordinates, residuals g - V V^T g have a smaller clip.

What is summed obeys the bounds that ``EmbeddingMechanism`` counts on, whatever V is and however roughly e and r were
computed: nothing here rests on orthonormal columns or on V e + r being g to the last bit, only utility does. So on an
accelerator e and r are products of factors rounded to 11 bits, and what is measured is measured in float64 on the
numbers that are summed, with V e in float64 where a bound is on it. The margin is that of ``clipping``.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from modelmix._checks import whole
from modelmix.accounting.embedding import EmbeddingMechanism
from modelmix.errors import ModelMixError
from modelmix.gradients import forms, kernels
from modelmix.gradients.clip import MARGIN, Clip, ClippedSum, flush_tiny_scales
from modelmix.gradients.device import allow_tf32
from modelmix.gradients.forms import DenseGradients
from modelmix.gradients.lazy import LazyGradients
from modelmix.training.sampling import TensorSource

# What gradients in float32 say about directions they do not have: squared in exact products, else lost in rounding.
_NOTHING = {torch.float64: 1e-12, torch.float32: 1e-6}
_ALIKE = 1e-6  # below this, squares of lengths no longer tell directions apart in float64
# Of a gradient: less of it than this may be what products of matrices round away.
_ROUNDING = {torch.float64: 2.0**-10, torch.float32: 2.0**-5}
# How far from orthonormal columns may be, by the precision that they come in; 0 asks for all that float64 can do.
_ENOUGH = {torch.float64: 0.0, torch.float32: 2.0**-14}
_TILE = 8  # matrices whose sizes are multiples of it are multiplied several times faster on accelerators
_ROOM = 2.0**-8  # left below a bound where sizes are foreseen from products of factors of 11 bits


class Embedding:
    """Public samples and the size of the basis that they give.

    Guarantee: none is needed. The samples must be public: epsilon says nothing about them.

    Args:
        public: (inputs, targets) of samples as the model takes them. Targets need not mean anything: see
            ``random_labels``.
        size: basis vectors in all.
        groups: contiguous parts of the flat parameter vector, of equal sizes, each with a basis of its own. The
            numbers of basis vectors are in proportion to the square roots of their sizes.
    """

    def __init__(self, public: tuple[Any, Any], size: int = 1000, groups: int = 3) -> None:
        self.source = TensorSource(*public)
        self.size = whole("size", size, "the number of basis vectors", least=1)
        self.groups = whole("groups", groups, "the number of groups", least=1)
        self._here: tuple[Any, Any] | None = None
        if self.source.n == 0:
            raise ModelMixError("there is no public sample: gradient embedding needs some.")

    def as_dict(self) -> dict[str, Any]:
        """What a resumed run must have again."""
        digest = hashlib.sha256()
        for leaf in tree_leaves((self.source.inputs, self.source.targets)):
            digest.update(f"{leaf.dtype}{tuple(leaf.shape)}".encode())
            digest.update(leaf.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
        return {"size": self.size, "groups": self.groups, "samples": self.source.n, "public": digest.hexdigest()}

    def chunks(self, size: int, device: torch.device, padded: bool = False) -> Iterator[tuple[Any, Any, int]]:
        """All public samples, at most ``size`` at a time and equally many, as far as that goes; padding makes it so.

        Each time with their number, padding not counted.
        """
        size, here = -(-self.source.n // -(-self.source.n // size)), self._on(device)
        for start in range(0, self.source.n, size):
            count = min(size, self.source.n - start)
            taken = torch.arange(start, start + (size if padded else count), device=device) % self.source.n
            inputs, targets = tree_map(lambda t, at=taken: t[at], here)
            yield inputs, targets, count

    def _on(self, device: torch.device) -> Any:
        """The samples on a device, sent there once for all steps unless someone writes to them."""
        own = self.source.inputs, self.source.targets
        stamp = device, [t._version for t in tree_leaves(own)]
        if self._here is None or self._here[0] != stamp:
            self._here = stamp, tree_map(lambda t: t.to(device), own)
        return self._here[1]

    def layout(self, coordinates: int) -> list[tuple[slice, int]]:
        """(part of the flat vector, basis vectors) of every group."""
        if self.groups > coordinates:
            raise ModelMixError(f"groups = {self.groups} is too many for {coordinates} coordinates.")
        parts = [slice(a, b) for a, b in pairwise(coordinates * i // self.groups for i in range(self.groups + 1))]
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

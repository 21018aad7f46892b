"""Algorithm 2 on every sample's gradient: the norm to c, then every coordinate to c/sqrt(p).

What is summed obeys the bounds, not only what was meant. Gradients are widened to float64 first, whatever the model's
precision, and scale and truncation stay ``MARGIN`` below the bounds. With u = 2^-53 that pays for two roundings: the
norm of d coordinates is off by at most d*u of itself, and one sample more or less in a sum of m, made of chunks of k,
moves it by that sample's clipped gradient and at most 2*m*(k + m/k)*u*c of rounding, in whichever order a chunk is
summed. Together they are below half the margin for d = 2^30 coordinates and batches of m = 2^15 in one chunk, or of
2^18 in chunks of 2^11; the other half pays for an accelerator that scales in float32 (3 * 2^-24) and for gradients that
are computed twice (2^-22).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from modelmix._checks import positive, whole
from modelmix.accounting.mechanism import Mechanism
from modelmix.errors import ModelMixError
from modelmix.gradients.forms import DenseGradients, Gradients

MARGIN = 2.0**-20

_SMALLEST = 1e-100  # a gradient that would have to be clipped to less can have squares that are no longer numbers
_SMALLEST_FLOAT = 1e-30  # the same where gradients are scaled in float32
_FINEST = 2.0**-100  # of what float32 can scale by with full precision, with room for the products
_CACHE = 4 * 2**20  # bytes of float64 that a CPU core works on at once
_FEW = 4  # samples at a time, below which a block is not worth its overhead
_NARROW = 4096  # coordinates below which a parameter is not worth a pass of its own


@dataclass(frozen=True)
class Clip:
    """Bound one sample's gradient: its norm by c, then every coordinate by c/sqrt(p).

    Args:
        c: the bound on its norm.
        p: every coordinate is at most c/sqrt(p) afterwards; 1 is no truncation.
        norm: 2 for Gaussian noise, 1 for Laplace noise.

    Raises:
        ModelMixError: if c is not positive and finite, p no whole number from 1 on, or norm another one.

    >>> import torch
    >>> gradients = [torch.tensor([[3.0, 4.0], [0.3, 0.4]])]  # two samples of one parameter
    >>> Clip(1.0).sum(gradients, torch.ones(2)).total.round(decimals=4)
    tensor([0.9000, 1.2000], dtype=torch.float64)
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
        """Return the clip that a mechanism's proof asks for."""
        return cls(c, mechanism.p, mechanism.coordinate_law.norm)

    @property
    def coordinate_bound(self) -> float:
        return self.c / math.sqrt(self.p)

    @torch.no_grad()
    def sum(self, gradients: Sequence[Tensor | Gradients], weights: Tensor) -> ClippedSum:
        """Sum clipped gradients.

        Args:
            gradients: for every parameter m x (shape), or another form of ``Gradients``; row i belongs to sample i.
            weights: m numbers, 1 for a sample that was drawn and 0 for padding.
        """
        m = weights.shape[0]
        forms = [g if isinstance(g, Gradients) else DenseGradients(g) for g in gradients]
        counts = {g.samples for g in forms}
        if counts != {m}:
            raise ModelMixError(f"gradients of {sorted(counts)} samples cannot be summed with {m} weights.")
        weights = weights.to(forms[0].device)
        how = self._in_blocks if weights.device.type == "cpu" else self.sum_traceable
        total, norms, truncated = how(forms, weights, *self.limits_on(weights.device))
        return ClippedSum(total, norms, truncated, weights > 0)

    def sum_traceable(
        self, gradients: Sequence[Gradients], weights: Tensor, c: Tensor, bound: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Sum by one straight line of operations; nothing here looks at a value, so a compiler can follow.

        Args:
            c, bound: see ``limits_on``.

        Returns:
            The total, and for all m samples the norm and the number of coordinates cut.
        """
        gradients, order = _side_by_side(gradients)
        gradients = [g.materialize() for g in gradients]
        powers = torch.stack([g.powers(self.norm) for g in gradients]).sum(0)
        scale = self._scale(powers, weights > 0, c)
        truncated = torch.zeros_like(powers, dtype=torch.int64)
        found: list[Tensor] = []
        for g in gradients:
            value, cut = g.clipped_sum(scale, None if self.p == 1 else bound)
            found.append(value.flatten())
            truncated = truncated if cut is None else truncated + cut
        return order(found), self._norms(powers), truncated

    def _in_blocks(
        self, gradients: Sequence[Gradients], weights: Tensor, c: Tensor, bound: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Sum on a CPU, through one small buffer: widening costs little while it stays in the cache."""
        m, drawn = weights.shape[0], weights > 0
        limit = math.inf if self.p == 1 else float(bound)
        powers = torch.zeros_like(weights, dtype=torch.float64)
        truncated = torch.zeros_like(weights, dtype=torch.int64)
        for g in gradients:
            if not isinstance(g, DenseGradients):
                powers += g.powers(self.norm)
        rows = [g.rows() for g in gradients if isinstance(g, DenseGradients)]
        blocks = _by_samples if m * sum(r.shape[1] for r in rows) and _fits(rows) else _by_coordinates
        for part, wide in blocks(rows):
            powers[part[0]] += torch.linalg.vector_norm(wide, ord=self.norm, dim=1) ** self.norm
        scale = self._scale(powers, drawn, c)
        # A gradient that is not finite is no gradient: it adds nothing, and the caller is told.
        odd = not bool(torch.isfinite(powers).all())
        total = powers.new_zeros(sum(r.shape[1] for r in rows))
        for (some, where), wide in blocks(rows):
            if odd:
                wide[~torch.isfinite(powers[some])] = 0.0
            if limit < math.inf:
                sample, place, value = _take_out_above(wide, scale[some], limit)
                total[where].index_add_(0, place, value.clamp(-limit, limit))
                truncated[some] += torch.bincount(sample, minlength=len(wide))
            total[where] += scale[some] @ wide
        sums = iter(torch.split(total, [r.shape[1] for r in rows]))
        found: list[Tensor] = []
        for g in gradients:
            if isinstance(g, DenseGradients):
                found.append(g.shaped(next(sums)).flatten())
            else:
                value, cut = g.clipped_sum(scale, limit)
                found.append(value.flatten())
                truncated += 0 if cut is None else cut
        return torch.cat(found), self._norms(powers), truncated

    def limits_on(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """Return what norms and coordinates are cut to: the bounds less the margin, as float64 numbers on a device."""
        if scales_in_float32(device) and self.coordinate_bound < _SMALLEST_FLOAT:
            raise ModelMixError(
                f"c = {self.c:g} with p = {self.p} is not allowed on {device.type}: c/sqrt(p) must be at least "
                f"{_SMALLEST_FLOAT:g}."
            )
        c, bound = self.c * (1 - MARGIN), self.coordinate_bound * (1 - MARGIN)
        wide = {"dtype": torch.float64, "device": device}
        return torch.full((), c, **wide), torch.full((), bound, **wide)  # type: ignore[call-overload]

    def _norms(self, powers: Tensor) -> Tensor:
        return powers.sqrt() if self.norm == 2 else powers

    def _scale(self, powers: Tensor, drawn: Tensor, c: Tensor) -> Tensor:
        scale = (c / self._norms(powers).clamp_min(1e-300)).clamp_max(1.0)
        return torch.where(torch.isfinite(powers) & drawn, flush_tiny_scales(scale), 0.0)


def scales_in_float32(device: torch.device) -> bool:
    return device.type != "cpu"


def flush_tiny_scales(scale: Tensor) -> Tensor:
    """Set a scale below 2^-100 to 0 where float32 scales: a gradient that much too long adds nothing.

    Below 2^-126 a float32 has less than its 24 bits, and what is summed would no longer be what was measured.
    """
    return torch.where(scale < _FINEST, 0.0, scale) if scales_in_float32(scale.device) else scale


Part = tuple[slice, slice]
"""Some samples, and some of the coordinates that all dense gradients have together."""


def _room() -> int:
    """Return how many float64 numbers stay in the caches of the cores at work."""
    return _CACHE * min(4, torch.get_num_threads()) // 8


def _fits(rows: list[Tensor]) -> bool:
    """Whether several whole samples have room."""
    return _room() >= _FEW * sum(r.shape[1] for r in rows)


def _by_samples(rows: list[Tensor]) -> Iterator[tuple[Part, Tensor]]:
    """Yield all coordinates of a few samples at a time."""
    m, sizes = rows[0].shape[0], [r.shape[1] for r in rows]
    block = min(m, _room() // sum(sizes))
    buffer = torch.empty(block, sum(sizes), dtype=torch.float64, device="cpu")
    for start in range(0, m, block):
        some = slice(start, min(start + block, m))
        wide = buffer[: some.stop - start]
        for r, piece in zip(rows, torch.split(wide, sizes, 1), strict=True):
            piece.copy_(r[some])
        yield (some, slice(None)), wide


def _by_coordinates(rows: list[Tensor]) -> Iterator[tuple[Part, Tensor]]:
    """Yield some coordinates of all samples at a time."""
    first = 0
    for r in rows:
        width = max(1, min(r.shape[1], _room() // max(1, r.shape[0])))
        buffer = torch.empty(r.shape[0], width, dtype=torch.float64, device="cpu")
        for start in range(0, r.shape[1], width):
            stop = min(start + width, r.shape[1])
            wide = buffer[:, : stop - start].copy_(r[:, start:stop])
            yield (slice(None), slice(first + start, first + stop)), wide
        first += r.shape[1]


def _take_out_above(wide: Tensor, scale: Tensor, limit: float) -> tuple[Tensor, Tensor, Tensor]:
    """Take out the few values that scaling leaves above the limit, as (row, column, scaled value); zeros stay behind.

    Nothing larger than the limit may enter a sum, not even to be taken off again: rounding would remember its size.
    """
    near = torch.nonzero(torch.linalg.vector_norm(wide, ord=math.inf, dim=1) * scale > limit).flatten()
    here = wide if near.numel() == wide.shape[0] else wide[near]
    found = torch.nonzero(here.abs() * scale[near, None] > limit)
    row, column = near[found[:, 0]], found[:, 1]
    value = wide[row, column] * scale[row]
    wide[row, column] = 0.0
    return row, column, value


def _side_by_side(gradients: Sequence[Gradients]) -> tuple[list[Gradients], Callable[[list[Tensor]], Tensor]]:
    """Put narrow gradients side by side in one matrix, and say how their flat sums come back in order: fewer passes."""
    narrow = {i: g for i, g in enumerate(gradients) if isinstance(g, DenseGradients) and g.values[0].numel() <= _NARROW}
    if len(narrow) < 2:
        return list(gradients), torch.cat
    wide = [i for i in range(len(gradients)) if i not in narrow]
    side_by_side = [g.rows() for g in narrow.values()]
    sizes = [r.shape[1] for r in side_by_side]

    def order(sums: list[Tensor]) -> Tensor:
        parts = dict(zip(wide, sums, strict=False))
        for (i, g), part in zip(narrow.items(), torch.split(sums[-1], sizes), strict=True):
            parts[i] = g.shaped(part).flatten()
        return torch.cat([parts[i] for i in range(len(gradients))])

    return [*(gradients[i] for i in wide), DenseGradients(torch.cat(side_by_side, 1))], order


@dataclass(frozen=True)
class ClippedSum:
    """Hold a sum of clipped gradients, in float64, and what clipping met on the way.

    ``norms`` (before clipping) and ``truncated`` (coordinates cut, for every sample) are computed from private data
    without noise: they serve the data holder's diagnostics and nothing else. They are picked out when asked for: on a
    GPU that waits for the sum, and whoever has more work to hand over should do that first.

    Args:
        total: the sum.
        every_norm, every_cut: of all m samples, padding included.
        drawn: which of them are not padding.
    """

    total: Tensor
    every_norm: Tensor
    every_cut: Tensor
    drawn: Tensor

    @classmethod
    def concatenate(cls, total: Tensor, parts: Sequence[ClippedSum]) -> ClippedSum:
        """Put together what clipping met in several parts of one sum."""

        def together(tensors: list[Tensor], dtype: torch.dtype) -> Tensor:
            return torch.cat(tensors) if tensors else torch.zeros(0, dtype=dtype, device=total.device)

        return cls(
            total,
            together([part.every_norm for part in parts], torch.float64),
            together([part.every_cut for part in parts], torch.int64),
            together([part.drawn for part in parts], torch.bool),
        )

    def to_cpu(self) -> ClippedSum:
        """Copy what clipping met to the CPU, in one transfer; the sum stays where it is."""
        if self.total.device.type == "cpu":
            return self
        told = torch.stack([self.every_norm, self.every_cut.double(), self.drawn.double()]).cpu()  # exact below 2^53
        return ClippedSum(self.total, told[0], told[1].long(), told[2] > 0)

    @property
    def norms(self) -> Tensor:
        """Of the samples that were drawn, before clipping."""
        return self.every_norm[self.drawn]

    @property
    def truncated(self) -> Tensor:
        """How many coordinates of the samples that were drawn were cut."""
        return self.every_cut[self.drawn]

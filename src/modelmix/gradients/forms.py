"""The gradients of single samples with respect to one parameter, in the form that costs least.

Clipping asks two things of them: how long each is, and the sum of all after scaling and truncation. A weight used once
by a sample, or a table of which it touches a few rows, can answer both without writing every coordinate down. All
answers are float64: what is measured and what is summed are the same numbers, whatever precision they came in.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor

from modelmix.gradients import kernels

_SLACK = 2.0**-22  # a fraction of the margin that clipping keeps
_CACHE = 2 * 2**20  # bytes that a CPU core works on at once
_FEW_ROWS = 64


def has_kernels(x: Tensor) -> bool:
    """Whether a tensor lies where our kernels run."""
    return x.is_cuda and x.dtype in kernels.TYPES and kernels.has_triton()


class Gradients(ABC):
    """The gradients of m samples for one parameter."""

    @property
    @abstractmethod
    def stored(self) -> Tensor:
        """One of the tensors that these gradients are made of, samples first."""

    @property
    def samples(self) -> int:
        """How many samples these are the gradients of."""
        return self.stored.shape[0]

    @property
    def device(self) -> torch.device:
        """Where they lie."""
        return self.stored.device

    @abstractmethod
    def dense(self) -> Tensor:
        """Write every coordinate down: m x (shape)."""

    def coordinates(self, low: int, high: int) -> Tensor:
        """Write some coordinates of the flattened parameter down: m x (high - low)."""
        values = self.dense()
        return values.reshape(self.samples, values.shape[1:].numel())[:, low:high]

    @abstractmethod
    def powers(self, norm: int) -> Tensor:
        """Measure every sample: the sum of |coordinate|^norm."""

    @abstractmethod
    def clipped_sum(self, scale: Tensor, bound: Tensor | float | None) -> tuple[Tensor, Tensor | None]:
        """Sum scale * gradient over samples, with every coordinate cut to +-bound.

        A sample of scale 0 adds nothing, even if its gradient is not finite. The bound is a float64 number on the
        device, or a plain one on a CPU, where infinity is no bound.

        Returns:
            A tensor of the parameter's shape, and how many coordinates were cut of each sample (zeros or None without a
            bound).
        """

    @abstractmethod
    def materialize(self) -> Gradients:
        """Force the gradients into memory, out of a compiler's reach: see ``kernels.materialize``."""

    def __add__(self, other: Gradients) -> Gradients:
        return DenseGradients(self.dense() + other.dense())


def _truncate(values: Tensor, scale: Tensor, bound: Tensor | float | None) -> tuple[Tensor, Tensor | None]:
    """Scale and truncate values, and count those cut in every row."""
    scale = scale.reshape(-1, *[1] * (values.dim() - 1))
    scaled = torch.where(scale > 0, values.double() * scale, 0.0)
    if bound is None:
        return scaled, None
    return _clamp(scaled, bound), (scaled.abs() > bound).flatten(1).sum(1)


def _room() -> int:
    """Return how many float64 numbers stay in the caches of a CPU."""
    return _CACHE * min(4, torch.get_num_threads()) // 8


def _slices(count: int, size: int) -> list[slice]:
    return [slice(start, start + size) for start in range(0, count, size)]


def _rows_with(low: int, high: int, width: int) -> tuple[slice, slice]:
    """Find the rows of a matrix that hold these coordinates, and where among theirs these are."""
    rows = slice(low // width, -(-high // width))
    return rows, slice(low - rows.start * width, high - rows.start * width)


def _clamp(values: Tensor, bound: Tensor | float) -> Tensor:
    return values.clamp(-bound, bound)  # type: ignore[arg-type]


@dataclass(frozen=True)
class DenseGradients(Gradients):
    """Hold every coordinate of every sample.

    Args:
        values: m x (shape).
        materialized: whether a kernel of ours wrote them, so that they lie in memory.
        squares: the sum of squares of every sample, where that kernel measured what it wrote.
    """

    values: Tensor
    materialized: bool = False
    squares: Tensor | None = None

    @property
    def stored(self) -> Tensor:
        return self.values

    @property
    def order(self) -> list[int]:
        """The dimensions of the parameter as they lie in memory: read in this order, a row is one piece."""
        stride = self.values.stride()
        return sorted(range(1, self.values.dim()), key=lambda k: -stride[k])

    def rows(self) -> Tensor:
        """Return m x coordinates, in the order of memory."""
        return self.values.permute(0, *self.order).reshape(self.samples, self.values.shape[1:].numel())

    def shaped(self, row: Tensor) -> Tensor:
        """Bring one row of ``rows`` into the shape of the parameter."""
        order = self.order
        there = row.reshape([self.values.shape[k] for k in order])
        return there.permute([order.index(k) for k in range(1, self.values.dim())])

    def dense(self) -> Tensor:
        return self.values

    def powers(self, norm: int) -> Tensor:
        if norm == 2 and self.squares is not None:
            return self.squares
        rows = self.rows()
        if has_kernels(rows):
            found: Tensor = kernels.powers(rows, norm)
            return found
        wide = rows.double()
        if wide.device.type == "cpu":
            lengths: Tensor = torch.linalg.vector_norm(wide, ord=norm, dim=1)
            return lengths**norm
        return (wide.square() if norm == 2 else wide.abs()).sum(1)

    def clipped_sum(self, scale: Tensor, bound: Tensor | float | None) -> tuple[Tensor, Tensor | None]:
        rows = self.rows()
        if has_kernels(rows):
            assert not isinstance(bound, float)
            total, cut = kernels.clipped_sum(rows, scale, bound)
            return self.shaped(total), cut
        values, cut = _truncate(rows, scale, bound)
        return self.shaped(values.sum(0)), cut

    def materialize(self) -> DenseGradients:
        return self if self.materialized else DenseGradients(kernels.materialize(self.values), materialized=True)


@dataclass(frozen=True)
class OuterGradients(Gradients):
    """Hold the gradients of a matrix that each sample uses once: outer products of what came back and what went in.

    Args:
        back: m x rows.
        seen: m x columns.
    """

    back: Tensor
    seen: Tensor

    @property
    def stored(self) -> Tensor:
        return self.back

    @cached_property
    def _wide(self) -> Tensor:
        """``seen``, on a CPU in float64 where that stays in its cache: it is read twice and converted once."""
        here = self.seen.device.type == "cpu" and self.seen.numel() <= _room()
        return self.seen.double() if here else self.seen

    def dense(self) -> Tensor:
        return self.back[:, :, None] * self.seen[:, None, :]

    def coordinates(self, low: int, high: int) -> Tensor:
        rows, there = _rows_with(low, high, self.seen.shape[1])
        return OuterGradients(self.back[:, rows], self.seen).dense().flatten(1)[:, there]

    def powers(self, norm: int) -> Tensor:
        if self.seen.dtype != torch.float64 and self.back.dtype != torch.float64:
            return DenseGradients(self.back).powers(norm) * DenseGradients(self._wide).powers(norm)
        # The largest number changes sides first: neither factor can then vanish where the product does not.
        seen = self.seen.double()
        top = seen.abs().amax(1, keepdim=True)
        return DenseGradients(self.back.double() * top).powers(norm) * DenseGradients(
            seen / top.clamp_min(1e-300)
        ).powers(norm)

    def clipped_sum(self, scale: Tensor, bound: Tensor | float | None) -> tuple[Tensor, Tensor | None]:
        if isinstance(bound, float):
            return self._in_blocks(scale, bound)
        few = self.back.shape[1] <= _FEW_ROWS  # with more, a matrix product is faster where nothing is truncated
        if has_kernels(self.back) and has_kernels(self.seen) and (few or bound is not None):
            found: tuple[Tensor, Tensor] = kernels.outer_sum(self.back, self.seen, scale, bound)
            return found
        live = scale[:, None] > 0
        back = torch.where(live, self.back.double() * scale[:, None], 0.0)
        seen = torch.where(live, self.seen.double(), 0.0)
        if bound is None:
            return back.T @ seen, None
        product = back[:, :, None] * seen[:, None, :]
        return _clamp(product, bound).sum(0), (product.abs() > bound).sum((1, 2))

    def _in_blocks(self, scale: Tensor, bound: float) -> tuple[Tensor, Tensor]:
        """Sum on a CPU, a few samples at a time."""
        total = scale.new_zeros(self.back.shape[1], self.seen.shape[1])
        cut = torch.zeros_like(scale, dtype=torch.int64)
        room = _room()
        # A sample none of whose coordinates reaches the bound is as good as not truncated.
        tops = [t.abs().amax(1).double() for t in (self.back, self.seen)] if bound < math.inf else [scale, scale]
        high = tops[0] * tops[1] * scale > bound
        low, size = (scale > 0) & ~high, max(1, room // self.seen.shape[1])
        for some in _slices(low.numel(), size) if bool(low.all()) else torch.split(torch.nonzero(low).flatten(), size):
            total.addmm_((self.back[some].double() * scale[some, None]).T, self._wide[some].double())
        for some in torch.split(torch.nonzero((scale > 0) & high).flatten(), max(1, room // max(1, total.numel()))):
            back = self.back[some].double() * scale[some, None]
            product = back[:, :, None] * self.seen[some].double()[:, None, :]
            kept = product.clamp(-bound, bound)
            total += kept.sum(0)
            cut[some] = product.ne_(kept).flatten(1).sum(1).long()
        return total, cut

    def materialize(self) -> OuterGradients:
        return OuterGradients(kernels.materialize(self.back), kernels.materialize(self.seen))


@dataclass(frozen=True)
class SparseRowGradients(Gradients):
    """Hold the gradients of a table of which each sample touches at most k rows.

    Args:
        values: m x k x width. Where a sample touches a row several times, the first place holds the sum and the others
            hold zeros, so that every coordinate stands in one place.
        index: m x k, the rows.
        height: rows of the whole table.
    """

    values: Tensor
    index: Tensor
    height: int

    @classmethod
    def of(cls, values: Tensor, index: Tensor, height: int) -> SparseRowGradients:
        """Make them from values that may touch a row several times."""
        same = index[:, :, None] == index[:, None, :]
        earlier = torch.ones(index.shape[1], index.shape[1], dtype=torch.bool, device=index.device).tril(-1)
        first = ~(same & earlier).any(2)
        return cls(torch.bmm((same & first[:, :, None]).to(values.dtype), values), index, height)

    @property
    def stored(self) -> Tensor:
        return self.values

    def dense(self) -> Tensor:
        table = self.values.new_zeros(self.samples, self.height, self.values.shape[2])
        return table.scatter_add(1, self.index[:, :, None].expand_as(self.values), self.values)

    def coordinates(self, low: int, high: int) -> Tensor:
        rows, there = _rows_with(low, high, self.values.shape[2])
        inside = (self.index >= rows.start) & (self.index < rows.stop)
        values = torch.where(inside[:, :, None], self.values, 0.0)
        index = torch.where(inside, self.index - rows.start, 0)
        return SparseRowGradients(values, index, rows.stop - rows.start).dense().flatten(1)[:, there]

    def powers(self, norm: int) -> Tensor:
        return DenseGradients(self.values).powers(norm)

    def clipped_sum(self, scale: Tensor, bound: Tensor | float | None) -> tuple[Tensor, Tensor | None]:
        values, cut = _truncate(self.values, scale, bound)
        table = values.new_zeros(self.height, values.shape[2])
        return table.index_add(0, self.index.flatten(), values.flatten(0, 1)), cut

    def materialize(self) -> SparseRowGradients:
        return SparseRowGradients(kernels.materialize(self.values), self.index, self.height)


@dataclass(frozen=True)
class ConvGradients(Gradients):
    """Hold what went into a convolution and what came back, and compute its weight's gradients when needed.

    They are computed twice, to be measured and to be summed. The sum becomes NaN, which no step takes, if the second
    time they are not the numbers that were measured.

    Args:
        seen, back: images and the gradient of the loss with respect to the layer's output, m * copies rows.
        geometry: of the convolution.
        line: whether it has one dimension, in which case images have one line.
    """

    seen: Tensor
    back: Tensor
    geometry: kernels.Geometry
    line: bool = False
    measured: dict[int, Tensor] = field(default_factory=dict, compare=False)

    @property
    def samples(self) -> int:
        return self.seen.shape[0] // self.geometry.copies

    @property
    def stored(self) -> Tensor:
        return self.seen

    def _shaped(self, weight: Tensor) -> Tensor:
        """Bring ... x out x kernel x in into the shape of the parameter, ... x out x in x kernel."""
        weight = weight.movedim(-1, -3)
        return weight.squeeze(-2) if self.line else weight

    def to_dense(self) -> DenseGradients:
        """Compute the gradients now, and measure them with the same kernel."""
        values, squares = kernels.conv_weight(self.seen, self.back, self.geometry.numbers())
        return DenseGradients(self._shaped(values), True, squares)

    def dense(self) -> Tensor:
        return self.to_dense().values

    def powers(self, norm: int) -> Tensor:
        self.measured[norm] = kernels.conv_powers(self.seen, self.back, self.geometry.numbers(), norm)
        return self.measured[norm]

    def clipped_sum(self, scale: Tensor, bound: Tensor | float | None) -> tuple[Tensor, Tensor | None]:
        if isinstance(bound, float):
            bound = torch.full_like(scale[0], bound)
        (norm, first), *_ = self.measured.items()
        total, cut, again = kernels.conv_clipped_sum(self.seen, self.back, self.geometry.numbers(), scale, bound, norm)
        same = ((again <= first * (1 + _SLACK)) | (scale == 0)).all()
        return self._shaped(torch.where(same, total, torch.nan)), None if bound is None else cut

    def materialize(self) -> ConvGradients:
        return self  # kernels read from memory

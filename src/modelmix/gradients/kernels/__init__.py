"""Our GPU kernels as operations that torch's compiler leaves whole. What they compute stands in the modules beside."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

_MOST_CHANNELS = 2048
TYPES = (torch.bfloat16, torch.float16, torch.float32)


def has_triton() -> bool:
    """Whether triton, in which the kernels are written, is installed."""
    try:
        import triton  # noqa: F401
    except ImportError:
        return False
    return True


def takes_group_norm(x: Tensor, channels: int, groups: int) -> bool:
    """Whether our GroupNorm takes images of this shape."""
    powers_of_two = channels & (channels - 1) == 0 and groups & (groups - 1) == 0
    return x.dim() == 4 and powers_of_two and channels <= _MOST_CHANNELS and x[0].numel() > 0


class Geometry(NamedTuple):
    """How a convolution moves over its image; ``copies`` rows that follow each other are one sample."""

    kernel: tuple[int, int]
    stride: tuple[int, int]
    padding: tuple[int, int]
    dilation: tuple[int, int]
    groups: int
    copies: int

    def numbers(self) -> list[int]:
        return [*self.kernel, *self.stride, *self.padding, *self.dilation, self.groups, self.copies]

    @classmethod
    def of(cls, numbers: list[int]) -> Geometry:
        a, b, c, d, e, f, g, h, groups, copies = numbers
        return cls((a, b), (c, d), (e, f), (g, h), groups, copies)


# The kernels are imported where they are called: triton is slow to load and not everywhere.


def kept_as(x: Tensor) -> torch.dtype:
    """Return the type in which per-sample gradients are kept: sums are in float32, and rounded as the model runs."""
    return torch.bfloat16 if x.dtype == torch.bfloat16 else torch.float32


@torch.library.custom_op("modelmix::conv_weight", mutates_args=())
def conv_weight(x: Tensor, g: Tensor, geometry: list[int]) -> tuple[Tensor, Tensor]:
    """Compute every sample's weight gradient, m x out x kernel x (in / groups), and its squared norm."""
    from modelmix.gradients.kernels import convolution

    return convolution.conv_weight(x, g, Geometry.of(geometry))


@conv_weight.register_fake
def _(x: Tensor, g: Tensor, geometry: list[int]) -> tuple[Tensor, Tensor]:
    m = x.shape[0] // geometry[-1]
    return x.new_empty(m, *_weight_shape(x, g, geometry), dtype=kept_as(x)), x.new_empty(m, dtype=torch.float64)


def _weight_shape(x: Tensor, g: Tensor, geometry: list[int]) -> tuple[int, ...]:
    return (g.shape[1], *geometry[:2], x.shape[1] // geometry[-2])


@torch.library.custom_op("modelmix::conv_standardised", mutates_args=())
def conv_standardised(
    x: Tensor, g: Tensor, geometry: list[int], factor: Tensor, unit: Tensor, shift: Tensor, slope: Tensor
) -> tuple[Tensor, Tensor]:
    """Compute what ``conv_weight`` does, through a standardised weight."""
    from modelmix.gradients.kernels import convolution

    more = convolution.Standardised(*(t.float().contiguous() for t in (factor, unit, shift, slope)))
    return convolution.conv_weight(x, g, Geometry.of(geometry), more)


@conv_standardised.register_fake
def _(
    x: Tensor, g: Tensor, geometry: list[int], factor: Tensor, unit: Tensor, shift: Tensor, slope: Tensor
) -> tuple[Tensor, Tensor]:
    m = x.shape[0] // geometry[-1]
    return x.new_empty(m, *_weight_shape(x, g, geometry), dtype=kept_as(x)), x.new_empty(m, dtype=torch.float64)


@torch.library.custom_op("modelmix::products", mutates_args=())
def products(a: Tensor, b: Tensor) -> Tensor:
    """Multiply the two matrices of every sample: summed in float32, rounded to what came in."""
    return torch.bmm(a, b)


@products.register_fake
def _(a: Tensor, b: Tensor) -> Tensor:
    return a.new_empty(a.shape[0], a.shape[1], b.shape[2])


@torch.library.custom_op("modelmix::conv_powers", mutates_args=())
def conv_powers(x: Tensor, g: Tensor, geometry: list[int], norm: int) -> Tensor:
    from modelmix.gradients.kernels import convolution

    return convolution.conv_powers(x, g, Geometry.of(geometry), norm)


@conv_powers.register_fake
def _(x: Tensor, g: Tensor, geometry: list[int], norm: int) -> Tensor:
    return x.new_empty(x.shape[0] // geometry[-1], dtype=torch.float64)


@torch.library.custom_op("modelmix::conv_clipped_sum", mutates_args=())
def conv_clipped_sum(
    x: Tensor, g: Tensor, geometry: list[int], scale: Tensor, bound: Tensor | None, norm: int
) -> tuple[Tensor, Tensor, Tensor]:
    from modelmix.gradients.kernels import convolution

    return convolution.conv_clipped_sum(x, g, Geometry.of(geometry), scale, bound, norm)


@conv_clipped_sum.register_fake
def _(
    x: Tensor, g: Tensor, geometry: list[int], scale: Tensor, bound: Tensor | None, norm: int
) -> tuple[Tensor, Tensor, Tensor]:
    total = scale.new_empty(_weight_shape(x, g, geometry))
    return total, torch.empty_like(scale, dtype=torch.int64), torch.empty_like(scale)


@torch.library.custom_op("modelmix::materialize", mutates_args=())
def materialize(t: Tensor) -> Tensor:
    """Force ``t`` into memory, so that the norm and the sum read identical values.

    A compiler may compute a value anew for every use of it, and round it each time in another way. What was measured
    and what is summed must be the same numbers to the last digit, so they are read from memory both times.
    """
    return t.clone()


@materialize.register_fake
def _(t: Tensor) -> Tensor:
    return torch.empty_like(t)


def _in_pieces(rows: Tensor) -> Tensor:
    """Make every row of a matrix one piece of memory."""
    return rows if rows.stride(1) == 1 else rows.contiguous()


@torch.library.custom_op("modelmix::powers", mutates_args=())
def powers(rows: Tensor, norm: int) -> Tensor:
    from modelmix.gradients.kernels import clipping

    return clipping.powers(_in_pieces(rows), norm)


@powers.register_fake
def _(rows: Tensor, norm: int) -> Tensor:
    return rows.new_empty(rows.shape[0], dtype=torch.float64)


@torch.library.custom_op("modelmix::clipped_sum", mutates_args=())
def clipped_sum(rows: Tensor, scale: Tensor, bound: Tensor | None) -> tuple[Tensor, Tensor]:
    from modelmix.gradients.kernels import clipping

    return clipping.clipped_sum(_in_pieces(rows), scale, bound)


@clipped_sum.register_fake
def _(rows: Tensor, scale: Tensor, bound: Tensor | None) -> tuple[Tensor, Tensor]:
    return scale.new_empty(rows.shape[1]), scale.new_empty(rows.shape[0], dtype=torch.int32)


@torch.library.custom_op("modelmix::outer_sum", mutates_args=())
def outer_sum(back: Tensor, seen: Tensor, scale: Tensor, bound: Tensor | None) -> tuple[Tensor, Tensor]:
    from modelmix.gradients.kernels import clipping

    return clipping.outer_sum(back.contiguous(), seen.contiguous(), scale, bound)


@outer_sum.register_fake
def _(back: Tensor, seen: Tensor, scale: Tensor, bound: Tensor | None) -> tuple[Tensor, Tensor]:
    return scale.new_empty(back.shape[1], seen.shape[1]), torch.empty_like(scale, dtype=torch.int32)


@torch.library.custom_op("modelmix::group_norm", mutates_args=())
def group_norm(x: Tensor, weight: Tensor, bias: Tensor, groups: int, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    from modelmix.gradients.kernels import normalisation

    return normalisation.group_norm(x, weight.contiguous(), bias.contiguous(), groups, eps)


@group_norm.register_fake
def _(x: Tensor, weight: Tensor, bias: Tensor, groups: int, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    mean = x.new_empty(x.shape[0], groups, dtype=torch.float32)
    return torch.empty_like(x), mean, torch.empty_like(mean)


@torch.library.custom_op("modelmix::group_norm_backward", mutates_args=())
def group_norm_backward(
    x: Tensor, g: Tensor, weight: Tensor, mean: Tensor, scale: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    from modelmix.gradients.kernels import normalisation

    return normalisation.group_norm_backward(x, g, weight.contiguous(), mean, scale)


@group_norm_backward.register_fake
def _(x: Tensor, g: Tensor, weight: Tensor, mean: Tensor, scale: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    dweight = x.new_empty(x.shape[:2], dtype=torch.float32)
    return torch.empty_like(x), dweight, torch.empty_like(dweight)


# These serve steps that embed gradients, which no compiler sees.


def sizes(
    image: Tensor, residual: Tensor, shorter: Tensor, smaller: Tensor, bound: Tensor
) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    from modelmix.gradients.kernels import embedding

    return embedding.sizes(image.contiguous(), residual.contiguous(), shorter, smaller, bound)


def excess(
    gradients: Tensor, residual: Tensor, shorter: Tensor, smaller: Tensor, limit: float, bound: float
) -> tuple[Tensor, Tensor]:
    from modelmix.gradients.kernels import embedding

    return embedding.excess(_in_pieces(gradients), residual.contiguous(), shorter, smaller, limit, bound)

"""Triton: sizes of what a sample adds to a step that embeds gradients, without writing it down.

A sample adds V e + r, of which V e is scaled by one factor, r by another and then truncated.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_PROGRAMS = 8192  # enough for any device; where there are fewer than blocks, each takes several turns
_BLOCK = 1024


def _shared_out(rows: Tensor) -> tuple[int, int]:
    """How many programs take a row, and how many blocks each of them."""
    m, width = rows.shape
    splits = min(triton.cdiv(width, _BLOCK), max(1, _PROGRAMS // max(1, m)))
    return splits, triton.cdiv(width, _BLOCK * splits)


@triton.jit
def _sizes(image, residual, shorter, smaller, bounds, out, width, splits, BLOCK: tl.constexpr, TURNS: tl.constexpr):
    m = tl.program_id(0).to(tl.int64)
    split = tl.program_id(1)
    a = tl.load(shorter + m)
    s = tl.load(smaller + m)
    bound = tl.load(bounds)
    # What is scaled by 0 is not read: it may be infinite, and adds nothing.
    image_end = tl.where(a > 0, width, 0)
    residual_end = tl.where(s > 0, width, 0)
    squares = tl.zeros((BLOCK,), dtype=tl.float64)
    tops = tl.zeros((BLOCK,), dtype=tl.float64)
    whole_squares = tl.zeros((BLOCK,), dtype=tl.float64)
    whole_tops = tl.zeros((BLOCK,), dtype=tl.float64)
    for turn in range(TURNS):
        d = (turn * splits + split) * BLOCK + tl.arange(0, BLOCK)
        v = tl.load(image + m * width + d, mask=d < image_end, other=0.0) * a
        r = tl.load(residual + m * width + d, mask=d < residual_end, other=0.0).to(tl.float64) * s
        squares += v * v
        tops = tl.maximum(tops, tl.abs(v))
        v += tl.where(r == r, tl.minimum(tl.maximum(r, -bound), bound), r)  # what is no number stays
        whole_squares += v * v
        whole_tops = tl.maximum(whole_tops, tl.abs(v))
    at = out + (m * splits + split) * 4
    tl.store(at, tl.sum(squares, 0))
    tl.store(at + 1, tl.max(tops, 0))
    tl.store(at + 2, tl.sum(whole_squares, 0))
    tl.store(at + 3, tl.max(whole_tops, 0))


def sizes(
    image: Tensor, residual: Tensor, shorter: Tensor, smaller: Tensor, bound: Tensor
) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """Measure (norm, top coordinate) of every row of shorter * image, and of that plus the cut smaller * residual.

    Everything is measured in float64; what is not a number makes its norm none.

    Args:
        image: m x width, float64.
        residual: m x width.
        shorter, smaller, bound: float64 numbers, of every row and of all.
    """
    (m, width), (splits, turns) = image.shape, _shared_out(image)
    out = torch.empty(m, splits, 4, dtype=torch.float64, device=image.device)
    _sizes[(m, splits)](image, residual, shorter, smaller, bound, out, width, splits, _BLOCK, turns)
    norms, tops = out[:, :, ::2].sum(1).sqrt(), out[:, :, 1::2].amax(1)
    return (norms[:, 0], tops[:, 0]), (norms[:, 1], tops[:, 1])


@triton.jit
def _excess(
    gradients, residual, shorter, smaller, out, width, pitch, splits, limit, bound, BLOCK: tl.constexpr,
    TURNS: tl.constexpr,
):  # fmt: skip
    m = tl.program_id(0).to(tl.int64)
    split = tl.program_id(1)
    a = tl.load(shorter + m).to(tl.float32)
    s = tl.load(smaller + m).to(tl.float32)
    end = tl.where(tl.minimum(a, s) > 0, width, 0)
    most = tl.zeros((BLOCK,), dtype=tl.float32)
    squares = tl.zeros((BLOCK,), dtype=tl.float32)
    for turn in range(TURNS):
        d = (turn * splits + split) * BLOCK + tl.arange(0, BLOCK)
        r = tl.load(residual + m * width + d, mask=d < end, other=0.0)
        v = (tl.load(gradients + m * pitch + d, mask=d < end, other=0.0) - r) * a
        r *= s
        alone = tl.abs(v)
        alike = tl.minimum((alone + tl.abs(r)) / bound, alone / tl.maximum(bound - limit, 1e-30))
        against = tl.maximum((alone - tl.abs(r)) / bound, alone / (bound + limit))
        most = tl.maximum(most, tl.where(v * r > 0, alike, against))
        v += tl.minimum(tl.maximum(r, -limit), limit)
        squares += v * v
    at = out + (m * splits + split) * 2
    tl.store(at, tl.max(most, 0))
    tl.store(at + 1, tl.sum(squares, 0))


def excess(
    gradients: Tensor, residual: Tensor, shorter: Tensor, smaller: Tensor, limit: float, bound: float
) -> tuple[Tensor, Tensor]:
    """See ``embedding._excess``; in float32. Gradients and residual are m x width; the first may be part of more."""
    (m, width), (splits, turns) = residual.shape, _shared_out(residual)
    out = torch.empty(m, splits, 2, dtype=torch.float32, device=residual.device)
    _excess[(m, splits)](
        gradients, residual, shorter, smaller, out, width, gradients.stride(0), splits, limit, bound, _BLOCK, turns
    )
    return out[:, :, 0].amax(1).double(), out[:, :, 1].double().sum(1)

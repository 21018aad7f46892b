"""Triton: the two passes of clipping, one that measures and one that scales, truncates and sums.

Values are widened to float64 in registers: the bounds hold for what is summed, and nothing wide is ever stored.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def _powers(
    rows,
    out,
    width,
    splits,
    NORM: tl.constexpr,
    BLOCK: tl.constexpr,
    TURNS: tl.constexpr,
):
    m = tl.program_id(0).to(tl.int64)
    split = tl.program_id(1)
    sums = tl.zeros((BLOCK,), dtype=tl.float64)
    for turn in range(TURNS):
        d = (turn * splits + split) * BLOCK + tl.arange(0, BLOCK)
        value = tl.load(rows + m * width + d, mask=d < width, other=0.0).to(tl.float64)
        sums += value * value if NORM == 2 else tl.abs(value)
    tl.store(out + m * splits + split, tl.sum(sums, 0))


def powers(rows: Tensor, norm: int) -> Tensor:
    """Of every row the sum of |value|^norm, in float64."""
    m, width = rows.shape
    block = min(1024, max(16, triton.next_power_of_2(width)))
    splits = min(triton.cdiv(width, block), max(1, 4096 // max(1, m)))
    out = torch.empty(m, splits, dtype=torch.float64, device=rows.device)
    _powers[(m, splits)](rows, out, width, splits, norm, block, triton.cdiv(width, block * splits))
    return out.sum(1)


@triton.jit
def _clipped_sum(
    rows,
    scale,
    bounds,
    out,
    cut,
    samples,
    width,
    GROUP: tl.constexpr,
    TRUNCATE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK: tl.constexpr,
):
    group = tl.program_id(1)
    d = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    right = d < width
    sums = tl.zeros((BLOCK_M, BLOCK), dtype=tl.float64)
    if TRUNCATE:
        bound = tl.load(bounds)
    for start in range(0, GROUP, 4 * BLOCK_M):
        # Counting the cut values of a row asks all threads to meet. Four rows share one meeting, 16 bits each.
        flags = tl.zeros((BLOCK_M, BLOCK), dtype=tl.int64)
        for turn in tl.static_range(4):
            m = group * GROUP + start + turn * BLOCK_M + tl.arange(0, BLOCK_M)
            factor = tl.load(scale + m, mask=m < samples, other=0.0)
            # What is scaled by 0 is not read: it may be infinite, and must add nothing.
            there = (factor > 0)[:, None] & right[None, :]
            value = tl.load(rows + m.to(tl.int64)[:, None] * width + d[None, :], mask=there, other=0.0).to(tl.float64)
            value *= factor[:, None]
            if TRUNCATE:
                flags += (tl.abs(value) > bound).to(tl.int64) << (16 * turn)
                value = tl.minimum(tl.maximum(value, -bound), bound)
            sums += value
        if TRUNCATE:
            counts = tl.sum(flags, 1)
            for turn in tl.static_range(4):
                m = group * GROUP + start + turn * BLOCK_M + tl.arange(0, BLOCK_M)
                count = ((counts >> (16 * turn)) & 0xFFFF).to(tl.int32)
                tl.atomic_add(cut + m, count, mask=(m < samples) & (count > 0))
    tl.store(out + group.to(tl.int64) * width + d, tl.sum(sums, 0), mask=right)


def clipped_sum(rows: Tensor, scale: Tensor, bound: Tensor | None) -> tuple[Tensor, Tensor]:
    """The sum over rows of scale * row with every value cut to +-bound, and how many values of each row were cut.

    Args:
        scale: a float64 number for every row; a row of scale 0 adds nothing.
        bound: a float64 number on the device, or None.
    """
    m, width = rows.shape
    block, block_m, group = 256, 8, 64
    groups = max(1, triton.cdiv(m, group))
    out = torch.empty(groups, width, dtype=torch.float64, device=rows.device)
    cut = torch.zeros(m, dtype=torch.int32, device=rows.device)
    _clipped_sum[(triton.cdiv(width, block), groups)](
        rows, scale, scale if bound is None else bound, out, cut, m, width, group, bound is not None, block_m, block
    )
    return out.sum(0), cut

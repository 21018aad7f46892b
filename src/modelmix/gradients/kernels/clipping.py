"""Triton: the two passes of clipping, one that measures and one that scales, truncates and sums.

Values are measured and added up in float64, in registers: nothing wide is ever stored. They are scaled and truncated in
float32, which moves them by at most three roundings, 3 * 2^-24 of themselves; the margin of clipping pays for that too.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_PROGRAMS = 4096  # enough for any device; where there are fewer than blocks, each takes several turns


@triton.jit
def _powers(rows, out, width, pitch, splits, NORM: tl.constexpr, BLOCK: tl.constexpr, TURNS: tl.constexpr):
    m = tl.program_id(0).to(tl.int64)
    split = tl.program_id(1)
    sums = tl.zeros((BLOCK,), dtype=tl.float64)
    for turn in range(TURNS):
        d = (turn * splits + split) * BLOCK + tl.arange(0, BLOCK)
        value = tl.load(rows + m * pitch + d, mask=d < width, other=0.0).to(tl.float64)
        sums += value * value if NORM == 2 else tl.abs(value)
    tl.store(out + m * splits + split, tl.sum(sums, 0))


def powers(rows: Tensor, norm: int) -> Tensor:
    """Measure every row: the sum of |value|^norm, in float64. Rows may be parts of longer ones."""
    m, width = rows.shape
    block = min(1024, max(16, triton.next_power_of_2(width)))
    splits = min(triton.cdiv(width, block), max(1, _PROGRAMS // max(1, m)))
    out = torch.empty(m, splits, dtype=torch.float64, device=rows.device)
    _powers[(m, splits)](rows, out, width, rows.stride(0), splits, norm, block, triton.cdiv(width, block * splits))
    return out.sum(1)


@triton.jit
def _clipped_sum(
    rows, scale, bounds, out, cut, samples, width, pitch, GROUP: tl.constexpr, TRUNCATE: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    group = tl.program_id(1)
    d = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    right = d < width
    sums = tl.zeros((BLOCK_M, BLOCK), dtype=tl.float64)
    if TRUNCATE:
        bound = tl.load(bounds).to(tl.float32)
    for start in range(0, GROUP, 4 * BLOCK_M):
        # Counting the cut values of a row asks threads to meet. Two rows share one meeting, 16 bits each.
        even = tl.zeros((BLOCK_M, BLOCK), dtype=tl.int32)
        odd = tl.zeros((BLOCK_M, BLOCK), dtype=tl.int32)
        for turn in tl.static_range(4):
            m = group * GROUP + start + turn * BLOCK_M + tl.arange(0, BLOCK_M)
            factor = tl.load(scale + m, mask=m < samples, other=0.0)
            # What is scaled by 0 is not read: it may be infinite, and must add nothing.
            there = (factor > 0)[:, None] & right[None, :]
            value = tl.load(rows + m.to(tl.int64)[:, None] * pitch + d[None, :], mask=there, other=0.0).to(tl.float32)
            value *= factor.to(tl.float32)[:, None]
            if TRUNCATE:
                flag = (tl.abs(value) > bound).to(tl.int32) << (16 * (turn // 2))
                if turn % 2 == 0:
                    even += flag
                else:
                    odd += flag
                value = tl.minimum(tl.maximum(value, -bound), bound)
            sums += value.to(tl.float64)
        if TRUNCATE:
            even_counts = tl.sum(even, 1)
            odd_counts = tl.sum(odd, 1)
            for turn in tl.static_range(4):
                m = group * GROUP + start + turn * BLOCK_M + tl.arange(0, BLOCK_M)
                counts = even_counts if turn % 2 == 0 else odd_counts
                count = (counts >> (16 * (turn // 2))) & 0xFFFF
                tl.atomic_add(cut + m, count, mask=(m < samples) & (count > 0))
    tl.store(out + group.to(tl.int64) * width + d, tl.sum(sums, 0), mask=right)


def clipped_sum(rows: Tensor, scale: Tensor, bound: Tensor | None) -> tuple[Tensor, Tensor]:
    """Sum scale * row over rows with every value cut to +-bound, and count how many values of each row were cut.

    Args:
        rows: m x width; they may be parts of longer ones.
        scale: a float64 number for every row; a row of scale 0 adds nothing.
        bound: a float64 number on the device, or None.
    """
    m, width = rows.shape
    block, block_m, group = 256, 8, 64
    groups = max(1, triton.cdiv(m, group))
    out = torch.empty(groups, width, dtype=torch.float64, device=rows.device)
    cut = torch.zeros(m, dtype=torch.int32, device=rows.device)
    bounds = scale if bound is None else bound
    _clipped_sum[(triton.cdiv(width, block), groups)](
        rows, scale, bounds, out, cut, m, width, rows.stride(0), group, bound is not None, block_m, block
    )
    return out.sum(0), cut


_MOST_SUMS = 2**22


@triton.jit
def _outer_sum(
    back, seen, scale, bounds, out, cut, samples, rows, columns, PART: tl.constexpr, TRUNCATE: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    c = tl.program_id(0) * BLOCK_C + tl.arange(0, BLOCK_C)
    r = tl.program_id(1) * BLOCK_R + tl.arange(0, BLOCK_R)
    part = tl.program_id(2).to(tl.int64)
    total = tl.zeros((BLOCK_M, BLOCK_R, BLOCK_C), dtype=tl.float64)
    if TRUNCATE:
        bound = tl.load(bounds).to(tl.float32)
    for start in range(0, PART, 2 * BLOCK_M):
        flags = tl.zeros((BLOCK_M, BLOCK_R, BLOCK_C), dtype=tl.int32)  # as in ``_clipped_sum``
        for turn in tl.static_range(2):
            m = part * PART + start + turn * BLOCK_M + tl.arange(0, BLOCK_M)
            factor = tl.load(scale + m, mask=m < samples, other=0.0)
            # What is scaled by 0 is not read: it may be infinite, and must add nothing.
            live = (factor > 0)[:, None]
            a = tl.load(back + m[:, None] * rows + r[None, :], mask=live & (r < rows)[None, :], other=0.0)
            b = tl.load(seen + m[:, None] * columns + c[None, :], mask=live & (c < columns)[None, :], other=0.0)
            value = (a.to(tl.float32) * factor.to(tl.float32)[:, None])[:, :, None] * b.to(tl.float32)[:, None, :]
            if TRUNCATE:
                flags += (tl.abs(value) > bound).to(tl.int32) << (16 * turn)
                value = tl.minimum(tl.maximum(value, -bound), bound)
            total += value.to(tl.float64)
        if TRUNCATE:
            counts = tl.sum(tl.sum(flags, 2), 1)
            for turn in tl.static_range(2):
                m = part * PART + start + turn * BLOCK_M + tl.arange(0, BLOCK_M)
                count = (counts >> (16 * turn)) & 0xFFFF
                tl.atomic_add(cut + m, count, mask=(m < samples) & (count > 0))
    place = (part * rows + r.to(tl.int64))[:, None] * columns + c[None, :]
    tl.store(out + place, tl.sum(total, 0), mask=(r < rows)[:, None] & (c < columns)[None, :])


def outer_sum(back: Tensor, seen: Tensor, scale: Tensor, bound: Tensor | None) -> tuple[Tensor, Tensor]:
    """Take ``clipped_sum`` of the outer products of the rows of back and seen, none of which is materialised."""
    (m, rows), columns = back.shape, seen.shape[1]
    # As many rows at once as fill a block well: every coordinate costs a conversion to float64, padding as well.
    block_r = next(b for b in (16, 8, 4, 2, 1) if 4 * triton.cdiv(rows, b) * b <= 5 * rows)
    block_c = 1024 // block_r
    # Samples that a program adds up: more where the sums of all parts would take much memory.
    part = max(64, triton.next_power_of_2(triton.cdiv(m * rows * columns, _MOST_SUMS)))
    parts = max(1, triton.cdiv(m, part))
    out = torch.empty(parts, rows, columns, dtype=torch.float64, device=back.device)
    cut = torch.zeros(m, dtype=torch.int32, device=back.device)
    _outer_sum[(triton.cdiv(columns, block_c), triton.cdiv(rows, block_r), parts)](
        back, seen, scale, scale if bound is None else bound, out, cut, m, rows, columns,
        part, bound is not None, 4, block_r, block_c, num_warps=4,
    )  # fmt: skip
    return out.sum(0), cut

"""Triton: the weight gradient of every sample of a convolution.

For sample n and output channel o, the gradient is a sum over positions q of g[n, o, q] * x[n, i, q * stride + tap]: a
small matrix product for every sample. A program computes one tile of it, with the windows read from the image as they
are needed; sums over positions are kept in float32.

``conv_weight`` writes the tiles down and measures what it wrote, after what a standardised weight makes of them where
there is one. ``conv_powers`` and ``conv_clipped_sum`` never do: the first measures them, the
second computes them anew, scales, truncates and adds them up in registers, in float64. Where a layer has few positions
and many weights that is far less work for the memory. The sum holds to the clip only if both see the same numbers, so
the second measures again, and whoever calls both compares.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from modelmix.gradients.kernels import Geometry, kept_as


@triton.jit
def _place(
    x, g, tile, n, xn, xc, gn, gc, CI: tl.constexpr, CIP: tl.constexpr, CO: tl.constexpr, TAPS: tl.constexpr,
    COPIES: tl.constexpr, BLOCK_O: tl.constexpr, BLOCK_J: tl.constexpr,
):  # fmt: skip
    """Find where a sample begins, and the group, output channels, taps and input channels of a tile."""
    j_blocks = tl.cdiv(TAPS * CIP, BLOCK_J)
    o_blocks = tl.cdiv(CO, BLOCK_O)
    group = tile // (j_blocks * o_blocks)
    o = (tile // j_blocks) % o_blocks * BLOCK_O + tl.arange(0, BLOCK_O)
    j = tile % j_blocks * BLOCK_J + tl.arange(0, BLOCK_J)
    x += n * COPIES * xn + group * CI * xc
    g += n * COPIES * gn + group * CO * gc
    return x, g, group, o, j // CIP, j % CIP


@triton.jit
def _sums(
    x, g, o, tap, i, xn, xc, xh, xw, gn, gc, gh, gw, H: tl.constexpr, W: tl.constexpr, OH: tl.constexpr,
    OW: tl.constexpr, CI: tl.constexpr, CO: tl.constexpr, KH: tl.constexpr, KW: tl.constexpr, SH: tl.constexpr,
    SW: tl.constexpr, PH: tl.constexpr, PW: tl.constexpr, DH: tl.constexpr, DW: tl.constexpr, COPIES: tl.constexpr,
    PRECISION: tl.constexpr, BLOCK_O: tl.constexpr, BLOCK_J: tl.constexpr, BLOCK_Q: tl.constexpr,
):  # fmt: skip
    """Compute one tile of one sample's gradient."""
    kh = tap // KW
    kw = tap % KW
    right_j = (tap < KH * KW) & (i < CI)
    right_o = o < CO
    sums = tl.zeros((BLOCK_O, BLOCK_J), dtype=tl.float32)
    for start in range(0, COPIES * OH * OW, BLOCK_Q):
        q = start + tl.arange(0, BLOCK_Q)
        copy = q // (OH * OW)
        oh = q % (OH * OW) // OW
        ow = q % OW
        right_q = q < COPIES * OH * OW
        here = g + (copy * gn + oh * gh + ow * gw)[:, None] + (o * gc)[None, :]
        back = tl.load(here, mask=right_q[:, None] & right_o[None, :], other=0.0)
        h = (oh * SH - PH)[:, None] + (kh * DH)[None, :]
        w = (ow * SW - PW)[:, None] + (kw * DW)[None, :]
        there = x + (copy * xn)[:, None] + h * xh + w * xw + (i * xc)[None, :]
        inside = (h >= 0) & (h < H) & (w >= 0) & (w < W)
        seen = tl.load(there, mask=inside & right_q[:, None] & right_j[None, :], other=0.0)
        sums = tl.dot(tl.trans(back), seen, sums, input_precision=PRECISION)
    return sums


@triton.jit
def _conv_weight(
    x, g, out, powers, factor, unit, shift, slope, xn, xc, xh, xw, gn, gc, gh, gw, H: tl.constexpr, W: tl.constexpr,
    OH: tl.constexpr, OW: tl.constexpr, CI: tl.constexpr, CIP: tl.constexpr, CO: tl.constexpr, KH: tl.constexpr,
    KW: tl.constexpr, SH: tl.constexpr, SW: tl.constexpr, PH: tl.constexpr, PW: tl.constexpr, DH: tl.constexpr,
    DW: tl.constexpr, GROUPS: tl.constexpr, COPIES: tl.constexpr, PRECISION: tl.constexpr, BLOCK_O: tl.constexpr,
    BLOCK_J: tl.constexpr, BLOCK_Q: tl.constexpr, STANDARDISED: tl.constexpr,
):  # fmt: skip
    n = tl.program_id(0).to(tl.int64)
    tile = tl.program_id(1)
    x, g, group, o, tap, i = _place(x, g, tile, n, xn, xc, gn, gc, CI, CIP, CO, KH * KW, COPIES, BLOCK_O, BLOCK_J)
    value = _sums(
        x, g, o, tap, i, xn, xc, xh, xw, gn, gc, gh, gw, H, W, OH, OW, CI, CO,
        KH, KW, SH, SW, PH, PW, DH, DW, COPIES, PRECISION, BLOCK_O, BLOCK_J, BLOCK_Q,
    )  # fmt: skip
    inside = (o < CO)[:, None] & ((tap < KH * KW) & (i < CI))[None, :]
    row = (group * CO + o)[:, None] * (KH * KW * CI) + (tap * CI + i)[None, :]
    if STANDARDISED:
        place = n * GROUPS * CO + group * CO + o
        a = tl.load(shift + place, mask=o < CO, other=0.0)
        b = tl.load(slope + place, mask=o < CO, other=0.0)
        f = tl.load(factor + group * CO + o, mask=o < CO, other=0.0)
        value = f[:, None] * (value - a[:, None] - b[:, None] * tl.load(unit + row, mask=inside, other=0.0))
    # Rounded first, measured after: the bound holds for what is read back.
    kept = tl.where(inside, value, 0.0).to(out.dtype.element_ty)
    tl.store(out + n * GROUPS * CO * (KH * KW * CI) + row, kept, mask=inside)
    wide = kept.to(tl.float64)
    tl.store(powers + (n * tl.num_programs(1) + tile) * BLOCK_O + tl.arange(0, BLOCK_O), tl.sum(wide * wide, 1))


@triton.jit
def _conv_powers(
    x, g, out, xn, xc, xh, xw, gn, gc, gh, gw, H: tl.constexpr, W: tl.constexpr, OH: tl.constexpr, OW: tl.constexpr,
    CI: tl.constexpr, CIP: tl.constexpr, CO: tl.constexpr, KH: tl.constexpr, KW: tl.constexpr, SH: tl.constexpr,
    SW: tl.constexpr, PH: tl.constexpr, PW: tl.constexpr, DH: tl.constexpr, DW: tl.constexpr, GROUPS: tl.constexpr,
    COPIES: tl.constexpr, PRECISION: tl.constexpr, BLOCK_O: tl.constexpr, BLOCK_J: tl.constexpr, BLOCK_Q: tl.constexpr,
    NORM: tl.constexpr,
):  # fmt: skip
    n = tl.program_id(0).to(tl.int64)
    tile = tl.program_id(1)
    x, g, _, o, tap, i = _place(x, g, tile, n, xn, xc, gn, gc, CI, CIP, CO, KH * KW, COPIES, BLOCK_O, BLOCK_J)
    value = _sums(
        x, g, o, tap, i, xn, xc, xh, xw, gn, gc, gh, gw, H, W, OH, OW, CI, CO,
        KH, KW, SH, SW, PH, PW, DH, DW, COPIES, PRECISION, BLOCK_O, BLOCK_J, BLOCK_Q,
    ).to(tl.float64)  # fmt: skip
    power = tl.sum(value * value if NORM == 2 else tl.abs(value), 1)
    tl.store(out + (n * tl.num_programs(1) + tile) * BLOCK_O + tl.arange(0, BLOCK_O), power)


@triton.jit
def _conv_clipped_sum(
    x, g, scale, bounds, out, cut, powers, samples, xn, xc, xh, xw, gn, gc, gh, gw, H: tl.constexpr, W: tl.constexpr,
    OH: tl.constexpr, OW: tl.constexpr, CI: tl.constexpr, CIP: tl.constexpr, CO: tl.constexpr, KH: tl.constexpr,
    KW: tl.constexpr, SH: tl.constexpr, SW: tl.constexpr, PH: tl.constexpr, PW: tl.constexpr, DH: tl.constexpr,
    DW: tl.constexpr, GROUPS: tl.constexpr, COPIES: tl.constexpr, PRECISION: tl.constexpr, BLOCK_O: tl.constexpr,
    BLOCK_J: tl.constexpr, BLOCK_Q: tl.constexpr, NORM: tl.constexpr, TRUNCATE: tl.constexpr, PART: tl.constexpr,
):  # fmt: skip
    tile = tl.program_id(0)
    part = tl.program_id(1).to(tl.int64)
    total = tl.zeros((BLOCK_O, BLOCK_J), dtype=tl.float64)
    if TRUNCATE:
        bound = tl.load(bounds)
    first_x, first_g, group, o, tap, i = _place(
        x, g, tile, part * PART, xn, xc, gn, gc, CI, CIP, CO, KH * KW, COPIES, BLOCK_O, BLOCK_J
    )
    lane = tl.arange(0, BLOCK_O)
    for s in range(PART):
        n = part * PART + s
        # Beyond the last sample the last one is read again and scaled by 0.
        back = tl.where(n < samples, s, samples - 1 - part * PART)
        factor = tl.load(scale + n, mask=n < samples, other=0.0)
        value = _sums(
            first_x + back * COPIES * xn, first_g + back * COPIES * gn, o, tap, i, xn, xc, xh, xw, gn, gc, gh, gw,
            H, W, OH, OW, CI, CO, KH, KW, SH, SW, PH, PW, DH, DW, COPIES, PRECISION, BLOCK_O, BLOCK_J, BLOCK_Q,
        ).to(tl.float64)  # fmt: skip
        place = (n * tl.num_programs(0) + tile) * BLOCK_O + lane
        power = tl.sum(value * value if NORM == 2 else tl.abs(value), 1)
        tl.store(powers + place, power, mask=(lane < BLOCK_O) & (n < samples))
        value = tl.where(factor > 0, value * factor, 0.0)
        if TRUNCATE:
            count = tl.sum((tl.abs(value) > bound).to(tl.int32), 1)
            tl.store(cut + place, count, mask=(lane < BLOCK_O) & (n < samples))
            value = tl.minimum(tl.maximum(value, -bound), bound)
        total += value
    row = out + ((part * GROUPS + group) * CO + o)[:, None] * (KH * KW * CI) + (tap * CI + i)[None, :]
    tl.store(row, total, mask=(o < CO)[:, None] & ((tap < KH * KW) & (i < CI))[None, :])


class _Launch(NamedTuple):
    """Hold the size of a grid and what every kernel here is told."""

    m: int
    tiles: int
    block_o: int
    arguments: tuple[object, ...]


def _launch(x: Tensor, g: Tensor, geometry: Geometry, widest: int) -> _Launch:
    _, channels, height, width = x.shape
    kernel, stride, padding, dilation, groups, copies = geometry
    inside, outside, taps = channels // groups, g.shape[1] // groups, kernel[0] * kernel[1]
    padded = triton.next_power_of_2(inside) if inside < 16 else -(-inside // 16) * 16
    block_o = min(64, max(16, triton.next_power_of_2(outside)))
    block_j = min(widest if block_o > 16 else 256, max(16, triton.next_power_of_2(taps * padded)))
    block_q = min(64, max(16, triton.next_power_of_2(copies * g.shape[2] * g.shape[3])))
    precision = "tf32x3" if x.dtype == torch.float32 else "ieee"
    tiles = groups * triton.cdiv(outside, block_o) * triton.cdiv(taps * padded, block_j)
    sizes = (height, width, g.shape[2], g.shape[3], inside, padded, outside)
    moves = (*kernel, *stride, *padding, *dilation, groups, copies, precision, block_o, block_j, block_q)
    return _Launch(x.shape[0] // copies, tiles, block_o, (*x.stride(), *g.stride(), *sizes, *moves))


class Standardised(NamedTuple):
    """Hold what makes of the gradient G of the kernels used that of a weight: factor * (G - shift - slope * unit).

    All in float32: factor, a number for every output channel; unit, out x kernel x (in / groups); shift and slope, of
    every sample and output channel.
    """

    factor: Tensor
    unit: Tensor
    shift: Tensor
    slope: Tensor


def conv_weight(
    x: Tensor, g: Tensor, geometry: Geometry, standardised: Standardised | None = None
) -> tuple[Tensor, Tensor]:
    """Compute every sample's gradient, and the sum of squares of what was written for each, in float64.

    Args:
        x: m * copies images, channels second; g: the gradient of the loss with respect to the layer's output.

    Returns:
        m x out x kernel x (in / groups), in bfloat16 if the images are and else in float32; m numbers.
    """
    m, tiles, block_o, arguments = _launch(x, g, geometry, 128)
    shape = (m, g.shape[1], *geometry.kernel, x.shape[1] // geometry.groups)
    out = torch.empty(shape, dtype=kept_as(x), device=x.device)
    squares = torch.zeros(m, tiles * block_o, dtype=torch.float64, device=x.device)
    if out.numel():
        more = standardised or (squares,) * 4  # not read
        _conv_weight[(m, tiles)](x, g, out, squares, *more, *arguments, standardised is not None, num_warps=4)
    return out, squares.sum(1)


def conv_powers(x: Tensor, g: Tensor, geometry: Geometry, norm: int) -> Tensor:
    """Measure every sample's gradient: the sum of |coordinate|^norm, in float64."""
    m, tiles, block_o, arguments = _launch(x, g, geometry, 64)
    out = torch.empty(m, tiles * block_o, dtype=torch.float64, device=x.device)
    _conv_powers[(m, tiles)](x, g, out, *arguments, norm, num_warps=4)
    return out.sum(1)


_PART = 64  # samples that a program adds up, at most


def conv_clipped_sum(
    x: Tensor, g: Tensor, geometry: Geometry, scale: Tensor, bound: Tensor | None, norm: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Sum as ``clipping.clipped_sum`` what ``conv_weight`` would write, and what ``conv_powers`` says of it.

    Returns:
        The sum, out x kernel x (in / groups); coordinates cut of every sample; the power of every sample, measured on
        what was scaled and added.
    """
    m, tiles, block_o, arguments = _launch(x, g, geometry, 64)
    part = min(_PART, triton.next_power_of_2(m))
    parts = triton.cdiv(m, part)
    shape = (parts, g.shape[1], *geometry.kernel, x.shape[1] // geometry.groups)
    out = torch.empty(shape, dtype=torch.float64, device=x.device)
    cut = torch.zeros(m, tiles * block_o, dtype=torch.int32, device=x.device)
    powers = torch.empty(m, tiles * block_o, dtype=torch.float64, device=x.device)
    bounds = scale if bound is None else bound
    _conv_clipped_sum[(tiles, parts)](
        x, g, scale, bounds, out, cut, powers, m, *arguments, norm, bound is not None, part, num_warps=4
    )
    return out.sum(0), cut.sum(1), powers.sum(1)

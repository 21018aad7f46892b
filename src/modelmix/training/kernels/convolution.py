"""Triton: the weight gradient of every sample of a convolution, in one launch.

For sample n and output channel o, the gradient is a sum over positions q of g[n, o, q] * x[n, i, q * stride + tap]: a
small matrix product for every sample. One program computes one tile of it, with the windows read from the image as
they are needed, so that nothing but the result is written. Sums are kept in float32.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from modelmix.training.kernels.sizes import next_power_of_two


@triton.jit
def _conv_weight(
    x,
    g,
    out,
    xn,
    xc,
    xh,
    xw,
    gn,
    gc,
    gh,
    gw,
    H: tl.constexpr,
    W: tl.constexpr,
    OH: tl.constexpr,
    OW: tl.constexpr,
    CI: tl.constexpr,
    CIP: tl.constexpr,
    CO: tl.constexpr,
    KH: tl.constexpr,
    KW: tl.constexpr,
    SH: tl.constexpr,
    SW: tl.constexpr,
    PH: tl.constexpr,
    PW: tl.constexpr,
    DH: tl.constexpr,
    DW: tl.constexpr,
    GROUPS: tl.constexpr,
    COPIES: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK_O: tl.constexpr,
    BLOCK_J: tl.constexpr,
    BLOCK_Q: tl.constexpr,
):
    n = tl.program_id(0).to(tl.int64)
    j_blocks = tl.cdiv(KH * KW * CIP, BLOCK_J)
    o_blocks = tl.cdiv(CO, BLOCK_O)
    tile = tl.program_id(1)
    group = tile // (j_blocks * o_blocks)
    o = (tile // j_blocks) % o_blocks * BLOCK_O + tl.arange(0, BLOCK_O)
    j = tile % j_blocks * BLOCK_J + tl.arange(0, BLOCK_J)
    tap = j // CIP
    i = j % CIP
    kh = tap // KW
    kw = tap % KW
    right_j = (tap < KH * KW) & (i < CI)
    right_o = o < CO
    x += n * COPIES * xn + group * CI * xc
    g += n * COPIES * gn + group * CO * gc
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
    row = out + ((n * GROUPS + group) * CO + o)[:, None] * (KH * KW * CI) + (tap * CI + i)[None, :]
    tl.store(row, sums.to(out.dtype.element_ty), mask=right_o[:, None] & right_j[None, :])


def _blocks(inside: int, outside: int, taps: int, positions: int) -> tuple[int, int, int, int, int]:
    """(padded channels, BLOCK_O, BLOCK_J, BLOCK_Q, warps)"""
    padded = next_power_of_two(inside) if inside < 16 else -(-inside // 16) * 16
    block_o = min(64, max(16, next_power_of_two(outside)))
    block_j = min(256 if block_o <= 16 else 128, max(16, next_power_of_two(taps * padded)))
    block_q = min(64, max(16, next_power_of_two(positions)))
    return padded, block_o, block_j, block_q, 4


def conv_weight(
    x: Tensor,
    g: Tensor,
    kernel: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    groups: int,
    copies: int,
    config: tuple[int, int, int, int] | None = None,
) -> Tensor:
    """m x out x kernel x (in / groups), in float32.

    Args:
        x: m * copies images, channels second; g: the gradient of the loss with respect to the layer's output.
    """
    rows, channels, height, width = x.shape
    m, outside, inside, taps = rows // copies, g.shape[1], channels // groups, kernel[0] * kernel[1]
    out = torch.empty(m, outside, *kernel, inside, dtype=torch.float32, device=x.device)
    if not out.numel():
        return out
    padded, block_o, block_j, block_q, warps = _blocks(
        inside, outside // groups, taps, copies * g.shape[2] * g.shape[3]
    )
    if config is not None:
        block_o, block_j, block_q, warps = config
    tiles = groups * triton.cdiv(outside // groups, block_o) * triton.cdiv(taps * padded, block_j)
    _conv_weight[(m, tiles)](
        x,
        g,
        out,
        *x.stride(),
        *g.stride(),
        height,
        width,
        g.shape[2],
        g.shape[3],
        inside,
        padded,
        outside // groups,
        *kernel,
        *stride,
        *padding,
        *dilation,
        groups,
        copies,
        "tf32x3" if x.dtype == torch.float32 else "ieee",
        block_o,
        block_j,
        block_q,
        num_warps=warps,
    )
    return out

"""Triton: GroupNorm, whose backward pass has every sample's gradients of scale and shift as by-products."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def _group_norm(
    x, weight, bias, y, means, scales, xn, xc, xh, xw, yn, yc, yh, yw, eps, W: tl.constexpr, P: tl.constexpr,
    C: tl.constexpr, GROUPS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    n = tl.program_id(0).to(tl.int64)
    c = tl.arange(0, C)
    x += n * xn
    y += n * yn
    # Sums of differences from one pixel of each channel: squares of what is far from 0 would cancel.
    pivot = tl.load(x + c * xc).to(tl.float32)
    first = tl.zeros((BLOCK, C), dtype=tl.float32)
    second = tl.zeros((BLOCK, C), dtype=tl.float32)
    for start in range(0, P, BLOCK):
        q = start + tl.arange(0, BLOCK)
        there = (q // W * xh + q % W * xw)[:, None] + (c * xc)[None, :]
        value = tl.load(x + there, mask=(q < P)[:, None], other=0.0).to(tl.float32)
        value = tl.where((q < P)[:, None], value - pivot[None, :], 0.0)
        first += value
        second += value * value
    sums = tl.sum(first, 0)
    inside = tl.sum(tl.reshape(tl.sum(second, 0) - sums * sums / P, (GROUPS, C // GROUPS)), 1)
    mean_c = tl.reshape(pivot + sums / P, (GROUPS, C // GROUPS))
    mean = tl.sum(mean_c, 1) / (C // GROUPS)
    away = mean_c - mean[:, None]
    scale = 1.0 / tl.sqrt((inside + P * tl.sum(away * away, 1)) / (P * (C // GROUPS)) + eps)
    group = tl.arange(0, GROUPS)
    tl.store(means + n * GROUPS + group, mean)
    tl.store(scales + n * GROUPS + group, scale)
    of_channel = tl.zeros((GROUPS, C // GROUPS), dtype=tl.float32)
    mean = tl.reshape(of_channel + mean[:, None], (C,))
    slope = tl.reshape(of_channel + scale[:, None], (C,)) * tl.load(weight + c).to(tl.float32)
    shift = tl.load(bias + c).to(tl.float32)
    for start in range(0, P, BLOCK):
        q = start + tl.arange(0, BLOCK)
        there = (q // W * xh + q % W * xw)[:, None] + (c * xc)[None, :]
        value = tl.load(x + there, mask=(q < P)[:, None], other=0.0).to(tl.float32)
        value = (value - mean[None, :]) * slope[None, :] + shift[None, :]
        there = (q // W * yh + q % W * yw)[:, None] + (c * yc)[None, :]
        tl.store(y + there, value.to(y.dtype.element_ty), mask=(q < P)[:, None])


@triton.jit
def _group_norm_backward(
    x, g, weight, means, scales, dx, dweight, dbias, xn, xc, xh, xw, gn, gc, gh, gw, dn, dc, dh, dw, W: tl.constexpr,
    P: tl.constexpr, C: tl.constexpr, GROUPS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    n = tl.program_id(0).to(tl.int64)
    c = tl.arange(0, C)
    x += n * xn
    g += n * gn
    dx += n * dn
    group = tl.arange(0, GROUPS)
    of_channel = tl.zeros((GROUPS, C // GROUPS), dtype=tl.float32)
    mean = tl.reshape(of_channel + tl.load(means + n * GROUPS + group)[:, None], (C,))
    scale = tl.reshape(of_channel + tl.load(scales + n * GROUPS + group)[:, None], (C,))
    for_weight = tl.zeros((BLOCK, C), dtype=tl.float32)
    for_bias = tl.zeros((BLOCK, C), dtype=tl.float32)
    for start in range(0, P, BLOCK):
        q = start + tl.arange(0, BLOCK)
        right = (q < P)[:, None]
        there = (q // W * xh + q % W * xw)[:, None] + (c * xc)[None, :]
        value = (tl.load(x + there, mask=right, other=0.0).to(tl.float32) - mean[None, :]) * scale[None, :]
        there = (q // W * gh + q % W * gw)[:, None] + (c * gc)[None, :]
        back = tl.load(g + there, mask=right, other=0.0).to(tl.float32)
        for_weight += back * value
        for_bias += back
    sum_weight = tl.sum(for_weight, 0)
    sum_bias = tl.sum(for_bias, 0)
    tl.store(dweight + n * C + c, sum_weight)
    tl.store(dbias + n * C + c, sum_bias)
    factor = tl.load(weight + c).to(tl.float32)
    per = P * (C // GROUPS)
    along = tl.sum(tl.reshape(sum_weight * factor, (GROUPS, C // GROUPS)), 1) / per
    level = tl.sum(tl.reshape(sum_bias * factor, (GROUPS, C // GROUPS)), 1) / per
    along = tl.reshape(of_channel + along[:, None], (C,))
    level = tl.reshape(of_channel + level[:, None], (C,))
    for start in range(0, P, BLOCK):
        q = start + tl.arange(0, BLOCK)
        right = (q < P)[:, None]
        there = (q // W * xh + q % W * xw)[:, None] + (c * xc)[None, :]
        value = (tl.load(x + there, mask=right, other=0.0).to(tl.float32) - mean[None, :]) * scale[None, :]
        there = (q // W * gh + q % W * gw)[:, None] + (c * gc)[None, :]
        back = tl.load(g + there, mask=right, other=0.0).to(tl.float32)
        value = (back * factor[None, :] - level[None, :] - value * along[None, :]) * scale[None, :]
        there = (q // W * dh + q % W * dw)[:, None] + (c * dc)[None, :]
        tl.store(dx + there, value.to(dx.dtype.element_ty), mask=right)


_TILE = 4096  # values of an image that a program of eight warps holds at once


def group_norm(x: Tensor, weight: Tensor, bias: Tensor, groups: int, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    """Run GroupNorm on images whose numbers of channels and groups are powers of two; also give means and scales."""
    n, channels, height, width = x.shape
    y = torch.empty_like(x)
    mean, scale = (torch.empty(n, groups, dtype=torch.float32, device=x.device) for _ in range(2))
    shape = (width, height * width, channels, groups, max(1, _TILE // channels))
    _group_norm[(n,)](x, weight, bias, y, mean, scale, *x.stride(), *y.stride(), eps, *shape, num_warps=8)
    return y, mean, scale


def group_norm_backward(
    x: Tensor, g: Tensor, weight: Tensor, mean: Tensor, scale: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute the gradient of the image, and for every image those of the weight and the bias, in float32."""
    n, channels, height, width = x.shape
    dx = torch.empty_like(x)
    dweight, dbias = (torch.empty(n, channels, dtype=torch.float32, device=x.device) for _ in range(2))
    shape = (width, height * width, channels, mean.shape[1], max(1, _TILE // channels))
    _group_norm_backward[(n,)](
        x, g, weight, mean, scale, dx, dweight, dbias, *x.stride(), *g.stride(), *dx.stride(), *shape, num_warps=8
    )
    return dx, dweight, dbias

"""GroupNorm by our kernels, whose backward pass has every sample's own gradients as by-products."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from modelmix.gradients import kernels

Collect = Callable[[Tensor, Tensor], None]


def group_norm(x: Tensor, weight: Tensor, bias: Tensor, groups: int, eps: float, collect: Collect) -> Tensor:
    """Compute ``F.group_norm``; ``collect`` is given the gradients of weight and bias, one row for every row of x."""
    out: Tensor = _GroupNorm.apply(x, weight, bias, groups, eps, collect)  # type: ignore[no-untyped-call]
    return out


class _GroupNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, groups: int, eps: float, collect: Collect) -> Tensor:
        y, mean, scale = kernels.group_norm(x, weight, bias, groups, eps)
        ctx.save_for_backward(x, weight, mean, scale)
        ctx.collect = collect
        out: Tensor = y
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        x, weight, mean, scale = ctx.saved_tensors
        with torch.no_grad():
            dx, dweight, dbias = kernels.group_norm_backward(x, gradients[0], weight, mean, scale)
            ctx.collect(dweight, dbias)
        return dx, None, None, None, None, None

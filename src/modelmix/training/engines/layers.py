"""Per-sample gradients of single layers from what entered them and what came back.

A rule takes the layer, its input x and the gradient g of the loss with respect to its output, both with samples first
(m * copies rows, the copies of a sample next to each other), and returns for every trained parameter of the layer an
m x (shape) tensor: the gradient of each sample, summed over its copies.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F  # noqa: N812, the name everybody knows
from torch import Tensor, nn
from torch.func import functional_call, vjp, vmap

Rule = Callable[[nn.Module, Tensor, Tensor, int], dict[str, Tensor]]


def _samples(t: Tensor, copies: int) -> Tensor:
    """m * copies x ... -> m x copies * (positions) x (last)"""
    return t.reshape(t.shape[0] // copies, -1, t.shape[-1])


def linear(layer: nn.Module, x: Tensor, g: Tensor, copies: int) -> dict[str, Tensor]:
    a, b = _samples(x, copies), _samples(g, copies)
    return {"weight": torch.bmm(b.transpose(1, 2), a), "bias": b.sum(1)}


def conv2d(layer: nn.Module, x: Tensor, g: Tensor, copies: int) -> dict[str, Tensor]:
    assert isinstance(layer, nn.Conv2d)
    mode = "constant" if layer.padding_mode == "zeros" else layer.padding_mode
    x = F.pad(x, layer._reversed_padding_repeated_twice, mode=mode)
    m, groups = x.shape[0] // copies, layer.groups
    b = g.reshape(m, copies, groups, g.shape[1] // groups, -1).transpose(1, 2)  # m, groups, copies, out, positions
    windows = _windows(x, layer, (g.shape[2], g.shape[3]))  # m * copies, in, kh, kw, rows, columns
    a = windows.reshape(m, copies, groups, -1, g.shape[2] * g.shape[3]).transpose(1, 2)
    weight = torch.einsum("mgkop,mgkip->mgoi", b, a) if copies > 1 else b[:, :, 0] @ a[:, :, 0].transpose(-1, -2)
    return {"weight": weight.reshape(m, *layer.weight.shape), "bias": b.sum((2, 4)).reshape(m, -1)}


def _windows(x: Tensor, layer: nn.Conv2d, size: tuple[int, int]) -> Tensor:
    """Every window a kernel sees, as a view: no copy, and no launch per sample as with ``F.unfold`` on a GPU."""
    n, c, h, w = x.stride()
    (kh, kw), (sh, sw), (dh, dw) = layer.kernel_size, layer.stride, layer.dilation
    shape = (x.shape[0], x.shape[1], kh, kw, *size)
    return x.as_strided(shape, (n, c, h * dh, w * dw, h * sh, w * sw))


def group_norm(layer: nn.Module, x: Tensor, g: Tensor, copies: int) -> dict[str, Tensor]:
    assert isinstance(layer, nn.GroupNorm)
    shape = (x.shape[0] // copies, copies, x.shape[1], -1)
    product = g * F.group_norm(x, layer.num_groups, eps=layer.eps)
    return {"weight": product.reshape(shape).sum((1, 3)), "bias": g.reshape(shape).sum((1, 3))}


def layer_norm(layer: nn.Module, x: Tensor, g: Tensor, copies: int) -> dict[str, Tensor]:
    assert isinstance(layer, nn.LayerNorm)
    shape = (x.shape[0] // copies, -1, *layer.normalized_shape)
    product = g * F.layer_norm(x, layer.normalized_shape, eps=layer.eps)
    return {"weight": product.reshape(shape).sum(1), "bias": g.reshape(shape).sum(1)}


def embedding(layer: nn.Module, x: Tensor, g: Tensor, copies: int) -> dict[str, Tensor]:
    assert isinstance(layer, nn.Embedding)
    m = x.shape[0] // copies
    index = x.reshape(m, -1)
    g = g.reshape(m, index.shape[1], -1)
    if layer.padding_idx is not None:
        g = g * (index != layer.padding_idx)[:, :, None]
    out = g.new_zeros(m, *layer.weight.shape)
    return {"weight": out.scatter_add_(1, index[:, :, None].expand_as(g), g)}


def any_layer(layer: nn.Module, x: Tensor, g: Tensor, copies: int) -> dict[str, Tensor]:
    """Any module of one tensor in and one out: its own backward pass, one sample at a time through ``vmap``."""
    own = {name: p.detach() for name, p in layer.named_parameters(recurse=False) if p.requires_grad}

    def one(x: Tensor, g: Tensor) -> dict[str, Tensor]:
        back = vjp(lambda parameters: functional_call(layer, parameters, (x[None],)), own)[1]
        found: dict[str, Tensor] = back(g[None])[0]
        return found

    rows = vmap(one, randomness="error")(x, g)
    return {name: t.reshape(-1, copies, *t.shape[1:]).sum(1) for name, t in rows.items()}


RULES: dict[type[nn.Module], Rule] = {
    nn.Linear: linear,
    nn.Conv2d: conv2d,
    nn.GroupNorm: group_norm,
    nn.LayerNorm: layer_norm,
    nn.Embedding: embedding,
}


def rule_for(layer: nn.Module) -> Rule:
    """The rule of exactly this class; a subclass may compute something else with the same parameters."""
    rule = RULES.get(type(layer), any_layer)
    names = {name for name, _ in layer.named_parameters(recurse=False)}
    special = isinstance(layer, nn.Embedding) and (layer.max_norm is not None or layer.scale_grad_by_freq)
    return rule if names <= {"weight", "bias"} and not special else any_layer

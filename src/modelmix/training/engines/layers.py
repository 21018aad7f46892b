"""Per-sample gradients of single layers from what entered them and what came back.

A rule takes the layer, its input x and the gradient g of the loss with respect to its output, both with samples first
(m * copies rows, the rows of a sample next to each other), and returns for every trained parameter of the layer an
m x (shape) tensor: the gradient of each sample, summed over its rows. No rule looks at the values of the parameters.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F  # noqa: N812, the name everybody knows
from torch import Tensor, nn
from torch.func import functional_call, vjp, vmap

from modelmix.errors import ModelMixError
from modelmix.training.engines.universal import any_speed

Rule = Callable[[nn.Module, Tensor, Tensor, int], dict[str, Tensor]]

_CACHE = 2 * 2**20  # bytes of windows that a processor core copies at once


def _samples(t: Tensor, copies: int) -> Tensor:
    """m * copies x ... -> m x copies * (positions) x (last)"""
    return t.reshape(t.shape[0] // copies, copies * t.shape[1:-1].numel(), t.shape[-1])


def linear(layer: nn.Module, x: Tensor, g: Tensor, copies: int) -> dict[str, Tensor]:
    a, b = _samples(x, copies), _samples(g, copies)
    # One position is an outer product, for which a plain product is several times faster.
    weight = b.transpose(1, 2) * a if a.shape[1] == 1 else torch.bmm(b.transpose(1, 2), a)
    return {"weight": weight, "bias": b.sum(1)}


def conv2d(layer: nn.Module, x: Tensor, g: Tensor, copies: int) -> dict[str, Tensor]:
    assert isinstance(layer, nn.Conv2d)
    mode = "constant" if layer.padding_mode == "zeros" else layer.padding_mode
    x = F.pad(x, layer._reversed_padding_repeated_twice, mode=mode)
    m, groups = x.shape[0] // copies, layer.groups
    weight = x.new_empty(m, *layer.weight.shape)
    positions = g.shape[2] * g.shape[3]
    b = g.reshape(m, copies, groups, layer.out_channels // groups, positions)
    inside = layer.weight.shape[1:].numel()  # entries of a window, within one group
    row = copies * groups * inside * positions * x.element_size()
    block = max(1, _CACHE * min(4, torch.get_num_threads()) // max(1, row)) if x.device.type == "cpu" else m
    for start in range(0, m, block):
        part = slice(start, min(start + block, m))
        windows = _windows(x[start * copies : part.stop * copies], layer, (g.shape[2], g.shape[3]))
        a = windows.reshape(part.stop - start, copies, groups, inside, positions)
        weight[part] = torch.einsum("mkgop,mkgip->mgoi", b[part], a).reshape(weight[part].shape)
    return {"weight": weight, "bias": b.sum((1, 4)).reshape(m, -1)}


def _windows(x: Tensor, layer: nn.Conv2d, size: tuple[int, int]) -> Tensor:
    """Every window a kernel sees, as a view: no copy, and no launch per sample as with ``F.unfold`` on a GPU."""
    n, c, h, w = x.stride()
    (kh, kw), (sh, sw), (dh, dw) = layer.kernel_size, layer.stride, layer.dilation
    shape = (x.shape[0], x.shape[1], kh, kw, *size)
    return x.as_strided(shape, (n, c, h * dh, w * dw, h * sh, w * sw))


def group_norm(layer: nn.Module, x: Tensor, g: Tensor, copies: int) -> dict[str, Tensor]:
    assert isinstance(layer, nn.GroupNorm)
    shape = (x.shape[0] // copies, copies, x.shape[1], x.shape[2:].numel())
    product = g * F.group_norm(x, layer.num_groups, eps=layer.eps)
    return {"weight": product.reshape(shape).sum((1, 3)), "bias": g.reshape(shape).sum((1, 3))}


def layer_norm(layer: nn.Module, x: Tensor, g: Tensor, copies: int) -> dict[str, Tensor]:
    assert isinstance(layer, nn.LayerNorm)
    positions = copies * x.shape[1 : x.dim() - len(layer.normalized_shape)].numel()
    shape = (x.shape[0] // copies, positions, *layer.normalized_shape)
    product = g * F.layer_norm(x, layer.normalized_shape, eps=layer.eps)
    return {"weight": product.reshape(shape).sum(1), "bias": g.reshape(shape).sum(1)}


def embedding(layer: nn.Module, x: Tensor, g: Tensor, copies: int) -> dict[str, Tensor]:
    assert isinstance(layer, nn.Embedding)
    index = _samples(x.long()[..., None], copies)
    g = _samples(g, copies)
    if layer.padding_idx is not None:
        g = g * (index != layer.padding_idx)
    out = g.new_zeros(g.shape[0], *layer.weight.shape)
    return {"weight": out.scatter_add_(1, index.expand_as(g), g)}


RULES: dict[type[nn.Module], Rule] = {
    nn.Linear: linear,
    nn.Conv2d: conv2d,
    nn.GroupNorm: group_norm,
    nn.LayerNorm: layer_norm,
    nn.Embedding: embedding,
}


def rule_for(layer: nn.Module) -> Rule | None:
    """The rule of exactly this class, if there is one; a subclass may compute something else with its parameters."""
    names = {name for name, _ in layer.named_parameters(recurse=False)}
    special = isinstance(layer, nn.Embedding) and (layer.max_norm is not None or layer.scale_grad_by_freq)
    return RULES.get(type(layer)) if names <= {"weight", "bias"} and not special else None


class _Bare(nn.Module):
    """A layer without the hooks on it: what was captured lies between them."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.layer.forward(x)
        return out


def any_layer(layer: nn.Module, values: dict[str, Tensor], x: Tensor, g: Tensor, copies: int) -> dict[str, Tensor]:
    """Any module of one tensor in and one out: its own backward pass, one row at a time through ``vmap``.

    Args:
        values: of the layer's trained parameters, at which the gradient is taken.
    """
    if any(p.requires_grad for child in layer.children() for p in child.parameters()):
        raise cannot_follow(layer, "it owns trained parameters beside those of the layers within it")
    if layer._forward_pre_hooks:
        raise cannot_follow(layer, "something runs before it and may change it")

    def one(x: Tensor, g: Tensor) -> dict[str, Tensor]:
        own = {f"layer.{name}": value for name, value in values.items()}
        back = vjp(lambda parameters: functional_call(_Bare(layer), parameters, (x[None],)), own)[1]
        found: dict[str, Tensor] = back(g[None])[0]
        return found

    with any_speed():
        rows = vmap(one, randomness="error")(x, g)
    return {name.removeprefix("layer."): t.reshape(-1, copies, *t.shape[1:]).sum(1) for name, t in rows.items()}


def cannot_follow(layer: nn.Module, why: str) -> ModelMixError:
    return ModelMixError(f'the hook engine cannot follow {type(layer).__name__}: {why}; use engine="universal".')

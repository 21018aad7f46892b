"""Per-sample gradients of single layers from what entered them and what came back.

A rule takes the layer, the values of its trained parameters, its input x and the gradient g of the loss with respect to
its output, both with samples first (m * copies rows, the rows of a sample next to each other), and returns for every
trained parameter of the layer the gradient of each sample, summed over its rows. Sums are kept in float32 or wider.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeGuard, TypeVar

import torch
import torch.nn.functional as F  # noqa: N812, the name everybody knows
from torch import Tensor, nn
from torch.func import functional_call, vjp, vmap

from modelmix.errors import ModelMixError
from modelmix.gradients import forms, kernels
from modelmix.gradients.forms import ConvGradients, DenseGradients, Gradients, OuterGradients, SparseRowGradients
from modelmix.gradients.kernels import autotune
from modelmix.gradients.vmap import ignore_vmap_slowness

Values = dict[str, Tensor]
Rule = Callable[[nn.Module, Values, Tensor, Tensor, int], dict[str, Gradients]]

_CACHE = 2 * 2**20  # bytes of windows that a CPU core copies at once
_LONGEST = 1024  # positions whose repetitions are found by comparing each with each


def _samples(t: Tensor, copies: int) -> Tensor:
    """Reshape m * copies x ... to m x copies * (positions) x (last)."""
    return t.reshape(t.shape[0] // copies, copies * t.shape[1:-1].numel(), t.shape[-1])


def to_float32(t: Tensor) -> Tensor:
    """Widen to float32 what comes in less."""
    return t.float() if t.dtype in (torch.bfloat16, torch.float16) else t


def linear(layer: nn.Module, values: Values, x: Tensor, g: Tensor, copies: int) -> dict[str, Gradients]:
    a, b = _samples(x, copies), _samples(g, copies)
    if a.shape[1] == 1:
        back = to_float32(b[:, 0])
        return {"weight": OuterGradients(back, a[:, 0]), "bias": DenseGradients(back)}
    bias = DenseGradients(to_float32(b).sum(1))
    if forms.has_kernels(a) and a.dtype != torch.float16:  # whose range is too small to be written down in
        return {"weight": DenseGradients(kernels.products(b.transpose(1, 2), a), materialized=True), "bias": bias}
    return {"weight": DenseGradients(torch.bmm(to_float32(b.transpose(1, 2)), to_float32(a))), "bias": bias}


def standardised(
    layer: nn.Conv2d, values: Values, unit: Tensor, factor: Tensor, before: Tensor, x: Tensor, g: Tensor, copies: int
) -> dict[str, Gradients]:
    """Take a convolution with kernels gain * (W - mean) * r, r = 1 / sqrt(fan_in * (variance + eps)), by our kernel.

    With G the gradient of the used kernel, that of W is gain * r * (G - mean(G) - <G, unit> * unit), row by row. Both
    numbers of a row come from images, without G: its sum is that of g times the sums over windows of x, and <G, unit>,
    the gradient of the gain, that of g times what the layer gives without gain and bias.

    Args:
        unit: (W - mean) * r, out x in x kernel; factor: gain * r, one number for every output channel.
        before: the layer's output without gain and bias.
    """
    m, (height, width) = x.shape[0] // copies, layer.kernel_size
    padding = [int(k) for k in layer.padding]
    # Of all that a window holds, zeros of the padding included.
    mean = F.avg_pool2d(to_float32(x).sum(1, keepdim=True), layer.kernel_size, layer.stride, padding) / x.shape[1]
    back = to_float32(g)

    def summed(t: Tensor) -> Tensor:
        return t.sum((2, 3)).reshape(m, copies, -1).sum(1)

    slope, bias = summed(back * to_float32(before)), summed(back)
    geometry = kernels.Geometry.of([height, width, *layer.stride, *padding, 1, 1, 1, copies])
    found, squares = kernels.conv_standardised(
        x,
        g.to(x.dtype),
        geometry.numbers(),
        to_float32(factor),
        to_float32(unit).movedim(1, -1).contiguous(),
        summed(back * mean),
        slope,
    )
    return {
        "weight": DenseGradients(found.movedim(-1, 2), True, squares),
        "gain": DenseGradients(slope),
        "bias": DenseGradients(bias),
    }


def convolution(layer: nn.Module, values: Values, x: Tensor, g: Tensor, copies: int) -> dict[str, Gradients]:
    """Take a convolution in one or two dimensions, with any stride, padding, dilation and groups."""
    assert isinstance(layer, nn.Conv1d | nn.Conv2d)
    left_right = list(layer._reversed_padding_repeated_twice)  # of the last dimension first
    padding = left_right[::-2]
    if layer.padding_mode != "zeros" or left_right[::2] != left_right[1::2]:
        mode = "constant" if layer.padding_mode == "zeros" else layer.padding_mode
        x, padding = F.pad(x, left_right, mode=mode), [0] * len(padding)
    kernel, stride, dilation = layer.kernel_size, layer.stride, layer.dilation
    if isinstance(layer, nn.Conv1d):  # an image of one line
        x, g = x[:, :, None], g[:, :, None]
        kernel, stride, padding, dilation = (1, *kernel), (1, *stride), [0, *padding], (1, *dilation)
    out: dict[str, Gradients] = {}
    if layer.bias is not None:
        out["bias"] = DenseGradients(to_float32(g).reshape(x.shape[0] // copies, copies, g.shape[1], -1).sum((1, 3)))
    geometry = kernels.Geometry.of([*kernel, *stride, *padding, *dilation, layer.groups, copies])
    if forms.has_kernels(x):
        found = ConvGradients(x, g.to(x.dtype), geometry, isinstance(layer, nn.Conv1d))
        twice = autotune.recomputing_is_faster(x, found.back, geometry)
        return {"weight": found if twice else found.to_dense(), **out}
    weight = _conv_weight(x, g, geometry)
    return {"weight": DenseGradients(weight[:, :, :, 0] if isinstance(layer, nn.Conv1d) else weight), **out}


def transposed_convolution(layer: nn.Module, values: Values, x: Tensor, g: Tensor, copies: int) -> dict[str, Gradients]:
    """Take a convolution run backwards: for its weight, what went in and what came back change places."""
    assert isinstance(layer, nn.ConvTranspose1d | nn.ConvTranspose2d)
    m = x.shape[0] // copies
    bias = (
        {"bias": DenseGradients(to_float32(g).reshape(m, copies, g.shape[1], -1).sum((1, 3)))}
        if layer.bias is not None
        else {}
    )
    kernel, stride, padding, dilation = layer.kernel_size, layer.stride, layer.padding, layer.dilation
    line = isinstance(layer, nn.ConvTranspose1d)
    if line:
        x, g = x[:, :, None], g[:, :, None]
        kernel, stride, padding, dilation = (1, *kernel), (1, *stride), (0, *padding), (1, *dilation)
    geometry = kernels.Geometry.of([*kernel, *stride, *map(int, padding), *dilation, layer.groups, copies])
    weight = _conv_weight(g, x, geometry)
    return {"weight": DenseGradients(weight[:, :, :, 0] if line else weight), **bias}


def _conv_weight(x: Tensor, g: Tensor, geometry: kernels.Geometry) -> Tensor:
    """Compute without kernels: windows of the image and matrix products."""
    kernel, stride, padding, dilation, groups, copies = geometry
    x, g = to_float32(x), to_float32(g)
    x = F.pad(x, (padding[1], padding[1], padding[0], padding[0]))
    m, positions = x.shape[0] // copies, g.shape[2] * g.shape[3]
    weight = x.new_empty(m, g.shape[1], x.shape[1] // groups, *kernel)
    b = g.reshape(m, copies, groups, g.shape[1] // groups, positions)
    inside = weight.shape[2:].numel()  # entries of a window, within one group
    row = copies * groups * inside * positions * x.element_size()
    block = max(1, _CACHE * min(4, torch.get_num_threads()) // max(1, row)) if x.device.type == "cpu" else m
    n, c, h, w = x.stride()
    for start in range(0, m, block):
        part = slice(start, min(start + block, m))
        # Every window a kernel sees, as a view: no launch per sample as with ``F.unfold`` on a GPU.
        windows = x[start * copies : part.stop * copies].as_strided(
            ((part.stop - start) * copies, x.shape[1], *kernel, *g.shape[2:]),
            (n, c, h * dilation[0], w * dilation[1], h * stride[0], w * stride[1]),
        )
        a = windows.reshape(part.stop - start, copies, groups, inside, positions)
        weight[part] = torch.einsum("mkgop,mkgip->mgoi", b[part], a).reshape(weight[part].shape)
    return weight


def reparametrised(layer: nn.Module, values: Values, x: Tensor, g: Tensor, copies: int) -> dict[str, Gradients]:
    """Take a convolution with ``used_weight(weight, ...)`` of its parameters: gradients go back through that function.

    Weight standardisation is one (``modelmix.models.residual.StandardisedConv2d``).
    """
    found = convolution(layer, values, x, g, copies)
    names = _of_used_weight(layer)
    used: Callable[..., Tensor] = layer.used_weight  # type: ignore[assignment]
    back = vjp(used, *(to_float32(values.get(name, getattr(layer, name)).detach()) for name in names))[1]
    through = vmap(back)(to_float32(found["weight"].dense()))
    return {**found, **{name: DenseGradients(t) for name, t in zip(names, through, strict=True)}}


def _of_used_weight(layer: nn.Module) -> list[str]:
    """List the parameters that a convolution's weight is computed from, where a class of ours computes it.

    Anybody else's function is run within the pass that is traced, as any other layer is.
    """
    if not type(layer).__module__.startswith("modelmix."):
        return []
    compute = getattr(layer, "used_weight", None) if isinstance(layer, nn.Conv1d | nn.Conv2d) else None
    return [] if compute is None else list(inspect.signature(compute).parameters)


def _affine(product: Tensor, g: Tensor, shape: tuple[int, ...], dims: tuple[int, ...]) -> dict[str, Gradients]:
    """Sum the gradients of a scale and a shift over ``dims`` of ``shape``."""
    return {
        "weight": DenseGradients(product.reshape(shape).sum(dims)),
        "bias": DenseGradients(g.reshape(shape).sum(dims)),
    }


def group_norm(layer: nn.Module, values: Values, x: Tensor, g: Tensor, copies: int) -> dict[str, Gradients]:
    assert isinstance(layer, nn.GroupNorm)
    x, g = to_float32(x), to_float32(g)
    shape = (x.shape[0] // copies, copies, x.shape[1], x.shape[2:].numel())
    return _affine(g * F.group_norm(x, layer.num_groups, eps=layer.eps), g, shape, (1, 3))


def instance_norm(layer: nn.Module, values: Values, x: Tensor, g: Tensor, copies: int) -> dict[str, Gradients]:
    assert isinstance(layer, nn.modules.instancenorm._InstanceNorm)
    x, g = to_float32(x), to_float32(g)
    shape = (x.shape[0] // copies, copies, x.shape[1], x.shape[2:].numel())
    return _affine(g * F.instance_norm(x, eps=layer.eps), g, shape, (1, 3))


def layer_norm(layer: nn.Module, values: Values, x: Tensor, g: Tensor, copies: int) -> dict[str, Gradients]:
    assert isinstance(layer, nn.LayerNorm)
    x, g = to_float32(x), to_float32(g)
    positions = copies * x.shape[1 : x.dim() - len(layer.normalized_shape)].numel()
    shape = (x.shape[0] // copies, positions, *layer.normalized_shape)
    return _affine(g * F.layer_norm(x, layer.normalized_shape, eps=layer.eps), g, shape, (1,))


def embedding(layer: nn.Module, values: Values, x: Tensor, g: Tensor, copies: int) -> dict[str, Gradients]:
    assert isinstance(layer, nn.Embedding)
    index = _samples(x.long()[..., None], copies)
    g = to_float32(_samples(g, copies))
    if layer.padding_idx is not None:
        g = g * (index != layer.padding_idx)
    if index.shape[1] <= min(layer.num_embeddings, _LONGEST):
        return {"weight": SparseRowGradients.of(g, index[..., 0], layer.num_embeddings)}
    out = g.new_zeros(g.shape[0], *layer.weight.shape)
    return {"weight": DenseGradients(out.scatter_add(1, index.expand_as(g), g))}


RULES: dict[type[nn.Module], Rule] = {
    nn.Linear: linear,
    nn.Conv1d: convolution,
    nn.Conv2d: convolution,
    nn.ConvTranspose1d: transposed_convolution,
    nn.ConvTranspose2d: transposed_convolution,
    nn.GroupNorm: group_norm,
    nn.InstanceNorm1d: instance_norm,
    nn.InstanceNorm2d: instance_norm,
    nn.InstanceNorm3d: instance_norm,
    nn.LayerNorm: layer_norm,
    nn.Embedding: embedding,
}


def is_standardised(layer: nn.Module) -> TypeGuard[nn.Conv2d]:
    """Whether ``standardised`` is its rule: a convolution that says how its weight is standardised.

    Its method ``standardised(weight)`` gives (W - mean) * r and r; the kernel used is that times ``gain``.
    """
    return (
        isinstance(layer, nn.Conv2d)
        and hasattr(layer, "standardised")
        and _of_used_weight(layer) == ["weight", "gain"]
        and (layer.padding_mode, layer.dilation, layer.groups) == ("zeros", (1, 1), 1)
        and not isinstance(layer.padding, str)
        and all(2 * int(p) <= k for p, k in zip(layer.padding, layer.kernel_size, strict=True))
    )


def rule_for(layer: nn.Module) -> Rule | None:
    """Return the rule of exactly this class, if there is one; a subclass may compute something else."""
    names = {name for name, _ in layer.named_parameters(recurse=False)}
    if computed := _of_used_weight(layer):
        return reparametrised if names <= {*computed, "bias"} else None
    special = isinstance(layer, nn.Embedding) and (layer.max_norm is not None or layer.scale_grad_by_freq)
    return RULES.get(type(layer)) if names <= {"weight", "bias"} and not special else None


def slow_layers(model: nn.Module) -> list[str]:
    """Name the classes of trained layers without a rule: their gradients are taken sample by sample."""
    inside = {m for a in model.modules() if type(a) is nn.MultiheadAttention for m in a.modules()}
    found = (m for m in model.modules() if m not in inside and rule_for(m) is None)
    return sorted({type(m).__name__ for m in found if any(p.requires_grad for p in m.parameters(recurse=False))})


_STATE = ("_parameters", "_buffers", "_modules")
Layer = TypeVar("Layer", bound=nn.Module)


def freeze_settings(layer: Layer) -> Layer:
    """Copy a layer with the settings it has now: what becomes of its own later does not reach a rule.

    A pass that was proved is replayed without the model's code, and rules read eps, padding or groups while it runs.
    Parameters are shared, hooks are left behind.
    """
    twin = copy.copy(layer)
    for name, value in vars(layer).items():
        if name in _STATE:
            vars(twin)[name] = dict(value)
        elif "hook" in name:
            vars(twin)[name] = type(value)() if isinstance(value, dict | set) else value
        else:
            vars(twin)[name] = copy.deepcopy(value) if isinstance(value, list | dict | set) else value
    return twin


class _Bare(nn.Module):
    """A layer without the hooks on it: what was captured lies between them."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.layer.forward(x)
        return out


def vjp_rule(layer: nn.Module, values: Values, x: Tensor, g: Tensor, copies: int) -> dict[str, Gradients]:
    """Take any module of one tensor in and one out: its own backward pass, one row at a time through ``vmap``."""
    if any(p.requires_grad for child in layer.children() for p in child.parameters()):
        raise cannot_follow(layer, "it owns trained parameters beside those of the layers within it")
    if layer._forward_pre_hooks:
        raise cannot_follow(layer, "something runs before it and may change it")

    def one(x: Tensor, g: Tensor) -> dict[str, Tensor]:
        own = {f"layer.{name}": value for name, value in values.items()}
        back = vjp(lambda parameters: functional_call(_Bare(layer), parameters, (x[None],)), own)[1]
        found: dict[str, Tensor] = back(g[None])[0]
        return found

    with ignore_vmap_slowness():
        rows = vmap(one, randomness="error")(x, g)
    summed = {name: to_float32(t).reshape(-1, copies, *t.shape[1:]).sum(1) for name, t in rows.items()}
    return {name.removeprefix("layer."): DenseGradients(t) for name, t in summed.items()}


def cannot_follow(layer: nn.Module, why: str) -> ModelMixError:
    return ModelMixError(f'the hook engine cannot follow {type(layer).__name__}: {why}; use engine="vmap".')


@dataclass(frozen=True)
class LayerCall:
    """Hold one call of a layer in a pass: all that is needed to compute the gradients of its parameters.

    Args:
        names: of its trained parameters; how the model calls each.
        rule: gradients by the layer's own names, from the values of its parameters and what was seen.
        seen: from what, besides the values of the parameters.
    """

    names: Mapping[str, str]
    rule: Callable[..., dict[str, Gradients]]
    seen: tuple[Tensor, ...]

    def gradients(self, parameters: Mapping[str, Tensor]) -> dict[str, Gradients]:
        """Return the gradients by the names of the model, whose parameters have these values."""
        with torch.no_grad():
            found = self.rule({own: parameters[name].detach() for own, name in self.names.items()}, *self.seen)
        return {name: found[own] for own, name in self.names.items()}

    def as_function(self) -> Callable[..., dict[str, Gradients]]:
        """Return the gradients as a function of what was seen and, in front, the values of the parameters in order."""
        rule, names = self.rule, dict(self.names)

        def gradients(values: Sequence[Tensor], *seen: Tensor) -> dict[str, Gradients]:
            found = rule(dict(zip(names, values, strict=True)), *seen)
            return {name: found[own] for own, name in names.items()}

        return gradients


def add_up(found: Iterable[dict[str, Gradients]]) -> dict[str, Gradients]:
    """Add the gradients of several calls with one parameter; one that is not used is missing."""
    total: dict[str, Gradients] = {}
    for one in found:
        for name, g in one.items():
            total[name] = total[name] + g if name in total else g
    return total


def is_ours(rule: Callable[..., Any]) -> bool:
    """Whether nothing of the user's runs when gradients are computed by this rule."""
    return not isinstance(rule, partial) or rule.func is not vjp_rule

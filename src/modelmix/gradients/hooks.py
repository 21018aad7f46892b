"""The hook engine: one ordinary forward and backward pass of the batch, per-sample gradients layer by layer.

It rests on the model treating every sample alone, which ``ProvedPass`` proves before any sample is looked at.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeGuard

import torch
import torch.nn.functional as F  # noqa: N812, the name everybody knows
from torch import Tensor, nn
from torch.func import vmap
from torch.utils._pytree import tree_leaves, tree_map

from modelmix.errors import ModelMixError
from modelmix.gradients import attention, forms, kernels, normalisation
from modelmix.gradients.batch import Batch, Loss, PassResult
from modelmix.gradients.forms import DenseGradients, Gradients
from modelmix.gradients.layers import (
    LayerCall,
    Values,
    add_up,
    cannot_follow,
    freeze_settings,
    is_ours,
    is_standardised,
    linear,
    rule_for,
    standardised,
    vjp_rule,
)
from modelmix.gradients.vmap import call_model_at, to_scalar


class _Patch:
    """Give one module another forward, until it is removed."""

    def __init__(self, module: nn.Module, forward: Callable[..., Any]) -> None:
        self._module = module
        module.forward = forward

    def remove(self) -> None:
        self._module.__dict__.pop("forward", None)


def may_use_group_norm_kernel(module: nn.Module, trained: Mapping[str, str]) -> TypeGuard[nn.GroupNorm]:
    """Whether it is worth asking, input by input, for our kernel: weight and bias are both trained, or neither is."""
    if type(module) is not nn.GroupNorm or set(trained) not in ({"weight", "bias"}, set()):
        return False
    return module.weight is None or _on_device(module.weight)


def _on_device(t: Tensor) -> bool:
    return t.is_cuda


class Capture:
    """Listen to the trained layers and collect the per-sample gradient of every parameter.

    Gradients add up over several calls of a layer, several layers that share a parameter, and several backward passes.

    Args:
        model: the model.
        samples: among which the rows of a layer's input are divided evenly, in order; None: every row is a sample.
        parameters: the values the model is run with, none of which requires a gradient; the first outputs that depend
            on them then become ``leaves`` of the graph. None: the model runs with parameters of its own, which do.
        later: keeps ``calls`` and computes no gradient.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        samples: int | None = None,
        parameters: Mapping[str, Tensor] | None = None,
        later: bool = False,
    ) -> None:
        self.gradients: dict[str, Gradients] = {}
        self.calls: list[LayerCall] = []
        self.leaves: list[Tensor] = []
        self.samples = samples
        self._parameters, self._later = parameters, later
        self._own = {name: p for name, p in model.named_parameters() if p.requires_grad}
        # The one name under which each trained parameter is known, however often it is tied.
        names = {id(p): name for name, p in self._own.items()}
        self._trained = {
            module: {own: names[id(p)] for own, p in module.named_parameters(recurse=False) if id(p) in names}
            for module in model.modules()
        }

    @contextmanager
    def listening(self) -> Iterator[None]:
        handles = self.attach()
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()
            self.leaves.clear()  # leaves know their hooks and these know us: let memory go at once

    def attach(self) -> list[Any]:
        handles: list[Any] = []
        for module, own in self._trained.items():
            patched = "forward" in vars(module)  # by someone else, who knows what it computes
            if type(module) is nn.MultiheadAttention and not patched:
                handles.append(_Patch(module, partial(attention.forward, module, self._project)))
            elif may_use_group_norm_kernel(module, own) and not patched:
                handles.append(_Patch(module, partial(self._group_norm, module)))
            elif own and is_standardised(module) and not patched and _on_device(module.weight):
                handles.append(_Patch(module, partial(self._standardised, module)))
            elif own:
                # In front of other hooks: what they do to an output is not the layer's doing.
                handles.append(module.register_forward_hook(self._forward, prepend=True, with_kwargs=True))
        return handles

    def clear(self) -> None:
        self.gradients.clear()
        self.leaves.clear()

    def _forward(self, module: nn.Module, arguments: tuple[Any, ...], named: dict[str, Any], output: Any) -> Any:
        if not torch.is_grad_enabled():
            return None
        if len(arguments) != 1 or named or not isinstance(arguments[0], Tensor) or not isinstance(output, Tensor):
            raise cannot_follow(module, "it needs layers of one tensor in and one out")
        rule = rule_for(module)
        known = partial(vjp_rule, module) if rule is None else partial(rule, freeze_settings(module))
        return self._follow(module, arguments[0], output, known)

    def _project(self, layer: nn.Module, x: Tensor, weight: str, bias: str, rows: slice) -> Tensor:
        """Multiply some rows of a matrix of ``layer`` by x, for modules that use matrices without calling layers."""
        w, b = getattr(layer, weight), getattr(layer, bias)
        output = F.linear(x, w[rows], None if b is None else b[rows])
        if not torch.is_grad_enabled() or not self._trained[layer]:
            return output

        height = w.shape[0]

        def rule(values: Values, x: Tensor, g: Tensor, copies: int) -> dict[str, Gradients]:
            found = linear(layer, {}, x, g, copies)
            start, stop, _ = rows.indices(height)
            if (start, stop) == (0, height):
                return {weight: found["weight"], bias: found["bias"]}
            above, below = start, height - stop
            return {
                weight: DenseGradients(F.pad(found["weight"].dense(), (0, 0, above, below))),
                bias: DenseGradients(F.pad(found["bias"].dense(), (above, below))),
            }

        followed = self._follow(layer, x, output, rule)
        return output if followed is None else followed

    def _group_norm(self, module: nn.GroupNorm, input: Tensor) -> Tensor:
        groups, eps, samples = module.num_groups, module.eps, self.samples or input.shape[0]
        ours = (
            input.requires_grad
            and forms.has_kernels(input)
            and kernels.takes_group_norm(input, module.num_channels, groups)
        )
        if torch.is_grad_enabled() and ours and input.shape[0] % samples == 0:
            copies = int(input.shape[0] // samples)

            def rule(values: Values, *found: Tensor) -> dict[str, Gradients]:
                gradients = (DenseGradients(t.reshape(-1, copies, t.shape[-1]).sum(1)) for t in found)
                return dict(zip(("weight", "bias"), gradients, strict=True))

            def collect(*found: Tensor) -> None:
                self._add(LayerCall(self._trained[module], rule, found))

            channels = module.num_channels
            weight = input.new_ones(channels) if module.weight is None else module.weight.detach()
            bias = input.new_zeros(channels) if module.bias is None else module.bias.detach()
            return normalisation.group_norm(input, weight, bias, groups, eps, collect)
        output = F.group_norm(input, groups, module.weight, module.bias, eps)
        followed = self._forward(module, (input,), {}, output) if self._trained[module] else None
        return output if followed is None else followed

    def _standardised(self, module: Any, input: Tensor) -> Tensor:
        if not torch.is_grad_enabled() or not forms.has_kernels(input) or input.dim() != 4:
            output: Tensor = type(module).forward(module, input)
            followed = self._forward(module, (input,), {}, output)
            return output if followed is None else followed
        unit, r = (t.detach() for t in module.standardised(module.weight))
        gain = module.gain.detach()
        before = module._conv_forward(input, unit.to(input.dtype), None)
        output = before * gain[:, None, None]
        if module.bias is not None:
            output = output + module.bias.detach()[:, None, None]
        known = (unit, r.flatten() * gain, before.detach())
        followed = self._follow(module, input, output, partial(standardised, module), known)
        return output if followed is None else followed

    def _add(self, call: LayerCall) -> None:
        if self._later:
            if call.names:
                self.calls.append(call if is_ours(call.rule) else self._taken(call))
            return
        for name, found in call.gradients(self._own if self._parameters is None else self._parameters).items():
            self.gradients[name] = self.gradients[name] + found if name in self.gradients else found

    def _taken(self, call: LayerCall) -> LayerCall:
        """Compute the gradients now: a rule that runs the model's own code must be part of the pass."""
        assert self._parameters is not None
        found = call.rule({own: self._parameters[name] for own, name in call.names.items()}, *call.seen)
        names = {own: name for own, name in call.names.items() if own in found}

        def given(values: Values, *found: Tensor) -> dict[str, Gradients]:
            return {own: DenseGradients(g) for own, g in zip(names, found, strict=True)}

        return LayerCall(names, given, tuple(found[own].dense() for own in names))

    def _follow(
        self,
        module: nn.Module,
        x: Tensor,
        output: Tensor,
        rule: Callable[..., dict[str, Gradients]],
        known: tuple[Tensor, ...] = (),
    ) -> Tensor | None:
        """Collect gradients when the backward pass reaches the output; return what must take its place, if any.

        Args:
            rule: of the values of parameters, what is known, input, gradient of the output and copies of a sample.
        """
        x = x.detach()
        version, samples = x._version, self.samples or x.shape[:1].numel()
        returned = None
        if self._parameters is not None and not output.requires_grad:
            output = output.detach().requires_grad_()
            self.leaves.append(output)
            returned = output.clone()  # a layer that works in place may not touch a leaf
        elif output._is_view():
            returned = output.clone()  # and would cut a view, with the hook on it, out of the graph

        def collect(g: Tensor) -> None:
            if x._version != version:
                raise ModelMixError(
                    f"the input of {type(module).__name__} was changed in place after it was used; "
                    'make that operation out of place or use engine="vmap".'
                )
            if x.dim() == 0 or x.shape[0] % samples or g.shape[:1] != x.shape[:1]:
                raise cannot_follow(
                    module, f"its input of shape {tuple(x.shape)} is not {samples} samples, samples first"
                )
            seen = (*known, x.to(g.dtype) if x.is_floating_point() else x, g.detach())
            self._add(LayerCall(self._trained[module], partial(rule, copies=int(x.shape[0] // samples)), seen))

        if output.requires_grad:
            output.register_hook(collect)  # type: ignore[no-untyped-call]
        return returned


@dataclass(frozen=True)
class ObservedPass:
    """Hold what one forward and backward pass over a batch leaves behind.

    Args:
        outputs: of the model.
        losses: of every row.
        calls: what gradients can be computed from, layer by layer.
    """

    outputs: Any
    losses: Tensor
    calls: list[LayerCall]


def observe(model: nn.Module, loss: Loss, parameters: dict[str, Tensor], batch: Batch) -> ObservedPass:
    """Run the model on a batch and keep what its layers saw. Whether samples meet is for the caller to know."""
    fixed = {name: value.detach() for name, value in parameters.items()}
    copies = batch.rows_per_sample
    samples = tree_leaves(batch.inputs)[0].shape[0] // copies  # a symbol while it is traced, of which nobody asks
    capture = Capture(model, samples=samples, parameters=fixed, later=True)
    with torch.enable_grad(), capture.listening():
        outputs = call_model_at(model, fixed, batch.inputs)
        each = _of_each(loss, outputs, batch.targets)
        if each.requires_grad and capture.leaves:
            share = torch.full_like(each, 1 / copies)
            torch.autograd.grad(each, capture.leaves, share, allow_unused=True)
    return ObservedPass(tree_map(_detached, outputs), each.detach(), capture.calls)


def per_sample(model: nn.Module, loss: Loss, parameters: dict[str, Tensor], batch: Batch) -> PassResult:
    """Compute the gradient of every sample by a pass that nobody has proved anything about: for synthetic samples."""
    calls = observe(model, loss, parameters, batch).calls
    return PassResult(add_up(call.gradients(parameters) for call in calls))


def _detached(value: Any) -> Any:
    return value.detach() if isinstance(value, Tensor) else value


def _of_each(loss: Loss, outputs: Any, targets: Any) -> Tensor:
    """Compute the loss of every row."""
    if _is_cross_entropy(loss) and isinstance(outputs, Tensor) and outputs.dim() == 2 and targets.dim() == 1:
        known = loss if isinstance(loss, nn.CrossEntropyLoss) else nn.CrossEntropyLoss()
        return F.cross_entropy(
            outputs, targets, reduction="none", ignore_index=known.ignore_index, label_smoothing=known.label_smoothing
        )
    # Every sample as a batch of one, so that a loss written for batches can be mapped over samples.
    rows = tree_map(lambda t: t[:, None], (outputs, targets))
    found: Tensor = vmap(lambda o, t: to_scalar(loss(o, t)), randomness="different")(*rows)
    return found


def _is_cross_entropy(loss: Loss) -> bool:
    """Whether it is torch's own, whose rows need no mapping: the mean over a batch of one is the row's own loss."""
    if loss is F.cross_entropy:
        return True
    plain = type(loss) is nn.CrossEntropyLoss and loss.reduction == "mean" and loss.weight is None
    return plain and not (loss._forward_hooks or loss._forward_pre_hooks)  # type: ignore[attr-defined]

"""The hook engine: one ordinary forward and backward pass of the batch, per-sample gradients layer by layer.

It rests on the model treating every sample alone, which ``trace.ProvedPass`` proves before any sample is looked at.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
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
from modelmix.gradients import kernels
from modelmix.gradients.engines import attention, normalisation
from modelmix.gradients.engines.layers import (
    Values,
    any_layer,
    cannot_follow,
    frozen,
    is_standardised,
    linear,
    rule_for,
    standardised,
)
from modelmix.gradients.engines.universal import Loss, call_at, one_number
from modelmix.gradients.gradients import Dense, Gradients


class _Patch:
    """Another forward for one module, until it is removed."""

    def __init__(self, module: nn.Module, forward: Callable[..., Any]) -> None:
        self._module = module
        module.forward = forward

    def remove(self) -> None:
        self._module.__dict__.pop("forward", None)


def has_group_norm_kernel(module: nn.Module, trained: Mapping[str, str]) -> TypeGuard[nn.GroupNorm]:
    """Whether it is worth asking, input by input, for our kernel: weight and bias are both trained, or neither is."""
    if type(module) is not nn.GroupNorm or set(trained) not in ({"weight", "bias"}, set()):
        return False
    return module.weight is None or _on_device(module.weight)


def _on_device(t: Tensor) -> bool:
    return t.is_cuda


@dataclass(frozen=True)
class Use:
    """One use of a layer: all that is needed to write its gradients down.

    Args:
        names: of its trained parameters; how the model calls each.
        rule: gradients by the layer's own names, from the values of its parameters and what was seen.
        seen: from what, besides the values of the parameters.
    """

    names: Mapping[str, str]
    rule: Callable[..., dict[str, Gradients]]
    seen: tuple[Tensor, ...]

    def gradients(self, parameters: Mapping[str, Tensor]) -> dict[str, Gradients]:
        """By the names of the model, whose parameters have these values."""
        with torch.no_grad():
            found = self.rule({own: parameters[name].detach() for own, name in self.names.items()}, *self.seen)
        return {name: found[own] for own, name in self.names.items()}


def _is_ours(rule: Callable[..., Any]) -> bool:
    """Whether nothing of the user's runs when gradients are computed by this rule."""
    return not isinstance(rule, partial) or rule.func is not any_layer


class Capture:
    """Listens to the trained layers and collects the per-sample gradient of every parameter.

    Gradients add up over several uses of a layer, several layers that share a parameter, and several backward passes.

    Args:
        model: the model.
        samples: among which the rows of a layer's input are divided evenly, in order; None: every row is a sample.
        parameters: the values the model is run with, none of which requires a gradient; the first outputs that depend
            on them then become ``leaves`` of the graph. None: the model runs with parameters of its own, which do.
        later: keeps ``uses`` and computes no gradient.
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
        self.uses: list[Use] = []
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
            elif has_group_norm_kernel(module, own) and not patched:
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
        known = partial(any_layer, module) if rule is None else partial(rule, frozen(module))
        return self._follow(module, arguments[0], output, known)

    def _project(self, layer: nn.Module, x: Tensor, weight: str, bias: str, rows: slice) -> Tensor:
        """Some rows of a matrix of ``layer`` times x, for modules that use their matrices without calling layers."""
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
                weight: Dense(F.pad(found["weight"].dense(), (0, 0, above, below))),
                bias: Dense(F.pad(found["bias"].dense(), (above, below))),
            }

        followed = self._follow(layer, x, output, rule)
        return output if followed is None else followed

    def _group_norm(self, module: nn.GroupNorm, input: Tensor) -> Tensor:
        groups, eps, samples = module.num_groups, module.eps, self.samples or input.shape[0]
        ours = input.requires_grad and kernels.has_group_norm(input, module.num_channels, groups)
        if torch.is_grad_enabled() and ours and input.shape[0] % samples == 0:
            copies = int(input.shape[0] // samples)

            def rule(values: Values, *found: Tensor) -> dict[str, Gradients]:
                gradients = (Dense(t.reshape(-1, copies, t.shape[-1]).sum(1)) for t in found)
                return dict(zip(("weight", "bias"), gradients, strict=True))

            def collect(*found: Tensor) -> None:
                self._add(Use(self._trained[module], rule, found))

            channels = module.num_channels
            weight = input.new_ones(channels) if module.weight is None else module.weight.detach()
            bias = input.new_zeros(channels) if module.bias is None else module.bias.detach()
            return normalisation.group_norm(input, weight, bias, groups, eps, collect)
        output = F.group_norm(input, groups, module.weight, module.bias, eps)
        followed = self._forward(module, (input,), {}, output) if self._trained[module] else None
        return output if followed is None else followed

    def _standardised(self, module: Any, input: Tensor) -> Tensor:
        if not torch.is_grad_enabled() or not kernels.has_kernels(input) or input.dim() != 4:
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

    def _add(self, use: Use) -> None:
        if self._later:
            if use.names:
                self.uses.append(use if _is_ours(use.rule) else self._taken(use))
            return
        for name, found in use.gradients(self._own if self._parameters is None else self._parameters).items():
            self.gradients[name] = self.gradients[name] + found if name in self.gradients else found

    def _taken(self, use: Use) -> Use:
        """The same gradients, computed now: a rule that runs the model's own code must be part of the pass."""
        assert self._parameters is not None
        found = use.rule({own: self._parameters[name] for own, name in use.names.items()}, *use.seen)
        names = {own: name for own, name in use.names.items() if own in found}

        def given(values: Values, *found: Tensor) -> dict[str, Gradients]:
            return {own: Dense(g) for own, g in zip(names, found, strict=True)}

        return Use(names, given, tuple(found[own].dense() for own in names))

    def _follow(
        self,
        module: nn.Module,
        x: Tensor,
        output: Tensor,
        rule: Callable[..., dict[str, Gradients]],
        known: tuple[Tensor, ...] = (),
    ) -> Tensor | None:
        """Collects gradients when the backward pass reaches the output; returns what must take its place, if any.

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
                    'make that operation out of place or use engine="universal".'
                )
            if x.dim() == 0 or x.shape[0] % samples or g.shape[:1] != x.shape[:1]:
                raise cannot_follow(
                    module, f"its input of shape {tuple(x.shape)} is not {samples} samples, samples first"
                )
            seen = (*known, x.to(g.dtype) if x.is_floating_point() else x, g.detach())
            self._add(Use(self._trained[module], partial(rule, copies=int(x.shape[0] // samples)), seen))

        if output.requires_grad:
            output.register_hook(collect)  # type: ignore[no-untyped-call]
        return returned


@dataclass(frozen=True)
class Pass:
    """What one forward and backward pass over a chunk leaves behind.

    Args:
        outputs: of the model.
        losses: of every row.
        uses: what gradients can be computed from, layer by layer.
    """

    outputs: Any
    losses: Tensor
    uses: list[Use]


def run(model: nn.Module, loss: Loss, parameters: dict[str, Tensor], inputs: Any, targets: Any, copies: int) -> Pass:
    """Run the model on a chunk and keep what its layers saw. Whether samples meet is for the caller to know."""
    fixed = {name: value.detach() for name, value in parameters.items()}
    samples = tree_leaves(inputs)[0].shape[0] // copies
    capture = Capture(model, samples=samples, parameters=fixed, later=True)
    with torch.enable_grad(), capture.listening():
        outputs = call_at(model, fixed, inputs)
        each = _of_each(loss, outputs, targets)
        if each.requires_grad and capture.leaves:
            share = torch.full_like(each, 1 / copies)
            torch.autograd.grad(each, capture.leaves, share, allow_unused=True)
    return Pass(tree_map(_detached, outputs), each.detach(), capture.uses)


def per_sample(
    model: nn.Module, loss: Loss, parameters: dict[str, Tensor], inputs: Any, targets: Any, copies: int
) -> dict[str, Gradients]:
    """The gradient of every sample by a pass that nobody has proved anything about: for synthetic samples only."""
    uses = run(model, loss, parameters, inputs, targets, copies).uses
    return add_up(use.gradients(parameters) for use in uses)


def _detached(value: Any) -> Any:
    return value.detach() if isinstance(value, Tensor) else value


def add_up(found: Iterable[dict[str, Gradients]]) -> dict[str, Gradients]:
    """Add the gradients of several uses of a parameter; one that is not used is missing."""
    total: dict[str, Gradients] = {}
    for one in found:
        for name, g in one.items():
            total[name] = total[name] + g if name in total else g
    return total


def _of_each(loss: Loss, outputs: Any, targets: Any) -> Tensor:
    """The loss of every row."""
    if _is_cross_entropy(loss) and isinstance(outputs, Tensor) and outputs.dim() == 2 and targets.dim() == 1:
        known = loss if isinstance(loss, nn.CrossEntropyLoss) else nn.CrossEntropyLoss()
        return F.cross_entropy(
            outputs, targets, reduction="none", ignore_index=known.ignore_index, label_smoothing=known.label_smoothing
        )
    # Every sample as a batch of one, so that a loss written for batches can be mapped over samples.
    rows = tree_map(lambda t: t[:, None], (outputs, targets))
    found: Tensor = vmap(lambda o, t: one_number(loss(o, t)), randomness="different")(*rows)
    return found


def _is_cross_entropy(loss: Loss) -> bool:
    """Whether it is torch's own, whose rows need no mapping: the mean over a batch of one is the row's own loss."""
    if loss is F.cross_entropy:
        return True
    plain = type(loss) is nn.CrossEntropyLoss and loss.reduction == "mean" and loss.weight is None
    return plain and not (loss._forward_hooks or loss._forward_pre_hooks)  # type: ignore[attr-defined]

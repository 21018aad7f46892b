"""The hook engine: one ordinary forward and backward pass of the batch, per-sample gradients layer by layer.

It rests on the model treating every sample alone. The caller checks that on a few samples against the universal engine
(see ``engines.choose``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, vmap

from modelmix.errors import ModelMixError
from modelmix.training.engines.layers import rule_for

Loss = Callable[[Any, Any], Tensor]


def trained_layers(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """The modules that own a trained parameter themselves."""
    for name, module in model.named_modules():
        if any(p.requires_grad for p in module.parameters(recurse=False)):
            yield name, module


def parameter_names(model: nn.Module) -> dict[int, str]:
    """The one name under which each trained parameter is known, however often it is tied."""
    return {id(p): name for name, p in model.named_parameters() if p.requires_grad}


class Capture:
    """Listens to the trained layers and collects the per-sample gradient of every parameter.

    Gradients add up over several uses of a layer, several layers that share a parameter, and several backward passes.

    Args:
        model: the model.
        copies: rows that belong to one sample, next to each other.
        leaf: make the first outputs leaves of the graph, where parameters do not require gradients themselves.
    """

    def __init__(self, model: nn.Module, *, copies: int = 1, leaf: bool = False) -> None:
        self.gradients: dict[str, Tensor] = {}
        self.leaves: list[Tensor] = []
        self.copies = copies
        self._leaf = leaf
        self._busy = False
        self._names = parameter_names(model)
        self._layers = list(trained_layers(model))
        self._trained = {
            module: {
                own: self._names[id(p)] for own, p in module.named_parameters(recurse=False) if id(p) in self._names
            }
            for _, module in self._layers
        }

    @contextmanager
    def listening(self) -> Iterator[None]:
        handles = self.attach()
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def attach(self) -> list[Any]:
        return [module.register_forward_hook(self._forward) for _, module in self._layers]

    def clear(self) -> None:
        self.gradients.clear()
        self.leaves.clear()

    def _forward(self, module: nn.Module, arguments: tuple[Any, ...], output: Any) -> Any:
        if self._busy or not torch.is_grad_enabled():
            return None
        if len(arguments) != 1 or not isinstance(arguments[0], Tensor) or not isinstance(output, Tensor):
            raise ModelMixError(
                f"the hook engine cannot follow {type(module).__name__}: it needs layers of one tensor in and one out; "
                'use engine="universal".'
            )
        x = arguments[0].detach()
        version = x._version
        returned = None
        if self._leaf and not output.requires_grad:
            leaf = output.detach().requires_grad_()
            self.leaves.append(leaf)
            output, returned = leaf, leaf.clone()  # a copy, because layers that work in place may not touch a leaf

        def collect(g: Tensor) -> None:
            if x._version != version:
                raise ModelMixError(
                    f"the input of {type(module).__name__} was changed in place after it was used; "
                    'make that operation out of place or use engine="universal".'
                )
            with torch.no_grad():
                self._add(module, x, g.detach())

        if output.requires_grad:
            output.register_hook(collect)
        return returned

    def _add(self, module: nn.Module, x: Tensor, g: Tensor) -> None:
        self._busy = True  # a rule may run the layer again, and must not be listened to
        try:
            found = rule_for(module)(module, x.to(g.dtype) if x.is_floating_point() else x, g, self.copies)
        finally:
            self._busy = False
        for own, name in self._trained[module].items():
            self.gradients[name] = self.gradients[name] + found[own] if name in self.gradients else found[own]


def per_sample(
    model: nn.Module, loss: Loss, parameters: dict[str, Tensor], inputs: Any, targets: Any, copies: int
) -> dict[str, Tensor]:
    """The gradient of every sample, by parameter; a parameter the samples do not use is missing."""
    from modelmix.training.engines.universal import call

    capture = Capture(model, copies=copies, leaf=True)
    fixed = {name: value.detach() for name, value in parameters.items()}
    with torch.enable_grad(), capture.listening():
        outputs = call(lambda *a, **k: functional_call(model, fixed, a, k), inputs)
        each = vmap(lambda o, t: loss(o, t), randomness="different")(_rows(outputs), _rows(targets))
        if each.dim() != 1:
            raise ModelMixError(f"the loss of one sample must be one number; it has the shape {tuple(each.shape[1:])}.")
        if capture.leaves:
            torch.autograd.grad(each.sum() / copies, capture.leaves, allow_unused=True)
    return capture.gradients


def _rows(tree: Any) -> Any:
    """Every sample as a batch of one, so that a loss written for batches can be mapped over samples."""
    from torch.utils._pytree import tree_map

    return tree_map(lambda t: t[:, None], tree)

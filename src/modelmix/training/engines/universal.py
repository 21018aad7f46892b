"""The universal engine: ``torch.func`` maps the gradient of one sample over the batch, for any module.

Each sample runs alone, so nothing can leak from one into the gradient of another.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from collections.abc import Set as AbstractSet
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap
from torch.utils._pytree import tree_leaves, tree_map

from modelmix.errors import ModelMixError
from modelmix.training.gradients import Dense, Gradients

Loss = Callable[[Any, Any], Tensor]


def call(model: Callable[..., Any], inputs: Any) -> Any:
    """A model on its inputs: a tensor, a tuple of positional arguments or a dict of named ones."""
    if isinstance(inputs, dict):
        return model(**inputs)
    if isinstance(inputs, list | tuple):
        return model(*inputs)
    return model(inputs)


def _places(model: nn.Module, parameters: dict[str, Tensor]) -> Iterator[tuple[str, nn.Module, str, Tensor]]:
    """(path, module, own name, value) of every place where a parameter lives, once, however it is tied."""
    names = {id(p): name for name, p in model.named_parameters()}
    for path, module in model.named_modules():
        for own, p in module.named_parameters(recurse=False, remove_duplicate=False):
            if names[id(p)] in parameters:
                yield path, module, own, parameters[names[id(p)]]


def call_at(model: nn.Module, parameters: dict[str, Tensor], inputs: Any) -> Any:
    """A model on its inputs with other values of its parameters, by the names of ``named_parameters``.

    Every place where a parameter lives is named once. Left to find tied parameters by itself, ``functional_call`` swaps
    a module that is registered twice two times, and does not put its parameters back.
    """
    places = {f"{path}.{own}".lstrip("."): value for path, _, own, value in _places(model, parameters)}
    return call(lambda *a, **k: functional_call(model, places, a, k, tie_weights=False), inputs)


@contextmanager
def running_at(model: nn.Module, parameters: dict[str, Tensor]) -> Iterator[None]:
    """The model has these values of its parameters for a while, so that a backward pass finds them as well."""
    places = [(module, own, module._parameters[own], value) for _, module, own, value in _places(model, parameters)]
    try:
        for module, own, _, value in places:
            module._parameters[own] = value  # type: ignore[assignment]
        yield
    finally:
        for module, own, before, _ in places:
            module._parameters[own] = before


@contextmanager
def any_speed() -> Iterator[None]:
    """Operations that ``vmap`` runs one by one are right all the same; nobody can act on its warning."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="There is a performance drop")
        yield


def one_number(value: Tensor) -> Tensor:
    """The loss of one sample; the mean, where the loss does not reduce."""
    return value.reshape(()) if value.numel() == 1 else value.mean()


def sample_loss(model: nn.Module, loss: Loss, parameters: dict[str, Tensor], inputs: Any, targets: Any) -> Tensor:
    """The mean over the copies of one sample, given as a small batch, of the loss of each."""
    return mean_loss(loss, call_at(model, parameters, inputs), targets, tree_leaves(inputs)[0].shape[0])


def mean_loss(loss: Loss, outputs: Any, targets: Any, copies: int) -> Tensor:
    """The mean over the copies of one sample of the loss of each."""
    if copies == 1:
        return one_number(loss(outputs, targets))
    rows = [tree_map(lambda t, i=i: t[i : i + 1], (outputs, targets)) for i in range(copies)]
    return torch.stack([one_number(loss(*row)) for row in rows]).mean()


def split(tree: Any, copies: int) -> Any:
    """m * copies x ... -> m x copies x ..."""
    return tree_map(lambda t: t.reshape(t.shape[0] // copies, copies, *t.shape[1:]), tree)


def per_sample(
    model: nn.Module,
    loss: Loss,
    parameters: dict[str, Tensor],
    inputs: Any,
    targets: Any,
    copies: int,
    names: AbstractSet[str] | None = None,
) -> dict[str, Gradients]:
    """The gradient of every sample, by parameter; of all of them, or of those that are named."""
    fixed = {name: value.detach() for name, value in parameters.items()}
    chosen = {name: value for name, value in fixed.items() if names is None or name in names}

    def one(chosen: dict[str, Tensor], x: Any, y: Any) -> Tensor:
        return sample_loss(model, loss, fixed | chosen, x, y)

    each = vmap(grad(one), in_dims=(None, 0, 0), randomness="different")
    with any_speed():
        found: dict[str, Tensor] = each(chosen, split(inputs, copies), split(targets, copies))
    return {name: Dense(value) for name, value in found.items()}


def per_sample_loop(
    model: nn.Module,
    loss: Loss,
    parameters: dict[str, Tensor],
    inputs: Any,
    targets: Any,
    copies: int,
    names: AbstractSet[str] | None = None,
) -> dict[str, Gradients]:
    """One sample after the other through ordinary autograd: slow, and right wherever autograd is."""
    free = {name: value.detach().requires_grad_() for name, value in parameters.items()}
    wanted = [name for name in free if names is None or name in names]
    batch = split((inputs, targets), copies)
    samples = tree_leaves(batch)[0].shape[0]
    found = {name: free[name].new_zeros(samples, *free[name].shape) for name in wanted}
    # All of it with these values: a layer that is computed again by the backward pass reads them again.
    with torch.enable_grad(), running_at(model, free):
        for i in range(samples):
            x, y = tree_map(lambda t, i=i: t[i], batch)
            value = mean_loss(loss, call(model, x), y, copies)
            if not value.requires_grad:
                raise ModelMixError("the loss does not depend on any trained parameter.")
            gradients = torch.autograd.grad(value, [free[name] for name in wanted], allow_unused=True)
            for name, g in zip(wanted, gradients, strict=True):
                if g is not None:
                    found[name][i] = g.to_dense()
    return {name: Dense(value) for name, value in found.items()}

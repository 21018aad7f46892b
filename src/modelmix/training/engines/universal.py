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


def call_at(model: nn.Module, parameters: dict[str, Tensor], inputs: Any) -> Any:
    """A model on its inputs with other values of its parameters, by the names of ``named_parameters``.

    Every place where a parameter lives is named once. Left to find tied parameters by itself, ``functional_call`` swaps
    a module that is registered twice two times, and does not put its parameters back.
    """
    names = {id(p): name for name, p in model.named_parameters()}
    places = {
        f"{path}.{own}".lstrip("."): parameters[names[id(p)]]
        for path, module in model.named_modules()
        for own, p in module.named_parameters(recurse=False, remove_duplicate=False)
        if names[id(p)] in parameters
    }
    return call(lambda *a, **k: functional_call(model, places, a, k, tie_weights=False), inputs)


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
    outputs = call_at(model, parameters, inputs)
    copies = tree_leaves(inputs)[0].shape[0]
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
    fixed = {name: value.detach() for name, value in parameters.items()}
    free = {name: value.requires_grad_() for name, value in fixed.items() if names is None or name in names}
    batch = split((inputs, targets), copies)
    samples = tree_leaves(batch)[0].shape[0]
    found = {name: value.new_zeros(samples, *value.shape) for name, value in free.items()}
    for i in range(samples):
        with torch.enable_grad():
            value = sample_loss(model, loss, fixed, *tree_map(lambda t, i=i: t[i], batch))
            if not value.requires_grad:
                if names is not None:  # it may depend on others
                    continue
                raise ModelMixError("the loss does not depend on any trained parameter.")
            gradients = torch.autograd.grad(value, list(free.values()), allow_unused=True)
        for name, g in zip(found, gradients, strict=True):
            if g is not None:
                found[name][i] = g.to_dense()
    return {name: Dense(value) for name, value in found.items()}

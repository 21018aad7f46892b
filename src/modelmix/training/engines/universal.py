"""The universal engine: ``torch.func`` maps the gradient of one sample over the batch, for any module.

Each sample runs alone, so nothing can leak from one into the gradient of another.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap
from torch.utils._pytree import tree_map

from modelmix.errors import ModelMixError

Loss = Callable[[Any, Any], Tensor]


def call(model: Callable[..., Any], inputs: Any) -> Any:
    """A model on its inputs: a tensor, a tuple of positional arguments or a dict of named ones."""
    if isinstance(inputs, dict):
        return model(**inputs)
    if isinstance(inputs, list | tuple):
        return model(*inputs)
    return model(inputs)


def sample_loss(model: nn.Module, loss: Loss, parameters: dict[str, Tensor], inputs: Any, targets: Any) -> Tensor:
    """The mean loss over the copies of one sample, given as a small batch."""
    outputs = call(lambda *a, **k: functional_call(model, parameters, a, k), inputs)
    value = loss(outputs, targets)
    if value.dim() != 0 and value.numel() != 1:
        value = value.mean()  # a loss without reduction, over the copies of one sample
    return value.reshape(())


def split(tree: Any, copies: int) -> Any:
    """m * copies x ... -> m x copies x ..."""
    return tree_map(lambda t: t.reshape(t.shape[0] // copies, copies, *t.shape[1:]), tree)


def per_sample(
    model: nn.Module, loss: Loss, parameters: dict[str, Tensor], inputs: Any, targets: Any, copies: int
) -> dict[str, Tensor]:
    """The gradient of every sample, by parameter."""

    def one(parameters: dict[str, Tensor], x: Any, y: Any) -> Tensor:
        return sample_loss(model, loss, parameters, x, y)

    fixed = {name: value.detach() for name, value in parameters.items()}
    each = vmap(grad(one), in_dims=(None, 0, 0), randomness="different")
    found: dict[str, Tensor] = each(fixed, split(inputs, copies), split(targets, copies))
    return found


def per_sample_loop(
    model: nn.Module, loss: Loss, parameters: dict[str, Tensor], inputs: Any, targets: Any, copies: int
) -> dict[str, Tensor]:
    """One sample after the other through ordinary autograd: slow, and right wherever autograd is."""
    free = {name: value.detach().requires_grad_() for name, value in parameters.items()}
    xs, ys = split(inputs, copies), split(targets, copies)
    first = xs
    while not isinstance(first, Tensor):
        first = next(iter(first.values())) if isinstance(first, dict) else first[0]
    rows = []
    for i in range(first.shape[0]):
        with torch.enable_grad():
            value = sample_loss(model, loss, free, tree_map(lambda t: t[i], xs), tree_map(lambda t: t[i], ys))  # noqa: B023
            if not value.requires_grad:
                raise ModelMixError("the loss does not depend on any trained parameter.")
            found = torch.autograd.grad(value, list(free.values()), allow_unused=True)
        rows.append([torch.zeros_like(p) if g is None else g for g, p in zip(found, free.values(), strict=True)])
    return {name: torch.stack([row[j] for row in rows]) for j, name in enumerate(free)}

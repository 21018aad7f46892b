"""The vmap engine: ``torch.func`` maps the gradient of one sample over the batch, for any module; and the loop engine.

Each sample runs alone in both, so nothing can leak from one into the gradient of another.
"""

from __future__ import annotations

import random
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping
from collections.abc import Set as AbstractSet
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch._functorch import autograd_function
from torch.func import functional_call, grad, vmap
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map, tree_unflatten

from modelmix.errors import ModelMixError
from modelmix.gradients.batch import Batch, Loss, PassResult
from modelmix.gradients.device import preserve_torch_rng
from modelmix.gradients.forms import DenseGradients, Gradients


def call_model(model: Callable[..., Any], inputs: Any) -> Any:
    """Run a model on its inputs: a tensor, a tuple of positional arguments or a dict of named ones."""
    if isinstance(inputs, dict):
        return model(**inputs)
    if isinstance(inputs, list | tuple):
        return model(*inputs)
    return model(inputs)


def _places(model: nn.Module, parameters: dict[str, Tensor]) -> Iterator[tuple[str, nn.Module, str, Tensor]]:
    """Yield (path, module, own name, value) of every place where a parameter lives, once, however it is tied."""
    names = {id(p): name for name, p in model.named_parameters()}
    for path, module in model.named_modules():
        for own, p in module.named_parameters(recurse=False, remove_duplicate=False):
            if names[id(p)] in parameters:
                yield path, module, own, parameters[names[id(p)]]


def call_model_at(model: nn.Module, parameters: dict[str, Tensor], inputs: Any) -> Any:
    """Run a model on its inputs with other values of its parameters, by the names of ``named_parameters``.

    Every place where a parameter lives is named once. Left to find tied parameters by itself, ``functional_call`` swaps
    a module that is registered twice two times, and does not put its parameters back.
    """
    places = {f"{path}.{own}".lstrip("."): value for path, _, own, value in _places(model, parameters)}
    return call_model(lambda *a, **k: functional_call(model, places, a, k, tie_weights=False), inputs)


@contextmanager
def parameters_replaced(model: nn.Module, parameters: dict[str, Tensor]) -> Iterator[None]:
    """Give the model these values of its parameters for a while, so that a backward pass finds them as well."""
    places = [(module, own, module._parameters[own], value) for _, module, own, value in _places(model, parameters)]
    try:
        for module, own, _, value in places:
            module._parameters[own] = value  # type: ignore[assignment]
        yield
    finally:
        for module, own, before, _ in places:
            module._parameters[own] = before


@contextmanager
def ignore_vmap_slowness() -> Iterator[None]:
    """Ignore the warning about operations that ``vmap`` runs one by one: they are right, and nobody can act on it."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="There is a performance drop")
        yield


def to_scalar(value: Tensor) -> Tensor:
    """Return the loss of one sample; the mean, where the loss does not reduce."""
    return value.reshape(()) if value.numel() == 1 else value.mean()


def mean_loss(loss: Loss, outputs: Any, targets: Any, copies: int) -> Tensor:
    """Average the losses of the copies of one sample."""
    if copies == 1:
        return to_scalar(loss(outputs, targets))
    rows = [tree_map(lambda t, i=i: t[i : i + 1], (outputs, targets)) for i in range(copies)]
    return torch.stack([to_scalar(loss(*row)) for row in rows]).mean()


def split(tree: Any, copies: int) -> Any:
    """Reshape m * copies x ... to m x copies x ..."""
    return tree_map(lambda t: t.reshape(t.shape[0] // copies, copies, *t.shape[1:]), tree)


@contextmanager
def refuse_parameter_writes(parameters: Mapping[str, Tensor]) -> Iterator[None]:
    """Raise ``ModelMixError`` if what is trained was written to while the model ran."""
    before = [p._version for p in parameters.values()]
    yield
    if before != [p._version for p in parameters.values()]:
        raise ModelMixError(
            "the model changes its trained parameters while it runs (max_norm?): only steps may do that."
        )


def per_sample(
    model: nn.Module,
    loss: Loss,
    parameters: dict[str, Tensor],
    batch: Batch,
    names: AbstractSet[str] | None = None,
    with_outputs: bool = False,
) -> PassResult:
    """Compute the gradient of every sample through ``vmap``.

    Args:
        parameters: the values to run the model at, by the names of ``named_parameters``.
        names: of the parameters whose gradients are wanted; None: of all.
        with_outputs: also give the model's outputs and the losses.
    """
    fixed = {name: value.detach() for name, value in parameters.items()}
    chosen = {name: value for name, value in fixed.items() if names is None or name in names}
    form: list[Any] = []

    def one(chosen: dict[str, Tensor], x: Any, y: Any) -> tuple[Tensor, Any]:
        outputs = call_model_at(model, fixed | chosen, x)
        value = mean_loss(loss, outputs, y, tree_leaves(x)[0].shape[0])
        leaves, spec = tree_flatten(outputs)
        form[:] = [spec, [None if isinstance(leaf, Tensor) else leaf for leaf in leaves]]
        tensors = [leaf.detach() for leaf in leaves if isinstance(leaf, Tensor)]
        return value, (tensors, value.detach()) if with_outputs else ()

    each = vmap(grad(one, has_aux=True), in_dims=(None, 0, 0), randomness="different")
    copies = batch.rows_per_sample
    with (
        refuse_parameter_writes(parameters),
        ignore_vmap_slowness(),
        refuse_foreign_vmap_rules(),
        _preserve_python_rng(),
    ):
        found, aside = each(chosen, split(batch.inputs, copies), split(batch.targets, copies))
    gradients: dict[str, Gradients] = {name: DenseGradients(value) for name, value in found.items()}
    if not with_outputs:
        return PassResult(gradients)
    tensors = iter(t.flatten(0, 1) if t.dim() > 1 else t for t in aside[0])
    return PassResult(
        gradients, tree_unflatten([next(tensors) if v is None else v for v in form[1]], form[0]), aside[1]
    )


@contextmanager
def refuse_foreign_vmap_rules() -> Iterator[None]:
    """Refuse functions and operators that bring a rule of their own for ``vmap``: it is given the whole batch."""
    right = autograd_function.VmapInfo

    def checked(*arguments: Any, **named: Any) -> Any:
        op = sys._getframe(1).f_locals.get("op")  # torch makes this for nobody else than such a rule
        namespace, module = getattr(op, "namespace", None), str(getattr(op, "__module__", ""))
        ours = namespace in ("aten", "modelmix") if namespace else module.startswith(("torch.", "modelmix."))
        if not ours:
            raise ForeignVmapRuleError(
                f"{getattr(op, '__name__', op)} has a vmap rule of its own, which sees the whole batch"
            )
        return right(*arguments, **named)

    autograd_function.VmapInfo = checked  # type: ignore[assignment,misc]
    try:
        yield
    finally:
        autograd_function.VmapInfo = right  # type: ignore[misc]


class ForeignVmapRuleError(RuntimeError):
    """A function would see several samples at once."""


def per_sample_loop(
    model: nn.Module,
    loss: Loss,
    parameters: dict[str, Tensor],
    batch: Batch,
    names: AbstractSet[str] | None = None,
    with_outputs: bool = False,
) -> PassResult:
    """Compute what ``per_sample`` does, one sample after the other: slow, and right wherever autograd is."""
    wanted = [name for name in parameters if names is None or name in names]
    copies, samples = batch.rows_per_sample, batch.samples
    rows = split((batch.inputs, batch.targets), copies)
    found = {name: parameters[name].new_zeros(samples, *parameters[name].shape) for name in wanted}
    seen: list[tuple[Any, Tensor]] = []
    seeds, device = torch.randint(2**31, (samples,), device="cpu").tolist(), tree_leaves(rows)[0].device
    with refuse_parameter_writes(parameters), torch.enable_grad(), _preserve_python_rng(), preserve_torch_rng(device):
        for i in range(samples):
            _seed_all(seeds[i])  # how much one sample draws, or that it seeds anew, is nothing to the next
            x, y = tree_map(lambda t, i=i: t[i].clone(), rows)  # nothing of another sample within reach
            # Tensors of its own as well: what a model keeps on a parameter, or in its .grad, goes with the sample.
            free = {name: value.detach().requires_grad_() for name, value in parameters.items()}
            # All of it with these values: a layer that is computed again by the backward pass reads them again.
            with parameters_replaced(model, free):
                outputs = call_model(model, x)
                value = mean_loss(loss, outputs, y, copies)
                if not value.requires_grad:
                    raise ModelMixError("the loss does not depend on any trained parameter.")
                gradients = torch.autograd.grad(value, [free[name] for name in wanted], allow_unused=True)
            for name, g in zip(wanted, gradients, strict=True):
                if g is not None:
                    found[name][i] = g.to_dense()
            if with_outputs:
                seen.append((tree_map(_detached, outputs), value.detach()))
    dense: dict[str, Gradients] = {name: DenseGradients(value) for name, value in found.items()}
    if not with_outputs:
        return PassResult(dense)
    joined = tree_map(_joined, *(one for one, _ in seen)) if seen else None
    return PassResult(dense, joined, torch.stack([value for _, value in seen]))


ONE_BY_ONE: dict[str, Callable[..., PassResult]] = {"vmap": per_sample, "loop": per_sample_loop}
"""The engines in which samples cannot meet, whatever the model does."""


@contextmanager
def _preserve_python_rng() -> Iterator[None]:
    """Seed Python's and numpy's generators as torch's was seeded, and put their states back on exit."""
    python, numpy = random.getstate(), np.random.get_state()  # noqa: NPY002, models may draw from the old one
    try:
        _seed_python(torch.initial_seed())
        yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)  # noqa: NPY002


def _seed_all(seed: int) -> None:
    torch.manual_seed(seed)
    _seed_python(seed)


def _seed_python(seed: int) -> None:
    random.seed(seed)
    np.random.seed(seed % 2**32)  # noqa: NPY002


def _detached(value: Any) -> Any:
    return value.detach() if isinstance(value, Tensor) else value


def _joined(*rows: Any) -> Any:
    if not isinstance(rows[0], Tensor):
        return rows[0]
    return torch.cat(rows) if rows[0].dim() else torch.stack(rows)

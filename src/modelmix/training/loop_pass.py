"""The private pass over a part of a draw: what its outputs and its loss let through, and what they refuse."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_leaves

from modelmix.errors import UnprovedError
from modelmix.gradients.clip import ClippedSum
from modelmix.gradients.memory import ALONE
from modelmix.training.randomness import StepRandomness

_CRITERION = (
    "Use the model, loader and criterion that make_private returned, on the loader's batches as they are: "
    "transformations of them belong into the model, the dataset or the criterion."
)


@dataclass(frozen=True)
class DrawPart:
    """Some samples of a draw: the ``number``-th part of it, and whether it is the last."""

    draws: StepRandomness
    number: int
    last: bool
    weights: Tensor


@dataclass
class PrivatePass:
    """The private pass over one part, and how far the loop has come with it."""

    summed: ClippedSum
    outputs: Any
    losses: Tensor
    finished: bool = False  # backward was called


def digest_of(tree: Any) -> str:
    """Of tensors and of whatever has a printed form, in their order."""
    digest = hashlib.sha256()
    for part in tree_leaves(tree):
        if isinstance(part, Tensor):
            flat = part.detach().cpu().contiguous().reshape(-1)
            digest.update(f"{part.dtype}{tuple(part.shape)}".encode() + flat.view(torch.uint8).numpy().tobytes())
        else:
            digest.update(repr(part).encode())
    return digest.hexdigest()


def places_in(given: Any, batch: Any) -> Any:
    """Which tensors of the batch may be given, and in which structure; None if one is no tensor of it.

    A tensor of the batch is one that is whole and unchanged, perhaps a copy on another device. What is computed from
    the batch, converted to another type or put together of it, is not.
    """
    have = [t for t in tree_leaves(batch) if isinstance(t, Tensor)]
    leaves, form = tree_flatten(given)
    found = [{i for i, t in enumerate(have) if isinstance(v, Tensor) and is_equal(v, t)} for v in leaves]
    return (form, found) if leaves and all(found) else None


def is_equal(t: Tensor, other: Tensor) -> bool:
    if t.shape != other.shape or t.dtype != other.dtype:
        return False
    other = other.to(t.device)
    return torch.equal(t, other) or bool(((t == other) | ((t != t) & (other != other))).all())


def modes_of(model: nn.Module) -> list[bool]:
    return [module.training for module in model.modules()]


def are_identical(given: Any, returned: Any) -> bool:
    mine, ours = tree_leaves(given), tree_leaves(returned)
    return len(mine) == len(ours) and all(a is b for a, b in zip(mine, ours, strict=True))


class GuardedOutput(torch.autograd.Function):
    """An output of the private pass: a number to look at, which no gradient passes."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, anchor: Tensor) -> Tensor:
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        raise UnprovedError(
            ALONE,
            "backward was called on something other than the criterion's loss of the model's outputs.",
            _CRITERION,
        )


def guard(t: Any, anchor: Tensor) -> Any:
    if not isinstance(t, Tensor) or not t.is_floating_point():
        return t
    return GuardedOutput.apply(t.detach(), anchor)  # type: ignore[no-untyped-call]


class PrivateLoss(torch.autograd.Function):
    """The loss of a part. Its backward computes nothing: the gradients of single samples are in the pass already."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, anchor: Tensor, passed: PrivatePass) -> Tensor:
        ctx.passed, ctx.rows = passed, max(1, passed.losses.numel())
        return value.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        (given,) = gradients
        allowed = [1.0] if given.dim() == 0 else [1.0, 1.0 / ctx.rows]
        if not any(torch.equal(given, torch.full_like(given, value)) for value in allowed):
            raise UnprovedError(
                ALONE,
                "the loss was scaled, weighted or added up before backward, by something that may depend on the batch.",
                "Call backward on what the criterion returns; to give a draw in parts, as accumulation does, give "
                "make_private(..., options=mm.LoopOptions(chunk=...)).",
            )
        ctx.passed.finished = True
        return None, None, None


def refuse_gradient(p: Tensor) -> None:
    p.grad = None
    raise UnprovedError(
        ALONE,
        "a gradient reached a trained parameter and did not come from the criterion. (A batch of the loader that was "
        "there before, or one that was changed, gives such gradients.)",
        _CRITERION,
    )

"""Augmentations of image batches N x C x H x W, for several copies of every sample."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812, the name everybody knows
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map

from modelmix._checks import whole
from modelmix.errors import ModelMixError, UnprovedError
from modelmix.gradients.device import preserve_torch_rng
from modelmix.gradients.memory import ALONE, WatchedFunction

AugmentFunction = Callable[[Any, torch.Generator], Any]


@dataclass(frozen=True)
class Augment:
    """Several augmented copies of every sample, whose gradients are averaged before clipping.

    Args:
        function: ``function(inputs, generator)``, applied to one sample at a time unless it is one of ours; None
            augments nothing.
        copies: of every sample (its augmentation multiplicity).

    Example:
        >>> Augment(flip_and_crop, copies=4).copies
        4
    """

    function: AugmentFunction | None = None
    copies: int = 1

    def __post_init__(self) -> None:
        if self.function is not None and not callable(self.function):
            raise ModelMixError(f"function = {self.function!r} cannot be called: give function(inputs, generator).")
        whole("copies", self.copies, "the number of augmented copies of a sample", least=1)
        if self.function is None and self.copies > 1:
            raise ModelMixError("copies > 1 needs a function: copies of a sample must differ to be worth their time.")


def flip(images: Tensor, generator: torch.Generator) -> Tensor:
    """Mirrors every image left to right with probability one half."""
    coin = torch.rand(images.shape[0], generator=generator, device=generator.device) < 0.5
    return torch.where(coin.to(images.device)[:, None, None, None], images.flip(-1), images)


def crop(images: Tensor, generator: torch.Generator, pad: int = 4) -> Tensor:
    """Moves every image by up to ``pad`` pixels in each direction; what comes in is zero."""
    n, _, height, width = images.shape
    padded = F.pad(images, (pad, pad, pad, pad))
    offset = torch.randint(2 * pad + 1, (2, n), generator=generator, device=generator.device).to(images.device)
    row = offset[0][:, None] + torch.arange(height, device=images.device)
    column = offset[1][:, None] + torch.arange(width, device=images.device)
    sample = torch.arange(n, device=images.device)
    return padded[sample[:, None, None], :, row[:, :, None], column[:, None, :]].permute(0, 3, 1, 2).contiguous()


def flip_and_crop(images: Tensor, generator: torch.Generator) -> Tensor:
    """Both: the usual augmentation of small natural images."""
    return crop(flip(images, generator), generator)


AUGMENTATIONS = {"flip": flip, "crop": crop, "flip-crop": flip_and_crop}


def apply_augmentation(augment: AugmentFunction, inputs: Any, generator: torch.Generator) -> Any:
    """Augment every row of a chunk on its own.

    Our own augmentations treat the rows of a chunk one by one and are given all of them; any other is given one row at
    a time, as a batch of one that shares no memory with the others.

    Args:
        augment: ``augment(inputs, generator)``.
        inputs: a tensor, or a tuple or dict of tensors, rows first.

    Returns:
        What it makes of every row, in order, of the structure, types and number of rows of the inputs.

    Raises:
        UnprovedError: if a row would be another one after other rows.
        ModelMixError: if the result is not of that form.
    """
    if augment in AUGMENTATIONS.values():
        return augment(inputs, generator)
    _check_alone(augment, inputs, generator.device)
    count = tree_leaves(inputs)[0].shape[0]
    if not count:
        return inputs
    memory = WatchedFunction(augment, "augment")
    seeds = torch.randint(2**62, (count,), generator=generator, device=generator.device).tolist()
    rows = []
    with preserve_torch_rng(generator.device):
        for i, seed in enumerate(seeds):  # how much one row draws, or that it seeds anew, is nothing to the next
            torch.manual_seed(seed)
            own = torch.Generator(generator.device).manual_seed(seed)
            made = augment(tree_map(lambda t, i=i: t[i : i + 1].clone(), inputs), own)
            rows.append(tree_map(lambda t: t.clone() if isinstance(t, Tensor) else t, made))  # it may reuse a buffer
    memory.check()
    for row in rows:
        _check_form(row, inputs)
    try:
        return tree_map(lambda *parts: torch.cat(parts), *rows)
    except RuntimeError:
        raise ModelMixError("augment gives rows of different shapes: give all of them one shape.") from None


def _check_form(row: Any, inputs: Any) -> None:
    (mine, form), (theirs, wanted) = tree_flatten(row), tree_flatten(inputs)
    right = form == wanted and all(isinstance(t, Tensor) and t.dim() > 0 and t.shape[0] == 1 for t in mine)
    if not right or any(a.dtype != b.dtype for a, b in zip(mine, theirs, strict=True)):
        raise ModelMixError("augment must give as many rows as it is given, of the same structure and types.")


def _check_alone(augment: AugmentFunction, inputs: Any, device: torch.device) -> None:
    """Augment a synthetic row with the same draws, after itself and after other rows: it must not remember them."""
    draws = torch.Generator("cpu").manual_seed(0)

    def made(scale: float) -> Any:
        def like(t: Tensor) -> Tensor:
            values = torch.rand(1, *t.shape[1:], generator=draws, device="cpu") * scale
            return values.to(t.device, t.dtype)

        return tree_map(like, inputs)

    row, others = made(1.0), [made(scale) for scale in (1.0, 3.0, -5.0)]

    def augmented(values: Any, seed: int) -> Any:
        torch.manual_seed(seed)  # for those that draw from torch's own generator
        return augment(tree_map(torch.clone, values), torch.Generator(device).manual_seed(seed))

    found = []
    with preserve_torch_rng(device):
        for before in ([], [row], others, others[:1]):
            for other in before:
                augmented(other, 1)
            found.append(augmented(row, 2))
            _check_form(found[-1], inputs)
    for again in found[1:]:
        if not all(torch.equal(a, b) for a, b in zip(tree_leaves(found[0]), tree_leaves(again), strict=True)):
            raise UnprovedError(
                ALONE,
                "augment gives another result for the same row and the same draws after other rows.",
                "Compute it from the row and the given generator alone, and keep nothing between calls.",
            )

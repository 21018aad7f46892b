"""A feature function must see every image alone.

If the features of one image depend on the images beside it, as with the statistics of a batch, then one person's image
changes other persons' features: clipping each sample's gradient no longer bounds what that person can do, and epsilon
is not true. So a function is asked for the features of the same public images in different company, before it sees any
of the data.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F  # noqa: N812, the name everybody knows
from torch import Tensor

from modelmix.errors import UnprovedError
from modelmix.features.leaves import dead_leaves

SAME, ALONE = 1e-4, 1e-2
"""Largest distance of two features of one image, over their length: in batches of one size, where rounding hardly
differs, and in batches of different sizes, where other kernels may run."""

_SIDE = 64  # of the images that are drawn before they are scaled to the size in question


def check_independence(features: Callable[[Tensor], Tensor], shape: tuple[int, ...], name: str) -> int:
    """Refuse a function whose features of an image depend on other images, on its place, or on chance.

    Seen is what shows on a few images: a function that leaves no trace of company there, or changes its mind later, is
    not caught.

    Args:
        features: uint8 N x C x H x W -> N x d.
        shape: C, H, W of the images.
        name: what errors call the function.

    Returns:
        The number d of features.
    """
    subjects, strange, alike = _images(shape)
    count = len(subjects)
    among = features(torch.cat([subjects, strange]))[:count]
    trials: tuple[tuple[Callable[[], Tensor], float, str], ...] = (
        (lambda: features(torch.cat([subjects, alike]))[:count], SAME, "on the images beside it, or on chance"),
        (lambda: features(torch.cat([alike, subjects]))[count:], ALONE, "on its place in a batch"),
        (lambda: torch.cat([features(image[None]) for image in subjects]), ALONE, "on the size of a batch"),
    )
    for again, tolerance, why in trials:
        found = again()
        distance, length = (found - among).norm(dim=1), among.norm(dim=1)
        if bool((distance > tolerance * length).any()):
            raise UnprovedError(
                "a sample's gradient depends on that sample and the released state alone",
                f"with features {name!r} what is seen in an image depends {why}.",
                "Use a function of each image alone: no batch statistics, dropout or quantisation by the batch.",
            )
    return among.shape[1]


def _images(shape: tuple[int, ...]) -> tuple[Tensor, Tensor, Tensor]:
    """Draw three pale images; black, white and bright noise to stand beside them; and three more of their kind."""
    colours, height, width = shape
    generator = torch.Generator("cpu").manual_seed(0)
    leaves = F.interpolate(dead_leaves(6, _SIDE, generator).float(), (height, width), mode="bilinear")
    pale = (64 + leaves / 2).to(torch.uint8)[:, [i % 3 for i in range(colours)]]
    noise = torch.randint(96, 256, (1, *shape), generator=generator, dtype=torch.uint8)
    black = torch.zeros(1, *shape, dtype=torch.uint8)
    return pale[:3], torch.cat([black, 255 - black, noise]), pale[3:]

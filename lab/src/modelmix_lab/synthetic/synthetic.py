"""Images that a prior is learned from: dead leaves, random paintings, and paintings laid over each other."""

from __future__ import annotations

import torch
from torch import Tensor

from modelmix.features.leaves import dead_leaves, shape
from modelmix_lab.synthetic.textures import paint_textures

_LEAVES, _PAINTED = 0.15, 0.5  # shares of the images; the others are laid over each other
_OBJECTS = 5
_SMALLEST, _LARGEST = 1 / 6, 1 / 2  # radius of an object, in sides of the image


def synthetic(count: int, side: int, generator: torch.Generator) -> Tensor:
    """Draw ``count`` images, uint8 N x 3 x side x side, of three kinds in a fixed order, on the generator's device."""
    leaves, plain = round(_LEAVES * count), round(_PAINTED * count)
    parts = [(dead_leaves, leaves), (paint_textures, plain), (objects, count - leaves - plain)]
    return torch.cat([kind(n, side, generator) for kind, n in parts if n])


def objects(count: int, side: int, generator: torch.Generator) -> Tensor:
    """Draw paintings with up to five shapes in front, which are cut from other paintings."""
    pictures = paint_textures(2 * count, side, generator)
    image, others = pictures[:count], pictures[count:]
    many = torch.randint(1, _OBJECTS + 1, (count, 1, 1), generator=generator, device=image.device)
    for number in range(_OBJECTS):
        inside = shape(count, side, _SMALLEST, _LARGEST, generator)[0] & (number < many)
        image = torch.where(inside[:, None], others.roll(number, 0), image)
    return image

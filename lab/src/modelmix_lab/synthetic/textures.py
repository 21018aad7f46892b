"""Synthetic images: what random functions of position paint.

The colour of a pixel is a network's answer to where it lies and to a few clouds of noise there; nobody trained its
weights. Waves, kinks, steps and bumps put in series give outlines, surfaces and textures of many kinds, as short
drawing programs do (Baradad et al. 2022 train on images of such programs). Like dead leaves, they show no one's data.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from modelmix.features.chance import Chance
from modelmix.features.leaves import clouds, cut, mix_colours

_UNITS = 24  # in every layer of a network
_LAYERS = 3
_NOISES = 3

_SHAPES: tuple[Callable[[Tensor], Tensor], ...] = (
    torch.sin,
    torch.tanh,
    torch.abs,
    lambda t: torch.exp(-(t**2)),
    lambda t: torch.tanh(12 * t),
    lambda t: 2 * torch.sin(3 * t).clamp(-0.5, 0.5),
)


def paint_textures(count: int, side: int, generator: torch.Generator) -> Tensor:
    """Draw ``count`` images, uint8 N x 3 x side x side, each by a network of its own, on the generator's device."""
    device = generator.device

    chance = Chance(generator)
    uniform, normal = chance.uniform, chance.normal

    axis = 2 * (torch.arange(side, device=device) + 0.5) / side - 1
    x, y = (t.expand(count, side, side) for t in (axis[None, None, :], axis[None, :, None]))
    x, y = x - normal(count, 1, 1) / 2, y - normal(count, 1, 1) / 2
    bank = clouds(generator, 1.5, 3.0)
    noise = [0.7 * uniform(count, 1, 1) ** 2 * cut(bank, count, side, generator) for _ in range(_NOISES)]
    h = torch.stack([x, y, (x**2 + y**2).sqrt(), *noise], -1).flatten(1, 2)
    wild = (1 + 2.5 * uniform(count, 1, 1)) * torch.ones(_LAYERS, 1, 1, 1, device=device)
    wild[1:] = 0.8 + 0.7 * uniform(_LAYERS - 1, count, 1, 1)
    for layer in range(_LAYERS):
        weights = normal(count, h.shape[2], _UNITS) * wild[layer] / math.sqrt(h.shape[2])
        h = h @ weights + normal(count, 1, _UNITS)
        h = torch.cat([shape(part) for shape, part in zip(_SHAPES, h.chunk(len(_SHAPES), 2), strict=True)], 2)
    colours = h @ (normal(count, _UNITS, 3) * (uniform(count, _UNITS, 1) < 0.3))
    colours = (colours - colours.mean(1, keepdim=True)) / (colours.std(1, keepdim=True) + 0.05)
    spread = torch.tensor([0.22, 0.06, 0.06], device=device) * (0.4 * normal(count, 1, 3)).exp()
    middle = torch.tensor([0.15, 0.06, 0.06], device=device) * normal(count, 1, 3)
    image = 0.47 + mix_colours(*(colours * spread + middle).unbind(2))
    return (255 * image).round().clamp(0, 255).to(torch.uint8).view(count, 3, side, side)

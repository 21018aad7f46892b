"""Synthetic images: dead leaves, shapes of all sizes that cover each other, with textures and shading.

Edges, occlusion and power-law statistics as in photographs, and no photograph: a network trained on them has seen no
one's data, so what it has learned costs no privacy (Lee, Mumford and Huang 2001; Baradad et al. 2021 train on them).
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from modelmix.features.chance import Chance

_LEAVES = 48  # that are painted over each other in an image
_SMALLEST, _LARGEST = 1 / 20, 1 / 2  # radius of a leaf, in sides of the image
_BANK, _NOISE_SIDE = 64, 128  # pictures of noise from which textures are cut


def dead_leaves(count: int, side: int, generator: torch.Generator) -> Tensor:
    """Draw ``count`` images, uint8 N x 3 x side x side, on the generator's device.

    Radii follow the law r^-3, under which an image looks alike at all scales.
    """
    device = generator.device

    chance = Chance(generator)
    uniform, normal = chance.uniform, chance.normal

    bank = clouds(generator)
    light, mood = uniform(count, low=-math.pi, high=math.pi), mix_colours(uniform(count), *(0.1 * normal(2, count)))
    busy = uniform(count, 1, 1, low=0.15)  # the share of leaves that an image has
    image = torch.zeros(count, 3, side, side, device=device)
    for leaf in range(_LEAVES):
        inside, dx, dy, radius = shape(count, side, _SMALLEST, _LARGEST, generator)
        turn = uniform(count, 1, 1, high=math.pi)
        inside &= uniform(count, 1, 1) < busy
        wave = torch.sin(
            2 * math.pi * uniform(count, 1, 1, low=1, high=12) * (dx * turn.cos() + dy * turn.sin())
            + uniform(count, 1, 1, high=2 * math.pi)
        )
        shade = (dx * light.cos()[:, None, None] + dy * light.sin()[:, None, None]) / radius
        rough = cut(bank, count, side, generator)
        strength = [uniform(count, 1, 1) ** 2 * most for most in (0.2, 0.25, 0.15)]
        texture = strength[0] * wave + strength[1] * rough + strength[2] * shade
        own = mix_colours(uniform(count), *(0.08 * normal(2, count)))
        base = 0.35 * mood + 0.65 * own
        paint = base[:, :, None, None] + texture[:, None] * (1 + 0.3 * normal(count, 3, 1, 1))
        if leaf == 0:
            image = paint  # the ground, which has no edge
        image = torch.where(inside[:, None], paint, image)
    return (255 * image).round().clamp(0, 255).to(torch.uint8)


def shape(
    count: int, side: int, smallest: float, largest: float, generator: torch.Generator
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Draw a leaf for every image: the pixels within it, their offsets from its middle in x and y, and its radius.

    Radii are in sides of the image and follow the law r^-3.
    """
    device = generator.device

    def uniform(low: float = 0.0, high: float = 1.0) -> Tensor:
        return low + (high - low) * torch.rand(count, 1, 1, generator=generator, device=device)

    axis = (torch.arange(side, device=device) + 0.5) / side
    dx, dy = axis[None, None, :] - uniform(-0.1, 1.1), axis[None, :, None] - uniform(-0.1, 1.1)
    angle = uniform(high=math.pi)
    along, across = rotate(dx, dy, angle)
    radius = smallest * (1 - uniform() * (1 - (smallest / largest) ** 2)) ** -0.5
    ratio = (0.35 * torch.randn(count, 1, 1, generator=generator, device=device)).exp()
    # Diamonds, ellipses and boxes: |u|^k + |v|^k < 1.
    k = 2 ** torch.randint(0, 4, (count, 1, 1), generator=generator, device=device)
    inside = (along / (radius * ratio)).abs() ** k + (across * ratio / radius).abs() ** k < 1
    return inside, dx, dy, radius


def rotate(dx: Tensor, dy: Tensor, angle: Tensor) -> tuple[Tensor, Tensor]:
    """Rotate offsets by an angle."""
    return dx * angle.cos() + dy * angle.sin(), dy * angle.cos() - dx * angle.sin()


def mix_colours(light: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """Mix red, green and blue from brightness and two opponent colours, which vary less in the world."""
    return torch.stack([light + a + b, light - a + 0.5 * b, light - 1.5 * b], 1)


def clouds(generator: torch.Generator, least: float = 0.5, most: float = 2.0) -> Tensor:
    """Draw pictures of noise whose spectrum falls like 1/f^e, e from least to most; mean 0 and variance 1 each."""
    device = generator.device
    f = torch.fft.fftfreq(_NOISE_SIDE, device=device)
    distance = (f[:, None] ** 2 + f[None, :] ** 2).sqrt().clamp_min(1 / _NOISE_SIDE)
    steep = least + (most - least) * torch.rand(_BANK, 1, 1, generator=generator, device=device)
    white = torch.randn(_BANK, _NOISE_SIDE, _NOISE_SIDE, generator=generator, device=device)
    noise: Tensor = torch.fft.ifft2(torch.fft.fft2(white) * distance**-steep).real
    return (noise - noise.mean((1, 2), keepdim=True)) / noise.std((1, 2), keepdim=True)


def cut(bank: Tensor, count: int, side: int, generator: torch.Generator) -> Tensor:
    """Cut a piece of some picture of the bank for every image; pictures are periodic."""
    which = torch.randint(len(bank), (count, 1, 1), generator=generator, device=bank.device)
    corner = torch.randint(_NOISE_SIDE, (2, count, 1, 1), generator=generator, device=bank.device)
    step = torch.arange(side, device=bank.device)
    return bank[which, (corner[0] + step[:, None]) % _NOISE_SIDE, (corner[1] + step[None, :]) % _NOISE_SIDE]

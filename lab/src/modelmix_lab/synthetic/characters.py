"""Synthetic images: digits and letters as on houses and signs, one in the middle and parts of its neighbours.

Every character is a few strokes of our own, no font and no photograph: points on a grid, drawn with a pen of random
width on random grounds, bent, slanted, lit, blurred. Which character is in the middle is known, so a network can learn
to read from them, and what it has learned shows no one's data. How they vary was chosen by looking at training images
of SVHN: for that set, and no other, it is a choice that epsilon does not count.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from modelmix.features.chance import Chance
from modelmix.features.leaves import mix_colours
from modelmix_lab.synthetic.alphabet import CLASSES, strokes
from modelmix_lab.synthetic.textures import paint_textures

_DIGITS = 0.7  # share of the images with a digit in the middle; letters teach shapes that digits lack
_CHUNK = 2048  # images at a time
_GROUNDS = 512  # paintings that grounds are cut from


def characters(count: int, side: int, generator: torch.Generator) -> Tensor:
    """Draw ``count`` images, uint8 N x 3 x side x side, on the generator's device."""
    return labelled_characters(count, side, generator)[0]


def labelled_characters(count: int, side: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Draw ``count`` images, uint8 N x 3 x side x side, with labels: which of ``CLASSES`` is in the middle, int64."""
    grounds = paint_textures(min(count, _GROUNDS), side, generator).float() / 255
    parts = [_scene(min(_CHUNK, count - start), side, grounds, generator) for start in range(0, count, _CHUNK)]
    return torch.cat([image for image, _ in parts]), torch.cat([label for _, label in parts])


def _scene(count: int, side: int, grounds: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Paint images with labels: characters on plates or walls, with rims and shadows, in some light."""
    device = generator.device

    chance = Chance(generator)
    uniform, normal = chance.uniform, chance.normal

    def sometimes(share: float) -> Tensor:
        return uniform(count, 1, 1) < share

    depth, labels = _draw_strokes(count, side, generator)
    ink = (0.5 + depth).clamp(0, 1)  # at the edge of a stroke, paint fades over a pixel
    hollow = sometimes(0.06)
    rim = (0.5 + depth + side / 32 * uniform(count, 1, 1, low=0.5, high=2.5)).clamp(0, 1) * (sometimes(0.12) | hollow)

    # Colours: lights of ground and figure apart by a contrast that is often low, little colour.
    contrast = uniform(count, low=math.log(0.12), high=math.log(0.7)).exp()
    contrast = torch.where(uniform(count) < 0.5, contrast, -contrast)
    room = contrast.abs() / 2 + 0.03  # from black and from white
    middle = (0.45 + 0.17 * normal(count)).clamp(room, 1 - room)
    vivid = 0.01 + 0.1 * uniform(count) ** 4
    axes = torch.tensor([[0.5], [1.0]], device=device)  # the world has more blue and yellow than red and green
    cast = 0.025 * normal(2, count)
    tone = [axes * (cast + vivid * normal(2, count)) for _ in range(4)]
    lights = [middle - contrast / 2, middle + contrast / 2, uniform(count), middle - contrast * uniform(count)]
    ground, paint, edge, plate = (
        mix_colours(light, *ab)[:, :, None, None] for light, ab in zip(lights, tone, strict=True)
    )

    # The ground: a plate that may end near a border, rough or smooth.
    axis = 2 * (torch.arange(side, device=device) + 0.5) / side - 1
    x, y = axis[None, None, :], axis[None, :, None]
    outside = torch.zeros(count, side, side, device=device)
    for along, across in ((x, y), (-x, y), (y, x), (-y, x)):
        where = along + 0.08 * normal(count, 1, 1) * across - uniform(count, 1, 1, low=0.6, high=1.1)
        outside = torch.maximum(outside, (0.5 + where * side / 2).clamp(0, 1) * sometimes(0.25))
    image = torch.lerp(ground, plate, outside[:, None])
    image = image + uniform(count, 1, 1, 1) ** 3 * 0.7 * _cut(grounds, count, generator)

    # A shadow to one side, a light or a second shadow to the other: digits of metal, digits that stand off a wall.
    away = side / 32 * 1.2 * normal(2, count)
    for sign, share in ((1, 0.35), (-1, 0.2)):
        cast_off = _blur(ink[:, None], side / 32 * uniform(2, count, low=0.3, high=1.2), sign * away)
        shade = mix_colours(uniform(count), *tone[3])[:, :, None, None]
        image = torch.lerp(image, shade, cast_off * (sometimes(share) * uniform(count, 1, 1, low=0.2))[:, None])
    edge, paint = torch.where(hollow[:, None], paint, edge), torch.where(hollow[:, None], ground, paint)
    image = torch.lerp(image, edge, rim[:, None])
    light = uniform(count, 1, 1, low=-math.pi, high=math.pi)
    slope = x * light.cos() + y * light.sin()
    paint = paint + (0.15 * normal(count, 1, 1) * slope)[:, None] * (uniform(count, 1, 1, 1) < 0.4)
    paint = paint + uniform(count, 1, 1, 1) ** 4 * 0.6 * _cut(grounds, count, generator)
    image = torch.lerp(image, paint, ink[:, None])
    light = uniform(count, 1, 1, low=-math.pi, high=math.pi)
    image = image * (1 + (0.12 * normal(count, 1, 1) * (x * light.cos() + y * light.sin()))[:, None])
    return _photograph(image, generator), labels


def _photograph(image: Tensor, generator: torch.Generator) -> Tensor:
    """Photograph with a poor camera, uint8: grain, a blur that is often strong, halos, colour not quite in place."""
    device, (count, _, side, _) = image.device, image.shape

    chance = Chance(generator)
    uniform, normal = chance.uniform, chance.normal

    image = image + 0.03 * uniform(count, 1, 1, 1) ** 2 * normal(count, 3, side, side)
    strong = side / 32 * (uniform(1, count, low=math.log(0.5), high=math.log(2.3)).exp())
    strong = strong * (0.15 * normal(2, count)).exp()
    image = _blur(image, strong, torch.zeros_like(strong))
    sharp = uniform(count, 1, 1, 1) * (uniform(count, 1, 1, 1) < 0.35)  # cameras sharpen, which leaves halos
    image = image + sharp * (image - _blur(image, 0.6 + strong, torch.zeros_like(strong)))
    grey = image.mean(1, keepdim=True)
    soft = torch.full((2, count), side / 32 * 1.5, device=device)
    fringe = mix_colours(
        torch.zeros(count, device=device), *(0.2 * normal(2, count) * torch.tensor([[0.5], [1.0]], device=device))
    )[:, :, None, None]
    beside = _blur(grey, soft, side / 32 * 0.7 * normal(2, count)) - grey
    image = grey + _blur(image - grey, soft, torch.zeros_like(soft)) + fringe * beside
    image = image + 0.012 * uniform(count, 1, 1, 1) ** 2 * (
        normal(count, 1, side, side) + 0.5 * normal(count, 3, side, side)
    )
    return (255 * image).round().clamp(0, 255).to(torch.uint8)


def _draw_strokes(count: int, side: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Compute how deep every pixel lies within the strokes, in pixels, negative outside; and the labels.

    Characters to the left and right, or above and below, belong to the same line: same pen, slant and bend.
    """
    device = generator.device

    chance = Chance(generator)
    uniform, normal = chance.uniform, chance.normal

    straight, curved, first, ways = (t.to(device) for t in strokes())
    digit = uniform(count, 3) < torch.tensor([_DIGITS, 0.9, 0.9], device=device)  # the middle, before, after
    label = (uniform(count, 3) * torch.where(digit, 10, len(CLASSES) - 10)).long() + torch.where(digit, 0, 10)
    way = first[label] + (uniform(count, 3) * ways[label]).long()

    # Round strokes of some are rounder than parabolas, of others nearly boxes.
    angular = torch.where(uniform(count) < 0.3, uniform(count, high=0.6), uniform(count, low=-0.2, high=0.1))
    angular = angular.view(count, 1, 1, 1, 1)
    points = torch.lerp(curved[way], straight[way], angular)  # N x 3 x pieces x 2 ends x 2
    wide = uniform(count, 1, low=math.log(0.42), high=math.log(0.95)).exp()
    px, py = points[..., 0] * wide[:, :, None, None], points[..., 1]
    spread = px.flatten(2).abs().amax(2)  # half the width of each
    gap = uniform(count, 2, low=-0.04, high=0.22) + 0.12
    beside = spread[:, :1] + spread[:, 1:] + gap
    there = uniform(count, 2) < 0.75
    stacked = uniform(count, 1) < 0.03
    sign = torch.tensor([-1.0, 1.0], device=device)
    far = torch.where(there, 0.0, 50.0)
    zero = torch.zeros(count, 1, device=device)
    px = px + torch.cat([zero, sign * torch.where(stacked, 0.2 * normal(count, 2), beside) + far], 1)[:, :, None, None]
    drift = 0.04 * normal(count, 2) * (uniform(count, 1) < 0.5)
    py = py + torch.cat([zero, torch.where(stacked, sign * (1.1 + gap), drift)], 1)[:, :, None, None]

    def each(t: Tensor) -> Tensor:
        return t.view(count, 1, 1)

    px, py = px.flatten(1, 2), py.flatten(1, 2)  # N x pieces of all three x 2 ends
    # Smooth bends, then a slant, a turn and the place in the image.
    for size, pace in ((0.035, 2.0), (0.012, 6.0)):
        bends = []
        for _ in range(2):
            strength, right, down = size * normal(count, 1, 1), pace * normal(count, 1, 1), pace * normal(count, 1, 1)
            bends.append(strength * torch.sin(right * px + down * py + uniform(count, 1, 1, high=2 * math.pi)))
        px, py = px + bends[0], py + bends[1]
    px = px - each(0.12 * normal(count)) * py - each(0.1 * (uniform(count) < 0.2).float()) * py
    angle = each(0.08 * normal(count))
    px, py = px * angle.cos() - py * angle.sin(), px * angle.sin() + py * angle.cos()
    height = side * uniform(count, 1, low=0.52, high=0.92)
    px = px * each(height) + each(side / 2 + side * 0.03 * normal(count))
    py = py * each(height) + each(side / 2 + side * 0.03 * normal(count))

    # A pen that draws level lines thinner than upright ones.
    flat = uniform(count, 1, 1, low=math.log(0.9), high=math.log(2.4)).exp()
    half = height[:, None] * flat.sqrt() * uniform(count, 1, 1, low=math.log(0.033), high=math.log(0.1)).exp()
    (ax, bx), (ay, by) = px.unbind(2), (py * flat).unbind(2)
    vx, vy = bx - ax, by - ay
    square = vx**2 + vy**2
    scale = 1 / square.clamp_min(1e-6)
    # Distances from balls count less, so that balls are thicker than strokes.
    less = torch.where(square < 1e-6, 1 / uniform(count, 1, low=1.0, high=2.0), 1.0)
    at = torch.arange(side, device=device) + 0.5
    x, y = at[None, None, :], at[None, :, None] * flat
    nearest = torch.full((count, side, side), 1e9, device=device)
    for piece in range(ax.shape[1]):
        shrunk = less[:, piece, None, None]
        dx, dy = (x - ax[:, piece, None, None]) * shrunk, (y - ay[:, piece, None, None]) * shrunk
        ux, uy = vx[:, piece, None, None], vy[:, piece, None, None]
        # How far along the piece the nearest point lies: a sum of a row and a column.
        along = (dx * (ux * scale[:, piece, None, None]) + dy * (uy * scale[:, piece, None, None])).clamp_(0, 1)
        nearest = torch.minimum(nearest, (dx - along * ux).square_() + (dy - along * uy).square_())
    return half - nearest.sqrt(), label[:, 0]


def _cut(grounds: Tensor, count: int, generator: torch.Generator) -> Tensor:
    """Cut paintings less their means, one for every image: moved over their borders, mirrored or not, paler."""
    device = generator.device
    which = torch.randint(len(grounds), (count,), generator=generator, device=device)
    shift, flip = (torch.randint(n, (2, count, 1), generator=generator, device=device) for n in (grounds.shape[-1], 2))
    step = torch.arange(grounds.shape[-1], device=device)
    rows, columns = (((step - shift[i]) * (1 - 2 * flip[i])) % len(step) for i in range(2))
    picture = grounds[which[:, None, None], :, rows[:, :, None], columns[:, None, :]].permute(0, 3, 1, 2)
    grey = picture.mean(1, keepdim=True)
    picture = grey + torch.rand(count, 1, 1, 1, generator=generator, device=device) * (picture - grey)
    return picture - picture.mean((1, 2, 3), keepdim=True)


def _blur(image: Tensor, width: Tensor, shift: Tensor) -> Tensor:
    """Blur every image by a Gaussian with its own width in y and x, 2 x N, and move it by shifts, 2 x N, in pixels."""
    at = torch.arange(image.shape[-1], device=image.device)
    way = at[:, None] - at[None, :] - shift[:, :, None, None]
    spread = torch.softmax(-(way**2) / (2 * width[:, :, None, None] ** 2), 3)
    return spread[0][:, None] @ image @ spread[1][:, None].mT

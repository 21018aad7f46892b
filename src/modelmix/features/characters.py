"""Synthetic images: digits and letters as on houses and signs, one in the middle and parts of its neighbours.

Every character is a few strokes of our own, no font and no photograph: points on a grid, drawn with a pen of random
width on random grounds, bent, slanted, lit, blurred. Which character is in the middle is known, so a network can learn
to read from them, and what it has learned shows no one's data.
"""

from __future__ import annotations

import math
from functools import cache

import torch
from torch import Tensor

from modelmix.features.leaves import coloured
from modelmix.features.textures import painted

ALPHABET: dict[str, tuple[str, ...]] = {
    "0": ("~306068080030", "~3060646808040030", "~305058181030"),
    "1": (
        "3038",
        "123038",
        "113038 1858",
        "023038",
        "213138",
        "123038 1858",
        "2131 3138 1858",
        "~123230 3038",
        "043038",
        "144048",
        "1131 3038 1858",
    ),
    "2": (
        "~0200606308 0868",
        "~020060640508 0868",
        "~0110606308 0868",
        "~0200606408 0868",
        "~0200606308 ~08274868 6866 12",  # a ball at its end and a wave for a foot
        "~0200606308 0868 6866 12",
        "~0200606308 ~08164868 12",
        "~0300606308 ~08264868 ~07375867 13",
        "~0310505308 ~08264868 6865 13",
    ),
    "3": (
        "~0110606424 ~2464681807",
        "~0200606424 ~2464680806",
        "~0210505424 ~2464681806",
        "006033 ~3363681807",
        "~0110606434 ~3464681807",
        "~0200606424 ~2464680806 12 16",
        "~0200505424 ~2464680806 12 16",
        "02006033 ~3363680806 16",
    ),
    "4": ("48400565", "100565 4248", "48400666", "000464 6068", "58500565", "200565 4348", "48400565 2868"),
    "5": (
        "501004 ~041363681807",
        "600004 ~040363680806",
        "601003 ~0363681807",
        "600003 ~0363680806",
        "601004 ~041363680806 16",
        "~605010 1004 ~041363680806 16",
    ),
    "6": (
        "~5140000868630305",
        "~6260000868630305",
        "~50040868630306",
        "4005 ~050868630305",
        "~6260000868630305 52",
    ),
    "7": (
        "006028",
        "0060 ~603428",
        "006028 1454",
        "01006028",
        "006018",
        "0060 ~603438",
        "020060 ~603428",
        "0300600161 ~603428",
        "0300600161 ~603438",
    ),
    "8": (
        "~305054141030 ~346468080434",
        "~306064040030 ~346468080434",
        "~30606305086865030030",
        "~305053131030 ~336368080333",
    ),
    "9": (
        "~1728686000056563",
        "~0608686000056563",
        "~18646000056562",
        "2863 ~636000056563",
        "~0608686000056563 16",
        "~636000056563 6368",
    ),
    "A": ("083068 1555", "0803 ~03006063 6368 0464"),
    "B": ("0008 ~00606404 ~04646808",),
    "C": ("~626000086866",),
    "D": ("0008 ~00606808",),
    "E": ("60000868 0454",),
    "F": ("600008 0454",),
    "G": ("~626000086866 666434",),
    "H": ("0008 6068 0464",),
    "I": ("3038 1050 1858",),
    "J": ("5055 ~55580806", "2060 5055 ~55580806"),
    "K": ("0008 6005 2368",),
    "L": ("000868",),
    "M": ("0800346068", "0800376068"),
    "N": ("08006860",),
    "O": ("~306068080030",),
    "P": ("0800 ~00606404",),
    "Q": ("~306068080030 4668",),
    "R": ("0800 ~00606404 3468",),
    "S": ("~6260000464680806",),
    "T": ("0060 3038",),
    "U": ("0005 ~05086865 6560",),
    "V": ("003860",),
    "W": ("0018325860", "0018305860"),
    "X": ("0068 6008",),
    "Y": ("003460 3438",),
    "Z": ("00600868",),
}
"""Ways to write every character. Strokes are words, points are two figures, x from 0 to 6 and y from 0 to 8, down. A
stroke that begins with ~ is round: it starts at the first point, ends at the last, and the others are corners that it
cuts, passing half-way between them. A stroke of one point is a ball."""

CLASSES = tuple(ALPHABET)
"""Digits have their own values as labels, letters follow."""

_DIGITS = 0.7  # share of the images with a digit in the middle; letters teach shapes that digits lack
_ROUND = 4  # pieces of a round stroke at every corner; even
_CHUNK = 2048  # images at a time
_GROUNDS = 512  # paintings that grounds are cut from


def characters(count: int, side: int, generator: torch.Generator) -> Tensor:
    """``count`` images, uint8 N x 3 x side x side, on the generator's device."""
    return labelled_characters(count, side, generator)[0]


def labelled_characters(count: int, side: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """``count`` images, uint8 N x 3 x side x side, and which of `CLASSES` is in the middle of each, int64."""
    grounds = painted(min(count, _GROUNDS), side, generator).float() / 255
    parts = [_scene(min(_CHUNK, count - start), side, grounds, generator) for start in range(0, count, _CHUNK)]
    return torch.cat([image for image, _ in parts]), torch.cat([label for _, label in parts])


def _scene(count: int, side: int, grounds: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Images and labels: characters painted on plates or walls, with rims and shadows, in some light."""
    device = generator.device

    def uniform(*shape: int, low: float = 0.0, high: float = 1.0) -> Tensor:
        return low + (high - low) * torch.rand(shape, generator=generator, device=device)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, device=device)

    def sometimes(share: float) -> Tensor:
        return uniform(count, 1, 1) < share

    depth, labels = _drawn(count, side, generator)
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
        coloured(light, *ab)[:, :, None, None] for light, ab in zip(lights, tone, strict=True)
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
        cast_off = _blurred(ink[:, None], side / 32 * uniform(2, count, low=0.3, high=1.2), sign * away)
        shade = coloured(uniform(count), *tone[3])[:, :, None, None]
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
    return _photographed(image, generator), labels


def _photographed(image: Tensor, generator: torch.Generator) -> Tensor:
    """As a poor camera sees it, uint8: grain, a blur that is often strong, halos, colour not quite in place."""
    device, (count, _, side, _) = image.device, image.shape

    def uniform(*shape: int, low: float = 0.0, high: float = 1.0) -> Tensor:
        return low + (high - low) * torch.rand(shape, generator=generator, device=device)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, device=device)

    image = image + 0.03 * uniform(count, 1, 1, 1) ** 2 * normal(count, 3, side, side)
    strong = side / 32 * (uniform(1, count, low=math.log(0.5), high=math.log(2.3)).exp())
    strong = strong * (0.15 * normal(2, count)).exp()
    image = _blurred(image, strong, torch.zeros_like(strong))
    sharp = uniform(count, 1, 1, 1) * (uniform(count, 1, 1, 1) < 0.35)  # cameras sharpen, which leaves halos
    image = image + sharp * (image - _blurred(image, 0.6 + strong, torch.zeros_like(strong)))
    grey = image.mean(1, keepdim=True)
    soft = torch.full((2, count), side / 32 * 1.5, device=device)
    fringe = coloured(
        torch.zeros(count, device=device), *(0.2 * normal(2, count) * torch.tensor([[0.5], [1.0]], device=device))
    )[:, :, None, None]
    beside = _blurred(grey, soft, side / 32 * 0.7 * normal(2, count)) - grey
    image = grey + _blurred(image - grey, soft, torch.zeros_like(soft)) + fringe * beside
    image = image + 0.012 * uniform(count, 1, 1, 1) ** 2 * (
        normal(count, 1, side, side) + 0.5 * normal(count, 3, side, side)
    )
    return (255 * image).round().clamp(0, 255).to(torch.uint8)


def _drawn(count: int, side: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """How deep every pixel lies within the strokes, in pixels, negative outside; and the labels of the middle ones.

    Characters to the left and right, or above and below, belong to the same line: same pen, slant and bend.
    """
    device = generator.device

    def uniform(*shape: int, low: float = 0.0, high: float = 1.0) -> Tensor:
        return low + (high - low) * torch.rand(shape, generator=generator, device=device)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, device=device)

    straight, curved, first, ways = (t.to(device) for t in _strokes())
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
    """Paintings less their means, one for every image: moved over their borders, mirrored or not, paler."""
    device = generator.device
    which = torch.randint(len(grounds), (count,), generator=generator, device=device)
    shift, flip = (torch.randint(n, (2, count, 1), generator=generator, device=device) for n in (grounds.shape[-1], 2))
    step = torch.arange(grounds.shape[-1], device=device)
    rows, columns = (((step - shift[i]) * (1 - 2 * flip[i])) % len(step) for i in range(2))
    picture = grounds[which[:, None, None], :, rows[:, :, None], columns[:, None, :]].permute(0, 3, 1, 2)
    grey = picture.mean(1, keepdim=True)
    picture = grey + torch.rand(count, 1, 1, 1, generator=generator, device=device) * (picture - grey)
    return picture - picture.mean((1, 2, 3), keepdim=True)


def _blurred(image: Tensor, width: Tensor, shift: Tensor) -> Tensor:
    """Images after a Gaussian blur of a width of their own in y and x, 2 x N, moved by shifts, 2 x N, in pixels."""
    at = torch.arange(image.shape[-1], device=image.device)
    way = at[:, None] - at[None, :] - shift[:, :, None, None]
    spread = torch.softmax(-(way**2) / (2 * width[:, :, None, None] ** 2), 3)
    return spread[0][:, None] @ image @ spread[1][:, None].mT


@cache
def _strokes() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """All ways to write characters as pieces of lines, and where the ways of every class begin and how many there are.

    Pieces are ways x pieces x 2 ends x 2, in heights of a character from its middle: with
    the corners of round strokes, and without.
    """
    forms = []
    for word in (way for ways in ALPHABET.values() for way in ways):
        strokes = []
        for stroke in word.split():
            points = torch.tensor([float(figure) for figure in stroke.lstrip("~")]).view(-1, 2)
            points = points if len(points) > 1 else points.expand(2, 2)
            bent = stroke[0] == "~"
            strokes.append([_sampled(points, rounded) if bent else points for rounded in (False, True)])
        forms.append(strokes)
    both = []
    for kind in range(2):
        lines = [torch.cat([torch.stack([p[kind][:-1], p[kind][1:]], 1) for p in strokes]) for strokes in forms]
        most = max(len(line) for line in lines)
        padded = torch.stack([torch.cat([line, line[-1:].expand(most - len(line), 2, 2)]) for line in lines])
        ends = padded.flatten(1, 2)
        middle = (ends.amin(1) + ends.amax(1)) / 2
        both.append((padded - middle[:, None, None]) / 8)
    many = torch.tensor([len(ways) for ways in ALPHABET.values()])
    return both[0], both[1], many.cumsum(0) - many, many


def _sampled(points: Tensor, rounded: bool) -> Tensor:
    """Points along a round stroke, parabolas that cut its corners, or along its corners."""
    corners = points[1:-1]
    half = (corners[1:] + corners[:-1]) / 2
    starts, ends = torch.cat([points[:1], half])[:, None], torch.cat([half, points[-1:]])[:, None]
    t = (torch.arange(_ROUND) / _ROUND)[:, None]
    c = corners[:, None]
    if rounded:
        found = (1 - t) ** 2 * starts + 2 * t * (1 - t) * c + t**2 * ends
    else:
        found = torch.where(t < 0.5, torch.lerp(starts, c, 2 * t), torch.lerp(c, ends, 2 * t - 1))
    return torch.cat([found.flatten(0, 1), points[-1:]])

"""Digits and letters as strokes of our own, no font: points on a grid, and lines between them."""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

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

_ROUND = 4  # pieces of a round stroke at every corner; even


@cache
def strokes() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return all ways to write characters as pieces of lines, where the ways of every class begin, and their number.

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
            strokes.append([_sample_points(points, rounded) if bent else points for rounded in (False, True)])
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


def _sample_points(points: Tensor, rounded: bool) -> Tensor:
    """Sample points along a round stroke, parabolas that cut its corners, or along its corners."""
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

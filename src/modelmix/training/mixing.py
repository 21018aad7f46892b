"""The mixing of Algorithm 1: a uniformly random point between the last two states, coordinate by coordinate.

A mixed state is midpoint + (alpha - 1/2) * gap with alpha uniform on (0, 1). Small gaps are widened about the same
midpoint first, so that every coordinate moves in an interval of width tau or more.
"""

from __future__ import annotations

import torch
from torch import Tensor

from modelmix.errors import ModelMixError

PADDINGS = ("exact", "paper")


def midpoint(last: Tensor, previous: Tensor) -> Tensor:
    """(w_{k-1} + w_{k-2}) / 2. Public: both states are."""
    return 0.5 * (last + previous)


def padded_gap(last: Tensor, previous: Tensor, tau: float, padding: str) -> Tensor:
    """w_{k-1} - w_{k-2}, with gaps below tau widened.

    "exact" widens to tau, as the authors' code does; "paper" widens to |gap| + tau, as lines 6 to 8 of Algorithm 1 say.
    Both are covered by the proof; the first adds less noise. The states themselves are kept as they were released.
    """
    if padding not in PADDINGS:
        raise ModelMixError(f"padding = {padding!r} is unknown: choose one of {', '.join(PADDINGS)}.")
    if not tau >= 0:
        raise ModelMixError(f"a mixing threshold of {tau:g} widens nothing: it must be at least 0.")
    gap = last - previous
    # sign(0) is +1: two equal coordinates must be mixed as well.
    sign = torch.where(gap >= 0, 1.0, -1.0).to(gap.dtype)
    widened = sign * tau if padding == "exact" else gap + sign * tau
    return torch.where(gap.abs() < tau, widened, gap)

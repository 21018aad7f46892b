"""Randomness that gets no number: the paper's negative answers (Sections 4.4 and 4.5), as examples.

Bounded randomness without noise proves nothing, and what multiplies a sample's contribution (dropout, augmentation)
proves nothing more than the noise beside it: the sample decides what is left.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NoReturn

from modelmix._checks import rate
from modelmix.errors import ModelMixError, UnprovedError

ADDED = "randomness is added, and independent of the samples"


@dataclass(frozen=True)
class Localised:
    """Randomness that leaves a difference visible with probability ``visible`` in one step, and no noise.

    Then the outputs can be told apart for certain whenever it is visible: no epsilon holds with a delta below
    ``least_delta``, however large.
    """

    what: str
    visible: float

    def least_delta(self, steps: int) -> float:
        """1 - (1 - visible)^T."""
        return -math.expm1(steps * math.log1p(-self.visible)) if self.visible < 1 else 1.0


def bounded_example(width: float = 5.0, shift: float = 1.0) -> Localised:
    """Section 4.4: gradients 0 and 1 plus U[0, 5]. Whatever falls below 1 or above 5 gives the answer away."""
    return Localised(f"U[0, {width:g}] on gradients that differ by {shift:g}", min(1.0, shift / width))


def erasing_example(height: int, width: int, rectangle: tuple[int, int]) -> Localised:
    """Section 4.5: two images that differ in one corner pixel, a random rectangle erased. Mostly it is still there."""
    places = (height - rectangle[0] + 1) * (width - rectangle[1] + 1)
    if places < 1:
        raise ModelMixError("the rectangle does not fit into the image.")
    return Localised(f"erasing {rectangle[0]} x {rectangle[1]} of {height} x {width} pixels", 1 - 1 / places)


def dropout_example(keep: float, features: int = 1) -> Localised:
    """Two samples that differ in ``features`` features, each kept with probability ``keep``."""
    visible = 1 - (1 - rate("keep", keep, "the rate at which features are kept")) ** features
    return Localised(f"dropout that keeps {keep:g} of {features} features", visible)


MULTIPLICATIVE = ("dropout", "augmentation", "erasing", "cropping", "mixup")


def multiplicative(what: str) -> NoReturn:
    """Dropout, augmentation, erasing: no number, with noise or without.

    They multiply what the sample brings, so the sample decides what is left: on a sample whose features are all zero
    dropout does nothing, on an image that is one colour neither flips nor crops do, and its clipped gradient, the bias'
    alone, is as long as any. For that sample the step is plain DP-SGD, and that is the epsilon that holds.
    """
    if what not in MULTIPLICATIVE:
        raise ModelMixError(f"{what!r} is unknown: choose one of {', '.join(MULTIPLICATIVE)}.")
    raise UnprovedError(
        ADDED,
        f"{what} multiplies what a sample brings: there are samples which it does not change at all.",
        "It may be used freely; count the Gaussian noise alone.",
    )

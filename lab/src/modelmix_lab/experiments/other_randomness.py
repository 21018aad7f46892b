"""Section 4.5 measured: epsilon over the size of what is added beside the noise, for each kind of randomness."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from modelmix.accounting.accountant import epsilon
from modelmix.accounting.mechanism import Mechanism
from modelmix.errors import UnprovedError
from modelmix_lab.theory import other_randomness, sphere

Array = NDArray[np.float64]
Z, RATE, STEPS, DELTA = 1.0, 0.05, 200, 1e-5
STDS = tuple(np.geomspace(0.2, 6.0, 15))


def _two_point(std: float) -> float:
    law = other_randomness.Discrete(Z, (-std, std), (0.5, 0.5))
    return epsilon(other_randomness.coordinatewise(law, RATE), DELTA, steps=STEPS)


def _sphere(dimension: int) -> Callable[[float], float]:
    return lambda std: sphere.Sphere(Z, std * math.sqrt(dimension), RATE, dimension).epsilon(DELTA, STEPS)


KINDS: dict[str, Callable[[float], float]] = {
    "Langevin (Gaussian)": lambda std: epsilon(other_randomness.langevin(Mechanism(Z, RATE), std), DELTA, steps=STEPS),
    "sphere, d = 100": _sphere(100),
    "uniform (mixing, dither)": lambda std: epsilon(Mechanism(Z, RATE, std * math.sqrt(12)), DELTA, steps=STEPS),
    "sphere, d = 3": _sphere(3),
    "two points": _two_point,
}
"""From the added standard deviation of a coordinate (over the clip) to epsilon."""


@dataclass(frozen=True, eq=False)
class Line:
    """epsilon over the added standard deviation; NaN from where the worst gradient is not known."""

    name: str
    std: Array
    epsilon: Array


def lines(stds: Sequence[float] = STDS) -> list[Line]:
    out = []
    for name, kind in KINDS.items():
        found = np.full(len(stds), np.nan)
        for i, std in enumerate(stds):
            try:
                found[i] = kind(float(std))
            except UnprovedError:
                break  # and nothing is drawn beyond
        out.append(Line(name, np.asarray(stds, dtype=float), found))
    return out


def without() -> float:
    """epsilon of the Gaussian noise alone, which holds whatever is added."""
    return epsilon(Mechanism(Z, RATE), DELTA, steps=STEPS)

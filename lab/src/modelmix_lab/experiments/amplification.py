"""Theorem 4.2 over the mixing width: its constants beside the Renyi accountant, and where its law sets in."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from modelmix.accounting.accountant import epsilon
from modelmix.accounting.mechanism import Mechanism
from modelmix.errors import ModelMixError
from modelmix_lab.theory.amplification import bernstein, law_window

Array = NDArray[np.float64]
_SPAN = 6
SLOPES: tuple[tuple[str, Mechanism, int], ...] = (
    ("Laplace, z = 1, q = 1, T = 1,000", Mechanism(1.0, 1.0, law="laplace"), 1000),
    ("Laplace, z = 5, q = 1, T = 1,000", Mechanism(5.0, 1.0, law="laplace"), 1000),
    ("Gaussian, z = 0.367, q = 0.02, T = 5,000, p = 1", Mechanism(0.367, 0.02), 5000),
    ("Gaussian, z = 0.367, q = 0.02, T = 5,000, p = 100", Mechanism(0.367, 0.02, p=100), 5000),
)
"""The last two are Figure 3's."""


@dataclass(frozen=True, eq=False)
class Composition:
    """Mixed Laplace noise without sampling: epsilon over the width by each proof; NaN where one says nothing."""

    z: float
    steps: int
    delta: float
    omega: Array
    renyi: Array
    bernstein: Array
    lemma: Array
    pure: float
    window: tuple[float, float]


def composition(z: float, steps: int, delta: float, omega: Sequence[float] | Array) -> Composition:
    rows = []
    for width in omega:
        mechanism = Mechanism(z, 1.0, float(width), law="laplace")
        try:
            lemma = bernstein(mechanism, delta, steps, lemma=True).epsilon
        except ModelMixError:
            lemma = float("nan")
        rows.append((epsilon(mechanism, delta, steps=steps), bernstein(mechanism, delta, steps).epsilon, lemma))
    renyi, ours, lemmas = (np.array(column) for column in zip(*rows, strict=True))
    window = law_window(Mechanism(z, 1.0, law="laplace"), delta, steps)
    return Composition(z, steps, delta, np.asarray(omega, dtype=float), renyi, ours, lemmas, steps / z, window)


@dataclass(frozen=True, eq=False)
class Slope:
    """d log(epsilon) / d log(omega) of the Renyi accountant, over a factor of about four: orders are whole numbers."""

    name: str
    omega: Array
    slope: Array


def slopes(omega: Sequence[float] | Array, delta: float = 1e-5) -> list[Slope]:
    omega = np.asarray(omega, dtype=float)
    out = []
    for name, mechanism, steps in SLOPES:
        found = np.array([epsilon(replace(mechanism, mixing_width=float(w)), delta, steps=steps) for w in omega])
        with np.errstate(divide="ignore", invalid="ignore"):
            slope = np.log(found[_SPAN:] / found[:-_SPAN]) / np.log(omega[_SPAN:] / omega[:-_SPAN])
        out.append(Slope(name, np.sqrt(omega[_SPAN:] * omega[:-_SPAN]), slope))
    return out

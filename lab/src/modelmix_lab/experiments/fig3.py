"""Figure 3 of the paper: how far mixing lowers epsilon, for three widths, two sampling rates and three truncations.

n = 50,000, c = 20, delta = 1e-5, T = 5,000; the noise is the one at which plain DP-SGD has epsilon 200. The numbers of
the paper come out, within 2 %, with the classic conversion and the order grid that TF Privacy made customary, which
starts at 1.25: plain DP-SGD and p = 1 have their optimum between 1 and 2, the truncated mechanisms at whole orders.
That the worst gradient is the same between whole orders is a theorem as well (docs/proofs.md); what is proved with
every numerical error added stands beside it, by the distribution of the losses, and is smaller than what is printed
throughout.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from modelmix.accounting import accountant
from modelmix.accounting.calibration import smallest_safe
from modelmix.accounting.functions import Array
from modelmix.accounting.guarantee import epsilon, quick_epsilon
from modelmix.accounting.ledger import Ledger
from modelmix.accounting.mechanism import Mechanism, mixing_width
from modelmix.accounting.moments import sampled_log_moments

N, CLIP, DELTA, STEPS, PLAIN_EPSILON = 50_000, 20.0, 1e-5, 5_000, 200.0
RATES = (0.02, 0.04)
TAUS = (0.075, 0.15, 0.3)
TRUNCATIONS = (1, 25, 100)
PAPER = {
    (0.075, 1): 57.2, (0.075, 25): 17.9, (0.075, 100): 15.3,
    (0.15, 1): 40.4, (0.15, 25): 9.0, (0.15, 100): 7.9,
    (0.3, 1): 31.7, (0.3, 25): 5.4, (0.3, 100): 4.8,
}  # fmt: skip
"""(tau/eta, p) -> epsilon, read in the paper's text; q = 0.02."""

_PROVED_POINTS = 24  # of each dotted line; straight in logarithms between them

ORDERS = np.array([1.25, 1.5, 1.75, 2.0, 2.25, 2.5, 3.0, 3.5, 4.0, 4.5, *range(5, 64)])
"""TF Privacy's customary Renyi orders (its three largest, 128 to 512, never matter here)."""


@dataclass(frozen=True)
class Point:
    """One number of the figure: as the paper computed it, and what is proved at the same noise."""

    sample_rate: float
    tau: float
    p: int
    paper: float | None
    ours: float
    proved_classic: float
    proved: float


@dataclass(frozen=True)
class Panel:
    """One subfigure: epsilon against steps; ``lines`` maps a truncation to its curve, ``paper`` to the printed end."""

    sample_rate: float
    tau: float
    steps: Array
    plain: Array
    lines: dict[int, Array]
    proved: dict[int, Array]
    paper: dict[int, float]


def fractional_curve(mechanism: Mechanism, steps: Array) -> Array:
    """Classic epsilon against steps with orders between whole numbers, for p = 1. No numerical error is added."""
    kappa = sampled_log_moments(mechanism.coordinate_law, 1.0, ORDERS, mechanism.sample_rate)
    divergence = kappa / (ORDERS - 1)
    price = -math.log(DELTA) / (ORDERS - 1)
    return np.asarray(np.min(np.outer(steps, divergence) + price, axis=1))


@lru_cache(maxsize=8)
def noise_multiplier(sample_rate: float) -> float:
    """z at which plain DP-SGD has epsilon 200 after 5,000 steps (fractional orders, classic conversion)."""

    def value(z: float) -> float:
        return float(fractional_curve(Mechanism(z, sample_rate), np.array([STEPS]))[0])

    return smallest_safe(value, PLAIN_EPSILON, start=0.5, tolerance=1e-6, name="z")


def mechanism_of(sample_rate: float, tau: float, p: int, z: float) -> Mechanism:
    """tau is in units of the step size, as in the figure."""
    return Mechanism(z, sample_rate, mixing_width(CLIP, tau, 1.0, sample_rate * N), p)


def points() -> list[Point]:
    """The nine numbers of the paper's text (q = 0.02) and the nine of the other row (q = 0.04)."""
    out = []
    for q in RATES:
        z = noise_multiplier(q)
        for tau in TAUS:
            for p in TRUNCATIONS:
                mechanism = mechanism_of(q, tau, p, z)
                classic = epsilon(mechanism, DELTA, steps=STEPS, by="classic")
                ours = float(fractional_curve(mechanism, np.array([STEPS]))[0]) if p == 1 else classic
                proved = epsilon(mechanism, DELTA, steps=STEPS)
                paper = PAPER[tau, p] if q == RATES[0] else None
                out.append(Point(q, tau, p, paper, ours, classic, proved))
    return out


def panels() -> list[Panel]:
    """The six subfigures, row by row."""
    steps = np.unique(np.round(np.geomspace(10, STEPS, 160)))
    out = []
    for q in RATES:
        z = noise_multiplier(q)
        plain = fractional_curve(Mechanism(z, q), steps)
        for tau in TAUS:
            lines, proved = {}, {}
            for p in TRUNCATIONS:
                mechanism = mechanism_of(q, tau, p, z)
                if p == 1:
                    lines[p] = fractional_curve(mechanism, steps)
                else:
                    lines[p] = accountant.epsilon_curve(mechanism, steps, DELTA, conversion="classic")
                few = steps[np.unique(np.linspace(0, steps.size - 1, _PROVED_POINTS).round().astype(int))]
                values = [quick_epsilon(Ledger().add(mechanism, int(t)), DELTA) for t in few]
                proved[p] = np.exp(np.interp(np.log(steps), np.log(few), np.log(np.maximum(values, 1e-9))))
            printed = {p: PAPER[tau, p] for p in TRUNCATIONS if q == RATES[0]}
            out.append(Panel(q, tau, steps, plain, lines, proved, printed))
    return out


HOW = (
    "Noise: the z at which plain DP-SGD has epsilon 200 (Renyi orders from 1.25 up, classic conversion).",
    "ours: as the paper, classic conversion; p = 1 with orders between whole numbers and no numerical error added, "
    "p > 1 with whole orders.",
    "proved: every error added; classic: whole orders and lines between them; best: the distribution of losses.",
)

"""An independent way to the law of privacy losses: midpoints in x, direct convolution by doubling, Richardson's limit.

Nothing is rounded up here and no Fourier transform is taken. Losses are spread linearly between lattice points, an
error of second order in the lattice; two lattices, one twice as fine, remove it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from scipy import optimize
from scipy.special import ndtr

LIGHT = 1e-22
NEGLIGIBLE = 1e-14  # mass of the largest losses of a step, which would stretch the lattice


def density(law: str, z: float, omega: float, x):
    """f(x) from distribution functions, in the tail on the side where they do not cancel."""
    x = -np.abs(x)
    if omega == 0:
        return (
            np.exp(-0.5 * (x / z) ** 2) / (z * math.sqrt(2 * math.pi)) if law == "gaussian" else np.exp(x / z) / (2 * z)
        )
    a, b = (x - omega / 2) / z, (x + omega / 2) / z
    if law == "gaussian":
        return (ndtr(b) - ndtr(a)) / omega
    inside = 1 - 0.5 * np.exp(np.minimum(a, 0.0)) - 0.5 * np.exp(-np.maximum(b, 0.0))
    return np.where(b > 0, inside, 0.5 * np.exp(np.minimum(b, 0.0)) * -np.expm1(-omega / z)) / omega


@dataclass
class Lattice:
    """Masses under the law with the sample at the losses (first + i) * step."""

    step: float
    first: int
    mass: np.ndarray

    @property
    def losses(self):
        return self.step * (self.first + np.arange(self.mass.size))

    def trimmed(self):
        heavy = np.flatnonzero(self.mass * np.maximum(1, np.exp(np.minimum(-self.losses, 600))) > LIGHT)
        return Lattice(self.step, self.first + heavy[0], self.mass[heavy[0] : heavy[-1] + 1])

    def plus(self, other):
        return Lattice(self.step, self.first + other.first, np.convolve(self.mass, other.mass)).trimmed()

    def halved(self):
        return spread(self.losses, self.mass, 2 * self.step)


def spread(losses, mass, step) -> Lattice:
    """Both masses are kept: under the law with the sample, and under the one without it."""
    index = np.floor(losses / step + 1e-12).astype(int)
    rest = np.clip(losses - index * step, 0, step)
    up = np.expm1(-rest) / np.expm1(-step)
    first = index.min()
    out = np.bincount(index - first, mass * (1 - up), index.max() - first + 2)
    out += np.bincount(index - first + 1, mass * up, index.max() - first + 2)
    return Lattice(step, int(first), out).trimmed()


def times(one: Lattice, count: int, most: int) -> Lattice:
    """The sum of ``count`` of them, by doubling; the lattice is halved whenever it has more points than ``most``."""
    out, power = None, one
    while True:
        if count & 1:
            while out is not None and out.step < power.step * 0.99:
                out = out.halved()
            out = power if out is None else out.plus(power)
        count >>= 1
        if not count:
            return out
        power = power.plus(power)
        while power.mass.size > most:
            power = power.halved()


def coordinate(law: str, z: float, omega: float, shift: float, step: float) -> Lattice:
    reach = 11 * z if law == "gaussian" else 38 * z
    low, high = -omega / 2 - reach, omega / 2 + shift + reach
    kinks = sorted({-omega / 2, omega / 2, shift - omega / 2, shift + omega / 2})
    stops = np.array([low, *kinks, high])
    losses, mass = [], []
    for a, b in pairwise(stops):
        if b - a < 1e-12 * z:
            continue
        n = min(400_000, max(400, int(120 * (b - a) / z)))
        x = a + (np.arange(n) + 0.5) * (b - a) / n  # midpoints
        here, there = density(law, z, omega, x), density(law, z, omega, x - shift)
        held = (here > 1e-290) & (there > 1e-290)
        losses.append(np.log(there[held] / here[held]))
        mass.append(there[held] * (b - a) / n)
    losses, mass = np.concatenate(losses), np.concatenate(mass)
    return spread(losses, mass / mass.sum(), step)


def gradient(law: str, z: float, omega: float, parts, most: int) -> Lattice:
    """The losses of coordinates of some sizes, each so many times."""
    out = None
    for size, count in parts:
        some = times(coordinate(law, z, omega, size, 30 * size / z / most), count, most)
        if out is not None:
            step = max(out.step, some.step)
            out, some = (spread(each.losses, each.mass, step) for each in (out, some))
        out = some if out is None else out.plus(some)
    return out


def sampled(loss: Lattice, q: float, adding: bool = False):
    """(losses, masses) of one sampled step, under the law that is tested."""
    ratio = np.log1p(q * np.expm1(loss.losses)) if q < 1 else loss.losses
    without = loss.mass * np.exp(-loss.losses)
    losses, mass = (-ratio[::-1], without[::-1]) if adding else (ratio, without * (1 - q) + loss.mass * q)
    held = np.cumsum(mass[::-1])[::-1] > NEGLIGIBLE
    return losses[held], mass[held]


def psi(x):
    """Psi from its definition."""
    first, second = ((x ** (2 - b) - 1) / ((1 - b) * (2 - b)) - (x - 1) / (1 - b) for b in (24 / 25, 77 / 50))
    return np.where(x > 1, first - second, 0.0)


def psi_slope(x):
    return 25 * (x**0.04 - 1) - (x**-0.54 - 1) / -0.54


def cone_delta(loss: Lattice, epsilon: float) -> float:
    """Minimised over x0: E under the law with the sample of phi(e^L) e^-L."""

    def at(log_y0):
        x0 = math.exp(math.exp(log_y0))
        psi0, slope = float(psi(x0)), psi_slope(x0)
        kappa = math.exp(epsilon) / (x0 - psi0 / slope)
        above = loss.losses > math.log(kappa)
        t = np.exp(loss.losses[above])
        return float(np.sum(loss.mass[above] * kappa * psi(t / kappa) / slope / t))

    with np.errstate(over="ignore", invalid="ignore"):
        grid = np.linspace(-6, 3.1, 40)
        best = grid[np.argmin([at(x) for x in grid])]
        return min(1.0, optimize.minimize_scalar(at, bounds=(best - 0.3, best + 0.3), method="bounded").fun)


def hockey_stick(loss: Lattice, epsilon: float) -> float:
    above = loss.losses > epsilon
    return float(np.sum(loss.mass[above] * -np.expm1(epsilon - loss.losses[above])))


def composed(phases, most: int, adding: bool = False) -> Lattice:
    """Phases are (law, z, omega, parts, q, steps)."""
    laws = [(sampled(gradient(law, z, omega, parts, most), q, adding), steps)
            for law, z, omega, parts, q, steps in phases]  # fmt: skip
    deviation = math.sqrt(sum(n * np.sum(m * lam**2) / m.sum() for (lam, m), n in laws))
    total = sum(n for _, n in laws)
    out = None
    for (losses, mass), steps in laws:
        step = max(8 * deviation / math.sqrt(total), np.ptp(losses) / 3) / most
        some = times(spread(losses, mass, step), steps, most)
        if out is not None:
            step = max(out.step, some.step)
            out, some = (spread(each.losses, each.mass, step) for each in (out, some))
        out = some if out is None else out.plus(some)
    return out


def in_the_limit(value, most: int = 900) -> float:
    coarse, fine = value(most), value(2 * most)
    return fine + (fine - coarse) / 3


def epsilon_at(delta_of, target: float) -> float:
    low, high = 0.0, 1.0
    if delta_of(0.0) <= target:
        return 0.0
    while delta_of(high) > target:
        low, high = high, 2 * high
    for _ in range(40):
        middle = (low + high) / 2
        low, high = (middle, high) if delta_of(middle) > target else (low, middle)
    return high

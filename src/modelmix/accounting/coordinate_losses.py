r"""Losses of one coordinate of Gaussian or Laplace noise, mixed or plain, as a dominating ``LossDistribution``.

The pair is f(x) and f(x - s), f even and log-concave: the loss l(x) = log f(x - s) - log f(x) does not fall in x and
is odd about s/2. The reflection x -> s - x swaps the two laws, so the half x >= s/2, where losses are >= 0, is enough;
the rest is its mirror image with the two masses exchanged.

**Cells.** The half-line is cut where the loss is a multiple of h. In the cell between the losses l and l + h a point x
of mass f(x) dx goes to the two ends in the proportions that keep both masses:

    under P:   (r - e^l) / (e^(l+h) - e^l)  to the upper end,  r = exp(l(x)),

integrated by ten Gauss-Legendre points on panels of at most sigma/8. On a Bernstein ellipse of parameter 32 around such
a panel, at most 1.01 sigma long and wide to each side, |f(x+iy)| <= exp(y^2/2) f(x) and f changes by less than exp(20),
so the relative error is below (64/15) 32^(-20) exp(22) < 1e-19 (Trefethen, *Approximation Theory*, Theorem 19.3; the
exponentials of the Laplace law change by less than exp(1.1), their kinks are ends of panels).
The cell about l = 0 can be very wide; its masses are what is missing to

    int_(s/2) (P + Q) = 1      and      int_(s/2) (Q - P) = 2 int_0^(s/2) f.

**Errors.** Log-densities are known up to a few eps of their size, so the loss at the end of a cell is off by some eta.
A mass whose loss is eta beyond the end is spread to that end and the next grid point, a share of eta/h to the latter;
and rounding misplaces a share of about as much between the two ends. Both are paid for by moving such a share of the
mass under Q to the next larger loss. That is a spread as well, from r to 0 and to the larger one: the mass under P
that it leaves behind is counted in ``zero``. The relative errors of the masses themselves are added.

**The tail** beyond x_c, of the Gaussian: with V = -log f, 0 <= V'' <= 1/sigma^2, so log of f(x-s)^(1+a) f(x)^(-a)
falls at least at the rate V'(x_c - s) - a s/sigma^2, and V'(x) >= (x - omega/2)/sigma^2. The integral is at most its
first value over that rate. The Laplace law has one loss, s/z, beyond its last kink.
"""

from __future__ import annotations

import math
from functools import lru_cache

import numpy as np

from modelmix.accounting.functions import Array
from modelmix.accounting.laws import Gaussian, Law, Mixed, known
from modelmix.accounting.loss_distribution import EXTRA, LossDistribution, TooLarge
from modelmix.errors import UnprovedError

_EPS = float(np.finfo(np.float64).eps)
_CELLS = 224  # grid points for a loss of s/z, or more:
_COARSEST = 0.03
_REACH = 13.0  # standard deviations of Gaussian noise that lie on the grid, beyond the edge of the uniform
_PANEL = 0.125
_X, _W = np.polynomial.legendre.leggauss(10)
_QUADRATURE = 4 * _EPS
_LARGEST_SHIFT, _SMALLEST_SHIFT = 64.0, 1e-7  # in standard deviations of the noise
_WIDEST = 1e12
_TABLE = 1500
_REFINEMENTS = 7


@lru_cache(maxsize=256)
def coordinate(law: Law, shift: float) -> LossDistribution:
    """Losses of the pair f, f(. - shift).

    Raises:
        UnprovedError: for a law that is neither Gaussian nor Laplace, nor one of these mixed.
        TooLarge: where the shift or the width has no bearable grid.
    """
    noise = known(law)
    if noise is None:
        raise UnprovedError(
            "the worst gradient is known for every divergence that is used",
            f"for {law} it is not proved.",
            'Use by="renyi", whose facts are checked for such a law.',
        )
    z, omega = noise.z, law.omega if isinstance(law, Mixed) else 0.0
    if not _SMALLEST_SHIFT <= shift / z <= _LARGEST_SHIFT or omega / z > _WIDEST:
        raise TooLarge(f"one coordinate of size {shift:.1e} under noise of {z:.1e} has no loss distribution of ours")
    if 0 < omega < 1e-9 * z:  # mixing is post-processing
        law, omega = noise, 0.0
    cells = max(_CELLS, math.ceil(shift / z / _COARSEST))
    return _Half(law, float(shift), cells, omega, isinstance(noise, Gaussian)).whole()


class _Half:
    """The half-line x >= s/2, measured from the edge of the uniform so that wide ones keep their digits."""

    def __init__(self, law: Law, shift: float, cells: int, omega: float, gaussian: bool) -> None:
        self.law, self.shift, self.gaussian, self.origin = law, shift, gaussian, omega / 2
        self.z = law.scale
        self.step = shift / self.z / cells
        self.start = max(shift / 2 - self.origin, -_REACH * self.z)
        self.end = shift + (_REACH * self.z if gaussian else 0.0)
        self.kinks = [y for y in (0.0, shift - omega) if self.start < y < self.end]
        self.constants = 1 + abs(np.log(self.z)) + (abs(np.log(omega)) if omega else 0.0)

    def densities(self, y: Array) -> tuple[Array, Array]:
        """log f(x) and log f(x - s)."""
        return self.law.log_density(y, self.origin), self.law.log_density(y - self.shift, self.origin)

    def error(self, here: Array, there: Array) -> Array:
        """Granted to a loss and to the logarithm of a mass."""
        return np.asarray(8 * _EPS * (self.constants + np.abs(here) + np.abs(there)))

    def edges(self) -> tuple[Array, Array]:
        """Where the loss is h, 2h, ..., and the end; and by how much the loss there is off."""
        table = np.union1d(np.linspace(self.start, self.end, _TABLE), self.kinks)
        losses = np.maximum.accumulate(np.subtract(*self.densities(table)[::-1]))
        count = int(np.ceil(losses[-1] / self.step - 1e-6)) - 1
        wanted = self.step * np.arange(1, count + 1)
        right = np.clip(np.searchsorted(losses, wanted), 1, table.size - 1)
        low, high, below, above = table[right - 1], table[right], losses[right - 1], losses[right]
        y = high
        for look in range(_REFINEMENTS):
            part = (wanted - below) / np.maximum(above - below, 1e-300)
            # Straight lines, and halves now and then in case they come from one side only.
            y = low + (high - low) * (np.clip(part, 0.0, 1.0) if look % 3 != 2 else 0.5)
            found = np.subtract(*self.densities(y)[::-1])
            over = found > wanted
            high, above = np.where(over, y, high), np.where(over, found, above)
            low, below = np.where(over, low, y), np.where(over, below, found)
        y = np.append(np.where(np.abs(above - wanted) < np.abs(below - wanted), high, low), self.end)
        y = np.maximum.accumulate(y)
        here, there = self.densities(y)
        missed = np.abs(there - here - np.append(wanted, there[-1] - here[-1]))
        beyond = np.zeros(y.size)
        beyond[-1] = max(0.0, there[-1] - here[-1] - self.step * (count + 1))
        return y, np.asarray(missed + beyond + self.error(here, there))

    def cells(self, edges: Array) -> tuple[Array, Array, Array]:
        """Of the cells from 1 on: mass under P at the lower end, at the upper end, and the error of a loss."""
        h = self.step
        panels = np.arange(edges[0], edges[-1], _PANEL * self.z)
        ends = np.union1d(np.concatenate([edges, panels]), [k for k in self.kinks if edges[0] < k < edges[-1]])
        half, middle = np.diff(ends) / 2, (ends[1:] + ends[:-1]) / 2
        cell = np.clip(np.searchsorted(edges, middle) - 1, 0, edges.size - 2)
        y = (middle[:, None] + half[:, None] * _X).ravel()
        here, there = self.densities(y)
        loss, error = there - here, self.error(here, there)
        number = np.repeat(cell, _X.size)
        mass = (half[:, None] * _W).ravel() * np.exp(here)
        up = np.clip(np.expm1(loss - h * (number + 1)) / np.expm1(h), 0.0, 1.0)
        size = edges.size - 1
        worst = np.zeros(size)
        np.maximum.at(worst, number, error)
        lower, upper = (np.bincount(number, part, size).astype(np.float64) for part in (mass * (1 - up), mass * up))
        return lower, upper, worst

    def difference(self) -> float:
        """2 int_0^(s/2) f, the total variation of the pair."""
        middle = self.shift / 2
        ends = np.union1d(np.linspace(0, middle, 2 + int(middle / (_PANEL * self.z))), [min(self.origin, middle)])
        half, centre = np.diff(ends) / 2, (ends[1:] + ends[:-1]) / 2
        x = (centre[:, None] + half[:, None] * _X).ravel()
        return float(2 * np.sum((half[:, None] * _W).ravel() * np.exp(self.law.log_density(x))))

    def whole(self) -> LossDistribution:
        """The law of the loss under Q; see the module for what moves to larger losses to pay for errors."""
        h = self.step
        edges, off = self.edges()
        lower, upper, error = self.cells(edges)  # under P
        count = lower.size  # cells 1 ... count; their upper ends go up to count + 1
        low = h * np.arange(1, count + 1)
        lower_q, upper_q = lower * np.exp(low), upper * np.exp(low + h)
        without, with_sample = lower + upper, lower_q + upper_q
        share = np.minimum(1.0, 1.2 * (error + off[:-1] + off[1:] + _QUADRATURE) / h)
        logs = np.concatenate([d[-1:] for d in self.densities(edges)])  # densities at the end
        beyond = np.exp(logs)
        if self.gaussian:
            tail_p, tail_q = (1.0001 * float(d) * self.z / _REACH for d in beyond)
            rate = (_REACH - EXTRA * self.shift / self.z) / self.z
            tail = 1.0001 * float(np.exp((1 + EXTRA) * logs[1] - EXTRA * logs[0])) / rate
            zero, known_p, known_q = tail_q, 0.0, 0.0
        else:
            tail_p, tail_q = known_p, known_q = [float(d) * self.z for d in beyond]
            tail = zero = 0.0
        grown = 1 + error + _QUADRATURE

        # Right of s/2: masses under Q at the losses 0, h, 2h, ...; left of it, mirrored: under P, at 0, -h, -2h, ...
        right, left = np.zeros(count + 4), np.zeros(count + 4)
        moved = np.minimum(lower_q, share * with_sample)
        further = upper_q * share
        right[1 : count + 1] += (lower_q - moved) * grown
        right[2 : count + 2] += (upper_q + moved - further) * grown
        right[3 : count + 3] += further * grown
        moved = np.minimum(upper, share * without)
        further = lower * share
        left[2 : count + 2] += (upper - moved) * grown
        left[1 : count + 1] += (lower + moved - further) * grown
        left[0:count] += further * grown
        zero += float(2.5 * h * share @ (without + with_sample))
        if self.gaussian:
            left[count + 1] += tail_p
        else:  # one loss, s/z, which is a grid point but for rounding
            last = round(self.shift / self.z / h)
            share_last = min(1.0, 16 * _EPS * (last + self.constants / h))
            right[last] += tail_q * (1 - share_last) * grown[-1]
            right[last + 1] += tail_q * share_last * grown[-1]
            left[last] += tail_p * (1 - share_last) * grown[-1]
            left[last - 1] += tail_p * share_last * grown[-1]
            zero += 2.5 * h * share_last * (tail_p + tail_q)

        # The cell from 0 to h: what is missing. Errors are those of the terms.
        split = self.difference()
        inner = 1.0 - float(np.sum(without + with_sample)) - known_p - known_q
        gap = split - float(np.sum(with_sample - without)) - (known_q - known_p)
        doubt = float((without + with_sample) @ error) + 8 * _EPS * self.constants * split
        doubt += (_QUADRATURE + 40 * _EPS) * (split + float(np.sum(with_sample + without)) + tail_q + tail_p)
        up = min(max(0.0, gap) / np.expm1(h), max(0.0, inner - gap) / 2)  # under P, at h
        p, q = (max(0.0, inner - gap) / 2 + doubt, (inner + max(0.0, gap)) / 2 + doubt)
        blur = min(1.2 * (doubt / h + 2 * up * (off[0] + _QUADRATURE) / h), p)
        right[0] += max(0.0, q - up * np.exp(h) - blur) + 4 * _EPS * q
        right[1] += up * np.exp(h)
        right[2] += blur
        left[1] += max(0.0, up - blur)
        left[0] += p - max(0.0, up - blur) + 4 * _EPS * p
        zero += 5 * h * blur

        mass = np.concatenate([left[:0:-1], right])
        mass[right.size - 1] += left[0]
        return LossDistribution(h, -(right.size - 1), np.asarray(mass), zero, tail).pruned(1e-60)

"""Mean and variance of the pointwise loss of one coordinate.

The loss at o is u(o) = log f(o - s) - log f(o), o drawn from f(. - s). Units: the clip is 1.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from modelmix.accounting.laws import Law
from modelmix.accounting.quadrature import panel_rule
from modelmix.errors import UnprovedError

Array = NDArray[np.float64]


@dataclass(frozen=True)
class LossMoments:
    """Of the pointwise loss of one coordinate: its mean (the Kullback-Leibler divergence) and its variance."""

    mean: float
    variance: float


def loss_moments(law: Law, shift: float = 1.0) -> LossMoments:
    """Mean and variance of the loss by quadrature, never below the truth by more than the quadrature's own estimate.

    The mean is summed as f [r log r - r + 1], which is never negative, so that nothing cancels.
    """
    shift = abs(float(shift))
    if shift == 0:
        return LossMoments(0.0, 0.0)
    coarse, fine = (_moments(law, shift, halvings) for halvings in (2, 3))
    change = np.abs(fine / coarse - 1)
    if not np.all(change < 1e-7):
        raise UnprovedError(
            "the moments of the loss are known with an error bound",
            f"the integrals of {law} did not settle.",
            "Use Gaussian or Laplace noise, or the Renyi accountant.",
        )
    mean, second = fine * (1 + 10 * change + 1e-12)
    return LossMoments(float(mean), float(max(0.0, second - fine[0] ** 2)))


def _moments(law: Law, shift: float, halvings: int) -> Array:
    """Mean and second moment on one rule."""
    rule = panel_rule(law, shift, 1.0, halvings)
    total = np.zeros(2)
    for piece in rule.pieces:
        log_f, log_shifted = law.log_density(piece.x, piece.origin), law.log_density(piece.x - shift, piece.origin)
        u = log_shifted - log_f
        weight = piece.weight * np.exp(log_f)
        shifted = piece.weight * np.exp(log_shifted)
        small = np.abs(u) < 1e-3
        middling = np.clip(u, -1e-3, 1e-3)
        series = weight * middling**2 * (0.5 + middling / 3 + middling**2 / 8 + middling**3 / 30)
        whole_term = shifted * u - shifted + weight
        total += [float(np.sum(np.where(small, series, whole_term))), float(np.sum(shifted * u * u))]
    return total

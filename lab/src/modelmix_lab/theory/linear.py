"""Algorithm 1 on linear models with known constants: what the bounds of ``utility`` are tested against.

Clipping the gradient of a linear model clips the slope of its loss, so clipped least squares is Huber regression:
convex, L-Lipschitz for L = c, and as smooth as before. All runs are vectorised over seeds.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy import optimize, special

from modelmix.errors import ModelMixError
from modelmix.theory.kappa import tail_constant
from modelmix.theory.utility import Setting

Array = NDArray[np.float64]
LOSSES = ("squares", "logistic", "robust")


@dataclass(frozen=True, eq=False)
class LinearProblem:
    """Mean over i of loss(<x_i, w>, y_i): (m - y)^2/2, log(1 + exp(-y m)), or r^2/(1 + r^2) with r = m - y.

    The last is not convex and lies in [0, 1).

    Args:
        x: n x d.
        y: n numbers; +1 and -1 for "logistic".
        loss: one of ``LOSSES``.
        clip: of a sample's gradient; every loss is the clipped one.
    """

    x: Array
    y: Array
    loss: str
    clip: float

    def __post_init__(self) -> None:
        if self.loss not in LOSSES:
            raise ModelMixError(f"loss = {self.loss!r} is unknown: choose one of {', '.join(LOSSES)}.")

    @property
    def lengths(self) -> Array:
        return np.asarray(np.linalg.norm(self.x, axis=1))

    @property
    def smoothness(self) -> float:
        """beta: the largest curvature of the loss times the largest eigenvalue of the mean of x x^T."""
        top = float(np.linalg.eigvalsh(self.x.T @ self.x / len(self.x))[-1])
        return {"squares": 1.0, "logistic": 0.25, "robust": 2.0}[self.loss] * top

    def slopes(self, w: Array) -> Array:
        """Derivative of every sample's loss in <x, w>, clipped; ``w`` is S x d, the result S x n."""
        m = w @ self.x.T
        if self.loss == "squares":
            raw = m - self.y
        elif self.loss == "logistic":
            raw = -self.y * special.expit(-self.y * m)
        else:
            r = m - self.y
            raw = 2 * r / (1 + r * r) ** 2
        most = self.clip / self.lengths
        return np.asarray(np.clip(raw, -most, most))

    def value(self, w: Array) -> Array:
        """F at every row of ``w``."""
        m = w @ self.x.T
        if self.loss == "squares":
            r, most = np.abs(m - self.y), self.clip / self.lengths
            each = np.where(r <= most, r * r / 2, most * r - most * most / 2)
        elif self.loss == "logistic":
            if self.clip < self.lengths.max() * (1 - 1e-12):
                raise ModelMixError("the clipped logistic loss has no closed form here: clip at max |x| or above.")
            each = np.logaddexp(0.0, -self.y * m)
        else:
            r2 = (m - self.y) ** 2
            each = r2 / (1 + r2)
        return np.asarray(each.mean(axis=1))

    def gradient(self, w: Array) -> Array:
        """Mean of the clipped gradients at every row of ``w``."""
        return np.asarray(self.slopes(w) @ self.x / len(self.x))

    def optimum(self) -> tuple[Array, float]:
        """w* and F(w*), for a convex loss."""
        found = optimize.minimize(
            lambda w: float(self.value(w[None])[0]),
            np.zeros(self.x.shape[1]),
            jac=lambda w: self.gradient(w[None])[0],
            method="BFGS",
            options={"gtol": 1e-10},
        )
        return found.x, float(found.fun)


@dataclass(frozen=True, eq=False)
class Trace:
    """What S runs measured: F at w_bar, the mean of F along the way, |grad F(w_k)| (S x T), and the largest kappa."""

    final: Array
    along: Array
    gradient_norms: Array
    kappa: float


def run(problem: LinearProblem, setting: Setting, start: Array, *, seeds: int, seed: int, watch: int = 0) -> Trace:
    """Algorithm 1 (or DP-SGD, without mixing) ``seeds`` times from w_{-1} = w_0 = ``start``.

    Args:
        watch: kappa is estimated at every ``watch``-th state of the first run; 0 for never.
    """
    rng = np.random.default_rng(seed)
    s, (n, d) = setting, problem.x.shape
    last = np.tile(start, (seeds, 1))
    previous = last.copy()
    mean, along, norms, kappa = np.zeros_like(last), np.zeros(seeds), [], 0.0
    for k in range(s.steps):
        point = 0.5 * (last + previous) if s.mixing else last
        mean += point / s.steps
        values = 0.5 * (problem.value(last) + problem.value(previous)) if s.mixing else problem.value(last)
        along += values / s.steps
        slopes = problem.slopes(last)
        full = slopes @ problem.x / n
        norms.append(np.linalg.norm(full, axis=1))
        if watch and k % watch == 0:
            noise = slopes[0][:, None] * problem.x - full[0]
            kappa = max(kappa, tail_constant(np.linalg.norm(noise, axis=1)))
        drawn = rng.random((seeds, n)) < s.sample_rate
        step = np.where(drawn, slopes, 0.0) @ problem.x / (n * s.sample_rate)
        new = point - s.step_size * (step + s.noise_std * rng.standard_normal((seeds, d)))
        if s.mixing:
            gap = last - previous
            sign = np.where(gap >= 0, 1.0, -1.0)
            wide = sign * s.tau if s.padding == "exact" else gap + sign * s.tau
            gap = np.where(np.abs(gap) < s.tau, wide, gap)
            new += (rng.random((seeds, d)) - 0.5) * gap
        last, previous = new, last
    return Trace(problem.value(mean), along, np.array(norms).T, kappa)

r"""What clipping does to a gradient: the bias of the clipped mean, Example 3.1, and what a histogram of norms can say.

CP(g, c) = g * min(1, c/|g|). Its mean over samples is off by at most E (|g| - c)_+, the mean of what is cut off.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy import special

from modelmix._checks import positive
from modelmix.errors import ModelMixError
from modelmix.theory.kappa import tail_constant

Array = NDArray[np.float64]


@dataclass(frozen=True)
class Bias:
    """The mean of clipped gradients beside the mean of whole ones, at one clip.

    ``bias`` is the norm of their difference, ``cut`` the bound E (|g| - c)_+ on it, ``clipped`` the share of samples
    that are shortened, ``cosine`` that of the angle between the two means (NaN where one of them is 0).
    """

    clip: float
    gradient: float
    clipped_gradient: float
    bias: float
    cut: float
    clipped: float
    cosine: float

    @classmethod
    def of(cls, clip: float, whole: Array, clipped: Array, norms: Array) -> Bias:
        """From the two means and all the norms."""
        sizes = float(np.linalg.norm(whole)), float(np.linalg.norm(clipped))
        cosine = float(whole @ clipped) / (sizes[0] * sizes[1]) if min(sizes) > 0 else math.nan
        return cls(
            clip=float(clip),
            gradient=sizes[0],
            clipped_gradient=sizes[1],
            bias=float(np.linalg.norm(clipped - whole)),
            cut=float(np.mean(np.maximum(norms - clip, 0.0))),
            clipped=float(np.mean(norms > clip)),
            cosine=cosine,
        )


def clipped_mean(gradients: ArrayLike, clip: float) -> Array:
    """Mean over the rows of ``gradients`` (n x d) of CP(g, c)."""
    g = np.asarray(gradients, dtype=np.float64)
    positive("c", clip, "the clip")
    norms = np.linalg.norm(g, axis=1, keepdims=True)
    return np.asarray((g * np.minimum(1.0, clip / np.maximum(norms, 1e-300))).mean(axis=0))


def bias_curve(gradients: ArrayLike, clips: Sequence[float]) -> list[Bias]:
    """The bias of clipping as a function of c, from per-sample gradients n x d."""
    g = np.asarray(gradients, dtype=np.float64)
    norms = np.linalg.norm(g, axis=1)
    return [Bias.of(c, g.mean(axis=0), clipped_mean(g, c), norms) for c in clips]


@dataclass(frozen=True)
class Example:
    """Example 3.1 at one w: f = (w - x)^2/2 on x = -20, -10, 90, clipped to c."""

    w: float
    clip: float
    gradient: float
    clipped_gradient: float
    noise_std: float


EXAMPLE_SAMPLES = (-20.0, -10.0, 90.0)


def example(w: float, clip: float = 1.0) -> Example:
    """Example 3.1: with c = 1 the mean clipped gradient is 1/3 at w = 20, where it should be 0, and 1/3 at w = 0,
    where it should be -20; the noise has standard deviation 49.7 everywhere."""
    g = w - np.array(EXAMPLE_SAMPLES)[:, None]
    return Example(w, clip, float(g.mean()), float(clipped_mean(g, clip)[0]), float(g.std()))


def clipped_minimum(clip: float) -> float:
    """Where clipped descent on Example 3.1 comes to rest: its mean clipped gradient is 0. The optimum is 20."""
    low, high = min(EXAMPLE_SAMPLES), max(EXAMPLE_SAMPLES)
    while high - low > 1e-12 * 100:
        middle = 0.5 * (low + high)
        low, high = (low, middle) if example(middle, clip).clipped_gradient > 0 else (middle, high)
    return 0.5 * (low + high)


EDGES: Array = np.geomspace(1e-3, 1e3, 49)
"""Fixed bins of gradient norms, eight to a decade; below the first and above the last edge is one bin each.

They are constants: bins chosen by looking at the data would be a release of their own.
"""


def bin_of(norms: ArrayLike) -> NDArray[np.int64]:
    """The bin of every norm, 0 to len(EDGES); what is not a number goes to the last."""
    values = np.nan_to_num(np.asarray(norms, dtype=np.float64), nan=np.inf, posinf=np.inf)
    return np.asarray(np.searchsorted(EDGES, values, side="right"), dtype=np.int64)


@dataclass(frozen=True, eq=False)
class NormHistogram:
    """Counts of norms in the fixed bins, noisy or not; all that advice on private data may use.

    Args:
        counts: len(EDGES) + 1 numbers.
        noise_std: of every count; 0 if there is none.
    """

    counts: Array
    noise_std: float = 0.0

    def __post_init__(self) -> None:
        if np.shape(self.counts) != (EDGES.size + 1,):
            raise ModelMixError(f"a histogram of norms has {EDGES.size + 1} counts.")

    @property
    def floor(self) -> float:
        """Counts below this are taken for noise: some empty bin exceeds it with probability 1/20 at most."""
        return float(-self.noise_std * special.ndtri(0.05 / (EDGES.size + 1)))

    @property
    def kept(self) -> Array:
        """The counts that are more than noise; the others as 0."""
        return np.where(self.counts > self.floor, self.counts, 0.0)

    @property
    def uppers(self) -> Array:
        """The upper edge of every bin; the last has none and counts as one bin wider."""
        return np.append(EDGES, EDGES[-1] ** 2 / EDGES[-2])

    def _shares(self) -> Array:
        kept = self.kept
        if not kept.sum() > 0:
            raise ModelMixError(
                "every bin of the noisy histogram is below its noise: give more samples or a larger --epsilon."
            )
        return np.asarray(kept / kept.sum())

    @property
    def mean_norm(self) -> float:
        """E |g| with every norm at the upper edge of its bin."""
        return float(self._shares() @ self.uppers)

    def cut(self, clip: float) -> float:
        """E (|g| - c)_+, a bound on the bias of clipping, with every norm at the upper edge of its bin."""
        return float(self._shares() @ np.maximum(self.uppers - clip, 0.0))

    def quantile(self, share: float) -> float:
        """The smallest upper edge below which this share of the norms lies."""
        return float(self.uppers[int(np.searchsorted(np.cumsum(self._shares()), share - 1e-12))])

    def kappa(self) -> float:
        """A tail constant of the sampling noise, on the safe side: |xi| <= |g| + |grad F| <= |g| + E|g|."""
        return tail_constant(self.uppers + self.mean_norm, weights=self._shares())


def histogram(norms: ArrayLike) -> NormHistogram:
    """The histogram without noise."""
    return NormHistogram(np.bincount(bin_of(norms), minlength=EDGES.size + 1).astype(np.float64))

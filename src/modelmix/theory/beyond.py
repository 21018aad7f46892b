r"""Randomness beyond noise (Section 4.5): what else a training step draws, and what that is worth.

Randomness X that is *added*, *independent* of the samples given the past, and secret, can only help: with the Gaussian
noise N it makes X + N, and epsilon of N alone holds in any case. How much it helps:

- **Langevin noise** is Gaussian: variances add. Every direction is the same.
- **Bounded laws, the same in every coordinate and independent** (``Discrete``, ``bounded``): the accountant's own sum
  over coordinates. One coordinate of size c is the worst gradient if the log-moments are convex in the squared size;
  ``require_convex`` checks that on a grid finer than the noise, and refuses where it fails, as it does for atoms that
  lie farther apart than the noise is wide.
- **Uniform on a sphere** (saddle-point escape): coordinates are dependent, but X + N looks the same from every
  direction, so only the length of the gradient counts. The moments are integrals over two dimensions; that they grow
  with the length is checked.
- **Stochastic rounding** is not independent of what it rounds: a value on the grid is not randomised at all. After the
  noise it is post-processing, and free. Before the noise it *costs*: see ``rounded_before_noise``. Only subtractive
  dither is additive, and is exactly mixing over one grid spacing.
- **Multiplicative randomness** (dropout, erasing, augmentation) gets no number: see ``multiplicative``.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar, NoReturn

import numpy as np
from numpy.typing import NDArray
from scipy import special

from modelmix.errors import ModelMixError, UnprovedError
from modelmix.privacy.facts import CHECKED_ORDERS
from modelmix.privacy.functions import log_bracket
from modelmix.privacy.laws import Law
from modelmix.privacy.mechanism import Mechanism
from modelmix.privacy.moments import log_moments
from modelmix.privacy.renyi import epsilons, orders_at, refine, sampled_curve
from modelmix.privacy.validation import at_least_zero, positive, probability, rate, whole

Array = NDArray[np.float64]
_ADDED = "randomness is added, and independent of the samples"
_FINEST = 4000  # points of the grid on which convexity is looked at, at most


def langevin(mechanism: Mechanism, std: float) -> Mechanism:
    """Plain DP-SGD with Langevin noise of standard deviation ``std`` (over the clip) added: z^2 + std^2, exactly."""
    if mechanism.mixed or mechanism.law != "gaussian":
        raise ModelMixError("Langevin noise is added to plain Gaussian noise here: give Mechanism(z, q).")
    at_least_zero("std", std, "the standard deviation of Langevin noise")
    z = math.hypot(mechanism.noise_multiplier, std)
    return Mechanism(z, mechanism.sample_rate, p=mechanism.p, dimension=mechanism.dimension)


def langevin_std(eta: float, temperature: float, clip: float, expected_batch: float) -> float:
    """sqrt(2 * temperature / eta) * B/c: the noise sqrt(2 eta temperature) N(0, 1) of a Langevin step, in our units."""
    positive("eta", eta, "the learning rate")
    at_least_zero("temperature", temperature, "the temperature")
    unit = positive("c", clip, "the clip") / positive("B", expected_batch, "the expected batch")
    return math.sqrt(2 * temperature / eta) / unit


@dataclass(frozen=True)
class Discrete(Law):
    """N(0, z^2) plus an atom: one of ``values`` with its probability, independently in every coordinate.

    Lengths over the clip. The atoms must be symmetric about zero.
    """

    z: float
    values: tuple[float, ...]
    weights: tuple[float, ...]
    norm: ClassVar[int] = 2

    def __post_init__(self) -> None:
        positive("z", self.z, "the noise multiplier")
        if len(self.values) != len(self.weights) or not self.values or min(self.weights) < 0:
            raise ModelMixError("a discrete law has as many weights, 0 or more, as values, and at least one.")
        if not abs(math.fsum(self.weights) - 1) < 1e-12:
            raise ModelMixError(f"the weights of a discrete law add up to 1, not {math.fsum(self.weights):.6g}.")
        pairs = sorted(zip(self.values, self.weights, strict=True))
        mirrored = sorted((-value, weight) for value, weight in pairs)
        if not np.allclose(pairs, mirrored, rtol=1e-9, atol=1e-12):
            raise UnprovedError(
                "the noise is symmetric about zero", "the atoms of this law are not.", "Use a symmetric law."
            )

    @property
    def scale(self) -> float:
        return self.z

    @property
    def variance(self) -> float:
        return self.z**2 + float(np.dot(np.square(self.values), self.weights))

    @property
    def kinks(self) -> tuple[float, ...]:
        return tuple(sorted({0.0, min(self.values), max(self.values)}))

    def log_density(self, x: Array, origin: float = 0.0) -> Array:
        y = (np.asarray(x)[..., None] + origin - np.array(self.values)) / self.z
        logs = -0.5 * y * y + np.log(np.maximum(self.weights, 1e-300))
        return np.asarray(special.logsumexp(logs, axis=-1) - 0.5 * math.log(2 * math.pi) - math.log(self.z))

    def sample(self, rng: np.random.Generator, size: int | tuple[int, ...]) -> Array:
        atoms = rng.choice(np.array(self.values), size, p=np.array(self.weights))
        return np.asarray(rng.normal(0.0, self.z, size) + atoms)


def bounded(z: float, density: Callable[[Array], Array], bound: float) -> Discrete:
    """N(0, z^2) plus a random number with a symmetric density on [-bound, bound], independently in every coordinate.

    Gauss-Legendre points stand for the density, which must be smooth on either side of zero. Convolved with a Gaussian
    the difference is tiny; it is measured against twice as many points, and 1e-9 or more is refused.
    """
    positive("bound", bound, "the bound")
    points = 20 + math.ceil(4 * bound / positive("z", z, "the noise multiplier"))
    if points > 1000:
        raise ModelMixError(f"a bound of {bound / z:.0f} standard deviations of the noise is too wide: at most 245.")
    law, finer = (_atoms(z, density, bound, count) for count in (points, 2 * points))
    x = np.linspace(0, bound + 8 * z, 400)
    if not np.max(np.abs(law.log_density(x) - finer.log_density(x))) < 1e-9:
        raise UnprovedError(
            "the moments of the noise are known with an error bound",
            "the density has kinks between 0 and its bound, and the quadrature did not settle.",
            "Give a density that is smooth there, or a Discrete law.",
        )
    return law


def _atoms(z: float, density: Callable[[Array], Array], bound: float, points: int) -> Discrete:
    x, w = np.polynomial.legendre.leggauss(points)
    half = 0.5 * bound * (x + 1)
    right, left = (np.asarray(density(side * half)) * w * bound / 2 for side in (1.0, -1.0))
    if not np.allclose(right, left, rtol=1e-9, atol=1e-12):
        raise UnprovedError("the noise is symmetric about zero", "this density is not.", "Use a symmetric law.")
    total = 2 * float(right.sum())
    if not abs(total - 1) < 1e-6:
        raise ModelMixError(f"the density integrates to {total:.6g} on [-bound, bound], not to 1.")
    weights = np.concatenate([right[::-1], right]) / total
    return Discrete(z, (*(-half[::-1]), *half), tuple(weights / math.fsum(weights)))


def require_convex(law: Law, bound: float = 1.0) -> None:
    """Raises ``UnprovedError`` unless log A_k is convex and rising in |v|^2 on (0, bound], four points to a scale."""
    points = max(25, math.ceil(4 * bound / law.scale))
    if points > _FINEST:
        raise UnprovedError(
            "one coordinate of size c is the worst gradient",
            f"the noise of {type(law).__name__} is too narrow ({law.scale:.2g} of the clip) to look at every shift.",
            "Use more Gaussian noise; epsilon of the Gaussian alone always holds.",
        )
    x = np.linspace(0.0, bound**2, points)
    orders = CHECKED_ORDERS[CHECKED_ORDERS * bound <= 60 * law.scale]
    orders = orders if orders.size else CHECKED_ORDERS[:1]
    h = np.array([log_moments(law, math.sqrt(v), orders) for v in x])
    if not (np.all(np.diff(h, 2, axis=0) >= -1e-8 * h[-1]) and np.all(np.diff(h, axis=0) >= -1e-8 * h[-1])):
        raise UnprovedError(
            "one coordinate of size c is the worst gradient",
            f"the moments of this {type(law).__name__} law are not convex in the squared size of a coordinate: some "
            "other gradient is worse.",
            "Let atoms lie closer together than the noise is wide; epsilon of the Gaussian alone always holds.",
        )


@dataclass(frozen=True)
class Fixed:
    """A law as a function of z, for a ``Mechanism``: the law it was made with, at its own z only."""

    law: Discrete

    def __call__(self, z: float) -> Law:
        if z != self.law.z:
            raise ModelMixError(f"this law was made for z = {self.law.z:g}: make another for z = {z:g}.")
        return self.law


def coordinatewise(law: Discrete, sample_rate: float, p: int = 1) -> Mechanism:
    """The mechanism of Gaussian noise with this added; refused unless its worst gradient is known."""
    require_convex(law, 1 / math.sqrt(p))
    return Mechanism(law.z, sample_rate, p=p, law=Fixed(law))


# Uniform on a sphere.


def _log_radial(t: Array, d: int) -> Array:
    """log of the mean of exp(t * cosine) over the sphere in d dimensions: log 0F1(; d/2; t^2/4)."""
    if d == 1:
        return np.asarray(np.logaddexp(t, -t) - math.log(2.0))
    order = d / 2 - 1
    scaled = special.ive(order, t)
    with np.errstate(divide="ignore", invalid="ignore"):
        direct = special.gammaln(d / 2) + np.log(scaled) + t + order * (math.log(2.0) - np.log(t))
    # Debye's uniform expansion, exact to 1/order^2 and better, where the Bessel function underflows.
    nu = max(order, 1.0)
    zz = np.maximum(t, 1e-300) / nu
    root = np.sqrt(1 + zz * zz)
    eta = root + np.log(zz / (1 + root))
    u = 1 / root
    debye = nu * eta - 0.5 * np.log(2 * math.pi * nu) - 0.25 * np.log1p(zz * zz)
    debye = debye + np.log1p((3 * u - 5 * u**3) / (24 * nu) + (81 * u**2 - 462 * u**4 + 385 * u**6) / (1152 * nu**2))
    uniform = special.gammaln(d / 2) + debye + order * (math.log(2.0) - np.log(np.maximum(t, 1e-300)))
    small = t * t / (2 * d) - t**4 / (4 * d * d * (d + 2))
    return np.where(t < 1e-2, small, np.where(np.isfinite(direct) & (scaled > 1e-290), direct, uniform))


def sphere_log_moments(z: float, radius: float, dimension: int, shift: float, orders: Array, cells: int = 4) -> Array:
    """log A_k of N(0, z^2 I) plus a uniform point on the sphere of ``radius``, for a gradient of length ``shift``.

    By rotation the gradient lies along the first axis, and the integral is over that axis and the distance from it.
    ``cells`` grid cells to a standard deviation. Orders whose integrand is not inside the grid are infinite.
    """
    k = np.asarray(orders, dtype=np.float64)
    s, r, d = shift / z, radius / z, dimension  # in standard deviations of the noise
    reach = 9.0
    top = float(k.max())
    x = np.arange(-r - reach, r + top * s + reach, 1 / cells)
    log_weight = -math.log(cells)
    if d == 1:
        log_volume, rho = np.zeros((1, 1)), np.zeros((1, 1))
    else:
        centre = math.sqrt(d - 1)
        low = max(0.0, centre - r - reach)
        count = math.ceil((centre + r + reach - low) * cells)
        nodes, weights = np.polynomial.legendre.leggauss(12)
        edges = np.linspace(low, centre + r + reach, max(2, count // 8))
        half = 0.5 * np.diff(edges)
        rho = ((edges[:-1] + half)[:, None] + half[:, None] * nodes).reshape(1, -1)
        log_w = np.log((half[:, None] * weights).reshape(1, -1))
        log_surface = math.log(2) + 0.5 * (d - 1) * math.log(math.pi) - special.gammaln((d - 1) / 2)
        log_volume = log_w + log_surface + (d - 2) * np.log(rho)

    def log_g(first: Array) -> Array:
        square = first * first + rho * rho
        return np.asarray(
            -0.5 * (square + r * r) - 0.5 * d * math.log(2 * math.pi) + _log_radial(r * np.sqrt(square), d)
        )

    log_f = log_g(x[:, None])
    u = log_g(x[:, None] - s) - log_f
    base = log_f + log_volume + log_weight
    out = np.full(k.shape, np.inf)
    for i, order in enumerate(k):
        term = base + log_bracket(np.array([[order]]), u)
        peak = float(term.max())
        rim = max(float(term[0].max()), float(term[-1].max()))
        if d > 1:
            rim = max(rim, float(term[:, -1].max()), float(term[:, 0].max()) if rho[0, 0] > 0.5 else -math.inf)
        if rim < peak - 25:
            out[i] = np.logaddexp(0.0, peak + math.log(float(np.exp(term - peak).sum())))
    return out


@dataclass(frozen=True)
class Sphere:
    """Plain DP-SGD with a uniform point on a sphere added to the gradient: z, the radius (over the clip), q and d."""

    z: float
    radius: float
    sample_rate: float
    dimension: int

    def __post_init__(self) -> None:
        positive("z", self.z, "the noise multiplier")
        positive("radius", self.radius, "the radius")
        rate("q", self.sample_rate, "the sampling rate")
        whole("d", self.dimension, "the number of trained coordinates", least=1)
        if self.radius > 60 * self.z:
            raise ModelMixError(f"radius = {self.radius:g} is not allowed: it must be at most 60 z.")

    def curve(self) -> Array:
        """kappa at ``orders_at(0)``; orders that cannot be integrated take the Gaussian alone, an upper bound."""
        orders = orders_at(0)
        plain = 0.5 * orders * (orders - 1) / self.z**2
        log_a = plain.copy()
        near = orders / self.z <= 40
        if near.any():
            k = orders[near]
            coarse, fine = (sphere_log_moments(self.z, self.radius, self.dimension, 1.0, k, cells) for cells in (3, 4))
            with np.errstate(invalid="ignore"):
                change = np.nan_to_num(np.abs(fine / coarse - 1), nan=np.inf)
            settled = change < 1e-6
            self._require_growth(k[settled])
            log_a[near] = np.where(settled, np.minimum(plain[near], fine * (1 + 10 * change + 1e-9)), plain[near])
        return sampled_curve(log_a, self.sample_rate, 0)

    def _require_growth(self, orders: Array) -> None:
        """A shorter gradient must not be worse; looked at where the noise could see a difference."""
        if not orders.size:
            return
        orders = orders[np.unique(np.linspace(0, orders.size - 1, 6).astype(int))]
        lengths = np.linspace(0, 1, max(8, min(60, math.ceil(2 / self.z))) + 1)[1:]
        h = np.array([sphere_log_moments(self.z, self.radius, self.dimension, s, orders, 3) for s in lengths])
        if not np.all(np.diff(h, axis=0) > -1e-9 * h[-1]):
            raise UnprovedError(
                "the longest gradient is the worst one",
                f"on a sphere of radius {self.radius / self.z:.2g} standard deviations in {self.dimension} dimensions "
                "a shorter gradient has larger moments.",
                "Use a smaller sphere or more noise; epsilon of the Gaussian alone always holds.",
            )

    def epsilon(self, delta: float, steps: int) -> float:
        """epsilon after ``steps`` steps."""
        delta = probability("delta", delta, "the failure probability")
        steps = whole("steps", steps, "the number of steps", least=1)
        orders, kappa = refine(orders_at(0), steps * self.curve())
        return float(np.min(epsilons(orders, kappa, delta, "improved"))) * (1 + 1e-12)


# Stochastic rounding.

FORMATS = {"bf16": 7, "fp8-e4m3": 3, "fp8-e5m2": 2, "fp16": 10}
"""Bits behind the point of the significand."""


def spacing(number_format: str, largest: float) -> float:
    """Distance of neighbouring numbers of a format at size ``largest``: 2^(floor(log2 largest) - bits)."""
    if number_format not in FORMATS:
        raise ModelMixError(f"format = {number_format!r} is unknown: choose one of {', '.join(FORMATS)}.")
    return 2.0 ** (math.floor(math.log2(positive("largest", largest, "the largest size"))) - FORMATS[number_format])


def rounded_after_noise(mechanism: Mechanism) -> Mechanism:
    """Stochastic rounding of the noisy sum or of the state: post-processing. The same mechanism, for free."""
    return mechanism


def rounded_before_noise(mechanism: Mechanism, grid: float, dimension: int) -> Mechanism:
    """Stochastic rounding of the clipped sum before the noise, to a grid of spacing ``grid`` (over the clip): a cost.

    Rounding is monotone in its argument for every draw of its coins, so with the same coins one sample moves a
    coordinate by at most |v_j| + grid, and the vector by at most 1 + grid * sqrt(d). Renyi divergence is jointly
    quasi-convex, so the coins may be fixed: plain Gaussian noise of multiplier z/(1 + grid sqrt(d)).
    """
    if mechanism.mixed or mechanism.law != "gaussian":
        raise UnprovedError(
            "every coordinate of a clipped gradient is bounded",
            "rounding before the noise changes which gradients are possible, and mixing counts on them.",
            "Round after the noise, which is free.",
        )
    positive("grid", grid, "the spacing")
    moved = 1 + grid * math.sqrt(whole("d", dimension, "the number of trained coordinates", least=1))
    return Mechanism(mechanism.noise_multiplier / moved, mechanism.sample_rate)


def rounding_as_noise() -> NoReturn:
    """Stochastic rounding counted as randomness that hides: refused."""
    raise UnprovedError(
        _ADDED,
        "stochastic rounding depends on what it rounds: two sums that lie on the grid are not randomised at all.",
        "Round after the noise (free), or dither subtractively over one spacing, which is mixing with that width.",
    )


def dithered(mechanism: Mechanism, grid: float) -> Mechanism:
    """Subtractive dither: round(x + U) - U with U uniform over one spacing leaves x plus an independent uniform.

    U must be fresh and secret, and the sum released is x plus that uniform plus noise: ModelMix with omega = ``grid``.
    """
    if mechanism.mixed:
        raise ModelMixError("this mechanism mixes already: the sum of two uniforms is not a uniform.")
    positive("grid", grid, "the spacing")
    return Mechanism(
        mechanism.noise_multiplier, mechanism.sample_rate, grid, mechanism.p, mechanism.law, mechanism.dimension
    )


# The paper's negative answers.


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
        _ADDED,
        f"{what} multiplies what a sample brings: there are samples which it does not change at all.",
        "It may be used freely; count the Gaussian noise alone.",
    )

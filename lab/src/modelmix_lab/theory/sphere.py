r"""Gaussian noise plus a uniform point on a sphere, as algorithms that escape saddle points add it (Section 4.5).

Coordinates are dependent, but the sum looks the same from every direction, so only the length of the gradient counts.
The moments are integrals over two dimensions, along the gradient and away from it.

They grow with the length as long as radius <= z sqrt(d), and nothing else is accepted. Given the sum y, the point X on
the sphere has a von Mises-Fisher law, whose variance in no direction exceeds radius^2/d: across its mean it is
radius^2 A(k)/k, along it radius^2 A'(k), with A = I_{d/2} / I_{d/2-1}, which is concave with A'(0) = 1/d (Watson,
*Statistics on Spheres*, 1983). The Hessian of the log-density of y is Cov(X | y)/z^4 - I/z^2, so that y is log-concave.
So is then its law along the gradient given all that lies across, which the gradient does not move: shifts of it have a
monotone likelihood ratio, and every f-divergence between them grows with the shift.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy import special

from modelmix._checks import positive, probability, rate, whole
from modelmix.accounting.functions import log_bracket
from modelmix.accounting.renyi import epsilons, orders_at, refine, sampled_curve
from modelmix.errors import ModelMixError, UnprovedError

Array = NDArray[np.float64]


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
        if self.radius > self.z * math.sqrt(self.dimension):
            raise UnprovedError(
                "the longest gradient is the worst one",
                f"a sphere of radius {self.radius / self.z:.3g} standard deviations in {self.dimension} dimensions has "
                "a hollow inside, in which a shorter gradient may be worse.",
                "Let the radius be at most z sqrt(d), or use more noise; epsilon of the Gaussian alone always holds.",
            )

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
            log_a[near] = np.where(settled, np.minimum(plain[near], fine * (1 + 10 * change + 1e-9)), plain[near])
        return sampled_curve(log_a, self.sample_rate, 0)

    def epsilon(self, delta: float, steps: int) -> float:
        """epsilon after ``steps`` steps."""
        delta = probability("delta", delta, "the failure probability")
        steps = whole("steps", steps, "the number of steps", least=1)
        orders, kappa = refine(orders_at(0), steps * self.curve())
        return float(np.min(epsilons(orders, kappa, delta, "improved"))) * (1 + 1e-12)

"""An independent oracle: densities from their definition, integrals by 40-digit Gauss-Legendre panels (mpmath)."""

from __future__ import annotations

import mpmath as mp

DIGITS = 40


def gaussian_mass(z, a, b):
    """P(a < N(0, z^2) < b) from complementary error functions on the side where they do not cancel."""
    if a + b < 0:
        a, b = -b, -a
    root = z * mp.sqrt(2)
    return (mp.erfc(a / root) - mp.erfc(b / root)) / 2


def laplace_mass(z, a, b):
    def below(x):
        return mp.exp(x / z) / 2 if x < 0 else 1 - mp.exp(-x / z) / 2

    if a + b > 0:
        a, b = -b, -a
    return below(b) - below(a)


def density(law, z, omega):
    mass = {"gaussian": gaussian_mass, "laplace": laplace_mass}[law]
    return lambda x: mass(z, x - omega / 2, x + omega / 2) / omega


def excess(law: str, z: float, omega: float, shift: float, k: int):
    """A_k - 1 for a mixed law, as an mpmath number."""
    with mp.workdps(DIGITS):
        z, omega, shift = mp.mpf(z), mp.mpf(omega), mp.mpf(shift)
        f = density(law, z, omega)

        def integrand(x):
            here, there = f(x), f(x - shift)
            return there**k * here ** (1 - k) - here - k * (there - here)

        reach = 16 * z if law == "gaussian" else 100 * z
        far = k * shift if law == "gaussian" else shift
        stops = {-omega / 2 - reach, omega / 2 + far + reach}
        for kink in (-omega / 2, omega / 2):
            for offset in (mp.mpf(0), shift, far):
                for step in (0, 1, 3, 7, 15, 40):
                    stops |= {kink + offset - step * z, kink + offset + step * z}
        lower, upper = -omega / 2 - reach, omega / 2 + far + reach
        points = sorted(x for x in stops if lower <= x <= upper)
        return mp.quad(integrand, points, maxdegree=5)

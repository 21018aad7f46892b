r"""Is mixing worth it? Total noise at equal epsilon, ModelMix against plain Gaussian noise.

A mixed mechanism adds variance z^2 + omega^2/12 to every coordinate; the share of the uniform part is
rho = (omega^2/12) / (z^2 + omega^2/12). For a given share the *price* of mixing is the standard deviation it needs for
some epsilon over the one that plain Gaussian noise needs, both on clipped gradients of the same l2 norm and by the same
(Renyi) accountant.

In the limit of small shifts (many coordinates, much noise) every Renyi divergence is alpha/2 * J * s^2 with J the
Fisher information of the noise, so the price tends to sqrt(J * variance), which is at least 1 by the Cramer-Rao bound
and is 1 for the Gaussian alone. It depends on the share only. Away from the limit the price is larger: the next term of
the divergence, -kappa_4 s^4/24 for the Kullback-Leibler divergence, is positive, because the uniform has a negative
fourth cumulant.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from modelmix.accounting.accountant import epsilon as renyi_epsilon
from modelmix.accounting.calibration import smallest_safe
from modelmix.accounting.laws import Gaussian, Law, Mixed
from modelmix.accounting.mechanism import Mechanism
from modelmix.errors import ModelMixError
from modelmix.theory.loss import loss_moments

_SMALL = 1e-3
_TOLERANCE = 1e-4


def fisher_information(law: Law) -> float:
    """J = E[(d log f)^2], from the Kullback-Leibler divergence of a small shift: 2 D(s)/s^2, to about 1e-6."""
    s = _SMALL * law.scale
    return 2 * loss_moments(law, s).mean / s**2


def _law(share: float) -> Law:
    """Unit variance, of which ``share`` is the uniform's."""
    if not 0 <= share < 1:
        raise ModelMixError(f"share = {share:g} is not allowed: some of the variance must be Gaussian, 0 <= share < 1.")
    noise = Gaussian(math.sqrt(1 - share))
    return Mixed(noise, math.sqrt(12 * share)) if share > 0 else noise


def limit_price(share: float) -> float:
    """sqrt(J * variance): the price of mixing in the limit of small shifts."""
    return math.sqrt(fisher_information(_law(share)))


def mechanism_of(share: float, std: float, sample_rate: float, p: int) -> Mechanism:
    """The mechanism with total standard deviation ``std``, of whose variance ``share`` comes from mixing."""
    _law(share)
    return Mechanism(std * math.sqrt(1 - share), sample_rate, std * math.sqrt(12 * share), p)


def std_needed(share: float, *, epsilon: float, delta: float, sample_rate: float, steps: int, p: int) -> float:
    """The smallest total standard deviation (over the clip) with this epsilon, rounded up by at most 1e-4."""

    def value(std: float) -> float:
        return renyi_epsilon(mechanism_of(share, std, sample_rate, p), delta, steps=steps)

    return smallest_safe(value, float(epsilon), start=1.0, tolerance=_TOLERANCE, name="noise")


def price(share: float, *, epsilon: float, delta: float, sample_rate: float, steps: int, p: int) -> float:
    """Noise with mixing over noise without, at equal epsilon. Above 1 mixing costs more than it gives."""
    setting = {"epsilon": epsilon, "delta": delta, "sample_rate": sample_rate, "steps": steps, "p": p}
    return std_needed(share, **setting) / std_needed(0.0, **setting)  # type: ignore[arg-type]


@dataclass(frozen=True)
class Cell:
    """One point of the map."""

    epsilon: float
    sample_rate: float
    steps: int
    p: int
    share: float
    price: float


EPSILONS = (0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0)
RUNS = ((0.001, 10_000), (0.01, 1000), (0.01, 10_000), (0.03, 3500), (0.1, 100), (0.1, 1000), (1.0, 1), (1.0, 100))
"""(q, T)."""
TRUNCATIONS = (1, 25, 400)
SHARE = 0.99
"""About that of the paper's ResNet20: z = 0.335, omega = 11.25."""


def price_map(
    *,
    share: float = SHARE,
    epsilons: Sequence[float] = EPSILONS,
    runs: Sequence[tuple[float, int]] = RUNS,
    truncations: Sequence[int] = TRUNCATIONS,
    delta: float = 1e-5,
) -> list[Cell]:
    """The price over (epsilon, q, T, p)."""
    out = []
    for q, steps in runs:
        for epsilon in epsilons:
            plain = std_needed(0.0, epsilon=epsilon, delta=delta, sample_rate=q, steps=steps, p=1)
            for p in truncations:
                mixed = std_needed(share, epsilon=epsilon, delta=delta, sample_rate=q, steps=steps, p=p)
                out.append(Cell(epsilon, q, steps, p, share, mixed / plain))
    return out


SHARES = (0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 0.99)


def price_by_share(
    p: int, *, epsilon: float = 8.0, delta: float = 1e-5, sample_rate: float = 0.03, steps: int = 3500
) -> list[Cell]:
    """The price over the share, in the setting of the paper's ResNet20."""
    setting = {"epsilon": epsilon, "delta": delta, "sample_rate": sample_rate, "steps": steps}
    plain = std_needed(0.0, p=1, **setting)  # type: ignore[arg-type]
    found = [std_needed(share, p=p, **setting) / plain for share in SHARES]  # type: ignore[arg-type]
    return [Cell(epsilon, sample_rate, steps, p, s, value) for s, value in zip(SHARES, found, strict=True)]

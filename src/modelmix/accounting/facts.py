r"""The facts the proof rests on, as functions that can be tested, and the gate for laws that are not ours.

1. Worst direction: h_k(|v|) is a convex function of |v|^norm, so a vertex of the clipped set is the worst gradient.
2. Width: A_k does not grow with the mixing width, so a natural gap wider than tau is never worse.
3. Direction: D_alpha((1-q)P + qP' || P) is at least D_alpha(P || (1-q)P + qP'), so the dataset with the sample against
   the one without its contribution is the worst case. This one is a theorem for every law symmetric about a point
   (Mironov, Talwar, Zhang 2019, Theorem 5).

For the Gaussian and the Laplace law, mixed or not, all three are theorems (docs/proofs.md), and held on wide grids by
this package's tests as well. Any other law is refused unless they hold on a grid that covers the shifts its mechanism
uses.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np

from modelmix.accounting.functions import Array
from modelmix.accounting.laws import Law, Mixed, known
from modelmix.accounting.mechanism import Mechanism
from modelmix.accounting.moments import log_moments
from modelmix.accounting.quadrature import panel_rule
from modelmix.errors import ModelMixError, UnprovedError

CHECKED_ORDERS = np.array([2.0, 3.0, 4.0, 6.0, 8.0, 16.0, 32.0, 256.0])
_GRID = 24
_WIDER = (1.1, 1.5, 2.0, 3.0, 5.0, 10.0)
_NEAREST = "Gaussian noise with l2 clipping and Laplace noise with l1 clipping are covered."


def convexity(law: Law, bound: float, points: int = _GRID) -> Array:
    """Smallest second difference of x -> h_k(x^(1/norm)) on [0, bound^norm], over h_k at the end, for every order."""
    x = np.linspace(0.0, bound**law.norm, points)
    h = np.array([log_moments(law, v ** (1 / law.norm), CHECKED_ORDERS) for v in x])
    return np.asarray(np.min(h[2:] - 2 * h[1:-1] + h[:-2], axis=0) / h[-1])


def width_growth(law: Mixed, shift: float) -> Array:
    """Largest relative growth of log A_k when the mixing width grows, for every order; never above rounding."""
    widths = (1.0, *_WIDER)
    h = np.array([log_moments(Mixed(law.base, law.omega * w), shift, CHECKED_ORDERS) for w in widths])
    return np.asarray(np.max(h[1:] / h[:-1], axis=0) - 1)


def mass(law: Law) -> float:
    """Integral of the density; 1 for an honest law."""
    rule = panel_rule(law, 0.0, 1.0, 1)
    return float(sum(np.sum(p.weight * np.exp(law.log_density(p.x, p.origin))) for p in rule.pieces))


@lru_cache(maxsize=1024)
def require_facts(mechanism: Mechanism) -> None:
    """Raises ``UnprovedError`` unless the facts hold for the mechanism's law; at once for the laws under test."""
    law = mechanism.coordinate_law
    if known(law) is not None:
        return
    if law.norm not in (1, 2):
        raise ModelMixError(
            f"norm = {law.norm!r} of {law} is unknown: a law goes with the l1 norm (1) or the l2 norm (2)."
        )
    bound = mechanism.coordinate_bound
    x = np.concatenate([np.linspace(0, max(law.kinks), 61), law.scale * np.linspace(0.01, 20.0, 201) + max(law.kinks)])
    if not np.allclose(law.log_density(x), law.log_density(-x), rtol=1e-9, atol=1e-9):
        raise UnprovedError("the noise is symmetric about zero", f"{law} is not.", _NEAREST)
    total = mass(law)
    if not abs(total - 1) < 1e-6:
        raise UnprovedError("the noise is a probability density", f"{law} integrates to {total:.6g}.", _NEAREST)
    curved = convexity(law, bound)
    if not np.all(curved >= -1e-8):
        worst = CHECKED_ORDERS[int(np.argmin(np.nan_to_num(curved, nan=-np.inf)))]
        raise UnprovedError(
            "one coordinate of size c (or p equal ones of c/sqrt(p)) is the worst gradient",
            f"for {law} the moment of order {worst:g} is not convex in |v|^{law.norm}, so another direction is worse.",
            _NEAREST,
        )
    if isinstance(law, Mixed) and not np.all(width_growth(law, bound) <= 1e-8):
        raise UnprovedError(
            "a gap wider than tau is never worse",
            f"for {law} a wider mixing raises a moment.",
            _NEAREST,
        )

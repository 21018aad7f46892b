"""Elementary functions in log space, accurate where the textbook formula cancels or overflows."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]

_SMALL, _LARGE = 0.05, 30.0
_TERMS = 11  # of the series; the next one is below 1e-18 for arguments under _SMALL


def log_expm1(x: Array) -> Array:
    """log(exp(x) - 1) for x >= 0."""
    x = np.asarray(x, dtype=np.float64)
    with np.errstate(divide="ignore"):
        return np.where(x > 1.0, x + np.log1p(-np.exp(-np.maximum(x, 1.0))), np.log(np.expm1(np.minimum(x, 1.0))))


def log_exp_minus_line(x: Array) -> Array:
    """log(exp(x) - 1 - x), the gap between the exponential and its tangent at 0."""
    x = np.asarray(x, dtype=np.float64)
    out = np.empty_like(x)
    small, large = np.abs(x) < _SMALL, x > _LARGE
    rest = ~(small | large)
    xs, xl = x[small], x[large]
    out[small] = _log_half_square(xs) + np.log1p(_series(np.zeros_like(xs), xs))
    out[large] = xl + np.log1p(-(1 + xl) * np.exp(-xl))
    out[rest] = np.log(np.expm1(x[rest]) - x[rest])
    return out


def log_bracket(k: Array, u: Array) -> Array:
    """log(exp(ku) - 1 - k(exp(u) - 1)), elementwise over the broadcast of k > 1 and u; never negative inside."""
    t = k * u
    kb, ub = np.broadcast_to(k, t.shape), np.broadcast_to(u, t.shape)
    out = np.empty_like(t)
    small, large = np.abs(t) < _SMALL, t > _LARGE
    rest = ~(small | large)
    ks, us, ts = kb[small], ub[small], t[small]
    out[small] = np.log(ks * (ks - 1)) + _log_half_square(us) + np.log1p(_series(us, ts))
    kl, ul, tl = kb[large], ub[large], t[large]
    out[large] = tl + np.log1p((kl - 1) * np.exp(-tl) - kl * np.exp(ul - tl))
    out[rest] = np.log(np.expm1(t[rest]) - kb[rest] * np.expm1(ub[rest]))
    return out


def _log_half_square(x: Array) -> Array:
    """log(x^2 / 2), by logarithms so that it does not underflow."""
    with np.errstate(divide="ignore"):
        return np.asarray(2 * np.log(np.abs(x)) - np.log(2.0))


def _series(u: Array, t: Array) -> Array:
    """What follows the leading term 1 of sum over n >= 2 of (u^(n-2) + u^(n-3) t + ... + t^(n-2)) * 2/n!.

    With t = ku this is (exp(ku) - 1 - k(exp(u) - 1)) / (k(k-1) u^2/2), because (k^n - k)/(k(k-1)) = 1 + k + ... +
    k^(n-2); with u = 0 it is (exp(t) - 1 - t) / (t^2/2).
    """
    total = np.zeros_like(t)
    power = np.ones_like(t)
    t_power = np.ones_like(t)
    factorial = 2.0
    for n in range(3, _TERMS + 1):
        t_power = t_power * t
        power = power * u + t_power
        factorial *= n
        total += 2.0 * power / factorial
    return total

"""Renyi accounting: what the moments of several mechanisms prove, as epsilon for a delta or delta for an epsilon."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

from modelmix._checks import at_least_zero, probability, whole
from modelmix.accounting.functions import Array
from modelmix.accounting.ledger import Ledger, Phase
from modelmix.accounting.mechanism import Mechanism
from modelmix.accounting.renyi import (
    LAST_LEVEL,
    REAL_ORDERS,
    Conversion,
    at_real_orders,
    epsilons,
    log_deltas,
    orders_at,
    real_curve,
    refine,
    step_curve,
    total_variation,
    worst_loss,
)
from modelmix.errors import ModelMixError

# Rounding of the last few operations, which act on numbers that are upper bounds already.
_UP = 1 + 1e-13


@dataclass(frozen=True)
class RenyiBound:
    """What Renyi moments prove of a composition at one delta.

    ``order`` is the Renyi order that proves it (infinity: the bound of the worst case, pure differential privacy; 0: no
    step was taken). ``reason`` says why epsilon is infinite or looser than it could be, where it is.
    """

    epsilon: float
    delta: float
    order: float
    conversion: Conversion
    reason: str | None = None


def _phases(source: Mechanism | Ledger, steps: int | None) -> tuple[Phase, ...]:
    if not isinstance(source, Mechanism | Ledger):
        raise ModelMixError(f"{source!r} is neither a Mechanism nor a Ledger.")
    if isinstance(source, Ledger):
        if steps is not None:
            raise ModelMixError("a ledger knows its steps: leave steps out.")
        source.require_proof()
        return source.phases
    if steps is None:
        raise ModelMixError("say for how many steps: steps = a whole number, 1 or more.")
    return (Phase(source, steps),)


def _pure(phases: Iterable[Phase]) -> float:
    """The worst case of all the steps: epsilon with delta = 0, infinite but for Laplace noise."""
    return sum(phase.steps * worst_loss(phase.mechanism) for phase in phases)


def renyi_curve(source: Mechanism | Ledger, steps: int | None = None, level: int = 0) -> tuple[Array, Array]:
    """(orders, kappa) of the composition, kappa = (alpha - 1) * D_alpha; curves of the phases add up."""
    return orders_at(level), _compose(_phases(source, steps), level)


def _compose(phases: Iterable[Phase], level: int) -> Array:
    total = np.zeros_like(orders_at(level))
    for phase in phases:
        total = total + phase.steps * step_curve(phase.mechanism, level)
    return total


def _refined(phases: Iterable[Phase], level: int, kappa: Array) -> tuple[Array, Array]:
    """With orders between whole numbers: sampled moments where they are known there, straight lines elsewhere."""
    steps = [(step_curve(p.mechanism, level), real_curve(p.mechanism), float(p.steps)) for p in phases]
    fine, values = refine(orders_at(level), kappa)
    if all(real is None for _, real, _ in steps):
        return fine, values
    all_orders = np.append(fine, REAL_ORDERS)
    all_values = np.append(values, at_real_orders(orders_at(level), steps))
    sort = np.argsort(all_orders, kind="stable")
    return all_orders[sort], all_values[sort]


def rdp(mechanism: Mechanism, orders: Sequence[float]) -> Array:
    """Upper bounds on the Renyi divergence D_alpha of one step, at any orders above 1."""
    wanted = np.asarray(orders, dtype=np.float64)
    if wanted.size == 0 or not np.all(wanted > 1):
        raise ModelMixError("Renyi orders must be greater than 1.")
    level = 0
    while level < LAST_LEVEL and orders_at(level)[-1] < wanted.max():
        level += 1
    grid, kappa = orders_at(level), step_curve(mechanism, level)
    if wanted.max() > grid[-1]:
        raise ModelMixError(f"Renyi orders go up to {grid[-1]:g}.")
    return np.asarray(np.interp(wanted, np.append(1.0, grid), np.append(0.0, kappa)) / (wanted - 1))


def guarantee(
    source: Mechanism | Ledger,
    delta: float,
    *,
    steps: int | None = None,
    conversion: Conversion = "improved",
    real_orders: bool = True,
) -> RenyiBound:
    """The smallest epsilon the moments prove at ``delta``. The order grid grows until its optimum is inside it.

    Without ``real_orders`` straight lines between whole orders are all that the improved conversion sees.
    """
    delta = probability("delta", delta, "the failure probability")
    phases = _phases(source, steps)
    if not phases:
        return RenyiBound(0.0, delta, 0.0, conversion)
    pure = _pure(phases)
    for level in range(LAST_LEVEL + 1):
        orders, kappa = orders_at(level), _compose(phases, level)
        if conversion == "improved":
            orders, kappa = _refined(phases, level, kappa) if real_orders else refine(orders, kappa)
        candidates = epsilons(orders, kappa, delta, conversion)
        best = int(np.argmin(candidates))
        if best < orders.size - 1:
            break
    value, order = float(candidates[best]) * _UP, float(orders[best])
    if not math.isfinite(min(value, pure)):
        return RenyiBound(
            math.inf, delta, 0.0, conversion, "no finite moment: the noise is too small to bound the loss"
        )
    if pure <= value:
        return RenyiBound(pure, delta, math.inf, conversion, "pure: holds with delta = 0 as well")
    reason = None
    if value == 0:
        reason = "epsilon 0: the total variation distance is proved to be below delta"
    elif best == orders.size - 1:
        reason = f"Renyi orders above {order:g} could lower epsilon by at most {-math.log(delta) / (order - 1):.1e}"
    return RenyiBound(value, delta, order, conversion, reason)


def epsilon(
    source: Mechanism | Ledger,
    delta: float,
    *,
    steps: int | None = None,
    conversion: Conversion = "improved",
    real_orders: bool = True,
) -> float:
    """epsilon at ``delta`` of a mechanism run for ``steps``, or of a ledger."""
    return guarantee(source, delta, steps=steps, conversion=conversion, real_orders=real_orders).epsilon


def delta(
    source: Mechanism | Ledger,
    epsilon: float,
    *,
    steps: int | None = None,
    conversion: Conversion = "improved",
) -> float:
    """The smallest delta the moments prove at ``epsilon``; 1 where they prove nothing."""
    epsilon = at_least_zero("epsilon", epsilon, "the privacy loss")
    phases = _phases(source, steps)
    if not phases or _pure(phases) <= epsilon:
        return 0.0
    for level in range(LAST_LEVEL + 1):
        orders, kappa = _refined(phases, level, _compose(phases, level))
        candidates = log_deltas(orders, kappa, epsilon, conversion)
        if int(np.argmin(candidates)) < candidates.size - 1:
            break
    smallest = math.exp(float(np.min(candidates)))
    if conversion == "improved":
        smallest = min(smallest, total_variation(orders, kappa))
    return min(1.0, smallest * _UP)


def epsilon_curve(
    mechanism: Mechanism,
    steps: ArrayLike,
    delta: float,
    *,
    conversion: Conversion = "improved",
) -> Array:
    """epsilon after each of many step counts, at the price of little more than one."""
    delta = probability("delta", delta, "the failure probability")
    counts = np.array([whole("steps", t, "the number of steps", least=1) for t in np.ravel(steps)], dtype=np.float64)
    out = np.full(counts.shape, np.inf)
    open_ = np.ones(counts.shape, dtype=bool)
    for level in range(LAST_LEVEL + 1):
        orders, kappa = orders_at(level), step_curve(mechanism, level)
        if conversion == "improved":
            orders, kappa = _refined([Phase(mechanism, 1)], level, kappa)
        where = np.flatnonzero(open_)
        for chunk in np.array_split(where, 1 + where.size * orders.size // 4_000_000):
            candidates = epsilons(orders, kappa[:, None] * counts[chunk], delta, conversion)
            best = np.argmin(candidates, axis=0)
            out[chunk] = np.min(candidates, axis=0) * _UP
            open_[chunk] = best == orders.size - 1
        if not open_.any():
            break
    return np.asarray(np.minimum(out, counts * worst_loss(mechanism)))

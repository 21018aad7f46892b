"""The mechanism under attack: the worst gradient, the best test, many trials.

One step gives the canary's gradient v, with probability q, plus the mechanism's own noise in every coordinate. The
best test of "the canary was there" against "it was not" is the likelihood ratio (Neyman and Pearson), which is known
exactly: log((1 - q) + q prod_j f(x_j - v_j)/f(x_j)), summed over the steps. So the bound is as tight
as the trials allow.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from modelmix.audit.bounds import Array, LowerBound, epsilon_lower_bound
from modelmix.errors import ModelMixError
from modelmix.privacy.embedding import EmbeddingMechanism
from modelmix.privacy.laws import Law
from modelmix.privacy.ledger import Ledger
from modelmix.privacy.mechanism import Mechanism
from modelmix.privacy.validation import whole

_BLOCK = 2_000_000


@dataclass(frozen=True)
class Canary:
    """A clipped gradient, in units of the clip: ``count`` coordinates of size ``size`` each."""

    name: str
    size: float
    count: int


def canary_size(mechanism: Mechanism, count: int) -> float:
    """What clipping leaves of each of ``count`` equal coordinates, over the clip."""
    full = 1 / count if mechanism.coordinate_law.norm == 1 else 1 / math.sqrt(count)
    return min(full, mechanism.coordinate_bound)


def log_ratio(law: Law, x: Array, size: float) -> Array:
    """log f(x - size)/f(x) in every coordinate.

    Rounded to nine decimals: where the ratio is flat, as in the tails of a Laplace law, the rounding of x + v - v would
    tell the worlds apart. That is a leak of floating-point arithmetic, which is not what is audited here.
    """
    return np.round(law.log_density(x - size) - law.log_density(x), 9)


def canaries(mechanism: Mechanism, spread: int = 4) -> tuple[Canary, ...]:
    """The proof's worst case, and gradients spread over more coordinates, which must be no worse."""
    if isinstance(mechanism, EmbeddingMechanism):
        raise ModelMixError(
            "an embedded step releases two sums, and this attack knows one: there is no audit of it yet."
        )
    (size, count), *_ = mechanism.worst_gradient
    many = count * spread
    name = "one coordinate of c" if count == 1 else f"{count} coordinates of c/sqrt(p)"
    wide = Canary(f"spread over {many} coordinates", canary_size(mechanism, many), many)
    return Canary(name, size, count), wide


def scores(
    ledger: Ledger,
    trials: int,
    present: bool,
    rng: np.random.Generator,
    *,
    canary: Canary | None = None,
    actual: Law | None = None,
    done: Callable[[int], None] | None = None,
) -> Array:
    """Log-likelihood ratios of ``trials`` whole runs in one world.

    Args:
        ledger: what is run.
        present: was the canary in the data?
        canary: its clipped gradient; None takes the worst case of every phase.
        actual: the law that is really drawn from, where a broken implementation is imitated; the attacker always uses
            the law that the mechanism claims.
        done: told how many trial-steps were done.
    """
    total = np.zeros(trials)
    for phase in ledger.phases:
        mechanism, q = phase.mechanism, phase.mechanism.sample_rate
        one = canary or canaries(mechanism)[0]
        law = mechanism.coordinate_law
        drawn = law if actual is None else actual
        rows = max(1, _BLOCK // one.count)
        for start in range(0, trials, rows):
            part = slice(start, min(start + rows, trials))
            m = part.stop - start
            for _ in range(phase.steps):
                x = drawn.sample(rng, (m, one.count))
                if present:
                    x += one.size * (rng.random(m) < q)[:, None]
                ratio = np.sum(log_ratio(law, x, one.size), axis=1)
                total[part] += ratio if q == 1 else np.logaddexp(math.log1p(-q), math.log(q) + ratio)
                if done is not None:
                    done(m)
    return total


def audit_ledger(
    ledger: Ledger,
    delta: float,
    *,
    trials: int = 100_000,
    confidence: float = 0.95,
    canary: Canary | None = None,
    seed: int = 0,
    actual: Law | None = None,
    done: Callable[[int], None] | None = None,
) -> Audit:
    """A lower bound on the epsilon of a whole ledger, from ``trials`` runs in each world."""
    trials = whole("trials", trials, "the number of trials in each world", least=4)
    rng = np.random.default_rng(seed)
    without, with_canary = (
        scores(ledger, trials, present, rng, canary=canary, actual=actual, done=done) for present in (False, True)
    )
    return Audit(epsilon_lower_bound(without, with_canary, delta, confidence), without, with_canary)


def audit_mechanism(mechanism: Mechanism, delta: float, *, steps: int = 1, **options: Any) -> LowerBound:
    """A lower bound on the epsilon of ``steps`` steps of a mechanism; options as in ``audit_ledger``."""
    return audit_ledger(Ledger().add(mechanism, steps), delta, **options).bound


@dataclass(frozen=True)
class Audit:
    """A bound and the scores of the two worlds it rests on."""

    bound: LowerBound
    without: Array
    with_canary: Array

"""The mechanism under attack: the worst gradient, the best test, many trials.

One step gives the canary's gradient v, with probability q, plus the mechanism's own noise in every coordinate. The
best test of "the canary was there" against "it was not" is the likelihood ratio (Neyman and Pearson), which is known
exactly: log((1 - q) + q prod_j f(x_j - v_j)/f(x_j)), summed over the steps. So the bound is as tight
as the trials allow.

An embedded step is attacked where the basis consists of coordinates. What a canary has there meets the noise of both
releases, c0 and c1 long, and what it has elsewhere that of residuals alone; both meet the mixing.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from modelmix._checks import whole
from modelmix.accounting.embedding import EmbeddingMechanism
from modelmix.accounting.laws import Law
from modelmix.accounting.ledger import Ledger
from modelmix.accounting.mechanism import Bound, Mechanism
from modelmix.auditing.bounds import Array, LowerBound, epsilon_lower_bound

_BLOCK = 2_000_000


@dataclass(frozen=True)
class Canary:
    """A clipped gradient, in units of the clip.

    Args:
        parts: (law of what is added, size, how many) of coordinates that are alike.
    """

    name: str
    parts: Bound

    @property
    def count(self) -> int:
        return sum(count for _, _, count in self.parts)


def canary_size(mechanism: Mechanism, count: int) -> float:
    """What clipping leaves of each of ``count`` equal coordinates, over the clip."""
    full = 1 / count if mechanism.coordinate_law.norm == 1 else 1 / math.sqrt(count)
    return min(full, mechanism.coordinate_bound)


def parts(mechanism: Mechanism, width: int) -> Bound:
    """What is left of a canary of ``width`` equal coordinates; where gradients are embedded, half are in the basis."""
    law = mechanism.coordinate_law
    if not isinstance(mechanism, EmbeddingMechanism):
        return ((law, canary_size(mechanism, width), width),)
    size = canary_size(mechanism, width // 2)
    both = Mechanism(mechanism.noise_multiplier * mechanism.whole_bound, 1.0, mechanism.mixing_width).coordinate_law
    return (both, mechanism.clip_ratio * size, width // 2), (law, size, width // 2)


def worst_width(mechanism: Mechanism) -> int:
    """How many coordinates the proof's worst case has."""
    (_, count), *_ = mechanism.worst_gradient
    return 2 * count if isinstance(mechanism, EmbeddingMechanism) else count


def log_ratio(law: Law, x: Array, size: float) -> Array:
    """log f(x - size)/f(x) in every coordinate.

    Rounded to nine decimals: where the ratio is flat, as in the tails of a Laplace law, the rounding of x + v - v would
    tell the worlds apart. That is a leak of floating-point arithmetic, which is not what is audited here.
    """
    return np.round(law.log_density(x - size) - law.log_density(x), 9)


def log_likelihood_ratio(parts: Bound, x: Array) -> Array:
    """Of "the canary was drawn" against "it was not", for what was seen of its coordinates, the last axis of x."""
    pieces = np.split(x, np.cumsum([count for _, _, count in parts])[:-1], axis=-1)
    ratios = [np.sum(log_ratio(law, seen, size), axis=-1) for (law, size, _), seen in zip(parts, pieces, strict=True)]
    return np.asarray(sum(ratios))


def canaries(mechanism: Mechanism, spread: int = 4) -> tuple[Canary, ...]:
    """The proof's worst case, and gradients spread over more coordinates, which must be no worse."""
    count = worst_width(mechanism)
    if isinstance(mechanism, EmbeddingMechanism):
        name = f"{count // 2} coordinates of the basis and as many others"
    else:
        name = "one coordinate of c" if count == 1 else f"{count} coordinates of c/sqrt(p)"
    return (
        Canary(name, parts(mechanism, count)),
        Canary(f"spread over {count * spread} coordinates", parts(mechanism, count * spread)),
    )


def scores(
    ledger: Ledger,
    trials: int,
    present: bool,
    rng: np.random.Generator,
    *,
    canary: Canary | None = None,
    actual: Mechanism | None = None,
    done: Callable[[int], None] | None = None,
) -> Array:
    """Log-likelihood ratios of ``trials`` whole runs in one world.

    Args:
        ledger: what is run.
        present: was the canary in the data?
        canary: its clipped gradient; None takes the worst case of every phase.
        actual: the mechanism whose noise is really drawn, where a broken implementation is imitated; the attacker
            always uses the laws that the ledger claims.
        done: told how many trial-steps were done.
    """
    total = np.zeros(trials)
    for phase in ledger.phases:
        mechanism, q = phase.mechanism, phase.mechanism.sample_rate
        one = canary or canaries(mechanism)[0]
        drawn = one.parts if actual is None else parts(actual, one.count)
        sizes = np.repeat([size for _, size, _ in one.parts], [count for _, _, count in one.parts])
        rows = max(1, _BLOCK // one.count)
        for start in range(0, trials, rows):
            part = slice(start, min(start + rows, trials))
            m = part.stop - start
            for _ in range(phase.steps):
                x = np.concatenate([law.sample(rng, (m, count)) for law, _, count in drawn], axis=1)
                if present:
                    x += sizes * (rng.random(m) < q)[:, None]
                ratio = log_likelihood_ratio(one.parts, x)
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
    actual: Mechanism | None = None,
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

"""Lower bounds on epsilon from the outcomes of an attack, valid at a stated confidence.

Two worlds, with and without a canary; an attacker sees a score and guesses. (epsilon, delta)-differential privacy
forces 1 - FNR <= e^epsilon FPR + delta and 1 - FPR <= e^epsilon FNR + delta for every guessing rule, so upper bounds on
the two error rates bound epsilon from below.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy import stats

from modelmix._checks import at_least_zero, probability, whole
from modelmix.errors import ModelMixError

Array = NDArray[np.float64]
_CANDIDATES = 2000


@dataclass(frozen=True)
class LowerBound:
    """epsilon >= ``epsilon`` at ``delta``, wrong with probability at most 1 - ``confidence``."""

    epsilon: float
    delta: float
    confidence: float
    false_positives: float
    false_negatives: float
    trials: int


def clopper_pearson_upper(hits: NDArray[np.int64] | int, trials: int, level: float) -> Array:
    """An upper bound on a probability that is wrong with probability at most ``level``."""
    hits = np.asarray(hits, dtype=np.float64)
    with np.errstate(invalid="ignore"):
        upper = stats.beta.ppf(1 - level, hits + 1, trials - hits)
    return np.asarray(np.where(hits >= trials, 1.0, upper))


def _bound(fpr: Array, fnr: Array, delta: float) -> Array:
    with np.errstate(divide="ignore", invalid="ignore"):
        one = np.log(np.maximum(1 - fnr - delta, 0)) - np.log(fpr)
        two = np.log(np.maximum(1 - fpr - delta, 0)) - np.log(fnr)
    return np.asarray(np.maximum(0.0, np.nan_to_num(np.maximum(one, two), nan=0.0, neginf=0.0)))


def epsilon_lower_bound(without: Array, with_canary: Array, delta: float, confidence: float = 0.95) -> LowerBound:
    """The bound from scores in the two worlds, large scores speaking for the canary.

    The threshold is chosen on the first half of the scores and judged on the second, so that choosing costs nothing.
    Clopper and Pearson's upper bounds hold for both error rates together at the stated confidence.
    """
    at_least_zero("delta", delta, "the failure probability", most=1.0)
    level = (1 - probability("confidence", confidence, "the confidence")) / 2
    n = min(len(without), len(with_canary))
    if n < 4:
        raise ModelMixError(f"{n} trials in each world are too few for a bound: use hundreds at least.")
    half = n // 2
    out, into = np.sort(without[:half]), np.sort(with_canary[:half])
    both = np.sort(np.concatenate([out, into]))
    # DenseGradients in the tails, where the large ratios are.
    ranks = np.unique(np.clip(np.geomspace(1, len(both) / 2, _CANDIDATES // 2).astype(int), 1, len(both)))
    thresholds = np.unique(np.concatenate([both[ranks - 1], both[-ranks]]))
    fp = half - np.searchsorted(out, thresholds, side="left")
    fn = np.searchsorted(into, thresholds, side="left")
    guess = _bound(clopper_pearson_upper(fp, half, level), clopper_pearson_upper(fn, half, level), delta)
    threshold = thresholds[int(np.argmax(guess))]
    judged = n - half
    false_positives = int(np.sum(without[half:n] >= threshold))
    false_negatives = int(np.sum(with_canary[half:n] < threshold))
    fpr = clopper_pearson_upper(false_positives, judged, level)
    fnr = clopper_pearson_upper(false_negatives, judged, level)
    return LowerBound(
        float(_bound(fpr, fnr, delta)), delta, confidence, false_positives / judged, false_negatives / judged, n
    )


def one_run_p_value(epsilon: float, delta: float, canaries: int, guesses: int, correct: int) -> float:
    """How likely so many correct guesses are under (epsilon, delta)-differential privacy (Steinke et al. 2023).

    ``canaries`` were each included with probability one half; the attacker guessed ``guesses`` of them.
    """
    if correct <= 0:
        return 1.0
    p = 1 / (1 + math.exp(-epsilon))
    beta = float(stats.binom.sf(correct - 1, guesses, p))
    below = stats.binom.cdf(correct - 1, guesses, p)
    i = np.arange(1, correct + 1)
    mass = below - stats.binom.cdf(correct - i - 1, guesses, p)  # P[v - i <= Bin < v]
    alpha = float(np.max(mass / i))
    return min(1.0, beta + 2 * canaries * delta * alpha)


def one_run_lower_bound(
    canaries: int, guesses: int, correct: int, delta: float, confidence: float = 0.95
) -> LowerBound:
    """The largest epsilon that one run with many canaries refutes at the stated confidence."""
    whole("canaries", canaries, "the number of canaries", least=1)
    if not 0 <= correct <= guesses <= canaries:
        raise ModelMixError("the counts of a one-run audit must satisfy 0 <= correct <= guesses <= canaries.")
    level = 1 - probability("confidence", confidence, "the confidence")
    low, high = 0.0, 60.0
    if one_run_p_value(0.0, delta, canaries, guesses, correct) > level:
        high = 0.0
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (
            (middle, high) if one_run_p_value(middle, delta, canaries, guesses, correct) <= level else (low, middle)
        )
    wrong = 1 - correct / guesses if guesses else 1.0
    return LowerBound(low, delta, confidence, wrong, wrong, canaries)

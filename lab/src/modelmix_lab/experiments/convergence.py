"""Theorem 3.1 at work: Algorithm 1 on least squares and logistic regression, beside its bounds, over T."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from modelmix.theory.utility import Setting, convex, convex_printed
from modelmix_lab.theory.linear import LinearProblem, run

N, DIMENSION, RATE, NOISE_STD, TAU_OVER_STEP = 200, 5, 0.1, 0.3, 1.0
GAMMA = {"squares": 4.0, "logistic": 16.0}
"""Unit inputs, clip and Lipschitz constant 1; step h = gamma/sqrt(T), tau = h, noise of the averaged gradient."""
STEPS = (64, 128, 256, 512, 1024, 2048, 4096)


@dataclass(frozen=True)
class Line:
    """One problem over T: means over the seeds and their standard errors; all but ``steps`` are losses above F*."""

    loss: str
    steps: tuple[int, ...]
    final: tuple[float, ...]
    final_error: tuple[float, ...]
    along: tuple[float, ...]
    along_error: tuple[float, ...]
    proved: tuple[float, ...]
    printed: tuple[float, ...]


def problem(loss: str, seed: int = 1) -> LinearProblem:
    """n unit vectors and noisy answers (or noisy signs) of the model w = (1, ..., 1)."""
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((N, DIMENSION))
    x /= np.linalg.norm(x, axis=1, keepdims=True)
    answer = x @ np.ones(DIMENSION)
    if loss == "logistic":
        return LinearProblem(x, np.sign(answer + rng.standard_normal(N)), loss, 1.0)
    return LinearProblem(x, answer + 0.3 * rng.standard_normal(N), loss, 1.0)


def setting(loss: str, steps: int, padding: str = "exact") -> Setting:
    h = GAMMA[loss] / math.sqrt(steps)
    return Setting(N, RATE, DIMENSION, steps, h, NOISE_STD, TAU_OVER_STEP * h, padding)


def line(loss: str, steps: Sequence[int] = STEPS, *, seeds: int = 64, padding: str = "exact") -> Line:
    """What was measured over ``seeds`` runs, and what the theorem says, for every T."""
    task = problem(loss)
    best, least = task.optimum()
    constants = {"lipschitz": 1.0, "smoothness": task.smoothness, "distance": float(np.linalg.norm(best))}
    rows = []
    for count in steps:
        how = setting(loss, count, padding)
        found = run(task, how, np.zeros(DIMENSION), seeds=seeds, seed=count)
        measured = [
            number
            for values in (found.final - least, found.along - least)
            for number in (float(values.mean()), float(values.std(ddof=1) / math.sqrt(seeds)))
        ]
        rows.append((*measured, convex(how, **constants).total, convex_printed(how, **constants).total))
    return Line(loss, tuple(steps), *(tuple(column) for column in zip(*rows, strict=True)))


def slope(steps: Sequence[int], values: Sequence[float]) -> float:
    """Exponent of T in ``values``, by least squares on logarithms; -1/2 is the rate of the theorem."""
    return float(np.polyfit(np.log(steps), np.log(values), 1)[0])

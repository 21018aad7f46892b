"""Planted bugs: every one of these changes of the loss distributions is caught by a handful of checks.

``tools/mutants.py`` plants hundreds of small ones. These are the mistakes one would make in the mathematics.
"""

from __future__ import annotations

import math
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest
from losses_oracle import composed, cone_delta, hockey_stick, in_the_limit

import modelmix as mm
from modelmix.accounting import loss_distribution
from modelmix.accounting.laws import Gaussian, Laplace, Mixed
from modelmix.accounting.ledger import Phase
from modelmix.accounting.moments import log_moments

FOLDER = Path(loss_distribution.__file__).parent
NAMES = ("loss_distribution", "coordinate_losses", "cone", "composition")

MUTANTS = {
    "0 is not a grid point": (
        "loss_distribution",
        "self.step * np.arange(self.first,",
        "self.step * np.arange(self.first - 0.5,",
    ),
    "the mass under Q alone is kept": (
        "loss_distribution",
        "up = np.expm1(-rest) / np.expm1(-step)",
        "up = 0.2 * rest / step",
    ),
    "rounded to the nearer point": (
        "loss_distribution",
        "up = np.expm1(-rest) / np.expm1(-step)",
        "up = (rest > step / 2) * 1.0",
    ),
    "rounded down": (
        "loss_distribution",
        "up = np.expm1(-rest) / np.expm1(-step)",
        "up = 0.0 * rest",
    ),
    "the noise is not added": (
        "loss_distribution",
        "value + math.sqrt(float(np.sum((self.noise * weight) ** 2)))",
        "value",
    ),
    "what is pruned is lost": (
        "loss_distribution",
        "tail = self.tail + (float(from_right[keep])",
        "tail = self.tail + 0 * (float(from_right[keep])",
    ),
    "what is pruned on the left is lost": (
        "loss_distribution",
        "mass[0] += float(self.mass[:left].sum())",
        "pass",
    ),
    "the tail of one part counts once": (
        "loss_distribution",
        "tail = sum(count * part.tail for",
        "tail = sum(part.tail for",
    ),
    "a bare count in the noise": (
        "loss_distribution",
        "noise += count * (transform",
        "noise += (transform",
    ),
    "half a step off": (
        "loss_distribution",
        "offset += count * part.first",
        "offset += count * part.first + 1",
    ),
    "one tilt is not taken back": (
        "loss_distribution",
        "back = scale - theta * step * numbers",
        "back = scale - 0.99 * theta * step * numbers",
    ),
    "cells by the midpoint": (
        "coordinate_losses",
        "np.expm1(loss - h * (number + 1)) / np.expm1(h)",
        "0.5 + 0 * loss",
    ),
    "the cell about 0 is what is missing to less": (
        "coordinate_losses",
        "inner = 1.0 -",
        "inner = 0.999 -",
    ),
    "the mirror keeps the wrong mass": (
        "coordinate_losses",
        "left[1 : count + 1] += (lower + moved",
        "left[1 : count + 1] += (lower_q + moved",
    ),
    "the atom of Laplace noise is lost": (
        "coordinate_losses",
        "right[last] += tail_q",
        "right[last] += 0 * tail_q",
    ),
    "a shift too small": (
        "coordinate_losses",
        "y - self.shift, self.origin)",
        "y - 0.99 * self.shift, self.origin)",
    ),
    "phi without the factor": (
        "cone",
        "return (value + tail) / float(slope(np.array([self.y0]))[0]) * _UP",
        "return value + tail",
    ),
    "the hockey stick in place of phi": (
        "cone",
        "value = loss.expectation(lambda x: growth(x - log_kappa))",
        "return loss.expectation(lambda x: -np.expm1(np.minimum(epsilon - x, 0.0)))",
    ),
    "kappa is e^epsilon": (
        "cone",
        "log_kappa = epsilon - self.offset",
        "log_kappa = epsilon - 0 * self.offset",
    ),
    "x0 below what kappa is made for": (
        "cone",
        "return np.asarray(y0 + np.log1p",
        "return np.asarray(0.5 * y0 + np.log1p",
    ),
    "the tail is not added": (
        "cone",
        "return (value + tail) /",
        "return (value + 0 * tail) /",
    ),
    "the tail of the hockey stick is not added": (
        "cone",
        "return value * _UP + loss.tail",
        "return value * _UP",
    ),
    "the second power is left out": (
        "cone",
        "_C1 * np.exp((_A1 - 1) * t) - _C2 * np.exp((_A2 - 1) * t)",
        "_C1 * np.exp((_A1 - 1) * t)",
    ),
    "the direction of adding is dropped": (
        "composition",
        "return [(removing, exact), ([(sampled_losses(vertex, q, True)",
        "return [(removing, exact)] or [([(sampled_losses(vertex, q, True)",
    ),
    "sampled before the coordinates are added": (
        "composition",
        "loss, q = gradient_losses(vertex), sample_rate",
        "loss, q = gradient_losses(vertex), sample_rate ** (1 + 0.01 * len(vertex))",
    ),
    "the hockey stick for mixed Gaussian noise": (
        "composition",
        "return all(type(known(phase.mechanism.coordinate_law)) is Laplace for phase in phases)",
        "return True",
    ),
    "not sampled under P": (
        "composition",
        "mass = mass * (q + (1 - q) * np.exp",
        "mass = mass * (1 + 0 * np.exp",
    ),
    "what has ratio 0 is lost": (
        "composition",
        "np.append((1 - q) * zero, mass)",
        "np.append(0 * zero, mass)",
    ),
    "dropping the largest losses": (
        "composition",
        'order = np.argsort(losses, kind="stable")',
        'order = np.argsort(-losses, kind="stable")',
    ),
    "one direction for both": (
        "composition",
        "np.exp(np.minimum(-ratios, 700.0))) * (1 + 4",
        "np.exp(np.minimum(ratios, 700.0))) * (1 + 4",
    ),
    "the least of two directions": (
        "composition",
        "found = min(max(_epsilon(*direction",
        "found = min(min(_epsilon(*direction",
    ),
    "the best vertex of each step": (
        "composition",
        "return bounds[min(which, len(bounds) - 1)]",
        "return bounds[0] if len(bounds) == 1 else bounds[0][:1]",
    ),
    "a user's law is taken": (
        "composition",
        "if any(known(phase.mechanism.coordinate_law) is None for phase in phases):",
        "if False:",
    ),
}


def load(changed: tuple[str, str, str] | None) -> SimpleNamespace:
    """The four modules, one of them changed, under other names."""
    made: dict[str, ModuleType] = {}
    try:
        for name in NAMES:
            source = (FOLDER / f"{name}.py").read_text(encoding="utf-8")
            if changed is not None and changed[0] == name:
                assert source.count(changed[1]) == 1, f"{changed[1]!r} stands {source.count(changed[1])} times"
                source = source.replace(changed[1], changed[2])
            for other in NAMES:
                source = source.replace(f"from modelmix.accounting.{other} import", f"from mutated_{other} import")
            module = ModuleType(f"mutated_{name}")
            sys.modules[module.__name__] = made[name] = module
            exec(compile(source, f"mutated_{name}", "exec"), module.__dict__)
    finally:
        for name in made:
            del sys.modules[f"mutated_{name}"]
    return SimpleNamespace(**made)


GAUSSIAN = (mm.Mechanism(0.5, 0.1, 6.0, 4), 60)
LAPLACE = (mm.Mechanism(0.4, 0.3, 1.0, law="laplace"), 3)
ADDING = (mm.Mechanism(1.0, 0.5, law="laplace"), 2)  # at epsilon 0.2 adding has 10 % more delta than removing
EMBEDDING = (mm.EmbeddingMechanism(1.5, 0.1, 20.0, 4), 30)


def value(mechanism: mm.Mechanism, steps: int, epsilon: float, adding: bool, vertex=None) -> float:
    law = str(mechanism.law)
    phases = [
        (law, mechanism.noise_multiplier, mechanism.mixing_width, vertex or mechanism.worst_gradient,
         mechanism.sample_rate, steps)
    ]  # fmt: skip
    of = hockey_stick if law == "laplace" else cone_delta
    return in_the_limit(lambda n: of(composed(phases, n, adding), epsilon), 1000)


@pytest.fixture(scope="module")
def truth():
    """What the independent computation says, once."""
    whole = tuple((s * EMBEDDING[0].whole_bound, c) for s, c in EMBEDDING[0].worst_gradient)
    return SimpleNamespace(
        gaussian=[(e, value(*GAUSSIAN, e, False)) for e in (0.5, 3.0)],
        laplace=[(e, max(value(*LAPLACE, e, adding) for adding in (False, True))) for e in (0.05, 1.0)],
        adding=[(0.2, value(*ADDING, 0.2, True))],
        whole=value(*EMBEDDING, 1.0, False, whole),
    )


def check(m: SimpleNamespace, truth: SimpleNamespace) -> None:
    delta_of, ld = m.composition.loss_delta, m.loss_distribution
    for (mechanism, steps), expected in ((GAUSSIAN, truth.gaussian), (LAPLACE, truth.laplace), (ADDING, truth.adding)):
        for epsilon, delta in expected:
            found = delta_of((Phase(mechanism, steps),), epsilon)
            assert delta * (1 - 2e-4) <= found <= delta * (1 + 2e-3)
            back = m.composition.loss_epsilon((Phase(mechanism, steps),), found * (1 + 1e-9))[0]
            assert abs(back - epsilon) < 2e-3 * epsilon
    embedding_alone = delta_of((Phase(mm.Mechanism(1.5, 0.1), EMBEDDING[1]),), 1.0)
    assert 1.5 * embedding_alone < delta_of((Phase(*EMBEDDING),), 1.0) <= truth.whole * (1 + 2e-3)
    for law, shift in (
        (Mixed(Gaussian(0.5), 4.0), 0.5),
        (Mixed(Laplace(0.5), 2.0), 0.5),
        (Mixed(Gaussian(1.0), 300.0), 1.0),
    ):
        one = m.coordinate_losses.coordinate(law, shift)
        assert np.all(np.abs(one.losses / one.step - np.round(one.losses / one.step)) < 1e-6)
        true = float(log_moments(law, shift, np.array([2.0]))[0])
        assert true * (1 - 1e-9) <= one.log_moment(1.0) <= true * (1 + 2e-4)
        assert true * (1 - 1e-9) <= one.log_moment(-2.0) <= true * (1 + 2e-4)
        assert abs(np.sum(one.mass * np.exp(-one.losses)) - 1) < 1e-9, "both laws' masses are kept"
        less = one.pruned(1e-3)
        if less.mass.size < one.mass.size:
            assert less.mass.sum() + less.tail >= one.mass.sum() * (1 - 1e-12)
            assert less.tail > 0
            many = ld.total([(less, 5)])
            assert many.tail >= 5 * less.tail
            for bound in (m.cone.Cone(0.5), m.cone.HockeyStick()):
                assert bound.delta(less, 0.3) >= bound.delta(one, 0.3) * (1 - 1e-9)
    # Fourier noise, against a direct sum.
    mass = np.random.default_rng(3).random(40)
    part = ld.LossDistribution(0.01, -15, mass / mass.sum())
    direct = np.array([1.0])
    for _ in range(64):
        direct = np.convolve(direct, part.mass)
    found, noise = ld.tilted_sum([(part, 64)], 3.0, -15 * 64, 24 * 64)
    assert np.all(np.abs(found - direct) <= noise + 1e-10 * direct)
    assert np.max(noise * np.exp(3.0 * 0.01 * np.arange(-960, 1537))) > 64 * 1e-15 * np.exp(64 * part.log_moment(3.0))
    noisy = ld.LossDistribution(0.01, -15, part.mass, noise=0.1 * np.ones(40))
    assert noisy.expectation(lambda x: np.ones_like(x)) >= 1 + 0.1 * math.sqrt(40) * (1 - 1e-9)
    # What has ratio 0 under P stays, and masses above 1 lose their smallest losses.
    step = m.composition._without_excess(np.array([-1.0, 0.5, 2.0]), np.array([0.4, 0.4, 0.4]), 0.0)
    assert step.mass == pytest.approx([0.2, 0.4, 0.4], abs=1e-9)
    m.composition.gradient_losses = lambda vertex: ld.LossDistribution(0.1, 0, np.array([0.5, 0.5]), zero=0.02)
    assert m.composition.sampled_losses.__wrapped__(((Gaussian(1.0), 1.0, 1),), 0.25).losses[0] == math.log1p(-0.25)

    # Refused: a law with no proved worst gradient.
    class Other(Gaussian):
        pass

    assert m.composition.unusable((Phase(mm.Mechanism(1.0, 0.5, 1.0, law=Other), 1),)) is not None


def test_the_checks_hold(truth):
    check(load(None), truth)


@pytest.mark.parametrize("name", MUTANTS)
def test_a_planted_bug_is_caught(name, truth):
    changed = load(MUTANTS[name])
    with pytest.raises((AssertionError, ArithmeticError, ValueError, IndexError, mm.ModelMixError)):
        check(changed, truth)

"""Solving for any one number: safe, and tight."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import modelmix as mm

BASE = {"noise_multiplier": 0.335, "sample_rate": 0.03, "mixing_width": 11.25, "p": 100}
DELTA, STEPS = 1e-5, 3400


@pytest.mark.parametrize(
    ("unknown", "worse"),
    [("noise_multiplier", 1 - 1e-5), ("mixing_width", 1 - 1e-5), ("sample_rate", 1 + 1e-5)],
)
@pytest.mark.parametrize("conversion", ["improved", "classic"])
@pytest.mark.parametrize("epsilon", [1.0, 8.0])
def test_solution_is_safe_and_tight(unknown, worse, conversion, epsilon):
    found = mm.calibrate(**{**BASE, unknown: None}, epsilon=epsilon, delta=DELTA, steps=STEPS, conversion=conversion)
    value = getattr(found, unknown)
    assert mm.epsilon(found, DELTA, steps=STEPS, conversion=conversion) <= epsilon
    spoiled = replace(found, **{unknown: value * worse})
    assert mm.epsilon(spoiled, DELTA, steps=STEPS, conversion=conversion) > epsilon


def test_truncation_and_steps_are_exact():
    found = mm.calibrate(**{**BASE, "p": None}, epsilon=8, delta=DELTA, steps=STEPS)
    assert mm.epsilon(found, DELTA, steps=STEPS) <= 8 < mm.epsilon(replace(found, p=found.p - 1), DELTA, steps=STEPS)
    mechanism = mm.Mechanism(**BASE)
    steps = mm.max_steps(mechanism, epsilon=8, delta=DELTA)
    assert mm.epsilon(mechanism, DELTA, steps=steps) <= 8 < mm.epsilon(mechanism, DELTA, steps=steps + 1)


@settings(max_examples=25)
@given(
    epsilon=st.floats(0.05, 50), q=st.floats(1e-4, 1), steps=st.integers(1, 10**5),
    omega=st.floats(0, 100), p=st.integers(1, 1000), law=st.sampled_from(["gaussian", "laplace"]),
)  # fmt: skip
def test_noise_can_always_be_found(epsilon, q, steps, omega, p, law):
    found = mm.calibrate(
        epsilon=epsilon, delta=1e-6, sample_rate=q, steps=steps, mixing_width=omega, p=p, law=law, tolerance=1e-3
    )
    assert mm.epsilon(found, 1e-6, steps=steps) <= epsilon


def test_easy_targets():
    easy = {"epsilon": 100, "delta": DELTA, "steps": 1}
    assert mm.calibrate(**easy, noise_multiplier=5, sample_rate=0.1, mixing_width=None).mixing_width == 0
    assert mm.calibrate(**easy, noise_multiplier=5, sample_rate=None).sample_rate == 1
    assert mm.calibrate(**easy, noise_multiplier=5, sample_rate=0.1, p=None).p == 1


def test_impossible_targets_say_so():
    with pytest.raises(mm.ModelMixError, match="any p"):
        mm.calibrate(epsilon=0.1, delta=DELTA, noise_multiplier=0.3, sample_rate=0.1, steps=1000, p=None)
    with pytest.raises(mm.ModelMixError, match="steps = 1"):
        mm.max_steps(mm.Mechanism(0.1, 1.0), epsilon=0.1, delta=DELTA)


@pytest.mark.parametrize("kind", [np.float16, np.float32, np.float64, np.int64, int])
def test_targets_of_any_number_type_are_safe(kind):
    """Half precision must not blur the comparison with the target."""
    found = mm.calibrate(epsilon=kind(3), delta=1e-5, sample_rate=0.01, steps=100)
    assert mm.epsilon(found, 1e-5, steps=100) <= 3.0
    mechanism = mm.Mechanism(1, 0.01, 10, 100)
    assert mm.epsilon(mechanism, 1e-5, steps=mm.max_steps(mechanism, epsilon=kind(3), delta=1e-5)) <= 3.0


@pytest.mark.parametrize("tolerance", [0, -1, float("nan"), float("inf"), 2])
def test_senseless_tolerances(tolerance):
    with pytest.raises(mm.ModelMixError, match="tolerance"):
        mm.calibrate(epsilon=1, delta=1e-5, sample_rate=0.01, steps=100, tolerance=tolerance)


def test_the_finest_tolerance_ends():
    assert mm.calibrate(epsilon=1, delta=1e-5, sample_rate=0.01, steps=100, tolerance=1e-300).noise_multiplier > 0


def test_exactly_one_unknown():
    for wrong in ({}, {"noise_multiplier": None, "p": None}, {"steps": None, "noise_multiplier": None}):
        with pytest.raises(mm.ModelMixError, match="one unknown"):
            mm.calibrate(**{**BASE, "steps": STEPS, **wrong}, epsilon=8, delta=DELTA)
    with pytest.raises(mm.ModelMixError, match="target epsilon"):
        mm.calibrate(**{**BASE, "p": None}, steps=STEPS, epsilon=0, delta=DELTA)

"""Solving for any one number: safe, and tight."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import modelmix as mm
from modelmix.accounting.calibration import _first, smallest_safe

BASE = {"noise_multiplier": 0.335, "sample_rate": 0.03, "mixing_width": 11.25, "p": 100}
DELTA, STEPS = 1e-5, 3400


@pytest.mark.parametrize(
    ("unknown", "worse"),
    [("noise_multiplier", 1 - 1e-5), ("mixing_width", 1 - 1e-5), ("sample_rate", 1 + 1e-5)],
)
@pytest.mark.parametrize("by", ["renyi", "classic"])
@pytest.mark.parametrize("epsilon", [1.0, 8.0])
def test_solution_is_safe_and_tight(unknown, worse, by, epsilon):
    found = mm.calibrate(**{**BASE, unknown: None}, epsilon=epsilon, delta=DELTA, steps=STEPS, by=by)
    value = getattr(found, unknown)
    assert mm.epsilon(found, DELTA, steps=STEPS, by=by) <= epsilon
    spoiled = replace(found, **{unknown: value * worse})
    assert mm.epsilon(spoiled, DELTA, steps=STEPS, by=by) > epsilon


def test_truncation_and_steps_are_exact():
    found = mm.calibrate(**{**BASE, "p": None}, epsilon=8, delta=DELTA, steps=STEPS)
    assert mm.epsilon(found, DELTA, steps=STEPS) <= 8 < mm.epsilon(replace(found, p=found.p - 1), DELTA, steps=STEPS)
    mechanism = mm.Mechanism(**BASE)
    steps = mm.max_steps(mechanism, epsilon=8, delta=DELTA)
    assert mm.epsilon(mechanism, DELTA, steps=steps) <= 8 < mm.epsilon(mechanism, DELTA, steps=steps + 1)


@settings(max_examples=8)
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


# The searches themselves, on functions that cost nothing.


@pytest.mark.parametrize("start", [1.0, 1e-3, 37.0])
@pytest.mark.parametrize("tolerance", [0.5, 1e-3, 1e-9])
@pytest.mark.parametrize("edge", [1e-7, 0.3, 1.0, 8.0, 5e5])
def test_the_smallest_safe_number_is_safe_and_within_the_tolerance(edge, tolerance, start):
    tried = []

    def value(x):
        tried.append(x)
        return edge / x

    found = smallest_safe(value, 1.0, start=start, tolerance=tolerance, name="x")
    assert value(found) <= 1.0
    assert edge <= found <= edge * (1 + tolerance)
    assert len(tried) < 120


def test_a_search_meets_its_target_exactly_and_knows_its_ends():
    assert smallest_safe(lambda x: 8.0 if x < 4 else 2.0, 2.0, start=1.0, tolerance=1e-9, name="x") == pytest.approx(4)
    assert smallest_safe(lambda x: 2.0, 2.0, start=1.0, tolerance=0.1, name="x") <= 4e-9, "anything will do"
    with pytest.raises(mm.ModelMixError, match=r"cannot be reached with any x up to 1e\+12"):
        smallest_safe(lambda x: 3.0, 2.0, start=1.0, tolerance=0.1, name="x")
    assert smallest_safe(lambda x: 1e11 / x, 1.0, start=1.0, tolerance=0.1, name="x") >= 1e11
    nan = smallest_safe(lambda x: math.nan if x < 3 else 1.0, 2.0, start=1.0, tolerance=1e-6, name="x")
    assert nan >= 3, "what is no number is not safe"


def test_the_first_number_from_which_on_something_holds():
    for first in [*range(1, 70), 1023, 1024, 1025, 2**50]:
        assert _first(lambda n, first=first: n >= first) == first
    assert _first(lambda n: False) is None


def test_what_is_given_is_kept_and_only_the_unknown_is_found():
    options = {"epsilon": 3.0, "delta": 1e-5, "steps": 10, "tolerance": 0.1}
    found = mm.calibrate(**options, sample_rate=0.5)
    assert (found.sample_rate, found.mixing_width, found.p, found.law, found.dimension) == (
        0.5,
        0.0,
        1,
        "gaussian",
        None,
    )
    found = mm.calibrate(**options, sample_rate=1.0, law="laplace", mixing_width=2.0, p=4, dimension=3)
    assert (found.law, found.mixing_width, found.p, found.dimension) == ("laplace", 2.0, 4, 3)
    found = mm.calibrate(**options, sample_rate=1.0, clip_ratio=2.0)
    assert isinstance(found, mm.EmbeddingMechanism)
    assert found.clip_ratio == 2.0
    for wrong in (0, 2.5):
        with pytest.raises(mm.ModelMixError, match="steps"):
            mm.calibrate(**{**options, "steps": wrong}, sample_rate=0.5)


def test_a_target_that_is_met_exactly_is_met():
    """The epsilon of a mechanism is a target that this mechanism reaches, not one step or one p more."""
    mechanism = mm.Mechanism(2.0, 1.0, 0.0, 3)
    target = mm.epsilon(mechanism, 1e-5, steps=7)
    assert mm.max_steps(mechanism, epsilon=target, delta=1e-5) == 7
    easy = {"epsilon": target, "delta": 1e-5, "steps": 7, "noise_multiplier": 2.0}
    assert mm.calibrate(**easy, sample_rate=None, p=3).sample_rate == 1
    assert mm.calibrate(**easy, sample_rate=1.0, p=3, mixing_width=None).mixing_width == 0


def test_a_search_returns_only_what_it_has_tried():
    """At the lower end of its range, and where the target is met exactly between two powers of two."""
    for edge in (1.5e-9, 5.0, 0.3):
        found = smallest_safe(lambda x, edge=edge: 2.0 if x >= edge else 9.0, 2.0, start=1.0, tolerance=1e-9, name="x")
        assert edge <= found <= edge * (1.3 if edge < 1e-8 else 1 + 1e-9)


def test_little_mixing_and_little_truncation_are_found():
    """A width below 1 and the very p of a mechanism, from their own epsilon."""
    at = {"delta": 1e-5, "steps": 1, "by": "renyi"}
    mixed = mm.Mechanism(0.5, 1.0, 0.9)
    target = mm.epsilon(mixed, **at)
    found = mm.calibrate(epsilon=target, **at, noise_multiplier=0.5, sample_rate=1.0, mixing_width=None, tolerance=1e-3)
    assert mm.epsilon(found, **at) <= target
    assert 0.89 < found.mixing_width < 0.91
    cut = mm.Mechanism(1.0, 1.0, 3.0, 3)
    target = mm.epsilon(cut, **at)
    found = mm.calibrate(epsilon=target, **at, noise_multiplier=1.0, sample_rate=1.0, mixing_width=3.0, p=None)
    assert found == cut

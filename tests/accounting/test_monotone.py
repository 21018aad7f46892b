"""epsilon falls as z, omega or p grow and rises with q, T and d."""

from __future__ import annotations

from dataclasses import replace

import pytest
from depth import cases
from hypothesis import given, settings
from hypothesis import strategies as st

import modelmix as mm

MECHANISMS = st.builds(
    mm.Mechanism,
    noise_multiplier=st.floats(0.1, 30),
    sample_rate=st.floats(1e-4, 1),
    mixing_width=st.one_of(st.just(0.0), st.floats(1e-3, 1e3)),
    p=st.integers(1, 10**5),
    law=st.sampled_from(["gaussian", "laplace"]),
)
STEPS = st.integers(1, 10**5)
FACTOR = st.floats(1.0, 30.0)
ROOM = 1 + 1e-8  # the added error bounds differ between the two sides
GRID = 1 + 2e-3  # what the grids of loss distributions add differs more, and where they are too large moments answer


def check(less: mm.Ledger, more: mm.Ledger, delta: float = 1e-5, delta_of_more: float = 1e-5) -> None:
    """The first costs no more than the second: by moments to rounding, by the best accountant to its grids."""
    assert mm.epsilon(less, delta, by="renyi") <= mm.epsilon(more, delta_of_more, by="renyi") * ROOM
    found, above = mm.guarantee(less, delta), mm.guarantee(more, delta_of_more)
    fallen_back = found.accountant == "RDP" and found.reason is not None
    assert fallen_back or found.epsilon <= above.epsilon * GRID + 1e-6


@settings(max_examples=cases(25))
@given(mechanism=MECHANISMS, steps=STEPS, factor=FACTOR)
@pytest.mark.parametrize("field", ["noise_multiplier", "mixing_width"])
def test_falls_with_noise_and_width(field, mechanism, steps, factor):
    more = replace(mechanism, **{field: max(getattr(mechanism, field), 1e-3) * factor})
    check(mm.Ledger().add(more, steps), mm.Ledger().add(mechanism, steps))


@settings(max_examples=cases(25))
@given(mechanism=MECHANISMS, steps=STEPS, more=st.integers(1, 10**4))
def test_falls_with_truncation(mechanism, steps, more):
    tighter = replace(mechanism, p=mechanism.p + more)
    check(mm.Ledger().add(tighter, steps), mm.Ledger().add(mechanism, steps))


@settings(max_examples=cases(25))
@given(mechanism=MECHANISMS, steps=STEPS, fraction=st.floats(0.01, 1))
def test_rises_with_sampling(mechanism, steps, fraction):
    fewer = replace(mechanism, sample_rate=mechanism.sample_rate * fraction)
    check(mm.Ledger().add(fewer, steps), mm.Ledger().add(mechanism, steps))


@settings(max_examples=cases(25))
@given(mechanism=MECHANISMS, steps=STEPS, extra=st.integers(1, 10**6))
def test_rises_with_steps(mechanism, steps, extra):
    check(mm.Ledger().add(mechanism, steps), mm.Ledger().add(mechanism, steps + extra))


@settings(max_examples=cases(25))
@given(mechanism=MECHANISMS, steps=STEPS, d=st.integers(1, 10**5), more=st.integers(0, 10**5))
def test_rises_with_dimension_until_p(mechanism, steps, d, more):
    few, many = replace(mechanism, dimension=d), replace(mechanism, dimension=d + more)
    check(mm.Ledger().add(few, steps), mm.Ledger().add(many, steps))
    check(mm.Ledger().add(many, steps), mm.Ledger().add(mechanism, steps))


@settings(max_examples=cases(25))
@given(mechanism=MECHANISMS, steps=STEPS, delta=st.floats(1e-10, 0.1), factor=st.floats(1, 1e3))
def test_falls_with_delta(mechanism, steps, delta, factor):
    looser = min(0.5, delta * factor)
    ledger = mm.Ledger().add(mechanism, steps)
    check(ledger, ledger, looser, delta)

"""The lines under every epsilon."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import optimize, special

import modelmix as mm
from modelmix.accounting import pld
from modelmix.accounting.comparison import plain_noise_for
from modelmix.accounting.guarantee import guarantee
from modelmix.accounting.pld import equal_variance, pld_epsilon, unmixed


def plain(z: float, q: float, steps: int) -> mm.Ledger:
    return mm.Ledger().add(mm.Mechanism(z, q), steps)


@pytest.mark.parametrize(
    ("q", "steps", "epsilon", "z"),
    [(0.03, 3500, 4, 2.064), (0.03, 3500, 6, 1.539), (0.03, 3500, 8, 1.277), (1830 / 73260, 4000, 2, 3.252)],
)
def test_pld_noise_of_the_resnet_experiments(q, steps, epsilon, z):
    """Multipliers computed elsewhere to three digits."""
    assert pld_epsilon(plain(z, q, steps), 1e-5) == pytest.approx(epsilon, rel=2e-3)
    assert plain_noise_for(epsilon, 1e-5, q, steps) == pytest.approx(z, abs=1.5e-3)


@settings(max_examples=25)
@given(z=st.floats(0.3, 100), steps=st.integers(1, 10**6), delta=st.floats(1e-9, 1e-2))
def test_pld_meets_the_analytic_gaussian(z, steps, delta):
    """Without sampling, T steps are one Gaussian of mu = sqrt(T)/z, whose exact epsilon is known in closed form."""
    mu = math.sqrt(steps) / z

    def exact_delta(epsilon: float) -> float:
        a, b = -epsilon / mu + mu / 2, -epsilon / mu - mu / 2
        return special.ndtr(a) - math.exp(min(700, epsilon + special.log_ndtr(b)))

    if mu > 30 or exact_delta(0.0) <= delta:
        return
    exact = optimize.brentq(lambda e: exact_delta(e) - delta, 0, mu * mu / 2 + 20 * mu)
    found = guarantee(plain(z, 1.0, steps), delta).epsilon
    assert exact * (1 - 1e-9) <= found
    assert found <= exact * 1.005 + 1e-4


@pytest.mark.parametrize(
    ("z", "steps", "delta", "exact"),
    [(100.0, 10_000, 1e-14, 7.86874), (100.0, 10_000, 1e-12, 7.23849), (10.0, 1000, 1e-14, 28.6862)],
)
def test_noise_of_the_transforms_never_lowers_a_line(z, steps, delta, exact):
    """For a tiny delta the library's Fourier noise is as large as delta itself; its answer is then not used."""
    assert guarantee(plain(z, 1.0, steps), delta).epsilon >= exact * (1 - 1e-5)


@pytest.mark.parametrize(
    ("z", "q", "steps"),
    [(267.732456453277, 1.045160296424083e-06, 21_945_017), (1000.0, 1e-5, 10**8), (300.0, 1e-4, 10**6)],
)
def test_a_breakdown_of_the_library_leaves_the_renyi_value(z, q, steps):
    """With buckets of 1e-9 its probabilities are differences of rounding errors, and its transforms overflow."""
    line = guarantee(plain(z, q, steps), 1e-5)
    assert line.accountant == "RDP"
    assert line.epsilon == mm.epsilon(mm.Mechanism(z, q), 1e-5, steps=steps)


@settings(max_examples=15)
@given(z=st.floats(0.5, 20), q=st.floats(1e-3, 0.5), steps=st.integers(1, 10**4))
def test_best_is_never_above_either(z, q, steps):
    line = guarantee(plain(z, q, steps), 1e-5)
    assert line.epsilon <= mm.epsilon(mm.Mechanism(z, q), 1e-5, steps=steps)
    assert line.accountant in ("PLD", "RDP")


def test_the_honest_comparison():
    """ResNet20: mixing is worth a lot against its own noise, and less than a Gaussian of the same variance."""
    mechanism = mm.Mechanism(0.335, 0.03, 11.25, 100)
    result = mm.compare(mechanism, 1e-5, steps=3400)
    assert result.mechanism.epsilon == pytest.approx(6.8573, abs=2e-4)
    assert result.plain.epsilon == pytest.approx(277.3, rel=1e-3)
    assert result.equal_variance.epsilon == pytest.approx(2.2323, rel=1e-3)
    assert result.equal_variance_renyi == pytest.approx(2.4297, rel=1e-3)
    assert result.total_std == pytest.approx(3.2648, rel=1e-4)
    same = mm.Mechanism(result.plain_std_at_equal_epsilon, 0.03)
    assert guarantee(mm.Ledger().add(same, 3400), 1e-5).epsilon == pytest.approx(6.8573, rel=2e-3)
    assert result.plain_std_at_equal_epsilon < result.total_std


@settings(max_examples=40)
@given(
    z=st.floats(0.2, 10), omega=st.floats(0.1, 50), q=st.floats(1e-3, 1), steps=st.integers(1, 10**4),
    p=st.integers(1, 200), dimension=st.one_of(st.none(), st.integers(1, 300)),
)  # fmt: skip
def test_no_mixing_found_that_beats_its_variance(z, omega, q, steps, p, dimension):
    """Renyi against Renyi: on every point drawn, the Gaussian of the same variance has the smaller epsilon."""
    mechanism = mm.Mechanism(z, q, omega, p, dimension=dimension)
    twin = mm.equal_variance_gaussian(mechanism)
    ours, theirs = (mm.epsilon(each, 1e-5, steps=steps, by="renyi") for each in (mechanism, twin))
    assert theirs <= ours * (1 + 1e-9)


@settings(max_examples=40)
@given(
    z=st.floats(0.2, 10), q=st.floats(1e-3, 1), steps=st.integers(1, 10**4), p=st.integers(1, 200),
    dimension=st.one_of(st.none(), st.integers(1, 300)), law=st.sampled_from(["gaussian", "laplace"]),
)  # fmt: skip
def test_without_mixing_the_yardstick_is_the_mechanism(z, q, steps, p, dimension, law):
    """The yardsticks see the same clipped gradients: truncation and few coordinates count for them too."""
    ledger = mm.Ledger().add(mm.Mechanism(z, q, 0.0, p, law, dimension), steps)
    plain_line, own = mm.epsilon(unmixed(ledger), 1e-5), mm.epsilon(ledger, 1e-5)
    assert plain_line == pytest.approx(own, rel=1e-9)
    if law == "gaussian":
        assert mm.epsilon(equal_variance(ledger), 1e-5) == pytest.approx(own, rel=1e-9)


def test_the_yardstick_of_truncated_laplace_noise():
    """An l1 clip of 1 with coordinates below 0.1 leaves an l2 norm of sqrt(0.1), and the Gaussian may use that."""
    mechanism = mm.Mechanism(1.0, 0.03, 5.0, 100, "laplace")
    assert mechanism.l2_sensitivity == pytest.approx(math.sqrt(0.1))
    result = mm.compare(mechanism, 1e-5, steps=1000)
    assert result.equal_variance.epsilon < result.mechanism.epsilon < result.plain.epsilon
    assert result.plain_std_at_equal_epsilon < result.total_std


def test_the_plain_line_bounds_the_mixed_mechanism():
    """Mixing is post-processing: where there is hardly any, the line without mixing is the proved value."""
    ledger = mm.Ledger().add(mm.Mechanism(0.335, 0.03, 0.02), 1000)
    best = guarantee(ledger, 1e-5)
    assert best.accountant == "PLD"
    assert best.epsilon == guarantee(unmixed(ledger), 1e-5).epsilon
    assert best.epsilon < mm.epsilon(ledger, 1e-5, by="renyi")


def test_ledgers_are_mapped_phase_by_phase():
    ledger = mm.Ledger().add(mm.Mechanism(0.5, 0.1, 3.0, 9), 10).add(mm.Mechanism(0.5, 0.1, 4.0, 9), 20)
    assert [p.steps for p in equal_variance(ledger).phases] == [10, 20]
    assert unmixed(ledger).phases == mm.Ledger().add(mm.Mechanism(0.5, 0.1), 30).phases
    assert pld_epsilon(mm.Ledger(), 1e-5) == 0
    assert guarantee(unmixed(ledger), 1e-5).epsilon >= mm.epsilon(equal_variance(ledger), 1e-5)


# What the distributions are asked for, with a library that only counts.


class Count:
    """Stands in for a distribution: how many copies it holds, and the longest row composed at once."""

    longest = 0

    def __init__(self, copies):
        self.copies = copies

    def self_compose(self, times):
        Count.longest = max(Count.longest, times)
        return Count(self.copies * times)

    def compose(self, other):
        return Count(self.copies + other.copies)


@pytest.mark.parametrize("steps", [1, 2, 9_999, 10_000, 10_001, 20_000, 25_003, 10**8, 10**8 + 7])
def test_many_steps_are_composed_in_stages_and_none_is_lost(steps):
    Count.longest = 0
    assert pld._composed(Count(1), steps).copies == steps
    assert Count.longest <= 10_000


@pytest.mark.parametrize(("z", "q"), [(0.05, 1e-6), (0.3, 0.5), (1.0, 1.0), (10.0, 0.01), (1000.0, 1.0)])
def test_the_span_of_a_step_is_its_loss_ten_deviations_out(z, q):
    """log(1 - q + q exp(1/(2z^2) + 10/z)), but for the part 1 - q that does not matter."""
    exact = float(np.logaddexp(0.0, math.log(q) + 0.5 / z**2 + 10 / z))
    assert pld._step_span(mm.Mechanism(z, q)) == pytest.approx(exact, rel=1e-9)


def test_without_mixing_each_law_keeps_its_own_noise():
    ledger = (
        mm.Ledger()
        .add(mm.Mechanism(1.0, 0.1, 3.0, 100, dimension=25), 4)
        .add(mm.Mechanism(1.0, 0.1, 3.0, 5, "laplace"), 6)
    )
    assert unmixed(ledger) == mm.Ledger().add(mm.Mechanism(2.0, 0.1), 4).add(
        mm.Mechanism(1.0, 0.1, 0.0, 5, "laplace"), 6
    )
    twin = equal_variance(ledger)
    assert [(p.mechanism.law, p.mechanism.mixed, p.steps) for p in twin.phases] == [
        ("gaussian", False, 4),
        ("gaussian", False, 6),
    ]
    assert twin.phases[0].mechanism.noise_multiplier == pytest.approx(2 * math.sqrt(1 + 9 / 12))
    broken = mm.Ledger(ledger.phases, ("a rule",))
    assert unmixed(broken).unproved == equal_variance(broken).unproved == ("a rule",)


def test_one_phase_of_other_noise_is_beyond_the_tight_accountant():
    ledger = mm.Ledger().add(mm.Mechanism(1.0, 0.1), 4).add(mm.Mechanism(1.0, 0.1, law="laplace"), 6)
    found = guarantee(ledger, 1e-5)
    assert found.accountant in ("RDP", "PLD cone")
    assert found.epsilon <= mm.epsilon(ledger, 1e-5, by="renyi")
    with pytest.raises(mm.UnprovedError):
        guarantee(ledger, 1e-5, by="pld")


def test_the_ends_of_distributions():
    one = plain(1.0, 0.1, 1)
    assert pld_epsilon(mm.Ledger(), 1e-5) == 0
    assert pld_epsilon(one, 2e-11) == math.inf, "the noise of the transforms, once for the ledger and once a phase"
    assert pld_epsilon(one, 1.9e-11) == math.inf
    assert pld_epsilon(plain(1e5, 1e-3, 1), 1e-3) == 0
    assert pld_epsilon(plain(1e-200, 1.0, 1), 1e-5) == math.inf
    assert guarantee(plain(1e5, 1e-3, 1), 1e-3).epsilon == 0


def test_a_comparison_without_an_epsilon_has_no_noise_to_match():
    for mechanism, value in ((mm.Mechanism(1e-160, 1.0), math.inf), (mm.Mechanism(1e5, 1e-3), 0.0)):
        found = mm.compare(mechanism, 1e-3, steps=1)
        assert found.mechanism.epsilon == value
        assert math.isnan(found.plain_std_at_equal_epsilon)

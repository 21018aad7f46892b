"""Renyi curves and conversions against dp-accounting, direct integrals and their own laws."""

from __future__ import annotations

import math

import dp_accounting
import mpmath as mp
import numpy as np
import pytest
from dp_accounting import rdp as google
from hypothesis import given
from hypothesis import strategies as st
from oracle import density

import modelmix as mm
from modelmix.accounting.accountant import renyi_curve
from modelmix.accounting.functions import log_expm1
from modelmix.accounting.moments import log_moments, sampled_log_moments, sampled_moment_bounds
from modelmix.accounting.renyi import LAST_LEVEL, REAL_ORDERS, epsilons, orders_at, real_curve, step_curve

WHOLE = list(range(2, 65))


def google_rdp(z: float, q: float) -> np.ndarray:
    accountant = google.RdpAccountant(WHOLE)
    accountant.compose(dp_accounting.PoissonSampledDpEvent(q, dp_accounting.GaussianDpEvent(z)))
    return np.asarray(accountant._rdp)


@pytest.mark.parametrize(("z", "q"), [(0.5, 0.01), (1.0, 0.02), (2.0, 1.0), (5.0, 0.2), (0.3, 0.5)])
@pytest.mark.parametrize("omega", [0.0, 1e-9, 1e-6])
def test_no_mixing_is_dp_accountings_rdp(z, q, omega):
    ours = mm.rdp(mm.Mechanism(z, q, omega), WHOLE)
    np.testing.assert_allclose(ours, google_rdp(z, q), rtol=1e-8)


@given(
    z=st.floats(0.2, 5), omega=st.floats(0.01, 100), q=st.floats(1e-4, 0.99), alpha=st.integers(2, 40),
    law=st.sampled_from(["gaussian", "laplace"]),
)  # fmt: skip
def test_whole_orders_equal_the_direct_integral(z, omega, q, alpha, law):
    """For p = 1 the binomial sum of moments and one integral of (1 - q + q r)^alpha are the same number."""
    mechanism = mm.Mechanism(z, q, omega, law=law)
    direct = sampled_log_moments(mechanism.coordinate_law, 1.0, np.array([float(alpha)]), q)[0]
    assert mm.rdp(mechanism, [alpha])[0] * (alpha - 1) == pytest.approx(direct, rel=1e-8)


@given(z=st.floats(0.3, 5), q=st.floats(1e-3, 0.9), alpha=st.floats(1.05, 30), omega=st.sampled_from([0.0, 0.5, 8.0]))
def test_orders_between_whole_numbers_are_bounded_from_above(z, q, alpha, omega):
    mechanism = mm.Mechanism(z, q, omega)
    direct = sampled_log_moments(mechanism.coordinate_law, 1.0, np.array([alpha]), q)[0]
    assert mm.rdp(mechanism, [alpha])[0] * (alpha - 1) >= direct * (1 - 1e-9)


@given(z=st.floats(0.1, 20), q=st.floats(1e-4, 1), omega=st.floats(0, 100), p=st.integers(1, 1000))
def test_the_curve_is_convex_and_rising(z, q, omega, p):
    """(alpha - 1) D_alpha is convex, which is what the straight-line bound rests on; D_alpha itself rises."""
    kappa = step_curve(mm.Mechanism(z, q, omega, p), 0)
    orders = orders_at(0)
    second = np.diff(np.append(0.0, kappa), 2)
    assert np.all(second >= -1e-9 * kappa[1:])
    divergence = kappa / (orders - 1)
    assert np.all(np.diff(divergence) >= -1e-9 * divergence[1:])


@given(
    z=st.floats(0.3, 50), q=st.floats(1e-3, 1), steps=st.integers(1, 10**5), delta=st.floats(1e-9, 1e-2),
    omega=st.floats(0, 50),
)  # fmt: skip
def test_conversion_agrees_with_dp_accounting(z, q, steps, delta, omega):
    orders, kappa = renyi_curve(mm.Mechanism(z, q, omega), steps)
    theirs, _ = google.compute_epsilon(orders.tolist(), (kappa / (orders - 1)).tolist(), delta)
    ours = float(np.min(epsilons(orders, kappa, delta, "improved")))
    assert ours == pytest.approx(theirs, rel=1e-9, abs=1e-12)


@given(
    z=st.floats(0.3, 50), q=st.floats(1e-3, 1), steps=st.integers(1, 10**5), delta=st.floats(1e-9, 1e-2),
    by=st.sampled_from(["renyi", "classic"]),
)  # fmt: skip
def test_delta_inverts_epsilon(z, q, steps, delta, by):
    mechanism = mm.Mechanism(z, q, 3.0, 4)
    epsilon = mm.epsilon(mechanism, delta, steps=steps, by=by)
    back = mm.delta(mechanism, epsilon, steps=steps, by=by)
    assert back <= delta * (1 + 1e-6)
    if epsilon > 0:
        assert back == pytest.approx(delta, rel=1e-6) or by == "classic"


@given(z=st.floats(0.3, 100), q=st.floats(1e-4, 1), steps=st.integers(1, 10**6))
def test_improved_never_exceeds_classic(z, q, steps):
    mechanism = mm.Mechanism(z, q, 2.0)
    improved = mm.epsilon(mechanism, 1e-5, steps=steps, by="renyi")
    assert improved <= mm.epsilon(mechanism, 1e-5, steps=steps, by="classic") * (1 + 1e-12)


@pytest.mark.parametrize("z", [0.5, 2.0, 8.0, 40.0, 200.0, 900.0])
@pytest.mark.parametrize("by", ["renyi", "classic"])
def test_the_optimum_is_inside_the_grid(z, by):
    mechanism = mm.Mechanism(z, 0.1, 4.0)
    result = mm.guarantee(mechanism, 1e-5, steps=100, by=by)
    levels = [level for level in range(LAST_LEVEL + 1) if result.order < orders_at(level)[-1]]
    assert levels
    assert result.reason is None
    best_everywhere = float(
        np.min(epsilons(*renyi_curve(mechanism, 100, LAST_LEVEL), 1e-5, "classic" if by == "classic" else "improved"))
    )
    assert result.epsilon <= best_everywhere * (1 + 1e-3)


def test_an_optimum_past_the_last_order_says_so():
    result = mm.guarantee(mm.Mechanism(1000.0, 0.001), 1e-9, steps=100, by="classic")
    assert "could lower epsilon by at most" in str(result.reason)
    assert result.epsilon < 1e-3


def test_sparse_large_orders_stay_above_the_dense_truth():
    """Order 512, where A_k is known at sparse k only, against the sum over every k."""
    mechanism = mm.Mechanism(6.0, 0.05, 9.0, 7)
    law, ((shift, count),) = mechanism.coordinate_law, mechanism.worst_gradient
    k = np.arange(2.0, 513.0)
    log_a = count * log_moments(law, shift, k)
    terms = [
        math.lgamma(513) - math.lgamma(i + 1) - math.lgamma(513 - i) + i * math.log(0.05) + (512 - i) * math.log(0.95)
        for i in k
    ]
    dense = np.logaddexp.reduce(np.append(np.array(terms) + log_expm1(log_a), 0.0)) / 511
    ours = mm.rdp(mechanism, [512])[0]
    assert dense <= ours <= dense * (1 + 2e-3)


def test_laplace_reaches_pure_privacy():
    """One unsampled step of Laplace noise is 1/z-DP, whatever delta; sampling gives log(1 + q(e^{1/z} - 1))."""
    assert mm.epsilon(mm.Mechanism(0.5, 1.0, law="laplace"), 1e-15, steps=1) == pytest.approx(2.0, rel=1e-9)
    sampled = mm.guarantee(mm.Mechanism(0.5, 0.1, law="laplace"), 1e-15, steps=3)
    assert sampled.order == math.inf
    assert sampled.epsilon == pytest.approx(3 * math.log1p(0.1 * math.expm1(2.0)), rel=1e-9)
    mixed = mm.Mechanism(0.5, 1.0, 6.0, law="laplace")
    assert mm.epsilon(mixed, 1e-5, steps=50) < mm.epsilon(mm.Mechanism(0.5, 1.0, law="laplace"), 1e-5, steps=50)


def test_phases_add_up():
    first, second = mm.Mechanism(1.0, 0.01, 2.0, 4), mm.Mechanism(0.7, 0.02, 5.0, 9)
    ledger = mm.Ledger().add(first, 100).add(second, 50)
    _, both = renyi_curve(ledger)
    np.testing.assert_allclose(both, renyi_curve(first, 100)[1] + renyi_curve(second, 50)[1])
    split = mm.Ledger().add(first, 60).add(second, 50).add(first, 40)
    assert mm.epsilon(split, 1e-5) == pytest.approx(mm.epsilon(ledger, 1e-5), rel=1e-12)


@pytest.mark.parametrize("by", ["renyi", "classic"])
def test_a_curve_over_steps_is_the_single_answers(by):
    mechanism = mm.Mechanism(0.9, 0.02, 3.0, 25)
    steps = np.array([1, 2, 17, 400, 5000, 10**6])
    singles = [mm.epsilon(mechanism, 1e-5, steps=int(t), by=by) for t in steps]
    np.testing.assert_allclose(mm.epsilon_curve(mechanism, steps, 1e-5, by=by), singles, rtol=1e-9)


def test_nonsense_is_refused():
    mechanism = mm.Mechanism(1.0, 0.1)
    for call in (
        lambda: mm.epsilon(mechanism, 0.0, steps=1),
        lambda: mm.epsilon(mechanism, 1.0, steps=1),
        lambda: mm.epsilon(mechanism, 1e-5),
        lambda: mm.epsilon(mechanism, 1e-5, steps=0),
        lambda: mm.epsilon(mechanism, 1e-5, steps=1.5),
        lambda: mm.epsilon(mm.Ledger(), 1e-5, steps=3),
        lambda: mm.epsilon(mechanism, 1e-5, steps=1, by="improved"),
        lambda: mm.delta(mechanism, -1.0, steps=1),
        lambda: mm.rdp(mechanism, [1.0]),
        lambda: mm.rdp(mechanism, [1e9]),
        lambda: mm.epsilon_curve(mechanism, [1.5], 1e-5),
        lambda: mm.epsilon_curve(mechanism, ["a"], 1e-5),
        lambda: mm.epsilon_curve(mechanism, [math.inf], 1e-5),
        lambda: mm.epsilon(mechanism, 1e-5, steps=10**400),
        lambda: mm.epsilon("a mechanism", 1e-5, steps=1),
    ):
        with pytest.raises(mm.ModelMixError):
            call()
    assert mm.epsilon(mm.Ledger(), 1e-5) == 0
    assert mm.epsilon_curve(mechanism, [], 1e-5).size == 0


def test_delta_at_the_ends():
    assert mm.delta(mm.Mechanism(1.0, 0.5), 1e308, steps=10) == 0
    assert mm.delta(mm.Mechanism(1e-200, 0.5), 1e308, steps=10) == 1
    assert mm.delta(mm.Mechanism(1.0, 1.0), 0.0, steps=10**6) == 1


# Orders between whole numbers.


@pytest.mark.parametrize(("omega", "expected"), [(3.75, 53.68), (7.5, 38.65), (15.0, 29.14)])
def test_real_orders_of_figure_3(omega, expected):
    """Computed elsewhere, at the best of all orders; ours are 0.05 apart there."""
    found = mm.guarantee(mm.Mechanism(0.3669447200353208, 0.02, omega), 1e-5, steps=5000, by="renyi")
    assert expected * (1 - 1e-3) < found.epsilon < expected * (1 + 3e-3)
    assert 1.3 < found.order < 1.7


@pytest.mark.parametrize(
    ("z", "omega", "q", "alpha"),
    [
        (0.5, 3.0, 0.05, 1.04),
        (0.5, 3.0, 0.05, 2.5),
        (2.0, 40.0, 1e-3, 1.3),
        (0.1, 0.0, 0.5, 1.1),
        (1.0, 0.2, 1.0, 3.75),
    ],
)
def test_real_orders_agree_with_thirty_digits(z, omega, q, alpha):
    law = mm.Mixed(mm.Gaussian(z), omega) if omega else mm.Gaussian(z)
    found = math.expm1(float(sampled_moment_bounds(law, 1.0, np.array([alpha]), q)[0]))
    with mp.workdps(30):
        sigma, width, rate, order = mp.mpf(z), mp.mpf(omega), mp.mpf(q), mp.mpf(alpha)
        f = density("gaussian", sigma, width) if omega else lambda x: mp.npdf(x, 0, sigma)

        def integrand(x):
            t = 1 - rate + rate * f(x - 1) / f(x)
            return f(x) * (t**order - 1 - order * (t - 1))

        edge, reach = width / 2, 12 * sigma
        stops = sorted(
            {-edge - reach, -edge, 0, edge, edge + 1, edge + order, edge + order + reach}
            | {e + i * sigma for e in (-edge, edge, edge + 1, edge + order) for i in (-6, -3, -1, 1, 3, 6)}
        )
        stops = [x for x in stops if -edge - reach <= x <= edge + order + reach]
        true = float(mp.quad(integrand, stops, maxdegree=5))
    assert true * (1 - 1e-9) <= found <= true * (1 + 1e-5)


def test_real_orders_are_those_of_one_coordinate_of_gaussian_noise():
    """Truncation and few coordinates leave a smaller set, inside the ball of one coordinate of that norm."""
    for other in (mm.Mechanism(0.5, 0.1, 2.0, law="laplace"), mm.EmbeddingMechanism(1.0, 0.1)):
        assert real_curve(other) is None
    single, truncated = (real_curve(mm.Mechanism(0.5, 0.1, 2.0, p)) for p in (1, 4))
    np.testing.assert_allclose(truncated, single, rtol=1e-9)
    assert np.all(real_curve(mm.Mechanism(0.5, 0.1, 2.0, 4, dimension=1)) < single)
    one = mm.Ledger().add(mm.Mechanism(0.4, 0.02, 5.0), 500)
    two = one.add(mm.Mechanism(2.0, 0.02, 5.0, 9), 500)
    assert mm.epsilon(one, 1e-5, by="renyi") < mm.epsilon(two, 1e-5, by="renyi") < mm.epsilon(two, 1e-5, by="classic")
    kappa = real_curve(one.phases[0].mechanism)
    line = np.interp(2.0, REAL_ORDERS, kappa)
    below = kappa[REAL_ORDERS < 2][-1]
    assert below < mm.rdp(one.phases[0].mechanism, [2])[0] <= line * (1 + 1e-9), "convex in the order"
    assert np.all(np.diff(kappa) > 0)

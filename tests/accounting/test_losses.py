"""Distributions of privacy losses: against an independent computation, between its two neighbours, at their limits."""

from __future__ import annotations

import math
from itertools import pairwise

import numpy as np
import pytest
from losses_oracle import LIGHT, composed, cone_delta, coordinate, gradient, hockey_stick, in_the_limit, psi, psi_slope
from scipy import optimize
from scipy.special import ndtr

import modelmix as mm
from modelmix.accounting import coordinate_losses, loss_distribution
from modelmix.accounting.composition import FINE, ROUGH, gradient_losses, loss_delta, loss_epsilon
from modelmix.accounting.cone import Cone, growth, offset, slope
from modelmix.accounting.laws import Gaussian, Laplace, Mixed
from modelmix.accounting.ledger import Phase
from modelmix.accounting.loss_distribution import LossDistribution, on_grid, total
from modelmix.accounting.moments import log_moments

DELTA = 1e-5


def phases_of(ledger: mm.Ledger):
    return [
        (str(m.law), m.noise_multiplier, m.mixing_width, m.worst_gradient, m.sample_rate, phase.steps)
        for phase in ledger.phases for m in [phase.mechanism]
    ]  # fmt: skip


def drawn(seed: int, count: int) -> list[mm.Ledger]:
    """z .2 to 4, omega 0 to 500, p 1 to 1000, q .001 to 1, T 1 to 10,000; every fourth has two phases."""
    rng = np.random.default_rng(seed)
    out: list[mm.Ledger] = []
    while len(out) < count:
        ledger = mm.Ledger()
        law = str(rng.choice(["gaussian", "laplace"]))
        for _ in range(2 if len(out) % 4 == 3 else 1):
            z, q = math.exp(rng.uniform(math.log(0.2), math.log(4))), min(1, math.exp(rng.uniform(-6.9, 0.3)))
            omega = 0.0 if rng.random() < 0.1 else math.exp(rng.uniform(-2, math.log(500)))
            p, steps = int(math.exp(rng.uniform(0, math.log(1000)))), int(math.exp(rng.uniform(0, math.log(1e4))))
            ledger = ledger.add(mm.Mechanism(z, q, omega, p, law), steps)
        if 0.02 < loss_epsilon(ledger.phases, DELTA, ROUGH)[0] < 40:
            out.append(ledger)
    return out


def reference(ledger: mm.Ledger, epsilon: float, points: int) -> float:
    """log delta at epsilon, in the limit of fine lattices."""
    phases = phases_of(ledger)
    exact = all(phase[0] == "laplace" for phase in phases)
    delta_of = hockey_stick if exact else cone_delta

    def direction(adding: bool) -> float:
        return in_the_limit(lambda n: math.log(delta_of(composed(phases, n, adding), epsilon) + 1e-99), points)

    return max(direction(adding) for adding in ((False, True) if exact else (False,)))


@pytest.mark.parametrize("seed", range(10))
def test_an_independent_computation_agrees_from_below_to_a_ten_thousandth(seed):
    """The reference has an error of its own; the slope of log delta turns both into fractions of epsilon."""
    for ledger in drawn(seed, 4):
        epsilon, why = loss_epsilon(ledger.phases, DELTA)
        assert why is None
        near, far = (reference(ledger, x, 1200) for x in (epsilon, 1.002 * epsilon))
        rough = reference(ledger, epsilon, 600)
        slope_of_log = (near - far) / 0.002
        # What two lattices leave, a sixteenth of it if they were of fourth order, and the error of the slope.
        doubt = 2e-5 + abs(near - rough) / slope_of_log
        excess = (math.log(DELTA) - near) / slope_of_log
        # Rare large losses, for which moments are useless, need wide windows: the bound is a little looser.
        rare = mm.epsilon(ledger, DELTA, by="renyi") > 4 * epsilon
        assert -doubt < excess < (1e-3 if rare else 1e-4) + doubt, (ledger, excess, doubt)


@pytest.mark.parametrize("seed", range(3))
def test_it_lies_between_the_vertex_and_renyi(seed):
    """The vertex is a possible gradient, so that its hockey stick is a lower bound on delta."""
    for ledger in drawn(100 + seed, 6):
        epsilon, _ = loss_epsilon(ledger.phases, DELTA)
        assert epsilon <= mm.epsilon(ledger, DELTA, by="renyi") * (1 + 1e-4)
        phases = phases_of(ledger)
        coarse, fine = (hockey_stick(composed(phases, points), epsilon) for points in (1500, 3000))
        assert fine + (fine - coarse) / 3 <= DELTA * (1 + 2e-4)


# Target values, and what is exact.


@pytest.mark.parametrize(
    ("mechanism", "steps", "expected"),
    [
        (mm.Mechanism(0.335, 0.03, 11.25, 100), 3400, 6.86),
        *((mm.Mechanism(0.3669, 0.02, omega, p), 5000, expected) for omega, p, expected in [
            (3.75, 1, 49.8), (3.75, 25, 14.36), (3.75, 100, 13.19), (7.5, 1, 35.4), (7.5, 25, 7.41), (7.5, 100, 6.79),
            (15.0, 1, 26.3), (15.0, 25, 4.38), (15.0, 100, 4.05)]),
        (mm.Mechanism(0.3, 0.01, 10.0), 1000, 19.9),
        (mm.Mechanism(1.0, 1.0, 5.0), 100, 47.2),
        (mm.Mechanism(2.05, 0.16384, 409.6, 100), 2700, 1.59),
        (mm.EmbeddingMechanism(1.563, 0.04, 50.0, 25), 5000, 5.85),
        (mm.EmbeddingMechanism(1.563, 0.04, 250.0, 25), 5000, 2.26),
        (mm.Mechanism(1.0, 0.02, 5.0, law="laplace"), 1000, 1.373),
        (mm.Mechanism(0.5, 0.02, 10.0, law="laplace"), 2000, 2.521),
    ],
)  # fmt: skip
def test_values_that_were_computed_elsewhere(mechanism, steps, expected):
    """Computed by other code and printed rounded up."""
    found = mm.guarantee(mechanism, DELTA, steps=steps)
    assert found.accountant == ("PLD" if mechanism.law == "laplace" else "PLD cone")
    assert expected * 0.995 < found.epsilon <= expected + 1e-3


@pytest.mark.parametrize(("z", "delta"), [(1.0, 1e-5), (0.4, 1e-3), (3.0, 1e-9)])
def test_one_step_without_sampling_and_mixing_is_the_cone_function_of_a_gaussian(z, delta):
    """The loss is N(1/2z^2, 1/z^2): E[G(L - k)] by quadrature, minimised over x0 by an optimiser."""
    mu = 0.5 / z**2
    x, w = np.polynomial.legendre.leggauss(400)

    def delta_at(epsilon, x0):
        kappa = math.exp(epsilon) / (x0 - psi(x0) / psi_slope(x0))
        low, high = max(math.log(kappa), mu - 12 / z), mu + 12 / z
        loss = low + (high - low) * (x + 1) / 2
        density = np.exp(-0.5 * ((loss - mu) * z) ** 2) * z / math.sqrt(2 * math.pi)
        return (
            (high - low) / 2 * np.sum(w * density * kappa * psi(np.exp(loss) / kappa) / psi_slope(x0) * np.exp(-loss))
        )

    found, _ = loss_epsilon((Phase(mm.Mechanism(z, 1.0), 1),), delta)
    best = optimize.minimize_scalar(
        lambda y: delta_at(found, math.exp(math.exp(y))), bounds=(-4, 2.5), method="bounded"
    )
    assert delta * (1 - 2e-3) < best.fun <= delta * (1 + 1e-7)


@pytest.mark.parametrize("q", [1.0, 0.1])
@pytest.mark.parametrize("scale", [0.5, 2.0])
def test_one_step_of_laplace_noise_is_exact(q, scale):
    """P(x > a) etc. by hand: delta = 1 - exp((epsilon' - 1/z)/2) with e^epsilon' = 1 + (e^epsilon - 1)/q."""
    for epsilon in (0.1, 0.3):
        inner = math.log1p(math.expm1(epsilon) / q)
        exact = q * max(0.0, -math.expm1((inner - 1 / scale) / 2))
        found = loss_delta((Phase(mm.Mechanism(scale, q, law="laplace"), 1),), epsilon)
        assert exact <= found <= exact + 1e-4 * q


@pytest.mark.parametrize(("z", "q", "steps"), [(1.0, 0.01, 1000), (0.7, 0.05, 300), (2.0, 1.0, 40)])
def test_without_mixing_the_vertex_is_that_of_plain_dp_sgd(z, q, steps):
    """Hockey stick and cone function of the same law: the first agrees with dp-accounting."""
    plain = mm.epsilon(mm.Mechanism(z, q), DELTA, steps=steps)
    phases = [("gaussian", z, 0.0, ((1.0, 1),), q, steps)]
    stick = in_the_limit(lambda n: hockey_stick(composed(phases, n), plain), 1500)
    assert stick == pytest.approx(DELTA, rel=5e-3)
    narrow, _ = loss_epsilon((Phase(mm.Mechanism(z, q, 1e-7), steps),), DELTA)
    none, _ = loss_epsilon((Phase(mm.Mechanism(z, q), steps),), DELTA)
    assert narrow == pytest.approx(none, rel=1e-6)
    assert plain < none < 1.06 * plain + 0.02


BASE = {"noise_multiplier": 0.6, "sample_rate": 0.05, "mixing_width": 6.0, "p": 10}


@pytest.mark.parametrize("law", ["gaussian", "laplace"])
@pytest.mark.parametrize(
    ("field", "falling"),
    [
        ("noise_multiplier", [0.3, 0.5, 0.6, 1.0, 2.0]),
        ("sample_rate", [1.0, 0.2, 0.05, 0.049, 0.01]),
        ("mixing_width", [0.0, 0.1, 1.0, 6.0, 60.0]),
        ("steps", [1000, 300, 50, 49, 2, 1]),
        ("delta", [1e-12, 1e-8, 1e-5, 1e-3]),
    ],
)
def test_epsilon_is_monotone_in_everything(law, field, falling):
    values = []
    for x in falling:
        given = {**BASE, "steps": 50, "delta": DELTA, field: x}
        steps, delta = int(given.pop("steps")), given.pop("delta")
        values.append(loss_epsilon((Phase(mm.Mechanism(**given, law=law), steps),), delta)[0])
    assert all(a >= b * (1 - 1e-4) for a, b in pairwise(values))


def test_epsilon_and_delta_are_inverse():
    for ledger in drawn(7, 6):
        epsilon, _ = loss_epsilon(ledger.phases, DELTA)
        assert loss_delta(ledger.phases, epsilon) == pytest.approx(DELTA, rel=3e-3)
        assert loss_epsilon(ledger.phases, DELTA, ROUGH)[0] == pytest.approx(epsilon, rel=3e-3)


def test_the_order_of_phases_and_their_number_do_not_matter():
    a, b = Phase(mm.Mechanism(0.5, 0.03, 8.0, 25), 500), Phase(mm.Mechanism(0.8, 0.02, 2.0, 4), 700)
    both = loss_epsilon((a, b), DELTA)[0]
    assert loss_epsilon((b, a), DELTA)[0] == pytest.approx(both, rel=1e-9)
    halves = (Phase(a.mechanism, 200), b, Phase(a.mechanism, 300))
    assert loss_epsilon(halves, DELTA)[0] == pytest.approx(both, rel=1e-9)
    assert max(loss_epsilon((x,), DELTA)[0] for x in (a, b)) < both


# Pieces.


@pytest.mark.parametrize(
    ("law", "shift"),
    [(Gaussian(1.0), 1.0), (Mixed(Gaussian(0.335), 11.25), 0.1), (Mixed(Gaussian(2.0), 0.3), 0.5),
     (Mixed(Gaussian(1.0), 1e5), 0.01), (Laplace(1.0), 1.0), (Mixed(Laplace(1.0), 5.0), 1.0),
     (Mixed(Laplace(0.5), 0.1), 0.3)],
)  # fmt: skip
def test_a_coordinate_dominates_and_hardly_more(law, shift):
    found = coordinate_losses.coordinate(law, shift)
    assert found.first <= 0 <= found.last
    orders = np.array([1.5, 2.0, 4.0])
    true = log_moments(law, shift, orders)
    ours = np.array([found.log_moment(k - 1) for k in orders])
    back = np.array([found.log_moment(-k) for k in orders])  # both laws' masses are kept: the pair is its own mirror
    assert np.all(ours >= true * (1 - 1e-9))
    assert np.all(back >= true * (1 - 1e-9))
    assert np.all(np.maximum(ours, back) <= true * (1 + 2e-4) + 1e-12)
    assert abs(found.mass.sum() - 1) < 1e-12
    assert abs(np.sum(found.mass * np.exp(-found.losses)) - 1) < 1e-11


def test_a_coordinate_of_an_unlisted_law_is_refused():
    class Other(mm.Gaussian):
        pass

    with pytest.raises(mm.UnprovedError, match="worst gradient"):
        coordinate_losses.coordinate(Other(1.0), 1.0)
    value, why = loss_epsilon((Phase(mm.Mechanism(1.0, 0.1, 2.0, law=Other), 5),), DELTA)
    assert math.isinf(value)
    assert "of one's own" in why
    assert loss_delta((Phase(mm.Mechanism(1.0, 0.1, 2.0, law=Other), 5),), 1.0) == 1.0


def test_sums_have_the_moments_of_their_parts():
    one = coordinate_losses.coordinate(Mixed(Gaussian(0.5), 4.0), 0.1)
    for count in (2, 7, 100):
        many = total([(one, count)])
        for theta in (-2.0, -0.5, 0.5, 3.0):
            assert count * one.log_moment(theta) <= many.log_moment(theta) + 1e-12
            assert many.log_moment(theta) == pytest.approx(count * one.log_moment(theta), rel=1e-6, abs=1e-8)
    staged = total([(coordinate_losses.coordinate(Gaussian(1.0), 1e-3), 10**6)])
    whole = coordinate_losses.coordinate(Gaussian(1.0), 1.0)
    for theta in (-2.0, -0.5, 0.5, 3.0):
        assert staged.log_moment(theta) == pytest.approx(whole.log_moment(theta), rel=1e-4)


def test_fourier_noise_is_below_its_bound():
    """A thousand-fold sum by direct convolution, which has no noise, lies between the masses and masses plus noise."""
    rng = np.random.default_rng(3)
    mass = rng.random(40)
    one = LossDistribution(0.01, -15, mass / mass.sum())
    direct, power, count = np.array([1.0]), one.mass, 1000
    while count:
        direct = np.convolve(direct, power) if count & 1 else direct
        power, count = np.convolve(power, power), count >> 1
    for theta in (0.0, 2.0, -1.0):
        low, high = -15 * 1000, 24 * 1000
        found, noise = loss_distribution.tilted_sum([(one, 1000)], theta, low, high)
        assert np.all(found + noise >= direct * (1 - 1e-12))
        lacking = np.minimum(found - direct, 0) / noise
        assert np.sum(lacking**2) <= 1
        assert np.sum(np.abs(found - direct) * np.exp(theta * 0.01 * np.arange(low, high + 1))) < 1e-6 * np.exp(
            1000 * one.log_moment(theta)
        )


def test_spreading_keeps_both_masses():
    rng = np.random.default_rng(1)
    losses, mass = np.sort(rng.normal(0, 1, 500)), rng.random(500)
    found = on_grid(losses, mass, 0.01)
    assert np.sum(found.mass) == pytest.approx(np.sum(mass), rel=1e-9)
    assert np.sum(found.mass * np.exp(-found.losses)) == pytest.approx(np.sum(mass * np.exp(-losses)), rel=1e-9)
    assert np.all(np.abs(found.losses / 0.01 - np.round(found.losses / 0.01)) < 1e-9), "0 is a grid point"


def test_pruning_moves_mass_up_or_into_the_tail():
    one = coordinate_losses.coordinate(Mixed(Gaussian(0.5), 4.0), 1.0)
    less = one.pruned(1e-6)
    assert less.mass.size < one.mass.size
    assert less.first <= 0 <= less.last
    assert less.mass.sum() <= one.mass.sum() * (1 + 1e-12) <= less.mass.sum() + less.tail
    assert less.tail >= np.sum((one.mass * np.exp(0.04 * one.losses))[one.losses > less.losses[-1] + 1e-9])
    assert np.sum(less.mass * np.exp(-less.losses)) + less.zero >= np.sum(one.mass * np.exp(-one.losses)) * (1 - 1e-12)


def test_the_function_is_above_the_hockey_stick_and_touches_it():
    for y0 in (1e-3, 0.02, 0.5, 3.0, 12.0):
        y = np.linspace(0, 20, 4001)
        epsilon = 0.7
        kappa = math.exp(epsilon - Cone(y0).offset)
        phi = kappa * np.exp(y) * growth(y) / slope(np.array([y0]))[0]
        stick = np.maximum(kappa * np.exp(y) - math.exp(epsilon), 0)
        assert np.all(phi >= stick * (1 - 1e-9) - 1e-12)
        at = np.array([y0])
        touch = kappa * math.exp(y0)
        assert kappa * math.exp(y0) * growth(at)[0] / slope(at)[0] == pytest.approx(touch - math.exp(epsilon), rel=1e-7)


def test_the_function_lies_in_the_cone():
    """P_2, P_3, P_4 of Psi in closed form: x^2 Psi'' and so on, for all pi."""
    x = np.exp(np.linspace(1e-6, 40, 4000))[:, None]
    pi = np.linspace(0, 1, 201)[None, :]

    def p(n):
        def power(b):
            return x ** (2 - b) * np.prod([-b - i for i in range(n - 2)])

        return power(24 / 25) - power(77 / 50)

    assert np.all(p(2) >= 0)
    assert np.all(p(2) + pi * p(3) >= -1e-12 * x)
    assert np.all(1.5 * p(2) + 3.5 * pi * p(3) + pi**2 * p(4) >= -1e-12 * x)


def test_growth_is_what_it_is_called():
    y = np.concatenate([[-1.0, 0.0], np.geomspace(1e-2, 20, 200)])
    assert np.all(growth(y)[:2] == 0)
    np.testing.assert_allclose(growth(y)[2:], psi(np.exp(y[2:])) * np.exp(-y[2:]), rtol=1e-7)
    np.testing.assert_allclose(slope(y[2:]), psi_slope(np.exp(y[2:])), rtol=1e-9)
    np.testing.assert_allclose(
        offset(y[2:]), np.log(np.exp(y[2:]) - psi(np.exp(y[2:])) / psi_slope(np.exp(y[2:]))), rtol=1e-6
    )
    assert np.all(np.diff(growth(np.geomspace(1e-6, 30, 500))) > 0)


# Extremes.


@pytest.mark.parametrize("law", ["gaussian", "laplace"])
@pytest.mark.parametrize(
    ("z", "omega", "p", "q", "steps"),
    [(0.05, 1.0, 1, 1.0, 10**8), (1000.0, 1e6, 10**7, 1e-6, 1), (0.3, 1e6, 10**7, 0.01, 10**8),
     (2.0, 50.0, 100, 0.01, 10**8),
     (0.05, 1e6, 1, 1e-6, 10**8), (1000.0, 0.5, 1, 1.0, 10**8), (5.0, 3.0, 10**7, 1e-3, 10**6)],
)  # fmt: skip
def test_extremes_give_a_number_or_fall_back_with_a_reason(law, z, omega, p, q, steps):
    mechanism = mm.Mechanism(z, q, omega, p, law)
    with np.errstate(all="raise", under="ignore"):
        found, renyi = (
            mm.guarantee(mechanism, DELTA, steps=steps),
            mm.epsilon(mechanism, DELTA, steps=steps, by="renyi"),
        )
        value, why = loss_epsilon((Phase(mechanism, steps),), DELTA)
    assert 0 <= found.epsilon <= renyi
    assert not math.isnan(value)
    assert math.isfinite(value) or why
    if found.accountant == "RDP" and renyi > 0:
        assert value >= renyi
    if found.epsilon == renyi and not math.isfinite(value) and found.accountant == "RDP" and renyi > 0:
        assert why in found.reason
    floor = mechanism.sample_rate * (2 * ndtr(0.5 / mechanism.total_std / math.sqrt(max(1, p))) - 1)
    if floor > 2 * DELTA and law == "gaussian":
        assert found.epsilon > 0, "one coordinate of one step alone costs something"


def test_too_many_mechanisms_and_too_small_noise_fall_back():
    many = mm.Ledger()
    for i in range(129):
        many = many.add(mm.Mechanism(1.0 + i / 100, 0.01, 2.0), 1)
    value, why = loss_epsilon(many.phases, DELTA)
    assert math.isinf(value)
    assert "128 different" in why
    found = mm.guarantee(many, DELTA)
    assert (found.accountant, "128 different" in found.reason) == ("RDP", True)
    tiny = mm.guarantee(mm.Mechanism(1e-3, 0.5, 2.0), DELTA, steps=10)
    assert tiny.accountant in ("RDP", "PLD")


def test_a_sample_that_is_hardly_ever_drawn_costs_nothing():
    assert loss_epsilon((Phase(mm.Mechanism(0.1, 1e-7, 1.0), 90),), DELTA) == (0.0, None)
    assert loss_delta((Phase(mm.Mechanism(0.1, 1e-7, 1.0), 90),), 0.0) <= 9e-6
    assert loss_epsilon((Phase(mm.Mechanism(0.1, 1e-7, 1.0), 200),), DELTA)[0] > 0


def test_the_lattice_of_the_reference_is_a_law():
    """The reference itself: masses sum to 1 under both laws, and its moments are those of the quadrature."""
    one = coordinate("gaussian", 0.5, 4.0, 0.5, 0.004)
    assert one.mass.sum() == pytest.approx(1, abs=1e-9)
    assert np.sum(one.mass * np.exp(-one.losses)) == pytest.approx(1, abs=1e-6)
    moment = math.log(np.sum(one.mass * np.exp(one.losses)))
    assert moment == pytest.approx(log_moments(Mixed(Gaussian(0.5), 4.0), 0.5, np.array([2.0]))[0], rel=1e-4)
    many = gradient("gaussian", 0.5, 4.0, ((0.25, 16),), 800)
    ours = gradient_losses(mm.Mechanism(0.5, 1.0, 4.0, 16).moment_bounds[0])
    assert math.log(np.sum(many.mass * np.exp(many.losses))) == pytest.approx(ours.log_moment(1.0), rel=3e-3)
    assert LIGHT < 1e-20
    assert FINE < ROUGH

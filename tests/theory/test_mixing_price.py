"""Is mixing worth it? The price at equal epsilon, its limit, and the search for a region that favours mixing."""

from __future__ import annotations

import json
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import integrate, stats

import modelmix as mm
from modelmix.accounting.laws import Gaussian, Laplace, Mixed
from modelmix.theory import mixing_price
from modelmix.theory.loss import loss_moments


@pytest.mark.parametrize(("z", "omega"), [(1.0, 0.5), (1.0, 3.0), (0.3, 4.0), (0.1, 3.3)])
def test_fisher_information_of_the_mixed_law(z, omega):
    """Against the integral of f'^2/f, with f' in closed form; and the Cramer-Rao bound."""

    def integrand(x: float) -> float:
        a, b = (x - omega / 2) / z, (x + omega / 2) / z
        f = (
            (stats.norm.cdf(-a) - stats.norm.cdf(-b)) / omega
            if x > 0
            else (stats.norm.cdf(b) - stats.norm.cdf(a)) / omega
        )
        slope = (stats.norm.pdf(b) - stats.norm.pdf(a)) / (omega * z)
        return slope**2 / f

    reach = omega / 2 + 8 * z
    exact = 2 * integrate.quad(integrand, -reach, 0, points=[-omega / 2], limit=200)[0]
    law = Mixed(Gaussian(z), omega)
    assert mixing_price.fisher_information(law) == pytest.approx(exact, rel=1e-5)
    assert mixing_price.fisher_information(law) * law.variance > 1
    assert mixing_price.fisher_information(Gaussian(z)) == pytest.approx(1 / z**2, rel=1e-6)
    assert mixing_price.fisher_information(Laplace(z)) * 2 * z**2 == pytest.approx(2, rel=1e-3)


def test_the_price_grows_with_the_share():
    prices = [mixing_price.limit_price(share) for share in (0.0, 0.1, 0.3, 0.6, 0.9, 0.99)]
    assert prices[0] == pytest.approx(1, abs=1e-6)
    assert prices == sorted(prices)
    assert prices[-1] > 2.2
    with pytest.raises(mm.ModelMixError, match="some of the variance must be Gaussian"):
        mixing_price.limit_price(1.0)


@given(share=st.floats(0.05, 0.99), s=st.floats(0.05, 1.0))
@settings(max_examples=25)
def test_away_from_the_limit_mixing_is_dearer(share, s):
    """The divergence of a larger shift exceeds its quadratic part, because the uniform's fourth cumulant is negative;
    the Gaussian's is its quadratic part."""
    law = Mixed(Gaussian(math.sqrt(1 - share)), math.sqrt(12 * share))
    assert 2 * loss_moments(law, s).mean / s**2 >= mixing_price.fisher_information(law) * (1 - 1e-5)


@given(
    share=st.floats(0.05, 0.99),
    log_epsilon=st.floats(-1, 2.3),
    log_q=st.floats(-3, 0),
    steps=st.integers(1, 10_000),
    p=st.integers(1, 5000),
    log_delta=st.floats(-8, -2),
)
@settings(max_examples=25)
def test_no_region_favours_mixing(share, log_epsilon, log_q, steps, p, log_delta):
    """Random settings; prices are accurate to 1e-4 each way."""
    setting = {"epsilon": 10**log_epsilon, "delta": 10**log_delta, "sample_rate": 10**log_q, "steps": steps, "p": p}
    if mixing_price.std_needed(0.0, **setting) < 1e-3:
        return  # the target is met by next to no noise
    assert mixing_price.price(share, **setting) >= mixing_price.limit_price(share) * (1 - 3e-4)


def test_the_corner_where_a_uniform_wins_on_one_coordinate_and_loses_on_two():
    """Total variation at epsilon = 0 of one step: standard deviation times total variation, small shifts."""
    width = 1e4
    std = width / math.sqrt(12)
    one, two = 1 / width, 1 - (1 - math.sqrt(0.5) / width) ** 2
    gaussian = 2 * stats.norm.cdf(0.5 / std) - 1  # rotation invariant: one coordinate or two
    assert (round(std * one, 3), round(std * two, 3), round(std * gaussian, 3)) == (0.289, 0.408, 0.399)


def test_with_many_coordinates_the_price_is_the_limit():
    setting = {"epsilon": 1.0, "delta": 1e-5, "sample_rate": 0.1, "steps": 1000, "p": 10**6}
    for share in (0.3, 0.9):
        assert mixing_price.price(share, **setting) == pytest.approx(mixing_price.limit_price(share), rel=5e-4)


def test_the_map_agrees_with_the_single_comparison():
    """At the paper's ResNet20 setting, by moments on both sides."""
    ours = mm.Mechanism(0.335, 0.03, 11.25, 100)
    share = (11.25**2 / 12) / ours.total_std**2
    epsilon = mm.epsilon(ours, 1e-5, steps=3400, by="renyi")
    cells = mixing_price.price_map(share=share, epsilons=[epsilon], runs=[(0.03, 3400)], truncations=[100])
    plain = mm.calibrate(epsilon=epsilon, delta=1e-5, sample_rate=0.03, steps=3400, by="renyi")
    assert cells[0].price == pytest.approx(ours.total_std / plain.noise_multiplier, rel=5e-4)
    assert cells[0].price > 2.2


def test_the_command(run, tmp_path, monkeypatch):
    monkeypatch.setattr(mixing_price, "EPSILONS", (2.0, 8.0))
    monkeypatch.setattr(mixing_price, "SHARES", (0.3, 0.9))
    small = mixing_price.price_map

    def fewer(**options: float) -> list[mixing_price.Cell]:
        return small(epsilons=(2.0, 8.0), runs=((0.1, 100), (1.0, 1)), **options)

    monkeypatch.setattr(mixing_price, "price_map", fewer)
    code, out, _ = run("compare", "--map", "--out", tmp_path / "worth.png", "--json")
    data = json.loads(out)
    assert code == 0
    assert len(data["cells"]) == 2 * 2 * 3
    assert min(cell["price"] for cell in data["cells"]) > 1
    assert (tmp_path / "worth.svg").exists()
    code, text, _ = run("compare", "--map", "--out", tmp_path / "worth.png")
    assert "0 favour mixing" in text
    code, _, err = run("compare", "--map", "--z", 1)
    assert code == 2
    assert "leave them out" in err

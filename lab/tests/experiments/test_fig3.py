"""Figure 3 of the paper."""

from __future__ import annotations

import json

import mpmath as mp
import numpy as np
import pytest

import modelmix as mm
from modelmix.accounting.moments import sampled_log_moments
from modelmix_lab.experiments import fig3


def test_the_nine_numbers_of_the_paper():
    nine = [point for point in fig3.points() if point.paper is not None]
    assert len(nine) == 9
    for point in nine:
        assert point.ours == pytest.approx(point.paper, rel=0.03)
        assert point.proved <= point.proved_classic
        mechanism = fig3.mechanism_of(point.sample_rate, point.tau, point.p, fig3.noise_multiplier(point.sample_rate))
        assert point.proved == mm.epsilon(mechanism, 1e-5, steps=5000)
        assert point.proved < point.paper, "proved, and below what the paper prints"


def test_plain_dp_sgd_has_epsilon_200():
    for q in fig3.RATES:
        plain = mm.Mechanism(fig3.noise_multiplier(q), q)
        assert fig3.fractional_curve(plain, np.array([fig3.STEPS]))[0] == pytest.approx(200, abs=0.01)


@pytest.mark.parametrize("alpha", [1.25, 1.5, 2.5, 4.5])
def test_fractional_orders_agree_with_thirty_digits(alpha):
    """dp-accounting's own fractional orders are upper bounds that can be several per cent off, so not the oracle."""
    with mp.workdps(30):
        q = mp.mpf(0.02)
        integrand = lambda x: mp.npdf(x) * (1 - q + q * mp.exp(x - mp.mpf(1) / 2)) ** alpha  # noqa: E731
        truth = float(mp.log(mp.quad(integrand, [-30, -10, -4, -1, 0, 1, 2, 3, 4, 5, 6, 8, 12, 30])))
    assert sampled_log_moments(mm.Gaussian(1.0), 1.0, np.array([alpha]), 0.02)[0] == pytest.approx(truth, rel=1e-11)


def test_reproduce_prints_and_draws(run, tmp_path):
    code, out, _ = run("reproduce", "fig3", "--out", tmp_path)
    assert code == 0
    for number in (
        "57.2",
        "40.4",
        "31.7",
        "17.9",
        "9.0",
        "5.4",
        "15.3",
        "7.9",
        "4.8",
        "0.04",
        "no numerical error added",
        "proved",
    ):
        assert number in out
    assert (tmp_path / "fig3.png").read_bytes().startswith(b"\x89PNG")
    assert b"<svg" in (tmp_path / "fig3.svg").read_bytes()
    assert len(json.loads((tmp_path / "fig3.json").read_text())["points"]) == 18

"""Agreement with independently computed epsilons, which are those of whole orders."""

from __future__ import annotations

import numpy as np
import pytest
from reference import reference_cases

import modelmix as mm
from modelmix.accounting import accountant


@pytest.fixture(autouse=True)
def whole_orders(monkeypatch):
    """Sampled moments at real orders prove less still."""
    monkeypatch.setattr(accountant, "real_curve", lambda mechanism: None)


@pytest.mark.parametrize("case", reference_cases(), ids=lambda c: f"z{c['noise_multiplier']}-w{c['mixing_width']}")
def test_reference_case(case, monkeypatch):
    mechanism = mm.Mechanism(case["noise_multiplier"], case["sample_rate"], case["mixing_width"], case["p"])
    at = {"delta": case["delta"], "steps": case["steps"]}
    classic = mm.guarantee(mechanism, **at, by="classic")
    improved = mm.guarantee(mechanism, **at, by="renyi")
    assert classic.epsilon == pytest.approx(case["epsilon_classic"], abs=5.1e-7)  # as printed in the file
    assert classic.order == case["order_classic"]
    assert improved.epsilon == pytest.approx(case["epsilon_improved"], rel=1e-3)
    assert improved.epsilon <= case["epsilon_improved"] + 1e-6
    monkeypatch.undo()
    assert mm.guarantee(mechanism, **at, by="renyi").epsilon <= improved.epsilon
    orders = [float(order) for order in case["rdp_per_step"]]
    np.testing.assert_allclose(mm.rdp(mechanism, orders), list(case["rdp_per_step"].values()), rtol=1e-8)


@pytest.mark.parametrize(
    ("epsilon", "classic", "improved", "plain_classic", "plain_improved"),
    [
        (4, 0.958, 0.781, 2.437, 2.198),
        (5, 0.667, 0.560, 2.027, 1.854),
        (6, 0.506, 0.440, 1.759, 1.634),
        (7, 0.410, 0.357, 1.574, 1.463),
        (8, 0.342, 0.307, 1.429, 1.345),
    ],
)
def test_noise_of_the_resnet_experiments(epsilon, classic, improved, plain_classic, plain_improved):
    """CIFAR-10, q = 0.03, T = 3500, omega = 11.25, p = 100: multipliers computed elsewhere to three digits."""
    target = {"epsilon": epsilon, "delta": 1e-5, "sample_rate": 0.03, "steps": 3500}
    mixing = {"mixing_width": 11.25, "p": 100}
    found = [
        mm.calibrate(**target, **mixing, by="classic").noise_multiplier,
        mm.calibrate(**target, **mixing, by="renyi").noise_multiplier,
        mm.calibrate(**target, by="classic").noise_multiplier,
        mm.calibrate(**target, by="renyi").noise_multiplier,
    ]
    np.testing.assert_allclose(found, [classic, improved, plain_classic, plain_improved], atol=1.1e-3)

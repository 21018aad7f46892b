"""What a step adds has the law its mechanism claims.

(midpoint - w_k)/eta - clipped mean, in units of clip/B, is compared with the mechanism's law by the test of Kolmogorov
and Smirnov, on whole training steps. The threshold gives a false alarm once in 10^6 draws; the seeds are fixed, so the
verdict is always the same. The same test must see noise that is three per cent too small.
"""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from planned import Trainer
from scipy import stats
from torch import nn

import modelmix as mm
from modelmix.training import rules, step

STEPS, WIDTH = 40, 140
D = WIDTH * WIDTH


class Push(nn.Module):
    """The gradient of every sample is its own input, a vector of d numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.zeros(D))

    def forward(self, x):
        return x @ self.w[:, None]


def product(outputs, targets):
    return outputs.sum()


def cdf(mechanism: mm.Mechanism):
    """The law of noise plus uniform: the average of the noise's own distribution over the width, in closed form."""
    z, omega = mechanism.noise_multiplier, mechanism.mixing_width

    def integral(t):
        if mechanism.law == "gaussian":
            return t * stats.norm.cdf(t / z) + z * stats.norm.pdf(t / z)
        return np.where(t < 0, 0.5 * z * np.exp(np.minimum(t, 0) / z), t + 0.5 * z * np.exp(-np.maximum(t, 0) / z))

    def mixed(x):
        return (integral(x + omega / 2) - integral(x - omega / 2)) / omega

    plain = stats.norm(scale=z).cdf if mechanism.law == "gaussian" else stats.laplace(scale=z).cdf
    return mixed if omega > 0 else plain


MECHANISMS = {
    "gaussian": (mm.Mechanism(0.8, 1.0, 1.6), "mix"),
    "gaussian, p": (mm.Mechanism(0.4, 1.0, 1.2, p=9), "mix"),
    "laplace": (mm.Mechanism(0.7, 1.0, 1.5, law="laplace"), "mix"),
    "alternating": (mm.Mechanism(0.8, 1.0, 1.6), "alternate"),
    "plain": (mm.Mechanism(1.3, 1.0), "plain"),
    "plain laplace": (mm.Mechanism(1.3, 1.0, law="laplace"), "plain"),
    "average": (mm.Mechanism(1.3, 1.0), "average"),
}


def residuals(mechanism, rule, **options) -> np.ndarray:
    """Everything the steps added, over clip/B, where the gap was padded."""
    torch.manual_seed(1)
    x = torch.randn(3, D)
    clip, eta = 2.0, 0.25
    trainer = Trainer(Push(), product, (x, torch.zeros(3)), mechanism, clip, eta, rule=rule, seed=5, **options)
    if mechanism.law == "gaussian":
        each = x.double() / x.double().norm(dim=1, keepdim=True)
    else:
        each = x.double() / x.double().abs().sum(1, keepdim=True)
    bound = mechanism.coordinate_bound
    mean = clip * each.clamp(-bound, bound).sum(0) / 3  # q = 1: everybody is in every draw
    unit = clip / 3
    tau = mechanism.mixing_width * unit * eta
    out = []
    for _ in range(STEPS):
        before = trainer.state
        trainer.run(1, progress=False)
        centre = before.last if rule == "plain" else 0.5 * (before.last + before.previous)
        added = ((centre - trainer.state.last) / eta - mean) / unit
        padded = (before.last - before.previous).abs() < tau if mechanism.mixed else torch.ones(D, dtype=torch.bool)
        out.append(added[padded].numpy())
    return np.concatenate(out)


def surprise(sample, mechanism) -> float:
    """The statistic over its threshold: above 1 has a probability of 10^-6."""
    distance = stats.ks_1samp(sample, cdf(mechanism)).statistic
    return distance * math.sqrt(len(sample)) / math.sqrt(-0.5 * math.log(0.5e-6))


@pytest.mark.parametrize("name", MECHANISMS)
def test_a_step_adds_the_law_of_its_mechanism(name):
    mechanism, rule = MECHANISMS[name]
    sample = residuals(mechanism, rule)
    assert len(sample) > 3e5
    assert surprise(sample, mechanism) < 1
    assert abs(np.std(sample) / mechanism.total_std - 1) < 0.01


@pytest.mark.parametrize("name", MECHANISMS)
def test_noise_three_per_cent_too_small_is_seen(name, monkeypatch):
    mechanism, rule = MECHANISMS[name]
    honest = step.noise
    monkeypatch.setattr(step, "noise", lambda *arguments: 0.97 * honest(*arguments))
    assert surprise(residuals(mechanism, rule), mechanism) > 1


def test_mixing_left_out_is_seen(monkeypatch):
    mechanism, rule = MECHANISMS["gaussian"]
    honest = rules.padded_gap

    def one_half_unmixed(*arguments):
        gap = honest(*arguments)
        gap[: D // 2] *= 1e-3
        return gap

    monkeypatch.setattr(rules, "padded_gap", one_half_unmixed)
    monkeypatch.setattr(step, "_is_mixed", lambda *arguments: None)
    assert surprise(residuals(mechanism, rule), mechanism) > 1


def test_coordinates_and_steps_are_independent():
    mechanism, rule = MECHANISMS["plain"]
    sample = residuals(mechanism, rule).reshape(STEPS, D) / mechanism.noise_multiplier
    bound = 5.3 / math.sqrt(sample.size)  # of a standard Gaussian: once in 10^7
    for shifted in (np.roll(sample, 1, 0), np.roll(sample, 1, 1), np.roll(sample, D // 2, 1)):
        assert abs(np.mean(sample * shifted)) < bound


def test_the_paper_padding_has_a_wider_gap_and_the_same_midpoint():
    mechanism, _ = MECHANISMS["gaussian"]
    sample = residuals(mechanism, "mix", padding="paper")
    assert np.std(sample) > 1.02 * mechanism.total_std
    assert abs(np.mean(sample)) < 5.3 * np.std(sample) / math.sqrt(len(sample))

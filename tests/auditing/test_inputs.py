"""Input canaries seen through the final model only."""

from __future__ import annotations

import torch
from torch import nn

import modelmix as mm
from modelmix.auditing.inputs import audit_inputs, random_inputs

GENERATOR = torch.Generator().manual_seed(0)
X, Y = torch.randn(100, 60, generator=GENERATOR), torch.arange(100) % 8


def bound(mechanism, **options):
    torch.manual_seed(1)
    model = nn.Linear(60, 8)
    settings = {"steps": 120, "clip": 1.0, "lr": 2.0, "canaries": 60, "guesses": 40, **options}
    return audit_inputs(model, (X[:20], Y[:20]), 8, mechanism, 1e-5, **settings)


def test_a_private_model_tells_less_than_it_claims():
    mechanism = mm.Mechanism(1.0, 0.5, 1.0)
    for seed in range(3):
        assert bound(mechanism, seed=seed, confidence=0.999).epsilon < mm.epsilon(mechanism, 1e-5, steps=120)


def test_a_model_without_noise_tells_who_was_there():
    """Almost no noise: memorised canaries are found, far beyond what epsilon = 0.5 would allow."""
    assert bound(mm.Mechanism(1e-6, 1.0), clip=100.0).epsilon > 0.5


def test_canaries_look_like_data_and_hold_none_of_it():
    pixels = torch.zeros(5, 1, 4, 4, dtype=torch.uint8)
    made = random_inputs(pixels, 7, GENERATOR)
    assert made.shape == (7, 1, 4, 4)
    assert made.dtype == torch.uint8
    assert made.float().std() > 30
    assert random_inputs(X, 3, GENERATOR).dtype == torch.float32

"""Our mechanisms under the best attack: the bound stays below the claim, and sees at least half of it at q = 1."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

import modelmix as mm
from modelmix.accounting.guarantee import guarantee
from modelmix.auditing.mechanism import audit_mechanism, canaries, scores

DELTA = 1e-3
MECHANISMS = {
    "plain Gaussian": mm.Mechanism(1.0, 1.0),
    "Laplace": mm.Mechanism(0.8, 1.0, law="laplace"),
    "ModelMix": mm.Mechanism(0.7, 1.0, 2.0),
    "ModelMix, narrow": mm.Mechanism(1.0, 1.0, 0.3),
    "ModelMix, p = 4": mm.Mechanism(0.5, 1.0, 3.0, p=4),
    "ModelMix-Laplace": mm.Mechanism(0.9, 1.0, 1.5, law="laplace"),
    "embedded": mm.EmbeddingMechanism(1.3, 1.0),
    "embedded, mixed": mm.EmbeddingMechanism(1.2, 1.0, 3.0),
}


def claim(mechanism, delta, steps):
    return guarantee(mm.Ledger().add(mechanism, steps), delta).epsilon


@pytest.mark.parametrize("steps", [1, 3])
@pytest.mark.parametrize("name", MECHANISMS)
def test_the_bound_is_below_the_claim_and_sees_half_of_it(name, steps):
    mechanism = MECHANISMS[name]
    claimed = claim(mechanism, DELTA, steps)
    found = [
        audit_mechanism(mechanism, DELTA, steps=steps, trials=150_000, canary=canary, seed=3, confidence=0.999).epsilon
        for canary in canaries(mechanism)
    ]
    assert max(found) < claimed
    assert max(found) > 0.5 * claimed


@pytest.mark.parametrize("name", MECHANISMS)
def test_with_subsampling(name):
    mechanism = replace(MECHANISMS[name], sample_rate=0.2)
    found = audit_mechanism(mechanism, 1e-2, steps=5, trials=100_000, seed=4, confidence=0.999).epsilon
    assert 0.1 < found < claim(mechanism, 1e-2, 5)


@pytest.mark.parametrize(
    ("factor", "name"), [(0.9, "plain Gaussian"), (0.9, "Laplace"), (0.7, "ModelMix"), (0.8, "embedded")]
)
def test_noise_that_is_too_small_is_caught(factor, name):
    """The attacker still believes the claimed law; what is drawn is quieter."""
    mechanism = MECHANISMS[name]
    quiet = replace(mechanism, noise_multiplier=factor * mechanism.noise_multiplier)
    if mechanism.mixed:
        quiet = replace(quiet, mixing_width=factor * mechanism.mixing_width)
    found = audit_mechanism(mechanism, 1e-2, trials=400_000, seed=5, actual=quiet).epsilon
    assert found > claim(mechanism, 1e-2, 1)


def test_the_score_is_a_likelihood_ratio():
    """The mean of e^score over the world without the canary is 1, whatever the mechanism."""
    rng = np.random.default_rng(6)
    for mechanism in (
        mm.Mechanism(1.0, 0.3, 1.0, p=4),
        mm.Mechanism(1.5, 1.0, law="laplace"),
        mm.Mechanism(2.0, 0.5),
        mm.EmbeddingMechanism(1.5, 0.5, 2.0, p=4),
    ):
        score = scores(mm.Ledger().add(mechanism, 2), 200_000, False, rng)
        spread = np.std(np.exp(score)) / np.sqrt(len(score))
        assert abs(np.mean(np.exp(score)) - 1) < 5 * spread


def test_spreading_the_gradient_can_be_worse_for_one_delta_but_never_for_the_claim():
    """The one-hot pair is worst for Renyi orders, not for every delta; the claim covers both."""
    mechanism = mm.Mechanism(0.5, 1.0, 5.0)
    claimed = claim(mechanism, 0.1, 1)
    for canary in canaries(mechanism, spread=2):
        assert audit_mechanism(mechanism, 0.1, trials=300_000, canary=canary, seed=7).epsilon < claimed

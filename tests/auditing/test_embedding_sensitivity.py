"""One sample more or less, in the two sums that an embedded step releases, on real gradients of real images."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

import modelmix as mm
from modelmix.data import load
from modelmix.gradients import Batch, Engine
from modelmix.gradients.parameters import FlatParameters
from modelmix.models import Pixels, build
from modelmix.training import random_labels
from modelmix.training.embedding import Embedding, EmbeddingClip, find_basis

N, C0, C1, P = 48, 0.5, 0.2, 25


@pytest.fixture(scope="module")
def released():
    """A function from a clip and some of the images to (sum of embeddings, sum of residuals, the two together)."""
    data = load("fashion-mini").train
    torch.manual_seed(0)
    model = Pixels(build("cnn", (1, 28, 28), 10))
    flat = FlatParameters(model)
    parameters = flat.views(flat.read())
    engine = Engine(model, nn.CrossEntropyLoss(), (data.x[:3], data.y[:3]))

    public = Embedding((data.x[-64:], random_labels(64, 10)), 40, 3)
    chunks = (engine.gradients(parameters, Batch(x, y)) for x, y, _ in public.chunks(16, torch.device("cpu")))
    basis = find_basis(public.layout(flat.size), chunks, torch.Generator().manual_seed(0))
    private = engine.gradients(parameters, Batch(data.x[:N], data.y[:N]))

    def sums(clip, chosen):
        e, part = clip.sum(private, basis, torch.tensor([float(i in chosen) for i in range(N)]))
        return e, part.total, basis.reconstruct(e) + part.total

    return sums


@pytest.mark.parametrize(
    "mechanism", [mm.EmbeddingMechanism(1.0, 0.1), mm.EmbeddingMechanism(1.0, 0.1, 3.0, P)], ids=["plain", "mixed"]
)
def test_adding_one_sample_moves_either_sum_by_its_clip_at_most(released, mechanism):
    clip = EmbeddingClip.of(mechanism, C1)
    assert (clip.c0, clip.c1) == (C0, C1)
    everyone = set(range(N))
    base = released(clip, everyone)
    most = torch.zeros(3)
    root = math.sqrt(mechanism.p)
    for i in range(N):
        e, r, whole = (a - b for a, b in zip(base, released(clip, everyone - {i}), strict=True))
        assert e.norm() <= C0
        assert r.norm() <= C1
        assert r.abs().max() <= C1 / root
        # Both of the account's pictures of a step: the pair, and the whole.
        assert math.hypot(e.norm() / C0, r.norm() / C1) <= mechanism.l2_sensitivity
        assert whole.norm() <= clip.c
        assert whole.abs().max() <= clip.c / root
        most = torch.maximum(most, torch.stack([e.norm() / C0, r.norm() / C1, whole.norm() / math.hypot(C0, C1)]))
    assert most[0] > 0.999, "the bound is reached"
    assert most[1] > (0.999 if mechanism.p == 1 else 0.5)
    assert most[2] > 0.9

"""What only an accelerator can show: compiled chunks that are replayed, and their memory."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from planned import Trainer
from scipy import stats
from torch import nn

from modelmix import Mechanism, Performance
from modelmix.gradients import Batch, Engine
from modelmix.gradients.clip import Clip
from modelmix.gradients.parameters import FlatParameters
from modelmix.training import Randomness
from modelmix.training.embedding import Embedding, EmbeddingClip, columns, find_basis
from modelmix.training.keystream import by_torch, chacha20

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1, bias=False),
        nn.GroupNorm(4, 16),
        nn.ReLU(),
        nn.Conv2d(16, 32, 3, 2, 1),
        nn.GroupNorm(32, 32),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(32 * 64, 10),
    ).to("cuda")


def batch(m: int) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(m, 3, 16, 16, device="cuda"), torch.randint(0, 10, (m,), device="cuda")


def views(model: nn.Module, factor: float = 1.0) -> dict[str, torch.Tensor]:
    flat = FlatParameters(model)
    return flat.views(factor * flat.read())


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_a_replayed_chunk_is_the_chunk(precision):
    model, ones = network(), torch.ones(64, dtype=torch.float64, device="cuda")
    x, y = batch(64)
    compiled, plain = (
        Engine(model, F.cross_entropy, (x, y), precision=precision, compiled=way) for way in (True, False)
    )
    near = 1e-3 if precision == "float32" else 0.05
    for factor, c in ((1.0, 0.1), (1.1, 0.1), (1.1, 3.0)):  # other weights, another clip
        x, y = batch(64)
        ones[-1] = 1.0 - ones[-1]  # and padding
        mine = compiled(views(model, factor), Batch(x, y, ones), Clip(c, 100))
        right = plain(views(model, factor), Batch(x, y, ones), Clip(c, 100))
        assert (mine.total - right.total).norm() <= near * right.total.norm()
        assert (mine.norms - right.norms).norm() <= near * right.norms.norm()
    # Kept results are not written over by later replays.
    kept = mine.total.clone()
    compiled(views(model), *batch(64), ones, Clip(1.0, 100))
    assert torch.equal(kept, mine.total)


@pytest.mark.parametrize("p", [1, 100])
def test_the_bounds_hold_for_what_a_compiled_chunk_sums(p):
    model, clip = network(), Clip(1e-2, p)
    x, y = batch(16)
    engine = Engine(model, F.cross_entropy, (x, y), precision="bfloat16", compiled=True)
    sums = []
    for i in range(16):
        weights = torch.zeros(16, dtype=torch.float64, device="cuda")
        weights[i] = 1
        sums.append(engine(views(model), Batch(x, y, weights), clip).total)
    each = torch.stack(sums)
    assert float(each.norm(dim=1).max()) <= clip.c
    assert float(each.abs().max()) <= clip.coordinate_bound
    whole = engine(views(model), Batch(x, y, torch.ones_like(weights)), clip).total
    torch.testing.assert_close(each.sum(0), whole, rtol=1e-9, atol=1e-12)


def test_a_basis_is_found_in_float64():
    """Products of which cannot be summed in less."""
    model, (x, y) = network(), batch(32)
    engine = Engine(model, F.cross_entropy, (x, y), precision="float64", compiled=True)
    public = engine.gradients(views(model), Batch(x, y))
    layout = Embedding((x, y), 20, 3).layout(FlatParameters(model).size)
    for _, v in find_basis(layout, [public], torch.Generator("cuda").manual_seed(0), engine.precision).parts:
        one = torch.eye(v.shape[1], dtype=v.dtype, device="cuda")
        torch.testing.assert_close(v.T @ v, one, rtol=0, atol=2.0**-14)


@pytest.mark.parametrize("precision", [None, "bfloat16"])
@pytest.mark.parametrize("clip", [EmbeddingClip(0.05, 0.02), EmbeddingClip(0.05, 0.02, 25, math.hypot(0.05, 0.02))])
def test_the_bounds_hold_for_embedded_gradients(clip, precision):
    """In float32 with factors of 11 bits, whatever the basis lost by it, or by public gradients in bfloat16."""
    model = network()
    x, y = batch(32)
    engine = Engine(model, F.cross_entropy, (x, y), precision=precision, compiled=True)
    plain = Engine(model, F.cross_entropy, (x, y), precision=precision, compiled=False)
    flat = FlatParameters(model)
    mine, right = (columns(e.gradients(views(model), Batch(x, y)), slice(0, flat.size)) for e in (engine, plain))
    assert float((mine - right).norm()) <= (0.02 if precision else 1e-3) * float(right.norm())
    generator = torch.Generator("cuda").manual_seed(0)
    layout = Embedding((x, y), 20, 3).layout(flat.size)
    basis = find_basis(layout, [engine.gradients(views(model), Batch(x, y))], generator, engine.precision)
    for _, v in basis.parts:
        one = torch.eye(v.shape[1], dtype=v.dtype, device="cuda")
        torch.testing.assert_close(v.T @ v, one, rtol=0, atol=2.0**-14)
    gradients = engine.gradients(views(model), Batch(x, y))
    root = math.sqrt(clip.p)
    for chosen in torch.eye(32, dtype=torch.float64, device="cuda"):
        e, part = clip.sum(gradients, basis, chosen)
        whole = basis.reconstruct(e) + part.total
        assert 0 < float(e.norm()) <= clip.c0
        assert float(part.total.norm()) <= clip.c1
        assert float(part.total.abs().max()) <= clip.c1 / root
        assert float(whole.norm()) <= clip.c
        assert float(whole.abs().max()) <= clip.c / root


def test_memory_does_not_grow_with_the_batch():
    model, ones = network(), torch.ones(64, dtype=torch.float64, device="cuda")
    x, y = batch(64)
    engine = Engine(model, F.cross_entropy, (x, y), compiled=True)
    engine(views(model), Batch(x, y, ones), Clip(1.0, 100))
    peaks = []
    for chunks in (2, 20):
        torch.cuda.reset_peak_memory_stats()
        before, total = torch.cuda.memory_allocated(), 0
        for _ in range(chunks):
            total = total + engine(views(model), Batch(x, y, ones), Clip(1.0, 100)).total
        torch.cuda.synchronize()
        peaks.append(torch.cuda.max_memory_allocated() - before)
    assert peaks[1] <= 1.05 * peaks[0]


@pytest.mark.parametrize("count", [1, 9, 300_001])
def test_noise_of_the_device_is_what_torch_makes_of_the_same_key(count):
    key = bytes(range(1, 33))
    assert torch.equal(chacha20(key, count, "cuda").cpu(), by_torch(key, -(-count // 8), "cpu")[:count])


def test_the_law_of_noise_on_the_device():
    step = Randomness(5).step()
    noise, mixing = step.gaussian("noise", 100_001, "cuda"), step.uniform("mixing", 100_001, "cuda")
    assert noise.dtype == mixing.dtype == torch.float64
    assert stats.kstest(noise.cpu().numpy(), "norm").pvalue > 1e-6
    assert stats.kstest(mixing.cpu().numpy(), "uniform").pvalue > 1e-6


def test_training_on_the_device_spends_what_it_spends_elsewhere():
    x, y = batch(256)
    mechanism = Mechanism(1.0, 0.25, mixing_width=4.0, p=100)
    ledgers = []
    for device, precision in (("cuda", "bfloat16"), ("cpu", None)):
        trainer = Trainer(
            network(),
            F.cross_entropy,
            (x.cpu(), y.cpu()),
            mechanism,
            1.0,
            0.1,
            seed=1,
            performance=Performance(device=device, precision=precision, chunk=64),
        )
        trainer.run(3, progress=False)
        ledgers.append(trainer.ledger)
        assert bool(torch.isfinite(trainer.state.last).all())
    assert ledgers[0] == ledgers[1]

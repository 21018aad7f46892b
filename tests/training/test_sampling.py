"""Poisson draws at exactly q, one a step, in chunks of one shape."""

from __future__ import annotations

import gc
import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from planned import Trainer
from scipy import stats
from torch import nn
from torch.utils.data import Dataset

import modelmix as mm
from modelmix.training import Performance, Randomness, sampling
from modelmix.training.randomness import StepRandomness
from modelmix.training.sampling import Ahead, as_source, pieces
from modelmix.training.sending import sent


class Squares(Dataset):
    """A map-style data set whose items tell which sample they are."""

    def __init__(self, n: int) -> None:
        self.n = n

    def __len__(self) -> int:
        return self.n

    def __getitem__(self, i: int):
        return torch.tensor([float(i)]), torch.tensor(float(i * i))


class Stream(torch.utils.data.IterableDataset):
    def __iter__(self):
        return iter([])


def draws(randomness: Randomness, n: int, q: float, steps: int) -> list[torch.Tensor]:
    return [r.poisson_indices("sampling", n, q) for _, r in zip(range(steps), randomness.coming_steps(), strict=False)]


def test_every_sample_has_probability_q_and_its_own_coin():
    n, q, steps = 500, 0.137, 2000
    hits = torch.zeros(steps, n)
    for k, indices in enumerate(draws(Randomness(7), n, q, steps)):
        hits[k, indices] = 1
    total = int(hits.sum())
    assert 1e-7 < stats.binom.cdf(total, n * steps, q) < 1 - 1e-7
    # Counts of samples and sizes of draws are binomial: their variances say so. Bounds of once in 10^6.
    for counts, trials in ((hits.sum(0), steps), (hits.sum(1), n)):
        spread = float(((counts - trials * q) ** 2).sum() / (trials * q * (1 - q)))
        assert 1e-6 < stats.chi2.cdf(spread, len(counts)) < 1 - 1e-6
    # One step tells nothing of the next.
    between = float((hits[1:] - q).flatten().dot((hits[:-1] - q).flatten())) / (
        q * (1 - q) * math.sqrt(hits[1:].numel())
    )
    assert abs(between) < 5


@pytest.mark.parametrize("q", [1e-9, 1e-3, 0.03, 1500 / 50000, 1 / 3, 0.999999])
def test_the_rate_is_exact(q, monkeypatch):
    """The threshold of the coin, in units of 2^-63."""
    threshold = int(q * 2**63)
    assert 0 <= q - threshold / 2**63 < 2**-60
    with monkeypatch.context() as patch:
        words = torch.tensor([threshold - 1, threshold, threshold - 1 - 2**63, threshold - 2**63])
        patch.setattr(StepRandomness, "_words", lambda *_: words)
        assert draws(Randomness(1), 4, q, 1)[0].tolist() == [0, 2]
    assert draws(Randomness(1), 10, 1.0, 1)[0].tolist() == list(range(10))


@given(st.integers(0, 40), st.integers(1, 17))
def test_chunks_cover_a_draw_and_have_one_shape(size, chunk):
    indices = torch.arange(100, 100 + size)
    parts = list(pieces(indices, chunk))
    bare = list(pieces(indices, chunk, pad=False))
    assert torch.equal(torch.cat([index for index, _ in bare] or [indices[:0]]), indices)
    assert all(bool((weights == 1).all()) and len(weights) == len(index) <= chunk for index, weights in bare)
    assert len(parts) == math.ceil(size / chunk)
    assert all(index.shape == weights.shape == (chunk,) for index, weights in parts)
    kept = torch.cat([index[weights == 1] for index, weights in parts]) if parts else indices[:0]
    assert torch.equal(kept, indices)
    assert all(((w == 0) | (w == 1)).all() for _, w in parts)


@pytest.mark.parametrize("workers", [0, 2])
def test_a_dataset_gives_the_same_samples_as_tensors(workers):
    n, chunk = 57, 8
    wanted = draws(Randomness(3), n, 0.05, 12)
    wanted[0] = wanted[0][:0]
    wanted[-1] = wanted[-1][:0]
    wanted.append(torch.arange(n))
    wanted += [torch.arange(0)] * 2  # ends in empty draws, which are steps as well
    seen = []
    for chunks in as_source(Squares(n), workers).steps(iter(wanted), chunk):
        inputs = [c.inputs[c.weights == 1].flatten() for c in chunks]
        seen.append(torch.cat(inputs).long() if inputs else torch.arange(0))
    assert len(seen) == len(wanted)
    assert all(torch.equal(a, b) for a, b in zip(seen, wanted, strict=True))


def sums(train_set, q, steps, **performance):
    """The states of a run whose only gradient is a constant: one for every sample drawn."""
    mechanism = mm.Mechanism(1e-9, q)
    model = nn.Linear(1, 1, bias=False)
    nn.init.zeros_(model.weight)
    trainer = Trainer(
        model,
        lambda outputs, targets: 1e3 * (outputs / targets).sum(),
        train_set,
        mechanism,
        clip=1.0,
        lr=1.0,
        rule="plain",
        seed=2,
        performance=Performance(device="cpu", **performance),
    )
    sizes = [len(indices) for indices in draws(Randomness(2), len(train_set[0]), q, steps)]
    states = [0.0]
    for _ in range(steps):
        trainer.run(1, progress=False)
        states.append(float(trainer.state.last))
    return np.array(sizes), -np.diff(states), trainer


@pytest.mark.parametrize("chunk", [1, 7, 64, None])
def test_the_sum_is_divided_by_the_expected_batch(chunk):
    n, q = 40, 0.05
    x = torch.linspace(1, 2, n)[:, None]
    sizes, moved, trainer = sums((x, x), q, 60, chunk=chunk)
    assert 0 in sizes  # empty draws happen
    assert len(set(sizes)) > 3
    np.testing.assert_allclose(moved, sizes / (q * n), rtol=1e-5, atol=1e-6)
    assert trainer.ledger.steps == 60  # and count


def test_an_empty_draw_adds_noise():
    x = torch.ones(4, 1)
    with pytest.warns(UserWarning, match="most draws will be empty"):
        trainer = Trainer(nn.Linear(1, 1), nn.MSELoss(), (x, x), mm.Mechanism(1.0, 1e-9), clip=1.0, lr=0.1, seed=1)
    before = trainer.state.last
    trainer.run(1, progress=False)
    assert trainer.ledger.steps == 1
    assert float((trainer.state.last - before).abs().min()) > 0


@pytest.mark.parametrize(
    ("bad", "error"),
    [
        (torch.utils.data.DataLoader(Squares(5)), mm.UnprovedError),
        (Stream(), mm.UnprovedError),
        ((torch.zeros(3, 1), torch.zeros(4)), mm.ModelMixError),
        ((torch.zeros(0, 1), torch.zeros(0)), mm.ModelMixError),
        ((torch.zeros(3, 1), torch.tensor(1.0)), mm.ModelMixError),
        (Squares(0), mm.ModelMixError),
        (17, mm.ModelMixError),
        (("a", "b"), mm.ModelMixError),
    ],
)
def test_what_cannot_be_drawn_from_is_refused(bad, error):
    with pytest.raises(error):
        as_source(bad)


def test_randomness_is_never_reused_and_never_goes_back():
    r = Randomness(1)
    step = r.step()
    step.gaussian("noise", 3)
    with pytest.raises(mm.ModelMixError, match="never reused"):
        step.uniform("noise", 3)
    seen = set()
    for _ in range(100):
        key = r.state()["key"]
        assert key not in seen
        seen.add(key)
        r.advance()
    assert Randomness().state()["key"] != Randomness().state()["key"]
    assert Randomness(1).state() == Randomness(1).state()
    assert Randomness(1).seeded
    assert not Randomness().seeded


def test_a_checkpoint_holds_no_key_of_a_step():
    r = Randomness(1)
    for _ in range(3):
        before, used = r.state()["key"], r.step()._key.hex()
        r.advance()
        assert len({before, used, r.state()["key"]}) == 3


def test_draws_made_early_are_the_same_draws_in_the_same_order():
    made = []

    def counted():
        for i in range(5):
            made.append(i)
            yield torch.tensor([i])

    ahead = Ahead(counted())
    found = []
    for draw in ahead:
        found.append(int(draw))
        for _ in range(int(draw)):  # never, once, more than once and at the end
            ahead.look()
        assert len(made) == len(found) + (0 < int(draw) < 4)
    assert found == made == [0, 1, 2, 3, 4]


def some_trainer(n: int = 40, **options) -> Trainer:
    torch.manual_seed(0)
    data = torch.randn(n, 3), torch.arange(n) % 2
    return Trainer(nn.Linear(3, 2), nn.CrossEntropyLoss(), data, seed=1, clip=1.0, lr=0.1, **options)


@pytest.mark.parametrize("failing", ["_measure", "_account"])
def test_no_key_of_a_step_outlives_an_interrupt(monkeypatch, failing):
    trainer = some_trainer(mechanism=mm.Mechanism(1.0, 0.3))
    trainer.run(2)

    def interrupted(*arguments):
        raise KeyboardInterrupt

    monkeypatch.setattr(trainer, failing, interrupted)
    with pytest.raises(KeyboardInterrupt):
        trainer.run(3, evaluate_every=1)
    gc.collect()
    assert not [thing for thing in gc.get_objects() if type(thing) is StepRandomness]


def test_a_run_in_parts_is_the_run_where_augmentation_is_drawn_chunk_by_chunk():
    plan = mm.Ledger().add(mm.Mechanism(1.0, 0.05), 3).add(mm.Mechanism(1.0, 0.9), 3)

    def jitter(x, generator):
        return x + torch.randn(x.shape, generator=generator)

    trainers = [some_trainer(400, mechanism=plan, augment=jitter) for _ in range(2)]
    assert torch.equal(trainers[0].run(6).state.last, trainers[1].run(4).run(2).state.last)


def test_labels_of_one_step_are_unrelated_streams():
    step = Randomness(3).step()
    a, b = step.gaussian("noise", 20_000), step.gaussian("mixing", 20_000)
    assert abs(float((a * b).mean())) < 5.3 / math.sqrt(20_000)
    assert not torch.equal(a, b)
    assert step.generator("augment").initial_seed() != step.generator("model").initial_seed()


def test_the_uniform_never_touches_its_ends():
    u = Randomness(4).step().uniform("u", 200_000)
    assert 0 < float(u.min()) < 1e-4
    assert 1 - 1e-4 < float(u.max()) < 1
    assert stats.kstest(u.numpy(), "uniform").statistic * math.sqrt(200_000) < 2.7


def test_the_words_at_either_end_are_inside_of_it(monkeypatch):
    monkeypatch.setattr(StepRandomness, "_words", lambda *_: torch.tensor([0, 2**11 - 1, -(2**11), -1]))
    assert Randomness(4).step().uniform("u", 4).tolist() == [2**-54, 2**-54, 1 - 2**-53, 1 - 2**-53]


def test_gaussian_draws_are_box_and_mullers_in_float64():
    u, found = Randomness(5).step().uniform("noise", 6), Randomness(5).step().gaussian("noise", 5)
    radii, angles = [math.sqrt(-2 * math.log(a)) for a in u[:3]], [2 * math.pi * float(b) for b in u[3:]]
    expected = [r * turn(t) for turn in (math.cos, math.sin) for r, t in zip(radii, angles, strict=True)]
    torch.testing.assert_close(found, torch.tensor(expected[:5], dtype=torch.float64), rtol=1e-13, atol=1e-15)


class Named(Squares):
    """A data set that happens to have attributes x and y: what counts is what it gives."""

    x, y = torch.zeros(5), torch.zeros(5)


def test_tensors_are_known_by_their_values_and_looked_at_again_when_they_change(monkeypatch):
    x, y, salt = torch.arange(12.0).reshape(6, 2), torch.arange(6), b"0" * 16
    source, looks = as_source((x, y)), []
    genuine = sampling._digest_of
    monkeypatch.setattr(sampling, "_digest_of", lambda *a: looks.append(a) or genuine(*a))
    first = source.fingerprint(salt)
    assert source.fingerprint(salt) == first != source.fingerprint(b"1" * 16)
    assert len(looks) == 1
    assert as_source((x.clone(), y)).fingerprint(salt) == first
    x[3, 1] += 1
    assert source.fingerprint(salt) != first
    x[3, 1] -= 1
    assert source.fingerprint(salt) == first
    assert as_source((x.double(), y)).fingerprint(salt) != first


def test_a_dataset_is_known_by_what_it_gives():
    source = as_source(Named(7))
    assert source.n == 7
    salt = b"0" * 16
    assert source.fingerprint(salt) == as_source(Squares(7)).fingerprint(salt)
    assert source.fingerprint(salt) != as_source(Squares(8)).fingerprint(salt)
    other = type("Other", (Squares,), {"__getitem__": lambda self, i: (torch.zeros(1), torch.tensor(float(i)))})(7)
    assert source.fingerprint(salt) != as_source(other).fingerprint(salt)
    assert source.fingerprint(salt) != source.fingerprint(b"1" * 16)


def test_a_copy_that_may_be_read_later_is_made_from_memory_that_is_kept(monkeypatch):
    """Pinned memory is not used again before a GPU has read it; of any other a copy must be over when it returns."""
    told = []
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda t: told.append("pinned") or t)
    monkeypatch.setattr(torch.Tensor, "to", lambda t, device, **how: told.append((device.type, how)) or t)
    for name in ("cuda", "xpu", "mps", "cpu"):
        sent(torch.zeros(1, device="cpu"), torch.device(name))
    assert told == ["pinned", ("cuda", {"non_blocking": True}), ("xpu", {}), ("mps", {}), ("cpu", {})]

"""Poisson draws at exactly q, one a step, in chunks of one shape."""

from __future__ import annotations

import copy
import gc
import math
import random

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
from modelmix.gradients.device import to_device_async
from modelmix.training import Performance, Randomness, digests, item_checks, sampling
from modelmix.training.checkpoint import RunFiles
from modelmix.training.items import SeparateCollate
from modelmix.training.randomness import StepRandomness
from modelmix.training.sampling import Prefetched, as_source, pieces
from modelmix.training.step import RunAccount


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

    ahead = Prefetched(counted())
    found = []
    for draw in ahead:
        found.append(int(draw))
        for _ in range(int(draw)):  # never, once, more than once and at the end
            ahead.prefetch()
        assert len(made) == len(found) + (0 < int(draw) < 4)
    assert found == made == [0, 1, 2, 3, 4]


def some_trainer(n: int = 40, **options) -> Trainer:
    torch.manual_seed(0)
    data = torch.randn(n, 3), torch.arange(n) % 2
    return Trainer(nn.Linear(3, 2), nn.CrossEntropyLoss(), data, seed=1, clip=1.0, lr=0.1, **options)


@pytest.mark.parametrize("failing", [(RunFiles, "measure"), (RunAccount, "add")], ids=["evaluation", "line"])
def test_no_key_of_a_step_outlives_an_interrupt(monkeypatch, failing):
    trainer = some_trainer(mechanism=mm.Mechanism(1.0, 0.3))
    trainer.run(2)

    def interrupted(*arguments):
        raise KeyboardInterrupt

    monkeypatch.setattr(*failing, interrupted)
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
    genuine = digests.digest_of
    monkeypatch.setattr(sampling, "digest_of", lambda *a: looks.append(a) or genuine(*a))
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
        to_device_async(torch.zeros(1, device="cpu"), torch.device(name))
    assert told == ["pinned", ("cuda", {"non_blocking": True}), ("xpu", {}), ("mps", {}), ("cpu", {})]


# Without a trainer: every part by itself.


def listed(parts):
    return [(index.tolist(), weights.tolist()) for index, weights in parts]


def test_pieces_are_padded_with_their_first_sample_at_weight_zero():
    draw = torch.arange(10, 15)
    padded = [([10, 11], [1, 1]), ([12, 13], [1, 1]), ([14, 14], [1, 0])]
    assert listed(pieces(draw, 2)) == listed(pieces(draw, 2, pad=True)) == padded
    assert listed(pieces(draw, 2, pad=False)) == [*padded[:2], ([14], [1])]
    assert listed(pieces(draw, 5)) == listed(pieces(draw, 5, pad=False)) == [([10, 11, 12, 13, 14], [1] * 5)]
    assert listed(pieces(draw, 8)) == [([10, 11, 12, 13, 14, 10, 10, 10], [1] * 5 + [0] * 3)]
    assert listed(pieces(draw[:0], 3)) == listed(pieces(draw[:0], 3, pad=False)) == []
    assert next(pieces(draw, 2))[1].dtype == torch.float64


class Kept(Dataset):
    """Map-style, and counts what it is asked for."""

    def __init__(self, items, asked=None):
        self.items, self.asked = list(items), asked

    def __len__(self):
        return len(self.items)

    def __getitem__(self, i):
        if self.asked is not None:
            self.asked.append(i)
        return self.items[i]


def rows(n, scale=1.0):
    return [(torch.tensor([scale * i]), torch.tensor(i)) for i in range(n)]


@pytest.mark.parametrize("source", [as_source((torch.arange(7.0)[:, None], torch.arange(7))), as_source(Kept(rows(7)))])
def test_a_source_gives_padded_chunks_unless_told_otherwise(source):
    def chunks(**how):
        steps = source.steps([torch.tensor([5, 2, 6]), torch.tensor([], dtype=torch.int64)], 2, **how)
        return [[(c.inputs.flatten().tolist(), c.targets.tolist(), c.weights.tolist()) for c in step] for step in steps]

    full = ([5, 2], [5, 2], [1, 1])
    assert chunks() == chunks(pad=True) == [[full, ([6, 6], [6, 6], [1, 0])], []]
    assert chunks(pad=False) == [[full, ([6], [6], [1])], []]


@pytest.mark.parametrize("source", [as_source((torch.arange(7.0)[:, None], torch.arange(7))), as_source(Kept(rows(7)))])
def test_the_head_is_the_first_samples_and_never_more_than_there_are(source):
    for count, there in ((1, 1), (3, 3), (7, 7), (100, 7)):
        x, y = source.head(count)
        assert x.flatten().tolist() == y.tolist() == list(range(there))


def test_nested_inputs_keep_their_structure():
    source = as_source(({"a": torch.arange(4), "b": (torch.arange(4) * 2,)}, [torch.arange(4) * 3]))
    (chunk,) = next(source.steps([torch.tensor([3, 1])], 2))
    assert chunk.inputs["a"].tolist() == [3, 1]
    assert chunk.inputs["b"][0].tolist() == [6, 2]
    assert chunk.targets[0].tolist() == [9, 3]
    assert source.head(2)[0]["b"][0].tolist() == [0, 2]


def test_samples_go_to_a_device_where_they_fit(monkeypatch):
    source = as_source((torch.zeros(5, 3), torch.zeros(5, dtype=torch.int64)))  # 5*3*4 + 5*8 = 100 bytes
    assert source.to(torch.device("cpu")) is source
    meta = torch.device("meta")
    for room, goes in ((100, True), (99, False)):
        monkeypatch.setattr(sampling, "_ON_DEVICE", room)
        moved = source.to(meta)
        assert (moved is not source) == goes
        assert moved.head(1)[0].device == moved.head(1)[1].device == torch.device("meta" if goes else "cpu")
        assert moved.n == 5
    monkeypatch.setattr(sampling, "_ON_DEVICE", 100)
    there = source.to(meta)
    assert there.to(meta) is there
    mixed = as_source((torch.zeros(5, 3), torch.zeros(5, device="meta")))
    assert mixed.to(meta) is not mixed
    dataset = as_source(Kept(rows(3)))
    assert dataset.to(meta) is dataset


def test_a_source_is_taken_as_it_is_and_workers_are_told():
    tensors, dataset = as_source((torch.zeros(3, 1), torch.zeros(3))), as_source(Kept(rows(3)), 2)
    assert as_source(tensors) is tensors
    assert as_source(dataset, 5) is dataset
    assert dataset.workers == 2
    assert as_source(Kept(rows(3))).workers == 0
    assert sampling.DatasetSource(Kept(rows(3))).workers == 0


class Fields:
    def __init__(self, **fields):
        vars(self).update(fields)


class OnlyItems:
    def __getitem__(self, i):
        return torch.zeros(1), torch.zeros(1)


class OnlyLength:
    def __len__(self):
        return 3


def test_what_counts_as_a_training_set():
    x, y = torch.arange(3.0)[:, None], torch.arange(3)
    pairs = [(x, y), [x, y], (x.numpy(), y.numpy()), torch.utils.data.TensorDataset(x, y), Fields(x=x, y=y)]
    for data in pairs:
        source = as_source(data)
        assert isinstance(source, sampling.TensorSource)
        assert torch.equal(source.inputs, x)
        assert torch.equal(source.targets, y)
    assert isinstance(as_source(Kept(rows(3))), sampling.DatasetSource)
    for data in (OnlyItems(), OnlyLength(), Fields(x=x), Fields(y=y)):
        with pytest.raises(mm.ModelMixError, match="is not a training set"):
            as_source(data)
    for count in (1, 3):  # no pairs
        with pytest.raises(mm.ModelMixError, match="pair"):
            as_source(torch.utils.data.TensorDataset(*[x] * count)).head(1)
    with pytest.raises(mm.ModelMixError, match="inputs and targets with the samples first"):
        as_source(((), ()))
    with pytest.raises(mm.ModelMixError, match="different numbers of samples"):
        as_source((x, y[:2]))
    with pytest.raises(mm.ModelMixError, match="cannot be a tensor"):
        as_source((["a"], [object()]))
    strided = np.arange(12).reshape(3, 4)[:, ::2]
    assert as_source((strided, y)).inputs.tolist() == strided.tolist()


@pytest.mark.parametrize("item", [(torch.zeros(1),) * 3, torch.zeros(2), [torch.zeros(1)]])
def test_a_sample_that_is_no_pair_is_refused(item):
    with pytest.raises(mm.ModelMixError, match="must be a pair"):
        as_source(Kept([item] * 3)).head(1)


# What a data set is known by.


def test_a_digest_covers_type_shape_values_and_what_is_no_tensor():
    x = torch.arange(6.0)
    found = [
        digests.digest_of(sample)
        for sample in (
            x,
            x.reshape(2, 3),
            x.reshape(3, 2),
            x.double(),
            x + 1,
            x.int(),
            "a",
            "b",
            1,
            2,
            (x, "a"),
            (x, "b"),
        )
    ]
    assert len(set(found)) == len(found)
    assert digests.digest_of(x, b"salt") != digests.digest_of(x)
    assert digests.digest_of(x[::2]) == digests.digest_of(x[::2].clone())
    assert all(len(d) == 32 for d in found)


def test_samples_in_inference_mode_have_a_fingerprint():
    with torch.inference_mode():
        x = torch.arange(3.0)[:, None]
    assert as_source((x, torch.arange(3))).fingerprint(b"s") == as_source((x.clone(), torch.arange(3))).fingerprint(
        b"s"
    )


def test_what_is_read_twice_alike_is_repeatable():
    tensors = [as_source((torch.arange(3.0)[:, None] * k, torch.arange(3))) for k in (1, 1, 2)]
    sets = [as_source(Kept(rows(5, k))) for k in (1, 1, 2)]
    for same, again, other in (tensors, sets):
        assert same.repeatable() is not None
        assert same.repeatable() == again.repeatable() != other.repeatable()
    longer = as_source(Kept(rows(6)))
    assert longer.repeatable() != sets[0].repeatable()


def test_a_dataset_is_read_once_to_know_it_all():
    asked = []
    source = as_source(Kept(rows(5), asked))
    asked.clear()
    first = source.repeatable()
    assert asked == [0, 0, 1, 1, 2, 2, 3, 3, 4, 4]
    assert source.repeatable() == first
    assert len(asked) == 10


class LastChanges(Kept):
    def __getitem__(self, i):
        x, y = super().__getitem__(i)
        return (x + torch.rand(1), y) if i == len(self) - 1 else (x, y)


def test_one_item_that_changes_makes_a_dataset_unrepeatable():
    asked = []
    source = as_source(LastChanges(rows(4), asked))
    asked.clear()
    assert source.repeatable() is None
    assert source.repeatable() is None
    assert len(asked) == 8
    assert source.fingerprint(b"s") == as_source(LastChanges(rows(4))).fingerprint(b"s")


def test_a_fingerprint_looks_at_items_spread_over_the_dataset():
    def places(n):
        asked = []
        source = as_source(Kept(rows(n), asked))
        asked.clear()
        source.fingerprint(b"salt")
        return asked

    assert places(5) == [0, 0, 1, 1, 2, 2, 3, 3, 4, 4]
    assert places(33) == [i for k in range(0, 33, 2) for i in (k, k)]
    assert len(places(1000)) < 40
    items = rows(9)
    items[8] = (items[8][0] + 1, items[8][1])
    assert as_source(Kept(items)).fingerprint(b"s") != as_source(Kept(rows(9))).fingerprint(b"s")


# Items that look at each other.


class Looks(Dataset):
    """Item ``who`` also reads row ``at``."""

    def __init__(self, n, who, at, x=None):
        self.x = torch.arange(float(n)) if x is None else x
        self.n, self.who, self.at = n, who, at

    def __len__(self):
        return self.n

    def __getitem__(self, i):
        return (self.x[i], self.x[self.at]) if i == self.who else (self.x[i], 0)


@pytest.mark.parametrize(
    "x",
    [
        torch.arange(5.0),
        torch.zeros(5),
        torch.arange(5),
        torch.arange(5, dtype=torch.uint8),
        torch.zeros(5, dtype=torch.bool),
        torch.ones(5, dtype=torch.bool),
        np.arange(5.0),
        np.arange(5),
        -3.0 * torch.ones(5),
    ],
    ids=lambda x: str(x.dtype),
)
@pytest.mark.parametrize(("who", "at"), [(4, 0), (1, 0), (0, 4), (3, 4), (2, 0), (2, 4)])
def test_one_item_that_reads_one_row_of_another_is_found(who, at, x):
    kept = copy.deepcopy(x)
    with pytest.raises(mm.UnprovedError, match="changes with another item"):
        item_checks.check_items_independent(Looks(5, who, at, x))
    assert (kept == x).all()  # what is disturbed is a copy
    item_checks.check_items_independent(Looks(5, who, who, x))


def test_two_items_are_enough_to_look_and_one_is_not():
    for who, at in ((0, 1), (1, 0)):
        with pytest.raises(mm.UnprovedError):
            item_checks.check_items_independent(Looks(2, who, at))
    item_checks.check_items_independent(Looks(1, 0, 0))
    asked = []
    item_checks.check_items_independent(Kept(rows(1), asked))
    assert not asked


def test_large_datasets_are_sampled_and_too_large_ones_left_alone(monkeypatch):
    for who in (0, 9, 21):
        for at in {0, 23} - {who}:
            with pytest.raises(mm.UnprovedError):
                item_checks.check_items_independent(Looks(24, who, at))
    monkeypatch.setattr(item_checks, "_COPIED", 24 * 4)
    with pytest.raises(mm.UnprovedError):
        item_checks.check_items_independent(Looks(24, 3, 0))
    monkeypatch.setattr(item_checks, "_COPIED", 24 * 4 - 1)
    item_checks.check_items_independent(Looks(24, 3, 0))


class Ordered(Looks):
    """Gives rows in an order of its own, which it keeps."""

    def __init__(self, n):
        super().__init__(n, -1, 0)
        self.order = torch.arange(n).flip(0)

    def __getitem__(self, i):
        return self.x[self.order[i] % self.n]


class Uncopied(Looks):
    def __deepcopy__(self, memo):
        raise TypeError("open files")


class Counting(Looks):
    """Never the same twice, and not because of others."""

    def __getitem__(self, i):
        self.n_asked = getattr(self, "n_asked", 0) + 1
        return self.x[i] + self.n_asked


class Flipping(Looks):
    """Augments at random, from a generator that everybody has or from one of its own."""

    def __init__(self, coin, mean=False):
        super().__init__(16, -1, 0)
        self.coin, self.mean, self.own = coin, mean, np.random.default_rng(0)

    def __getitem__(self, i):
        coins = {
            "torch": lambda: float(torch.rand(())),
            "numpy": np.random.rand,
            "python": random.random,
            "own": self.own.random,
        }
        turned = coins[self.coin]() < 0.5
        return self.x[i] - self.x.mean() * self.mean, turned


def test_what_cannot_be_tried_out_is_not_refused():
    item_checks.check_items_independent(Uncopied(5, 1, 0))


def test_an_item_that_knows_how_many_were_read_before_is_refused():
    with pytest.raises(mm.UnprovedError, match="another one after others were read"):
        item_checks.check_items_independent(Counting(5, 1, 0))


def test_the_order_of_the_items_is_the_datasets_own():
    for n in (2, 6, 50):
        item_checks.check_items_independent(Ordered(n))
    for seed in range(5):
        generator = torch.Generator().manual_seed(seed)
        base = torch.utils.data.TensorDataset(torch.arange(20.0), torch.arange(20) * 3)
        for part in torch.utils.data.random_split(base, [15, 5], generator):
            item_checks.check_items_independent(part)


@pytest.mark.parametrize("coin", ["torch", "numpy", "python", "own"])
def test_random_augmentation_is_not_taken_for_looking_at_others(coin):
    state = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()  # noqa: NPY002
    for _ in range(8):
        item_checks.check_items_independent(Flipping(coin))
    assert torch.equal(torch.get_rng_state(), state[0])
    assert random.getstate() == state[1]
    assert np.random.get_state()[1].tolist() == state[2]  # noqa: NPY002


@pytest.mark.parametrize("coin", ["torch", "numpy", "python"])
def test_random_augmentation_does_not_hide_what_looks_at_others(coin):
    with pytest.raises(mm.UnprovedError, match="changes with another item"):
        item_checks.check_items_independent(Flipping(coin, mean=True))


@pytest.mark.parametrize("value", [-3.0, math.nan, math.inf, -math.inf, 0.0, 3e38])
@pytest.mark.parametrize("kind", [torch.float32, torch.float64, torch.float16])
def test_every_number_of_a_row_is_disturbed(value, kind):
    row = torch.full((3,), min(value, 6e4) if kind == torch.float16 else value, dtype=kind)
    other = item_checks._another(row, row[None])
    assert other.dtype == kind
    assert not (other == row).any()
    assert not torch.equal(other.isnan(), row.isnan()) or not row.isnan().any()
    alone, coins = torch.tensor([[255, 7]], dtype=torch.uint8), torch.tensor([[True, False]])
    assert item_checks._another(alone[0], alone).tolist() == [0, 8]
    assert item_checks._another(coins[0], coins).tolist() == [False, True]
    labels = torch.tensor([2, 2, 0, 1])  # of one-hot vectors: 3 would be none
    assert item_checks._another(labels[0], labels) == 0


class Remembers(Looks):
    """The first reading of a row after it changed is kept for good: it does not come back with the row."""

    def __getitem__(self, i):
        if float(self.x[0]) != 0.0:
            self.other = True
        return self.x[i], hasattr(self, "other")


def test_an_item_that_does_not_come_back_was_not_changed_by_the_row():
    item_checks.check_items_independent(Remembers(5, 1, 0))


def found(holder, n, **how):
    return [tuple(t.shape) for t in item_checks.arrays_of(holder, n, **how)]


def test_where_rows_are_looked_for():
    x, a = torch.zeros(4, 2), np.zeros((5, 3))
    assert found(x, 4) == found([x], 4) == found({"a": x}, 4) == found((x, x), 4) == [(4, 2)]
    assert found(Fields(x=x, y=Fields(a=a)), 4) == [(4, 2), (5, 3)]
    assert found(x, 5) == found(a, 6) == found(torch.zeros(()), 0) == found(np.zeros(()), 0) == []
    assert found(x.clone().requires_grad_(), 4) == []
    assert found(np.zeros(5, dtype=bool), 5) == found(np.zeros(5, dtype=np.uint8), 5) == [(5,)]
    assert found(np.array(["a"] * 5), 5) == found(np.zeros(5, dtype=object), 5) == []
    frozen = np.zeros(5)
    frozen.flags.writeable = False
    assert found(frozen, 5) == []
    assert found([None] * 15 + [x], 4) == [(4, 2)]
    assert found([None] * 100 + [x], 4) == []
    nested = x
    for depth in range(7):
        assert found(nested, 4) == ([(4, 2)] if depth <= 4 else []), depth
        nested = [nested]
    own = Fields(x=x)
    own.own = own
    assert found(own, 4) == [(4, 2)]

    def function():
        return x

    function.x = x
    assert found(function, 4) == found(nn.Linear(2, 4), 4) == []


# Items brought to one form.


def collate(first, items, own=None):
    return SeparateCollate(own, first)(items)


def test_items_of_one_form_are_collated_by_torch():
    items = [(torch.tensor([1.0, 2.0]), 3), (torch.tensor([4.0, 5.0]), 6)]
    for own in (None, torch.utils.data.default_collate, lambda batch: torch.utils.data.default_collate(batch)):
        (x, y), fits = collate(items[0], items, own)
        assert x.tolist() == [[1.0, 2.0], [4.0, 5.0]]
        assert y.tolist() == [3, 6]
        assert fits.tolist() == [1.0, 1.0]
        assert fits.dtype == torch.float64


@pytest.mark.parametrize(
    ("odd", "counts"),
    [
        ((torch.tensor([1.0, 2.0], dtype=torch.float64), 3), True),  # brought to the first one's type
        ((torch.tensor([1.0, 2.0], dtype=torch.float16), 3), True),
        ((torch.tensor([1.0, 2.0]), torch.tensor(3, dtype=torch.int32)), True),
        ((torch.tensor([1, 2]), 3), False),
        ((torch.tensor([1.0, 2.0]), 3.0), False),
        ((torch.tensor([1.0, 2.0]), True), False),
        ((torch.tensor([1.0 + 0j, 2.0]), 3), False),
        ((torch.tensor([1.0]), 3), False),
        ((torch.tensor([[1.0, 2.0]]), 3), False),
        ((torch.tensor([1.0, 2.0]), 3, 4), False),
        ((torch.tensor([1.0, 2.0]), "3"), False),
        ((torch.tensor([1.0, 2.0]), object()), False),
        (torch.tensor([1.0, 2.0]), False),
    ],
)
@pytest.mark.parametrize("own", [None, lambda batch: torch.utils.data.default_collate(batch)])
@pytest.mark.parametrize("place", [0, 1, 2])
def test_an_item_of_another_form_is_zero_and_the_others_are_as_they_were(odd, counts, own, place):
    first = (torch.tensor([7.0, 8.0]), 9)
    items = [first, first]
    items.insert(place, odd)
    (x, y), fits = collate(first, items, own)
    assert x.dtype == torch.float32
    assert y.dtype == torch.int64
    wanted = [[7.0, 8.0, 9], [7.0, 8.0, 9]]
    wanted.insert(place, [1.0, 2.0, 3] if counts else [0.0, 0.0, 0])
    assert [[*a, b] for a, b in zip(x.tolist(), y.tolist(), strict=True)] == wanted
    assert fits.tolist() == [float(counts) if i == place else 1.0 for i in range(3)]


def test_a_collate_function_gives_tensors_of_one_row():
    item = (torch.zeros(2), 1)
    for wrong in (lambda batch: ("text", torch.zeros(1)), lambda batch: ()):
        with pytest.raises(mm.ModelMixError, match="must give tensors"):
            SeparateCollate(wrong, item)
    for wrong in (lambda b: (torch.zeros(2, 2), torch.zeros(1)), lambda b: (torch.zeros(1), torch.tensor(0.0))):
        with pytest.raises(mm.UnprovedError, match="one row for one item"):
            SeparateCollate(wrong, item)
    changing = [torch.zeros(1)]
    collated = SeparateCollate(lambda batch: changing[0], item)
    collated._expected = None  # it is another function from now on, which is not what is tried here
    changing[0] = "text"
    batch, fits = collated([item])
    assert fits.tolist() == [0.0]
    assert batch.tolist() == [0.0]
    changing[0] = (torch.zeros(1), torch.ones(1))
    collated = SeparateCollate(lambda batch: changing[0], item)
    collated._expected = None
    changing[0] = (torch.zeros(1), "text")
    batch, fits = collated([item])
    assert fits.tolist() == [0.0]
    assert [t.tolist() for t in batch] == [[0.0], [0.0]]


def test_items_that_do_not_count_are_said():
    collated = SeparateCollate(None, torch.zeros(1))
    collated.warn_of_misfits(torch.tensor([1.0, 1.0]))
    with pytest.warns(UserWarning, match="1 of the first 2 items .* count as zero"):
        collated.warn_of_misfits(torch.tensor([1.0, 0.0]))
    collated.warn_of_misfits(torch.tensor([1.0, 0.0]))  # once is enough
    source = as_source(Kept([(torch.zeros(2), 1), (torch.ones(3), 1), (torch.ones(2), 1)]))
    with pytest.warns(UserWarning, match="count as zero"):
        (chunk,) = next(source.steps([torch.tensor([2, 1])], 3))
    assert chunk.weights.tolist() == [1.0, 0.0, 0.0]
    assert chunk.inputs.tolist() == [[1.0, 1.0], [0.0, 0.0], [1.0, 1.0]]

"""Generators that a dataset brings: the numbers of a seeded one are public, and which item gets which is the draw."""

from __future__ import annotations

import contextlib
import random

import numpy as np
import planned
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

import modelmix as mm

N, POPULATION = 40, 200
V = torch.tensor([1.0, 2.0, 1.0, 2.0, 1.0])
SHARED = np.random.default_rng(0)
DRAWS = {
    "numpy": lambda g: g.random(),
    "random state": lambda g: g.random_sample(),
    "python": lambda g: g.random(),
    "torch": lambda g: torch.rand(1, generator=g).item(),
}
MADE = {
    "numpy": lambda: np.random.default_rng(0),
    "random state": lambda: np.random.RandomState(0),
    "python": lambda: random.Random(0),
    "torch": lambda: torch.Generator().manual_seed(0),
}


class Flips:
    """Ordinary augmentation: every item is mirrored with probability one half."""

    def __init__(self, x, kind):
        self.x, self.generator, self.draw = x, MADE[kind](), DRAWS[kind]

    def __len__(self):
        return len(self.x)

    def number(self, i):
        return self.draw(self.generator)

    def __getitem__(self, i):
        return (self.x[i] if self.number(i) < 0.5 else -self.x[i]), 0


class FlipsOfAModule(Flips):
    def number(self, i):
        return SHARED.random()


class FlipsOfAClosure(Flips):
    def __init__(self, x, kind):
        super().__init__(x, kind)
        generator, draw = self.generator, self.draw
        self.generator, self.coin = None, lambda: draw(generator)

    def number(self, i):
        return self.coin()


class Rejects(Flips):
    """Draws until it likes what it gets, as random crops do: how often hangs on the item."""

    def number(self, i):
        found = self.draw(self.generator)
        return found if self.x[i, 0] > 0 else self.draw(self.generator)


def aligned(kind):
    """Samples that, met by the public stream in their order, all pull one way."""
    generator = MADE[kind]()
    return torch.stack([V if DRAWS[kind](generator) < 0.5 else -V for _ in range(N)])


def trainer_sum(dataset, rest):
    plan = mm.Plan.of(mm.Mechanism(1e-9, 1.0), 1, population=POPULATION, adjacency="add-or-remove", delta=1e-4)
    torch.manual_seed(1)
    run = planned.Trainer(nn.Linear(5, 2, bias=False), nn.CrossEntropyLoss(), dataset, plan, 1.0, 1.0, seed=5, **rest)
    before = run.state.last.clone()
    run.run(1, progress=False)
    return (before - run.state.last) * POPULATION


def loop_sum(dataset, rest):
    plan = mm.Plan.of(mm.Mechanism(1e-9, 1.0), 1, population=POPULATION, adjacency="add-or-remove", delta=1e-4)
    torch.manual_seed(1)
    model = nn.Linear(5, 2, bias=False)
    model, optimizer, loader, criterion = planned.make_private(
        model, torch.optim.SGD(model.parameters(), lr=1.0), DataLoader(dataset, batch_size=POPULATION, **rest),
        nn.CrossEntropyLoss(), clip=1.0, plan=plan, seed=5,
    )  # fmt: skip
    before = model.weight.detach().clone().double()
    for x, y in loader:
        criterion(model(x), y).backward()
        optimizer.step()
    return (before - model.weight.detach().double()).flatten() * POPULATION


@pytest.mark.parametrize("kind", MADE)
@pytest.mark.parametrize("summed", [trainer_sum, loop_sum])
def test_who_is_drawn_does_not_choose_what_others_draw(summed, kind):
    x = aligned(kind)
    moved = summed(Flips(x, kind), {}) - summed(Flips(x[1:], kind), {})
    # Item i of the one is item i - 1 of the other: every one keeps its own draws, so that far more than one clip moves
    # by chance. What may not happen is that all of them turn: 40 samples of one clip each, aligned by the stream.
    assert float(summed(Flips(x, kind), {}).norm()) < 25
    assert float(moved.norm()) < 25


@pytest.mark.parametrize("made", [Flips, FlipsOfAModule, FlipsOfAClosure, Rejects])
@pytest.mark.parametrize("summed", [trainer_sum, loop_sum])
@pytest.mark.parametrize("last", [1.0, -1.0])
def test_one_item_exchanged_moves_the_sum_by_two_clips(summed, made, last):
    """The first item is another one; all others have the draws that they had."""
    x = aligned("numpy")
    other = x.clone()
    other[0] = last * torch.tensor([9.0, -3.0, 2.0, 0.0, 1.0])
    moved = summed(made(other, "numpy"), {}) - summed(made(x, "numpy"), {})
    assert float(moved.norm()) <= 2 * (1 + 1e-6)


def test_workers_read_with_the_same_draws():
    x = aligned("numpy")
    here, there = (loop_sum(Flips(x, "numpy"), {"num_workers": k}) for k in (0, 1))
    torch.testing.assert_close(here, there, rtol=1e-6, atol=1e-6)


def test_a_generator_keeps_its_state_for_whoever_else_uses_it():
    data = Flips(aligned("numpy"), "numpy")
    before = data.generator.bit_generator.state
    trainer_sum(data, {})
    assert data.generator.bit_generator.state == before


@pytest.mark.parametrize("summed", [trainer_sum, loop_sum])
def test_entropy_of_the_system_is_refused_in_one_line(summed):
    """Nobody can copy or seed it, so that nobody can see whether items hang on each other."""

    class Jitter(Flips):
        def __init__(self, x):
            super().__init__(x, "python")
            self.generator = random.SystemRandom()

        def __getitem__(self, i):
            return self.x[i] * self.generator.random(), 0

    with pytest.raises(mm.UnprovedError, match="after others were read"):
        summed(Jitter(aligned("python")), {})


class Congruential(Flips):
    """A generator of its own making, whose lowest bit alternates."""

    def __init__(self, x, kind):
        super().__init__(x, kind)
        self.state = 1

    def number(self, i):
        self.state = (1103515245 * self.state + 12345) % 2**31
        return self.state % 2


@pytest.mark.parametrize("summed", [trainer_sum, loop_sum])
def test_generators_that_nobody_can_seed_are_refused(summed):
    with pytest.raises(mm.UnprovedError, match="after others were read"):
        summed(Congruential(aligned("numpy"), "numpy"), {})


@pytest.mark.parametrize("draw", [lambda: torch.rand(1).item(), lambda: np.random.random(), random.random])  # noqa: NPY002
def test_collate_functions_do_not_draw_from_a_public_stream(draw):
    """torch.manual_seed(0) and a flip in collate_fn: the k-th row got the k-th number."""

    def flip(items):
        return torch.utils.data.default_collate([((x if draw() < 0.5 else -x), y) for x, y in items])

    class Rows(Flips):
        def __getitem__(self, i):
            return self.x[i], 0

    def begun():
        torch.manual_seed(0)
        random.seed(0)
        np.random.seed(0)  # noqa: NPY002

    begun()
    torch.manual_seed(1)
    x = torch.stack([V if draw() < 0.5 else -V for _ in range(N)])
    begun()
    assert float(loop_sum(Rows(x, "numpy"), {"collate_fn": flip}).norm()) < 25
    begun()
    torch.manual_seed(1)
    assert float(loop_sum(Rows(x, "numpy"), {"collate_fn": flip}).norm()) < 25


def test_generators_that_come_later_are_seeded_too():
    class Lazy(Flips):
        def __init__(self, x):
            super().__init__(x, "numpy")
            self.generator, self.reads = None, 0

        def number(self, i):
            self.reads += 1
            if self.generator is None or self.reads == 30:
                self.generator = np.random.default_rng(0)
            return self.generator.random()

    x = aligned("numpy")
    for summed in (trainer_sum, loop_sum):
        with contextlib.suppress(mm.UnprovedError):
            assert float(summed(Lazy(x), {}).norm()) < 25


COUNTED, MEAN, BITS = [0], [torch.zeros(5)], np.random.PCG64(0)


class CountsInAGlobal(Flips):
    def number(self, i):
        COUNTED[0] += 1
        return COUNTED[0] * 2654435761 % 2**32 / 2**32


class MeanInAGlobal(Flips):
    def __getitem__(self, i):
        MEAN[0] = 0.9 * MEAN[0] + 0.1 * self.x[i]
        return self.x[i] - MEAN[0], 0


class MeanInItsClass(Flips):
    mean = torch.zeros(5)

    def __getitem__(self, i):
        type(self).mean = 0.9 * type(self).mean + 0.1 * self.x[i]
        return self.x[i] - type(self).mean, 0


@pytest.mark.parametrize("made", [CountsInAGlobal, MeanInAGlobal, MeanInItsClass])
@pytest.mark.parametrize("summed", [trainer_sum, loop_sum])
def test_what_copies_of_a_dataset_share_is_not_taken_for_randomness(summed, made):
    with pytest.raises(mm.UnprovedError, match="an item of the dataset is another one"):
        summed(made(aligned("numpy"), "numpy"), {})


def test_bit_generators_are_seeded_too():
    class Raw(Flips):
        def number(self, i):
            return BITS.random_raw() / 2**64

    found = np.random.PCG64(0)
    x = torch.stack([V if found.random_raw() / 2**64 < 0.5 else -V for _ in range(N)])
    for summed in (trainer_sum, loop_sum):
        assert float(summed(Raw(x, "numpy"), {}).norm()) < 25


def test_a_draw_that_could_not_be_read_is_not_thrown_away():
    """An error while items are read, and the own state loaded: sample 5 was in 20 of 20 steps at q = 0.1."""

    class Fails(Flips):
        broken = False

        def __getitem__(self, i):
            if Fails.broken:
                raise OSError("not now")
            return self.x[i], 0

    torch.manual_seed(1)
    model = nn.Linear(5, 2, bias=False)
    plan = mm.Plan.of(mm.Mechanism(1.0, 0.5), 4, population=POPULATION, adjacency="add-or-remove", delta=1e-4)
    model, optimizer, loader, criterion = planned.make_private(
        model, torch.optim.SGD(model.parameters(), lr=1.0),
        DataLoader(Fails(aligned("numpy"), "numpy"), batch_size=100), nn.CrossEntropyLoss(), clip=1.0, plan=plan,
    )  # fmt: skip
    state = optimizer.state_dict()
    Fails.broken = True
    with pytest.raises(OSError, match="not now"):
        next(iter(loader))
    with pytest.raises(mm.UnprovedError, match="a draw was begun"):
        optimizer.load_state_dict(state)
    Fails.broken = False
    x, y = next(iter(loader))
    criterion(model(x), y).backward()
    optimizer.step()
    optimizer.load_state_dict(state)
    assert optimizer.ledger.steps == 1

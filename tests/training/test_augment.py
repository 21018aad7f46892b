"""Augmentation row by row, and what a digest of code sees."""

from __future__ import annotations

import types
from functools import partial

import pytest
import torch
from torch import nn

import modelmix as mm
from modelmix.training import augment
from modelmix.training.augment import apply_augmentation, crop, flip, flip_and_crop
from modelmix.training.digests import code_digest


def generator(seed=3):
    return torch.Generator().manual_seed(seed)


def images(m=6, side=5):
    return torch.arange(1.0, 1 + m * 2 * side * side).reshape(m, 2, side, side)


def test_half_of_the_images_are_mirrored_left_to_right():
    x = images(200)
    found = flip(x, generator())
    turned = [torch.equal(a, b.flip(-1)) for a, b in zip(found, x, strict=True)]
    kept = [torch.equal(a, b) for a, b in zip(found, x, strict=True)]
    coin = (torch.rand(200, generator=generator()) < 0.5).tolist()
    assert turned == coin
    assert kept == [not c for c in coin]


@pytest.mark.parametrize("pad", [1, 2, 4])
def test_every_image_is_moved_by_its_own_offset_and_zeros_come_in(pad):
    x = images(300)
    found = crop(x, generator()) if pad == 4 else crop(x, generator(), pad)
    assert found.shape == x.shape
    assert found.is_contiguous()
    offset = torch.randint(2 * pad + 1, (2, 300), generator=generator()).tolist()
    for image, moved, down, right in zip(x, found, *offset, strict=True):
        wanted = torch.zeros(2, 5 + 2 * pad, 5 + 2 * pad)
        wanted[:, pad : pad + 5, pad : pad + 5] = image
        assert torch.equal(moved, wanted[:, down : down + 5, right : right + 5])
    assert {tuple(o) for o in zip(*offset, strict=True)} == {
        (a, b) for a in range(2 * pad + 1) for b in range(2 * pad + 1)
    } or pad == 4


def test_images_that_are_not_square_are_moved_as_well():
    x = torch.rand(4, 1, 3, 7)
    assert crop(x, generator(), 1).shape == x.shape


def test_both_are_one_after_the_other():
    x, draws = images(), generator()
    assert torch.equal(flip_and_crop(x, generator()), crop(flip(x, draws), draws))
    assert {"flip": flip, "crop": crop, "flip-crop": flip_and_crop} == augment.AUGMENTATIONS


def test_our_own_are_given_all_rows():
    x = images()
    assert torch.equal(apply_augmentation(flip, x, generator()), flip(x, generator()))


def noisy(x, draws):
    return x + torch.rand(x.shape, generator=draws)


def test_any_other_is_given_rows_with_draws_of_their_own():
    x = images()
    seeds = torch.randint(2**62, (len(x),), generator=generator()).tolist()
    wanted = torch.cat([noisy(x[i : i + 1], generator(s)) for i, s in enumerate(seeds)])
    assert torch.equal(apply_augmentation(noisy, x, generator()), wanted)
    # Torch's own generator is seeded for every row, and goes on outside as if nothing had been drawn.
    state = torch.get_rng_state()
    found = apply_augmentation(lambda x, _: x + torch.rand(x.shape), x, generator())
    assert torch.equal(found, wanted)
    assert torch.equal(torch.get_rng_state(), state)


def test_rows_are_copies_and_keep_their_structure():
    x = {"a": torch.zeros(3, 2), "b": (torch.arange(3),)}

    def write(row, draws):
        row["a"] += 1
        row["b"][0].add_(1)
        return row

    found = apply_augmentation(write, x, generator())
    assert found["a"].tolist() == [[1.0, 1.0]] * 3
    assert found["b"][0].tolist() == [1, 2, 3]
    assert not x["a"].any()
    assert x["b"][0].tolist() == [0, 1, 2]


def test_no_rows_are_no_rows():
    x = torch.zeros(0, 3)
    assert apply_augmentation(noisy, x, generator()) is x


@pytest.mark.parametrize(
    "wrong",
    [
        lambda x, g: x[:0], lambda x, g: torch.cat([x, x]), lambda x, g: x.double(), lambda x, g: (x,),
        lambda x, g: x.sum(), lambda x, g: "row", lambda x, g: {"a": x}, lambda x, g: x.long(), lambda x, g: None,
    ],
)  # fmt: skip
def test_another_form_is_refused(wrong):
    with pytest.raises(mm.ModelMixError, match="augment must give as many rows"):
        apply_augmentation(wrong, torch.rand(3, 2), generator())


def test_a_pair_where_one_part_is_wrong_is_refused():
    x = (torch.rand(3, 2), torch.arange(3))
    for wrong in (lambda r, g: (r[0], r[1].float()), lambda r, g: (r[0][:0], r[1]), lambda r, g: (r[0], r[1][0])):
        with pytest.raises(mm.ModelMixError, match="augment must give as many rows"):
            apply_augmentation(wrong, x, generator())


def test_rows_of_different_shapes_are_refused():
    def cut(x, draws):
        return x[:, : 1 + int(torch.randint(3, (), generator=draws))]

    with pytest.raises(mm.ModelMixError, match="rows of different shapes"):
        apply_augmentation(cut, torch.rand(40, 3), generator())


class Remembers:
    """Adds something as soon as it has seen rows of a kind."""

    def __init__(self, kind):
        self.kind, self.seen, self.calls = kind, False, 0

    def __call__(self, x, draws):
        self.calls += 1
        kinds = {"any": self.calls > 1, "large": float(x.max()) > 1, "negative": float(x.min()) < 0}
        self.seen = self.seen or kinds[self.kind]
        return x + self.seen


@pytest.mark.parametrize("kind", ["any", "large", "negative"])
def test_what_remembers_rows_is_refused_before_it_sees_one(kind):
    x = torch.rand(3, 4)
    with pytest.raises(mm.UnprovedError, match="after other rows"):
        apply_augmentation(Remembers(kind), x, generator())


class Twins:
    """Adds something to a row that comes twice."""

    last = None

    def __call__(self, x, draws):
        twin = self.last is not None and torch.equal(self.last, x)
        self.last = x.clone()
        return x + twin


def test_what_remembers_the_same_row_is_refused():
    with pytest.raises(mm.UnprovedError, match="after other rows"):
        apply_augmentation(Twins(), torch.rand(3, 4), generator())


def test_what_remembers_in_one_of_two_tensors_is_refused():
    remembers = Remembers("any")

    def pair(rows, draws):
        return rows[0], remembers(rows[1], draws)

    for wrong in (pair, lambda rows, draws: pair(rows[::-1], draws)[::-1]):
        with pytest.raises(mm.UnprovedError, match="after other rows"):
            apply_augmentation(wrong, (torch.rand(3, 4), torch.rand(3, 4)), generator())
        remembers.seen, remembers.calls = False, 0


def test_a_private_row_of_another_form_is_refused():
    def odd(x, draws):
        return x.double() if float(x.max()) > 1e4 else x

    x = torch.rand(3, 4)
    x[1] = 1e5
    with pytest.raises(mm.ModelMixError, match="augment must give as many rows"):
        apply_augmentation(odd, x, generator())


def test_the_trial_row_gives_as_many_tensors_every_time():
    calls = []

    def growing(x, draws):
        calls.append(1)
        return [x] * len(calls)

    with pytest.raises(mm.ModelMixError, match="augment must give as many rows"):
        apply_augmentation(growing, torch.rand(3, 4), generator())


def test_what_is_kept_of_a_private_row_is_refused():
    class Late:
        """Remembers only what no trial row is."""

        top = 0.0

        def __call__(self, x, draws):
            if float(x.abs().max()) > 1e4:
                self.top = 1.0
            return x

    x = torch.rand(3, 4)
    apply_augmentation(Late(), x, generator())
    x[1] = 1e5
    with pytest.raises(mm.UnprovedError, match="kept something of the samples"):
        apply_augmentation(Late(), x, generator())


def test_the_trial_is_synthetic():
    x, seen = torch.full((3, 4), 77.0), []
    augment._check_alone(lambda row, draws: seen.append(row) or row, x, torch.device("cpu"))
    assert not any((row == 77).any() for row in seen)
    assert all(row.shape == (1, 4) for row in seen)
    assert len({float(row.max()) for row in seen}) > 2


# Digests of code.


def one(x):
    return x + 1


def also_one(x):
    return x + 1


def two(x):
    return x + 2


def other_name(x):
    return x.abs()


def another_name(x):
    return x.exp()


def nested_one():
    return lambda x: x + 1


def nested_two():
    return lambda x: x + 2


class Called:
    def __call__(self, x):
        return x + 1

    def method(self, x):
        return x + 3


class CalledToo:
    def __call__(self, x):
        return x + 1


class Layer(nn.Module):
    def forward(self, x):
        return x


class Edited(nn.Module):
    def forward(self, x):
        return x * 2


def test_a_digest_changes_with_the_code():
    things = [
        one, two, other_name, another_name, nested_one, nested_two, Called(), CalledToo(), Called().method, partial,
        partial(one), nn.Linear(2, 2), nn.Linear(2, 3), nn.Sequential(nn.Linear(2, 2)), Layer(), Edited(),
        nn.Sequential(Layer(), nn.Linear(2, 2)), nn.Sequential(Edited(), nn.Linear(2, 2)),
        nn.ModuleDict({"a": nn.Linear(2, 2)}), nn.ModuleDict({"b": nn.Linear(2, 2)}),
    ]  # fmt: skip
    digests = [code_digest(thing) for thing in things]
    assert len(set(digests)) == len(things)
    assert digests == [code_digest(thing) for thing in things]
    assert code_digest(one) == code_digest(also_one)
    assert code_digest(Called().method) == code_digest(Called.method)
    assert code_digest(nn.Linear(2, 2)) == code_digest(nn.Linear(2, 2))
    assert all(len(digest) == 64 for digest in digests)


def test_an_edited_class_of_the_same_name_is_another():
    def make(forward):
        return type("Net", (nn.Module,), {"forward": forward, "__module__": "m"})()

    def call(function):
        return type("Loss", (), {"__call__": function, "__module__": "m"})()

    for made in (make, call):
        assert code_digest(made(lambda self, x: x)) != code_digest(made(lambda self, x: x + x))
        assert code_digest(made(lambda self, x: x)) == code_digest(made(lambda self, x: x))
    renamed = types.FunctionType(one.__code__, {}, "renamed")
    assert code_digest(renamed) == code_digest(one)

"""Every draw from its key, in plain Python; and when a key moves, is shared, or is a new one."""

from __future__ import annotations

import copy
import hashlib
import math
import os
import pickle
import struct

import pytest
import torch
from scipy import stats

import modelmix as mm
from modelmix.gradients.device import preserve_torch_rng
from modelmix.training import Randomness, randomness
from modelmix.training.randomness import StepRandomness

KEY = bytes(range(32))


def words(label, count, key=KEY):
    return struct.unpack(f"<{count}Q", hashlib.shake_256(key + label.encode()).digest(8 * count))


def units(label, count, key=KEY):
    return [min(((w >> 11) + 0.5) * 2.0**-53, 1 - 2.0**-53) for w in words(label, count, key)]


def signed(label, count):
    return [w - 2**64 if w >= 2**63 else w for w in words(label, count)]


@pytest.mark.parametrize("count", [0, 1, 2, 5])
def test_draws_in_plain_python(count):
    def step():
        return StepRandomness(KEY)

    assert step()._words("a", count).tolist() == signed("a", count)
    assert step().uniform("a", count).tolist() == units("a", count)
    u = units("a", 2 * count)
    laplace = [(1 if u[i] < 0.5 else -1) * -math.log(u[count + i]) for i in range(count)]
    assert step().laplace("a", count).tolist() == pytest.approx(laplace, rel=1e-14)
    half = (count + 1) // 2
    u = units("a", 2 * half)
    radii, angles = [math.sqrt(-2 * math.log(x)) for x in u[:half]], [2 * math.pi * x for x in u[half:]]
    gaussian = [r * math.cos(t) for r, t in zip(radii, angles, strict=True)]
    gaussian += [r * math.sin(t) for r, t in zip(radii, angles, strict=True)]
    assert step().gaussian("a", count).tolist() == pytest.approx(gaussian[:count], rel=1e-13, abs=1e-15)
    for rate in (0.0, 0.3, 0.5, 1 - 2**-53):
        picked = [i for i, w in enumerate(words("a", count)) if (w & (2**63 - 1)) < int(rate * 2**63)]
        assert step().poisson_indices("a", count, rate).tolist() == picked
    for rate in (1.0, 1.5):
        assert step().poisson_indices("a", count, rate).tolist() == list(range(count))
    for made in (step().uniform("a", count), step().laplace("a", count), step().gaussian("a", count)):
        assert made.dtype == torch.float64
        assert made.shape == (count,)


def test_the_ends_of_uniforms_and_coins(monkeypatch):
    monkeypatch.setattr(StepRandomness, "_words", lambda *_: torch.tensor([0, 2**11 - 1, -(2**11), -1]))
    assert StepRandomness(KEY).uniform("a", 4).tolist() == [2**-54, 2**-54, 1 - 2**-53, 1 - 2**-53]
    top = int(0.3 * 2**63)
    words = torch.tensor([top - 1, top, top + 1, top - 1 - 2**63, top - 2**63, 0])
    monkeypatch.setattr(StepRandomness, "_words", lambda *_: words)
    assert StepRandomness(KEY).poisson_indices("a", 6, 0.3).tolist() == [0, 3, 5]
    monkeypatch.setattr(StepRandomness, "_words", lambda *_: torch.tensor([0, 1]))
    assert StepRandomness(KEY).poisson_indices("a", 2, 2.0**-63).tolist() == [0]


def test_laws_of_large_draws():
    """Bounds of once in a million."""
    n = 50_000
    assert stats.kstest(StepRandomness(KEY).laplace("a", n).numpy(), "laplace").pvalue > 1e-6
    assert stats.kstest(StepRandomness(KEY).gaussian("b", n).numpy(), "norm").pvalue > 1e-6
    assert 1e-7 < stats.binom.cdf(len(StepRandomness(KEY).poisson_indices("c", n, 0.3)), n, 0.3) < 1 - 1e-7


def test_every_label_is_drawn_once_whatever_is_drawn():
    draws = [
        lambda s: s.uniform("a", 1),
        lambda s: s.gaussian("a", 1),
        lambda s: s.laplace("a", 1),
        lambda s: s.poisson_indices("a", 1, 0.5),
        lambda s: s.poisson_indices("a", 1, 1.0),
    ]
    for first in draws:
        for second in draws:
            step = StepRandomness(KEY)
            first(step)
            with pytest.raises(mm.ModelMixError, match="the a of this step was drawn already"):
                second(step)
            step.uniform("b", 1)


def test_generators_are_told_apart_by_label_and_key():
    def seed(label, key=KEY):
        return StepRandomness(key).generator(label).initial_seed()

    wanted = int.from_bytes(hashlib.shake_256(KEY + b"generator:a").digest(8), "little") >> 1
    assert seed("a") == wanted < 2**63
    assert len({seed("a"), seed("b"), seed("a", bytes(32))}) == 3
    assert StepRandomness(KEY).generator("a").device == torch.device("cpu")


def test_the_key_of_a_run_moves_by_one_hash_a_step():
    run = Randomness(5)
    key = hashlib.shake_256(b"seed 5 key").digest(32)
    for _ in range(3):
        assert run.state() == {"key": key.hex(), "seeded": True}
        assert run.step()._key == run.step()._key == hashlib.shake_256(key + b"step").digest(32)
        run.advance()
        key = hashlib.shake_256(key + b"next").digest(32)


def test_coming_steps_are_the_steps_that_come():
    run = Randomness(5)
    ahead = [step for _, step in zip(range(4), run.coming_steps(), strict=False)]
    assert run.state() == Randomness(5).state()
    for k, step in enumerate(ahead):
        assert run.comes_to(step)
        assert step.same_as(run.step())
        assert [run.comes_to(other) for other in ahead] == [i == k for i in range(4)]
        run.advance()


def test_only_a_seed_makes_a_run_repeatable(monkeypatch):
    assert Randomness().state()["key"] != Randomness().state()["key"]
    assert not Randomness().seeded
    assert Randomness(0).seeded
    assert len({Randomness(s).state()["key"] for s in (0, 1, -1, 10**30)}) == 4
    sizes = []
    monkeypatch.setattr(randomness.os, "urandom", lambda n: sizes.append(n) or bytes(n))
    assert Randomness().state()["key"] == bytes(32).hex()
    assert sizes == [32]
    for wrong in (True, False, 1.0, "1", torch.tensor(1)):
        with pytest.raises(mm.ModelMixError, match="is not a whole number"):
            Randomness(wrong)


@pytest.mark.parametrize("seed", [None, 3])
def test_fresh_entropy_leads_away_from_every_earlier_copy(seed, monkeypatch):
    run = Randomness(seed)
    before = run.state()
    copies = [Randomness.from_state(before) for _ in range(2)]
    for one in (run, *copies):
        one.refresh()
    keys = {one.state()["key"] for one in (run, *copies)} | {before["key"]}
    assert len(keys) == 4
    # The old key counts as well: entropy of the system that is known is not enough to know the new one.
    monkeypatch.setattr(randomness.os, "urandom", bytes)
    keys = set()
    for old in (0, 1):
        one = Randomness(old)
        one.refresh()
        keys.add(one.state()["key"])
        assert len(str(one.state()["key"])) == 64
    assert len(keys) == 2


def test_a_forked_process_has_a_key_of_its_own(monkeypatch):
    seeded, run, ahead = Randomness(3), Randomness(), Randomness()
    kept, ahead_kept = run.state()["key"], ahead.state()["key"]
    run.step()
    assert run.state()["key"] == kept
    mine = os.getpid()
    monkeypatch.setattr(randomness.os, "getpid", lambda: mine + 1)
    for use in (seeded.step, lambda: next(seeded.coming_steps())):
        with pytest.raises(mm.ModelMixError, match="cannot go on in a forked process"):
            use()
    run.step()
    fresh = run.state()["key"]
    assert fresh != kept
    run.step()
    assert run.state()["key"] == fresh  # once, not at every step
    next(ahead.coming_steps())
    assert ahead.state()["key"] != ahead_kept
    Randomness(3).step()


def test_what_a_checkpoint_keeps_goes_on_where_it_was():
    for seed in (None, 4):
        run = Randomness(seed)
        run.advance()
        again = Randomness.from_state(run.state())
        assert again.state() == run.state()
        assert again.seeded == (seed is not None)
        assert again.comes_to(run.step())
        again.step()


@pytest.mark.parametrize(
    "state",
    [{}, {"key": "00" * 32}, {"seeded": True}, {"key": "zz" * 32, "seeded": True}, {"key": "00" * 31, "seeded": True},
     {"key": "00" * 33, "seeded": True}, {"key": "", "seeded": True}],
)  # fmt: skip
def test_a_state_that_is_no_key_is_refused(state):
    with pytest.raises(mm.ModelMixError, match="randomness is not readable"):
        Randomness.from_state(state)


@pytest.mark.parametrize("duplicate", [copy.copy, copy.deepcopy, pickle.dumps])
def test_a_key_is_not_copied(duplicate):
    with pytest.raises(mm.ModelMixError, match="is not copied"):
        duplicate(Randomness(1))


def test_what_is_drawn_apart_is_not_missing_outside():
    torch.manual_seed(0)
    wanted = torch.rand(3)
    torch.manual_seed(0)
    with preserve_torch_rng(torch.device("cpu")):
        torch.rand(5)
        torch.manual_seed(7)
    assert torch.equal(torch.rand(3), wanted)

"""ChaCha20 against RFC 8439, and our kernel against torch."""

from __future__ import annotations

import hashlib
import importlib.util
import struct

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from modelmix.errors import ModelMixError
from modelmix.training import Randomness, keystream
from modelmix.training.keystream import by_torch, chacha20

HERE = torch.get_default_device().type  # "cuda" where the tests of kernels run on a device
NEEDS_TRITON = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")

# RFC 8439, appendix A.1: test vectors 1, 2, 3 (counter 1) and 4 (counter 2). All have nonce 0.
VECTORS = [
    (bytes(32), 0, "76b8e0ada0f13d90405d6ae55386bd28bdd219b8a08ded1aa836efcc8b770dc7"
                   "da41597c5157488d7724e03fb8d84a376a43b8f41518a11cc387b669b2ee6586"),
    (bytes(32), 1, "9f07e7be5551387a98ba977c732d080dcb0f29a048e3656912c6533e32ee7aed"
                   "29b721769ce64e43d57133b074d839d531ed1f28510afb45ace10a1f4b794d6f"),
    (bytes(31) + b"\x01", 1, "3aeb5224ecf849929b9d828db1ced4dd832025e8018b8160b82284f3c949aa5a"
                             "8eca00bbb4a73bdad192b5c42f73f2fd4e273644c8b36125a64addeb006c13a0"),
    (b"\x00\xff" + bytes(30), 2, "72d54dfbf12ec44b362692df94137f328fea8da73990265ec1bbbea1ae9af0ca"
                                 "13b25aa26cb4a648cb9b9d1be65b2c0924a66c54d545ec1b7374f4872e99f096"),
]  # fmt: skip


def bytes_of(words: torch.Tensor) -> bytes:
    return words.cpu().numpy().tobytes()


@pytest.mark.parametrize(("key", "counter", "block"), VECTORS)
def test_the_vectors_of_the_standard(key, counter, block):
    found = bytes_of(chacha20(key, 8 * (counter + 1), "cpu"))
    assert found[64 * counter :].hex() == block


@NEEDS_TRITON
@settings(max_examples=8)
@given(st.binary(min_size=32, max_size=32), st.sampled_from((0, 1, 127, 129, 300)))
def test_the_kernel_makes_the_same_words(key, blocks):
    kernel = keystream._by_kernel(key, blocks, torch.device(HERE))
    assert torch.equal(kernel.cpu(), by_torch(key, blocks, "cpu"))


def test_a_shorter_stream_is_the_beginning_of_a_longer_one():
    key = hashlib.sha256(b"a").digest()
    long = chacha20(key, 100, "cpu")
    for count in (0, 1, 7, 8, 9, 99):
        assert torch.equal(chacha20(key, count, "cpu"), long[:count])
    assert not torch.equal(chacha20(hashlib.sha256(b"b").digest(), 100, "cpu"), long)


@pytest.mark.parametrize(("key", "count"), [(bytes(31), 8), (bytes(33), 8), (bytes(32), -9), (bytes(32), 2**35)])
def test_what_is_no_stream_is_refused(key, count):
    with pytest.raises(ModelMixError, match="are not a stream of ChaCha20"):
        chacha20(key, count, "cpu")


def test_bits_are_fair_and_words_unrelated():
    words = chacha20(hashlib.sha256(b"fair").digest(), 40_000, "cpu").numpy().view(np.uint64)
    uniform = (words >> np.uint64(11)) / 2.0**53
    assert stats.kstest(uniform, "uniform").pvalue > 1e-6
    assert abs(np.corrcoef(uniform[:-1], uniform[1:])[0, 1]) < 5 / np.sqrt(len(words))
    ones = sum(int(word).bit_count() for word in words.tolist())
    assert abs(ones - 32 * len(words)) < 5 * 4 * np.sqrt(len(words))  # of 64 coins, the deviation is 4


def broken(key, blocks, device):
    raise RuntimeError("no such\nhardware")


def wrong(key, blocks, device):
    return by_torch(key, blocks) ^ 1


@pytest.fixture
def forgetful():
    keystream._maker.cache_clear()
    yield
    keystream._maker.cache_clear()


@NEEDS_TRITON
@pytest.mark.parametrize(("kernel", "why"), [(broken, "no such hardware"), (wrong, "its words are wrong")])
def test_a_kernel_that_fails_or_is_wrong_is_not_used(monkeypatch, forgetful, kernel, why):
    right = keystream._is_right
    monkeypatch.setattr(keystream, "_by_kernel", kernel)
    monkeypatch.setattr(keystream, "_is_right", lambda make, device: right(make, torch.device("cpu")))
    with pytest.warns(UserWarning, match=why):
        assert keystream._maker(torch.device("cuda")) is by_torch


def test_where_nothing_is_right_nothing_is_made(monkeypatch, forgetful):
    monkeypatch.setattr(keystream, "by_torch", wrong)
    monkeypatch.setattr(keystream, "_is_right", lambda make, device: make is not wrong)
    with pytest.raises(ModelMixError, match="noise is not made rightly"):
        keystream._maker(torch.device("cpu"))


def test_what_is_right_is_told_by_the_words(monkeypatch):
    cpu = torch.device("cpu")
    assert keystream._is_right(by_torch, cpu)
    assert not keystream._is_right(wrong, cpu)


def test_the_draws_of_an_accelerator_are_under_keys_of_their_own(monkeypatch):
    """Made by torch on the CPU in place of an accelerator."""
    seen = []

    def recorded(key, count, device):
        seen.append(key)
        return by_torch(key, -(-count // 8))[:count]

    monkeypatch.setattr("modelmix.training.randomness.chacha20", recorded)
    randomness = Randomness(3)
    for _ in range(2):
        step = randomness.step()
        for label in ("noise", "mixing"):
            noise = step.gaussian(label, 5001, "meta")
            assert stats.kstest(noise.numpy(), "norm").pvalue > 1e-6
            with pytest.raises(ModelMixError, match="drawn already"):
                step.gaussian(label, 3, "cpu")
        randomness.advance()
    assert len(set(seen)) == 4
    assert all(len(key) == 32 for key in seen)


def test_constants_are_those_of_the_standard():
    assert struct.pack("<4I", *keystream._CONSTANTS) == b"expand 32-byte k"

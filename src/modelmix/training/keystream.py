"""ChaCha20 (RFC 8439) as tensors: a cryptographic generator that runs where an accelerator's noise is wanted.

On a GPU our kernel makes it. Where that does not run, or its first blocks are not right, the same words come from
operations of torch; and if those are not right either, nothing does.
"""

from __future__ import annotations

import struct
import warnings
from collections.abc import Callable
from functools import cache

import torch
from torch import Tensor

from modelmix._imports import one_line
from modelmix.errors import ModelMixError
from modelmix.gradients.device import to_device_async
from modelmix.gradients.kernels import has_triton

KEY_BYTES = 32
_CONSTANTS = struct.unpack("<4I", b"expand 32-byte k")
_WORDS = 16  # of 32 bits in a block
_MOST_BLOCKS = 2**31  # of a key; the counter has 32 bits


def chacha20(key: bytes, count: int, device: torch.device | str = "cpu") -> Tensor:
    """The first ``count`` words of 64 bits, as int64, of the stream under a key of 256 bits with nonce 0."""
    device = torch.device(device)
    blocks = -(-count // (_WORDS // 2))
    if len(key) != KEY_BYTES or not 0 <= blocks < _MOST_BLOCKS:
        raise ModelMixError(f"{count} words under {len(key)} bytes are not a stream of ChaCha20: it takes 32 bytes.")
    return _maker(device)(key, blocks, device)[:count]


def by_torch(key: bytes, blocks: int, device: torch.device | str = "cpu") -> Tensor:
    """All words of some blocks; a column of numbers for every word of the state, whose additions are modulo 2^32."""

    def column(word: int) -> Tensor:
        return torch.full((blocks,), _signed(word), dtype=torch.int32, device=device)

    start = [column(word) for word in (*_CONSTANTS, *_words_of(key))]
    start += [torch.arange(blocks, dtype=torch.int32, device=device), *(column(0) for _ in range(3))]
    x = list(start)

    def quarter(a: int, b: int, c: int, d: int) -> None:
        for to, by, turned, bits in ((a, b, d, 16), (c, d, b, 12), (a, b, d, 8), (c, d, b, 7)):
            x[to] = x[to] + x[by]
            mixed = x[turned] ^ x[to]
            x[turned] = (mixed << bits) | ((mixed >> (32 - bits)) & (2**bits - 1))

    for _ in range(10):
        for i in range(4):
            quarter(i, 4 + i, 8 + i, 12 + i)
        for i in range(4):
            quarter(i, 4 + (i + 1) % 4, 8 + (i + 2) % 4, 12 + (i + 3) % 4)
    return torch.stack([a + b for a, b in zip(x, start, strict=True)], 1).view(torch.int64).flatten()


def _by_kernel(key: bytes, blocks: int, device: torch.device) -> Tensor:
    from modelmix.gradients.kernels.chacha import blocks_of

    words = torch.tensor([_signed(word) for word in (*_CONSTANTS, *_words_of(key))], dtype=torch.int32, device="cpu")
    return blocks_of(to_device_async(words, device), blocks).view(torch.int64).flatten()


@cache
def _maker(device: torch.device) -> Callable[[bytes, int, torch.device], Tensor]:
    """What makes the stream on a device: the first that is right."""
    if device.type == "cuda" and has_triton():
        try:
            if _is_right(_by_kernel, device):
                return _by_kernel
            problem = "its words are wrong"
        except Exception as error:  # whatever a compiler raises on hardware we have not seen
            problem = one_line(error)
        warnings.warn(f"our kernel of ChaCha20 is not used, torch makes the same noise: {problem}", stacklevel=2)
    if not _is_right(by_torch, device):
        raise ModelMixError(f"noise is not made rightly on {device}: no step was taken. Train on another device.")
    return by_torch


def _is_right(make: Callable[[bytes, int, torch.device], Tensor], device: torch.device) -> bool:
    key, blocks = bytes(range(KEY_BYTES)), 3
    return torch.equal(make(key, blocks, device).cpu(), by_torch(key, blocks, torch.device("cpu")))


def _words_of(key: bytes) -> tuple[int, ...]:
    return struct.unpack("<8I", key)


def _signed(word: int) -> int:
    """The same 32 bits as a number that int32 holds."""
    return word - 2**32 if word >= 2**31 else word

"""Triton: blocks of ChaCha20, each by one lane, with its sixteen words in registers."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 128


@triton.jit
def _turned(x, BITS: tl.constexpr):
    return (x << BITS) | (x >> (32 - BITS))


@triton.jit
def _quarter(a, b, c, d):
    a += b
    d = _turned(d ^ a, 16)
    c += d
    b = _turned(b ^ c, 12)
    a += b
    d = _turned(d ^ a, 8)
    c += d
    b = _turned(b ^ c, 7)
    return a, b, c, d


@triton.jit
def _word(words, like, NUMBER: tl.constexpr):
    return like + tl.load(words + NUMBER).to(tl.uint32, bitcast=True)


@triton.jit
def _keep(out, at, within, start, end, NUMBER: tl.constexpr):
    tl.store(out + at * 16 + NUMBER, (start + end).to(tl.int32, bitcast=True), mask=within)


@triton.jit
def _chacha(words, out, blocks, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    within = at < blocks
    zero = tl.zeros((BLOCK,), dtype=tl.uint32)
    s0, s1, s2, s3 = _word(words, zero, 0), _word(words, zero, 1), _word(words, zero, 2), _word(words, zero, 3)
    s4, s5, s6, s7 = _word(words, zero, 4), _word(words, zero, 5), _word(words, zero, 6), _word(words, zero, 7)
    s8, s9, s10, s11 = _word(words, zero, 8), _word(words, zero, 9), _word(words, zero, 10), _word(words, zero, 11)
    s12 = at.to(tl.uint32)
    x0, x1, x2, x3, x4, x5, x6, x7 = s0, s1, s2, s3, s4, s5, s6, s7
    x8, x9, x10, x11, x12, x13, x14, x15 = s8, s9, s10, s11, s12, zero, zero, zero
    for _ in range(10):
        x0, x4, x8, x12 = _quarter(x0, x4, x8, x12)
        x1, x5, x9, x13 = _quarter(x1, x5, x9, x13)
        x2, x6, x10, x14 = _quarter(x2, x6, x10, x14)
        x3, x7, x11, x15 = _quarter(x3, x7, x11, x15)
        x0, x5, x10, x15 = _quarter(x0, x5, x10, x15)
        x1, x6, x11, x12 = _quarter(x1, x6, x11, x12)
        x2, x7, x8, x13 = _quarter(x2, x7, x8, x13)
        x3, x4, x9, x14 = _quarter(x3, x4, x9, x14)
    _keep(out, at, within, s0, x0, 0)
    _keep(out, at, within, s1, x1, 1)
    _keep(out, at, within, s2, x2, 2)
    _keep(out, at, within, s3, x3, 3)
    _keep(out, at, within, s4, x4, 4)
    _keep(out, at, within, s5, x5, 5)
    _keep(out, at, within, s6, x6, 6)
    _keep(out, at, within, s7, x7, 7)
    _keep(out, at, within, s8, x8, 8)
    _keep(out, at, within, s9, x9, 9)
    _keep(out, at, within, s10, x10, 10)
    _keep(out, at, within, s11, x11, 11)
    _keep(out, at, within, s12, x12, 12)
    _keep(out, at, within, zero, x13, 13)
    _keep(out, at, within, zero, x14, 14)
    _keep(out, at, within, zero, x15, 15)


def blocks_of(words: Tensor, blocks: int) -> Tensor:
    """blocks x 16 words, int32, from the constants and the key, 12 words of int32; counters from 0, nonce 0."""
    out = torch.empty(blocks, 16, dtype=torch.int32, device=words.device)
    if blocks:
        _chacha[(triton.cdiv(blocks, _BLOCK),)](words, out, blocks, _BLOCK)
    return out

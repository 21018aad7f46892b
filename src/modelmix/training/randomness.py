"""All the randomness of a run, passed in and never reached for.

Noise that an attacker can predict is no noise, so every draw is a keystream of a cryptographic generator under a key
that comes from 256 bits of the operating system: SHAKE-256 on the processor, and for noise on an accelerator ChaCha20,
which is made there. The key moves forward by one hash a step: a checkpoint holds what resuming needs and nothing from
which the noise of past steps could be computed. It does hold the future: keep it secret.

**The key of a step serves one computation.** The same noise on two different gradients gives their difference in the
clear. So whenever a run goes on from something that was kept (a checkpoint, a state dict), fresh entropy is mixed into
the key: what follows has its own noise, whatever became of the data, the settings or the code in between. Only a seeded
run repeats its key, where everything we can see of the computation is as it was.

A seed makes a run repeatable, for tests; whoever knows it can take the noise away, and so can whoever sees two
different runs with the same seed.
"""

from __future__ import annotations

import hashlib
import math
import os
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from modelmix.errors import ModelMixError
from modelmix.training.keystream import KEY_BYTES, chacha20

_UNIT = 2.0**-53


def _derive(key: bytes, label: str, size: int) -> bytes:
    return hashlib.shake_256(key + label.encode()).digest(size)


class StepRandomness:
    """The draws of one step. Every label can be drawn once, so that no noise is ever used twice."""

    def __init__(self, key: bytes) -> None:
        self._key = key
        self._drawn: set[str] = set()

    def same_as(self, other: StepRandomness) -> bool:
        """Whether both are the draws of the same step of the same run."""
        return self._key == other._key

    def _words(self, label: str, count: int, device: torch.device | str = "cpu") -> Tensor:
        """``count`` uniform 64-bit words, as int64."""
        if label in self._drawn:
            raise ModelMixError(f"the {label} of this step was drawn already: randomness is never reused.")
        self._drawn.add(label)
        if torch.device(device).type != "cpu":
            return chacha20(_derive(self._key, f"chacha20:{label}", KEY_BYTES), count, device)
        stream = _derive(self._key, label, 8 * count)
        return torch.frombuffer(bytearray(stream or b"\0" * 8), dtype=torch.int64)[:count]

    def uniform(self, label: str, count: int, device: torch.device | str = "cpu") -> Tensor:
        """Uniform on (0, 1) in float64: from 2^-54 to 1 - 2^-53, never 0 and never 1."""
        units = ((self._words(label, count, device) >> 11) & (2**53 - 1)).double().add_(0.5)
        return units.mul_(_UNIT).clamp_max_(1 - _UNIT)  # the half of the last unit is rounded up

    def gaussian(self, label: str, count: int, device: torch.device | str = "cpu") -> Tensor:
        """Standard Gaussian in float64, by Box and Muller's transform."""
        half = (count + 1) // 2
        u = self.uniform(label, 2 * half, device)
        radius = torch.sqrt(-2 * torch.log(u[:half]))
        angle = 2 * math.pi * u[half:]
        return torch.cat([radius * torch.cos(angle), radius * torch.sin(angle)])[:count]

    def laplace(self, label: str, count: int, device: torch.device | str = "cpu") -> Tensor:
        """Standard Laplace (scale 1) in float64: a random sign times an exponential."""
        u = self.uniform(label, 2 * count, device)
        return torch.where(u[:count] < 0.5, 1.0, -1.0) * -torch.log(u[count:])

    def poisson_indices(self, label: str, count: int, rate: float) -> Tensor:
        """The indices below ``count`` that an independent coin of probability ``rate`` picks, each with its own.

        The coin is a 63-bit integer below floor(rate * 2^63): the probability is ``rate`` to within 2^-63, never above.
        """
        words = self._words(label, count)
        if rate >= 1:
            return torch.arange(count, device="cpu")
        return torch.nonzero((words & (2**63 - 1)) < int(rate * 2**63)).flatten()

    def generator(self, label: str, device: torch.device | str = "cpu") -> torch.Generator:
        """A torch generator for what privacy does not rest on: dropout, augmentation, initial weights."""
        seed = int.from_bytes(_derive(self._key, f"generator:{label}", 8), "little") >> 1
        return torch.Generator(device).manual_seed(seed)


class Randomness:
    """The key of a run and how far it has moved.

    Args:
        seed: None takes 256 bits of the operating system's entropy. A whole number makes the run repeatable, and the
            run is then for tests only.
    """

    def __init__(self, seed: int | None = None) -> None:
        if seed is not None and (isinstance(seed, bool) or not isinstance(seed, int)):
            raise ModelMixError(f"seed = {seed!r} is not a whole number: leave it out for randomness from the system.")
        self.seeded = seed is not None
        self._process = os.getpid()
        self._key = os.urandom(KEY_BYTES) if seed is None else _derive(f"seed {seed} ".encode(), "key", KEY_BYTES)

    def step(self) -> StepRandomness:
        """The draws of the coming step."""
        self._own()
        return StepRandomness(_derive(self._key, "step", KEY_BYTES))

    def _own(self) -> None:
        """A forked process has a copy of the key: it gets noise of its own."""
        if os.getpid() != self._process:
            if self.seeded:
                raise ModelMixError("a seeded run cannot go on in a forked process: its noise would be used twice.")
            self.refresh()
            self._process = os.getpid()

    def advance(self) -> None:
        """Moves on to the next step and forgets the key of this one."""
        self._key = _derive(self._key, "next", KEY_BYTES)

    def refresh(self) -> None:
        """Mix fresh entropy of the operating system into the key: no earlier copy of it leads to what follows."""
        self._key = _derive(self._key + os.urandom(KEY_BYTES), "fresh", KEY_BYTES)

    def coming_steps(self) -> Iterator[StepRandomness]:
        """The draws of the coming steps in order, for fetching data ahead of time."""
        self._own()
        ahead = Randomness.from_state(self.state())
        while True:
            yield ahead.step()
            ahead.advance()

    def comes_to(self, draws: StepRandomness) -> bool:
        """Whether these are the draws of the coming step."""
        return draws.same_as(self.step())

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise ModelMixError("what holds the key of coming noise is not copied: make a new trainer or loop instead.")

    def state(self) -> dict[str, str | bool]:
        """What a checkpoint keeps. Secret: it holds the noise of the steps to come."""
        return {"key": self._key.hex(), "seeded": self.seeded}

    @classmethod
    def from_state(cls, state: dict[str, str | bool]) -> Randomness:
        out = cls.__new__(cls)
        try:
            out._key = bytes.fromhex(str(state["key"]))
            out.seeded = bool(state["seeded"])
            out._process = os.getpid()
        except (KeyError, ValueError):
            raise ModelMixError("the checkpoint's randomness is not readable: restore the file.") from None
        if len(out._key) != KEY_BYTES:
            raise ModelMixError("the checkpoint's randomness is not readable: restore the file.")
        return out

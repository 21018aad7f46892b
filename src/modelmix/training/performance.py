"""Knobs that change speed and memory and never the ledger."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from modelmix._checks import whole
from modelmix.errors import ModelMixError

_CHUNK_BYTES = {"cpu": 2**26, "cuda": 2**31}  # of gradients held at once: about a cache, and a fraction of a card
_TILE = 32  # samples of which a chunk on an accelerator is a multiple, if so many fit
_MOST = 2048  # samples of a chunk on an accelerator, which more would not keep busier


@dataclass(frozen=True)
class Performance:
    """How a run uses the machine.

    Args:
        device: "cpu", "cuda", ...; None takes an accelerator if there is one.
        engine: "auto", "hooks", "vmap" or "loop"; see ``modelmix.gradients``.
        precision: in which the model is run: "float32", "bfloat16" or "float64"; None takes the model's own. Clipping
            measures and sums in float64 whatever this says, and released states stay in float64.
        compiled: trace and compile the work of a chunk; None does so on a GPU. It takes half a minute and pays after
            some hundreds of steps.
        chunk: samples whose gradients are held at once; None chooses by the size of the model and the batch.
        workers: processes that fetch samples of a ``Dataset``.
    """

    device: str | torch.device | None = None
    engine: str = "auto"
    precision: str | None = None
    compiled: bool | None = None
    chunk: int | None = None
    workers: int = 0

    def __post_init__(self) -> None:
        if self.chunk is not None:
            whole("chunk", self.chunk, "the number of samples held at once", least=1)
        whole("workers", self.workers, "the number of worker processes", least=0)

    def find_device(self) -> torch.device:
        if self.device is None:
            return torch.device("cuda" if torch.cuda.is_available() else "cpu")
        try:
            device = torch.device(self.device)
            torch.zeros(1, device=device)
        except (RuntimeError, AssertionError):
            raise ModelMixError(
                f"device = {str(self.device)!r} is not there: this machine has cpu"
                f"{', cuda' if torch.cuda.is_available() else ''}."
            ) from None
        return device

    def chunk_for(self, expected_batch: float, coordinates: int, copies: int) -> int:
        """Large enough to keep the machine busy, small enough to waste little on padding.

        On a processor a power of two, about a sixth of the batch. An accelerator gets the fewest chunks of equal size
        that hold two standard deviations more than is expected: few draws need another.
        """
        if self.chunk is not None:
            return int(self.chunk)
        kind = self.find_device().type
        fits = max(1, _CHUNK_BYTES.get(kind, 2**26) // (4 * max(1, coordinates)))
        if kind == "cpu":
            wanted = max(16.0, min(expected_batch / 6, 1024.0 / copies))
            return min(fits, 1 << round(wanted - 1).bit_length())
        most = min(fits, max(1, _MOST // copies))
        expected = max(1, math.ceil(expected_batch + 2 * math.sqrt(expected_batch)))
        even = -(-expected // -(-expected // most))
        return min(most, -(-even // _TILE) * _TILE)

"""Gradients of a chunk that are written down for some parameters at a time, as often as they are asked for."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from modelmix.gradients.engines import hooks
from modelmix.gradients.engines.chunk import ENGINES, Loss, detached, rows, unchanged
from modelmix.gradients.gradients import Gradients, Unwritten
from modelmix.gradients.torch_rng import draws_apart


class OfUses(Unwritten):
    """From what every layer saw in one pass over the samples."""

    def __init__(self, uses: Sequence[hooks.Use], parameters: Mapping[str, Tensor], samples: int) -> None:
        super().__init__(parameters, samples)
        self._uses = uses

    def of(self, names: AbstractSet[str]) -> Iterator[tuple[str, Gradients]]:
        for use in self._uses:
            if not names.isdisjoint(use.names.values()):
                yield from _chosen(use.gradients(self.parameters), names)


class OfPasses(Unwritten):
    """By a pass over the samples each time, for models whose layers cannot be followed.

    All passes are given the same inputs, whatever the model does to them, and draw the same random numbers, for
    dropout and the like, as long as they are torch's.

    Args:
        engine, model, loss: that give gradients.
        batch: (inputs, targets), every sample of which is ``copies`` rows.
        check: refuses what the model keeps from one pass to the next.
    """

    def __init__(
        self,
        engine: str,
        model: nn.Module,
        loss: Loss,
        parameters: dict[str, Tensor],
        batch: Any,
        copies: int,
        check: Callable[[], None],
    ) -> None:
        super().__init__(parameters, rows(batch) // copies)
        self._check = check
        self._engine = partial(ENGINES[engine], model, loss, parameters)
        self._batch, self._copies = detached(*batch), copies
        self._seed = int(torch.randint(2**62, (), device="cpu"))

    def of(self, names: AbstractSet[str]) -> Iterator[tuple[str, Gradients]]:
        if self.samples:
            with draws_apart(self.device), unchanged(self.parameters):
                torch.manual_seed(self._seed)
                found = self._engine(*tree_map(torch.clone, self._batch), self._copies, names=names)
            self._check()
            yield from found.items()


def _chosen(found: dict[str, Gradients], names: AbstractSet[str]) -> Iterator[tuple[str, Gradients]]:
    return ((name, g) for name, g in found.items() if name in names)

"""Per-sample gradients that are materialised on demand, a few parameters at a time."""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet

import torch
from torch import Tensor

from modelmix.errors import ModelMixError
from modelmix.gradients.batch import Batch, PassResult
from modelmix.gradients.device import preserve_torch_rng
from modelmix.gradients.forms import Gradients
from modelmix.gradients.layers import LayerCall


class LazyGradients(ABC):
    """Give the gradients of some samples, materialised on demand, a few parameters at a time.

    Args:
        parameters: by name, in the order of the flat vector.
        samples: how many there are; rows behind them are padding.
    """

    def __init__(self, parameters: Mapping[str, Tensor], samples: int) -> None:
        self.parameters, self.samples = parameters, samples

    @property
    def device(self) -> torch.device:
        return next(iter(self.parameters.values())).device

    @abstractmethod
    def of(self, names: AbstractSet[str]) -> Iterator[tuple[str, Gradients]]:
        """Yield the gradients of some parameters, one after the other in any order.

        Of a parameter that is used several times there may be several, which add up; of one that is not used, none.
        """

    def first(self, count: int) -> LazyGradients:
        """Return the gradients of the first samples."""
        fewer = copy.copy(self)
        fewer.samples = count
        return fewer

    def columns(self, part: slice, kind: torch.dtype, width: int) -> Tensor:
        """Return a contiguous part of every sample's flat gradient, m x width, with zeros behind it.

        Materialised layer by layer: beside what is returned, one layer's gradients are held.

        Args:
            kind: the precision.
        """
        places, start = {}, 0
        for name, p in self.parameters.items():
            low, high = max(part.start - start, 0), min(part.stop - start, p.numel())
            if low < high:
                places[name] = low, high, slice(start + low - part.start, start + high - part.start)
            start += p.numel()
        out, met = torch.zeros(self.samples, width, dtype=kind, device=self.device), set()
        for name, g in self.of(places.keys()):
            if g.samples < self.samples:  # one row for several samples would let one of them add several times
                raise ModelMixError(f"there are gradients of {g.samples} samples where {self.samples} were given.")
            low, high, at = places[name]
            place = out[:, at]
            if high - low == self.parameters[name].numel():  # whatever the order in memory, one pass
                values = g.dense()[: self.samples]
                place = place.view(values.shape)
            else:
                values = g.coordinates(low, high)[: self.samples]
            if name in met:
                place += values
            else:
                place.copy_(values)
            met.add(name)
            del g, values  # before those of the next layer
        return out


class FromLayerCalls(LazyGradients):
    """Compute gradients from what every layer saw in one pass over the samples."""

    def __init__(self, calls: Sequence[LayerCall], parameters: Mapping[str, Tensor], samples: int) -> None:
        super().__init__(parameters, samples)
        self._calls = calls

    def of(self, names: AbstractSet[str]) -> Iterator[tuple[str, Gradients]]:
        for call in self._calls:
            if not names.isdisjoint(call.names.values()):
                yield from ((name, g) for name, g in call.gradients(self.parameters).items() if name in names)


class FromRecompute(LazyGradients):
    """Compute gradients by a pass over the samples each time, for models whose layers cannot be followed.

    All passes are given the same inputs, whatever the model does to them, and draw the same random numbers, for
    dropout and the like, as long as they are torch's.

    Args:
        run: gives gradients of (parameters, batch), with ``names`` of those that are wanted.
        check: refuses what the model keeps from one pass to the next.
    """

    def __init__(
        self, run: Callable[..., PassResult], parameters: dict[str, Tensor], batch: Batch, check: Callable[[], None]
    ) -> None:
        super().__init__(parameters, batch.samples)
        self._run, self._values, self._batch, self._check = run, parameters, batch, check
        self._seed = int(torch.randint(2**62, (), device="cpu"))

    def of(self, names: AbstractSet[str]) -> Iterator[tuple[str, Gradients]]:
        if self.samples:
            with preserve_torch_rng(self.device):
                torch.manual_seed(self._seed)
                found = self._run(self._values, self._batch.map(torch.clone), names=names)
            self._check()
            yield from found.gradients.items()

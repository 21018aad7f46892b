"""The trained parameters of a model as one flat vector."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from modelmix.errors import ModelMixError


def _refuse_shared_memory(model: nn.Module) -> None:
    """Refuse two tensors in one place in memory, one of them trained: they would be trained apart and kept as one."""
    spans = []
    for name, t in [*model.named_parameters(), *model.named_buffers()]:
        if t.numel() and t.layout == torch.strided:
            last = sum((size - 1) * step for size, step in zip(t.shape, t.stride(), strict=True))
            start = t.data_ptr()
            spans.append((str(t.device), start, start + (last + 1) * t.element_size(), name, t.requires_grad))
    ends: dict[tuple[str, bool], int] = {}  # how far memory is taken, by device, by all tensors and by trained ones
    for device, start, end, name, trained in sorted(spans):
        if start < ends.get((device, not trained), 0):
            raise ModelMixError(
                f"{name} shares memory with another tensor of the model: tie parameters by assigning one Parameter."
            )
        for kind in (False, True) if trained else (False,):
            ends[device, kind] = max(end, ends.get((device, kind), 0))


class FlatParameters:
    """Map the parameters that require a gradient to one flat vector, and back; a tied parameter counts once.

    The vector is kept apart from the model and in float64, so that the law of the noise is not rounded to the model's
    precision; ``write`` copies it into the model.

    Args:
        model: whose ``named_parameters`` give the order.

    Raises:
        ModelMixError: if nothing is trained, or something that cannot be (lazy, complex, in shared memory).

    >>> flat = FlatParameters(nn.Linear(3, 2))
    >>> flat.names, flat.size, flat.read().dtype
    (['weight', 'bias'], 8, torch.float64)
    """

    def __init__(self, model: nn.Module) -> None:
        self._parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
        if not self._parameters:
            raise ModelMixError("the model has no trainable parameter: set requires_grad on what is to be trained.")
        if any(is_lazy(t) for t in (*model.parameters(), *model.buffers())):
            raise ModelMixError("the model has lazy layers without a shape: run it once on a sample before training.")
        odd = [name for name, p in self._parameters.items() if not p.is_floating_point()]
        if odd:
            raise ModelMixError(
                f"parameter {odd[0]} is {self._parameters[odd[0]].dtype}: only real floats are trained."
            )
        _refuse_shared_memory(model)
        self.sizes = [p.numel() for p in self._parameters.values()]
        self.size = sum(self.sizes)

    @property
    def names(self) -> list[str]:
        """Of the parameters, in their order."""
        return list(self._parameters)

    @property
    def shapes(self) -> dict[str, list[int]]:
        """Of the parameters, by name."""
        return {name: list(p.shape) for name, p in self._parameters.items()}

    def read(self) -> Tensor:
        """Return the model's present values, as a float64 vector."""
        return torch.cat([p.detach().reshape(-1).double() for p in self._parameters.values()])

    def read_from(self, values: nn.Module | Mapping[str, Tensor]) -> Tensor:
        """Return the vector of another model of the same shape, or of its state dict."""
        state = dict(values.named_parameters()) if isinstance(values, nn.Module) else values
        for name, p in self._parameters.items():
            if name not in state or state[name].shape != p.shape:
                raise ModelMixError(f"the other initial state has no {name} of shape {tuple(p.shape)}.")
        first = next(iter(self._parameters.values()))
        return torch.cat([state[name].detach().reshape(-1).double().to(first.device) for name in self._parameters])

    def views(self, vector: Tensor) -> dict[str, Tensor]:
        """Return the vector as the model's parameters, by name, in the model's precision: a copy, whatever that is.

        A pass that writes to what it is given is refused after it has; what it wrote to must be nobody's state.
        """
        parameters = self._parameters
        dtypes = {p.dtype for p in parameters.values()}
        vector = vector.to(dtypes.pop(), copy=True) if len(dtypes) == 1 else vector.clone()
        pieces = torch.split(vector, self.sizes)
        return {
            name: piece.view(p.shape).to(p.dtype) for (name, p), piece in zip(parameters.items(), pieces, strict=True)
        }

    def write(self, vector: Tensor) -> None:
        """Copy the vector into the model."""
        with torch.no_grad():
            for p, value in zip(self._parameters.values(), self.views(vector).values(), strict=True):
                p.copy_(value)

    def versions(self) -> list[tuple[int, int]]:
        """Return what changes whenever someone writes into a trained parameter."""
        return [(p.data_ptr(), p._version) for p in self._parameters.values()]

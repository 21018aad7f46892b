"""A batch as engines take it: some samples, what weight each has, and how many rows it is."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map

from modelmix.errors import ModelMixError
from modelmix.gradients.forms import DenseGradients, Gradients

Loss = Callable[[Any, Any], Tensor]
"""``loss(outputs, targets)``, as for ordinary training; it is only ever given one sample at a time."""


def count_rows(tree: Any) -> int:
    """Return how many rows the tensors of a batch have, samples first.

    Args:
        tree: a tensor, or a tuple or dict of tensors.

    Raises:
        ModelMixError: if something else is among them, or they do not have the same number of rows.

    >>> count_rows({"a": torch.zeros(4, 3), "b": torch.zeros(4)})
    4
    """
    leaves = tree_leaves(tree)
    if not leaves or not all(isinstance(t, Tensor) and t.dim() > 0 for t in leaves):
        raise ModelMixError("a batch is a tensor, or a tuple or dict of tensors, with the samples first.")
    if len({t.shape[0] for t in leaves}) != 1:
        raise ModelMixError("the tensors of a batch do not have the same number of samples.")
    return int(leaves[0].shape[0])


@dataclass(frozen=True)
class Batch:
    """Hold the samples whose clipped gradients are summed.

    Args:
        inputs: of the model: a tensor, or a tuple or dict of tensors, samples first.
        targets: of the loss, samples first.
        weights: a number for every sample, 1 if it was drawn and 0 if it is padding; None: all were drawn.
        rows_per_sample: how many rows that follow each other are one sample, whose gradient is their mean.

    >>> import torch
    >>> batch = Batch(torch.zeros(6, 3), torch.zeros(6), rows_per_sample=2)
    >>> batch.samples, batch.part(slice(1, 3)).inputs.shape
    (3, torch.Size([4, 3]))
    """

    inputs: Any
    targets: Any
    weights: Tensor | None = None
    rows_per_sample: int = 1

    @property
    def samples(self) -> int:
        """How many samples these are, padding included."""
        return int(tree_leaves(self.inputs)[0].shape[0]) // self.rows_per_sample

    @property
    def sample_weights(self) -> Tensor:
        """The weights, all of them 1 if none are given."""
        if self.weights is not None:
            return self.weights
        return torch.ones(self.samples, dtype=torch.float64, device=tree_leaves(self.inputs)[0].device)

    @property
    def form(self) -> Any:
        """What is equal for batches that differ in their numbers and in how many samples they are, and in no more."""
        leaves, form = tree_flatten((self.inputs, self.targets))
        return tuple([(tuple(t.shape[1:]), t.dtype, t.device) for t in leaves]), str(form), self.rows_per_sample

    def checked(self) -> Batch:
        """Return this batch, after it was seen to be one.

        Raises:
            ModelMixError: if rows, weights and rows of a sample do not fit together.
        """
        rows, copies = count_rows((self.inputs, self.targets)), self.rows_per_sample
        m = rows // copies if self.weights is None else self.weights.shape[0]
        if rows != m * copies:
            raise ModelMixError(f"{m} samples of {copies} rows each are not the {rows} rows that were given.")
        return self

    def map(self, change: Callable[[Tensor], Tensor], inputs_only: bool = False) -> Batch:
        """Return the batch with every tensor of the inputs, and of the targets, changed."""
        targets = self.targets if inputs_only else tree_map(change, self.targets)
        return replace(self, inputs=tree_map(change, self.inputs), targets=targets)

    def part(self, samples: slice) -> Batch:
        """Return some of the samples: ``slice(start, stop)``."""
        k = self.rows_per_sample
        start, stop, _ = samples.indices(self.samples)
        weights = None if self.weights is None else self.weights[start:stop]
        return replace(self.map(lambda t: t[start * k : stop * k]), weights=weights)


class PassResult(NamedTuple):
    """What one pass over a batch gives.

    Args:
        gradients: of every sample, by parameter; one that is not used is missing.
        outputs: of the model, where they were asked for.
        losses: of every row, where they were asked for.
    """

    gradients: dict[str, Gradients]
    outputs: Any = None
    losses: Tensor | None = None

    def in_order(self, parameters: Mapping[str, Tensor], batch: Batch) -> list[Gradients]:
        """List the gradients in the order of the parameters, with zeros for one that is not used."""
        unused = [name for name in parameters if name not in self.gradients]
        zeros = {n: DenseGradients(parameters[n].new_zeros(batch.samples, *parameters[n].shape)) for n in unused}
        return [zeros[name] if name in zeros else self.gradients[name] for name in parameters]

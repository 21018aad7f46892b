"""The clipped sum of one chunk of samples, by any engine."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from modelmix.errors import ModelMixError
from modelmix.gradients.clipping import Clip, ClippedSum
from modelmix.gradients.engines import trace, universal
from modelmix.gradients.gradients import Dense, Gradients

Loss = universal.Loss
PerSample = Callable[..., dict[str, Gradients]]

ENGINES: dict[str, PerSample] = {
    "hooks": trace.per_sample,
    "universal": universal.per_sample,
    "loop": universal.per_sample_loop,
}


def known(engine: str) -> str:
    """The name of an engine, or a refusal."""
    if engine not in ENGINES:
        raise ModelMixError(f"engine = {engine!r} is unknown: choose auto, {', '.join(ENGINES)}.")
    return engine


def rows(tree: Any) -> int:
    """Samples in a batch."""
    leaves = tree_leaves(tree)
    if not leaves or not all(isinstance(t, Tensor) and t.dim() > 0 for t in leaves):
        raise ModelMixError("a batch is a tensor, or a tuple or dict of tensors, with the samples first.")
    if len({t.shape[0] for t in leaves}) != 1:
        raise ModelMixError("the tensors of a batch do not have the same number of samples.")
    return int(leaves[0].shape[0])


def gradients_of_chunk(
    engine: str,
    model: nn.Module,
    loss: Loss,
    parameters: dict[str, Tensor],
    inputs: Any,
    targets: Any,
    copies: int,
) -> list[Gradients]:
    """The gradient of every sample for every parameter, in order; every sample is ``copies`` rows in a row."""
    m = rows((inputs, targets)) // copies
    with unchanged(parameters):
        found = ENGINES[engine](model, loss, parameters, *detached(inputs, targets), copies) if m else {}
    return [found[n] if n in found else Dense(p.new_zeros(m, *p.shape)) for n, p in parameters.items()]


@contextmanager
def unchanged(parameters: Mapping[str, Tensor]) -> Iterator[None]:
    """Refuses a model that writes to what is trained while it runs."""
    before = [p._version for p in parameters.values()]
    yield
    if before != [p._version for p in parameters.values()]:
        raise ModelMixError(
            "the model changes its trained parameters while it runs (max_norm?): only steps may do that."
        )


def detached(inputs: Any, targets: Any) -> tuple[Any, Any]:
    out: tuple[Any, Any] = tree_map(lambda t: t.detach(), (inputs, targets))
    return out


def sum_of_chunk(
    engine: str,
    model: nn.Module,
    loss: Loss,
    parameters: dict[str, Tensor],
    inputs: Any,
    targets: Any,
    weights: Tensor,
    clip: Clip,
    copies: int = 1,
) -> ClippedSum:
    """The clipped sum of one chunk at the given parameters; every sample is ``copies`` rows that follow each other."""
    known(engine)
    check_rows((inputs, targets), weights, copies)
    return clip.sum(gradients_of_chunk(engine, model, loss, parameters, inputs, targets, copies), weights)


def check_rows(batch: Any, weights: Tensor, copies: int) -> None:
    m = weights.shape[0]
    if rows(batch) != m * copies:
        raise ModelMixError(f"{m} samples of {copies} rows each are not the {rows(batch)} rows that were given.")

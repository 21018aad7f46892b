"""What a model must not do for an epsilon to be true. Every refusal names the rule, the reason and the way out."""

from __future__ import annotations

import os
from collections.abc import Iterable

import torch
from torch import Tensor, nn

from modelmix.accounting.embedding import EmbeddingMechanism
from modelmix.accounting.mechanism import Mechanism
from modelmix.errors import ModelMixError, UnprovedError
from modelmix.gradients.memory import ALONE, SAME_SET


class PrivateForward:
    """The forward of a model in a private loop."""


def require_not_private(model: nn.Module) -> None:
    """Refuse a model that a private loop trains, or one that holds such a model: its ledger would be forgotten."""
    if any(isinstance(vars(module).get("forward"), PrivateForward) for module in model.modules()):
        raise UnprovedError(
            "everything that is released about the same samples adds up",
            "this model was made private before, and its ledger would be forgotten.",
            "Go on with the loop that was made, or give a fresh model and the earlier ledger as spent in the plan.",
        )


def require_one_process() -> None:
    """Refuse several processes: each would train on all the data, and the epsilon of one covers one."""
    world = os.environ.get("WORLD_SIZE", "1")
    group = torch.distributed.is_available() and torch.distributed.is_initialized()
    if (group and torch.distributed.get_world_size() > 1) or (world.isdigit() and int(world) > 1):
        raise UnprovedError(
            "one draw, one sum and one noise make a step",
            "several processes were started (WORLD_SIZE is above 1), and each would train a model of its own on all "
            "the data.",
            "Start one process: training on several devices is not supported yet.",
        )


def check_model(model: nn.Module) -> None:
    """Refuses layers that let samples meet or that keep statistics of the data."""
    for name, module in model.named_modules():
        where = f"layer {name!r}" if name else "the model"
        if isinstance(module, nn.modules.batchnorm._BatchNorm):
            trained = any(p.requires_grad for p in module.parameters())
            if module.training or trained or not module.track_running_stats:
                raise UnprovedError(
                    ALONE,
                    f"{where} is a {type(module).__name__}: it mixes the samples of a batch.",
                    "Use GroupNorm or LayerNorm; a pretrained one may stay if it is frozen and in eval mode.",
                )
        elif isinstance(module, nn.modules.instancenorm._InstanceNorm) and module.track_running_stats:
            raise UnprovedError(
                ALONE,
                f"{where} keeps running statistics of the training data without noise.",
                "Use track_running_stats=False.",
            )


def check_public_model(model: nn.Module, samples: Iterable[Tensor]) -> None:
    """Refuse a model that holds training samples: a support set, a memory bank, a normaliser made of them.

    What lies in the memory of the samples is seen; a copy of them is not.
    """
    taken = {t.untyped_storage().data_ptr() for t in samples if t.numel()}
    for path, module in model.named_modules():
        inside = {**vars(module), **module._buffers, **module._parameters}
        for name, value in inside.items():
            held = isinstance(value, Tensor) and value.numel() and value.layout == torch.strided
            if held and value.untyped_storage().data_ptr() in taken:
                raise UnprovedError(
                    ALONE,
                    f"the model holds training samples as {'.'.join(filter(None, (path, name)))}.",
                    "What a model starts with must be public, or paid for and counted by spent.",
                )


def require_other_samples(what: str, given: Iterable[Tensor], samples: Iterable[Tensor]) -> None:
    """Refuse tensors that are declared public and lie in the memory of the training samples."""
    taken = [_span(t) for t in samples if t.numel() and t.layout == torch.strided]
    spans = [_span(t) for t in given if t.numel() and t.layout == torch.strided]
    if any(start < other_end and other < end for start, end in spans for other, other_end in taken):
        raise UnprovedError(
            "what is declared public holds nothing of the training samples",
            f"{what} lies in the memory of the training samples.",
            "Give other samples, or do not declare them public.",
        )


def _span(t: Tensor) -> tuple[int, int]:
    """Return where a tensor begins and ends in memory; other rows of one array have another span."""
    last = sum((size - 1) * step for size, step in zip(t.shape, t.stride(), strict=True))
    return t.data_ptr(), t.data_ptr() + (last + 1) * t.element_size()


def check_mechanism(mechanism: Mechanism, coordinates: int, embedded: bool = False) -> None:
    """Refuses an account that counts on fewer coordinates than are trained, or on a law that cannot be re-checked.

    Args:
        embedded: whether steps embed gradients, which their account must know.
    """
    if not isinstance(mechanism, Mechanism):
        raise ModelMixError(f"{mechanism!r} is not a Mechanism: make one with mm.Mechanism or mm.calibrate.")
    if embedded != isinstance(mechanism, EmbeddingMechanism):
        raise UnprovedError(
            "a step runs the mechanism that its ledger line names",
            "an embedded step releases two sums, and its mechanism counts on one."
            if embedded
            else "the mechanism counts on embedded gradients, and a step would not embed them.",
            "EmbeddingMechanism goes with Trainer(..., embedding=...), and every other mechanism without.",
        )
    mechanism.as_dict()  # only named laws can be written to a ledger
    if mechanism.dimension is not None and mechanism.dimension < min(coordinates, mechanism.p):
        raise UnprovedError(
            SAME_SET,
            f"the mechanism counts on {mechanism.dimension} coordinates and the model trains {coordinates}.",
            f"Leave dimension out, or set it to {coordinates}.",
        )

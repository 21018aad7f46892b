"""What a model must not do for an epsilon to be true. Every refusal names the rule, the reason and the way out."""

from __future__ import annotations

import hashlib
import os
from collections import deque
from functools import partial
from types import CellType, FunctionType, MethodType, ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.utils.weight_norm import WeightNorm

from modelmix.accounting.embedding import EmbeddingMechanism
from modelmix.accounting.mechanism import Mechanism
from modelmix.errors import ModelMixError, UnprovedError

ALONE = "a sample's gradient depends on that sample and the released state alone"
FIXED = "whatever is not trained stays as it was"
SAME_SET = "the coordinates trained are the ones that are noised, mixed and accounted for"


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
        where = name or "the model"
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


class Watch:
    """Remembers what may not change during training and complains when it did.

    Args:
        model: the model.
        attributes: also watch what modules keep beside parameters and buffers. For engines that run the model's own
            code on one sample after the other, or on several that must not know of each other.
    """

    def __init__(self, model: nn.Module, attributes: bool = False) -> None:
        self._model, self._attributes = model, attributes
        self._trained = {name for name, p in model.named_parameters() if p.requires_grad}
        self._fixed = self._versions()
        self._kept = self._values() if attributes else {}

    def _versions(self) -> dict[str, tuple[int, int]]:
        fixed = {name: _stamp(p) for name, p in self._model.named_parameters() if name not in self._trained}
        return fixed | {name: _stamp(b) for name, b in self._model.named_buffers()}

    def _values(self) -> dict[str, Any]:
        return {
            f"{path}.{name}".lstrip("."): (value, _content(value))
            for path, module in self._model.named_modules()
            for name, value in vars(module).items()
            if name not in _TORCHS_OWN and name not in _computed(module)
        } | {
            f"{path}.hooks".lstrip("."): (None, [_content(hook) for hook in _hooks(module)])
            for path, module in self._model.named_modules()
        }

    def check(self) -> None:
        now = {name for name, p in self._model.named_parameters() if p.requires_grad}
        if now != self._trained:
            odd = sorted(now ^ self._trained)[0]
            raise UnprovedError(
                SAME_SET,
                f"{odd} was {'unfrozen or added' if odd in now else 'frozen or removed'} after training began.",
                "Decide what is trained before making the trainer; begin a new run for another choice.",
            )
        versions = self._versions()
        for name in sorted(set(versions) ^ set(self._fixed)) or sorted(versions):
            if versions.get(name) != self._fixed.get(name):
                raise UnprovedError(
                    FIXED,
                    f"{name} is not trained and yet was changed during training.",
                    "Keep buffers and frozen parameters as they are; statistics of private data cost budget.",
                )
        if self._attributes:
            self._check_attributes()

    def _check_attributes(self) -> None:
        kept = self._values()
        for name in sorted(set(kept) | set(self._kept)):
            before, after = self._kept.get(name), kept.get(name)
            if before is None or after is None or before[1] != after[1]:
                raise UnprovedError(
                    FIXED,
                    f"the model's attribute {name} changed while samples ran: one could reach another through it.",
                    "Compute it from the sample alone, or once in __init__; keep nothing of one forward pass.",
                )


_TORCHS_OWN = frozenset(vars(nn.Module()))
"""Registries of parameters, buffers, modules and hooks."""


def _hooks(module: nn.Module) -> list[Any]:
    """What else runs with a module; torch's own hooks recompute weights and keep nothing of samples."""
    every = [*module._forward_pre_hooks.values(), *module._forward_hooks.values()]
    return [hook for hook in every if not type(hook).__module__.startswith(("torch.", "modelmix."))]


def _computed(module: nn.Module) -> set[str]:
    """Attributes that torch itself computes from the parameters whenever a module runs."""
    if isinstance(module, nn.RNNBase):
        return {"_flat_weights", "_flat_weight_refs"}
    return {hook.name for hook in module._forward_pre_hooks.values() if isinstance(hook, WeightNorm)}


def _stamp(t: Tensor) -> tuple[int, int]:
    try:
        return t.data_ptr(), t._version
    except RuntimeError:  # a tensor of a transform, which has no memory of its own: it is its own identity
        return id(t), -1


def _content(value: Any, depth: int = 3) -> Any:
    """Equal as long as a value stays what it is: by value if it is plain, else by identity and what it is made of."""
    if isinstance(value, bool | int | float | complex | str | bytes | None):
        return type(value), repr(value)
    if isinstance(value, Tensor):
        return id(value), _stamp(value)
    if isinstance(value, np.ndarray):
        return id(value), hashlib.blake2b(np.ascontiguousarray(value).tobytes()).digest()
    if not depth or isinstance(value, nn.Module) or type(value).__module__.startswith("modelmix."):
        return id(value)  # modules are looked at by themselves, and ours keep nothing that a model reads
    if isinstance(value, dict):
        return id(value), [(_content(k, depth - 1), _content(v, depth - 1)) for k, v in value.items()]
    if isinstance(value, list | tuple | deque | set | frozenset):
        return id(value), [_content(v, depth - 1) for v in value]
    if isinstance(value, MethodType):
        return _content(value.__self__, depth - 1)
    if isinstance(value, FunctionType):
        cells = [_content(_cell(cell), depth - 1) for cell in value.__closure__ or ()]
        return id(value), cells, _content(value.__defaults__, depth - 1)
    if isinstance(value, partial):
        return id(value), [_content(v, depth - 1) for v in (value.func, value.args, value.keywords)]
    if hasattr(value, "__dict__") and not isinstance(value, type | ModuleType):
        return id(value), [(k, _content(v, depth - 1)) for k, v in vars(value).items()]
    return id(value)


def _cell(cell: CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # not filled yet
        return None


class WatchedFunction:
    """Remember what a function that is given samples keeps, and complain when it has changed: a criterion, say."""

    def __init__(self, function: Any, called: str) -> None:
        self._function, self._called = function, called
        self._kept = self._now()

    def _now(self) -> Any:
        if not isinstance(self._function, nn.Module):
            return _content(self._function)
        buffers = [(name, _stamp(b)) for name, b in self._function.named_buffers()]
        own = [(k, _content(v)) for m in self._function.modules() for k, v in vars(m).items() if k not in _TORCHS_OWN]
        return buffers, own

    def check(self) -> None:
        """Refuse if anything changed since it was made."""
        if self._now() != self._kept:
            raise UnprovedError(
                FIXED,
                f"{self._called} kept something of the samples it was given: one could reach another through it.",
                "Compute it from the sample alone, and keep nothing between calls.",
            )

"""Notice what a model, a criterion or an augmentation keeps of the samples it was given.

Where samples run one after the other, or side by side in ``vmap``, nothing that Python can reach may carry one to the
next. Contents are compared before and after: tensors by their values (a write through ``.data`` leaves no other trace),
containers, attributes of modules registered or not, attributes of their classes, closures, and the globals that their
functions name. What this cannot see is what lies outside the process, or behind an extension module; a synthetic sample
that is run before and after the others shows whether that mattered (``independence``).
"""

from __future__ import annotations

import dis
import gc
import hashlib
import io
import itertools
import pickle
import random
import sys
import types
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from functools import _lru_cache_wrapper, lru_cache, partial
from operator import length_hint
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.modules import module as torch_module
from torch.nn.utils.weight_norm import WeightNorm

from modelmix.errors import UnprovedError

FIXED = "whatever is not trained stays as it was"
ALONE = "a sample's gradient depends on that sample and the released state alone"
SAME_SET = "the coordinates trained are the ones that are noised, mixed and accounted for"
_DEPTH = 12
_BLOCK = 1024
_LIBRARIES = frozenset([
    "abc", "builtins", "contextlib", "enum", "functools", "importlib", "logging", "math", "modelmix", "numpy",
    "pathlib", "re", "scipy", "threading", "torch", "transformers", "types", "typing", "warnings", "weakref",
])  # fmt: skip
"""Modules whose own objects keep nothing of samples, or nothing that a model could read back."""


_SILENT = _LIBRARIES - {"numpy", "scipy", "torch", "transformers", "types"}
"""Modules whose objects are not looked into: they change by themselves, or keep nothing that a model reads back."""


def tensor_content(t: Tensor) -> Any:
    """Return a value that changes with any entry of a tensor: sums over rows and columns of its words, with weights.

    It is computed where the tensor lies. Changes that keep it are those of a deliberate collision.
    """
    (found,) = tensor_contents([t])
    return found


def tensor_contents(tensors: Sequence[Tensor]) -> list[Any]:
    """Return ``tensor_content`` of several tensors, with one wait for a device."""
    places, sums = [], []
    for t in tensors:
        try:
            places.append((t.data_ptr(), t._version))
        except RuntimeError:  # a tensor of a transform, which has no memory of its own: it is its own identity
            places.append((id(t), -1))
        else:
            if t.numel() and not t.is_meta and t.layout == torch.strided:
                sums.append((len(places) - 1, weighted_sum(t)))
    out: list[Any] = list(places)
    for device in {value.device for _, value in sums}:
        here = [(i, value) for i, value in sums if value.device == device]
        for (i, _), number in zip(here, torch.stack([value for _, value in here]).tolist(), strict=True):
            out[i] = places[i], number
    return out


@torch.no_grad()
def weighted_sum(t: Tensor) -> Tensor:
    flat = t.detach().resolve_conj().resolve_neg().contiguous().reshape(-1).view(torch.uint8)
    words = flat if flat.numel() % 4 else flat.view(torch.int32)
    whole = words[: words.numel() // _BLOCK * _BLOCK].reshape(-1, _BLOCK)
    total = torch.zeros((), dtype=torch.int64, device=t.device)
    for sums in (whole.sum(0, dtype=torch.int64), whole.sum(1, dtype=torch.int64), words[whole.numel() :]):
        total = total * 31 + (sums * _scattered(sums.numel(), t.device)).sum()
    return total


def _scattered(count: int, device: torch.device) -> Tensor:
    """Return odd numbers all over 64 bits, modulo which they are multiplied.

    With small weights 1, 2, 3 ... ordinary changes of few entries cancel: one number that rises by two of its last
    digits while the next one falls by one.
    """
    x = torch.arange(1, count + 1, device=device) * -0x61C8864680B583EB
    for shift, factor in ((30, -0x40A7B892E31B1A47), (27, -0x6B2FB644ECCEEE15)):
        x = (x ^ (x >> shift)) * factor
    return (x ^ (x >> 31)) | 1


class Watch:
    """Remember what may not change during training and complain when it did.

    Args:
        model: the model.
        attributes: also watch everything else that its code can reach in Python. For engines that run the model's own
            code on one sample after the other, or on several that must not know of each other.
        parameters: the values that the model is run with, where they are not its own.
    """

    def __init__(
        self, model: nn.Module, attributes: bool = False, parameters: Mapping[str, Tensor] | None = None
    ) -> None:
        self._model, self._attributes, self._parameters = model, attributes, dict(parameters or {})
        self._trained = {name for name, p in model.named_parameters() if p.requires_grad}
        self._fixed = self._contents()
        self._kept = self._values() if attributes else {}

    def _contents(self) -> dict[str, Any]:
        fixed: dict[str, Tensor] = dict(self._model.named_buffers())
        fixed |= {name: p for name, p in self._model.named_parameters() if name not in self._trained}
        fixed |= {f"parameter {name}": p for name, p in self._parameters.items()}
        return dict(zip(fixed, tensor_contents(list(fixed.values())), strict=True))

    def _values(self) -> dict[str, Any]:
        met = _trained(self._model)
        out: dict[str, Any] = {
            "hooks of all modules": [content(hook, met) for hooks in _OF_ALL for hook in hooks.values()]
        }
        for path, module in self._model.named_modules():
            for name, value in vars(module).items():
                if name not in _TORCHS_OWN and name not in _computed(module):
                    out[f"{path}.{name}".lstrip(".")] = content(value, met)
            out[f"{path}.hooks".lstrip(".")] = [content(hook, met) for hook in _hooks(module)]
            for name, buffer in module.named_buffers(recurse=False):
                out[f"{path}.{name} (what is kept on it)".lstrip(".")] = _kept_on(buffer, met)
            out[f"{path} (its class)".lstrip()] = _class_content(type(module), met)
        return out

    def check(self) -> None:
        """Raise ``UnprovedError`` if anything changed since this was made."""
        now = {name for name, p in self._model.named_parameters() if p.requires_grad}
        if now != self._trained:
            odd = sorted(now ^ self._trained)[0]
            raise UnprovedError(
                SAME_SET,
                f"{odd} was {'unfrozen or added' if odd in now else 'frozen or removed'} after training began.",
                "Decide what is trained before making the trainer; begin a new run for another choice.",
            )
        contents = self._contents()
        for name in sorted(set(contents) ^ set(self._fixed)) or sorted(contents):
            if contents.get(name) != self._fixed.get(name):
                raise UnprovedError(
                    FIXED,
                    f"{name} is not trained and yet was changed during training."
                    if name.removeprefix("parameter ") == name
                    else f"the model writes to its {name} while it runs.",
                    "Keep buffers and frozen parameters as they are; statistics of private data cost budget.",
                )
        if not self._attributes:
            return
        kept = self._values()
        for name in sorted(set(kept) | set(self._kept)):
            if name not in kept or name not in self._kept or kept[name] != self._kept[name]:
                if name.split(".")[-1] == "training":
                    raise UnprovedError(
                        FIXED,
                        "a module was put into another mode (train or eval) since training began.",
                        "Put it back; choose the modes before training begins.",
                    )
                raise UnprovedError(
                    FIXED,
                    f"the model's attribute {name} changed while samples ran: one could reach another through it.",
                    "Compute it from the sample alone, or once in __init__; keep nothing of one forward pass.",
                )


class WatchedFunction:
    """Remember what a function that is given samples keeps, and complain when it has changed: a criterion, say.

    Args:
        function: that is watched.
        called: how messages name it.
        model: whose trained parameters it may reach, which steps change.
    """

    def __init__(self, function: Any, called: str, model: nn.Module | None = None) -> None:
        self._function, self._called, self._model = function, called, model
        self._kept = self._now()

    def _now(self) -> Any:
        return content(self._function, {} if self._model is None else _trained(self._model))

    def check(self) -> None:
        """Raise ``UnprovedError`` if anything changed since this was made."""
        if self._now() != self._kept:
            raise UnprovedError(
                FIXED,
                f"{self._called} kept something of the samples it was given: one could reach another through it.",
                "Compute it from the sample alone, and keep nothing between calls.",
            )


def _trained(model: nn.Module) -> dict[int, int]:
    """List trained parameters as looked at already: steps change them, and passes are watched for that elsewhere."""
    return {id(p): _DEPTH for p in model.parameters() if p.requires_grad}


_TORCHS_OWN = frozenset(vars(nn.Module())) - {"training"}
"""Registries of parameters, buffers, modules and hooks."""


_OF_ALL = (
    torch_module._global_forward_pre_hooks,
    torch_module._global_forward_hooks,
    torch_module._global_backward_pre_hooks,
    torch_module._global_backward_hooks,
)


def _hooks(module: nn.Module) -> list[Any]:
    """List what else runs with a module; torch's own hooks recompute weights and keep nothing of samples."""
    registries = (
        module._forward_pre_hooks,
        module._forward_hooks,
        module._backward_pre_hooks,
        module._backward_hooks,
    )
    every: list[Any] = [hook for registry in registries for hook in registry.values()]
    return [hook for hook in every if not type(hook).__module__.startswith(("torch.", "modelmix."))]


def _computed(module: nn.Module) -> set[str]:
    """Name the attributes that torch itself computes from the parameters whenever a module runs."""
    if isinstance(module, nn.RNNBase):
        return {"_flat_weights", "_flat_weight_refs"}
    return {hook.name for hook in module._forward_pre_hooks.values() if isinstance(hook, WeightNorm)}


def content(value: Any, met: dict[int, int], depth: int = _DEPTH) -> Any:
    """Return something that is equal as long as a value, and what it is made of, stays what it is.

    Args:
        met: what was looked at already, by its identity, with the depth left for it then.
    """
    if isinstance(value, bool | int | float | complex | str | bytes | None):
        return type(value), repr(value)
    if met.get(id(value), -1) >= depth:
        return id(value)
    met[id(value)] = depth
    if isinstance(value, Tensor):
        return id(value), tensor_content(value), *_kept_on(value, met, depth - 1)
    if isinstance(value, np.ndarray):
        plain = value.dtype.hasobject is False
        if plain:
            return id(value), hashlib.blake2b(np.ascontiguousarray(value).tobytes()).digest()
        return id(value), [content(v, met, depth - 1) for v in value.flat]
    if isinstance(value, bytearray | memoryview):
        return id(value), bytes(value)
    if isinstance(value, io.StringIO | io.BytesIO):
        return id(value), value.closed or (value.getvalue(), value.tell())
    if isinstance(value, torch.Generator):
        return id(value), hashlib.blake2b(value.get_state().numpy().tobytes()).digest()
    if isinstance(value, np.random.Generator | np.random.RandomState):
        # NumPy's own text of a state may be shortened; pickled it is whole.
        return id(value), hashlib.blake2b(pickle.dumps(value)).digest()
    if isinstance(value, types.ModuleType | types.BuiltinFunctionType) or depth <= 0:
        return id(value)
    return id(value), [content(v, met, depth - 1) for v in _inside(value)]


def _inside(value: Any) -> Iterator[Any]:
    """Yield what a value is made of, as far as Python shows it."""
    if isinstance(value, Mapping):
        for k, v in list(value.items()):
            yield from (k, v)
    elif isinstance(value, list | tuple | set | frozenset | deque):
        yield from sorted(value, key=id) if isinstance(value, set | frozenset) else value
    elif isinstance(value, types.GeneratorType):
        frame = value.gi_frame
        yield -1 if frame is None else frame.f_lasti
        yield from () if frame is None else frame.f_locals.values()
        yield value.gi_yieldfrom
    elif isinstance(value, enumerate | zip | map | filter):
        yield from value.__reduce__()[1]
    elif type(value).__module__ == "builtins" and isinstance(value, Iterator):
        yield length_hint(value, -1)
    elif isinstance(value, _lru_cache_wrapper):
        yield from (value.cache_info().misses, value.cache_info().currsize)  # what is only read again is no memory
        yield from gc.get_referents(value)
    elif isinstance(value, types.MethodType):
        yield from (value.__self__, value.__func__)
    elif isinstance(value, types.FunctionType):
        yield from (_cell(cell) for cell in value.__closure__ or ())
        yield from (value.__defaults__, value.__kwdefaults__, vars(value))
        if not _is_library(value.__globals__.get("__name__")):  # its own __module__ is what functools.wraps copied
            yield from _reached(value)
    elif isinstance(value, partial):
        yield from (value.func, value.args, value.keywords)
    elif isinstance(value, type):
        if not _is_library(value.__module__):
            yield from (v for k, v in vars(value).items() if k not in ("__dict__", "__weakref__", "__doc__"))
            yield from value.__bases__
    elif isinstance(value, staticmethod | classmethod):
        yield value.__func__
    elif isinstance(value, property):
        yield value.fget
    elif isinstance(value, nn.Module):
        for k, v in vars(value).items():
            if k not in _TORCHS_OWN and k not in _computed(value):
                yield from (k, v)
        for registry in (value._parameters, value._buffers, value._modules):
            for k, v in registry.items():
                yield from (k, v)
        yield type(value)
    elif isinstance(value, types.SimpleNamespace):
        yield vars(value)
    elif type(value).__module__ == "itertools" and not isinstance(value, itertools.count | itertools.repeat):
        raise UnprovedError(
            FIXED,
            f"an itertools.{type(value).__name__} is within reach of what runs on samples, and nobody can read how far "
            "it has come.",
            "Keep an index instead, and choose by something that belongs to the sample.",
        )
    elif type(value).__module__ in ("itertools", "array", "_random", "random"):
        seedable = isinstance(value, random.Random) and not isinstance(value, random.SystemRandom)
        yield repr(value.getstate() if seedable else value)
    elif (type(value).__module__ or "").split(".")[0] not in _SILENT:
        yield from (getattr(value, "__dict__", None), type(value))
        for slot in (s for c in type(value).__mro__ for s in _slots(c)):
            yield getattr(value, slot, None)


def _kept_on(t: Tensor, met: dict[int, int], depth: int = _DEPTH) -> list[Any]:
    """List what Python keeps on a tensor: attributes and a gradient."""
    grad = [("grad", t.grad)] if t.is_leaf and t.grad is not None else []
    return [(name, content(value, met, depth)) for name, value in [*sorted(vars(t).items()), *grad]]


def reachable(value: Any, depth: int = _DEPTH, met: dict[int, int] | None = None) -> Iterator[Any]:
    """Yield whatever ``content`` would look at."""
    met = {} if met is None else met
    if isinstance(value, bool | int | float | complex | str | bytes | None) or met.get(id(value), -1) >= depth:
        return
    met[id(value)] = depth
    yield value
    if depth > 0 and not isinstance(value, Tensor | np.ndarray | types.ModuleType | types.BuiltinFunctionType):
        for part in _inside(value):
            yield from reachable(part, depth - 1, met)


def _class_content(kind: type, met: dict[int, int]) -> Any:
    """Return the content of a module's classes, up to torch's own: their attributes and what their methods name."""
    return [content(c, met) for c in kind.__mro__ if not _is_library(c.__module__)]


def _slots(kind: type) -> tuple[str, ...]:
    slots = vars(kind).get("__slots__", ())
    return (slots,) if isinstance(slots, str) else tuple(slots)


def _reached(function: types.FunctionType) -> Iterator[Any]:
    """Yield the globals that a function may look up by name, and what it may look up in modules among them."""
    names = _names(function.__code__)
    found = [function.__globals__.get(name) for name in names]
    for value in (*found, *(sys.modules.get(name) for name in _imported(function.__code__))):
        if isinstance(value, types.ModuleType):
            yield from _of_module(value, names)
        else:
            yield value


def _of_module(module: types.ModuleType, names: list[str], depth: int = 3) -> Iterator[Any]:
    """Yield what code may look up in a module of the user's by name, and in modules within it."""
    if _is_library(module.__name__):
        return
    for value in (vars(module).get(name) for name in names):
        if isinstance(value, types.ModuleType) and depth:
            yield from _of_module(value, names, depth - 1)
        else:
            yield value


def _names(code: types.CodeType) -> list[str]:
    """List the names of globals that a function's code, or that of functions within it, may look up."""
    inner = [c for c in code.co_consts if isinstance(c, types.CodeType)]
    found = {*code.co_names, *(name for c in inner for name in _names(c))}
    if "globals" in found:
        found |= {c for c in code.co_consts if isinstance(c, str)}
    return sorted(found)


@lru_cache(maxsize=4096)
def _imported(code: types.CodeType) -> tuple[str, ...]:
    """Name the modules that a function's code, or that of functions within it, imports when it runs."""
    inner = [c for c in code.co_consts if isinstance(c, types.CodeType)]
    own = [i.argval for i in dis.get_instructions(code) if i.opname == "IMPORT_NAME"]
    return tuple(sorted({*own, *(name for c in inner for name in _imported(c))}))


def _is_library(module: str | None) -> bool:
    return (module or "builtins").split(".")[0] in _LIBRARIES


def _cell(cell: types.CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # not filled yet
        return None

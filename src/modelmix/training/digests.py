"""Digests of samples, and of what can be seen of a computation: the code of functions and modules."""

from __future__ import annotations

import hashlib
import io
import pickle
from types import CodeType, FunctionType, MethodType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten


def code_digest(thing: Any) -> str:
    """Digest the code of a function, a module or a callable object, as far as Python shows it.

    Two equal digests do not prove equal behaviour (globals and extension modules are not seen); two different ones
    prove that something was edited.
    """
    digest = hashlib.sha256()
    if isinstance(thing, nn.Module):
        for name, module in thing.named_modules():
            digest.update(
                f"{name} {type(module).__module__}.{type(module).__qualname__} {module.extra_repr()}".encode()
            )
            _add(digest, type(module).forward)
    else:
        _add(digest, thing)
    return digest.hexdigest()


def _add(digest: Any, thing: Any) -> None:
    if isinstance(thing, MethodType):
        thing = thing.__func__
    if isinstance(thing, FunctionType):
        _add_code(digest, thing.__code__)
        return
    call = vars(type(thing)).get("__call__")
    digest.update(f"{type(thing).__module__}.{getattr(thing, '__qualname__', type(thing).__qualname__)}".encode())
    if isinstance(call, FunctionType):
        _add_code(digest, call.__code__)


def _add_code(digest: Any, code: CodeType) -> None:
    digest.update(code.co_code + repr(code.co_names).encode())
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            _add_code(digest, constant)
        else:
            digest.update(repr(constant).encode())


def digest_of(sample: Any, salt: bytes = b"") -> bytes:
    digest = hashlib.blake2b(key=salt, digest_size=32)
    for leaf in tree_flatten(sample)[0]:
        if isinstance(leaf, Tensor):
            digest.update(f"{leaf.dtype}{tuple(leaf.shape)}".encode())
            digest.update(_bytes_of_tensor(leaf))
        elif isinstance(leaf, np.ndarray) and not leaf.dtype.hasobject:
            digest.update(f"{leaf.dtype}{leaf.shape}".encode() + np.ascontiguousarray(leaf).tobytes())
        else:
            digest.update(_bytes_of(leaf))
    return digest.digest()


class _Pickler(pickle.Pickler):
    """Writes tensors down as they are seen, and not with all of the memory that they are a part of."""

    def reducer_override(self, value: Any) -> Any:
        if isinstance(value, Tensor) and value.layout == torch.strided:
            return bytes, (_bytes_of_tensor(value),)
        return NotImplemented


def _bytes_of(value: Any) -> bytes:
    out = io.BytesIO()
    try:
        _Pickler(out).dump(value)
    except Exception:  # an object that nobody can compare
        return type(value).__qualname__.encode()
    return out.getvalue()


def _bytes_of_tensor(t: Tensor) -> bytes:
    words: bytes = t.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    return words

"""What can be seen of a computation: the code of functions and modules, as a digest."""

from __future__ import annotations

import hashlib
from types import CodeType, FunctionType, MethodType
from typing import Any

from torch import nn


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

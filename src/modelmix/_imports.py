"""Things of one's own by name: ``package.module:function``, importable from the current folder."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import ModuleType
from typing import Any

from modelmix.errors import ModelMixError


def imported(name: str, what: str) -> tuple[ModuleType, Any]:
    """The module and the thing that "package.module:thing" names. Importing runs the module's code.

    Args:
        what: how errors call it: "model", "features".
    """
    module, _, thing = name.partition(":")
    with current_folder_importable():
        try:
            found = importlib.import_module(module)
            return found, getattr(found, thing)
        except Exception as error:  # whatever the user's module raises
            raise ModelMixError(
                f"{what} {name!r} cannot be imported: {one_line(error)}. It must be package.module:function, "
                "importable from the current folder."
            ) from error


@contextmanager
def current_folder_importable() -> Iterator[None]:
    """An installed command, unlike ``python -m``, does not look into the current folder by itself."""
    folder = os.getcwd()
    importlib.invalidate_caches()
    sys.path.insert(0, folder)
    try:
        yield
    finally:
        with suppress(ValueError):  # already gone when the imported code has put sys.path in order itself
            sys.path.remove(folder)


def one_line(error: BaseException) -> str:
    """An error of somebody else's code as a part of our line."""
    return " ".join(f"{type(error).__name__}: {error}".split()).rstrip(".")

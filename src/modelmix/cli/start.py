"""What commands that train do before they begin."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import click

from modelmix.errors import ModelMixError


def program() -> str:
    """The name of the program whose command runs."""
    context = click.get_current_context(silent=True)
    return (context and context.find_root().info_name) or "modelmix"


@contextmanager
def needs_torch() -> Iterator[None]:
    """Around the imports of a command that trains: says what to install where something is missing."""
    try:
        yield
    except ModuleNotFoundError as error:
        raise ModelMixError(f"training needs {error.name}: install it with pip install 'modelmix[train]'.") from None


@contextmanager
def plain_warnings() -> Iterator[None]:
    """Our own warnings as one line each, without the place in the code."""
    with warnings.catch_warnings():
        warnings.filterwarnings("always", module="modelmix")
        warnings.showwarning = lambda message, *_, **__: print(f"modelmix: warning: {message}", file=sys.stderr)
        yield

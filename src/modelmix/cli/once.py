"""Refuse an option that is given twice where only one value counts: the first would be dropped in silence."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any, TypeVar

import typer
from click import Context, Parameter, UsageError
from typer.core import TyperCommand, TyperGroup, TyperOption

Command = TypeVar("Command", bound=Callable[..., Any])


class _Once:
    """What commands and groups share: a look at the arguments before they are parsed for good."""

    def parse_args(self, ctx: Context, args: list[str]) -> list[str]:
        if not ctx.resilient_parsing:
            _, _, order = self.make_parser(ctx).parse_args(args=list(args))  # type: ignore[attr-defined]
            for parameter, times in Counter(order).items():
                if times > 1 and takes_one(parameter):
                    names = "/".join((*parameter.opts, *parameter.secondary_opts))
                    raise UsageError(
                        f"{names} was given {times} times and only one value can count: give it once.", ctx=ctx
                    )
        return super().parse_args(ctx, args)  # type: ignore[misc, no-any-return]


def takes_one(parameter: Parameter) -> bool:
    """Whether a parameter is an option of a single value."""
    return isinstance(parameter, TyperOption) and not parameter.multiple and not parameter.count


class OnceCommand(_Once, TyperCommand):
    """A command that refuses repeated options."""


class OnceGroup(_Once, TyperGroup):
    """A group that refuses repeated options."""


class Program(typer.Typer):
    """A Typer app whose commands refuse repeated options."""

    def __init__(self, *, cls: type[TyperGroup] = OnceGroup, **settings: Any) -> None:
        super().__init__(cls=cls, **settings)

    def command(
        self, name: str | None = None, *, cls: type[TyperCommand] | None = OnceCommand, **settings: Any
    ) -> Callable[[Command], Command]:
        """Add a command, as in Typer."""
        return super().command(name, cls=cls, **settings)

"""The commands that help texts and documentation show, and a parser that runs none of them."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable, Iterator
from pathlib import Path

import click


def commands(command: click.Command) -> Iterator[click.Command]:
    """A command and all below it."""
    yield command
    for child in getattr(command, "commands", {}).values():
        yield from commands(child)


def shown(text: str, program: str) -> list[str]:
    """The command lines in a text: lines of their own, and those in backquotes."""
    text = text.replace("\\\n", " ")
    lines = re.findall(rf"^(?:\$ |    )?({program} .+)$", text, re.MULTILINE)
    lines += re.findall(rf"`({program} [^`]+)`", text)
    # What stands behind an example is a remark; "..." and [..] mean that something was left out.
    plain = (re.sub(r"\s+[#>].*|\s{2,}\(.*|\s{3,}\w+ .*", "", line.replace(r"\|", "|")).strip() for line in lines)
    return [line for line in plain if "..." not in line and "[" not in line]


def documented(pages: Iterable[Path], program: str) -> list[str]:
    """The command lines in some files; a name alone, without options or arguments, is no example."""
    lines = [line for page in pages for line in shown(page.read_text(encoding="utf-8"), program)]
    return [line for line in lines if re.search(r" (--|[a-z]+ \S*[A-Z./])| (reproduce|fetch) ", line)]


def parse(program: click.Command, line: str) -> click.Context:
    """Go as far as options and arguments are read."""
    command, words, context = program, shlex.split(line)[1:], None
    while isinstance(command, click.Group):
        context = click.Context(command, info_name=words[0], parent=context)
        command, words = command.commands[words[0]], words[1:]
    return command.make_context(command.name, words, parent=context)

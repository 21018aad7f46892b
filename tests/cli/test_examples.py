"""Every command that help texts and documentation show is one that the program takes."""

from __future__ import annotations

from pathlib import Path

import pytest
import typer
from examples import commands, documented, parse, shown

from modelmix.cli.app import app
from modelmix.cli.options import read_settings
from modelmix.config.recipe import PLACES

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
PROGRAM = typer.main.get_command(app)
HELP = [line for command in commands(PROGRAM) for line in shown(command.help or "", "modelmix")]
DOCUMENTED = documented(PAGES, "modelmix")


@pytest.mark.parametrize("line", sorted({*HELP, *DOCUMENTED}))
def test_a_command_that_is_shown_can_be_copied(line):
    given = parse(PROGRAM, line).params
    assert set(read_settings(given.get("settings") or [])) <= set(PLACES)


def test_there_are_examples():
    assert len(HELP) >= 15
    assert len(DOCUMENTED) >= 15

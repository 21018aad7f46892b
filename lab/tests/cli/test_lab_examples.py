"""Every command of the laboratory that help texts and documentation show is one that the program takes."""

from __future__ import annotations

from pathlib import Path

import pytest
import typer
from examples import commands, documented, parse, shown

from modelmix.cli.options import read_settings
from modelmix.config.recipe import PLACES
from modelmix_lab.cli.app import app

ROOT = Path(__file__).parents[3]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
PROGRAM = typer.main.get_command(app)
HELP = [line for command in commands(PROGRAM) for line in shown(command.help or "", "modelmix-lab")]
DOCUMENTED = documented(PAGES, "modelmix-lab")


@pytest.mark.parametrize("line", sorted({*HELP, *DOCUMENTED}))
def test_a_command_that_is_shown_can_be_copied(line):
    given = parse(PROGRAM, line).params
    assert set(read_settings(given.get("settings") or [])) <= set(PLACES)


def test_there_are_examples():
    assert len(HELP) >= 15
    assert len(DOCUMENTED) >= 15

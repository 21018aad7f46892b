"""The program of the laboratory as a whole."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import typer

import modelmix_lab
from modelmix.cli.once import OnceCommand, OnceGroup
from modelmix_lab.cli.app import app

COMMANDS = ["advise", "audit", "data", "prior", "reproduce", "results", "theory", "train"]


def test_program_help_and_version(run):
    for arguments in ([], ["--help"], ["-h"]):
        code, out, _ = run(*arguments)
        assert code == 0
        assert all(name in out for name in COMMANDS)
    assert run("--version")[1].strip() == f"modelmix-lab {modelmix_lab.__version__}"


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_help(run, command):
    code, out, _ = run(command, "--help")
    assert code == 0
    assert "Usage: modelmix-lab" in out


def test_a_mistake_is_one_line_of_this_program(run, tmp_path):
    code, out, err = run("reproduce", "fig9", "--out", tmp_path)
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert err.startswith("modelmix-lab: error: ")
    assert "fig3" in err


def commands(command, path=()):
    yield path, command
    for name, child in getattr(command, "commands", {}).items():
        yield from commands(child, (*path, name))


def test_every_command_refuses_a_single_value_given_twice():
    for path, command in commands(typer.main.get_command(app)):
        assert isinstance(command, OnceCommand | OnceGroup), path


def test_the_library_does_not_import_the_laboratory():
    source = Path(__file__).parents[3] / "src" / "modelmix"
    assert not [path for path in source.rglob("*.py") if "modelmix_lab" in path.read_text(encoding="utf-8")]
    program = "import sys, modelmix, modelmix.cli; print('modelmix_lab' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"

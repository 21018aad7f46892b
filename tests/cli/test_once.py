"""No option of the program drops a value in silence: single values are refused when given twice, lists are composed."""

from __future__ import annotations

import json

import click
import pytest
import typer

import modelmix as mm
from modelmix.cli import main
from modelmix.cli.app import app
from modelmix.cli.once import takes_one


def commands(command=None, path=()):
    """Every command of the program with its place."""
    command = typer.main.get_command(app) if command is None else command
    yield path, command
    for name, child in getattr(command, "commands", {}).items():
        yield from commands(child, (*path, name))


OPTIONS = [
    pytest.param(path, option, id=" ".join((*path, option.opts[0])))
    for path, command in commands()
    for option in command.params
    if isinstance(option, click.Option) and option.name != "help"
]


@pytest.fixture
def run(capsys):
    def go(*arguments):
        with pytest.raises(SystemExit) as end:
            main([str(argument) for argument in arguments])
        out, err = capsys.readouterr()
        return end.value.code, out, err

    return go


@pytest.mark.parametrize(("path", "option"), OPTIONS)
def test_a_single_value_given_twice_is_refused(run, path, option):
    if not takes_one(option):
        assert option.name in ("ledger", "spent", "row", "kind", "settings")
        return
    given = [option.opts[0]] if option.is_flag else [option.opts[0], "1"]
    code, out, err = run(*path, *given, *given)
    assert (code, out) == (2, "")
    assert "was given 2 times" in err
    assert err.count("\n") == 1


def test_ledgers_add_up(run, tmp_path):
    """Of two ledgers the last was kept: 0.0181 was printed where the first alone is 16.5."""
    first, second = tmp_path / "a.json", tmp_path / "b.json"
    mm.Ledger().add(mm.Mechanism(0.335, 1.0), 1).save(first)
    mm.Ledger().add(mm.Mechanism(100.0, 1.0), 1).save(second)
    alone = mm.epsilon(mm.Ledger.load(first), 1e-5)
    for order in ((first, second), (second, first)):
        code, out, _ = run("epsilon", "--json", "--ledger", order[0], "--ledger", order[1])
        assert code == 0
        assert json.loads(out)["epsilon"] >= alone > 16
        assert json.loads(out)["steps"] == 2


def test_what_was_spent_adds_up(run, tmp_path):
    files = [tmp_path / "a.json", tmp_path / "b.json"]
    for file in files:
        mm.Ledger().add(mm.Mechanism(4.0, 1.0), 1).save(file)
    both = [argument for file in files for argument in ("--spent", file)]
    code, _, err = run("train", *both, "--epsilon", 1.2, "--out", tmp_path / "run")
    assert code == 2
    assert "nothing is left for training" in err
    assert mm.epsilon(mm.Ledger.load(files[0]), 1e-5) < 1.2
    shown = run("train", *both, "--show-recipe")[1]
    assert f'spent = ["{files[0]}", "{files[1]}"]' in shown


def test_several_processes_are_refused(run, monkeypatch, tmp_path):
    monkeypatch.setenv("WORLD_SIZE", "2")
    code, _, err = run("train", "--out", tmp_path / "run")
    assert (code, err.count("\n")) == (2, 1)
    assert "WORLD_SIZE" in err

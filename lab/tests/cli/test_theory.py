"""What the theorems are told and what they say: a delta that says something, and for whom they hold."""

from __future__ import annotations

import json

import pytest


@pytest.mark.parametrize(
    "command",
    [
        ["convex", "--distance", 5, "--n", 1000],
        ["clipped", "--kappa", 0.5, "--n", 1000],
        ["randomness", "uniform"],
        ["randomness", "dropout"],
        ["amplification", "--out", "amp.png"],
    ],
)
def test_no_theorem_is_asked_at_a_delta_that_says_nothing(run, tmp_path, monkeypatch, command):
    monkeypatch.chdir(tmp_path)
    code, out, err = run("theory", *command, "--delta", 0.5)
    assert (code, out) == (2, "")
    assert "delta = 0.5 is not allowed" in err
    if "--n" in command:
        code, _, err = run("theory", *command, "--delta", 0.009)
        assert code == 2
        assert "below 1/1000" in err


def test_theorems_say_for_whom_they_hold(run):
    for command in (["convex", "--distance", 5], ["clipped", "--kappa", 0.5], ["randomness", "uniform"]):
        assert "the contribution of one sample is removed (zero-out" in " ".join(run("theory", *command)[1].split())
        assert "zero-out" in json.loads(run("theory", *command, "--json")[1])["scope"]
    assert "50,000, is public" in run("theory", "convex", "--distance", 5)[1]


@pytest.mark.parametrize("command", ["clipped", "convex"])
def test_a_missing_option_names_the_help_of_its_command(run, command):
    assert run("theory", command)[2].endswith(f"See modelmix-lab theory {command} --help.\n")

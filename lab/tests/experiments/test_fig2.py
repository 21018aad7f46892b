"""Figure 2: what each line runs, and a small one from the command line that goes on where it stopped."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest

import modelmix as mm
from modelmix_lab.experiments import fig2


def test_the_lines_are_those_of_the_paper():
    names = [(arm.private, arm.tau, arm.eta) for arm in fig2.arms(fig2.PAPER)]
    assert names == [
        (False, 0.0, 0.1), (False, 0.05, 0.1), (False, 0.1, 0.1),
        (True, 0.0, 0.1), (True, 0.0, 0.2), (True, 0.05, 0.2), (True, 0.1, 0.2),
    ]  # fmt: skip
    assert fig2.setup_for("cifar10") == fig2.setup_for("svhn") == fig2.PAPER
    assert fig2.setup_for("cifar10", "cnn").steps == fig2.SMALL.steps
    assert fig2.setup_for("fashion-mini", steps=7).steps == 7


def test_every_private_line_has_the_noise_of_dp_sgd_at_epsilon_8():
    z = fig2.noise_multiplier(fig2.PAPER)
    plain, _, mixed = (arm.mechanism(fig2.PAPER, 50_000, z) for arm in fig2.arms(fig2.PAPER)[3:6])
    assert mm.epsilon(plain, 1e-5, steps=2000, by="renyi") == pytest.approx(8, rel=1e-5)
    assert mm.epsilon(plain, 1e-5, steps=2000) <= 8
    assert mixed.noise_multiplier == plain.noise_multiplier
    # omega = (tau/eta) B/c
    assert mixed.mixing_width == pytest.approx(0.05 * 2500 / 8)
    assert mm.epsilon(mixed, 1e-5, steps=2000) < 8
    free = fig2.arms(fig2.PAPER)[1].mechanism(fig2.PAPER, 50_000, z)
    assert free.mixing_width * fig2.NO_CLIP / 2500 == pytest.approx(0.05)
    assert mm.epsilon(free, 1e-5, steps=2000) > 1e15  # none is shown


@pytest.fixture
def tiny(tmp_path):
    rng = np.random.default_rng(0)
    y = np.arange(300) % 3
    x = rng.standard_normal((300, 6)) + 2 * np.eye(3)[y].repeat(2, axis=1)
    file = tmp_path / "tiny.npz"
    np.savez(file, x_train=x, y_train=y, x_test=x, y_test=y)
    return file


def test_the_command_trains_draws_and_goes_on(run, tiny, tmp_path):
    out = tmp_path / "results"
    base = ["reproduce", "fig2", "--data", tiny, "--model", "linear", "--steps", 6, "--out", out]
    code, text, err = run(*base, "--seeds", 1, "--json")
    assert code == 0
    assert err.count("training") == 7
    first = json.loads(text)
    assert (out / "fig2-tiny.svg").exists()
    lines = first["curves"]
    assert [line["epsilon"] for line in lines[:3]] == ["inf"] * 3
    assert all(line["epsilon"] <= 8 * (1 + 1e-9) for line in lines[3:])
    assert lines[-1]["epsilon"] <= lines[3]["epsilon"]
    assert all(0 <= value <= 1 for line in lines for row in line["accuracy"] for value in row)
    # SGD on three separated classes learns; a constant answer has a third.
    assert lines[0]["final"][0] > 0.5
    code, text, err = run(*base, "--seeds", 2)
    assert code == 0
    assert err.count("training") == 7  # only the second seed
    assert "with noise: ModelMix" in " ".join(text.split())
    kept = json.loads((out / "fig2-tiny.json").read_text())
    assert len(kept["runs"]) == 14
    assert tuple(kept["runs"]["SGD, eta = 0.3, without noise, seed 1"]["accuracy"]) == tuple(lines[0]["accuracy"][0])


def test_runs_of_another_setup_are_not_mixed_in(run, tiny, tmp_path):
    out = tmp_path / "results"
    base = ["reproduce", "fig2", "--data", tiny, "--model", "linear", "--seeds", 1, "--out", out]
    assert run(*base, "--steps", 2)[0] == 0
    code, _, err = run(*base, "--steps", 3)
    assert code == 2
    assert "another setup" in err
    (out / "fig2-tiny.json").write_text("{")
    assert "not a file of Figure 2" in run(*base, "--steps", 2)[2]


def test_fig3_trains_nothing(run):
    code, _, err = run("reproduce", "fig3", "--seeds", 2)
    assert code == 2
    assert "leave out" in err
    assert "fig2 has no rows" in run("reproduce", "fig2", "--row", "x")[2]
    assert "are for fig2" in run("reproduce", "fig3", "--data", "svhn")[2]
    assert "choose one of fig2, fig3" in run("reproduce", "fig9")[2]


def test_the_middle_of_the_seeds():
    arm = fig2.arms(fig2.SMALL)[0]
    two = fig2.Curve(arm, (1,), ((0.2,), (0.6,)), math.inf, math.inf)
    three = fig2.Curve(arm, (1,), ((0.9,), (0.2,), (0.6,)), math.inf, math.inf)
    assert two.final == pytest.approx((0.4, 0.2, 0.6))
    assert three.final == (0.6, 0.2, 0.9)

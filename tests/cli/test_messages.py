"""What commands and the library say where somebody is about to go wrong: true, in one line, with a way out."""

from __future__ import annotations

import errno
import io
import json
import sys

import numpy as np
import planned
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import modelmix as mm
from modelmix._format import up_digits
from modelmix.accounting import pld
from modelmix.cli import main

X, Y = torch.randn(60, 3, generator=torch.Generator().manual_seed(0)), torch.arange(60) % 2
PLAN = mm.Plan.of(mm.Mechanism(1.0, 0.5), 10, delta=1e-3)


# Rounding.


@pytest.mark.parametrize("value", [1e-5, 1.0000049e-5, 3.00000001e-7, 9.9999e-4, 0.01, 123.456, 2 / 3])
@pytest.mark.parametrize("digits", [2, 4, 6])
def test_significant_digits_are_rounded_up(value, digits):
    assert value <= float(up_digits(value, digits)) <= value * (1 + 10.0 ** (1 - digits) * (1 + 1e-9))


def test_round_numbers_stay_as_they_are():
    assert [up_digits(x) for x in (1e-5, 0.01, 0.0, 1.0)] == ["1e-05", "0.01", "0", "1"]
    assert up_digits(float("inf")) == "inf"


def test_deltas_and_divergences_are_printed_rounded_up(run):
    """delta at epsilon = 0.9 was printed as 8.391e-03 for 8.3914e-03."""
    asked = ["--z", 1, "--q", 0.01, "--steps", 1000]
    for epsilon in (0.3, 0.5, 0.7, 0.9, 1.1, 1.3):
        out = run("epsilon", *asked, "--for-epsilon", epsilon, "--orders", "2,7")[1]
        exact = mm.delta(mm.Mechanism(1, 0.01), epsilon, steps=1000)
        (line,) = [line for line in out.splitlines() if "delta at epsilon" in line]
        assert exact <= float(line.split("=")[1].split()[1]) <= exact * 1.001
    for order, value in zip((2, 7), mm.rdp(mm.Mechanism(1, 0.01), [2, 7]), strict=True):
        (line,) = [line for line in out.splitlines() if f"D_{order} of" in line]
        assert value <= float(line.split()[-3]) <= value * 1.00001
    assert "delta = 1.001e-05" in run("epsilon", *asked, "--delta", 1.0000049e-5)[1]


def test_an_epsilon_in_a_message_is_rounded_up():
    spent = mm.Ledger(population=1000).add(mm.Mechanism(1.0, 0.1), 33)
    with pytest.raises(mm.BudgetExceeded, match="have spent epsilon") as no:
        mm.plan(epsilon=1, delta=1e-5, samples=1000, batch=100, steps=10, spent=spent)
    assert float(str(no.value).split("epsilon ")[1].split()[0]) >= mm.epsilon(spent, 1e-5)


# Breakdowns.


def test_an_error_of_the_library_leaves_the_renyi_value(run):
    code, out, err = run("epsilon", "--z", 0.3, "--q", 0.9999999999999999, "--steps", 1, "--json")
    assert (code, err) == (0, "")
    assert json.loads(out)["epsilon"] > mm.epsilon(mm.Mechanism(0.3, 0.9), 1e-5, steps=1)


@pytest.mark.parametrize(("error", "ends"), [(ValueError, "inf"), (mm.ModelMixError, "raised")])
def test_our_own_errors_are_not_taken_for_the_librarys(monkeypatch, error, ends):
    def broken(*_: object) -> float:
        raise error("no")

    monkeypatch.setattr(pld, "_composed", broken)
    ledger = mm.Ledger().add(mm.Mechanism(1.234, 0.1), 5 if ends == "inf" else 6)  # answers are cached
    if ends == "inf":
        assert pld.pld_delta(ledger, 1.0) == float("inf")
    else:
        with pytest.raises(mm.ModelMixError):
            pld.pld_delta(ledger, 1.0)


@pytest.mark.parametrize("when", ["write", "flush"])
def test_a_full_disk_behind_the_output_is_one_line(monkeypatch, capsys, when):
    class Full(io.StringIO):
        def write(self, text: str) -> int:
            return self._fail() if when == "write" else len(text)

        def flush(self) -> None:
            if when == "flush":
                self._fail()

        def _fail(self) -> int:
            raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(sys, "stdout", Full())
    with pytest.raises(SystemExit) as end:
        main(["epsilon", "--z", "1", "--q", "0.1", "--steps", "5"])
    assert end.value.code == 2
    assert capsys.readouterr().err == "modelmix: error: cannot write the output: No space left on device.\n"


# Options.


@pytest.mark.parametrize(("z", "q"), [("1e-300", 1), ("1e-300", 0.1), ("1e-170", 1)])
def test_tiny_noise_is_not_called_none(run, z, q):
    code, out, err = run("epsilon", "--z", z, "--q", q, "--steps", 1)
    assert (code, err) == (0, "")
    assert "inf" in out


@pytest.mark.parametrize("over", ["omega", "tau"])
def test_a_curve_over_a_width_takes_no_width(run, tmp_path, over):
    mm.Ledger().add(mm.Mechanism(1.0, 0.1), 50).save(tmp_path / "l.json")
    given = ["curve", "--over", over, "--z", 1, "--clip", 1, "--n", 100, "--q", 0.1, "--steps", 50]
    for option in ("omega", "tau", "eta"):
        code, out, err = run(*given, f"--{option}", 2)
        assert (code, out) == (2, "")
        assert f"--{option} cannot be fixed" in err
    code, _, err = run("curve", "--over", over, "--ledger", tmp_path / "l.json")
    assert code == 2
    assert "leave --ledger out" in err


def test_a_resumed_folder_without_a_run_is_told(run, tmp_path):
    rng = np.random.default_rng(0)
    arrays = {f"x_{part}": rng.standard_normal((60, 3)).astype(np.float32) for part in ("train", "test")}
    np.savez(tmp_path / "d.npz", **arrays, y_train=Y.numpy(), y_test=Y.numpy())
    out = tmp_path / "new"
    given = [
        "--data",
        tmp_path / "d.npz",
        "--set",
        "data.classes=2",
        "--model",
        "linear",
        "--mechanism",
        "plain",
        "--steps",
        2,
    ]
    code, _, err = run(
        "train", *given, "--batch", 30, "--set", "privacy.noise_multiplier=1", "--delta", 1e-3, "--out", out, "--resume"
    )
    assert code == 0
    assert f"{out} holds no run: a new one begins.\n" in err
    assert "holds no run" not in run("train", "--out", out, "--resume")[2]


# Training.


def trainer() -> mm.Trainer:
    return mm.Trainer(nn.Linear(3, 2), nn.CrossEntropyLoss(), (X, Y), PLAN, clip=1.0, lr=0.1)


def test_a_trainer_past_its_plan_is_told_what_is_left_and_how_to_go_on():
    t = trainer()
    with pytest.raises(mm.BudgetExceeded, match=r"20 more .* plan: 10 of its 10 are left.* trainer.extend\(steps\)"):
        t.run(20)
    t.run(4, progress=False)
    with pytest.raises(mm.BudgetExceeded, match="7 more steps go past the end of the plan: 6 of its 10 are left"):
        t.run(7)
    assert t.extend(1).run(7, progress=False).step == 11


def test_a_loop_past_its_plan_is_told_how_to_go_on():
    with pytest.raises(mm.BudgetExceeded, match=r"trainer.extend\(steps\), or optimizer.extend\(steps\)"):
        PLAN.require(11)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"epsilon": 3.0}, "plan already contains epsilon: give either plan or epsilon"),
        ({"epochs": 2, "population": 60}, "contains epochs and population: give either plan or epochs and population"),
    ],
)
def test_only_what_was_given_beside_a_plan_is_named(given, said):
    model = nn.Linear(3, 2)
    loader, optimizer = DataLoader(TensorDataset(X, Y), batch_size=30), torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(mm.ModelMixError, match=said):
        planned.make_private(model, optimizer, loader, nn.CrossEntropyLoss(), plan=PLAN, clip=1.0, **given)

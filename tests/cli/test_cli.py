"""The command line, as a person and as a script use it."""

from __future__ import annotations

import json
import math
import signal
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
import typer
from reference import reference_cases

import modelmix as mm
from modelmix.cli.show import as_json, up

RESNET = ["--z", 0.335, "--omega", 11.25, "--p", 100, "--q", 0.03, "--steps", 3400]
PAPER_UNITS = ["--z", 0.335, "--clip", 20, "--n", 50000, "--batch", 1500, "--p", 100, "--steps", 3400]


def ratios(case: dict) -> list[object]:
    return [
        "--z", case["noise_multiplier"], "--omega", case["mixing_width"], "--p", case["p"],
        "--q", case["sample_rate"], "--steps", case["steps"], "--delta", case["delta"],
    ]  # fmt: skip


@pytest.mark.parametrize("case", reference_cases(), ids=lambda c: f"z{c['noise_multiplier']}-w{c['mixing_width']}")
def test_epsilon_json_on_the_reference_cases(run, case):
    code, out, err = run("epsilon", "--json", "--orders", "2,3,4,8,16", *ratios(case))
    data = json.loads(out)
    assert (code, err) == (0, "")
    assert data["epsilon_renyi"] <= case["epsilon_improved"] * (1 + 1e-3), "which is that of whole orders"
    if case["p"] > 1 and case["mixing_width"] > 0:
        assert data["epsilon_renyi"] == pytest.approx(case["epsilon_improved"], rel=1e-3)
    assert data["epsilon"] <= data["epsilon_renyi"]
    assert data["epsilon_classic"] == pytest.approx(case["epsilon_classic"], rel=1e-5)
    assert data["order_classic"] == case["order_classic"]
    assert data["proved"] is True
    assert data["rdp_per_step"] == pytest.approx(case["rdp_per_step"], rel=1e-8)
    assert data["equal_variance_epsilon"] <= data["epsilon"]
    assert data["plain_dpsgd_epsilon"] >= data["equal_variance_epsilon"]
    assert data["epsilon"] <= data["plain_dpsgd_epsilon"]
    assert not any("moments" in line for line in data["assumed"]), "what is said of moments is proved"
    assert any("every row of the training data" in line for line in data["assumed"])


def test_epsilon_for_people(run):
    code, out, _ = run("epsilon", *RESNET)
    assert code == 0
    assert "6.857" in out
    assert "7.2502" in out
    assert "8.0000" in out
    assert "277.3" in out
    assert "2.232" in out
    assert "the contribution of one sample is removed (zero-out" in out


def test_delta_for_an_epsilon(run):
    _, out, _ = run("epsilon", "--json", *RESNET, "--for-epsilon", 5)
    mechanism = mm.Mechanism(0.335, 0.03, 11.25, 100)
    assert json.loads(out)["delta_for_epsilon"] == mm.delta(mechanism, 5, steps=3400)
    _, text, _ = run("epsilon", *RESNET, "--for-epsilon", 5)
    assert "delta at epsilon = 5" in text


@pytest.mark.parametrize("tau", [["--tau", 0.15], ["--tau", 0.0225, "--eta", 0.15]])
def test_paper_units_are_the_same_mechanism(run, tau):
    _, by_ratio, _ = run("epsilon", "--json", *RESNET)
    _, by_paper, _ = run("epsilon", "--json", *PAPER_UNITS, *tau)
    assert json.loads(by_paper)["epsilon"] == pytest.approx(json.loads(by_ratio)["epsilon"], rel=1e-9)


def test_laplace_and_few_coordinates(run):
    _, out, _ = run(
        "epsilon", "--json", "--law", "laplace", "--z", 2, "--omega", 5, "--q", 0.1, "--steps", 50, "--d", 3
    )
    data = json.loads(out)
    mechanism = mm.Mechanism(2, 0.1, 5, law="laplace", dimension=3)
    assert data["epsilon"] == mm.epsilon(mechanism, 1e-5, steps=50)
    assert data["plain_dpsgd_accountant"] == "PLD"
    _, text, _ = run("epsilon", "--law", "laplace", "--z", 2, "--q", 0.1, "--steps", 1)
    assert "pure, order inf" in text


def test_phases_from_ledgers(run, tmp_path):
    """The transfer-learning schedule of the paper: three widths by thirds; epsilon 0.648 by the classic conversion."""
    book = tmp_path / "ledger.json"
    common = ["--z", 2.05, "--q", 0.02048, "--steps", 500]
    run("epsilon", *common, "--omega", 76.8, "--save-ledger", book)
    run("epsilon", *common, "--omega", 51.2, "--ledger", book, "--save-ledger", book)
    _, out, _ = run("epsilon", "--json", *common, "--omega", 25.6, "--ledger", book, "--save-ledger", book)
    data = json.loads(out)
    assert data["epsilon_classic"] == pytest.approx(0.648, abs=1e-3)
    assert [phase["mixing_width"] for phase in data["phases"]] == [76.8, 51.2, 25.6]
    _, again, _ = run("epsilon", "--json", "--ledger", book)
    assert json.loads(again)["epsilon"] == data["epsilon"]
    code, verified, _ = run("verify", book, "--json", "--claim", 0.65)
    assert code == 0
    assert json.loads(verified)["epsilon"] == data["epsilon"]
    assert json.loads(verified)["claim_holds"] is True
    code, text, _ = run("verify", book, "--claim", 0.3)
    assert code == 1
    assert "TOO SMALL" in text


def test_a_claim_may_rest_on_any_proof(run, tmp_path):
    """Plain DP-SGD: 1.83 by privacy-loss distributions, 2.11 by Renyi moments. A claim of 1.9 is right."""
    book = tmp_path / "new" / "plain.json"
    run("epsilon", "--z", 1, "--q", 0.01, "--steps", 1000, "--save-ledger", book)
    code, out, _ = run("verify", book, "--json", "--claim", 1.9)
    assert code == 0
    assert json.loads(out)["accountant"] == "PLD"
    assert run("verify", book, "--claim", 1.8)[0] == 1


@pytest.mark.parametrize("left_out", ["--z", "--omega", "--q"])
def test_a_printed_solution_can_be_typed_in_again(run, tmp_path, left_out):
    options = dict(zip(RESNET[::2], RESNET[1::2], strict=True))
    del options[left_out]
    flat = [item for pair in options.items() for item in pair]
    _, text, _ = run("calibrate", "--epsilon", 8, "--for", left_out.lstrip("-"), *flat)
    printed = text.splitlines()[2].split()[1]
    _, out, _ = run("epsilon", "--json", *flat, left_out, printed)
    assert json.loads(out)["epsilon"] <= 8
    run("calibrate", "--epsilon", 8, "--for", left_out.lstrip("-"), *flat, "--save-ledger", tmp_path / "cal.json")
    assert run("verify", tmp_path / "cal.json", "--claim", 8)[0] == 0


@pytest.mark.parametrize(
    ("left_out", "expected"),
    [("z", 0.335), ("omega", 11.25), ("q", 0.03), ("steps", 3400), ("p", 100)],
)
def test_calibrate_finds_each_number_again(run, left_out, expected):
    target = mm.epsilon(mm.Mechanism(0.335, 0.03, 11.25, 100), 1e-5, steps=3400) * (1 + 1e-9)
    options = dict(zip(RESNET[::2], RESNET[1::2], strict=True))
    del options[f"--{left_out}"]
    flat = [item for pair in options.items() for item in pair]
    code, out, _ = run("calibrate", "--json", "--epsilon", target, *flat)
    data = json.loads(out)
    assert code == 0
    assert data["solved_for"] == left_out
    assert data[left_out] == pytest.approx(expected, rel=1e-4 if left_out in ("z", "omega", "q") else 0)
    assert data["epsilon"] <= target
    code, text, _ = run("calibrate", "--epsilon", target, *flat, "--for", left_out)
    assert code == 0
    assert left_out in text


def test_compare(run):
    code, out, _ = run("compare", "--json", *RESNET)
    data = json.loads(out)
    assert code == 0
    assert data["plain_std_at_equal_epsilon"] == pytest.approx(1.3926, abs=2e-3)
    code, text, _ = run("compare", *RESNET)
    assert code == 0
    assert "noise at equal epsilon" in text


@pytest.mark.parametrize(
    "axis",
    [
        ["--z", 1, "--omega", 2, "--p", 4, "--q", 0.1, "--steps", 50],
        ["--over", "omega", "--z", 1, "--q", 0.1, "--steps", 50, "--from", 1, "--to", 9],
        ["--over", "tau", "--z", 1, "--clip", 1, "--n", 100, "--batch", 10, "--steps", 50],
        ["--over", "tau", "--z", 1, "--clip", 1, "--n", 100, "--q", 0.1, "--steps", 50],
    ],
)
def test_curve(run, tmp_path, axis):
    code, out, _ = run("curve", "--json", "--out", tmp_path / "plot.png", *axis)
    data = json.loads(out)
    assert code == 0
    assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG")
    assert b"<svg" in (tmp_path / "plot.svg").read_bytes()
    first = next(iter(data["epsilon"].values()))
    assert len(first) == len(data["x"])
    assert sorted(first, reverse="--over" in axis) == first


def test_curve_for_people(run, tmp_path):
    code, text, _ = run("curve", "--out", tmp_path / "plot.pdf", "--z", 5, "--q", 0.1, "--to", 50)
    assert code == 0
    assert "drawn:" in text
    assert sorted(path.suffix for path in tmp_path.iterdir()) == [".pdf", ".png", ".svg"]


NONSENSE = {
    "rate above one": (["epsilon", "--z", 1, "--q", 1.5, "--steps", 10], "at most 1"),
    "rate zero": (["epsilon", "--z", 1, "--q", 0, "--steps", 10], "greater than 0"),
    "delta one": (["epsilon", *RESNET, "--delta", 1], "above 0.01 a guarantee says next to nothing"),
    "delta above one": (["epsilon", *RESNET, "--delta", 2], "above 0.01 a guarantee says next to nothing"),
    "delta zero": (["epsilon", *RESNET, "--delta", 0], "strictly between 0 and 1"),
    "no noise": (["epsilon", "--z", 0, "--q", 0.1, "--steps", 10], "greater than 0"),
    "negative noise": (["epsilon", "--z", -1, "--q", 0.1, "--steps", 10], "greater than 0"),
    "nan noise": (["epsilon", "--z", "nan", "--q", 0.1, "--steps", 10], "finite"),
    "infinite width": (["epsilon", "--z", 1, "--omega", "inf", "--q", 0.1, "--steps", 10], "finite"),
    "negative width": (["epsilon", "--z", 1, "--omega", -1, "--q", 0.1, "--steps", 10], "0 or more"),
    "p zero": (["epsilon", "--z", 1, "--q", 0.1, "--steps", 10, "--p", 0], "whole number"),
    "p half": (["epsilon", "--z", 1, "--q", 0.1, "--steps", 10, "--p", 2.5], "whole number"),
    "steps half": (["epsilon", "--z", 1, "--q", 0.1, "--steps", 10.5], "whole number"),
    "d zero": (["epsilon", "--z", 1, "--q", 0.1, "--steps", 10, "--d", 0], "whole number"),
    "word for a number": (["epsilon", "--z", "much", "--q", 0.1], "--z"),
    "unknown option": (["epsilon", "--zz", 1], "--zz"),
    "unknown command": (["epsilonn"], "epsilonn"),
    "a command of before": (["clip-advice", "--public"], "clip-advice is advise clip now. See modelmix "),
    "unknown law": (["epsilon", "--z", 1, "--q", 0.1, "--steps", 10, "--law", "cauchy"], "gaussian, laplace"),
    "nothing given": (["epsilon"], "--z, --q and --steps"),
    "steps missing": (["epsilon", "--z", 1, "--q", 0.1], "--steps"),
    "batch without n": (["epsilon", "--z", 1, "--batch", 100, "--steps", 10], "--n"),
    "batch above n": (["epsilon", "--z", 1, "--batch", 100, "--n", 10, "--steps", 10], "at most 1"),
    "batch and q": (["epsilon", "--z", 1, "--batch", 1, "--q", 0.1, "--n", 10, "--steps", 10], "one of them"),
    "tau without clip": (["epsilon", "--z", 1, "--q", 0.1, "--tau", 1, "--steps", 10], "--clip"),
    "tau and omega": (["epsilon", "--z", 1, "--q", 0.1, "--tau", 1, "--omega", 1, "--steps", 10], "one of them"),
    "clip without tau": (["epsilon", "--z", 1, "--q", 0.1, "--clip", 1, "--steps", 10], "--tau"),
    "no such ledger": (["verify", "nowhere.json"], "cannot read"),
    "two unknowns": (["calibrate", "--epsilon", 3, "--z", 1], "only one"),
    "no unknown": (["calibrate", "--epsilon", 3, *RESNET], "leave one of"),
    "unknown unknown": (["calibrate", "--epsilon", 3, "--for", "eta", *RESNET], "choose one of"),
    "given unknown": (["calibrate", "--epsilon", 3, "--for", "z", *RESNET], "leave its value out"),
    "negative target": (["calibrate", "--epsilon", -3, "--q", 0.1, "--steps", 5], "greater than 0"),
    "bad accountant": (["calibrate", "--epsilon", 3, "--q", 0.1, "--steps", 5, "--by", "x"], "classic"),
    "two claims": (["epsilon", "--z", 1, "--n", 10, "--population", 10, "--batch", 1, "--steps", 10], "two claims"),
    "delta of 1/n": (["epsilon", "--z", 1, "--q", 0.1, "--n", 200_000, "--steps", 10], "below 1/200000"),
    "unearned": (["epsilon", "--z", 1, "--q", 1, "--steps", 1, "--adjacency", "add-or-remove"], "give a population"),
    "q with tau": (["calibrate", "--epsilon", 3, "--z", 1, "--steps", 9, "--tau", 1, "--for", "q"], "--omega instead"),
    "steps twice": (["curve", "--to", 100, *RESNET], "one of them"),
    "one step": (["curve", "--z", 1, "--q", 0.1, "--steps", 1], "--steps 2"),
    "odd picture": (["curve", "--out", "x.doc", *RESNET], ".pdf"),
    "bad axis": (["curve", "--over", "time", *RESNET], "choose one of"),
    "empty axis": (["curve", "--from", 10, "--to", 10, "--z", 1, "--q", 0.1], "greater than"),
    "bad orders": (["epsilon", "--orders", "2,x", *RESNET], "--orders"),
    "order one": (["epsilon", "--orders", "1", *RESNET], "greater than 1"),
    "negative claim": (["verify", "{ledger}", "--claim", -1], "0 or more"),
}


@pytest.mark.parametrize(("arguments", "allowed"), NONSENSE.values(), ids=NONSENSE)
def test_nonsense_ends_in_one_line(run, tmp_path, arguments, allowed):
    book = tmp_path / "ledger.json"
    mm.Ledger().add(mm.Mechanism(1.0, 0.1), 5).save(book)
    code, out, err = run(*(str(book) if argument == "{ledger}" else argument for argument in arguments))
    assert code == 2
    assert out == ""
    assert err.count("\n") == 1
    assert err.startswith("modelmix: error: ")
    assert allowed in err
    assert "Traceback" not in err


@pytest.mark.parametrize("spoil", ["cut", "edit", "schema", "version", "empty", "binary"])
@pytest.mark.parametrize("command", [["verify"], ["epsilon", "--ledger"]])
def test_spoiled_ledgers_end_in_one_line(run, tmp_path, spoil, command):
    text = mm.Ledger().add(mm.Mechanism(1.0, 0.1), 5000).to_json()
    spoiled = {
        "cut": text[:100],
        "edit": text.replace("5000", "50"),
        "schema": text.replace("modelmix-ledger", "other"),
        "version": text.replace('"version": 3', '"version": 99'),
        "empty": "",
        "binary": "\x00\x01",
    }[spoil]
    book = tmp_path / "ledger.json"
    book.write_text(spoiled)
    code, out, err = run(*command, book)
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert str(book) in err


@pytest.mark.parametrize("command", ["epsilon", "calibrate", "compare", "curve", "verify"])
def test_every_command_has_help(run, command):
    code, out, _ = run(command, "--help")
    assert code == 0
    assert "Usage" in out
    assert "--json" in out


def test_program_help_and_version(run):
    for arguments in ([], ["--help"], ["-h"]):
        code, out, _ = run(*arguments)
        assert code == 0
        assert "calibrate" in out
    assert run("--version")[1].strip() == f"modelmix {mm.__version__}"


def test_numbers_are_rounded_up():
    assert up(7.25018) == "7.2502"
    assert up(2.00001) == "2.0001"
    assert up(2.0) == "2.0000"
    assert up(0.0) == "0.0000"
    assert up(math.inf) == "inf"
    assert up(1.2345678e9) == "1.23457e+09"
    assert up(9.9999999e13) == "1.00000e+14"
    assert json.loads(as_json({"a": math.inf, "b": [math.nan, 1.5]})) == {"a": "inf", "b": [None, 1.5]}


def test_sigterm_is_left_as_it_was(run, monkeypatch):
    seen = []
    monkeypatch.setattr(typer.main, "get_command", lambda app: SimpleNamespace(main=main))

    def main(**_: object) -> None:
        seen.append(signal.getsignal(signal.SIGTERM))

    def theirs(*_: object) -> None:
        pass

    before = signal.signal(signal.SIGTERM, signal.SIG_DFL)
    try:
        assert run("epsilon")[0] == 0
        assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
        signal.signal(signal.SIGTERM, theirs)
        assert run("epsilon")[0] == 0
        assert signal.getsignal(signal.SIGTERM) is theirs
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        with ThreadPoolExecutor(1) as thread:
            assert thread.submit(run, "epsilon").result()[0] == 0
    finally:
        signal.signal(signal.SIGTERM, before)
    assert seen[0] is not signal.SIG_DFL
    assert seen[1:] == [theirs, signal.SIG_DFL]

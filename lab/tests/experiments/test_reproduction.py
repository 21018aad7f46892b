"""``modelmix-lab reproduce`` on small tables: to the end, interrupted, failing, rehearsed, and on a bare machine."""

from __future__ import annotations

import errno
import json
import math
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from nested import places

import modelmix as mm
import modelmix.data
from modelmix.config.recipe import Recipe
from modelmix.data import DataSet, Split
from modelmix.features.whitening import Whitened
from modelmix.gradients import engine
from modelmix.runs import page
from modelmix.training import Trainer
from modelmix_lab.experiments import store, tables
from modelmix_lab.experiments.reproduction import Run
from modelmix_lab.experiments.results import Result, account
from modelmix_lab.features import patches

ROW = """
data = "Blobs"
epsilon = {epsilon}
accuracy = 60.0
plain_accuracy = 50.0

[released]
extends = ["small", "mixed"]
privacy.kind = "released"
optimizer.momentum = 0.9
model.second_start = true

[paper]
extends = ["small", "mixed"]
privacy.padding = "paper"

[plain]
extends = "small"
privacy.kind = "plain"
privacy.noise_multiplier = {z}

[gaussian]
extends = "small"
privacy.kind = "average"

[best]
extends = "small"
privacy.kind = "plain"
optimizer.ema = 0.9999
"""
SMALL = """
data = {{ source = "{folder}/data.npz", classes = 3 }}
model.kind = "linear"
privacy = {{ steps = 6, batch = 40 }}
optimizer.lr = 1.0
"""
MIXED = 'privacy = { kind = "modelmix", mixing_width = 2.0 }\n'


@pytest.fixture(autouse=True)
def without_pages(monkeypatch):
    """The page of a run is tested elsewhere and takes longer than a run of these."""
    monkeypatch.setattr(page, "write_report", lambda folder: None)


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A world with three small tables and small data; commands run in it."""
    rng = np.random.default_rng(0)
    y = np.arange(300) % 3
    x = (rng.normal(size=(300, 6)) + 2 * np.eye(3, 6)[y]).astype(np.float32)
    np.savez(tmp_path / "data.npz", x_train=x[:240], y_train=y[:240], x_test=x[240:], y_test=y[240:])
    root = tmp_path / "recipes"
    for name in ("base", *tables.TABLES):
        (root / name).mkdir(parents=True)
        (root / name / "table.toml").write_text(f'title = "{name}"\nnetwork = "linear"')
    (root / "base" / "small.toml").write_text(SMALL.format(folder=tmp_path))
    (root / "base" / "mixed.toml").write_text(MIXED)
    (root / "table1" / "one.toml").write_text(ROW.format(epsilon=2.0, z=2.0))
    (root / "table1" / "two.toml").write_text(ROW.format(epsilon=4.0, z=1.0))
    monkeypatch.setattr(tables, "RECIPES", root)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def load(folder: Path, row: str, kind: str, seed: int = 1) -> Result:
    return Result.load(folder / "results" / "table1" / row / f"{kind}-{seed}.json")


# To the end.


def test_every_run_ends_in_a_result_that_can_be_checked(run, folder):
    code, out, err = run("reproduce", "table1", "--row", "one", "--seeds", 2)
    assert (code, out) == (0, "")
    assert "10 runs, 0 of them done; 60 steps to take at most" in err
    assert "10 of 10 runs have a result" in err
    for row in tables.rows("table1")[:1]:
        for kind in row.kinds:
            for seed in (1, 2):
                found = load(folder, row.name, kind, seed)
                recipe = Recipe.from_mapping(found.recipe)
                assert recipe == row.recipe(kind, seed)
                assert (found.kind, found.seed, found.steps, found.rehearsal) == (kind, seed, 6, False)
                assert found.data == {"name": "data", "train": 240, "test": 60}
                assert 0 < found.reported <= 100
                assert found.seconds["training"] <= found.seconds["total"]
                folder_of_run = folder / "results" / "runs" / "table1" / row.name / f"{kind}-{seed}"
                ledger = mm.Ledger.load(folder_of_run / "ledger.json")
                assert found.ledger == json.loads(ledger.to_json())
                assert found.epsilon == account(ledger, 1e-5)


def test_an_epsilon_is_proved_or_it_says_not(run, folder):
    run("reproduce", "table1", "--row", "one")
    for kind in tables.KINDS:
        found = load(folder, "one", kind)
        if kind == "released":
            assert (found.epsilon["status"], found.proved_epsilon()) == ("not proved", None)
            assert "value" not in found.epsilon
            assert len(found.epsilon["broken"]) == 4
            assert found.epsilon["claimed"] > 2  # by its authors' conversion, the classic one
        else:
            assert found.epsilon["status"] == "proved"
            assert found.proved_epsilon() == found.epsilon["value"] == min(found.epsilon["all"].values())
            assert found.epsilon["value"] <= (2 if kind != "plain" else 100)


def test_the_average_is_reported_where_the_recipe_keeps_one_even_if_it_is_worse(run, folder, monkeypatch):
    monkeypatch.setattr(Trainer, "evaluate", lambda self, data, averaged=False: {"accuracy": 0.1 if averaged else 0.9})
    run("reproduce", "table1", "--row", "one", "--kind", "best", "--kind", "plain")
    averaged, plain = load(folder, "one", "best"), load(folder, "one", "plain")
    assert averaged.accuracy == {"reported": "average", "last": 0.9, "average": 0.1}
    assert plain.accuracy == {"reported": "last", "last": 0.9, "average": None}
    assert (averaged.reported, plain.reported) == (10, 90)


def test_the_test_set_is_read_after_the_last_step_only(run, folder, monkeypatch):
    genuine, seen = Trainer.evaluate, []

    def evaluate(self, *arguments, **options):
        seen.append((self.step, self._test))
        return genuine(self, *arguments, **options)

    monkeypatch.setattr(Trainer, "evaluate", evaluate)
    assert run("reproduce", "table1", "--row", "one", "--kind", "plain", "--seeds", 2)[0] == 0
    assert seen == [(6, None)] * 2
    metrics = json.loads((folder / "results/runs/table1/one/plain-1/metrics.json").read_text())["rows"]
    assert not any("test_accuracy" in row for row in metrics)


def test_finished_runs_are_skipped_and_nothing_is_loaded_for_them(run, folder, monkeypatch):
    options = ["reproduce", "table1", "--row", "one", "--kind", "plain"]
    run(*options)
    before = (folder / "results/table1/one/plain-1.json").read_bytes()
    monkeypatch.setattr("modelmix.data.load", None)
    code, _, err = run(*options)
    assert code == 0
    assert "1 runs, 1 of them done; 0 steps" in err
    assert (folder / "results/table1/one/plain-1.json").read_bytes() == before


def test_data_is_loaded_once_and_a_network_compiled_once(run, folder, monkeypatch):
    loads, engines = [], []
    genuine, engine_of = modelmix.data.load, store.Engine
    monkeypatch.setattr("modelmix.data.load", lambda *a, **k: loads.append(a) or genuine(*a, **k))
    monkeypatch.setattr(store, "Engine", lambda *a, **k: engines.append(a) or engine_of(*a, **k))
    assert run("reproduce", "table1", "--kind", "paper", "--kind", "plain")[0] == 0
    assert (len(loads), len(engines)) == (1, 1)


def test_sharing_changes_no_result(run, folder):
    """Run after others, and alone by the train command."""
    run("reproduce", "table1", "--kind", "paper", "--kind", "gaussian")
    code, recipe, _ = run("reproduce", "table1", "--row", "two", "--kind", "gaussian", "--print-recipe")
    (folder / "recipe.toml").write_text(recipe)
    code, out, _ = run("train", folder / "recipe.toml", "--out", folder / "alone", "--json")
    assert code == 0
    assert json.loads(out)["test_accuracy"] == load(folder, "two", "gaussian").accuracy["last"]
    alone = torch.load(folder / "alone" / "model.pt", weights_only=True)
    shared = torch.load(folder / "results/runs/table1/two/gaussian-1/model.pt", weights_only=True)
    assert all(torch.equal(alone[key], shared[key]) for key in alone)


def test_json_for_scripts(run, folder):
    code, out, _ = run("reproduce", "table1", "--row", "one", "--kind", "plain", "--json")
    found = json.loads(out)
    assert (code, found["failed"]) == (0, [])
    assert Path(found["results"][0]["file"]).is_file()


# Interrupted and failing.


def test_ctrl_c_keeps_everything(run, folder, monkeypatch):
    options = ["reproduce", "table1", "--kind", "paper", "--chunk", 8]
    run(*options, "--out", "whole")
    genuine, calls = engine.Engine.__call__, [0]

    def clipped_sum(*arguments: object, **options: object) -> object:
        calls[0] += 1
        if calls[0] == 45:
            raise KeyboardInterrupt
        return genuine(*arguments, **options)

    monkeypatch.setattr(engine.Engine, "__call__", clipped_sum)
    code, _, err = run(*options)
    assert code == 130
    assert "stopped in table1 two paper, seed 1: nothing is lost; the same command goes on here." in err
    assert (folder / "results/table1/one/paper-1.json").exists()
    assert not (folder / "results/table1/two").exists()
    code, _, err = run(*options)
    assert code == 0
    assert "2 runs, 1 of them done" in err
    for row in ("one", "two"):
        ours = Result.load(folder / "results" / "table1" / row / "paper-1.json")
        whole = Result.load(folder / "whole" / "table1" / row / "paper-1.json")
        assert (ours.accuracy, ours.epsilon, ours.ledger) == (whole.accuracy, whole.epsilon, whole.ledger)
        assert 0 < ours.seconds["training"] <= ours.seconds["total"]
        models = [folder / root / "runs/table1" / row / "paper-1/model.pt" for root in ("results", "whole")]
        assert models[0].read_bytes() == models[1].read_bytes()


def test_a_run_that_fails_is_named_and_the_next_begins(run, folder):
    row = (folder / "recipes/table1/one.toml").read_text()
    (folder / "recipes/table1/one.toml").write_text(
        row.replace("[plain]\n", '[plain]\nprivacy.spent = "nowhere.json"\n')
    )
    code, out, err = run("reproduce", "table1", "--kind", "plain", "--kind", "gaussian", "--json")
    assert code == 1
    (failed,) = json.loads(out)["failed"]
    assert failed["run"] == "table1 one plain, seed 1"
    assert "cannot read nowhere.json" in failed["why"]
    assert sum("FAILED" in line for line in err.splitlines()) == 1
    assert not (folder / "results/table1/one/plain-1.json").exists()
    assert load(folder, "two", "gaussian").steps == 6


def test_a_kind_that_some_rows_lack_is_run_for_the_others(run, tmp_path):
    given = ["--data-dir", tmp_path / "nowhere", "--out", tmp_path / "out", "--kind", "paper", "--json"]
    code, out, _ = run("reproduce", "transfer", *given)
    assert code == 1  # there is no data
    assert [one["run"] for one in json.loads(out)["failed"]] == [
        "transfer cifar10-eps0.64 paper, seed 1",
        "transfer cifar10-eps2 paper, seed 1",
    ]
    code, _, err = run("reproduce", "transfer", "--row", "cifar10-epsinf", *given)
    assert code == 2
    assert "has no paper run" in err


def test_a_place_that_cannot_hold_results_is_refused_at_once(run, folder):
    (folder / "file").write_text("")
    for out in (folder / "file", folder / "file" / "below"):
        code, _, err = run("reproduce", "table1", "--row", "one", "--kind", "plain", "--out", out)
        assert code == 2
        assert "is not a folder. Choose another --out." in err


@pytest.mark.parametrize("out", ["x" * 300, "closed"])
def test_a_place_that_cannot_be_looked_into_is_one_line(run, folder, monkeypatch, out):
    genuine = os.stat

    def stat(path, *args, **kwargs):
        if "closed/table1" in str(path):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
        return genuine(path, *args, **kwargs)

    monkeypatch.setattr(os, "stat", stat)
    code, _, err = run("reproduce", "table1", "--row", "one", "--kind", "plain", "--out", folder / out)
    assert code == 1
    (line,) = (line for line in err.splitlines() if "FAILED" in line)
    assert "FAILED: cannot look for" in line
    assert line.endswith("Open its folder, or choose another --out.")


def test_data_that_is_not_there_is_said_once(run, tmp_path):
    given = ["--data-dir", tmp_path / "nowhere", "--out", tmp_path / "out", "--seeds", 2]
    code, out, err = run("reproduce", "table2", "--row", "svhn-eps2", "--row", "cifar10-eps4", *given, "--json")
    assert code == 1
    failed = json.loads(out)["failed"]
    assert len(failed) == 2 * 2 * 5
    assert all("modelmix-lab data fetch" in one["why"] for one in failed)
    assert sorted(line.split(" can be made")[0] for line in err.splitlines() if "can be made" in line) == [
        "no run on cifar10",
        "no run on svhn",
    ]
    assert "FAILED" not in err


def test_whatever_a_run_raises_is_one_line(run, folder, monkeypatch):
    errors = iter(
        [torch.OutOfMemoryError("CUDA out of memory.\nTried"), RuntimeError("an\nodd\nthing"), OSError(28, "x")]
    )

    def clipped_sum(*_: object, **__: object) -> object:
        raise next(errors)

    monkeypatch.setattr(engine.Engine, "__call__", clipped_sum)
    code, out, err = run("reproduce", "table1", "--row", "one", "--kind", "plain", "--seeds", 3, "--json")
    why = [failed["why"] for failed in json.loads(out)["failed"]]
    assert code == 1
    assert why[0] == "the device has not enough memory: give a smaller --chunk."
    assert why[1] == "RuntimeError: an odd thing"
    assert "Traceback" not in err


def test_missing_and_damaged_data(run, folder):
    data = (folder / "data.npz").read_bytes()
    (folder / "data.npz").write_bytes(data[:1000])
    code, out, _ = run("reproduce", "table1", "--row", "one", "--kind", "plain", "--json")
    assert code == 1
    assert "data.npz" in json.loads(out)["failed"][0]["why"]
    (folder / "data.npz").unlink()
    code, _, err = run("reproduce", "table1", "--row", "one", "--kind", "plain")
    assert code == 1
    assert "is not there" in err
    assert not (folder / "results").exists()
    (folder / "data.npz").write_bytes(data)
    assert run("reproduce", "table1", "--row", "one", "--kind", "plain")[0] == 0


def test_the_wrong_data_set_does_not_continue_a_run(run, folder, monkeypatch):
    """Interrupted on one data set, resumed on another: refused, and the first is not harmed."""
    options = ["reproduce", "table1", "--row", "one", "--kind", "paper", "--chunk", 8]
    genuine, calls = engine.Engine.__call__, [0]

    def clipped_sum(*arguments: object, **options: object) -> object:
        calls[0] += 1
        if calls[0] == 25:
            raise KeyboardInterrupt
        return genuine(*arguments, **options)

    monkeypatch.setattr(engine.Engine, "__call__", clipped_sum)
    assert run(*options)[0] == 130
    arrays = dict(np.load(folder / "data.npz"))
    np.savez(folder / "data.npz", **{**arrays, "x_train": arrays["x_train"] + 1})
    code, _, err = run(*options)
    assert code == 1
    assert "a ledger is about one data set" in err
    np.savez(folder / "data.npz", **arrays)
    assert run(*options)[0] == 0


def test_a_result_that_cannot_be_written_is_not_lost(run, folder):
    (folder / "results").mkdir()
    (folder / "results" / "table1").write_text("in the way")
    options = ["reproduce", "table1", "--row", "one", "--kind", "plain"]
    code, _, err = run(*options)
    assert code == 1
    assert "FAILED: cannot write results/table1/one/plain-1.json" in err
    model = (folder / "results/runs/table1/one/plain-1/model.pt").read_bytes()
    (folder / "results" / "table1").unlink()
    assert run(*options)[0] == 0
    assert (folder / "results/runs/table1/one/plain-1/model.pt").read_bytes() == model
    assert load(folder, "one", "plain").steps == 6


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"version": 1}, "is of version 1 and this program reads version 2: use the program that wrote it"),
        ({"schema": "other"}, "is not the result of a run: move it away"),
        (
            {"recipe": {"privacy": {"steps": 6, "noise_multiplier": 2.0, "batch": 40, "kind": "plain"}}},
            "of another recipe",
        ),
        ({"steps": "six"}, "was edited: steps cannot be right"),
        ({"accuracy": {"reported": "last", "last": 7.0}}, "its numbers cannot be right"),
        ({"accuracy": {"reported": "last", "last": "0.9"}}, "its numbers cannot be right"),
        ({"steps": 5}, "its numbers cannot be right"),
        ({"data": {}}, "its numbers cannot be right"),
        ({"accuracy": {"reported": "last", "last": 10**400}}, "its numbers cannot be right"),
        ({"ledger": {}}, "is not a ledger"),
        ({"rehearsal": True}, "is a rehearsal and no result: move it away"),
        ({"row": "two"}, "is the result of another recipe or row: move it away"),
        ({"same_run_as": 7}, "was edited: same_run_as cannot be right"),
        ({"same_run_as": None}, "was edited: same_run_as cannot be right"),
    ],
)
def test_results_of_another_version_stay_as_they_are(run, folder, change, message):
    options = ["reproduce", "table1", "--kind", "plain"]
    run(*options)
    path = folder / "results/table1/one/plain-1.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **change}))
    before = path.read_bytes()
    (folder / "results/table1/two/plain-1.json").unlink()
    code, _, err = run(*options)
    assert code == 1
    assert message in err
    assert path.read_bytes() == before
    assert load(folder, "two", "plain").steps == 6


# The same training in two rows.

PAPER = ["--kind", "paper"]
ONE, OTHER = "table1/one/paper-1.json", "table2/other/paper-1.json"


@pytest.fixture
def twins(folder):
    """Row other of table2 asks for what row one of table1 asks for."""
    (folder / "recipes/table2/other.toml").write_text(ROW.format(epsilon=2.0, z=2.0))
    return folder / "results"


@pytest.fixture
def finished(run, twins):
    """Of the two, row one has been run."""
    assert run("reproduce", "table1", "--row", "one", *PAPER)[0] == 0
    return twins


def trained(results: Path, place: str = OTHER) -> bool:
    """Whether the run with this result has trained itself."""
    return (results / "runs" / place).with_suffix("").exists()


def body(results: Path, place: str) -> dict:
    return json.loads((results / place).read_text())


def test_a_training_that_another_row_has_is_not_repeated(run, twins):
    assert run("reproduce", "table1", "--row", "one", "--seeds", 2)[0] == 0
    (twins.parent / "data.npz").unlink()  # nothing is loaded
    code, _, err = run("reproduce", "table2", "--seeds", 2, "--precision", "bfloat16")
    assert code == 0
    assert "10 of 10 runs have a result" in err
    assert not (twins / "runs/table2").exists()
    for kind in tables.KINDS:
        for seed in (1, 2):
            there, here = f"table1/one/{kind}-{seed}.json", f"table2/other/{kind}-{seed}.json"
            assert f"table2 other {kind}, seed {seed}: taken from results/{there}, which is the same training: " in err
            first = body(twins, there)
            assert body(twins, here) == {
                **first,
                "table": "table2",
                "row": "other",
                "recipe": {**first["recipe"], "run": {**first["recipe"]["run"], "name": f"table2/other/{kind}"}},
                "same_run_as": there,
            }
            assert Result.load(twins / here).same_run_as == there
            assert Result.load(twins / there).same_run_as is None
    before = (twins / OTHER).read_bytes()
    code, _, err = run("reproduce", "table2", "--seeds", 2)
    assert (code, "10 runs, 10 of them done" in err, "taken from" in err) == (0, True, False)
    assert (twins / OTHER).read_bytes() == before
    (row,) = json.loads(run("results", "--json")[1])["tables"]["table2"]
    assert {kind: found["seeds"] for kind, found in row["runs"].items()} == {kind: [1, 2] for kind in tables.KINDS}


def test_a_training_is_shared_within_a_table_and_a_command(run, folder):
    (folder / "recipes/table1/two.toml").write_text(ROW.format(epsilon=2.0, z=3.0))
    assert run("reproduce", "table1", "--row", "one", "--row", "two", *PAPER, "--kind", "plain")[0] == 0
    assert load(folder, "two", "paper").same_run_as == ONE
    assert load(folder, "two", "plain").same_run_as is None  # the noise is another


def test_whose_training_it_is_stays_true_whichever_file_it_was_taken_from(run, twins):
    (twins.parent / "recipes/table3").joinpath("third.toml").write_text(ROW.format(epsilon=2.0, z=2.0))
    run("reproduce", "table1", "--row", "one", *PAPER)
    run("reproduce", "table2", *PAPER)
    before = (twins / ONE).read_bytes()
    (twins / ONE).unlink()
    assert run("reproduce", "table3", *PAPER)[0] == 0
    assert body(twins, "table3/third/paper-1.json")["same_run_as"] == ONE
    assert run("reproduce", "table1", "--row", "one", *PAPER)[0] == 0
    assert (twins / ONE).read_bytes() == before  # the first again, not a copy of its copy


def test_another_recipe_or_seed_is_another_training(run, twins):
    row = (twins.parent / "recipes/table2/other.toml").read_text()
    (twins.parent / "recipes/table2/other.toml").write_text(row.replace("[paper]\n", "[paper]\nprivacy.clip = 2.0\n"))
    run("reproduce", "table1", "--row", "one", *PAPER, "--kind", "gaussian")
    assert run("reproduce", "table2", *PAPER)[0] == 0
    assert run("reproduce", "table2", "--kind", "gaussian", "--first-seed", 2)[0] == 0
    for place in (OTHER, "table2/other/gaussian-2.json"):
        assert trained(twins, place)
        assert "same_run_as" not in body(twins, place)


def test_every_value_of_a_recipe_counts(finished):
    other = Run.of(tables.row("table2", "other"), "paper", 1)
    assert other.twin(finished) is not None
    assert Run.of(tables.row("table1", "one"), "paper", 1).twin(finished) is None  # nobody is their own twin
    changes = [
        {"data": "svhn"},
        {"model": "cnn"},
        {"mechanism": "released"},
        {"epsilon": 2.5},
        {"noise_multiplier": 2.0},
        {"delta": 1e-6},
        {"steps": 7},
        {"batch": 41},
        {"sample_rate": 40 / 240},
        {"clip": 2.0},
        {"lr": 2.0},
        {"lr": {"1": 1.0, "2": 0.5}},
        {"mixing_width": 3.0},
        {"p": 2},
        {"padding": "exact"},
        {"momentum": 0.9},
        {"weight_decay": 0.1},
        {"ema": 0.9},
        {"augment": "flip"},
        {"multiplicity": 2},
        {"second_start": True},
        {"evaluate_every": 2},
        {"seed": 2},
        {"seed": None},
    ]
    for change in changes:
        assert replace(other, recipe=other.recipe.changed(places(change))).twin(finished) is None, change


def test_a_rehearsal_is_shared_with_nothing(run, twins):
    """Not even one that is as long as the run, not even if somebody moves the file to the results."""
    rehearse = ["--steps", 6]
    run("reproduce", "table1", "--row", "one", *PAPER, *rehearse)
    (twins / "table1").mkdir()
    (twins / "rehearsals/table1/one").rename(twins / "table1/one")
    assert run("reproduce", "table2", *PAPER)[0] == 0
    assert trained(twins)
    assert "same_run_as" not in body(twins, OTHER)
    (twins / ONE).unlink()
    code, _, err = run("reproduce", "table1", "--row", "one", *PAPER, *rehearse)
    assert (code, "taken from" in err) == (0, False)
    assert not (twins / ONE).exists()


@pytest.mark.parametrize(
    "spoil",
    [
        lambda text: text[:-20],
        lambda text: "",
        lambda text: "[]",
        lambda text: text.replace('"version": 2', '"version": 3', 1),
        lambda text: text.replace('"row": "one"', '"row": "two"'),
        lambda text: text.replace('"seed": 1,\n "rehearsal"', '"seed": 2,\n "rehearsal"'),
        lambda text: text.replace('"lr": 1.0', '"lr": 2.0'),
        lambda text: text.replace('"lr": 1.0', '"of": "the future"'),
        lambda text: text.replace('"last": 0.', '"last": 7.'),
    ],
)
def test_a_result_that_cannot_be_right_is_passed_over(run, finished, spoil):
    text = (finished / ONE).read_text()
    (finished / ONE).write_text(spoil(text))
    assert (finished / ONE).read_text() != text
    assert Run.of(tables.row("table2", "other"), "paper", 1).twin(finished) is None
    code, _, err = run("reproduce", "table2", *PAPER)
    assert (code, "taken from" in err) == (0, False)
    assert trained(finished)
    assert (finished / ONE).read_text() == spoil(text)


def test_a_folder_in_place_of_a_result_is_passed_over(run, finished):
    (finished / ONE).unlink()
    (finished / ONE).mkdir()
    assert run("reproduce", "table2", *PAPER)[0] == 0
    assert trained(finished)


def test_a_result_of_what_its_row_no_longer_asks_for_is_passed_over(run, finished):
    row = finished.parent / "recipes/table1/one.toml"
    row.write_text(row.read_text().replace("[paper]\n", "[paper]\nprivacy.clip = 2.0\n"))
    tables._table.cache_clear()
    assert run("reproduce", "table2", *PAPER)[0] == 0
    assert trained(finished)


# Rehearsals.


def test_a_rehearsal_is_never_a_result(run, folder):
    """Not even one that is as long as the run."""
    code, _, err = run("reproduce", "table1", "--row", "one", "--kind", "paper", "--steps", 6)
    assert code == 0
    assert "REHEARSAL, no results" in err
    assert "not a result, a rehearsal" in err
    found = Result.load(folder / "results/rehearsals/table1/one/paper-1.json")
    assert (found.rehearsal, found.steps) == (True, 6)
    assert not (folder / "results/table1").exists()
    assert not (folder / "results/runs").exists()
    assert all(not row["runs"] for row in json.loads(run("results", "--json")[1])["tables"]["table1"])
    # Not even if somebody moves the file there.
    (folder / "results/rehearsals/table1").rename(folder / "results/table1")
    assert all(not row["runs"] for row in json.loads(run("results", "--json")[1])["tables"]["table1"])


@pytest.fixture
def imagined(tmp_path, monkeypatch):
    """Images of the right shape in place of the public sets, and any directions in place of synthetic images'."""

    def load(name: str, data_dir: object, image_size: None, **_: object) -> DataSet:
        generator = torch.Generator().manual_seed(0)
        shape = (1, 28, 28) if name == "fashion-mnist" else (3, 32, 32)

        def split(n: int) -> Split:
            x = torch.randint(0, 256, (n, *shape), dtype=torch.uint8, generator=generator)
            return Split(x, torch.randint(0, 10, (n,), generator=generator))

        return DataSet(name, split(40), split(8), tuple("0123456789"))

    monkeypatch.setenv("MODELMIX_CACHE", str(tmp_path / "cache"))

    def directions(self: Whitened, like: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        width = math.prod(self.transform.shape(like)[1:])
        return torch.zeros(width), torch.randn(self.components, width, generator=torch.Generator().manual_seed(0))

    monkeypatch.setattr("modelmix.data.load", load)
    monkeypatch.setattr(Whitened, "_directions", directions)
    monkeypatch.setattr(patches, "_SOURCES", 32)
    monkeypatch.setattr(patches, "_CUT", 1200)
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize(
    ("table", "row"),
    [
        ("table1", "cifar10-eps0.2"),
        ("table1", "fashion-mnist-eps1"),
        ("table2", "cifar10-eps8"),
        ("table3", "svhn-acc88"),
    ],
)
def test_every_kind_of_every_table_can_be_rehearsed(run, imagined, table, row):
    code, _, err = run("reproduce", table, "--row", row, "--steps", 1, "--batch", 3, "--device", "cpu")
    assert code == 0, err
    found = {path.stem for path in Path("results/rehearsals", table, row).iterdir()}
    assert found == {f"{kind}-1" for kind in tables.row(table, row).kinds}


def test_every_kind_of_transfer_learning_can_be_rehearsed(run, imagined, monkeypatch):
    """With features of few numbers in place of a network whose weights are large."""
    from modelmix.features import pretrained
    from modelmix.features.extractor import Extractor

    asked = set()

    def small(name: str, device: object, *, size: None, unit_length: bool) -> Extractor:
        asked.add((name, size))
        return Extractor(name, name, lambda x: x.flatten(1).float(), {}, unit_length)

    monkeypatch.setattr(pretrained, "pretrained", small)
    np.savez("public_tinyimagenet32_2000.npz", x=np.zeros((1001, 32, 32, 3), np.uint8))
    code, _, err = run("reproduce", "transfer", "--steps", 2, "--batch", 3, "--device", "cpu")
    assert code == 0, err
    for row in tables.rows("transfer"):
        found = {path.stem for path in Path("results/rehearsals/transfer", row.name).iterdir()}
        assert found == {f"{kind}-1" for kind in row.kinds}
    assert asked == {(f"efficientnet-lite{i}", None) for i in range(3)}


# Nonsense, and a bare machine.


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["table4"], "'table4' cannot be reproduced: choose one of fig2, fig3, table1, table2, table3, transfer, emb"),
        (["table1", "--row", "on"], "table1 has no row 'on': did you mean one?"),
        (["table1", "--kind", "pln"], "there is no kind 'pln': did you mean plain?"),
        (["table1", "--seeds", 0], "--seeds = 0"),
        (["table1", "--steps", 0], "steps = 0"),
        (["table1", "--batch", -1], "batch = -1"),
        (["table1", "--device", "abacus"], "device = 'abacus' is not there"),
        (["table1", "--print-recipe"], "--print-recipe is for one run: give one --row and one --kind"),
        (["fig3", "--row", "one"], "fig3 is a figure and has no runs"),
    ],
)
def test_nonsense_is_refused_before_anything_begins(run, folder, arguments, message):
    code, out, err = run("reproduce", *arguments)
    assert (code, out) == (2, "")
    assert message in err
    assert err.count("\n") == 1
    assert not (folder / "results").exists()


def test_a_machine_with_torch_and_little_else_can_reproduce(folder):
    """No dp-accounting, kymatio, opacus, YAML or TensorBoard: importing any of them raises."""
    program = f"""
import sys

class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("dp_accounting", "kymatio", "opacus", "yaml", "tensorboard", "tensorboardX"):
            raise ModuleNotFoundError(name, name=name)

sys.meta_path.insert(0, Refuse())
from pathlib import Path
from modelmix_lab.experiments import tables
tables.RECIPES = Path({str(folder / "recipes")!r})
from modelmix_lab.cli import main
main(["reproduce", "table1", "--row", "one", "--kind", "paper", "--kind", "plain"])
"""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=folder, env=environment)
    assert done.returncode == 0, done.stderr
    found = load(folder, "one", "plain")
    assert found.epsilon["by"] == "Renyi, improved conversion"
    assert found.proved_epsilon() <= found.epsilon["value"]  # here the distributions are there as well

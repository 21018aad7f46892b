"""``modelmix audit``: on a ledger, on a recipe, on a run; a refuted claim is said loudly."""

from __future__ import annotations

import json

import numpy as np
import pytest

import modelmix as mm
from modelmix.accounting.guarantee import guarantee
from modelmix.accounting.runs import SCHEMA
from modelmix.cli import audit as command

HEADER = "audit at delta"


@pytest.fixture
def ledger(tmp_path):
    mm.Ledger().add(mm.Mechanism(0.8, 0.5, 1.0), 4).save(tmp_path / "ledger.json")
    return tmp_path / "ledger.json"


def test_a_ledger(run, ledger, tmp_path):
    code, out, error = run(
        "audit", ledger, "--quick", "--trials", 20_000, "--delta", 1e-3, "--out", tmp_path / "a.png", "--json"
    )
    assert code == 0, error
    found = json.loads(out)
    whole, step = found["audits"]
    assert 0.2 * whole["claimed"] < whole["epsilon"] < whole["claimed"]
    assert whole["claimed"] == guarantee(mm.Ledger.load(ledger), 1e-3).epsilon
    assert 0 < step["epsilon"] < step["claimed"]
    assert (tmp_path / "a.png").stat().st_size > 1000


@pytest.mark.parametrize("proved", [True, False])
def test_embedded_steps(run, tmp_path, proved):
    found = mm.Ledger().add(mm.EmbeddingMechanism(1.2, 0.5, 3.0), 2)
    (found if proved else mm.Ledger(found.phases, ("raw momentum",))).save(tmp_path / "ledger.json")
    code, out, error = run("audit", tmp_path / "ledger.json", "--quick", "--trials", 5_000, "--delta", 1e-2, "--json")
    assert code == 0, error
    rows = json.loads(out)["audits"]
    assert [row["what"] for row in rows] == ["the mechanism, 2 steps", "the trainer, one step at q = 1"][: 1 + proved]
    assert all(0 < row["epsilon"] < row["claimed"] for row in rows)


def test_a_run_folder_and_its_table(run, ledger):
    config = {"schema": SCHEMA, "version": 1, "seed": None, "delta": 1e-2}  # of before there were plans
    ledger.with_name("config.json").write_text(json.dumps(config))
    code, out, _ = run("audit", ledger.parent, "--quick", "--trials", 5_000, "--delta", 1e-2)
    assert code == 0
    assert HEADER in out
    assert "REFUTED" not in out
    assert (ledger.parent / "audit.png").exists()


def test_a_recipe(run, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    x, y = np.zeros((50, 3), dtype=np.float32), np.arange(50) % 2
    np.savez("data.npz", x_train=x, y_train=y, x_test=x, y_test=y)
    (tmp_path / "r.toml").write_text(
        '[data]\nsource = "data.npz"\nclasses = 2\n[model]\nkind = "linear"\n'
        '[privacy]\nkind = "plain"\nnoise_multiplier = 1.0\nbatch = 25\nsteps = 3\n'
    )
    code, out, error = run("audit", "r.toml", "--quick", "--trials", 5000, "--json")
    assert code == 0, error
    assert json.loads(out)["proved"] is True


def test_a_claim_that_is_too_small_is_refuted(run, ledger, monkeypatch):
    monkeypatch.setattr(command, "guarantee", lambda *_: type("Guarantee", (), {"epsilon": 0.01})())
    code, out, _ = run("audit", ledger, "--quick", "--trials", 5_000, "--delta", 1e-2, "--out", ledger.parent / "a.png")
    assert code == 1
    assert "REFUTED" in out


@pytest.mark.parametrize(
    "arguments",
    [
        ("nowhere",),
        ("nowhere.toml",),
        ("LEDGER", "--trials", 1),
        ("LEDGER", "--confidence", 2),
        ("LEDGER", "--delta", 0),
    ],
)
def test_nonsense(run, ledger, arguments):
    code, out, error = run("audit", *(ledger if a == "LEDGER" else a for a in arguments))
    assert (code, out) == (2, "")
    assert error.count("\n") == 1

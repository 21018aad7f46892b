"""Every committed result keeps the epsilon it had, or has a smaller one."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path

import pytest

import modelmix as mm

RESULTS = Path(__file__).parents[3] / "docs" / "results"
TABLES = sorted(path.name for path in RESULTS.iterdir() if path.is_dir())
FOURIER = 1 + 1e-8  # the transforms round differently on other machines


@cache
def found(ledger: str, delta: float) -> mm.Guarantee:
    return mm.guarantee(mm.Ledger.from_json(ledger), delta)


@pytest.mark.parametrize("table", TABLES)
def test_no_epsilon_grew(table):
    files = sorted((RESULTS / table).glob("*/*.json"))
    assert files
    for file in files:
        result = json.loads(file.read_text(encoding="utf-8"))
        said, delta = result["epsilon"], result["recipe"]["privacy"]["delta"]
        ledger = mm.Ledger.from_json(json.dumps(result["ledger"]))
        assert ledger.adjacency == "zero-out", file
        if ledger.unproved:
            assert said["status"] == "not proved", file
            with pytest.raises(mm.UnprovedError):
                mm.guarantee(ledger, delta)
        else:
            assert found(ledger.to_json(), delta).epsilon <= said["value"] * FOURIER, file

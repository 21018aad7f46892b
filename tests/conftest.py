"""Shared helpers. Hypothesis runs derandomised: the suite gives the same verdict every time."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from hypothesis import settings

settings.register_profile("suite", derandomize=True, deadline=None, max_examples=60)
settings.load_profile("suite")
torch.set_num_threads(1)  # the suite runs one process a core already

DATA = Path(__file__).parent / "data"


def reference_cases() -> list[dict]:
    return json.loads((DATA / "epsilon_cases.json").read_text())


@pytest.fixture
def run(capsys):
    """Runs the command line in this process: (exit code, stdout, stderr)."""
    from modelmix.cli import main

    def call(*arguments: object) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as stop:
            main([str(argument) for argument in arguments])
        captured = capsys.readouterr()
        return int(stop.value.code or 0), captured.out, captured.err

    return call

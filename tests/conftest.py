"""Shared helpers. Hypothesis runs derandomised: the suite gives the same verdict every time."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import torch
from hypothesis import settings

settings.register_profile("suite", derandomize=True, deadline=None, max_examples=60)
settings.load_profile("suite")
torch.set_num_threads(1)  # the suite runs one process a core already

# MODELMIX_TEST_DEVICE=cuda runs the tests of engines on an accelerator. Elsewhere the interpreter runs our kernels.
if os.environ.get("MODELMIX_TEST_DEVICE", "cpu") != "cpu":
    torch.set_default_device(os.environ["MODELMIX_TEST_DEVICE"])
    torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = False
else:
    os.environ.setdefault("TRITON_INTERPRET", "1")

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

"""Epsilons that others computed, for tests to meet."""

from __future__ import annotations

import json
from pathlib import Path


def reference_cases() -> list[dict]:
    return json.loads((Path(__file__).parent / "data" / "epsilon_cases.json").read_text())

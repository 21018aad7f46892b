"""How many random cases a test takes."""

from __future__ import annotations

import os

DEPTH = float(os.environ.get("MODELMIX_TEST_DEPTH", "1"))


def cases(count: int) -> int:
    """``count`` in everyday runs; MODELMIX_TEST_DEPTH=3 gives three times as many."""
    return max(1, round(count * DEPTH))

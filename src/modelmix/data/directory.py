"""The data directory, in which public files are looked for by name."""

from __future__ import annotations

import os
from pathlib import Path

VARIABLE = "MODELMIX_DATA"
"""The environment variable that names the data directory."""


def directory(given: str | Path | None = None) -> Path:
    """Return the data directory: the one given, else what MODELMIX_DATA names, else ~/.cache/modelmix."""
    return Path(given or os.environ.get(VARIABLE) or Path("~") / ".cache" / "modelmix").expanduser()

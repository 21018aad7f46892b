"""The tests of the laboratory run its own program; everything else is shared with those of the library."""

from __future__ import annotations

import pytest

import modelmix_lab  # noqa: F401, its kinds are known by name


@pytest.fixture
def run(capsys):
    """Runs the laboratory's command line in this process: (exit code, stdout, stderr)."""
    from modelmix_lab.cli import main

    def call(*arguments: object) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as stop:
            main([str(argument) for argument in arguments])
        captured = capsys.readouterr()
        return int(stop.value.code or 0), captured.out, captured.err

    return call

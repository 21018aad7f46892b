"""``modelmix report``: the page of a run."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from modelmix.runs.page import write_report


def report(
    run: Annotated[Path, typer.Argument(help="The folder of a run.", metavar="RUN")],
    public: Annotated[
        bool, typer.Option("--public", help="Leave out what epsilon does not cover: diagnostics and the seed.")
    ] = False,
) -> None:
    """Write the page of a run: accuracy, epsilon with its yardsticks, what it covers, diagnostics, settings.

    \b
    modelmix report RUN              writes RUN/report.html, for the data holder
    modelmix report RUN --public     writes RUN/report-public.html, without the diagnostics
    """
    print(f"written: {write_report(run, public=public)}")

"""The program of the laboratory: the paper's commands, and those of the library that take its data and features."""

from __future__ import annotations

from typing import Annotated

import typer

from modelmix.cli.advise import advise
from modelmix.cli.app import Root, run_program
from modelmix.cli.audit import audit
from modelmix.cli.once import Program
from modelmix.cli.train import TrainCommand, train
from modelmix_lab.cli.data import data
from modelmix_lab.cli.prior import prior
from modelmix_lab.cli.reproduce import reproduce
from modelmix_lab.cli.results import results
from modelmix_lab.cli.theory import theory

app = Program(
    name="modelmix-lab",
    cls=Root,
    help="The paper recomputed: figures, tables, theorems, benchmark data, synthetic images. Commands take --help.",
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _version(wanted: bool) -> None:
    if wanted:
        from modelmix_lab import __version__

        print(f"modelmix-lab {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    pass


app.command("train", cls=TrainCommand)(train)
for _command in (audit, reproduce, results, prior):
    app.command(_command.__name__)(_command)
for _name, _group in {"advise": advise, "data": data, "theory": theory}.items():
    app.add_typer(_group, name=_name)


def main(arguments: list[str] | None = None) -> None:
    """Entry point."""
    run_program(app, "modelmix-lab", arguments)

"""``modelmix-lab data``: the public data sets, and how they get here."""

from __future__ import annotations

import sys
from contextlib import nullcontext
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING, Annotated, Any

import typer

from modelmix.cli import show
from modelmix.cli.once import Program
from modelmix.cli.options import Json
from modelmix.data.directory import VARIABLE, directory
from modelmix_lab.datasets import catalogue

if TYPE_CHECKING:
    from modelmix_lab.datasets.checksum import File

data = Program(help="List the public data sets, or download one, checked by its published checksums.")

DataDir = Annotated[
    Path | None,
    typer.Option(
        "--data-dir",
        help=f"Where public data sets lie; default: the folder that {VARIABLE} names, or ~/.cache/modelmix.",
        show_default=False,
    ),
]


@data.command()
def fetch(
    name: Annotated[str, typer.Argument(help=f"One of {', '.join(catalogue.CATALOGUE)}.", metavar="NAME")],
    data_dir: DataDir = None,
    url_base: Annotated[
        str | None, typer.Option(help="Another place with the published files, without their names.")
    ] = None,
    json: Json = False,
) -> None:
    """Download a public data set, go on with an interrupted download, or check what is there.

    \b
    modelmix-lab data fetch cifar10
    modelmix-lab data fetch svhn --data-dir data
    modelmix-lab train --data cifar10
    """
    from modelmix_lab.datasets.fetch import fetch as bring

    public = catalogue.published(name)
    print(f"{public.title}: {public.licence}", file=sys.stderr)
    with _Bars() if sys.stderr.isatty() else nullcontext(_silent) as watch:
        done = bring(name, data_dir, url_base=url_base, watch=watch, note=_note)
    use = f"modelmix-lab train --data {name}" + (f" --data-dir {quote(str(data_dir))}" if data_dir else "")
    if json:
        out = {
            "name": name,
            "folder": str(done.folder),
            "downloaded": list(done.downloaded),
            "licence": public.licence,
            "use": use,
        }
        print(show.as_json(out))
        return
    got = f"downloaded {', '.join(done.downloaded)}" if done.downloaded else "was there already"
    print(f"{name} is complete in {done.folder}: {got}; every checksum is the published one.\nUse it: {use}")


@data.command("list")
def list_sets(data_dir: DataDir = None, json: Json = False) -> None:
    """List the public data sets: which are here, how large a download is, and on which terms they are had."""
    root = directory(data_dir)
    places = {name: catalogue.find(name, data_dir) for name in catalogue.CATALOGUE}
    sizes = {name: sum(file.size for file in public.files) for name, public in catalogue.CATALOGUE.items()}
    if json:
        sets = [
            {
                "name": name,
                "title": public.title,
                "folder": None if places[name] is None else str(places[name]),
                "download_bytes": sizes[name],
                "licence": public.licence,
            }
            for name, public in catalogue.CATALOGUE.items()
        ]
        print(show.as_json({"data_dir": str(root), "sets": sets}))
        return
    rows = [
        [name, f"{sizes[name] / 1e6:.0f} MB", "-" if places[name] is None else str(places[name])]
        for name in catalogue.CATALOGUE
    ]
    notes = [f"{public.title}: {public.licence}" for public in catalogue.CATALOGUE.values()]
    notes.append("Files are checked when a set is loaded or fetched: modelmix-lab data fetch NAME.")
    title = f"public data sets, looked for in {root!s}"
    show.table(title, ["name", "download", " here"], rows, notes)


def _note(line: str) -> None:
    print(f"modelmix-lab: {line}", file=sys.stderr)


def _silent(file: File, held: int) -> None:
    """Nobody is watching."""


class _Bars:
    """A progress bar for each file, on stderr."""

    def __enter__(self) -> _Bars:
        from rich.console import Console
        from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

        self._tasks: dict[str, Any] = {}
        self._bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            DownloadColumn(),
            TimeRemainingColumn(),
            console=Console(stderr=True),
        )
        self._bar.start()
        return self

    def __call__(self, file: File, held: int) -> None:
        if file.name not in self._tasks:
            self._tasks[file.name] = self._bar.add_task(file.name, total=file.size)
        self._bar.update(self._tasks[file.name], completed=held)

    def __exit__(self, *_: object) -> None:
        self._bar.stop()

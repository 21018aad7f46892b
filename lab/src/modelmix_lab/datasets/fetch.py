"""A public data set from its publisher into the data directory."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from modelmix._files import write_atomically
from modelmix.data.directory import directory
from modelmix.errors import ModelMixError
from modelmix_lab.datasets import archive, catalogue
from modelmix_lab.datasets.checksum import File, is_missing
from modelmix_lab.datasets.download import RetryPolicy, download


@dataclass(frozen=True)
class Fetched:
    """Where a set lies, and which files were downloaded for it; none if all was there already."""

    folder: Path
    downloaded: tuple[str, ...]


def fetch(
    name: str,
    data_dir: str | Path | None = None,
    *,
    url_base: str | None = None,
    retry: RetryPolicy | None = None,
    watch: Callable[[File, int], None] = lambda file, held: None,
    note: Callable[[str], None] = lambda line: None,
) -> Fetched:
    """Download what is not there yet. In the end every file has its published checksum.

    Args:
        name: of the set: cifar10, svhn or fashion-mnist.
        data_dir: the data directory; by default as for `modelmix.data.load`.
        url_base: another place with the same files, without their names.
        retry: with the network.
        watch: called with a file and the number of its bytes that are here, now and then.
        note: called with a line for the user.
    """
    public = catalogue.published(name)
    root = directory(data_dir)
    folder = root / public.folder
    base = (url_base or public.url).rstrip("/")

    def bring(file: File, where: Path) -> bool:
        return download(
            f"{base}/{file.name}",
            where / file.name,
            file,
            retry=retry or RetryPolicy(),
            watch=lambda held: watch(file, held),
            note=note,
        )

    if not public.members:
        return Fetched(folder, tuple([file.name for file in public.files if bring(file, folder)]))
    # Every member is checked before the download: a wrong one would stop us after it.
    wanted = [member for member in public.members if is_missing(folder / member.name, member)]
    if not wanted:
        return Fetched(folder, ())
    (packed,) = public.files
    fresh = bring(packed, root)
    _unpack(root / packed.name, folder, wanted)
    if not fresh:
        return Fetched(folder, ())  # the archive was the user's own: it stays
    with suppress(OSError):  # an archive that stays is in nobody's way
        (root / packed.name).unlink()
    return Fetched(folder, (packed.name,))


def _unpack(path: Path, folder: Path, files: list[File]) -> None:
    """Write the given members of an archive, each verified, under names that we chose and the archive did not."""
    by_name = {f"{folder.name}/{file.name}": file for file in files}
    for name, content in archive.members(path, by_name, max(file.size for file in files)):
        file = by_name[name]
        if file.of(content) != file.checksum:
            raise ModelMixError(
                f"{path} holds another {name} than the published one: its checksum is {file.of(content)}, "
                f"published is {file.checksum}. Remove the archive and fetch again."
            )
        write_atomically(folder / file.name, content)

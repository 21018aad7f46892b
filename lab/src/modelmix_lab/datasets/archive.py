"""Single files out of a .tar.gz archive. Nothing is written, so no member can choose where it goes."""

from __future__ import annotations

import tarfile
import zlib
from collections.abc import Collection, Iterator
from pathlib import Path

from modelmix.errors import ModelMixError


def members(path: Path, wanted: Collection[str], largest: int) -> Iterator[tuple[str, bytes]]:
    """Yield names and contents of the members whose full name is wanted, in the order of the archive; skip others.

    A wanted member that is no plain file, comes twice or holds more than ``largest`` bytes is refused, and so is an
    archive that lacks one.
    """
    missing = set(wanted)
    try:
        with tarfile.open(path, "r:gz") as archive:
            for member in archive:
                if member.name not in wanted:
                    continue
                content = archive.extractfile(member) if member.isreg() and member.size <= largest else None
                if content is None or member.name not in missing:
                    raise ModelMixError(
                        f"{path} is not the published archive: its {member.name} comes twice, is no plain file or "
                        f"holds more than {largest:,} bytes. Copy it again from a source you trust."
                    )
                missing.remove(member.name)
                yield member.name, content.read()
    except (tarfile.TarError, EOFError, zlib.error) as error:
        raise ModelMixError(f"{path} is cut off, damaged or no .tar.gz archive: {error}. Copy it again.") from error
    except OSError as error:  # gzip's own errors are among these, without a strerror
        raise ModelMixError(f"{path} cannot be read: {error.strerror or error}. Copy it again.") from error
    if missing:
        raise ModelMixError(
            f"{path} has no {min(missing)}: the archive must hold {', '.join(sorted(wanted))}. Check that it is the "
            "right one."
        )

"""Tables of a recipe: what their annotations say is checked by msgspec, and refused in one line; TOML for them."""

from __future__ import annotations

import difflib
import json
import math
import re
import sys
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal, TypeVar, get_args, get_origin

import msgspec
from msgspec import Meta

from modelmix.errors import ModelMixError

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib


def key(text: str, option: str | None = None, **allowed: Any) -> Meta:
    """Describe a key of a recipe, in the annotation of its field.

    Args:
        text: what it means, as help texts print it.
        option: the option of ``modelmix train`` that sets it, if it has one of its own beside ``--set``.
        allowed: the range of a number, as ``msgspec.Meta`` takes it: gt, ge, lt, le.
    """
    return Meta(description=text, extra={"option": option}, **allowed)


class ConfigTable(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A table of a recipe."""

    def as_dict(self) -> dict[str, Any]:
        """Return everything that is set."""
        return {name: value for name, value in msgspec.structs.asdict(self).items() if value is not None}


T = TypeVar("T", bound=ConfigTable)


def parts(hint: Any) -> list[Any]:
    """Return an annotation with all that it is made of, in order."""
    return [hint, *(found for part in get_args(hint) for found in parts(part))]


def nearest(wanted: str, known: Iterable[str]) -> str:
    """Return a hint for whoever wrote a name that does not exist."""
    found = difflib.get_close_matches(wanted, list(known), 1)
    return f"did you mean {found[0]}?" if found else f"choose one of {', '.join(known)}."


def read_table(table: type[T], title: str, values: Mapping[str, Any]) -> T:
    """Make a table from names and values; 100.0 is taken as 100, 3 as 3.0."""
    for name, value in values.items():
        if isinstance(value, float) and not math.isfinite(value):
            raise ModelMixError(f"{title}.{name} = {value!r} is not a finite number.")
    try:
        return msgspec.convert({name: _plain(value) for name, value in values.items()}, table)
    except msgspec.ValidationError as error:
        if isinstance(error.__cause__, ModelMixError):  # raised by the table itself
            raise error.__cause__ from None
        said, _, path = str(error).partition(" - at `$.")
        said = said[0].lower() + said[1:]
        name = re.split(r"\W", path)[0]
        if not name:
            raise ModelMixError(f"[{title}] is not whole: {said}.") from None
        hint = next(field.type for field in msgspec.structs.fields(table) if field.name == name)
        choices = [str(one) for part in parts(hint) if get_origin(part) is Literal for one in get_args(part)]
        allowed = f"choose one of {', '.join(choices)}" if choices else said
        raise ModelMixError(f"{title}.{name} = {values[name]!r:.60} is not allowed: {allowed}.") from None


def _plain(value: Any) -> Any:
    """A value as msgspec takes it for every field that could be meant."""
    if isinstance(value, Mapping):
        return {str(name): entry for name, entry in value.items()}
    return int(value) if isinstance(value, float) and value.is_integer() else value


def read_toml(path: str | Path) -> dict[str, Any]:
    """Read a TOML file."""
    try:
        found: dict[str, Any] = tomllib.loads(Path(path).read_text(encoding="utf-8"))
        return found
    except OSError as error:
        raise ModelMixError(f"cannot read {path}: {error.strerror}.") from None
    except ValueError as error:  # no text, or no TOML
        raise ModelMixError(f"{path} cannot be read as TOML: {' '.join(str(error).split())}.") from None


def parse_value(text: str) -> Any:
    """Return a value as TOML writes it; anything else is the text itself."""
    with suppress(tomllib.TOMLDecodeError):
        found = tomllib.loads(f"value = {text}")
        return found["value"] if len(found) == 1 else text
    return text


def write_toml(tables: Mapping[str, Mapping[str, Any]]) -> str:
    """Return tables as a file that ``read_toml`` reads."""
    texts = (
        f"[{title}]\n" + "".join(f"{name} = {_toml(value)}\n" for name, value in table.items())
        for title, table in tables.items()
    )
    return "\n".join(texts)


def _toml(value: Any) -> str:
    if isinstance(value, Mapping):
        return "{ " + ", ".join(f"{json.dumps(name)} = {_toml(entry)}" for name, entry in value.items()) + " }"
    return json.dumps(value, ensure_ascii=False)

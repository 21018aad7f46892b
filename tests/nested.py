"""Recipes for tests, from keys without their tables."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from modelmix.config.recipe import Recipe, place_of


def places(flat: Mapping[str, Any]) -> dict[str, Any]:
    """Every key with its table, as ``Recipe.changed`` takes them."""
    out = {}
    for name, value in flat.items():
        place = place_of(name) or name
        if name == "prior":
            place = "model.prior" if flat.get("features") is None else "features.prior"
        out[place] = value
    return out


def nested(flat: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """The tables of a recipe; what is None is left out."""
    out: dict[str, dict[str, Any]] = {}
    for place, value in places({name: value for name, value in flat.items() if value is not None}).items():
        title, _, key = place.partition(".")
        out.setdefault(title, {})[key] = value
    return out


def recipe_of(**flat: Any) -> Recipe:
    """A recipe of keys without their tables."""
    return Recipe.from_mapping(nested(flat))


def values(recipe: Recipe, *names: str) -> tuple[Any, ...]:
    """The values of keys without their tables; None where a table is left out."""
    found = (place.split(".") for place in places(dict.fromkeys(names)))
    return tuple(getattr(getattr(recipe, title), key, None) for title, key in found)

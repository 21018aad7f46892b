"""What the page of a run says about numbers and guarantees. An epsilon is always rounded up."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from modelmix.accounting.embedding import EmbeddingMechanism
from modelmix.accounting.mechanism import Mechanism

SEED_UNKNOWN = (
    "the configuration does not say whether this run was seeded: no privacy guarantee can be published for it"
)
NOT_PROVED = "epsilon: not proved"
UNBOUNDED = "no finite epsilon is proved for this run: the noise is too small to bound the loss"
DIAGNOSTICS = (
    "computed from the training data without noise: not covered by epsilon, for the data holder's eyes only; "
    "`modelmix report RUN --public` writes the page without it"
)

UNTAUGHT = ("scatter", "patches", "prior", "patches+prior")
"""Features of a recipe that no real image taught."""

TEST_LEFT_OUT = (
    "Test metrics are left out: the test set was not declared public (test_public), and epsilon does not cover them."
)
NOTHING_COVERED = "Nothing is covered by a guarantee: not the released states, not the final model, not its averages."


def assumed_by(recipe: Mapping[str, Any]) -> list[str]:
    """Return what only the recipe knows to be assumed."""
    found = recipe.get("features")
    table = found if isinstance(found, Mapping) else {**recipe, "kind": found}  # before version 3: one flat table
    out, kind = [], str(table.get("kind") or "scatter")
    if kind not in UNTAUGHT and not kind.endswith(".npz"):
        out.append(f"no private sample taught the network of the features, {kind}")
    if table.get("normalise") == "public":
        out.append("the images by which features are whitened are public")
    return out


def share(part: object, whole: object) -> str:
    """Format a fraction as a percentage; "-" where there is nothing to divide."""
    top, bottom = number(part), number(whole)
    return "-" if top is None or not bottom else f"{100 * top / bottom:.2f} %"


def count(value: object) -> str:
    """Format a number with thousands separators; "-" where there is none."""
    found = number(value)
    if found is None:
        return "-"
    return f"{int(found):,}" if found == int(found) else f"{found:,.1f}"


def number(value: object) -> float | None:
    """Return a finite number as float, else None."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        return float(value) if math.isfinite(value) else None
    except OverflowError:  # a whole number past the range of floats
        return None


def mechanism_cells(mechanism: Mechanism) -> list[str]:
    """Format the numbers of a mechanism: law, z, omega, p, q, d."""
    embedded = f", embedded {mechanism.clip_ratio:.7g}" if isinstance(mechanism, EmbeddingMechanism) else ""
    return [
        f"{mechanism.law}{embedded}",
        f"{mechanism.noise_multiplier:.7g}",
        f"{mechanism.mixing_width:.7g}" if mechanism.mixed else "-",
        str(mechanism.p) if mechanism.p > 1 else "-",
        f"{mechanism.sample_rate:.7g}",
        "-" if mechanism.dimension is None else f"{mechanism.dimension:,}",
    ]

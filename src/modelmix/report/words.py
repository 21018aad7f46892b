"""What the page of a run says about numbers and guarantees. An epsilon is always rounded up."""

from __future__ import annotations

import math
from collections.abc import Mapping
from decimal import ROUND_CEILING, Decimal
from typing import Any

from modelmix.accounting.embedding import EmbeddingMechanism
from modelmix.accounting.ledger import Ledger
from modelmix.accounting.mechanism import Mechanism
from modelmix.experiments.sources import FIXED

SEEDED = (
    "seeded: for tests only; whoever knows the seed can remove the noise; this run has no privacy guarantee to publish"
)
SEED_UNKNOWN = (
    "the configuration does not say whether this run was seeded: no privacy guarantee can be published for it"
)
NOT_PROVED = "epsilon: not proved"
UNBOUNDED = "no finite epsilon is proved for this run: the noise is too small to bound the loss"
DIAGNOSTICS = (
    "computed from the training data without noise: not covered by epsilon, for the data holder's eyes only; "
    "`modelmix report RUN --public` writes the page without it"
)

NOTHING_COVERED = "Nothing is covered by a guarantee: not the released states, not the final model, not its averages."

COVERED = (
    "every released state, one after each step, and all of them together",
    "the final model",
    "averages of released states (EMA) and momentum computed from released states",
    "anything else computed from these without looking at the training data again",
)

_NOT_COVERED = (
    "metrics on the test set: they are computed from the test data without noise",
    "choices of hyper-parameters made by looking at this data, in this run or in earlier ones",
    "several samples of one person: the guarantee is for one sample, and weakens with every further one",
    "the number of samples n: it is treated as known, and this page names it",
    "finite-precision arithmetic: the proof is about real numbers, the program adds noise in floating point",
    "the checkpoint: it holds the key of the noise still to come and must stay secret",
)


def not_covered(ledger: Ledger, box: bool, recipe: Mapping[str, Any]) -> list[str]:
    """What epsilon says nothing about, and what it rests on beside theorems; ``box``: the page shows diagnostics."""
    where = ", in the marked box below" if box else ""
    out = [_NOT_COVERED[0], f"diagnostics of the training: norms, clips and batch sizes{where}", *_NOT_COVERED[1:]]
    return out + [f"what is assumed: {line}" for line in (*assumptions(ledger), *_assumed_by(recipe))]


def _assumed_by(recipe: Mapping[str, Any]) -> list[str]:
    """What only the recipe knows to be assumed."""
    out, features = [], str(recipe.get("features") or "scatter")
    if features not in FIXED and not features.endswith(".npz"):
        out.append(f"no private sample taught the network of the features, {features}")
    if recipe.get("normalise") == "public":
        out.append("the images by which features are whitened are public")
    return out


def assumptions(ledger: Ledger) -> list[str]:
    """What the number rests on beside theorems, where it does."""
    out = []
    if any(phase.mechanism.mixed for phase in ledger.phases):
        out.append(
            "moments convex in the clipped norm and falling with the width: tested on grids, no written proof known"
        )
    if any(phase.mechanism.mixed and phase.mechanism.law != "gaussian" for phase in ledger.phases):
        out.append("quadrature error of the moments estimated by halving panels, and added tenfold")
    if any(isinstance(phase.mechanism, EmbeddingMechanism) for phase in ledger.phases):
        out.append("the samples in whose directions gradients are embedded are public")
    return out


def up(value: float, decimals: int = 4) -> str:
    """A privacy number, rounded up in its last digit."""
    if math.isnan(value):
        return "-"
    if math.isinf(value):
        return "inf"
    exact = Decimal(value)
    if value >= 1e6:
        return f"{float(exact.quantize(Decimal(1).scaleb(exact.adjusted() - 5), ROUND_CEILING)):.5e}"
    return f"{exact.quantize(Decimal(1).scaleb(-decimals), ROUND_CEILING):f}"


def share(part: object, whole: object) -> str:
    """A fraction as a percentage; "-" where there is nothing to divide."""
    top, bottom = number(part), number(whole)
    return "-" if top is None or not bottom else f"{100 * top / bottom:.2f} %"


def count(value: object) -> str:
    """A number with its thousands set apart; "-" where there is none."""
    found = number(value)
    if found is None:
        return "-"
    return f"{int(found):,}" if found == int(found) else f"{found:,.1f}"


def number(value: object) -> float | None:
    """A finite number, or None."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        return float(value) if math.isfinite(value) else None
    except OverflowError:  # a whole number past the range of floats
        return None


def mechanism_cells(mechanism: Mechanism) -> list[str]:
    """The numbers of a mechanism: law, z, omega, p, q, d."""
    embedded = f", embedded {mechanism.clip_ratio:.7g}" if isinstance(mechanism, EmbeddingMechanism) else ""
    return [
        f"{mechanism.law}{embedded}",
        f"{mechanism.noise_multiplier:.7g}",
        f"{mechanism.mixing_width:.7g}" if mechanism.mixed else "-",
        str(mechanism.p) if mechanism.p > 1 else "-",
        f"{mechanism.sample_rate:.7g}",
        "-" if mechanism.dimension is None else f"{mechanism.dimension:,}",
    ]

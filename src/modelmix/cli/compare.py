"""``modelmix compare``: ModelMix beside its yardsticks."""

from __future__ import annotations

from dataclasses import asdict

from modelmix.cli import show
from modelmix.cli.options import Json, MechanismOptions, takes_mechanism
from modelmix.privacy.comparison import compare as honest_comparison
from modelmix.privacy.mechanism import Mechanism


@takes_mechanism
def compare(options: MechanismOptions, json: Json = False) -> None:
    """ModelMix, plain DP-SGD and the equal-variance Gaussian: epsilon at equal noise, noise at equal epsilon."""
    mechanism, steps = options.one_phase()
    result = honest_comparison(mechanism, steps, options.delta)
    if json:
        print(show.as_json({**asdict(result), "delta": options.delta, "steps": steps, **mechanism.as_dict()}))
        return
    std = result.total_std
    show.table(
        f"epsilon at equal noise, delta = {options.delta:g}",
        ["", "epsilon", "noise std / clip", " by"],
        [
            ["this mechanism", show.up(result.epsilon), f"{std:.4f}", "Renyi"],
            ["the same noise without mixing", show.up(result.plain.epsilon), _noise_std(mechanism),
             result.plain.accountant],
            ["plain Gaussian of equal variance", show.up(result.equal_variance.epsilon), f"{std:.4f}",
             result.equal_variance.accountant],
            ["  the same by Renyi", show.up(result.equal_variance_renyi), f"{std:.4f}", "Renyi"],
        ],
    )  # fmt: skip
    needed = result.plain_std_at_equal_epsilon
    print()
    show.table(
        f"noise at equal epsilon = {show.up(result.epsilon)}",
        ["", "noise std / clip", "against plain"],
        [
            ["this mechanism", f"{std:.4f}", f"x {std / needed:.3f}"],
            ["plain DP-SGD", f"{needed:.4f}", "x 1"],
        ],
        [
            f"phase: {steps:,} steps of {show.describe(mechanism)}",
            "Noise std: of everything added to one coordinate, mixing included. At equal epsilon less is better.",
        ],
    )


def _noise_std(mechanism: Mechanism) -> str:
    return f"{mechanism.noise.variance**0.5:.4f}"

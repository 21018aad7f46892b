"""``modelmix compare``: ModelMix beside its yardsticks."""

from __future__ import annotations

from dataclasses import asdict

from modelmix.cli import show
from modelmix.cli.options import Json, MechanismOptions, takes_mechanism
from modelmix.privacy.comparison import compare as honest_comparison


@takes_mechanism
def compare(options: MechanismOptions, json: Json = False) -> None:
    """ModelMix, plain DP-SGD and the equal-variance Gaussian: epsilon at equal noise, noise at equal epsilon."""
    phase = options.one_phase()
    result = honest_comparison(phase.mechanism, options.delta, steps=phase.steps)
    if json:
        print(show.as_json({**asdict(result), "delta": options.delta, "phase": phase.as_dict()}))
        return
    std, ours = result.total_std, result.mechanism
    noise_std = phase.mechanism.noise.variance**0.5
    show.table(
        f"epsilon at equal noise, delta = {options.delta:g}",
        ["", "epsilon", "noise std / clip", " by"],
        [
            ["this mechanism", show.up(ours.epsilon), f"{std:.4f}", ours.accountant],
            ["the same noise without mixing", show.up(result.plain.epsilon), f"{noise_std:.4f}",
             result.plain.accountant],
            ["plain Gaussian of equal variance", show.up(result.equal_variance.epsilon), f"{std:.4f}",
             result.equal_variance.accountant],
            ["  the same by Renyi moments", show.up(result.equal_variance_renyi), f"{std:.4f}", "RDP"],
        ],
    )  # fmt: skip
    needed = result.plain_std_at_equal_epsilon
    print()
    show.table(
        f"noise at equal epsilon = {show.up(ours.epsilon)}",
        ["", "noise std / clip", "against plain", " by"],
        [
            ["this mechanism", f"{std:.4f}", f"x {std / needed:.3f}", ours.accountant],
            ["plain Gaussian DP-SGD", f"{needed:.4f}", "x 1", "PLD"],
        ],
        [
            show.phase_line(phase),
            "Noise std: of everything added to one coordinate, mixing included. At equal epsilon less is better.",
        ],
    )

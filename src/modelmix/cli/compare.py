"""``modelmix compare``: ModelMix beside its yardsticks, for one mechanism or as a map."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from modelmix.accounting.comparison import compare as honest_comparison
from modelmix.cli import show
from modelmix.cli.options import Json, MechanismOptions, takes_mechanism
from modelmix.errors import ModelMixError
from modelmix.theory import mixing_price


@takes_mechanism
def compare(
    options: MechanismOptions,
    whole_map: Annotated[
        bool, typer.Option("--map", help="The price of mixing over epsilon, q, T and p, as a figure; takes a minute.")
    ] = False,
    share: Annotated[
        float, typer.Option(help="--map: share of the variance that comes from mixing.")
    ] = mixing_price.SHARE,
    out: Annotated[Path, typer.Option(help="--map: figure file; .png and .svg are written.")] = Path("worth.png"),
    json: Json = False,
) -> None:
    """ModelMix, plain DP-SGD and the equal-variance Gaussian: epsilon at equal noise, noise at equal epsilon.

    \b
    modelmix compare --z 0.335 --omega 11.25 --p 100 --q 0.03 --steps 3400
    modelmix compare --map
    """
    if whole_map:
        _map(options, share, out, json)
        return
    ledger, notes = options.one_phase()
    (phase,) = ledger.phases
    result = honest_comparison(ledger, options.delta)
    std, ours = result.total_std, result.mechanism
    if json:
        print(
            show.as_json(
                {**asdict(result), **ours.as_dict(), "proved": True, "counted": notes, "phase": phase.as_dict()}
            )
        )
        return
    noise_std = phase.mechanism.noise.variance**0.5
    show.table(
        f"epsilon at equal noise, delta = {show.up_digits(options.delta)}",
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
            *ours.lines,
            *notes,
            "Noise std: of everything added to one coordinate, mixing included. At equal epsilon less is better.",
        ],
    )


def _map(options: MechanismOptions, share: float, out: Path, json: bool) -> None:
    """Total noise at equal epsilon, mixed over plain, both by Renyi moments."""
    import numpy as np

    from modelmix.report import mixing_price as picture
    from modelmix.report import style

    if options.describes_a_phase or options.ledger:
        raise ModelMixError("--map goes over z, omega, q, steps and p by itself: leave them out.")
    style.prepare(out)
    cells = mixing_price.price_map(share=share, delta=options.delta)
    lines = {p: mixing_price.price_by_share(p, delta=options.delta) for p in mixing_price.TRUNCATIONS}
    shares = np.linspace(0, 0.99, 34).tolist()
    limit = [mixing_price.limit_price(value) for value in shares]
    written = [str(path) for path in picture.draw(cells, lines, (shares, limit), out)]
    if json:
        print(show.as_json({"cells": [asdict(cell) for cell in cells], "limit": limit, "files": written}))
        return
    ordered = sorted(cells, key=lambda cell: cell.price)
    rows = [
        [f"{c.price:.3f}", f"{c.epsilon:g}", f"{c.sample_rate:g}", f"{c.steps:,}", str(c.p)]
        for c in (*ordered[:5], *ordered[-3:])
    ]
    favours = sum(cell.price < 1 for cell in cells)
    show.table(
        f"noise with mixing / noise without at equal epsilon, {share:.0%} of the variance from mixing",
        ["price", "epsilon", "q", "steps", "p"],
        rows,
        [
            f"{len(cells)} settings, the five cheapest and the three dearest; {favours} favour mixing.",
            f"In the limit of small shifts the price is {mixing_price.limit_price(share):.3f} (Fisher information).",
            f"drawn: {', '.join(written)}",
        ],
    )

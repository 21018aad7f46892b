"""``modelmix calibrate``: the one number that is left out."""

from __future__ import annotations

from dataclasses import replace
from decimal import ROUND_CEILING, ROUND_FLOOR
from pathlib import Path
from typing import Annotated, Any

import typer

from modelmix._checks import check_delta, positive
from modelmix.accounting import calibration
from modelmix.accounting.guarantee import guarantee
from modelmix.cli import show
from modelmix.cli.options import ADJACENCY_HELP, Json, MechanismOptions, takes_mechanism
from modelmix.errors import ModelMixError

_LONG_NAMES = {"z": "noise_multiplier", "omega": "mixing_width", "q": "sample_rate", "p": "p"}
_SAFE = {"z": ROUND_CEILING, "omega": ROUND_CEILING, "q": ROUND_FLOOR}
_UNKNOWNS = (*_LONG_NAMES, "steps")


@takes_mechanism
def calibrate(
    options: MechanismOptions,
    epsilon: Annotated[float, typer.Option("--epsilon", help="Target epsilon.")],
    solve_for: Annotated[
        str | None, typer.Option("--for", help="z, omega, q, steps or p; left out, whichever is missing.")
    ] = None,
    by: Annotated[str, typer.Option(help="Accountant: best, renyi, classic or pld.")] = "best",
    adjacency: Annotated[str | None, typer.Option(help=ADJACENCY_HELP)] = None,
    save_ledger: Annotated[Path | None, typer.Option(help="Write the solution to this ledger file.")] = None,
    json: Json = False,
) -> None:
    """Solve for the one number that is left out, so that epsilon is at most the target.

    \b
    modelmix calibrate --epsilon 8 --omega 11.25 --p 100 --q 0.03 --steps 3500          (solves for z)
    modelmix calibrate --epsilon 8 --z 0.335 --p 100 --q 0.03 --steps 3500 --for omega
    """
    if options.ledger:
        raise ModelMixError("calibrate takes one phase from its options: leave --ledger out.")
    positive("epsilon", epsilon, "the target epsilon")
    check_delta(options.delta, [] if options.samples is None else [options.samples])
    ratios, unknown = _unknown(options, solve_for)
    target: dict[str, Any] = {"epsilon": epsilon, "delta": options.delta, "by": by, "adjacency": adjacency}
    if unknown == "steps":
        mechanism = ratios.mechanism()
        steps = calibration.max_steps(mechanism, **target)
    else:
        ratios.require(*(name for name in ("z", "q", "steps") if name != unknown))
        given: dict[str, Any] = {
            "noise_multiplier": ratios.z,
            "mixing_width": 0.0 if ratios.omega is None else ratios.omega,
            "sample_rate": ratios.q,
            "p": 1 if ratios.p is None else ratios.p,
            "steps": ratios.steps,
            "dimension": ratios.d,
            "law": ratios.law or "gaussian",
        }
        given[_LONG_NAMES[unknown]] = None
        mechanism = calibration.calibrate(**given, **target)
        if unknown != "p":
            exact = getattr(mechanism, _LONG_NAMES[unknown])
            change: dict[str, Any] = {_LONG_NAMES[unknown]: show.rounded(exact, _SAFE[unknown])}
            mechanism = replace(mechanism, **change)
        steps = int(ratios.steps)  # type: ignore[arg-type]
    ledger = options.claim().add(mechanism, steps)
    reached = guarantee(ledger, options.delta, by=by, adjacency=adjacency)  # type: ignore[arg-type]
    answer = steps if unknown == "steps" else getattr(mechanism, _LONG_NAMES[unknown])
    if save_ledger is not None:
        ledger.save(save_ledger)
    if json:
        print(
            show.as_json(
                {
                    "solved_for": unknown,
                    unknown: answer,
                    **reached.as_dict(),
                    "target_epsilon": epsilon,
                    "proved": True,
                    "mechanism": mechanism.as_dict(),
                    "steps": steps,
                }
            )
        )
        return
    show.table(
        f"epsilon {show.up(reached.epsilon)} ({reached.accountant}; target {epsilon:g}) at delta = "
        f"{show.up_digits(options.delta)}",
        ["", "value"],
        [[show.bold(unknown), show.bold(f"{answer:.7g}")]],
        [show.phase_line(ledger.phases[0]), "Rounded to the safe side.", *reached.lines],
    )


def _unknown(options: MechanismOptions, solve_for: str | None) -> tuple[MechanismOptions, str]:
    """Which number to solve for. The paper's units cannot describe an unknown q or omega."""
    if options.tau is not None and solve_for == "q":
        raise ModelMixError("q cannot be solved for with --tau, because omega depends on q: give --omega instead.")
    ratios = options.in_ratios()
    if solve_for is not None:
        if solve_for not in _UNKNOWNS:
            raise ModelMixError(f"--for {solve_for} is unknown: choose one of {', '.join(_UNKNOWNS)}.")
        if getattr(ratios, solve_for) is not None:
            raise ModelMixError(f"--for {solve_for} asks for what is given: leave its value out.")
        return ratios, solve_for
    missing = [name for name in ("z", "q", "steps") if getattr(ratios, name) is None]
    if len(missing) > 1:
        raise ModelMixError(f"{' and '.join('--' + m for m in missing)} are missing: leave out only one number.")
    missing = missing or [name for name in ("omega", "p") if getattr(ratios, name) is None]
    if not missing:
        raise ModelMixError("nothing is left to solve for: leave one of --z, --omega, --q, --steps, --p out.")
    return ratios, missing[0]

"""``modelmix verify``: epsilon from a ledger, without the model."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from modelmix._checks import at_least_zero, check_delta
from modelmix.accounting.guarantee import guarantee
from modelmix.accounting.ledger import Ledger
from modelmix.accounting.runs import load_claim, require_own_certificate
from modelmix.cli import show
from modelmix.cli.options import Json


def verify(
    ledger: Annotated[Path, typer.Argument(help="A run folder, or a ledger file.", metavar="RUN")],
    delta: Annotated[float, typer.Option(help="Failure probability.")] = 1e-5,
    claim: Annotated[float | None, typer.Option(help="An epsilon to check: exit code 1 if it is too small.")] = None,
    json: Json = False,
) -> None:
    """Recompute epsilon from a ledger, without the model, and check a claim against it."""
    counted = load_claim(ledger)
    book, planned = counted.taken, counted.ledger
    if book.unproved and json:
        print(show.as_json({"epsilon": None, "delta": delta, "proved": False, "unproved": list(book.unproved)}))
        raise typer.Exit(1)
    check_delta(delta)
    best = counted.guarantee(delta)
    require_own_certificate(ledger, counted, best)
    so_far = guarantee(book, delta).epsilon if planned.steps > book.steps else None
    holds = None if claim is None else at_least_zero("claim", claim, "the claimed epsilon") >= best.epsilon
    if json:
        print(
            show.as_json(
                {
                    **best.as_dict(),
                    "proved": True,
                    "epsilon_if_stopping_was_fixed_beforehand": so_far,
                    "steps_taken": book.steps,
                    "claim": claim,
                    "claim_holds": holds,
                    "phases": [phase.as_dict() for phase in book.phases],
                }
            )
        )
    else:
        rows = [[str(i + 1), f"{p.steps:,}", show.describe(p.mechanism)] for i, p in enumerate(book.phases)]
        verdict = {None: "", True: f" The claim of {claim} holds.", False: f" The claim of {claim} is TOO SMALL."}[
            holds
        ]
        show.table(
            f"epsilon = {show.up(best.epsilon)} ({best.accountant}) at delta = {show.up_digits(delta)}.{verdict}",
            ["phase", "steps", " mechanism"],
            rows,
            [
                *best.lines,
                *([] if so_far is None else [_stopped(planned, book, so_far)]),
            ],
        )
    if holds is False:
        raise typer.Exit(1)


def _stopped(planned: Ledger, book: Ledger, so_far: float) -> str:
    return (
        f"Of {planned.steps:,} planned steps {book.steps:,} were taken: epsilon is that of the plan; "
        f"{show.up(so_far)} applies only if stopping there was decided before training."
    )

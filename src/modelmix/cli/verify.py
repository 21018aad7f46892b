"""``modelmix verify``: epsilon from a ledger, without the model."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from modelmix.accounting.accountant import guarantee
from modelmix.accounting.comparison import best_epsilon
from modelmix.accounting.ledger import Ledger
from modelmix.accounting.validation import at_least_zero
from modelmix.cli import show
from modelmix.cli.options import Json


def verify(
    ledger: Annotated[Path, typer.Argument(help="A run folder, or a ledger file.", metavar="RUN")],
    delta: Annotated[float, typer.Option(help="Failure probability.")] = 1e-5,
    claim: Annotated[float | None, typer.Option(help="An epsilon to check: exit code 1 if it is too small.")] = None,
    json: Json = False,
) -> None:
    """Recompute epsilon from a ledger, without the model, and check a claim against it."""
    book = Ledger.load(ledger / "ledger.json" if ledger.is_dir() else ledger)
    if book.unproved and json:
        print(show.as_json({"epsilon": None, "delta": delta, "proved": False, "unproved": list(book.unproved)}))
        raise typer.Exit(1)
    result = guarantee(book, delta)
    best = best_epsilon(book, delta)
    holds = None if claim is None else at_least_zero("claim", claim, "the claimed epsilon") >= best.epsilon
    if json:
        print(
            show.as_json(
                {
                    "epsilon": result.epsilon,
                    "delta": delta,
                    "order": result.order,
                    "best_proved_epsilon": best.epsilon,
                    "best_proved_accountant": best.accountant,
                    "proved": True,
                    "claim": claim,
                    "claim_holds": holds,
                    "steps": book.steps,
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
            f"epsilon = {show.up(best.epsilon)} ({best.accountant}) at delta = {delta:g}.{verdict}",
            ["phase", "steps", " mechanism"],
            rows,
            [show.GUARANTEE],
        )
    if holds is False:
        raise typer.Exit(1)

"""A trainer for tests: its plan is made of a mechanism or a ledger, long enough for whatever the test runs."""

from __future__ import annotations

from typing import Any

import modelmix as mm

LONG = 10_000


def as_plan(source: Any, **more: Any) -> Any:
    """A plan of a mechanism or a ledger; anything else as it is, for the trainer to judge."""
    if isinstance(source, mm.Mechanism):
        return mm.Plan.of(source, LONG, **more)
    return mm.Plan.of(source, **more) if isinstance(source, mm.Ledger) else source


def Trainer(  # noqa: N802, it stands for the class
    model: Any,
    loss: Any,
    data: Any,
    mechanism: Any,
    *rest: Any,
    delta: float = 1e-5,
    spent: mm.Ledger | None = None,
    **options: Any,
) -> mm.Trainer:
    plan = as_plan(mechanism, delta=delta, spent=mm.Ledger() if spent is None else spent)
    return mm.Trainer(model, loss, data, plan, *rest, **options)

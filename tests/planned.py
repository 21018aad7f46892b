"""Trainers and loops for tests: settings by name in one list, and plans made of mechanisms or ledgers."""

from __future__ import annotations

from typing import Any

import modelmix as mm
from modelmix import kinds
from modelmix.training.rules import Rule


class RawMomentum(Rule):
    """Mixes, and lets momentum sum up what was not mixed: a rule that breaks the proof."""

    NAMES = ("released",)
    mixes = True
    unproved = ("momentum carries unmixed noisy gradients across steps", "one", "two", "three")

    def remembered_gradient(self, centre, new, eta, noisy):
        return noisy


# The laboratory brings the authors' own, which breaks more.
kinds.RULES.setdefault("released", lambda model, embedded, **fields: RawMomentum("released", **fields))

LONG = 10_000
_RULE = ("padding", "momentum", "weight_decay", "ema", "tau", "previous")
_RUN = ("resume", "seed", "nonfinite", "test_public", "callbacks", "performance", "engine", "name", "about")
_LOOP = ("chunk", "seed", "ledger")


def as_plan(source: Any, **more: Any) -> Any:
    """A plan of a mechanism or a ledger; anything else as it is, for the trainer to judge."""
    if isinstance(source, mm.Mechanism):
        return mm.Plan.of(source, LONG, **more)
    return mm.Plan.of(source, **more) if isinstance(source, mm.Ledger) else source


def _taken(options: dict[str, Any], names: tuple[str, ...]) -> dict[str, Any]:
    return {name: options.pop(name) for name in names if name in options}


def _rule(options: dict[str, Any]) -> Any:
    rule = options.pop("rule", None)
    if rule == "released":
        return RawMomentum(rule, **_taken(options, _RULE))
    if rule is None or isinstance(rule, str):
        return mm.Rule(rule, **_taken(options, _RULE))
    return rule


def grouped(**options: Any) -> dict[str, Any]:
    """Settings of a trainer by name, in the groups that it takes."""
    augment, copies = options.pop("augment", None), options.pop("multiplicity", 1)
    if not isinstance(augment, mm.Augment):
        augment = mm.Augment(augment, copies)
    return {"rule": _rule(options), "augment": augment, "options": mm.RunOptions(**_taken(options, _RUN)), **options}


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
    return mm.Trainer(model, loss, data, plan, *rest, **grouped(**options))


def make_private(*objects: Any, **options: Any) -> Any:
    return mm.make_private(*objects, rule=_rule(options), options=mm.LoopOptions(**_taken(options, _LOOP)), **options)

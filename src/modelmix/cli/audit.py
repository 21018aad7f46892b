"""``modelmix audit``: what an attacker can prove about a run."""

from __future__ import annotations

import sys
from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated, Any

import typer

from modelmix import kinds
from modelmix._checks import probability, whole
from modelmix.accounting.embedding import EmbeddingMechanism
from modelmix.accounting.guarantee import Guarantee, guarantee
from modelmix.accounting.ledger import Ledger
from modelmix.accounting.runs import Claim, load_claim
from modelmix.cli import show
from modelmix.cli.options import Json
from modelmix.errors import ModelMixError

_QUICK = 4e7  # coordinates drawn in all: about twenty seconds on one core
_FULL = 1e9


def audit(
    run: Annotated[Path, typer.Argument(help="A run folder, a ledger file or a recipe.", metavar="RUN_OR_RECIPE")],
    delta: Annotated[float, typer.Option(help="Failure probability.")] = 1e-5,
    confidence: Annotated[float, typer.Option(help="Of every lower bound.")] = 0.95,
    trials: Annotated[int | None, typer.Option(help="Runs in each world; default by the size of the run.")] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Under a minute on two cores.")] = False,
    seed: Annotated[int, typer.Option(help="Of the attack.")] = 0,
    out: Annotated[Path | None, typer.Option(help="Plot of the two worlds; default RUN/audit.png.")] = None,
    json: Json = False,
) -> None:
    """Attack a run: lower bounds on its epsilon, beside what it claims.

    The whole run is simulated many times with and without a canary whose gradient is the worst case, and told apart by
    the exact likelihood ratio; then one step of the trainer itself is attacked with thousands of canaries.

    \b
    modelmix audit runs/mine --quick
    """
    ledger, found_claim, proved, counted = _claim(run, delta)
    claimed = found_claim.epsilon
    probability("confidence", confidence, "the confidence")
    from modelmix.auditing.mechanism import audit_ledger, canaries

    cost = 2 * sum(phase.steps * canaries(phase.mechanism)[0].count for phase in ledger.phases)
    wanted = (_QUICK if quick else _FULL) / cost
    number = int(min(2e6, max(200, wanted))) if trials is None else whole("trials", trials, "the trials", least=4)
    found = audit_ledger(
        Ledger(ledger.phases), delta, trials=number, confidence=confidence, seed=seed, done=_progress(cost * number / 2)
    )
    step = replace(ledger.phases[0].mechanism, sample_rate=1.0)
    step_claim = guarantee(Ledger().add(step, 1), delta).epsilon
    by_trainer = _trainer_bound(step, delta, confidence, seed, quick) if proved else None
    plots = _plot(found, run, out, claimed)
    rows: list[dict[str, Any]] = [
        {"what": f"the mechanism, {ledger.steps:,} steps", "claimed": claimed, **asdict(found.bound)},
    ]
    if by_trainer is not None:
        rows.append({"what": "the trainer, one step at q = 1", "claimed": step_claim, **asdict(by_trainer)})
    if not proved and not any(isinstance(phase.mechanism, EmbeddingMechanism) for phase in ledger.phases):
        rows += [{"claimed": claimed, **row} for attack in kinds.ATTACKS for row in attack(ledger, delta, seed, quick)]
    broken = [row for row in rows if row["epsilon"] > row["claimed"]]
    if json:
        said = {"delta": delta, "proved": proved, "claim": found_claim.as_dict(), "counted": counted}
        print(show.as_json({**said, "audits": rows, "plots": [str(p) for p in plots]}))
    else:
        table = [[row["what"], show.up(row["claimed"]), f"{row['epsilon']:.4f}", f"{row['trials']:,}"] for row in rows]
        notes = [
            f"Lower bounds hold with {confidence:.0%} confidence each; fewer trials give smaller ones.",
            "A lower bound above the claim refutes it; one below it proves nothing.",
            *([] if proved else ["The claim is not proved: the run broke rules of the proof. See docs/audit.md."]),
            *(
                []
                if proved or kinds.ATTACKS
                else ["modelmix-lab audit attacks the authors' released configuration, too."]
            ),
            *found_claim.lines,
            *counted,
            *(f"Plot: {path}" for path in plots),
        ]
        verdict = " THE CLAIM IS REFUTED." if broken else ""
        show.table(
            f"audit at delta = {show.up_digits(delta)}.{verdict}", ["", "claimed", "at least", "trials"], table, notes
        )
    if broken:
        raise typer.Exit(1)


def _claim(run: Path, delta: float) -> tuple[Ledger, Guarantee, bool, tuple[str, ...]]:
    """The phases a run took, what its plan claims, whether that is proved, and what to say of it."""
    if run.suffix == ".toml":
        from modelmix.config.recipe import Recipe

        recipe = Recipe.load(run)
        whole = replace(recipe.whole(len(recipe.load_data().train)), seeded=recipe.run.seed is not None)
        found, proved = Claim(whole, whole), recipe.privacy.traits.rule != "released"
    else:
        found = load_claim(run)
        proved = not found.ledger.unproved
    if not found.taken.phases:
        raise ModelMixError(f"{run} has no step yet: there is nothing to attack.")
    # What a run that broke rules would claim is what is attacked.
    as_if = replace(found, ledger=replace(found.ledger, unproved=()), taken=replace(found.taken, unproved=()))
    return found.taken, as_if.guarantee(delta), proved, found.notes


def _trainer_bound(mechanism: Any, delta: float, confidence: float, seed: int, quick: bool) -> Any:
    """Canaries in real steps of the trainer; every step at q = 1 is a trial of its own."""
    try:
        from modelmix.auditing.training import attack
    except ModuleNotFoundError as error:
        raise ModelMixError(f"attacking the trainer needs {error.name}: pip install 'modelmix[train]'.") from None
    from modelmix.auditing.mechanism import worst_width

    width, steps = worst_width(mechanism), 50 if quick else 500
    count = max(20, min(400, 4000 // width))
    if isinstance(mechanism, EmbeddingMechanism):  # every canary makes the basis larger, which each step finds anew
        few = max(8, min(100, 500 // width))
        count, steps = few, steps * count // few
    return (
        attack(mechanism, canaries=count, steps=steps, seed=seed).each_step().two_worlds(delta, confidence=confidence)
    )


def _plot(found: Any, run: Path, out: Path | None, claimed: float) -> list[Path]:
    from modelmix.report import style
    from modelmix.report.audit import draw

    if not style.available() and out is None:
        return []
    path = out or (run / "audit.png" if run.is_dir() else Path("audit.png"))
    title = f"claimed epsilon {show.up(claimed, 2)}, at least {found.bound.epsilon:.2f}"
    return draw(found.without, found.with_canary, title, path)


def _progress(total: float) -> Any:
    """A bar on a terminal, nothing otherwise."""
    if not sys.stderr.isatty():
        return None
    from rich.console import Console
    from rich.progress import Progress

    bar = Progress(console=Console(stderr=True), transient=True)
    bar.start()
    task = bar.add_task("attacking", total=total)

    def done(count: int) -> None:
        bar.update(task, advance=count)
        if bar.finished:
            bar.stop()

    return done

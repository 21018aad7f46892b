"""``modelmix train``: a private training run from a recipe."""

from __future__ import annotations

import os
import re
import sys
import time
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING, Annotated, Any

import typer
from click import Context, NoSuchOption, UsageError

from modelmix.accounting.guarantee import SEEDED
from modelmix.accounting.guarantee import epsilon as proved_epsilon
from modelmix.accounting.pld import equal_variance, unmixed
from modelmix.cli import show
from modelmix.cli.once import OnceCommand
from modelmix.cli.options import DataDir, Json, takes_recipe
from modelmix.cli.start import needs_torch, plain_warnings, program
from modelmix.config.recipe import DEFAULT, Recipe, place_of
from modelmix.errors import ModelMixError

if TYPE_CHECKING:
    from modelmix.training import Trainer

_BASIC, _ADVANCED = "basic", "advanced"


def _option(name: str, text: str, panel: str) -> Any:
    return typer.Option(name, help=text, rich_help_panel=panel, show_default=False)


class TrainCommand(OnceCommand):
    """A command that says where an option of older versions is now."""

    def parse_args(self, ctx: Context, args: list[str]) -> list[str]:
        """Parse the arguments."""
        try:
            return super().parse_args(ctx, args)
        except NoSuchOption as error:
            place = place_of(error.option_name.lstrip("-").removeprefix("no-").replace("-", "_"))
            if place is None:
                raise
            now = place.replace(" or ", "=VALUE or --set ")
            raise UsageError(f"{error.option_name} is a key of recipes now: give --set {now}=VALUE", ctx=ctx) from None


@takes_recipe
def train(
    recipe: Annotated[
        Path | None, typer.Argument(help="A .toml file; left out, the default recipe.", metavar="[RECIPE]")
    ] = None,
    *,
    changes: dict[str, Any],
    out: Annotated[Path | None, _option("--out", "Folder of the run [default: runs/NAME-TIME].", _BASIC)] = None,
    resume: Annotated[bool, _option("--resume", "Resume the run in --out from its checkpoint.", _BASIC)] = False,
    data_dir: DataDir = None,
    show_recipe: Annotated[
        bool, _option("--show-recipe", "Print the recipe and stop; a start for your own.", _ADVANCED)
    ] = False,
    json: Json = False,
) -> None:
    """Train privately and end with a model, an epsilon and a report.

    Without arguments: a small network on embedded images of Fashion-MNIST, at epsilon 3, in a few minutes on two cores.
    Every key of a recipe can be given by --set; docs/training.md lists them.

    \b
    modelmix train
    modelmix train recipe.toml --epsilon 2 --out runs/mine
    modelmix train --out runs/mine --resume      (the recipe is that of the run)
    modelmix train --mechanism plain --set optimizer.momentum=0.9
    modelmix train --data photos --model linear --set data.image_size=224 \\
        --set features.kind=efficientnet-lite0
    """
    if os.environ.get("WORLD_SIZE", "1") not in ("", "1"):
        raise ModelMixError(
            "WORLD_SIZE is above 1: modelmix trains in one process, and several would draw the same noise. Unset it."
        )
    if resume and out is None:
        raise ModelMixError("--resume needs --out, the folder of the run to go on with.")
    begun = Recipe.of_run(out) if resume and out is not None and recipe is None else None
    if resume and recipe is None and begun is None and not changes:
        raise ModelMixError(f"{out} holds no run: check the folder, or leave out --resume to begin one.")
    if "data.source" in changes and recipe is None and begun is None:
        changes.setdefault("run.name", Path(changes["data.source"]).stem)  # the default recipe names its own data
    chosen = (begun or Recipe.load(recipe or DEFAULT)).changed(changes)
    if show_recipe:
        plain = recipe is None and begun is None and not changes
        print(DEFAULT.read_text(encoding="utf-8") if plain else chosen.as_toml(), end="")
        return
    name = re.sub(r"[^\w.-]+", "-", chosen.run.name)
    folder = out or Path("runs") / f"{name}-{time.strftime('%Y%m%d-%H%M%S')}"
    trainer = _trainer(chosen, data_dir, folder, resume)
    if not json:
        _announce(chosen, trainer, folder)
    try:
        trainer.run(evaluate_every=chosen.evaluate_every)
    except KeyboardInterrupt:
        again = f"{program()} train --out {quote(str(folder))} --resume"
        if data_dir is not None:
            again += f" --data-dir {quote(str(data_dir))}"
        print(f"stopped at step {trainer.step}; go on with: {again}", file=sys.stderr)
        raise typer.Exit(130) from None
    _tell(chosen, trainer, folder, json)


def _trainer(recipe: Recipe, data_dir: Path | None, folder: Path, resume: bool) -> Trainer:
    with needs_torch():
        from modelmix.runs.folder import RunFolder
    if resume and not RunFolder(folder).holds_a_run:
        print(f"{folder} holds no run: a new one begins.", file=sys.stderr)
    if not resume:
        RunFolder(folder).require_vacant()  # before features take their time
    with plain_warnings():
        return recipe.trainer(recipe.load_data(data_dir), folder=folder, resume=resume, data_dir=data_dir)


def _announce(recipe: Recipe, trainer: Trainer, folder: Path) -> None:
    first = trainer.plan.mechanism_at(1)
    privacy = "epsilon: not proved" if trainer.ledger.unproved else f"planned {trainer.guarantee.statement}"
    width = f", omega = {first.mixing_width:.4g}" if first.mixed else ""
    print(
        f"{recipe.privacy.kind} on {recipe.data.source}, {recipe.model.kind}, {recipe.privacy.steps} steps; "
        f"z = {first.noise_multiplier:.4g}{width}, p = {first.p}, q = {first.sample_rate:.4g}; {privacy} "
        f"Run folder: {folder}" + (f" (resumed at step {trainer.step})" if trainer.step else ""),
        file=sys.stderr,
    )


def _tell(recipe: Recipe, trainer: Trainer, folder: Path, as_json: bool) -> None:
    last = trainer.metrics[-1] if trainer.metrics else {}
    ledger = trainer.ledger
    best = None if ledger.unproved else trainer.guarantee
    if as_json:
        out = {
            "run": str(folder),
            "test_accuracy": last.get("test_accuracy"),
            "ema_accuracy": last.get("ema_accuracy"),
            "epsilon": None if best is None else best.epsilon,
            "accountant": None if best is None else best.accountant,
            "adjacency": trainer.plan.adjacency,
            "scope": None if best is None else best.scope,
            "delta": recipe.privacy.delta,
            "proved": best is not None,
            "unproved": list(ledger.unproved),
            "seeded": ledger.seeded,
            "counted": [note for found in recipe.privacy.spent_claims() for note in found.notes],
            "steps": trainer.step,
            "report": str(folder / "report.html") if (folder / "report.html").exists() else None,
        }
        print(show.as_json(out))
        return
    rows: list[list[Any]] = [
        ["test accuracy", _percent(last.get("test_accuracy"))],
        ["  of the averaged model", _percent(last.get("ema_accuracy"))],
        [show.bold("epsilon"), show.bold("not proved" if best is None else show.up(best.epsilon))],
    ]
    if best is not None and any(phase.mechanism.mixed for phase in ledger.phases):
        planned = trainer.plan.ledger
        rows += [
            ["  same noise, no mixing", show.up(proved_epsilon(unmixed(planned), recipe.privacy.delta))],
            ["  Gaussian of equal variance", show.up(proved_epsilon(equal_variance(planned), recipe.privacy.delta))],
        ]
    rows += [["steps", f"{trainer.step:,}"], ["seconds, rounded to tens", f"{last.get('seconds', 0):.0f}"]]
    notes = [f"not proved: {reason}" for reason in ledger.unproved]
    if best is not None:
        notes += best.lines
    elif recipe.run.seed is not None:
        notes.append(f"{SEEDED[0].upper()}{SEEDED[1:]}.")
    notes += [note for found in recipe.privacy.spent_claims() for note in found.notes]
    if (folder / "report.html").exists():
        notes.append(f"Report: {folder / 'report.html'}")
    notes.append(f"Check it: modelmix verify {quote(str(folder))} --delta {recipe.privacy.delta!r}")
    show.table(f"{recipe.run.name}, delta = {show.up_digits(recipe.privacy.delta)}", ["", ""], rows, notes)


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{100 * value:.1f} %"

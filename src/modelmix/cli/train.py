"""``modelmix train``: a private training run from a recipe."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from modelmix.cli import show
from modelmix.cli.options import Json
from modelmix.errors import ModelMixError
from modelmix.experiments.recipe import DEFAULT, MECHANISMS, Recipe

if TYPE_CHECKING:
    from modelmix.training import Trainer

_PRIVACY, _LEARNING, _RUN = "Privacy (over the recipe)", "Learning (over the recipe)", "The run"


def _option(names: str, text: str, panel: str) -> Any:
    return typer.Option(*names.split(","), help=text, rich_help_panel=panel, show_default=False)


def train(
    recipe: Annotated[
        Path | None, typer.Argument(help="A .toml or .yaml file; left out, the embedded default.", metavar="[RECIPE]")
    ] = None,
    mechanism: Annotated[str | None, _option("--mechanism", f"One of {', '.join(MECHANISMS)}.", _PRIVACY)] = None,
    epsilon: Annotated[float | None, _option("--epsilon", "Target epsilon; the noise is calibrated.", _PRIVACY)] = None,
    z: Annotated[float | None, _option("--z", "Noise multiplier, instead of --epsilon.", _PRIVACY)] = None,
    delta: Annotated[float | None, _option("--delta", "Failure probability.", _PRIVACY)] = None,
    batch: Annotated[float | None, _option("--batch", "Expected batch q*n.", _PRIVACY)] = None,
    omega: Annotated[float | None, _option("--omega", "Mixing width (tau/eta)*B/c.", _PRIVACY)] = None,
    p: Annotated[int | None, _option("--p", "Truncation: coordinates at most c/sqrt(p).", _PRIVACY)] = None,
    clip: Annotated[float | None, _option("--clip", "Clip c of a sample's gradient.", _PRIVACY)] = None,
    steps: Annotated[int | None, _option("--steps", "Number of steps T.", _PRIVACY)] = None,
    lr: Annotated[float | None, _option("--lr", "Learning rate eta, constant.", _LEARNING)] = None,
    momentum: Annotated[float | None, _option("--momentum", "From released states.", _LEARNING)] = None,
    model: Annotated[str | None, _option("--model", "cnn, linear, mlp or package.module:function.", _LEARNING)] = None,
    data: Annotated[
        str | None, _option("--data", "fashion-mini, a folder of idx files, or an .npz file.", _LEARNING)
    ] = None,
    out: Annotated[Path | None, _option("--out", "Folder of the run; default runs/NAME-TIME.", _RUN)] = None,
    resume: Annotated[bool, _option("--resume", "Go on with the run in --out where it stopped.", _RUN)] = False,
    seed: Annotated[int | None, _option("--seed", "Repeatable; for tests only.", _RUN)] = None,
    device: Annotated[str | None, _option("--device", "cpu, cuda; default: what is there.", _RUN)] = None,
    engine: Annotated[str, _option("--engine", "auto, hooks, universal or loop.", _RUN)] = "auto",
    chunk: Annotated[int | None, _option("--chunk", "Samples whose gradients are held at once.", _RUN)] = None,
    show_recipe: Annotated[
        bool, _option("--show-recipe", "Print the recipe and stop; a start for your own.", _RUN)
    ] = False,
    json: Json = False,
) -> None:
    """Train privately and end with a model, an epsilon and a report.

    Without arguments: a small network on embedded images of Fashion-MNIST, at epsilon 3, in a few minutes on two cores.

    \b
    modelmix train
    modelmix train recipe.toml --epsilon 2 --out runs/mine
    modelmix train --out runs/mine --resume
    modelmix train --mechanism plain
    """
    source = recipe or DEFAULT
    if show_recipe:
        print(source.read_text(encoding="utf-8") if recipe is None else _text(source), end="")
        return
    asked = {
        "mechanism": mechanism,
        "epsilon": epsilon,
        "noise_multiplier": z,
        "delta": delta,
        "batch": batch,
        "mixing_width": omega,
        "p": p,
        "clip": clip,
        "steps": steps,
        "lr": lr,
        "momentum": momentum,
        "model": model,
        "data": data,
        "seed": seed,
    }
    if epsilon is not None and z is not None:
        raise ModelMixError("--epsilon and --z say the same thing: give one of them.")
    chosen = Recipe.load(source).changed(**{name: value for name, value in asked.items() if value is not None})
    if resume and out is None:
        raise ModelMixError("--resume needs --out, the folder of the run to go on with.")
    folder = out or Path("runs") / f"{chosen.name}-{time.strftime('%Y%m%d-%H%M%S')}"
    trainer = _trainer(chosen, folder, resume, device, engine, chunk)
    left = chosen.steps - trainer.step
    if not json:
        _announce(chosen, trainer, folder)
    if left > 0:
        trainer.run(left, evaluate_every=chosen.evaluate_every or max(1, chosen.steps // 20))
    _tell(chosen, trainer, folder, json)


def _trainer(recipe: Recipe, folder: Path, resume: bool, device: str | None, engine: str, chunk: int | None) -> Trainer:
    try:
        from modelmix.data import load
        from modelmix.training import Performance
    except ModuleNotFoundError as error:
        raise ModelMixError(f"training needs {error.name}: install it with pip install 'modelmix[train]'.") from None
    performance = Performance(device=device, engine=engine, chunk=chunk)
    return recipe.trainer(load(recipe.data), folder=folder, resume=resume, performance=performance)


def _text(path: Path) -> str:
    Recipe.load(path)
    return path.read_text(encoding="utf-8")


def _announce(recipe: Recipe, trainer: Trainer, folder: Path) -> None:
    first = trainer.mechanism_at(1)
    privacy = (
        "epsilon: not proved"
        if trainer.ledger.unproved
        else f"epsilon {recipe.epsilon:g} at delta {recipe.delta:g}"
        if recipe.epsilon is not None
        else f"delta {recipe.delta:g}"
    )
    width = f", omega = {first.mixing_width:.4g}" if first.mixed else ""
    print(
        f"{recipe.mechanism} on {recipe.data}, {recipe.model}, {recipe.steps} steps; {privacy}; "
        f"z = {first.noise_multiplier:.4g}{width}, p = {first.p}, q = {first.sample_rate:.4g}. "
        f"Run folder: {folder}" + (f" (resumed at step {trainer.step})" if trainer.step else ""),
        file=sys.stderr,
    )


def _tell(recipe: Recipe, trainer: Trainer, folder: Path, as_json: bool) -> None:
    from modelmix.privacy.comparison import best_epsilon, equal_variance, unmixed

    last = trainer.metrics[-1] if trainer.metrics else {}
    proved = not trainer.ledger.unproved
    epsilon = trainer.epsilon() if proved else None
    if as_json:
        out = {
            "run": str(folder),
            "test_accuracy": last.get("test_accuracy"),
            "ema_accuracy": last.get("ema_accuracy"),
            "epsilon": epsilon,
            "delta": recipe.delta,
            "proved": proved,
            "unproved": list(trainer.ledger.unproved),
            "seeded": recipe.seed is not None,
            "steps": trainer.step,
            "seconds": last.get("seconds"),
            "report": str(folder / "report.html"),
        }
        print(show.as_json(out))
        return
    rows = [
        ["test accuracy", _percent(last.get("test_accuracy"))],
        ["  of the averaged model", _percent(last.get("ema_accuracy"))],
        ["[bold]epsilon[/]", f"[bold]{show.up(epsilon)}[/]" if epsilon is not None else "[bold]not proved[/]"],
    ]
    if proved:
        plain = best_epsilon(unmixed(trainer.ledger), recipe.delta)
        twin = best_epsilon(equal_variance(trainer.ledger), recipe.delta)
        rows += [
            ["  same noise, no mixing", show.up(plain.epsilon)],
            ["  Gaussian of equal variance", show.up(twin.epsilon)],
        ]
    rows += [["steps", f"{trainer.step:,}"], ["seconds", f"{last.get('seconds', 0):.0f}"]]
    notes = [*(f"not proved: {reason}" for reason in trainer.ledger.unproved)]
    if recipe.seed is not None:
        notes.append("Seeded: for tests only. Whoever knows the seed can take the noise away.")
    notes += [f"Report: {folder / 'report.html'}", f"Check it: modelmix verify {folder} --delta {recipe.delta:g}"]
    show.table(f"{recipe.name}, delta = {recipe.delta:g}", ["", ""], rows, notes)


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{100 * value:.1f} %"

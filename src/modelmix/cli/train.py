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

from modelmix import kinds
from modelmix.accounting.guarantee import SEEDED
from modelmix.accounting.guarantee import epsilon as proved_epsilon
from modelmix.accounting.pld import equal_variance, unmixed
from modelmix.cli import show
from modelmix.cli.options import RUN, Chunk, Compiled, DataDir, Device, Engine, Json, Knobs, Precision
from modelmix.cli.start import needs_torch, plain_warnings, program
from modelmix.config.recipe import DEFAULT, MECHANISMS, Recipe
from modelmix.config.sources import check_mirror, names, normalisations
from modelmix.errors import ModelMixError

if TYPE_CHECKING:
    from modelmix.training import Trainer

_PRIVACY, _LEARNING = "Privacy (over the recipe)", "Learning (over the recipe)"


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
    batch: Annotated[
        float | None, _option("--batch", "Expected batch, q times samples or population.", _PRIVACY)
    ] = None,
    population: Annotated[
        int | None,
        _option("--population", "A public constant in place of the number of samples, which stays private.", _PRIVACY),
    ] = None,
    omega: Annotated[float | None, _option("--omega", "Mixing width (tau/eta)*B/c.", _PRIVACY)] = None,
    p: Annotated[int | None, _option("--p", "Truncation: coordinates at most c/sqrt(p).", _PRIVACY)] = None,
    clip: Annotated[float | None, _option("--clip", "Clip c of a sample's gradient.", _PRIVACY)] = None,
    steps: Annotated[int | None, _option("--steps", "Number of steps T.", _PRIVACY)] = None,
    spent: Annotated[
        list[Path] | None,
        _option(
            "--spent", "Ledger of earlier releases on the same samples; included in epsilon. May be repeated.", _PRIVACY
        ),
    ] = None,
    lr: Annotated[float | None, _option("--lr", "Learning rate eta, constant.", _LEARNING)] = None,
    momentum: Annotated[
        float | None, _option("--momentum", "Momentum factor, computed from released states.", _LEARNING)
    ] = None,
    model: Annotated[
        str | None,
        _option(
            "--model",
            f"{', '.join(('cnn', 'linear', 'mlp', 'resnet20', 'wrn-16-4', *kinds.MODELS))}, package.module:function.",
            _LEARNING,
        ),
    ] = None,
    data: Annotated[
        str | None, _option("--data", f"{', '.join(('fashion-mini', *kinds.DATA))}, a folder, an .npz file.", _LEARNING)
    ] = None,
    image_size: Annotated[
        int | None,
        _option("--image-size", "Side in pixels of the images of a --data folder train/<class>/.", _LEARNING),
    ] = None,
    classes: Annotated[
        int | None, _option("--classes", "How many classes the data has, where it does not say.", _LEARNING)
    ] = None,
    test_public: Annotated[
        bool | None, _option("--test-public", "The test set is public: its metrics may be published.", _LEARNING)
    ] = None,
    data_dir: DataDir = None,
    features: Annotated[
        str | None,
        _option(
            "--features",
            f"Train on features: {', '.join(names())}, a file {' or '.join(('.onnx', *kinds.FEATURE_FILES))}, "
            "package.module:function.",
            _LEARNING,
        ),
    ] = None,
    weights: Annotated[
        str | None,
        _option("--weights", "State dict for the network that --features package.module:function builds.", _LEARNING),
    ] = None,
    feature_size: Annotated[
        int | None, _option("--feature-size", "Side in pixels for the network of --features.", _LEARNING)
    ] = None,
    pixels: Annotated[
        str | None,
        _option(
            "--pixels", "What an .onnx file or a network with --weights takes: imagenet, signed, unit, raw.", _LEARNING
        ),
    ] = None,
    unit_length: Annotated[
        bool | None, _option("--unit-length", "Scale every image's features to the length 1.", _LEARNING)
    ] = None,
    normalise: Annotated[
        str | None,
        _option("--normalise", f"Of features: {', '.join(normalisations())}; docs/features.md.", _LEARNING),
    ] = None,
    components: Annotated[
        int | None,
        _option("--components", "Directions that are kept of whitened features.", _LEARNING),
    ] = None,
    public: Annotated[
        str | None,
        _option("--public", "For --normalise public: .npz file with images x that nobody has to protect.", _LEARNING),
    ] = None,
    mirror: Annotated[
        bool | None,
        _option("--mirror/--no-mirror", "Add to features what is seen in the mirror image, or do not.", _LEARNING),
    ] = None,
    prior: Annotated[
        str | None,
        _option(
            "--prior",
            "Weights to start from, or for --features prior: synthetic, characters, a file.",
            _LEARNING,
        ),
    ] = None,
    out: Annotated[Path | None, _option("--out", "Folder of the run; default runs/NAME-TIME.", RUN)] = None,
    resume: Annotated[bool, _option("--resume", "Go on with the run in --out where it stopped.", RUN)] = False,
    seed: Annotated[int | None, _option("--seed", "Repeatable; for tests only.", RUN)] = None,
    device: Device = None,
    engine: Engine = "auto",
    chunk: Chunk = None,
    precision: Precision = None,
    compiled: Compiled = None,
    show_recipe: Annotated[
        bool, _option("--show-recipe", "Print the recipe and stop; a start for your own.", RUN)
    ] = False,
    json: Json = False,
) -> None:
    """Train privately and end with a model, an epsilon and a report.

    Without arguments: a small network on embedded images of Fashion-MNIST, at epsilon 3, in a few minutes on two cores.

    \b
    modelmix train
    modelmix train recipe.toml --epsilon 2 --out runs/mine
    modelmix train --out runs/mine --resume      (the recipe is that of the run)
    modelmix train --mechanism plain
    modelmix train --data photos --image-size 224 --features efficientnet-lite0 --unit-length --model linear
    modelmix-lab train --data cifar10 --features efficientnet-lite2 --unit-length --model linear
    modelmix-lab train --data cifar10 --features patches+prior --prior synthetic --normalise scenes --components 4000
        --model linear --mechanism plain --batch 50000 --steps 100 --clip 2.5 --lr 1.12 --epsilon 1
    """
    given = {
        "mechanism": mechanism,
        "epsilon": epsilon,
        "noise_multiplier": z,
        "delta": delta,
        "batch": batch,
        "mixing_width": omega,
        "p": p,
        "clip": clip,
        "steps": steps,
        "spent": [str(path) for path in spent] if spent else None,
        "population": population,
        "classes": classes,
        "test_public": test_public,
        "lr": lr,
        "momentum": momentum,
        "model": model,
        "data": data,
        "image_size": image_size,
        "features": features,
        "weights": weights,
        "feature_size": feature_size,
        "pixels": pixels,
        "unit_length": unit_length,
        "normalise": normalise,
        "components": components,
        "public": public,
        "mirror": mirror,
        "prior": prior,
        "seed": seed,
    }
    if os.environ.get("WORLD_SIZE", "1") not in ("", "1"):
        raise ModelMixError(
            "WORLD_SIZE is above 1: modelmix trains in one process, and several would draw the same noise. Unset it."
        )
    if epsilon is not None and z is not None:
        raise ModelMixError("--epsilon and --z say the same thing: give one of them.")
    if resume and out is None:
        raise ModelMixError("--resume needs --out, the folder of the run to go on with.")
    asked = {name: value for name, value in given.items() if value is not None}
    begun = Recipe.of_run(out) if resume and out is not None and recipe is None else None
    if resume and recipe is None and begun is None and not asked:
        raise ModelMixError(f"{out} holds no run: check the folder, or leave out --resume to begin one.")
    if data is not None and recipe is None and begun is None:
        asked["name"] = Path(data).stem  # the default recipe is called after its own data
    chosen = (begun or Recipe.load(recipe or DEFAULT)).changed(**asked)
    if mirror:
        check_mirror(chosen)
    if show_recipe:
        plain = recipe is None and begun is None and not asked
        print(DEFAULT.read_text(encoding="utf-8") if plain else chosen.as_toml(), end="")
        return
    name = re.sub(r"[^\w.-]+", "-", chosen.name)
    folder = out or Path("runs") / f"{name}-{time.strftime('%Y%m%d-%H%M%S')}"
    trainer = _trainer(chosen, data_dir, folder, resume, Knobs(device, engine, precision, compiled, chunk))
    if not json:
        _announce(chosen, trainer, folder)
    try:
        every = chosen.evaluate_every or max(1, chosen.steps // 20)
        trainer.run(evaluate_every=every)
    except KeyboardInterrupt:
        again = f"{program()} train --out {quote(str(folder))} --resume"
        if data_dir is not None:
            again += f" --data-dir {quote(str(data_dir))}"
        print(f"stopped at step {trainer.step}; go on with: {again}", file=sys.stderr)
        raise typer.Exit(130) from None
    _tell(chosen, trainer, folder, json)


def _trainer(recipe: Recipe, data_dir: Path | None, folder: Path, resume: bool, knobs: Knobs) -> Trainer:
    with needs_torch():
        from modelmix.runs.folder import RunFolder
        from modelmix.training import Performance
    performance = Performance(**knobs._asdict())
    if resume and not RunFolder(folder).holds_a_run:
        print(f"{folder} holds no run: a new one begins.", file=sys.stderr)
    if not resume:
        RunFolder(folder).require_vacant()  # before features take their time
    with plain_warnings():
        return recipe.trainer(
            recipe.load_data(data_dir), folder=folder, resume=resume, performance=performance, data_dir=data_dir
        )


def _announce(recipe: Recipe, trainer: Trainer, folder: Path) -> None:
    first = trainer.plan.mechanism_at(1)
    privacy = "epsilon: not proved" if trainer.ledger.unproved else f"planned {trainer.guarantee.statement}"
    width = f", omega = {first.mixing_width:.4g}" if first.mixed else ""
    print(
        f"{recipe.mechanism} on {recipe.data}, {recipe.model}, {recipe.steps} steps; "
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
            "delta": recipe.delta,
            "proved": best is not None,
            "unproved": list(ledger.unproved),
            "seeded": ledger.seeded,
            "counted": [note for found in recipe.spent_claims() for note in found.notes],
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
            ["  same noise, no mixing", show.up(proved_epsilon(unmixed(planned), recipe.delta))],
            ["  Gaussian of equal variance", show.up(proved_epsilon(equal_variance(planned), recipe.delta))],
        ]
    rows += [["steps", f"{trainer.step:,}"], ["seconds, rounded to tens", f"{last.get('seconds', 0):.0f}"]]
    notes = [f"not proved: {reason}" for reason in ledger.unproved]
    if best is not None:
        notes += best.lines
    elif recipe.seed is not None:
        notes.append(f"{SEEDED[0].upper()}{SEEDED[1:]}.")
    notes += [note for found in recipe.spent_claims() for note in found.notes]
    if (folder / "report.html").exists():
        notes.append(f"Report: {folder / 'report.html'}")
    notes.append(f"Check it: modelmix verify {quote(str(folder))} --delta {recipe.delta!r}")
    show.table(f"{recipe.name}, delta = {show.up_digits(recipe.delta)}", ["", ""], rows, notes)


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{100 * value:.1f} %"

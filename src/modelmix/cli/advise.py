"""``modelmix advise``: where to clip, from data that need no protection or from a release that is paid for."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from modelmix.cli import show
from modelmix.cli.once import Program
from modelmix.cli.options import DataDir, Json
from modelmix.cli.start import needs_torch
from modelmix.errors import ModelMixError, UnprovedError

if TYPE_CHECKING:
    from modelmix.training.advice import ClipAdvice

SYNTHETIC = "synthetic"

advise = Program(help="Advise on settings, from public samples or from a release that a ledger pays for.")


@advise.callback()
def _group() -> None:
    pass


@advise.command("clip")
def clip(
    data: Annotated[str, typer.Option(help="synthetic, or a data set as for modelmix train.")] = SYNTHETIC,
    model: Annotated[str, typer.Option(help="cnn, linear, mlp, resnet20, ... or package.module:function.")] = "cnn",
    weights: Annotated[
        Path | None, typer.Option(help="A released model, RUN/model.pt; left out, fresh weights.", show_default=False)
    ] = None,
    public: Annotated[bool, typer.Option("--public", help="The samples are public: no noise, no charge.")] = False,
    epsilon: Annotated[
        float | None, typer.Option(help="Private: epsilon of the noisy histogram.", show_default=False)
    ] = None,
    ledger: Annotated[
        Path | None, typer.Option(help="Private: ledger that is charged; it is made or continued.", show_default=False)
    ] = None,
    delta: Annotated[float, typer.Option(help="Failure probability.")] = 1e-5,
    q: Annotated[float, typer.Option("--q", help="Private: Poisson sampling rate.")] = 0.1,
    population: Annotated[
        int | None,
        typer.Option(help="Private: a public constant in place of the number of samples.", show_default=False),
    ] = None,
    classes: Annotated[int | None, typer.Option(help="Number of classes.", show_default=False)] = None,
    samples: Annotated[int, typer.Option(help="Public: number of samples that are looked at.")] = 1000,
    beta: Annotated[
        float | None, typer.Option(help="Smoothness; with --range and --train-epsilon.", show_default=False)
    ] = None,
    loss_range: Annotated[
        float | None, typer.Option("--range", help="R_F, for the second part of the threshold.", show_default=False)
    ] = None,
    train_epsilon: Annotated[
        float | None, typer.Option(help="Epsilon of the training to come.", show_default=False)
    ] = None,
    data_dir: DataDir = None,
    seed: Annotated[int, typer.Option(help="Of fresh weights, synthetic samples and the choice of public ones.")] = 0,
    out: Annotated[Path, typer.Option(help="Figure file; .png and .svg are written.")] = Path("clip-advice.png"),
    json: Json = False,
) -> None:
    """Advise a clip c: gradient norms, sampling noise, the paper's threshold and the bias of clipping.

    In Python: modelmix.training.advise_clip.

    \b
    modelmix advise clip                                                  (synthetic images)
    modelmix advise clip --data fashion-mini --public
    modelmix advise clip --data mine.npz --classes 10 --epsilon 0.1 --ledger spent.json
    """
    from modelmix.report import clip_advice as picture
    from modelmix.report import style

    private = data != SYNTHETIC and not public
    if private and (epsilon is None or ledger is None):
        raise UnprovedError(
            "a choice made by looking at private data is paid for",
            f"gradient norms of {data} would be looked at, and nothing says that these samples are public.",
            "Give --public if they need no protection, --epsilon and --ledger to pay for a noisy histogram, or leave "
            "--data out for synthetic images.",
        )
    if not private and (epsilon is not None or ledger is not None or population is not None):
        raise ModelMixError(
            "--epsilon, --ledger and --population are for private samples: leave them out, or leave out --public."
        )
    constants = {"smoothness": beta, "loss_range": loss_range, "epsilon": train_epsilon}
    if None in constants.values() and set(constants.values()) != {None}:
        raise ModelMixError("--beta, --range and --train-epsilon go together: give all three of them, or none.")
    style.prepare(out)
    with needs_torch():
        from torch import nn

        from modelmix.training.advice import HistogramBudget, LossConstants, advise_clip
    network, batch = _load(data, model, weights, data_dir, seed, classes, public)
    found = advise_clip(
        network,
        nn.CrossEntropyLoss(),
        batch,
        public=not private,
        budget=None if epsilon is None or ledger is None else HistogramBudget(epsilon, ledger, delta, q, population),
        constants=None if beta is None else LossConstants(delta=delta, **constants),  # type: ignore[arg-type]
        samples=samples,
        seed=seed,
    )
    written = picture.draw(found.histogram, found.clip, found.threshold, out, tail=found.tail, bias=found.bias)
    facts: dict[str, Any] = {"data": data, "model": model, "private": private, "coordinates": found.coordinates}
    if found.tail is not None:
        facts |= {"tail_chance": found.tail.chance, "mean_excess": found.tail.mean_excess}
        facts["bias"] = [asdict(row) for row in found.bias]
    if found.guarantee is not None:
        facts |= {
            "epsilon_spent": epsilon, "delta": delta, "noise_std": found.histogram.noise_std, "sample_rate": q,
            "scope": found.guarantee.scope, "counts": found.histogram.counts.tolist(), "ledger": str(ledger),
        }  # fmt: skip
    facts |= {"clip": found.clip, "kappa": found.kappa, "threshold": found.threshold}
    facts |= {"mean_norm": found.histogram.mean_norm, "files": [str(path) for path in written]}
    if json:
        print(show.as_json(facts))
        return
    norms = found.histogram
    rows = [["advised clip c", f"{found.clip:.4g}"], ["the paper's threshold", f"{found.threshold:.4g}"]]
    rows += [["kappa" + (" (bound)" if private else ""), f"{found.kappa:.4g}"]]
    rows += [[f"{share:.0%} of the norms are below", f"{norms.quantile(share):.4g}"] for share in (0.5, 0.9, 0.99)]
    show.table(f"where to clip: {model} on {data}", ["", ""], rows, _notes(facts, found))


def _notes(facts: dict[str, Any], found: ClipAdvice) -> list[str]:
    from modelmix.training.advice import TOLERATED

    private = found.guarantee is not None
    notes = [
        f"Advised: the smallest c whose bias is at most {TOLERATED:.0%} of the "
        + ("mean norm" if private else "gradient")
        + ", or the threshold if that is smaller. At these weights; norms change in training.",
        "The threshold is what Theorem 3.2 needs to promise convergence; smaller clips often work, without a promise.",
    ]
    if private:
        book = facts["ledger"]
        notes.append(f"Charged to {book}: epsilon {show.up_digits(facts['epsilon_spent'])} for this look alone.")
        notes.append(facts["scope"])
        notes.append(f"Only the noisy histogram was used. modelmix train --spent {book} counts the look as well.")
    else:
        chance = facts["tail_chance"]
        fit = "is" if chance >= 0.05 else "is NOT"
        notes.append(f"The upper tenth of the noise {fit} compatible with an exponential tail (p = {chance:.2g}).")
    return [*notes, f"drawn: {', '.join(facts['files'])}"]


def _load(
    data: str, model: str, weights: Path | None, data_dir: Path | None, seed: int, count: int | None, public: bool
) -> Any:
    """The network and the samples that the options name."""
    import torch

    from modelmix.data import load
    from modelmix.data.synthetic import synthetic
    from modelmix.models import Pixels, build

    if data == SYNTHETIC:
        split, classes = synthetic(seed=seed), 10
    else:
        loaded = load(data, data_dir, classes=count, test_public=public)
        split, classes = loaded.train, len(loaded.classes)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        network = Pixels(build(model, tuple(split.x.shape[1:]), classes))
    if weights is not None:
        try:
            network.load_state_dict(torch.load(weights, map_location="cpu", weights_only=True))
        except (OSError, RuntimeError, ValueError, AttributeError) as error:
            reason = " ".join(str(error).split())[:120]
            raise ModelMixError(f"{weights} does not hold weights of {model}: {reason}") from None
    return network, (split.x, split.y)

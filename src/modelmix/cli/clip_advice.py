"""``modelmix clip-advice``: where to clip, from data that need no protection or from a release that is paid for."""

from __future__ import annotations

import math
import os
from dataclasses import asdict
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING, Annotated, Any

import typer

from modelmix._checks import check_delta, positive, whole
from modelmix.accounting.adjacency import ADD_OR_REMOVE, ZERO_OUT
from modelmix.accounting.calibration import calibrate
from modelmix.accounting.guarantee import guarantee
from modelmix.accounting.ledger import Ledger, append_to_ledger
from modelmix.accounting.runs import plan_beside
from modelmix.cli import show
from modelmix.cli.options import DataDir, Json
from modelmix.errors import ModelMixError, UnprovedError
from modelmix.theory import nonconvex
from modelmix.theory.clipping import NormHistogram, histogram
from modelmix.theory.kappa import fit_tail

if TYPE_CHECKING:
    from modelmix.theory.clipping import Bias

SYNTHETIC = "synthetic"
TOLERATED = 0.1
"""The bias that is tolerated, as a share of the gradient (private data: of the mean norm)."""
_CLIPS = 25


def clip_advice(
    data: Annotated[str, typer.Option(help="synthetic, or a data set as for modelmix train.")] = SYNTHETIC,
    model: Annotated[str, typer.Option(help="cnn, linear, mlp, resnet20, ... or package.module:function.")] = "cnn",
    weights: Annotated[
        Path | None, typer.Option(help="A released model, RUN/model.pt; left out, fresh weights.", show_default=False)
    ] = None,
    public: Annotated[bool, typer.Option("--public", help="These samples need no protection.")] = False,
    epsilon: Annotated[
        float | None, typer.Option(help="Budget for looking at private samples.", show_default=False)
    ] = None,
    ledger: Annotated[
        Path | None, typer.Option(help="Ledger that the look is charged to; it is made or continued.")
    ] = None,
    delta: Annotated[float, typer.Option(help="Failure probability of the budget.")] = 1e-5,
    q: Annotated[float, typer.Option("--q", help="Private: share of the samples that is looked at, by Poisson.")] = 0.1,
    population: Annotated[
        int | None,
        typer.Option(help="Private: a public constant in place of the number of samples.", show_default=False),
    ] = None,
    classes: Annotated[int | None, typer.Option(help="How many classes the data has.", show_default=False)] = None,
    samples: Annotated[int, typer.Option(help="Public: how many samples are looked at.")] = 1000,
    beta: Annotated[float | None, typer.Option(help="Smoothness; with --range and --train-epsilon.")] = None,
    loss_range: Annotated[
        float | None, typer.Option("--range", help="R_F, for the second part of the threshold.")
    ] = None,
    train_epsilon: Annotated[float | None, typer.Option(help="Epsilon of the training to come.")] = None,
    data_dir: DataDir = None,
    seed: Annotated[int, typer.Option(help="Of fresh weights, synthetic samples and the choice of public ones.")] = 0,
    out: Annotated[Path, typer.Option(help="Figure file; .png and .svg are written.")] = Path("clip-advice.png"),
    json: Json = False,
) -> None:
    """Advise a clip c: gradient norms, sampling noise, the paper's threshold and the bias of clipping.

    \b
    modelmix clip-advice                                                  (synthetic images)
    modelmix clip-advice --data fashion-mini --public
    modelmix clip-advice --data mine.npz --epsilon 0.1 --ledger spent.json
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
    if not private and (epsilon is not None or ledger is not None):
        raise ModelMixError("--epsilon and --ledger pay for private samples: leave them out, or leave out --public.")
    style.prepare(out)
    network, batch, dimension = _load(data, model, weights, data_dir, seed, classes, public)
    facts: dict[str, Any] = {"data": data, "model": model, "private": private, "coordinates": dimension}
    if private:
        assert epsilon is not None
        assert ledger is not None
        many = len(batch[1]) if population is None else whole("population", population, "the population", least=1)
        claim = Ledger(adjacency=ZERO_OUT if population is None else ADD_OR_REMOVE, population=many)
        check_delta(delta, claim.populations)
        found = _pay(network, batch, epsilon, delta, q, ledger, claim, facts)
        kappa, tail, bias = found.kappa(), None, []
    else:
        found, tail, bias = _look(network, batch, samples, seed)
        kappa = tail.kappa
        facts |= {"tail_chance": tail.chance, "mean_excess": tail.mean_excess, "bias": [asdict(row) for row in bias]}
    threshold = _threshold(kappa, beta, loss_range, train_epsilon, population or len(batch[1]), dimension, delta)
    clip = _advised(found, bias, threshold)
    written = [str(path) for path in picture.draw(found, clip, threshold, out, tail=tail, bias=bias)]
    facts |= {"clip": clip, "kappa": kappa, "threshold": threshold, "mean_norm": found.mean_norm, "files": written}
    if json:
        print(show.as_json(facts))
        return
    rows = [["advised clip c", f"{clip:.4g}"], ["the paper's threshold", f"{threshold:.4g}"]]
    rows += [["kappa" + (" (bound)" if private else ""), f"{kappa:.4g}"]]
    rows += [[f"{share:.0%} of the norms are below", f"{found.quantile(share):.4g}"] for share in (0.5, 0.9, 0.99)]
    show.table(f"where to clip: {model} on {data}", ["", ""], rows, [*_notes(facts, private, ledger)])


def _notes(facts: dict[str, Any], private: bool, ledger: Path | None) -> list[str]:
    notes = [
        f"Advised: the smallest c whose bias is at most {TOLERATED:.0%} of the "
        + ("mean norm" if private else "gradient")
        + ", or the threshold if that is smaller. At these weights; norms change in training.",
        "The threshold is what Theorem 3.2 needs to promise convergence; smaller clips often work, without a promise.",
    ]
    if private:
        notes.append(f"Charged to {ledger!s}: epsilon {show.up_digits(facts['epsilon_spent'])} for this look alone.")
        notes.append(facts["scope"])
        notes.append(f"Only the noisy histogram was used. modelmix train --spent {ledger!s} counts the look as well.")
    else:
        chance = facts["tail_chance"]
        fit = "is" if chance >= 0.05 else "is NOT"
        notes.append(f"The upper tenth of the noise {fit} compatible with an exponential tail (p = {chance:.2g}).")
    return [*notes, f"drawn: {', '.join(facts['files'])}"]


def _load(
    data: str, model: str, weights: Path | None, data_dir: Path | None, seed: int, count: int | None, public: bool
) -> Any:
    try:
        import torch

        from modelmix.data import load
        from modelmix.data.synthetic import synthetic
        from modelmix.gradients.parameters import FlatParameters
        from modelmix.models import Pixels, build
    except ModuleNotFoundError as error:
        raise ModelMixError(f"gradients need {error.name}: install it with pip install 'modelmix[train]'.") from None
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
    return network, (split.x, split.y), FlatParameters(network).size


def _look(network: Any, batch: Any, samples: int, seed: int) -> Any:
    import numpy as np
    import torch
    from torch import nn

    from modelmix.training.norms import gradient_statistics

    samples = whole("samples", samples, "the number of samples", least=100)
    chosen = torch.randperm(len(batch[1]), generator=torch.Generator().manual_seed(seed))[:samples]
    part = batch[0][chosen], batch[1][chosen]
    few = gradient_statistics(network, nn.CrossEntropyLoss(), (part[0][:100], part[1][:100]), [1.0])
    middle = float(np.median(few.norms))
    clips = np.geomspace(middle / 30, 30 * middle, _CLIPS).tolist()
    found = gradient_statistics(network, nn.CrossEntropyLoss(), part, clips)
    return histogram(found.norms), fit_tail(found.noise, seed=seed), found.bias


def _pay(
    network: Any,
    batch: Any,
    epsilon: float,
    delta: float,
    q: float,
    ledger: Path,
    claim: Ledger,
    facts: dict[str, Any],
) -> NormHistogram:
    """The noisy histogram; its phase is on disk before the histogram is used."""
    from torch import nn

    from modelmix.training.norms import private_norm_histogram
    from modelmix.training.randomness import Randomness

    mechanism = calibrate(epsilon=epsilon, delta=delta, sample_rate=q, steps=1)

    def charged(before: Ledger | None) -> Ledger:
        _refuse_kept(ledger)
        spent = (before or Ledger()).then(claim.add(mechanism, 1))
        spent.require_proof()
        return spent

    _refuse_kept(ledger)  # also before its folder is made
    append_to_ledger(ledger, charged)  # first: a look that is not in the ledger must not happen
    release = private_norm_histogram(network, nn.CrossEntropyLoss(), batch, mechanism, Randomness())
    facts |= {
        "epsilon_spent": float(epsilon), "delta": delta, "noise_std": mechanism.noise_multiplier, "sample_rate": q,
        "scope": guarantee(claim.add(mechanism, 1), delta).scope,
        "counts": release.histogram.counts.tolist(), "ledger": str(ledger),
    }  # fmt: skip
    return release.histogram


def _refuse_kept(ledger: Path) -> None:
    """Refuse the ledger that a run or a loop keeps: its plan says what it costs, and it would no longer match it."""
    for place in (ledger, Path(os.path.realpath(ledger))):
        if place.is_dir() or place.with_name("config.json").exists() or plan_beside(place).exists():
            whole = quote(str(ledger))
            raise ModelMixError(
                f"{ledger} belongs to a run or a loop, which would no longer match it: write what it counts as into a "
                f"new file, modelmix epsilon --ledger {whole} --save-ledger FILE, and give that file."
            )


def _threshold(
    kappa: float, beta: float | None, loss_range: float | None, epsilon: float | None, n: int, d: int, delta: float
) -> float:
    """4 kappa log 10, and the second condition of the proof where its constants are given."""
    given = [value is not None for value in (beta, loss_range, epsilon)]
    if not any(given):
        return 4 * kappa * math.log(10)
    if not all(given):
        raise ModelMixError("--beta, --range and --train-epsilon go together: give all three of them, or none.")
    budget = nonconvex.Budget(
        n, d, 1.0, positive("train-epsilon", epsilon, "the training's epsilon"), delta, 1.0,
        positive("beta", beta, "the smoothness"), positive("range", loss_range, "the range of the loss"),
    )  # fmt: skip
    return nonconvex.threshold(kappa, budget.scale)


def _advised(norms: NormHistogram, bias: list[Bias], threshold: float) -> float:
    """The smallest clip whose bias is tolerated, at most the threshold."""
    if bias:
        fine = [row.clip for row in bias if row.bias <= TOLERATED * row.gradient]
    else:
        fine = [float(c) for c in norms.uppers if norms.cut(float(c)) <= TOLERATED * norms.mean_norm]
    return min([threshold, *fine])

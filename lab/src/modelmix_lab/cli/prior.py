"""``modelmix-lab prior``: a network that has learned to see from synthetic images, and from nothing else."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Annotated

import typer

from modelmix.cli import show
from modelmix.cli.options import Json
from modelmix.errors import ModelMixError


def prior(
    out: Annotated[Path, typer.Option(help="The file of weights to write, .npz.")] = Path("prior.npz"),
    steps: Annotated[int, typer.Option(help="Training steps.")] = 10_000,
    batch: Annotated[int, typer.Option(help="Images in a step; of scenes, two views of each are compared.")] = 1024,
    images: Annotated[int, typer.Option(help="Synthetic images to make.")] = 200_000,
    lr: Annotated[float, typer.Option(help="The largest learning rate.")] = 2e-3,
    width: Annotated[
        int,
        typer.Option(
            help="Of the WRN-16 that learns; all weights can be trained on if it is 4, features serve in any case."
        ),
    ] = 4,
    seed: Annotated[int, typer.Option(help="Of images, views and weights.")] = 0,
    of: Annotated[str, typer.Option(help="scenes, or characters: to read, for data with digits.")] = "scenes",
    device: Annotated[str | None, typer.Option(help="cpu, cuda; default: what is there.", show_default=False)] = None,
    json: Json = False,
) -> None:
    """Train a network on synthetic images, to begin private training with. No data set is read.

    \b
    modelmix-lab prior --out prior.npz
    modelmix-lab prior --of characters --out reads.npz
    modelmix-lab train --model wrn-16-4 --set model.prior=prior.npz
    modelmix-lab train --model linear --set features.kind=prior.npz
    """
    from modelmix.training import Performance
    from modelmix_lab.features.prior import PriorConfig, train_prior
    from modelmix_lab.features.reading import train_reading_prior
    from modelmix_lab.features.weights import save

    if out.exists() or not out.parent.is_dir():
        why = "is there already" if out.exists() else "has no folder to lie in"
        raise ModelMixError(f"{out} {why}: choose another --out.")
    config = PriorConfig(images=images, steps=steps, batch=batch, lr=lr, width=width, seed=seed, of=of)
    where = Performance(device=device).find_device()
    start = time.monotonic()
    losses: list[tuple[int, float]] = []

    def on_progress(step: int, loss: float) -> None:
        losses.append((step, loss))
        print(f"step {step:,} of {steps:,}: loss {loss:.3f}, {time.monotonic() - start:.0f} s", file=sys.stderr)

    network = (
        train_reading_prior(config, where, on_progress)
        if of == "characters"
        else train_prior(config, where, on_progress)
    )
    save(network, config, out)
    seconds = round(time.monotonic() - start, 1)
    if json:
        print(show.as_json({"file": str(out), "loss": losses[-1][1], "seconds": seconds, "losses": losses}))
        return
    print(f"written: {out} ({out.stat().st_size / 2**20:.1f} MiB), the last loss {losses[-1][1]:.3f}")

"""A network that learns to see from synthetic images alone, to begin private training with.

Two views of one image, cut, mirrored and recoloured at random, shall be closer to each other than to the views of all
other images (Chen et al. 2020, SimCLR). Nothing here reads a data set: weights that come out are public, and private
training that starts from them, or from their features, pays nothing for them (after Tang et al. 2023, "Differentially
Private Image Classification by Learning Priors from Random Processes").
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812, the name everybody knows
from torch import Tensor, nn

from modelmix._checks import positive, whole
from modelmix.errors import ModelMixError
from modelmix.models.residual import WideResNet16
from modelmix_lab.features.views import views
from modelmix_lab.synthetic.synthetic import synthetic

_CANVAS = 48  # of the images that views are cut from
_GENERATED = 2048  # images at a time
_WARM_UP = 0.05  # of the steps

KINDS = ("scenes", "characters")
"""The kinds of synthetic images that a prior is trained on."""


@dataclass(frozen=True)
class PriorConfig:
    """The settings by which a prior is trained.

    Args:
        images: how many are made; views of them are cut anew in every step.
        steps, batch: batch images a step, two views of each.
        lr: the largest of a half cosine after a short warm-up, for AdamW.
        temperature: of the contrastive loss.
        width: of the WRN-16.
        seed: of everything.
        of: "scenes", which are compared (`train_prior`), or "characters", which are named (`train_reading_prior`).
    """

    images: int = 200_000
    steps: int = 10_000
    batch: int = 1024
    lr: float = 2e-3
    temperature: float = 0.2
    width: int = 4
    seed: int = 0
    of: str = "scenes"

    def __post_init__(self) -> None:
        for name in ("images", "steps", "width"):
            whole(name, getattr(self, name), f"the number of {name}", 1)
        whole("batch", self.batch, "the number of images in a step", 2)
        for name in ("lr", "temperature"):
            positive(name, getattr(self, name), f"the {name}")
        if self.of not in KINDS:
            raise ModelMixError(f"a prior of {self.of!r} is unknown: choose {' or '.join(KINDS)}.")


def contrast(a: Tensor, b: Tensor, temperature: float) -> Tensor:
    """Compute NT-Xent, the cross-entropy of finding every view's partner among all views by cosine similarity."""
    z = F.normalize(torch.cat([a, b]).float(), dim=1)
    scores = z @ z.T / temperature
    scores = scores.masked_fill(torch.eye(len(z), dtype=torch.bool, device=z.device), -math.inf)
    partner = torch.arange(len(z), device=z.device).roll(len(a))
    return F.cross_entropy(scores, partner)


def train_prior(
    config: PriorConfig, device: torch.device, on_progress: Callable[[int, float], None] = lambda step, loss: None
) -> WideResNet16:
    """Train a network on synthetic scenes and return it with a zero head.

    ``on_progress`` is called with the step and the loss every hundred steps.
    """
    generator = torch.Generator(device).manual_seed(config.seed)
    images = torch.cat(
        [
            synthetic(min(_GENERATED, config.images - start), _CANVAS, generator)
            for start in range(0, config.images, _GENERATED)
        ]
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(config.seed)
        network = WideResNet16(width=config.width)
        inside = network.head.in_features
        project = nn.Sequential(nn.Linear(inside, inside), nn.ReLU(), nn.Linear(inside, 128))
    network.head = nn.Identity()  # type: ignore[assignment]

    def loss(step: int, run: Any) -> Tensor:
        some = torch.randint(config.images, (config.batch,), generator=generator, device=device)
        pair = torch.cat([views(images[some], generator) for _ in range(2)])
        a, b = run(pair).chunk(2)
        return contrast(a, b, config.temperature)

    train(nn.Sequential(network, project), config, device, loss, on_progress)
    return without_head(network, inside)


def train(
    model: nn.Module,
    config: PriorConfig,
    device: torch.device,
    loss: Callable[[int, Any], Tensor],
    on_progress: Callable[[int, float], None],
) -> None:
    """Train a model in place by AdamW. ``loss`` gets the number of a step, from 0, and how to run the model."""
    model = model.to(device).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    optimizer = torch.optim.AdamW(model.parameters(), config.lr, weight_decay=1e-4)
    compiled: Any = torch.compile(model) if device.type == "cuda" else model

    def run(x: Tensor) -> Tensor:
        with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
            out: Tensor = compiled(x.contiguous(memory_format=torch.channels_last))
        return out

    for step in range(config.steps):
        for group in optimizer.param_groups:
            group["lr"] = config.lr * _share(step, config.steps)
        found = loss(step, run)
        optimizer.zero_grad(set_to_none=True)
        found.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        if step % 100 == 0 or step + 1 == config.steps:
            value = found.item()
            if not math.isfinite(value):
                raise ModelMixError(f"the loss is {value} after {step + 1} steps: give a smaller lr.")
            on_progress(step + 1, value)


def without_head(network: WideResNet16, inside: int) -> WideResNet16:
    """Return the network on the CPU with a zero head."""
    network.head = nn.Linear(inside, 10)
    nn.init.zeros_(network.head.weight)
    nn.init.zeros_(network.head.bias)
    return network.cpu()


def _share(step: int, steps: int) -> float:
    """Return the learning rate of a step as a fraction of the largest one: warm-up, then half a cosine."""
    warm = max(1, int(_WARM_UP * steps))
    return min((step + 1) / warm, 0.5 * (1 + math.cos(math.pi * step / steps)))

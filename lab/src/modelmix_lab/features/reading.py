"""A network that learns to read from synthetic characters alone, to begin private training on digits with.

Like `modelmix_lab.features.prior` it reads no data set, so its weights cost no privacy; here images have labels, which
character is in the middle, and the network learns to name it. The layer that names is thrown away.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812, the name everybody knows
from torch import Tensor

from modelmix.data.dataset import to_float
from modelmix.features.chance import Chance
from modelmix.models.residual import WideResNet16
from modelmix_lab.features.prior import PriorConfig, train, without_head
from modelmix_lab.features.views import SIDE
from modelmix_lab.synthetic.alphabet import CLASSES
from modelmix_lab.synthetic.characters import labelled_characters

_GENERATED = 2048  # images at a time
_RENEWED = 8  # steps after which as many are drawn anew


def train_reading_prior(
    config: PriorConfig, device: torch.device, on_progress: Callable[[int, float], None] = lambda step, loss: None
) -> WideResNet16:
    """Train a network to name synthetic characters and return it with a zero head.

    ``on_progress`` is called with the step and the loss every hundred steps. ``config.images`` are kept in memory and
    redrawn part by part; ``config.temperature`` is ignored.
    """
    generator = torch.Generator(device).manual_seed(config.seed)
    starts = range(0, config.images, _GENERATED)
    parts = [labelled_characters(min(_GENERATED, config.images - start), SIDE, generator) for start in starts]
    images, labels = (torch.cat(kind) for kind in zip(*parts, strict=True))
    del parts
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(config.seed)
        network = WideResNet16(classes=len(CLASSES), width=config.width)

    def loss(step: int, run: Any) -> Tensor:
        if step % _RENEWED == _RENEWED - 1:
            start = starts[step // _RENEWED % len(starts)]
            count = min(_GENERATED, config.images - start)
            images[start : start + count], labels[start : start + count] = labelled_characters(count, SIDE, generator)
        some = torch.randint(config.images, (config.batch,), generator=generator, device=device)
        return F.cross_entropy(run(looks(images[some], generator)).float(), labels[some])

    train(network, config, device, loss, on_progress)
    return without_head(network, network.head.in_features)


def looks(images: Tensor, generator: torch.Generator) -> Tensor:
    """Augment every image: move, turn, stretch and relight it a little, never mirror it. Returns floats."""
    n, uniform = images.shape[0], Chance(generator).uniform
    angle, (width, height) = uniform(n, low=-0.1, high=0.1), uniform(2, n, low=0.85, high=1.15)
    rows = [width * angle.cos(), -height * angle.sin(), width * angle.sin(), height * angle.cos()]
    affine = torch.cat([torch.stack(rows, 1).view(n, 2, 2), uniform(n, 2, 1, low=-0.08, high=0.08)], 2)
    grid = F.affine_grid(affine, list(images.shape), align_corners=False)
    x = F.grid_sample(images.float() / 255, grid, padding_mode="reflection", align_corners=False)
    grey = x.mean(1, keepdim=True)
    x = grey + uniform(n, 1, 1, 1, high=1.5) * (x - grey) + uniform(n, 3, 1, 1, low=-0.05, high=0.05)
    mean = x.mean((1, 2, 3), keepdim=True)
    x = (mean + uniform(n, 1, 1, 1, low=0.6, high=1.4) * (x - mean)) * uniform(n, 1, 1, 1, low=0.8, high=1.2)
    return to_float((255 * x.clamp(0, 1)).round().to(torch.uint8))

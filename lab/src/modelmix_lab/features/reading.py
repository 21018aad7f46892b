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
from modelmix_lab.features.prior import Lesson, teach, without_head
from modelmix_lab.features.views import SIDE
from modelmix_lab.synthetic.alphabet import CLASSES
from modelmix_lab.synthetic.characters import labelled_characters

_GENERATED = 2048  # images at a time
_RENEWED = 8  # steps after which as many are drawn anew


def learn_to_read(
    lesson: Lesson, device: torch.device, said: Callable[[int, float], None] = lambda step, loss: None
) -> WideResNet16:
    """The network after its lesson; its head is zero. ``said`` hears of the loss every hundred steps.

    As many images as the lesson says are kept, and drawn anew part by part; its temperature has no meaning here.
    """
    generator = torch.Generator(device).manual_seed(lesson.seed)
    starts = range(0, lesson.images, _GENERATED)
    parts = [labelled_characters(min(_GENERATED, lesson.images - start), SIDE, generator) for start in starts]
    images, labels = (torch.cat(kind) for kind in zip(*parts, strict=True))
    del parts
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(lesson.seed)
        network = WideResNet16(classes=len(CLASSES), width=lesson.width)

    def loss(step: int, run: Any) -> Tensor:
        if step % _RENEWED == _RENEWED - 1:
            start = starts[step // _RENEWED % len(starts)]
            count = min(_GENERATED, lesson.images - start)
            images[start : start + count], labels[start : start + count] = labelled_characters(count, SIDE, generator)
        some = torch.randint(lesson.images, (lesson.batch,), generator=generator, device=device)
        return F.cross_entropy(run(looks(images[some], generator)).float(), labels[some])

    teach(network, lesson, device, loss, said)
    return without_head(network, network.head.in_features)


def looks(images: Tensor, generator: torch.Generator) -> Tensor:
    """Another look at every image: moved, turned and stretched a little, in other light. Floats; never mirrored."""
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

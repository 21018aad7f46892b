"""What throughput is measured on: networks of the private-training literature, on random data of their shapes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property, partial

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from modelmix.gradients.device import full_precision
from modelmix.models.residual import ResNet20, WideResNet16
from modelmix_lab.models.scattering import scatter_cnn_cifar, scatter_cnn_grey

TRUNCATION = 100  # the p of the truncating clip


class _Block(nn.Module):
    """Attention and a two-layer perceptron, each after a norm and around a shortcut."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(width)
        self.attention = nn.MultiheadAttention(width, 4, batch_first=True)
        self.norm2 = nn.LayerNorm(width)
        self.expand = nn.Linear(width, 4 * width)
        self.act = nn.GELU()
        self.contract = nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        inner = self.norm1(x)
        x = x + self.attention(inner, inner, inner, need_weights=False)[0]
        return x + self.contract(self.act(self.expand(self.norm2(x))))


class Transformer(nn.Module):
    """Four pre-norm blocks over tokens with learned positions; the mean over positions is classified."""

    def __init__(self, vocabulary: int = 8192, length: int = 128, width: int = 256, classes: int = 2) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.positions = nn.Embedding(length, width)
        self.blocks = nn.Sequential(*(_Block(width) for _ in range(4)))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, classes)

    def forward(self, x: Tensor) -> Tensor:
        # A row of positions for every sample, so that per-sample rules find samples first here too.
        places = torch.arange(x.shape[1], device=x.device).repeat(x.shape[0], 1)
        x = self.blocks(self.tokens(x) + self.positions(places))
        return self.head(self.norm(x).mean(1))


@dataclass(frozen=True)
class Case:
    """One network and its data.

    Args:
        build: makes the network.
        shape: of one sample.
        batch: samples in a step, on an accelerator.
        chunk: samples that ModelMix holds at once.
        vmap_chunk: samples that the systems built on vmap hold at once; all others take the batch whole.
        vocabulary: for tokens, how many there are; 0 for floats.
    """

    build: Callable[[], nn.Module]
    shape: tuple[int, ...]
    batch: int
    chunk: int
    vmap_chunk: int
    classes: int = 10
    vocabulary: int = 0


CASES = {
    "resnet20": Case(ResNet20, (3, 32, 32), 1536, 768, 512),
    "wrn-16-4": Case(partial(WideResNet16, width=4), (3, 32, 32), 512, 128, 128),
    "scatter-cifar": Case(scatter_cnn_cifar, (243, 8, 8), 8192, 1024, 1024),
    "scatter-grey": Case(scatter_cnn_grey, (81, 7, 7), 8192, 2048, 2048),
    "linear-2048": Case(partial(nn.Linear, 2048, 10), (2048,), 8192, 8192, 8192),
    "transformer": Case(Transformer, (128,), 256, 64, 64, 2, 8192),
}
# The same layers, small enough for a processor core to go through all systems in minutes.
QUICK = {
    **CASES,
    "wrn-16-4": Case(partial(WideResNet16, width=1), (3, 32, 32), 512, 128, 128),
    "transformer": Case(partial(Transformer, 64, 16, 32), (16,), 256, 64, 64, 2, 64),
}


@dataclass(frozen=True)
class Setting:
    """How a system runs.

    Args:
        precision: bfloat16, autocast or float32.
        layout: of images, channels_last or contiguous.
        chunk: samples held at once.
        mode: of torch.compile.
    """

    precision: str
    layout: str
    chunk: int
    mode: str = "default"


class Problem:
    """A case on a device: the same weights, samples and clip for every system, and the right answers.

    The clip is the median of the first norms, so that about half of the gradients are cut, or a part of that.
    """

    def __init__(self, case: Case, batch: int, device: torch.device, part: float = 1.0) -> None:
        self.case, self.batch, self.device = case, batch, device
        generator = torch.Generator().manual_seed(1)
        if case.vocabulary:
            self.x = torch.randint(case.vocabulary, (batch, *case.shape), generator=generator).to(device)
        else:
            self.x = torch.randn(batch, *case.shape, generator=generator).to(device)
        self.y = torch.randint(case.classes, (batch,), generator=generator).to(device)
        self.parameters = sum(p.numel() for p in case.build().parameters())
        self.clip = part * float(self._norms(min(batch, 64)).median())
        self.right = self._right()

    def model(self) -> nn.Module:
        torch.manual_seed(0)
        return self.case.build().to(self.device)

    @cached_property
    def small(self) -> Problem:
        """The same with few samples, all of them cut, so that wrong norms show."""
        return Problem(self.case, min(16, self.batch), self.device, 0.25)

    @property
    def image(self) -> bool:
        return len(self.case.shape) == 3

    def data(self, setting: Setting) -> tuple[Tensor, Tensor]:
        """Samples as a system wants them."""
        x = self.x
        if x.is_floating_point() and setting.precision == "bfloat16":
            x = x.bfloat16()
        if self.image and setting.layout == "channels_last":
            x = x.to(memory_format=torch.channels_last)
        return x, self.y

    def _gradients(self, count: int) -> Iterator[Tensor]:
        """Rows of per-sample gradients in float32 by torch.func, few samples at a time."""
        model = self.model()
        parameters = {name: p.detach() for name, p in model.named_parameters()}
        compute = torch.func.vmap(torch.func.grad(loss_of_one(model)), in_dims=(None, 0, 0))
        size = max(1, min(256, 2**28 // self.parameters))
        with full_precision(), sdpa_kernel(SDPBackend.MATH):
            for start in range(0, count, size):
                part = slice(start, min(count, start + size))
                yield torch.cat([g.flatten(1) for g in compute(parameters, self.x[part], self.y[part]).values()], 1)

    def _norms(self, count: int) -> Tensor:
        return torch.cat([rows.norm(dim=1) for rows in self._gradients(count)])

    def _right(self) -> dict[int, Tensor]:
        """The clipped sums, without and with truncation."""
        bound = self.clip / TRUNCATION**0.5
        plain = torch.zeros(self.parameters, dtype=torch.float64, device=self.device)
        cut = torch.zeros_like(plain)
        for rows in self._gradients(self.batch):
            rows = rows * (self.clip / rows.norm(dim=1, keepdim=True)).clamp(max=1.0)
            plain += rows.sum(0)
            cut += rows.clamp(-bound, bound).sum(0)
        return {1: plain.cpu(), TRUNCATION: cut.cpu()}

    def distance(self, vector: Tensor, p: int) -> float:
        """How far a system's clipped sum is from the right one, relative to its length."""
        right = self.right[p]
        return float((vector.detach().double().cpu() - right).norm() / right.norm())


def loss_of_one(model: nn.Module) -> Callable[[dict[str, Tensor], Tensor, Tensor], Tensor]:
    """The loss of one sample as a function of the parameters."""

    def loss(parameters: dict[str, Tensor], x: Tensor, y: Tensor) -> Tensor:
        scores = torch.func.functional_call(model, parameters, (x[None],))
        return nn.functional.cross_entropy(scores, y[None])

    return loss

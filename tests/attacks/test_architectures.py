"""Real architectures get the fast engine, by proof, and agree with one sample at a time."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn

from modelmix.gradients import Batch, Engine
from modelmix.gradients.clip import Clip
from modelmix.gradients.parameters import FlatParameters
from modelmix.models.registry import build

pytestmark = pytest.mark.filterwarnings("ignore:there is no fast rule")


class Block(nn.Module):
    """A block of a vision transformer, written out."""

    def __init__(self, width=8, heads=2):
        super().__init__()
        self.heads = heads
        self.norm, self.qkv, self.out = nn.LayerNorm(width), nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.after = nn.Sequential(
            nn.LayerNorm(width), nn.Linear(width, 16), nn.GELU(), nn.Dropout(0.0), nn.Linear(16, width)
        )

    def forward(self, x, causal=False):
        n, length = x.shape[:2]
        q, k, v = self.qkv(self.norm(x)).reshape(n, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=causal).transpose(1, 2).flatten(2))
        return x + self.after(x)


class ViT(nn.Module):
    def __init__(self):
        super().__init__()
        self.patches, self.blocks = nn.Conv2d(3, 8, 4, 4), nn.Sequential(Block(), Block())
        self.norm, self.head = nn.LayerNorm(8), nn.Linear(8, 3)

    def forward(self, x):
        x = self.patches(x).flatten(2).transpose(1, 2)
        x = torch.cat([x.new_zeros(x.shape[0], 1, 8), x], 1)
        return self.head(self.norm(self.blocks(x))[:, 0])


class Bert(nn.Module):
    """Position ids, a padding mask and a pooled first token."""

    def __init__(self):
        super().__init__()
        self.words, self.places = nn.Embedding(20, 8, padding_idx=0), nn.Embedding(7, 8)
        self.norm, self.drop = nn.LayerNorm(8), nn.Dropout(0.0)
        self.layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
        self.head = nn.Linear(8, 3)
        self.register_buffer("ids", torch.arange(7)[None])

    def forward(self, x):
        h = self.drop(self.norm(self.words(x) + self.places(self.ids.expand(x.shape[0], -1))))
        return self.head(torch.tanh(self.layer(h, src_key_padding_mask=x == 0)[:, 0]))


class Gpt(nn.Module):
    """Causal, with tied weights, as wide as its vocabulary in the end."""

    def __init__(self):
        super().__init__()
        self.words, self.places, self.block = nn.Embedding(20, 8), nn.Embedding(7, 8), Block()
        self.head = nn.Linear(8, 20, bias=False)
        self.head.weight = self.words.weight

    def forward(self, x):
        places = self.places(torch.arange(7, device=x.device).expand(x.shape[0], -1))
        return self.head(self.block(self.words(x) + places, causal=True))


class Attends(nn.Module):
    def __init__(self):
        super().__init__()
        self.attention, self.last = nn.MultiheadAttention(8, 2, batch_first=True), nn.Linear(8, 3)

    def forward(self, x):
        mask = torch.ones(5, 5, dtype=torch.bool).triu(1)
        return self.last(self.attention(x, x, x, attn_mask=mask)[0].mean(1))


class _NormedLinear(nn.Module):
    def __init__(self):
        super().__init__()
        self.v, self.g = nn.Parameter(torch.randn(5, 6)), nn.Parameter(torch.ones(5, 1))

    def forward(self, x):
        return F.linear(x, self.g * self.v / self.v.norm(dim=1, keepdim=True))


def weight_normed():
    return nn.Sequential(_NormedLinear(), nn.Tanh(), nn.Linear(5, 3))


def frozen_batch_norm():
    norm = nn.BatchNorm2d(4).requires_grad_(False).eval()
    return nn.Sequential(nn.Conv2d(3, 4, 3), norm, nn.ReLU(inplace=True), nn.Flatten(), nn.Linear(4 * 36, 3))


def norms():
    return nn.Sequential(
        nn.Conv2d(3, 4, 3, padding=1), nn.GroupNorm(2, 4), nn.ReLU(inplace=True), nn.Conv2d(4, 4, 3, padding=1),
        nn.InstanceNorm2d(4, affine=True), nn.MaxPool2d(2), nn.LayerNorm([4, 4, 4]), nn.SiLU(), nn.AvgPool2d(2),
        nn.Flatten(), nn.Linear(16, 3),
    )  # fmt: skip


def upsampled():
    return nn.Sequential(
        nn.Conv2d(3, 4, 3, 2, 1), nn.Upsample(scale_factor=2), nn.ConvTranspose2d(4, 2, 2, 2), nn.AdaptiveAvgPool2d(2),
        nn.Flatten(), nn.Linear(8, 3),
    )  # fmt: skip


def encoder(first=True):
    return nn.Sequential(
        nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=first), 2),
        nn.Flatten(),
        nn.Linear(40, 3),
    )


IMAGE, WORDS, SEQUENCE, VECTOR = (3, 8, 8), "words", (5, 8), (6,)
CASES = {
    "mlp": (lambda: nn.Sequential(nn.Linear(6, 8), nn.ReLU(inplace=True), nn.Linear(8, 3)), VECTOR),
    "deep mlp": (lambda: nn.Sequential(nn.Linear(6, 8), nn.ELU(), nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 3)), VECTOR),
    "cnn": (lambda: build("cnn", (1, 28, 28), 3), (1, 28, 28)),
    "linear": (lambda: build("linear", (3, 8, 8), 3), IMAGE),
    "our mlp": (lambda: build("mlp", (3, 8, 8), 3), IMAGE),
    "resnet20": (lambda: build("resnet20", (3, 32, 32), 3), (3, 32, 32)),
    "resnet20-embedding": (lambda: build("resnet20-embedding", (3, 32, 32), 3), (3, 32, 32)),
    "every norm": (norms, IMAGE),
    "frozen batch norm": (frozen_batch_norm, IMAGE),
    "upsampled": (upsampled, IMAGE),
    "vision transformer": (ViT, IMAGE),
    "transformer encoder": (encoder, SEQUENCE),
    "bert": (Bert, WORDS),
    "gpt": (Gpt, WORDS),
    "attention with a mask": (Attends, SEQUENCE),
    "prelu": (lambda: nn.Sequential(nn.Linear(6, 8), nn.PReLU(8), nn.Linear(8, 3)), VECTOR),
    "weight norm": (weight_normed, VECTOR),
    "embeddings": (lambda: nn.Sequential(nn.Embedding(20, 4), nn.Flatten(), nn.Linear(28, 3)), WORDS),
    "conv1d": (lambda: nn.Sequential(nn.Conv1d(5, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(24, 3)), SEQUENCE),
}


def every_token(outputs, targets):
    return F.cross_entropy(outputs.flatten(0, 1), targets.flatten())


@pytest.mark.parametrize("name", CASES)
def test_real_architectures_get_the_fast_engine_and_agree_with_one_at_a_time(name):
    torch.manual_seed(0)
    make, shape = CASES[name]
    model, m = make(), 4
    x = torch.randint(1, 20, (m, 7)) if shape == WORDS else torch.randn(m, *shape)
    y, loss = torch.randint(0, 3, (m,)), F.cross_entropy
    if shape == WORDS:
        x[1:, -2:] = 0 if name == "bert" else 1
    if name == "gpt":
        y, loss = torch.randint(0, 20, (m, 7)), every_token
    engine, alone = Engine(model, loss, (x, y)), Engine(model, loss, (x, y), name="loop")
    assert engine.name == "hooks", engine.reason
    flat = FlatParameters(model)
    for clip in (Clip(1e6), Clip(0.1, 100)):
        for count in (m, 1, 3):
            one = torch.ones(count, dtype=torch.float64)
            found, right = (
                e(flat.views(flat.read()), Batch(x[:count], y[:count], one), clip).total for e in (engine, alone)
            )
            assert (found - right).norm() <= 1e-5 * right.norm()

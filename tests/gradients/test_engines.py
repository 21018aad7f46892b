"""Every engine against one-sample-at-a-time autograd and Algorithm 2, computed here and in float64.

An engine may be slow and it may refuse; it may not be wrong.
"""

from __future__ import annotations

import copy
import gc
import math
import warnings

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from depth import cases
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import nn
from torch.utils.checkpoint import checkpoint

from modelmix.errors import ModelMixError, UnprovedError
from modelmix.gradients import ENGINES, Batch, Engine, choose, clipped_sum, count_rows, sum_of_chunk
from modelmix.gradients.clip import MARGIN, Clip
from modelmix.gradients.parameters import FlatParameters
from modelmix.models import cnn
from modelmix.models.networks import Pixels
from modelmix.models.residual import StandardisedConv2d
from modelmix.training.embedding import columns

pytestmark = pytest.mark.filterwarnings(
    "ignore:Using padding='same'",  # torch, on even kernels
    "ignore:samples run one at a time",
)

ALL = (*ENGINES, "auto")
NO_CLIP = Clip(1e30)


# The oracle.


def pick(tree, i, j):
    if isinstance(tree, dict):
        return {key: pick(value, i, j) for key, value in tree.items()}
    return tuple(pick(value, i, j) for value in tree) if isinstance(tree, tuple) else tree[i:j]


def apply(model, x):
    if isinstance(x, dict):
        return model(**x)
    return model(*x) if isinstance(x, tuple) else model(x)


def widen(tree):
    if isinstance(tree, dict):
        return {key: widen(value) for key, value in tree.items()}
    if isinstance(tree, tuple):
        return tuple(map(widen, tree))
    return tree.detach().double() if tree.is_floating_point() else tree


def first(tree):
    while not isinstance(tree, torch.Tensor):
        tree = next(iter(tree.values())) if isinstance(tree, dict) else tree[0]
    return tree


def clipped(g, clip):
    length = float(g.abs().sum() if clip.norm == 1 else (g * g).sum().sqrt())
    bound = clip.c / math.sqrt(clip.p)
    return (g * (clip.c / length) if length > clip.c else g).clamp(-bound, bound)


def oracle(model, loss, x, y, clip, copies=1, wide=True):
    """The sum of clipped gradients; each is the mean over the copies of a sample, each copy run alone."""
    if wide and any(p.dtype != torch.float64 for p in model.parameters()):
        model, x, y = copy.deepcopy(model).double(), widen(x), widen(y)
    trained = [p for p in model.parameters() if p.requires_grad]
    total = torch.zeros(sum(p.numel() for p in trained), dtype=torch.float64)
    for i in range(first(x).shape[0] // copies):
        g = torch.zeros_like(total)
        for j in range(i * copies, (i + 1) * copies):
            value = loss(apply(model, pick(x, j, j + 1)), pick(y, j, j + 1)).mean()
            found = torch.autograd.grad(value, trained, allow_unused=True)
            parts = [torch.zeros_like(p) if part is None else part for p, part in zip(trained, found, strict=True)]
            g += torch.cat([part.flatten().double() for part in parts]) / copies
        total += clipped(g, clip)
    return total


def assert_right(found, wanted, clip, samples, dtype=torch.float64):
    rounding = 1e-9 if dtype == torch.float64 else 2e-4
    assert found.dtype == torch.float64
    assert (found - wanted).norm() <= rounding * (1e-6 + wanted.norm()) + 2 * MARGIN * min(clip.c, 1e6) * samples


def check(model, loss, x, y, clip=NO_CLIP, engine="auto", chunk=None):
    wanted = oracle(model, loss, x, y, clip)
    found = clipped_sum(model, loss, (x, y), clip, engine=engine, chunk=chunk)
    assert_right(found, wanted, clip, 0 if clip is NO_CLIP else first(x).shape[0])


# Random networks.


class Residual(nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, x):
        return x + self.inner(x)


class Twice(Residual):
    def forward(self, x):
        return self.inner(torch.tanh(self.inner(x)))


class Spare(nn.Module):
    """Has a layer that it does not use."""

    def __init__(self, inner):
        super().__init__()
        self.spare = nn.Linear(2, 3)
        self.inner = inner

    def forward(self, x):
        return self.inner(x)


class SelfAttention(nn.Module):
    def __init__(self, width, weights):
        super().__init__()
        self.attention, self.weights = nn.MultiheadAttention(width, 1, batch_first=True), weights

    def forward(self, x):
        return x + self.attention(x, x, x, need_weights=self.weights)[0]


class OverTime(nn.Module):
    """A layer for channels first."""

    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def forward(self, x):
        return self.layer(x.transpose(1, 2)).transpose(1, 2)


class MeanOverTime(nn.Module):
    def forward(self, x):
        return x.mean(1)


def activations(draw):
    return draw(
        st.sampled_from(
            [nn.Tanh(), nn.ReLU(inplace=True), nn.ELU(inplace=True), nn.SiLU(), nn.GELU(), nn.LeakyReLU(0.1, True)]
        )
    )


def pair(draw, low, high):
    return draw(st.one_of(st.integers(low, high), st.tuples(st.integers(low, high), st.integers(low, high))))


def convolution(draw, channels, out=None):
    groups = draw(st.sampled_from([k for k in (1, 2, 3) if channels % k == 0 and (out or 6) % k == 0]))
    padding = draw(st.sampled_from(["same", "valid", "number"]))
    return nn.Conv2d(
        channels,
        out or draw(st.sampled_from([2, 4, 6] if groups == 2 else [3, 6] if groups == 3 else [2, 3, 6])),
        pair(draw, 1, 3),
        stride=1 if padding == "same" else pair(draw, 1, 3),
        padding=pair(draw, 0, 2) if padding == "number" else padding,
        dilation=pair(draw, 1, 2),
        groups=groups,
        bias=draw(st.booleans()),
        padding_mode=draw(st.sampled_from(["zeros", "reflect", "replicate", "circular"])),
    )


def same_size(draw, channels):
    kernel = draw(st.sampled_from([1, 3, (3, 1)]))
    return nn.Conv2d(channels, channels, kernel, padding="same", bias=draw(st.booleans()))


def image_layer(draw, shape):
    channels = shape[0]
    kinds = ["conv", "conv", "norm", "layer norm", "standardised", "pool", "residual", "twice", "other"]
    kind = draw(st.sampled_from(kinds))
    if kind == "conv":
        return convolution(draw, channels)
    if kind == "standardised":
        return StandardisedConv2d(channels, 4, 3, draw(st.integers(1, 2)), 1, bias=draw(st.booleans()))
    if kind == "norm":
        return nn.GroupNorm(draw(st.sampled_from([k for k in (1, 2, 3) if channels % k == 0])), channels)
    if kind == "layer norm":
        return nn.LayerNorm(shape[draw(st.integers(0, 2)) :], bias=draw(st.booleans()))
    if kind == "pool":
        return draw(st.sampled_from([nn.MaxPool2d(2, 1), nn.AvgPool2d(2), nn.AdaptiveAvgPool2d((3, 2))]))
    if kind == "residual":
        return Residual(nn.Sequential(same_size(draw, channels), activations(draw), same_size(draw, channels)))
    if kind == "twice":
        return Twice(same_size(draw, channels))
    return draw(
        st.sampled_from(
            [nn.PReLU(channels), nn.ConvTranspose2d(channels, 2, 2), nn.InstanceNorm2d(channels, affine=True)]
        )
    )


def finish(draw, model):
    """Random weights, some of them frozen."""
    for module in model.modules():
        for name, p in module.named_parameters(recurse=False):
            nn.init.normal_(p, 0.3, 0.5)
            freeze = draw(st.sampled_from(["no", "no", "no", "all", "bias", "weight"]))
            p.requires_grad_(freeze == "no" or (freeze != "all" and name != freeze))
    if not any(p.requires_grad for p in model.parameters()):
        next(model.parameters()).requires_grad_(True)
    return Spare(model) if draw(st.booleans()) else model


LOSSES = {
    "mean": F.cross_entropy,
    "none": nn.CrossEntropyLoss(reduction="none"),
    "sum": nn.CrossEntropyLoss(reduction="sum"),
    "smooth": nn.CrossEntropyLoss(label_smoothing=0.1),
    "weighted": lambda o, t: F.cross_entropy(o, t, weight=torch.tensor([1.0, 2.0, 0.5]).to(o)),
    "squares": F.mse_loss,
    "squares of each": nn.MSELoss(reduction="none"),
}


@st.composite
def settings_of(draw, model, x):
    """The rest of a case: loss, targets, clip, chunk, dtype."""
    name = draw(st.sampled_from(sorted(LOSSES)))
    m = x.shape[0]
    y = torch.randn(m, 3) if name.startswith("squares") else torch.randint(0, 3, (m,))
    dtype = draw(st.sampled_from([torch.float64, torch.float64, torch.float32]))
    clip = Clip(
        draw(st.sampled_from([0.02, 1.0, 1e6])), draw(st.sampled_from([1, 4, 100])), draw(st.sampled_from([1, 2]))
    )
    x, y = (t.to(dtype) if t.is_floating_point() else t for t in (x, y))
    return model.to(dtype), LOSSES[name], x, y, clip, draw(st.integers(1, m + 1)), dtype


@st.composite
def image_cases(draw):
    torch.manual_seed(draw(st.integers(0, 1000)))
    shape = (draw(st.sampled_from([1, 2, 3, 6])), draw(st.integers(4, 8)), draw(st.integers(4, 8)))
    m, dummy = draw(st.integers(1, 4)), torch.zeros(1, *shape)
    layers = []
    for i in range(draw(st.integers(1, 4))):
        layer = image_layer(draw, dummy.shape[1:])
        try:
            with torch.no_grad():
                dummy = layer(dummy)
        except (RuntimeError, ValueError):  # too small for this layer by now
            continue
        layers.append(layer)
        if i == 0 or draw(st.booleans()):
            layers.append(nn.Tanh() if i == 0 else activations(draw))
    model = finish(draw, nn.Sequential(*layers, nn.Flatten(), nn.Linear(dummy.numel(), 3)))
    x = torch.randn(m, *shape)
    # Not with GroupNorm: where its input needs no gradient, torch 2.13 itself dies of this layout on a CPU.
    if not any(isinstance(module, nn.GroupNorm) for module in model.modules()) and draw(st.booleans()):
        x = x.to(memory_format=torch.channels_last)
    return draw(settings_of(model, x))


@st.composite
def sequence_cases(draw):
    torch.manual_seed(draw(st.integers(0, 1000)))
    m, time, width = draw(st.integers(1, 4)), draw(st.integers(1, 4)), draw(st.integers(2, 5))
    words = draw(st.booleans())
    x = torch.randint(0, 6, (m, time)) if words else torch.randn(m, time, width)
    layers = [nn.Embedding(6, width, padding_idx=draw(st.sampled_from([None, 0, -1])))] if words else []
    before = None
    for _ in range(draw(st.integers(1, 4))):
        kinds = ["linear", "tied", "again", "norm", "residual", "tanh", "attention", "conv", "instance norm"]
        kind = draw(st.sampled_from(kinds))
        if kind == "norm":
            layers.append(nn.LayerNorm(width))
        elif kind == "tanh":
            layers.append(nn.Tanh())
        elif kind == "attention":
            layers.append(SelfAttention(width, draw(st.booleans())))
        elif kind == "conv":
            layers.append(OverTime(nn.Conv1d(width, width, 3, padding=draw(st.sampled_from([1, "same"])))))
        elif kind == "instance norm" and time > 1:
            layers.append(OverTime(nn.InstanceNorm1d(width, affine=True)))
        elif kind == "residual":
            layers.append(Residual(nn.Sequential(nn.Linear(width, width), activations(draw))))
        elif kind == "again" and before is not None:
            layers.append(before)
        else:
            layer = nn.Linear(width, width, bias=draw(st.booleans()))
            if kind == "tied" and before is not None:
                layer.weight = before.weight
            layers.append(layer)
            before = layer
    if draw(st.booleans()):
        layers += [MeanOverTime(), nn.Linear(width, 3)]
    else:
        layers += [nn.Flatten(), nn.Linear(width * time, 3)]
    return draw(settings_of(finish(draw, nn.Sequential(*layers)), x))


def wanted_of(model, loss, x, y, clip, copies=1):
    """What the oracle says, where rounding lets anybody say it: not for a gradient that vanishes but for rounding."""
    wanted = oracle(model, loss, x, y, clip, copies)
    assume((oracle(model, loss, x, y, clip, copies, wide=False) - wanted).norm() <= 2e-5 * wanted.norm())
    return wanted


def hold(case):
    model, loss, x, y, clip, chunk, dtype = case
    wanted = wanted_of(model, loss, x, y, clip)
    before = {name: (p, p.clone()) for name, p in model.named_parameters()}
    for engine in ("vmap", "loop"):
        found = clipped_sum(model, loss, (x, y), clip, engine=engine, chunk=chunk)
        assert_right(found, wanted, clip, x.shape[0], dtype)
    run, flat, found = Engine(model, loss, (x, y)), FlatParameters(model), 0
    for a, b in zip(x.split(chunk), y.split(chunk), strict=True):
        found = found + run(flat.views(flat.read()), Batch(a, b, torch.ones(len(a), dtype=torch.float64)), clip).total
    assert_right(found, wanted, clip, x.shape[0], dtype)
    assert run.name == "hooks", run.reason
    now = dict(model.named_parameters())
    assert all(now[name] is p and torch.equal(p, value) for name, (p, value) in before.items())
    assert len(now) == len(before)


@settings(max_examples=cases(12))
@given(image_cases())
def test_every_engine_is_right_on_random_networks_for_images(case):
    hold(case)


@settings(max_examples=cases(9))
@given(sequence_cases())
def test_every_engine_is_right_on_random_networks_for_sequences(case):
    hold(case)


@settings(max_examples=cases(6))
@given(image_cases(), st.integers(2, 3), st.integers(0, 3))
def test_copies_are_averaged_before_clipping_and_padding_adds_nothing(case, copies, padding):
    model, loss, x, y, clip, _, dtype = case
    m = x.shape[0]
    x = x.repeat_interleave(copies, 0)
    x = x + 0.3 * torch.randn_like(x)
    y = y.repeat_interleave(copies, 0)
    weights = torch.ones(m, dtype=torch.float64)
    wanted = wanted_of(model, loss, x, y, clip, copies)
    if padding:
        x, y = (torch.cat([t, t[:copies].repeat(padding, *[1] * (t.dim() - 1))]) for t in (x, y))
        weights = torch.cat([weights, torch.zeros(padding, dtype=torch.float64)])
    flat = FlatParameters(model)
    for engine in ENGINES:
        found = sum_of_chunk(engine, model, loss, flat.views(flat.read()), Batch(x, y, weights, copies), clip)
        assert_right(found.total, wanted, clip, m, dtype)
        assert found.norms.shape == found.truncated.shape == (m,)


@pytest.mark.parametrize("engine", ALL)
def test_gradients_are_taken_at_the_values_given_not_at_those_of_the_model(engine):
    """A trainer keeps its state apart from the model and writes it back at the end."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), Swish(4), nn.Linear(4, 2)).double()
    other = copy.deepcopy(model)
    for p in other.parameters():
        nn.init.normal_(p)
    x, y = torch.randn(3, 3).double(), torch.randn(3, 2).double()
    if engine == "auto":
        engine = choose(model, F.mse_loss, x, y)
        assert engine == "hooks"
    values = {name: p.detach() for name, p in other.named_parameters()}
    found = sum_of_chunk(engine, model, F.mse_loss, values, Batch(x, y, torch.ones(3)), NO_CLIP).total
    assert_right(found, oracle(other, F.mse_loss, x, y, NO_CLIP), NO_CLIP, 0)


# Models that are hard on an engine. "auto" is right on each, and the engine it takes is the one written here.


class Swish(nn.Module):
    """Not linear in its parameter."""

    def __init__(self, width):
        super().__init__()
        self.beta = nn.Parameter(torch.ones(width))

    def forward(self, x):
        return x * torch.sigmoid(self.beta * x)


class Net(nn.Module):
    """4 -> 4 -> 3 with something in between."""

    def __init__(self, between=None):
        super().__init__()
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 3)
        self.between = between or nn.Tanh()

    def forward(self, x):
        return self.last(self.between(self.first(x)))


class Centred(Net):
    def forward(self, x):
        h = self.first(x)
        return self.last(torch.tanh(h - h.mean(0)))


class Shifted(Net):
    def forward(self, x):
        h = self.first(x)
        return self.last(h - h.mean(0))


class BatchStatistics(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.last = nn.Conv2d(1, 2, 2), nn.Linear(2, 3)

    def forward(self, x):
        h = F.batch_norm(self.conv(x.reshape(-1, 1, 2, 2).repeat(1, 1, 2, 2)), None, None, training=True)
        return self.last(torch.tanh(h).mean((2, 3)))


class BehindItsBack(Net):
    def forward(self, x):
        return self.last(F.linear(self.first(x), self.first.weight))


class ZeroHead(BehindItsBack):
    """While the last layer is zero, nothing is seen of it."""

    def __init__(self):
        super().__init__()
        nn.init.zeros_(self.last.weight)


class TwoNames(nn.Module):
    """One parameter under two names in one module."""

    def __init__(self):
        super().__init__()
        self.one = self.other = nn.Parameter(torch.randn(4, 4))

    def forward(self, x):
        return torch.tanh(x @ self.one) @ self.other


class OnlyBehindItsBack(Net):
    def forward(self, x):
        return self.last(torch.tanh(F.linear(x, self.first.weight, self.first.bias)))


class Cosine(nn.Linear):
    def forward(self, x):
        return F.linear(x, torch.tanh(self.weight), self.bias) ** 2


class InPlace(nn.Module):
    """Changes its input; at its first value nothing is seen of that."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(4))

    def forward(self, x):
        return x.mul_(self.scale)


class Named(nn.Module):
    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.randn(4, 4))

    def forward(self, x, times=1.0):
        return times * (x @ self.w)


class OptionByName(Net):
    def __init__(self):
        super().__init__(Named())

    def forward(self, x):
        return self.last(self.between(self.first(x), times=2.0))


class InputByName(Net):
    def forward(self, x):
        return self.last(input=self.first(x))


class OwnAndChild(Net):
    """Owns a parameter and layers that are trained as well."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.randn(4))

    def forward(self, x):
        return self.last(torch.exp(self.scale) * self.first(x))


class LowRank(nn.Module):
    """Trains a correction to a frozen layer."""

    def __init__(self):
        super().__init__()
        self.base = nn.Linear(4, 4).requires_grad_(False)
        self.a, self.b = nn.Parameter(torch.randn(4, 2)), nn.Parameter(torch.zeros(2, 4))

    def forward(self, x):
        return self.base(x) + x @ self.a @ self.b


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.attention, self.last = nn.MultiheadAttention(4, 2, batch_first=True), nn.Linear(4, 3)

    def forward(self, x):
        x = x.reshape(-1, 2, 2).repeat(1, 1, 2)
        return self.last(self.attention(x, x, x)[0].mean(1))


class Encoder(Attention):
    def __init__(self):
        super().__init__()
        self.attention = nn.TransformerEncoderLayer(4, 2, 6, dropout=0.0, batch_first=True)

    def forward(self, x):
        return self.last(self.attention(x.reshape(-1, 2, 2).repeat(1, 1, 2)).mean(1))


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.recurrent, self.last = nn.LSTM(2, 4, batch_first=True), nn.Linear(4, 3)

    def forward(self, x):
        return self.last(self.recurrent(x.reshape(-1, 2, 2))[0][:, -1])


class Checkpointed(Net):
    def forward(self, x):
        return self.last(checkpoint(self.between, self.first(x), use_reentrant=False))


class LooksAtTheBatch(Net):
    def forward(self, x):
        if x.abs().max() > 100:  # never in a probe
            x = x / x.abs().max()
        return super().forward(x)


class Positions(Net):
    def __init__(self):
        super().__init__()
        self.where = nn.Embedding(4, 4)

    def forward(self, x):
        return self.last(torch.tanh(self.first(x) + self.where(torch.arange(4)).sum(1)))


class RowsOfASample(nn.Module):
    """Four rows for every sample, next to each other."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(1, 4), nn.Linear(4, 3)

    def forward(self, x):
        rows = torch.tanh(self.first(x.reshape(-1, 1)))
        return self.last(rows).reshape(-1, 4, 3).mean(1)


class RowsOfAPosition(RowsOfASample):
    """Four rows for every sample, far from each other."""

    def forward(self, x):
        rows = torch.tanh(self.first(x.T.reshape(-1, 1)))
        return self.last(rows).reshape(4, -1, 3).mean(0)


class PositionsFirst(RowsOfASample):
    def forward(self, x):
        return self.last(torch.tanh(self.first(x.T[:, :, None]))).mean(0)


class NoGradient(Net):
    def forward(self, x):
        with torch.no_grad():
            h = self.first(x)
        return self.last(h + self.first(x).detach() + 0.1 * self.first(x))


class AfterUse(Net):
    """Changes the input of a layer in place, after it was used."""

    def forward(self, x):
        h = x + 0
        out = self.first(h)
        h.add_(1.0)
        return self.last(out + h)


class InPlaceOnViews(Net):
    """What a linear layer makes of three dimensions is a view, and so are slices."""

    def forward(self, x):
        h = F.elu(self.first(x[:, None, :]), inplace=True)
        k = self.first(h)
        k.view(-1, 2).mul_(3.0)
        k[:, :, 0] = 1.0
        return F.elu(self.last(k), inplace=True)[:, 0]


class Outside(Net):
    """Something that is no parameter requires a gradient."""

    def __init__(self):
        super().__init__()
        self.factor = torch.ones(4, dtype=torch.float64, requires_grad=True)

    def forward(self, x):
        return super().forward(x * self.factor.to(x.dtype))


def with_hook(register, hook):
    def make():
        model = Net()
        getattr(model.first, register)(hook)
        return model

    return make


def weight_norm_of_old():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return Net(nn.utils.weight_norm(nn.Linear(4, 4)))


def registered_twice():
    layer = nn.Linear(4, 4)
    return nn.Sequential(layer, nn.Tanh(), layer, nn.ReLU(inplace=True), nn.Linear(4, 3))


def tied_with_embedding():
    words, out = nn.Embedding(5, 4), nn.Linear(4, 5, bias=False)
    out.weight = words.weight
    return nn.Sequential(words, nn.Tanh(), out, MeanOverTime(), nn.Linear(5, 3))


HARD = {
    "plain": (Net, "hooks"),
    "centred": (Centred, "vmap"),
    "shifted": (Shifted, "vmap"),
    "zero head": (ZeroHead, "vmap"),
    "batch statistics": (BatchStatistics, "vmap"),
    "behind its back": (BehindItsBack, "vmap"),
    "only behind its back": (OnlyBehindItsBack, "vmap"),
    "subclass": (lambda: Net(Cosine(4, 4)), "hooks"),
    "parametrized": (lambda: Net(nn.utils.parametrizations.weight_norm(nn.Linear(4, 4))), "vmap"),
    "old weight norm": (weight_norm_of_old, "vmap"),
    "hook that looks": (with_hook("register_forward_hook", lambda m, x, out: None), "hooks"),
    "hook that changes": (with_hook("register_forward_hook", lambda m, x, out: 2 * torch.sin(out)), "hooks"),
    "hook before": (with_hook("register_forward_pre_hook", lambda m, x: (2 * torch.sin(x[0]),)), "hooks"),
    "in place": (lambda: Net(InPlace()), "vmap"),
    "option by name": (OptionByName, "vmap"),
    "input by name": (InputByName, "vmap"),
    "own and child": (OwnAndChild, "vmap"),
    "low rank": (lambda: Net(LowRank()), "hooks"),
    "swish": (lambda: Net(Swish(4)), "hooks"),
    "attention": (Attention, "hooks"),
    "encoder": (Encoder, "hooks"),
    "recurrent": (Recurrent, "loop"),
    "checkpointed": (lambda: Checkpointed(nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))), "loop"),
    "looks at the batch": (LooksAtTheBatch, "loop"),
    "positions": (Positions, "vmap"),
    "rows of a sample": (RowsOfASample, "hooks"),
    "rows of a position": (RowsOfAPosition, "vmap"),
    "positions first": (PositionsFirst, "vmap"),
    "registered twice": (registered_twice, "hooks"),
    "two names": (lambda: Net(TwoNames()), "hooks"),
    "without gradient": (NoGradient, "hooks"),
    "in place on views": (InPlaceOnViews, "hooks"),
    "after use": (AfterUse, None),
    "outside": (Outside, "vmap"),
    "eval": (lambda: nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5), nn.Linear(4, 3)).eval(), "hooks"),
}


@pytest.mark.parametrize("name", HARD)
def test_auto_is_right_where_it_is_hard(name):
    make, engine = HARD[name]
    torch.manual_seed(3)
    model = make().double()
    x, y = torch.randn(5, 4).double(), torch.randint(0, 3, (5,))
    if engine is None:  # autograd refuses it as well
        with pytest.raises(RuntimeError, match="inplace"):
            oracle(model, F.cross_entropy, x, y, NO_CLIP)
        with pytest.raises(ModelMixError, match="inplace"):
            clipped_sum(model, F.cross_entropy, (x, y), NO_CLIP)
        return
    assert choose(model, F.cross_entropy, x, y) == engine
    check(model, F.cross_entropy, x, y)
    check(model, F.cross_entropy, x, y, Clip(0.05, 4), chunk=2)
    check(model, F.cross_entropy, x[:1], y[:1])  # choosing by one sample finds the same
    if engine == "hooks":
        check(model, F.cross_entropy, x, y, engine="hooks", chunk=1)
    else:
        with pytest.raises(UnprovedError, match="cannot show that samples stay apart"):
            clipped_sum(model, F.cross_entropy, (x, y), NO_CLIP, engine="hooks")


def test_what_is_computed_again_is_computed_at_the_same_values():
    """A checkpointed block runs a second time in the backward pass, when the model may have its own weights back."""
    torch.manual_seed(0)
    model = Checkpointed(nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))).double()
    x, y, flat = torch.randn(5, 4).double(), torch.randint(0, 3, (5,)), FlatParameters(model)
    other = flat.read() + torch.randn(flat.size, dtype=torch.float64)
    engine = Engine(model, F.cross_entropy, (x, y))
    one = torch.ones(5, dtype=torch.float64)
    found = engine(flat.views(other), Batch(x, y, one), NO_CLIP).total
    parts = engine.gradients(flat.views(other), Batch(x, y))
    own = list(model.parameters())
    flat.write(other)
    right = oracle(model, F.cross_entropy, x, y, NO_CLIP)
    torch.testing.assert_close(found, right)
    for part in (slice(0, 11), slice(11, flat.size)):
        torch.testing.assert_close(columns(parts, part).sum(0), right[part])
    assert all(a is b for a, b in zip(own, model.parameters(), strict=True))


def test_samples_that_are_all_alike_do_not_hide_that_they_meet():
    torch.manual_seed(0)
    x, y = torch.randn(1, 4).expand(5, 4), torch.zeros(5, dtype=torch.long)
    assert choose(Shifted(), F.cross_entropy, x, y) == "vmap"
    assert choose(Shifted(), F.cross_entropy, x[:1], y[:1]) == "vmap"


def test_inputs_may_be_tuples_and_dicts():
    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b, self.c = nn.Linear(4, 3), nn.Linear(2, 3), nn.Bilinear(3, 3, 3)

        def forward(self, u, v):
            a, b = torch.tanh(self.a(u)), self.b(v)
            return {"score": a + b, "both": (self.c(a, b),)}

    class One(Two):
        def forward(self, u, v):
            return {"score": self.a(u) + self.b(v), "both": (self.a(u),)}

    def loss(outputs, targets):
        first, second = targets
        return F.cross_entropy(outputs["score"] + outputs["both"][0], first) + second["weight"].sum()

    torch.manual_seed(0)
    u, v = torch.randn(5, 4).double(), torch.randn(5, 2).double()
    y = (torch.randint(0, 3, (5,)), {"weight": torch.randn(5)})
    for model, engine in ((Two().double(), "vmap"), (One().double(), "hooks")):
        for x in ((u, v), {"v": v, "u": u}):
            assert choose(model, loss, x, y) == engine
            check(model, loss, x, y, chunk=2)
            check(model, loss, x, y, engine="vmap")
            check(model, loss, x, y, engine="loop", chunk=3)


@pytest.mark.parametrize("index", [torch.int64, torch.int32])
@pytest.mark.parametrize("kind", ["plain", "by frequency", "sparse", "tied", "bag"])
def test_embeddings(kind, index):
    torch.manual_seed(0)
    x, y = torch.randint(0, 5, (4, 6)).to(index), torch.randint(0, 3, (4,))
    sum_up = [nn.Tanh(), MeanOverTime(), nn.Linear(4, 3)]
    model = {
        "plain": lambda: nn.Sequential(nn.Embedding(5, 4, padding_idx=1), *sum_up),
        "by frequency": lambda: nn.Sequential(nn.Embedding(5, 4, scale_grad_by_freq=True), *sum_up),
        "sparse": lambda: nn.Sequential(nn.Embedding(5, 4, sparse=True), *sum_up),
        "tied": tied_with_embedding,
        "bag": lambda: nn.Sequential(nn.EmbeddingBag(5, 4), nn.Linear(4, 3)),
    }[kind]().double()
    found = clipped_sum(model, F.cross_entropy, (x, y), NO_CLIP)
    if kind == "sparse":
        model[0].sparse = False
    assert_right(found, oracle(model, F.cross_entropy, x, y, NO_CLIP), NO_CLIP, 0)


def test_a_model_that_changes_its_own_weights_is_refused():
    model = nn.Sequential(nn.Embedding(5, 4, max_norm=0.1), nn.Flatten(), nn.Linear(8, 3)).double()
    x, y = torch.randint(0, 5, (4, 2)), torch.randint(0, 3, (4,))
    with pytest.raises(ModelMixError, match="changes its trained parameters"):
        clipped_sum(model, F.cross_entropy, (x, y), NO_CLIP)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (PositionsFirst, "samples, samples first"),
        (AfterUse, "changed in place"),
        (OptionByName, "one tensor in and one out"),
        (InputByName, "one tensor in and one out"),
        (OwnAndChild, "beside those of the layers within it"),
        (weight_norm_of_old, "runs before it"),
    ],
)
def test_hooks_refuse_what_they_can_see_to_be_wrong_even_unchecked(make, message):
    torch.manual_seed(0)
    x, y, one = torch.randn(3, 4), torch.randint(0, 3, (3,)), torch.ones(3, dtype=torch.float64)
    model = make()
    values = {name: p.detach() for name, p in model.named_parameters()}
    with pytest.raises(ModelMixError, match=message):
        sum_of_chunk("hooks", model, F.cross_entropy, values, Batch(x, y, one), NO_CLIP)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("engine", ALL)
def test_half_precision(engine, dtype):
    """The model rounds; the sum does not."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(1, 4, 3), nn.GroupNorm(2, 4), nn.Tanh(), nn.Flatten(), nn.Linear(64, 3)).to(dtype)
    x, y, clip = torch.randn(4, 1, 6, 6, dtype=dtype), torch.randint(0, 3, (4,)), Clip(1e-3, 4)
    found = clipped_sum(model, F.cross_entropy, (x, y), clip, engine=engine)
    wanted = oracle(model, F.cross_entropy, x, y, clip)
    assert found.dtype == torch.float64
    assert (found - wanted).norm() <= 0.05 * wanted.norm()
    for i in range(4):
        single = clipped_sum(model, F.cross_entropy, (x[i : i + 1], y[i : i + 1]), clip, engine=engine, chunk=1)
        assert single.norm() <= clip.c
        assert single.abs().max() <= clip.c / 2


def test_mixed_precision():
    torch.manual_seed(0)

    class Mixed(Net):
        def forward(self, x):
            return self.last(torch.tanh(self.first(x)).to(self.last.weight.dtype))

    model = Mixed().double()
    model.first.float()
    x, y = torch.randn(4, 4), torch.randint(0, 3, (4,))
    for engine in ALL:
        found = clipped_sum(model, F.cross_entropy, (x, y), NO_CLIP, engine=engine)
        assert_right(found, oracle(model, F.cross_entropy, x, y, NO_CLIP), NO_CLIP, 0, torch.float32)


LAYOUTS = {
    "channels last": lambda x: x.to(memory_format=torch.channels_last),
    "permuted": lambda x: x.permute(0, 2, 3, 1).contiguous().permute(0, 3, 1, 2),
    "a slice": lambda x: torch.cat([x, x], 3)[:, :, :, ::2],
    "expanded": lambda x: x[:, :, :1].expand(-1, -1, 8, -1),
    "requires a gradient": lambda x: x.clone().requires_grad_(),
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("padding", [0, (1, 2), "same"])
def test_how_an_image_lies_in_memory_does_not_matter(layout, padding):
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(2, 4, 3, padding=padding, groups=2), nn.ReLU(inplace=True), nn.Conv2d(4, 2, 2, 2), nn.Flatten()
    )
    model = nn.Sequential(model, nn.LazyLinear(3)).double()
    x, y = LAYOUTS[layout](torch.randn(4, 2, 8, 8).double()), torch.randint(0, 3, (4,))
    with torch.no_grad():
        model(x)
    for engine in ALL:
        check(model, F.cross_entropy, x, y, engine=engine)


def test_the_default_network_takes_the_fast_engine():
    torch.manual_seed(0)
    pixels, y = torch.randint(0, 256, (4, 1, 28, 28), dtype=torch.uint8), torch.randint(0, 10, (4,))
    assert choose(Pixels(cnn(1, 28, 10)), F.cross_entropy, pixels, y) == "hooks"
    assert choose(cnn(1, 28, 10), F.cross_entropy, pixels / 255.0, y) == "hooks"


@pytest.mark.parametrize("engine", ALL)
def test_an_empty_batch_sums_to_zero(engine):
    model = Net()
    found = clipped_sum(
        model, F.cross_entropy, (torch.zeros(0, 4), torch.zeros(0, dtype=torch.long)), NO_CLIP, engine=engine
    )
    assert found.shape == (35,)
    assert not found.any()


def test_dropout_draws_for_every_sample_and_does_not_upset_the_choice():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 200), nn.Dropout(0.5), nn.Linear(200, 3))
    x, y = torch.ones(2, 4), torch.zeros(2, dtype=torch.long)
    assert choose(model, F.cross_entropy, x, y) == "hooks"
    values = {name: p.detach() for name, p in model.named_parameters()}
    for engine in ENGINES:
        g = ENGINES[engine](model, F.cross_entropy, values, Batch(x, y)).gradients["2.weight"].dense()
        assert not torch.equal(g[0], g[1])
        assert bool((g == 0).any())


# What is left behind.


class Breaks(nn.Module):
    def forward(self, x):
        raise ZeroDivisionError


@pytest.mark.parametrize("engine", ENGINES)
def test_a_failure_leaves_the_model_as_it_was(engine):
    model = Net(Breaks())
    before = dict(model.named_parameters())
    values = {name: 2 * p.detach() for name, p in before.items()}
    with pytest.raises((ZeroDivisionError, UnprovedError)):  # a trace says that it could not be made
        ENGINES[engine](model, F.cross_entropy, values, Batch(torch.randn(2, 4), torch.zeros(2, dtype=torch.long)))
    assert all(not module._forward_hooks for module in model.modules())
    assert all(dict(model.named_parameters())[name] is p for name, p in before.items())
    with pytest.raises(ModelMixError, match="fails on a batch of one sample: ZeroDivisionError"):
        clipped_sum(model, F.cross_entropy, (torch.randn(2, 4), torch.zeros(2, dtype=torch.long)), NO_CLIP)


@pytest.mark.parametrize("engine", ENGINES)
def test_memory_is_given_back_at_once(engine):
    model, x, y = Net(), torch.randn(3, 4), torch.zeros(3, dtype=torch.long)
    values = {name: p.detach() for name, p in model.named_parameters()}

    def tensors():
        return sum(issubclass(type(o), torch.Tensor) for o in gc.get_objects())

    run = Engine(model, F.cross_entropy, (x, y), name=engine)
    one = torch.ones(3, dtype=torch.float64)
    run(values, Batch(x, y, one), NO_CLIP)
    gc.collect()
    gc.disable()
    try:
        before = tensors()
        for _ in range(3):
            run(values, Batch(x, y, one), NO_CLIP)
        assert tensors() == before
    finally:
        gc.enable()
    assert all(p.grad is None for p in model.parameters())
    assert all(not module._forward_hooks for module in model.modules())


# What is refused.


def test_wrong_calls_are_refused():
    model, x, y = Net(), torch.randn(3, 4), torch.zeros(3, dtype=torch.long)
    values = {name: p.detach() for name, p in model.named_parameters()}
    for chunk in (0, -1, 1.5):
        with pytest.raises(ModelMixError, match="chunk"):
            clipped_sum(model, F.cross_entropy, (x, y), NO_CLIP, chunk=chunk)
    with pytest.raises(ModelMixError, match="engine = 'fast'"):
        clipped_sum(model, F.cross_entropy, (x, y), NO_CLIP, engine="fast")
    with pytest.raises(ModelMixError, match="same number of samples"):
        clipped_sum(model, F.cross_entropy, (x, y[:2]), NO_CLIP)
    with pytest.raises(ModelMixError, match="samples first"):
        clipped_sum(model, F.cross_entropy, (x, 0), NO_CLIP)
    with pytest.raises(ModelMixError, match="2 samples of 2 rows"):
        sum_of_chunk("loop", model, F.cross_entropy, values, Batch(x, y, torch.ones(2), 2), NO_CLIP)
    with pytest.raises(ModelMixError, match="does not depend"):
        clipped_sum(model, lambda o, t: t.sum() * 1.0, (x, y), NO_CLIP, engine="loop")


def test_a_model_that_cannot_be_copied_is_run_one_sample_at_a_time():
    class Alone(Net):
        def __deepcopy__(self, memo):
            raise TypeError

    torch.manual_seed(0)
    model, x, y = Alone(), torch.randn(3, 4), torch.zeros(3, dtype=torch.long)
    assert choose(model, F.cross_entropy, x, y) == "vmap"


def test_parameters_that_share_memory_without_being_one_are_refused():
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    model[1].weight = nn.Parameter(model[0].weight.data)
    with pytest.raises(ModelMixError, match="shares memory"):
        FlatParameters(model)
    model[1].weight.requires_grad_(False)  # it would not stay as it is
    with pytest.raises(ModelMixError, match="shares memory"):
        FlatParameters(model)
    model[0].weight.requires_grad_(False)
    assert FlatParameters(model).names == ["0.bias", "1.bias"]
    flat = torch.zeros(18)
    model[0].weight, model[1].weight = nn.Parameter(flat[:9].view(3, 3)), nn.Parameter(flat[9:].view(3, 3))
    assert FlatParameters(model).size == 24
    assert count_rows(torch.zeros(2, 3)) == 2

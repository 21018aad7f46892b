"""Random programs of ATen operations, some of which mix samples: the checker may never call a mixing one proved."""

from __future__ import annotations

import random

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from depth import cases
from torch.fx.experimental.proxy_tensor import make_fx

from modelmix.gradients import trace
from modelmix.gradients.dataflow import PerSample, prove

T, D = 4, 6

# Each takes and returns samples x T x D.
APART = {
    "relu": F.relu,
    "sin": torch.sin,
    "scale": lambda x: 1.7 * x + 0.1,
    "softmax": lambda x: x.softmax(-1),
    "softmax over time": lambda x: x.softmax(1),
    "layer norm": lambda x: F.layer_norm(x, (D,)),
    "group norm": lambda x: F.group_norm(x, 2),
    "instance norm": lambda x: F.instance_norm(x),
    "attention": lambda x: (x @ x.transpose(1, 2)).softmax(-1) @ x,
    "fused attention": lambda x: F.scaled_dot_product_attention(x[:, None], x[:, None], x[:, None])[:, 0],
    "mean over time": lambda x: x - x.mean(1, keepdim=True),
    "sum of a sample": lambda x: x + x.sum((1, 2))[:, None, None],
    "top of a sample": lambda x: x + x.flatten(1).max(1)[0][:, None, None],
    "running sum": lambda x: x.cumsum(1),
    "flip": lambda x: x.flip(1),
    "roll": lambda x: x.roll(1, 2),
    "sort": lambda x: x.sort(2)[0],
    "swap": lambda x: x.transpose(1, 2).reshape(-1, T, D),
    "flat rows": lambda x: torch.tanh(x.reshape(-1, D)).reshape(-1, T, D),
    "time first and back": lambda x: torch.tanh(x.transpose(0, 1)).transpose(0, 1),
    "all time first": lambda x: x.permute(1, 2, 0).sin().permute(2, 0, 1),
    "cat": lambda x: torch.cat([x[:, 1:], x[:, :1]], 1),
    "stack": lambda x: torch.stack([x[:, i] for i in range(T)], 1),
    "pad": lambda x: F.pad(x, (1, 0))[..., :D],
    "mask": lambda x: x.masked_fill(torch.ones(T, D, dtype=torch.bool).triu(1), 0.3),
    "where": lambda x: torch.where(x > 0, x, 0.1 * x),
    "gather": lambda x: x.gather(1, x.argsort(1)),
    "public index": lambda x: x[:, torch.tensor([2, 0, 1, 3])],
    "in place": lambda x: x.clone().mul_(1.1).relu_(),
    "written slice": lambda x: _write(x, lambda out: out[:, 1].copy_(x[:, 0])),
    "conv": lambda x: F.conv1d(x, torch.full((T, T, 3), 0.2), padding=1),
    "pool": lambda x: F.avg_pool1d(x, 3, 1, 1),
    "public matrix": lambda x: x @ torch.linspace(-1, 1, D * D).reshape(D, D),
    "squeeze": lambda x: x[:, None].squeeze().sin(),
    "expand": lambda x: x + x[:, :1].expand(-1, T, -1),
}
MEETS = {
    "mean": lambda x: x - x.mean(0),
    "mean of all": lambda x: x * x.mean(),
    "any": lambda x: torch.where((x > 1.5).any(), -x, x),
    "flip batch": lambda x: x + x.flip(0),
    "roll batch": lambda x: x + x.roll(1, 0),
    "roll flat": lambda x: x.roll(1),
    "cumsum batch": lambda x: x.cumsum(0),
    "softmax batch": lambda x: x.softmax(0),
    "sort batch": lambda x: x.sort(0)[0],
    "first": lambda x: x + x[0],
    "shift": lambda x: torch.cat([x[1:], x[:1]]),
    "wrong view": lambda x: x.transpose(0, 1).reshape(x.shape),
    "wrong permute": lambda x: x.permute(1, 0, 2).flatten(0, 1).cumsum(-1).reshape(x.shape),
    "gram": lambda x: x + (x.flatten(1) @ x.flatten(1).t()).sum(1)[:, None, None],
    "pairs": lambda x: x + (x[:, None] - x[None]).abs().sum((1, 2, 3))[:, None, None],
    "broadcast": lambda x: x + x.sum((1, 2))[None, :, None].mean(1, keepdim=True),
    "by size": lambda x: x / x.shape[0],
    "place": lambda x: x + torch.arange(x.shape[0])[:, None, None],
    "index batch": lambda x: x + x.index_select(0, torch.zeros(x.shape[0], dtype=torch.long)),
    "einsum": lambda x: torch.einsum("btd,ctd->bc", x, x).sum(1)[:, None, None] * x,
    "norm batch": lambda x: F.batch_norm(x, None, None, training=True),
    "write batch": lambda x: _write(x, lambda out: out[:1].add_(x.sum(0, keepdim=True))),
    "conv batch": lambda x: F.conv1d(x[:, 0].t()[None], torch.ones(D, 1, 3), padding=1, groups=D)[0].t()[:, None] + x,
    "pool batch": lambda x: F.max_pool1d(x.permute(1, 2, 0), 3, 1, 1).permute(2, 0, 1),
    "sorted draws": lambda x: x + torch.rand(x.shape[0]).sort()[0][:, None, None],
}  # fmt: skip


def _write(x, change):
    out = x.clone()
    change(out)
    return out


def run(steps, x, y):
    """A program's outputs and how the loss of every row changes with that row's input."""
    with torch.enable_grad():
        x = x.detach().requires_grad_()
        h = x * 1.0
        for step in steps:
            h = step(h)
        (g,) = torch.autograd.grad(h, x, y, allow_unused=True)
    return [h.detach(), torch.zeros_like(x) if g is None else g]


def is_proved(steps, x, y):
    symbol, _, fake = trace._fake([x, y], 0, 1, 7)
    try:
        with torch.no_grad():
            module = make_fx(lambda x, y: run(steps, x, y), tracing_mode="symbolic", _allow_non_fake_inputs=True)(*fake)
        trace._normalise(module.graph)
        values = prove(module.graph, symbol, [True, True])
    except Exception:  # whatever cannot be traced is not proved
        return False
    return all(values[node] == PerSample(0) for node in trace.results_of(module.graph))


def rows_meet(steps, x, y):
    """Whether a row changes when another one does, or when it is not there; measured."""

    def both(x, y):
        torch.manual_seed(0)
        return torch.cat([t.flatten(1) for t in run(steps, x, y)], 1)

    right, other = both(x, y), x.clone()
    other[0] = other[0] * 3 + 1
    scale = 1e-4 * (1 + right.abs().max())
    changed, fewer = both(other, y)[1:] - right[1:], both(x[1:], y[1:]) - right[1:]
    return bool(changed.abs().max() > scale or fewer.abs().max() > scale)


@pytest.mark.parametrize("part", range(3))
def test_a_program_that_mixes_samples_is_never_proved(part):
    """Programs of 3 to 8 operations; how many of the others are proved shows that the checker is not just shy.

    Half of them mix. The mixing operations come in turn, so that every one is met in two programs at least.
    """
    pool = random.Random(part)
    torch.manual_seed(0)
    x, y = torch.randn(5, T, D), torch.randn(5, T, D)
    apart = proved_apart = met = 0
    count = cases(36)
    for i in range(count):
        names = pool.sample(sorted(APART), pool.randint(3, 8))
        mixing = i % 2 == 0
        if mixing:
            names[pool.randrange(len(names))] = sorted(MEETS)[(part * count + i) // 2 % len(MEETS)]
        steps = [(APART | MEETS)[name] for name in names]
        proved, meets = is_proved(steps, x, y), rows_meet(steps, x, y)
        assert not (proved and meets), names
        assert not (proved and mixing), names
        met += meets
        apart += not mixing
        proved_apart += proved
    assert met > 0.2 * count
    assert proved_apart >= 0.9 * apart

"""Every operation's rule by itself: what the checker says of it, and whether that is true in numbers."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch.fx.experimental.proxy_tensor import make_fx

from modelmix.gradients import trace
from modelmix.gradients.dataflow import OPAQUE, PUBLIC, MeetingError, PerSample, prove

M, T, D = 7, 4, 6
aten = torch.ops.aten
PUBLIC_TABLE = torch.linspace(-1, 1, D * D).reshape(D, D)

# x, y: M x T x D of samples; i: M x T, places below T, of samples; p: D x D, public. What is said of each result.
SAID = {
    "pointwise": (lambda x, y, i, p: x * y + p[0], 0),
    "public alone": (lambda x, y, i, p: p.sin() @ p, None),
    "public broadcast": (lambda x, y, i, p: x[:, 0, :, None] + p, 0),
    "moved by broadcasting": (lambda x, y, i, p: x[:, 0] + torch.zeros(T, 1, 1), 1),
    "comparison": (lambda x, y, i, p: x > y, 0),
    "frexp": (lambda x, y, i, p: torch.frexp(x)[1], 0),
    "loss by sample": (lambda x, y, i, p: F.mse_loss(x, y, reduction="none"), 0),
    "smooth loss by sample": (lambda x, y, i, p: F.smooth_l1_loss(x, y, reduction="none"), 0),
    "zeros for samples": (lambda x, y, i, p: x * 0 + torch.zeros_like(x), 0),
    "new zeros": (lambda x, y, i, p: x.new_zeros(x.shape[0], 3), 0),
    "new full": (lambda x, y, i, p: x.new_full((3, x.shape[0]), 2.0), 1),
    "constants": (lambda x, y, i, p: torch.arange(5) + torch.eye(5), None),
    "sum of the last": (lambda x, y, i, p: x.sum(2), 0),
    "sum of all of a sample": (lambda x, y, i, p: x.sum((1, -1)), 0),
    "sum that is kept": (lambda x, y, i, p: x.sum(2, keepdim=True), 0),
    "sum in front": (lambda x, y, i, p: x.transpose(0, 1).sum(0), 0),
    "sum behind": (lambda x, y, i, p: x.transpose(0, 1).sum(2), 1),
    "sum in front, kept": (lambda x, y, i, p: x.transpose(0, 1).sum(0, keepdim=True), 1),
    "sum of several in front": (lambda x, y, i, p: x.permute(1, 2, 0).sum((0, 1)), 0),
    "sum of public": (lambda x, y, i, p: p.sum(), None),
    "values and places": (lambda x, y, i, p: x.max(1), (0, 0)),
    "variance and mean": (lambda x, y, i, p: torch.var_mean(x, 2), (0, 0)),
    "larger of two": (lambda x, y, i, p: torch.maximum(x, y), 0),
    "argmax": (lambda x, y, i, p: x.argmax(-1), 0),
    "norm": (lambda x, y, i, p: torch.linalg.vector_norm(x, dim=(1, 2)), 0),
    "softmax": (lambda x, y, i, p: x.softmax(-1), 0),
    "cumsum": (lambda x, y, i, p: x.cumsum(1), 0),
    "cumsum, samples last": (lambda x, y, i, p: x.permute(1, 2, 0).cumsum(1), 2),
    "sort": (lambda x, y, i, p: x.sort(1), (0, 0)),
    "topk": (lambda x, y, i, p: x.topk(2, 2), (0, 0)),
    "flip": (lambda x, y, i, p: x.flip((1, 2)), 0),
    "roll": (lambda x, y, i, p: x.roll(1, 1), 0),
    "glu": (lambda x, y, i, p: F.glu(x, 2), 0),
    "view": (lambda x, y, i, p: x.reshape(x.shape[0], 2, T // 2, D), 0),
    "view behind": (lambda x, y, i, p: x.reshape(-1, T * D), 0),
    "view in rows": (lambda x, y, i, p: x.reshape(-1, D), 0),
    "view in front": (lambda x, y, i, p: x.transpose(0, 1).reshape(2, 2, -1, D), 2),
    "view around": (lambda x, y, i, p: x.permute(1, 2, 0).reshape(T * D, -1), 1),
    "permute": (lambda x, y, i, p: x.permute(2, 0, 1), 1),
    "permute back": (lambda x, y, i, p: x.permute(-1, -2, -3), 2),
    "transpose": (lambda x, y, i, p: x.transpose(0, -1), 2),
    "transpose of others": (lambda x, y, i, p: x.transpose(1, 2), 0),
    "t": (lambda x, y, i, p: x[:, 0].t(), 1),
    "expand": (lambda x, y, i, p: x[:, :1].expand(-1, 5, -1), 0),
    "expand in front": (lambda x, y, i, p: x.expand(3, -1, -1, -1), 1),
    "expand of public": (lambda x, y, i, p: p.expand(x.shape[0], D, D), 0),
    "expand of public within": (lambda x, y, i, p: p[:, None].expand(D, x.shape[0], D), 1),
    "expand of public alone": (lambda x, y, i, p: p.expand(3, D, D), None),
    "repeat": (lambda x, y, i, p: x.repeat(1, 2, 1), 0),
    "repeat in front": (lambda x, y, i, p: x.repeat(2, 1, 1, 3), 1),
    "repeat of public": (lambda x, y, i, p: p[0].repeat(x.shape[0], 1), 0),
    "repeat behind": (lambda x, y, i, p: x.transpose(0, 1).repeat(2, 1, 1), 1),
    "unsqueeze in front": (lambda x, y, i, p: x.unsqueeze(0), 1),
    "unsqueeze behind": (lambda x, y, i, p: x.unsqueeze(1), 0),
    "unsqueeze last": (lambda x, y, i, p: x.unsqueeze(-1), 0),
    "unsqueeze far in front": (lambda x, y, i, p: x.unsqueeze(-4), 1),
    "squeeze": (lambda x, y, i, p: aten.squeeze.default(x[:, None, :1]), 0),
    "squeeze in front": (lambda x, y, i, p: aten.squeeze.default(x[None, :, None]), 0),
    "squeeze one": (lambda x, y, i, p: aten.squeeze.dim(x[None], 0), 0),
    "squeeze one that is none": (lambda x, y, i, p: aten.squeeze.dim(x.transpose(0, 1), 0), 1),
    "squeeze some": (lambda x, y, i, p: aten.squeeze.dims(x[None, None], [1, 0]), 0),
    "squeeze behind": (lambda x, y, i, p: aten.squeeze.dim(x[..., None], -1), 0),
    "slice": (lambda x, y, i, p: x[:, 1:3], 0),
    "slice in steps": (lambda x, y, i, p: x[..., ::2], 0),
    "slice in front": (lambda x, y, i, p: x.transpose(0, 1)[1:], 1),
    "slice of all": (lambda x, y, i, p: aten.slice.Tensor(x, 0, 0, x.shape[0]), 0),
    "slice backward": (lambda x, y, i, p: aten.slice_backward(x, [x.shape[0], 9, D], 1, 2, 6, 1), 0),
    "slice scatter": (lambda x, y, i, p: aten.slice_scatter(x, y[:, :2], 1, 1, 3), 0),
    "select": (lambda x, y, i, p: x[:, 1], 0),
    "select last": (lambda x, y, i, p: x[..., -1], 0),
    "select in front": (lambda x, y, i, p: x.transpose(0, 1)[1], 0),
    "select behind": (lambda x, y, i, p: x.transpose(0, 1)[..., 2], 1),
    "select backward": (lambda x, y, i, p: aten.select_backward(x[:, 0], [x.shape[0], T, D], 1, 2), 0),
    "select backward in front": (lambda x, y, i, p: aten.select_backward(x, [3, x.shape[0], T, D], 0, 2), 1),
    "select scatter": (lambda x, y, i, p: aten.select_scatter(x, y[:, 0], 1, 2), 0),
    "select scatter in front": (lambda x, y, i, p: aten.select_scatter(x.transpose(0, 1), y[:, 0], 0, 2), 1),
    "split": (lambda x, y, i, p: x.split(2, 1), (0, 0)),
    "split in front": (lambda x, y, i, p: x.transpose(0, 1).split(2, 0), (1, 1)),
    "unbind": (lambda x, y, i, p: x[:, :2].unbind(1), (0, 0)),
    "unbind in front": (lambda x, y, i, p: x.transpose(0, 1)[:2].unbind(0), (0, 0)),
    "unbind behind": (lambda x, y, i, p: x.transpose(0, 1)[..., :2].unbind(2), (1, 1)),
    "cat": (lambda x, y, i, p: torch.cat([x, y], 1), 0),
    "cat in front": (lambda x, y, i, p: torch.cat([x.transpose(0, 1), y.transpose(0, 1)], 0), 1),
    "cat of public": (lambda x, y, i, p: torch.cat([p, p]), None),
    "stack": (lambda x, y, i, p: torch.stack([x, y], 1), 0),
    "stack in front": (lambda x, y, i, p: torch.stack([x, y], 0), 1),
    "stack behind": (lambda x, y, i, p: torch.stack([x, y], -1), 0),
    "unfold": (lambda x, y, i, p: x.unfold(2, 2, 2), 0),
    "diagonal": (lambda x, y, i, p: x.diagonal(0, 1, 2), 0),
    "diagonal in front": (lambda x, y, i, p: x.permute(1, 2, 0).diagonal(0, 0, 1), 0),
    "pad": (lambda x, y, i, p: F.pad(x, (1, 2)), 0),
    "pad of two": (lambda x, y, i, p: F.pad(x, (1, 2, 3, 0)), 0),
    "pad in front": (lambda x, y, i, p: F.pad(x.transpose(0, 1), (0, 0, 0, 0, 1, 2)), 1),
    "embedding": (lambda x, y, i, p: F.embedding(i, p), 0),
    "embedding, samples last": (lambda x, y, i, p: F.embedding(i.t(), p), 1),
    "embedding of public": (lambda x, y, i, p: F.embedding(torch.tensor([1, 2]), p), None),
    "index of a table": (lambda x, y, i, p: p[i], 0),
    "index of a table behind": (lambda x, y, i, p: p[:, i], 1),
    "index of a table, samples last": (lambda x, y, i, p: p[i.t()], 1),
    "index by public": (lambda x, y, i, p: x[:, torch.tensor([2, 0, 1])], 0),
    "index by public in front": (lambda x, y, i, p: x.transpose(0, 1)[torch.tensor([[2, 0], [1, 1]])], 2),
    "index by two": (lambda x, y, i, p: x[:, torch.tensor([2, 0]), torch.tensor([1, 1])], 0),
    "index by two apart": (lambda x, y, i, p: x.transpose(0, 1)[torch.tensor([2, 0]), :, torch.tensor([1, 1])], 1),
    "index put": (lambda x, y, i, p: aten.index_put(x, [None, torch.tensor([2, 0])], y[:, :2]), 0),
    "index put of public": (lambda x, y, i, p: aten.index_put(x, [None, torch.tensor([2])], p[:1]), 0),
    "index put into public": (lambda x, y, i, p: aten.index_put(p, [torch.tensor([2])], p[:1]), None),
    "gather": (lambda x, y, i, p: x.gather(1, i[:, :, None]), 0),
    "gather, samples last": (lambda x, y, i, p: x.permute(1, 2, 0).gather(0, i.t()[:, None, :]), 2),
    "gather of a table": (lambda x, y, i, p: p[:, 0].gather(0, i[:, 0]), 0),
    "gather of public": (lambda x, y, i, p: p.gather(0, torch.zeros(1, D, dtype=torch.long)), None),
    "scatter": (lambda x, y, i, p: x.scatter(1, i[:, :, None], y), 0),
    "scatter add": (lambda x, y, i, p: x.scatter_add(1, i[:, :, None], y), 0),
    "scatter of a number": (lambda x, y, i, p: x.scatter(1, i[:, :, None], 2.0), 0),
    "index select": (lambda x, y, i, p: x.index_select(1, torch.tensor([2, 0])), 0),
    "index select of a table": (lambda x, y, i, p: p.index_select(0, i[:, 0]), 0),
    "index select of a table behind": (lambda x, y, i, p: p.index_select(1, i[:, 0]), 1),
    "index add": (lambda x, y, i, p: x.index_add(1, torch.tensor([2, 0]), y[:, :2]), 0),
    "index fill": (lambda x, y, i, p: x.index_fill(1, torch.tensor([2]), 3.0), 0),
    "triangle": (lambda x, y, i, p: x.tril(), 0),
    "matrices": (lambda x, y, i, p: torch.bmm(x, y.transpose(1, 2)), 0),
    "public matrix": (lambda x, y, i, p: x[:, 0] @ p, 0),
    "public matrix in front": (lambda x, y, i, p: p @ x[:, 0].t(), 1),
    "in place": (lambda x, y, i, p: x.clone().mul_(y), 0),
    "written view": (lambda x, y, i, p: _write(x, lambda o: o[:, 1].copy_(y[:, 0])), 0),
    "filled": (lambda x, y, i, p: torch.empty_like(x).copy_(y), 0),
}  # fmt: skip

REFUSED = {
    "sum of samples": lambda x, y, i, p: x.sum(0),
    "sum of everything": lambda x, y, i, p: x.sum(),
    "sum of samples that moved": lambda x, y, i, p: x.transpose(0, 1).sum(1),
    "sum of several": lambda x, y, i, p: x.sum((0, 2)),
    "kept sum": lambda x, y, i, p: x.sum(0, keepdim=True),
    "largest sample": lambda x, y, i, p: x.max(0)[0],
    "largest of all": lambda x, y, i, p: x.max(),
    "any": lambda x, y, i, p: (x > 0).any(),
    "variance": lambda x, y, i, p: torch.var_mean(x, 0),
    "norm": lambda x, y, i, p: torch.linalg.vector_norm(x),
    "mean loss": lambda x, y, i, p: F.mse_loss(x, y),
    "summed loss": lambda x, y, i, p: F.huber_loss(x, y, reduction="sum"),
    "softmax": lambda x, y, i, p: x.softmax(0),
    "softmax that moved": lambda x, y, i, p: x.permute(1, 2, 0).softmax(-1),
    "cumsum": lambda x, y, i, p: x.cumsum(0),
    "cumprod": lambda x, y, i, p: x.transpose(0, 1).cumprod(1),
    "sort": lambda x, y, i, p: x.sort(0),
    "flip": lambda x, y, i, p: x.flip((0, 1)),
    "flip all": lambda x, y, i, p: x.flip((-3,)),
    "roll": lambda x, y, i, p: x.roll(1, 0),
    "roll by the number of samples": lambda x, y, i, p: x.roll((x.shape[0], 1), (1, 2)),
    "public entries that are among samples": lambda x, y, i, p: torch.isin(p, x),
    "roll flat": lambda x, y, i, p: x.roll(1),
    "broadcast": lambda x, y, i, p: x[:, 0, 0] + y[:, 0, :1],
    "broadcast one dimension down": lambda x, y, i, p: x[:, None, :, 0] + y[None, :, :, 0],
    "two dimensions": lambda x, y, i, p: x[:, 0] @ y[:, 0].t(),
    "gram": lambda x, y, i, p: x[:, 0].t() @ y[:, 0],
    "view across": lambda x, y, i, p: x.transpose(0, 1).reshape(-1, D),
    "view across and away": lambda x, y, i, p: x.transpose(0, 1).reshape(-1, T, D),
    "view in front": lambda x, y, i, p: x.reshape(T, -1, D),
    "view as another type": lambda x, y, i, p: x.view(torch.int32),
    "repeat": lambda x, y, i, p: x.repeat(2, 1, 1),
    "repeat in front and of samples": lambda x, y, i, p: x.repeat(3, 2, 1, 1),
    "slice": lambda x, y, i, p: x[1:],
    "slice of a few": lambda x, y, i, p: x[:2],
    "slice of the last": lambda x, y, i, p: x[-1:],
    "slice in steps": lambda x, y, i, p: x[::2],
    "slice to the half": lambda x, y, i, p: x[: x.shape[0] // 2],
    "slice scatter of samples": lambda x, y, i, p: aten.slice_scatter(x, y, 0, 0, None),
    "slice scatter into public": lambda x, y, i, p: aten.slice_scatter(p, x[0], 0, 0, T),
    "select": lambda x, y, i, p: x[0],
    "select the last": lambda x, y, i, p: x[-1],
    "select that moved": lambda x, y, i, p: x.transpose(0, 1)[:, 0],
    "select scatter": lambda x, y, i, p: aten.select_scatter(x, p[:T], 0, 0),
    "select scatter into public": lambda x, y, i, p: aten.select_scatter(p, x[0, 0], 0, 0),
    "select scatter across": lambda x, y, i, p: aten.select_scatter(x, p[0].expand(x.shape[0], D), 1, 1) + x.sum(0),
    "split": lambda x, y, i, p: x.split(3, 0),
    "unbind": lambda x, y, i, p: x.unbind(0),
    "chunk that moved": lambda x, y, i, p: x.transpose(0, 1).chunk(2, 1),
    "cat": lambda x, y, i, p: torch.cat([x, y]),
    "cat across": lambda x, y, i, p: torch.cat([x[:, :1, 0], y[:, 0, :1]], 0),
    "cat with public": lambda x, y, i, p: torch.cat([x[0], p]),
    "stack and sum": lambda x, y, i, p: torch.stack([x, y], 0).sum(1),
    "unfold": lambda x, y, i, p: x.unfold(0, 2, 1),
    "diagonal": lambda x, y, i, p: x.diagonal(0, 0, 1),
    "pad": lambda x, y, i, p: F.pad(x, (0, 0, 0, 0, 1, 0)),
    "pad behind": lambda x, y, i, p: F.pad(x, (0, 0, 0, 0, 0, 1)),
    "cut by a pad": lambda x, y, i, p: F.pad(x, (0, 0, 0, 0, -1, 0)),
    "embedding of samples": lambda x, y, i, p: F.embedding(torch.tensor([0]), x[:, 0]),
    "index of samples": lambda x, y, i, p: x[torch.tensor([0, 1])],
    "index of samples by samples": lambda x, y, i, p: x[i[:, 0]],
    "index of another dimension by samples": lambda x, y, i, p: x[:, i],
    "mask": lambda x, y, i, p: x[x[:, 0, 0] > 0],
    "index by a range": lambda x, y, i, p: x[torch.arange(x.shape[0]), i[:, 0]],
    "index put": lambda x, y, i, p: aten.index_put(x, [torch.tensor([0])], y[:1]),
    "index put of other samples": lambda x, y, i, p: aten.index_put(p, [i[:, 0]], y[:, 0]),
    "index put across": lambda x, y, i, p: aten.index_put(
        x.transpose(0, 1)[..., 0], [torch.arange(T)], y[:, 0, :1].expand(-1, T)
    ),
    "gather": lambda x, y, i, p: x.gather(0, i[:, :, None]),
    "scatter": lambda x, y, i, p: x.scatter(0, i[:, :, None], y),
    "scatter into public": lambda x, y, i, p: p.scatter(0, i[:, :1], 1.0),
    "scatter add into public": lambda x, y, i, p: p[:, 0].scatter_add(0, i[:, 0], y[:, 0, 0]),
    "index select": lambda x, y, i, p: x.index_select(0, torch.tensor([0])),
    "index select by samples": lambda x, y, i, p: x.index_select(1, i[:, 0]),
    "index add": lambda x, y, i, p: x.index_add(0, torch.tensor([0]), y[:1]),
    "index add by samples": lambda x, y, i, p: p.index_add(0, i[:, 0], y[:, 0]),
    "index add into public": lambda x, y, i, p: p.index_add(0, torch.zeros(M, dtype=torch.long), y[:, 0]),
    "triangle": lambda x, y, i, p: x[:, 0].tril(),
    "triangle that moved": lambda x, y, i, p: x.transpose(0, 1).triu(),
    "number of samples": lambda x, y, i, p: x / x.shape[0],
    "place": lambda x, y, i, p: x[:, 0, 0] + torch.arange(x.shape[0]),
    "full of the number": lambda x, y, i, p: torch.full((3,), x.shape[0]),
    "constant for every place": lambda x, y, i, p: x + torch.arange(M)[:, None, None],
    "permutation": lambda x, y, i, p: torch.randperm(x.shape[0]),
    "matrix of samples": lambda x, y, i, p: x @ x[0].t(),
    "square of samples": lambda x, y, i, p: x.new_zeros(x.shape[0], x.shape[0]),
    "memory": lambda x, y, i, p: torch.empty(x.shape[0], 3) * 1.0,
    "written to the input": lambda x, y, i, p: x.mul_(2.0),
    "written to the parameter": lambda x, y, i, p: p.add_(x[:, 0].sum(0)),
    "written into public": lambda x, y, i, p: torch.zeros(x.shape[0], D).mul_(0).t().add_(x[:, 0].t()).sum(1),
    "written across": lambda x, y, i, p: _write(x, lambda o: o[:1].copy_(y[1:2])),
    "own generator": lambda x, y, i, p: x * torch.rand(3, 1, 1, 1, generator=torch.Generator()),
    "fourier": lambda x, y, i, p: torch.fft.fft(x, dim=0).real,
}


def _write(x, change):
    out = x.clone()
    change(out)
    return out


def _listed(out):
    return list(out) if isinstance(out, tuple | list) else [out]


def said(function):
    """What the checker says of every result: the dimension of the samples, None for what is public."""
    x = torch.randn(M, T, D)
    symbol, _, fake = trace._fake([PUBLIC_TABLE, x, x, torch.zeros(M, T, dtype=torch.long)], 1, 1, M)

    def flat(p, x, y, i):
        return _listed(function(x, y, i, p))

    with torch.no_grad():
        module = make_fx(flat, tracing_mode="symbolic", _allow_non_fake_inputs=True)(*fake)
    module.graph.eliminate_dead_code()
    values = prove(module.graph, symbol, [False, True, True, True])
    found = [values[node] for node in trace.results_of(module.graph)]
    assert all(isinstance(v, PerSample) or v in (PUBLIC, OPAQUE) for v in found)
    return [v.dim if isinstance(v, PerSample) else None for v in found]


def ran(function, keep=range(M), odd=None):
    generator = torch.Generator().manual_seed(0)
    x, y = (torch.randn(M, T, D, generator=generator) for _ in range(2))
    i = torch.randint(0, T, (M, T), generator=generator)
    if odd is not None:
        x[odd], y[odd], i[odd] = 3 * x[odd] + 1, -y[odd], (i[odd] + 1) % T
    keep = list(keep)
    return _listed(function(x[keep], y[keep], i[keep], PUBLIC_TABLE.clone()))


@pytest.mark.parametrize("name", SAID)
def test_what_is_said_is_said_rightly_and_is_true(name):
    function, wanted = SAID[name]
    dims = said(function)
    assert dims == (list(wanted) if isinstance(wanted, tuple) else [wanted])
    right, other, fewer = ran(function), ran(function, odd=2), ran(function, keep=[k for k in range(M) if k != 2])
    for dim, a, b, c in zip(dims, right, other, fewer, strict=True):
        if dim is None:
            torch.testing.assert_close(b, a, rtol=0, atol=0)
            torch.testing.assert_close(c, a, rtol=0, atol=0)
            continue
        each = a.shape[dim] // M
        rest = torch.tensor([k for k in range(M * each) if k // each != 2])
        torch.testing.assert_close(b.index_select(dim, rest), a.index_select(dim, rest))
        torch.testing.assert_close(c, a.index_select(dim, rest))


@pytest.mark.parametrize("name", REFUSED)
def test_what_may_mix_is_refused(name):
    with pytest.raises(MeetingError):
        said(REFUSED[name])

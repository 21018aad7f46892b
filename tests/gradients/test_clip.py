"""Algorithm 2, held to its definition and to its bounds: what is summed, not what was meant."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import modelmix as mm
from modelmix.errors import ModelMixError
from modelmix.gradients import ENGINES, Batch
from modelmix.gradients import clip as clipping
from modelmix.gradients.clip import MARGIN, Clip

FLOATS = [torch.float64, torch.float32, torch.bfloat16, torch.float16]
KINDS = list(itertools.product([1, 4, 7, 100], [1, 2]))


def algorithm_2(g: torch.Tensor, clip: Clip) -> torch.Tensor:
    """One gradient, by the book and in float64."""
    g = g.double()
    length = g.abs().sum() if clip.norm == 1 else (g * g).sum().sqrt()
    g = g * min(1.0, clip.c / float(length)) if length > 0 else g
    bound = clip.c / math.sqrt(clip.p)
    return g.clamp(-bound, bound)


def assert_bounded(clip: Clip, rows: list[torch.Tensor]) -> None:
    """Every gradient alone, through the sum: norm and largest coordinate of what comes out, in exact arithmetic."""
    for i in range(rows[0].shape[0]):
        out = clip.sum([g[i : i + 1] for g in rows], torch.ones(1, dtype=torch.float64)).total
        assert out.dtype == torch.float64
        numbers = out.tolist()
        length = math.fsum(map(abs, numbers)) if clip.norm == 1 else math.hypot(*numbers)
        assert length <= clip.c
        assert max(map(abs, numbers)) <= clip.c / math.sqrt(clip.p)


@st.composite
def gradients(draw):
    m, sizes = draw(st.integers(1, 6)), draw(st.lists(st.integers(1, 9), min_size=1, max_size=4))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    dtype = draw(st.sampled_from([torch.float64, torch.float32]))
    scale = 10.0 ** draw(st.integers(-8, 8))
    rows = [(scale * torch.randn(m, size, generator=generator, dtype=torch.float64)).to(dtype) for size in sizes]
    weights = torch.tensor(draw(st.lists(st.sampled_from([0.0, 1.0]), min_size=m, max_size=m)), dtype=torch.float64)
    c = scale * draw(st.sampled_from([0.01, 1.0, 3.0, 1e4]))
    return rows, weights, Clip(c, draw(st.sampled_from([1, 4, 100])), draw(st.sampled_from([1, 2])))


@given(gradients())
def test_the_sum_is_algorithm_2_sample_by_sample(case):
    rows, weights, clip = case
    found = clip.sum(rows, weights)
    flat = torch.cat(rows, 1)
    wanted = sum((w * algorithm_2(g, clip) for g, w in zip(flat, weights, strict=True)), torch.zeros(flat.shape[1]))
    assert (found.total - wanted).abs().max() <= 2 * MARGIN * clip.c * len(weights)
    drawn = flat[weights > 0].double()
    lengths = drawn.abs().sum(1) if clip.norm == 1 else drawn.norm(dim=1)
    torch.testing.assert_close(found.norms, lengths, rtol=1e-12, atol=0.0)
    assert found.truncated.shape == lengths.shape
    if clip.p == 1:
        assert not found.truncated.any()


def test_a_gradient_within_the_bounds_is_left_as_it_is():
    rows = [torch.tensor([[0.25, -0.5]]), torch.tensor([[0.125]])]
    one = torch.ones(1, dtype=torch.float64)
    for clip in (Clip(1.0), Clip(1.0, 3), Clip(1.0, 1, 1), Clip(1.0, 3, 1)):
        assert clip.sum(rows, one).total.tolist() == [0.25, -0.5, 0.125]


def test_coordinates_are_cut_after_the_norm_and_counted():
    g = [torch.tensor([[3.0, 4.0, 0.0], [0.1, 0.0, -0.9]], dtype=torch.float64)]
    found = Clip(1.0, 4).sum(g, torch.ones(2, dtype=torch.float64))
    wanted = torch.tensor([0.5 + 0.1, 0.5, -0.5], dtype=torch.float64)  # (.6, .8, 0) and (.1, 0, -.9), cut at 1/2
    torch.testing.assert_close(found.total, wanted, rtol=0, atol=3 * MARGIN)
    assert found.truncated.tolist() == [2, 1]
    torch.testing.assert_close(found.norms, torch.tensor([5.0, math.sqrt(0.82)], dtype=torch.float64))


@pytest.mark.parametrize(("p", "norm"), KINDS)
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_no_clipped_gradient_is_above_the_bounds_at_any_scale(p, norm, dtype):
    generator = torch.Generator().manual_seed(0)
    most = torch.finfo(dtype).max
    sizes, plain = (301, 50), torch.randn(9, 351, generator=generator, dtype=torch.float64)
    plain[3] = 1.0  # all alike
    plain[4, 1:] = 0.0  # one coordinate
    plain[5] *= 10.0 ** torch.linspace(-40, 0, 351)  # all sizes at once
    for exponent in (-45, -40, -20, -8, 0, 4, 20, 38, 200):
        rows = (plain * 10.0**exponent).clamp(-most, most)
        rows[6, 7] = most  # one huge coordinate
        rows[7] = most
        rows[8] = 0.0
        pieces = list(torch.split(rows.to(dtype), sizes, 1))
        for c in (1e-30, 1e-5, 1.0, 0.3 * 10.0 ** max(-90, min(exponent, 90)), 20.0):
            assert_bounded(Clip(c, p, norm), pieces)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_what_is_no_gradient_adds_nothing_and_is_told(dtype):
    rows = torch.tensor([[1.0, 2.0], [math.inf, 0.0], [-math.inf, math.nan], [0.0, math.nan], [3.0, 0.5]]).to(dtype)
    good = rows[[0, 4]]
    ones = torch.ones(5, dtype=torch.float64)
    for p, norm in KINDS:
        clip = Clip(0.5, p, norm)
        found = clip.sum([rows], ones)
        assert torch.equal(found.total, clip.sum([good], ones[:2]).total)
        assert torch.isfinite(found.norms).tolist() == [True, False, False, False, True]
        hidden = clip.sum([rows], torch.tensor([1.0, 0.0, 0.0, 0.0, 1.0], dtype=torch.float64))
        assert torch.equal(hidden.total, found.total)
        assert torch.isfinite(hidden.norms).all()


@settings(max_examples=20)
@given(st.integers(0, 2**31), st.sampled_from(KINDS), st.floats(-3, 3))
def test_one_sample_more_moves_a_large_sum_by_no_more_than_the_bounds(seed, kind, exponent):
    """Rounding of the sum included: neighbours of very different size are summed around the sample."""
    generator = torch.Generator().manual_seed(seed)
    m, d = 700, 40
    rows = torch.randn(m, d, generator=generator) * 10 ** (4 * torch.randn(m, 1, generator=generator))
    clip = Clip(10.0**exponent, *kind)
    with_it = torch.ones(m, dtype=torch.float64)
    without = with_it.clone()
    without[seed % m] = 0.0
    moved = clip.sum([rows], with_it).total - clip.sum([rows], without).total
    assert torch.linalg.vector_norm(moved, clip.norm) <= clip.c
    assert moved.abs().max() <= clip.c / math.sqrt(clip.p)


@pytest.mark.parametrize(("p", "norm"), [(1, 2), (100, 2), (1, 1), (4, 1)])
def test_the_bounds_hold_for_gradients_of_large_networks(p, norm):
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(16 * 64, 250), nn.Tanh(), nn.Linear(250, 10)
    )
    x = torch.randn(6, 1, 8, 8) * 10.0 ** torch.tensor([-20.0, -3, 0, 1, 5, 18])[:, None, None, None]
    parameters = {name: p.detach() for name, p in model.named_parameters()}
    found = ENGINES["hooks"](model, lambda o, t: (o * t).sum(), parameters, Batch(x, torch.randn(6, 10))).gradients
    rows = [found[name].dense().flatten(1) for name in parameters]
    assert sum(g.shape[1] for g in rows) > 250_000
    for c in (1e-6, 1.0):
        assert_bounded(Clip(c, p, norm), rows)


@given(gradients())
@settings(max_examples=15)
def test_the_samples_held_at_once_change_nothing(case):
    rows, weights, clip = case
    whole = clip.sum(rows, weights)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(clipping, "_CACHE", 1)
        single = clip.sum(rows, weights)
    torch.testing.assert_close(single.total, whole.total, rtol=1e-13, atol=1e-13 * clip.c)
    torch.testing.assert_close(single.norms, whole.norms, rtol=1e-14, atol=0.0)
    assert torch.equal(single.truncated, whole.truncated)


def test_no_samples_sum_to_zero():
    found = Clip(1.0, 4).sum([torch.zeros(0, 3), torch.zeros(0, 2, 2)], torch.zeros(0, dtype=torch.float64))
    assert found.total.tolist() == [0.0] * 7
    assert found.norms.numel() == found.truncated.numel() == 0


def test_a_weight_cannot_raise_a_sample_above_the_bounds():
    one = torch.ones(1, dtype=torch.float64)
    g = [torch.tensor([[3.0, 4.0]])]
    assert torch.equal(Clip(1.0).sum(g, 7 * one).total, Clip(1.0).sum(g, one).total)


def test_clips_that_promise_nothing_are_refused():
    for wrong in (0.0, -1.0, math.inf, math.nan, 1e-200):
        with pytest.raises(ModelMixError, match="c = "):
            Clip(wrong)
    with pytest.raises(ModelMixError, match="p = 0"):
        Clip(1.0, 0)
    with pytest.raises(ModelMixError, match="norm = 3"):
        Clip(1.0, 1, 3)
    with pytest.raises(ModelMixError, match=r"\[3, 6\] samples"):
        Clip(1.0).sum([torch.ones(3, 2), torch.ones(6, 2)], torch.ones(3))


def test_a_mechanism_names_its_clip():
    assert Clip.of(mm.Mechanism(1.0, 0.1, 2.0, 100), 3.0) == Clip(3.0, 100, 2)
    assert Clip.of(mm.Mechanism(1.0, 0.1, law="laplace"), 3.0) == Clip(3.0, 1, 1)

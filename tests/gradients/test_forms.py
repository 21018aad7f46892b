"""Every form of per-sample gradients answers as its dense form does, and sums the numbers that it measured."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from modelmix.gradients.clip import MARGIN, Clip
from modelmix.gradients.forms import DenseGradients, OuterGradients, SparseRowGradients

HERE = torch.get_default_device().type


def spread(*shape):
    """Numbers of very different sizes."""
    return torch.randn(*shape) * 10.0 ** torch.randint(-6, 6, (shape[0], *[1] * (len(shape) - 1)))


@st.composite
def forms(draw):
    torch.manual_seed(draw(st.integers(0, 1000)))
    m, k, width = draw(st.integers(1, 5)), draw(st.integers(1, 6)), draw(st.integers(1, 7))
    kind = draw(st.sampled_from(["dense", "permuted", "outer", "rows"]))
    if kind == "outer":
        return OuterGradients(spread(m, k), spread(m, width))
    if kind == "rows":
        return SparseRowGradients.of(spread(m, k, width), torch.randint(0, 4, (m, k)), 4)
    values = spread(m, k, width, 2)
    return DenseGradients(values.permute(0, 3, 1, 2) if kind == "permuted" else values)


@given(forms(), st.sampled_from([1, 2]), st.sampled_from([None, 1e-3, 1.0]), st.booleans())
def test_forms_agree_with_their_dense_form(g, norm, bound, on_device):
    dense = DenseGradients(g.dense().double())
    torch.testing.assert_close(g.powers(norm), dense.powers(norm), rtol=1e-5, atol=1e-12)
    scale = torch.rand(g.samples, dtype=torch.float64)
    scale[0] = 0
    # A processor is given the bound as a number, an accelerator as a tensor: two ways to the same sum.
    limit = torch.tensor(bound, dtype=torch.float64) if bound is not None and (on_device or HERE != "cpu") else bound
    total, cut = g.clipped_sum(scale, limit)
    wanted, wanted_cut = dense.clipped_sum(scale, limit)
    torch.testing.assert_close(total, wanted, rtol=1e-5, atol=1e-5 * float(wanted.abs().max()) + 1e-30)
    if bound is None:
        assert cut is None or not cut.any()
    else:
        assert (cut - wanted_cut).abs().max() <= 1  # a coordinate at the bound may fall to either side
    torch.testing.assert_close((g + g).dense(), 2.0 * g.dense())
    torch.testing.assert_close(g.materialize().dense(), g.dense())


@given(st.lists(forms(), min_size=1, max_size=3), st.sampled_from([1, 4, 100]), st.sampled_from([1, 2]))
def test_the_bounds_hold_for_any_forms_together(gradients, p, norm):
    m = min(g.samples for g in gradients)
    forms_of_m = [DenseGradients(g.dense()[:m]) if g.samples != m else g for g in gradients]
    clip = Clip(1e-4, p, norm)
    for i in range(m):
        weights = torch.zeros(m, dtype=torch.float64)
        weights[i] = 1
        both = clip.sum(forms_of_m, weights), clip.sum_traceable(forms_of_m, weights, *clip.limits_on(weights.device))
        for total in (both[0].total, both[1][0]):
            assert float(torch.linalg.vector_norm(total, ord=norm)) <= clip.c
            assert float(total.abs().max()) <= clip.coordinate_bound
        torch.testing.assert_close(both[0].total, both[1][0], rtol=1e-12, atol=1e-20)
        torch.testing.assert_close(both[0].every_norm, both[1][1], rtol=1e-12, atol=0)
        assert torch.equal(both[0].every_cut, both[1][2])


def test_a_product_is_measured_where_its_factors_vanish():
    """1e-170 squared is no number any more, and times 1e160 it is far above the clip."""
    back, seen = torch.full((1, 3), 1e-170, dtype=torch.float64), torch.full((1, 4), 1e160, dtype=torch.float64)
    clip, one = Clip(1e-20), torch.ones(1, dtype=torch.float64)
    found = clip.sum([OuterGradients(back, seen)], one)
    assert found.norms.tolist() == pytest.approx([12**0.5 * 1e-10])
    assert float(found.total.norm()) == pytest.approx(clip.c * (1 - MARGIN))


def test_touched_rows_stand_in_one_place_each():
    index = torch.tensor([[2, 0, 2, 2], [1, 1, 0, 3]])
    values = torch.randn(2, 4, 3)
    found = SparseRowGradients.of(values, index, 5)
    dense = torch.zeros(2, 5, 3)
    for n in range(2):
        dense[n].index_add_(0, index[n], values[n])
    torch.testing.assert_close(found.dense(), dense)
    assert not found.values[0, 2:].any()
    assert not found.values[1, 1].any()


@pytest.mark.parametrize("form", ["outer", "rows"])
def test_a_gradient_that_is_not_finite_adds_nothing(form):
    back = torch.ones(2, 3)
    back[1, 0] = torch.inf
    g = (
        OuterGradients(back, torch.ones(2, 2))
        if form == "outer"
        else SparseRowGradients.of(back[:, :, None], torch.tensor([[0, 1, 2]] * 2), 3)
    )
    one = torch.ones(2, dtype=torch.float64)
    for p in (1, 4):
        clip = Clip(1.0, p)
        found = clip.sum([g], one)
        alone = clip.sum([g], torch.tensor([1.0, 0.0], dtype=torch.float64))
        assert not bool(torch.isfinite(found.norms[1]))
        assert torch.equal(found.total, alone.total)
        assert torch.equal(clip.sum_traceable([g], one, *clip.limits_on(one.device))[0], alone.total)

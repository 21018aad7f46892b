"""Our kernels against torch: by triton's interpreter here, on the device itself where there is one."""

from __future__ import annotations

import importlib
import importlib.util
import math

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from hypothesis import given, settings
from hypothesis import strategies as st
from known import Known
from torch import nn

from modelmix.errors import ModelMixError
from modelmix.gradients import Batch, Engine, forms, hooks, kernels, sum_of_chunk
from modelmix.gradients import clip as clipping
from modelmix.gradients.clip import Clip
from modelmix.gradients.forms import ConvGradients, DenseGradients, OuterGradients
from modelmix.gradients.kernels import autotune
from modelmix.gradients.layers import RULES, reparametrised, standardised
from modelmix.gradients.parameters import FlatParameters
from modelmix.gradients.selection import per_sample_gradients
from modelmix.models.residual import StandardisedConv2d
from modelmix.training import embedding
from modelmix.training.embedding import basis as basis_module
from modelmix.training.embedding import clip as clip_module

pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")

# The interpreter takes the bits of bfloat16 for whole numbers in matrix products.
HALF = (torch.float16,) if torch.get_default_device().type == "cpu" else (torch.float16, torch.bfloat16)


GEOMETRY = kernels.Geometry((3, 3), (1, 1), (1, 1), (1, 1), 1, 1)


def wide(value: float) -> torch.Tensor:
    return torch.tensor(value, dtype=torch.float64)


@st.composite
def convolutions(draw):
    groups = draw(st.sampled_from([1, 1, 2, 3]))

    def two(low, high):
        return draw(st.tuples(st.integers(low, high), st.integers(low, high)))

    layer = nn.Conv2d(
        groups * draw(st.sampled_from([1, 2, 3, 17])),
        groups * draw(st.sampled_from([1, 4, 20])),
        two(1, 3),
        stride=two(1, 2),
        padding=two(0, 2),
        dilation=two(1, 2),
        groups=groups,
    )
    copies, m = draw(st.integers(1, 2)), draw(st.integers(1, 2))
    return layer, m, copies, two(5, 9), draw(st.sampled_from(["contiguous", "channels last", "sliced"]))


@given(convolutions(), st.sampled_from([torch.float32, *HALF]), st.integers(0, 100))
@settings(max_examples=15)
def test_the_weight_gradient_of_a_convolution(case, dtype, seed):
    layer, m, copies, size, layout = case
    torch.manual_seed(seed)
    x = torch.randn(m * copies, layer.in_channels, *size)
    if layout == "sliced":
        x = torch.randn(m * copies, layer.in_channels, size[0], 2 * size[1])[..., ::2]
    x = x.to(dtype)
    g = torch.randn_like(layer(x.float())).to(dtype)
    if layout == "channels last":
        x, g = (t.contiguous(memory_format=torch.channels_last) for t in (x, g))
    geometry = kernels.Geometry(
        layer.kernel_size, layer.stride, layer.padding, layer.dilation, layer.groups, copies
    ).numbers()
    found, squares = kernels.conv_weight(x, g, geometry)
    found = found.permute(0, 1, 4, 2, 3)
    wanted = RULES[nn.Conv2d](layer, {}, x.double(), g.double(), copies)["weight"].dense()
    assert found.dtype == kernels.kept_as(x)
    assert found.shape == wanted.shape
    near = 4e-3 if found.dtype == torch.bfloat16 else 2e-6  # what is written down may be rounded: it is measured so
    assert (found.double() - wanted).norm() <= near * wanted.norm() + 1e-12
    torch.testing.assert_close(squares, DenseGradients(found.double()).powers(2), rtol=1e-12, atol=0)
    # And without ever being written down, to be measured and to be summed.
    scale, norm = torch.rand(m, dtype=torch.float64), 1 + seed % 2
    first = kernels.conv_powers(x, g, geometry, norm)
    torch.testing.assert_close(first, DenseGradients(wanted).powers(norm), rtol=1e-5, atol=1e-12)
    for bound in (None, wide(0.3)):
        total, cut, again = kernels.conv_clipped_sum(x, g, geometry, scale, bound, norm)
        assert torch.equal(first, again)
        right, right_cut = DenseGradients(wanted).clipped_sum(scale, bound)
        assert (total.permute(0, 3, 1, 2) - right).norm() <= 1e-5 * right.norm() + 1e-12
        assert right_cut is None or (cut - right_cut).abs().max() <= 1


@given(
    st.integers(1, 70), st.integers(1, 600), st.sampled_from([0, 8, None]), st.sampled_from([None, 0.01, 0.3]),
    st.sampled_from([1, 2]),
)  # fmt: skip
@settings(max_examples=15)
def test_both_passes_of_clipping(m, width, behind, bound, norm):
    """Of rows that follow each other, of parts of longer ones, and of rows that do not lie in one piece."""
    torch.manual_seed(m + width)
    rows = (torch.randn(m, width + (behind or 0)) * 10.0 ** torch.randint(-20, 10, (m, 1)))[:, :width]
    rows = rows.T.contiguous().T if behind is None else rows
    wanted = DenseGradients(rows.double())
    torch.testing.assert_close(kernels.powers(rows, norm), wanted.powers(norm), rtol=1e-13, atol=0)
    scale = torch.rand(m, dtype=torch.float64)
    scale[0] = 0
    rows[0, 0] = math.inf  # what is scaled by 0 adds nothing
    limit = None if bound is None else wide(bound)
    total, cut = kernels.clipped_sum(rows, scale, limit)
    wanted_total, wanted_cut = wanted.clipped_sum(scale, limit)
    size = (rows[1:].double().abs() * scale[1:, None]).sum(0)
    # Scaled in float32, added up in float64; the margin of clipping covers three roundings.
    assert bool(((total - wanted_total).abs() <= 3 * 2**-24 * size + 1e-37 * m).all())
    assert wanted_cut is None or (cut - wanted_cut).abs().max() <= 1


@given(st.integers(1, 70), st.integers(1, 20), st.integers(1, 70), st.sampled_from([None, 0.01, 0.3]))
@settings(max_examples=15)
def test_the_sum_of_outer_products(m, rows, columns, bound):
    torch.manual_seed(m + rows + columns)
    back, seen = torch.randn(m, rows), torch.randn(m, columns).to(torch.float16)
    scale = torch.rand(m, dtype=torch.float64)
    scale[0], back[0, 0] = 0, math.inf  # what is scaled by 0 adds nothing
    limit = None if bound is None else wide(bound)
    total, cut = kernels.outer_sum(back, seen, scale, limit)
    wanted, wanted_cut = OuterGradients(back.double(), seen.double()).clipped_sum(scale, limit)
    assert total.shape == wanted.shape
    size = (back[1:].double().abs() * scale[1:, None]).T @ seen[1:].double().abs()
    assert bool(((total - wanted).abs() <= 3 * 2**-24 * size + 1e-37 * m).all())
    assert wanted_cut is None or (cut - wanted_cut).abs().max() <= 1


@pytest.mark.parametrize(("kernel", "stride", "padding"), [(3, 1, 1), (3, 2, 1), (1, 2, 0), (2, 1, 1)])
@pytest.mark.parametrize("copies", [1, 2])
@pytest.mark.parametrize("bias", [True, False])
def test_a_standardised_convolution(everywhere, kernel, stride, padding, copies, bias):
    torch.manual_seed(0)
    layer = StandardisedConv2d(5, 20, kernel, stride, padding, bias)
    with torch.no_grad():
        layer.gain.copy_(torch.linspace(-1, 1, 20))
        layer.gain[3] = 0
    x = torch.randn(2 * copies, 5, 6, 7)
    unit, r = layer.standardised(layer.weight)
    before = layer._conv_forward(x, unit, None)
    g = torch.randn_like(before)
    with torch.no_grad():
        found = standardised(layer, {}, unit, r.flatten() * layer.gain, before, x, g, copies)
        wanted = reparametrised(layer.double(), dict(layer.named_parameters()), x.double(), g.double(), copies)
    for name, _ in layer.named_parameters():
        assert (found[name].dense().double() - wanted[name].dense()).norm() <= 1e-5 * wanted[name].dense().norm()
    torch.testing.assert_close(found["weight"].powers(2), DenseGradients(found["weight"].dense().double()).powers(2))


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize(("channels", "groups", "size"), [(16, 16, (6, 5)), (32, 4, (3, 3)), (8, 1, (20, 30))])
@pytest.mark.parametrize("far", [0.0, 1000.0])
def test_group_norm_forward_and_backward(channels, groups, size, layout, far):
    torch.manual_seed(0)
    x = (torch.randn(3, channels, *size) * 3 + far).to(memory_format=layout)
    weight, bias, g = torch.randn(channels), torch.randn(channels), torch.randn(3, channels, *size)
    y, mean, scale = kernels.group_norm(x, weight, bias, groups, 1e-5)
    dx, dweight, dbias = kernels.group_norm_backward(x, g, weight, mean, scale)
    free = [t.double().requires_grad_() for t in (x, weight.expand(3, -1), bias.expand(3, -1))]
    outputs = [F.group_norm(free[0][i : i + 1], groups, free[1][i], free[2][i], 1e-5) for i in range(3)]
    wanted = torch.cat(outputs)
    gradients = torch.autograd.grad(wanted, free, g.double())
    assert y.stride() == x.stride()
    # Where images lie far from 0, their own rounding is all that can be asked for.
    rounding = 2e-6 + 2e-7 * far
    for mine, right in zip((y, dx, dweight, dbias), (wanted, *gradients), strict=True):
        assert (mine.double() - right).norm() <= rounding * right.norm()


@pytest.fixture(params=[False, True], ids=["written down", "in registers"])
def everywhere(request, monkeypatch):
    """Our kernels for tensors of any device, so that whole networks go through them, by either way of convolutions."""
    monkeypatch.setattr(autotune, "recomputing_is_faster", lambda *_: request.param)
    if torch.get_default_device().type == "cpu":
        monkeypatch.setattr(forms, "has_kernels", lambda x: x.dtype in kernels.TYPES)
        monkeypatch.setattr(hooks, "_on_device", lambda t: True)


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1),
        StandardisedConv2d(8, 8, 3, 1, 1),
        nn.GroupNorm(4, 8),
        nn.ReLU(),
        nn.Conv2d(8, 16, 3, 2, 1, bias=False),
        nn.GroupNorm(16, 16),
        nn.Tanh(),
        nn.Flatten(),
        nn.Linear(16 * 9, 10),
    )


@pytest.mark.parametrize(("p", "norm"), [(1, 2), (100, 2), (4, 1)])
@pytest.mark.parametrize("copies", [1, 2])
def test_a_whole_network_by_kernels(everywhere, p, norm, copies):
    model, m = network(), 3
    x, y = torch.randn(m * copies, 3, 6, 6), torch.randint(0, 10, (m * copies,))
    flat, clip = FlatParameters(model), Clip(0.3, p, norm)
    one = torch.ones(m, dtype=torch.float64)
    found = sum_of_chunk("hooks", model, F.cross_entropy, flat.views(flat.read()), Batch(x, y, one, copies), clip)
    model.double()
    right = sum_of_chunk(
        "vmap", model, F.cross_entropy, flat.views(flat.read()), Batch(x.double(), y, one, copies), clip
    )
    assert (found.total - right.total).norm() <= 2e-5 * right.total.norm()
    torch.testing.assert_close(found.norms, right.norms, rtol=2e-5, atol=0)
    assert (found.truncated - right.truncated).abs().max() <= 1


@pytest.mark.parametrize("norm", ["without weights", "frozen", "frozen without bias"])
def test_group_norms_that_are_not_trained_go_through_the_kernel(everywhere, monkeypatch, norm):
    model = network()
    model[2] = nn.GroupNorm(4, 8, affine=norm != "without weights").requires_grad_(False)
    if model[2].affine:
        nn.init.normal_(model[2].weight)
        nn.init.normal_(model[2].bias)
    if norm == "frozen without bias":
        model[2].bias = None
    kernel, calls = kernels.group_norm, []
    monkeypatch.setattr(kernels, "group_norm", lambda x, *rest: calls.append(x.shape[1]) or kernel(x, *rest))
    x, y = torch.randn(3, 3, 6, 6), torch.randint(0, 10, (3,))
    flat, clip, one = FlatParameters(model), Clip(0.3), torch.ones(3, dtype=torch.float64)
    found = sum_of_chunk("hooks", model, F.cross_entropy, flat.views(flat.read()), Batch(x, y, one), clip)
    assert calls[:2] == [8, 16]  # and again in the second trace
    model.double()
    right = sum_of_chunk("vmap", model, F.cross_entropy, flat.views(flat.read()), Batch(x.double(), y, one), clip)
    assert (found.total - right.total).norm() <= 2e-5 * right.total.norm()


@pytest.mark.parametrize("dtype", [torch.float32, *HALF])
@pytest.mark.parametrize(("p", "norm"), [(1, 2), (100, 2), (4, 1)])
def test_what_one_sample_adds_keeps_the_bounds_to_the_last_digit(everywhere, dtype, p, norm):
    """The largest norm of any clipped gradient, measured in float64 and in whatever precision the model runs."""
    model = network().to(dtype)
    x, y = 100 * torch.randn(4, 3, 6, 6).to(dtype), torch.randint(0, 10, (4,))
    flat, clip = FlatParameters(model), Clip(1e-3, p, norm)
    parameters = flat.views(flat.read())
    each = per_sample_gradients("hooks", model, lambda o, t: F.cross_entropy(o.float(), t), parameters, Batch(x, y))
    norms, tops = [], []
    for i in range(4):
        weights = torch.zeros(4, dtype=torch.float64)
        weights[i] = 1
        part = clip.sum(each, weights)
        norms.append(float(torch.linalg.vector_norm(part.total, ord=norm)))
        tops.append(float(part.total.abs().max()))
        assert float(part.norms) > clip.c  # it was clipped
    assert max(norms) <= clip.c
    assert max(tops) <= clip.coordinate_bound
    assert p > 1 or min(norms) >= clip.c * (1 - 1e-5)  # and not by more than it must


@given(st.integers(1, 5), st.integers(1, 3000), st.integers(0, 100))
@settings(max_examples=15)
def test_sizes_of_what_a_sample_adds(m, width, seed):
    generator = torch.Generator(torch.get_default_device()).manual_seed(seed)
    image = torch.randn(m, width, generator=generator, dtype=torch.float64)
    r, g = torch.randn(2, m, width + 8, generator=generator)[:, :, :width]
    shorter, smaller = torch.rand(2, m, generator=generator, dtype=torch.float64)
    shorter[0], smaller[-1], bound = 0.0, 0.0, wide(0.3)
    image[0], r[-1], g[-1] = math.inf, math.nan, math.inf  # not read, as their factors are 0
    device = torch.get_default_device()
    case = [t.to(device) for t in (image, r, shorter, smaller, bound)]
    mine, right = kernels.sizes(*case), clip_module._sizes(*case)
    for here, there in zip((*mine[0], *mine[1]), (*right[0], *right[1]), strict=True):
        torch.testing.assert_close(here, there, rtol=1e-12, atol=0)
    for limit in (0.3, 2.0):
        case = [*(t.to(device) for t in (g, r, shorter, smaller)), limit, 2.0]
        torch.testing.assert_close(kernels.excess(*case), clip_module._excess(*case), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("programs", [1, 4, 8192])
def test_rows_longer_than_a_program_takes_in_one_turn(monkeypatch, programs):
    for name in ("clipping", "embedding"):
        monkeypatch.setattr(importlib.import_module(f"modelmix.gradients.kernels.{name}"), "_PROGRAMS", programs)
    image = torch.randn(2, 2500, dtype=torch.float64)
    g, r = torch.randn(2, 2, 2500)
    one = torch.full((2,), 0.7, dtype=torch.float64)
    for norm in (1, 2):
        torch.testing.assert_close(kernels.powers(g, norm), DenseGradients(g.double()).powers(norm), rtol=1e-13, atol=0)
    mine, right = (sizes(image, r, one, one, wide(0.3)) for sizes in (kernels.sizes, clip_module._sizes))
    torch.testing.assert_close(mine, right, rtol=1e-13, atol=0)
    mine, right = (excess(g, r, one, one, 0.3, 2.0) for excess in (kernels.excess, clip_module._excess))
    torch.testing.assert_close(mine, right, rtol=1e-5, atol=1e-6)


def test_what_is_no_number_has_no_size():
    image, r, one = torch.zeros(2, 5, dtype=torch.float64), torch.zeros(2, 5), torch.ones(2, dtype=torch.float64)
    image[0, 3], r[1, 2] = math.nan, math.nan
    own, whole = kernels.sizes(image, r, one, one, wide(1.0))
    assert torch.isnan(own[0]).tolist() == [True, False]
    assert torch.isnan(whole[0]).all()


@pytest.mark.parametrize("c", [0.02, 1.38e-5])
@pytest.mark.parametrize("p", [1, 25])
@pytest.mark.parametrize("size", [1e-30, 3e30, 1e35, 3e38])
def test_gradients_too_long_for_float32_to_scale_add_nothing(everywhere, monkeypatch, c, p, size):
    """A factor below 2^-126 has fewer than 24 bits: what it gives could be twice the clip."""
    monkeypatch.setattr(clipping, "scales_in_float32", lambda device: True)
    monkeypatch.setattr(basis_module, "_precision", lambda device: torch.float32)
    rows = torch.full((1, 512), size)
    rows[0, :2] = 0
    one, clip = torch.ones(1, dtype=torch.float64), Clip(c, p)
    seen, back = torch.full((1, 2, 4, 4), 0.05), torch.full((1, 5, 4, 4), size)
    outer = OuterGradients(torch.ones(1, 20), torch.full((1, 30), size))
    for g in (DenseGradients(rows), outer, ConvGradients(seen, back, GEOMETRY)):
        total, *_ = clip.sum_traceable([g], one, *clip.limits_on(one.device))
        assert bool(torch.isfinite(total).all())
        assert float(total.norm()) <= c
        assert float(total.abs().max()) <= clip.coordinate_bound
    basis = embedding.Basis(((slice(0, 512), torch.eye(512, 2, dtype=torch.float64)),))
    for whole in (math.inf, math.hypot(2.5 * c, c)):
        e, part = embedding.EmbeddingClip(2.5 * c, c, p, whole).sum(Known(DenseGradients(rows)), basis, one)
        assert bool(torch.isfinite(part.total).all())
        assert float(part.total.norm()) <= c
        assert float((basis.reconstruct(e) + part.total).norm()) <= whole


def test_a_clip_too_small_for_float32_is_refused(monkeypatch):
    limits = Clip(1e-29, 10_000).limits_on
    assert limits(torch.device("cpu"))
    monkeypatch.setattr(clipping, "scales_in_float32", lambda device: True)
    with pytest.raises(ModelMixError, match="at least 1e-30"):
        limits(torch.device("cpu"))


def test_a_sum_of_other_numbers_than_were_measured_is_no_sum(everywhere, monkeypatch):
    torch.manual_seed(0)
    g = ConvGradients(torch.randn(3, 2, 4, 4), torch.randn(3, 5, 4, 4), GEOMETRY)
    one, clip = torch.ones(3, dtype=torch.float64), Clip(0.1)
    limits = clip.limits_on(one.device)
    assert bool(torch.isfinite(clip.sum_traceable([g], one, *limits)[0]).all())
    genuine = kernels.conv_powers
    monkeypatch.setattr(kernels, "conv_powers", lambda *a: genuine(*a) * (1 - 1e-6))
    g = ConvGradients(g.seen, g.back, GEOMETRY)
    assert bool(torch.isnan(clip.sum_traceable([g], one, *limits)[0]).all())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_layer_at_many_positions(everywhere, dtype):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 5, bias=False), nn.Flatten(), nn.Linear(35, 3))
    x, y, one = torch.randn(3, 7, 4), torch.randint(0, 3, (3,)), torch.ones(3, dtype=torch.float64)
    flat, clip = FlatParameters(model), Clip(0.3, 4)
    right = sum_of_chunk("vmap", model, F.cross_entropy, flat.views(flat.read()), Batch(x, y, one), clip)
    engine = Engine(model, F.cross_entropy, (x, y), name="hooks", precision=str(dtype)[6:], compiled=False)
    ours = engine(flat.views(flat.read()), Batch(x, y, one), clip)
    assert (ours.total - right.total).norm() <= (1e-5 if dtype == torch.float32 else 0.03) * right.total.norm()
    for i in range(3):  # what one sample adds, after all rounding
        part = engine(flat.views(flat.read()), Batch(x, y, torch.eye(3, dtype=torch.float64)[i]), clip).total
        assert float(part.norm()) <= clip.c
        assert float(part.abs().max()) <= clip.coordinate_bound


@pytest.mark.parametrize("layer", [nn.Conv1d(4, 6, 3, padding=1, groups=2), nn.Conv1d(4, 3, 2, stride=2, dilation=2)])
def test_one_dimension(everywhere, layer):
    torch.manual_seed(0)
    model = nn.Sequential(layer, nn.Flatten(), nn.LazyLinear(3))
    x, y, one = torch.randn(3, 4, 9), torch.randint(0, 3, (3,)), torch.ones(3, dtype=torch.float64)
    with torch.no_grad():
        model(x)
    flat, clip = FlatParameters(model), Clip(0.3, 4)
    case = (F.cross_entropy, flat.views(flat.read()), Batch(x, y, one), clip)
    ours, right = (sum_of_chunk(name, model, *case) for name in ("hooks", "vmap"))
    torch.testing.assert_close(ours.total, right.total, rtol=1e-4, atol=1e-6)


def test_kernels_that_are_wrong_on_a_machine_are_not_used(everywhere, monkeypatch):
    model = nn.Sequential(network()[:3], nn.Dropout(0.3), nn.Flatten(), nn.Linear(8 * 36, 10))
    x, y = torch.randn(4, 3, 6, 6), torch.randint(0, 10, (4,))
    engine = Engine(model, F.cross_entropy, (x, y), compiled=False)
    engine._check_kernels((x, y))
    assert engine.name == "hooks"
    genuine = kernels.group_norm_backward
    monkeypatch.setattr(kernels, "group_norm_backward", lambda *a: tuple(1.1 * t for t in genuine(*a)))
    with pytest.warns(UserWarning, match="not right on this machine"):
        engine._check_kernels((x, y))
    assert engine.name == "vmap"

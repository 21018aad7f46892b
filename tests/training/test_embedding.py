"""Gradient embedding: the basis, the bounds of what is summed, and whole training steps."""

from __future__ import annotations

import math
import weakref
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from known import Known
from planned import Trainer, make_private
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import modelmix as mm
from modelmix.gradients import Engine, compiled
from modelmix.gradients import clip as clipping
from modelmix.gradients.clip import MARGIN
from modelmix.gradients.forms import DenseGradients, OuterGradients, SparseRowGradients
from modelmix.training import random_labels
from modelmix.training.embedding import Basis, Embedding, EmbeddingClip, columns, find_basis
from modelmix.training.embedding import basis as basis_module
from modelmix.training.embedding import clip as clip_module

SIZES = [(4, 3), (4,), (5, 4), (5,)]  # of a small network: 41 coordinates
D = sum(math.prod(shape) for shape in SIZES)


def flat(rows, shapes=SIZES):
    """Per-sample gradients given as one matrix, in the form that engines give them."""
    pieces = torch.split(rows, [math.prod(shape) for shape in shapes], 1)
    return Known(*(DenseGradients(g.reshape(-1, *shape)) for g, shape in zip(pieces, shapes, strict=True)))


def random_basis(seed=0, ks=(3, 2, 4), stretch=1.0):
    generator = torch.Generator().manual_seed(seed)
    layout = Embedding((torch.zeros(9, 1), torch.zeros(9)), 9, len(ks)).layout(D)
    parts = []
    for (part, _), k in zip(layout, ks, strict=True):
        q = torch.linalg.qr(torch.randn(part.stop - part.start, k, generator=generator, dtype=torch.float64)).Q
        parts.append((part, stretch * q))
    return Basis(tuple(parts))


def dense(basis):
    return torch.block_diag(*[v for _, v in basis.parts])


@pytest.fixture(params=[torch.float64, torch.float32], ids=["float64", "float32"])
def precision(request, monkeypatch):
    """That of a processor, and that of an accelerator, which pads its matrices."""
    monkeypatch.setattr(basis_module, "_precision", lambda device: request.param)
    if request.param == torch.float32:
        monkeypatch.setattr(basis_module, "_padded", lambda size, device: -(-size // 8) * 8)
    return request.param


# The basis.


def test_three_groups_and_a_thousand_vectors_in_proportion_to_square_roots():
    layout = Embedding((torch.zeros(2000, 1), torch.zeros(2000))).layout(268_346)
    assert [part.stop - part.start for part, _ in layout] == [89_448, 89_449, 89_449]
    assert [k for _, k in layout] == [333, 333, 333]
    assert (layout[0][0].start, layout[-1][0].stop) == (0, 268_346)
    assert all(a.stop == b.start for (a, _), (b, _) in pairwise(layout))
    few = Embedding((torch.zeros(7, 1), torch.zeros(7)), 1000, 2).layout(9)
    assert [k for _, k in few] == [4, 5], "never more than coordinates"
    assert [k for _, k in Embedding((torch.zeros(3, 1), torch.zeros(3)), 1000, 2).layout(90)] == [3, 3]


def test_columns_are_those_of_the_flat_vector_wherever_groups_cut():
    rows = torch.randn(6, D)
    assert all(torch.equal(columns(flat(rows), slice(a, a + 9)), rows[:, a : a + 9].double()) for a in range(D - 9))
    back, seen = torch.randn(3, 4), torch.randn(3, 5)
    whole = (back[:, :, None] * seen[:, None, :]).flatten(1).double()
    assert torch.equal(columns(Known(OuterGradients(back, seen)), slice(3, 17)), whole[:, 3:17])


def test_a_part_of_a_layer_is_written_down_alone():
    """Of outer products and of tables, without the rest; of a parameter used twice, the sum of both."""
    g = torch.Generator().manual_seed(0)
    outer = OuterGradients(torch.randn(3, 4, generator=g), torch.randn(3, 5, generator=g))
    rows = SparseRowGradients.of(torch.randn(3, 6, 5, generator=g), torch.randint(4, (3, 6), generator=g), 4)
    for gradients in (outer, rows, DenseGradients(torch.randn(3, 4, 5, generator=g))):
        right = gradients.dense().flatten(1)
        for low, high in ((0, 20), (3, 4), (4, 15), (7, 20), (10, 15)):
            torch.testing.assert_close(gradients.coordinates(low, high), right[:, low:high])

    class Twice(Known):
        def of(self, names):
            yield from super().of(names)
            yield from super().of(names)

    for part in (slice(0, 20), slice(3, 17)):
        torch.testing.assert_close(columns(Twice(outer), part), 2 * columns(Known(outer), part))
        assert columns(Known(outer), part, torch.float32).dtype == torch.float32


def test_columns_of_no_samples():
    assert columns(flat(torch.zeros(0, D)), slice(3, 17)).shape == (0, 14)
    e, part = CLIPS[1].sum(flat(torch.zeros(0, D)), random_basis(), torch.ones(0))
    assert not e.any()
    assert not part.total.any()


def test_public_gradients_are_multiplied_as_they_are_in_bfloat16_alone():
    """Products of float64 are not summed in float32, and those of float16 leave its range."""
    gpu, cpu = torch.device("cuda"), torch.device("cpu")
    assert basis_module._multiplied_in(torch.bfloat16, gpu) == torch.bfloat16
    for kind in (None, torch.float64, torch.float32, torch.float16):
        assert basis_module._multiplied_in(kind, gpu) == torch.float32
    assert basis_module._multiplied_in(torch.bfloat16, cpu) == torch.float64


def test_columns_are_padded_with_zeros(monkeypatch):
    monkeypatch.setattr(basis_module, "_padded", lambda size, device: -(-size // 8) * 8)
    found = columns(flat(torch.full((2, D), math.inf)), slice(1, 10))
    assert found.shape == (2, 16)
    assert torch.isinf(found[:, :9]).all()
    assert (found[:, 9:] == 0).all()


@pytest.mark.parametrize("shape", [(), (3,), (4, 2, 3, 3)])
def test_columns_do_not_hang_on_the_order_in_memory(shape):
    values = torch.randn(2, *shape)
    turned = values.to(memory_format=torch.channels_last) if values.dim() == 4 else values
    parts = [DenseGradients(torch.randn(2, 5)), DenseGradients(turned), DenseGradients(torch.randn(2, 1))]
    whole = torch.cat([g.values.flatten(1) if g.values.dim() > 1 else g.values[:, None] for g in parts], 1)
    for low, high in ((0, whole.shape[1]), (2, whole.shape[1] - 1), (5, whole.shape[1])):
        assert torch.equal(columns(Known(*parts), slice(low, high)), whole[:, low:high].double())


def test_padding_makes_public_chunks_one_shape_and_is_told_apart():
    embedding = Embedding((torch.arange(10.0)[:, None], torch.arange(10)))
    for padded in (False, True):
        chunks = list(embedding.chunks(4, torch.device("cpu"), padded))
        assert torch.cat([x[:count] for x, _, count in chunks]).flatten().tolist() == list(range(10))
        assert [len(y) for _, y, _ in chunks] == ([4, 4, 4] if padded else [4, 4, 2])
    assert [len(y) for _, y, _ in embedding.chunks(64, torch.device("cpu"), True)] == [10]
    assert [len(y) for _, y, _ in embedding.chunks(6, torch.device("cpu"), True)] == [5, 5], "little is padding"


def test_the_basis_is_orthonormal_and_holds_what_public_gradients_span(precision):
    embedding = Embedding((torch.zeros(50, 1), torch.zeros(50)), 15, 3)
    generator = torch.Generator().manual_seed(0)
    low = torch.randn(50, 4, generator=generator) @ torch.randn(4, D, generator=generator)
    chunks = [flat(part) for part in torch.split(low, 11)]
    basis = find_basis(embedding.layout(D), chunks, torch.Generator().manual_seed(1))
    v = dense(basis)
    # Rank four: the fifth vector of each group has nothing to point to.
    kept = torch.tensor([1.0, 1, 1, 1] + 2 * [1.0, 1, 1, 1, 0], dtype=torch.float64)
    near, real = 1e-6, kept > 0
    if precision == torch.float32:  # where rounding cannot be told from a direction, it may stand for one
        kept, near = torch.where(real, kept, (v.T @ v).diagonal().round()), 1e-3
    assert torch.allclose(v.T @ v, torch.diag(kept), atol=1e-12)
    low = low.double()
    assert ((low @ v @ v.T - low).norm() <= near * low.norm()).all()
    sum_traceable = find_basis(embedding.layout(D), [flat(low.float())], torch.Generator().manual_seed(1))
    off = v[:, real] - dense(sum_traceable)[:, real]
    assert off.norm() <= near, "the size of chunks does not matter"
    x = torch.randn(basis.size, dtype=torch.float64)
    assert torch.allclose(basis.reconstruct(x), v @ x)


def test_chunks_of_public_gradients_may_lie_in_one_place(precision):
    """Each written over the one before, as a replayed graph does."""
    rows = torch.randn(30, 208, generator=torch.Generator().manual_seed(0)).to(precision)
    layout, buffer = Embedding((torch.zeros(30, 1), torch.zeros(30)), 12, 3).layout(208), torch.empty_like(rows[:10])
    replayed = (Known(DenseGradients(buffer.copy_(part))) for part in torch.split(rows, 10))
    kept = [Known(DenseGradients(part)) for part in torch.split(rows, 10)]
    one, other = (dense(find_basis(layout, chunks, torch.Generator().manual_seed(1))) for chunks in (replayed, kept))
    assert torch.equal(one, other)


@pytest.mark.parametrize("kind", [torch.float64, torch.float32])
@pytest.mark.parametrize("spread", [0.0, -4.0, -9.0])
def test_columns_are_orthonormal_however_alike_they_were(spread, kind):
    g = torch.Generator().manual_seed(0)
    left, _ = torch.linalg.qr(torch.randn(300, 20, generator=g, dtype=torch.float64))
    right, _ = torch.linalg.qr(torch.randn(20, 20, generator=g, dtype=torch.float64))
    vectors = left * torch.logspace(0, spread, 20, dtype=torch.float64) @ right
    assert (basis_module._by_cholesky(vectors, 0.0) is None) == (spread < -5)  # then by the slower way
    if kind == torch.float32 and spread < -5:
        return  # directions are lost when it is rounded
    found = basis_module._orthonormal(vectors.to(kind))
    near = {torch.float64: 1e-12, torch.float32: 2.0**-14}[kind]
    torch.testing.assert_close(found.T @ found, torch.eye(20, dtype=torch.float64), rtol=0, atol=near)
    lost = 1e-6 if kind == torch.float64 else 1e-6 * 10**-spread  # by rounding what came in
    torch.testing.assert_close(found @ (found.T @ left), left, rtol=0, atol=lost)


@pytest.mark.parametrize(("spread", "rounds"), [(-1.0, 1), (-5.9, 2)])
def test_one_round_is_made_where_it_is_enough(monkeypatch, spread, rounds):
    g, made = torch.Generator().manual_seed(0), []
    left, _ = torch.linalg.qr(torch.randn(300, 20, generator=g, dtype=torch.float64))
    vectors = left * torch.logspace(0, spread, 20, dtype=torch.float64)
    right = torch.linalg.cholesky_ex
    monkeypatch.setattr(torch.linalg, "cholesky_ex", lambda x: (made.append(1), right(x))[1])
    found = basis_module._by_cholesky(vectors, 2.0**-14)
    assert len(made) == rounds
    torch.testing.assert_close(found.T @ found, torch.eye(20, dtype=torch.float64), rtol=0, atol=2.0**-14)


def test_a_start_follows_the_strongest_directions():
    """One power iteration squares the spectrum: of public gradients with a decaying one, most is kept."""
    spectrum = 0.8 ** torch.arange(D)
    rows = torch.randn(200, D, generator=torch.Generator().manual_seed(2)) * spectrum
    basis = find_basis([(slice(0, D), 8)], [flat(rows)], torch.Generator().manual_seed(3))
    v = dense(basis)
    kept = (rows.double() @ v).square().sum() / rows.double().square().sum()
    assert kept > 0.9 * (spectrum[:8].square().sum() / spectrum.square().sum())


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_public_gradients_that_are_not_finite_make_no_basis(bad):
    rows = torch.randn(9, D)
    rows[4, 30] = bad
    with pytest.raises(mm.ModelMixError, match="of a public sample is not finite"):
        find_basis([(slice(0, 20), 3), (slice(20, D), 3)], [flat(rows)], torch.Generator().manual_seed(0))


# What is summed.

CLIPS = [EmbeddingClip(5.0, 2.0), EmbeddingClip(5.0, 2.0, 4, math.hypot(5, 2)), EmbeddingClip(0.1, 3.0, 25, 3.0)]


def contribution(clip, basis, row):
    e, part = clip.sum(flat(row[None]), basis, torch.ones(1))
    return e, part.total, basis.reconstruct(e) + part.total


@pytest.mark.usefixtures("precision")
@pytest.mark.parametrize("clip", CLIPS)
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    size=st.floats(1e-3, 1e4), hot=st.integers(0, D - 1), heat=st.floats(0, 1e4), seed=st.integers(0, 50),
    stretch=st.sampled_from([1.0, 0.3, 1.7]),
)  # fmt: skip
def test_one_sample_keeps_every_bound_whatever_the_basis(clip, size, hot, heat, seed, stretch):
    row = size * torch.randn(D, generator=torch.Generator().manual_seed(seed))
    row[hot] += heat
    e, r, whole = contribution(clip, random_basis(seed, stretch=stretch), row)
    assert torch.isfinite(whole).all()
    root = math.sqrt(clip.p)
    assert e.norm() <= clip.c0
    assert r.norm() <= clip.c1
    assert r.abs().max() <= clip.c1 / root
    assert whole.norm() <= clip.c
    assert whole.abs().max() <= clip.c / root


@given(st.integers(0, 200), st.floats(0.1, 30), st.sampled_from([0.0, 0.5, 0.9, 1.0]))
def test_a_foreseen_factor_is_enough_and_not_much_more(seed, size, truncated):
    """Of t: every coordinate of t a v + (t s r, truncated) is below the bound; some is at it, if it was above."""
    generator = torch.Generator().manual_seed(seed)
    v, r = size * torch.randn(2, 1, 40, generator=generator, dtype=torch.float64)
    one, bound, cut = torch.ones(1, dtype=torch.float64), 2.0, 2.0 * truncated
    excess, squares = clip_module._excess(v + r, r, one, one, cut, bound)
    torch.testing.assert_close(squares, (v + r.clamp(-cut, cut)).square().sum(1))
    t = 1 / excess.clamp_min(1.0)
    parts = t * v, (t * r).clamp(-cut, cut)
    assert sum(parts).abs().max() <= bound * (1 + 1e-12)
    assert t == 1 or sum(parts).abs().max() >= bound * (1 - 1e-12)


@pytest.mark.parametrize("size", [1.0, 1e10, 1e14, 1e20, 1e35])
@pytest.mark.parametrize("held", [True, False], ids=["nothing left over", "nothing embedded"])
def test_what_a_sample_adds_does_not_hang_on_where_in_a_batch_it_stands(size, held):
    """Products of matrices round a row differently, by its place and by their number; that may not be scaled up."""
    generator = torch.Generator().manual_seed(0)
    v, others = (torch.randn(n, 400, generator=generator, dtype=torch.float64) for n in (20, 101))
    v = torch.linalg.qr(v.T).Q
    row = others[-1] @ v @ v.T if held else others[-1] - others[-1] @ v @ v.T
    clip, found = CLIPS[1], []
    for m in (1, 4, 16, 100, 101):
        rows, drawn = others[:m].clone(), torch.zeros(m)
        rows[-1], drawn[-1] = size * row, 1.0
        e, part = clip.sum(Known(DenseGradients(rows)), Basis(((slice(0, 400), v),)), drawn)
        found.append(torch.cat([e / clip.c0, part.total / clip.c1]))
    assert all((here - found[0]).norm() <= 1e-10 for here in found)


@pytest.mark.parametrize("left", [True, False], ids=["left over", "embedded"])
def test_what_may_be_rounding_is_not_scaled_up_to_a_bound(precision, left):
    """Half a thousandth of a gradient reaches half of its bound; half a 32nd, where products are rough."""
    least = {torch.float64: 2.0**-10, torch.float32: 2.0**-5}[precision]
    basis, any_row = random_basis(), torch.randn(D, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    inside = dense(basis) @ dense(basis).T @ any_row
    inside, outside = (part / part.norm() for part in (inside, any_row - inside))
    row = inside + least / 2 * outside if left else outside + least / 2 * inside
    e, r, _ = contribution(EmbeddingClip(5.0, 2.0), basis, 1e6 * row)
    assert (r.norm() / 2.0 if left else e.norm() / 5.0) == pytest.approx(0.5, rel=1e-3)


@pytest.mark.parametrize("enough", ["_in_proportion", "_for_certain"])
def test_a_sample_is_not_shrunk_for_another_that_sticks_out(monkeypatch, enough):
    """Where nothing is foreseen, and where shrinking in proportion does not help either."""
    monkeypatch.setattr(EmbeddingClip, "_foreseen", lambda *a: torch.ones_like(a[-1]))
    if enough == "_for_certain":
        monkeypatch.setattr(EmbeddingClip, "_in_proportion", lambda *a: torch.ones_like(a[-1]))
    generator = torch.Generator().manual_seed(0)
    rows, clip = torch.randn(12, D, generator=generator), CLIPS[1]
    rows[::2] *= 1e-2  # these fit
    rows[1::2, 5] *= 100  # these do not
    basis = random_basis(stretch=1.5)
    e, part = clip.sum(flat(rows), basis, torch.ones(12))
    single = [contribution(clip, basis, row) for row in rows]
    assert torch.isfinite(part.total).all()
    torch.testing.assert_close(e, sum(s[0] for s in single))
    torch.testing.assert_close(part.total, sum(s[1] for s in single))
    torch.testing.assert_close(single[0][2], contribution(EmbeddingClip(5.0, 2.0), basis, rows[0])[2])


@pytest.mark.parametrize(("clip", "hot"), [(CLIPS[1], 30.0), (EmbeddingClip(2.0, 2.0, 1, 2.0), 1.0)])
def test_most_samples_are_summed_once(monkeypatch, clip, hot):
    """What sticks out is foreseen: the slow pass, in float64, is made once."""
    rows, passes, right = 3 * torch.randn(64, D).sign(), [], EmbeddingClip._summed
    rows[::2, 5] *= hot
    monkeypatch.setattr(EmbeddingClip, "_summed", lambda *a: (passes.append(1), right(*a))[1])
    _, part = clip.sum(flat(rows), random_basis(), torch.ones(64))
    assert torch.isfinite(part.total).all()
    assert len(passes) == 1


@pytest.mark.parametrize("shrunk_by", ["_foreseen", "_in_proportion"])
def test_what_shrinking_leaves_too_small_for_float32_adds_nothing(monkeypatch, shrunk_by):
    monkeypatch.setattr(clipping, "scales_in_float32", lambda device: True)
    monkeypatch.setattr(EmbeddingClip, "_foreseen", lambda *a: torch.ones_like(a[-1]))
    monkeypatch.setattr(EmbeddingClip, shrunk_by, lambda *a: torch.full_like(a[-1], 2.0**-60))
    row = torch.randn(D, generator=torch.Generator().manual_seed(0))
    row[5] *= 100
    whole = contribution(CLIPS[1], random_basis(stretch=1.5), 2.0**60 * row)[2]
    assert torch.equal(whole, torch.zeros_like(whole))


def test_a_short_gradient_passes_whole():
    row = 0.01 * torch.randn(D)
    assert torch.allclose(contribution(CLIPS[1], random_basis(), row)[2], row.double(), atol=1e-15)


def test_the_residual_is_of_the_unclipped_embedding():
    """A gradient in the span of the basis has no residual, however much of it the clip takes off."""
    basis = random_basis()
    inside = dense(basis) @ torch.full((basis.size,), 1e3, dtype=torch.float64)
    e, part = EmbeddingClip(5.0, 2.0).sum(Known(DenseGradients(inside[None])), basis, torch.ones(1))
    assert e.norm() == pytest.approx(5.0, rel=2 * MARGIN)
    assert part.total.norm() < 1e-9


def test_sums_are_sums_of_single_samples():
    rows, basis, clip = 3 * torch.randn(12, D), random_basis(), CLIPS[1]
    rows[:, 5] *= 20
    weights = torch.ones(12)
    weights[[3, 7]] = 0.0
    e, part = clip.sum(flat(rows), basis, weights)
    alone = [contribution(clip, basis, row) for row, w in zip(rows, weights, strict=True) if w]
    assert torch.allclose(e, sum(a[0] for a in alone), atol=1e-12)
    assert torch.allclose(part.total, sum(a[1] for a in alone), atol=1e-12)
    assert part.norms.numel() == 10
    v = dense(basis)
    residual = rows.double() - rows.double() @ v @ v.T
    assert torch.allclose(part.norms, residual.norm(dim=1)[weights > 0])
    assert int(part.truncated.sum()) > 0


@pytest.mark.parametrize("clip", CLIPS)
def test_where_layers_end_does_not_matter(precision, clip):
    generator = torch.Generator().manual_seed(0)
    rows = (3 * torch.randn(12, 204, generator=generator)).to(precision)
    rows[:, 5] *= 20
    layout = Embedding((torch.zeros(50, 1), torch.zeros(50)), 30, 3).layout(204)
    basis = find_basis(layout, [Known(DenseGradients(rows))], torch.Generator().manual_seed(1))
    rows[4, 77] = math.nan
    weights = torch.ones(12)
    weights[7] = 0.0
    (e, found), (right_e, right) = (
        clip.sum(g, basis, weights) for g in (Known(DenseGradients(rows)), flat(rows, [(100,), (4, 26)]))
    )
    torch.testing.assert_close(e, right_e)
    torch.testing.assert_close(found.total, right.total)
    torch.testing.assert_close(found.norms, right.norms, equal_nan=True)
    assert torch.isnan(found.norms).sum() == 1
    assert torch.equal(found.truncated, right.truncated)


@pytest.mark.parametrize("clip", CLIPS)
def test_gradients_are_left_as_they_are(clip, precision):
    """Also where autograd gives samples with one gradient the same memory: residuals take no one's place."""
    row, basis = torch.randn(1, 48).to(precision), Basis(((slice(0, 48), torch.eye(48, 3, dtype=torch.float64)),))
    for shared in (row, row[:, :1]):
        rows = shared.expand(5, 48)
        found, right = (clip.sum(Known(DenseGradients(g)), basis, torch.ones(5)) for g in (rows, rows.clone()))
        torch.testing.assert_close(found[0], right[0])
        torch.testing.assert_close(found[1].total, right[1].total)
        assert torch.equal(rows, shared.expand(5, 48).clone())


@pytest.fixture
def written(monkeypatch):
    """Where the groups begin that are written down; each must be gone before the next comes."""
    starts, alive, right = [], [], columns

    def watched(gradients, part, kind=None):
        assert not [matrix for matrix in alive if matrix() is not None], "those of another group are still there"
        found = right(gradients, part, kind)
        alive.append(weakref.ref(found))
        starts.append(part.start)
        return found

    for module in (basis_module, clip_module):
        monkeypatch.setattr(module, "columns", watched)
    return starts


def test_public_gradients_are_written_down_one_group_at_a_time(written):
    layout = Embedding((torch.zeros(50, 1), torch.zeros(50)), 9, 3).layout(D)
    chunks = (flat(rows) for rows in torch.randn(2, 10, D))
    find_basis(layout, chunks, torch.Generator().manual_seed(0))
    assert written == 2 * [part.start for part, _ in layout]


@pytest.mark.parametrize("clip", CLIPS)
def test_groups_are_written_down_one_at_a_time_and_the_last_is_not_twice(written, clip):
    """Forwards and backwards in turns: a pass begins with what the one before it had last."""
    rows, basis = 3 * torch.randn(6, D), random_basis()
    clip.sum(flat(rows), basis, torch.ones(6))
    a, b, c = (part.start for part, _ in basis.parts)
    # V e + r needs g and r together, so that there no group is spared in the pass that foresees it.
    assert written == ([a, b, c, b, a] if clip.c == math.inf else [a, b, c, c, b, a, b, c])


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_gradient_that_is_not_finite_adds_nothing_and_is_reported(bad):
    rows, basis = torch.randn(3, D), random_basis()
    rows[1, 20] = bad
    e, part = CLIPS[1].sum(flat(rows), basis, torch.ones(3))
    others = CLIPS[1].sum(flat(rows[[0, 2]]), basis, torch.ones(2))
    assert torch.allclose(e, others[0])
    assert torch.allclose(part.total, others[1].total)
    assert torch.isfinite(part.norms).tolist() == [True, False, True]


@pytest.mark.parametrize("at", [0, 20], ids=["embedded", "left over"])
def test_a_gradient_too_long_to_be_measured_adds_nothing_and_is_reported(at):
    rows, basis = torch.randn(3, D, dtype=torch.float64), Basis(((slice(0, D), torch.eye(D, 3, dtype=torch.float64)),))
    rows[1, at] = 1e200
    e, part = CLIPS[1].sum(flat(rows), basis, torch.ones(3))
    others = CLIPS[1].sum(flat(rows[[0, 2]]), basis, torch.ones(2))
    assert torch.allclose(e, others[0])
    assert torch.allclose(part.total, others[1].total)
    assert torch.isfinite(part.norms).tolist() == [True, False, True]


@pytest.mark.parametrize("broken", ["c0", "c1", "c", "top"])
def test_a_sum_past_a_bound_is_no_number(monkeypatch, broken):
    """If clipping were wrong for one of two samples, the sum that results is one that no step takes."""
    clip, right = CLIPS[1], clip_module._scale
    whole = [clip.c, clip.c / 2, (clip.c - 2) / 2]
    targets = {"c0": [5.0], "c1": [2.0], "c": whole, "top": whole}[broken]
    monkeypatch.setattr(clip_module, "_scale", lambda c, s: torch.ones_like(s) if c in targets else right(c, s))
    if targets is whole:
        monkeypatch.setattr(EmbeddingClip, "_foreseen", lambda *a: torch.ones_like(a[-1]))
    # Along one basis vector, and along what is left over from a hot coordinate: |V e + r| is then near its bound.
    row = 100 * torch.randn(D, generator=torch.Generator().manual_seed(0))
    basis = random_basis(stretch=1.5 if broken == "c" else 1.0)
    if broken == "top":
        groups = slice(0, 20), slice(20, D)
        basis = Basis(tuple((part, torch.eye(part.stop - part.start, 3, dtype=torch.float64)) for part in groups))
        row = 100 * torch.eye(D)[20]
    rows = torch.stack([row, 1e-4 * row])
    _, part = clip.sum(flat(rows), basis, torch.ones(2))
    assert not torch.isfinite(part.total).any()


def test_a_sum_is_past_a_bound_by_little(monkeypatch):
    """What is kept of a residual's size is that of the residual."""
    right = clip_module._scale
    monkeypatch.setattr(clip_module, "_scale", lambda c, s: right(c, s) * (1 + 1e-4 * (c == 2.0)))
    rows = 100 * torch.randn(2, D, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    _, part = EmbeddingClip(5.0, 2.0).sum(Known(DenseGradients(rows)), random_basis(), torch.ones(2))
    assert not torch.isfinite(part.total).any()


# Whole steps.


class Push(nn.Module):
    """The gradient of every sample is its own input, a vector of d numbers."""

    def __init__(self, d):
        super().__init__()
        self.w = nn.Parameter(torch.zeros(d))

    def forward(self, x):
        return x @ self.w[:, None]


def product(outputs, targets):
    return outputs.sum()


def small_data(n=60, seed=0):
    generator = torch.Generator().manual_seed(seed)
    y = torch.randint(3, (n,), generator=generator)
    return torch.randn(n, 6, generator=generator) + 2 * nn.functional.one_hot(y, 6), y


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))


def public(n=20):
    return Embedding((small_data(n, 9)[0], random_labels(n, 3)), 6, 3)


def trainer(mechanism, embedding=None, **more):
    options = {"clip": 2.0, "lr": 0.2, "seed": 1, **more}
    return Trainer(
        network(), nn.CrossEntropyLoss(), small_data(), mechanism, embedding=embedding or public(), **options
    )


PLAIN, MIXED = mm.EmbeddingMechanism(1.0, 0.5), mm.EmbeddingMechanism(1.0, 0.5, 3.0, 4)


def test_a_mechanism_names_its_clip():
    assert EmbeddingClip.of(PLAIN, 2.0) == EmbeddingClip(5.0, 2.0)
    assert EmbeddingClip.of(MIXED, 2.0) == EmbeddingClip(5.0, 2.0, 4, 2 * math.hypot(2.5, 1))


def test_a_step_clips_as_its_mechanism_says(monkeypatch):
    right, clips = EmbeddingClip.sum, []
    monkeypatch.setattr(EmbeddingClip, "sum", lambda clip, *a: (clips.append(clip), right(clip, *a))[1])
    for mechanism in (PLAIN, MIXED):
        trainer(mechanism, performance=mm.Performance(chunk=64)).run(1, progress=False)
    assert clips == [EmbeddingClip.of(PLAIN, 2.0), EmbeddingClip.of(MIXED, 2.0)]


@pytest.mark.parametrize("mechanism", [PLAIN, MIXED], ids=["plain", "mixed"])
def test_noise_of_both_releases_has_its_size(mechanism):
    """Variance in the directions of the basis, and across them, within 5 standard errors: a false alarm in 10^6."""
    d, k, c1, steps = 900, 90, 2.0, 6
    generator = torch.Generator().manual_seed(0)
    x = torch.zeros(4, d)
    embedding = Embedding((torch.randn(300, d, generator=generator), torch.zeros(300)), k, 3)
    run = Trainer(Push(d), product, (x, torch.zeros(4)), mechanism, clip=c1, lr=1.0, embedding=embedding, seed=5)
    along, across = [], []
    for _ in range(steps):
        draws = run._step.randomness.step()
        rows = [Known(DenseGradients(embedding.source.inputs))]
        v = dense(find_basis(embedding.layout(d), rows, draws.generator("basis")))
        before = run.state
        run.run(1, progress=False)
        centre = 0.5 * (before.last + before.previous) if mechanism.mixed else before.last
        added = (centre - run.state.last) * 2.0 / c1  # B = 2; the private gradients are zero
        if mechanism.mixed:
            gap = (before.last - before.previous).abs().clamp_min(3.0 * c1 / 2)
            uniform = (draws.uniform("mixing", d) - 0.5) * gap * torch.where(before.last < before.previous, -1, 1)
            added = added + uniform * 2.0 / c1
        along.append(v.T @ added)
        across.append(added - v @ along[-1])
    for found, count, variance in (
        (along, steps * k, 2.5**2 + 1),
        (across, steps * (d - k), 1.0),
    ):
        measured = float(torch.cat(found).square().sum()) / count
        assert abs(measured / variance - 1) < 5 * math.sqrt(2 / count)


def test_a_step_is_the_algorithm():
    """Against the settings' seven lines written out, at a noise too small to see."""
    run = trainer(mm.EmbeddingMechanism(1e-9, 1.0), momentum=0.0, weight_decay=0.1)
    x, y = small_data()
    start = run.state.last

    def rows(inputs, targets):
        found = []
        for a, b in zip(inputs, targets, strict=True):
            model = network()
            nn.functional.cross_entropy(model(a[None]), b[None]).backward()
            found.append(torch.cat([p.grad.flatten() for p in model.parameters()]).double())
        return torch.stack(found)

    source = public().source
    g, generator = rows(source.inputs, source.targets), run._step.randomness.step().generator("basis")
    layout = public().layout(g.shape[1])
    starts = [torch.randn(p.stop - p.start, k, generator=generator, dtype=torch.float64) for p, k in layout]
    blocks = [torch.linalg.qr(g[:, p].T @ g[:, p] @ o).Q for (p, _), o in zip(layout, starts, strict=True)]
    v = torch.block_diag(*blocks)
    update = 0.0
    for one in rows(x, y):
        e = v.T @ one
        r = one - v @ e
        update = update + v @ (e * min(1, 5 / e.norm())) + r * min(1, 2 / r.norm())
    run.run(1, progress=False)
    assert torch.allclose(run.state.last, start - 0.2 * (update / 60 + 0.1 * start), atol=1e-6)


@pytest.mark.parametrize("rule", [{}, {"rule": "alternate"}, {"momentum": 0.9, "ema": 0.9}])
def test_chunks_and_engines_do_not_change_a_run(rule, monkeypatch):
    monkeypatch.setattr(compiled, "_BACKEND", "aot_eager")
    ways = [{}, {"chunk": 7}, {"engine": "vmap", "chunk": 64}, {"compiled": True, "chunk": 7}]
    states = [trainer(MIXED, performance=mm.Performance(**way), **rule).run(4, progress=False).state for way in ways]
    for other in states[1:]:
        assert torch.allclose(states[0].last, other.last, atol=1e-5)


def test_public_gradients_may_be_rounded_and_private_ones_are_not(monkeypatch):
    """Public ones are multiplied in the precision in which the model runs, if the device is fast in it."""
    kinds, right = [], columns
    monkeypatch.setattr(basis_module, "_multiplied_in", lambda precision, device: precision or torch.float64)
    monkeypatch.setattr(basis_module, "_add_product", lambda total, a, b: total.add_((a @ b).to(total.dtype)))
    for module in (basis_module, clip_module):
        monkeypatch.setattr(module, "columns", lambda g, part, kind=None: (kinds.append(kind), right(g, part, kind))[1])
    run = trainer(mm.EmbeddingMechanism(1.0, 1.0), performance=mm.Performance(chunk=64, precision="bfloat16"))
    run.run(1, progress=False)
    assert kinds == 3 * [torch.bfloat16] + 5 * [None]


@pytest.mark.parametrize("mechanism", [PLAIN, MIXED], ids=["plain", "mixed"])
def test_what_is_written_over_does_not_change_a_run(mechanism, monkeypatch):
    """A compiled chunk may lie where the one before it lay."""
    monkeypatch.setattr(compiled, "_BACKEND", "aot_eager")
    right, buffers = compiled.CompiledGraph.__call__, {}

    def in_place(line, *case):
        out = right(line, *case)
        mine = buffers.setdefault(id(line), [torch.empty_like(t) for t in out])
        for buffer, t in zip(mine, out, strict=True):
            buffer.copy_(t)
        return tuple(mine)

    monkeypatch.setattr(compiled.CompiledGraph, "__call__", in_place)
    states = []
    for way in ({"compiled": False}, {"compiled": True, "chunk": 7}):
        more = {"performance": mm.Performance(precision="float64", **way)}
        states.append(trainer(mechanism, momentum=0.5, **more).run(3, progress=False).state)
    assert buffers
    torch.testing.assert_close(states[0].last, states[1].last, rtol=0, atol=1e-9)


class Live(TorchDispatchMode):
    """How many numbers there are at most, at one time, in tensors with a row for every sample."""

    def __init__(self, samples):
        super().__init__()
        self.samples, self.alive, self.most, self.largest = samples, {}, 0, 0

    def __torch_dispatch__(self, function, types, arguments=(), named=None):
        out = function(*arguments, **(named or {}))
        for t in tree_leaves(out):
            if isinstance(t, torch.Tensor) and t.dim() > 1 and t.shape[0] == self.samples:
                storage = t.untyped_storage()
                numbers = storage.nbytes() // t.element_size()
                self.alive[storage._cdata] = weakref.ref(t), numbers
                self.largest = max(self.largest, numbers)
        self.alive = {at: (t, n) for at, (t, n) in self.alive.items() if t() is not None}
        self.most = max(self.most, sum(n for _, n in self.alive.values()))
        return out


def test_what_layers_saw_of_a_chunk_is_gone_before_the_next(monkeypatch):
    alive, right = [], Engine.gradients

    def gradients(engine, *chunk):
        assert not [seen for seen in alive if seen() is not None]
        found = right(engine, *chunk)
        alive.extend(weakref.ref(t) for call in found._calls for t in call.seen)
        return found

    monkeypatch.setattr(Engine, "gradients", gradients)
    run = trainer(replace(MIXED, sample_rate=1.0), performance=mm.Performance(device="cpu", chunk=7))
    run.run(2, progress=False)
    assert len(alive) == 2 * (3 + 9) * 4, "chunks of public and private samples, two layers of two tensors"


@pytest.mark.parametrize("engine", ["hooks", "vmap", "loop"])
@pytest.mark.parametrize("mechanism", [PLAIN, MIXED], ids=["plain", "mixed"])
def test_never_more_than_one_groups_gradients_are_held(engine, mechanism):
    """Of 48 samples at once, in a network whose gradients are many times what its layers see."""
    torch.manual_seed(0)
    layers = [layer for _ in range(8) for layer in (nn.Linear(40, 40), nn.Tanh())]
    model, samples, groups = nn.Sequential(*layers, nn.Linear(40, 3)), 48, 4
    x, y = torch.randn(samples, 2, 40), torch.randint(3, (samples,))

    def loss(outputs, targets):
        return nn.functional.cross_entropy(outputs.mean(1), targets)

    public = Embedding((x.clone(), y.clone()), 8, groups)
    run = Trainer(
        model, loss, (x, y), replace(mechanism, sample_rate=1.0), clip=1.0, lr=0.1, embedding=public, seed=0,
        performance=mm.Performance(device="cpu", engine=engine, chunk=samples),
    )  # fmt: skip
    d = sum(p.numel() for p in model.parameters())
    with Live(samples) as live:
        run.run(1, progress=False)
    group, layer, seen = samples * d / groups, samples * 1640, samples * 2 * 40 * 2 * len(layers)
    assert live.largest <= 1.01 * group
    # A group in float64 and, layer by layer or all of them by a pass, as they come; where V e + r is bounded, g, r,
    # V e and what is scaled of them.
    more = {"plain": 2 * group + layer, "mixed": 6 * group + layer}["mixed" if mechanism.mixed else "plain"]
    assert live.most <= more + seen
    assert mechanism.mixed or live.most < samples * d, "that is less than all gradients"


def test_the_ledger_holds_the_mechanism_and_epsilon_is_of_it():
    run = trainer(MIXED).run(3, progress=False)
    assert run.ledger.phases == mm.Ledger().add(MIXED, 3).phases
    assert run.epsilon(1e-5) == mm.epsilon(MIXED, 1e-5, steps=3)
    follows = trainer(PLAIN, tau=0.1, lr=0.2).mechanism_at(1)
    assert follows == mm.EmbeddingMechanism(1.0, 0.5, 0.1 / 0.2 * 30 / 2.0)


@pytest.mark.parametrize("mechanism", [PLAIN, MIXED], ids=["plain", "mixed"])
def test_resuming_repeats_the_same_run(tmp_path, mechanism):
    whole = trainer(mechanism, momentum=0.5).run(6, progress=False)
    trainer(mechanism, momentum=0.5, folder=tmp_path).run(4, evaluate_every=2, progress=False)
    again = trainer(mechanism, momentum=0.5, folder=tmp_path, resume=True)
    assert again.step == 4
    again.run(2, progress=False)
    assert torch.equal(again.state.last, whole.state.last)
    assert mm.Ledger.load(tmp_path / "ledger.json") == whole.ledger
    other = Embedding((small_data(20, 8)[0], random_labels(20, 3)), 6, 3)
    with pytest.raises(mm.ModelMixError, match="embedding"):
        trainer(mechanism, other, momentum=0.5, folder=tmp_path, resume=True)


def test_it_learns():
    run = trainer(mm.EmbeddingMechanism(0.05, 0.5), lr=0.5, test_set=small_data(200, 4)).run(40, progress=False)
    assert run.metrics[-1]["test_accuracy"] > 0.8


# Refusals.


def test_account_and_step_must_both_embed():
    with pytest.raises(mm.UnprovedError, match="counts on one"):
        trainer(mm.Mechanism(1.0, 0.5))
    with pytest.raises(mm.UnprovedError, match="would not embed"):
        Trainer(network(), nn.CrossEntropyLoss(), small_data(), PLAIN, clip=2.0, lr=0.1)
    with pytest.raises(mm.UnprovedError, match="counts on one"):
        trainer(mm.Ledger().add(PLAIN, 2).add(mm.Mechanism(1.0, 0.5), 2))
    model = network()
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(*small_data()), batch_size=10)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with pytest.raises(mm.UnprovedError, match="would not embed"):
        make_private(model, optimizer, loader, nn.CrossEntropyLoss(), plan=mm.Plan.of(PLAIN, 3), clip=1.0)


def test_public_labels_must_be_of_the_model():
    with pytest.raises(mm.ModelMixError, match="public labels"):
        trainer(PLAIN, Embedding((small_data(20, 9)[0], torch.full((20,), 3)), 6, 3))
    with pytest.raises(mm.ModelMixError, match="groups"):
        trainer(PLAIN, Embedding((small_data(20, 9)[0], random_labels(20, 3)), 6, 1000))


@pytest.mark.parametrize("count", [1, 2, 4])
def test_every_sample_has_its_own_weight(count):
    with pytest.raises(mm.ModelMixError, match="cannot be summed with"):
        CLIPS[0].sum(flat(torch.randn(3, D)), random_basis(), torch.ones(count))


def test_no_gradient_stands_for_several_samples():
    """Of any parameter, though the first has as many as there are weights."""
    some = Known(DenseGradients(torch.randn(3, 20)), DenseGradients(torch.randn(1, 21)))
    with pytest.raises(mm.ModelMixError, match="gradients of 1 samples where 3 were given"):
        CLIPS[0].sum(some, random_basis(), torch.ones(3))


@pytest.mark.parametrize("clips", [(1e-150, 1.0), (1.0, 1e-150), (0.0, 1.0), (1.0, math.nan)])
def test_clips_that_cannot_be_measured_are_refused(clips):
    with pytest.raises(mm.ModelMixError, match=r"c = |finite"):
        EmbeddingClip(*clips)


def test_random_labels_are_fixed():
    assert torch.equal(random_labels(100, 7), random_labels(100, 7))
    assert not torch.equal(random_labels(100, 7), random_labels(100, 7, seed=1))
    assert set(np.unique(random_labels(1000, 7))) == set(range(7))

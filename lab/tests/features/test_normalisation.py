"""Private channel moments: their noise, the bound on what one image can do, and their price."""

from __future__ import annotations

import math

import pytest
import torch
from dp_accounting.rdp import compute_epsilon
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

import modelmix as mm
from modelmix.training.randomness import Randomness
from modelmix_lab.features.normalisation import clipped_sums, group_normalise, private_channel_normalisation

Z = 8.0


def features(n: int = 40, channels: int = 6, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    scale = torch.linspace(0.2, 2, channels).view(-1, 1, 1)
    return torch.randn(n, channels, 4, 4, generator=generator) * scale + scale


def moments(x: torch.Tensor, **changes):
    settings = {"n": len(x), "mean_clip": 3.0, "square_clip": 5.0, "noise_multiplier": Z} | changes
    return private_channel_normalisation(x, randomness=Randomness(3), **settings)


def test_group_norm_is_torchs_and_sees_one_sample():
    x = features(8, 81)
    found = group_normalise(x)
    assert torch.allclose(found, torch.nn.GroupNorm(27, 81, affine=False)(x))
    assert torch.allclose(found[3:4], group_normalise(x[3:4]), atol=1e-6)
    groups = found.view(8, 27, -1)
    assert groups.mean(2).abs().max() < 1e-5
    assert (groups.var(2, unbiased=False) - 1).abs().max() < 1e-2
    assert group_normalise(x.half()).dtype == torch.float32
    with pytest.raises(mm.ModelMixError, match="81 channels cannot be split into 10 groups"):
        group_normalise(x, 10)


def test_almost_no_noise_and_wide_clips_give_the_moments():
    x = features(2000).double()
    found = moments(x, mean_clip=1e3, square_clip=1e3, noise_multiplier=1e-9)
    assert torch.allclose(found.mean, x.mean((0, 2, 3)), atol=1e-6)
    assert torch.allclose(found.variance, x.transpose(0, 1).flatten(1).var(1, unbiased=False), atol=1e-6)
    normal = found(x)
    assert normal.dtype == torch.float32
    assert normal.mean((0, 2, 3)).abs().max() < 1e-5
    assert (normal.square().mean((0, 2, 3)) - 1).abs().max() < 1e-5


@pytest.mark.parametrize("n", [1, 1000])
def test_the_noise_has_the_law_that_is_paid_for(n):
    """Both releases less their exact averages, in units of z * clip / n: standard Gaussian, and not the same draw."""
    x = torch.full((1, 100_000, 1, 1), 1e3)  # so large that no variance is lifted to the level of its noise
    z, mean_clip, square_clip = 1e-4, 1e-3, 1e9
    found = moments(x, n=n, mean_clip=mean_clip, square_clip=square_clip, noise_multiplier=z)
    sums = clipped_sums(x, mean_clip, square_clip)
    first = ((found.mean - sums[0] / n) / (z * mean_clip / n)).numpy()
    second = ((found.variance + found.mean**2 - sums[1] / n) / (z * square_clip / n)).numpy()
    for noise in (first, second):
        assert stats.kstest(noise, "norm").pvalue > 1e-3
        assert stats.kstest(0.97 * noise, "norm").pvalue < 1e-3, "noise that is three per cent too small is seen"
    assert abs(stats.pearsonr(first, second).statistic) < 0.015


def test_a_variance_is_never_below_its_noise():
    x = torch.full((40, 500, 2, 2), 0.01)
    assert moments(x).variance.min().item() == pytest.approx(Z * 5 / 40)
    assert torch.isfinite(moments(x)(x)).all()


@given(
    size=st.sampled_from([0.0, 1e-30, 1e-3, 1.0, 2.9999999, 3.0, 1e3, 1e18, 1e38]),
    shape=st.sampled_from(["one pixel", "one channel", "all", "random"]),
    n=st.integers(0, 300),
    clip=st.sampled_from([1e-6, 1.0, 3.0, 1e6]),
)
def test_no_image_moves_a_sum_by_more_than_the_clip(size, shape, n, clip):
    others = features(n, seed=2) * 50
    bad = torch.zeros(1, 6, 4, 4)
    if shape == "one pixel":
        bad[0, 2, 1, 1] = size
    elif shape == "one channel":
        bad[0, 2] = -size
    elif shape == "all":
        bad += size
    else:
        bad = features(1, seed=3) * size
    where = n // 2
    with_it = torch.cat([others[:where], bad, others[where:]])
    for before, after in zip(clipped_sums(others, clip, clip), clipped_sums(with_it, clip, clip), strict=True):
        assert torch.linalg.vector_norm(after - before).item() <= clip


def test_the_clip_is_used_up():
    """The bound is not met by throwing everything away: a large image moves the sum by the clip, less the margin."""
    empty = torch.zeros(0, 6, 4, 4)
    for before, after in zip(clipped_sums(empty, 3, 5), clipped_sums(features(1) * 1e4, 3, 5), strict=True):
        moved = torch.linalg.vector_norm(after - before).item()
        assert moved == pytest.approx(3 if moved < 4 else 5, rel=2e-3)
    small = features(1) * 1e-3
    assert torch.allclose(clipped_sums(small, 3, 5)[0], small.double().mean((0, 2, 3)))


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_an_image_that_is_not_finite_adds_nothing(bad):
    x = features(5)
    worse = torch.cat([x, torch.full((1, 6, 4, 4), bad)])
    for clean, dirty in zip(clipped_sums(x, 3, 5), clipped_sums(worse, 3, 5), strict=True):
        assert torch.allclose(clean, dirty, rtol=1e-14)


def test_the_size_of_the_data_set_is_what_the_caller_says():
    """Neighbours are divided by the same number: the release of n and n + 1 images differs by one clip at most."""
    x = features(41)
    one, other = moments(x[:40], n=40), moments(x, n=40)
    assert torch.linalg.vector_norm(one.mean - other.mean).item() <= 3 / 40


def test_the_price():
    phase = moments(features()).phase
    assert (phase.mechanism, phase.steps) == (mm.Mechanism(8.0, 1.0), 2)
    ledger = mm.Ledger((phase,))
    orders = [1 + k / 50 for k in range(1, 5000)]
    theirs, _ = compute_epsilon(orders, [2 * a / (2 * Z**2) for a in orders], 1e-5)
    assert mm.epsilon(ledger, 1e-5, by="renyi") == pytest.approx(theirs, rel=1e-4)
    assert mm.epsilon(ledger, 1e-5, by="renyi") == pytest.approx(0.695, abs=5e-4)
    assert mm.epsilon(ledger, 1e-5) == pytest.approx(0.634, abs=5e-4)
    root = math.sqrt(math.log(1e5)) / Z  # min over alpha of alpha/z^2 + log(1/delta)/(alpha - 1), in closed form
    assert mm.epsilon(ledger, 1e-5, by="classic") == pytest.approx(1 / Z**2 + 2 * root, rel=1e-3)
    once = mm.epsilon(mm.Mechanism(Z / math.sqrt(2), 1.0), 1e-5, steps=1)
    assert mm.epsilon(ledger, 1e-5) == pytest.approx(once, rel=1e-4)


def test_the_price_composes_with_training():
    phase, train = moments(features()).phase, mm.Mechanism(5.67, 8192 / 50000)
    ledger = mm.Ledger().add(phase.mechanism, phase.steps).add(train, 300)
    alone = mm.epsilon(train, 1e-5, steps=300)
    assert alone < mm.epsilon(ledger, 1e-5) < alone + 0.695
    assert mm.Ledger.from_json(ledger.to_json()) == ledger


def test_noise_is_never_drawn_twice():
    randomness = Randomness(3)
    settings = {"n": 40, "mean_clip": 3.0, "square_clip": 5.0, "noise_multiplier": Z, "randomness": randomness}
    first, second = (private_channel_normalisation(features(), **settings) for _ in range(2))
    assert not torch.isclose(first.mean, second.mean, rtol=1e-9, atol=1e-12).any()


@pytest.mark.parametrize(
    "changes", [{"n": 0}, {"n": 2.5}, {"mean_clip": 0}, {"square_clip": math.inf}, {"noise_multiplier": 0}]
)
def test_refuses_in_one_line(changes):
    with pytest.raises(mm.ModelMixError) as error:
        moments(features(), **changes)
    assert "\n" not in str(error.value)


def test_refuses_what_are_no_features():
    with pytest.raises(mm.ModelMixError, match="allowed are floats N x C x H x W"):
        moments(features()[0], n=40)

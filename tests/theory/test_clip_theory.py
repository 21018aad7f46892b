"""Example 3.1 to the digit, the bias of clipping, histograms of norms, and the advice on the command line."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats
from torch import nn

import modelmix as mm
from modelmix.data.synthetic import synthetic
from modelmix.models import Pixels, build
from modelmix.theory import clipping
from modelmix.theory.kappa import tail_constant
from modelmix.training.norms import gradient_statistics, private_norm_histogram
from modelmix.training.randomness import Randomness


def test_example_3_1_to_the_digit():
    at_optimum, far = clipping.example(20.0), clipping.example(0.0)
    assert round(at_optimum.noise_std, 1) == round(far.noise_std, 1) == 49.7
    assert (at_optimum.gradient, far.gradient) == (0.0, -20.0)
    assert at_optimum.clipped_gradient == far.clipped_gradient == pytest.approx(1 / 3)
    assert clipping.clipped_minimum(1.0) == pytest.approx(-10.0, abs=1.0)
    assert clipping.clipped_minimum(200.0) == pytest.approx(20.0, abs=1e-6)


@given(seed=st.integers(0, 10**6), clip=st.floats(0.01, 100))
def test_the_bias_is_what_is_cut_off(seed, clip):
    rng = np.random.default_rng(seed)
    g = rng.standard_normal((40, 3)) * rng.exponential(5.0, (40, 1)) + 1.0
    (row,) = clipping.bias_curve(g, [clip])
    norms = np.linalg.norm(g, axis=1)
    assert row.bias <= row.cut * (1 + 1e-12) + 1e-12
    assert row.clipped_gradient <= clip * (1 + 1e-12)
    assert row.cut == pytest.approx(np.mean(np.maximum(norms - clip, 0)))
    if clip >= norms.max():
        assert row.bias == pytest.approx(0, abs=1e-12)
        assert row.cosine == pytest.approx(1.0)


def test_in_one_direction_the_bound_on_the_bias_is_met():
    (row,) = clipping.bias_curve([[3.0, 0.0], [5.0, 0.0]], [2.0])
    assert row.bias == row.cut == 2.0


@given(st.lists(st.floats(1e-4, 1e4), min_size=1, max_size=50))
def test_a_histogram_bounds_what_it_stands_for(values):
    """All that is computed from upper edges is at least what the norms themselves give, below the last edge."""
    norms = np.minimum(values, 900.0)
    found = clipping.histogram(norms)
    assert found.counts.sum() == len(values)
    assert found.mean_norm >= norms.mean()
    for c in (0.01, 1.0, 30.0):
        assert found.cut(c) >= np.mean(np.maximum(norms - c, 0.0)) - 1e-9
    assert found.quantile(1.0) >= norms.max()
    assert found.kappa() >= tail_constant(norms + norms.mean()) * (1 - 1e-9)


def test_what_is_not_a_number_is_counted_once_in_the_last_bin():
    assert clipping.bin_of([math.nan, math.inf, 0.0, 2e3]).tolist() == [49, 49, 0, 49]


@pytest.fixture(scope="module")
def small():
    torch.manual_seed(0)
    split = synthetic(samples=120, seed=3)
    return Pixels(build("linear", (1, 28, 28), 10)), (split.x, split.y)


def one_by_one(model, batch):
    out = []
    for x, y in zip(*batch, strict=True):
        model.zero_grad()
        nn.functional.cross_entropy(model(x[None]), y[None]).backward()
        out.append(torch.cat([p.grad.flatten() for p in model.parameters()]).double().numpy())
    return np.array(out)


def test_statistics_of_a_model_agree_with_autograd(small):
    model, batch = small
    g = one_by_one(model, batch)
    found = gradient_statistics(model, nn.CrossEntropyLoss(), batch, [1.0, 20.0])
    assert found.norms == pytest.approx(np.linalg.norm(g, axis=1), rel=1e-5)
    assert found.noise == pytest.approx(np.linalg.norm(g - g.mean(0), axis=1), rel=1e-4)
    for mine, theirs in zip(found.bias, clipping.bias_curve(g, [1.0, 20.0]), strict=True):
        assert mine.bias == pytest.approx(theirs.bias, rel=1e-4)
        assert mine.clipped == theirs.clipped


def test_one_sample_moves_one_count_by_one(small):
    """Sensitivity 1: the same noise, one sample fewer, and only one count changes, by one."""
    model, (x, y) = small
    mechanism = mm.Mechanism(0.01, 1.0)  # little noise, and the same for both: rounded away

    def counts(keep):
        release = private_norm_histogram(model, nn.CrossEntropyLoss(), (x[keep], y[keep]), mechanism, Randomness(1))
        assert release.phase == mm.Ledger().add(mechanism, 1).phases[0]
        return release.histogram.counts

    whole = counts(torch.arange(40))
    exact = clipping.histogram(np.linalg.norm(one_by_one(model, (x[:40], y[:40])), axis=1)).counts
    assert whole.tolist() == exact.tolist()
    for left_out in (0, 17, 39):
        change = whole - counts(torch.tensor([i for i in range(40) if i != left_out]))
        assert sorted(change)[-1] == 1
        assert np.abs(change).sum() == 1


def test_the_noise_is_the_mechanisms(small):
    """Empty counts of 20 releases have the standard deviation that was paid for; off by 10 % is 4 standard errors."""
    model, (x, y) = small
    mechanism = mm.Mechanism(30.0, 1.0)
    releases = [
        private_norm_histogram(model, nn.CrossEntropyLoss(), (x[:2], y[:2]), mechanism, Randomness(i))
        for i in range(20)
    ]
    counts = np.array([release.histogram.counts for release in releases])
    assert counts.std() == pytest.approx(30.0, rel=0.1)
    for bad in (mm.Mechanism(1.0, 1.0, 2.0), mm.Mechanism(1.0, 1.0, p=4), mm.Mechanism(1.0, 1.0, law="laplace")):
        with pytest.raises(mm.ModelMixError, match="plain Gaussian"):
            private_norm_histogram(model, nn.CrossEntropyLoss(), (x, y), bad, Randomness(0))


@pytest.mark.parametrize("q", [0.1, 0.5])
def test_the_histogram_looks_at_no_more_samples_than_are_paid_for(small, q):
    """Every sample enters on its own coin of probability q; a count outside the bounds comes up once in 10^6."""
    model, (x, y) = small
    x, y = x[:1].repeat(200, 1, 1, 1)[:200], y[:1].repeat(200)
    mechanism = mm.Mechanism(1e-3, q)  # noise that is rounded away: the counts are those of the draw
    counts = []
    for seed in range(3):
        release = private_norm_histogram(model, nn.CrossEntropyLoss(), (x, y), mechanism, Randomness(seed))
        assert release.phase.mechanism.sample_rate == q
        counts.append(release.histogram.counts.sum())
    low, high = stats.binom.ppf([5e-7, 1 - 5e-7], 200, q)
    assert all(low <= count <= high for count in counts)
    assert len(set(counts)) > 1, "every step draws anew"


def test_advice_on_private_data_draws_at_the_rate_it_pays_for(run, tmp_path):
    """1,000 samples at q = 0.2 and little noise: about 200 of them are in the released counts."""
    file, book = tmp_path / "mine.npz", tmp_path / "spent.json"
    rng, labels = np.random.default_rng(0), np.arange(1000) % 3
    arrays = {f"x_{part}": rng.standard_normal((1000, 5)) for part in ("train", "test")}
    np.savez(file, **arrays, y_train=labels, y_test=labels)
    budget = ["--epsilon", 30, "--ledger", book, "--q", 0.2]
    code, out, _ = run(
        "advise",
        "clip",
        "--data",
        file,
        "--classes",
        3,
        "--model",
        "linear",
        "--out",
        tmp_path / "a.png",
        *budget,
        "--json",
    )
    assert code == 0
    data = json.loads(out)
    assert mm.Ledger.load(book).phases[0].mechanism.sample_rate == 0.2
    spread = math.sqrt(1000 * 0.2 * 0.8 + len(data["counts"]) * data["noise_std"] ** 2)
    assert abs(sum(data["counts"]) - 200) < 5.5 * spread < 200  # a false alarm once in 10^7


def test_batch_statistics_are_refused(small):
    _, batch = small
    model = nn.Sequential(nn.Flatten(), nn.BatchNorm1d(784), nn.Linear(784, 10))
    for call in (
        lambda: gradient_statistics(model, nn.CrossEntropyLoss(), batch, [1.0]),
        lambda: private_norm_histogram(model, nn.CrossEntropyLoss(), batch, mm.Mechanism(1.0, 1.0), Randomness(0)),
    ):
        with pytest.raises(mm.UnprovedError):
            call()


def test_advice_on_public_data(run, tmp_path):
    code, out, _ = run("advise", "clip", "--model", "linear", "--samples", 200, "--out", tmp_path / "a.png", "--json")
    data = json.loads(out)
    assert code == 0
    assert data["threshold"] == pytest.approx(4 * data["kappa"] * math.log(10))
    assert data["clip"] <= data["threshold"]
    chosen = next(row for row in data["bias"] if row["clip"] == data["clip"])
    assert chosen["bias"] <= 0.1 * chosen["gradient"]
    smaller = [row for row in data["bias"] if row["clip"] < data["clip"]]
    assert all(row["bias"] > 0.1 * row["gradient"] for row in smaller)
    assert (tmp_path / "a.svg").exists()
    constants = ["--beta", 1, "--range", 2.3, "--train-epsilon", 1]
    _, out, _ = run(
        "advise", "clip", "--model", "linear", "--samples", 200, "--out", tmp_path / "a.png", "--json", *constants
    )
    assert json.loads(out)["threshold"] >= data["threshold"]


def test_private_data_are_refused_without_a_budget_and_charged_with_one(run, tmp_path):
    rng = np.random.default_rng(0)
    file, book = tmp_path / "mine.npz", tmp_path / "spent.json"
    labels = np.arange(300) % 3
    arrays = {f"x_{part}": rng.standard_normal((300, 5)) for part in ("train", "test")}
    np.savez(file, **arrays, y_train=labels, y_test=labels)
    base = ["advise", "clip", "--data", file, "--classes", 3, "--model", "linear", "--out", tmp_path / "a.png"]
    for missing in ([], ["--epsilon", 1], ["--ledger", book]):
        code, _, err = run(*base, *missing)
        assert code == 2
        assert "a choice made by looking at private data is paid for" in err
        assert not book.exists()
    code, out, _ = run(*base, "--epsilon", 1, "--ledger", book, "--q", 0.5, "--json")
    data = json.loads(out)
    ledger = mm.Ledger.load(book)
    assert code == 0
    assert ledger.steps == 1
    assert ledger.phases[0].mechanism == mm.Mechanism(data["noise_std"], 0.5)
    assert mm.epsilon(ledger, 1e-5) <= 1
    assert "bias" not in data  # nothing but the release
    # The advice is a function of the released counts alone.
    again = clipping.NormHistogram(np.array(data["counts"]), data["noise_std"])
    assert data["kappa"] == again.kappa()
    fine = [c for c in again.uppers if again.cut(c) <= 0.1 * again.mean_norm]
    assert data["clip"] == min([data["threshold"], *fine])
    run(*base, "--epsilon", 1, "--ledger", book, "--q", 0.5, "--json")
    assert mm.Ledger.load(book).steps == 2
    assert run(*base, "--public", "--epsilon", 1, "--ledger", book)[0] == 2
    (tmp_path / "config.json").write_text("{}")
    code, _, err = run(*base, "--epsilon", 1, "--ledger", book)
    assert code == 2
    assert "belongs to a run" in err
    assert mm.Ledger.load(book).steps == 2

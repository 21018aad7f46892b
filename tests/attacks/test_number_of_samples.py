"""The number of samples: public where it sets a scale (zero-out), and hidden where it does not (add-or-remove).

Noise of scale c/(q n) on d coordinates over T steps tells n with mu = sqrt(2 d T)/n: two steps of 100,000 parameters
told 50 samples from 49 with an epsilon of at least 4.9 where 0.019 was claimed as "one sample added or removed".
"""

from __future__ import annotations

import json
import math
import re

import planned
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import modelmix as mm

D, STEPS, POPULATION = 100_000, 2, 60
PLAN = {"noise_multiplier": 100.0, "sample_rate": 0.5, "steps": STEPS, "delta": 1e-5}


class Silent(nn.Module):
    """Learns nothing, so that what is released is noise alone."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(D))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.sum(1, keepdim=True) + 0 * self.weight.sum()


def flat(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return 0 * outputs.sum()


def data(n: int) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.zeros(n, 2), torch.zeros(n)


def rms(moves: list[torch.Tensor], mixing_width: float) -> float:
    """Of all moves; with mixing of the first, whose gap is tau, for a natural gap is wider."""
    return float(torch.cat(moves[:1] if mixing_width else moves).square().mean().sqrt())


def scale_of_trainer(n: int, mixing_width: float, **plan: object) -> tuple[float, mm.Guarantee]:
    """The attacker's statistic: the root mean square of the moves between released states, and the claim."""
    trainer = planned.Trainer(
        Silent(), flat, data(n), mm.plan(**PLAN, **plan, mixing_width=mixing_width), clip=1.0, lr=1.0, rule="plain"
        if not mixing_width else None,
    )  # fmt: skip
    moves = []
    for _ in range(STEPS):
        before = trainer.state
        trainer.run(1, progress=False)
        centre = before.last if not mixing_width else 0.5 * (before.last + before.previous)
        moves.append(trainer.state.last - centre)
    return rms(moves, mixing_width), trainer.guarantee


def scale_of_loop(n: int, mixing_width: float, **plan: object) -> tuple[float, mm.Guarantee]:
    model = Silent()
    loader = DataLoader(TensorDataset(*data(n)), batch_size=n)  # as large as the data: q is the plan's
    model, optimizer, loader, criterion = mm.make_private(
        model, torch.optim.SGD(model.parameters(), lr=1.0), loader, flat,
        plan=mm.plan(**PLAN, **plan, mixing_width=mixing_width), clip=1.0,
    )  # fmt: skip
    moves, before = [], torch.zeros(D)
    previous = before
    for _ in range(STEPS):
        x, y = next(iter(loader))
        criterion(model(x), y).backward()
        optimizer.step()
        now = model.weight.detach().clone()
        moves.append(now - (0.5 * (before + previous) if mixing_width else before))
        before, previous = now, before
    return rms(moves, mixing_width), optimizer.guarantee


@pytest.mark.parametrize("mixing_width", [0.0, 150.0], ids=["plain", "mixed"])
@pytest.mark.parametrize("entry", [scale_of_trainer, scale_of_loop], ids=["Trainer", "make_private"])
def test_the_scale_of_noise_does_not_tell_the_number_of_samples(entry, mixing_width):
    """With a population the scale is that of 60 samples, for 50 and for 49: z c/(q n0) with q = 1/2.

    The standard error of a root mean square of 100,000 normals is 1/sqrt(200,000) of it; the two scales that n would
    have set are 2 % apart, which is nine of them, and 20 % from this one. Four are allowed: false alarms in one of
    15,000 runs a case.
    """
    total = math.hypot(100.0, mixing_width / math.sqrt(12))
    for n in (50, 49):
        scale, claim = entry(n, mixing_width, population=POPULATION)
        assert scale == pytest.approx(total / (0.5 * POPULATION), rel=4 / math.sqrt(200_000))
        assert claim.adjacency == "add-or-remove"
        assert claim.population == POPULATION
        assert "50" not in claim.scope
        assert "49" not in claim.scope


@pytest.mark.parametrize("entry", [scale_of_trainer, scale_of_loop], ids=["Trainer", "make_private"])
def test_without_a_population_the_number_of_samples_is_said_to_be_public(entry):
    for n in (50, 49):
        _, claim = entry(n, 0.0, samples=n)
        assert claim.adjacency == "zero-out"
        assert claim.population == n
        assert "is public" in claim.scope
        assert "added" not in claim.scope


def test_files_of_a_run_with_a_population_do_not_tell_the_number_of_samples(tmp_path):
    x, y = torch.randn(347, 3), torch.arange(347) % 2
    plan = mm.plan(epsilon=3, population=400, batch=100, steps=4, delta=1e-4)
    mm.Trainer(nn.Linear(3, 2), nn.CrossEntropyLoss(), (x, y), plan, clip=1.0, lr=0.1, folder=tmp_path).run(
        progress=False
    )
    private = {"checkpoint.npz", "diagnostics.json", "report.html"}  # for the data holder, mode 0600
    for path in tmp_path.rglob("*"):
        if path.is_file() and path.name not in private:  # as a number of its own: losses have digits, too
            assert not re.search(rb"(?<![\d.e-])347(?![\d.])", path.read_bytes()) or path.suffix == ".pt", path.name
        elif path.is_file():
            assert path.stat().st_mode & 0o077 == 0, path.name
    config = json.loads((tmp_path / "config.json").read_text())
    assert (config["population"], config["adjacency"]) == (400, "add-or-remove")
    certificate = json.loads((tmp_path / "certificate.json").read_text())
    assert certificate["guarantee"]["adjacency"] == "add-or-remove"


def test_a_plan_for_another_number_of_samples_is_refused():
    x, y = torch.randn(30, 3), torch.arange(30) % 2
    plan = mm.plan(noise_multiplier=1.0, samples=31, batch=10, steps=4)
    with pytest.raises(mm.ModelMixError, match="made for 31 samples and the data has 30"):
        mm.Trainer(nn.Linear(3, 2), nn.CrossEntropyLoss(), (x, y), plan, clip=1.0, lr=0.1)


@pytest.mark.parametrize(("z", "q", "steps"), [(2.0, 1.0, 10), (1.0, 0.1, 50), (4.0, 0.5, 20)])
def test_replace_one_is_accounted_for_what_it_is(z, q, steps):
    """The pair of mixtures with means c and -c is a possible pair: its delta may not be above the claimed one."""
    mechanism, delta = mm.Mechanism(z, q), 1e-5
    removed = mm.epsilon(mechanism, delta, steps=steps)
    replaced = mm.epsilon(mechanism, delta, steps=steps, adjacency="replace-one")
    assert replaced > removed
    if steps == 10:  # q = 1: N(-T, T z^2) against N(T, T z^2), exactly
        mu = 2 * math.sqrt(steps) / z

        def phi(x: float) -> float:
            return 0.5 * math.erfc(-x / math.sqrt(2))

        exact = phi(-replaced / mu + mu / 2) - math.exp(replaced) * phi(-replaced / mu - mu / 2)
        assert exact <= delta
        assert exact > 0.9 * delta
    else:
        assert one_step_delta(z, q, mm.epsilon(mechanism, delta, steps=1, adjacency="replace-one")) <= delta


def one_step_delta(z: float, q: float, epsilon: float) -> float:
    """The hockey stick of (1-q) N(0) + q N(1) against (1-q) N(0) + q N(-1), by the trapezoidal rule."""
    x = torch.linspace(-40 * z, 40 * z, 400_001, dtype=torch.float64)
    normal = [torch.exp(-((x - m) ** 2) / (2 * z * z)) / (z * math.sqrt(2 * math.pi)) for m in (0.0, 1.0, -1.0)]
    here, there = ((1 - q) * normal[0] + q * one for one in normal[1:])
    return float(torch.trapezoid((here - math.exp(epsilon) * there).clamp_min(0), x))

"""Figure 2 of the paper: Algorithm 1 with and without noise against SGD and DP-SGD, over tau = 0.05 eta and 0.1 eta.

Without noise: SGD beside Algorithm 1 at the same step size. With noise: the Gaussian noise at which plain DP-SGD has
epsilon 8 is given to every run; DP-SGD at two step sizes, Algorithm 1 at the larger. "Without noise" is the same
program with a clip nobody reaches and noise of 1e-9 clips; nothing is proved of it that is worth saying, and no
epsilon is shown.

Runs are kept in the file of numbers as they end; the same command goes on where it stopped.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from modelmix._checks import whole
from modelmix._files import write_atomically
from modelmix.accounting.calibration import calibrate
from modelmix.accounting.guarantee import epsilon as proved_epsilon
from modelmix.accounting.ledger import Ledger
from modelmix.accounting.mechanism import Mechanism
from modelmix.accounting.plan import Plan
from modelmix.accounting.pld import equal_variance
from modelmix.errors import ModelMixError

if TYPE_CHECKING:
    from modelmix.data import DataSet

EPSILON, DELTA = 8.0, 1e-5
TAUS = (0.05, 0.1)
NO_CLIP, NO_NOISE = 1e6, 1e-9
POINTS = 20
"""Evaluations along a run."""


@dataclass(frozen=True)
class Setup:
    """What is trained, and how. ``eta`` serves SGD and the first DP-SGD; the other private runs take twice that."""

    model: str
    sample_rate: float
    steps: int
    clip: float
    eta: float


PAPER = Setup("resnet20", 0.05, 2000, 8.0, 0.1)
"""Sampling rate, steps, clip and the private step sizes 0.1 and 0.2 are the paper's; it does not say eta of (a, b)."""
SMALL = Setup("cnn", 0.02, 300, 8.0, 0.3)
"""For a small network on two cores."""


def setup_for(data: str, model: str | None = None, steps: int | None = None) -> Setup:
    """The paper's setup for CIFAR-10 and SVHN, a small one elsewhere; another network is trained as the small one."""
    chosen = PAPER if data in ("cifar10", "svhn") and model in (None, PAPER.model) else SMALL
    if model is not None:
        chosen = replace(chosen, model=model)
    return chosen if steps is None else replace(chosen, steps=whole("steps", steps, "the number of steps", least=2))


@dataclass(frozen=True)
class Arm:
    """One line of the figure. ``tau`` is in units of eta, 0 is without mixing."""

    name: str
    private: bool
    eta: float
    tau: float

    def mechanism(self, setup: Setup, n: int, noise: float) -> Mechanism:
        clip = self.clip(setup)
        width = self.tau * setup.sample_rate * n / clip
        return Mechanism(noise if self.private else NO_NOISE, setup.sample_rate, width)

    def clip(self, setup: Setup) -> float:
        return setup.clip if self.private else NO_CLIP


def arms(setup: Setup) -> list[Arm]:
    """Three lines without noise, four with it."""
    eta = setup.eta
    free = [Arm(f"SGD, eta = {eta:g}", False, eta, 0.0)]
    free += [Arm(f"ModelMix, eta = {eta:g}, tau = {tau:g} eta", False, eta, tau) for tau in TAUS]
    noisy = [Arm(f"DP-SGD, eta = {rate:g}", True, rate, 0.0) for rate in (eta, 2 * eta)]
    noisy += [Arm(f"ModelMix, eta = {2 * eta:g}, tau = {tau:g} eta", True, 2 * eta, tau) for tau in TAUS]
    return free + noisy


def noise_multiplier(setup: Setup) -> float:
    """z at which plain DP-SGD has epsilon 8 by Renyi moments: files of runs that were made with it stay right."""
    found = calibrate(epsilon=EPSILON, delta=DELTA, sample_rate=setup.sample_rate, steps=setup.steps, by="renyi")
    return found.noise_multiplier


@dataclass(frozen=True)
class Curve:
    """Test accuracy along the runs of one arm, a row for every seed, and what is proved about it."""

    arm: Arm
    steps: tuple[int, ...]
    accuracy: tuple[tuple[float, ...], ...]
    epsilon: float
    equal_variance_epsilon: float

    @property
    def final(self) -> tuple[float, float, float]:
        """Median, smallest and largest accuracy at the end."""
        last = sorted(row[-1] for row in self.accuracy)
        return last[len(last) // 2] if len(last) % 2 else sum(last[len(last) // 2 - 1 :][:2]) / 2, last[0], last[-1]


def curves(
    data: DataSet,
    setup: Setup,
    seeds: Sequence[int],
    file: Path,
    *,
    device: str | None = None,
    told: Callable[[str], None] = lambda line: None,
) -> list[Curve]:
    """Trains what is not in ``file`` yet, adds it there, and returns every arm."""
    kept = _kept(file, data.name, setup)
    noise, n = noise_multiplier(setup), len(data.train)
    out = []
    for arm in arms(setup):
        mechanism = arm.mechanism(setup, n, noise)
        rows = []
        for seed in seeds:
            key = f"{arm.name}, {'with' if arm.private else 'without'} noise, seed {seed}"
            if key not in kept["runs"]:
                told(key)
                kept["runs"][key] = _train(data, setup, arm, mechanism, seed, device)
                write_atomically(file, json.dumps(kept, indent=1) + "\n")
            rows.append(kept["runs"][key])
        steps = tuple(rows[0]["steps"])
        epsilon, twin = math.inf, math.inf
        if arm.private:
            ledger = Ledger().add(mechanism, setup.steps)
            epsilon, twin = proved_epsilon(ledger, DELTA), proved_epsilon(equal_variance(ledger), DELTA)
        out.append(Curve(arm, steps, tuple(tuple(row["accuracy"]) for row in rows), epsilon, twin))
    return out


def _train(
    data: DataSet, setup: Setup, arm: Arm, mechanism: Mechanism, seed: int, device: str | None
) -> dict[str, Any]:
    import torch
    from torch import nn

    from modelmix.models import Pixels, build
    from modelmix.training import Performance, RunOptions, Trainer

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = Pixels(build(setup.model, data.shape, len(data.classes)))
    trainer = Trainer(
        model,
        nn.CrossEntropyLoss(),
        data.train,
        Plan.of(mechanism, setup.steps, delta=DELTA),
        clip=arm.clip(setup),
        lr=arm.eta,
        test_set=data.test,
        options=RunOptions(test_public=True, seed=seed, performance=Performance(device=device)),
    )
    trainer.run(evaluate_every=max(1, setup.steps // POINTS), progress=False)
    found = trainer.metrics
    return {"steps": [row["step"] for row in found], "accuracy": [row["test_accuracy"] for row in found]}


def _kept(file: Path, data: str, setup: Setup) -> dict[str, Any]:
    """What the file holds; a file of another setup is refused, not overwritten."""
    settings = {"data": data, **asdict(setup)}
    if not file.exists():
        return {"settings": settings, "runs": {}}
    try:
        kept = json.loads(file.read_text(encoding="utf-8"))
        same = kept["settings"] == settings and isinstance(kept["runs"], dict)
    except (OSError, ValueError, KeyError, TypeError):
        raise ModelMixError(f"{file} is not a file of Figure 2: move it away, or give another --out.") from None
    if not same:
        raise ModelMixError(f"{file} holds runs of another setup: move it away, or give another --out.")
    return kept  # type: ignore[no-any-return]


HOW = (
    "With noise: every line has the Gaussian noise at which plain DP-SGD has epsilon 8 by Renyi moments; mixing comes "
    "on top, so its own epsilon is smaller, and its total noise larger.",
    "epsilon: the smallest proved. Beside it, what a plain Gaussian of the same total variance would have.",
)

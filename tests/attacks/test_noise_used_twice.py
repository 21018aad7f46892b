"""The key of a step serves one computation: the same noise on two gradients gives their difference in the clear.

Each attack runs the same step twice from one saved state, with other data, another learning rate or other code, and
subtracts. With the same noise the difference is that of the clean gradients to 1e-7; with fresh noise its standard
deviation is sqrt(2) times the noise's. Found in ``make_private`` (state loaded elsewhere, or rolled back and gone on
with at another rate) and in ``Trainer`` (a copied folder, a ``Dataset`` of which sixteen samples were compared).
"""

from __future__ import annotations

import copy
import io
import json
import math
import shutil
from itertools import pairwise

import planned
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

import modelmix as mm
from modelmix.training.norms import private_norm_histogram
from modelmix.training.randomness import Randomness

N, Z = 64, 1.0
X, Y = torch.randn(N, 400, generator=torch.Generator().manual_seed(0)), torch.zeros(N)
PLAIN, MIXED = mm.Mechanism(Z, 0.5), mm.Mechanism(Z, 0.5, 3.0)
MECHANISMS = pytest.mark.parametrize("mechanism", [PLAIN, MIXED], ids=["plain", "mixed"])


def product(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return outputs.sum()


def tripled(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return 3 * outputs.sum()


def loop(mechanism, x=X, seed=None, lr=1.0, ledger=None):
    torch.manual_seed(0)
    model = nn.Linear(400, 1, bias=False)
    loader = DataLoader(TensorDataset(x, Y), batch_size=32)
    plan = mm.Plan.of(mechanism, 50)
    return planned.make_private(
        model,
        torch.optim.SGD(model.parameters(), lr=lr),
        loader,
        product,
        plan=plan,
        clip=1.0,
        seed=seed,
        ledger=ledger,
    )


def steps(model, optimizer, loader, criterion, count=1):
    for _ in range(count):
        x, y = next(iter(loader))
        criterion(model(x), y).backward()
        optimizer.step()
    return model.weight.detach().clone().double().flatten()


def noise_left(a: torch.Tensor, b: torch.Tensor, batch: float = 32.0) -> float:
    """Standard deviation of what is left of the noise in a difference, over that of one step's noise."""
    return float((a - b).std()) * batch / Z


def assert_fresh(a: torch.Tensor, b: torch.Tensor) -> None:
    # Two independent noises leave sqrt(2) (more with mixing); gradients differ by at most 2c in norm, 0.1 a coordinate.
    assert noise_left(a, b) > 1.2


@MECHANISMS
@pytest.mark.parametrize("seed", [None, 7], ids=["unseeded", "seeded"])
def test_a_state_rolled_back_and_gone_on_with_at_another_rate(mechanism, seed):
    model, optimizer, loader, criterion = loop(mechanism, seed=seed)
    steps(model, optimizer, loader, criterion, 2)
    weights, state = copy.deepcopy(model.state_dict()), copy.deepcopy(optimizer.state_dict())
    first = steps(model, optimizer, loader, criterion)
    model.load_state_dict(weights)
    optimizer.load_state_dict(state)
    optimizer.param_groups[0]["lr"] = 0.9
    second = steps(model, optimizer, loader, criterion)
    assert_fresh(first, second)
    assert optimizer.ledger.steps == 4  # the step that was rolled back was seen
    assert optimizer.epsilon() == mm.epsilon(mechanism, 1e-5, steps=4)


@MECHANISMS
@pytest.mark.parametrize("seed", [None, 7], ids=["unseeded", "seeded"])
def test_a_state_loaded_into_a_loop_over_other_data(mechanism, seed):
    model, optimizer, loader, criterion = loop(mechanism, seed=seed)
    steps(model, optimizer, loader, criterion, 2)
    buffer = io.BytesIO()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, buffer)
    after = []
    for x in (X, -X):
        buffer.seek(0)
        saved = torch.load(buffer, weights_only=True)
        other = loop(mechanism, x, seed=seed)
        other[0].load_state_dict(saved["model"])
        other[1].load_state_dict(saved["optimizer"])
        after.append(steps(*other))
        assert other[1].ledger.steps == 3
    assert_fresh(*after)


def test_no_key_is_in_a_state_dict():
    model, optimizer, loader, criterion = loop(PLAIN)
    steps(model, optimizer, loader, criterion, 2)
    buffer = io.BytesIO()
    torch.save(optimizer.state_dict(), buffer)
    key = optimizer._loop.step.randomness._key
    assert key not in buffer.getvalue()
    assert key.hex().encode() not in buffer.getvalue()


def test_a_loop_that_dies_loses_no_line_with_a_ledger_file(tmp_path):
    """Weights saved after the last state of the optimizer were seen by somebody."""
    model, optimizer, loader, criterion = loop(PLAIN, ledger=tmp_path / "ledger.json")
    steps(model, optimizer, loader, criterion, 2)
    state = copy.deepcopy(optimizer.state_dict())
    steps(model, optimizer, loader, criterion, 3)
    del optimizer
    again = loop(PLAIN, ledger=tmp_path / "ledger.json")
    again[1].load_state_dict(state)
    assert again[1].ledger.steps == 5
    steps(*again)
    assert again[1].ledger.steps == mm.load_claim(tmp_path / "ledger.json").taken.steps == 6


def test_what_was_rolled_back_counts_towards_the_plan():
    model, optimizer, loader, criterion = loop(PLAIN)
    state = copy.deepcopy(optimizer.state_dict())
    for _ in range(50):
        steps(model, optimizer, loader, criterion)
        optimizer.load_state_dict(state)
    with pytest.raises(mm.BudgetExceeded, match="plan of 50 steps"):
        steps(model, optimizer, loader, criterion)
    assert optimizer.ledger.steps == 50


class Rows(Dataset):
    def __init__(self, x: torch.Tensor) -> None:
        self.x = x

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self.x[index], Y[index]


def trainer(folder, mechanism=PLAIN, data=None, loss=product, **options):
    torch.manual_seed(0)
    model = nn.Linear(400, 1, bias=False)
    data = (X, Y) if data is None else data
    return planned.Trainer(model, loss, data, mm.Plan.of(mechanism, 9), clip=1.0, lr=1.0, folder=folder, **options)


@MECHANISMS
def test_a_copied_folder_goes_on_with_noise_of_its_own(tmp_path, mechanism):
    """Once as it was, once with other code of the same name, precision and chunks."""
    trainer(tmp_path / "a", mechanism).run(2, progress=False)
    for name in "bc":
        shutil.copytree(tmp_path / "a", tmp_path / name)
    scaled = tripled
    scaled.__name__ = "product"
    otherwise = {"loss": scaled, "performance": mm.Performance(precision="float64", chunk=5)}
    ends = [
        trainer(tmp_path / "a", mechanism, resume=True),
        trainer(tmp_path / "b", mechanism, resume=True),
        trainer(tmp_path / "c", mechanism, resume=True, **otherwise),
    ]
    ends = [one.run(1, progress=False).state.last for one in ends]
    for i in range(3):
        for j in range(i):
            assert_fresh(ends[i], ends[j])


def test_a_seeded_run_repeats_its_noise_only_where_the_computation_is_the_same(tmp_path):
    trainer(tmp_path / "a", data=Rows(X), seed=3).run(2, progress=False)
    for name in "bcd":
        shutil.copytree(tmp_path / "a", tmp_path / name)
    last = trainer(tmp_path / "a", data=Rows(X), seed=3, resume=True).run(1, progress=False).state.last
    same = trainer(tmp_path / "b", data=Rows(X), seed=3, resume=True).run(1, progress=False).state.last
    assert torch.equal(same, last)
    performance = mm.Performance(precision="float64")
    other = trainer(tmp_path / "c", data=Rows(X), seed=3, resume=True, performance=performance)
    assert_fresh(other.run(1, progress=False).state.last, last)
    changed = X.clone()
    changed[17] *= -1  # not one of the sixteen that the fingerprint of a Dataset looks at
    other = trainer(tmp_path / "d", data=Rows(changed), seed=3, resume=True)
    assert_fresh(other.run(1, progress=False).state.last, last)


def test_a_seeded_run_says_so_wherever_its_epsilon_is_printed(tmp_path, run):
    seeded = trainer(tmp_path / "seeded", seed=3).run(progress=False)
    honest = trainer(tmp_path / "honest").run(progress=False)
    assert seeded.ledger.seeded
    assert not honest.ledger.seeded
    assert "Seeded" in seeded.guarantee.scope
    assert not (tmp_path / "seeded" / "certificate.json").exists()
    assert (tmp_path / "honest" / "certificate.json").exists()
    code, out, _ = run("verify", tmp_path / "seeded")
    assert (code, "eeded" in out) == (0, True)
    assert json.loads(run("verify", tmp_path / "seeded", "--json")[1])["seeded"] is True
    assert "eeded" not in run("verify", tmp_path / "honest")[1]


def test_steps_that_are_taken_again_were_seen_by_nobody(tmp_path, monkeypatch):
    """A state that could not be kept is not shown: whoever resumes takes its steps again, and pays once."""
    from modelmix.runs.folder import RunFolder

    one = trainer(tmp_path)
    one.run(2, progress=False)
    kept = one.state.last.clone()

    def full(*_: object, **__: object) -> None:
        raise mm.ModelMixError("cannot write: No space left.")

    monkeypatch.setattr(RunFolder, "save_checkpoint", full)
    with pytest.raises(mm.ModelMixError, match="No space left"):
        one.run(2, progress=False)
    assert torch.equal(one.state.last, kept)
    assert torch.equal(one.model.weight.detach().double().flatten(), kept.float().double())
    assert one.step == 2


def test_noise_of_two_steps_is_independent():
    """Correlation of 400 pairs: standard error 0.05; four of them, one false alarm in 15,000 runs."""
    model, optimizer, loader, criterion = loop(PLAIN)
    states = [model.weight.detach().clone().double().flatten()]
    states += [steps(model, optimizer, loader, criterion) for _ in range(3)]
    moves = [b - a for a, b in pairwise(states)]
    clean = -X.double().mean(0)  # the same expected gradient in every step
    a, b = (move - clean * float(move @ clean / (clean @ clean)) for move in moves[:2])
    assert abs(float(torch.corrcoef(torch.stack([a, b]))[0, 1])) < 4 / math.sqrt(400)


def test_two_histograms_of_norms_have_noise_of_their_own():
    """The difference of two releases with one generator stood in the clear: 41 of 50 bins were equal."""
    torch.manual_seed(0)
    batch = torch.randn(60, 4), torch.arange(60) % 2
    randomness, mechanism = Randomness(3), mm.Mechanism(50.0, 1.0)
    model = torch.nn.Linear(4, 2)
    first, second = (private_norm_histogram(model, torch.nn.CrossEntropyLoss(), batch, mechanism, randomness)
                     for _ in range(2))  # fmt: skip
    assert first.seeded
    assert not private_norm_histogram(model, torch.nn.CrossEntropyLoss(), batch, mechanism, Randomness()).seeded
    assert (first.histogram.counts == second.histogram.counts).mean() < 0.1

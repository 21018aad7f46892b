"""Loops of one's own: nothing that ran is forgotten, and no process shares another's noise."""

from __future__ import annotations

import os
from functools import partial

import planned
import pytest
import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812
from torch.utils.data import DataLoader, TensorDataset

import modelmix as mm

N = 100
X = torch.randn(N, 4, generator=torch.Generator().manual_seed(0))
Y = torch.zeros(N, dtype=torch.long)


def plan(z, steps, spent=None):
    return mm.Plan.of(mm.Mechanism(z, 1.0), steps, delta=1e-4, spent=spent or mm.Ledger())


def loop(a_plan, criterion=None, model=None, x=X, **options):
    torch.manual_seed(0)
    model = model or nn.Linear(4, 2)
    loader, optimizer = DataLoader(TensorDataset(x, Y), batch_size=N), torch.optim.SGD(model.parameters(), lr=0.1)
    return planned.make_private(
        model, optimizer, loader, criterion or nn.CrossEntropyLoss(), plan=a_plan, clip=1.0, **options
    )


def go(model, optimizer, loader, criterion, count=1):
    for _ in range(count):
        x, y = next(iter(loader))
        criterion(model(x), y).backward()
        optimizer.step()


@pytest.mark.parametrize(
    "spent", [None, mm.Ledger().add(mm.Mechanism(50.0, 1.0), 20), mm.Ledger().add(mm.Mechanism(0.5, 1.0), 2)]
)
def test_a_state_that_cost_more_than_the_plan_foresees_is_refused(spent):
    """A state of ten steps at z = 0.5 costs 42.7; a plan of z = 20 claimed 1.7 after loading it."""
    dear = loop(plan(0.5, 10))
    go(*dear, 10)
    cheap = loop(plan(20.0, 100, spent))
    with pytest.raises(mm.BudgetExceeded, match="does not go on with"):
        cheap[1].load_state_dict(dear[1].state_dict())


def test_a_ledger_file_of_another_plan_is_not_forgotten(tmp_path):
    go(*loop(plan(0.5, 10), ledger=tmp_path / "l.json"), 10)
    with pytest.raises(mm.BudgetExceeded, match="does not go on with"):
        loop(plan(20.0, 100), ledger=tmp_path / "l.json")


def test_a_state_is_loaded_by_a_loop_that_spent_the_same_before():
    spent = mm.Ledger().add(mm.Mechanism(20.0, 1.0), 5)
    other = loop(plan(20.0, 10, spent))
    go(*other, 10)
    with pytest.raises(mm.BudgetExceeded, match="does not go on with"):
        loop(plan(20.0, 100))[1].load_state_dict(other[1].state_dict())
    here = loop(plan(20.0, 100, spent))
    here[1].load_state_dict(other[1].state_dict())
    assert here[1].ledger.steps == 15


@pytest.mark.parametrize("by", ["file", "state"])
def test_a_shorter_plan_does_not_take_the_place_of_the_one_that_ran(tmp_path, by):
    """50 of 1,000 steps and then a plan of 51: 7.2 was printed for 20.6."""
    file = tmp_path / "l.json" if by == "file" else None
    first = loop(plan(5.0, 100), ledger=file)
    go(*first, 5)
    state = first[1].state_dict()

    def again(steps):
        later = loop(plan(5.0, steps), ledger=file)
        if by == "state":
            later[1].load_state_dict(state)
        return later[1]

    with pytest.raises(mm.BudgetExceeded, match="does not go on with"):
        again(6)
    assert again(100).guarantee.epsilon == plan(5.0, 100).guarantee().epsilon
    assert again(120).guarantee.epsilon > plan(5.0, 100).guarantee().epsilon


def test_two_loops_do_not_write_one_ledger_file(tmp_path):
    one, two = (loop(plan(5.0, 10), ledger=tmp_path / "l.json") for _ in range(2))
    go(*one, 2)
    with pytest.raises(mm.UnprovedError, match="written to by another loop"):
        go(*two)
    assert mm.load_claim(tmp_path / "l.json").taken.steps == 2


def test_a_model_is_made_private_once():
    model = nn.Linear(4, 2)
    loop(plan(5.0, 10), model=model)
    with pytest.raises(mm.UnprovedError, match="made private before"):
        loop(plan(5.0, 10), model=model)


def test_a_forked_process_has_noise_of_its_own(tmp_path):
    trainer = mm.Trainer(nn.Linear(4, 2), nn.CrossEntropyLoss(), (X, Y), plan(100.0, 5), clip=1.0, lr=1.0)
    child = os.fork()
    if child == 0:
        try:
            torch.save(trainer.run(1, progress=False).state.last, tmp_path / "child.pt")
        finally:
            os._exit(0)
    os.waitpid(child, 0)
    mine, theirs = trainer.run(1, progress=False).state.last, torch.load(tmp_path / "child.pt", weights_only=True)
    assert float((mine - theirs).abs().max()) > 0.1  # the noise has standard deviation 1, clean sums differ by nothing


class Remembering:
    """A criterion that keeps the largest loss it has seen."""

    def __init__(self) -> None:
        self.top = 0.0

    def __call__(self, outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        value = F.cross_entropy(outputs, targets)
        self.top = max(self.top, value.item())
        return value * (1 - 2 * (self.top > 50))


class Averaging(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("average", torch.zeros(()))

    def forward(self, outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        value = F.cross_entropy(outputs, targets)
        self.average.mul_(0.9).add_(0.1 * float(value.detach()))
        return value * (1 - self.average)


class Helper:
    def __init__(self) -> None:
        self.top = 0.0

    def __call__(self, module: object, inputs: object, output: torch.Tensor) -> torch.Tensor:
        self.top = max(self.top, float(output.abs().max()))
        return output * (1 - 2 * (self.top > 1000))


class Holding(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.helper = nn.Linear(4, 2), Helper()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.helper(self, x, self.layer(x))


def hooked() -> nn.Module:
    model, seen = nn.Linear(4, 2), []

    def remember(module: object, inputs: object, output: torch.Tensor) -> torch.Tensor:
        seen.append(float(output.abs().max()))
        return output * (1 - 2 * (max(seen) > 1000))

    model.register_forward_hook(remember)
    return model


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("model", "criterion"),
    [(None, Remembering()), (None, Averaging()), (Holding(), None), (hooked(), None)],
    ids=["criterion", "criterion with a buffer", "helper object", "hook with a list"],
)
def test_memory_of_samples_outside_the_models_own_attributes_is_refused(model, criterion):
    x = X.clone()
    x[0] = 1e5

    def clipped() -> torch.Tensor:
        return mm.clipped_sum(model or nn.Linear(4, 2), criterion or nn.CrossEntropyLoss(), (x, Y), mm.Clip(1.0))

    with pytest.raises(mm.ModelMixError):
        clipped()


def test_an_augmentation_that_remembers_is_refused():
    class Brighter:
        top = 0.0

        def __call__(self, inputs: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
            self.top = max(self.top, float(inputs.abs().max()))
            return inputs * (1 - 2 * (self.top > 1000))

    x = X.clone()
    x[0] = 1e5
    trainer = planned.Trainer(
        nn.Linear(4, 2), nn.CrossEntropyLoss(), (x, Y), plan(1.0, 3), clip=1.0, lr=0.1, augment=Brighter()
    )
    with pytest.raises(mm.UnprovedError):
        trainer.run(1, progress=False)


def test_a_criterion_with_fixed_arguments_is_not_taken_for_one_that_remembers():
    criterion = partial(F.cross_entropy, label_smoothing=0.1)
    found = mm.clipped_sum(nn.Linear(4, 2), criterion, (X, Y), mm.Clip(1.0), engine="loop")
    assert torch.isfinite(found).all()

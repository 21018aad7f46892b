"""make_private: the same steps as the trainer's, in a loop of one's own."""

from __future__ import annotations

import copy
import io
import itertools

import pytest
import torch
from planned import Trainer, as_plan, make_private
from torch import nn
from torch.nn import functional as F  # noqa: N812
from torch.utils.data import DataLoader, TensorDataset

import modelmix as mm
from modelmix.models.residual import StandardisedConv2d

N = 60
X = torch.randn(N, 1, 8, 8, generator=torch.Generator().manual_seed(0))
Y = torch.arange(N) % 3
MIXED, PLAIN = mm.Mechanism(0.5, 0.2, 1.0, p=100), mm.Mechanism(0.5, 0.2)

CE = nn.CrossEntropyLoss()


def network() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(
        nn.Conv2d(1, 4, 3, stride=2), nn.GroupNorm(2, 4), nn.ReLU(inplace=True), nn.Flatten(), nn.Linear(36, 3)
    )


def private(mechanism=MIXED, optimizer=lambda p: torch.optim.SGD(p, lr=0.3), seed=11, **options):
    model = network()
    loader = DataLoader(TensorDataset(X, Y), batch_size=12, shuffle=True)
    criterion = options.pop("criterion", nn.CrossEntropyLoss())
    plan = as_plan(mechanism)
    return make_private(
        model, optimizer(model.parameters()), loader, criterion, plan=plan, clip=0.7, seed=seed, **options
    )


def epochs(model, optimizer, loader, criterion, count, schedule=None):
    for _ in range(count):
        for x, y in loader:
            optimizer.zero_grad()
            criterion(model(x), y).backward()
            optimizer.step()
        if schedule is not None:
            schedule.step()
    return model, optimizer


def trained(mechanism, steps, **options) -> Trainer:
    return Trainer(network(), nn.CrossEntropyLoss(), (X, Y), mechanism, 0.7, 0.3, seed=11, **options).run(
        steps, progress=False
    )


def assert_same(model: nn.Module, reference: Trainer) -> None:
    mine = torch.cat([p.detach().flatten() for p in model.parameters()]).double()
    torch.testing.assert_close(mine, reference.state.last, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("chunk", [None, 5])
@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("mechanism", [MIXED, PLAIN, mm.Mechanism(0.5, 0.2, 1.0, law="laplace")])
def test_a_loop_takes_the_trainers_steps(mechanism, reduction, chunk):
    criterion = nn.CrossEntropyLoss(reduction=reduction)
    model, optimizer = epochs(*private(mechanism, criterion=criterion, chunk=chunk), 2)
    reference = trained(mechanism, 10)
    assert optimizer.ledger == reference.ledger
    assert optimizer.epsilon(1e-5) == reference.epsilon(1e-5)
    assert_same(model, reference)


def test_layers_whose_gradients_need_their_weights_are_followed_at_the_weights_of_the_moment():
    """Kernels that are standardised and slopes that are learned, after steps that moved them."""
    torch.manual_seed(0)
    model = nn.Sequential(StandardisedConv2d(1, 4, 3, stride=2), nn.PReLU(4), nn.Flatten(), nn.Linear(36, 3))
    twin, loader = copy.deepcopy(model), DataLoader(TensorDataset(X, Y), batch_size=12)
    # So little noise that a step is the sum of clipped gradients.
    mechanism = mm.Mechanism(1e-7, 0.2)
    model, optimizer, loader, criterion = make_private(
        model,
        torch.optim.SGD(model.parameters(), lr=2.0),
        loader,
        nn.CrossEntropyLoss(),
        plan=as_plan(mechanism),
        clip=0.7,
        seed=11,
    )
    for x, y in loader:
        twin.load_state_dict(model.state_dict())
        step = torch.zeros(sum(p.numel() for p in twin.parameters()))
        for a, b in zip(x, y, strict=True):
            g = torch.autograd.grad(F.cross_entropy(twin(a[None]), b[None]), list(twin.parameters()))
            g = torch.cat([part.flatten() for part in g])
            step += g * (0.7 / g.norm()).clamp_max(1.0)
        optimizer.zero_grad()
        criterion(model(x), y).backward()
        optimizer.step()
        moved = [a - b for a, b in zip(twin.parameters(), model.parameters(), strict=True)]
        torch.testing.assert_close(torch.cat([d.flatten() for d in moved]), 2.0 * step / 12, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("parts", [1, 2, 4])
def test_a_loop_that_is_left_in_the_middle_of_a_draw_goes_on_with_it(parts):
    """No part of a draw is in its sum twice, and none is left out."""
    model, optimizer, loader, criterion = private(chunk=5)
    while optimizer.ledger.steps < 5:
        for _, (x, y) in zip(range(parts), loader, strict=False):
            criterion(model(x), y).backward()
            optimizer.step()
            if optimizer.ledger.steps == 5:
                break
    assert_same(model, trained(MIXED, 5))


def test_a_step_that_was_refused_can_be_taken_again_with_the_same_draw():
    model, optimizer, loader, criterion = private(tau=0.02)
    optimizer.param_groups[0]["lr"] = 0.0
    with pytest.raises(mm.ModelMixError):
        epochs(model, optimizer, loader, criterion, 1)
    assert not optimizer._loop.total.any()
    assert optimizer.ledger.steps == 0
    optimizer.param_groups[0]["lr"] = 0.3
    optimizer.step()
    for x, y in itertools.islice(loader, 4):
        optimizer.zero_grad()
        criterion(model(x), y).backward()
        optimizer.step()
    reference = trained(MIXED, 5, tau=0.02)
    assert_same(model, reference)
    assert optimizer.ledger == reference.ledger


def test_momentum_of_the_loop_is_the_trainers():
    model, _ = epochs(*private(momentum=0.6), 2)
    assert_same(model, trained(MIXED, 10, momentum=0.6))


def test_weight_decay_of_the_loop_is_the_trainers():
    decaying = private(optimizer=lambda p: torch.optim.SGD(p, lr=0.3, weight_decay=0.2))
    assert_same(epochs(*decaying, 1)[0], trained(MIXED, 5, weight_decay=0.2))


def test_an_optimizer_that_climbs_is_refused():
    with pytest.raises(mm.ModelMixError, match="negate the loss"):
        private(optimizer=lambda p: torch.optim.SGD(p, lr=0.3, maximize=True))


def test_without_mixing_any_optimizer_gets_the_noisy_gradient():
    """SGD with momentum on noisy gradients is the trainer's momentum from released states."""
    model, _ = epochs(*private(PLAIN, lambda p: torch.optim.SGD(p, lr=0.3, momentum=0.6)), 2)
    mine = torch.cat([p.detach().flatten() for p in model.parameters()]).double()
    torch.testing.assert_close(mine, trained(PLAIN, 10, momentum=0.6).state.last, rtol=1e-4, atol=1e-5)
    epochs(*private(PLAIN, torch.optim.Adam), 1)


def test_the_model_keeps_its_class_and_keys():
    fresh = network()
    model, _, _, _ = private()
    assert type(model) is type(fresh)
    assert list(model.state_dict()) == list(fresh.state_dict())
    fresh.load_state_dict(model.state_dict())


def test_raw_gradients_are_never_kept():
    model, optimizer, loader, criterion = private()
    x, y = next(iter(loader))
    criterion(model(x), y).backward()
    assert all(p.grad is None for p in model.parameters())
    optimizer.step()
    assert all(p.grad is None for p in model.parameters())


def test_evaluating_between_steps_changes_nothing():
    reference, _ = epochs(*private(), 1)
    model, optimizer, loader, criterion = private()
    for x, y in loader:
        optimizer.zero_grad()
        criterion(model(X[:7]), Y[:7])  # a forward pass without a backward one
        criterion(model(x), y).backward()
        optimizer.step()
        model.eval()
        with torch.no_grad():
            model(X)
        model.train()
    for a, b in zip(model.parameters(), reference.parameters(), strict=True):
        assert torch.equal(a, b)


def test_schedulers_work_and_tau_follows():
    model, optimizer, loader, criterion = private()
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    epochs(model, optimizer, loader, criterion, 3, schedule=schedule)
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.3 / 8)
    assert optimizer.ledger.phases == mm.Ledger().add(MIXED, 15).phases  # omega is kept: tau follows eta


def test_empty_draws_are_steps():
    mechanism = mm.Mechanism(1.0, 0.01)
    model = network()
    loader = DataLoader(TensorDataset(X, Y), batch_size=1, shuffle=True)
    model, optimizer, loader, criterion = make_private(
        model,
        torch.optim.SGD(model.parameters(), lr=0.1),
        loader,
        nn.CrossEntropyLoss(),
        plan=as_plan(mechanism),
        clip=1.0,
        seed=1,
    )
    sizes = []
    for x, y in loader:
        before = [p.detach().clone() for p in model.parameters()]
        optimizer.zero_grad()
        criterion(model(x), y).backward()
        optimizer.step()
        sizes.append(len(x))
        assert all(not torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    assert optimizer.ledger.steps == len(sizes) == 100
    with pytest.warns(UserWarning, match="most draws will be empty"):
        reference = Trainer(network(), nn.CrossEntropyLoss(), (X, Y), mechanism, 1.0, 0.1, seed=1)
    assert_same(model, reference.run(100, progress=False))


def test_a_loop_goes_on_from_its_state_with_fresh_noise_and_its_ledger():
    model, optimizer, loader, criterion = private()
    epochs(model, optimizer, loader, criterion, 1)
    buffer = io.BytesIO()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, buffer)
    epochs(model, optimizer, loader, criterion, 2)
    buffer.seek(0)
    saved = torch.load(buffer, weights_only=True)
    other, again, draws, loss = private()
    other.load_state_dict(saved["model"])
    again.load_state_dict(saved["optimizer"])
    assert again.ledger.steps == 5
    epochs(other, again, draws, loss, 2)
    assert again.ledger == optimizer.ledger
    assert not any(torch.equal(a, b) for a, b in zip(model.parameters(), other.parameters(), strict=True))


def test_an_ordinary_state_dict_is_refused():
    model, optimizer, _, _ = private()
    with pytest.raises(mm.ModelMixError, match="no ledger"):
        optimizer.load_state_dict(torch.optim.SGD(model.parameters(), lr=0.1).state_dict())


def test_saving_in_the_middle_of_a_draw_is_refused():
    model, optimizer, loader, criterion = private(chunk=2)
    batches = iter(loader)
    x, y = next(batches)
    criterion(model(x), y).backward()
    optimizer.step()
    assert optimizer.ledger.steps == 0  # the draw has further parts
    with pytest.raises(mm.ModelMixError, match="half done"):
        optimizer.state_dict()


def test_saving_between_a_draw_and_its_step_is_refused():
    _, optimizer, loader, _ = private()
    next(iter(loader))
    with pytest.raises(mm.ModelMixError, match="half done"):
        optimizer.state_dict()


def test_loading_brings_back_the_weights_but_not_in_the_middle_of_a_draw():
    model, optimizer, loader, criterion = private(chunk=2)
    saved = optimizer.state_dict()
    epochs(model, optimizer, loader, criterion, 1)
    for x, y in loader:
        if optimizer.ledger.steps == 5:
            with pytest.raises(mm.UnprovedError, match="throw it away"):
                optimizer.load_state_dict(saved)
        criterion(model(x), y).backward()
        optimizer.step()
    ran = optimizer.ledger.steps
    optimizer.load_state_dict(saved)
    fresh = network()
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), fresh.parameters(), strict=True))
    epochs(model, optimizer, loader, criterion, 1)
    assert optimizer.ledger.steps == ran + 5  # what ran before was seen, and stays in the ledger


def test_a_backward_before_zero_grad_is_in_no_step():
    model, optimizer, loader, criterion = private()
    x, y = next(iter(loader))
    criterion(model(x), y).backward()
    optimizer.zero_grad()
    with pytest.raises(mm.ModelMixError, match="call backward"):
        optimizer.step()
    criterion(model(x), y).backward()
    optimizer.step()
    assert_same(model, trained(MIXED, 1))


def test_step_without_backward_and_samples_that_are_not_finite():
    model, optimizer, loader, criterion = private(PLAIN)
    x, y = next(iter(loader))
    with pytest.raises(mm.ModelMixError, match="was not run on"):
        optimizer.step()
    loss = criterion(model(x), y)
    with pytest.raises(mm.ModelMixError, match="call backward"):
        optimizer.step()
    loss.backward()
    optimizer.step()
    data = X.clone()
    data[::2] = float("nan")
    model = network()
    loader = DataLoader(TensorDataset(data, Y), batch_size=12)
    private_loop = make_private(
        model, torch.optim.SGD(model.parameters(), lr=0.3), loader, nn.CrossEntropyLoss(), plan=as_plan(PLAIN), clip=0.7
    )
    epochs(*private_loop, 1)
    assert all(torch.isfinite(p).all() for p in model.parameters())


@pytest.mark.parametrize("workers", [0, 2])
def test_workers_and_own_collate_functions(workers):
    def collate(items):
        return torch.stack([x for x, _ in items]), torch.tensor([int(y) for _, y in items])

    model = network()
    loader = DataLoader(TensorDataset(X, Y), batch_size=12, num_workers=workers, collate_fn=collate)
    model, optimizer, loader, criterion = make_private(
        model,
        torch.optim.SGD(model.parameters(), lr=0.3),
        loader,
        nn.CrossEntropyLoss(),
        plan=as_plan(MIXED),
        clip=0.7,
        seed=11,
    )
    epochs(model, optimizer, loader, criterion, 2)
    assert_same(model, trained(MIXED, 10))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"criterion": "cross entropy"}, "must be a function"),
        ({"chunk": 0}, "samples given at once"),
        ({"tau": -1.0}, "mixing threshold"),
        ({"seed": 1.5}, "whole number"),
        ({"padding": "thick"}, "choose one of exact, paper"),
        ({"mechanism": "modelmix"}, "not a Plan"),
        ({"mechanism": PLAIN, "momentum": 0.5}, "belongs to the optimizer"),
    ],
)
def test_nonsense_is_refused_in_one_line(options, message):
    with pytest.raises(mm.ModelMixError, match=message) as caught:
        private(**{"mechanism": MIXED, **options})
    assert "\n" not in str(caught.value)


class Folded(nn.Module):
    """Folds positions into rows, as models of sequences do."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(4)
        self.inner, self.outer = nn.Linear(8, 4), nn.Linear(32, 3)

    def forward(self, x):
        rows = self.inner(x.reshape(-1, 8))
        return self.outer(torch.tanh(rows).reshape(len(x), 32))


def test_rows_inside_a_model_belong_to_their_samples():
    loader = DataLoader(TensorDataset(X, Y), batch_size=12)
    model = Folded()
    model, optimizer, loader, criterion = make_private(
        model,
        torch.optim.SGD(model.parameters(), lr=0.3),
        loader,
        nn.CrossEntropyLoss(),
        plan=as_plan(MIXED),
        clip=0.7,
        seed=11,
    )
    epochs(model, optimizer, loader, criterion, 1)
    reference = Trainer(Folded(), nn.CrossEntropyLoss(), (X, Y), MIXED, 0.7, 0.3, seed=11).run(5, progress=False)
    assert_same(model, reference)


def test_a_layer_registered_twice():
    layer = nn.Linear(4, 4)
    x, y = torch.randn(20, 4, generator=torch.Generator().manual_seed(1)), torch.arange(20) % 4
    t = Trainer(
        nn.Sequential(layer, nn.Tanh(), layer), nn.CrossEntropyLoss(), (x, y), MIXED, 1.0, 0.1, test_set=(x, y), seed=1
    ).run(3, progress=False)
    assert t.evaluate()["loss"] > 0


@pytest.mark.parametrize("mechanism", [MIXED, PLAIN], ids=["mixed", "plain"])
def test_noise_is_used_once_whatever_fails_after_it_was_seen(mechanism, monkeypatch):
    """The model or its gradients show the noise before a step is over: no other step may add the same."""
    model, optimizer, loader, criterion = private(mechanism)
    loop = optimizer._loop

    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    x, y = next(iter(loader))
    criterion(model(x), y).backward()
    before = loop.step.randomness.state()
    monkeypatch.setattr(*((loop.flat, "write") if mechanism.mixed else (optimizer._original, "step")), interrupted)
    with pytest.raises(KeyboardInterrupt):
        optimizer.step()
    assert loop.account.ledger.steps == 1
    assert loop.step.randomness.state() != before

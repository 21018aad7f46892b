"""Every rule of the proof, broken on purpose through every public entry: Trainer, make_private, the command line.

The command line trains models named package.module:function, so a forbidden model can be asked for there as well.
"""

from __future__ import annotations

import copy
import pickle
import sys

import numpy as np
import planned
import pytest
import torch
from planned import Trainer, as_plan, make_private
from torch import nn
from torch.nn import functional as F  # noqa: N812
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
)

import modelmix as mm
from modelmix.training import rules

N = 40
X, Y = torch.randn(N, 6, generator=torch.Generator().manual_seed(0)), torch.arange(N) % 2
MIXED, PLAIN = mm.Mechanism(1.0, 0.25, 1.0), mm.Mechanism(1.0, 0.25)


def network() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 2))


def trainer(model=None, mechanism=MIXED, train_set=(X, Y), **options) -> Trainer:
    return Trainer(model or network(), nn.CrossEntropyLoss(), train_set, mechanism, clip=1.0, lr=0.1, seed=1, **options)


def loop(model=None, optimizer=None, loader=None, mechanism=MIXED, **options):
    model = model or network()
    optimizer = optimizer or torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    if loader is None:
        loader = DataLoader(TensorDataset(X, Y), batch_size=10, shuffle=True)
    plan = as_plan(mechanism)
    return make_private(model, optimizer, loader, nn.CrossEntropyLoss(), plan=plan, clip=1.0, seed=1, **options)


def steps(model, optimizer, loader, criterion, count=3):
    done = 0
    while done < count:
        for x, y in loader:
            optimizer.zero_grad()
            criterion(model(x), y).backward()
            optimizer.step()
            done += 1
            if done == count:
                break


def refused(rule: str):
    """An ``UnprovedError`` of one line that names the rule, the reason and a way out."""
    return pytest.raises(mm.UnprovedError, match=rule)


@pytest.fixture
def command(tmp_path, monkeypatch, run):
    """``modelmix train`` on a model of one's own."""
    monkeypatch.chdir(tmp_path)
    arrays = {"x_train": X.numpy(), "y_train": Y.numpy(), "x_test": X.numpy(), "y_test": Y.numpy()}
    np.savez(tmp_path / "data.npz", **arrays)

    def call(body: str, *arguments: object) -> tuple[int, str]:
        (tmp_path / "own_model.py").write_text(
            f"import torch\nfrom torch import nn\nfrom torch.nn import functional as F\n{body}\n"
        )
        sys.modules.pop("own_model", None)
        standard = [
            "--data",
            "data.npz",
            "--model",
            "own_model:make",
            "--batch",
            10,
            "--steps",
            2,
            "--out",
            "run",
            "--set",
            "data.classes=2",
        ]
        code, _, error = run("train", *standard, *arguments)
        return code, error

    return call


# Samples may not meet.

BATCH_NORMS = {
    "1d": nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5), nn.Linear(5, 2)),
    "without running statistics": nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5, track_running_stats=False)),
    "sync": nn.Sequential(nn.Linear(6, 5), nn.SyncBatchNorm(5), nn.Linear(5, 2)),
    "frozen but training": nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5).requires_grad_(False), nn.Linear(5, 2)),
    "trained in eval mode": nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5).eval(), nn.Linear(5, 2)),
    "instance norm with running statistics": nn.Sequential(
        nn.Unflatten(1, (2, 3)), nn.InstanceNorm1d(2, track_running_stats=True), nn.Flatten(), nn.Linear(6, 2)
    ),
}


@pytest.mark.parametrize("name", BATCH_NORMS)
@pytest.mark.parametrize("entry", [trainer, loop])
def test_batch_statistics(entry, name):
    with refused("that sample and the released state alone"):
        entry(BATCH_NORMS[name])


def test_batch_statistics_from_the_command_line(command):
    code, error = command(
        "make = lambda shape, classes: nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5), nn.Linear(5, 2))"
    )
    assert code == 2
    assert error.count("\n") == 1
    assert "BatchNorm1d" in error
    assert "GroupNorm" in error


def test_a_frozen_batch_norm_in_eval_mode_may_stay():
    model = nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5).requires_grad_(False).eval(), nn.Linear(5, 2))
    t = trainer(model)
    t.run(2, progress=False)
    steps(*loop(model))
    model[1].train()
    with refused("alone"):
        t.run(1, progress=False)


@pytest.mark.parametrize("entry", ["trainer", "loop"])
def test_a_batch_norm_put_in_later(entry):
    model = network()
    if entry == "trainer":
        t = trainer(model)
        model[1] = nn.BatchNorm1d(5)
        with refused("alone"):
            t.run(1, progress=False)
    else:
        private = loop(model)
        model[1] = nn.BatchNorm1d(5)
        with refused("alone"):
            steps(*private)


class Meeting(nn.Module):
    """Subtracts the mean over the batch: no layer to forbid, only what it does."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 2)

    def forward(self, x):
        x = self.layer(x)
        return x - x.mean(0)


class Behind(nn.Module):
    """Uses a layer's weight without calling the layer."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 2)

    def forward(self, x):
        return F.linear(x, self.layer.weight, self.layer.bias)


@pytest.mark.parametrize("model", [Meeting(), Behind()])
def test_what_hooks_cannot_see(model):
    with refused("cannot show that samples stay apart|hook engine is not right"):
        trainer(model, performance=mm.Performance(engine="hooks"))
    # One sample at a time, nothing can meet: the vmap engine is right for both.
    with pytest.warns(UserWarning, match="samples run one at a time"):
        t = trainer(model)
    with pytest.warns(UserWarning, match="samples run one at a time"):
        steps(*loop(model))
    assert t.engine == "vmap"


# Every trained coordinate is noised, mixed and accounted for.


def test_trainable_parameters_outside_the_optimizer():
    model = network()
    with refused("noised, mixed and accounted for"):
        loop(model, torch.optim.SGD(model[0].parameters(), lr=0.1))


def test_parameters_of_another_model_in_the_optimizer():
    model, other = network(), network()
    optimizer = torch.optim.SGD([*model.parameters(), *other.parameters()], lr=0.1)
    with refused("noised, mixed and accounted for"):
        loop(model, optimizer)


@pytest.mark.parametrize("entry", ["trainer", "loop"])
@pytest.mark.parametrize("change", ["unfreeze", "freeze", "add"])
def test_the_trained_set_may_not_change(entry, change):
    model = network()
    model[0].weight.requires_grad_(False)
    private = trainer(model) if entry == "trainer" else loop(model)
    if change == "unfreeze":
        model[0].weight.requires_grad_(True)
    elif change == "freeze":
        model[0].bias.requires_grad_(False)
    else:
        model.append(nn.Linear(2, 2))
    with refused("noised, mixed and accounted for"):
        private.run(1, progress=False) if entry == "trainer" else steps(*private)


def test_a_parameter_group_added_later():
    _, optimizer, _, _ = loop()
    with refused("noised, mixed and accounted for"):
        optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(1))]})


@pytest.mark.parametrize("entry", ["trainer", "loop"])
def test_frozen_parameters_and_buffers_may_not_change(entry):
    model = network()
    model.register_buffer("mean", torch.zeros(6))
    private = trainer(model) if entry == "trainer" else loop(model)
    with torch.no_grad():
        model.mean += 1
    with refused("not trained stays as it was"):
        private.run(1, progress=False) if entry == "trainer" else steps(*private)


class Counting(nn.Module):
    """Keeps a statistic of what it sees."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 2)
        self.register_buffer("seen", torch.zeros(6))

    def forward(self, x):
        self.seen.copy_(x.detach().mean(0)) if x.dim() == 2 else None
        return self.layer(x)


def test_a_model_that_keeps_statistics():
    with pytest.raises(mm.ModelMixError):
        trainer(Counting()).run(2, progress=False)
    with pytest.raises(mm.ModelMixError):
        steps(*loop(Counting()))


@pytest.mark.parametrize("entry", ["trainer", "loop"])
def test_weights_changed_from_outside(entry):
    model = network()
    private = trainer(model) if entry == "trainer" else loop(model)
    with torch.no_grad():
        model[2].weight += 1
    with refused("noisy, mixed steps only"):
        private.run(1, progress=False) if entry == "trainer" else steps(*private)


def test_an_account_of_fewer_coordinates():
    few = mm.Mechanism(1.0, 0.25, 1.0, p=100, dimension=3)
    for entry in (trainer, loop):
        with refused("noised, mixed and accounted for"):
            entry(mechanism=few)
    trainer(mechanism=mm.Mechanism(1.0, 0.25, 1.0, p=100, dimension=47)).run(1, progress=False)


def test_a_law_of_ones_own_cannot_be_trained_with():
    own = mm.Mechanism(1.0, 0.25, law=lambda z: mm.Gaussian(z))
    for entry in (trainer, loop):
        with pytest.raises(mm.ModelMixError, match="named laws"):
            entry(mechanism=own)


@pytest.mark.parametrize("rule", ["plain", "average"])
def test_an_account_that_counts_on_mixing_without_mixing(rule):
    with refused("every trained coordinate is mixed"):
        trainer(rule=rule)


@pytest.mark.parametrize("left", [0.0, 1 - 1e-9])
def test_no_coordinate_slips_past_the_mixing(monkeypatch, left):
    honest = rules.padded_gap

    def forgets_the_first(*arguments):
        gap = honest(*arguments)
        gap[0] *= left
        return gap

    monkeypatch.setattr(rules, "padded_gap", forgets_the_first)
    with refused("every trained coordinate is mixed"):
        trainer().run(1, progress=False)
    with refused("every trained coordinate is mixed"):
        steps(*loop())


# No state carries an unmixed noisy gradient.


@pytest.mark.parametrize(
    "make",
    [
        lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
        lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True),
        lambda p: torch.optim.Adam(p),
        lambda p: torch.optim.AdamW(p),
        lambda p: torch.optim.RMSprop(p),
        lambda p: type("MySGD", (torch.optim.SGD,), {})(p, lr=0.1),
    ],
)
def test_optimizers_that_remember(make):
    model = network()
    with refused("unmixed noisy gradient"):
        loop(model, make(model.parameters()))
    # Without mixing they only process what is public.
    steps(*loop(model, make(model.parameters()), mechanism=PLAIN))


def test_momentum_switched_on_later():
    model, optimizer, loader, criterion = loop()
    steps(model, optimizer, loader, criterion, 1)
    optimizer.param_groups[0]["momentum"] = 0.9
    with refused("unmixed noisy gradient"):
        steps(model, optimizer, loader, criterion, 1)


def test_two_learning_rates():
    model = network()
    groups = [{"params": model[0].parameters(), "lr": 0.1}, {"params": model[2].parameters(), "lr": 0.2}]
    with refused("one mixing width"):
        loop(model, torch.optim.SGD(groups, lr=0.1))


# Poisson sampling, one draw a step.


class Stream(IterableDataset):
    def __iter__(self):
        return iter(zip(X, Y, strict=True))


SET = TensorDataset(X, Y)
LOADERS = {
    "weighted": DataLoader(SET, batch_size=10, sampler=WeightedRandomSampler([1.0] * N, N)),
    "with replacement": DataLoader(SET, batch_size=10, sampler=RandomSampler(SET, replacement=True)),
    "not all": DataLoader(SET, batch_size=10, sampler=RandomSampler(SET, num_samples=N - 1)),
    "subset": DataLoader(SET, batch_size=10, sampler=SubsetRandomSampler(range(N))),
    "own batches": DataLoader(SET, batch_sampler=type("Mine", (BatchSampler,), {})(SequentialSampler(SET), 10, False)),
    "a stream": DataLoader(Stream(), batch_size=10),
    "no batches": DataLoader(SET, batch_size=None),
}


@pytest.mark.parametrize("name", LOADERS)
def test_samplers_that_are_not_poisson(name):
    with refused("probability q, independently"):
        loop(loader=LOADERS[name])
    with refused("probability q, independently"):
        trainer(train_set=LOADERS[name])


def test_a_stream_cannot_be_drawn_from():
    with refused("probability q, independently"):
        trainer(train_set=Stream())


def test_another_rate_than_the_mechanism_says():
    with pytest.raises(mm.ModelMixError, match="make them agree"):
        loop(loader=DataLoader(SET, batch_size=20, shuffle=True))


def test_one_draw_serves_one_step():
    model, optimizer, loader, criterion = loop()
    batches = iter(loader)
    x, y = next(batches)
    criterion(model(x), y).backward()
    optimizer.step()
    with refused("alone"):
        criterion(model(x), y).backward()
    with refused("one fresh draw"):
        optimizer.step()


def test_no_draw_is_left_out():
    _, _, loader, _ = loop()
    batches = iter(loader)
    next(batches)
    with refused("one fresh draw"):
        next(batches)


@pytest.mark.parametrize("chunk", [None, 3])
def test_two_loops_over_one_loader_do_not_use_one_draw_twice(chunk):
    model, optimizer, loader, criterion = loop(chunk=chunk)
    one, other = iter(loader), iter(loader)
    for batches in (one, other):
        x, y = next(batches)
        criterion(model(x), y).backward()
        optimizer.step()
    with refused("one fresh draw"):
        next(one)


def test_other_samples_than_the_draw():
    model, optimizer, loader, criterion = loop()
    x, y = next(iter(loader))
    with refused("alone"):
        criterion(model(torch.cat([x, x])), torch.cat([y, y])).backward()
    with refused("one fresh draw"):
        optimizer.step()


def test_a_closure():
    _, optimizer, loader, _ = loop()
    next(iter(loader))
    with refused("one fresh draw"):
        optimizer.step(lambda: 0.0)


# What runs is what the ledger says.


@pytest.mark.parametrize("name", ["mechanism", "tau", "lr", "clip", "ledger", "rule", "state", "padding"])
def test_nothing_can_be_changed_on_a_trainer(name):
    with refused("its ledger line names"):
        setattr(trainer(), name, 1.0)


def test_a_changed_tau_has_its_own_ledger_line():
    """Through a schedule of the trainer, and through the learning rate of a loop with a fixed tau."""
    t = trainer(tau=mm.Schedule.pieces({1: 0.02, 3: 0.01}))
    t.run(4, progress=False)
    widths = [(phase.mechanism.mixing_width, phase.steps) for phase in t.ledger.phases]
    assert widths == [(pytest.approx(0.02 / 0.1 * 10), 2), (pytest.approx(0.01 / 0.1 * 10), 2)]
    model, optimizer, loader, criterion = loop(tau=0.02)
    steps(model, optimizer, loader, criterion, 2)
    optimizer.param_groups[0]["lr"] = 0.2
    steps(model, optimizer, loader, criterion, 1)
    widths = [(phase.mechanism.mixing_width, phase.steps) for phase in optimizer.ledger.phases]
    assert widths == [(pytest.approx(2.0), 2), (pytest.approx(1.0), 1)]
    optimizer.param_groups[0]["lr"] = 0.3
    with pytest.raises(mm.BudgetExceeded, match="plan counts on 1"):
        steps(model, optimizer, loader, criterion, 1)


def test_a_plan_that_is_too_short():
    t = trainer(mechanism=mm.Ledger().add(MIXED, 3))
    with pytest.raises(mm.BudgetExceeded, match="past the end"):
        t.run(4, progress=False)
    t.run(3, progress=False)
    assert t.ledger.phases == mm.Ledger().add(MIXED, 3).phases


def test_released_trains_and_proves_nothing(command):
    t = trainer(rule="released", momentum=0.9)
    t.run(2, progress=False)
    with refused("a step does what its mechanism says"):
        t.epsilon()
    with refused("a step does what its mechanism says"):
        mm.epsilon(t.ledger, 1e-5)
    make = "make = lambda shape, classes: nn.Linear(6, 2)"
    code, error = command(make, "--mechanism", "released")
    assert code == 0
    assert "not proved" in error


def test_errors_are_one_line_and_name_a_way_out():
    with pytest.raises(mm.UnprovedError) as caught:
        trainer(BATCH_NORMS["1d"])
    error = caught.value
    assert "\n" not in str(error)
    assert all(part in str(error) for part in (error.rule, error.reason, error.fix))


# What a newcomer gives by mistake: one line, before anything is spent.

ROWS = torch.randn(20, 4, generator=torch.Generator().manual_seed(0))
CLASSES = torch.arange(20) % 2


def both_entries(inputs, targets, loss=F.cross_entropy, model=None, test_set=None):
    """A trainer and a private loop of two steps."""
    plan = mm.Plan.of(mm.Mechanism(1.0, 0.5), 2, delta=1e-3)
    yield lambda: mm.Trainer(model or nn.Linear(4, 2), loss, (inputs, targets), plan, 1.0, 0.1, test_set=test_set)

    def loop():
        own = model or nn.Linear(4, 2)
        loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(inputs, targets), batch_size=10)
        return mm.make_private(own, torch.optim.SGD(own.parameters(), lr=0.1), loader, loss, clip=1.0, plan=plan)

    yield loop


@pytest.mark.parametrize("targets", [CLASSES.int(), CLASSES.float()])
def test_labels_of_another_type(targets):
    for make in both_entries(ROWS, targets):
        with pytest.raises(mm.ModelMixError, match=r"int64: give targets.long\(\)"):
            make()


def test_inputs_of_another_width():
    for make in both_entries(ROWS[:, :3], CLASSES):
        with pytest.raises(mm.ModelMixError, match="the model fails on samples of these shapes"):
            make()
    trainer, _ = both_entries(ROWS, CLASSES, test_set=(ROWS[:, :3], CLASSES))
    with pytest.raises(mm.ModelMixError, match="the model fails on samples of these shapes"):
        trainer()


def test_layers_without_a_shape():
    for make in both_entries(ROWS, CLASSES, model=nn.Sequential(nn.LazyLinear(2))):
        with pytest.raises(mm.ModelMixError, match="run it once on a sample"):
            make()


def test_a_label_the_model_has_no_output_for_counts_as_zero_in_a_loop():
    odd = CLASSES.clone()
    odd[3] = 6
    states = []
    for inputs, targets in ((ROWS, odd), (ROWS, CLASSES)):
        torch.manual_seed(0)
        model = nn.Linear(4, 2)
        loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(inputs, targets), batch_size=20)
        plan = mm.Plan.of(mm.Mechanism(1.0, 1.0), 1, delta=1e-3)
        model, optimizer, loader, criterion = planned.make_private(
            model, torch.optim.SGD(model.parameters(), lr=1.0), loader, F.cross_entropy, clip=0.1, plan=plan, seed=1
        )
        for x, y in loader:
            if targets is odd:
                with pytest.warns(UserWarning, match="labels must be 0 to 1"):
                    outputs = model(x)
            else:
                outputs = model(x)
            criterion(outputs, y).backward()
            optimizer.step()
        states.append(model.weight.detach().double())
    assert 0 < float((states[0] - states[1]).norm()) * 20 / 0.1 <= 1.001


def test_a_private_optimizer_is_not_copied():
    _, loop = both_entries(ROWS, CLASSES)
    _model, optimizer, _loader, _criterion = loop()
    with pytest.raises(mm.ModelMixError, match="noise would be used twice"):
        copy.deepcopy(optimizer)
    with pytest.raises(mm.ModelMixError, match="state_dict"):
        pickle.dumps(optimizer)


def test_rates_in_a_mapping():
    plan = mm.Plan.of(mm.Mechanism(1.0, 0.5), 2, delta=1e-3)
    with pytest.raises(mm.ModelMixError, match=r"mm\.Schedule\.pieces"):
        mm.Trainer(nn.Linear(4, 2), F.cross_entropy, (ROWS, CLASSES), plan, 1.0, {1: 0.5, 5: 0.1})

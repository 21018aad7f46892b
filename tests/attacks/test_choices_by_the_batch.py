"""Attacks in which a private sample chooses how, or whether, all the others are treated.

On the version before, measured in clips where one or two are allowed: a slice of the batch by a constant moved a sum by
72, an item of another type by 87, memory behind ``.data`` by 13, a mode chosen by the batch by 105; a learning rate
below zero turned mixing off (noise 0.35 where 43 was accounted for); draws were thrown away by loading a state.
"""

from __future__ import annotations

import copy
import math
import threading
from collections import deque
from contextlib import suppress
from types import SimpleNamespace

import numpy as np
import planned
import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from planned import Trainer
from torch import nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

import modelmix as mm
from modelmix.gradients import Batch, Engine
from modelmix.gradients.clip import Clip
from modelmix.gradients.parameters import FlatParameters
from modelmix.training.augment import apply_augmentation

pytestmark = pytest.mark.filterwarnings(
    "ignore:samples run one at a time", "ignore:there is no fast rule", "ignore:samples of this shape"
)

C, WIDTH = 0.1, 6


def clipped_total(model, x, y, engine="auto"):
    flat = FlatParameters(model)
    run = Engine(model, F.cross_entropy, (x[:3], y[:3]), name=engine)
    torch.manual_seed(7)
    return run(flat.views(flat.read()), Batch(x, y, torch.ones(len(y), dtype=torch.float64)), Clip(C)).total


def samples(m, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(m, WIDTH, generator=generator).abs(), torch.randint(0, 3, (m,), generator=generator)


# The size of a batch.


class Sliced(nn.Module):
    """Does something to the first k samples of a batch: a sample less puts another one among them."""

    def __init__(self, k, way):
        super().__init__()
        torch.manual_seed(0)
        self.k, self.way, self.layer = k, way, nn.Linear(WIDTH, 3)

    def forward(self, x):
        if self.way == "in place":
            x = x.clone()
            x[: self.k].neg_()
        elif self.way == "scatter":
            index = torch.zeros_like(x[: self.k], dtype=torch.long)
            x = x + torch.zeros_like(x).scatter(1, index, x[: self.k])
        else:
            x = x * (1 if x.shape[0] < self.k else -1)
        return self.layer(x)


@pytest.mark.parametrize("way", ["in place", "scatter", "branch"])
@pytest.mark.parametrize(("k", "m"), [(5, 64), (16, 32), (70, 80), (100, 128)])
def test_what_is_done_to_a_part_of_the_batch_is_done_to_no_other_sample(way, k, m):
    x, y = samples(m)
    found = clipped_total(Sliced(k, way), x, y)
    for i in (0, m - 1):
        keep = torch.arange(m) != i
        less = clipped_total(Sliced(k, way), x[keep], y[keep])
        assert (found - less).norm() <= C * (1 + 1e-6)


def test_what_torch_itself_asks_about_the_size_is_covered_by_both_traces():
    """Convolutions choose their algorithm at 16 samples: proved for fewer and for more, and fast for both."""
    model = nn.Sequential(nn.Conv1d(2, 3, 3), nn.Flatten(), nn.Linear(12, 3))
    x, y = torch.randn(40, 2, 6), torch.randint(0, 3, (40,))
    engine = Engine(model, F.cross_entropy, (x, y))
    assert engine.name == "hooks"
    flat = FlatParameters(model)
    parameters = flat.views(flat.read())
    for m in (1, 2, 15, 16, 17, 40):
        one = torch.ones(m, dtype=torch.float64)
        assert engine._proved(parameters, Batch(x[:m], y[:m])) is not None
        slow = Engine(model, F.cross_entropy, (x, y), name="vmap")
        found, right = (e(parameters, Batch(x[:m], y[:m], one), Clip(C)).total for e in (engine, slow))
        assert (found - right).norm() <= 1e-5 * right.norm()


class Uninitialised(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(WIDTH, 3)

    def forward(self, x):
        return self.layer(x + 0 * torch.empty_permuted((WIDTH,), (0,)).nan_to_num())


def test_memory_that_nobody_has_written_is_not_proved():
    assert Engine(Uninitialised(), F.cross_entropy, samples(3)).name != "hooks"


# What is remembered.


class Buffer(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(WIDTH, 3)
        self.register_buffer("centre", torch.zeros(WIDTH))

    def forward(self, x):
        h = x - self.centre
        self.centre.data.mul_(0.5).add_(0.5 * x.detach().mean(0))
        return self.layer(h)


class Weights(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(WIDTH, 3)

    def forward(self, x):
        h = self.layer(x)
        self.layer.weight.data.add_(1e-3 * x.detach().mean())
        return h


class Hidden(nn.Module):
    """Memory in a module that is not registered."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layer, self.kept = nn.Linear(WIDTH, 3), [nn.Identity()]
        self.kept[0].centre = torch.zeros(WIDTH)

    def forward(self, x):
        h = x - self.kept[0].centre
        self.kept[0].centre = 0.5 * self.kept[0].centre + 0.5 * x.detach().mean(0)
        return self.layer(h)


class OfItsClass(nn.Module):
    bank: list = []  # noqa: RUF012, that is the attack

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(WIDTH, 3)

    def forward(self, x):
        h = self.layer(x - sum(self.bank, torch.zeros(WIDTH)))
        self.bank.append(x.detach().mean(0))
        return h


BANK: dict = {}


class Global(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(WIDTH, 3)

    def forward(self, x):
        h = self.layer(x - BANK.get("centre", 0.0))
        BANK["centre"] = x.detach().mean(0)
        return h


class OwnGenerator(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layer, self.generator = nn.Linear(WIDTH, 3), torch.Generator()

    def forward(self, x):
        if float(x.max()) > 100:
            self.generator.manual_seed(5)
        return self.layer(x * torch.rand(x.shape, generator=self.generator))


class Switching(nn.Module):
    """A large sample turns dropout off for all that follow."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layer, self.drop = nn.Linear(WIDTH, 3), nn.Dropout(0.5)

    def forward(self, x):
        if float(x.max()) > 100:
            self.drop.eval()
        return self.layer(self.drop(x))


class Namespace(nn.Module):
    """Memory in objects of Python's own library."""

    def __init__(self, kept):
        super().__init__()
        torch.manual_seed(0)
        self.layer, self.kept = nn.Linear(WIDTH, 3), kept

    def forward(self, x):
        top = float(x.max())
        if isinstance(self.kept, SimpleNamespace):
            self.kept.top = top = max(self.kept.top, top)
        elif isinstance(self.kept, deque):
            self.kept[0].data[1500] = top = max(float(self.kept[0][1500]), top)
        elif isinstance(self.kept, np.random.Generator):
            top = self.kept.random() if top > 100 else 1.0
        else:
            top = self.kept.send(top)
        return self.layer(x / top)


def _largest():
    top = 0.0
    while True:
        top = max(top, (yield top))


def _begun(generator):
    next(generator)
    return generator


NAMESPACES = [
    lambda: Namespace(SimpleNamespace(top=0.0)),
    lambda: Namespace(deque([torch.zeros(3000)])),
    lambda: Namespace(np.random.default_rng(0)),
    lambda: Namespace(_begun(_largest())),
]


@pytest.mark.parametrize("engine", ["vmap", "loop"])
@pytest.mark.parametrize("attack", [Buffer, Weights, Hidden, OfItsClass, Global, OwnGenerator, Switching, *NAMESPACES])
def test_nothing_is_remembered_of_a_sample(attack, engine):
    x, y = samples(12)
    x[0] = 1e6
    OfItsClass.bank.clear()
    BANK.clear()
    with pytest.raises((mm.ModelMixError, RuntimeError)):  # RuntimeError: of vmap, which writes nowhere
        clipped_total(attack(), x, y, engine)


class Cached(nn.Module):
    """Keeps a table that no sample has touched, a counter in a closure of nobody's, and a frozen part."""

    def __init__(self):
        super().__init__()
        self.layer, self.table = nn.Linear(WIDTH, 3), {}
        self.frozen = nn.Linear(WIDTH, WIDTH).requires_grad_(False)

    def forward(self, x):
        if "ones" not in self.table:
            self.table["ones"] = torch.ones(WIDTH)
        return self.layer(self.frozen(x) * self.table["ones"])


@pytest.mark.parametrize("engine", ["vmap", "loop"])
def test_a_model_that_remembers_nothing_of_samples_is_not_refused(engine):
    x, y = samples(12)
    assert clipped_total(Cached(), x, y, engine).norm() > 0


class Reseeding(nn.Module):
    """Some samples seed torch's generator: the masks of all later ones would be theirs to choose."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layer, self.drop = nn.Linear(WIDTH, 3), nn.Dropout(0.5)

    def forward(self, x):
        h = self.layer(self.drop(x))
        if float(x.abs().max()) > 100:
            torch.manual_seed(5)
            self.drop(self.drop(x))
        return h


def test_randomness_of_one_sample_is_nothing_to_the_next():
    x, y = samples(40)
    odd = x.clone()
    odd[0] = odd[17] = 1e6
    found, other = (clipped_total(Reseeding(), each, y, "loop") for each in (x, odd))
    assert (found - other).norm() <= 4 * C * (1 + 1e-6)  # two samples were exchanged


def test_randomness_of_one_augmented_row_is_nothing_to_the_next():
    def jitter(inputs, generator):
        if float(inputs.max()) > 100:
            torch.rand(3, generator=generator)
            torch.manual_seed(5)
        return inputs + torch.rand(inputs.shape, generator=generator)

    x, _ = samples(6)
    odd = x.clone()
    odd[0] = 1e6
    torch.manual_seed(1)
    found, other = (apply_augmentation(jitter, each, torch.Generator().manual_seed(3)) for each in (x, odd))
    assert torch.equal(found[1:], other[1:])


# The form of an item.


class Images(Dataset):
    """Bytes, but for one item that holds floats or has another size."""

    def __init__(self, odd):
        self.odd, self.x = odd, torch.randint(0, 256, (60, WIDTH), generator=torch.Generator().manual_seed(0))

    def __len__(self):
        return 60

    def __getitem__(self, i):
        x = self.x[i].to(torch.uint8)
        if i == 50 and self.odd == "type":
            x = x.float()
        if i == 50 and self.odd == "size":
            x = torch.cat([x, x])
        return x, torch.tensor(float(i % 3)) if i == 50 and self.odd == "label" else i % 3


class Pixels(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(WIDTH, 3)

    def forward(self, x):
        return self.layer(x.float() / 255 - 0.5 if x.dtype == torch.uint8 else x)


def moved_by_trainer(dataset, workers):
    performance = mm.Performance(workers=workers, chunk=60)
    one = Trainer(
        Pixels(), F.cross_entropy, dataset, mm.Mechanism(1.0, 1.0), clip=C, lr=60.0, seed=1, performance=performance
    )
    return one.run(1, progress=False).state.last


def moved_by_loop(dataset, collate):
    model, loader = Pixels(), DataLoader(dataset, batch_size=60, collate_fn=collate)
    plan = mm.Plan.of(mm.Mechanism(1.0, 1.0), 1)
    model, optimizer, loader, criterion = planned.make_private(
        model, torch.optim.SGD(model.parameters(), lr=60.0), loader, nn.CrossEntropyLoss(), plan=plan, clip=C, seed=1
    )
    for x, y in loader:
        criterion(model(x), y).backward()
        optimizer.step()
    return torch.cat([p.detach().flatten().double() for p in model.parameters()])


@pytest.mark.filterwarnings("ignore:.*items have another shape")
@pytest.mark.parametrize("odd", ["type", "size", "label"])
@pytest.mark.parametrize(
    "run",
    [
        lambda d: moved_by_trainer(d, 0),
        lambda d: moved_by_loop(d, None),
        lambda d: moved_by_loop(d, lambda items: torch.utils.data.default_collate(items)),
    ],
    ids=["Trainer", "make_private", "collate"],
)
def test_an_item_of_another_form_does_not_change_the_others(odd, run):
    """It counts as zero, and what is left is the sum of the others: one clip, for one sample that is gone."""
    assert (run(Images(None)) - run(Images(odd))).norm() <= C * (1 + 1e-5)


def test_what_does_not_count_is_said_to_the_data_holder():
    with pytest.warns(UserWarning, match=r"count as zero.*data holder"):
        moved_by_trainer(Images("size"), 0)


# What a loop does with a batch it has seen.


def private_loop(plan, n=40, lr=1.0, model=None, **options):
    x, y = samples(n)
    model = model or nn.Sequential(nn.Dropout(0.5), nn.Linear(WIDTH, 3))
    loader = DataLoader(TensorDataset(x, y), batch_size=round(plan.phases[0].mechanism.sample_rate * n))
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    return planned.make_private(model, optimizer, loader, nn.CrossEntropyLoss(), plan=plan, clip=1.0, **options)


@pytest.mark.parametrize("rate", [-1.0, -0.2, 0.0, math.nan, math.inf])
def test_a_learning_rate_that_would_turn_mixing_off_makes_no_step(rate):
    model, optimizer, loader, criterion = private_loop(mm.Plan.of(mm.Mechanism(0.335, 0.5, 150.0, p=100), 5))
    before = [p.detach().clone() for p in model.parameters()]
    x, y = next(iter(loader))
    criterion(model(x), y).backward()
    optimizer.param_groups[0]["lr"] = rate
    with pytest.raises(mm.ModelMixError, match="learning rate"):
        optimizer.step()
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))


def test_a_draw_that_was_seen_is_not_thrown_away_by_loading_a_state():
    model, optimizer, loader, criterion = private_loop(mm.Plan.of(mm.Mechanism(1.0, 0.1), 20))
    state = copy.deepcopy(optimizer.state_dict())
    for x, y in loader:
        with pytest.raises(mm.UnprovedError, match="throw it away"):
            optimizer.load_state_dict(state)
        criterion(model(x), y).backward()
        optimizer.step()
        optimizer.load_state_dict(optimizer.state_dict())
        break
    assert optimizer.ledger.steps == 1


@pytest.mark.parametrize("choice", ["type", "mode", "mode of the next", "part"])
def test_a_loop_does_not_choose_by_its_batch_how_samples_are_treated(choice):
    class Either(nn.Module):
        def __init__(self):
            super().__init__()
            self.drop, self.layer = nn.Dropout(0.9), nn.Linear(WIDTH, 3)

        def forward(self, x):
            return self.layer(self.drop(x.float()))

    class Two(Dataset):
        def __len__(self):
            return 40

        def __getitem__(self, i):
            x = torch.full((WIDTH,), float(i))
            return {"x": x, "z": x + 1}, i % 3

    model = Either()
    loader = DataLoader(Two(), batch_size=20)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    plan = mm.Plan.of(mm.Mechanism(1.0, 0.5), 4)

    class Given(nn.Module):  # the engine is probed with the whole batch
        def __init__(self):
            super().__init__()
            self.inner = model

        def forward(self, x, z=None):
            return self.inner(x)

    given = Given()
    given, optimizer, loader, criterion = mm.make_private(
        given, optimizer, loader, nn.CrossEntropyLoss(), plan=plan, clip=1.0
    )

    def epoch():
        for k, (batch, y) in enumerate(loader):
            inputs = dict(batch)
            if choice == "type":
                inputs["x"] = inputs["x"].half()
            if choice == "mode" or (choice == "mode of the next" and k):
                given.eval()
            if choice == "part" and k:
                inputs["x"], inputs["z"] = inputs["z"], inputs["x"]
            criterion(given(**inputs), y).backward()
            optimizer.step()

    with pytest.raises(mm.UnprovedError):
        epoch()


def test_evaluation_between_epochs_and_another_order_of_calls_are_no_choice():
    model, optimizer, loader, criterion = private_loop(mm.Plan.of(mm.Mechanism(1.0, 0.5), 4))
    for _ in range(2):
        model.train()
        for x, y in loader:
            optimizer.zero_grad()
            criterion(model(x), y).backward()
            optimizer.step()
        model.eval()
        with torch.no_grad():
            model(samples(5)[0])
    assert optimizer.ledger.steps == 4


# Copies and threads.


def test_the_key_of_coming_noise_is_not_copied():
    one = Trainer(nn.Linear(WIDTH, 3), F.cross_entropy, samples(20), mm.Mechanism(1.0, 0.5), clip=1.0, lr=0.1)
    for thing in (one, one._step.randomness):
        with pytest.raises((mm.ModelMixError, TypeError)):
            copy.deepcopy(thing)
    assert one.run(1, progress=False).step == 1


def test_two_threads_do_not_run_one_trainer(monkeypatch):
    one = Trainer(nn.Linear(WIDTH, 3), F.cross_entropy, samples(20), mm.Mechanism(1.0, 0.5), clip=1.0, lr=0.1)
    inside, go_on, genuine = threading.Event(), threading.Event(), mm.Trainer._take_step

    def slow(self, chunks):
        inside.set()
        go_on.wait(20)
        genuine(self, chunks)

    monkeypatch.setattr(mm.Trainer, "_take_step", slow)
    other = threading.Thread(target=lambda: one.run(1, progress=False))
    other.start()
    assert inside.wait(20)
    with pytest.raises(mm.ModelMixError, match="another thread"):
        one.run(1, progress=False)
    go_on.set()
    other.join()
    assert one.step == one.ledger.steps == 1


# What a loop, a dataset or an augmentation writes between two passes.

SIGN = torch.ones(())


class Signed(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layer, self.centre = nn.Linear(WIDTH, 3), torch.zeros(WIDTH)

    def forward(self, x):
        return self.layer((x - self.centre) * SIGN)


class Flips(Dataset):
    """An item that flips the sign which the model applies to all of them."""

    def __init__(self, odd):
        self.x, self.y = samples(40)
        self.odd = odd

    def __len__(self):
        return 40

    def __getitem__(self, i):
        if i == 3 and self.odd:
            SIGN.fill_(-1.0)
        return self.x[i] * (1 + 9 * (i == 3 and self.odd)), self.y[i]


def flip(inputs, generator):
    if float(inputs.max()) > 100:
        SIGN.fill_(-1.0)
    return inputs


@pytest.mark.parametrize("engine", ["hooks", "vmap", "loop"])
@pytest.mark.parametrize("way", ["dataset", "augment"])
def test_what_is_written_between_passes_reaches_no_other_sample(engine, way):
    states = []
    for odd in (False, True):
        SIGN.fill_(1.0)
        x, y = samples(40)
        if odd:
            x[3] = 1e3
        data = Flips(odd) if way == "dataset" else (x, y)
        options = {"augment": flip} if way == "augment" else {}
        performance = mm.Performance(chunk=8, engine=engine)
        one = Trainer(
            Signed(), F.cross_entropy, data, mm.Mechanism(1.0, 1.0), clip=C, lr=40.0, seed=1, performance=performance,
            **options,
        )  # fmt: skip
        try:
            states.append(one.run(1, progress=False).state.last)
        except mm.UnprovedError:
            assert engine != "hooks" or way == "augment"
            return
    assert (states[0] - states[1]).norm() <= 2 * C * (1 + 1e-6)


@pytest.mark.parametrize("what", ["criterion", "attribute", "rebound", "weights", "signs"])
def test_a_loop_writes_nothing_of_its_batch_into_what_the_pass_reads(what):
    weights = torch.ones(3)

    def criterion(outputs, targets):
        return (F.cross_entropy(outputs, targets, reduction="none") * weights[targets]).mean()

    moved = []
    for odd in (False, True):
        x, y = samples(40)
        x[:, 0] = 0.0
        if odd:
            x[3] = 1e3
        weights.fill_(1.0)
        model = Signed()
        SIGN.fill_(1.0)
        loader = DataLoader(TensorDataset(x, y), batch_size=40)
        model, optimizer, loader, private = planned.make_private(
            model, torch.optim.SGD(model.parameters(), lr=40.0), loader, criterion, clip=C, seed=1,
            plan=mm.Plan.of(mm.Mechanism(1.0, 1.0), 2),
        )  # fmt: skip
        try:
            for inputs, targets in (pair for _ in range(2) for pair in loader):
                given = inputs
                if what == "criterion":
                    weights.copy_(1 + inputs.max() * torch.arange(3))
                elif what == "attribute":
                    model.centre.copy_(inputs.mean(0))
                elif what == "rebound":
                    model.centre = inputs.mean(0)
                elif what == "weights":
                    with torch.no_grad():
                        model.layer.bias.copy_(inputs.max() * torch.ones(3))
                elif inputs.max() > 100:
                    given = torch.where(inputs == 0, -0.0, inputs)
                private(model(given), targets).backward()
                optimizer.step()
        except mm.UnprovedError:
            return
        moved.append(torch.cat([p.detach().flatten().double() for p in model.parameters()]))
    assert what != "weights"
    assert (moved[0] - moved[1]).norm() <= 2 * 2 * C * (1 + 1e-6) + 1e-5  # two steps


def test_weights_that_are_swapped_for_an_evaluation_and_put_back_are_no_change():
    model, optimizer, loader, criterion = private_loop(mm.Plan.of(mm.Mechanism(1.0, 0.5), 4))
    for x, y in loader:
        kept = copy.deepcopy(model.state_dict())
        with torch.no_grad():
            for p in model.parameters():
                p.mul_(0.5)
        model.load_state_dict(kept)
        criterion(model(x), y).backward()
        optimizer.step()
    assert optimizer.ledger.steps == 2


def test_the_ledger_file_of_a_loop_counts_as_its_plan(tmp_path):
    """A loop that was stopped by looking at it has the epsilon of its plan, in whatever is told of its file."""
    from modelmix.accounting.runs import load_claim

    plan = mm.Plan.of(mm.Mechanism(0.5, 0.1), 1000, delta=1e-4)
    model, optimizer, loader, criterion = private_loop(plan, ledger=tmp_path / "ledger.json")
    for x, y in (pair for _ in range(2) for pair in loader):
        criterion(model(x), y).backward()
        optimizer.step()
    claim = load_claim(tmp_path / "ledger.json")
    assert claim.guarantee(1e-4).epsilon == pytest.approx(optimizer.guarantee.epsilon, rel=1e-9)
    assert claim.taken.steps == 20
    (tmp_path / "link.json").symlink_to(tmp_path / "ledger.json")
    assert load_claim(tmp_path / "link.json").ledger.steps == 1000


@pytest.mark.parametrize("op", ["strides", "empty"])
def test_overlapping_memory_is_not_proved(op):
    class Overlaps(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(WIDTH, 3)

        def forward(self, x):
            if op == "strides":
                return self.layer(torch.ops.aten._reshape_alias(x, [x.shape[0], WIDTH], [0, 1]))
            out = torch.empty_strided((x.shape[0], WIDTH), (1, 1)).fill_(0.0)
            return self.layer(out.copy_(x))

    with suppress(mm.ModelMixError):
        assert Engine(Overlaps(), F.cross_entropy, samples(3)).name != "hooks"


@pytest.mark.parametrize("width", [0.0, 2.0], ids=["plain", "mixed"])
def test_weights_that_are_swapped_for_the_pass_and_put_back_are_refused(width):
    model, _, loader, criterion = private_loop(mm.Plan.of(mm.Mechanism(1.0, 0.5, width), 4))
    x, y = next(iter(loader))
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(-100)
    with pytest.raises(mm.UnprovedError, match="changed from outside"):
        criterion(model(x), y)


def test_hooks_around_the_step_are_refused():
    model, optimizer, loader, criterion = private_loop(mm.Plan.of(mm.Mechanism(1.0, 0.5), 4))
    x, y = next(iter(loader))
    optimizer._original.register_step_post_hook(lambda *a: None)
    criterion(model(x), y).backward()
    with pytest.raises(mm.UnprovedError, match="hooks around the optimizer"):
        optimizer.step()


class Late(nn.Module):
    """Is traced anew, or run again, once it has been put into another mode or is given more samples."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(WIDTH, 3)

    def forward(self, x):
        return self.layer(x * SIGN) if x.shape[0] < 20 else self.layer(x * SIGN * 1.0)


@pytest.mark.parametrize("late", ["mode", "copies", "size"])
def test_what_is_traced_late_has_seen_no_sample(late):
    states = []
    for odd in (False, True):
        SIGN.fill_(1.0)
        model = Late()
        options = {"augment": lambda x, g: x, "multiplicity": 2} if late == "copies" else {}
        if late == "mode":
            model.eval()
        performance = mm.Performance(chunk=40 if late == "size" else 8)
        one = Trainer(
            model, F.cross_entropy, Flips(odd), mm.Mechanism(1.0, 1.0), clip=C, lr=40.0, seed=1,
            performance=performance, **options,
        )  # fmt: skip
        SIGN.fill_(1.0)
        model.train()
        try:
            states.append(one.run(1, progress=False).state.last)
        except mm.UnprovedError:
            return
    assert (states[0] - states[1]).norm() <= 2 * C * (1 + 1e-6)

"""Memory of samples, wherever a model, a criterion or a dataset keeps it: one sample moves a step by one clip or none.

Every attack ran to the end and moved the released states by 1.3 to 126 clips before contents of base classes, imports
within functions, hooks of the backward pass and attributes of tensors were compared, items were copied as they are
read, and a synthetic sample was run before and after the others.
"""

from __future__ import annotations

import contextvars
import functools
import itertools
import os
import pickle
import random
import sys
import threading
import time
import types
import warnings

import numpy as np
import planned
import pytest
import torch
import torch.nn.functional as F  # noqa: N812, the name everybody knows
from torch import nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

import modelmix as mm
from modelmix.training import Randomness
from modelmix.training.augment import apply_augmentation
from modelmix.training.item_checks import check_items_independent
from modelmix.training.items import Items
from modelmix.training.norms import private_norm_histogram
from modelmix.training.sampling import as_source

WIDTH, CLIP, POPULATION = 6, 0.1, 64


def samples(m=41):
    draws = torch.Generator().manual_seed(0)
    x, y = torch.randn(m, WIDTH, generator=draws), torch.randint(0, 3, (m,), generator=draws)
    x[0] *= 100
    return x, y


def one_step():
    mechanism = mm.Mechanism(1.0, 1.0)
    return mm.Plan.of(mechanism, 1, population=POPULATION, delta=1e-3, adjacency="add-or-remove")


def trained(model, data, loss):
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="samples run one at a time")
        trainer = planned.Trainer(model, loss, data, one_step(), CLIP, 1.0, seed=3)
        trainer.run()
    return trainer.state.last


def looped(model, data, loss):
    if isinstance(data, tuple):
        data = TensorDataset(*data)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="samples run one at a time")
        loader = DataLoader(data, batch_size=len(data))
        model, optimizer, loader, criterion = planned.make_private(
            model, torch.optim.SGD(model.parameters(), lr=1.0), loader, loss, clip=CLIP, plan=one_step(), seed=3
        )
        for x, y in loader:
            criterion(model(x), y).backward()
            optimizer.step()
    return torch.cat([p.detach().double().flatten() for p in model.parameters()])


ENTRIES = {"trainer": trained, "loop": looped}


def moved(entry, make, data_of=lambda x, y: (x, y)):
    """By how many clips the first sample moves the released state."""
    x, y = samples()
    states = []
    for rows in (slice(0, None), slice(1, None)):
        torch.manual_seed(0)
        model, loss = make()
        states.append(ENTRIES[entry](model, data_of(x[rows], y[rows]), loss))
    return float((states[0] - states[1]).norm()) * POPULATION / CLIP


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(WIDTH, 3)


def largest(x):
    return float(x.detach().abs().max())


class Alternates(Net):
    def __init__(self):
        super().__init__()
        self.sign = itertools.cycle([1.0, -1.0])

    def forward(self, x):
        return self.layer(x * next(self.sign) if largest(x) < 1e9 else 0 * x)


class KeepsOnWeight(Net):
    def forward(self, x):
        weight = self.layer.weight
        if not hasattr(weight, "scale"):
            weight.scale = largest(x)
        return self.layer(x / weight.scale)


class KeepsOnBuffer(Net):
    def __init__(self):
        super().__init__()
        self.register_buffer("unit", torch.ones(()))

    def forward(self, x):
        self.unit.scale = max(getattr(self.unit, "scale", 0.1), largest(x))
        return self.layer(x / self.unit.scale)


class BackwardWithin(Net):
    def forward(self, x):
        hidden = self.layer(x)
        if self.layer.weight.grad is not None:
            hidden = hidden + F.linear(x, -3 * self.layer.weight.grad)
        if hidden.requires_grad:
            hidden.square().sum().backward(retain_graph=True)
        return hidden


class HooksBackward(Net):
    def __init__(self):
        super().__init__()
        self.act, self.last = nn.Tanh(), nn.Linear(3, 3)
        kept = {"norm": 1.0}

        def hook(module, into, out):
            kept["norm"] = 0.5 * kept["norm"] + 0.5 * float(into[0].norm())
            return (into[0] / kept["norm"],)

        self.act.register_full_backward_hook(hook)

    def forward(self, x):
        return self.last(self.act(self.layer(x)))


class HelperBase:
    def __init__(self):
        type(self).__mro__[1].top = 0.1

    def __call__(self, x):
        HelperBase.top = max(HelperBase.top, largest(x))
        return x / HelperBase.top


class Helper(HelperBase):
    pass


class HasHelper(Net):
    def __init__(self):
        super().__init__()
        self.helper = Helper()

    def forward(self, x):
        return self.layer(self.helper(x))


class ImportsWithin(Net):
    def __init__(self):
        super().__init__()
        sys.modules["keeps_the_largest"] = types.ModuleType("keeps_the_largest")
        sys.modules["keeps_the_largest"].top = 0.1

    def forward(self, x):
        import keeps_the_largest

        keeps_the_largest.top = max(keeps_the_largest.top, largest(x))
        return self.layer(x / keeps_the_largest.top)


TOP = contextvars.ContextVar("TOP", default=0.1)


class InContext(Net):
    def forward(self, x):
        TOP.set(max(TOP.get(), largest(x)))
        return self.layer(x / TOP.get())


class Script(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layer, self.top = nn.Linear(WIDTH, 3), torch.jit.Attribute(0.1, float)

    def forward(self, x):
        self.top = max(self.top, float(x.abs().max()))
        return self.layer(x / self.top)


def scripted():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch announces the end of scripts
        return torch.jit.script(Script())


class LossBase(nn.Module):
    kept = 0.0

    def forward(self, outputs, targets):
        loss = F.cross_entropy(outputs, targets)
        LossBase.kept = 0.9 * LossBase.kept + 0.1 * float(loss.detach())
        return loss * LossBase.kept


class InheritedLoss(LossBase):
    pass


MEAN = {"loss": 1.0}


@functools.wraps(F.cross_entropy)
def wrapped(outputs, targets):
    loss = F.cross_entropy(outputs, targets)
    MEAN["loss"] = 0.9 * MEAN["loss"] + 0.1 * float(loss.detach())
    return loss / MEAN["loss"]


KEEPERS = {
    "itertools": lambda: (Alternates(), F.cross_entropy),
    "an attribute of a weight": lambda: (KeepsOnWeight(), F.cross_entropy),
    "an attribute of a buffer": lambda: (KeepsOnBuffer(), F.cross_entropy),
    "a gradient": lambda: (BackwardWithin(), F.cross_entropy),
    "a backward hook": lambda: (HooksBackward(), F.cross_entropy),
    "a base class of a helper": lambda: (HasHelper(), F.cross_entropy),
    "an import within": lambda: (ImportsWithin(), F.cross_entropy),
    "a context variable": lambda: (InContext(), F.cross_entropy),
    "a script module": lambda: (scripted(), F.cross_entropy),
    "a base class of the criterion": lambda: (Net_(), InheritedLoss()),
    "a wrapped criterion": lambda: (Net_(), wrapped),
}


def Net_():  # noqa: N802, a network without a memory
    torch.manual_seed(0)
    return nn.Linear(WIDTH, 3)


@pytest.mark.parametrize("entry", ENTRIES)
@pytest.mark.parametrize("name", KEEPERS)
def test_what_is_kept_of_samples_reaches_no_other(name, entry):
    try:
        clips = moved(entry, KEEPERS[name])
    except mm.ModelMixError:
        return
    assert clips <= 1.001


class OneBuffer(Dataset):
    """Gives every item in the same memory."""

    def __init__(self, x, y, tensor):
        self.x, self.y = x, y
        self.buffer = torch.empty(WIDTH) if tensor else np.empty(WIDTH, np.float32)

    def __len__(self):
        return len(self.x)

    def __getitem__(self, i):
        self.buffer[:] = self.x[i] if isinstance(self.buffer, torch.Tensor) else self.x[i].numpy()
        return self.buffer, int(self.y[i])


@pytest.mark.parametrize("entry", ENTRIES)
@pytest.mark.parametrize("tensor", [True, False])
def test_items_in_one_buffer_are_different_items(entry, tensor):
    def make():
        return Net_(), F.cross_entropy

    assert moved(entry, make, lambda x, y: OneBuffer(x, y, tensor)) <= 1.001
    x, y = samples()
    whole = ENTRIES[entry](Net_(), (x, y), F.cross_entropy)
    torch.testing.assert_close(ENTRIES[entry](Net_(), OneBuffer(x, y, tensor), F.cross_entropy), whole)


def test_an_augmentation_that_reuses_memory_mixes_nothing():
    rows = torch.empty(1, WIDTH)

    def same_memory(inputs, generator):
        rows[:] = inputs
        return rows

    x, _ = samples()
    try:
        augmented = apply_augmentation(same_memory, x, torch.Generator().manual_seed(0))
    except mm.UnprovedError:
        return
    assert torch.equal(augmented, x)


class RunningMean(Dataset):
    def __init__(self, x, y):
        self.x, self.y, self.mean = x, y, torch.zeros(WIDTH)

    def __len__(self):
        return len(self.x)

    def __getitem__(self, i):
        self.mean = 0.9 * self.mean + 0.1 * self.x[i]
        return self.x[i] - self.mean, int(self.y[i])


class MixedWithTheLast(RunningMean):
    def __getitem__(self, i):
        x, last = self.x[i], self.mean
        self.mean = x
        return 0.5 * x + 0.5 * last, int(self.y[i])


@pytest.mark.parametrize("entry", ENTRIES)
@pytest.mark.parametrize("kind", [RunningMean, MixedWithTheLast])
def test_a_dataset_that_remembers_items_is_refused(entry, kind):
    with pytest.raises(mm.UnprovedError, match="another one after others were read"):
        ENTRIES[entry](Net_(), kind(*samples()), F.cross_entropy)


def test_nobody_sees_a_state_that_is_not_kept(tmp_path):
    """It is taken again with other noise if the process dies, and the ledger would count it once."""
    seen, done = set(), threading.Event()
    x, y = samples()

    class Slow(Dataset):
        def __len__(self):
            return len(x)

        def __getitem__(self, i):
            time.sleep(1e-4)
            return x[i], int(y[i])

    trainer = mm.Trainer(
        Net_(), F.cross_entropy, Slow(), mm.Plan.of(mm.Mechanism(1.0, 0.5), 12, delta=1e-3), CLIP, 1.0,
        folder=tmp_path / "run", test_set=(x, y),
    )  # fmt: skip

    def watch():
        while not done.is_set():
            seen.add((trainer.state.step, *(row["step"] for row in trainer.metrics)))
            time.sleep(1e-4)

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        trainer.run(evaluate_every=6)
    finally:
        done.set()
        watcher.join()
    assert {steps[0] for steps in seen} <= {0, 6, 12}
    assert all(max(steps) == steps[0] for steps in seen)
    assert trainer.state.step == 12


@pytest.mark.parametrize("entry", ENTRIES)
def test_a_penalty_on_the_weights_in_the_criterion_is_refused_and_not_lost(entry):
    model = Net_()

    def penalised(outputs, targets):
        return F.cross_entropy(outputs, targets) + 10 * sum(p.square().sum() for p in model.parameters())

    with pytest.raises(mm.ModelMixError, match="weight_decay"):
        ENTRIES[entry](model, samples(), penalised)


def test_hooks_of_all_optimizers_are_refused():
    from torch.optim.optimizer import register_optimizer_step_post_hook

    x, y = samples()
    model = Net_()
    handle = register_optimizer_step_post_hook(lambda *arguments: None)
    try:
        with pytest.raises(mm.UnprovedError, match="for all optimizers"):
            looped(model, (x, y), F.cross_entropy)
    finally:
        handle.remove()


def test_a_model_in_a_private_loop_is_not_taken_by_another():
    model = Net_()
    looped(model, samples(), F.cross_entropy)
    for entry in ENTRIES.values():
        for again in (model, nn.Sequential(model)):
            with pytest.raises(mm.UnprovedError, match="made private before"):
                entry(again, samples(), F.cross_entropy)


@pytest.mark.parametrize("entry", ENTRIES)
@pytest.mark.parametrize("kind", [nn.CrossEntropyLoss, nn.NLLLoss])
def test_class_weights_count(entry, kind):
    """Over one sample torch's mean divides by the weight of its class, and every weight would be lost."""
    weights = torch.tensor([1e-3, 1e-2, 3e-3])  # gradients shorter than the clip
    x, y = samples()
    x[0] /= 100

    def by_hand(outputs, targets):
        plain = kind(reduction="none")(outputs, targets)
        return (plain * weights[targets]).sum()

    given, wanted = (ENTRIES[entry](Net_(), (x, y), loss) for loss in (kind(weight=weights), by_hand))
    torch.testing.assert_close(given, wanted)
    assert not torch.allclose(given, ENTRIES[entry](Net_(), (x, y), kind()))
    assert moved(entry, lambda: (Net_(), kind(weight=weights))) <= 1.001


# Datasets again: memories that a probe with one seed and two neighbours did not see, and ones that are none.


class Rows(Dataset):
    def __init__(self, x, y):
        self.x, self.y = x, y

    def __len__(self):
        return len(self.x)

    def __getitem__(self, i):
        return self.x[i], int(self.y[i])


class Replays(Rows):
    """Mixes with one of the last fifty items, once it has ten of them."""

    def __init__(self, x, y):
        super().__init__(x, y)
        self.kept = []

    def __getitem__(self, i):
        x = self.x[i]
        mixed = x + self.kept[torch.randint(len(self.kept), ())] if len(self.kept) >= 10 else x
        self.kept = [*self.kept, x][-50:]
        return mixed, int(self.y[i])


class MixesSometimes(Rows):
    def __init__(self, x, y):
        super().__init__(x, y)
        self.last = None

    def __getitem__(self, i):
        x, last, self.last = self.x[i], self.last, self.x[i]
        return (x + last if last is not None and random.random() < 0.5 else x), int(self.y[i])


class MixesWithItsClass(Rows):
    def __init__(self, x, y):
        order = torch.argsort(y)
        super().__init__(x[order], y[order])
        self.last = {}

    def __getitem__(self, i):
        x, label = self.x[i], int(self.y[i])
        last, self.last[label] = self.last.get(label, x), x
        return x + last, label


class CutsIntoImages(Rows):
    """Images in NumPy, of which a printed form shows the edges only."""

    def __init__(self, x, y):
        super().__init__(np.random.default_rng(0).normal(size=(len(x), 3, 32, 32)).astype(np.float32), y)
        self.last = None

    def __getitem__(self, i):
        image, last, self.last = self.x[i].copy(), self.last, self.x[i]
        if last is not None:
            image[:, 10:20, 10:20] = last[:, 10:20, 10:20]
        return image, int(self.y[i])


@pytest.mark.parametrize("kind", [Replays, MixesSometimes, MixesWithItsClass, CutsIntoImages])
def test_memories_of_datasets_are_refused(kind):
    with pytest.raises(mm.UnprovedError, match="another one after others were read"):
        check_items_independent(kind(*samples()))


class OneHot(Rows):
    def __getitem__(self, i):
        return self.x[i], F.one_hot(self.y[i], 3)


class Named(Rows):
    """Labels that stand for something else."""

    def __getitem__(self, i):
        return self.x[i], ("cat", "dog", "fox")[int(self.y[i])]


class DrawsAnew(Rows):
    def __getitem__(self, i):
        return self.x[i] + np.random.default_rng().normal(), int(self.y[i])


class DrawsItsOwn(Rows):
    def __init__(self, x, y):
        super().__init__(x, y)
        self.own, self.theirs = np.random.default_rng(0), random.Random(0)

    def __getitem__(self, i):
        return self.x[i] + self.own.normal() + self.theirs.random(), int(self.y[i])


class Holds:
    def __init__(self, value):
        self.value = value


class GivesObjects(Rows):
    def __getitem__(self, i):
        return Holds(self.x[i]), int(self.y[i])


class Caches(Rows):
    def __init__(self, x, y):
        super().__init__(x, y)
        self.cache = {}

    def __getitem__(self, i):
        if i not in self.cache:
            self.cache[i] = self.x[i] * 2
        return self.cache[i], int(self.y[i])


@pytest.mark.parametrize("kind", [Rows, OneHot, Named, DrawsItsOwn, GivesObjects, Caches])
def test_datasets_that_remember_nothing_are_not_refused(kind):
    x, y = samples()
    y, _ = torch.sort(y)  # the last row has the last class
    check_items_independent(kind(x, y))
    check_items_independent(torch.utils.data.Subset(kind(x, y), torch.randperm(len(y))))
    check_items_independent(torch.utils.data.Subset(kind(x, y), torch.arange(len(y))))


def test_entropy_of_the_system_cannot_be_told_from_memory():
    with pytest.raises(mm.UnprovedError, match="another one when it is read again"):
        check_items_independent(DrawsAnew(*samples()))


class SeedsAll(Rows):
    """Augments by a seed of its own, as for reproducibility, and leaves the generator so."""

    def __getitem__(self, i):
        torch.manual_seed(int(self.x[i].abs().sum() * 1000))
        return self.x[i] + 0.01 * torch.randn(WIDTH), int(self.y[i])


def test_an_item_that_seeds_a_generator_is_nothing_to_the_others():
    """It chose the masks of dropout for its whole chunk."""
    x, y = samples()
    states = []
    for rows in (slice(0, None), slice(0, -1)):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(WIDTH, 50), nn.Dropout(0.5), nn.Linear(50, 3))
        states.append(trained(model, SeedsAll(x[rows], y[rows]), F.cross_entropy))
    without_seeds = []
    for rows in (slice(0, None), slice(0, -1)):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(WIDTH, 50), nn.Dropout(0.5), nn.Linear(50, 3))
        without_seeds.append(trained(model, Rows(x[rows], y[rows]), F.cross_entropy))
    moved_by = [float((a - b).norm()) * POPULATION / CLIP for a, b in (states, without_seeds)]
    assert moved_by[0] <= max(1.001, 1.2 * moved_by[1])


class Positive(nn.Module):
    """Refuses negative numbers, takes their root, and remembers the largest where Python does not look."""

    def __init__(self, raises):
        super().__init__()
        torch.manual_seed(0)
        self.layer, self.raises = nn.Linear(WIDTH, 3), raises

    def forward(self, x):
        if self.raises and float(x.min()) < 0:
            raise ValueError("negative")
        TOP.set(max(TOP.get(), largest(x)))
        return self.layer(torch.sqrt(x) / TOP.get())


@pytest.mark.parametrize("entry", ENTRIES)
@pytest.mark.parametrize("raises", [False, True])
def test_models_of_positive_numbers_are_watched_too(entry, raises):
    TOP.set(0.1)
    with pytest.raises(mm.UnprovedError, match="another gradient for the same sample"):
        moved(entry, lambda: (Positive(raises), F.cross_entropy), lambda x, y: (x.abs(), y))


class DropsLayers(Net):
    def forward(self, x):
        return self.layer(x) * (2.0 if random.random() < 0.5 else 1.0)


@pytest.mark.parametrize("entry", ENTRIES)
def test_a_model_may_draw_with_python(entry):
    x, y = samples()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        ENTRIES[entry](DropsLayers(), (x, y), F.cross_entropy)


def test_a_collate_function_that_remembers_out_of_sight_is_refused():
    x, y = samples()

    def scaled(items):
        rows, labels = torch.utils.data.default_collate(items)
        TOP.set(max(TOP.get(), largest(rows)))
        return rows / TOP.get(), labels

    TOP.set(0.1)
    model = Net_()
    loader = DataLoader(TensorDataset(x.flip(0), y), batch_size=len(y), collate_fn=scaled)
    plan = mm.Plan.of(mm.Mechanism(1.0, 1.0), 2, delta=1e-3)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)

    def draw():
        private = mm.make_private(model, optimizer, loader, F.cross_entropy, clip=CLIP, plan=plan)
        return next(iter(private[2]))

    with pytest.raises(mm.UnprovedError, match="collate_fn"):
        draw()


class OpensItsFile(Dataset):
    """Opens its file at the first item, one handle for every worker, as is recommended."""

    def __init__(self, path, n):
        self.path, self.n, self.file = path, n, None

    def __len__(self):
        return self.n

    def __getitem__(self, i):
        if self.file is None:
            self.file = os.open(self.path, os.O_RDONLY)
        return torch.frombuffer(bytearray(os.pread(self.file, 4, 4 * i)), dtype=torch.int32).float(), 0


def test_workers_open_files_of_their_own(tmp_path):
    n = 200
    (tmp_path / "rows").write_bytes(np.arange(n, dtype=np.int32).tobytes())
    data = OpensItsFile(tmp_path / "rows", n)
    planned.Trainer(
        nn.Linear(1, 2), F.cross_entropy, data, one_step(), CLIP, 1.0, performance=mm.Performance(workers=1)
    )  # fmt: skip
    assert data.file is None
    model = nn.Linear(1, 2)
    mm.make_private(
        model, torch.optim.SGD(model.parameters(), lr=1.0), DataLoader(data, batch_size=10, num_workers=1),
        F.cross_entropy, clip=CLIP, plan=mm.Plan.of(mm.Mechanism(1.0, 0.05), 2, delta=1e-3),
    )  # fmt: skip
    assert data.file is None


def test_what_is_asked_of_the_items_is_asked_of_the_dataset():
    """``worker_init_fn`` of torch's documentation reaches the dataset of its worker."""
    data = Rows(*samples())
    items = Items(data)
    assert items.x is data.x
    items.handle = 3
    assert data.handle == 3
    assert len(pickle.loads(pickle.dumps(items))) == len(data)


class Focal(nn.CrossEntropyLoss):
    def forward(self, outputs, targets):
        losses = F.cross_entropy(outputs, targets, weight=self.weight, reduction="none")
        return (losses * (1 - torch.exp(-losses)) ** 2).mean()


def test_a_criterion_that_inherits_is_what_it_says():
    x, y = samples()
    weights = torch.tensor([1e-3, 1e-2, 3e-3])
    found = [trained(Net_(), (x, y), kind(weight=weights)) for kind in (Focal, nn.CrossEntropyLoss)]
    assert not torch.allclose(*found)


def test_a_dataset_that_inherits_is_what_it_says():
    class Half(TensorDataset):
        def __len__(self):
            return 20

        def __getitem__(self, i):
            x, y = super().__getitem__(i)
            return 0 * x, y

    x, y = samples()
    source = as_source(Half(x, y))
    assert source.n == 20
    assert not source.head(3)[0].any()


def test_a_frozen_backbone_may_stay_in_the_optimizer():
    x, y = samples()
    model = nn.Sequential(nn.Linear(WIDTH, 4), nn.Linear(4, 3))
    model[0].requires_grad_(False)
    before = model[0].weight.clone()
    looped(model, (x, y), F.cross_entropy)
    assert torch.equal(model[0].weight, before)


def test_a_histogram_of_norms_of_a_model_that_remembers_is_refused():
    TOP.set(0.1)
    x, y = samples()
    with pytest.raises(mm.UnprovedError, match="another gradient for the same sample"):
        private_norm_histogram(
            InContext(), F.cross_entropy, (x, y), mm.Mechanism(1.0, 1.0), Randomness(1)
        )  # fmt: skip

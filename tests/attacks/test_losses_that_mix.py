"""Loops of one's own: the criterion, the batch and the loss may not make samples meet.

The loop runs at q = 1 with next to no noise, so that one step shows the sum of clipped gradients. One sample exchanged
may move it by 2c. A class-weighted cross entropy, whose mean divides by the weights of the batch, moved it by 45 c, a
mean over the batch by 10 c, a mean over the batch's tokens by 7 c, rows repeated in a batch by 44 c: none of them was
refused by the version that took the loop's own loss.
"""

from __future__ import annotations

import copy
import pickle

import planned
import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

import modelmix as mm

N, C, LR = 40, 0.1, 1.0
X = torch.randn(N, 6, generator=torch.Generator().manual_seed(0))
Y = torch.zeros(N, dtype=torch.long)


def private(x, y, criterion, model=None, dataset=None, **options):
    torch.manual_seed(0)
    model = model or nn.Sequential(nn.Linear(6, 4), nn.Tanh(), nn.Linear(4, 3))
    loader = DataLoader(TensorDataset(x, y) if dataset is None else dataset, batch_size=N, **options)
    plan = mm.Plan.of(mm.Mechanism(1e-9, 1.0), 5)
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    return planned.make_private(model, optimizer, loader, criterion, plan=plan, clip=C, seed=1)


def moved(x, y, criterion, **options) -> torch.Tensor:
    """The sum of clipped gradients, as one step shows it."""
    model, optimizer, loader, criterion = private(x, y, criterion, **options)
    before = torch.cat([p.detach().flatten() for p in model.parameters()]).double()
    x, y = next(iter(loader))
    criterion(model(x), y).backward()
    optimizer.step()
    return (before - torch.cat([p.detach().flatten() for p in model.parameters()]).double()) * N / LR


def sensitivity(criterion, x=X, y=Y, **options) -> float:
    """The largest change of the sum, in clips, when one sample is another one."""
    base, changes = moved(x, y, criterion, **options), []
    for other, label in ((100 * X[0], 1), (torch.full((6,), 1e3), 2)):
        x2, y2 = x.clone(), y.clone()
        x2[0], y2[0] = other, label
        changes.append(float((base - moved(x2, y2, criterion, **options)).norm()) / C)
    return max(changes)


LOSSES = {
    "class weights": nn.CrossEntropyLoss(weight=torch.tensor([1e-3, 1.0, 1e3])),
    "sum": nn.CrossEntropyLoss(reduction="sum"),
    "mean": nn.CrossEntropyLoss(),
    "centred by the batch": lambda o, y: F.cross_entropy(o - o.mean(0), y),
    "divided by the batch": lambda o, y: F.cross_entropy(o, y, reduction="sum") / (o.abs().sum() + 1e-3),
    "largest of the batch": lambda o, y: F.cross_entropy(o, y, reduction="none").max(),
    "products of the batch": lambda o, y: (o @ o.T).sum() / len(o),
    "weighted by labels": lambda o, y: F.cross_entropy(o, y) * (y.float().mean() * 100 + 0.01),
}


@pytest.mark.parametrize("name", LOSSES)
def test_a_criterion_sees_one_sample_at_a_time(name):
    assert sensitivity(LOSSES[name]) <= 2 * (1 + 1e-4)


def test_a_mean_over_tokens_is_one_over_the_samples_own():
    """Sequences with ignored positions: a mean over the batch's tokens would divide by how many others have."""

    class Tagger(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(2, 3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.layer(x.reshape(-1, 3, 2)).transpose(1, 2)

    def tokens(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(outputs, targets, ignore_index=-100)

    y = torch.full((N, 3), -100)
    y[:, 0] = 1
    y[0] = 0
    found = []
    for first in (0, -100):
        y2 = y.clone()
        y2[0, 1:] = first
        torch.manual_seed(3)
        found.append(moved(X, y2, tokens, model=Tagger()))
    assert float((found[0] - found[1]).norm()) / C <= 2 * (1 + 1e-4)


def loop(**options):
    return private(X, Y, nn.CrossEntropyLoss(), **options)


def refused():
    return pytest.raises(mm.UnprovedError, match="that sample and the released state alone")


BATCHES = {
    "repeated rows": lambda x, y: (torch.cat([x, x[:1].expand(40, 6)]), torch.cat([y, y[:1].expand(40)])),
    "a row in place of the others": lambda x, y: (x[:1].expand_as(x), y),
    "centred": lambda x, y: (x - x.mean(0), y),
    "in another order": lambda x, y: (x.flip(0), y),
    "some of it": lambda x, y: (x[:5], y[:5]),
    "mixed up labels": lambda x, y: (x, (y + 1) % 3),
    "changed in place": lambda x, y: (x.mul_(2), y),
    "a view with other strides": lambda x, y: (x.t().contiguous().t()[:, [1, 0, 2, 3, 4, 5]], y),
}


@pytest.mark.parametrize("name", BATCHES)
def test_a_batch_that_is_not_the_loaders_gives_no_gradient(name):
    model, optimizer, loader, criterion = loop()
    x, y = BATCHES[name](*next(iter(loader)))
    with refused():
        criterion(model(x), y).backward()
    assert all(p.grad is None for p in model.parameters())
    with pytest.raises(mm.ModelMixError):
        optimizer.step()


LOSSES_OF_THE_LOOP = {
    "scaled": lambda loss, out, model: 3 * loss,
    "scaled by the batch": lambda loss, out, model: loss / loss.detach(),
    "a penalty on the outputs": lambda loss, out, model: loss + out.mean(),
    "a penalty on the weights": lambda loss, out, model: loss + sum(p.square().sum() for p in model.parameters()),
    "outputs alone": lambda loss, out, model: out.square().mean(),
    "outputs centred": lambda loss, out, model: F.cross_entropy(out - out.mean(0), torch.zeros(len(out)).long()),
    "another criterion": lambda loss, out, model: F.cross_entropy(out, torch.zeros(len(out)).long()),
    "twice": lambda loss, out, model: loss + loss,
}


@pytest.mark.parametrize("name", LOSSES_OF_THE_LOOP)
def test_gradients_that_did_not_come_from_the_criterion_are_refused(name):
    model, _optimizer, loader, criterion = loop()
    x, y = next(iter(loader))
    outputs = model(x)
    loss = LOSSES_OF_THE_LOOP[name](criterion(outputs, y), outputs, model)
    with refused():
        loss.backward()
    assert all(p.grad is None for p in model.parameters())


def test_one_loss_for_every_row_may_be_averaged_and_not_weighted():
    criterion = nn.CrossEntropyLoss(reduction="none")
    model, optimizer, loader, criterion = private(X, Y, criterion)
    x, y = next(iter(loader))
    losses = criterion(model(x), y)
    assert losses.shape == (N,)
    with refused():
        (losses * torch.arange(N)).mean().backward()
    losses.mean().backward()
    optimizer.step()


def test_the_model_is_run_once_a_draw_whatever_the_loop_does():
    """Nobody may choose among several passes, with other dropout for instance, by looking at them."""
    model = nn.Sequential(nn.Linear(6, 4), nn.Dropout(0.5), nn.Linear(4, 3))
    model, _optimizer, loader, _criterion = loop(model=model)
    x, _y = next(iter(loader))
    assert torch.equal(model(x), model(x))


class Centred(Dataset):
    """Items that look at all the others when they are read."""

    def __init__(self, x: torch.Tensor, y: torch.Tensor) -> None:
        self.x, self.y = x, y

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self.x[index] - self.x.mean(0), self.y[index]


def test_items_that_look_at_other_items_are_refused_where_it_can_be_seen():
    with refused():
        private(X, Y, nn.CrossEntropyLoss(), dataset=Centred(X, Y))
    plan = mm.Plan.of(mm.Mechanism(1.0, 0.5), 5)
    with refused():
        mm.Trainer(nn.Linear(6, 3), nn.CrossEntropyLoss(), Centred(X, Y), plan, clip=1.0, lr=0.1)
    honest = mm.Trainer(nn.Linear(6, 3), nn.CrossEntropyLoss(), (X, Y), plan, clip=1.0, lr=0.1)
    assert any("from one sample alone" in line for line in honest.guarantee.assumed)


def test_a_collate_function_sees_one_item_at_a_time():
    def centre(items):
        x = torch.stack([x for x, _ in items])
        return x - x.mean(0) + 1, torch.stack([y for _, y in items])

    assert sensitivity(nn.CrossEntropyLoss(), collate_fn=centre) <= 2 * (1 + 1e-4)


def test_copies_and_pickles_of_a_private_model_are_ordinary_models():
    model, _optimizer, _loader, _criterion = loop()
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(twin(X), model(X))
        with torch.no_grad():
            twin[0].weight.zero_()
        assert not torch.equal(twin(X), model(X))

"""What an adversary did to ledger files and run folders on disk, and may not."""

from __future__ import annotations

import json
import os
import stat
import threading
from contextlib import suppress
from pathlib import Path

import numpy as np
import planned
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import modelmix as mm
from modelmix._files import write_atomically
from modelmix.accounting.ledger import append_to_ledger
from modelmix.accounting.runs import load_claim, plan_beside
from modelmix.cli import main

A, B = mm.Mechanism(1.0, 0.1), mm.Mechanism(2.0, 0.1)
X = torch.randn(300, 5, generator=torch.Generator().manual_seed(0))
Y = torch.arange(300) % 2


@pytest.fixture
def run(capsys):
    def call(*arguments: object) -> tuple[int, str, str]:
        capsys.readouterr()
        with pytest.raises(SystemExit) as end:
            main([str(argument) for argument in arguments])
        out = capsys.readouterr()
        return int(end.value.code or 0), out.out, out.err

    return call


@pytest.fixture
def look(run, tmp_path):
    """``advise clip`` on private samples, charged to a ledger file."""
    rng = np.random.default_rng(0)
    arrays = {f"x_{part}": rng.standard_normal((300, 5)) for part in ("train", "test")}
    np.savez(tmp_path / "mine.npz", **arrays, y_train=np.arange(300) % 2, y_test=np.arange(300) % 2)

    def call(ledger: Path, *more: object, epsilon: float = 1) -> tuple[int, str, str]:
        given = ["--data", tmp_path / "mine.npz", "--classes", 2, "--model", "linear", "--out", tmp_path / "a.png"]
        return run("advise", "clip", *given, "--epsilon", epsilon, "--delta", 1e-4, "--ledger", ledger, *more)

    return call


def loop(ledger: Path, steps: int = 10):
    torch.manual_seed(0)
    model = nn.Linear(5, 2)
    loader, optimizer = DataLoader(TensorDataset(X, Y), batch_size=30), torch.optim.SGD(model.parameters(), lr=0.1)
    plan = mm.Plan.of(A, steps, delta=1e-4)
    return planned.make_private(model, optimizer, loader, nn.CrossEntropyLoss(), plan=plan, clip=1.0, ledger=ledger)


def go(model, optimizer, loader, criterion) -> None:
    x, y = next(iter(loader))
    criterion(model(x), y).backward()
    optimizer.step()


# Two writers of one file.


def in_parallel(work, count: int) -> list[BaseException | None]:
    found: list[BaseException | None] = [None] * count

    def call(k: int) -> None:
        try:
            work(k)
        except BaseException as error:
            found[k] = error

    threads = [threading.Thread(target=call, args=(k,)) for k in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found


def test_no_writer_of_a_ledger_file_forgets_another(tmp_path):
    """Two looks at once were charged as one."""
    path, together = tmp_path / "spent.json", threading.Barrier(4)

    def work(_: int) -> None:
        together.wait()
        for _ in range(10):
            append_to_ledger(path, lambda before: (before or mm.Ledger()).add(A, 1))

    assert in_parallel(work, 4) == [None] * 4
    assert mm.Ledger.load(path).steps == 40


def test_a_look_is_added_to_what_the_file_holds_then(look, tmp_path, monkeypatch):
    """Another release was charged while the noise of this one was being calibrated."""
    from modelmix.training import advice

    path, calibrate = tmp_path / "spent.json", advice.calibrate

    def slow(**given):
        append_to_ledger(path, lambda before: (before or mm.Ledger(population=300)).add(B, 7))
        return calibrate(**given)

    monkeypatch.setattr(advice, "calibrate", slow)
    assert look(path)[0] == 0
    assert mm.Ledger.load(path).steps == 8


def test_of_two_loops_on_one_file_one_steps(tmp_path, monkeypatch):
    """Both had checked, both wrote, and the file had one of the two steps."""
    from modelmix.training import loop_account

    path, write, loops = (
        tmp_path / "l.json",
        loop_account.write_atomically,
        [loop(tmp_path / "l.json") for _ in range(2)],
    )
    together = threading.Barrier(2, timeout=1)

    def late(place, *rest, **more):
        if Path(place) == plan_beside(path):
            with suppress(threading.BrokenBarrierError):
                together.wait()  # where both have compared the file with what they wrote
        write(place, *rest, **more)

    monkeypatch.setattr(loop_account, "write_atomically", late)
    found = in_parallel(lambda k: go(*loops[k]), 2)
    assert sorted(type(error).__name__ for error in found) == ["NoneType", "UnprovedError"]
    assert load_claim(path).taken.steps == 1


def test_what_fails_leaves_the_file_as_it_was(tmp_path):
    path = tmp_path / "spent.json"
    append_to_ledger(path, lambda before: mm.Ledger().add(A, 3))
    with pytest.raises(ZeroDivisionError):
        append_to_ledger(path, lambda before: mm.Ledger().add(A, 1 // 0))
    assert mm.Ledger.load(path).steps == 3


# The ledger of a loop or a run is not for others to write to.


def test_a_look_is_not_charged_to_the_file_of_a_loop_or_a_run(look, run, tmp_path):
    path = tmp_path / "loop.json"
    mine = loop(path)
    go(*mine)
    link = tmp_path / "link.json"
    link.symlink_to(path)
    for place in (path, link):
        code, _, err = look(place)
        assert code == 2
        assert "belongs to a run or a loop" in err
        assert "copy" not in err
    go(*mine)
    new = tmp_path / "new.json"
    assert run("epsilon", "--ledger", link, "--save-ledger", new, "--delta", 1e-4)[0] == 0
    assert look(new)[0] == 0
    assert load_claim(new).ledger.steps == 11, "the whole plan, and the look"


# A run that was stopped, by way of its ledger file.


def stopped(folder: Path) -> Path:
    """A run of 20 of 50 planned steps."""
    samples = X, Y
    plan = mm.plan(delta=1e-5, steps=50, noise_multiplier=1.0, samples=300, sample_rate=0.1)
    mm.Trainer(nn.Linear(5, 2), nn.CrossEntropyLoss(), samples, plan, clip=1.0, lr=0.1, folder=folder).run(20)
    return folder


def test_a_stopped_run_counts_as_its_plan_in_python_too(tmp_path):
    """50 planned, 20 taken: ``mm.epsilon(mm.Ledger.load(...))`` was that of 20 steps."""
    run, path = stopped(tmp_path / "run"), tmp_path / "loop.json"
    go(*loop(path))
    for file in (run / "ledger.json", path):
        part = mm.Ledger.load(file)  # what was taken, for those who look
        assert part.steps == mm.load_claim(file).taken.steps > 0
        for asked in (
            lambda part: mm.epsilon(part, 1e-5),
            lambda part: mm.delta(part, 1.0),
            lambda part: mm.epsilon(part.add(A, 3), 1e-5),
            lambda part: mm.epsilon(mm.Ledger().add(A, 3).then(part), 1e-5),
            lambda part: mm.epsilon(part.then(mm.Ledger().add(A, 3)), 1e-5),
            lambda part: mm.Plan.of(part),
            lambda part: mm.plan(epsilon=8, delta=1e-5, samples=300, batch=30, steps=5, spent=part),
        ):
            with pytest.raises(mm.ModelMixError, match=r"use mm.load_claim\('.*'\), which counts the plan"):
                asked(part)
    with pytest.raises(mm.ModelMixError, match=r"is a folder: use mm.load_claim"):
        mm.Ledger.load(run)
    claim = mm.load_claim(run)
    assert claim.guarantee(1e-5).epsilon == mm.epsilon(A, 1e-5, steps=50)
    for spent in (run, str(run), run / "ledger.json", claim, [run], claim.ledger, (claim,)):
        plan = mm.plan(epsilon=8, delta=1e-5, samples=300, batch=30, steps=5, spent=spent)
        assert plan.spent == claim.ledger
        assert mm.Plan.of(A, 5, spent=spent).spent == claim.ledger
    both = mm.plan(noise_multiplier=1.0, delta=1e-5, samples=300, batch=30, steps=5, spent=[run, path])
    assert both.spent.steps == 60
    assert mm.plan(noise_multiplier=1.0, delta=1e-5, samples=300, batch=30, steps=5, spent=[]).spent == mm.Ledger()
    with pytest.raises(mm.ModelMixError, match="3 is none"):
        mm.plan(noise_multiplier=1.0, delta=1e-5, samples=300, batch=30, steps=5, spent=[run, 3])


def test_a_run_that_took_all_it_planned_is_loaded(tmp_path):
    plan = mm.plan(delta=1e-5, steps=5, noise_multiplier=1.0, samples=300, sample_rate=0.1)
    t = mm.Trainer(nn.Linear(5, 2), nn.CrossEntropyLoss(), (X, Y), plan, clip=1.0, lr=0.1, folder=tmp_path / "run")
    t.run()
    assert mm.Ledger.load(tmp_path / "run" / "ledger.json") == t.ledger


@pytest.mark.parametrize("left", [0.0, 1e-6])
def test_what_was_spent_is_named_where_too_little_is_left(left):
    earlier = mm.Ledger(population=300).add(A, 33)
    target = mm.epsilon(earlier, 1e-5) * (1 + left)
    with pytest.raises(mm.BudgetExceeded, match=r"have spent epsilon 4.* Raise the target epsilon, or train on") as no:
        mm.plan(epsilon=target, delta=1e-5, samples=300, batch=30, steps=10, spent=earlier)
    assert "at delta 1e-05" in str(no.value)


# What lies where a ledger is to be written.


def test_a_link_to_a_ledger_stays_a_link(look, tmp_path):
    """A look was charged to a new file in place of the link, and the shared ledger stayed as it was."""
    shared, link = tmp_path / "shared.json", tmp_path / "link.json"
    mm.Ledger(population=300).add(A, 10).save(shared)
    link.symlink_to(shared)
    assert look(link)[0] == 0
    assert link.is_symlink()
    assert mm.Ledger.load(shared).steps == 11
    go(*loop(tmp_path / "other.json"))
    (tmp_path / "late.json").symlink_to(tmp_path / "there.json")
    go(*loop(tmp_path / "late.json"))
    assert load_claim(tmp_path / "there.json").ledger.steps == 10
    assert load_claim(tmp_path / "late.json").ledger.steps == 10


def test_pipes_and_devices_are_not_replaced(run, tmp_path):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    code, _, err = run("epsilon", "--z", 1, "--q", 0.01, "--steps", 10, "--save-ledger", pipe)
    assert code == 2
    assert "ordinary file" in err
    assert stat.S_ISFIFO(os.stat(pipe).st_mode)
    with pytest.raises(mm.ModelMixError, match="folder"):
        write_atomically(tmp_path, "text")
    assert json.loads(mm.Ledger().to_json())

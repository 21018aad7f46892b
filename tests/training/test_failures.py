"""What can go wrong with a run: it ends in one clear line, loses nothing, and goes on once the cause is gone."""

from __future__ import annotations

import errno
import hashlib
import io
import json
import os
import pickle
import stat
import subprocess
import sys
import tempfile
import zipfile
from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from planned import Trainer
from torch import nn
from torch.utils.data import Dataset

import modelmix as mm
from modelmix import _files as files
from modelmix.gradients import Engine
from modelmix.runs import events
from modelmix.runs.folder import RunFolder
from modelmix.training import Randomness

STEPS = 6
GENERATOR = torch.Generator().manual_seed(0)
X = torch.randn(60, 4, generator=GENERATOR)
Y = torch.randint(3, (60,), generator=GENERATOR)
MECHANISM = mm.Mechanism(1.0, 0.3, 2.0)


class Rows(Dataset):
    def __init__(self, x: torch.Tensor, y: torch.Tensor) -> None:
        self.inputs, self.labels = x, y

    def __len__(self) -> int:
        return len(self.inputs)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self.inputs[index], self.labels[index]


@cache
def engine() -> Engine:
    """One for all runs: each would trace the same network again, which takes longer than the run."""
    return Engine(network(), F.cross_entropy, (X[:3], Y[:3]))


def network() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3))


def make(folder: Path | None = None, data: object = (X, Y), mechanism: object = MECHANISM, **options: object):
    settings: dict = {"clip": 1.0, "lr": 0.3, "seed": 5, "folder": folder, "test_set": (X[:9], Y[:9])}
    settings["engine"] = engine()
    return Trainer(network(), F.cross_entropy, data, mechanism, **{**settings, **options})


def finish(one: mm.Trainer) -> mm.Trainer:
    return one.run(STEPS - one.step, evaluate_every=2)


def content(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def refused(error: pytest.ExceptionInfo) -> str:
    """The line a refusal consists of: one sentence or more, and something to do."""
    text = str(error.value)
    assert "\n" not in text
    assert text.rstrip().endswith((".", ")"))
    return text


@pytest.fixture(autouse=True, scope="module")
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def whole() -> torch.Tensor:
    """Where the run ends that nothing happens to."""
    return finish(make()).state.last


@pytest.fixture(autouse=True)
def no_page(monkeypatch):
    from modelmix.runs import page

    monkeypatch.setattr(page, "write_report", lambda folder: None)


# Data.


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("source", [lambda x, y: (x, y), Rows])
def test_an_input_that_is_not_finite(tmp_path, value, source):
    x = X.clone()
    x[7] = value
    one = make(tmp_path, source(x, Y), nonfinite="stop")
    assert any("not finite stops it" in line for line in one.guarantee.not_covered)
    with pytest.raises(mm.ModelMixError, match=r'not finite; the step was not taken.*nonfinite="drop"') as error:
        finish(one)
    assert f"stands at step {one.step}." in refused(error)
    assert one.step < STEPS
    assert RunFolder(tmp_path).load_checkpoint()[1]["step"] == one.step
    assert one.ledger.steps == one.step  # a step that was not taken costs nothing
    assert torch.isfinite(one.state.last).all()
    assert not [name for name in content(tmp_path) if name.endswith(".tmp")]


def test_an_input_that_is_not_finite_may_count_as_zero(tmp_path):
    x = X.clone()
    x[7] = float("nan")
    one = finish(make(tmp_path, (x, Y)))  # the default, which the proof covers
    assert not any("not finite" in line for line in one.guarantee.not_covered)
    assert one.step == one.ledger.steps == STEPS
    assert torch.isfinite(one.state.last).all()
    found = json.loads((tmp_path / "diagnostics.json").read_text())
    assert 0 < found["nonfinite"] <= STEPS
    again = make(tmp_path, (x, Y), resume=True)
    assert torch.equal(again.state.last, one.state.last)


def test_a_loss_that_is_not_finite(tmp_path):
    def loss(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(outputs, targets) / 0.0

    torch.manual_seed(1)
    one = Trainer(nn.Linear(4, 3), loss, (X, Y), MECHANISM, clip=1.0, lr=0.3, folder=tmp_path, nonfinite="stop")
    refused = pytest.raises(mm.ModelMixError, match="step 1: the loss or gradient of a sample is not finite")
    with pytest.warns(UserWarning, match="no finite gradient on synthetic samples"), refused:
        one.run(3)
    assert one.ledger.steps == one.step == 0


@pytest.mark.parametrize("source", [lambda x, y: (x, y), Rows])
def test_one_sample_is_a_training_set(tmp_path, source):
    one = finish(make(tmp_path, source(X[:1], Y[:1]), mm.Mechanism(1.0, 1.0, 2.0)))
    assert one.step == one.ledger.steps == STEPS


def test_an_empty_training_set():
    with pytest.raises(mm.ModelMixError, match="at least one sample") as error:
        make(data=(X[:0], Y[:0]))
    refused(error)


@pytest.mark.parametrize("source", [lambda x, y: (x, y), Rows])
def test_draws_that_are_mostly_empty_are_steps(tmp_path, source):
    with pytest.warns(UserWarning, match=r"q\*n = 0.06 is below 1: .*Raise the sampling rate"):
        one = make(tmp_path, source(X, Y), mm.Mechanism(1.0, 0.001, 2.0))
    finish(one)
    assert one.ledger.steps == STEPS
    assert json.loads((tmp_path / "diagnostics.json").read_text())["empty_draws"] == STEPS  # with this seed
    assert one.epsilon() == mm.epsilon(mm.Mechanism(1.0, 0.001, 2.0), 1e-5, steps=STEPS)
    assert (one.state.last != one.state.previous).all()  # noise is added all the same


@pytest.mark.parametrize(("label", "said"), [(3, "3 to 3"), (-1, "-1 to -1")])
def test_labels_out_of_range_in_tensors(tmp_path, label, said):
    y = Y.clone()
    y[50] = label
    with pytest.raises(mm.ModelMixError, match=f"the training labels run from {said} where the model has 3 outputs"):
        make(tmp_path / "run", (X, y))
    with pytest.raises(mm.ModelMixError, match="the test labels"):
        make(tmp_path / "run", test_set=(X, y))
    assert not (tmp_path / "run").exists()


def test_labels_out_of_range_in_a_dataset_count_as_zero(tmp_path):
    """They are met when they are drawn; a run that stopped there would tell that they are there."""
    y = Y.clone()
    y[50] = 3
    with pytest.warns(UserWarning, match="count as zero"):
        one = finish(make(tmp_path, Rows(X, y)))
    assert one.step == one.ledger.steps == STEPS
    assert torch.isfinite(one.state.last).all()


# The folder.


def test_a_folder_that_is_a_file(tmp_path):
    (tmp_path / "run").write_text("x")
    for folder in ("run", "run/below"):
        with pytest.raises(mm.ModelMixError, match="is a file, or inside one: give a folder") as error:
            make(tmp_path / folder)
        refused(error)
    assert (tmp_path / "run").read_text() == "x"


@pytest.mark.parametrize("resume", [False, True])
def test_a_folder_with_something_else_in_it(tmp_path, resume):
    (tmp_path / "thesis.tex").write_text("x")
    with pytest.raises(mm.ModelMixError, match="is not empty and holds no run: choose another") as error:
        make(tmp_path, resume=resume)
    refused(error)
    assert content(tmp_path) == {"thesis.tex": b"x"}


NOT_MINE = """
import os, sys
import torch
from torch import nn
import modelmix as mm

def make(folder, resume):
    mm.Trainer(nn.Linear(4, 3), nn.CrossEntropyLoss(), (torch.ones(9, 4), torch.ones(9).long()),
               mm.Plan.of(mm.Mechanism(1.0, 0.5, 2.0), 9), clip=1.0, lr=0.1, folder=folder,
               options=mm.RunOptions(resume=resume))

make(None, False)  # imports what the other user may not read
os.setgid(65534), os.setuid(65534)
for resume in (False, True):
    for folder in sys.argv[1:]:
        try:
            make(folder, resume)
        except mm.ModelMixError as error:
            print(error)
"""


@pytest.mark.skipif(os.name != "posix" or os.getuid() != 0, reason="needs to become another user")
def test_a_folder_that_may_not_be_written():
    with tempfile.TemporaryDirectory() as home:
        os.chmod(home, 0o755)
        closed = Path(home, "closed")
        closed.mkdir(mode=0o700)
        command = [sys.executable, "-c", NOT_MINE, f"{home}/run", home, str(closed), f"{closed}/run"]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        lines = done.stdout.splitlines()
        assert (done.returncode, len(lines)) == (0, 8), done.stderr
        assert all(
            "as a run folder: Permission denied. Choose another" in line or "not empty" in line for line in lines
        )
        assert os.listdir(home) == ["closed"]


def test_a_folder_that_holds_a_run_needs_the_word_resume(tmp_path):
    finish(make(tmp_path))
    before = content(tmp_path)
    with pytest.raises(mm.ModelMixError, match="holds a run already: go on with it by RunOptions"):
        make(tmp_path)
    assert content(tmp_path) == before


OTHERS = {
    "clip": {"clip": 2.0},
    "lr": {"lr": 0.2},
    "momentum": {"momentum": 0.1},
    "weight_decay": {"weight_decay": 0.1},
    "padding": {"padding": "paper"},
    "ema": {"ema": 0.5},
    "rule": {"rule": "alternate"},
    "nonfinite": {"nonfinite": "stop"},
    "tau": {"tau": 0.1},
    "augment": {"augment": lambda inputs, generator: inputs},
    "seed": {"seed": 6},
}


@pytest.mark.parametrize("name", OTHERS)
def test_another_run_is_not_gone_on_with(tmp_path, name):
    make(tmp_path).run(2)
    before = content(tmp_path)
    with pytest.raises(mm.ModelMixError, match=f"other settings .*{name}.*choose another folder") as error:
        make(tmp_path, **OTHERS[name], resume=True)
    refused(error)
    assert content(tmp_path) == before


@pytest.mark.parametrize(
    "change",
    [{"mechanism": mm.Mechanism(1.1, 0.3, 2.0)}, {"delta": 1e-6}, {"mechanism": mm.Ledger().add(MECHANISM, 9)}],
)
def test_another_plan_is_not_gone_on_with(tmp_path, change):
    make(tmp_path).run(2)
    before = content(tmp_path)
    with pytest.raises(mm.ModelMixError, match="another plan: resume it with its own") as error:
        make(tmp_path, **change, resume=True)
    refused(error)
    assert content(tmp_path) == before


def test_a_longer_plan_is_gone_on_with_at_its_own_epsilon(tmp_path):
    first = make(tmp_path, mechanism=mm.Ledger().add(MECHANISM, 3)).run()
    longer = make(tmp_path, mechanism=mm.Ledger().add(MECHANISM, 5), resume=True).run()
    assert longer.step == longer.ledger.steps == 5
    assert longer.guarantee.epsilon > first.guarantee.epsilon
    assert json.loads((tmp_path / "config.json").read_text())["plan"]["phases"][0]["steps"] == 5


def test_another_model_or_loss_is_not_gone_on_with(tmp_path):
    make(tmp_path).run(2)
    with pytest.raises(mm.ModelMixError, match="parameters"):
        Trainer(nn.Linear(4, 3), F.cross_entropy, (X, Y), MECHANISM, 1.0, 0.3, seed=5, folder=tmp_path, resume=True)
    with pytest.raises(mm.ModelMixError, match="loss"):
        Trainer(
            nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)), F.multi_margin_loss, (X, Y), MECHANISM, 1.0,
            0.3, seed=5, folder=tmp_path, resume=True,
        )  # fmt: skip


@pytest.mark.parametrize("change", ["input", "label", "order"])
def test_other_data_are_not_gone_on_with(tmp_path, change):
    make(tmp_path).run(2)
    before = content(tmp_path)
    x, y = X.clone(), Y.clone()
    if change == "input":
        x[59, 3] += 1e-6
    elif change == "label":
        y[0] = (y[0] + 1) % 3
    else:
        x, y = x.flip(0), y.flip(0)
    with pytest.raises(mm.UnprovedError, match=r"is not what .* was trained on"):
        make(tmp_path, (x, y), resume=True)
    assert content(tmp_path) == before


def test_a_frozen_part_is_part_of_the_data(tmp_path):
    def one(offset: float, **options: object) -> mm.Trainer:
        torch.manual_seed(1)
        model = nn.Sequential(nn.Linear(4, 5), nn.Linear(5, 3))
        model[0].requires_grad_(False)
        model[0].weight += offset
        return Trainer(model, F.cross_entropy, (X, Y), MECHANISM, 1.0, 0.3, seed=5, folder=tmp_path, **options)

    one(0.0).run(2)
    with pytest.raises(mm.UnprovedError, match="frozen"):
        one(0.01, resume=True)
    assert one(0.0, resume=True).step == 2


HOLDER = """
import sys
from modelmix.gradients import Engine
from modelmix.runs.folder import RunFolder
with RunFolder(sys.argv[1]):
    print("locked", flush=True)
    sys.stdin.read()
"""


def test_a_second_process_is_kept_out(tmp_path):
    one = make(tmp_path)
    one.run(2)
    before = content(tmp_path)
    with subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as holder:
        assert holder.stdout.readline() == "locked\n"
        for attempt in (lambda: one.run(1), lambda: make(tmp_path, resume=True)):
            with pytest.raises(mm.ModelMixError, match="in use by another process: wait") as error:
                attempt()
            refused(error)
        assert content(tmp_path) == before
        holder.kill()  # the lock dies with its process
    assert finish(one).step == STEPS


def test_a_disk_without_locks_will_do(tmp_path, monkeypatch, whole):
    import fcntl

    def flock(*_: object) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", flock)
    assert torch.equal(finish(make(tmp_path)).state.last, whole)


# The files.


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run at step 4, as bytes."""
    folder = tmp_path_factory.mktemp("run")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("modelmix.runs.page.write_report", lambda folder: None)
        make(folder).run(4, evaluate_every=2)
    return content(folder)


@pytest.fixture
def put(tmp_path, run):
    """Lays the run into a folder with some files changed."""

    def place(**changed: bytes | None) -> Path:
        for name, data in {**run, **{key.replace("_", "."): value for key, value in changed.items()}}.items():
            path = tmp_path / name
            path.parent.mkdir(exist_ok=True)
            if data is None:
                path.unlink(missing_ok=True)
            else:
                path.write_bytes(data)
        return tmp_path

    return place


def test_a_checkpoint_that_was_cut_off_anywhere(put, run):
    data = run["checkpoint.npz"]
    for length in [*range(0, 64), *range(64, len(data) - 64, 97), *range(len(data) - 64, len(data))]:
        folder = put(checkpoint_npz=data[:length])
        with pytest.raises(mm.ModelMixError, match=r"checkpoint.npz is not a whole checkpoint \(\w+\): restore it"):
            make(folder, resume=True)


def test_a_checkpoint_with_a_wrong_byte_is_refused_or_the_same(put, run, whole):
    """Zip archives carry checksums of their contents; what they do not cover does not matter."""
    data = run["checkpoint.npz"]
    refusals = 0
    for place in range(0, len(data), 41):
        folder = put(checkpoint_npz=data[:place] + bytes([data[place] ^ 0xFF]) + data[place + 1 :])
        try:
            one = make(folder, resume=True)
        except mm.ModelMixError as error:
            assert "\n" not in str(error)  # noqa: PT017
            refusals += 1
        else:
            assert one.step == 4
            assert torch.equal(finish(one).state.last, whole)
            put()
    assert refusals > 0.8 * len(range(0, len(data), 41))


class Bomb:
    def __reduce__(self) -> tuple:
        return os.mkdir, (os.environ["BOMB"],)


def _npz(**arrays: object) -> bytes:
    buffer = io.BytesIO()
    np.savez(buffer, **arrays)
    return buffer.getvalue()


def _bombs(checkpoint: bytes) -> dict[str, bytes]:
    with np.load(io.BytesIO(checkpoint)) as found:
        arrays = {name: found[name] for name in found.files}
    torch_file = io.BytesIO()
    torch.save({"last": Bomb()}, torch_file)
    bare = io.BytesIO()
    np.save(bare, np.array([Bomb()], dtype=object), allow_pickle=True)
    disguised = io.BytesIO()
    with zipfile.ZipFile(disguised, "w") as archive:
        for name in (*arrays, "last"):
            archive.writestr(f"{name}.npy", pickle.dumps(Bomb()))
    return {
        "pickle": pickle.dumps(Bomb()),
        "torch": torch_file.getvalue(),
        "npy": bare.getvalue(),
        "object array": _npz(**{**arrays, "last": np.array([Bomb()] * len(arrays["last"]), dtype=object)}),
        "object meta": _npz(**{**arrays, "meta": np.array([Bomb()], dtype=object)}),
        "bytes for arrays": disguised.getvalue(),
    }


@pytest.mark.filterwarnings("ignore:Duplicate name:UserWarning")
@pytest.mark.parametrize("kind", ["pickle", "torch", "npy", "object array", "object meta", "bytes for arrays"])
def test_a_checkpoint_never_runs_code(put, run, monkeypatch, tmp_path_factory, kind):
    trace = tmp_path_factory.mktemp("bomb") / "went off"
    monkeypatch.setenv("BOMB", str(trace))
    with pytest.raises(mm.ModelMixError, match="is not a whole checkpoint"):
        make(put(checkpoint_npz=_bombs(run["checkpoint.npz"])[kind]), resume=True)
    assert not trace.exists()
    pickle.loads(pickle.dumps(Bomb()))
    assert trace.exists()  # the bomb is live


def _checkpoint(data: bytes, arrays: dict | None = None, **meta: object) -> bytes:
    with np.load(io.BytesIO(data)) as found:
        content = {name: found[name] for name in found.files} | (arrays or {})
    old = json.loads(content.pop("meta").tobytes())
    new = {key: value for key, value in {**old, **meta}.items() if value is not None}
    text = np.frombuffer(json.dumps(new).encode(), dtype=np.uint8)
    return _npz(meta=text, **{name: value for name, value in content.items() if value is not None})


ODD = {
    "garbage": lambda data: os.urandom(5000),
    "empty": lambda data: b"",
    "meta is a list": lambda data: _npz(meta=np.frombuffer(b"[1]", dtype=np.uint8)),
    "no step": lambda data: _checkpoint(data, step=None),
    "no key": lambda data: _checkpoint(data, randomness=None),
    "short key": lambda data: _checkpoint(data, randomness={"key": "00", "seeded": True}),
    "key of another kind": lambda data: _checkpoint(data, randomness="00"),
    "long salt": lambda data: _checkpoint(data, salt="00" * 99),
    "no salt": lambda data: _checkpoint(data, salt=None),
    "no diagnostics": lambda data: _checkpoint(data, diagnostics=None),
    "metrics are a number": lambda data: _checkpoint(data, metrics=3),
    "no last": lambda data: _checkpoint(data, {"last": None}),
    "one vector more": lambda data: _checkpoint(data, {"average": np.zeros(43)}),
    "short vector": lambda data: _checkpoint(data, {"last": np.zeros(5)}),
    "vector of texts": lambda data: _checkpoint(data, {"last": np.array(["a"] * 43)}),
    "single precision": lambda data: _checkpoint(data, {"last": np.zeros(43, dtype=np.float32)}),
}


@pytest.mark.parametrize("kind", ODD)
def test_an_odd_checkpoint_is_refused_in_one_line(put, run, kind):
    folder = put(checkpoint_npz=ODD[kind](run["checkpoint.npz"]))
    with pytest.raises(mm.ModelMixError, match=r"restore|choose another") as error:
        make(folder, resume=True)
    assert "checkpoint" in refused(error)


def test_a_ledger_that_is_gone_short_or_edited(put, run):
    text = run["ledger.json"].decode()
    other = mm.Ledger().add(mm.Mechanism(9.0, 0.3, 2.0), 4)
    cases = {
        "cannot read": None,
        "digest": text.replace('"steps": 4', '"steps": 5').encode(),
        "not whole JSON": text[:80].encode(),
        "shorter than its checkpoint": mm.Ledger().add(MECHANISM, 3).to_json().encode(),
        "not of this run": other.to_json().encode(),
    }
    for said, data in cases.items():
        with pytest.raises(mm.ModelMixError, match=said) as error:
            make(put(ledger_json=data), resume=True)
        refused(error)


def test_a_longer_ledger_is_what_a_kill_leaves(put, whole):
    """Its lines are kept: two steps were accounted for and come again; nobody has seen them."""
    longer = replace(make().ledger, phases=mm.Ledger().add(MECHANISM, 6).phases)
    one = make(put(ledger_json=longer.to_json().encode()), resume=True)
    assert (one.step, one.ledger.steps) == (4, 6)
    assert torch.equal(finish(one).state.last, whole)
    assert one.ledger.steps == 6


@pytest.mark.parametrize("data", [b"", b"{", b"[]", b"null", b"\xff\xfe", b'{"schema": "modelmix-run"}', b"[" * 90000])
def test_a_broken_config(put, data):
    for change in (
        {"config_json": data},
        {"config_json": b'{"schema": "modelmix-run", "version": 1, "settings": 3}'},
        {"config_json": None},
    ):
        folder = put(**change)
        before = content(folder)
        with pytest.raises(mm.ModelMixError, match=r"config.json") as error:
            make(folder, resume=True)
        refused(error)
        with pytest.raises(mm.ModelMixError, match="holds a run already"):
            make(folder)
        assert content(folder) == before


@pytest.mark.parametrize("left", [{"ledger_json": mm.Ledger().to_json().encode()}, {"metrics_json": None}, {}])
def test_a_run_without_its_checkpoint_is_not_begun_again(put, left):
    """It would spend the same budget twice. Metrics or ledger lines say that it was under way."""
    with pytest.raises(mm.ModelMixError, match=r"restore checkpoint.npz"):
        make(put(checkpoint_npz=None, **left), resume=True)


# The disk.


class Disk:
    """A disk that is full when a certain file is written, after half of it; also for the appended events."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, name: str, passes: int) -> None:
        self.name, self.passes, self.failed = name, passes, False
        self._target = ""
        disk = self

        class Os:
            def __getattr__(self, attribute: str) -> object:
                return getattr(os, attribute)

            def fdopen(self, handle: int, mode: str) -> object:
                return disk.guard(os.fdopen(handle, mode))

        class Temporary:
            def mkstemp(self, dir: Path, prefix: str, suffix: str) -> tuple[int, str]:
                disk._target = prefix
                return tempfile.mkstemp(dir=dir, prefix=prefix, suffix=suffix)

        def append(path: Path, mode: str, **options: int) -> object:
            disk._target = f".{path.name}."
            return disk.guard(open(path, mode, **options))

        monkeypatch.setattr(files, "os", Os())
        monkeypatch.setattr(files, "tempfile", Temporary())
        monkeypatch.setattr(events, "open", append, raising=False)

    def guard(self, file: io.RawIOBase) -> object:
        if not self._target.startswith(f".{self.name}"):
            return file
        self.passes -= 1
        return file if self.passes >= 0 else _Full(file, self)


class _Full:
    def __init__(self, file: io.RawIOBase, disk: Disk) -> None:
        self._file, self._disk = file, disk

    def __getattr__(self, name: str) -> object:
        return getattr(self._file, name)

    def __enter__(self) -> _Full:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def write(self, data: bytes) -> int:
        self._file.write(data[: len(data) // 2])
        self._file.flush()
        self._disk.failed = True
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


WRITES = [
    *(("config", 0), ("model.pt", 0), ("diagnostics", 0), ("report", 0)),  # once in a run
    *((name, passes) for name in ("ledger", "checkpoint", "metrics", "events") for passes in (0, 1, 2)),
]


@pytest.mark.parametrize(("name", "passes"), WRITES)
def test_a_full_disk_loses_nothing(tmp_path, monkeypatch, whole, name, passes):
    if name == "report":
        monkeypatch.undo()  # the genuine page, for once
    with monkeypatch.context() as patch:
        disk = Disk(patch, name, passes)
        with pytest.raises(mm.ModelMixError, match=r"cannot write .*: No space left on device\.") as error:
            finish(make(tmp_path))
        refused(error)
        assert disk.failed
    found = RunFolder(tmp_path)
    assert not list(tmp_path.rglob("*.tmp"))
    for path in tmp_path.glob("*.json"):
        json.loads(path.read_text())
    if found.has("checkpoint.npz"):
        assert found.load_ledger().steps >= found.load_checkpoint()[1]["step"]
    again = finish(make(tmp_path, resume=True))
    assert torch.equal(again.state.last, whole)
    assert [row["step"] for row in again.metrics] == [2, 4, 6]
    saved = torch.load(tmp_path / "model.pt", weights_only=True)
    assert torch.equal(saved["0.weight"].double().flatten(), whole[:20].float().double())


def test_a_trainer_goes_on_by_itself_once_there_is_room(tmp_path, monkeypatch, whole):
    one = make(tmp_path)
    with monkeypatch.context() as patch:
        Disk(patch, "checkpoint", 1)
        with pytest.raises(mm.ModelMixError, match=r"No space left.*Nothing kept is lost"):
            finish(one)
    assert one.step == 0  # what is not kept is not shown: whoever resumes takes these steps again, with other noise
    assert one.metrics == []
    finish(one)
    assert one.step == one.ledger.steps == STEPS
    assert not torch.equal(one.state.last, whole)  # the key had moved on
    assert make(tmp_path, resume=True).step == STEPS


LIMITED = """
import os, resource, signal, sys
import torch
torch.set_num_threads(1)
from modelmix.cli import main
import modelmix.training, modelmix.runs.page

def child(arguments, limit=None):
    pid = os.fork()
    if pid == 0:
        if limit is not None:
            signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
            resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
        try:
            main(arguments)
        except SystemExit as stop:
            sys.stdout.flush(), sys.stderr.flush()
            os._exit(stop.code)
        os._exit(99)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])

home, names = sys.argv[1], sys.argv[2:]
try:
    main(["train", f"{home}/recipe.toml", "--out", f"{home}/whole", "--json"])  # here, so that the children start warm
except SystemExit as stop:
    assert stop.code == 0
for name in names:
    command = ["train", f"{home}/recipe.toml", "--out", f"{home}/{name}", "--json"]
    limit = os.path.getsize(f"{home}/whole/{name}") - 100
    print(f"EXIT {child(command, limit)} {child([*command, '--resume'])}", file=sys.stderr, flush=True)
"""


def test_a_limit_on_the_size_of_files_from_the_command_line(tmp_path):
    """The system's own refusal, at sizes where one file or another does not fit."""
    x, y = np.random.default_rng(0).normal(size=(60, 4)).astype(np.float32), np.arange(60) % 3
    np.savez(tmp_path / "data.npz", x_train=x, y_train=y, x_test=x, y_test=y)
    (tmp_path / "recipe.toml").write_text(
        f'[data]\nsource = "{tmp_path}/data.npz"\nclasses = 3\n[model]\nkind = "linear"\n'
        "[privacy]\nnoise_multiplier = 1.0\nsteps = 3\nbatch = 20\nmixing_width = 2.0\n"
        "[run]\nevaluate_every = 1\nseed = 3\n"
    )
    names = ["config.json", "checkpoint.npz", "report.html"]
    done = subprocess.run(
        [sys.executable, "-c", LIMITED, str(tmp_path), *names], capture_output=True, text=True, check=True
    )
    lines = [line for line in done.stderr.splitlines() if "holds no run: a new one" not in line]
    assert lines[1::2] == ["EXIT 2 0"] * len(names), done.stderr
    for name, line in zip(names, lines[::2], strict=True):
        assert line.startswith(f"modelmix: error: cannot write {tmp_path / name / name}: File too large.")
    right, _ = RunFolder(tmp_path / "whole").load_checkpoint()
    for name in names:
        found, _ = RunFolder(tmp_path / name).load_checkpoint()
        assert all(torch.equal(found[key], right[key]) for key in right)
        assert not list((tmp_path / name).rglob("*.tmp"))
        assert (tmp_path / name / "report.html").exists()


# The key.


def test_a_checkpoint_does_not_hold_the_noise_of_the_past(tmp_path):
    """The key moves on by a hash. Nothing stored is an earlier key, or gives one by the ways in which keys are made."""
    one = make(tmp_path, seed=None)
    keys, stored = [], b""
    for _ in range(4):
        keys.append(one._step.randomness._key)
        one.run(1)
        stored = b"".join(content(tmp_path).values())
    meta = RunFolder(tmp_path).load_checkpoint()[1]
    now = meta["randomness"]["key"]
    assert bytes.fromhex(now) == one._step.randomness._key
    texts = [now, meta["salt"], meta["fingerprint"]]
    for key in keys:
        assert key not in stored
        assert key.hex().encode() not in stored
        noise = Randomness.from_state({"key": key.hex(), "seeded": False}).step()._key
        for text in texts:
            raw = bytes.fromhex(text)
            for label in ("", "step", "next", "noise", "key"):
                derived = hashlib.shake_256(raw + label.encode()).digest(32)
                assert derived not in (key, noise)
        ahead = Randomness.from_state(meta["randomness"])
        for _ in range(50):
            assert ahead._key != key
            ahead.advance()
    forward = Randomness.from_state({"key": keys[0].hex(), "seeded": False})
    for _ in range(4):
        forward.advance()
    assert forward.state()["key"] == now  # the other way round it works: what is checked above could fail


def test_secret_files_are_for_their_owner(tmp_path, monkeypatch):
    monkeypatch.undo()
    old = os.umask(0o000)
    try:
        finish(make(tmp_path, seed=None))
    finally:
        os.umask(old)
    modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in tmp_path.iterdir()}
    assert {name for name, mode in modes.items() if mode == 0o600} == {
        "checkpoint.npz", "diagnostics.json", "metrics.json", "report.html",
    }  # fmt: skip
    key = RunFolder(tmp_path).load_checkpoint()[1]["randomness"]["key"]
    for name, data in content(tmp_path).items():
        held = key.encode() in data or bytes.fromhex(key) in data
        assert held == (name == "checkpoint.npz")

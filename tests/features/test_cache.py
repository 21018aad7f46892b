"""The cache gives what the transform gives, once, and never half of it."""

from __future__ import annotations

import errno
import os
import shutil
import signal
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import modelmix as mm
from modelmix.features import cache, cached, resumable_file
from modelmix.features.whitening import Whitened

IMAGES = torch.arange(5 * 1 * 8 * 8, dtype=torch.int64).remainder(251).to(torch.uint8).view(5, 1, 8, 8)


@dataclass
class Halves:
    """x / 2 in batches of two; counts how often it ran."""

    parameters: dict = field(default_factory=dict)
    version: int = 1
    name: str = "halves"
    runs: int = 0
    seen: int = 0
    stop: BaseException | None = None

    def shape(self, images):
        return tuple(images.shape)

    def batches(self, images):
        self.runs += 1
        for start in range(0, len(images), 2):
            if start and self.stop:
                raise self.stop
            self.seen += len(images[start : start + 2])
            yield images[start : start + 2].float() / 2


def files(folder):
    return sorted(entry.name for entry in folder.iterdir())


@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_computed_once(tmp_path, dtype):
    halves = Halves()
    first, second = (cached(halves, IMAGES, folder=tmp_path / "new", dtype=dtype) for _ in range(2))
    assert halves.runs == 1
    assert first.dtype == getattr(torch, dtype)
    assert torch.equal(first, second)
    assert torch.equal(first.float(), IMAGES.float() / 2)
    (name,) = files(tmp_path / "new")
    assert np.array_equal(np.load(tmp_path / "new" / name), first.numpy()), "an ordinary .npy file"
    assert (tmp_path / "new" / name).stat().st_mode & 0o077 == 0, "as private as the images"


def test_changing_the_tensor_does_not_change_the_file(tmp_path):
    cached(Halves(), IMAGES, folder=tmp_path).zero_()
    assert torch.equal(cached(Halves(), IMAGES, folder=tmp_path), IMAGES.float() / 2)


def test_the_key_sees_all_that_matters(tmp_path):
    other = IMAGES.clone()
    other[4, 0, 7, 7] += 1
    for images, parameters, dtype in [
        (IMAGES, {}, "float32"),
        (other, {}, "float32"),
        (IMAGES.flip(0), {}, "float32"),
        (IMAGES.view(5, 1, 4, 16), {}, "float32"),
        (IMAGES, {"J": 3}, "float32"),
        (IMAGES, {}, "float16"),
    ]:
        found = cached(Halves(parameters), images, folder=tmp_path, dtype=dtype)
        assert torch.equal(found.float(), images.float() / 2)
    assert len(files(tmp_path)) == 6
    strided = IMAGES.transpose(2, 3).contiguous().transpose(2, 3)
    again = Halves()
    cached(again, strided, folder=tmp_path)
    assert again.runs == 0, "how the images lie in memory does not matter"


def test_another_version_is_computed_anew_and_said(tmp_path):
    cached(Halves(), IMAGES, folder=tmp_path)
    newer = Halves(version=2)
    with pytest.warns(UserWarning, match=r"-v1\.npy is of another version of halves") as said:
        cached(newer, IMAGES, folder=tmp_path)
    assert newer.runs == 1
    assert len(said) == 1
    assert "\n" not in str(said[0].message)
    cached(newer, IMAGES, folder=tmp_path)
    assert newer.runs == 1


def _overwrite(path, content):
    """Puts ``content`` at the end of the array, behind which is a digest of 64 bytes."""
    data = path.read_bytes()
    path.write_bytes(data[: -64 - len(content)] + content + data[-64:])


def _other_array(path):
    np.save(path, np.zeros((5, 1, 8, 8)))


DAMAGE = {
    "empty": lambda path: path.write_bytes(b""),
    "cut in the header": lambda path: path.write_bytes(path.read_bytes()[:40]),
    "cut in the data": lambda path: path.write_bytes(path.read_bytes()[:-1]),
    "too long": lambda path: path.write_bytes(path.read_bytes() + b"\0"),
    "damaged header": lambda path: path.write_bytes(path.read_bytes().replace(b"shape", b"shapf")),
    "huge": lambda path: path.write_bytes(path.read_bytes().replace(b"(5, 1, 8, 8)", b"(9**99, 8, ")),
    "four bytes": lambda path: _overwrite(path, b"\xff" * 4),
    "all NaN": lambda path: _overwrite(path, np.full(IMAGES.shape, np.nan, np.float32).tobytes()),
    "damaged digest": lambda path: path.write_bytes(path.read_bytes()[:-1] + b"?"),
    "no digest": lambda path: path.write_bytes(path.read_bytes()[:-64]),
    "another array": _other_array,
    "a pickle": lambda path: np.save(path, np.array([{}], dtype=object)),
}


@pytest.mark.parametrize("damage", DAMAGE.values(), ids=DAMAGE)
def test_a_damaged_file_is_computed_anew_and_said(tmp_path, damage):
    cached(Halves(), IMAGES, folder=tmp_path)
    (name,) = files(tmp_path)
    damage(tmp_path / name)
    again = Halves()
    with pytest.warns(UserWarning, match=r"is not a sound cache \(.*\): it is computed anew\.$") as said:
        found = cached(again, IMAGES, folder=tmp_path)
    assert (again.runs, len(said)) == (1, 1)
    assert torch.equal(found, IMAGES.float() / 2)
    assert files(tmp_path) == [name]


@pytest.mark.parametrize("stop", [KeyboardInterrupt(), RuntimeError("out of memory")], ids=["Ctrl-C", "error"])
def test_what_is_stopped_goes_on(tmp_path, stop):
    with pytest.raises(type(stop)):
        cached(Halves(stop=stop), IMAGES, folder=tmp_path)
    assert all(name.startswith(".") for name in files(tmp_path))
    assert all((tmp_path / name).stat().st_mode & 0o077 == 0 for name in files(tmp_path)), "as private as the images"
    again = Halves()
    assert torch.equal(cached(again, IMAGES, folder=tmp_path), IMAGES.float() / 2)
    assert again.seen == 3, "of five images"
    (name,) = files(tmp_path)
    assert np.array_equal(np.load(tmp_path / name), IMAGES.numpy() / 2)


def test_before_the_first_batch_an_interrupt_leaves_nothing(tmp_path):
    class Never(Halves):
        def batches(self, images):
            raise KeyboardInterrupt
            yield

    with pytest.raises(KeyboardInterrupt):
        cached(Never(), IMAGES, folder=tmp_path)
    assert files(tmp_path) == []


def test_all_there_but_the_name(tmp_path, monkeypatch):
    """Stopped between the last row and the digest."""

    def interrupted(self):
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(resumable_file.ResumableFile, "finish", interrupted)
        with pytest.raises(KeyboardInterrupt):
            cached(Halves(), IMAGES, folder=tmp_path)
    again = Halves()
    assert torch.equal(cached(again, IMAGES, folder=tmp_path), IMAGES.float() / 2)
    assert again.runs == 0


def test_a_killed_process_loses_what_came_after_its_last_note(tmp_path, monkeypatch):
    monkeypatch.setattr(resumable_file, "_BETWEEN", -1.0)  # a note at every batch

    class Killed(Halves):
        def batches(self, images):
            for number, batch in enumerate(super().batches(images)):
                if number == 2:
                    monkeypatch.setattr(resumable_file.ResumableFile, "suspend", lambda self: self._file.close())
                    raise KeyboardInterrupt
                yield batch

    with pytest.raises(KeyboardInterrupt):
        cached(Killed(), IMAGES, folder=tmp_path)
    (part,) = tmp_path.glob(".*.part")
    with part.open("ab") as file:
        file.write(b"half a row")
    again = Halves()
    assert torch.equal(cached(again, IMAGES, folder=tmp_path), IMAGES.float() / 2)
    assert again.seen == 1


PARTS = {
    "a changed row": lambda part, note: part.write_bytes(part.read_bytes()[:-1] + b"x"),
    "too few rows": lambda part, note: part.write_bytes(part.read_bytes()[:-1]),
    "another header": lambda part, note: part.write_bytes(b"x" + part.read_bytes()[1:]),
    "no rows": lambda part, note: part.write_bytes(b""),
    "no note": lambda part, note: note.unlink(),
    "half a note": lambda part, note: note.write_text(note.read_text()[:-5]),
    "another note": lambda part, note: note.write_text("[1, 2]"),
    "a note of less than nothing": lambda part, note: note.write_text('{"rows": -1, "digest": ""}'),
    "a note of too much": lambda part, note: note.write_text('{"rows": 999999, "digest": ""}'),
    "a note of infinitely much": lambda part, note: note.write_text('{"rows": Infinity, "digest": ""}'),
    "a note without end": lambda part, note: note.write_text("[" * 200_000),
}


@pytest.mark.parametrize("damage", PARTS.values(), ids=PARTS)
def test_damaged_parts_are_begun_anew(tmp_path, damage):
    with pytest.raises(KeyboardInterrupt):
        cached(Halves(stop=KeyboardInterrupt()), IMAGES, folder=tmp_path)
    damage(*tmp_path.glob(".*.part"), *tmp_path.glob(".*.note"))
    again = Halves()
    assert torch.equal(cached(again, IMAGES, folder=tmp_path), IMAGES.float() / 2)
    assert again.seen == 5
    assert len(files(tmp_path)) == 1


def test_an_interrupt_between_a_row_and_its_count_loses_that_row_alone(tmp_path, monkeypatch):
    def interrupted(self, rows, content):
        if self.rows:
            monkeypatch.setattr(self, "_file", Interrupted(self._file))
        genuine(self, rows, content)

    class Interrupted:
        def __init__(self, file):
            self.file = file

        def __getattr__(self, name):
            return getattr(self.file, name)

        def write(self, content):
            self.file.write(content)
            raise KeyboardInterrupt

    genuine = resumable_file.ResumableFile.append
    with monkeypatch.context() as patched:
        patched.setattr(resumable_file.ResumableFile, "append", interrupted)
        with pytest.raises(KeyboardInterrupt):
            cached(Halves(), IMAGES, folder=tmp_path)
    again = Halves()
    assert torch.equal(cached(again, IMAGES, folder=tmp_path), IMAGES.float() / 2)
    assert again.seen == 3


def test_a_note_that_is_being_written_is_not_taken_for_one_that_was_left(tmp_path, monkeypatch):
    monkeypatch.setattr(resumable_file, "_BETWEEN", -1.0)  # a note at every batch
    genuine, begun = os.replace, []

    def replaced(old, new):
        if str(new).endswith(".note") and not begun:
            begun.append(new)
            cached(Halves(), 255 - IMAGES, folder=tmp_path)  # sweeps before it writes
            assert os.path.exists(old)
        genuine(old, new)

    monkeypatch.setattr(os, "replace", replaced)
    halves = Halves()
    assert torch.equal(cached(halves, IMAGES, folder=tmp_path), IMAGES.float() / 2)
    assert (len(begun), len(files(tmp_path))) == (1, 2)


def test_a_note_that_cannot_be_written_does_not_end_the_work(tmp_path, monkeypatch):
    monkeypatch.setattr(resumable_file, "_BETWEEN", -1.0)

    class During(Halves):
        def batches(self, images):
            (part,) = tmp_path.glob(".*.part")
            part.with_suffix(".note").mkdir()
            yield from super().batches(images)

    assert torch.equal(cached(During(), IMAGES, folder=tmp_path), IMAGES.float() / 2)


STRANGE = {
    "a folder": lambda part: part.mkdir(),
    "a link": lambda part: part.symlink_to(part.parent.parent / "elsewhere"),
}


@pytest.mark.parametrize("strange", STRANGE.values(), ids=STRANGE)
def test_what_is_no_part_of_ours_is_not_written_through(tmp_path, strange):
    folder = tmp_path / "cache"
    cached(Halves(), IMAGES, folder=folder)
    (name,) = files(folder)
    (folder / name).unlink()
    strange(folder / f".{name}.part")
    with pytest.raises(mm.ModelMixError, match="cannot write the cache") as error:
        cached(Halves(), IMAGES, folder=folder)
    assert "\n" not in str(error.value)
    assert not (tmp_path / "elsewhere").exists()
    assert files(folder) == [f".{name}.part"]


def test_a_part_that_others_may_read_is_closed_to_them(tmp_path):
    with pytest.raises(KeyboardInterrupt):
        cached(Halves(stop=KeyboardInterrupt()), IMAGES, folder=tmp_path)
    next(tmp_path.glob(".*.part")).chmod(0o644)
    cached(Halves(), IMAGES, folder=tmp_path)
    assert (tmp_path / files(tmp_path)[0]).stat().st_mode & 0o077 == 0


def test_a_note_that_outlived_its_part_is_not_believed(tmp_path, monkeypatch):
    monkeypatch.setattr(resumable_file, "_BETWEEN", -1.0)
    with monkeypatch.context() as patched:
        patched.setattr(Path, "unlink", lambda self: None)  # killed right before it
        cached(Halves(), IMAGES, folder=tmp_path)
    note, name = files(tmp_path)
    assert note.endswith(".note")
    again = Halves()
    assert torch.equal(cached(again, IMAGES, folder=tmp_path), IMAGES.float() / 2)
    assert again.runs == 0
    (tmp_path / name).unlink()
    assert torch.equal(cached(again, IMAGES, folder=tmp_path), IMAGES.float() / 2)
    assert (again.seen, files(tmp_path)) == (5, [name])


def test_a_folder_that_goes_is_told_before_all_is_computed(tmp_path, monkeypatch):
    monkeypatch.setattr(resumable_file, "_BETWEEN", -1.0)

    class During(Halves):
        def batches(self, images):
            shutil.rmtree(tmp_path / "cache")
            yield from super().batches(images)

    during = During()
    with pytest.raises(mm.ModelMixError, match="No such file or directory"):
        cached(during, IMAGES, folder=tmp_path / "cache")
    assert during.seen == 2
    assert files(tmp_path) == []


PROCESS = """
import sys, time, torch
from modelmix.features import cached

class Slow:
    name, version, parameters = "slow", 1, {}

    def shape(self, images):
        return tuple(images.shape)

    def batches(self, images):
        for image in images:
            print("seen", flush=True)
            time.sleep(float(sys.argv[2]))
            yield image[None].float() / 2

images = torch.arange(5 * 16).to(torch.uint8).view(5, 1, 4, 4)
import modelmix.features.resumable_file
modelmix.features.resumable_file._BETWEEN = -1.0
assert torch.equal(cached(Slow(), images, folder=sys.argv[1]), images.float() / 2)
"""


def start(folder, pause: float) -> subprocess.Popen:
    return subprocess.Popen([sys.executable, "-c", PROCESS, folder, str(pause)], stdout=subprocess.PIPE, text=True)


def test_two_processes_compute_once(tmp_path):
    """The second waits for the first and takes what it made."""
    first = start(tmp_path, 0.5)
    assert first.stdout.readline() == "seen\n"
    second = start(tmp_path, 0.5)
    assert [process.communicate(timeout=60)[0].count("seen") for process in (first, second)] == [4, 0]
    assert (first.returncode, second.returncode, len(files(tmp_path))) == (0, 0, 1)


@pytest.mark.skipif(not hasattr(signal, "SIGKILL"), reason="signals")
def test_a_killed_process_is_continued_by_another(tmp_path):
    first = start(tmp_path, 0.5)
    for _ in range(3):
        assert first.stdout.readline() == "seen\n"
    second = start(tmp_path, 0.0)
    first.kill()
    first.communicate()
    assert second.communicate(timeout=60)[0].count("seen") <= 4, "one row at least was noted"
    assert (second.returncode, len(files(tmp_path))) == (0, 1)


def test_where_locks_are_not_known_a_file_is_the_lock(tmp_path, monkeypatch):
    fcntl = pytest.importorskip("fcntl")

    def unknown(handle, operation):
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))

    monkeypatch.setattr(fcntl, "flock", unknown)
    with pytest.warns(UserWarning, match="flock not supported"), pytest.raises(KeyboardInterrupt):
        cached(Halves(stop=KeyboardInterrupt()), IMAGES, folder=tmp_path)
    again = Halves()
    with pytest.warns(UserWarning, match="flock not supported"):
        assert torch.equal(cached(again, IMAGES, folder=tmp_path), IMAGES.float() / 2)
    assert (again.seen, len(files(tmp_path))) == (3, 1)


def test_what_may_not_last_is_begun_anew(tmp_path):
    class Once(Halves):
        lasting = False

    with pytest.raises(KeyboardInterrupt):
        cached(Once(stop=KeyboardInterrupt()), IMAGES, folder=tmp_path)
    assert files(tmp_path) == []


def test_what_nobody_went_on_with_is_removed_after_a_month(tmp_path):
    for _ in range(2):
        with pytest.raises(KeyboardInterrupt):
            cached(Halves(stop=KeyboardInterrupt()), IMAGES, folder=tmp_path)
        cached(Halves(), 255 - IMAGES, folder=tmp_path)
        (tmp_path / next(name for name in files(tmp_path) if name.endswith(".npy"))).unlink()
        parts = list(tmp_path.glob(".*"))
        assert len(parts) == 2
        for path in parts:
            os.utime(path, (0, 0))
    cached(Halves(), 255 - IMAGES, folder=tmp_path)
    assert len(files(tmp_path)) == 1


def test_a_slow_transform_is_kept_for_all_that_is_made_of_it(tmp_path, monkeypatch):
    monkeypatch.setenv("MODELMIX_CACHE", str(tmp_path))
    slow, images = Halves(), torch.randint(0, 256, (30, 3, 4, 4), dtype=torch.uint8)
    kept = cache.Cached(slow)
    assert (kept.name, kept.version, kept.parameters) == (slow.name, slow.version, slow.parameters)
    found = [cached(Whitened(kept, images, count), images) for count in (4, 7, 4)]
    assert slow.seen == 30, "public and private images are the same ones here, and seen once"
    alone = [cached(Whitened(slow, images, count), images, folder=tmp_path / "other") for count in (4, 7)]
    assert torch.equal(found[0], found[2])
    torch.testing.assert_close([f.abs() for f in found[:2]], [a.abs() for a in alone])  # directions have no sign


def test_what_a_killed_process_left_goes_after_a_month(tmp_path):
    left = [tmp_path / f".{name}-v1.npy.{kind}" for name in ("halves-0", "scattering-1") for kind in ("part", "a.tmp")]
    other, fresh = tmp_path / ".other.tmp", tmp_path / ".halves-2-v1.npy.part"
    for path in (*left, other, fresh):
        path.write_bytes(b"half")
    for path in (*left, other):
        os.utime(path, (0, 0))
    cached(Halves(), IMAGES, folder=tmp_path)
    assert not any(path.exists() for path in left)
    assert fresh.exists(), "it may still be written"
    assert other.exists(), "not ours"


def test_what_another_process_still_writes_stays(tmp_path):
    class During(Halves):
        def batches(self, images):
            cached(Halves(), 255 - images, folder=tmp_path)
            yield from super().batches(images)

    assert torch.equal(cached(During(), IMAGES, folder=tmp_path), IMAGES.float() / 2)
    assert len(files(tmp_path)) == 2


def test_a_full_disk_is_one_line_and_leaves_nothing(tmp_path, monkeypatch):
    def full(handle):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(
        mm.ModelMixError, match=r"^cannot write the cache .* No space left on device\. Make room"
    ) as error:
        cached(Halves(), IMAGES, folder=tmp_path)
    assert "\n" not in str(error.value)
    assert files(tmp_path) == []


def test_a_disk_that_fills_up_costs_what_came_after_the_last_note(tmp_path, monkeypatch):
    def full(handle):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    class Fills(Halves):
        def batches(self, images):
            for number, batch in enumerate(super().batches(images)):
                if number == 1:
                    monkeypatch.setattr(os, "fsync", full)
                yield batch

    monkeypatch.setattr(resumable_file, "_BETWEEN", -1.0)  # a note at every batch
    with pytest.raises(mm.ModelMixError, match="No space left on device"):
        cached(Fills(), IMAGES, folder=tmp_path)
    monkeypatch.undo()
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: SimpleNamespace(free=100))
    with pytest.raises(mm.ModelMixError, match="No space left on device"):
        cached(Halves(), IMAGES, folder=tmp_path)
    monkeypatch.undo()
    again = Halves()
    assert torch.equal(cached(again, IMAGES, folder=tmp_path), IMAGES.float() / 2)
    assert (again.seen, len(files(tmp_path))) == (3, 1)


def test_a_disk_that_is_too_small_is_told_before_the_work(tmp_path, monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: SimpleNamespace(free=1000))
    halves = Halves()
    with pytest.raises(mm.ModelMixError, match="No space left on device"):
        cached(halves, IMAGES, folder=tmp_path)
    assert halves.runs == 0
    assert files(tmp_path) == []


@pytest.mark.parametrize("batch", [torch.zeros(3, 1, 8, 8), torch.zeros(5, 1, 8, 7)], ids=["rows", "columns"])
def test_features_that_are_not_as_told_are_refused(tmp_path, batch):
    class Other(Halves):
        def batches(self, images):
            yield batch

    with pytest.raises(
        mm.ModelMixError, match=r"^halves gave features of shape .* and declared \(5, 1, 8, 8\): "
    ) as error:
        cached(Other(), IMAGES, folder=tmp_path)
    assert "\n" not in str(error.value)
    assert files(tmp_path) == []


def test_a_file_for_a_folder(tmp_path):
    (tmp_path / "file").write_text("x")
    with pytest.raises(mm.ModelMixError, match="cannot write the cache"):
        cached(Halves(), IMAGES, folder=tmp_path / "file")


def test_where_the_cache_is(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.delenv("MODELMIX_CACHE", raising=False)
    cached(Halves(), IMAGES)
    assert len(files(tmp_path / "home" / ".cache" / "modelmix" / "features")) == 1
    monkeypatch.setenv("MODELMIX_CACHE", str(tmp_path / "named"))
    cached(Halves(), IMAGES)
    assert len(files(tmp_path / "named")) == 1


def test_an_unknown_format(tmp_path):
    with pytest.raises(mm.ModelMixError, match="features are stored as float16 or float32"):
        cached(Halves(), IMAGES, folder=tmp_path, dtype="int8")


def test_whoever_waits_is_told_how_far_it_is(monkeypatch, caplog):
    now = iter([0.0, 100.0, 120.0, 130.0, 140.0])  # what comes before the first batch says nothing about the others
    monkeypatch.setattr(cache, "time", SimpleNamespace(monotonic=lambda: next(now)))
    batches = [torch.zeros(5, 2)] * 4
    with caplog.at_level("INFO", logger="modelmix"):
        assert len(list(cache.log_progress("scattering", 20, batches))) == 4
    assert caplog.messages == ["scattering: features of 10 of 20 images, 40 s left"]

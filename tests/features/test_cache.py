"""The cache gives what the transform gives, once, and never half of it."""

from __future__ import annotations

import errno
import os
import tempfile
from dataclasses import dataclass, field
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import modelmix as mm
from modelmix.features import Scattering, cache, cached

IMAGES = torch.arange(5 * 1 * 8 * 8, dtype=torch.int64).remainder(251).to(torch.uint8).view(5, 1, 8, 8)


@dataclass
class Halves:
    """x / 2 in batches of two; counts how often it ran."""

    parameters: dict = field(default_factory=dict)
    version: int = 1
    name: str = "halves"
    runs: int = 0
    stop: BaseException | None = None

    def shape(self, images):
        return tuple(images.shape)

    def batches(self, images):
        self.runs += 1
        for start in range(0, len(images), 2):
            if start and self.stop:
                raise self.stop
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


def test_scattering_through_the_cache(tmp_path):
    assert torch.equal(cached(Scattering(device="cpu"), IMAGES, folder=tmp_path), Scattering(device="cpu")(IMAGES))


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


def test_an_interrupt_leaves_nothing(tmp_path):
    with pytest.raises(KeyboardInterrupt):
        cached(Halves(stop=KeyboardInterrupt()), IMAGES, folder=tmp_path)
    assert files(tmp_path) == []


def test_what_a_killed_process_left_goes_with_the_next_write(tmp_path):
    left = [tmp_path / f".{name}-v1.npy.abcd1234.tmp" for name in ("halves-0", "scattering-1")]
    other = tmp_path / ".other.tmp"
    for path in (*left, other):
        path.write_bytes(b"half")
    cached(Halves(), IMAGES, folder=tmp_path)
    assert not any(path.exists() for path in left)
    assert other.exists(), "not ours"


def test_what_another_process_still_writes_stays(tmp_path):
    class During(Halves):
        def batches(self, images):
            cached(Halves(), 255 - images, folder=tmp_path)
            yield from super().batches(images)

    assert torch.equal(cached(During(), IMAGES, folder=tmp_path), IMAGES.float() / 2)
    assert len(files(tmp_path)) == 2


def test_a_file_swept_before_it_was_locked_is_made_again(tmp_path, monkeypatch):
    genuine, made = tempfile.mkstemp, []

    def mkstemp(**where):
        made.append(genuine(**where))
        if len(made) == 1:
            os.unlink(made[0][1])
        return made[-1]

    monkeypatch.setattr(tempfile, "mkstemp", mkstemp)
    assert torch.equal(cached(Halves(), IMAGES, folder=tmp_path), IMAGES.float() / 2)
    assert len(made) == 2


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
    with pytest.raises(mm.ModelMixError, match="features are kept as float16 or float32"):
        cached(Halves(), IMAGES, folder=tmp_path, dtype="int8")


def test_whoever_waits_is_told_how_far_it_is(monkeypatch, caplog):
    now = iter([0.0, 100.0, 120.0, 130.0, 140.0])  # what comes before the first batch says nothing about the others
    monkeypatch.setattr(cache, "time", SimpleNamespace(monotonic=lambda: next(now)))
    batches = [torch.zeros(5, 2)] * 4
    with caplog.at_level("INFO", logger="modelmix"):
        assert len(list(cache.told("scattering", 20, batches))) == 4
    assert caplog.messages == ["scattering: features of 10 of 20 images, 40 s left"]

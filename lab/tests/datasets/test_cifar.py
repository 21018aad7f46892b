"""CIFAR-10: nothing but the published files of the binary version is read, and pickles never are."""

from __future__ import annotations

import io
import pickle
import tarfile

import numpy as np
import pytest
import torch

from modelmix.data import load
from modelmix.data.directory import directory
from modelmix.errors import ModelMixError
from modelmix_lab.datasets import catalogue, checksum, cifar

COUNT = 12


def images(seed: int) -> tuple[np.ndarray, np.ndarray]:
    draw = np.random.default_rng(seed)
    return draw.integers(0, 256, (COUNT, 3072), dtype=np.uint8), draw.permutation(np.arange(COUNT) % 10)


def as_binary(pixels: np.ndarray, labels: np.ndarray) -> bytes:
    return np.concatenate([labels[:, None].astype(np.uint8), pixels], axis=1).tobytes()


def publish(monkeypatch, contents: dict[str, bytes]) -> None:
    """Make these contents the published ones, so that a check behind the md5 is reached."""
    monkeypatch.setattr(cifar, "MD5", {name: checksum.of_bytes(raw) for name, raw in contents.items()})
    monkeypatch.setattr(cifar, "_COUNT", COUNT)
    monkeypatch.setattr(cifar, "_LARGEST", 100_000)


@pytest.fixture
def contents(monkeypatch):
    """A little CIFAR-10, which from now on is the published one; by file name."""
    out = {name: as_binary(*images(i)) for i, name in enumerate(cifar.MD5)}
    publish(monkeypatch, out)
    return out


def write(path, files: dict[str, bytes]):
    path.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        (path / name).write_bytes(content)
    return path


def pack(path, files: dict[str, bytes]):
    with tarfile.open(path, "w:gz") as archive:
        for name, content in files.items():
            member = tarfile.TarInfo(name)
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))
    return path


def refused(source, **more) -> str:
    with pytest.raises(ModelMixError) as error:
        load(source, **more)
    assert "\n" not in str(error.value)
    return str(error.value)


def assert_is_tiny(found) -> None:
    assert (found.name, found.shape, found.classes) == ("cifar10", (3, 32, 32), cifar.CLASSES)
    assert (found.train.x.dtype, found.train.y.dtype) == (torch.uint8, torch.int64)
    assert (len(found.train), len(found.test)) == (5 * COUNT, COUNT)
    assert found.train.x.is_contiguous()
    for i in range(6):
        split, start = (found.train, i * COUNT) if i < 5 else (found.test, 0)
        pixels, labels = images(i)
        np.testing.assert_array_equal(split.x[start : start + COUNT], pixels.reshape(COUNT, 3, 32, 32))
        np.testing.assert_array_equal(split.y[start : start + COUNT], labels)


def test_the_published_facts():
    assert len(cifar.MD5) == 6
    assert cifar._COUNT == 10_000
    assert catalogue.CATALOGUE["cifar10"].members[0].size == 10_000 * 3073


def test_from_the_folder_its_parent_and_by_name(tmp_path, contents, monkeypatch):
    write(tmp_path / cifar.FOLDER, contents)
    assert_is_tiny(load(tmp_path / cifar.FOLDER))
    assert_is_tiny(load(str(tmp_path)))
    assert_is_tiny(load("cifar10", data_dir=tmp_path))
    monkeypatch.setenv("MODELMIX_DATA", str(tmp_path))
    assert_is_tiny(load("cifar10"))


def test_straight_from_the_archive(tmp_path, contents):
    files = {f"{cifar.FOLDER}/{name}": content for name, content in contents.items()}
    more = {f"{cifar.FOLDER}/readme.html": b"hello", "../evil": b"never looked at"}
    path = pack(tmp_path / cifar.ARCHIVE, {**more, **dict(reversed(files.items()))})
    assert_is_tiny(load(path))
    assert_is_tiny(load("cifar10", tmp_path))
    path.write_bytes(path.read_bytes()[:-2000])
    assert "is cut off, damaged or no .tar.gz archive" in refused(path)
    path.write_bytes(b"no archive")
    assert f"{path} is cut off, damaged or no .tar.gz archive" in refused(path)
    del files[f"{cifar.FOLDER}/{next(iter(cifar.MD5))}"]
    assert "has no cifar-10-batches-" in refused(pack(path, files))


def test_a_cut_or_damaged_or_other_file_is_refused(tmp_path, contents):
    place = write(tmp_path / cifar.FOLDER, contents)
    name, other = list(contents)[2:4]
    whole = contents[name]
    for wrong in (b"", whole[:-1], whole + b"!", bytes([whole[0] ^ 1]) + whole[1:], contents[other]):
        (place / name).write_bytes(wrong)
        message = refused(place)
        assert f"{place / name} is not the published file of CIFAR-10: its {len(wrong):,} bytes" in message
        assert f"published is {checksum.of_bytes(whole)}" in message
        assert "copy it again" in message
    (place / name).unlink()
    assert f"{place} has no file {name}: CIFAR-10 is " in refused(place)
    assert "modelmix-lab data fetch cifar10" in refused(place)


def test_the_real_checksums_are_in_force(tmp_path):
    """Without the change that the other tests make, a little set is not taken for the published one."""
    place = write(tmp_path / cifar.FOLDER, {name: as_binary(*images(0)) for name in cifar.MD5})
    assert "is not the published file of CIFAR-10" in refused(place)


def test_what_a_batch_must_hold(tmp_path, contents, monkeypatch):
    pixels, labels = images(2)
    for wrong, reason in (
        (as_binary(pixels, labels)[:-1], "expected are 12 images of 3073 bytes"),
        (as_binary(pixels[:-1], labels[:-1]), "expected are 12 images of 3073 bytes"),
        (as_binary(pixels, labels + 1), "holds labels up to 10: CIFAR-10 has 0 to 9"),
    ):
        changed = {**contents, "data_batch_3.bin": wrong}
        publish(monkeypatch, changed)
        assert reason in refused(write(tmp_path / cifar.FOLDER, changed))


class Malice:
    def __init__(self, target) -> None:
        self.target = target

    def __reduce__(self):
        return exec, (f"open({str(self.target)!r}, 'w')",)


def test_the_python_version_is_never_unpickled(tmp_path):
    """Neither unpacked nor in its archive, by path or by name; what is allowed is said."""
    target = tmp_path / "touched"
    raw = pickle.dumps({b"data": Malice(target), b"labels": [1]}, protocol=2)
    files = {name.removesuffix(".bin"): raw for name in cifar.MD5}
    place = write(tmp_path / "data" / "cifar-10-batches-py", files)
    packed = {f"cifar-10-batches-py/{name}": raw for name in files}
    archive = pack(tmp_path / "data" / "cifar-10-python.tar.gz", packed)
    assert "a folder must hold the files of CIFAR-10" in refused(place)
    assert "a folder must hold the files of CIFAR-10" in refused(place.parent)
    assert "allowed are" in refused(archive)
    assert "modelmix-lab data fetch cifar10" in refused("cifar10", data_dir=place.parent)
    with pytest.raises(ModelMixError, match=r"expected are data_batch_1\.bin"):
        cifar.read(place)
    assert not target.exists()


def test_a_set_that_is_not_there_says_how_to_get_it(tmp_path):
    message = refused("cifar10", data_dir=tmp_path / "a b")
    assert f"cifar10 is not in the data directory {tmp_path / 'a b'}" in message
    assert f"modelmix-lab data fetch cifar10 --data-dir '{tmp_path / 'a b'}'" in message
    with pytest.raises(ModelMixError, match=r"holds no CIFAR-10: expected are data_batch_1\.bin"):
        cifar.read(tmp_path)


def test_a_folder_with_two_sets_is_not_guessed(tmp_path, contents):
    write(tmp_path / cifar.FOLDER, contents)
    write(tmp_path, {"train_32x32.mat": b""})
    assert "holds files of cifar10 and of svhn: which is meant cannot be told" in refused(tmp_path)
    assert_is_tiny(load("cifar10", tmp_path))


@pytest.mark.parametrize(
    ("other", "file"),
    [
        ("svhn", "svhn/test_32x32.mat"),
        ("fashion-mnist", "fashion-mnist/t10k-labels-idx1-ubyte.gz"),
        ("fashion-mnist", "FashionMNIST/raw/t10k-labels-idx1-ubyte"),
        ("images in train/<class>/", "train/cat/1.png"),
    ],
)
@pytest.mark.parametrize("place", ["", "cifar10"])
def test_a_folder_with_two_sets_below_it_is_not_guessed(tmp_path, contents, other, file, place):
    write(tmp_path / place / cifar.FOLDER, contents)
    assert_is_tiny(load(tmp_path))
    write((tmp_path / file).parent, {(tmp_path / file).name: b""})
    assert f"holds files of cifar10 and of {other}: which is meant cannot be told" in refused(tmp_path)


def test_the_directory_is_given_or_named_by_the_variable_or_in_the_home(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("MODELMIX_DATA", raising=False)
    assert directory() == tmp_path / ".cache" / "modelmix"
    monkeypatch.setenv("MODELMIX_DATA", "")
    assert directory() == tmp_path / ".cache" / "modelmix"
    monkeypatch.setenv("MODELMIX_DATA", "~/elsewhere")
    assert directory() == tmp_path / "elsewhere"
    assert directory(tmp_path / "given") == tmp_path / "given"


def test_a_file_of_another_kind_is_told_the_names_of_archives(tmp_path):
    (tmp_path / "other.tar.gz").write_bytes(b"x")
    assert "cifar-10-binary.tar.gz" in refused(tmp_path / "other.tar.gz")

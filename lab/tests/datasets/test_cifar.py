"""CIFAR-10: both versions of the published files give the same images, and nothing but the published files does."""

from __future__ import annotations

import dataclasses
import io
import os
import pickle
import struct
import tarfile

import numpy as np
import pytest
import torch

from modelmix.data import load
from modelmix.data.directory import directory
from modelmix.errors import ModelMixError
from modelmix_lab.datasets import catalogue, checksum, cifar, pickles

COUNT = 12


def images(seed: int) -> tuple[np.ndarray, np.ndarray]:
    draw = np.random.default_rng(seed)
    return draw.integers(0, 256, (COUNT, 3072), dtype=np.uint8), draw.permutation(np.arange(COUNT) % 10)


def as_binary(pixels: np.ndarray, labels: np.ndarray) -> bytes:
    return np.concatenate([labels[:, None].astype(np.uint8), pixels], axis=1).tobytes()


def text(value: str) -> bytes:
    return b"U" + bytes([len(value)]) + value.encode()


def as_python(pixels: np.ndarray, labels: np.ndarray, by_column: bool = False, kind: str = "u1") -> bytes:
    """Opcode for opcode what Python 2 wrote: strings of bytes, protocol 2."""
    raw = pixels.tobytes(order="F" if by_column else "C")
    shape = b"".join(b"M" + struct.pack("<H", length) for length in pixels.shape) + b"\x86"
    array = b"cnumpy.core.multiarray\n_reconstruct\ncnumpy\nndarray\nK\x00\x85" + text("b") + b"\x87R"
    dtype = b"cnumpy\ndtype\n" + text(kind) + b"K\x00K\x01\x87R(K\x03" + text("|") + b"NNNJ\xff\xff\xff\xff" * 1
    dtype += b"J\xff\xff\xff\xffK\x00tb"
    state = b"(K\x01" + shape + dtype + (b"\x88" if by_column else b"\x89") + b"T" + struct.pack("<i", len(raw)) + raw
    listed = b"](" + b"".join(b"K" + bytes([label]) for label in labels.tolist()) + b"e"
    entries = text("batch_label") + text("a batch") + text("labels") + listed + text("data") + array + state + b"tb"
    return b"\x80\x02}(" + entries + b"u."


WRITERS = {"cifar-10-batches-bin": as_binary, "cifar-10-batches-py": as_python}


def tiny(edition: cifar.Edition, contents: dict[str, bytes]) -> cifar.Edition:
    """The edition with these files as the published ones."""
    md5 = {name: checksum.of_bytes(contents[name]) for name in edition.md5}
    return dataclasses.replace(edition, md5=md5, count=COUNT, size=100_000)


@pytest.fixture
def contents(monkeypatch):
    """Both versions of a little CIFAR-10, which from now on is the published one; by folder and file name."""
    out = {
        edition.folder: {name: WRITERS[edition.folder](*images(i)) for i, name in enumerate(edition.md5)}
        for edition in cifar.EDITIONS
    }
    monkeypatch.setattr(cifar, "EDITIONS", tuple(tiny(edition, out[edition.folder]) for edition in cifar.EDITIONS))
    return out


def publish(monkeypatch, contents) -> None:
    """Makes changed contents the published ones, so that a check behind the md5 is reached."""
    monkeypatch.setattr(cifar, "EDITIONS", tuple(tiny(edition, contents[edition.folder]) for edition in cifar.EDITIONS))


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
    assert [len(edition.md5) for edition in cifar.EDITIONS] == [6, 6]
    assert all(edition.count == 10_000 for edition in cifar.EDITIONS)
    assert catalogue.CATALOGUE["cifar10"].members[0].size == 10_000 * 3073


@pytest.mark.parametrize("folder", WRITERS)
def test_both_versions_from_the_folder_its_parent_and_by_name(tmp_path, contents, folder, monkeypatch):
    write(tmp_path / folder, contents[folder])
    assert_is_tiny(load(tmp_path / folder))
    assert_is_tiny(load(str(tmp_path)))
    assert_is_tiny(load("cifar10", data_dir=tmp_path))
    monkeypatch.setenv("MODELMIX_DATA", str(tmp_path))
    assert_is_tiny(load("cifar10"))


@pytest.mark.parametrize("which", [0, 1])
def test_straight_from_the_archive(tmp_path, contents, which):
    edition = cifar.EDITIONS[which]
    files = {f"{edition.folder}/{name}": content for name, content in contents[edition.folder].items()}
    more = {f"{edition.folder}/readme.html": b"hello", "../evil": b"never looked at"}
    path = pack(tmp_path / edition.archive, {**more, **dict(reversed(files.items()))})
    assert_is_tiny(load(path))
    assert_is_tiny(load("cifar10", tmp_path))
    path.write_bytes(path.read_bytes()[:-2000])
    assert "is cut off, damaged or no .tar.gz archive" in refused(path)
    path.write_bytes(b"no archive")
    assert f"{path} is cut off, damaged or no .tar.gz archive" in refused(path)
    del files[f"{edition.folder}/{next(iter(edition.md5))}"]
    assert "has no cifar-10-batches-" in refused(pack(path, files))


def test_an_array_by_columns_is_read_by_columns():
    pixels, labels = images(0)
    np.testing.assert_array_equal(pickles.batch(as_python(pixels, labels, by_column=True), "it")[0], pixels)


@pytest.mark.parametrize("folder", WRITERS)
def test_a_cut_or_damaged_or_other_file_is_refused(tmp_path, contents, folder):
    place = write(tmp_path / folder, contents[folder])
    name, other = list(contents[folder])[2:4]
    whole = contents[folder][name]
    for wrong in (b"", whole[:-1], whole + b"!", bytes([whole[0] ^ 1]) + whole[1:], contents[folder][other]):
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
    for edition in cifar.EDITIONS:
        files = {name: WRITERS[edition.folder](*images(0)) for name in edition.md5}
        place = write(tmp_path / edition.folder, files)
        assert "is not the published file of CIFAR-10" in refused(place)


def test_what_a_batch_must_hold(tmp_path, contents, monkeypatch):
    pixels, labels = images(2)
    place, name = tmp_path / cifar.BINARY.folder, "data_batch_3.bin"
    for wrong, reason in (
        (as_binary(pixels, labels)[:-1], "allowed are 3073 for each image"),
        (as_binary(pixels[:-1], labels[:-1]), "expected are (12, 3072) and (12,)"),
        (as_binary(pixels, labels + 1), "holds labels from 1 to 10: CIFAR-10 has 0 to 9"),
    ):
        changed = {**contents, cifar.BINARY.folder: {**contents[cifar.BINARY.folder], name: wrong}}
        publish(monkeypatch, changed)
        assert reason in refused(write(place, changed[cifar.BINARY.folder]))


class Malice:
    def __init__(self, *call) -> None:
        self.call = call

    def __reduce__(self):
        return self.call


def hostile(target) -> list[bytes]:
    """Pickles that would write ``target``, or reach for what is not theirs."""
    pixels, labels = images(0)
    calls = [(os.system, (f"touch {target}",)), (exec, (f"open({str(target)!r}, 'w')",)), (open, (str(target), "w"))]
    out = [pickle.dumps(Malice(*call), protocol=protocol) for call in calls for protocol in range(6)]
    out += [pickle.dumps({b"data": Malice(*calls[0]), b"labels": [1]}, protocol=2)]
    out += [
        b"\x80\x04cnumpy\nfromfile\n.",
        b"\x80\x04cnumpy\nndarray.tofile\n.",
        b"\x80\x04\x8c\x05numpy\x8c\x0fndarray.__new__\x93.",
        b"cbuiltins\ngetattr\n(cnumpy\nndarray\nVtofile\ntR.",
        b"\x80\x02cnumpy\nndarray\n}U\x06valuesK\x01sb.",  # a state for the class itself
        b"\x80\x02cnumpy\ndtype\n}U\x04codeK\x01sb.",
        b"\x80\x02\x82\x01.",  # a registered extension
        b"\x80\x02U\x01xQ.",  # a persistent id
        as_python(pixels, labels, kind="O8"),
    ]
    return out


def test_a_pickle_never_runs_code(tmp_path):
    target = tmp_path / "touched"
    before = dict(vars(pickles._Array)), dict(vars(pickles._Kind))
    for raw in hostile(target):
        with pytest.raises(ModelMixError, match="nothing in it was run") as error:
            pickles.batch(raw, "it")
        assert "\n" not in str(error.value)
        assert not target.exists()
    assert before == (dict(vars(pickles._Array)), dict(vars(pickles._Kind)))


def test_a_hostile_batch_is_refused_even_with_the_published_md5(tmp_path, contents, monkeypatch):
    target = tmp_path / "touched"
    changed = {**contents, cifar.PYTHON.folder: {**contents[cifar.PYTHON.folder], "data_batch_1": hostile(target)[2]}}
    publish(monkeypatch, changed)
    message = refused(write(tmp_path / cifar.PYTHON.folder, changed[cifar.PYTHON.folder]))
    assert "data_batch_1 is not a sound batch of CIFAR-10: it asks for posix.system" in message
    assert not target.exists()


def test_every_cut_and_many_flips_of_a_pickle_are_refused_or_harmless():
    pixels, labels = images(0)
    whole = as_python(pixels[:, :8], labels)
    for length in range(len(whole)):
        with pytest.raises(ModelMixError, match="is not a sound batch"):
            pickles.batch(whole[:length], "it")
    for place in range(len(whole)):
        for flip in (1, 0x80, 0xFF):
            try:
                pickles.batch(whole[:place] + bytes([whole[place] ^ flip]) + whole[place + 1 :], "it")
            except ModelMixError as error:
                assert "\n" not in str(error)  # noqa: PT017


def test_what_else_a_pickle_may_not_be():
    pixels, labels = images(0)
    for value in ([1, 2], {b"labels": [1]}, {b"data": 3, b"labels": [1]}, None, "text", {"data": 1}):
        with pytest.raises(ModelMixError, match="is not a sound batch"):
            pickles.batch(pickle.dumps(value, protocol=2), "it")
    with pytest.raises(ModelMixError, match="its data or labels are of another kind"):
        pickles.batch(as_python(pixels, labels).replace(b"K" + bytes([labels[0]]), b"\x88", 1), "it")


def test_a_set_that_is_not_there_says_how_to_get_it(tmp_path):
    message = refused("cifar10", data_dir=tmp_path / "a b")
    assert f"cifar10 is not in the data directory {tmp_path / 'a b'}" in message
    assert f"modelmix-lab data fetch cifar10 --data-dir '{tmp_path / 'a b'}'" in message
    with pytest.raises(ModelMixError, match=r"holds no CIFAR-10: expected are data_batch_1\.bin"):
        cifar.read(tmp_path)


def test_a_folder_with_two_sets_is_not_guessed(tmp_path, contents):
    write(tmp_path / cifar.BINARY.folder, contents[cifar.BINARY.folder])
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
    write(tmp_path / place / cifar.BINARY.folder, contents[cifar.BINARY.folder])
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
    assert "cifar-10-binary.tar.gz or cifar-10-python.tar.gz" in refused(tmp_path / "other.tar.gz")

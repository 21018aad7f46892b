"""SVHN: the published .mat files and crops made anew are told apart, and anything else is refused."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from scipy.io import loadmat, savemat

from modelmix.data import fashion, idx, load
from modelmix.errors import ModelMixError
from modelmix_lab.datasets import checksum, mat, svhn

HISTOGRAM = {"train": (2, 3, 1, 1, 2, 1, 1, 1, 1, 2), "test": (1,) * 10}


def arrays(split: str) -> tuple[np.ndarray, np.ndarray]:
    """X and y as in a .mat file: the digit 0 is a 10."""
    draw = np.random.default_rng(len(split))
    digits = draw.permutation(np.repeat(np.arange(10), HISTOGRAM[split]))
    y = np.where(digits == 0, 10, digits).astype(np.uint8)[:, None]
    return draw.integers(0, 256, (32, 32, 3, len(y)), dtype=np.uint8), y


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A little SVHN, made anew: its md5 is not the published one."""
    monkeypatch.setattr(svhn, "HISTOGRAM", HISTOGRAM)
    for split, name in svhn.FILES.items():
        x, y = arrays(split)
        savemat(tmp_path / name, {"X": x, "y": y}, do_compression=split == "train")
    return tmp_path


def refused(source, **more) -> str:
    with pytest.raises(ModelMixError) as error:
        load(source, **more)
    assert "\n" not in str(error.value)
    return str(error.value)


def test_the_published_facts():
    assert sum(svhn.HISTOGRAM["train"]) == 73_257
    assert sum(svhn.HISTOGRAM["test"]) == 26_032


def test_images_stand_upright_and_ten_is_zero(folder):
    found = load(folder)
    assert (found.shape, found.classes) == ((3, 32, 32), tuple("0123456789"))
    assert (found.train.x.dtype, found.train.y.dtype) == (torch.uint8, torch.int64)
    for split, name in ((found.train, "train"), (found.test, "test")):
        x, y = arrays(name)
        assert split.x.is_contiguous()
        np.testing.assert_array_equal(split.x.permute(2, 3, 1, 0), x)
        np.testing.assert_array_equal(split.y, y[:, 0] % 10)
        assert tuple(split.y.bincount().tolist()) == HISTOGRAM[name]


def test_only_the_published_files_get_the_plain_name(folder, monkeypatch):
    assert load(folder).name == "svhn (rebuilt crops)"
    md5 = {split: checksum.of_bytes((folder / name).read_bytes()) for split, name in svhn.FILES.items()}
    monkeypatch.setattr(svhn, "MD5", md5)
    assert load(folder).name == "svhn"
    monkeypatch.setattr(svhn, "MD5", {**md5, "train": "0" * 32})
    assert load(folder).name == "svhn (rebuilt crops)"
    monkeypatch.setattr(svhn, "MD5", {**md5, "test": "0" * 32})
    assert load(folder).name == "svhn (rebuilt crops)"


def test_by_name(folder, tmp_path):
    assert load("svhn", data_dir=folder).name == "svhn (rebuilt crops)"
    folder.joinpath("svhn").mkdir()
    for name in svhn.FILES.values():
        (folder / name).rename(folder / "svhn" / name)
    assert len(load("svhn", data_dir=str(folder)).train) == 15
    assert "svhn is not in the data directory" in refused("svhn", data_dir=folder / "other")


def test_from_the_parent_unless_another_set_is_there(folder):
    (folder / "svhn").mkdir()
    for name in svhn.FILES.values():
        (folder / name).rename(folder / "svhn" / name)
    assert len(load(folder).train) == 15
    (folder / "svhn" / "svhn").mkdir()
    (folder / "svhn" / "svhn" / svhn.FILES["train"]).write_bytes(b"junk")
    assert len(load(folder / "svhn").train) == 15, "the folder that is given wins over one below it"
    (folder / "fashion-mnist").mkdir()
    (folder / "fashion-mnist" / fashion.CANONICAL["x_train"]).write_bytes(b"")
    assert "holds files of svhn and of fashion-mnist: which is meant cannot be told" in refused(folder)


def test_a_missing_file(folder):
    (folder / "test_32x32.mat").unlink()
    assert "has no file test_32x32.mat: SVHN is train_32x32.mat, test_32x32.mat" in refused(folder)


@pytest.mark.parametrize("name", svhn.FILES.values())
def test_cut_and_damaged_files(folder, name):
    path = folder / name
    whole = path.read_bytes()
    for length in [*range(0, 400, 37), len(whole) // 2, len(whole) - 9]:
        path.write_bytes(whole[:length])
        assert str(path) in refused(folder)
    for junk in (b"junk" * 100, whole[:128] + b"\xff" * 200, b"\x89HDF\r\n\x1a\n" + bytes(500)):
        path.write_bytes(junk)
        assert "is cut off, damaged or no MATLAB file" in refused(folder)
    path.write_bytes(whole)
    assert len(load(folder).test) == 10


def test_every_flipped_byte_of_a_header_is_refused_or_harmless(folder):
    """The compressed file and the plain one. scipy's reader, which we do not use, crashes the process on some."""
    for split, name in svhn.FILES.items():
        path = folder / name
        whole = path.read_bytes()
        for place in [*range(600), len(whole) - 20]:
            for flip in (1, 0x80, 0xFF):
                flipped = whole[:place] + bytes([whole[place] ^ flip]) + whole[place + 1 :]
                try:
                    svhn._split(flipped, path, HISTOGRAM[split])
                except ModelMixError as error:
                    assert "\n" not in str(error)  # noqa: PT017


@pytest.mark.parametrize("compressed", [False, True])
def test_numbers_are_read_as_scipy_reads_them(tmp_path, compressed):
    draw = np.random.default_rng(0)
    given = {
        f"{kind}_{len(shape)}": (100 * draw.normal(size=shape)).astype(kind)
        for kind in ("i1", "u1", "i2", "u2", "i4", "u4", "i8", "u8", "f4", "f8")
        for shape in ((1, 1), (3, 1), (1, 4), (5, 3), (2, 3, 4))
    }
    savemat(
        tmp_path / "it.mat", {**given, "text": "abc", "cell": np.array([1, "a"], object)}, do_compression=compressed
    )
    found = mat.arrays((tmp_path / "it.mat").read_bytes(), "it", 10_000)
    expected = loadmat(tmp_path / "it.mat")
    assert found.keys() == given.keys()
    for name, array in found.items():
        assert array.dtype == given[name].dtype
        np.testing.assert_array_equal(array, expected[name])


def test_a_packed_variable_cannot_grow_without_bound(tmp_path):
    savemat(tmp_path / "it.mat", {"X": np.zeros(10**6, np.uint8)}, do_compression=True)
    with pytest.raises(ModelMixError, match="larger than 5,000 bytes"):
        mat.arrays((tmp_path / "it.mat").read_bytes(), "it", 5000)


def test_other_sets_with_these_names(folder):
    x, y = arrays("train")
    path = folder / svhn.FILES["train"]
    for wrong, reason in (
        ({"X": x[..., :-1], "y": y[:-1]}, "expected are uint8 32 x 32 x 3 x 15 and numbers 15 x 1"),
        ({"X": x.astype(float), "y": y}, "holds X, float64 32 x 32 x 3 x 15"),
        ({"X": x.transpose(3, 0, 1, 2), "y": y}, "holds X, uint8 15 x 32 x 32 x 3"),
        ({"X": x}, "and y, float64 0"),
        ({"images": x}, "holds X, float64 0"),
        ({"X": x, "y": np.array([["a"]] * 15, object)}, "holds X"),
        ({"X": x, "y": y % 10}, "(with 10 for 0), expected are (2, 3, 1"),
        ({"X": x, "y": np.roll(y, 1) // 2}, "is not the file of SVHN's cropped digits: it holds"),
        ({"X": x, "y": y + 0.5}, "is not the file of SVHN's cropped digits: it holds"),
    ):
        savemat(path, wrong)
        assert reason in refused(folder)


def test_the_real_histogram_is_in_force(folder, monkeypatch):
    monkeypatch.undo()
    assert "expected are uint8 32 x 32 x 3 x 73257" in refused(folder)


def test_a_relative_is_not_taken_for_fashion_mnist(tmp_path, monkeypatch):
    """A folder called fashion-mnist with the digits of MNIST in it has every name right."""
    for key, name in fashion.CANONICAL.items():
        shape = (20, 28, 28) if key[0] == "x" else (20,)
        (tmp_path / "fashion-mnist").mkdir(exist_ok=True)
        idx.write(
            tmp_path / "fashion-mnist" / f"{name}.gz", np.arange(np.prod(shape)).reshape(shape).astype(np.uint8) % 10
        )
    assert "does not hold fashion-mnist: its files have the right names" in refused("fashion-mnist", data_dir=tmp_path)
    assert load(tmp_path / "fashion-mnist", classes=10).classes == tuple("0123456789")
    monkeypatch.setattr(fashion, "OFFICIAL", {})
    assert load("fashion-mnist", data_dir=tmp_path).classes[0] == "T-shirt/top"

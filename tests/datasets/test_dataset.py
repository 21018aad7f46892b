"""Data sets: the embedded one is whole, other people's are taken in every allowed shape and refused in one line."""

from __future__ import annotations

import subprocess
import sys
from importlib.resources import files

import numpy as np
import pytest
import torch

from modelmix.data import fashion, from_arrays, idx, load, to_float
from modelmix.errors import ModelMixError


@pytest.fixture(scope="module")
def mini():
    return load()


def arrays(**changed) -> dict[str, np.ndarray]:
    """A sound little set of 6 + 4 images 9 x 8 with 3 channels and 2 classes, with what is named changed."""
    draw = np.random.default_rng(0)
    sound = {
        "x_train": draw.integers(0, 256, (6, 9, 8, 3), dtype=np.uint8),
        "y_train": np.array([0, 1, 0, 1, 1, 0]),
        "x_test": draw.integers(0, 256, (4, 9, 8, 3), dtype=np.uint8),
        "y_test": np.array([1, 1, 0, 0]),
    }
    return {key: value for key, value in {**sound, **changed}.items() if value is not None}


def features(dtype: str) -> dict[str, np.ndarray]:
    return arrays(x_train=np.arange(30, dtype=dtype).reshape(6, 5), x_test=np.ones((4, 5), dtype))


def refused(source, **more) -> str:
    with pytest.raises(ModelMixError) as error:
        load(source, **more)
    assert "\n" not in str(error.value)
    return str(error.value)


def write_folder(path, ending: str = ".gz", **changed) -> None:
    draw = np.random.default_rng(0)
    content = {
        "x_train": draw.integers(0, 256, (20, 28, 28), dtype=np.uint8),
        "y_train": np.arange(20, dtype=np.uint8) % 10,
        "x_test": draw.integers(0, 256, (10, 28, 28), dtype=np.uint8),
        "y_test": np.arange(10, dtype=np.uint8),
    }
    for key, array in {**content, **changed}.items():
        if array is not None:
            idx.write(path / (fashion.CANONICAL[key] + ending), array)


def test_the_embedded_set_is_balanced_and_of_the_promised_size(mini):
    assert (mini.name, mini.shape, len(mini.classes)) == ("fashion-mini", (1, 28, 28), 10)
    for split, per_class in ((mini.train, 2780), (mini.test, 400)):
        assert split.x.dtype == torch.uint8
        assert split.y.dtype == torch.int64
        assert split.x.shape == (10 * per_class, 1, 28, 28)
        assert split.x.is_contiguous()
        assert split.y.bincount().tolist() == [per_class] * 10


def test_the_embedded_labels_begin_like_the_official_ones(mini):
    assert mini.train.y[:10].tolist() == [9, 0, 0, 3, 0, 2, 7, 2, 5, 5]
    assert mini.test.y[:10].tolist() == [9, 2, 1, 1, 6, 1, 4, 6, 5, 7]


def test_the_embedded_images_stand_upright(mini):
    """Trousers are higher than wide; a transposed image would lie on its side."""
    trousers = mini.train.x[mini.train.y == mini.classes.index("Trouser")].float().mean(0)[0]
    assert (trousers.sum(0) > 500).sum() < 20 < (trousers.sum(1) > 500).sum()


def test_no_embedded_image_is_in_both_splits(mini):
    train = {image.numpy().tobytes() for image in mini.train.x}
    test = {image.numpy().tobytes() for image in mini.test.x}
    assert not train & test


def test_the_embedded_files_stay_small_and_carry_their_licence():
    folder = files("modelmix.data") / "embedded"
    held = {file.name: len(file.read_bytes()) for file in folder.iterdir()}
    assert held.keys() == {name for name, _ in fashion.EMBEDDED.values()} | {"LICENSE.txt"}
    assert sum(held.values()) < 11_500_000
    assert "2017 Zalando SE" in (folder / "LICENSE.txt").read_text(encoding="utf-8")


def test_a_damaged_embedded_file_is_refused(monkeypatch):
    name, _ = fashion.EMBEDDED["y_test"]
    monkeypatch.setitem(fashion.EMBEDDED, "y_test", (name, "0" * 64))
    assert f"the embedded file {name} is damaged" in refused("fashion-mini")
    monkeypatch.setitem(fashion.EMBEDDED, "x_train", ("absent.xz", "0" * 64))
    assert "the embedded file absent.xz cannot be read: No such file" in refused("fashion-mini")


@pytest.mark.parametrize("ending", ["", ".gz", ".xz"])
def test_a_folder_of_idx_files(tmp_path, ending):
    write_folder(tmp_path, ending)
    found = load(tmp_path, classes=10)
    assert (found.name, found.shape, len(found.train), len(found.test)) == (tmp_path.name, (1, 28, 28), 20, 10)
    np.testing.assert_array_equal(found.test.x[:, 0], idx.read(tmp_path / (fashion.CANONICAL["x_test"] + ending)))


def test_only_the_official_files_get_the_names_of_clothes(tmp_path, monkeypatch):
    """A folder of MNIST has the same file names; its digits are no shirts."""
    write_folder(tmp_path)
    assert load(tmp_path, classes=10).classes == tuple("0123456789")
    monkeypatch.setattr(fashion, "OFFICIAL", {})
    assert load(tmp_path).classes[9] == "Ankle boot"
    assert load(str(tmp_path)).name == "fashion-mnist"


def test_a_folder_with_something_wrong(tmp_path):
    assert "has no file train-images-idx3-ubyte" in refused(tmp_path)
    write_folder(tmp_path, x_test=np.zeros((9, 28, 28), np.uint8))
    assert "y_test has 10 labels for 9 samples" in refused(tmp_path)
    write_folder(tmp_path, x_test=np.zeros((10, 28, 27), np.uint8))
    assert "uint8 1 x 28 x 28 in x_train and uint8 1 x 28 x 27 in x_test" in refused(tmp_path)
    path = tmp_path / (fashion.CANONICAL["x_test"] + ".gz")
    path.write_bytes(path.read_bytes()[:-30])
    assert f"{path} is cut off" in refused(tmp_path)


@pytest.mark.parametrize("save", [np.savez, np.savez_compressed])
def test_an_npz_file(tmp_path, save):
    save(tmp_path / "mine.npz", **arrays(), more=np.ones(3))
    found = load(tmp_path / "mine.npz", classes=2)
    assert (found.name, found.shape, found.classes) == ("mine", (3, 9, 8), ("0", "1"))
    assert found.train.y.tolist() == [0, 1, 0, 1, 1, 0]


def test_images_in_each_layout_come_out_channels_first():
    last = from_arrays("last", arrays(), 2)
    first = from_arrays("first", {k: v.transpose(0, 3, 1, 2) if k[0] == "x" else v for k, v in arrays().items()}, 2)
    grey = from_arrays("grey", {k: v[..., 0] if k[0] == "x" else v for k, v in arrays().items()}, 2)
    assert last.train.x.shape == (6, 3, 9, 8)
    assert torch.equal(last.train.x, first.train.x)
    assert torch.equal(last.test.x[:, :1], grey.test.x)
    assert all(found.train.x.is_contiguous() for found in (last, first, grey))


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64", ">f8"])
def test_features_become_float32(dtype):
    found = from_arrays("features", features(dtype), 2)
    assert found.shape == (5,)
    assert found.train.x.dtype == torch.float32
    assert torch.equal(found.train.x, torch.arange(30.0).reshape(6, 5))


@pytest.mark.parametrize("dtype", ["uint8", "int32", ">i4", "uint64"])
def test_labels_of_any_integer_type(dtype):
    found = from_arrays("set", arrays(y_train=arrays()["y_train"].astype(dtype)), 2)
    assert found.train.y.dtype == torch.int64
    assert found.train.y.tolist() == arrays()["y_train"].tolist()


def test_the_arrays_are_copied():
    given = features("float32")
    found = from_arrays("set", given, 2)
    given["x_train"][:] = -1
    given["y_train"][:] = 0
    assert found.train.x[0, 1] == 1
    assert found.train.y[1] == 1


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({"y_test": None}, "mine has no y_test"),
        ({"x_train": np.ones((6, 9, 8, 3))}, "mine: x_train is float64 with shape (6, 9, 8, 3): allowed are"),
        ({"x_train": np.ones((6, 9), np.uint8)}, "mine: x_train is uint8 with shape (6, 9): allowed are"),
        ({"x_train": np.ones((6, 9), np.int64)}, "mine: x_train is int64"),
        ({"x_train": np.ones((0, 9, 8, 3), np.uint8)}, "mine: x_train is empty"),
        ({"x_train": np.ones((6, 9, 8, 5), np.uint8)}, "the channels cannot be told"),
        ({"x_train": np.ones((6, 3, 8, 3), np.uint8)}, "the channels cannot be told"),
        ({"x_train": np.full((6, 2), np.nan)}, "mine: x_train holds values that are not finite"),
        ({"x_train": np.full((6, 2), 1e300)}, "mine: x_train holds values that are not finite"),
        ({"x_train": np.ones((6, 2))}, "one sample is float32 2 in x_train and uint8 3 x 9 x 8 in x_test"),
        ({"y_train": np.zeros(6)}, "mine: y_train is float64 with shape (6,): labels must be integers"),
        ({"y_train": np.zeros((6, 1), int)}, "mine: y_train is int64 with shape (6, 1)"),
        ({"y_train": np.zeros(6, bool)}, "mine: y_train is bool"),
        ({"y_train": np.zeros(5, int)}, "mine: y_train has 5 labels for 6 samples"),
        ({"y_train": np.array([0, 1, 0, 1, -1, 0])}, "mine: y_train holds label -1"),
        ({"y_train": np.array([0, 1, 0, 1, 3, 0])}, "y_train holds label 3: with 2 classes, allowed are 0 to 1"),
        ({"y_train": np.array([0, 1, 0, 1, 2**64 - 1, 0], np.uint64)}, "y_train holds label 18446744073709551615"),
        ({"y_test": np.array([0, 1, 2, 0])}, "y_test holds label 2: with 2 classes, allowed are 0 to 1"),
    ],
)
def test_an_npz_file_with_something_wrong(tmp_path, changed, reason):
    np.savez(tmp_path / "mine.npz", **arrays(**changed))
    assert reason in refused(tmp_path / "mine.npz", classes=2)


def test_private_labels_are_not_counted(tmp_path):
    np.savez(tmp_path / "mine.npz", **arrays())
    assert "private labels are not counted: give classes" in refused(tmp_path / "mine.npz")
    assert load(tmp_path / "mine.npz", test_public=True).classes == ("0", "1")
    assert load(tmp_path / "mine.npz", classes=4).classes == ("0", "1", "2", "3")
    assert "must be a whole number, 2 or more" in refused(tmp_path / "mine.npz", classes=1)


def test_an_npz_file_never_runs_code(tmp_path):
    np.savez(tmp_path / "objects.npz", **arrays(y_train=np.array([0, 1, None, 0, 1, 1], dtype=object)))
    assert "holds Python objects" in refused(tmp_path / "objects.npz")


def test_broken_npz_files(tmp_path):
    path = tmp_path / "set.npz"
    np.savez_compressed(path, **arrays())
    whole = path.read_bytes()
    for length in [*range(0, len(whole), 97), len(whole) - 1]:
        path.write_bytes(whole[:length])
        assert "is not a sound .npz file" in refused(path)
    for junk in (b"not a zip at all", b"\x93NUMPY\x01\x00"):
        path.write_bytes(junk)
        assert "is not a sound .npz file" in refused(path)
    with path.open("wb") as file:
        np.save(file, np.ones(3))
    assert "is not a sound .npz file" in refused(path)


@pytest.mark.parametrize("source", ["fashion", "missing.npz", "missing/folder", "README.md"])
def test_an_unknown_source_is_told_what_is_allowed(source):
    assert "allowed are fashion-mini, a folder with the four idx files" in refused(source)


@pytest.mark.parametrize("name", ["passwd", "other.tar.gz", "data.csv"])
def test_a_file_of_another_kind_is_not_called_missing(tmp_path, name):
    assert f"{name}' is not there: allowed are" in refused(tmp_path / name)
    (tmp_path / name).write_bytes(b"x")
    message = refused(tmp_path / name)
    assert f"{name}' is there but is no known data set: allowed are fashion-mini" in message


def test_pixels_become_floats_by_public_constants(mini):
    x = torch.arange(256, dtype=torch.uint8)
    found = to_float(x)
    assert found.dtype == torch.float32
    assert (found.min(), found.max()) == (-2, 2)
    assert torch.allclose(found, torch.linspace(-2, 2, 256), atol=1e-6)
    one = mini.train.x[:1]
    assert torch.equal(to_float(mini.train.x[:50])[:1], to_float(one))  # the others change nothing
    assert torch.equal(mini.train.x[:1], one)


def test_floats_pass_and_other_types_do_not():
    x = torch.randn(3, 4, generator=torch.Generator().manual_seed(0))
    assert to_float(x) is x
    with pytest.raises(ModelMixError, match=r"samples are torch\.int64"):
        to_float(x.long())


def test_the_package_itself_does_not_import_torch():
    program = "import sys, modelmix; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"

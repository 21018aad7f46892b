"""A folder of images for every class: pixels, split, classes, and every file that will not do."""

from __future__ import annotations

import sys
import warnings

import numpy as np
import pytest
from PIL import Image

from modelmix.data import load
from modelmix.data.images import held_out
from modelmix.errors import ModelMixError


def picture(path, colour=(10, 20, 30), size=(12, 12), mode="RGB", **options):
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new(mode, size, colour).save(path, **options)


@pytest.fixture
def folder(tmp_path):
    """Two classes, three training images and one test image each, in files of both kinds."""
    root = tmp_path / "photos"
    for label, name in enumerate(("cat", "dog")):
        for i in range(3):
            picture(root / "train" / name / f"{i}.{'png' if i else 'JPG'}", (100 * label, 50, 10 * i))
        picture(root / "test" / name / "9.jpeg", (100 * label, 50, 200))
    return root


def refused(*arguments, **options) -> str:
    with pytest.raises(ModelMixError) as error:
        load(*arguments, **options)
    assert "\n" not in str(error.value)
    return str(error.value)


def test_images_by_class(folder):
    found = load(folder)
    assert (found.name, found.classes, found.shape) == ("photos", ("cat", "dog"), (3, 12, 12))
    assert (found.train.y.tolist(), found.test.y.tolist()) == ([0, 0, 0, 1, 1, 1], [0, 1])
    assert found.train.x.dtype.itemsize == 1
    assert found.train.x[4, :, 5, 5].tolist() == [100, 50, 10]
    assert found.test.x[1, :, 5, 5].tolist() == pytest.approx([100, 50, 200], abs=3)  # JPEG


def test_every_size_becomes_the_one_that_is_given(folder):
    wide = Image.fromarray(np.repeat(np.arange(60, dtype=np.uint8)[None, :, None], 3, axis=2).repeat(20, axis=0))
    wide.save(folder / "train" / "cat" / "wide.png")
    assert "wide.png is 60 x 20 pixels and others are 12 x 12: give one size" in refused(folder)
    found = load(folder, image_size=16)
    assert found.shape == (3, 16, 16)
    middle = found.train.x[found.train.y == 0][3, 0, 8].float()
    assert 20 <= float(middle.min()) < float(middle.max()) < 40, "the middle of the longer side"


def test_a_size_is_for_images_only(folder):
    assert "image_size is for a folder of images" in refused("fashion-mini", image_size=16)
    assert "image_size = 4" in refused(folder, image_size=4)


@pytest.mark.parametrize(
    ("mode", "colour", "wanted"),
    [
        ("L", 77, [77, 77, 77]),
        ("1", 1, [255, 255, 255]),
        ("RGBA", (10, 20, 30, 255), [10, 20, 30]),
        ("RGBA", (10, 20, 30, 0), [255, 255, 255]),
        ("LA", (9, 255), [9, 9, 9]),
        ("P", 0, [0, 0, 0]),
    ],
)
def test_every_kind_of_png_becomes_three_colours(folder, mode, colour, wanted):
    picture(folder / "train" / "cat" / "0a.png", colour, mode=mode)
    x = load(folder).train.x
    assert [list(image[:, 6, 6]) for image in x].count(wanted) >= 1


def test_photographs_are_turned_upright(folder):
    image = Image.new("RGB", (12, 12))
    image.paste((255, 255, 255), (0, 0, 12, 6))  # white above
    exif = Image.Exif()
    exif[0x0112] = 6  # the camera was turned
    image.save(folder / "train" / "cat" / "0b.png", exif=exif)
    turned = load(folder).train.x[1, 0]
    assert turned[:, 9:].float().mean() > 250
    assert turned[:, :3].float().mean() < 5


# The split where there is no test folder.


def many(root, names):
    for name in names:
        picture(root / "train" / "a" / name, (1, 2, 3))
        picture(root / "train" / "b" / name, (4, 5, 6))
    return load(root)


def test_one_image_in_ten_is_held_out_by_its_name_alone(tmp_path):
    names = [f"{i}.png" for i in range(40)]
    found = many(tmp_path / "one", names)
    expected = sum(held_out(folder, name) for folder in "ab" for name in names)
    assert (len(found.train), len(found.test)) == (80 - expected, expected)
    assert 0.08 < sum(held_out("x", str(i)) for i in range(10_000)) / 10_000 < 0.12
    fewer = many(tmp_path / "two", names[1:])  # one image of each class less: the others stay where they are
    gone = sum(held_out(folder, names[0]) for folder in "ab")
    assert (len(fewer.train), len(fewer.test)) == (len(found.train) - (2 - gone), len(found.test) - gone)


def test_too_few_images_to_hold_any_out(tmp_path):
    name = next(name for name in (f"{i}.png" for i in range(99)) if not held_out("a", name) and not held_out("b", name))
    with pytest.raises(ModelMixError, match=r"leaves no image to test with: add some, or a folder test"):
        many(tmp_path, [name])


# What will not do.


def test_bad_files_are_named_in_one_line(folder):
    (folder / "train" / "cat" / "cut.png").write_bytes((folder / "train" / "cat" / "1.png").read_bytes()[:50])
    (folder / "train" / "dog" / "empty.jpg").write_bytes(b"")
    message = refused(folder)
    assert "2 of 10 files in" in message
    assert "train/cat/cut.png (" in message
    assert "train/dog/empty.jpg (" in message
    for i in range(5):
        (folder / "train" / "dog" / f"more{i}.jpg").write_bytes(b"GIF89a")
    assert "and 4 more. Repair them, or move them away." in refused(folder)


def test_other_files_are_not_left_out_in_silence(folder):
    (folder / "train" / "cat" / ".hidden").write_text("x")
    load(folder)
    (folder / "train" / "cat" / "notes.txt").write_text("x")
    assert "cat/notes.txt (not .png, .jpg, .jpeg)" in refused(folder)
    (folder / "train" / "cat" / "notes.txt").unlink()
    (folder / "train" / "cat" / "more.png").mkdir()
    assert "cat/more.png (not" in refused(folder)


@pytest.mark.parametrize("split", ["train", "test"])
@pytest.mark.parametrize("name", ["loose.png", "labels.csv"])
def test_loose_files_are_not_left_out_in_silence(folder, split, name):
    (folder / split / ".hidden").write_text("x")
    load(folder)
    picture(folder / split / "loose.png")
    (folder / split / "loose.png").rename(folder / split / name)
    assert f"files in {folder / split} cannot be used as images: {name} (not in the folder of a class)" in refused(
        folder
    )


@pytest.mark.parametrize("name", ["val", "valid", "validation", "Val"])
def test_a_validation_set_is_not_left_out_in_silence(folder, name):
    picture(folder / name / "cat" / "1.png")
    assert f"{folder / name} would not be used: allowed are train and test. Rename it test" in refused(folder)


def test_a_disguised_picture_of_another_kind(folder):
    Image.new("RGB", (12, 12)).save(folder / "train" / "cat" / "x.gif")
    (folder / "train" / "cat" / "x.gif").rename(folder / "train" / "cat" / "x.png")
    assert "train/cat/x.png (cannot identify" in refused(folder)


def test_more_than_eight_bits_are_not_cut_off_in_silence(folder):
    picture(folder / "train" / "cat" / "deep.png", 300, mode="I;16")
    assert "more than 8 bits a colour" in refused(folder)


def test_a_picture_of_absurd_size_is_refused_without_being_unpacked(folder, monkeypatch):
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 200)
    picture(folder / "train" / "cat" / "bomb.png", size=(15, 16))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        message = refused(folder)
    assert "train/cat/bomb.png (Image size (240 pixels) exceeds limit" in message


def test_tiny_pictures(folder):
    picture(folder / "train" / "cat" / "tiny.png", size=(30, 7))
    assert "tiny.png (30 x 7 pixels, fewer than 8 a side)" in refused(folder, image_size=16)


def test_classes_of_the_test_set_must_be_those_of_training(folder):
    picture(folder / "test" / "bird" / "1.png")
    assert "bird is a class that train does not have" in refused(folder)


def test_a_class_of_the_test_set_may_be_missing(folder):
    for file in (folder / "test" / "dog").iterdir():
        file.unlink()
    assert load(folder).test.y.tolist() == [0]


def test_folders_that_are_none(tmp_path):
    assert "or images in train/<class>/. Check the path." in refused(tmp_path)
    (tmp_path / "train").mkdir()
    assert "or images in train/<class>/" in refused(tmp_path)
    (tmp_path / "train" / "cat").mkdir()
    assert "leaves no image to train with" in refused(tmp_path)


def test_without_pillow(folder, monkeypatch):
    monkeypatch.setitem(sys.modules, "PIL", None)
    assert "needs Pillow: install it with pip install 'modelmix[train]'." in refused(folder)


def test_the_command_trains_on_a_folder(folder, run, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    options = ["--model", "linear", "--steps", 2, "--batch", 3, "--out", "run", "--json"]
    options += ["--set", "privacy.noise_multiplier=1", "--set", "run.seed=1"]
    code, out, err = run("train", "--data", "photos", "--set", "data.image_size=8", *options)
    assert code == 0, err
    assert '"steps": 2' in out
    code, _, err = run("train", "--data", "photos", *options, "--resume")
    assert code == 0, err

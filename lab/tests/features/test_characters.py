"""Synthetic characters: the alphabet, the images, and a network that learns to read them."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from modelmix.errors import ModelMixError
from modelmix.models.residual import WideResNet16
from modelmix_lab.features import reading
from modelmix_lab.features.prior import PriorConfig
from modelmix_lab.features.reading import looks, train_reading_prior
from modelmix_lab.features.weights import Prior
from modelmix_lab.synthetic.alphabet import ALPHABET, CLASSES
from modelmix_lab.synthetic.characters import characters, labelled_characters

CONFIG = PriorConfig(images=24, steps=2, batch=8, width=1, of="characters")


def test_images_are_drawn_anew_on_the_way(monkeypatch):
    drawn = []

    def counted(*arguments):
        drawn.append(arguments[0])
        return labelled_characters(*arguments)

    monkeypatch.setattr(reading, "labelled_characters", counted)
    train_reading_prior(replace(CONFIG, steps=17, batch=2), torch.device("cpu"))
    assert drawn == [24, 24, 24]  # at first, and after eight and sixteen steps


def made(count: int = 16, seed: int = 0, side: int = 32):
    return labelled_characters(count, side, torch.Generator("cpu").manual_seed(seed))


def test_digits_are_their_own_labels_and_letters_follow():
    assert "".join(CLASSES) == "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZ"


@pytest.mark.parametrize("name", CLASSES)
def test_strokes_are_points_on_the_grid(name):
    for way in ALPHABET[name]:
        for stroke in way.split():
            figures = stroke.lstrip("~")
            assert len(figures) % 2 == 0
            assert len(figures) >= (6 if stroke[0] == "~" else 2)
            assert max(figures[::2]) <= "6"
            assert max(figures[1::2]) <= "8"


def test_images_are_repeatable_and_all_different():
    (a, labels), (b, same), (c, _) = made(), made(), made(seed=1)
    assert a.shape == (16, 3, 32, 32)
    assert a.dtype == torch.uint8
    assert labels.dtype == torch.int64
    assert torch.equal(a, b)
    assert torch.equal(labels, same)
    assert not torch.equal(a, c)
    assert len({bytes(image.numpy().tobytes()) for image in a}) == 16
    assert torch.equal(characters(16, 32, torch.Generator("cpu").manual_seed(0)), a)


@pytest.mark.parametrize("count", [1, 2, 2049])
def test_any_number_of_images_of_any_side_can_be_made(count):
    images, labels = made(count, side=8)
    assert images.shape == (count, 3, 8, 8)
    assert labels.shape == (count,)


def test_all_characters_occur_and_digits_most():
    labels = made(2000, side=8)[1]
    often = torch.bincount(labels, minlength=len(CLASSES))
    assert len(often) == len(CLASSES)
    assert int(often.min()) > 0
    assert 0.6 < float((labels < 10).float().mean()) < 0.8


def test_the_middle_shows_the_label():
    """Images of a class have more in common with each other than with those of others: a mean of many tells them."""
    images, labels = made(3000, side=16)
    x = images.float().mean(1).flatten(1)
    x = (x - x.mean(1, keepdim=True)).abs()  # dark on light or light on dark
    x = x / x.norm(dim=1, keepdim=True).clamp_min(1e-6)
    learned, other = slice(0, 2500), slice(2500, 3000)
    means = torch.stack([x[learned][labels[learned] == digit].mean(0) for digit in range(10)])
    digits = labels[other] < 10
    found = torch.cdist(x[other][digits], means).argmin(1)
    assert float((found == labels[other][digits]).float().mean()) > 0.2


def test_looks_are_pixels_of_the_range_that_networks_take():
    g = torch.Generator("cpu").manual_seed(0)
    images = made()[0]
    a, b = looks(images, g), looks(images, g)
    assert a.shape == (16, 3, 32, 32)
    assert a.dtype == torch.float32
    assert -2 <= float(a.min()) <= float(a.max()) <= 2
    assert not torch.equal(a, b)


def test_training_on_characters_changes_all_weights_but_the_head_and_is_repeatable():
    heard = []
    networks = [
        train_reading_prior(CONFIG, torch.device("cpu"), lambda *progress: heard.append(progress)) for _ in range(2)
    ]
    assert [step for step, _ in heard[: len(heard) // 2]] == [1, 2]
    with torch.random.fork_rng():
        torch.manual_seed(CONFIG.seed)
        fresh = WideResNet16(classes=len(CLASSES), width=1)
    for (name, a), (_, b), (_, c) in zip(*(n.named_parameters() for n in (*networks, fresh)), strict=True):
        assert torch.equal(a, b), name
        assert bool((a == 0).all()) == name.startswith("head.")
        assert name.startswith("head.") or not torch.equal(a, c), name


def test_a_prior_of_something_else_is_refused():
    with pytest.raises(ModelMixError, match="choose scenes or characters"):
        PriorConfig(of="faces")


def test_the_command_teaches_to_read(tmp_path):
    from modelmix_lab.cli import main

    path = tmp_path / "prior.npz"
    numbers = {"--steps": "1", "--batch": "4", "--images": "8", "--width": "1", "--of": "characters"}
    with pytest.raises(SystemExit) as ended:
        main(["prior", "--out", str(path), "--device", "cpu", *(w for pair in numbers.items() for w in pair)])
    assert ended.value.code == 0
    assert Prior.load(path).config.of == "characters"

"""Priors from synthetic images: the images, the loss, the file, and what private training makes of it."""

from __future__ import annotations

import json

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from nested import recipe_of

from modelmix.data.dataset import from_arrays
from modelmix.errors import ModelMixError
from modelmix.features import cached
from modelmix.features.leaves import dead_leaves
from modelmix.models.residual import ResNet20, WideResNet16
from modelmix_lab.features.frozen import Frozen
from modelmix_lab.features.prior import PriorConfig, contrast, train_prior
from modelmix_lab.features.views import views
from modelmix_lab.features.weights import Prior, save
from modelmix_lab.synthetic.synthetic import objects, synthetic
from modelmix_lab.synthetic.textures import paint_textures

CONFIG = PriorConfig(images=24, steps=2, batch=8, width=1)


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    torch.manual_seed(0)
    path = tmp_path_factory.mktemp("prior") / "prior.npz"
    save(WideResNet16(width=1), CONFIG, path)
    return path


def leaves(count: int = 16, seed: int = 0, side: int = 32):
    return dead_leaves(count, side, torch.Generator("cpu").manual_seed(seed))


FAMILIES = pytest.mark.parametrize("family", [dead_leaves, paint_textures, objects, synthetic])


def made(family, count: int = 16, seed: int = 0, side: int = 32):
    return family(count, side, torch.Generator("cpu").manual_seed(seed))


@FAMILIES
def test_images_are_repeatable_and_all_different(family):
    a, b, c = made(family), made(family), made(family, seed=1)
    assert a.shape == (16, 3, 32, 32)
    assert a.dtype == torch.uint8
    assert torch.equal(a, b)
    assert not torch.equal(a, c)
    assert len({bytes(image.numpy().tobytes()) for image in a}) == 16


@FAMILIES
def test_neighbouring_pixels_are_alike_as_in_photographs(family):
    x = made(family, 64).float()
    x = x - x.mean((2, 3), keepdim=True)
    near = float((x[..., 1:] * x[..., :-1]).mean() / x.square().mean())
    far = float((x[..., 12:] * x[..., :-12]).mean() / x.square().mean())
    assert near > 0.7
    assert far < near - 0.2


@pytest.mark.parametrize("count", [1, 2, 3, 7])
def test_any_number_of_images_can_be_made(count):
    assert len(made(synthetic, count)) == count


def test_views_are_pixels_of_the_range_that_networks_take():
    g = torch.Generator("cpu").manual_seed(0)
    images = leaves(side=48)
    a, b = views(images, g), views(images, g)
    assert a.shape == (16, 3, 32, 32)
    assert a.dtype == torch.float32
    assert -2 <= float(a.min()) <= float(a.max()) <= 2
    assert not torch.equal(a, b)


def test_the_contrastive_loss_by_hand():
    torch.manual_seed(0)
    a, b = torch.randn(3, 4), torch.randn(3, 4)
    z = F.normalize(torch.cat([a, b]), dim=1)
    wanted = 0.0
    for i in range(6):
        others = torch.stack([z[i] @ z[j] / 0.5 for j in range(6) if j != i])
        wanted += float(torch.logsumexp(others, 0) - z[i] @ z[(i + 3) % 6] / 0.5) / 6
    assert float(contrast(a, b, 0.5)) == pytest.approx(wanted, rel=1e-5)
    assert contrast(a, a, 0.5) < contrast(a, b, 0.5)


def test_training_on_scenes_changes_all_weights_but_the_head_and_is_repeatable():
    heard = []
    networks = [train_prior(CONFIG, torch.device("cpu"), lambda *progress: heard.append(progress)) for _ in range(2)]
    assert [step for step, _ in heard[: len(heard) // 2]] == [1, 2]
    for (name, a), (_, b) in zip(networks[0].named_parameters(), networks[1].named_parameters(), strict=True):
        assert torch.equal(a, b), name
        assert bool((a == 0).all()) == name.startswith("head.")


@pytest.mark.parametrize("name", ["steps", "images", "width", "lr", "temperature", "batch"])
def test_nonsense_is_refused(name):
    with pytest.raises(ModelMixError, match=name):
        PriorConfig(**{name: 0})


def test_a_prior_comes_back_from_its_file(file):
    prior = Prior.load(file)
    assert prior.config == CONFIG
    torch.manual_seed(0)
    for name, value in WideResNet16(width=1).named_parameters():
        if name.startswith("head."):
            assert name not in prior.weights
        else:
            torch.testing.assert_close(prior.weights[name], value.detach(), rtol=1e-3, atol=1e-6)
    with pytest.raises(ModelMixError, match="another network"):
        prior.start(ResNet20())
    with pytest.raises(ModelMixError, match="another network"):
        prior.start(WideResNet16(width=2))


@pytest.mark.parametrize("content", [b"", b"PK not a zip", b"\x93NUMPY"])
def test_what_is_no_prior_is_refused_in_one_line(tmp_path, content):
    path = tmp_path / "x.npz"
    with pytest.raises(ModelMixError, match="there is no prior"):
        Prior.load(path)
    path.write_bytes(content)
    with pytest.raises(ModelMixError, match="is not a prior"):
        Prior.load(path)


def test_frozen_features_are_each_image_s_own(file, tmp_path):
    prior, images = Prior.load(file), leaves(5)
    transform = Frozen(prior, "cpu")
    found = cached(transform, images, folder=tmp_path)
    assert found.shape == transform.shape(images) == (5, 384)
    torch.testing.assert_close(found.norm(dim=1), torch.ones(5))
    torch.testing.assert_close(next(transform.batches(images[3:4]))[0], found[3], rtol=1e-4, atol=1e-5)
    grey = next(transform.batches(images[:2, :1]))
    assert grey.shape == (2, 384)
    with pytest.raises(ModelMixError, match="uint8"):
        transform.shape(images.float())
    with pytest.raises(ModelMixError, match="16 pixels"):
        transform.shape(images[..., :8])


def data():
    images, labels = leaves(24).numpy(), (torch.arange(24) % 3).numpy()
    arrays = {"x_train": images, "y_train": labels, "x_test": images[:6], "y_test": labels[:6]}
    return from_arrays("leaves", arrays, 3)


@pytest.mark.parametrize("features", ["prior", None])
def test_private_training_from_a_prior(file, tmp_path, monkeypatch, features):
    monkeypatch.setenv("MODELMIX_CACHE", str(tmp_path))
    # The registry knows the WRN-16 of width 4; this one is small.
    model = "linear" if features else f"{__name__}:small"
    recipe = recipe_of(
        model=model,
        mechanism="plain",
        noise_multiplier=2.0,
        steps=2,
        batch=6,
        features=features,
        prior=str(file),
        seed=1,
    )
    trainer = recipe.trainer(data())
    if features is None:
        start = dict(trainer.model.named_parameters())["network.conv.weight"]
        torch.testing.assert_close(start.detach().cpu(), Prior.load(file).weights["conv.weight"])
    trainer.run(2, progress=False)
    assert trainer.step == 2
    assert len(trainer.ledger.phases) == 1  # weights that saw no one's data cost nothing


def test_the_file_of_a_prior_names_its_features(file, tmp_path, monkeypatch):
    monkeypatch.setenv("MODELMIX_CACHE", str(tmp_path))
    settings = {"model": "linear", "mechanism": "plain", "noise_multiplier": 2.0, "batch": 6, "seed": 1}
    recipes = recipe_of(features="prior", prior=str(file), **settings), recipe_of(features=str(file), **settings)
    a, b = (recipe.trainer(data())._task.source.inputs for recipe in recipes)
    assert torch.equal(a, b)


def small(shape, classes):
    return WideResNet16(shape[0], classes, width=1)


def test_recipes_say_what_is_missing():
    with pytest.raises(ModelMixError, match=r"needs features\.prior"):
        recipe_of(noise_multiplier=1.0, batch=1, mixing_width=1.0, features="prior")
    with pytest.raises(ModelMixError, match=r'features\.prior is for kind = "prior" or'):
        recipe_of(noise_multiplier=1.0, batch=1, mixing_width=1.0, features="scatter", prior="x.npz")
    with pytest.raises(ModelMixError, match="normalise"):
        recipe_of(noise_multiplier=1.0, batch=1, mixing_width=1.0, features="prior", prior="x", normalise="group")


def test_the_command_writes_a_prior_and_says_so(tmp_path, capsys):
    from modelmix_lab.cli import main

    path = tmp_path / "prior.npz"
    numbers = {"--steps": "1", "--batch": "4", "--images": "8", "--width": "1"}
    with pytest.raises(SystemExit) as ended:
        main(["prior", "--out", str(path), "--device", "cpu", "--json", *(w for pair in numbers.items() for w in pair)])
    assert ended.value.code == 0
    assert json.loads(capsys.readouterr().out)["file"] == str(path)
    assert Prior.load(path).config.steps == 1


@pytest.mark.parametrize(
    ("out", "why"), [("there.npz", "is there already"), ("no/there.npz", "has no folder to lie in")]
)
def test_a_place_that_will_not_do_is_refused_before_anything_is_learned(tmp_path, capsys, out, why):
    from modelmix_lab.cli import main

    (tmp_path / "there.npz").write_bytes(b"something")
    with pytest.raises(SystemExit) as ended:
        main(["prior", "--out", str(tmp_path / out), "--device", "cpu"])
    assert ended.value.code == 2
    assert f"{why}: choose another --out" in capsys.readouterr().err

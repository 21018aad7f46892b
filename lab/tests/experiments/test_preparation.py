"""Recipes on features: what is trained on, what it costs, and that a resumed run does not pay twice."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest
import torch
from nested import places, recipe_of

import modelmix as mm
from modelmix.accounting.ledger import Ledger
from modelmix.config import feature_spec
from modelmix.config.preparation import prepare
from modelmix.data import DataSet, Split
from modelmix.errors import ModelMixError
from modelmix.features import pretrained
from modelmix.features.extractor import Extractor
from modelmix.training import Performance
from modelmix_lab.features.normalisation import group_normalise
from modelmix_lab.features.scattering import Scattering

BASE = {
    "data": "none",
    "model": "scatter-cnn",
    "features": "scatter",
    "epsilon": 100.0,
    "steps": 4,
    "batch": 12,
    "mixing_width": 2.0,
    "lr": 0.1,
    "seed": 1,
}
PRIVATE = {**BASE, "normalise": "private", "mean_clip": 2.0, "square_clip": 4.0}
CPU = Performance(device="cpu")


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("MODELMIX_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def data():
    torch.manual_seed(0)

    def split(n):
        return Split(torch.randint(0, 256, (n, 1, 28, 28), dtype=torch.uint8), torch.randint(0, 10, (n,)))

    return DataSet("noise", split(40), split(8), tuple("0123456789"))


def test_group_normalised_features_are_free(data):
    trainer = recipe_of(**BASE, normalise="group").trainer(data, performance=CPU)
    assert trainer.ledger.phases == ()
    torch.testing.assert_close(trainer._task.source.inputs, group_normalise(Scattering(device="cpu")(data.train.x)))
    trainer.run(4, progress=False)
    assert trainer.epsilon(1e-5) == pytest.approx(100.0, rel=1e-3)


def test_private_moments_and_training_spend_epsilon_together(data):
    recipe = recipe_of(**PRIVATE)
    trainer = recipe.trainer(data, performance=CPU)
    assert trainer.epsilon(1e-5) == pytest.approx(0.6340, abs=1e-4)  # two releases of multiplier 8
    trainer.run(4, progress=False)
    assert 99.9 < trainer.epsilon(1e-5) <= 100.0
    assert trainer.ledger == replace(recipe.whole(40), seeded=True)
    cheaper = recipe_of(**BASE, normalise="group").plan(40).phases[0].mechanism.noise_multiplier
    assert trainer.mechanism_at(1).noise_multiplier > cheaper


def test_a_resumed_run_uses_the_moments_it_released(data, tmp_path):
    recipe = recipe_of(**{**PRIVATE, "seed": None})
    first = recipe.trainer(data, folder=tmp_path / "run", performance=CPU)
    first.run(2, progress=False)
    again = recipe.trainer(data, folder=tmp_path / "run", resume=True, performance=CPU)
    assert torch.equal(again._task.source.inputs, first._task.source.inputs)
    again.run(2, progress=False)
    assert again.ledger == recipe.whole(40) == Ledger.load(tmp_path / "run" / "ledger.json")
    config = tmp_path / "run" / "config.json"
    spoiled = json.loads(config.read_text())
    spoiled["normalisation"]["mean"] = "many"
    config.write_text(json.dumps(spoiled))
    with pytest.raises(ModelMixError, match="restore the file"):
        recipe.trainer(data, folder=tmp_path / "run", resume=True, performance=CPU)


def test_moments_that_cost_more_than_there_is_are_refused_before_they_are_released():
    with pytest.raises(
        ModelMixError, match=r"costs epsilon 0.634 and the target is 0.5: raise features.normalise_noise"
    ):
        recipe_of(**{**PRIVATE, "epsilon": 0.5}).plan(40)
    assert mm.epsilon(recipe_of(**{**PRIVATE, "epsilon": 0.5, "normalise_noise": 30.0}).whole(40), 1e-5) <= 0.5


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"features": "sift"}, "features.kind = 'sift' is unknown: choose scatter"),
        ({"normalise": "batch"}, "normalise = 'batch' is unknown"),
        ({"features": None, "normalise": "group"}, "object missing required field `kind`"),
        ({"features": "patches", "normalise": "group"}, "normalise = 'group' is for features"),
        ({"features": None, "normalise": "scenes", "components": 4}, "missing required field `kind`"),
        ({"normalise": "scenes"}, "normalise = 'scenes' needs features.components"),
        ({"components": 4}, "components is for normalise = scenes, silhouettes"),
        ({"normalise": "scenes", "components": 0}, "components = 0"),
        ({"features": "patches+prior"}, "needs features.prior: synthetic, characters, or a file"),
        ({"prior": "synthetic"}, 'features.prior is for kind = "prior" or kind = "patches'),
        ({"mirror": False}, "features.mirror is for features of patches, priors and networks"),
        ({"normalise": "public", "components": 4}, "data.public is for .*: give it"),
        ({"normalise": "public", "public": "p.npz"}, "normalise = 'public' needs features.components"),
        ({"public": "p.npz"}, "data.public is for .*: leave it out"),
        (
            {"normalise": "public", "components": 4, "public": "p.npz", "basis": 3},
            "basis and groups are of embedded gradients",
        ),
        ({"normalise": "private", "mean_clip": 1.0}, "needs mean_clip and square_clip"),
        ({"normalise": "group", "mean_clip": 1.0}, "nothing else takes them"),
        ({"normalise": "private", "mean_clip": -1.0, "square_clip": 1.0}, "mean_clip = -1"),
        ({"normalise_noise": 0}, "normalise_noise = 0"),
    ],
)
def test_recipes_that_make_no_sense(change, message):
    with pytest.raises(ModelMixError, match=message):
        recipe_of(**{**BASE, **change})


def test_features_of_another_shape_are_refused(data):
    with pytest.raises(ModelMixError, match="takes features 243 x 8 x 8 or 81 x 7 x 7"):
        recipe_of(**{**BASE, "features": None}).trainer(data, performance=CPU)


def test_public_images_whiten_features_and_cost_nothing(data, tmp_path):
    x = torch.randint(0, 256, (20, *data.shape), dtype=torch.uint8, generator=torch.Generator().manual_seed(3))
    np.savez(tmp_path / "public.npz", x=x.numpy())
    recipe = recipe_of(**{**BASE, "model": "linear"}, normalise="public", public="public.npz", components=7)
    prepared = prepare(recipe, data, torch.device("cpu"), data_dir=tmp_path)
    assert prepared.data.train.x.shape == (40, 7)
    assert prepared.embedding is None
    assert prepared.spent == Ledger()
    np.savez(tmp_path / "public.npz", x=x.numpy()[:, :, :-1])
    with pytest.raises(ModelMixError, match="and the private ones"):
        prepare(recipe, data, torch.device("cpu"), data_dir=tmp_path)


@pytest.mark.parametrize("mirror", [True, None])
def test_several_networks_stand_beside_each_other(data, tmp_path, monkeypatch, mirror):
    """Each is asked once for every image, whatever whitens them, and has an equal share of what is whitened."""
    asked = []

    def small(name, device, *, size, unit_length):
        power = int(name[-1]) + 1

        def function(images):
            asked.append((name, len(images)))
            return images.flatten(1)[:, : 4 + power].float() ** power

        return Extractor(name, name, function, {"power": power}, unit_length)

    monkeypatch.setattr(pretrained, "pretrained", small)
    both = "efficientnet-lite1+efficientnet-lite2"
    recipe = recipe_of(**{**BASE, "features": both, "model": "linear"}, mirror=mirror)
    plain = prepare(recipe, data, torch.device("cpu")).data
    assert plain.train.x.shape == (40, 6 + 7)
    asked.clear()
    alone = prepare(recipe.changed(places({"features": "efficientnet-lite1"})), data, torch.device("cpu")).data
    assert max(count for _, count in asked) < 20  # a network that stood beside another is not asked again
    assert torch.equal(plain.train.x[:, :6], alone.train.x)
    x = torch.randint(0, 256, (20, *data.shape), dtype=torch.uint8, generator=torch.Generator().manual_seed(3))
    np.savez(tmp_path / "public.npz", x=x.numpy())
    white = recipe.changed(places({"normalise": "public", "public": "public.npz", "components": 7}))
    assert prepare(white, data, torch.device("cpu"), data_dir=tmp_path).data.test.x.shape[1] == 7
    asked.clear()
    other = white.changed(places({"components": 5}))
    assert prepare(other, data, torch.device("cpu"), data_dir=tmp_path).data.test.x.shape[1] == 5
    assert max(count for _, count in asked) < 20  # nobody is asked for all images again: caches know them
    transform = feature_spec.transform(white.features, torch.device("cpu"), x)
    assert transform.transform.blocks == (6, 7)
    assert not feature_spec.transform(recipe.features, torch.device("cpu")).lasting  # caches of each are of all images


def test_a_recipe_that_says_what_is_meant_anyhow_is_the_same_recipe():
    plain = recipe_of(**{**BASE, "features": None, "model": "cnn"})
    assert plain.changed(places({"features": "patches", "mirror": True})) == plain.changed(
        places({"features": "patches"})
    )
    assert plain.changed(places({"features": "patches", "mirror": False})) != plain.changed(
        places({"features": "patches"})
    )
    assert plain.changed(places({"features": "efficientnet-lite0", "mirror": False})) == plain.changed(
        places({"features": "efficientnet-lite0"})
    )
    assert plain.changed(places({"features": "efficientnet-lite0"})).features.mirror is None
    assert plain.changed(places({"features": "efficientnet-lite0", "mirror": True})).features.mirror is True

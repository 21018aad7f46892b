"""Features that no real image taught: patches, whitening by synthetic images, and what training makes of them."""

from __future__ import annotations

import pytest
import torch
from nested import recipe_of

from modelmix.config import feature_spec
from modelmix.config.preparation import prepare
from modelmix.data.dataset import from_arrays
from modelmix.errors import ModelMixError
from modelmix.features import pretrained, whitening
from modelmix.features.joined import Joined, _in_rows_of
from modelmix.features.whitening import LENGTH, Logarithm, Root, Whitened
from modelmix_lab.features import patches
from modelmix_lab.features.frozen import Frozen
from modelmix_lab.features.patches import Patches
from modelmix_lab.features.scattering import Scattering
from modelmix_lab.features.weights import Prior
from modelmix_lab.synthetic.silhouettes import silhouettes
from modelmix_lab.synthetic.synthetic import synthetic


@pytest.fixture(autouse=True)
def small(monkeypatch, tmp_path):
    """Few synthetic images and filters: whatever holds does not depend on their number."""
    monkeypatch.setenv("MODELMIX_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(patches, "_SOURCES", 32)
    monkeypatch.setattr(patches, "_CUT", 1200)
    monkeypatch.setattr(patches, "_SINGLE", ((24, 5, 1), (12, 8, 2)))
    monkeypatch.setattr(patches, "_FIRST", (16, 3, 1))
    monkeypatch.setattr(patches, "_SECOND", 30)
    monkeypatch.setattr(whitening, "_COUNT", 48)


def images(count: int = 12, seed: int = 3, side: int = 32):
    return synthetic(count, side, torch.Generator("cpu").manual_seed(seed))


def own(*tensors):
    names = ("x_train", "y_train", "x_test", "y_test")
    return from_arrays("own", {name: t.numpy() for name, t in zip(names, tensors, strict=True)}, test_public=True)


def features(transform, x):
    return torch.cat(list(transform.batches(x)))


def test_the_number_of_patches_is_what_the_documentation_says(monkeypatch):
    monkeypatch.undo()
    assert Patches("cpu").shape(images(1)) == (1, 13_248)


@pytest.mark.parametrize("mirror", [True, False])
def test_patches_of_an_image_depend_on_that_image_alone(mirror):
    transform, x = Patches("cpu", mirror), images()
    found = features(transform, x)
    assert found.shape == transform.shape(x) == (12, 18 * (24 + 12 + 30))
    assert transform.blocks == (18 * 24, 18 * 12, 18 * 30)
    assert bool((found >= 0).all())
    torch.testing.assert_close(features(transform, x[5:6]), found[5:6], rtol=1e-4, atol=1e-6)


def test_mirrored_images_have_the_same_patches_unless_they_should_not():
    x = images(4)
    for transform, same in ((Patches("cpu"), True), (Patches("cpu", False), False)):
        a, b = features(transform, x), features(transform, x.flip(3))
        assert torch.allclose(a, b, rtol=1e-4, atol=1e-5) == same


def test_patches_are_the_same_in_every_process():
    a, b, c = (features(Patches("cpu", seed=seed), images(2)) for seed in (0, 0, 1))
    assert torch.equal(a, b)
    assert not torch.equal(a, c)


@pytest.mark.parametrize(
    "wrong", [torch.zeros(2, 3, 28, 28, dtype=torch.uint8), torch.zeros(0, 3, 32, 32, dtype=torch.uint8)]
)
def test_images_without_patches_are_refused(wrong):
    with pytest.raises(ModelMixError, match="patches are compared in images of 32 x 32"):
        Patches("cpu").shape(wrong)


def test_whitened_synthetic_images_vary_alike_in_all_directions(monkeypatch):
    monkeypatch.setattr(whitening, "_RIDGE", 0.0)
    inner = Logarithm(Scattering(device="cpu"))
    seen = features(inner, synthetic(48, 32, torch.Generator("cpu").manual_seed(0)))
    mean, rows = Whitened(inner, "scenes", 20)._directions(images(1))
    white = (seen - mean) @ rows.T
    covariance = white.T @ white / 48
    torch.testing.assert_close(covariance, torch.eye(20), rtol=1e-3, atol=1e-3)


def test_whitened_public_images_vary_alike_in_all_directions(monkeypatch):
    monkeypatch.setattr(whitening, "_PUBLIC_RIDGE", 0.0)
    inner, public = Logarithm(Scattering(device="cpu")), images(30)
    mean, rows = Whitened(inner, public, 20)._directions(images(1))
    white = (features(inner, public) - mean) @ rows.T
    torch.testing.assert_close(white.T @ white / 30, torch.eye(20), rtol=1e-3, atol=1e-3)


def test_roots_keep_signs_and_do_not_look_at_other_images():
    class Signed:
        name, version, parameters = "signed", 1, {"of": "pixels"}

        def shape(self, x):
            return tuple(x.shape)

        def batches(self, x):
            yield from torch.split(x.float() - 100, 5)

    x = images(8)
    found = features(Root(Signed()), x)
    assert found.shape == Root(Signed()).shape(x) == (8, 3 * 32 * 32)
    torch.testing.assert_close(found * found.abs(), x.float().flatten(1) - 100)
    assert Root(Signed()).name == "root-signed"
    assert Root(Signed()).parameters == {"of": ["signed", 1, {"of": "pixels"}]}


def test_images_that_do_not_vary_cannot_whiten():
    with pytest.raises(ModelMixError, match="do not vary: give images that differ"):
        features(Whitened(Scattering(device="cpu"), torch.full((9, 3, 32, 32), 7, dtype=torch.uint8), 4), images(2))


def test_what_whitens_is_part_of_the_name_of_a_cache():
    inner, public = Scattering(device="cpu"), images(6)
    other = public.clone()
    other[0, 0, 0, 0] ^= 1
    found = [str(Whitened(inner, by, 5).parameters) for by in ("scenes", "silhouettes", public, other)]
    assert len(set(found)) == 4
    assert str(Whitened(inner, public.clone(), 5).parameters) == found[2]
    with pytest.raises(
        ModelMixError, match="components = 6 is more than 6 images with 15552 features tell apart: give 5"
    ):
        Whitened(inner, public, 6).shape(public)


def test_whitening_looks_at_one_image_at_a_time_and_gives_all_the_same_length():
    transform, x = Whitened(Logarithm(Scattering(device="cpu")), "scenes", 10), images()
    found = features(transform, x)
    assert found.shape == transform.shape(x) == (12, 10)
    torch.testing.assert_close(found.norm(dim=1), torch.full((12,), LENGTH))
    # Signs and order of directions may differ between two computations; products of images may not.
    again = features(transform, x[:6])
    torch.testing.assert_close(again @ again.T, (found @ found.T)[:6, :6], rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("size", [(72, 80), (28, 36)])
def test_images_of_any_size_are_whitened_by_images_of_that_size(size):
    x = torch.randint(0, 256, (3, 1, *size), dtype=torch.uint8, generator=torch.Generator("cpu").manual_seed(0))
    found = features(Whitened(Logarithm(Scattering(device="cpu")), "scenes", 5), x)
    assert found.shape == (3, 5)
    assert bool(found.isfinite().all())


def test_blocks_of_joined_features_have_equal_shares():
    joined = Joined((Patches("cpu"), Frozen(Prior.load("synthetic"), "cpu")))
    assert joined.blocks == (432, 216, 540, 1536)
    x = images(3)
    assert joined.shape(x) == (3, 1188 + 1536)
    found = features(joined, x)
    torch.testing.assert_close(found[:, 1188:], features(joined.transforms[1], x), rtol=1e-4, atol=1e-6)
    whitened = features(Whitened(joined, "scenes", 40), x)
    assert bool(whitened.isfinite().all())


@pytest.mark.parametrize("sizes", [[3, 4, 5], [12], [1] * 12, [4, 4, 4], []])
def test_rows_are_the_same_however_many_come_at_a_time(sizes):
    rows = torch.arange(24.0).reshape(12, 2)[: sum(sizes)]
    found = list(_in_rows_of(4, torch.split(rows, sizes)))
    assert [len(part) for part in found] == [4] * (len(rows) // 4)
    assert not sizes or torch.equal(torch.cat(found), rows)
    assert [len(part) for part in _in_rows_of(5, torch.split(rows, sizes))] == ([5, 5, 2] if sizes else [])


def test_more_components_than_there_are_is_refused():
    with pytest.raises(ModelMixError, match=r"more than 48 images with \d+ features tell apart: give 47"):
        Whitened(Scattering(device="cpu"), "scenes", 48).shape(images())
    with pytest.raises(
        ModelMixError, match="there are no synthetic 'photographs': choose scenes or silhouettes or characters"
    ):
        Whitened(Scattering(device="cpu"), "photographs", 4)


def test_names_that_are_checked_without_torch_are_those_that_exist():
    assert set(whitening.IMAGES) == set(feature_spec.whitenings()) - {"public"}
    assert set(pretrained._NETWORKS) == set(feature_spec.PRETRAINED)


def test_silhouettes_are_one_thing_on_black_that_fills_the_image():
    x = silhouettes(32, 28, torch.Generator("cpu").manual_seed(0))
    assert x.shape == (32, 3, 28, 28)
    assert torch.equal(x[:, 0], x[:, 2])
    lit = x[:, 0] > 0
    assert 0.1 < float(lit.float().mean()) < 0.9
    for thing in lit:
        rows, columns = (torch.nonzero(thing.any(dim)).flatten() for dim in (1, 0))
        assert max(int(rows[-1] - rows[0]), int(columns[-1] - columns[0])) >= 25


@pytest.mark.parametrize(
    ("colours", "normalise", "kind"),
    [(1, "silhouettes", "scatter"), (3, "scenes", "patches"), (3, "scenes", "patches+prior"), (3, "scenes", "prior")],
)
def test_a_recipe_trains_on_whitened_features_for_free(colours, normalise, kind):
    y = torch.arange(24) % 2
    data = own(images(24)[:, :colours], y, images(6, 8)[:, :colours], torch.arange(6) % 2)
    recipe = recipe_of(
        data="own",
        features=kind,
        prior="synthetic" if "prior" in kind else None,
        normalise=normalise,
        components=8,
        model="linear",
        mechanism="plain",
        noise_multiplier=2.0,
        sample_rate=1.0,
        steps=2,
        seed=1,
    )
    prepared = prepare(recipe, data, torch.device("cpu"))
    assert not prepared.spent.phases
    assert (prepared.data.train.x.shape, prepared.data.test.x.shape) == ((24, 8), (6, 8))
    trainer = recipe.trainer(prepared)
    trainer.run(2)
    assert [phase.mechanism.noise_multiplier for phase in trainer.ledger.phases] == [2.0]
    assert [phase.steps for phase in trainer.ledger.phases] == [2]


def test_train_and_test_images_are_whitened_in_one_call():
    """Directions found twice may differ: the same image must have the same features in both parts."""
    x = images(8)
    data = own(x, torch.arange(8) % 2, x[:4], torch.arange(4) % 2)
    recipe = recipe_of(
        data="own", features="scatter", normalise="scenes", components=6, model="linear", mechanism="plain",
        noise_multiplier=1.0, sample_rate=1.0,
    )  # fmt: skip
    prepared = prepare(recipe, data, torch.device("cpu"))
    assert torch.equal(prepared.data.train.x[:4], prepared.data.test.x)

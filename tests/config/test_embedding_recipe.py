"""Recipes that embed gradients, with a few tiny public images: trained, kept, resumed, refused."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest
from nested import places, recipe_of

import modelmix as mm
from modelmix.config.recipe import Recipe
from modelmix.data.public import public_images
from modelmix.models import build
from modelmix.runs import page

SMALL = {
    "model": "linear", "steps": 3, "batch": 20, "clip": 0.4, "embedding_clip": 1.0, "basis": 6, "groups": 2, "lr": 0.1,
    "noise_multiplier": 1.0, "seed": 3, "public": "public.npz",
}  # fmt: skip


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    rng = np.random.default_rng(0)
    y = np.arange(90) % 3
    x = (rng.integers(0, 100, size=(90, 6, 6)) + 50 * y[:, None, None]).astype(np.uint8)
    np.savez(tmp_path / "data.npz", x_train=x[:60], y_train=y[:60], x_test=x[60:], y_test=y[60:])
    np.savez(tmp_path / "public.npz", x=rng.integers(0, 256, size=(12, 6, 6)).astype(np.uint8), y=np.full(12, 200))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def recipe(**changes):
    return recipe_of(**{"data": "data.npz", "classes": 3, **SMALL, **changes})


@pytest.mark.parametrize(
    ("mechanism", "more", "wanted"),
    [
        ("plain", {}, mm.EmbeddingMechanism(1.0, 20 / 60, clip_ratio=2.5)),
        ("average", {"p": 4}, mm.EmbeddingMechanism(1.0, 20 / 60, p=4, clip_ratio=2.5)),
        (
            "modelmix", {"tau_over_eta": 0.05, "p": 4},
            mm.EmbeddingMechanism(1.0, 20 / 60, 0.05 * 20 / 0.4, 4, clip_ratio=2.5),
        ),
    ],
)  # fmt: skip
def test_a_recipe_trains_what_its_ledger_says(run, folder, monkeypatch, mechanism, more, wanted):
    if mechanism != "modelmix":  # one page is enough: it takes longer than a run
        monkeypatch.setattr(page, "write_report", lambda folder: None)
    one = recipe(mechanism=mechanism, **more)
    (folder / "recipe.toml").write_text(one.as_toml())
    assert Recipe.load(folder / "recipe.toml") == one
    code, out, _ = run("train", "recipe.toml", "--out", "here", "--json")
    assert code == 0
    ledger = mm.Ledger.load("here/ledger.json")
    assert ledger == replace(one.plan(60).ledger, seeded=True)
    assert ledger.phases == mm.Ledger().add(wanted, 3).phases
    assert json.loads(out)["epsilon"] == pytest.approx(mm.epsilon(wanted, 1e-5, steps=3))
    assert json.loads((folder / "here/config.json").read_text())["settings"]["embedding"]["samples"] == 12
    assert run("verify", "here", "--claim", mm.epsilon(ledger, 1e-5))[0] == 0
    if mechanism == "modelmix":
        assert "gaussian, embedded 2.5" in (folder / "here/report.html").read_text()


def test_noise_is_calibrated_to_epsilon():
    plan = recipe(mechanism="modelmix", mixing_width=5.0).changed(places({"epsilon": 3.0})).plan(60)
    assert isinstance(plan.phases[0].mechanism, mm.EmbeddingMechanism)
    assert 2.99 < mm.epsilon(plan, 1e-5) <= 3.0


def test_the_authors_configuration_is_not_proved(run, folder, monkeypatch):
    monkeypatch.setattr(page, "write_report", lambda folder: None)
    one = recipe(mechanism="released", tau_over_eta=0.05, p=4, momentum=0.9, second_start=True)
    (folder / "recipe.toml").write_text(one.as_toml())
    code, out, _ = run("train", "recipe.toml", "--out", "here", "--json")
    assert code == 0
    assert json.loads(out)["epsilon"] is None
    assert json.loads(out)["proved"] is False


def test_public_images_come_by_path_or_from_the_data_directory(folder, monkeypatch):
    inside = folder / "inside"
    inside.mkdir()
    (folder / "public.npz").rename(inside / "public.npz")
    assert public_images("public.npz", (1, 6, 6), inside).shape == (12, 1, 6, 6)
    assert public_images(inside / "public.npz", (1, 6, 6)).shape == (12, 1, 6, 6)
    monkeypatch.setenv("MODELMIX_DATA", str(inside))
    assert public_images("public.npz", (1, 6, 6)).shape == (12, 1, 6, 6)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: recipe(mechanism="plain", embedding_clip=None), "basis and groups are of embedded gradients"),
        (lambda: recipe(mechanism="plain", public=None), "data.public is for privacy.embedding_clip"),
        (lambda: recipe(mechanism="plain", features="efficientnet-lite0"), "leave [features] out"),
        (lambda: recipe(mechanism="plain", embedding_clip=-1.0), "embedding_clip = -1"),
        (lambda: public_images("absent.npz", (1, 6, 6)), "no public images 'absent.npz'"),
        (lambda: public_images("public.npz", (3, 8, 8)), "the private ones (3, 8, 8)"),
        (lambda: public_images("data.npz", (1, 6, 6)), "not an .npz file with an array x"),
    ],
)
def test_refusals_are_one_line(make, message):
    with pytest.raises(mm.ModelMixError) as error:
        make()
    assert message in str(error.value)
    assert "\n" not in str(error.value)


def test_the_network_of_yu_et_al():
    model = build("resnet20-embedding", (3, 32, 32), 10)
    assert sum(p.numel() for p in model.parameters()) == 268_346
    assert {(m.num_groups, m.affine) for m in model.modules() if type(m).__name__ == "GroupNorm"} == {(4, False)}

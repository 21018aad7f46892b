"""Recipes: one content in two notations, nonsense refused in one line, plans that cost what they promise."""

from __future__ import annotations

from pathlib import Path
from typing import Literal, get_args, get_origin

import msgspec
import numpy as np
import pytest
import torch
from nested import nested, places

import modelmix as mm
from modelmix.config.feature_spec import FeaturesConfig
from modelmix.config.privacy import MECHANISMS, PrivacyConfig
from modelmix.config.recipe import DEFAULT, PLACES, TABLES, DataConfig, Recipe, RunConfig, place_of
from modelmix.config.tables import parts
from modelmix.data import from_arrays
from modelmix.features.inputs import SCALES
from modelmix.gradients import ENGINES
from modelmix.training.augment import AUGMENTATIONS
from modelmix.training.rules import PADDINGS

BASE = {"epsilon": 3.0, "batch": 40.0, "mixing_width": 2.0, "steps": 6, "model": "linear"}
N = 240

TOML = """
[data]
source = "data.npz"
augment = "flip"
multiplicity = 2

[model]
kind = "mlp"
second_start = true

[privacy]
kind = "alternating"
noise_multiplier = 1
delta = 1e-6
steps = 8
sample_rate = 0.25
clip = 2
tau = { 1 = 0.2, 5 = 1e-1 }
p = 4
padding = "paper"

[optimizer]
lr = { schedule = "cosine", start = 1.0, end = 0.1, steps = 6 }
momentum = 0.5
weight_decay = 1e-4
ema = 0.9

[run]
name = "twin"
evaluate_every = 2
seed = 7
"""


@pytest.fixture(autouse=True, scope="module")
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def of(**changes: object) -> Recipe:
    """The base with changes; a None takes a name out."""
    return Recipe.from_mapping(nested({**BASE, **changes}))


def load(folder, text: str) -> Recipe:
    path = folder / "recipe.toml"
    path.write_text(text, encoding="utf-8")
    return Recipe.load(path)


def images(n: int = 60):
    generator = torch.Generator().manual_seed(0)
    x = torch.randint(256, (n, 6, 6), generator=generator, dtype=torch.uint8).numpy()
    y = torch.arange(n).numpy() % 3
    return from_arrays("images", {"x_train": x, "y_train": y, "x_test": x[:9], "y_test": y[:9]}, 3)


# Notation.


def test_a_file_says_everything_that_is_run(tmp_path):
    recipe = load(tmp_path, TOML)
    assert recipe == of(
        data="data.npz", augment="flip", multiplicity=2, model="mlp", second_start=True, mechanism="alternating",
        epsilon=None, noise_multiplier=1.0, delta=1e-6, steps=8, batch=None, sample_rate=0.25, clip=2.0,
        mixing_width=None, tau={"1": 0.2, "5": 0.1}, p=4, padding="paper",
        lr={"schedule": "cosine", "start": 1.0, "end": 0.1, "steps": 6}, momentum=0.5, weight_decay=1e-4, ema=0.9,
        name="twin", evaluate_every=2, seed=7,
    )  # fmt: skip
    done = recipe.trainer(images()).run(8, evaluate_every=2)
    assert len(done.ledger.phases) > 1
    assert done.ledger.steps == 8


def test_the_default_recipe():
    recipe = Recipe.load(DEFAULT)
    assert (recipe.privacy.epsilon, recipe.privacy.delta, recipe.privacy.kind) == (3.0, 1e-5, "modelmix")


@pytest.mark.parametrize(
    "recipe",
    [
        of(),
        of(name='odd "name" [with] ünïcode \\ and\ttab', lr={"schedule": "linear", "start": 1e-7, "end": 2}),
        of(mixing_width={"1": 2.0, "4": 1.0}, second_start=True, delta=1e-17, seed=-3),
    ],
)
def test_a_written_recipe_reads_as_it_was(tmp_path, recipe):
    assert load(tmp_path, recipe.as_toml()) == recipe


def test_numbers_take_the_kind_of_their_field():
    recipe = of(steps=6.0, p=2.0, epsilon=3, clip=1, seed=5.0, evaluate_every=2.0)
    privacy, run = recipe.privacy, recipe.run
    found = (privacy.steps, privacy.p, privacy.epsilon, privacy.clip, run.seed, run.evaluate_every)
    assert [type(value) for value in found] == [int, int, float, float, int, int]
    assert recipe.plan(N).steps == 6


def test_tables_made_in_python_are_checked_as_well():
    with pytest.raises(mm.ModelMixError, match=r"privacy.steps = -1 is not allowed"):
        Recipe(privacy=PrivacyConfig(epsilon=1.0, batch=3, mixing_width=1.0, steps=-1))
    assert type(Recipe(privacy=PrivacyConfig(epsilon=1, batch=3, mixing_width=1)).privacy.epsilon) is float


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("epsilon = ", "cannot be read as TOML"),
        ("[privacy]\nepsilon = 1\nepsilon = 2", "cannot be read as TOML"),
        ("[privacy]\nepsilon = 3\nbatch = 4\nmixing_width = 2\nclip = 'wide'", "recipe.toml: privacy.clip = 'wide'"),
        ("privacy = 3", "a recipe has no table 'privacy'"),
        ("wombat = 3", "a recipe has no table 'wombat': choose one of data, features, model, privacy, optimizer, run"),
        ("[privacies]", "did you mean privacy?"),
        ("[features]\nunit_length = true", "[features] is not whole: object missing required field `kind`"),
    ],
)
def test_files_that_are_no_recipe(tmp_path, text, said):
    with pytest.raises(mm.ModelMixError) as error:
        load(tmp_path, text)
    assert said in str(error.value)
    assert "\n" not in str(error.value)


def test_a_recipe_without_tables_is_told_where_its_keys_are(tmp_path):
    flat = 'data = "d.npz"\nmechanism = "plain"\nprior = "p"\nlr = { schedule = "linear", start = 1.0, end = 0.1 }\n'
    with pytest.raises(mm.ModelMixError) as error:
        load(tmp_path, flat)
    said = str(error.value)
    assert said.endswith(
        "a recipe consists of tables now: write data.source for data, privacy.kind for mechanism, model.prior or "
        "features.prior for prior, optimizer.lr for lr."
    )
    every = {name for place in PLACES for name in [place.partition(".")[2]] if name != "kind"} - {"source", "size"}
    assert all(place_of(name) for name in every), "every key that a flat recipe had has a new place"


def test_files_that_cannot_be_read(tmp_path):
    (tmp_path / "binary.toml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(mm.ModelMixError, match="cannot be read as TOML"):
        Recipe.load(tmp_path / "binary.toml")
    with pytest.raises(mm.ModelMixError, match=r"cannot read .*nowhere.toml: No such file"):
        Recipe.load(tmp_path / "nowhere.toml")
    with pytest.raises(mm.ModelMixError, match="cannot read"):
        Recipe.load(tmp_path)


# Nonsense.

NONSENSE = {
    "unknown features": (
        {"features": "sift"},
        "efficientnet-lite0, efficientnet-lite1, efficientnet-lite2, several of these networks with + between, a file",
    ),
    "a network that is unknown": ({"features": "efficientnet-lite0+sift"}, "is unknown: choose "),
    "a network twice": ({"features": "efficientnet-lite0+efficientnet-lite0"}, "names a network twice"),
    "patches beside a network": ({"features": "patches+efficientnet-lite0"}, "is unknown: choose "),
    "no ledger": ({"spent": "missing.json"}, "missing.json"),
    "weights without a network": ({"features": "net.pth"}, "are weights without their network: give kind = "),
    "features that do not exist": ({"features": "no.such:thing"}, "cannot be imported: ModuleNotFoundError"),
    "weights without a function": (
        {"features": "efficientnet-lite0", "weights": "w.pt"},
        "weights is for package.module:function",
    ),
    "a size without a network": ({"features": "no.such:thing", "feature_size": 64}, "features.size is for pretrained"),
    "a size of nothing": ({"features": "x.onnx", "feature_size": 0}, "features.size = 0"),
    "scaled pixels without a network": (
        {"features": "efficientnet-lite0", "pixels": "unit"},
        "features.pixels is for an .onnx file",
    ),
    "unknown pixels": (
        {"features": "x.onnx", "pixels": "half"},
        "features.pixels = 'half' is not allowed: choose one of imagenet",
    ),
    "images of no size": ({"image_size": 0}, "image_size = 0"),
    "unit length of pixels": ({"unit_length": True}, "[features] is not whole: object missing required field `kind`"),
    "no prior": ({"prior": "missing.npz"}, "missing.npz"),
    "components of nothing": (
        {"features": "efficientnet-lite0", "components": 5},
        "features.components is for normalise = ",
    ),
    "mirrored pixels": ({"mirror": False}, "[features] is not whole"),
    "normalised by nothing": (
        {"features": "efficientnet-lite0", "normalise": "group"},
        "features.normalise = 'group' is ",
    ),
    "clips of no moments": (
        {"features": "efficientnet-lite0", "mean_clip": 1.0, "square_clip": 1.0},
        'normalise = "private" needs mean_clip and square_clip, and nothing else takes them',
    ),
    "moments without noise": (
        {"features": "efficientnet-lite0", "normalise_noise": 0},
        "features.normalise_noise = 0",
    ),
    "unknown, near": ({"privacy.epsilom": 3}, "a recipe has no privacy.epsilom: did you mean privacy.epsilon?"),
    "unknown, near two": ({"privacy.mixing_with": 3}, "did you mean privacy.mixing_width?"),
    "of another table": (
        {"privacy.momentum": 0.5},
        "did you mean optimizer.momentum?",
    ),
    "no population": ({"population": 0}, "privacy.population = 0 is not allowed"),
    "half a class": ({"classes": 2.5}, "data.classes = 2.5 is not allowed: expected `int"),
    "test set in words": ({"test_public": "yes"}, "data.test_public = 'yes' is not allowed: expected `bool`"),
    "unknown, far": ({"data.wombat": 3}, "a recipe has no data.wombat: choose one of data.source"),
    "text for a number": ({"epsilon": "3"}, "privacy.epsilon = '3' is not allowed: expected `float"),
    "number for a text": ({"name": 3}, "expected `str`"),
    "number for a truth": ({"second_start": 1}, "expected `bool`"),
    "truth for a number": ({"clip": True}, "privacy.clip = True is not allowed: expected `float`"),
    "truth for a count": ({"steps": True}, "expected `int"),
    "half for a count": ({"steps": 2.5}, "expected `int"),
    "infinite count": ({"steps": float("inf")}, "inf is not a finite number"),
    "undefined count": ({"p": float("nan")}, "nan is not a finite number"),
    "number past floats": ({"clip": 10**400}, "is not allowed: number out of range"),
    "list for a number": ({"lr": [1, 2]}, "expected `float | object`"),
    "table for a number": ({"clip": {"1": 2}}, "expected `float`"),
    "text for a schedule": ({"lr": "cosine"}, "expected `float | object`"),
    "half a seed": ({"seed": 1.5}, "expected `int"),
    "a huge seed": ({"seed": 2**63}, "expected `int` <="),
    "text for a seed": ({"seed": "1"}, "expected `int"),
    "unknown mechanism": ({"mechanism": "modelmux"}, "choose one of modelmix, modelmix-laplace"),
    "neither epsilon nor z": ({"epsilon": None}, "one of epsilon, noise_multiplier for modelmix: it has none"),
    "both epsilon and z": ({"noise_multiplier": 1.0}, "it has epsilon and noise_multiplier"),
    "neither batch nor rate": ({"batch": None}, "one of batch, sample_rate for modelmix: it has none"),
    "both batch and rate": ({"sample_rate": 0.1}, "it has batch and sample_rate"),
    "no mixing": ({"mixing_width": None}, "one of mixing_width, tau_over_eta, tau for modelmix: it has none"),
    "mixing twice": ({"tau": 0.1}, "it has mixing_width and tau"),
    "mixing thrice": ({"tau": 0.1, "tau_over_eta": 1.0}, "it has mixing_width and tau_over_eta and tau"),
    "mixing for plain": ({"mechanism": "plain"}, "plain does not mix: leave out"),
    "mixing for average": ({"mechanism": "average"}, "average does not mix: leave out"),
    "epsilon zero": ({"epsilon": 0}, "> 0"),
    "epsilon negative": ({"epsilon": -1}, "> 0"),
    "epsilon infinite": ({"epsilon": float("inf")}, "not a finite number"),
    "no noise": ({"epsilon": None, "noise_multiplier": 0.0}, "> 0"),
    "delta one": ({"delta": 1.0}, "< 1"),
    "delta undefined": ({"delta": float("nan")}, "not a finite number"),
    "no steps": ({"steps": 0}, ">= 1"),
    "steps negative": ({"steps": -5}, ">= 1"),
    "batch negative": ({"batch": -5}, "> 0"),
    "batch above n": ({"batch": 241}, "at most 1"),
    "rate above one": ({"batch": None, "sample_rate": 1.5}, "<= 1"),
    "rate zero": ({"batch": None, "sample_rate": 0.0}, "> 0"),
    "no clip": ({"clip": 0}, "> 0"),
    "p zero": ({"p": 0}, ">= 1"),
    "no copies": ({"multiplicity": 0}, ">= 1"),
    "never evaluated": ({"evaluate_every": 0}, ">= 1"),
    "negative width": ({"mixing_width": -1.0}, "greater than 0"),
    "learning rate zero": ({"lr": 0.0}, "greater than 0"),
    "schedule from step 2": ({"lr": {"2": 0.1}}, "lr: a schedule begins at step 1"),
    "schedule of nothing": ({"lr": {}}, "lr: a schedule begins at step 1"),
    "schedule with a negative": ({"lr": {"1": -0.1}}, "lr: value = -0.1 is not allowed"),
    "schedule with a text": ({"lr": {"1": "a"}}, "lr: value = 'a' is not a finite number"),
    "schedule by words": ({"lr": {"first": 0.1}}, "optimizer.lr is not a schedule: write a number"),
    "schedule by halves": ({"lr": {"1.5": 0.1}}, "lr is not a schedule"),
    "unknown schedule": ({"lr": {"schedule": "warmup", "start": 1.0, "end": 2.0}}, "lr is not a schedule"),
    "schedule of a list": ({"lr": {"schedule": []}}, "lr is not a schedule"),
    "half a schedule": ({"lr": {"schedule": "linear", "start": 1.0}}, "lr is not a schedule"),
    "schedule with more": ({"lr": {"schedule": "linear", "start": 1.0, "end": 0.1, "stop": 3}}, "is not a schedule"),
    "schedule to zero": ({"lr": {"schedule": "linear", "start": 1.0, "end": 0.0}}, "lr: value = 0 is not allowed"),
    "mixed schedule": ({"lr": {"schedule": "pieces", "1": 0.1, "end": 2}}, "lr is not a schedule"),
    "schedule for a width": ({"mixing_width": {"1": 0.0}}, "mixing_width: value = 0"),
    "momentum one": ({"momentum": 1.0}, "< 1"),
    "momentum negative": ({"momentum": -0.1}, ">= 0"),
    "ema one": ({"ema": 1.0}, "< 1"),
    "negative decay": ({"weight_decay": -1.0}, ">= 0"),
    "unknown padding": ({"padding": "none"}, "choose one of exact, paper"),
    "unknown augmentation": ({"augment": "blur"}, "choose one of flip, crop, flip-crop"),
    "copies without change": ({"multiplicity": 2}, "needs a function"),
    "unknown model": ({"model": "resnet"}, "cnn, linear, mlp"),
    "public images for nothing": ({"public": "x.npz"}, "data.public is for privacy.embedding_clip"),
    "embedding of nothing": ({"embedding_clip": 1.0}, "data.public is for privacy.embedding_clip"),
    "no public images": (
        {"embedding_clip": 1.0, "public": "missing.npz"},
        "there are no public images 'missing.npz'",
    ),
    "no basis": ({"embedding_clip": 1.0, "public": "x", "basis": 0}, ">= 1"),
    "no groups": ({"embedding_clip": 1.0, "public": "x", "groups": 0}, ">= 1"),
    "a basis of nothing": ({"basis": 3}, "basis and groups are of embedded gradients"),
    "no such device": ({"device": "abacus"}, "abacus"),
    "no such engine": ({"engine": "steam"}, "choose one of auto, hooks"),
    "no such precision": ({"precision": "float8"}, "choose one of float32, bfloat16"),
    "compiled in words": ({"compiled": "yes"}, "expected `bool"),
    "no chunk": ({"chunk": 0}, ">= 1"),
}


@pytest.mark.parametrize(("changes", "said"), NONSENSE.values(), ids=NONSENSE)
def test_nonsense_is_refused_in_one_line_before_anything_is_written(tmp_path, changes, said):
    data = images(N)
    with pytest.raises(mm.ModelMixError) as error:
        of(**changes).trainer(data, folder=tmp_path / "run")
    assert said in str(error.value)
    assert "\n" not in str(error.value)
    assert not (tmp_path / "run").exists()


def test_every_key_is_among_the_nonsense():
    met = {place for changes, _ in NONSENSE.values() for place in places(changes)} | {"model.prior", "features.prior"}
    assert set(PLACES) - met == {"data.source"}  # looked for when it is loaded


def test_closed_choices_are_those_that_exist():
    """They are written down twice, so that reading a recipe does not load torch."""
    choices = {
        (table, field.name): set(get_args(part))
        for table in TABLES.values()
        for field in msgspec.structs.fields(table)
        for part in parts(field.type)
        if get_origin(part) is Literal
    }
    assert choices == {
        (DataConfig, "augment"): set(AUGMENTATIONS),
        (FeaturesConfig, "pixels"): set(SCALES),
        (PrivacyConfig, "kind"): set(MECHANISMS),
        (PrivacyConfig, "padding"): set(PADDINGS),
        (RunConfig, "engine"): {"auto", *ENGINES},
        (RunConfig, "precision"): {"float32", "bfloat16"},
    }


def test_the_documentation_says_of_every_key_what_help_texts_say():
    text = (Path(__file__).parents[2] / "docs" / "training.md").read_text(encoding="utf-8")
    for title, table in TABLES.items():
        for field in msgspec.structs.fields(table):
            (meta,) = (part for part in parts(field.type) if isinstance(part, msgspec.Meta))
            assert f"| `{title}.{field.name}` | {meta.description} |" in text


def test_what_was_spent_before_counts_and_leaves_less_for_training(tmp_path):
    file = tmp_path / "spent.json"
    before = mm.Ledger().add(mm.Mechanism(20.0, 1.0), 1)
    before.save(file)
    alone, after = of(epsilon=2.0), of(epsilon=2.0, spent=str(file))
    least = [recipe.plan(60).phases[0].mechanism.noise_multiplier for recipe in (alone, after)]
    assert least[0] < least[1]
    trainer = after.trainer(images()).run(after.privacy.steps, progress=False)
    assert trainer.ledger.phases[0] == before.phases[0]
    assert 1.99 < trainer.epsilon(after.privacy.delta) <= 2.0
    mm.Ledger().add(mm.Mechanism(0.5, 1.0), 1).save(file)
    with pytest.raises(mm.ModelMixError, match="nothing is left"):
        after.trainer(images())


# Changes from the command line.


def test_a_change_pushes_out_its_alternative():
    assert of().changed(places({"noise_multiplier": 1.5})).privacy.epsilon is None
    assert of(epsilon=None, noise_multiplier=1.0).changed(places({"epsilon": 2.0})).privacy.noise_multiplier is None
    assert of().changed(places({"sample_rate": 0.1})).privacy.batch is None
    assert of().changed(places({"tau": 0.1})) == of(mixing_width=None, tau=0.1)
    assert of().changed(places({"mechanism": "plain"})) == of(mixing_width=None, mechanism="plain")
    assert of().changed({}) == of()


def test_a_change_that_says_two_things_is_refused():
    for changes in (
        {"mechanism": "plain", "mixing_width": 1.0},
        {"epsilon": 1.0, "noise_multiplier": 1.0},
        {"tau": 1.0, "mixing_width": 1.0},
        {"mechanism": "other"},
    ):
        with pytest.raises(mm.ModelMixError):
            of().changed(places(changes))
    with pytest.raises(mm.ModelMixError, match="needs one of mixing_width"):
        of(mixing_width=None, mechanism="plain").changed(places({"mechanism": "modelmix"}))


# Schedules and plans.


def test_schedules_are_what_they_say():
    linear = of(lr={"schedule": "linear", "start": 1.0, "end": 0.5}).schedule("optimizer.lr")
    assert [linear.at(k) for k in (1, 6, 99)] == [1.0, 0.5, 0.5]  # over the steps of the recipe
    cosine = of(lr={"schedule": "cosine", "start": 1.0, "end": 0.5, "steps": 3}).schedule("optimizer.lr")
    assert [cosine.at(k) for k in (1, 2, 3, 6)] == pytest.approx([1.0, 0.75, 0.5, 0.5])
    pieces = of(lr={"schedule": "pieces", "1": 1.0, "3": 0.1}).schedule("optimizer.lr")
    assert [pieces.at(k) for k in (1, 2, 3, 6)] == [1.0, 1.0, 0.1, 0.1]
    assert of(lr={"1": 1.0, "3": 0.1}).schedule("optimizer.lr") == pieces
    assert of(lr=0.3).schedule("optimizer.lr").at(5) == 0.3


HALVED = {"1": 0.5, "4": 0.25}
PLANS = {
    "width": {"mixing_width": 2.0},
    "width in phases": {"mixing_width": {"1": 4.0, "4": 1.0}},
    "width, rate falls": {"mixing_width": 2.0, "lr": {"schedule": "linear", "start": 0.5, "end": 0.1}},
    "tau over eta": {"tau_over_eta": 0.05},
    "tau over eta in phases": {"tau_over_eta": {"1": 0.1, "3": 0.05}},
    "tau": {"tau": 0.025, "lr": 0.5},
    "tau, rate halved": {"tau": 0.025, "lr": HALVED},
    "tau, rate falls": {"tau": 0.025, "lr": {"schedule": "cosine", "start": 0.5, "end": 0.1}},
    "tau follows the rate": {"tau": {"1": 0.02, "4": 0.01}, "lr": HALVED},
    "laplace": {"mechanism": "modelmix-laplace", "p": 4},
    "alternating": {"mechanism": "alternating", "p": 4},
    "plain": {"mechanism": "plain", "mixing_width": None},
    "average": {"mechanism": "average", "mixing_width": None},
    "small noise": {"epsilon": 40.0, "p": 4},
    "small epsilon": {"epsilon": 0.1},
    "other delta": {"delta": 1e-9},
    "small rate": {"batch": None, "sample_rate": 0.018, "steps": 200, "mixing_width": 5.0, "p": 10},  # z counts most
}


@pytest.mark.parametrize("name", PLANS)
def test_a_plan_costs_its_epsilon_and_hardly_less(name):
    changes = PLANS[name]
    recipe = of(**{"mixing_width": None, **changes} if "tau" in name else changes)
    plan = recipe.plan(N)
    spent = mm.epsilon(plan, recipe.privacy.delta)
    assert 0.999 * recipe.privacy.epsilon <= spent <= recipe.privacy.epsilon
    assert plan.steps == recipe.privacy.steps


def test_what_was_planned_is_what_is_run():
    """The ledger of the trainer is the plan, and the tau of every step is the one that was asked for."""
    for name in ("tau, rate falls", "tau, rate halved", "tau over eta in phases", "width, rate falls"):
        recipe = of(**{"mixing_width": None, **PLANS[name]} if "tau" in name else PLANS[name])
        trainer = recipe.trainer(images(N))
        plan = recipe.plan(N)
        trainer.run(recipe.privacy.steps)
        assert trainer.ledger.phases == plan.phases
        assert trainer.epsilon(recipe.privacy.delta) == mm.epsilon(plan, recipe.privacy.delta) <= recipe.privacy.epsilon
        for step in range(1, recipe.privacy.steps + 1):
            width, eta = trainer.mechanism_at(step).mixing_width, recipe.schedule("optimizer.lr").at(step)
            tau = width * recipe.privacy.clip * eta / recipe.privacy.batch
            if "rate falls" in name and recipe.privacy.tau is None:
                assert width == 2.0
            elif recipe.privacy.tau is not None:
                assert tau == pytest.approx(recipe.schedule("privacy.tau").at(step), rel=1e-12)
            else:
                assert tau / eta == pytest.approx(recipe.schedule("privacy.tau_over_eta").at(step), rel=1e-12)


def test_tau_with_a_falling_rate_is_accounted_in_phases():
    phases = of(mixing_width=None, tau=0.025, lr=HALVED).plan(N).phases
    assert [phase.steps for phase in phases] == [3, 3]
    assert [phase.mechanism.mixing_width for phase in phases] == pytest.approx([2.0, 4.0])  # tau / eta * batch / clip
    assert len(of(mixing_width=None, **PLANS["tau, rate falls"]).plan(N).phases) == 6
    assert len(of(mixing_width=None, **PLANS["tau follows the rate"]).plan(N).phases) == 1


def test_a_given_noise_is_taken_as_it_is():
    plan = of(epsilon=None, noise_multiplier=0.7).plan(N)
    assert plan.phases == mm.Ledger().add(mm.Mechanism(0.7, 40 / N, 2.0), 6).phases
    assert (plan.population, plan.adjacency) == (N, "zero-out")


def test_a_population_takes_the_place_of_the_number_of_samples():
    recipe = of(epsilon=None, noise_multiplier=0.7, population=400, mixing_width=None, tau=0.05)
    here, there = recipe.plan(N), recipe.plan(N + 1)
    assert here == there
    assert (here.population, here.adjacency, here.expected_batch(1)) == (400, "add-or-remove", 40)
    assert here.mechanism_at(1).sample_rate == 0.1


def test_what_was_spent_adds_up(tmp_path):
    files = [str(tmp_path / name) for name in ("a.json", "b.json")]
    for file, z in zip(files, (3.0, 4.0), strict=True):
        mm.Ledger().add(mm.Mechanism(z, 1.0), 1).save(file)
    assert [phase.mechanism.noise_multiplier for phase in of(spent=files).privacy.before().phases] == [3.0, 4.0]
    assert of(spent=files[:1]) == of(spent=files[0])


@pytest.mark.parametrize(
    ("mechanism", "embedded"),
    [*((name, False) for name in MECHANISMS), *((name, True) for name in ("plain", "modelmix", "average", "released"))],
)
def test_every_mechanism_trains(mechanism, embedded, tmp_path):
    law, rule, mixes = MECHANISMS[mechanism]
    more: dict[str, object] = {"mixing_width": 2.0 if mixes else None}
    if embedded:
        np.savez(tmp_path / "public.npz", x=images(12).train.x.numpy())
        more |= {"public": str(tmp_path / "public.npz"), "embedding_clip": 2.5}
    recipe = of(epsilon=None, noise_multiplier=1.0, mechanism=mechanism, **more)
    trainer = recipe.trainer(images(N)).run(6)
    (phase,) = trainer.ledger.phases
    assert (phase.mechanism.law, phase.mechanism.mixed, phase.steps) == (law, mixes, 6)
    assert isinstance(phase.mechanism, mm.EmbeddingMechanism) == embedded
    assert bool(trainer.ledger.unproved) == (rule == "released")


def test_an_own_seed_leaves_the_programs_generator_alone():
    torch.manual_seed(3)
    expected = torch.rand(2)
    torch.manual_seed(3)
    of(epsilon=None, noise_multiplier=1.0).trainer(images(N))
    assert torch.equal(torch.rand(2), expected)

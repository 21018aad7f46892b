"""Recipes: one content in two notations, nonsense refused in one line, plans that cost what they promise."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
import yaml

import modelmix as mm
from modelmix.config.recipe import DEFAULT, MECHANISMS, Recipe, read_mapping
from modelmix.data import from_arrays

BASE = {"epsilon": 3.0, "batch": 40.0, "mixing_width": 2.0, "steps": 6, "model": "linear"}
N = 240

TOML = """
name = "twin"
data = "data.npz"
model = "mlp"
mechanism = "alternating"
noise_multiplier = 1
delta = 1e-6
steps = 8
sample_rate = 0.25
clip = 2
lr = { schedule = "cosine", start = 1.0, end = 0.1, steps = 6 }
tau = { 1 = 0.2, 5 = 1e-1 }
p = 4
padding = "paper"
momentum = 0.5
weight_decay = 1e-4
ema = 0.9
augment = "flip"
multiplicity = 2
second_start = true
evaluate_every = 2
seed = 7
"""

YAML = """
name: twin
data: data.npz
model: mlp
mechanism: alternating
noise_multiplier: 1
delta: 1e-6
steps: 8
sample_rate: 0.25
clip: 2
lr: {schedule: cosine, start: 1.0, end: 0.1, steps: 6}
tau:
  1: 0.2
  5: 1e-1
p: 4
padding: paper
momentum: 0.5
weight_decay: 1e-4
ema: 0.9
augment: flip
multiplicity: 2
second_start: true
evaluate_every: 2
seed: 7
"""


@pytest.fixture(autouse=True, scope="module")
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def of(**changes: object) -> Recipe:
    """The base with changes; a None takes a name out."""
    return Recipe.from_mapping({k: v for k, v in {**BASE, **changes}.items() if v is not None})


def load(folder, suffix: str, text: str) -> Recipe:
    path = folder / f"recipe.{suffix}"
    path.write_text(text, encoding="utf-8")
    return Recipe.load(path)


def images(n: int = 60):
    generator = torch.Generator().manual_seed(0)
    x = torch.randint(256, (n, 6, 6), generator=generator, dtype=torch.uint8).numpy()
    y = torch.arange(n).numpy() % 3
    return from_arrays("images", {"x_train": x, "y_train": y, "x_test": x[:9], "y_test": y[:9]}, 3)


# Notation.


@pytest.mark.parametrize("suffix", ["yaml", "yml"])
def test_toml_and_yaml_are_the_same_run(tmp_path, suffix):
    first, second = load(tmp_path, "toml", TOML), load(tmp_path, suffix, YAML)
    assert first == second
    without = {"epsilon", "batch", "mixing_width", "tau_over_eta", "spent", "prior", "features", "normalise"}
    without |= {"mean_clip", "square_clip", "weights", "feature_size", "pixels", "image_size"}
    without |= {"public", "embedding_clip", "basis", "groups", "components", "mirror", "population", "classes"}
    assert set(first.as_dict()) == {f.name for f in dataclasses.fields(Recipe)} - without
    runs = [recipe.trainer(images()).run(8, evaluate_every=2) for recipe in (first, second)]
    assert runs[0].ledger == runs[1].ledger
    assert torch.equal(runs[0].state.last, runs[1].state.last)
    assert len(runs[0].ledger.phases) > 1


def test_the_default_recipe(tmp_path):
    recipe = Recipe.load(DEFAULT)
    assert (recipe.epsilon, recipe.delta, recipe.mechanism) == (3.0, 1e-5, "modelmix")
    data = read_mapping(DEFAULT)
    (tmp_path / "same.yaml").write_text(yaml.safe_dump(data))
    assert Recipe.load(tmp_path / "same.yaml") == recipe


@pytest.mark.parametrize(
    "recipe",
    [
        of(),
        of(name='odd "name" [with] ünïcode \\ and\ttab', lr={"schedule": "linear", "start": 1e-7, "end": 2}),
        of(mixing_width={"1": 2.0, "4": 1.0}, second_start=True, delta=1e-17, seed=-3),
    ],
)
def test_a_written_recipe_reads_as_it_was(tmp_path, recipe):
    assert load(tmp_path, "toml", recipe.as_toml()) == recipe


def test_numbers_take_the_kind_of_their_field():
    recipe = of(steps=6.0, p=2.0, epsilon=3, clip=1, seed=5.0, evaluate_every=2.0)
    found = (recipe.steps, recipe.p, recipe.epsilon, recipe.clip, recipe.seed, recipe.evaluate_every)
    assert [type(value) for value in found] == [int, int, float, float, int, int]
    assert recipe.plan(N).steps == 6


@pytest.mark.parametrize(
    ("suffix", "text", "said"),
    [
        ("toml", "epsilon = ", "cannot be read as toml"),
        ("toml", "epsilon = 1\nepsilon = 2", "cannot be read as toml"),
        ("yaml", "epsilon: [", "cannot be read as yaml"),
        ("yaml", "epsilon: 1\nbatch: 3\nepsilon: 2", "comes twice"),
        ("yaml", "epsilon: 1\nlr: {1: 0.1, '1': 0.2}", "comes twice"),
        ("yaml", "- 1\n- 2", "must be a table"),
        ("yaml", "", "must be a table"),
        ("yaml", "!!python/object/apply:os.system [exit]", "cannot be read as yaml"),
        ("yaml", "? [1, 2]\n: 3", "unhashable"),
        ("yaml", "1: 2", "a recipe has no 1"),
        ("json", "{}", "give a .toml, .yaml or .yml file"),
        ("toml", "epsilon = 3\nbatch = 4\nmixing_width = 2\nclip = 'wide'", "recipe.toml: clip = 'wide'"),
    ],
)
def test_files_that_are_no_recipe(tmp_path, suffix, text, said):
    with pytest.raises(mm.ModelMixError) as error:
        load(tmp_path, suffix, text)
    assert said in str(error.value)
    assert "\n" not in str(error.value)


def test_files_that_cannot_be_read(tmp_path):
    (tmp_path / "binary.toml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(mm.ModelMixError, match="not a text file"):
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
    "weights without a network": ({"features": "net.pth"}, "are weights without their network: give features = "),
    "features that do not exist": ({"features": "no.such:thing"}, "cannot be imported: ModuleNotFoundError"),
    "weights without a function": ({"features": "efficientnet-lite0", "weights": "w.pt"}, "weights is for features = "),
    "a size without a network": ({"features": "no.such:thing", "feature_size": 64}, "feature_size is for pretrained"),
    "a size of nothing": ({"features": "x.onnx", "feature_size": 0}, "feature_size = 0"),
    "scaled pixels without a network": ({"pixels": "unit"}, "pixels is for an .onnx file"),
    "unknown pixels": ({"features": "x.onnx", "pixels": "half"}, "pixels = 'half' is unknown: choose one of imagenet"),
    "images of no size": ({"image_size": 0}, "image_size = 0"),
    "unit length of pixels": ({"unit_length": True}, "unit_length is for pretrained networks"),
    "no prior": ({"prior": "missing.npz"}, "missing.npz"),
    "components of pixels": ({"components": 5}, "components are for normalise = "),
    "mirrored pixels": ({"mirror": False}, "mirror = false is for features of patches, priors and networks"),
    "normalised pixels": ({"normalise": "group"}, "normalise = 'group' is "),
    "clips of no moments": (
        {"features": "efficientnet-lite0", "mean_clip": 1.0, "square_clip": 1.0},
        'normalise = "private" needs mean_clip and square_clip, and nothing else takes them',
    ),
    "moments without noise": ({"normalise_noise": 0}, "normalise_noise = 0"),
    "unknown, near": ({"epsilom": 3}, "a recipe has no 'epsilom': did you mean epsilon?"),
    "unknown, near two": ({"mixing_with": 3}, "did you mean mixing_width?"),
    "no population": ({"population": 0}, "population = 0 is not allowed"),
    "half a class": ({"classes": 2.5}, "classes = 2.5 is not of the right kind"),
    "test set in words": ({"test_public": "yes"}, "must be true or false"),
    "unknown, far": ({"wombat": 3}, "known are augment, basis, batch, classes"),
    "text for a number": ({"epsilon": "3"}, "epsilon = '3' is not of the right kind: it must be a number"),
    "number for a text": ({"name": 3}, "it must be a text"),
    "number for a truth": ({"second_start": 1}, "it must be true or false"),
    "truth for a number": ({"clip": True}, "clip = True is not of the right kind"),
    "truth for a count": ({"steps": True}, "it must be a whole number"),
    "half for a count": ({"steps": 2.5}, "it must be a whole number"),
    "infinite count": ({"steps": float("inf")}, "it must be a whole number"),
    "undefined count": ({"p": float("nan")}, "it must be a whole number"),
    "number past floats": ({"clip": 10**400}, "it must be a number"),
    "list for a number": ({"lr": [1, 2]}, "it must be a number or a schedule"),
    "table for a number": ({"clip": {"1": 2}}, "it must be a number"),
    "text for a schedule": ({"lr": "cosine"}, "it must be a number or a schedule"),
    "half a seed": ({"seed": 1.5}, "it must be a whole number"),
    "a huge seed": ({"seed": 2**63}, "the seed must be between"),
    "text for a seed": ({"seed": "1"}, "it must be a whole number"),
    "unknown mechanism": ({"mechanism": "modelmux"}, "choose one of modelmix, modelmix-laplace"),
    "neither epsilon nor z": ({"epsilon": None}, "one of epsilon, noise_multiplier: it has none"),
    "both epsilon and z": ({"noise_multiplier": 1.0}, "it has epsilon and noise_multiplier"),
    "neither batch nor rate": ({"batch": None}, "one of batch, sample_rate: it has none"),
    "both batch and rate": ({"sample_rate": 0.1}, "it has batch and sample_rate"),
    "no mixing": ({"mixing_width": None}, "one of mixing_width, tau_over_eta, tau: it has none"),
    "mixing twice": ({"tau": 0.1}, "it has mixing_width and tau"),
    "mixing thrice": ({"tau": 0.1, "tau_over_eta": 1.0}, "it has mixing_width and tau_over_eta and tau"),
    "mixing for plain": ({"mechanism": "plain"}, "plain does not mix: leave out"),
    "mixing for average": ({"mechanism": "average"}, "average does not mix: leave out"),
    "epsilon zero": ({"epsilon": 0}, "greater than 0"),
    "epsilon negative": ({"epsilon": -1}, "greater than 0"),
    "epsilon infinite": ({"epsilon": float("inf")}, "not a finite number"),
    "no noise": ({"epsilon": None, "noise_multiplier": 0.0}, "greater than 0"),
    "delta one": ({"delta": 1.0}, "strictly between 0 and 1"),
    "delta undefined": ({"delta": float("nan")}, "not a finite number"),
    "no steps": ({"steps": 0}, "1 or more"),
    "steps negative": ({"steps": -5}, "1 or more"),
    "batch negative": ({"batch": -5}, "greater than 0"),
    "batch above n": ({"batch": 241}, "at most 1"),
    "rate above one": ({"batch": None, "sample_rate": 1.5}, "at most 1"),
    "rate zero": ({"batch": None, "sample_rate": 0.0}, "greater than 0"),
    "no clip": ({"clip": 0}, "greater than 0"),
    "p zero": ({"p": 0}, "1 or more"),
    "no copies": ({"multiplicity": 0}, "1 or more"),
    "never evaluated": ({"evaluate_every": 0}, "1 or more"),
    "negative width": ({"mixing_width": -1.0}, "greater than 0"),
    "learning rate zero": ({"lr": 0.0}, "greater than 0"),
    "schedule from step 2": ({"lr": {"2": 0.1}}, "lr: a schedule begins at step 1"),
    "schedule of nothing": ({"lr": {}}, "lr: a schedule begins at step 1"),
    "schedule with a negative": ({"lr": {"1": -0.1}}, "lr: value = -0.1 is not allowed"),
    "schedule with a text": ({"lr": {"1": "a"}}, "lr: value = 'a' is not a finite number"),
    "schedule by words": ({"lr": {"first": 0.1}}, "lr is not a schedule: write a number"),
    "schedule by halves": ({"lr": {"1.5": 0.1}}, "lr is not a schedule"),
    "unknown schedule": ({"lr": {"schedule": "warmup", "start": 1.0, "end": 2.0}}, "lr is not a schedule"),
    "schedule of a list": ({"lr": {"schedule": []}}, "lr is not a schedule"),
    "half a schedule": ({"lr": {"schedule": "linear", "start": 1.0}}, "lr is not a schedule"),
    "schedule with more": ({"lr": {"schedule": "linear", "start": 1.0, "end": 0.1, "stop": 3}}, "is not a schedule"),
    "schedule to zero": ({"lr": {"schedule": "linear", "start": 1.0, "end": 0.0}}, "lr: value = 0 is not allowed"),
    "mixed schedule": ({"lr": {"schedule": "pieces", "1": 0.1, "end": 2}}, "lr is not a schedule"),
    "schedule for a width": ({"mixing_width": {"1": 0.0}}, "mixing_width: value = 0"),
    "momentum one": ({"momentum": 1.0}, "at least 0 and below 1"),
    "momentum negative": ({"momentum": -0.1}, "at least 0 and below 1"),
    "ema one": ({"ema": 1.0}, "at least 0 and below 1"),
    "negative decay": ({"weight_decay": -1.0}, "0 or more"),
    "unknown padding": ({"padding": "none"}, "choose one of exact, paper"),
    "unknown augmentation": ({"augment": "blur"}, "choose one of flip, crop, flip-crop"),
    "copies without change": ({"multiplicity": 2}, "needs a function"),
    "unknown model": ({"model": "resnet"}, "cnn, linear, mlp"),
    "public images for nothing": ({"public": "x.npz"}, "modelmix does not embed gradients"),
    "embedding of nothing": ({"mechanism": "embedding-modelmix", "embedding_clip": 1.0}, "needs public and"),
    "no public images": (
        {"mechanism": "embedding-modelmix", "embedding_clip": 1.0, "public": "missing.npz"},
        "there are no public images 'missing.npz'",
    ),
    "no basis": ({"mechanism": "embedding-modelmix", "embedding_clip": 1.0, "public": "x", "basis": 0}, "1 or more"),
    "no groups": ({"mechanism": "embedding-modelmix", "embedding_clip": 1.0, "public": "x", "groups": 0}, "1 or more"),
}


@pytest.mark.parametrize(("changes", "said"), NONSENSE.values(), ids=NONSENSE)
def test_nonsense_is_refused_in_one_line_before_anything_is_written(tmp_path, changes, said):
    data = images(N)
    with pytest.raises(mm.ModelMixError) as error:
        of(**changes).trainer(data, folder=tmp_path / "run")
    assert said in str(error.value)
    assert "\n" not in str(error.value)
    assert not (tmp_path / "run").exists()


def test_every_field_is_among_the_nonsense():
    met = {name for changes, _ in NONSENSE.values() for name in changes}
    assert {field.name for field in dataclasses.fields(Recipe)} - met == {"data"}  # looked for when it is loaded


def test_what_was_spent_before_counts_and_leaves_less_for_training(tmp_path):
    file = tmp_path / "spent.json"
    before = mm.Ledger().add(mm.Mechanism(20.0, 1.0), 1)
    before.save(file)
    alone, after = of(epsilon=2.0), of(epsilon=2.0, spent=str(file))
    least = [recipe.plan(60).phases[0].mechanism.noise_multiplier for recipe in (alone, after)]
    assert least[0] < least[1]
    trainer = after.trainer(images()).run(after.steps, progress=False)
    assert trainer.ledger.phases[0] == before.phases[0]
    assert 1.99 < trainer.epsilon(after.delta) <= 2.0
    mm.Ledger().add(mm.Mechanism(0.5, 1.0), 1).save(file)
    with pytest.raises(mm.ModelMixError, match="nothing is left"):
        after.trainer(images())


# Changes from the command line.


def test_a_change_pushes_out_its_alternative():
    assert of().changed(noise_multiplier=1.5).epsilon is None
    assert of(epsilon=None, noise_multiplier=1.0).changed(epsilon=2.0).noise_multiplier is None
    assert of().changed(sample_rate=0.1).batch is None
    assert of().changed(tau=0.1) == of(mixing_width=None, tau=0.1)
    assert of().changed(mechanism="plain") == of(mixing_width=None, mechanism="plain")
    assert of().changed() == of()


def test_a_change_that_says_two_things_is_refused():
    for changes in (
        {"mechanism": "plain", "mixing_width": 1.0},
        {"epsilon": 1.0, "noise_multiplier": 1.0},
        {"tau": 1.0, "mixing_width": 1.0},
        {"mechanism": "other"},
    ):
        with pytest.raises(mm.ModelMixError):
            of().changed(**changes)
    with pytest.raises(mm.ModelMixError, match="needs one of mixing_width"):
        of(mixing_width=None, mechanism="plain").changed(mechanism="modelmix")


# Schedules and plans.


def test_schedules_are_what_they_say():
    linear = of(lr={"schedule": "linear", "start": 1.0, "end": 0.5}).schedule("lr")
    assert [linear.at(k) for k in (1, 6, 99)] == [1.0, 0.5, 0.5]  # over the steps of the recipe
    cosine = of(lr={"schedule": "cosine", "start": 1.0, "end": 0.5, "steps": 3}).schedule("lr")
    assert [cosine.at(k) for k in (1, 2, 3, 6)] == pytest.approx([1.0, 0.75, 0.5, 0.5])
    pieces = of(lr={"schedule": "pieces", "1": 1.0, "3": 0.1}).schedule("lr")
    assert [pieces.at(k) for k in (1, 2, 3, 6)] == [1.0, 1.0, 0.1, 0.1]
    assert of(lr={"1": 1.0, "3": 0.1}).schedule("lr") == pieces
    assert of(lr=0.3).schedule("lr").at(5) == 0.3


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
    spent = mm.epsilon(plan, recipe.delta)
    assert 0.999 * recipe.epsilon <= spent <= recipe.epsilon
    assert plan.steps == recipe.steps


def test_what_was_planned_is_what_is_run():
    """The ledger of the trainer is the plan, and the tau of every step is the one that was asked for."""
    for name in ("tau, rate falls", "tau, rate halved", "tau over eta in phases", "width, rate falls"):
        recipe = of(**{"mixing_width": None, **PLANS[name]} if "tau" in name else PLANS[name])
        trainer = recipe.trainer(images(N))
        plan = recipe.plan(N)
        trainer.run(recipe.steps)
        assert trainer.ledger.phases == plan.phases
        assert trainer.epsilon(recipe.delta) == mm.epsilon(plan, recipe.delta) <= recipe.epsilon
        for step in range(1, recipe.steps + 1):
            width, eta = trainer.mechanism_at(step).mixing_width, recipe.schedule("lr").at(step)
            tau = width * recipe.clip * eta / recipe.batch
            if "rate falls" in name and recipe.tau is None:
                assert width == 2.0
            elif recipe.tau is not None:
                assert tau == pytest.approx(recipe.schedule("tau").at(step), rel=1e-12)
            else:
                assert tau / eta == pytest.approx(recipe.schedule("tau_over_eta").at(step), rel=1e-12)


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
    assert [phase.mechanism.noise_multiplier for phase in of(spent=files).before().phases] == [3.0, 4.0]
    assert of(spent=files[:1]) == of(spent=files[0])


@pytest.mark.parametrize("mechanism", MECHANISMS)
def test_every_mechanism_trains(mechanism, tmp_path):
    law, rule, mixes = MECHANISMS[mechanism]
    more: dict[str, object] = {"mixing_width": 2.0 if mixes else None}
    if mechanism.startswith("embedding"):
        np.savez(tmp_path / "public.npz", x=images(12).train.x.numpy())
        more |= {"public": str(tmp_path / "public.npz"), "embedding_clip": 2.5}
    recipe = of(epsilon=None, noise_multiplier=1.0, mechanism=mechanism, **more)
    trainer = recipe.trainer(images(N)).run(6)
    (phase,) = trainer.ledger.phases
    assert (phase.mechanism.law, phase.mechanism.mixed, phase.steps) == (law, mixes, 6)
    assert bool(trainer.ledger.unproved) == (rule == "released")


def test_an_own_seed_leaves_the_programs_generator_alone():
    torch.manual_seed(3)
    expected = torch.rand(2)
    torch.manual_seed(3)
    of(epsilon=None, noise_multiplier=1.0).trainer(images(N))
    assert torch.equal(torch.rand(2), expected)

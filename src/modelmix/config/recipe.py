"""A training run as data: what ``modelmix train`` reads from a TOML file, and how a trainer is made of it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import msgspec

from modelmix import kinds
from modelmix._format import up_digits
from modelmix.accounting.guarantee import epsilon as proved_epsilon
from modelmix.accounting.ledger import Ledger
from modelmix.accounting.mechanism import Mechanism
from modelmix.accounting.plan import Plan
from modelmix.accounting.runs import require_current
from modelmix.config.feature_spec import FeaturesConfig
from modelmix.config.privacy import EITHER, MECHANISMS, MIXING, Changing, PrivacyConfig, as_schedule
from modelmix.config.tables import ConfigTable, key, nearest, read_table, read_toml, write_toml
from modelmix.errors import ModelMixError
from modelmix.runs.formatting import assumed_by

if TYPE_CHECKING:
    from torch import nn

    from modelmix.config.preparation import Prepared
    from modelmix.data import DataSet
    from modelmix.gradients import Engine
    from modelmix.training import Performance, Rule, Schedule, Trainer

DEFAULT = Path(__file__).parent / "recipes" / "default.toml"


class DataConfig(ConfigTable, frozen=True):
    """What is trained on."""

    source: Annotated[str, key("A data set by name, a folder, or an .npz file.", "--data")] = "fashion-mini"
    classes: Annotated[int, key("Number of classes, where neither folders nor a name tell it.", ge=1)] | None = None
    image_size: Annotated[int, key("Side in pixels to which images of a folder are scaled.", ge=1)] | None = None
    test_public: Annotated[bool, key("The test set is public: its metrics may be published.")] = False
    public: Annotated[str, key("File of public images, to embed gradients or whiten features.")] | None = None
    augment: Annotated[Literal["flip", "crop", "flip-crop"], key("Augmentation of every image.")] | None = None
    multiplicity: Annotated[int, key("Augmented copies of a sample in a step.", ge=1)] = 1


class ModelConfig(ConfigTable, frozen=True):
    """Which network is trained, and where it starts."""

    kind: Annotated[str, key("cnn, linear, mlp, resnet20, ... or package.module:function.", "--model")] = "cnn"
    prior: Annotated[str, key("Weights to start from: synthetic, characters, or a file.")] | None = None
    second_start: Annotated[bool, key("Begin to mix with a second set of initial weights.")] = False


class OptimizerConfig(ConfigTable, frozen=True):
    """How steps are made of noisy gradients: nothing here changes epsilon."""

    lr: Annotated[Changing, key("Learning rate eta.", "--lr")] = 1.0
    momentum: Annotated[float, key("Momentum factor, computed from released states.", ge=0, lt=1)] = 0.0
    weight_decay: Annotated[float, key("Weight decay.", ge=0)] = 0.0
    ema: Annotated[float, key("Decay of the average of released states.", ge=0, lt=1)] | None = None


class RunConfig(ConfigTable, frozen=True):
    """What a run is called and how it is computed: nothing here but the seed matters for privacy."""

    name: Annotated[str, key("Name of the run.")] = "run"
    seed: Annotated[int, key("Makes a run repeatable; for tests only.", ge=-(2**63), le=2**63 - 1)] | None = None
    evaluate_every: Annotated[int, key("Steps between evaluations [default: steps / 20].", ge=1)] | None = None
    device: Annotated[str, key("cpu, cuda; default: what is there.", "--device")] | None = None
    engine: Annotated[Literal["auto", "hooks", "vmap", "loop"], key("Engine of per-sample gradients.")] = "auto"
    precision: Annotated[Literal["float32", "bfloat16"], key("Arithmetic of the model.")] | None = None
    compiled: Annotated[bool, key("Compile the model [default: on a GPU].")] | None = None
    chunk: Annotated[int, key("Samples whose gradients are held at once.", ge=1)] | None = None

    def performance(self) -> Performance:
        """Return how the run is computed."""
        from modelmix.training import Performance

        return Performance(
            device=self.device, engine=self.engine, precision=self.precision, compiled=self.compiled, chunk=self.chunk
        )


TABLES: Mapping[str, type[ConfigTable]] = {
    "data": DataConfig, "features": FeaturesConfig, "model": ModelConfig, "privacy": PrivacyConfig,
    "optimizer": OptimizerConfig, "run": RunConfig,
}  # fmt: skip
PLACES = tuple(f"{title}.{name}" for title, table in TABLES.items() for name in table.__struct_fields__)
"""Every key of a recipe with its table."""

_RENAMED = {
    "name": "run.name", "data": "data.source", "features": "features.kind", "feature_size": "features.size",
    "prior": "model.prior or features.prior", "model": "model.kind", "mechanism": "privacy.kind",
    "z": "privacy.noise_multiplier", "omega": "privacy.mixing_width", "compile": "run.compiled",
}  # fmt: skip


def place_of(name: str) -> str | None:
    """Return the table and key of a name that recipes and options had before there were tables."""
    found = [place for place in PLACES if place.endswith(f".{name}")]
    return _RENAMED.get(name) or (found[0] if len(found) == 1 else None)


class Recipe(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that defines a run, in tables.

    >>> recipe = Recipe(privacy=PrivacyConfig(epsilon=3.0, batch=256, steps=200, mixing_width=2.0))
    >>> recipe = recipe.changed({"model.kind": "linear", "privacy.kind": "plain"})
    >>> round(recipe.plan(10_000).phases[0].mechanism.noise_multiplier, 3)
    0.905
    """

    data: DataConfig = DataConfig()
    features: FeaturesConfig | None = None
    model: ModelConfig = ModelConfig()
    privacy: PrivacyConfig
    optimizer: OptimizerConfig = OptimizerConfig()
    run: RunConfig = RunConfig()

    def __post_init__(self) -> None:
        for title, values in self.as_dict().items():  # a table that was made in Python has not been checked
            msgspec.structs.force_setattr(self, title, read_table(TABLES[title], title, values))
        embeds, public = self.privacy.embeds, self.data.public
        whitens = self.features is not None and self.features.normalise == "public"
        if (embeds or whitens) != (public is not None):
            raise ModelMixError(
                "data.public is for privacy.embedding_clip, which embeds gradients, and for features.normalise = "
                f'"public": {"leave it out" if public else "give it"}.'
            )
        if embeds and self.features is not None:
            raise ModelMixError("gradients are embedded for networks on images: leave [features] out.")
        if self.model.prior is not None and (self.features is not None or self.model.second_start):
            raise ModelMixError(
                "model.prior is one start of a network on images: leave [features] and model.second_start out; a prior "
                "with features of its own is features.prior."
            )

    @classmethod
    def from_mapping(cls, tables: Mapping[str, Any]) -> Recipe:
        """Make a recipe of tables; unknown names are refused with the nearest known one."""
        flat = [name for name, values in tables.items() if name not in TABLES or not isinstance(values, Mapping | None)]
        places = [(name, place) for name in flat if (place := place_of(name)) is not None]
        if places:
            moved = ", ".join(f"{place} for {name}" for name, place in places)
            raise ModelMixError(f"a recipe consists of tables now: write {moved}.")
        for name in flat:
            raise ModelMixError(f"a recipe has no table {name!r}: {nearest(name, TABLES)}")
        for title, values in tables.items():
            for name in values:
                if f"{title}.{name}" not in PLACES:
                    raise ModelMixError(f"a recipe has no {title}.{name}: {_hint(title, str(name))}")
        found: dict[str, Any] = {**tables, "privacy": tables.get("privacy", {})}
        made: dict[str, Any] = {title: read_table(TABLES[title], title, values) for title, values in found.items()}
        return cls(**made)

    @classmethod
    def load(cls, path: str | Path) -> Recipe:
        """Read a .toml file."""
        tables = read_toml(path)
        try:
            return cls.from_mapping(tables)
        except ModelMixError as error:
            raise ModelMixError(f"{path}: {error}") from None

    @classmethod
    def of_run(cls, folder: str | Path) -> Recipe | None:
        """Return the recipe of the run in a folder; None if there is no run of a recipe."""
        path = Path(folder) / "config.json"
        try:
            config = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return None  # the trainer says what is wrong with it
        recipe = config.get("recipe") if isinstance(config, dict) else None
        if not isinstance(recipe, dict):
            return None
        require_current(config, path.parent)
        return cls.from_mapping(recipe)

    def changed(self, changes: Mapping[str, Any]) -> Recipe:
        """Return this recipe with other values, by table and key; one of an either-or pair pushes the other out.

        Args:
            changes: for instance {"privacy.epsilon": 2.0, "model.kind": "linear"}; None takes a value out.
        """
        tables = {title: dict(values) for title, values in self.as_dict().items()}
        traits = MECHANISMS.get(changes.get("privacy.kind", self.privacy.kind))
        for names in EITHER:
            if any(f"privacy.{name}" in changes for name in names) or (names == MIXING and traits and not traits.mixes):
                for name in names:
                    tables["privacy"].pop(name, None)
        for place, value in changes.items():
            title, dot, name = place.partition(".")
            if not dot:
                raise ModelMixError(f"a recipe has no {place!r}: {_hint('', place)}")
            tables.setdefault(title, {})[name] = value
        return Recipe.from_mapping(tables)

    def as_dict(self) -> dict[str, dict[str, Any]]:
        """Return everything that is set, by tables."""
        return {title: getattr(self, title).as_dict() for title in TABLES if getattr(self, title) is not None}

    def as_toml(self) -> str:
        """Return the recipe as a file that ``load`` reads."""
        return write_toml(self.as_dict())

    def load_data(self, data_dir: str | Path | None = None) -> DataSet:
        """Load the data set of this recipe."""
        from modelmix.data import load

        data = self.data
        return load(data.source, data_dir, data.image_size, classes=data.classes, test_public=data.test_public)

    def price(self, n: int) -> Ledger:
        """Return what is released about n training samples before training."""
        if self.features is None or self.features.normalise != "private":
            return self.privacy.before()
        return self.privacy.before().then(self.privacy.claim(n).add(Mechanism(self.features.normalise_noise, 1.0), 2))

    def whole(self, n: int) -> Ledger:
        """Return all that a run on n samples releases: ``price``, then what is trained."""
        return self.plan(n).ledger

    def plan(self, n: int) -> Plan:
        """Return the plan of training on n samples.

        If epsilon is the target, the noise is calibrated here, so that price and training together spend it.
        """
        privacy, price = self.privacy, self.price(n)
        own = self.features is not None and self.features.normalise == "private"
        if own and privacy.epsilon and (cost := proved_epsilon(price, privacy.delta)) >= privacy.epsilon:
            raise ModelMixError(
                f"what comes before training costs epsilon {up_digits(cost, 3)} and the target is {privacy.epsilon:g}: "
                'raise features.normalise_noise, or use features.normalise = "group", which is free.'
            )
        return privacy.plan(n, price, self.schedule("optimizer.lr"))

    def schedule(self, place: str) -> Schedule:
        """Return one of the changing numbers as a schedule, for instance "optimizer.lr"."""
        title, _, name = place.partition(".")
        return as_schedule(place, getattr(getattr(self, title), name), self.privacy.steps)

    def trainer(
        self,
        data: DataSet | Prepared,
        *,
        folder: str | Path | None = None,
        resume: bool = False,
        performance: Performance | None = None,
        tested: bool = True,
        engine: Engine | None = None,
        data_dir: str | Path | None = None,
    ) -> Trainer:
        """Return the trainer of this recipe on a data set, or on what ``prepare`` made of one for it.

        Args:
            performance: in place of what ``[run]`` says.
            tested: False keeps the test set away from the training; ``Trainer.evaluate`` can be given it afterwards.
            engine: see ``Trainer``.
            data_dir: where public images are looked for by name.
        """
        from torch import nn

        from modelmix.config.preparation import Prepared, prepare
        from modelmix.training import Augment, RunOptions, Trainer
        from modelmix.training.augment import AUGMENTATIONS

        performance = performance or self.run.performance()
        if isinstance(data, Prepared):
            prepared, plan = data, self.plan(len(data.data.train))
        else:
            plan = self.plan(len(data.train))  # before anything is spent
            prepared = prepare(self, data, performance.find_device(), folder if resume else None, data_dir)
        model, other = self._networks(prepared.data)
        rule, optimizer, tables = self.privacy.traits.rule, self.optimizer, self.as_dict()
        about: dict[str, Any] = {"data": prepared.data.name, "model": self.model.kind, "steps": self.privacy.steps}
        about |= {"recipe": tables, **prepared.about, "assumed": assumed_by(tables)}
        if rule == "released":
            about["claimed_epsilon"] = plan.guarantee().epsilon
        return Trainer(
            model,
            nn.CrossEntropyLoss(),
            prepared.train,
            plan,
            clip=self.privacy.clip,
            lr=self.schedule("optimizer.lr"),
            rule=_make_rule(
                rule,
                model,
                prepared.embedding is not None,
                padding=self.privacy.padding,
                momentum=optimizer.momentum,
                weight_decay=optimizer.weight_decay,
                ema=optimizer.ema,
                previous=other,
            ),
            augment=Augment(AUGMENTATIONS[self.data.augment] if self.data.augment else None, self.data.multiplicity),
            embedding=prepared.embedding,
            test_set=prepared.test if tested else None,
            folder=folder,
            options=RunOptions(
                resume=resume,
                seed=self.run.seed,
                test_public=self.data.test_public,
                performance=performance,
                engine=engine,
                name=self.run.name,
                about=about,
            ),
        )

    def _networks(self, data: DataSet) -> tuple[nn.Module, nn.Module | None]:
        """The network, and the second start if there is one; initial weights are public."""
        import torch

        from modelmix.models import Pixels, build

        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0 if self.run.seed is None else self.run.seed)
            models = [
                Pixels(build(self.model.kind, data.shape, len(data.classes)))
                for _ in range(1 + self.model.second_start)
            ]
        if self.model.prior is not None:
            kinds.start_from(self.model.prior, models[0].network)
        return models[0], models[1] if self.model.second_start else None

    @property
    def evaluate_every(self) -> int:
        """The number of steps between evaluations."""
        return self.run.evaluate_every or max(1, self.privacy.steps // 20)


def _make_rule(name: str, model: nn.Module, embedded: bool, **fields: Any) -> Rule:
    """Return the rule of a step that a mechanism names."""
    from modelmix.training.rules import Rule

    if name in Rule.NAMES:
        return Rule(name, **fields)  # type: ignore[arg-type]
    if name not in kinds.RULES:
        raise ModelMixError(f"the {name} configuration proves nothing and comes with modelmix-lab: modelmix-lab train.")
    return kinds.RULES[name](model, embedded, **fields)


def _hint(title: str, name: str) -> str:
    """Where a key might be that a table does not have."""
    own = [place for place in PLACES if place.startswith(f"{title}.")]
    keys = {place.partition(".")[2]: place for place in (*PLACES, *own)}
    near = get_close_matches(name, keys, 1)
    return f"did you mean {keys[near[0]]}?" if near else f"choose one of {', '.join(own or PLACES)}."

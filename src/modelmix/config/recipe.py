"""A training run as data: what ``modelmix train`` reads from a TOML or YAML file, and how a trainer is made of it."""

from __future__ import annotations

import dataclasses
import difflib
import json
import re
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from modelmix import kinds
from modelmix._checks import positive, probability, rate, whole
from modelmix._format import up_digits
from modelmix.accounting.adjacency import ADD_OR_REMOVE, ZERO_OUT
from modelmix.accounting.embedding import EmbeddingMechanism
from modelmix.accounting.guarantee import epsilon as proved_epsilon
from modelmix.accounting.ledger import Ledger
from modelmix.accounting.mechanism import Mechanism
from modelmix.accounting.plan import Plan, calibrated_noise
from modelmix.accounting.runs import Claim, load_claim
from modelmix.config import sources
from modelmix.errors import ModelMixError
from modelmix.runs.formatting import assumed_by

if TYPE_CHECKING:
    from torch import nn

    from modelmix.config.preparation import Prepared
    from modelmix.data import DataSet
    from modelmix.gradients import Engine
    from modelmix.training import Performance, Rule, Schedule, Trainer

DEFAULT = Path(__file__).parent / "recipes" / "default.toml"

# name: (law of the noise, rule of a step, does the mechanism count on mixing)
MECHANISMS: Mapping[str, tuple[str, str, bool]] = {
    "modelmix": ("gaussian", "mix", True),
    "modelmix-laplace": ("laplace", "mix", True),
    "alternating": ("gaussian", "alternate", True),
    "plain": ("gaussian", "plain", False),
    "average": ("gaussian", "average", False),
    "released": ("gaussian", "released", True),
    "embedding": ("gaussian", "plain", False),
    "embedding-modelmix": ("gaussian", "mix", True),
    "embedding-average": ("gaussian", "average", False),
    "embedding-released": ("gaussian", "released", True),
}
_EMBEDDING = "embedding"  # what the names of mechanisms that embed gradients begin with

_MIXING = ("mixing_width", "tau_over_eta", "tau")
_POSITIVE = {
    "epsilon": "the target epsilon",
    "noise_multiplier": "the noise multiplier",
    "batch": "the expected batch",
    "sample_rate": "the sampling rate",
    "clip": "the clip",
    "embedding_clip": "the clip of embeddings",
    "normalise_noise": "the noise multiplier of released moments",
    "mean_clip": "the clip of channel means",
    "square_clip": "the clip of channel second moments",
}
_COUNTS = {
    "population": "the population",
    "classes": "the number of classes",
    "steps": "the number of steps",
    "p": "the truncation parameter",
    "multiplicity": "the number of copies of a sample",
    "evaluate_every": "the number of steps between evaluations",
    "image_size": "the side of an image of the data",
    "feature_size": "the side of an image for the network of features",
    "basis": "the number of basis vectors",
    "groups": "the number of groups of parameters",
    "components": "the number of components of whitened features",
}

Paths = str | Sequence[str]
"""A file, or a list of files."""
Changing = float | Mapping[str, Any]
"""A number, or a table {schedule = "linear", start, end} / {schedule = "cosine", ...} / {"1" = ..., "351" = ...}."""


@dataclass(frozen=True)
class Recipe:
    """Everything that defines a run. Units as in ``Trainer``; ``batch`` is the expected batch q*n.

    Exactly one of epsilon (the noise is then calibrated) and noise_multiplier is given, one of batch and sample_rate,
    and, for a mechanism that mixes, one of mixing_width (omega), tau_over_eta and tau.

    population is a public constant that does not move with the data: batch and the sampling rate are then shares of it,
    and the number of samples stays private. Left out, the number of samples is public. See ``adjacency``.

    spent is a ledger file or a run folder, or a list of them, of what was released about the same samples before, by
    clip-advice for instance: epsilon counts it, and noise that is calibrated leaves room for it.

    test_public says that the test set is public: only then may what is measured on it be published. classes is how many
    classes the data has, where neither its folders nor its name say so: private labels are not counted.

    image_size is the side to which the images of a folder are scaled; nothing else takes it.

    prior is "synthetic" or "characters", which come with modelmix-lab, or a file of ``modelmix-lab prior``: the network
    starts from its weights, or, with features = "prior", is trained on what it sees.

    public is a file of images that nobody has to protect. A mechanism that embeds gradients does so in the directions
    of theirs: embeddings are clipped to embedding_clip and residuals to clip, with basis vectors (1000) in groups (3)
    of the parameters. Without such a mechanism they whiten features.

    features trains on what something sees in the images instead of the images: "scatter", "patches", "prior" (or the
    file of a prior itself), "patches+prior", a pretrained network by name, an .onnx file, or package.module:function,
    which takes images, or, with a file of weights, builds a network. feature_size, pixels and unit_length: see
    ``Inputs`` and ``Extractor``. mirror adds what is seen in the mirror image; left out, patches and priors do so, and
    networks and functions do not.

    With features = "scatter", normalise = "group" makes every group of their
    channels mean 0 and variance 1, sample by sample; "private" does so for every channel over the training set, with
    moments released by noise of multiplier normalise_noise on channel means clipped to mean_clip and channel second
    moments clipped to square_clip, and epsilon counts them. normalise = "scenes", "silhouettes" or "characters" whitens
    features by synthetic images of that kind, "public" by those of public, and keeps so many components; free.
    """

    name: str = "run"
    data: str = "fashion-mini"
    population: int | None = None
    classes: int | None = None
    test_public: bool = False
    spent: Paths | None = None
    image_size: int | None = None
    prior: str | None = None
    features: str | None = None
    weights: str | None = None
    feature_size: int | None = None
    pixels: str | None = None
    unit_length: bool = False
    mirror: bool | None = None
    normalise: str | None = None
    components: int | None = None
    normalise_noise: float = 8.0
    mean_clip: float | None = None
    square_clip: float | None = None
    model: str = "cnn"
    mechanism: str = "modelmix"
    epsilon: float | None = None
    noise_multiplier: float | None = None
    delta: float = 1e-5
    steps: int = 100
    batch: float | None = None
    sample_rate: float | None = None
    clip: float = 1.0
    public: str | None = None
    embedding_clip: float | None = None
    basis: int | None = None
    groups: int | None = None
    lr: Changing = 1.0
    mixing_width: Changing | None = None
    tau_over_eta: Changing | None = None
    tau: Changing | None = None
    p: int = 1
    padding: str = "exact"
    momentum: float = 0.0
    weight_decay: float = 0.0
    ema: float | None = None
    augment: str | None = None
    multiplicity: int = 1
    second_start: bool = False
    evaluate_every: int | None = None
    seed: int | None = None

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            object.__setattr__(self, field.name, _of_kind(field.name, getattr(self, field.name), str(field.type)))
        if self.mechanism not in MECHANISMS:
            raise ModelMixError(f"mechanism = {self.mechanism!r} is unknown: choose one of {', '.join(MECHANISMS)}.")
        if self.seed is not None and not -(2**63) <= self.seed < 2**63:
            raise ModelMixError(f"seed = {self.seed} is not allowed: the seed must be between -2^63 and 2^63.")
        self._one_of("epsilon", "noise_multiplier")
        self._one_of("batch", "sample_rate")
        if MECHANISMS[self.mechanism][2]:
            self._one_of(*_MIXING)
        elif any(getattr(self, name) is not None for name in _MIXING):
            raise ModelMixError(f"{self.mechanism} does not mix: leave out {', '.join(_MIXING)}.")
        sources.check(self)
        network = self.features is not None and sources.kind_of(self.features) in sources.EXTRACTORS
        if self.mirror is not network:
            object.__setattr__(self, "mirror", None)  # what is meant anyhow is written one way
        self._check_embedding()
        probability("delta", self.delta, "the failure probability")
        for name, meaning in _POSITIVE.items():
            if getattr(self, name) is not None:
                positive(name, getattr(self, name), meaning)
        for name, meaning in _COUNTS.items():
            if getattr(self, name) is not None:
                whole(name, getattr(self, name), meaning, least=1)

    def _one_of(self, *names: str) -> None:
        given = [name for name in names if getattr(self, name) is not None]
        if len(given) != 1:
            found = " and ".join(given) or "none"
            raise ModelMixError(f"a recipe for {self.mechanism} needs one of {', '.join(names)}: it has {found}.")

    def _check_embedding(self) -> None:
        needed, allowed = ("public", "embedding_clip"), ["public", "embedding_clip", "basis", "groups"]
        if self.embeds and any(getattr(self, name) is None for name in needed):
            raise ModelMixError(f"a recipe for {self.mechanism} needs {' and '.join(needed)}.")
        if self.normalise == "public":
            allowed.remove("public")
        if not self.embeds and any(getattr(self, name) is not None for name in allowed):
            raise ModelMixError(
                f"{self.mechanism} does not embed gradients: leave out {', '.join(allowed)}"
                f"{' (public whitens features with normalise = public)' if 'public' in allowed else ''}."
            )
        if self.embeds and self.features is not None:
            raise ModelMixError("gradients are embedded for networks on images: leave out features.")

    @property
    def embeds(self) -> bool:
        return self.mechanism.startswith(_EMBEDDING)

    @classmethod
    def from_mapping(cls, data: Mapping[str, Any]) -> Recipe:
        """Refuses unknown names, with the nearest known one."""
        known = {field.name for field in dataclasses.fields(cls)}
        for name in data:
            if name not in known:
                near = difflib.get_close_matches(str(name), known, 1)
                hint = f"did you mean {near[0]}?" if near else f"known are {', '.join(sorted(known))}."
                raise ModelMixError(f"a recipe has no {name!r}: {hint}")
        return cls(**data)

    @classmethod
    def load(cls, path: str | Path) -> Recipe:
        """Reads a .toml, .yaml or .yml file."""
        data = read_mapping(path)
        try:
            recipe = cls.from_mapping(data)
            if data.get("mirror"):
                sources.check_mirror(recipe)
            return recipe
        except ModelMixError as error:
            raise ModelMixError(f"{path}: {error}") from None

    @classmethod
    def of_run(cls, folder: str | Path) -> Recipe | None:
        """The recipe of the run in a folder; None if there is no run of a recipe."""
        try:
            config = json.loads((Path(folder) / "config.json").read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return None  # the trainer says what is wrong with it
        recipe = config.get("recipe") if isinstance(config, dict) else None
        return cls.from_mapping(recipe) if isinstance(recipe, dict) else None

    def changed(self, **changes: Any) -> Recipe:
        """This recipe with some values replaced; one of an either-or pair pushes the other out."""
        now = dataclasses.asdict(self)
        for group in (("epsilon", "noise_multiplier"), ("batch", "sample_rate"), _MIXING):
            if any(name in changes for name in group):
                now |= dict.fromkeys(group)
        if not MECHANISMS.get(changes.get("mechanism", self.mechanism), ("", "", True))[2]:
            now |= dict.fromkeys(_MIXING)
        return Recipe.from_mapping({**now, **changes})

    def as_dict(self) -> dict[str, Any]:
        return {key: value for key, value in dataclasses.asdict(self).items() if value is not None}

    def as_toml(self) -> str:
        """The recipe as a file that ``load`` reads."""
        return "".join(f"{key} = {_toml(value)}\n" for key, value in self.as_dict().items())

    def rate_for(self, n: int) -> float:
        if self.sample_rate is not None:
            return rate("sample_rate", self.sample_rate, "the sampling rate")
        return rate("batch / samples", (self.batch or 0.0) / self.public_size(n), "the sampling rate")

    def public_size(self, n: int) -> int:
        """What every scale is derived from: the population, or the number of samples, which is then public."""
        return n if self.population is None else self.population

    def claim(self, n: int) -> Ledger:
        """An empty ledger with what a run on n samples can claim."""
        return Ledger(adjacency=ZERO_OUT if self.population is None else ADD_OR_REMOVE, population=self.public_size(n))

    def load_data(self, data_dir: str | Path | None = None) -> DataSet:
        """Load the data set of this recipe."""
        from modelmix.data import load

        return load(self.data, data_dir, self.image_size, classes=self.classes, test_public=self.test_public)

    def spent_claims(self) -> list[Claim]:
        """What the ledgers and run folders that ``spent`` names count as."""
        return [load_claim(path) for path in ([self.spent] if isinstance(self.spent, str) else self.spent or ())]

    def before(self) -> Ledger:
        """What had been released about the training samples before this run, or was planned to be."""
        out = Ledger()
        for found in self.spent_claims():
            out = out.then(found.ledger)
        return out

    def price(self, n: int) -> Ledger:
        """What is released about n training samples before training."""
        if self.normalise != "private":
            return self.before()
        return self.before().then(self.claim(n).add(Mechanism(self.normalise_noise, 1.0), 2))

    def whole(self, n: int) -> Ledger:
        """All that a run on n samples releases: ``price``, then what is trained."""
        return self.plan(n).ledger

    def plan(self, n: int) -> Plan:
        """The plan of training on n samples.

        If epsilon is the target, the noise is calibrated here, so that price and training together spend it.
        """
        law, _, mixes = MECHANISMS[self.mechanism]
        q, price = self.rate_for(n), self.price(n)
        widths = self._widths(q * self.public_size(n)) if mixes else [(self.steps, 0.0)]

        def mechanism(z: float, width: float) -> Mechanism:
            if self.embedding_clip is None:
                return Mechanism(z, q, width, self.p, law)
            return EmbeddingMechanism(z, q, width, self.p, law, clip_ratio=self.embedding_clip / self.clip)

        def planned(z: float) -> Plan:
            ledger = self.claim(n)
            for steps, width in widths:
                ledger = ledger.add(mechanism(z, width), steps)
            return Plan(
                ledger.phases, self.delta, ledger.population, ledger.adjacency, target=self.epsilon, spent=price
            )

        if self.epsilon is None:
            return planned(self.noise_multiplier or 0.0)
        if self.normalise == "private" and (cost := proved_epsilon(price, self.delta)) >= self.epsilon:
            raise ModelMixError(
                f"what comes before training costs epsilon {up_digits(cost, 3)} and the target is {self.epsilon:g}: "
                'raise normalise_noise, or use normalise = "group", which is free.'
            )
        return planned(calibrated_noise(lambda z: planned(z).ledger, self.epsilon, self.delta, price))

    def _widths(self, batch: float) -> list[tuple[int, float]]:
        """(steps, omega) in order; steps of the same width are put together."""
        out: list[tuple[int, float]] = []
        lr = self.schedule("lr")
        name = next(n for n in _MIXING if getattr(self, n) is not None)
        mixing = self.schedule(name)
        for step in range(1, self.steps + 1):
            width = mixing.at(step)
            if name != "mixing_width":
                width *= batch / self.clip
            if name == "tau":
                width /= lr.at(step)
            if out and out[-1][1] == width:
                out[-1] = (out[-1][0] + 1, width)
            else:
                out.append((1, width))
        return out

    def schedule(self, name: str) -> Schedule:
        """One of the changing numbers as a schedule."""
        from modelmix.training.schedules import Schedule, schedule

        value = getattr(self, name)
        if not isinstance(value, Mapping):
            return schedule(name, value, name)
        shape = value.get("schedule", "pieces")
        numbers = {key: number for key, number in value.items() if key != "schedule"}
        try:
            if shape == "pieces":
                return Schedule.pieces({int(step): number for step, number in numbers.items()})
            make = {"linear": Schedule.linear, "cosine": Schedule.cosine}[shape]
            return make(**{"steps": self.steps, **numbers})
        except ModelMixError as error:
            raise ModelMixError(f"{name}: {error}") from None
        except (KeyError, ValueError, TypeError):
            raise ModelMixError(
                f'{name} is not a schedule: write a number, {{schedule = "linear", start = 1.0, end = 0.1}}, the same '
                'with "cosine", or {1 = 0.15, 3001 = 0.015}.'
            ) from None

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
        """The trainer of this recipe on a data set, or on what ``prepare`` made of one for it.

        Args:
            tested: False keeps the test set away from the training; ``Trainer.evaluate`` can be given it afterwards.
            engine: see ``Trainer``.
            data_dir: where public images are looked for by name.
        """
        import torch
        from torch import nn

        from modelmix.config.preparation import Prepared, prepare
        from modelmix.models import Pixels, build
        from modelmix.training import Augment, Performance, RunOptions, Trainer
        from modelmix.training.augment import AUGMENTATIONS

        if self.augment is not None and self.augment not in AUGMENTATIONS:
            raise ModelMixError(f"augment = {self.augment!r} is unknown: choose one of {', '.join(AUGMENTATIONS)}.")
        if isinstance(data, Prepared):
            prepared, plan = data, self.plan(len(data.data.train))
        else:
            plan = self.plan(len(data.train))  # before anything is spent
            device = (performance or Performance()).find_device()
            prepared = prepare(self, data, device, folder if resume else None, data_dir)
        data = prepared.data
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0 if self.seed is None else self.seed)  # initial weights are public
            model = Pixels(build(self.model, data.shape, len(data.classes)))
            other = Pixels(build(self.model, data.shape, len(data.classes))) if self.second_start else None
        if self.prior is not None and self.features is None:
            if other is not None:
                raise ModelMixError("a prior is one start: leave second_start out.")
            kinds.start_from(self.prior, model.network)
        _, rule, _ = MECHANISMS[self.mechanism]
        about: dict[str, Any] = {"data": data.name, "model": self.model, "steps": self.steps, "recipe": self.as_dict()}
        about |= prepared.about
        if rule == "released":
            about["claimed_epsilon"] = plan.guarantee().epsilon
        return Trainer(
            model,
            nn.CrossEntropyLoss(),
            prepared.train,
            plan,
            clip=self.clip,
            lr=self.schedule("lr"),
            rule=_make_rule(
                rule,
                model,
                prepared.embedding is not None,
                padding=self.padding,
                momentum=self.momentum,
                weight_decay=self.weight_decay,
                ema=self.ema,
                previous=other,
            ),
            augment=Augment(AUGMENTATIONS[self.augment] if self.augment else None, self.multiplicity),
            embedding=prepared.embedding,
            test_set=prepared.test if tested else None,
            folder=folder,
            options=RunOptions(
                resume=resume,
                seed=self.seed,
                test_public=self.test_public,
                performance=performance or Performance(),
                engine=engine,
                name=self.name,
                about={**about, "assumed": assumed_by(self.as_dict())},
            ),
        )


def _make_rule(name: str, model: nn.Module, embedded: bool, **fields: Any) -> Rule:
    """Return the rule of a step that a mechanism names."""
    from modelmix.training.rules import Rule

    if name in Rule.NAMES:
        return Rule(name, **fields)  # type: ignore[arg-type]
    if name not in kinds.RULES:
        raise ModelMixError(f"the {name} configuration proves nothing and comes with modelmix-lab: modelmix-lab train.")
    return kinds.RULES[name](model, embedded, **fields)


def read_mapping(path: str | Path) -> dict[str, Any]:
    """The table in a .toml, .yaml or .yml file."""
    path = Path(path)
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise ModelMixError(f"cannot read {path}: {error.strerror}.") from None
    except UnicodeDecodeError:
        raise ModelMixError(f"{path} is not a text file: give a .toml or .yaml recipe.") from None
    try:
        if path.suffix == ".toml":
            if sys.version_info >= (3, 11):
                import tomllib
            else:
                import tomli as tomllib

            data: Any = tomllib.loads(text)
        elif path.suffix in (".yaml", ".yml"):
            data = _yaml(text)
        else:
            raise ModelMixError(f"{path} is not a recipe: give a .toml, .yaml or .yml file.")
    except ModelMixError:
        raise
    except Exception as error:  # the parsers' own errors, which say where
        raise ModelMixError(f"{path} cannot be read as {path.suffix[1:]}: {' '.join(str(error).split())}.") from None
    if not isinstance(data, dict):
        raise ModelMixError(f"{path} is not a recipe: it must be a table of names and values.")
    return data


def _yaml(text: str) -> Any:
    """YAML as people mean it: 1e-5 is a number, and a name that comes twice is a mistake."""
    import yaml

    class Loader(yaml.SafeLoader):
        pass

    def mapping(loader: Any, node: Any) -> dict[Any, Any]:
        pairs = [(loader.construct_object(k, deep=True), loader.construct_object(v, deep=True)) for k, v in node.value]
        if len({str(key) for key, _ in pairs}) != len(pairs):
            raise ValueError(f"a name comes twice in line {node.start_mark.line + 1} or after")
        return dict(pairs)

    Loader.add_constructor("tag:yaml.org,2002:map", mapping)
    Loader.add_implicit_resolver(
        "tag:yaml.org,2002:float", re.compile(r"[-+]?\d+(\.\d*)?[eE][-+]?\d+$"), list("-+0123456789")
    )
    return yaml.load(text, Loader)


def _toml(value: Any) -> str:
    if isinstance(value, Mapping):
        return "{ " + ", ".join(f"{json.dumps(key)} = {_toml(entry)}" for key, entry in value.items()) + " }"
    return json.dumps(value, ensure_ascii=False)


_WORDS = {
    "str": "a text",
    "bool": "true or false",
    "int": "a whole number",
    "float": "a number",
    "Changing": "a number or a schedule",
    "Paths": "a file or a list of files",
}


def _of_kind(name: str, value: Any, kind: str) -> Any:
    """A value as the type its field is declared with: 100.0 is taken as 100, 3 as 3.0."""
    kind, optional = kind.removesuffix(" | None"), kind.endswith("None")
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if value is None and optional:
        return None
    if kind == "Changing" and isinstance(value, Mapping):
        return {str(key): entry for key, entry in value.items()}
    if (kind == "str" and isinstance(value, str)) or (kind == "bool" and isinstance(value, bool)):
        return value
    if (
        kind == "Paths"
        and value
        and all(isinstance(path, str) for path in ([value] if isinstance(value, str) else value))
    ):
        return value if isinstance(value, str) else value[0] if len(value) == 1 else list(value)
    with suppress(ValueError, OverflowError):  # not a number; past the range of floats
        if number and kind == "int" and value == int(value):
            return int(value)
        if number and kind in ("float", "Changing"):
            return float(value)
    raise ModelMixError(f"{name} = {value!r} is not of the right kind: it must be {_WORDS[kind]}.")

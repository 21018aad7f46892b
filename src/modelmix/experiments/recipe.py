"""A training run as data: what ``modelmix train`` reads from a TOML or YAML file, and how a trainer is made of it."""

from __future__ import annotations

import dataclasses
import difflib
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from modelmix.errors import ModelMixError
from modelmix.privacy.accountant import epsilon as ledger_epsilon
from modelmix.privacy.calibration import smallest_safe
from modelmix.privacy.ledger import Ledger
from modelmix.privacy.mechanism import Mechanism
from modelmix.privacy.validation import at_least_zero, positive, probability, rate, whole

if TYPE_CHECKING:
    from modelmix.data import DataSet
    from modelmix.training import Performance, Schedule, Trainer

DEFAULT = Path(__file__).parent / "recipes" / "default.toml"

# name: (law of the noise, rule of a step, does the mechanism count on mixing)
MECHANISMS: Mapping[str, tuple[str, str, bool]] = {
    "modelmix": ("gaussian", "mix", True),
    "modelmix-laplace": ("laplace", "mix", True),
    "alternating": ("gaussian", "alternate", True),
    "plain": ("gaussian", "plain", False),
    "average": ("gaussian", "average", False),
    "released": ("gaussian", "released", True),
}

Changing = float | Mapping[str, Any]
"""A number, or a table {schedule = "linear", start, end} / {schedule = "cosine", ...} / {"1" = ..., "351" = ...}."""


@dataclass(frozen=True)
class Recipe:
    """Everything that defines a run. Units as in ``Trainer``; ``batch`` is the expected batch q*n.

    Exactly one of epsilon (the noise is then calibrated) and noise_multiplier is given, one of batch and sample_rate,
    and, for a mechanism that mixes, one of mixing_width (omega), tau_over_eta and tau.
    """

    name: str = "run"
    data: str = "fashion-mini"
    model: str = "cnn"
    mechanism: str = "modelmix"
    epsilon: float | None = None
    noise_multiplier: float | None = None
    delta: float = 1e-5
    steps: int = 100
    batch: float | None = None
    sample_rate: float | None = None
    clip: float = 1.0
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
        if self.mechanism not in MECHANISMS:
            raise ModelMixError(f"mechanism = {self.mechanism!r} is unknown: choose one of {', '.join(MECHANISMS)}.")
        self._one_of("epsilon", "noise_multiplier")
        self._one_of("batch", "sample_rate")
        if MECHANISMS[self.mechanism][2]:
            self._one_of("mixing_width", "tau_over_eta", "tau")
        elif any(value is not None for value in (self.mixing_width, self.tau_over_eta, self.tau)):
            raise ModelMixError(f"{self.mechanism} does not mix: leave out mixing_width, tau_over_eta and tau.")
        whole("steps", self.steps, "the number of steps", least=1)
        probability("delta", self.delta, "the failure probability")

    def _one_of(self, *names: str) -> None:
        given = [name for name in names if getattr(self, name) is not None]
        if len(given) != 1:
            raise ModelMixError(f"a recipe for {self.mechanism} needs exactly one of {', '.join(names)}.")

    @classmethod
    def from_mapping(cls, data: Mapping[str, Any]) -> Recipe:
        """Refuses unknown names, with the nearest known one."""
        known = {field.name for field in dataclasses.fields(cls)}
        for name in data:
            if name not in known:
                near = difflib.get_close_matches(str(name), known, 1)
                hint = f"did you mean {near[0]}?" if near else f"known are {', '.join(sorted(known))}."
                raise ModelMixError(f"a recipe has no {name!r}: {hint}")
        for field in dataclasses.fields(cls):
            wrong = field.name in data and not _fits(data[field.name], str(field.type))
            if wrong:
                raise ModelMixError(f"{field.name} = {data[field.name]!r} is not of the right kind ({field.type}).")
        return cls(**data)

    @classmethod
    def load(cls, path: str | Path) -> Recipe:
        """Reads a .toml, .yaml or .yml file."""
        return cls.from_mapping(read_mapping(path))

    def changed(self, **changes: Any) -> Recipe:
        """This recipe with some values replaced; one of an either-or pair pushes the other out."""
        for group in (
            ("epsilon", "noise_multiplier"),
            ("batch", "sample_rate"),
            ("mixing_width", "tau_over_eta", "tau"),
        ):
            if any(name in changes for name in group):
                changes = {**dict.fromkeys(group), **changes}
        if "mechanism" in changes and changes["mechanism"] in MECHANISMS and not MECHANISMS[changes["mechanism"]][2]:
            changes = {**changes, **dict.fromkeys(("mixing_width", "tau_over_eta", "tau"))}
        return Recipe.from_mapping({**dataclasses.asdict(self), **changes})

    def as_dict(self) -> dict[str, Any]:
        return {key: value for key, value in dataclasses.asdict(self).items() if value is not None}

    def rate_for(self, n: int) -> float:
        if self.sample_rate is not None:
            return rate("sample_rate", self.sample_rate, "the sampling rate")
        return rate("batch / samples", positive("batch", self.batch, "the expected batch") / n, "the sampling rate")

    def plan(self, n: int) -> Ledger:
        """The phases that will be run on n samples: the noise is calibrated here if epsilon is the target."""
        if self.epsilon is None:
            return self._phases(n, positive("noise_multiplier", self.noise_multiplier, "the noise multiplier"))
        positive("epsilon", self.epsilon, "the target epsilon")

        def value(z: float) -> float:
            return ledger_epsilon(self._phases(n, z), self.delta)

        return self._phases(n, smallest_safe(value, self.epsilon, start=1.0, tolerance=1e-4, name="noise multiplier"))

    def _phases(self, n: int, z: float) -> Ledger:
        law, _, mixes = MECHANISMS[self.mechanism]
        q = self.rate_for(n)
        ledger = Ledger()
        for steps, width in self._widths(q * n) if mixes else [(self.steps, 0.0)]:
            ledger = ledger.add(Mechanism(z, q, width, self.p, law), steps)
        return ledger

    def _widths(self, batch: float) -> list[tuple[int, float]]:
        """(steps, omega) in order; steps of the same width are put together."""
        out: list[tuple[int, float]] = []
        lr = self.schedule("lr")
        name = next(n for n in ("mixing_width", "tau_over_eta", "tau") if getattr(self, n) is not None)
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
        try:
            if shape == "pieces":
                points = {int(step): number for step, number in value.items() if step != "schedule"}
                return Schedule.pieces(points)
            make = {"linear": Schedule.linear, "cosine": Schedule.cosine}[shape]
            return make(value["start"], value["end"], value.get("steps", self.steps))
        except (KeyError, ValueError, TypeError) as error:
            if isinstance(error, ModelMixError):
                raise
            raise ModelMixError(
                f'{name} is not a schedule: write a number, {{schedule = "linear", start = 1.0, end = 0.1}}, the same '
                'with "cosine", or {1 = 0.15, 3001 = 0.015}.'
            ) from None

    def trainer(
        self,
        data: DataSet,
        *,
        folder: str | Path | None = None,
        resume: bool = False,
        performance: Performance | None = None,
    ) -> Trainer:
        """The trainer of this recipe on a data set."""
        import torch
        from torch import nn

        from modelmix.models import Pixels, build
        from modelmix.training import Trainer
        from modelmix.training.augment import AUGMENTATIONS

        if self.augment is not None and self.augment not in AUGMENTATIONS:
            raise ModelMixError(f"augment = {self.augment!r} is unknown: choose one of {', '.join(AUGMENTATIONS)}.")
        plan = self.plan(len(data.train))
        torch.manual_seed(0 if self.seed is None else self.seed)  # initial weights are public
        model = Pixels(build(self.model, data.shape, len(data.classes)))
        other = Pixels(build(self.model, data.shape, len(data.classes))) if self.second_start else None
        _, rule, _ = MECHANISMS[self.mechanism]
        about: dict[str, Any] = {"data": data.name, "model": self.model, "steps": self.steps, "recipe": self.as_dict()}
        if rule == "released":
            about["claimed_epsilon"] = ledger_epsilon(plan, self.delta)
        return Trainer(
            model,
            nn.CrossEntropyLoss(),
            data.train,
            plan,
            clip=self.clip,
            lr=self.schedule("lr"),
            rule=rule,
            padding=self.padding,
            momentum=self.momentum,
            weight_decay=at_least_zero("weight_decay", self.weight_decay, "the weight decay"),
            ema=self.ema,
            previous=other,
            augment=None if self.augment is None else AUGMENTATIONS[self.augment],
            multiplicity=self.multiplicity,
            test_set=data.test,
            delta=self.delta,
            seed=self.seed,
            folder=folder,
            resume=resume,
            name=self.name,
            about=about,
            performance=performance,
        )


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
            import yaml

            data = yaml.safe_load(text)
        else:
            raise ModelMixError(f"{path} is not a recipe: give a .toml, .yaml or .yml file.")
    except ModelMixError:
        raise
    except Exception as error:  # the parsers' own errors, which say where
        raise ModelMixError(f"{path} cannot be read as {path.suffix[1:]}: {' '.join(str(error).split())}.") from None
    if not isinstance(data, dict):
        raise ModelMixError(f"{path} is not a recipe: it must be a table of names and values.")
    return data


def _fits(value: Any, kind: str) -> bool:
    """Is a value of the kind a field is declared as?"""
    if value is None:
        return "None" in kind
    if isinstance(value, bool):
        return "bool" in kind
    if isinstance(value, int):
        return "int" in kind or "float" in kind or "Changing" in kind
    if isinstance(value, float):
        return "float" in kind or "Changing" in kind or ("int" in kind and value == int(value))
    if isinstance(value, str):
        return "str" in kind
    return isinstance(value, Mapping) and "Changing" in kind

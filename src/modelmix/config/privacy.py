"""The table ``[privacy]``: what epsilon is made of, and the plan that it makes."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import groupby
from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple, get_args

import msgspec

from modelmix._checks import rate
from modelmix.accounting.adjacency import ADD_OR_REMOVE, ZERO_OUT
from modelmix.accounting.embedding import EmbeddingMechanism
from modelmix.accounting.ledger import Ledger
from modelmix.accounting.mechanism import Mechanism
from modelmix.accounting.plan import Plan, calibrated_noise
from modelmix.accounting.runs import Claim, load_claim
from modelmix.config.tables import ConfigTable, key
from modelmix.errors import ModelMixError

if TYPE_CHECKING:
    from modelmix.training.schedules import Schedule

Kind = Literal["modelmix", "modelmix-laplace", "alternating", "plain", "average", "released"]


class Traits(NamedTuple):
    """The noise law of a mechanism, the rule of its steps, and whether its account counts on mixing."""

    law: Literal["gaussian", "laplace"]
    rule: str
    mixes: bool


MECHANISMS: Mapping[Kind, Traits] = {
    "modelmix": Traits("gaussian", "mix", True),
    "modelmix-laplace": Traits("laplace", "mix", True),
    "alternating": Traits("gaussian", "alternate", True),
    "plain": Traits("gaussian", "plain", False),
    "average": Traits("gaussian", "average", False),
    "released": Traits("gaussian", "released", True),
}
Changing = float | dict[str, Any]
"""A number, or a table {schedule = "linear", start, end} / {schedule = "cosine", ...} / {1 = ..., 351 = ...}."""

MIXING = ("mixing_width", "tau_over_eta", "tau")
EITHER = (("epsilon", "noise_multiplier"), ("batch", "sample_rate"), MIXING)


class PrivacyConfig(ConfigTable, frozen=True):
    """What epsilon is made of.

    Exactly one of epsilon (the noise is then calibrated) and noise_multiplier is given, one of batch and sample_rate,
    and, for a mechanism that mixes, one of mixing_width (omega), tau_over_eta and tau.
    """

    kind: Annotated[Kind, key(f"Mechanism: {', '.join(get_args(Kind))}.", "--mechanism")] = "modelmix"
    epsilon: Annotated[float, key("Target epsilon; the noise is calibrated to it.", "--epsilon", gt=0)] | None = None
    noise_multiplier: Annotated[float, key("Noise scale / clip, instead of epsilon.", gt=0)] | None = None
    delta: Annotated[float, key("Failure probability.", "--delta", gt=0, lt=1)] = 1e-5
    steps: Annotated[int, key("Number of steps T.", "--steps", ge=1)] = 100
    batch: Annotated[float, key("Expected batch: q times samples or population.", "--batch", gt=0)] | None = None
    sample_rate: Annotated[float, key("Poisson sampling rate q, instead of batch.", gt=0, le=1)] | None = None
    population: (
        Annotated[int, key("Public constant in place of the number of samples, which then stays private.", ge=1)] | None
    ) = None
    spent: (
        Annotated[
            str | list[str],
            key("Ledger of earlier releases on the same samples; included in epsilon. May be repeated.", "--spent"),
        ]
        | None
    ) = None
    clip: Annotated[float, key("Clip c of per-sample gradients.", "--clip", gt=0)] = 1.0
    p: Annotated[int, key("Truncation: coordinates at most c/sqrt(p); 1 is none.", ge=1)] = 1
    mixing_width: Annotated[Changing, key("Mixing width omega, (tau/eta)*B/c.")] | None = None
    tau_over_eta: Annotated[Changing, key("Mixing threshold tau / learning rate, instead of omega.")] | None = None
    tau: Annotated[Changing, key("Mixing threshold tau, instead of omega.")] | None = None
    padding: Annotated[Literal["exact", "paper"], key("How a gap below tau is widened.")] = "exact"
    embedding_clip: Annotated[float, key("Clip of embeddings; clip is that of residuals.", gt=0)] | None = None
    basis: Annotated[int, key("Number of basis vectors of embeddings [default: 1000].", ge=1)] | None = None
    groups: Annotated[int, key("Number of groups of embedded parameters [default: 3].", ge=1)] | None = None

    def __post_init__(self) -> None:
        if isinstance(self.spent, list) and len(self.spent) < 2:
            msgspec.structs.force_setattr(self, "spent", next(iter(self.spent), None))
        for names in EITHER if self.traits.mixes else EITHER[:2]:
            given = [name for name in names if getattr(self, name) is not None]
            if len(given) != 1:
                found = " and ".join(given) or "none"
                raise ModelMixError(f"[privacy] needs one of {', '.join(names)} for {self.kind}: it has {found}.")
        if not self.traits.mixes and any(getattr(self, name) is not None for name in MIXING):
            raise ModelMixError(f"{self.kind} does not mix: leave out {', '.join(MIXING)}.")
        if self.embedding_clip is None and (self.basis or self.groups):
            raise ModelMixError("basis and groups are of embedded gradients: give embedding_clip as well.")

    @property
    def embeds(self) -> bool:
        """Whether gradients are embedded in the directions of those of public images."""
        return self.embedding_clip is not None

    @property
    def traits(self) -> Traits:
        """What the mechanism is made of."""
        return MECHANISMS[self.kind]

    def public_size(self, n: int) -> int:
        """Return what every scale is derived from: the population, or the number of samples, which is then public."""
        return n if self.population is None else self.population

    def claim(self, n: int) -> Ledger:
        """Return an empty ledger with what a run on n samples can claim."""
        return Ledger(adjacency=ZERO_OUT if self.population is None else ADD_OR_REMOVE, population=self.public_size(n))

    def spent_claims(self) -> list[Claim]:
        """Return what the ledgers and run folders that ``spent`` names count as."""
        return [load_claim(path) for path in ([self.spent] if isinstance(self.spent, str) else self.spent or ())]

    def before(self) -> Ledger:
        """Return what had been released about the training samples before this run, or was planned to be."""
        out = Ledger()
        for found in self.spent_claims():
            out = out.then(found.ledger)
        return out

    def plan(self, n: int, price: Ledger, lr: Schedule) -> Plan:
        """Return the plan of training on n samples; noise is calibrated to epsilon if that is the target.

        Args:
            price: what is released before training; it counts.
            lr: decides the mixing width where ``tau`` is given.
        """
        size = self.public_size(n)
        q = self.sample_rate or rate("batch / samples", (self.batch or 0.0) / size, "the sampling rate")
        widths, law = self._widths(q * size, lr), self.traits.law

        def planned(noise: float) -> Plan:
            ledger = self.claim(n)
            for steps, width in widths:
                if self.embedding_clip is None:
                    mechanism = Mechanism(noise, q, width, self.p, law)
                else:
                    ratio = self.embedding_clip / self.clip
                    mechanism = EmbeddingMechanism(noise, q, width, self.p, law, clip_ratio=ratio)
                ledger = ledger.add(mechanism, steps)
            return Plan(ledger.phases, self.delta, size, ledger.adjacency, target=self.epsilon, spent=price)

        if self.epsilon is None:
            return planned(self.noise_multiplier or 0.0)
        return planned(calibrated_noise(lambda z: planned(z).ledger, self.epsilon, self.delta, price))

    def _widths(self, batch: float, lr: Schedule) -> list[tuple[int, float]]:
        """(steps, omega) in order; steps of the same width are put together."""
        if not self.traits.mixes:
            return [(self.steps, 0.0)]
        name = next(name for name in MIXING if getattr(self, name) is not None)
        mixing = as_schedule(f"privacy.{name}", getattr(self, name), self.steps)
        widths = []
        for step in range(1, self.steps + 1):
            width = mixing.at(step)
            if name != "mixing_width":
                width *= batch / self.clip
            if name == "tau":
                width /= lr.at(step)
            widths.append(width)
        return [(len(list(same)), width) for width, same in groupby(widths)]


def as_schedule(place: str, value: Changing, steps: int) -> Schedule:
    """Return a changing number of a recipe as a schedule; one without a length has that of the run."""
    from modelmix.training.schedules import Schedule, schedule

    if not isinstance(value, Mapping):
        return schedule(place, value, place.partition(".")[2])
    numbers = dict(value)
    shape = numbers.pop("schedule", "pieces")
    try:
        if shape == "pieces":
            return Schedule.pieces({int(step): number for step, number in numbers.items()})
        make = {"linear": Schedule.linear, "cosine": Schedule.cosine}[shape]
        return make(**{"steps": steps, **numbers})
    except ModelMixError as error:
        raise ModelMixError(f"{place}: {error}") from None
    except (KeyError, ValueError, TypeError):
        raise ModelMixError(
            f'{place} is not a schedule: write a number, {{schedule = "linear", start = 1.0, end = 0.1}}, the same '
            'with "cosine", or {1 = 0.15, 3001 = 0.015}.'
        ) from None

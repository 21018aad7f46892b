"""A plan: what shall run, what it will cost at most, and for whom that holds. A limit, not a forecast.

>>> import modelmix as mm
>>> plan = mm.plan(epsilon=3, delta=1e-5, samples=27_800, batch=1_024, steps=400, mixing_width=2)
>>> round(plan.mechanism_at(1).noise_multiplier, 2), plan.steps
(1.21, 400)
>>> plan.adjacency, plan.population
('zero-out', 27800)
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from os import PathLike, fspath
from typing import TYPE_CHECKING, Any, Union

from modelmix._checks import check_delta, positive, probability, rate, whole
from modelmix._format import up, up_digits
from modelmix.accounting.adjacency import ADD_OR_REMOVE, ZERO_OUT, Adjacency
from modelmix.accounting.calibration import OutOfReach, smallest_by_best
from modelmix.accounting.guarantee import Guarantee, epsilon, guarantee
from modelmix.accounting.ledger import Ledger, Phase, merge_phases, phase_from_dict
from modelmix.accounting.mechanism import Mechanism
from modelmix.errors import BudgetExceeded, ModelMixError

if TYPE_CHECKING:
    from modelmix.accounting.runs import Claim

Released = Union[Ledger, "Claim", str, PathLike[str]]
"""What names earlier releases: a ledger, what ``load_claim`` returns, or the path that it reads."""

_WAY_OUT = "Raise the target epsilon, or train on samples about which less has been released."
_DROWNED = 1.0  # times the largest possible sum of all clipped gradients, in a single direction


def all_released(spent: Released | Sequence[Released]) -> Ledger:
    """Return everything that counts as released before, as one ledger."""
    from modelmix.accounting.runs import Claim, load_claim

    if isinstance(spent, Ledger):
        spent.require_whole()
        return spent
    if isinstance(spent, Claim):
        spent.ledger.require_whole()
        return spent.ledger
    if isinstance(spent, (str, PathLike)):
        return load_claim(fspath(spent)).ledger
    if not isinstance(spent, (list, tuple)):
        raise ModelMixError(
            "spent is the Ledger of earlier releases about the same samples, a run folder, a ledger file, or a list of "
            f"these: {spent!r} is none."
        )
    out = Ledger()
    for each in spent:
        out = out.then(all_released(each))
    return out


@dataclass(frozen=True)
class Plan:
    """Mechanisms by step, for how many steps, over whom, at which delta.

    Guarantee: whoever runs a plan, or stops before its end for whatever reason, has the epsilon of the whole plan:
    stopping is post-processing. Trainer and loop refuse to go past it (``BudgetExceeded``); ``extended`` makes a longer
    one, whose epsilon is larger and is stated for all of its steps.

    Args:
        phases: what shall run, in order; ``Plan.of(mechanism, steps)`` for one mechanism.
        delta: the failure probability; below 1/population.
        population: the public number of samples (zero-out), or the public constant from which every scale is derived
            (add-or-remove). None takes the number of samples of the data it is run on, which is then public.
        adjacency: what can be claimed, see ``adjacency``.
        unit: what one neighbour differs in.
        target: the epsilon it was calibrated for, if it was: a plan that costs more is refused.
        spent: what was released about the same samples before; included in epsilon. A run folder or a ledger file, read
            by ``mm.load_claim`` so that runs and loops count as their plans, a ``Ledger``, or a list of these.
        unproved: the rules of the proof that what runs it breaks, in words: no epsilon is made of it.
    """

    phases: tuple[Phase, ...]
    delta: float = 1e-5
    population: int | None = None
    adjacency: Adjacency = ZERO_OUT
    unit: str = "sample"
    target: float | None = None
    spent: Ledger = field(default_factory=Ledger)
    unproved: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "phases", tuple(self.phases))
        if not self.phases or not all(isinstance(phase, Phase) for phase in self.phases):
            raise ModelMixError("a plan has at least one phase: use Plan.of(mechanism, steps), or mm.plan(...).")
        object.__setattr__(self, "delta", probability("delta", self.delta, "the failure probability"))
        object.__setattr__(self, "spent", all_released(self.spent))
        self.spent.require_proof()
        if self.target is not None:
            object.__setattr__(self, "target", positive("epsilon", self.target, "the target epsilon"))
        # The ledger's own checks of adjacency, unit and population come with it.
        check_delta(self.delta, self.ledger.populations)

    @classmethod
    def of(cls, source: Mechanism | Ledger, steps: int | None = None, **more: object) -> Plan:
        """A plan from one mechanism and its steps, or from the phases of a ledger and what that claims.

        ``more`` is what ``Plan`` takes. It may claim less than the ledger does, and not more.

        >>> Plan.of(Mechanism(1.0, 0.01), 100).steps
        100
        """
        if isinstance(source, Ledger):
            if steps is not None:
                raise ModelMixError("a ledger knows its steps: leave steps out.")
            return cls(source.phases, **{**_claim_of(source, more), **more})  # type: ignore[arg-type]
        if not isinstance(source, Mechanism):
            raise ModelMixError(f"{source!r} is neither a Mechanism nor a Ledger.")
        if steps is None:
            raise ModelMixError("say for how many steps: Plan.of(mechanism, steps).")
        return cls((Phase(source, steps),), **more)  # type: ignore[arg-type]

    @property
    def _claim(self) -> Ledger:
        return Ledger(adjacency=self.adjacency, unit=self.unit, population=self.population)

    @property
    def steps(self) -> int:
        """How many steps may run."""
        return sum(phase.steps for phase in self.phases)

    @cached_property
    def ledger(self) -> Ledger:
        """Everything that will have been released at the end: what was spent before, then the plan."""
        return self.spent.then(replace(self._claim, phases=self.phases, unproved=self.unproved))

    def mechanism_at(self, step: int) -> Mechanism:
        """The mechanism of a step, counted from 1; ``BudgetExceeded`` past the end."""
        self.require(step)
        seen = 0
        for phase in self.phases:
            seen += phase.steps
            if step <= seen:
                break
        return phase.mechanism

    def require(self, step: int) -> None:
        """Refuse a step past the end of the plan."""
        if step > self.steps:
            raise BudgetExceeded(
                f"step {step:,} is past the end of a plan of {self.steps:,} steps: its epsilon would no longer be the "
                "planned one. To go on at a larger epsilon, plan more steps: trainer.extend(steps), or "
                "optimizer.extend(steps) in a loop of your own."
            )

    def guarantee(self) -> Guarantee:
        """What holds for everything that is released, however early the run is stopped; refused above the target."""
        return guarantee(self)

    def expected_batch(self, step: int) -> float:
        """B = q * population, by which sums are divided, whatever size was drawn."""
        if self.population is None:
            raise ModelMixError("this plan is not bound to a number of samples yet: give samples or population.")
        return self.mechanism_at(step).sample_rate * self.population

    def extended(self, steps: int) -> Plan:
        """A plan with ``steps`` more steps of its last mechanism, without the old target.

        The decision may have been made by looking at what was released: the epsilon of the longer plan holds for those
        who would have stopped earlier as well.
        """
        last = self.phases[-1].mechanism
        longer = Ledger(self.phases).add(last, whole("steps", steps, "the number of further steps", least=1))
        return replace(self, phases=longer.phases, target=None)

    def after(self, steps: int) -> Ledger:
        """What is left of the plan after some steps."""
        left = Ledger()
        for phase in self.phases:
            taken = min(steps, phase.steps)
            steps -= taken
            if phase.steps > taken:
                left = left.add(phase.mechanism, phase.steps - taken)
        return replace(self._claim, phases=left.phases)

    def with_phases(self, phases: Iterable[Phase]) -> Plan:
        """The same claim over other phases; refused if they cost more than the target."""
        return replace(self, phases=merge_phases(phases)).kept_to_target()

    def kept_to_target(self) -> Plan:
        """Return the plan; refuse one that costs more than the epsilon it was made for."""
        if self.target is not None:
            self.guarantee()
        return self

    def extends(self, other: Plan) -> bool:
        """Whether everything that ``other`` planned is planned here first, with the same claim."""
        if replace(self, phases=other.phases, target=None) != replace(other, target=None):
            return False
        return Ledger(self.phases).starts_with(Ledger(other.phases))

    def as_dict(self) -> dict[str, object]:
        """The plan as plain data, as a run folder keeps it."""
        return {
            "phases": [phase.as_dict() for phase in self.phases],
            "delta": self.delta,
            "population": self.population,
            "adjacency": self.adjacency,
            "unit": self.unit,
            "target": self.target,
            "spent": self.spent.to_json() if self.spent.phases else None,
            **({"unproved": list(self.unproved)} if self.unproved else {}),
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Plan:
        """The inverse of ``as_dict``."""
        try:
            phases = merge_phases(phase_from_dict(entry) for entry in data["phases"])
            spent = Ledger() if data["spent"] is None else Ledger.from_json(data["spent"])
            rest = {name: data[name] for name in ("delta", "population", "adjacency", "unit", "target")}
            return cls(phases, spent=spent, unproved=tuple(data.get("unproved", ())), **rest)
        except (KeyError, TypeError, AttributeError):
            raise ModelMixError("the plan of this run is not readable: restore config.json.") from None

    def bound_to(self, samples: int) -> Plan:
        """The plan for data of this many samples, which is public unless the plan has a population of its own.

        Training begins here, so a plan that costs more than its target is refused here.
        """
        bound = self
        if self.population is None:
            bound = replace(self, population=samples)
        elif self.adjacency != ADD_OR_REMOVE and self.population != samples:
            raise ModelMixError(
                f"the plan was made for {self.population:,} samples and the data has {samples:,}: make them agree, or "
                "give the plan a population, a public constant that need not be the number of samples."
            )
        return bound.kept_to_target()

    def require_signal(self) -> None:
        """Refuse a target epsilon that leaves only noise, and say which would not.

        Drowned is a run whose noise, over all steps and in one single direction, is more than everything that all
        gradients together could add up to.
        """
        if self.target is None or self.population is None:
            return
        variance = sum(p.steps * p.mechanism.noise_multiplier**2 for p in self.phases)
        signal = sum(p.steps * p.mechanism.sample_rate for p in self.phases) * self.population
        times = math.sqrt(variance) / signal
        if times <= _DROWNED:
            return
        z, some = max(p.mechanism.noise_multiplier for p in self.phases), self.phases[0].mechanism
        less = replace(some, noise_multiplier=some.noise_multiplier * _DROWNED / times)
        possible = epsilon(self.spent.then(Ledger().add(less, self.steps)), self.delta)
        raise ModelMixError(
            f"epsilon {self.target:g} leaves only noise (z = {z:.4g}): over all {self.steps:,} steps it is "
            f"{times:.3g} times the largest possible sum of all gradients. With this batch and these steps epsilon "
            f"{up_digits(possible, 2)} is the least that leaves something to learn from; or use a larger batch or more "
            "samples."
        )


def _claim_of(ledger: Ledger, asked: Mapping[str, object]) -> dict[str, object]:
    """What a plan over the phases of a ledger may claim; refuses arguments that claim more than it does."""
    ledger.require_proof()
    ledger.require_whole()
    if ledger.seeded:
        raise ModelMixError("this ledger is of a seeded run, which a plan cannot say: plan its mechanism anew.")
    if ledger.populations and ledger.population is None:
        raise ModelMixError(
            "this ledger is of several populations, or of one that is not known for all of it: a plan has one; plan "
            "every part of it."
        )
    claim: dict[str, object] = {"adjacency": ledger.adjacency, "unit": ledger.unit, "population": ledger.population}
    more = asked.get("adjacency", ledger.adjacency) not in (ledger.adjacency, ZERO_OUT)
    other = {name for name in ("unit", "population") if asked.get(name, claim[name]) != claim[name]}
    if more or other - ({"population"} if ledger.population is None else set()):
        raise ModelMixError(
            "a plan cannot claim more than the ledger it is made of: leave adjacency, unit and population out, or plan "
            "its mechanism anew."
        )
    return claim


def plan(
    *,
    epsilon: float | None = None,
    delta: float = 1e-5,
    samples: int | None = None,
    population: int | None = None,
    batch: float | None = None,
    sample_rate: float | None = None,
    steps: int | None = None,
    epochs: float | None = None,
    noise_multiplier: float | None = None,
    mixing_width: float = 0.0,
    p: int = 1,
    law: str = "gaussian",
    spent: Released | Sequence[Released] | None = None,
) -> Plan:
    """Plan private training: the least noise for a target epsilon, or a given noise.

    Args:
        epsilon: the target; the noise is calibrated. Or give ``noise_multiplier`` (z).
        delta: the failure probability, below 1/population.
        samples: the number of samples, which the guarantee then treats as public (zero-out).
        population: instead, a public constant that does not move with the data: add-or-remove may then be claimed.
        batch: the expected batch, q * samples or q * population. Or give ``sample_rate`` (q).
        steps: how many at most. Or give ``epochs`` (steps times q).
        mixing_width, p, law: see ``Mechanism``.
        spent: what was released about the same samples before, a run folder, a ledger file or a list of them, see
            ``Plan``; epsilon includes it.

    Returns:
        A plan whose epsilon is at most the target. ``Trainer`` and ``make_private`` take it and refuse to go past it.

    Raises:
        ModelMixError: if a number is missing or given twice, if delta is not below 1/population, or if so small an
            epsilon leaves only noise.
    """
    _one("epsilon", epsilon, "noise_multiplier", noise_multiplier)
    _one("batch", batch, "sample_rate", sample_rate)
    _one("steps", steps, "epochs", epochs)
    if samples is not None and population is not None:
        raise ModelMixError("samples and population are two claims: give the one that is public.")
    many = samples if population is None else population
    if many is not None:
        many = whole("population" if samples is None else "samples", many, "the number of samples", least=1)
    if batch is not None:
        if many is None:
            raise ModelMixError("batch needs samples or population: q = batch / samples. Or give sample_rate.")
        q = rate("q = batch / samples", positive("batch", batch, "the expected batch") / many, "the sampling rate")
    else:
        q = rate("q", sample_rate, "the sampling rate")
    if steps is None:
        steps = math.ceil(positive("epochs", epochs, "the number of epochs") / q)
    check_delta(probability("delta", delta, "the failure probability"), [] if many is None else [many])
    before = Ledger() if spent is None else all_released(spent)

    def planned(z: float) -> Plan:
        return Plan(
            (Phase(Mechanism(z, q, mixing_width, p, law), steps),),
            delta,
            many,
            ZERO_OUT if population is None else ADD_OR_REMOVE,
            target=epsilon,
            spent=before,
        )

    if epsilon is None:
        return planned(noise_multiplier)  # type: ignore[arg-type]
    found = planned(calibrated_noise(lambda z: planned(z).ledger, epsilon, delta, before))
    found.require_signal()
    return found


def calibrated_noise(
    ledger_of: Callable[[float], Ledger], target: float, delta: float, spent: Ledger, tolerance: float = 1e-5
) -> float:
    """The least noise multiplier z for which the whole ledger, with what was spent before, keeps the target epsilon."""
    target = positive("epsilon", target, "the target epsilon")
    if spent.phases and (cost := epsilon(spent, delta)) >= target:
        raise BudgetExceeded(
            f"earlier releases about these samples have spent epsilon {up(cost)} at delta {up_digits(delta)} and the "
            f"target is {target:g}: nothing is left for training. {_WAY_OUT}"
        )
    try:
        return smallest_by_best(
            lambda z: epsilon(ledger_of(z), delta),
            lambda z: epsilon(ledger_of(z), delta, by="renyi"),
            target,
            start=1.0,
            tolerance=tolerance,
            name="noise multiplier",
        )
    except OutOfReach as error:
        if not spent.phases:
            raise
        raise BudgetExceeded(
            f"{error} Earlier releases about these samples have spent epsilon {up(epsilon(spent, delta))} of it at "
            f"delta {up_digits(delta)}. {_WAY_OUT}"
        ) from None


def _one(first: str, a: object, second: str, b: object) -> None:
    if (a is None) == (b is None):
        raise ModelMixError(f"give one of {first} and {second}: {'none' if a is None else 'both'} was given.")


def plan_for_loop(batch: float | None, epochs: float, **more: Any) -> Plan:
    """The plan of plain DP-SGD for a loop of some epochs, each of about 1/q draws; see ``plan``."""
    if batch is None:
        raise ModelMixError("the loader has no batch size: give a plan (mm.plan(...)) instead of epsilon.")
    many = more.get("samples") or more.get("population")
    batch = min(batch, positive("population", many, "the number of samples"))
    draws = max(1, round(positive("population", many, "the number of samples") / batch))
    steps = math.ceil(positive("epochs", epochs, "the number of epochs") * draws)
    return plan(batch=batch, steps=steps, **more)

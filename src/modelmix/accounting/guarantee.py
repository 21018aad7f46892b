"""The guarantee: the one epsilon of a plan or a ledger, and every sentence that is said about it.

``guarantee`` takes the smallest epsilon of all proved accountants: Renyi moments, which cover every mechanism here; the
distribution of the privacy losses of the worst gradient, exact for Laplace noise and, through the functions of
``cone``, an upper bound for mixed Gaussian noise; and privacy-loss distributions of the same noise without mixing,
which are tight for plain Gaussian noise and sound for a mixed mechanism because mixing is post-processing. Training,
calibration, progress, reports, ``verify`` and JSON all ask this function, so that there is no second number for the
same thing.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal, Union, get_args

import numpy as np
from numpy.typing import ArrayLike

from modelmix._checks import at_least_zero, check_delta, probability
from modelmix._format import up, up_digits
from modelmix.accounting import accountant, pld
from modelmix.accounting.adjacency import ADD_OR_REMOVE, REPLACE_ONE, Adjacency, check_adjacency, relation
from modelmix.accounting.composition import ROUGH, hockey_stick_is_sound, loss_delta, loss_epsilon
from modelmix.accounting.embedding import EmbeddingMechanism
from modelmix.accounting.functions import Array
from modelmix.accounting.laws import known
from modelmix.accounting.ledger import Ledger
from modelmix.accounting.mechanism import Mechanism
from modelmix.errors import BudgetExceeded, ModelMixError

if TYPE_CHECKING:
    from modelmix.accounting.plan import Plan
    from modelmix.accounting.runs import Claim

By = Literal["best", "renyi", "classic", "pld", "cone"]
Source = Union[Mechanism, Ledger, "Plan", "Claim"]

_MOST_DISTRIBUTIONS = 32  # a privacy-loss distribution for every different mechanism takes its time
_CURVE = 16
_HOPELESS = 3.0  # times the group bound by moments: distributions will not bring it below
_ENOUGH = 1 + 1e-9
_ROUGHLY = 0.98  # a distribution of few buckets is above one of many by less than this factor

SEEDED = (
    "seeded: for tests only; it holds only against those who neither know the seed nor see another run with the same "
    "seed, and nothing of it can be published as a guarantee"
)
SEPARATE_ROWS = (
    "every row of the training data was made from one sample alone, whichever were read before it, e.g. not normalised "
    "with the mean of the whole dataset"
)
PUBLIC_START = (
    "the model, its initial weights, the criterion and the settings were chosen without these samples, or spent "
    "counts what the choice cost"
)
IDEAL = "arithmetic in real numbers, and draws and noise from a perfect source of randomness"
PRECONDITIONS = (SEPARATE_ROWS, PUBLIC_START)
"""What nobody can prove from outside: it is printed with the guarantee of every run."""
COVERED = (
    "every released state, one after each step, and all of them together",
    "the final model",
    "averages of released states (EMA) and momentum computed from released states",
    "anything else computed from these without looking at the training data again",
)
_NOT_COVERED = (
    "tuning of hyper-parameters on this data, in this run or in earlier ones",
    "several samples of one person: the guarantee is for one sample, and weakens with every further one",
    "finite-precision arithmetic: the proof is about real numbers, the program adds noise in floating point",
    "the checkpoint: it holds the key of the noise still to come and must stay secret",
    "how long a step takes, error messages and warnings: they are for the data holder's eyes",
)


@dataclass(frozen=True)
class Guarantee:
    """(epsilon, delta)-differential privacy, for whom, against what, and by which proof.

    Args:
        epsilon, delta: what is proved; epsilon is an upper bound.
        accountant: what proves it: "RDP", "PLD", "PLD cone" (see ``cone``) or "pure".
        order: the Renyi order, where that is the proof; 0 otherwise.
        reason: why epsilon is infinite, or looser than it could be, where it is.
        adjacency, unit, population: which datasets are compared, see ``adjacency``.
        steps: how many were counted.
        seeded: whether the noise came from a seed.
        assumed: what the number rests on besides theorems.
        excluded: what this run in particular leaves uncovered.
        populations: every population that is known of a part of it.

    >>> import modelmix as mm
    >>> mm.guarantee(mm.Mechanism(1.0, 0.01), 1e-5, steps=1000).accountant
    'PLD'
    """

    epsilon: float
    delta: float
    accountant: str
    order: float = 0.0
    reason: str | None = None
    adjacency: Adjacency = "zero-out"
    unit: str = "sample"
    population: int | None = None
    steps: int = 0
    seeded: bool = False
    assumed: tuple[str, ...] = ()
    excluded: tuple[str, ...] = ()
    populations: tuple[int, ...] = ()

    @property
    def relation(self) -> str:
        """Which datasets are compared, in words."""
        return relation(self.adjacency, self.unit, self.population)

    @property
    def scope(self) -> str:
        """One sentence: for which neighbours, which sampling and which observer it holds."""
        seeded = f" {SEEDED[0].upper()}{SEEDED[1:]}." if self.seeded else ""
        return (
            f"Holds when {self.relation}, for Poisson sampling, against an adversary who sees every released state and "
            f"knows all other samples.{seeded}"
        )

    @property
    def notes(self) -> tuple[str, ...]:
        """What a reader should know about the numbers."""
        most = max(self.populations, default=0)
        if self.delta * 10 * most <= 1:
            return ()
        return (
            f"delta = {up_digits(self.delta)} is large for n = {most:,}: a delta below 1/(10 n) = "
            f"{1 / (10 * most):.2g} is better.",
        )

    @property
    def not_covered(self) -> tuple[str, ...]:
        """What epsilon says nothing about."""
        if self.adjacency == ADD_OR_REMOVE:
            return (*self.excluded, *_NOT_COVERED)
        return ("the number of samples: it is public in this guarantee", *self.excluded, *_NOT_COVERED)

    def as_dict(self) -> dict[str, Any]:
        """The guarantee as plain data, for JSON and the certificate."""
        return {
            "epsilon": self.epsilon,
            "delta": self.delta,
            "accountant": self.accountant,
            "order": self.order,
            "reason": self.reason,
            "adjacency": self.adjacency,
            "unit": self.unit,
            "population": self.population,
            "populations": list(self.populations),
            "sampling": "Poisson",
            "steps": self.steps,
            "seeded": self.seeded,
            "scope": self.scope,
            "notes": list(self.notes),
            "covered": list(COVERED),
            "not_covered": list(self.not_covered),
            "assumed": list(self.assumed),
        }

    @property
    def statement(self) -> str:
        """The number and for whom it holds, in one line."""
        return f"epsilon {up(self.epsilon)} at delta {up_digits(self.delta)} ({self.accountant}). {self.scope}"

    @property
    def lines(self) -> tuple[str, ...]:
        """Everything that goes with the number wherever it is printed: for whom it holds, what is assumed, what is not
        covered in this run in particular."""
        assumed = (f"Assumed: {line}." for line in self.assumed)
        return (self.scope, *assumed, *(f"Not covered: {line}." for line in self.excluded), *self.notes)

    def __str__(self) -> str:
        return "\n".join([self.statement, *self.lines[1:]])


def assumptions(ledger: Ledger, accountant: str = "RDP") -> tuple[str, ...]:
    """What an epsilon of this ledger rests on besides theorems, and what nobody can prove from outside."""
    out = []
    own = any(known(phase.mechanism.coordinate_law) is None for phase in ledger.phases)
    if own:
        out.append("moments of an unlisted noise law convex in the clipped norm and falling with the width: on a grid")
    laplace = any(phase.mechanism.mixed and phase.mechanism.law != "gaussian" for phase in ledger.phases)
    if own or (laplace and accountant.startswith("RDP")):
        out.append("quadrature error of the moments estimated by halving panels, and added tenfold")
    if any(isinstance(phase.mechanism, EmbeddingMechanism) for phase in ledger.phases):
        out.append("the samples in whose directions gradients are embedded are public")
    return (*out, IDEAL, *PRECONDITIONS)


def as_ledger(source: Source, steps: int | None = None) -> Ledger:
    """What would run, as a ledger: of a plan, of a mechanism and its steps, or a ledger as it is."""
    if isinstance(source, Mechanism):
        if steps is None:
            raise ModelMixError("say for how many steps: steps = a whole number, 1 or more.")
        return Ledger().add(source, steps)
    if not isinstance(source, Ledger):
        source = getattr(source, "ledger", source)
    if not isinstance(source, Ledger):
        raise ModelMixError(f"{source!r} is neither a Plan, a Ledger nor a Mechanism.")
    if steps is not None:
        raise ModelMixError("a ledger knows its steps: leave steps out.")
    return source


def guarantee(
    source: Source,
    delta: float | None = None,
    *,
    steps: int | None = None,
    by: By = "best",
    adjacency: Adjacency | None = None,
) -> Guarantee:
    """The smallest proved epsilon of a plan, a ledger, ``steps`` steps of a mechanism, or what ``load_claim`` returns.

    Args:
        delta: the failure probability; None takes the plan's.
        by: "best" of all proved accountants, or one of them: "renyi" (conversion of Canonne, Kamath and Steinke),
            "classic" (log(1/delta)/(alpha-1)), "pld" (plain Gaussian noise, or Laplace noise throughout), "cone" (the
            losses of the worst gradient, for mixed Gaussian noise too).
        adjacency: None takes what the ledger can claim; "replace-one" may be asked of any.

    Raises:
        UnprovedError: for a ledger that broke a rule, or by="pld" for a mechanism it is not sound for.
    """
    ledger = as_ledger(source, steps)
    delta = probability("delta", getattr(source, "delta", None) if delta is None else delta, "the failure probability")
    _check_by(by)
    ledger.require_proof()
    wanted = _relation(source, ledger, adjacency)
    if ledger.populations:
        check_delta(delta, ledger.populations)
    found = _replace_one(ledger, delta, by) if wanted == REPLACE_ONE else _best(ledger, delta, by)
    target = getattr(source, "target", None)
    as_planned = by == "best" and wanted == ledger.adjacency and delta == getattr(source, "delta", None)
    if target is not None and as_planned and found.epsilon > target * _ENOUGH:
        raise BudgetExceeded(
            f"this plan costs epsilon {up(found.epsilon, 6)} and was made for {target:g}: calibrate it for what runs."
        )
    hidden = wanted != ledger.adjacency and ledger.adjacency == ADD_OR_REMOVE  # a constant, not the number of samples
    found = replace(
        found,
        adjacency=wanted,
        unit=ledger.unit,
        population=None if hidden else ledger.population,
        populations=ledger.populations,
        steps=ledger.steps,
        seeded=ledger.seeded,
        assumed=assumptions(ledger, found.accountant),
    )
    qualified = getattr(source, "qualified", None)  # of a claim
    return found if qualified is None else qualified(found)


def _relation(source: Source, ledger: Ledger, asked: Adjacency | None) -> Adjacency:
    """The relation that is asked for, or the ledger's own; refuses one that the ledger cannot claim."""
    wanted = ledger.adjacency if asked is None else check_adjacency(asked)
    if wanted == ADD_OR_REMOVE and ledger.adjacency != ADD_OR_REMOVE and not isinstance(source, Mechanism):
        raise ModelMixError(
            "add-or-remove cannot be claimed where scales may come from the number of samples: give a population."
        )
    return wanted


def epsilon(
    source: Source,
    delta: float | None = None,
    *,
    steps: int | None = None,
    by: By = "best",
    adjacency: Adjacency | None = None,
) -> float:
    """epsilon at ``delta`` of a plan, a ledger, or ``steps`` steps of a mechanism: ``guarantee(...).epsilon``."""
    return guarantee(source, delta, steps=steps, by=by, adjacency=adjacency).epsilon


def delta(
    source: Source,
    epsilon: float,
    *,
    steps: int | None = None,
    by: By = "best",
    adjacency: Adjacency | None = None,
) -> float:
    """The smallest proved delta at ``epsilon``; 1 where nothing is proved.

    Args:
        adjacency: as for ``guarantee``: None takes what the ledger can claim.
    """
    ledger = as_ledger(source, steps)
    _check_by(by)
    ledger.require_proof()
    epsilon = at_least_zero("epsilon", epsilon, "the privacy loss")
    if _relation(source, ledger, adjacency) != REPLACE_ONE:
        return _delta(ledger, epsilon, by)
    half = epsilon / 2
    removed = _delta(ledger, half, by)
    found = 0.0 if removed == 0 else math.exp(min(0.0, float(np.logaddexp(0.0, half)) + math.log(removed)))
    twice = pld.halved(ledger)
    if twice is None or (by == "pld" and any(phase.mechanism.mixed for phase in ledger.phases)):
        return found
    worth = _unsampled(ledger) or by == "pld" or _delta(twice, epsilon, "renyi") < 1
    return min(found, _delta(twice, epsilon, by if worth else "renyi"))


def _delta(ledger: Ledger, epsilon: float, by: By) -> float:
    """The smallest proved delta for the pair of zero-out and add-or-remove, which is the same."""
    found = 1.0
    if by in ("best", "renyi", "classic"):
        conversion: Literal["classic", "improved"] = "classic" if by == "classic" else "improved"
        found = accountant.delta(ledger, epsilon, conversion=conversion)
    if _by_losses(ledger, by):
        found = min(found, loss_delta(ledger.phases, epsilon))
        if by != "best":
            return found
    if by == "pld" or (by == "best" and _worth_distributions(ledger)):
        found = min(found, pld.pld_delta(ledger if by == "pld" else pld.unmixed(ledger), epsilon))
    return min(1.0, found)


def epsilon_curve(mechanism: Mechanism, steps: ArrayLike, delta: float, *, by: By = "best") -> Array:
    """epsilon after each of many step counts; at the largest it is what ``epsilon`` says.

    Moments are cheap for every count. Privacy-loss distributions are asked at 16 counts at most and, but for the
    largest, with fewer buckets; a count between two of them has at most the epsilon of the next.
    """
    _check_by(by)
    if by in ("pld", "cone"):
        raise ModelMixError('a curve is drawn by "best", "renyi" or "classic".')
    out = accountant.epsilon_curve(mechanism, steps, delta, conversion="classic" if by == "classic" else "improved")
    counts = np.array([int(t) for t in np.ravel(steps)])
    if by != "best" or counts.size == 0:
        return out
    last = int(counts.max())
    end = guarantee(mechanism, delta, steps=last).epsilon
    if end < out[counts.argmax()]:  # distributions help
        distinct = np.unique(counts)
        asked = distinct[np.unique(np.linspace(0, distinct.size - 1, min(distinct.size, _CURVE)).round().astype(int))]
        found = [end if t == last else quick_epsilon(Ledger().add(mechanism, int(t)), delta) for t in asked]
        out = np.minimum(out, np.array(found)[np.searchsorted(asked, counts)])
    return np.minimum(out, end)


def quick_epsilon(ledger: Ledger, delta: float) -> float:
    """An upper bound at most a few parts in 10^4 above ``epsilon``, several times faster: for the points of a plot."""
    found = accountant.guarantee(ledger, delta)
    if found.epsilon > 0 and _by_losses(ledger, "best"):
        found = replace(found, epsilon=min(found.epsilon, loss_epsilon(ledger.phases, delta, ROUGH)[0]))
    if found.epsilon == 0 or math.isinf(found.order) or not _worth_distributions(ledger):
        return found.epsilon
    plain = pld.unmixed(ledger)
    if any(pld.one_step_delta(phase.mechanism, found.epsilon) > delta for phase in plain.phases):
        return found.epsilon
    return min(found.epsilon, pld.pld_epsilon(plain, delta, pld.ROUGH))


def _check_by(by: str) -> None:
    if by not in get_args(By):
        raise ModelMixError(f"by = {by!r} is unknown: choose one of {', '.join(get_args(By))}.")


def _best(ledger: Ledger, delta: float, by: By) -> Guarantee:
    """The smallest epsilon for the pair of zero-out and add-or-remove, which is the same."""
    if by in ("pld", "cone") and _by_losses(ledger, by):
        value, why = loss_epsilon(ledger.phases, delta)
        return Guarantee(value, delta, _losses(ledger), reason=why)
    if by == "pld":
        return Guarantee(pld.pld_epsilon(ledger, delta), delta, "PLD")
    moments = accountant.guarantee(ledger, delta, conversion="classic" if by == "classic" else "improved")
    pure = math.isinf(moments.order)
    found = Guarantee(moments.epsilon, delta, "pure" if pure else "RDP", moments.order, moments.reason)
    if by != "best" or moments.epsilon == 0:
        return found
    if _by_losses(ledger, by):
        value, why = loss_epsilon(ledger.phases, delta)
        if value < found.epsilon:
            found = Guarantee(value, delta, _losses(ledger))
        elif why is not None and not pure:
            found = replace(found, reason="; ".join(filter(None, (found.reason, why))))
    if not pure and _worth_distributions(ledger, replace(moments, epsilon=found.epsilon)):
        tighter = pld.pld_epsilon(pld.unmixed(ledger), delta)
        if tighter < found.epsilon:
            mixed = any(phase.mechanism.mixed for phase in ledger.phases)
            note = "of the same noise without mixing, of which mixing is post-processing" if mixed else None
            return Guarantee(tighter, delta, "PLD", reason=note)
    return found


def _by_losses(ledger: Ledger, by: By) -> bool:
    """Whether the losses of the worst gradient are asked: not where plain Gaussian noise has a tight accountant."""
    if by == "pld":
        return bool(ledger.phases) and hockey_stick_is_sound(ledger.phases)
    plain = all(phase.mechanism.law == "gaussian" and not phase.mechanism.mixed for phase in ledger.phases)
    return by == "cone" or (by == "best" and not plain)


def _losses(ledger: Ledger) -> str:
    return "PLD" if hockey_stick_is_sound(ledger.phases) else "PLD cone"


def _worth_distributions(ledger: Ledger, found: accountant.RenyiBound | None = None) -> bool:
    """Whether a privacy-loss distribution is sound here and can help.

    It always is a choice of ours which accountant is asked: leaving one out never makes epsilon too small.
    """
    if any(phase.mechanism.law != "gaussian" for phase in ledger.phases):
        return False
    if len({phase.mechanism for phase in ledger.phases}) > _MOST_DISTRIBUTIONS:
        return False
    if found is None or not any(phase.mechanism.mixed for phase in ledger.phases):
        return True
    plain = pld.unmixed(ledger)
    # One step without mixing costs more than all of them with it: so do all steps without mixing.
    if any(pld.one_step_delta(phase.mechanism, found.epsilon) > found.delta for phase in plain.phases):
        return False
    return _ROUGHLY * pld.pld_epsilon(plain, found.delta, pld.ROUGH) < found.epsilon


def _unsampled(ledger: Ledger) -> bool:
    return all(phase.mechanism.sample_rate == 1 for phase in ledger.phases)


def _replace_one(ledger: Ledger, target: float, by: By) -> Guarantee:
    """One unit replaced by another: the smaller of two bounds.

    Half the noise at q = 1, see ``halved``; without sampling and mixing it is exact. And group privacy for two, by way
    of the dataset without the unit: with delta_0 the curve of removing, delta(2 e) <= (1 + exp(e)) delta_0(e).
    """
    twice = pld.halved(ledger)
    if twice is not None and _unsampled(ledger) and not any(phase.mechanism.mixed for phase in ledger.phases):
        return _best(twice, target, by)
    group = _group_of_two(ledger, target, by)
    if twice is None or by == "pld":
        return group
    direct = _best(twice, target, "classic" if by == "classic" else "renyi")
    if by == "best" and (_unsampled(ledger) or direct.epsilon < _HOPELESS * max(1.0, group.epsilon)):
        direct = _best(twice, target, by)
    if direct.epsilon >= group.epsilon:
        return group
    return direct if _unsampled(ledger) else replace(direct, reason="of half the noise without sampling")


def _group_of_two(ledger: Ledger, target: float, by: By) -> Guarantee:
    found, proof = math.inf, "RDP, group of two"
    if by in ("best", "renyi", "classic"):
        moments: By = "classic" if by == "classic" else "renyi"
        found = _least_for_two(lambda e: delta(ledger, e, by=moments), target)
    if _by_losses(ledger, by):
        tighter = _least_for_two(lambda e: loss_delta(ledger.phases, e, ROUGH), target)
        if tighter < found:
            found, proof = tighter, f"{_losses(ledger)}, group of two"
    if (by == "pld" and not _by_losses(ledger, by)) or (by == "best" and _worth_distributions(ledger)):
        tighter = pld.pld_group_epsilon(ledger if by == "pld" else pld.unmixed(ledger), target)
        if tighter < found:
            found, proof = tighter, "PLD, group of two"
    if math.isinf(found):
        return Guarantee(math.inf, target, proof, reason="no finite epsilon is proved for replacing a unit")
    return Guarantee(2 * found, target, proof, reason="by way of the dataset without the unit")


def _least_for_two(delta_at: Callable[[float], float], target: float) -> float:
    """The least e with (1 + exp(e)) delta(e) <= target, within 1e-4; infinity from 300 on."""
    low, high = 0.0, 1.0
    while high < 300 and not (1 + math.exp(high)) * delta_at(high) <= target:
        low, high = high, 2 * high
    while high < 300 and high - low > 1e-4 * high:
        middle = (low + high) / 2
        low, high = (low, middle) if (1 + math.exp(middle)) * delta_at(middle) <= target else (middle, high)
    return high if high < 300 else math.inf

"""A ledger is data: which mechanism ran for how many steps, in order.

It is saved as JSON beside every checkpoint, and anyone can recompute epsilon from it without the model. Two equal
phases in a row become one. The file carries a digest of its content, so that a truncated or edited ledger is refused;
the digest guards against accidents and sloppy edits, not against a forger.

A run that broke a rule of the proof keeps a ledger too, with the rules it broke; no epsilon is ever computed from it.

A ledger also says for which neighbours its epsilon holds (adjacency, unit, population) and whether the run was seeded:
version 3 of the file. Files of versions 1 and 2 say nothing of it and are read as zero-out, which is what the runs that
wrote them can claim.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from itertools import groupby
from pathlib import Path

from modelmix._checks import whole
from modelmix._files import alone_with, write_atomically
from modelmix.accounting.adjacency import ADD_OR_REMOVE, REPLACE_ONE, ZERO_OUT, Adjacency, check_adjacency
from modelmix.accounting.embedding import mechanism_from_dict
from modelmix.accounting.mechanism import Mechanism
from modelmix.errors import ModelMixError, UnprovedError

SCHEMA = "modelmix-ledger"
VERSION = 3
_OLDER = {1: ("phases",), 2: ("phases", "unproved")}
_LISTS = ("phases", "unproved", "populations")
_CLAIM = ("adjacency", "unit", "population", "populations", "seeded")
_UNIT = re.compile(r"[A-Za-z][A-Za-z0-9 -]{0,29}")  # it stands in printed sentences and must not be one


@dataclass(frozen=True)
class Phase:
    """``steps`` steps of one mechanism."""

    mechanism: Mechanism
    steps: int

    def __post_init__(self) -> None:
        if not isinstance(self.mechanism, Mechanism):
            raise ModelMixError(f"{self.mechanism!r} is not a Mechanism.")
        object.__setattr__(self, "steps", whole("steps", self.steps, "the number of steps", least=1))

    def as_dict(self) -> dict[str, object]:
        """The fields of the mechanism and the steps, as plain data."""
        return {**self.mechanism.as_dict(), "steps": self.steps}


def phase_from_dict(entry: object) -> Phase:
    """The inverse of ``Phase.as_dict``; refuses anything else."""
    if not isinstance(entry, dict) or "steps" not in entry:
        raise ModelMixError('every phase of a ledger is an object with "steps" and a mechanism.')
    return Phase(mechanism_from_dict({key: value for key, value in entry.items() if key != "steps"}), entry["steps"])


def merge_phases(phases: Iterable[Phase]) -> tuple[Phase, ...]:
    """Put phases of the same mechanism in a row together."""
    return tuple(Phase(mechanism, sum(phase.steps for phase in row)) for mechanism, row in groupby(phases, _mechanism))


def _mechanism(phase: Phase) -> Mechanism:
    return phase.mechanism


@dataclass(frozen=True)
class Ledger:
    """Phases in the order in which they ran. Immutable: ``add`` returns a longer ledger.

    Args:
        phases: what ran.
        unproved: the rules of the proof that were broken, in words; empty for an honest run.
        adjacency: the neighbours the run can claim, "zero-out" or "add-or-remove".
        unit: what one neighbour differs in.
        population: the public number of samples (zero-out), or the public constant every scale comes from
            (add-or-remove); None if it is not known, or not the same for all phases.
        seeded: whether the noise came from a seed: the epsilon then holds only against those who do not know it.
        populations: every population that is known of some phase, in order; filled in where there is one for all.
        stopped: where it was read from, if from a run that planned more: no epsilon is made of it, because what counts
            is the plan. It is not written down and not compared.
        live: whether it is ``stopped`` because its trainer or loop may go on: the epsilon so far can be asked for, but
            it is not saved elsewhere, and not given as what was spent.
    """

    phases: tuple[Phase, ...] = field(default=())
    unproved: tuple[str, ...] = field(default=())
    adjacency: Adjacency = ZERO_OUT
    unit: str = "sample"
    population: int | None = None
    seeded: bool = False
    populations: tuple[int, ...] = field(default=())
    stopped: str = field(default="", compare=False, repr=False)
    live: bool = field(default=False, compare=False, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "phases", tuple(self.phases))
        if not all(isinstance(phase, Phase) for phase in self.phases):
            raise ModelMixError("a ledger is made of phases: use Ledger().add(mechanism, steps).")
        object.__setattr__(self, "unproved", tuple(self.unproved))
        if not all(isinstance(reason, str) and reason for reason in self.unproved):
            raise ModelMixError("the broken rules of a ledger are written in words.")
        if check_adjacency(self.adjacency) == REPLACE_ONE:
            raise ModelMixError("a ledger claims zero-out or add-or-remove; ask guarantee() about replace-one.")
        known = {whole("population", n, "the number of samples", least=1) for n in self.populations}
        if self.population is not None:
            population = whole("population", self.population, "the number of samples", least=1)
            object.__setattr__(self, "population", population)
            if not known <= {population}:
                raise ModelMixError("a ledger of several populations has no single one: leave population out.")
            known = {population}
        elif self.adjacency == ADD_OR_REMOVE and not known:
            raise ModelMixError("add-or-remove needs a population: the public constant that every scale comes from.")
        object.__setattr__(self, "populations", tuple(sorted(known)))
        if not isinstance(self.unit, str) or not _UNIT.fullmatch(self.unit):
            raise ModelMixError(
                "the unit of a ledger is not a word: it must be at most 30 letters, digits, spaces and hyphens and "
                "begin with a letter; take for instance sample."
            )
        if not isinstance(self.seeded, bool):
            raise ModelMixError("seeded is true or false.")

    def add(self, mechanism: Mechanism, steps: int = 1) -> Ledger:
        """This ledger followed by ``steps`` steps of ``mechanism``."""
        new = Phase(mechanism, steps)
        if self.phases and self.phases[-1].mechanism == mechanism:
            return replace(self, phases=(*self.phases[:-1], Phase(mechanism, self.phases[-1].steps + new.steps)))
        return replace(self, phases=(*self.phases, new))

    def then(self, other: Ledger) -> Ledger:
        """A ledger with all of another one after this one; what either breaks, both break.

        The claim is the weaker of the two, whichever comes first: zero-out if either is, because add-or-remove implies
        it, and no single population where they differ, where one is not known, or where one is a number of samples and
        the other a constant. An empty ledger claims nothing and takes on
        the other's claim.
        """
        said = [ledger for ledger in (self, other) if ledger.phases] or [other]
        if len({ledger.unit for ledger in said}) > 1:
            raise ModelMixError(
                f"these ledgers are about different units, {self.unit} and {other.unit}: they cannot be added up."
            )
        return Ledger(
            merge_phases((*self.phases, *other.phases)),
            (*self.unproved, *(rule for rule in other.unproved if rule not in self.unproved)),
            ZERO_OUT if any(ledger.adjacency == ZERO_OUT for ledger in said) else ADD_OR_REMOVE,
            said[0].unit,
            said[0].population if len({(ledger.adjacency, ledger.population) for ledger in said}) == 1 else None,
            self.seeded or other.seeded,
            tuple({n for ledger in said for n in ledger.populations}),
            self.stopped or other.stopped,
            all(ledger.live for ledger in (self, other) if ledger.stopped) and bool(self.stopped or other.stopped),
        )

    @property
    def instead(self) -> str:
        """What counts the plan of a run that was stopped."""
        return f"{self.stopped}.plan.ledger, or its folder or file" if self.live else f"mm.load_claim({self.stopped!r})"

    def starts_with(self, other: Ledger) -> bool:
        """Whether everything in ``other`` comes first in this ledger, however steps are put together to phases."""
        mine, left, mechanism = iter(self.phases), 0, None
        for phase in other.phases:
            wanted = phase.steps
            while wanted:
                if not left:
                    coming = next(mine, None)
                    if coming is None:
                        return False
                    mechanism, left = coming.mechanism, coming.steps
                if mechanism != phase.mechanism:
                    return False
                matched = min(wanted, left)
                wanted, left = wanted - matched, left - matched
        return True

    def mechanism_at(self, step: int) -> Mechanism:
        """The mechanism of a step, counted from 1."""
        seen = 0
        for phase in self.phases:
            seen += phase.steps
            if step <= seen:
                return phase.mechanism
        raise ModelMixError(f"step {step} is past the end of a ledger of {seen} steps.")

    def require_proof(self) -> None:
        """Raises ``UnprovedError`` if a rule was broken, and refuses what is a part of a run."""
        if not self.live:
            self.require_whole()
        if self.unproved:
            raise UnprovedError(
                "a step does what its mechanism says",
                f"this run was not private training: {'; '.join(self.unproved)}.",
                "Its epsilon is not proved; train with a mechanism that is.",
            )

    @property
    def steps(self) -> int:
        return sum(phase.steps for phase in self.phases)

    @property
    def digest(self) -> str:
        """The digest that its file carries."""
        return str(json.loads(self.to_json())["digest"])

    def to_json(self) -> str:
        """The ledger as text, with its schema, version and digest."""
        body: dict[str, object] = {
            "schema": SCHEMA,
            "version": VERSION,
            "phases": [phase.as_dict() for phase in self.phases],
            "unproved": list(self.unproved),
            **{name: getattr(self, name) for name in _CLAIM},
        }
        return json.dumps({**body, "digest": _digest(body)}, indent=1) + "\n"

    @classmethod
    def from_json(cls, text: str) -> Ledger:
        """Reads what ``to_json`` wrote, now or in an older version; refuses anything else in one line."""
        try:
            data = json.loads(text, object_pairs_hook=_without_repeats)
        except (ValueError, RecursionError):
            raise ModelMixError("the ledger is not whole JSON: it was cut off or edited; restore the file.") from None
        if not isinstance(data, dict) or data.get("schema") != SCHEMA:
            raise ModelMixError(f'this is not a ledger: its "schema" must be "{SCHEMA}".')
        version = data.get("version")
        if type(version) is not int or version not in (*_OLDER, VERSION):
            raise ModelMixError(
                f"ledger version {version!r} is unknown: this program reads versions 1 to {VERSION}; use the program "
                "that wrote the file."
            )
        lists, claim = (_LISTS, _CLAIM) if version == VERSION else (_OLDER[version], ())
        if set(data) != {"schema", "version", *lists, *claim, "digest"} or not all(
            isinstance(data[k], list) for k in lists
        ):
            wanted = " and ".join(f'"{name}" (a list)' for name in lists) + "".join(
                f', "{name}"' for name in claim if name not in lists
            )
            raise ModelMixError(f'a ledger has exactly "schema", "version", {wanted} and "digest".')
        if version == 2 and not data["unproved"]:
            raise ModelMixError("a ledger of version 2 names at least one broken rule.")
        body = {key: value for key, value in data.items() if key != "digest"}
        if data["digest"] != _digest(body):
            raise ModelMixError("the ledger's digest does not match its content: it was edited; restore the file.")
        phases = merge_phases(phase_from_dict(entry) for entry in data["phases"])
        return cls(phases, tuple(data.get("unproved", ())), **{name: data[name] for name in claim})

    def require_whole(self) -> None:
        """Refuse the lines of a run that has planned more: where they are all that is known, its plan is lost."""
        if self.stopped:
            raise ModelMixError(
                f"{self.stopped} is of a run that planned more steps than it took, and stopping early does not lower "
                f"epsilon: use {self.instead}, which counts the plan."
            )

    def save(self, path: str | Path) -> None:
        """Write the ledger atomically: the old file or the new one, never half of one."""
        self.require_whole()
        write_atomically(path, self.to_json())

    @classmethod
    def load(cls, path: str | Path) -> Ledger:
        """Reads a ledger file.

        Of a run or a loop that planned more than it took, it is what was taken, and no epsilon is made of that: what
        counts is the plan, which ``mm.load_claim`` reads.
        """
        from modelmix.accounting.runs import load_claim

        if Path(path).is_dir():
            raise ModelMixError(
                f"{path} is a folder: use mm.load_claim({str(path)!r}), which reads the folder of a run."
            )
        claim = load_claim(path)
        stopped = claim.ledger.steps != claim.taken.steps
        return replace(claim.taken, stopped=str(path)) if stopped else claim.ledger


def read_ledger(path: str | Path) -> Ledger:
    """Read a ledger file as it is, for those who know what else has to be counted; others ask ``load_claim``."""
    try:
        text = Path(path).read_text(encoding="utf-8")
    except OSError as error:
        raise ModelMixError(f"cannot read {path}: {error.strerror}.") from None
    except UnicodeDecodeError:
        raise ModelMixError(f"{path} is not a text file: give the JSON file of a ledger.") from None
    try:
        return Ledger.from_json(text)
    except ModelMixError as error:
        raise ModelMixError(f"{path}: {error}") from None


def append_to_ledger(path: str | Path, extend: Callable[[Ledger | None], Ledger]) -> Ledger:
    """Put a longer ledger in the place of a ledger file; no other writer comes between reading it and writing it.

    Args:
        path: the file; it is made if there is none.
        extend: is given what the file holds, None if there is no file, and returns what it shall hold. Whatever it
            raises leaves the file as it is.

    Returns:
        What the file holds now.
    """
    with alone_with(path) as file:
        longer = extend(read_ledger(file) if file.exists() else None)
        longer.save(file)
    return longer


def _without_repeats(pairs: list[tuple[str, object]]) -> dict[str, object]:
    """An object of a JSON file; a key that comes twice would let a file say two things."""
    if len({key for key, _ in pairs}) != len(pairs):
        raise ValueError("a key comes twice")
    return dict(pairs)


def _digest(body: Mapping[str, object]) -> str:
    canonical = json.dumps(body, sort_keys=True, separators=(",", ":"))
    return "sha256:" + hashlib.sha256(canonical.encode()).hexdigest()

"""What a file or a run folder counts as: the one place where a ledger on disk becomes a claim.

A run that was stopped because of what was seen has the epsilon of its plan, not of the steps it took: composition holds
for what was fixed beforehand. So a run counts as all that it planned, wherever its ledger is read.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from modelmix._checks import probability
from modelmix.accounting.guarantee import Guarantee, guarantee
from modelmix.accounting.ledger import Ledger, read_ledger
from modelmix.accounting.plan import Plan
from modelmix.errors import ModelMixError

SCHEMA = "modelmix-run"
VERSION = 3  # of config.json; version 1 could do without a plan, and 1 and 2 have recipes without tables
_WITHOUT_PLAN = 1
_ROUNDING = 1 + 1e-6  # epsilon on another machine
TEST_METRICS = "metrics on the test set: they are computed from the test data without noise"
STOPS = "whether and when the run stopped: a sample whose gradient is not finite stops it"
KEEPS_NOTHING = (
    "model, criterion and augmentation keep nothing of one sample while they run the others: what Python can reach is "
    "compared, and a synthetic sample is run before and after"
)


@dataclass(frozen=True)
class Claim:
    """What has to be counted as released about the samples.

    Args:
        ledger: everything that counts: the whole plan of a run, or a ledger file as it is.
        taken: the steps that were taken.
        name: what was read, for messages.
        assumed: what the guarantee of this run rests on, besides what that of any ledger does.
        excluded: what it leaves uncovered.
    """

    ledger: Ledger
    taken: Ledger
    name: str = "this run"
    assumed: tuple[str, ...] = ()
    excluded: tuple[str, ...] = ()

    @property
    def notes(self) -> tuple[str, ...]:
        """Say that a plan was counted, where more was planned than taken."""
        if self.ledger.steps == self.taken.steps:
            return ()
        return (
            f"{self.name}: counted as its plan of {self.ledger.steps:,} steps; {self.taken.steps:,} were taken "
            "(stopping early does not lower epsilon).",
        )

    @property
    def caveats(self) -> tuple[str, ...]:
        """Say what is assumed and left uncovered in this run in particular, where its ledger is one of several."""
        return (*(f"Assumed: {line}." for line in self.assumed), *(f"Not covered: {line}." for line in self.excluded))

    def guarantee(self, delta: float) -> Guarantee:
        """Return the guarantee of everything that counts, never below that of the steps taken."""
        found = guarantee(self.ledger, delta)
        return self.qualified(replace(found, epsilon=max(found.epsilon, guarantee(self.taken, delta).epsilon)))

    def qualified(self, found: Guarantee) -> Guarantee:
        """Return the guarantee of the ledger with everything that is said of this run in particular.

        Trainers, pages, certificates and ``verify`` all come here, so that they say the same.
        """
        return replace(
            found,
            seeded=found.seeded or self.ledger.seeded,
            assumed=(*found.assumed, *(line for line in self.assumed if line not in found.assumed)),
            excluded=(*found.excluded, *(line for line in self.excluded if line not in found.excluded)),
        )


def load_claim(path: str | Path) -> Claim:
    """Read a run folder or a ledger file; a ledger.json in the folder of a run counts as that run."""
    path = Path(path)
    file = path / "ledger.json" if path.is_dir() else path
    ledger = read_ledger(file)
    for place in (file, file.resolve()):  # a link to the ledger of a run is one as well
        config, plan = place.with_name("config.json"), plan_beside(place)
        if plan.exists():
            said = read_object(plan)
            return claim_of({**said, "plan": said, "seed": None}, ledger, str(path))
        # Other programs have a config.json, too.
        if path.is_dir() or (place.name == "ledger.json" and config.exists() and _is_run(config)):
            return claim_of(read_config(config), ledger, str(path))
        if config.exists() and _is_run(config):  # the run's own ledger under another name counts as the run
            with suppress(ModelMixError):
                return claim_of(read_config(config), ledger, str(path))
    return Claim(ledger, ledger, str(path))


def plan_beside(ledger: Path) -> Path:
    """Where the plan of a loop lies that keeps this ledger file."""
    return ledger.with_name(ledger.name + ".plan")


def _is_run(config: Path) -> bool:
    return read_object(config).get("schema") == SCHEMA


def claim_of(config: Mapping[str, Any], ledger: Ledger, name: str = "this run") -> Claim:
    """Return what a run with this configuration counts as; refuse a plan that its ledger does not begin."""
    if "plan" not in config:
        # Configurations of version 1 and their ledgers, which name no population, are older than plans.
        if config.get("version", _WITHOUT_PLAN) != _WITHOUT_PLAN or ledger.populations:
            raise ModelMixError(f"{name} has no plan in config.json, which says what its epsilon is: restore it.")
        planned = ledger
    else:
        if not isinstance(config["plan"], dict):
            raise ModelMixError(f"{name}: the plan of this run is not readable: restore config.json.")
        planned = Plan.from_dict(config["plan"]).ledger
        # Wider mixing than was planned is never worse: a loop with a fixed threshold may run it.
        if _neighbours(planned) != _neighbours(ledger) or not planned.starts_with(_narrowed(ledger, planned)):
            raise ModelMixError(
                f"{name}: ledger.json does not begin what the plan in config.json says, so that neither tells its "
                "epsilon: restore both."
            )
    seeded = planned.seeded or ledger.seeded or config.get("seed", "unknown") is not None
    return Claim(replace(planned, unproved=ledger.unproved, seeded=seeded), ledger, name, *restrictions(config))


def restrictions(config: Mapping[str, Any]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return what a run of this configuration assumes and what it excludes; older ones did not write it down."""
    settings, engine = config.get("settings"), config.get("engine")
    out = []
    for name, known in (
        ("assumed", () if engine in (None, "hooks") else (KEEPS_NOTHING,)),
        ("excluded", excluded_by(config.get("test_public", True), (settings or {}).get("nonfinite"))),
    ):
        lines = config.get(name, known)
        if not isinstance(lines, (list, tuple)) or not all(isinstance(line, str) for line in lines):
            raise ModelMixError(f'"{name}" in config.json must be a list of sentences: restore it.')
        out.append(tuple(lines))
    return out[0], out[1]


def excluded_by(test_public: object, nonfinite: object) -> tuple[str, ...]:
    """Return what settings of a trainer leave uncovered."""
    return (*(() if test_public is True else (TEST_METRICS,)), *((STOPS,) if nonfinite == "stop" else ()))


def require_own_certificate(path: str | Path, claim: Claim, best: Guarantee) -> None:
    """Refuse a run folder whose certificate is not of its ledger and plan.

    Args:
        best: the guarantee of the claim, at any delta.
    """
    path = Path(path)
    file = (path if path.is_dir() else path.parent) / "certificate.json"
    if not (path.is_dir() or path.name == "ledger.json") or not file.exists():
        return
    said = read_object(file)
    shown = said.get("guarantee")
    fits = isinstance(shown, dict) and said.get("ledger_digest") == claim.taken.digest
    if fits and isinstance(shown, dict):
        fits = shown.get("steps") == claim.ledger.steps and shown.get("adjacency") == claim.ledger.adjacency
        delta, least = shown.get("delta"), shown.get("epsilon")
        if fits and isinstance(delta, float) and isinstance(least, (int, float)):
            found = best if best.delta == delta else claim.guarantee(delta)
            fits = found.epsilon <= least * _ROUNDING
    if not fits:
        raise ModelMixError(
            f"{file} is not of this run as it stands (another ledger, plan or epsilon): do not use it. Remove it, or "
            "complete the run (modelmix train --out RUN --resume), which writes it anew."
        )


def _narrowed(ledger: Ledger, planned: Ledger) -> Ledger:
    """Return a ledger whose steps mix as widely as planned, where they mixed more widely."""
    out, step = replace(ledger, phases=()), 0
    ends = [sum(phase.steps for phase in planned.phases[: k + 1]) for k in range(len(planned.phases))]
    for phase in ledger.phases:
        left = phase.steps
        while left:
            at = next((k for k, end in enumerate(ends) if end > step), None)
            if at is None:
                return ledger
            taken, mine, due = min(left, ends[at] - step), phase.mechanism, planned.phases[at].mechanism
            wider = mine.mixing_width > due.mixing_width and replace(mine, mixing_width=due.mixing_width) == due
            out, step, left = out.add(due if wider else mine, taken), step + taken, left - taken
    return out


def _neighbours(ledger: Ledger) -> tuple[object, ...]:
    return ledger.adjacency, ledger.unit, ledger.population, ledger.populations


def read_config(path: Path) -> dict[str, Any]:
    """Read and check the configuration of a run."""
    config = read_object(path)
    if config.get("schema") != SCHEMA:
        raise ModelMixError(f'{path} is not the configuration of a run: its "schema" must be "{SCHEMA}".')
    if type(config.get("version")) is not int or not 1 <= config["version"] <= VERSION:
        raise ModelMixError(
            f"{path} has version {config.get('version')!r}: this program reads versions 1 to {VERSION}; "
            "use the program that wrote the file."
        )
    try:
        probability("delta", config.get("delta"), "the failure probability")
    except ModelMixError as error:
        raise ModelMixError(f"{path}: {error}") from None
    if not isinstance(config.setdefault("settings", {}), dict):
        raise ModelMixError(f'{path}: "settings" must be an object.')
    return config


def require_current(config: Mapping[str, Any], place: object) -> None:
    """Refuse to go on with a run that an older program began; what it cost stays readable."""
    version = config.get("version")
    if type(version) is int and 1 <= version < VERSION:
        raise ModelMixError(
            f"{place} was begun by an older program (version {version} of config.json, this one writes {VERSION}): "
            "modelmix verify and modelmix report read it as before, but begin a new run to train."
        )


def read_object(path: Path) -> dict[str, Any]:
    """Read the JSON object in a file."""
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ModelMixError(f"cannot read {path}: {error.strerror}; give the folder of a run.") from None
    except (ValueError, RecursionError) as error:
        reason = "it is nested too deeply" if isinstance(error, RecursionError) else error
        raise ModelMixError(f"{path} is not whole JSON: {reason}.") from None
    if not isinstance(data, dict):
        raise ModelMixError(f"{path} is not a JSON object.")
    return data

"""What a file or a run folder counts as: the one place where a ledger on disk becomes a claim.

A run that was stopped because of what was seen has the epsilon of its plan, not of the steps it took: composition holds
for what was fixed beforehand. So a run counts as all that it planned, wherever its ledger is read.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from modelmix.accounting.guarantee import Guarantee, guarantee
from modelmix.accounting.ledger import Ledger, read_ledger
from modelmix.accounting.plan import Plan
from modelmix.accounting.validation import probability
from modelmix.errors import ModelMixError

SCHEMA = "modelmix-run"
VERSION = 2  # of config.json; version 1 could do without a plan
_WITHOUT_PLAN = 1


@dataclass(frozen=True)
class Claim:
    """What has to be counted as released about the samples.

    Args:
        ledger: everything that counts: the whole plan of a run, or a ledger file as it is.
        taken: the steps that were taken.
        name: what was read, for messages.
    """

    ledger: Ledger
    taken: Ledger
    name: str = "this run"

    @property
    def notes(self) -> tuple[str, ...]:
        """Say that a plan was counted, where more was planned than taken."""
        if self.ledger.steps == self.taken.steps:
            return ()
        return (
            f"{self.name}: counted as its plan of {self.ledger.steps:,} steps; {self.taken.steps:,} were taken "
            "(stopping early does not lower epsilon).",
        )

    def guarantee(self, delta: float) -> Guarantee:
        """Return the guarantee of everything that counts, never below that of the steps taken."""
        found = guarantee(self.ledger, delta)
        return replace(found, epsilon=max(found.epsilon, guarantee(self.taken, delta).epsilon))


def load_claim(path: str | Path) -> Claim:
    """Read a run folder or a ledger file; a ledger.json in the folder of a run counts as that run."""
    path = Path(path)
    file = path / "ledger.json" if path.is_dir() else path
    ledger = read_ledger(file)
    for place in (file, file.resolve()):  # a link to the ledger of a run is one as well
        config, plan = place.with_name("config.json"), plan_beside(place)
        if plan.exists():
            return claim_of({"plan": read_object(plan), "seed": None}, ledger, str(path))
        # Other programs have a config.json, too.
        if path.is_dir() or (place.name == "ledger.json" and config.exists() and _is_run(config)):
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
        if _neighbours(planned) != _neighbours(ledger) or not planned.starts_with(ledger):
            raise ModelMixError(
                f"{name}: ledger.json does not begin what the plan in config.json says, so that neither tells its "
                "epsilon: restore both."
            )
    seeded = planned.seeded or ledger.seeded or config.get("seed", "unknown") is not None
    return Claim(replace(planned, unproved=ledger.unproved, seeded=seeded), ledger, name)


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

"""The record of a run: begun once, kept at every checkpoint, resumed only by the run it belongs to.

Steps since the last checkpoint are taken again when a run is resumed, with other noise (see ``randomness``), and their
ledger lines count once: nobody has seen the first states, which were never kept. Settings, seed and data must be what
they were, because the ledger and the page speak of one run; the plan may be a longer one.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from modelmix._version import __version__
from modelmix.accounting.ledger import Ledger
from modelmix.accounting.plan import Plan
from modelmix.accounting.runs import require_current, restrictions
from modelmix.errors import ModelMixError, UnprovedError
from modelmix.runs.folder import SCHEMA, VERSION, RunFolder

PUBLISHED = ("certificate.json", "report.html", "report-public.html")
"""What says how much a run costs in all. It goes before anything is kept that it does not count."""

Fingerprint = Callable[[bytes], str]
_SALT_BYTES = 16


class Record:
    """What is written down of a run, and in which order.

    Args:
        path: the run's folder.
        settings: everything a step's outcome depends on besides plan, data and randomness, as plain data.
        plan: what may run; a resumed run may have a longer one.
        seed: of the run.
        fingerprint: a digest of the data under a salt.
    """

    def __init__(
        self,
        path: str | Path,
        settings: Mapping[str, Any],
        plan: Plan,
        seed: int | None,
        fingerprint: Fingerprint,
    ) -> None:
        self.folder = RunFolder(path)
        self._settings = json.loads(json.dumps(settings))
        self._seed = seed
        self._fingerprint = fingerprint
        self._plan = plan
        self._salt = os.urandom(_SALT_BYTES)
        self._digest: str | None = None
        self._stamp: object = None
        self._counted: Ledger | None = None  # the ledger that is kept

    def __enter__(self) -> Record:
        """Locks the folder, if it still is as this record left it."""
        self.folder.__enter__()
        if self._stamp != self._present():
            self.folder.__exit__()
            raise ModelMixError(
                f"{self.folder.path} was changed by another run or by hand since it was last read: make a new trainer "
                "with RunOptions(resume=True) (--resume)."
            )
        return self

    def __exit__(self, *_: object) -> None:
        self.folder.__exit__()

    def _present(self) -> object:
        """Which config and which checkpoint lie in the folder; every one that is written is another."""
        return [_identity(self.folder.file(name)) for name in ("config.json", "checkpoint.npz")]

    def begin(self, about: Mapping[str, Any]) -> None:
        """Writes the settings of a new run into a new or empty folder."""
        config = {
            **about,
            "schema": SCHEMA,
            "version": VERSION,
            "created": datetime.now(timezone.utc).isoformat(timespec="seconds"),
            "seed": self._seed,
            "torch": torch.__version__,
            "modelmix": __version__,
            "settings": self._settings,
            "plan": self._plan.as_dict(),
        }
        self.folder.require_vacant()
        with self.folder:
            self.folder.require_vacant()  # another process may have been quicker
            self.folder.sweep()
            self.folder.write_json("config.json", config)
            self._stamp = self._present()

    def replan(self, plan: Plan) -> None:
        """Write a longer plan into the settings."""
        self._plan = plan
        self.folder.remove(*PUBLISHED)
        self.folder.write_json("config.json", {**self.folder.read_json("config.json"), "plan": plan.as_dict()})
        self._stamp = self._present()

    def resume(self) -> tuple[dict[str, Tensor], dict[str, Any], Ledger] | None:
        """The last checkpoint and the ledger; None if the run stopped before its first step."""
        with self.folder:
            self.folder.sweep()
            self._require_same_run()
            found = self._last_state()
            self._stamp = self._present()
        return found

    def _require_same_run(self) -> None:
        config, path = self.folder.read_json("config.json"), self.folder.path
        settings = config.get("settings")
        require_current(config, path)
        if config.get("schema") != SCHEMA or config.get("version") != VERSION or not isinstance(settings, dict):
            raise ModelMixError(
                f"{path} holds no run that this program can resume (config.json of another version, or damaged): "
                "begin a new run."
            )
        ours, theirs = {**self._settings, "seed": self._seed}, {**settings, "seed": config.get("seed")}
        odd = sorted(key for key in {*ours, *theirs} if ours.get(key) != theirs.get(key))
        if odd:
            raise ModelMixError(
                f"{path} holds a run with other settings ({', '.join(odd)}): resume it with its own, or choose another "
                "folder."
            )
        if not isinstance(config.get("plan"), dict):
            raise ModelMixError(f"{path} was written by an older program and has no plan: begin a new run.")
        before = Plan.from_dict(config["plan"])
        if before != self._plan:
            if not self._plan.extends(before):
                raise ModelMixError(
                    f"{path} holds a run with another plan: resume it with its own or with that one extended, or "
                    "choose another folder."
                )
            self.folder.remove(*PUBLISHED)
            self.folder.write_json("config.json", {**config, "plan": self._plan.as_dict()})

    def restrict(self, own: Mapping[str, Any]) -> dict[str, Any]:
        """Keep what the guarantee of a resumed run rests on and leaves out, then and now, and return both together."""
        with self:
            config = self.folder.read_json("config.json")
            then = dict(zip(("assumed", "excluded"), restrictions(config), strict=True))
            both: dict[str, Any] = {name: [*dict.fromkeys((*then[name], *own[name]))] for name in then}
            both["test_public"] = bool(own["test_public"]) and config.get("test_public") is True
            if any(config.get(name) != value for name, value in both.items()):
                self.folder.remove(*PUBLISHED)
                self.folder.write_json("config.json", {**config, **both})
                self._stamp = self._present()
        return both

    def _last_state(self) -> tuple[dict[str, Tensor], dict[str, Any], Ledger] | None:
        folder, path = self.folder, self.folder.path
        if not folder.has("checkpoint.npz"):
            if folder.has("metrics.json") or (
                folder.has("ledger.json") and folder.load_ledger().steps > self._plan.spent.steps
            ):
                raise ModelMixError(f"{path} was under way and has no checkpoint: restore checkpoint.npz.")
            return None
        arrays, meta = folder.load_checkpoint()
        try:
            self._salt = bytes.fromhex(meta["salt"])
            step, digest = int(meta["step"]), str(meta["fingerprint"])
            if len(self._salt) != _SALT_BYTES:
                raise ValueError
        except (KeyError, TypeError, ValueError):
            raise ModelMixError(f"the checkpoint of {path} is not readable: restore it.") from None
        if digest != self._fingerprint(self._salt):
            raise UnprovedError(
                "a ledger is about one data set",
                f"the data or the frozen part of the model is not what {path} was trained on.",
                "Resume with the same data and the same frozen weights, or begin a new run.",
            )
        shown = folder.read_json("metrics.json").get("rows", []) if folder.has("metrics.json") else []
        if any(isinstance(row, dict) and int(row.get("step", 0)) > step for row in shown):
            raise ModelMixError(f"the checkpoint of {path} is older than what the run has shown: restore the last one.")
        ledger = folder.load_ledger()
        if ledger.steps < self._plan.spent.steps + step:
            raise ModelMixError(f"the ledger of {path} is shorter than its checkpoint: restore ledger.json.")
        self._counted = ledger
        return arrays, meta, ledger

    def keep(self, ledger: Ledger, arrays: Mapping[str, Tensor], meta: Mapping[str, Any]) -> None:
        """Keep the ledger, then the state."""
        if self._digest is None:
            self._digest = self._fingerprint(self._salt)
        if ledger != self._counted:
            self.folder.remove(*PUBLISHED)
        self.folder.save_ledger(ledger)
        self._counted = ledger
        self.folder.save_checkpoint(arrays, {**meta, "salt": self._salt.hex(), "fingerprint": self._digest})
        self._stamp = self._present()

    def finish(
        self,
        models: Mapping[str, Mapping[str, Tensor]],
        diagnostics: Mapping[str, Any],
        certificate: Mapping[str, Any] | None,
    ) -> None:
        """Write the certificate, the models and the diagnostics."""
        if certificate is None:
            self.folder.remove("certificate.json")
        else:
            head = {"schema": "modelmix-certificate", "version": 1}
            self.folder.write_json("certificate.json", {**head, **certificate})

        for name, state in models.items():
            self.folder.save_model(name, state)
        self.folder.write_json("diagnostics.json", diagnostics, secret=True)


def _identity(path: Path) -> tuple[int, int, int] | None:
    try:
        status = os.stat(path)
    except OSError:
        return None
    return status.st_ino, status.st_mtime_ns, status.st_size

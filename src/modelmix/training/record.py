"""The record of a run: begun once, kept at every checkpoint, resumed only by the run it belongs to.

Resuming repeats the randomness of the steps since the last checkpoint. That is safe for the same run, which gives the
same states again, and for no other: the same noise on other gradients would give both away. So settings, seed and data
must be what they were.
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
from modelmix.errors import ModelMixError, UnprovedError
from modelmix.privacy.ledger import Ledger
from modelmix.training.folder import SCHEMA, VERSION, RunFolder

Fingerprint = Callable[[bytes], str]


class Record:
    """What is written down of a run, and in which order.

    Args:
        path: the run's folder.
        settings: everything a step's outcome depends on besides data and randomness, as plain data.
        seed: of the run.
        fingerprint: a digest of the data under a salt.
    """

    def __init__(
        self, path: str | Path, settings: Mapping[str, Any], seed: int | None, fingerprint: Fingerprint
    ) -> None:
        self.folder = RunFolder(path)
        self._settings = json.loads(json.dumps(settings))
        self._seed = seed
        self._fingerprint = fingerprint
        self._salt = os.urandom(16)
        self._digest: str | None = None
        self._events: Any = None

    def begin(self, about: Mapping[str, Any]) -> None:
        """Writes the settings of a new run into a new or empty folder."""
        path = self.folder.path
        if path.exists() and not path.is_dir():
            raise ModelMixError(f"{path} is a file: give a folder for the run.")
        if self.folder.holds_a_run:
            raise ModelMixError(
                f"{path} holds a run already: go on with it by resume=True (--resume), or choose another folder."
            )
        if path.exists() and any(not file.name.startswith(".") for file in path.iterdir()):
            raise ModelMixError(f"{path} is not empty and holds no run: choose another folder.")
        config = {
            "schema": SCHEMA,
            "version": VERSION,
            "created": datetime.now(timezone.utc).isoformat(timespec="seconds"),
            "seed": self._seed,
            "torch": torch.__version__,
            "modelmix": __version__,
            "settings": self._settings,
            **about,
        }
        with self.folder:
            self.folder.write_json("config.json", config)

    def resume(self) -> tuple[dict[str, Tensor], dict[str, Any], Ledger] | None:
        """The last checkpoint and the ledger; None if the run stopped before its first step."""
        folder, path = self.folder, self.folder.path
        with folder:
            folder.sweep()
        config = folder.read_json("config.json")
        if config.get("schema") != SCHEMA or config.get("version") != VERSION:
            raise ModelMixError(f"{path} holds no run that this program can read.")
        theirs = config.get("settings", {})
        odd = sorted(key for key in {*self._settings, *theirs} if self._settings.get(key) != theirs.get(key))
        if odd or config.get("seed") != self._seed:
            raise ModelMixError(
                f"{path} holds a run with other settings ({', '.join(odd or ['seed'])}): resume it with its own, or "
                "choose another folder."
            )
        if not folder.file("checkpoint.npz").exists():
            if folder.file("ledger.json").exists() and folder.load_ledger().steps:
                raise ModelMixError(f"{path} has a ledger and no checkpoint: restore checkpoint.npz.")
            return None
        arrays, meta = folder.load_checkpoint()
        try:
            self._salt = bytes.fromhex(meta["salt"])
            step, digest = int(meta["step"]), str(meta["fingerprint"])
        except (KeyError, TypeError, ValueError):
            raise ModelMixError(f"the checkpoint of {path} is not readable: restore it.") from None
        if digest != self._fingerprint(self._salt):
            raise UnprovedError(
                "noise is used once",
                f"the data or the frozen part of the model is not what {path} was trained on, and resuming would add "
                "the same noise to other gradients.",
                "Resume with the same data and the same frozen weights, or begin a new run.",
            )
        ledger = folder.load_ledger()
        if ledger.steps < step:
            raise ModelMixError(f"the ledger of {path} is shorter than its checkpoint: restore ledger.json.")
        return arrays, meta, ledger

    def keep(self, ledger: Ledger, arrays: Mapping[str, Tensor], meta: Mapping[str, Any]) -> None:
        """Ledger first, then the state."""
        if self._digest is None:
            self._digest = self._fingerprint(self._salt)
        self.folder.save_ledger(ledger)
        self.folder.save_checkpoint(arrays, {**meta, "salt": self._salt.hex(), "fingerprint": self._digest})

    def measured(self, rows: list[dict[str, Any]]) -> None:
        """Metrics of a state that is kept already, also as TensorBoard events."""
        from modelmix.report.events import EventFile

        self.folder.write_json("metrics.json", {"rows": rows})
        if self._events is None:
            self._events = EventFile(self.folder.file("events"))
        self._events.add(rows[-1]["step"], {k: v for k, v in rows[-1].items() if k != "step" and v is not None})

    def finish(self, models: Mapping[str, Mapping[str, Tensor]], diagnostics: Mapping[str, Any]) -> None:
        """The models, the diagnostics and the page."""
        from modelmix.report.page import write_report

        for name, state in models.items():
            self.folder.save_model(name, state)
        self.folder.write_json("diagnostics.json", diagnostics)
        write_report(self.folder.path)

"""The folder of a run: settings, ledger, metrics, model, checkpoint. Every file is whole or not there.

Order is what makes it safe: a ledger line is on disk before the state it accounts for, and a state is on disk before
anything is computed from it for people to see. A checkpoint is arrays and JSON; reading one never runs code from it.
"""

from __future__ import annotations

import io
import json
import os
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from modelmix._files import TEMPORARY, lock, sync_folder, write_atomically
from modelmix.accounting.ledger import Ledger, read_ledger
from modelmix.accounting.runs import SCHEMA, VERSION
from modelmix.errors import ModelMixError

__all__ = ["SCHEMA", "VERSION", "RunFolder"]


class RunFolder:
    """The files of one run; as a context, locked against a second process."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self._lock: Any = None

    def file(self, name: str) -> Path:
        return self.path / name

    def has(self, name: str) -> bool:
        return os.path.exists(self.file(name))

    @property
    def holds_a_run(self) -> bool:
        return self.has("config.json") or self.has("checkpoint.npz")

    def require_vacant(self) -> None:
        """Refuses a place that is in use for something."""
        try:
            found = [name for name in os.listdir(self.path) if not name.startswith(".")]
        except FileNotFoundError:
            return
        except NotADirectoryError:
            raise ModelMixError(f"{self.path} is a file, or inside one: give a folder for the run.") from None
        except OSError as error:
            raise self._unusable(error) from None
        if self.holds_a_run:
            raise ModelMixError(
                f"{self.path} holds a run already: go on with it by RunOptions(resume=True) (--resume), or choose "
                "another folder."
            )
        if found:
            raise ModelMixError(f"{self.path} is not empty and holds no run: choose another folder.")

    def __enter__(self) -> RunFolder:
        """Makes the folder and locks it for this process; the lock dies with the process."""
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            self._lock = open(self.file(".lock"), "a")  # held as long as the context is
        except OSError as error:
            raise self._unusable(error) from None
        if lock(self._lock) is False:
            self._lock.close()
            raise ModelMixError(f"{self.path} is in use by another process: wait for it or choose another folder.")
        return self

    def __exit__(self, *_: object) -> None:
        self._lock.close()

    def _unusable(self, error: OSError) -> ModelMixError:
        return ModelMixError(f"cannot use {self.path} as a run folder: {error.strerror}. Choose another.")

    def read_json(self, name: str) -> dict[str, Any]:
        try:
            data = json.loads(self.file(name).read_text(encoding="utf-8"))
        except OSError as error:
            raise ModelMixError(f"cannot read {self.file(name)}: {error.strerror}.") from None
        except (ValueError, RecursionError):
            raise ModelMixError(f"{self.file(name)} is not whole JSON: it was cut off or edited; restore it.") from None
        if not isinstance(data, dict):
            raise ModelMixError(f"{self.file(name)} must hold a JSON object: restore it.")
        return data

    def write_json(self, name: str, data: Mapping[str, Any], *, secret: bool = False) -> None:
        self._write(name, json.dumps(data, indent=1) + "\n", secret=secret)

    def save_ledger(self, ledger: Ledger) -> None:
        self._write("ledger.json", ledger.to_json())

    def load_ledger(self) -> Ledger:
        return read_ledger(self.file("ledger.json"))

    def save_checkpoint(self, arrays: Mapping[str, Tensor], meta: Mapping[str, Any]) -> None:
        """Arrays and JSON in one file, readable by its owner only: it holds the randomness of the steps to come."""
        buffer = io.BytesIO()
        content = {name: t.detach().cpu().numpy() for name, t in arrays.items()}
        text = json.dumps(meta).encode()
        np.savez(buffer, allow_pickle=False, meta=np.frombuffer(text, dtype=np.uint8), **content)
        self._write("checkpoint.npz", buffer.getvalue(), secret=True)

    def load_checkpoint(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """The float64 vectors and the rest, as they were saved."""
        path = self.file("checkpoint.npz")
        try:
            with open(path, "rb") as file, np.load(file, allow_pickle=False) as content:
                arrays = {name: content[name] for name in content.files}
            meta = json.loads(arrays.pop("meta").tobytes())
            if not isinstance(meta, dict) or any(a.dtype != np.float64 for a in arrays.values()):
                raise TypeError
            return {name: torch.from_numpy(a) for name, a in arrays.items()}, meta
        except Exception as error:  # numpy has many ways of saying that a file is not whole
            raise ModelMixError(f"{path} is not a whole checkpoint ({type(error).__name__}): restore it.") from None

    def save_model(self, name: str, state: Mapping[str, Tensor]) -> None:
        """A state dict with the model's own keys; ``torch.load(..., weights_only=True)`` reads it."""
        buffer = io.BytesIO()
        torch.save({key: value.detach().cpu().clone() for key, value in state.items()}, buffer)
        self._write(name, buffer.getvalue())

    def _write(self, name: str, content: str | bytes, *, secret: bool = False) -> None:
        try:
            write_atomically(self.file(name), content, secret=secret)
        except ModelMixError as error:
            mend = "Nothing kept is lost: mend this, then RunOptions(resume=True) (--resume)."
            raise ModelMixError(f"{error} {mend}") from None

    def remove(self, *names: str) -> None:
        """Delete files that no longer hold, if they are there; durable when it returns."""
        try:
            for name in names:
                with suppress(FileNotFoundError):
                    self.file(name).unlink()
        except OSError as error:
            raise ModelMixError(f"cannot remove {self.file(name)}, which no longer holds: {error.strerror}.") from None
        sync_folder(self.path)

    def sweep(self) -> None:
        """Removes what a killed process left half-written; those files were never in use."""
        for path in self.path.rglob(TEMPORARY):
            with suppress(OSError):
                path.unlink()

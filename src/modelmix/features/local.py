"""Files of weights, read once: what is hashed is what is used."""

from __future__ import annotations

import hashlib
import io
import warnings
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from modelmix.errors import ModelMixError


def read_with_digest(path: str | Path) -> tuple[bytes, str]:
    """Return the bytes of a file and their SHA-256."""
    try:
        data = Path(path).read_bytes()
    except OSError as error:
        raise ModelMixError(f"cannot read the weights {path}: {error.strerror}. Check the path.") from None
    return data, hashlib.sha256(data).hexdigest()


def state_dict(data: bytes, source: str | Path) -> Mapping[str, Tensor]:
    """Read the tensors in a file of torch.save(network.state_dict()); code in it is refused and never run."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of TorchScript, which is refused below
            found = torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
        if isinstance(found, Mapping) and all(isinstance(value, Tensor) for value in found.values()):
            return found
    except Exception:  # code, TorchScript, or no file of torch's: a damaged one can raise anything
        pass
    raise ModelMixError(
        f"{source} is not a file of plain tensors: whole pickled networks, TorchScript and torch.export archives can "
        "run code when they are loaded. Write it with torch.save(network.state_dict(), FILE), or export to ONNX."
    )

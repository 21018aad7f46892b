"""A prior on disk: the weights of a network that learned from synthetic images, and how it learned."""

from __future__ import annotations

import hashlib
import io
import json
import zipfile
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from modelmix._files import write_atomically
from modelmix.errors import ModelMixError
from modelmix.models.residual import WideResNet16
from modelmix_lab.features.prior import PriorConfig

BUILT_IN = {"synthetic": "synthetic-prior.npz", "characters": "characters-prior.npz"}
"""The priors that come with the package, by name."""


def save(network: WideResNet16, config: PriorConfig, path: str | Path) -> None:
    """Write the weights as float16, with their settings, to a .npz file without code in it."""
    arrays = {
        name: value.detach().to(torch.float16).numpy()
        for name, value in network.state_dict().items()
        if not name.startswith("head.")
    }
    about = np.frombuffer(json.dumps(asdict(config)).encode(), dtype=np.uint8)
    file = io.BytesIO()
    np.savez_compressed(file, about=about, **arrays)
    write_atomically(path, file.getvalue())


@dataclass(frozen=True, eq=False)
class Prior:
    """The weights in a file of ``save``, their settings, and a digest of that file."""

    weights: dict[str, Tensor]
    config: PriorConfig
    digest: str

    @classmethod
    def load(cls, path: str | Path) -> Prior:
        """Read a file of ``modelmix-lab prior``, or one of ``BUILT_IN``."""
        own = BUILT_IN.get(str(path))
        path = Path(path) if own is None else Path(__file__).parent / own
        try:
            content = path.read_bytes()
            with np.load(path, allow_pickle=False) as archive:
                arrays = {name: archive[name] for name in archive.files}
            config = PriorConfig(**json.loads(bytes(arrays.pop("about"))))
        except FileNotFoundError:
            known = " or ".join(BUILT_IN)
            raise ModelMixError(
                f"there is no prior at {path}: choose {known}, or make one with modelmix-lab prior."
            ) from None
        except (OSError, ValueError, KeyError, TypeError, EOFError, zipfile.BadZipFile):
            raise ModelMixError(f"{path} is not a prior: make one with modelmix-lab prior.") from None
        weights = {name: torch.from_numpy(value.astype(np.float32)) for name, value in arrays.items()}
        return cls(weights, config, hashlib.sha256(content).hexdigest())

    def start(self, network: nn.Module) -> None:
        """Load the weights into a network of the same kind and set its head to zero."""
        own = {name for name, _ in network.named_parameters()}
        head = {name for name in own if name.startswith("head.")}
        try:
            if own - head != set(self.weights):
                raise RuntimeError
            network.load_state_dict(self.weights, strict=False)
        except RuntimeError:
            raise ModelMixError(
                f"the prior is a wrn-16-{self.config.width} for colour images, and this model is another network: "
                'train one of its kind, or give features = "prior" and a linear model.'
            ) from None
        for name, value in network.named_parameters():
            if name in head:
                nn.init.zeros_(value)

    def network(self) -> WideResNet16:
        network = WideResNet16(width=self.config.width)
        self.start(network)
        return network.requires_grad_(False).eval()

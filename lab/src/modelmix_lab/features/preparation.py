"""Normalised scattering features of a recipe, and what their statistics cost."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from torch import Tensor

from modelmix.accounting.ledger import Ledger, Phase
from modelmix.accounting.mechanism import Mechanism
from modelmix.config.recipe import Recipe
from modelmix.data import DataSet
from modelmix.errors import ModelMixError
from modelmix.kinds import Normalised
from modelmix.training.randomness import Randomness
from modelmix_lab.features.normalisation import ChannelNormalisation, group_normalise, private_channel_normalisation

KEY = "normalisation"
"""Where the settings of a run keep released moments: a run that is resumed must not release them again."""


def by_group(recipe: Recipe, data: DataSet, train: Tensor, test: Tensor, run: str | Path | None) -> Normalised:
    """Normalise every group of channels of every sample."""
    return Normalised(group_normalise(train), group_normalise(test), Ledger(), {})


def by_private_moments(
    recipe: Recipe, data: DataSet, train: Tensor, test: Tensor, run: str | Path | None
) -> Normalised:
    """Normalise every channel by released moments of the training set."""
    config = recipe.features
    assert config is not None
    normalise = (None if run is None else _released(run)) or private_channel_normalisation(
        train,
        n=recipe.privacy.public_size(len(data.train)),
        mean_clip=config.mean_clip or 0.0,
        square_clip=config.square_clip or 0.0,
        noise_multiplier=config.normalise_noise,
        randomness=Randomness(recipe.run.seed),
    )
    moments = {
        "mean": normalise.mean.tolist(),
        "variance": normalise.variance.tolist(),
        "mechanism": normalise.phase.mechanism.as_dict(),
        "steps": normalise.phase.steps,
    }
    spent = recipe.privacy.claim(len(data.train)).add(normalise.phase.mechanism, normalise.phase.steps)
    return Normalised(normalise(train), normalise(test), spent, {KEY: moments})


def _released(run: str | Path) -> ChannelNormalisation | None:
    """Read the moments that a run released when it began; None if it did not. Unreadable ones are refused."""
    path = Path(run) / "config.json"
    if not path.is_file():
        return None
    try:
        found = json.loads(path.read_text(encoding="utf-8"))[KEY]
        return ChannelNormalisation(
            torch.tensor(found["mean"], dtype=torch.float64),
            torch.tensor(found["variance"], dtype=torch.float64),
            Phase(Mechanism.from_dict(found["mechanism"]), int(found["steps"])),
        )
    except (OSError, KeyError, TypeError, ValueError, AttributeError):
        raise ModelMixError(f"the moments in {path} are not readable: restore the file.") from None

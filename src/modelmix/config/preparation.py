"""From the images of a recipe to what its network is trained on, and what that cost."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from modelmix import kinds
from modelmix.accounting.ledger import Ledger
from modelmix.config import feature_spec
from modelmix.data import DataSet, Split
from modelmix.data.public import public_images
from modelmix.features import cached
from modelmix.training.embedding import Embedding, random_labels
from modelmix.training.sampling import Source, as_source

if TYPE_CHECKING:
    from modelmix.config.recipe import Recipe


@dataclass(frozen=True, eq=False)
class Prepared:
    """Data as a network takes it; runs that share it share the copy near the accelerator.

    Args:
        data: the samples.
        device: where they are wanted.
        spent: what statistics of the training samples cost; empty if there are none.
        about: what a resumed run needs to prepare the same data without spending again.
        embedding: public images in whose directions gradients are embedded, if they are.
    """

    data: DataSet
    device: torch.device
    spent: Ledger = field(default_factory=Ledger)
    about: Mapping[str, Any] = field(default_factory=dict)
    embedding: Embedding | None = None

    @cached_property
    def train(self) -> Source:
        return as_source(self.data.train).to(self.device)

    @cached_property
    def test(self) -> Source:
        return as_source(self.data.test).to(self.device)


def prepare(
    recipe: Recipe,
    data: DataSet,
    device: torch.device,
    run: str | Path | None = None,
    data_dir: str | Path | None = None,
) -> Prepared:
    """The features that a recipe asks for, computed once and cached, and the public images.

    Args:
        run: the folder of a run that goes on: its released moments are used again.
        data_dir: where public images are looked for by name.
    """
    public, config, privacy = recipe.data.public, recipe.features, recipe.privacy
    images = None if public is None else public_images(public, data.shape, data_dir)
    if images is not None and privacy.embeds:
        labels = random_labels(len(images), len(data.classes))
        return Prepared(data, device, embedding=Embedding((images, labels), privacy.basis or 1000, privacy.groups or 3))
    if config is None:
        return Prepared(data, device)
    transform = feature_spec.transform(config, device, images)
    if config.components is not None:  # in one call, so that both are in the same directions
        both = cached(transform, torch.cat([data.train.x, data.test.x]))
        train, test = both[: len(data.train)], both[len(data.train) :]
    else:
        train, test = (cached(transform, split.x) for split in (data.train, data.test))
    seen = {"features": {"name": transform.name, "version": transform.version, **transform.parameters}}
    if config.normalise not in kinds.NORMALISATIONS:
        return Prepared(_with(data, train, test), device, about=seen)
    done = kinds.NORMALISATIONS[config.normalise].apply(recipe, data, train, test, run)
    return Prepared(_with(data, done.train, done.test), device, done.spent, {**seen, **done.about})


def _with(data: DataSet, train: torch.Tensor, test: torch.Tensor) -> DataSet:
    return DataSet(data.name, Split(train, data.train.y), Split(test, data.test.y), data.classes)

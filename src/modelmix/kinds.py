"""Kinds of things that a recipe asks for by name, beyond those of the library.

A package that brings data sets, features, networks or attacks adds them to these tables when it is imported; the
library looks names up here and imports no such package. Nothing here needs torch: what an entry makes is imported when
it is made.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from modelmix.errors import ModelMixError

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

    from modelmix.accounting.ledger import Ledger
    from modelmix.config.feature_spec import FeaturesConfig
    from modelmix.config.recipe import Recipe
    from modelmix.data import DataSet
    from modelmix.features.cache import Transform
    from modelmix.training.rules import Rule

Arrays = Mapping[str, Any]
"""x_train, y_train, x_test, y_test."""


@dataclass(frozen=True)
class NamedData:
    """A data set with a name, whose files are recognised.

    Args:
        title: its proper name.
        marker: a file that its folder must have, as errors name it.
        find: where it lies in the data directory; None if it is not there.
        held: where it lies in a folder or file that was named; None if that holds something else.
        read: its name, arrays and, where they are known, classes, from what ``find`` or ``held`` found.
        classes: of the published set.
        fetch: the command that gets it.
        archives: names of files that hold it whole.
    """

    title: str
    marker: str
    find: Callable[[Path], Path | None]
    held: Callable[[Path], Path | None]
    read: Callable[[Path], tuple[str, Arrays, tuple[str, ...] | None]]
    classes: tuple[str, ...]
    fetch: str
    archives: tuple[str, ...] = ()


@dataclass(frozen=True)
class NamedFeatures:
    """Features of images with a name.

    Args:
        make: the transforms whose features stand beside each other, from the table ``[features]`` of a recipe.
        prior: whether they need the weights that ``features.prior`` of a recipe names.
        mirror: whether they may look at the mirror image as well.
        logarithm: whether logarithms of them are whitened in place of themselves.
    """

    make: Callable[[FeaturesConfig, torch.device], tuple[Transform, ...]]
    prior: bool = False
    mirror: bool = True
    logarithm: bool = False


@dataclass(frozen=True)
class Normalised:
    """What a normalisation returns: features of both splits, what it cost, and what a resumed run has to know."""

    train: Tensor
    test: Tensor
    spent: Ledger
    about: Mapping[str, Any]


@dataclass(frozen=True)
class NamedNormalisation:
    """A normalisation of features with a name.

    Args:
        features: the only features that it is for.
        apply: recipe, images, features of the training and of the test split, folder of a run that goes on.
    """

    features: str
    apply: Callable[[Recipe, DataSet, Tensor, Tensor, str | Path | None], Normalised]


DATA: dict[str, NamedData] = {}
FEATURES: dict[str, NamedFeatures] = {}
FEATURE_FILES: dict[str, str] = {}
"""Endings of files that are features, and of which kind of ``FEATURES`` they are."""
NORMALISATIONS: dict[str, NamedNormalisation] = {}
IMAGES: dict[str, Callable[[int, int, torch.Generator], Tensor]] = {}
"""Synthetic images by which features are whitened: count, side, generator -> uint8 N x 3 x side x side."""
MODELS: dict[str, Callable[[tuple[int, ...], int], nn.Module]] = {}
"""Networks: shape of a sample, number of classes -> a new network."""
RULES: dict[str, Callable[..., Rule]] = {}
"""Rules of steps that train and prove nothing: model, whether gradients are embedded, fields of ``Rule`` -> a rule."""
STARTS: list[Callable[[str, nn.Module], None]] = []
"""Put the weights that ``model.prior`` of a recipe names into a network; the last one counts."""
ATTACKS: list[Callable[[Ledger, float, int, bool], list[dict[str, Any]]]] = []
"""Attacks on a run whose claim is not proved: ledger, delta, seed, quick -> rows of ``modelmix audit``."""


def start_from(prior: str, network: nn.Module) -> None:
    """Put the weights of a prior into a network."""
    if not STARTS:
        raise ModelMixError(f"model.prior = {prior!r} is unknown: priors come with modelmix-lab. Leave it out.")
    STARTS[-1](prior, network)

"""Which features a recipe may ask for, by name, and where they come from. Checking a name needs no torch."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from modelmix import kinds
from modelmix.errors import ModelMixError

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from modelmix.config.recipe import Recipe
    from modelmix.features.cache import Transform
    from modelmix.features.extractor import Extractor

PRETRAINED = ("efficientnet-lite0", "efficientnet-lite1", "efficientnet-lite2")
EXTRACTORS = ("pretrained", "onnx", "own")


def names() -> tuple[str, ...]:
    """The features that have a name."""
    return (*kinds.FEATURES, *PRETRAINED)


def whitenings() -> tuple[str, ...]:
    """The images by which features can be whitened."""
    return (*kinds.IMAGES, "public")


def normalisations() -> tuple[str, ...]:
    """The normalisations of features that have a name."""
    return (*kinds.NORMALISATIONS, *whitenings())


def _where(has: bool) -> str:
    return "" if has else " (more come with modelmix-lab)"


def kind_of(name: str) -> str:
    """One of ``modelmix.kinds.FEATURES``, or "pretrained", "onnx", "own"."""
    if name in kinds.FEATURES:
        return name
    if all(network in PRETRAINED for network in name.split("+")):
        if len(set(name.split("+"))) < len(name.split("+")):
            raise ModelMixError(f"features = {name!r} names a network twice: name each once.")
        return "pretrained"
    for ending, kind in kinds.FEATURE_FILES.items():
        if name.endswith(ending):
            return kind
    if name.endswith(".onnx"):
        return "onnx"
    module, colon, function = name.partition(":")
    if colon and all(part.isidentifier() for part in (*module.split("."), *function.split("."))):
        return "own"
    if name.endswith((".pt", ".pth", ".pt2", ".safetensors")):
        raise ModelMixError(
            f'features = {name!r} are weights without their network: give features = "package.module:function", which '
            f"builds it, and weights = {name!r} of its state dict; or export it to ONNX."
        )
    endings = " or ".join((".onnx", *kinds.FEATURE_FILES))
    raise ModelMixError(
        f"features = {name!r} is unknown: choose {', '.join(names())}, several of these networks with + between, a "
        f"file ending in {endings}, or package.module:function, or leave it out{_where(bool(kinds.FEATURES))}."
    )


def check(recipe: Recipe) -> None:
    """Refuses names that do not exist and settings that do not go together."""
    kind = None if recipe.features is None else kind_of(recipe.features)
    named = None if kind is None else kinds.FEATURES.get(kind)
    if recipe.normalise is not None and recipe.normalise not in normalisations():
        raise ModelMixError(
            f"normalise = {recipe.normalise!r} is unknown: choose {' or '.join(normalisations())}, or leave it out"
            f"{_where(bool(kinds.NORMALISATIONS))}."
        )
    if recipe.normalise in whitenings() and kind is None:
        raise ModelMixError(f"normalise = {recipe.normalise!r} whitens features: give features as well.")
    normalisation = kinds.NORMALISATIONS.get(recipe.normalise or "")
    if normalisation is not None and kind != normalisation.features:
        raise ModelMixError(
            f'normalise = {recipe.normalise!r} is for features = "{normalisation.features}": leave one of them out.'
        )
    if recipe.normalise in whitenings() and recipe.components is None:
        raise ModelMixError(f"normalise = {recipe.normalise!r} needs components, how many directions are kept.")
    if recipe.components is not None and recipe.normalise not in whitenings():
        raise ModelMixError(f"components are for normalise = {', '.join(whitenings())}: give one, or leave them out.")
    if recipe.normalise == "public" and recipe.public is None:
        raise ModelMixError('normalise = "public" needs public, a file of images that nobody has to protect.')
    if recipe.prior is None and recipe.features in kinds.FEATURES and named is not None and named.prior:
        raise ModelMixError(f'features = "{recipe.features}" needs prior: synthetic, characters, or a file.')
    if recipe.prior is not None and recipe.features is not None:
        takes = [name for name, features in kinds.FEATURES.items() if features.prior]
        if recipe.features not in takes:
            wanted = " or ".join(f'"{name}"' for name in takes) or "those of modelmix-lab"
            raise ModelMixError(f"a prior has features of its own: give features = {wanted}, or leave prior out.")
    clips = (recipe.mean_clip, recipe.square_clip)
    if (recipe.normalise == "private") != all(clip is not None for clip in clips) or (
        recipe.normalise != "private" and any(clip is not None for clip in clips)
    ):
        raise ModelMixError('normalise = "private" needs mean_clip and square_clip, and nothing else takes them.')
    if recipe.mirror is False and (kind is None or (named is not None and not named.mirror)):
        raise ModelMixError("mirror = false is for features of patches, priors and networks: leave it out.")
    network = kind == "onnx" or (kind == "own" and recipe.weights is not None)
    for name, allowed, what in (
        ("weights", kind == "own", 'features = "package.module:function"'),
        ("pixels", network, "an .onnx file, and for package.module:function with weights"),
        (
            "feature_size",
            network or kind == "pretrained",
            "pretrained networks, .onnx files, and functions with weights",
        ),
        ("unit_length", kind in EXTRACTORS, "pretrained networks, .onnx files and own functions"),
    ):
        if getattr(recipe, name) not in (None, False) and not allowed:
            raise ModelMixError(f"{name} is for {what}: leave it out.")


def check_mirror(recipe: Recipe) -> None:
    """Refuses mirror = true, as somebody wrote it, where nothing would look at the mirror image."""
    named = kinds.FEATURES.get(recipe.features or "")
    if recipe.features is None or (named is not None and not named.mirror):
        raise ModelMixError("mirror = true is for features of patches, priors and networks: leave it out.")


def transform(recipe: Recipe, device: torch.device, public: Tensor | None = None) -> Transform:
    """The features of a recipe, as they are cached; ``public`` are the images that whiten them, if it asks for such."""
    from modelmix.features.cache import Cached
    from modelmix.features.joined import Joined
    from modelmix.features.whitening import Logarithm, Root, Whitened

    kind, found = kind_of(str(recipe.features)), _found(recipe, device)
    if kind in EXTRACTORS and (len(found) > 1 or recipe.components is not None):
        # Networks are slow, and what one says does not change with what whitens it or stands beside it.
        found = tuple(Cached(one) for one in found)
    logarithm = kind in kinds.FEATURES and kinds.FEATURES[kind].logarithm
    if recipe.components is not None and (logarithm or kind in EXTRACTORS):
        bent = Logarithm if logarithm else Root
        found = tuple(bent(one) for one in found)
    one = found[0] if len(found) == 1 else Joined(found)
    if recipe.components is None:
        return one
    return Whitened(one, str(recipe.normalise) if public is None else public, recipe.components)


def _found(recipe: Recipe, device: torch.device) -> tuple[Transform, ...]:
    """One, or several whose features stand beside each other."""
    name = str(recipe.features)
    kind = kind_of(name)
    if kind in EXTRACTORS:
        names = name.split("+") if kind == "pretrained" else [name]
        made = (_extractor(recipe, one, kind, device) for one in names)
        return tuple(dataclasses.replace(one, mirror=recipe.mirror is True) for one in made)
    return kinds.FEATURES[kind].make(recipe, device)


def _extractor(recipe: Recipe, name: str, kind: str, device: torch.device) -> Extractor:
    from modelmix.features.inputs import Inputs
    from modelmix.features.onnx import onnx_file
    from modelmix.features.pretrained import pretrained
    from modelmix.features.user_function import user_function, user_network

    unit = recipe.unit_length
    if kind == "pretrained":
        return pretrained(name, device, size=recipe.feature_size, unit_length=unit)
    inputs = Inputs(recipe.feature_size, recipe.pixels or "imagenet")
    if kind == "onnx":
        return onnx_file(name, inputs, device, unit_length=unit)
    if recipe.weights is not None:
        return user_network(name, recipe.weights, inputs, device, unit_length=unit)
    return user_function(name, unit_length=unit)

"""The table ``[features]``: what is trained on in place of pixels, and where it comes from. Checks need no torch."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, Annotated, Literal

import msgspec

from modelmix import kinds
from modelmix.config.tables import ConfigTable, key
from modelmix.errors import ModelMixError

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from modelmix.features.cache import Transform
    from modelmix.features.extractor import Extractor

PRETRAINED = ("efficientnet-lite0", "efficientnet-lite1", "efficientnet-lite2")
EXTRACTORS = ("pretrained", "onnx", "own")
Pixels = Literal["imagenet", "signed", "unit", "raw"]


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
            raise ModelMixError(f"features.kind = {name!r} names a network twice: name each once.")
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
            f'features.kind = {name!r} are weights without their network: give kind = "package.module:function", which '
            f"builds it, and weights = {name!r} of its state dict; or export it to ONNX."
        )
    endings = " or ".join((".onnx", *kinds.FEATURE_FILES))
    raise ModelMixError(
        f"features.kind = {name!r} is unknown: choose {', '.join(names())}, several of these networks with + between, "
        f"a file ending in {endings}, or package.module:function, or leave it out{_where(bool(kinds.FEATURES))}."
    )


class FeaturesConfig(ConfigTable, frozen=True):
    """What is trained on in place of pixels: see ``docs/features.md`` and ``docs/public-data.md``."""

    kind: Annotated[str, key("Features by name, a file of them, or package.module:function.")]
    weights: Annotated[str, key("State dict for the network that package.module:function builds.")] | None = None
    size: Annotated[int, key("Side in pixels of the images that the network sees.", ge=1)] | None = None
    pixels: Annotated[Pixels, key("Scale of the pixels that an .onnx file or a network with weights sees.")] | None = (
        None
    )
    unit_length: Annotated[bool, key("Scale the features of every image to the length 1.")] = False
    mirror: Annotated[bool, key("Add the features of the mirror image; patches and priors do by default.")] | None = (
        None
    )
    prior: Annotated[str, key("Weights of the network: synthetic, characters, or a file.")] | None = None
    normalise: Annotated[str, key("How features are normalised or whitened.")] | None = None
    components: Annotated[int, key("Directions that are kept of whitened features.", ge=1)] | None = None
    normalise_noise: Annotated[float, key("Noise multiplier of released moments, normalise = private.", gt=0)] = 8.0
    mean_clip: Annotated[float, key("Clip of channel means, normalise = private.", gt=0)] | None = None
    square_clip: Annotated[float, key("Clip of channel second moments, normalise = private.", gt=0)] | None = None

    def __post_init__(self) -> None:
        kind = kind_of(self.kind)
        self._check_settings(kind)
        self._check_normalisation(kind)
        if self.prior is None and self.kind in kinds.FEATURES and kinds.FEATURES[kind].prior:
            raise ModelMixError(
                f'features.kind = "{self.kind}" needs features.prior: synthetic, characters, or a file.'
            )
        if self.mirror is (kind not in EXTRACTORS):
            msgspec.structs.force_setattr(self, "mirror", None)  # what is meant anyhow is written one way

    def _check_settings(self, kind: str) -> None:
        """Refuse settings of other kinds of features."""
        network = {"onnx"} if self.weights is None else {"onnx", "own"}
        with_prior = [name for name, found in kinds.FEATURES.items() if found.prior]
        takers: Mapping[str, tuple[Collection[str], str]] = {
            "weights": ({"own"}, "package.module:function"),
            "pixels": (network, "an .onnx file, and for package.module:function with weights"),
            "size": ({"pretrained", *network}, "pretrained networks, .onnx files, and functions with weights"),
            "unit_length": (EXTRACTORS, "pretrained networks, .onnx files and functions"),
            "mirror": (
                {*EXTRACTORS, *(name for name, found in kinds.FEATURES.items() if found.mirror)},
                "features of patches, priors and networks",
            ),
            "prior": (
                [name for name in with_prior if name == self.kind],
                " or ".join(f'kind = "{name}"' for name in with_prior) or "features of modelmix-lab",
            ),
        }
        for name, (takes, whose) in takers.items():
            unset = False if name == "unit_length" else None
            if getattr(self, name) is not unset and kind not in takes:
                raise ModelMixError(f"features.{name} is for {whose}: leave it out.")

    def _check_normalisation(self, kind: str) -> None:
        known, whitened = normalisations(), self.normalise in whitenings()
        if self.normalise is not None and self.normalise not in known:
            raise ModelMixError(
                f"features.normalise = {self.normalise!r} is unknown: choose {' or '.join(known)}, or leave it out"
                f"{_where(bool(kinds.NORMALISATIONS))}."
            )
        wanted = kinds.NORMALISATIONS.get(self.normalise or "")
        if wanted is not None and kind != wanted.features:
            raise ModelMixError(
                f'features.normalise = {self.normalise!r} is for features.kind = "{wanted.features}": leave it out.'
            )
        if whitened and self.components is None:
            raise ModelMixError(
                f"features.normalise = {self.normalise!r} needs features.components, how many directions are kept."
            )
        if self.components is not None and not whitened:
            raise ModelMixError(
                f"features.components is for normalise = {', '.join(whitenings())}: give one, or leave it out."
            )
        clips = {self.mean_clip is not None, self.square_clip is not None}
        if clips != {self.normalise == "private"}:
            raise ModelMixError(
                'features.normalise = "private" needs mean_clip and square_clip, and nothing else takes them.'
            )


def transform(config: FeaturesConfig, device: torch.device, public: Tensor | None = None) -> Transform:
    """The features of a table, as they are cached; ``public`` are the images that whiten them, if it asks for such."""
    from modelmix.features.cache import Cached
    from modelmix.features.joined import Joined
    from modelmix.features.whitening import Logarithm, Root, Whitened

    kind, found = kind_of(config.kind), _found(config, device)
    if kind in EXTRACTORS and (len(found) > 1 or config.components is not None):
        # Networks are slow, and what one says does not change with what whitens it or stands beside it.
        found = tuple(Cached(one) for one in found)
    logarithm = kind in kinds.FEATURES and kinds.FEATURES[kind].logarithm
    if config.components is not None and (logarithm or kind in EXTRACTORS):
        bent = Logarithm if logarithm else Root
        found = tuple(bent(one) for one in found)
    one = found[0] if len(found) == 1 else Joined(found)
    if config.components is None:
        return one
    return Whitened(one, str(config.normalise) if public is None else public, config.components)


def _found(config: FeaturesConfig, device: torch.device) -> tuple[Transform, ...]:
    """One, or several whose features stand beside each other."""
    name = config.kind
    kind = kind_of(name)
    if kind in EXTRACTORS:
        names = name.split("+") if kind == "pretrained" else [name]
        made = (_extractor(config, one, kind, device) for one in names)
        return tuple(dataclasses.replace(one, mirror=config.mirror is True) for one in made)
    return kinds.FEATURES[kind].make(config, device)


def _extractor(config: FeaturesConfig, name: str, kind: str, device: torch.device) -> Extractor:
    from modelmix.features.inputs import Inputs
    from modelmix.features.onnx import onnx_file
    from modelmix.features.pretrained import pretrained
    from modelmix.features.user_function import user_function, user_network

    unit = config.unit_length
    if kind == "pretrained":
        return pretrained(name, device, size=config.size, unit_length=unit)
    inputs = Inputs(config.size, config.pixels or "imagenet")
    if kind == "onnx":
        return onnx_file(name, inputs, device, unit_length=unit)
    if config.weights is not None:
        return user_network(name, config.weights, inputs, device, unit_length=unit)
    return user_function(name, unit_length=unit)

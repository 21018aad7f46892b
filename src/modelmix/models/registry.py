"""Networks by name: those of ModelMix, or ``package.module:function`` of one's own."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

from torch import nn

from modelmix import kinds
from modelmix._checks import whole
from modelmix._imports import current_folder_importable, imported, one_line
from modelmix.errors import ModelMixError
from modelmix.models.networks import cnn, linear, mlp
from modelmix.models.residual import ResNet20, WideResNet16

Shape = tuple[int, ...]


def _cnn(shape: Shape, classes: int) -> nn.Module:
    if len(shape) != 3:
        raise ModelMixError(f"model 'cnn' takes images C x H x W, not samples of shape {shape}: use linear or mlp.")
    return cnn(shape[0], (shape[1], shape[2]), classes)


def _residual(name: str, make: Callable[[int, int], nn.Module]) -> Callable[[Shape, int], nn.Module]:
    def builder(shape: Shape, classes: int) -> nn.Module:
        if len(shape) != 3:
            raise ModelMixError(f"model {name!r} takes images C x H x W, not samples of shape {shape}.")
        return make(shape[0], classes)

    return builder


_BUILDERS: dict[str, Callable[[Shape, int], nn.Module]] = {
    "cnn": _cnn,
    "linear": lambda shape, classes: linear(math.prod(shape), classes),
    "mlp": lambda shape, classes: mlp(math.prod(shape), classes),
    "resnet20": _residual("resnet20", ResNet20),
    "resnet20-released": _residual("resnet20-released", partial(ResNet20, tanh_stem=True)),
    "resnet20-embedding": _residual("resnet20-embedding", partial(ResNet20, four_groups=True)),
    "wrn-16-4": _residual("wrn-16-4", WideResNet16),
}

NAMES = tuple(_BUILDERS)
"""The names that `build` knows by itself; those of ``modelmix.kinds.MODELS`` are known as well."""


def build(name: str, shape: Shape, classes: int) -> nn.Module:
    """Build a network with fresh weights, drawn from torch's global generator.

    Args:
        name: one of `NAMES`, or "package.module:function"; the current folder is searched first. The function is called
            as function(shape, classes) and returns a torch.nn.Module that takes floats and returns scores N x classes.
            Naming a function runs its code.
        shape: of one sample, without the batch: (C, H, W) or (D,).
        classes: the number of classes, 2 or more.
    """
    shape = tuple(whole("shape", side, "each side of a sample", 1) for side in shape)
    classes = whole("classes", classes, "the number of classes", 2)
    known = {**_BUILDERS, **kinds.MODELS}
    if name in known:
        return known[name](shape, classes)
    module, colon, function = name.partition(":")
    if not (module and colon and function):
        raise ModelMixError(
            f"model {name!r} is not known: allowed are {', '.join(known)} or package.module:function. "
            "Check the spelling."
        )
    return _build_own(name, function, shape, classes)


def _build_own(name: str, function: str, shape: Shape, classes: int) -> nn.Module:
    _, builder = imported(name, "model")
    with current_folder_importable():
        try:
            model = builder(shape, classes)
        except Exception as error:
            raise ModelMixError(
                f"model {name!r} failed: {one_line(error)}. It is called as {function}({shape}, {classes}), with the "
                "shape of a sample and the number of classes, and must return a torch.nn.Module."
            ) from error
    if not isinstance(model, nn.Module):
        raise ModelMixError(
            f"model {name!r} returned {type(model).__name__}: {function}(shape, classes) must return a torch.nn.Module."
        )
    return model

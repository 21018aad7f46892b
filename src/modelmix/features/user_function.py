"""Features by a function of one's own, ``package.module:function``, with or without a file of weights.

Naming a function runs its code. What its features depend on cannot be known in full: the hash of its module's source
file and its declared version go into the name of the cache, what it imports and which files it opens do not.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from modelmix._imports import current_folder_importable, imported, one_line
from modelmix.errors import ModelMixError
from modelmix.features.extractor import Extractor
from modelmix.features.inputs import Inputs
from modelmix.features.local import contents, state_dict


def own_function(name: str, *, unit_length: bool = False) -> Extractor:
    """The features function(images) of uint8 images N x C x H x W on the CPU, as N x d floats of torch or numpy.

    A function that also depends on something outside its file should say so: ``function.version = "2"``.
    """
    function, identity = _found(name)
    return Extractor("own", name, function, identity, unit_length)


def own_network(
    name: str, weights: str | Path, inputs: Inputs, device: torch.device | str, *, unit_length: bool = False
) -> Extractor:
    """The features of a network that function() builds, with weights from a file of its state dict.

    The network is put into evaluation mode and takes what ``inputs`` makes of the images.
    """
    builder, identity = _found(name)
    data, digest = contents(weights)
    state = state_dict(data, weights)
    with current_folder_importable():
        try:
            network = builder()
        except Exception as error:  # whatever the user's code raises
            raise ModelMixError(
                f"features {name!r} failed: {one_line(error)}. With weights it is called without arguments and must "
                "return a torch.nn.Module."
            ) from error
    if not isinstance(network, nn.Module):
        raise ModelMixError(
            f"features {name!r} returned {type(network).__name__}: with weights it must return a torch.nn.Module."
        )
    try:
        network.load_state_dict(state)
    except RuntimeError as error:
        raise ModelMixError(f"{weights} does not fit the network of {name!r}: {_short(error)}.") from None
    identity |= {"weights": digest, "inputs": inputs.parameters}
    return Extractor("own", name, frozen(network, inputs, device), identity, unit_length)


def frozen(network: nn.Module, inputs: Inputs, device: torch.device | str) -> Any:
    """What a network that is not trained any more makes of images; it stays in evaluation mode."""
    network.to(device).requires_grad_(False).eval()

    def function(images: Tensor) -> Any:
        return network(inputs(images.to(device)))

    return function


def _found(name: str) -> tuple[Any, dict[str, object]]:
    module, function = imported(name, "features")
    if not callable(function):
        raise ModelMixError(f"features {name!r} is {type(function).__name__}: it must be a function.")
    file = getattr(module, "__file__", None)
    if file is None:
        raise ModelMixError(
            f"features {name!r} come from no file, so that a change would go unnoticed: put the function into a file."
        )
    version = getattr(function, "version", None)
    return function, {
        "function": name,
        "source": contents(file)[1],
        "declared": None if version is None else str(version),
    }


def _short(error: Exception) -> str:
    return one_line(error)[:300].rstrip(". ")

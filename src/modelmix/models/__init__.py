"""What is trained: small networks without batch statistics, and a way to name one's own."""

from modelmix.models.networks import Pixels, cnn, linear, mlp
from modelmix.models.registry import NAMES, build
from modelmix.models.residual import ResNet20, StandardisedConv2d, WideResNet16

__all__ = [
    "NAMES",
    "Pixels",
    "ResNet20",
    "StandardisedConv2d",
    "WideResNet16",
    "build",
    "cnn",
    "linear",
    "mlp",
]

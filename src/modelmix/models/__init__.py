"""What is trained: small networks without batch statistics, and a way to name one's own."""

from modelmix.models.networks import Pixels, cnn, linear, mlp
from modelmix.models.registry import NAMES, build

__all__ = ["NAMES", "Pixels", "build", "cnn", "linear", "mlp"]

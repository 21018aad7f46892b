"""Small networks for private training. They take floats (see `modelmix.data.to_float`) and return one score per class.

None of them has batch statistics: every output depends on its own sample alone, so a sample's gradient is its own.
"""

from __future__ import annotations

from torch import Tensor, nn

from modelmix._checks import whole
from modelmix.data.dataset import to_float

SMALLEST_SIDE = 8
"""The smallest height and width that `cnn` takes."""

_SMALLEST_UNPADDED = 14


class Pixels(nn.Module):
    """A network that takes pixels as they lie in memory: they become floats on the device, one batch at a time."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def forward(self, x: Tensor) -> Tensor:
        weights = next(self.network.parameters(), None)
        pixels = to_float(x)
        scores: Tensor = self.network(pixels if weights is None else pixels.to(weights.dtype))
        return scores


def cnn(channels: int, size: int | tuple[int, int], classes: int) -> nn.Sequential:
    """Build the small tanh network common in private training on MNIST and its relatives.

    26,010 parameters for 1 x 28 x 28 and 10 classes, 37,274 for 3 x 32 x 32. Tanh rather than ReLU: bounded activations
    keep gradients short, and clipping cuts less.

    Args:
        channels: of the image.
        size: its height and width, or one number for both; 8 or more. Below 14 the second convolution is padded by 2,
            without which nothing would be left of the image.
        classes: 2 or more.
    """
    height, width = (size, size) if isinstance(size, int) else size
    channels, classes = whole("channels", channels, "the number of channels", 1), _classes(classes)
    height = whole("height", height, "the height of an image for cnn", SMALLEST_SIDE)
    width = whole("width", width, "the width of an image for cnn", SMALLEST_SIDE)
    padding = 2 if min(height, width) < _SMALLEST_UNPADDED else 0
    left = _side_left(height, padding) * _side_left(width, padding)
    return nn.Sequential(
        nn.Conv2d(channels, 16, 8, stride=2, padding=3),
        nn.Tanh(),
        nn.MaxPool2d(2, stride=1),
        nn.Conv2d(16, 32, 4, stride=2, padding=padding),
        nn.Tanh(),
        nn.MaxPool2d(2, stride=1),
        nn.Flatten(),
        nn.Linear(32 * left, 32),
        nn.Tanh(),
        nn.Linear(32, classes),
    )


def linear(features: int, classes: int) -> nn.Sequential:
    """Build softmax regression on ``features`` numbers of any shape: 7,850 parameters for 28 x 28 and 10 classes."""
    return nn.Sequential(nn.Flatten(), nn.Linear(_features(features), _classes(classes)))


def mlp(features: int, classes: int) -> nn.Sequential:
    """Build one hidden layer of 128 tanh units: 101,770 parameters for 28 x 28 and 10 classes."""
    return nn.Sequential(
        nn.Flatten(), nn.Linear(_features(features), 128), nn.Tanh(), nn.Linear(128, _classes(classes))
    )


def _side_left(side: int, padding: int) -> int:
    """Return what the two convolutions and poolings of `cnn` leave of a side."""
    first = (side + 6 - 8) // 2 + 1 - 1
    return (first + 2 * padding - 4) // 2 + 1 - 1


def _features(features: int) -> int:
    return whole("features", features, "the number of input values", 1)


def _classes(classes: int) -> int:
    return whole("classes", classes, "the number of classes", 2)

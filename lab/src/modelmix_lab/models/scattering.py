"""The networks of Tramer and Boneh on scattering features, by number of parameters."""

from __future__ import annotations

from torch import nn

from modelmix.errors import ModelMixError


def scatter_cnn_cifar(classes: int = 10) -> nn.Sequential:
    """Build the network for features 243 x 8 x 8 of colour images 32 x 32: 187,210 parameters for 10 classes."""
    return nn.Sequential(
        nn.Conv2d(243, 64, 3, padding=1),
        nn.Tanh(),
        nn.MaxPool2d(2),
        nn.Conv2d(64, 64, 3, padding=1),
        nn.Tanh(),
        nn.Flatten(),
        nn.Linear(1024, classes),
    )


def scatter_cnn_grey(classes: int = 10) -> nn.Sequential:
    """Build the network for features 81 x 7 x 7 of grey images 28 x 28: 33,066 parameters for 10 classes."""
    return nn.Sequential(
        nn.Conv2d(81, 16, 3, stride=2, padding=1),
        nn.Tanh(),
        nn.Conv2d(16, 32, 3, padding=1),
        nn.Tanh(),
        nn.Flatten(),
        nn.Linear(512, 32),
        nn.Tanh(),
        nn.Linear(32, classes),
    )


def scatter_cnn(shape: tuple[int, ...], classes: int) -> nn.Module:
    """Build the network for features of this shape."""
    known = {(243, 8, 8): scatter_cnn_cifar, (81, 7, 7): scatter_cnn_grey}
    if shape not in known:
        raise ModelMixError(
            f"model 'scatter-cnn' takes features 243 x 8 x 8 or 81 x 7 x 7, not samples of shape {shape}: give "
            'features = "scatter" with images 3 x 32 x 32 or 1 x 28 x 28.'
        )
    return known[shape](classes)

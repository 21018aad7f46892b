"""Residual networks of the private-training literature, free of batch statistics.

All take images N x C x H x W as floats and return one score per class.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F  # noqa: N812, the name everybody knows
from torch import Tensor, nn

from modelmix._checks import whole


class StandardisedConv2d(nn.Conv2d):
    """A convolution whose kernels have mean 0 and variance 1/fan-in, times a trained gain for every output channel.

    The weight used is gain * (W - mean) / sqrt(fan_in * (variance + eps)), mean and variance over each output
    channel's kernel: Brock et al., "Characterizing signal propagation to close the performance gap in unnormalized
    ResNets". It depends on parameters alone, so samples do not meet in it.
    """

    eps = 1e-4

    def __init__(
        self, inside: int, outside: int, kernel_size: int, stride: int = 1, padding: int = 0, bias: bool = True
    ) -> None:
        super().__init__(inside, outside, kernel_size, stride, padding, bias=bias)
        self.gain = nn.Parameter(torch.ones(outside))

    def standardised(self, weight: Tensor) -> tuple[Tensor, Tensor]:
        """Return the kernels without their gains, (W - mean) * r, and r = 1 / sqrt(fan_in * (variance + eps))."""
        variance, mean = torch.var_mean(weight, (1, 2, 3), correction=0, keepdim=True)
        r = torch.rsqrt(weight[0].numel() * (variance + self.eps))
        return (weight - mean) * r, r

    def used_weight(self, weight: Tensor, gain: Tensor) -> Tensor:
        """Return the kernel that images are convolved with."""
        return gain[:, None, None, None] * self.standardised(weight)[0]

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self._conv_forward(x, self.used_weight(self.weight, self.gain), self.bias)
        return out


class _Shortcut(nn.Module):
    """Every second pixel, and zeros for the channels that are missing: a shortcut without parameters (option A)."""

    def __init__(self, missing: int) -> None:
        super().__init__()
        self.missing = missing

    def forward(self, x: Tensor) -> Tensor:
        before = self.missing // 2
        return F.pad(x[:, :, ::2, ::2], (0, 0, 0, 0, before, self.missing - before))


class _Block(nn.Module):
    def __init__(self, inside: int, outside: int, stride: int, norm: Callable[[int], nn.Module]) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inside, outside, 3, stride, 1, bias=False)
        self.norm1 = norm(outside)
        self.conv2 = nn.Conv2d(outside, outside, 3, 1, 1, bias=False)
        self.norm2 = norm(outside)
        self.shortcut = nn.Identity() if stride == 1 and inside == outside else _Shortcut(outside - inside)

    def forward(self, x: Tensor) -> Tensor:
        out = self.norm2(self.conv2(F.relu(self.norm1(self.conv1(x)))))
        return F.relu(out + self.shortcut(x))


def _group_norm(channels: int) -> nn.GroupNorm:
    return nn.GroupNorm(min(32, channels), channels)


def _four_groups(channels: int) -> nn.GroupNorm:
    return nn.GroupNorm(4, channels, affine=False)


class ResNet20(nn.Module):
    """Nine residual blocks of 16, 32 and 64 channels with GroupNorm: 269,722 parameters for 3 channels, 10 classes.

    Args:
        channels: of the image.
        classes: 2 or more.
        tanh_stem: tanh after the first convolution, as in the ModelMix authors' code, in place of ReLU.
        four_groups: GroupNorm of four groups without weights, as in Yu et al.'s gradient embedding: 268,346 parameters.
    """

    def __init__(
        self, channels: int = 3, classes: int = 10, *, tanh_stem: bool = False, four_groups: bool = False
    ) -> None:
        super().__init__()
        channels = whole("channels", channels, "the number of channels", 1)
        classes = whole("classes", classes, "the number of classes", 2)
        self.conv = nn.Conv2d(channels, 16, 3, padding=1, bias=False)
        norm = _four_groups if four_groups else _group_norm
        self.norm = norm(16)
        self.first = nn.Tanh() if tanh_stem else nn.ReLU()
        blocks, inside = [], 16
        for outside in (16, 32, 64):
            for i in range(3):
                blocks.append(_Block(inside, outside, 2 if i == 0 and outside > inside else 1, norm))
                inside = outside
        self.blocks = nn.Sequential(*blocks)
        self.head = nn.Linear(64, classes)
        for module in self.modules():
            if isinstance(module, nn.Conv2d | nn.Linear):
                nn.init.kaiming_normal_(module.weight)

    def forward(self, x: Tensor) -> Tensor:
        x = self.blocks(self.first(self.norm(self.conv(x))))
        scores: Tensor = self.head(x.mean((2, 3)))
        return scores


class _WideBlock(nn.Module):
    """ReLU, norm, convolution, twice; a 1 x 1 projection where shapes change."""

    def __init__(self, inside: int, outside: int, stride: int) -> None:
        super().__init__()
        self.norm1 = nn.GroupNorm(16, inside)
        self.conv1 = StandardisedConv2d(inside, outside, 3, stride, 1)
        self.norm2 = nn.GroupNorm(16, outside)
        self.conv2 = StandardisedConv2d(outside, outside, 3, 1, 1)
        self.project = None if inside == outside else StandardisedConv2d(inside, outside, 1, stride)

    def forward(self, x: Tensor) -> Tensor:
        inner = self.norm1(F.relu(x))
        out = self.conv2(self.norm2(F.relu(self.conv1(inner))))
        kept: Tensor = x if self.project is None else self.project(inner)
        total: Tensor = kept + out
        return total


class WideResNet16(nn.Module):
    """WRN-16-k with weight-standardised convolutions and GroupNorm(16), after De et al. 2022.

    2.7 million parameters for width 4, 3 channels and 10 classes.
    """

    def __init__(self, channels: int = 3, classes: int = 10, *, width: int = 4) -> None:
        super().__init__()
        channels = whole("channels", channels, "the number of channels", 1)
        classes = whole("classes", classes, "the number of classes", 2)
        width = whole("width", width, "the width factor", 1)
        self.conv = StandardisedConv2d(channels, 16, 3, 1, 1)
        blocks, inside = [], 16
        for outside in (16 * width, 32 * width, 64 * width):
            for i in range(2):
                blocks.append(_WideBlock(inside, outside, 2 if i == 0 and outside > 16 * width else 1))
                inside = outside
        self.blocks = nn.Sequential(*blocks)
        self.norm = nn.GroupNorm(16, inside)
        self.head = nn.Linear(inside, classes)

    def maps(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return the maps of the second of the three stages, at half the resolution, and of the last, at a quarter."""
        second = self.blocks[:4](self.conv(x))
        return F.relu(second), self.norm(F.relu(self.blocks[4:](second)))

    def forward(self, x: Tensor) -> Tensor:
        scores: Tensor = self.head(self.maps(x)[1].mean((2, 3)))
        return scores

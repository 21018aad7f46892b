"""Scattering features of images: fixed wavelets, nothing learned, so that they cost no privacy.

The transform of Oyallon and Mallat at scale J = 2 with L = 8 angles, orders 0 to 2, as Tramer and Boneh train on:

    S0 = x * phi,    S1 = |x * psi(j1, a1)| * phi,    S2 = ||x * psi(j1, a1)| * psi(j2, a2)| * phi  with j1 < j2,

* a convolution on the reflected image, every map sampled at each 4th pixel: 1 + 16 + 64 = 81 maps per colour, so that
a colour image of 32 x 32 becomes 243 x 8 x 8 and a grey one of 28 x 28 becomes 81 x 7 x 7. Filters, borders and order
of the maps are kymatio's (Morlet wavelets; colour first, then j1, a1, j2, a2): networks and results carry over.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from modelmix.errors import ModelMixError
from modelmix.features.inputs import require_images, where

MAPS = 81
"""Maps per colour."""

Planes = Callable[[Tensor], Tensor]
"""From P x H x W, float32, to P x 81 x H/4 x W/4."""

_ANGLES = 8
_STEP = 4  # 2^J: every map is sampled at each 4th pixel, and the image is reflected by as much
_SLANT = 4 / _ANGLES
_PI = 3.1415  # kymatio's pi in the height of a filter; with all the digits, second-order maps would be off by 9e-5

# Pixels at a time, times some 200 bytes of work space: on a processor what its cache can serve, on a GPU 0.5 GB.
_PIXELS_CPU, _PIXELS_GPU = 150_000, 2_500_000

# The usual constants of ImageNet's colours. They are public: those of the training set would have to be paid for.
_MEAN, _DEVIATION = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


@dataclass(frozen=True)
class Scattering:
    """The scattering transform: call it on images, or give it to ``cached``.

    Args:
        device: where to compute; the GPU when there is one.
    """

    device: torch.device | str | None = None

    name: ClassVar[str] = "scattering"
    version: ClassVar[int] = 1  # count up whenever the features of any image change

    @property
    def parameters(self) -> dict[str, object]:
        """All that the features depend on, besides the images and the version."""
        # "implementation" is in the names of caches since there were two.
        return {"J": 2, "L": _ANGLES, "order": 2, "implementation": "own"}

    def shape(self, images: Tensor) -> tuple[int, ...]:
        """Return the shape of the features of ``images``; refuse what cannot be transformed."""
        require_images(images, "scattering")
        n, colours, height, width = images.shape
        if n == 0:
            raise ModelMixError("there are no images: scattering needs one or more.")
        if height % _STEP or width % _STEP or min(height, width) <= _STEP:
            raise ModelMixError(
                f"images of {height} x {width} cannot be scattered: both sides must be multiples of {_STEP} and at "
                f"least {2 * _STEP}. Pad or crop them."
            )
        return n, MAPS * colours, height // _STEP, width // _STEP

    def batches(self, images: Tensor) -> Iterator[Tensor]:
        """Yield the features of the images batch by batch, float32 on the device. Memory does not grow with N."""
        _, maps, height, width = self.shape(images)
        device = self._where
        transform = _plane_transform(images.shape[2], images.shape[3], device)
        pixels_of_one = images.shape[1] * (images.shape[2] + 2 * _STEP) * (images.shape[3] + 2 * _STEP)
        at_once = (_PIXELS_CPU if device.type == "cpu" else _PIXELS_GPU) // pixels_of_one
        for batch in torch.split(images, max(1, at_once)):
            yield transform(pixels(batch.to(device)).flatten(0, 1)).reshape(-1, maps, height, width)

    def __call__(self, images: Tensor) -> Tensor:
        """Return the features of uint8 images N x C x H x W: float32 N x 81 C x H/4 x W/4, on the device."""
        out = torch.empty(self.shape(images), device=self._where)
        start = 0
        for batch in self.batches(images):
            out[start : start + len(batch)] = batch
            start += len(batch)
        return out

    @property
    def _where(self) -> torch.device:
        return where(self.device)


def pixels(images: Tensor) -> Tensor:
    """Convert to float32 what is transformed: grey on [0, 1]; colours after ImageNet's mean and deviation."""
    x = images.float() / 255
    if images.shape[1] == 1:
        return x
    mean, deviation = (torch.tensor(v, device=x.device).view(3, 1, 1) for v in (_MEAN, _DEVIATION))
    return (x - mean) / deviation


def _plane_transform(height: int, width: int, device: torch.device) -> Planes:
    """Build the transform of one plane by batched Fourier transforms in torch."""
    size = (height + 2 * _STEP, width + 2 * _STEP)
    psi = [_tensor(_wavelets(size, j), device) for j in (0, 1)]
    low = _low_pass(size)
    phi = [_tensor(f[:, : f.shape[1] // 2 + 1], device) for f in (low, _half_resolution(low))]

    def smooth(x: Tensor, j: int) -> Tensor:
        """Convolve real maps at resolution 2^-j with phi, at each 4th pixel inside the reflected border."""
        smoothed: Tensor = torch.fft.irfft2(torch.fft.rfft2(x) * phi[j], s=x.shape[-2:])
        k = _STEP >> j
        return smoothed[..., k:-k:k, k:-k:k]

    def transform(x: Tensor) -> Tensor:
        x = torch.nn.functional.pad(x, (_STEP,) * 4, mode="reflect")[:, None]
        out = x.new_empty(len(x), MAPS, height // _STEP, width // _STEP)
        out[:, :1] = smooth(x, 0)
        spectrum = torch.fft.fft2(x)
        fine = torch.fft.ifft2(spectrum * psi[0]).abs()
        out[:, 1:9] = smooth(fine, 0)
        out[:, 9:17] = smooth(torch.fft.ifft2(_halve(spectrum * psi[1])).abs(), 1)
        for a in range(_ANGLES):  # one angle at a time: all 64 pairs at once would need eight times the memory
            second = torch.fft.ifft2(_halve(torch.fft.fft2(fine[:, a : a + 1]) * psi[1])).abs()
            out[:, 17 + 8 * a : 25 + 8 * a] = smooth(second, 1)
        return out

    return transform


def _halve(spectrum: Tensor) -> Tensor:
    """Return the spectrum of every second pixel in both directions: the mean over the frequencies that become one."""
    h, w = spectrum.shape[-2] // 2, spectrum.shape[-1] // 2
    rows = spectrum[..., :h, :] + spectrum[..., h:, :]
    return (rows[..., :w] + rows[..., w:]) / 4


# The filters: Gaussians (phi) and Gaussians times a wave (psi), repeated periodically. They are given by their Fourier
# transforms, which are real because psi(-u) is the complex conjugate of psi(u).

Array = NDArray[Any]


def _gabor(size: tuple[int, int], sigma: float, angle: float, frequency: float, slant: float) -> Array:
    """Sample a Gabor filter, a along the angle and b across.

    exp(-(a^2 + slant^2 b^2) / (2 sigma^2) + i frequency a) / (2 pi sigma^2 / slant)

    Summed over the periods -2 .. 2 of the image, which is all of it: no filter is wider than 3.2 pixels.
    """
    u, v = (np.arange(-2 * n, 3 * n, dtype=np.float64) for n in size)
    u, v = u[:, None], v[None, :]
    along = u * math.cos(angle) + v * math.sin(angle)
    across = v * math.cos(angle) - u * math.sin(angle)
    wave = np.exp(-(along**2 + (slant * across) ** 2) / (2 * sigma**2) + 1j * frequency * along)
    one_period: Array = wave.reshape(5, size[0], 5, size[1]).sum((0, 2))
    return one_period / (2 * _PI * sigma**2 / slant)


def _low_pass(size: tuple[int, int]) -> Array:
    """Return phi, a round Gaussian of 1.6 pixels."""
    return np.fft.fft2(_gabor(size, 1.6, 0.0, 0.0, 1.0)).real


def _wavelets(size: tuple[int, int], j: int) -> Array:
    """Return psi(j, a) for the 8 angles: sigma 0.8 * 2^j pixels, frequency 3/4 pi / 2^j, mean exactly zero."""
    out = []
    for a in range(_ANGLES):
        shape = (size, 0.8 * 2**j, (_ANGLES // 2 - 1 - a) * math.pi / _ANGLES)
        wave, bump = _gabor(*shape, 0.75 * math.pi / 2**j, _SLANT), _gabor(*shape, 0.0, _SLANT)
        out.append(np.fft.fft2(wave - wave.sum() / bump.sum() * bump).real)
    return np.stack(out)


def _half_resolution(spectrum: Array) -> Array:
    """Return the filter for images of half the size: its lower half of the frequencies."""
    h, w = (n // 4 for n in spectrum.shape)
    return spectrum[np.r_[:h, -h:0]][:, np.r_[:w, -w:0]]


def _tensor(array: Array, device: torch.device) -> Tensor:
    return torch.from_numpy(np.ascontiguousarray(array, dtype=np.float32)).to(device)

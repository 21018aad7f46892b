"""Normalising features before private training: per sample, which is free, or per channel, which is paid for.

Means and variances of channels over the training set are statistics of private data. They may be used only as released
by a mechanism that is in the ledger; what is normalised by a sample's own values is still a function of that sample
alone and costs nothing.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from modelmix._checks import whole
from modelmix.accounting.ledger import Phase
from modelmix.accounting.mechanism import Mechanism
from modelmix.errors import ModelMixError
from modelmix.gradients.clip import Clip
from modelmix.training.randomness import Randomness

GROUPS = 27
"""Groups of Tramer and Boneh: 3 maps each for the 81 of a grey image, 9 for the 243 of a colour image."""

MARGIN = 2.0**-10
"""How far below the clips norms are cut, relatively; see ``clipped_sums``."""

_MOST_SAMPLES = 2**20
_CHUNK = 2048  # images at a time


def group_normalise(features: Tensor, groups: int = GROUPS) -> Tensor:
    """Normalise every group of channels of every sample to mean 0 and variance 1. Free: no sample sees another.

    Args:
        features: N x C x H x W.
        groups: how many groups of neighbouring channels; it divides C. There are no affine parameters.
    """
    _check(features)
    groups = whole("groups", groups, "the number of groups", least=1)
    if features.shape[1] % groups:
        raise ModelMixError(f"{features.shape[1]} channels cannot be split into {groups} groups of one size.")
    return torch.nn.functional.group_norm(features.float(), groups)


@dataclass(frozen=True, eq=False)
class ChannelNormalisation:
    """Noisy moments of every channel, and the phase of the ledger that pays for them.

    Args:
        mean: C numbers in float64.
        variance: C numbers in float64, all positive.
        phase: put it into the ledger *before* anything computed with the moments is kept:
            ``ledger.add(phase.mechanism, phase.steps)``.
    """

    mean: Tensor
    variance: Tensor
    phase: Phase

    def __call__(self, features: Tensor) -> Tensor:
        """Normalise features N x C x H x W of any sample: (x - mean) / sqrt(variance), in float32."""
        mean, scale = (v.to(features.device, torch.float32).view(-1, 1, 1) for v in (self.mean, self.variance.rsqrt()))
        return (features.float() - mean) * scale


@torch.no_grad()
def private_channel_normalisation(
    features: Tensor,
    *,
    n: int,
    mean_clip: float,
    square_clip: float,
    noise_multiplier: float,
    randomness: Randomness,
) -> ChannelNormalisation:
    """Release mean and variance of every channel over the training set by two Gaussian mechanisms.

    With m_i the channel means of image i (over its pixels), s_i the channel means of its squares, and clip(v, c) the
    vector v shortened to the l2 norm c where it is longer,

        mean          = ( sum_i clip(m_i, c1) + z * c1 * N(0, 1) ) / n,
        second moment = ( sum_i clip(s_i, c2) + z * c2 * N(0, 1) ) / n,        variance = second moment - mean^2.

    Neighbours differ in one image's contribution, see ``adjacency``. It changes the first sum by a vector of norm at
    most c1, so that noise of standard deviation z*c1 on the sum is a Gaussian mechanism of multiplier z, whatever the
    size of the data set; the same holds for the second. Dividing by n afterwards costs nothing *because n is a constant
    that is the same for both neighbours*: the standard deviation of the averages is z*c/n. Where the number of images
    is private, it would not do: the average would move with every image in it, and the scale of the noise would tell n.

    Price: two releases of multiplier z without sampling, D_alpha = 2 * alpha / (2 z^2), which is ``phase``: two steps
    of ``Mechanism(z, 1.0)``. For z = 8 and delta = 1e-5 alone that is epsilon 0.634 (0.695 by Renyi moments).
    One release of both vectors (m_i/c1, s_i/c2), each clipped as above, has sensitivity sqrt(2) and costs exactly the
    same; clipping the pair to norm 1 instead would save half of D_alpha and shorten more images.

    The clips are constants chosen in advance, from public images or from experience. Medians of the private norms,
    which some published code takes, are a release that nobody pays for.

    What is summed obeys the bounds, not only what was meant: see ``clipped_sums``. An image with features that are not
    finite adds nothing.

    Args:
        features: N x C x H x W, of the training images.
        n: the population, a public constant; or the number of images, where that is public (zero-out).
        mean_clip: c1, the bound on |m_i|.
        square_clip: c2, the bound on |s_i|.
        noise_multiplier: z of each of the two releases.
        randomness: its key serves these two releases and moves on, so that further ones have noise of their own.

    Returns:
        The variance is at least z*c2/n, a public constant: below its own noise nothing is known of it.
    """
    _check(features)
    n = whole("n", n, "the public size of the data set", least=1)
    clips = Clip(mean_clip).c, Clip(square_clip).c
    mechanism = Mechanism(noise_multiplier, 1.0)
    sums, draws = clipped_sums(features, *clips), randomness.step()
    labels = ("channel means", "channel second moments")
    mean, square = (
        (total.cpu() + mechanism.noise_multiplier * clip * draws.gaussian(label, features.shape[1])) / n
        for total, clip, label in zip(sums, clips, labels, strict=True)
    )
    randomness.advance()  # before anybody has seen the noise
    variance = (square - mean**2).clamp_min(mechanism.noise_multiplier * clips[1] / n)
    return ChannelNormalisation(mean, variance, Phase(mechanism, 2))


def clipped_sums(features: Tensor, mean_clip: float, square_clip: float) -> tuple[Tensor, Tensor]:
    """Compute the two sums above before noise: private. One image more or less moves each by at most its clip.

    All in float64, and norms are cut to (1 - 2^-10) of the clip, which pays for every rounding: with u = 2^-53, sums of
    n vectors are off by at most n^2 u of the clip in whichever order, for both neighbours together 2^-12 of it at
    n = 2^20, the most that is accepted; the norms by far less.
    """
    if len(features) > _MOST_SAMPLES:
        raise ModelMixError(f"{len(features)} samples are more than the bound on rounding covers: {_MOST_SAMPLES}.")
    means = torch.zeros(features.shape[1], dtype=torch.float64, device=features.device)
    squares = torch.zeros_like(means)
    for chunk in torch.split(features, _CHUNK):
        x = chunk.double()
        means += _clipped(x.mean((2, 3)), mean_clip).sum(0)
        squares += _clipped(x.square().mean((2, 3)), square_clip).sum(0)
    return means, squares


def _clipped(vectors: Tensor, clip: float) -> Tensor:
    """Clip every row to the l2 norm ``clip``; a row that is not finite becomes zero."""
    norms = torch.linalg.vector_norm(vectors, dim=1, keepdim=True)
    scale = (clip * (1 - MARGIN) / norms.clamp_min(1e-300)).clamp_max(1.0)
    return torch.where(torch.isfinite(norms), vectors * scale, 0.0)


def _check(features: Tensor) -> None:
    if not features.is_floating_point() or features.ndim != 4:
        raise ModelMixError(
            f"features are {features.dtype} with shape {tuple(features.shape)}: allowed are floats N x C x H x W."
        )

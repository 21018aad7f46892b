r"""One step of gradient embedding (Yu et al. 2021), plain or mixed (Section 5.3 of the paper), as a mechanism.

A public basis V (d x k) splits every sample's gradient into an embedding e = V^T g, clipped to c0, and a residual
r = g - V V^T g, clipped to c1. One Poisson draw gives two sums, and what is released is, with U the uniform of mixing,

    Y = V (sum e + z c0 N_k) + sum r + z c1 N_d + U,          N_k, N_d standard Gaussian,

up to functions of released states. V may depend on public data and on released states in any way: given those it is a
constant, and the bounds hold for every constant V. Lengths are divided by c1; rho = c0/c1, and sqrt(rho^2 + 1) is the
bound on a sample's whole contribution v = V e + r.

**Given the draw of all other samples**, Y has the density f(. - s) without the sample and f(. - s - v) with it, f even.
So the pair to compare is P = f and (1-q) P + q P', P' = f(. - v), by quasi-convexity of the Renyi divergence; removing
is the worse direction for every even f (fact 3), and at whole orders the divergence is a sum of the moments
A_k = \int P'^k P^(1-k), each with a positive coefficient. Two upper bounds on A_k hold for the same step:

1. **The pair.** Y is computed from (sum e + z c0 N_k, sum r + z c1 N_d + U), and computing raises no moment. The two
   noises are independent, so the moment of the pair is the product of a Gaussian one, at a shift of 1/z, and of the
   mixed one of the residual: |r| <= c1 and every coordinate at most c1/sqrt(p).
2. **The whole.** Y is computed from sum v + z c1 N_d + U by adding V z c0 N_k, so the mixed moments of v are above as
   well: |v| <= sqrt(c0^2 + c1^2) and every coordinate at most that over sqrt(p), with the residual's noise alone.

Whichever is smaller counts, moment by moment. The products stand *inside* one sum over the draw: adding the curves of
two sampled releases, as Yu et al. do, would be right for two draws and is too small for one. Without mixing the pair is
one Gaussian of multiplier z/sqrt(2), and the second bound, which forgets a noise, never helps.

The second bound asks for |v| and its coordinates as such: that e and r lie at right angles does not survive truncating
r, so training scales e and r of a sample together until v keeps its bounds.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

from modelmix._checks import LARGEST, positive
from modelmix.accounting.laws import Gaussian
from modelmix.accounting.mechanism import Bound, Mechanism
from modelmix.errors import UnprovedError

_KEY = "clip_ratio"


@dataclass(frozen=True)
class EmbeddingMechanism(Mechanism):
    """One draw, two noisy releases: embeddings clipped to c0 and residuals clipped to c1, each with z times its clip.

    Adjacency, sampling rate and p are as for ``Mechanism``, of which the clip is c1: mixing_width is
    (tau/eta) * q*n / c1, and p is the truncation of residuals to c1/sqrt(p) and of whole contributions to
    sqrt(c0^2 + c1^2)/sqrt(p).

    Args:
        clip_ratio: rho = c0/c1; 5/2 in both papers.
    """

    clip_ratio: float = 2.5

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(
            self, _KEY, positive(_KEY, self.clip_ratio, "the embedding's clip over the residual's", LARGEST)
        )
        if self.law != "gaussian":
            raise UnprovedError(
                "both releases of an embedded step have Gaussian noise",
                f"law = {self.law!r} was asked for.",
                'Leave law out: an l2 clip of embeddings goes with law = "gaussian".',
            )

    @property
    def whole_bound(self) -> float:
        """Largest l2 norm of a sample's whole contribution V e + r, over c1."""
        return math.hypot(self.clip_ratio, 1.0)

    @cached_property
    def moment_bounds(self) -> tuple[Bound, ...]:
        (residual,) = super().moment_bounds
        pair: Bound = ((Gaussian(self.noise_multiplier), 1.0, 1), *residual)
        if not self.mixed:
            return (pair,)
        # hypot is off by an ulp or so; moments are continuous and 1e-12 pays for it.
        whole: Bound = tuple((law, size * self.whole_bound * (1 + 1e-12), count) for law, size, count in residual)
        return pair, whole

    @cached_property
    def l2_sensitivity(self) -> float:
        """Largest l2 norm of the pair (e/c0, r/c1), both of which have noise z: sqrt(2)."""
        (_, full), *_ = self.worst_gradient
        return math.sqrt(1 + full / self.p)

    @property
    def equal_variance_multiplier(self) -> float:
        """Of the Gaussian pair in which the variance of mixing, too, is Gaussian, for embedding and residual alike."""
        mixing = self.coordinate_law.variance - self.noise.variance
        z, (_, full) = self.noise_multiplier, self.worst_gradient[0]
        lost = 1 / (z**2 + mixing / self.clip_ratio**2) + full / self.p / (z**2 + mixing)
        return 1 / math.sqrt(lost)


def mechanism_from_dict(data: Mapping[str, object]) -> Mechanism:
    """The mechanism that ``as_dict`` wrote, of whichever kind; refuses missing and unknown fields."""
    return (EmbeddingMechanism if _KEY in data else Mechanism).from_dict(data)

"""One step's privacy as an immutable value.

What a trainer runs and what the accountant composes is the same ``Mechanism``; they cannot disagree.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from functools import cached_property

from modelmix._checks import LARGEST, at_least_zero, positive, rate, whole
from modelmix.accounting.laws import Gaussian, Laplace, Law, Mixed
from modelmix.errors import ModelMixError

LAWS: Mapping[str, Callable[[float], Law]] = {"gaussian": Gaussian, "laplace": Laplace}

_FIELDS = ("law", "noise_multiplier", "mixing_width", "p", "sample_rate", "dimension")

Bound = tuple[tuple[Law, float, int], ...]
"""(law, shift, count) of independent parts: log A_k is at most the sum of count * log A_k(law, shift)."""


@dataclass(frozen=True)
class Mechanism:
    """One noisy, mixed gradient step on a Poisson-sampled batch.

    Neighbours differ in one sample's contribution, see ``adjacency``. All lengths are divided by the clip.

    Args:
        noise_multiplier: z, the noise scale over the clip. Gaussian: standard deviation over the l2 clip.
            Laplace: scale over the l1 clip.
        sample_rate: q, the probability with which every sample enters the batch, independently.
        mixing_width: omega = (tau/eta) * q*n / c; 0 is plain DP-SGD.
        p: truncation. Every coordinate of a clipped gradient is at most c/sqrt(p) in size; 1 is no truncation.
        law: "gaussian", "laplace", or a function from z to a ``Law`` (Section 4.5 of the paper).
        dimension: number d of trained coordinates if known; it matters only when it is below p.
    """

    noise_multiplier: float
    sample_rate: float
    mixing_width: float = 0.0
    p: int = 1
    law: str | Callable[[float], Law] = "gaussian"
    dimension: int | None = None

    def __post_init__(self) -> None:
        # Normal forms, so that equal mechanisms compare and hash equal however they were written.
        set_field = object.__setattr__
        set_field(self, "noise_multiplier", positive("z", self.noise_multiplier, "the noise multiplier", LARGEST))
        set_field(self, "sample_rate", rate("q", self.sample_rate, "the sampling rate"))
        set_field(self, "mixing_width", at_least_zero("omega", self.mixing_width, "the mixing width", LARGEST))
        set_field(self, "p", whole("p", self.p, "the truncation parameter", least=1))
        if self.dimension is not None:
            set_field(self, "dimension", whole("d", self.dimension, "the number of trained coordinates", least=1))
        if isinstance(self.law, str) and self.law not in LAWS:
            raise ModelMixError(f"law = {self.law!r} is unknown: choose one of {', '.join(sorted(LAWS))}.")
        if not isinstance(self.law, str) and not callable(self.law):
            raise ModelMixError("law must be a name or a function from z to a Law.")

    @cached_property
    def noise(self) -> Law:
        """The law of the added noise alone."""
        family = LAWS[self.law] if isinstance(self.law, str) else self.law
        return family(self.noise_multiplier)

    @cached_property
    def coordinate_law(self) -> Law:
        """What one coordinate receives in one step: the noise, plus the mixing uniform."""
        return Mixed(self.noise, self.mixing_width) if self.mixing_width > 0 else self.noise

    @property
    def mixed(self) -> bool:
        return self.mixing_width > 0

    @property
    def total_std(self) -> float:
        """Standard deviation of everything added to one coordinate, over the clip."""
        return math.sqrt(self.coordinate_law.variance)

    @property
    def coordinate_bound(self) -> float:
        """Largest size of one coordinate of a clipped gradient, over the clip."""
        return 1 / math.sqrt(self.p)

    @cached_property
    def worst_gradient(self) -> tuple[tuple[float, int], ...]:
        """The clipped gradient with the largest Renyi divergence, as (size, how many coordinates).

        Clipping leaves {|v|_norm <= 1, |v_j| <= 1/sqrt(p)}. The log-moment is a sum over coordinates of a convex
        function of |v_j|^norm, so it is largest at a vertex: as many coordinates as fit at the bound (Corollary 4.1:
        exactly p of them for the l2 norm), and for the l1 norm one more with what is left.
        """
        bound = self.coordinate_bound
        full, rest = self.p, 0.0
        if self.coordinate_law.norm == 1:
            full = math.isqrt(self.p)
            rest = 0.0 if full * full == self.p else max(0.0, 1 - full * bound)
        d = self.dimension if self.dimension is not None else full + 1
        gradient = [(bound, min(full, d))]
        if rest > 0 and d > full:
            gradient.append((rest, 1))
        return tuple(gradient)

    @cached_property
    def l2_sensitivity(self) -> float:
        """Largest l2 norm of a clipped gradient, over the clip: 1, unless truncation or few coordinates lower it."""
        (_, full), *rest = self.worst_gradient
        return math.sqrt(full / self.p + sum(count * size**2 for size, count in rest))

    @cached_property
    def moment_bounds(self) -> tuple[Bound, ...]:
        """Upper bounds on the moments of one step, all of them true: at every order the smallest counts."""
        return (tuple((self.coordinate_law, size, count) for size, count in self.worst_gradient),)

    @property
    def equal_variance_multiplier(self) -> float:
        """z of plain DP-SGD that adds the same total variance to the same clipped gradients."""
        return self.total_std / self.l2_sensitivity

    def as_dict(self) -> dict[str, object]:
        """The fields as plain data, for a ledger."""
        if not isinstance(self.law, str):
            raise ModelMixError("a law of your own cannot be written to a ledger: only named laws can be re-checked.")
        return {name: getattr(self, name) for name in self._names()}

    @classmethod
    def _names(cls) -> tuple[str, ...]:
        """In a ledger's order; what a kind of mechanism adds comes last."""
        return (*_FIELDS, *(field.name for field in fields(cls) if field.name not in _FIELDS))

    @classmethod
    def from_dict(cls, data: Mapping[str, object]) -> Mechanism:
        """The inverse of ``as_dict``; refuses missing and unknown fields."""
        names = cls._names()
        if set(data) != set(names):
            odd = sorted(set(data) ^ set(names))
            raise ModelMixError(f"a ledger phase has the fields {', '.join(names)}; look at {', '.join(odd)}.")
        if not isinstance(data["law"], str):
            raise ModelMixError(f"law = {data['law']!r} is unknown: choose one of {', '.join(sorted(LAWS))}.")
        return cls(**data)  # type: ignore[arg-type]


def equal_variance_gaussian(mechanism: Mechanism) -> Mechanism:
    """Plain DP-SGD that adds the same total variance to every coordinate of the same clipped gradients.

    z_eq = (standard deviation of the mixed law) / (largest l2 norm of a clipped gradient). The honest yardstick of
    mixing: in the small-shift limit no law of this variance beats it (Cramer-Rao).
    """
    # The square of a tiny standard deviation is 0 in floating point; that deviation is not.
    multiplier = mechanism.equal_variance_multiplier or mechanism.noise_multiplier / mechanism.l2_sensitivity
    return Mechanism(multiplier, mechanism.sample_rate)


def mixing_width(clip: float, tau: float, eta: float, expected_batch: float) -> float:
    """omega from the paper's quantities: (tau/eta) * B / c, with B = q*n the *expected* batch."""
    positive("c", clip, "the clip")
    positive("eta", eta, "the learning rate")
    positive("B", expected_batch, "the expected batch q*n")
    return at_least_zero("tau", tau, "the mixing threshold") / eta * expected_batch / clip

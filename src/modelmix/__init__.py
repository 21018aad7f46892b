"""ModelMix: training with differential privacy whose epsilon you can check.

>>> import modelmix as mm
>>> mechanism = mm.Mechanism(noise_multiplier=0.335, sample_rate=0.03, mixing_width=11.25, p=100)
>>> round(mm.epsilon(mechanism, delta=1e-5, steps=3400), 3)
7.25
"""

from modelmix._version import __version__
from modelmix.errors import ModelMixError, UnprovedError
from modelmix.privacy import (
    Gaussian,
    Guarantee,
    Laplace,
    Law,
    Ledger,
    Mechanism,
    Mixed,
    calibrate,
    compare,
    delta,
    epsilon,
    epsilon_curve,
    equal_variance_gaussian,
    guarantee,
    max_steps,
    mixing_width,
    rdp,
)

__all__ = [
    "Gaussian",
    "Guarantee",
    "Laplace",
    "Law",
    "Ledger",
    "Mechanism",
    "Mixed",
    "ModelMixError",
    "UnprovedError",
    "__version__",
    "calibrate",
    "compare",
    "delta",
    "epsilon",
    "epsilon_curve",
    "equal_variance_gaussian",
    "guarantee",
    "max_steps",
    "mixing_width",
    "rdp",
]

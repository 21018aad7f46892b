"""ModelMix: training with differential privacy whose epsilon you can check.

>>> import modelmix as mm
>>> mechanism = mm.Mechanism(noise_multiplier=0.335, sample_rate=0.03, mixing_width=11.25, p=100)
>>> round(mm.epsilon(mechanism, delta=1e-5, steps=3400), 2)
6.86
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from modelmix._version import __version__
from modelmix.errors import BudgetExceeded, ModelMixError, UnprovedError

if TYPE_CHECKING:  # so that types are known where nothing is loaded before it is needed
    from modelmix.accounting.accountant import rdp
    from modelmix.accounting.calibration import calibrate, max_steps
    from modelmix.accounting.comparison import compare
    from modelmix.accounting.embedding import EmbeddingMechanism
    from modelmix.accounting.guarantee import Guarantee, delta, epsilon, epsilon_curve, guarantee
    from modelmix.accounting.laws import Gaussian, Laplace, Law, Mixed
    from modelmix.accounting.ledger import Ledger
    from modelmix.accounting.mechanism import Mechanism, equal_variance_gaussian, mixing_width
    from modelmix.accounting.plan import Plan, plan
    from modelmix.accounting.runs import load_claim
    from modelmix.training import (
        Augment,
        Callback,
        Clip,
        Embedding,
        LoopOptions,
        Performance,
        Rule,
        RunOptions,
        Schedule,
        Trainer,
        clipped_sum,
        make_private,
    )

# Loading numpy, scipy and torch takes longer than most programs that import this package need.
_HOMES = {
    "accounting.accountant": ("rdp",),
    "accounting.calibration": ("calibrate", "max_steps"),
    "accounting.comparison": ("compare",),
    "accounting.embedding": ("EmbeddingMechanism",),
    "accounting.guarantee": ("Guarantee", "delta", "epsilon", "epsilon_curve", "guarantee"),
    "accounting.laws": ("Gaussian", "Laplace", "Law", "Mixed"),
    "accounting.ledger": ("Ledger",),
    "accounting.mechanism": ("Mechanism", "equal_variance_gaussian", "mixing_width"),
    "accounting.plan": ("Plan", "plan"),
    "accounting.runs": ("load_claim",),
    "training": (
        "Augment",
        "Callback",
        "Clip",
        "Embedding",
        "LoopOptions",
        "Performance",
        "Rule",
        "RunOptions",
        "Schedule",
        "Trainer",
        "clipped_sum",
        "make_private",
    ),
}
_HOME = {name: f"modelmix.{home}" for home, names in _HOMES.items() for name in names}
_NAMESPACES = ("accounting", "auditing", "config", "data", "features", "gradients", "models", "runs", "training")

__all__ = [
    "Augment",
    "BudgetExceeded",
    "Callback",
    "Clip",
    "Embedding",
    "EmbeddingMechanism",
    "Gaussian",
    "Guarantee",
    "Laplace",
    "Law",
    "Ledger",
    "LoopOptions",
    "Mechanism",
    "Mixed",
    "ModelMixError",
    "Performance",
    "Plan",
    "Rule",
    "RunOptions",
    "Schedule",
    "Trainer",
    "UnprovedError",
    "__version__",
    "calibrate",
    "clipped_sum",
    "compare",
    "delta",
    "epsilon",
    "epsilon_curve",
    "equal_variance_gaussian",
    "guarantee",
    "load_claim",
    "make_private",
    "max_steps",
    "mixing_width",
    "plan",
    "rdp",
]


def __dir__() -> list[str]:
    return sorted(__all__)


def __getattr__(name: str) -> Any:
    if name not in _HOME and name not in _NAMESPACES:
        raise AttributeError(f"module 'modelmix' has no attribute {name!r}")
    try:
        if name in _NAMESPACES:
            return import_module(f"modelmix.{name}")
        found = getattr(import_module(_HOME[name]), name)
    except ModuleNotFoundError as error:
        raise ModelMixError(f"{name} needs {error.name}: install it with pip install 'modelmix[train]'.") from None
    globals()[name] = found
    return found

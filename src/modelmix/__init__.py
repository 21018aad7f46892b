"""ModelMix: training with differential privacy whose epsilon you can check.

>>> import modelmix as mm
>>> mechanism = mm.Mechanism(noise_multiplier=0.335, sample_rate=0.03, mixing_width=11.25, p=100)
>>> round(mm.epsilon(mechanism, delta=1e-5, steps=3400), 3)
7.25
"""

from typing import TYPE_CHECKING, Any

from modelmix._version import __version__
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
from modelmix.errors import BudgetExceeded, ModelMixError, UnprovedError

if TYPE_CHECKING:  # so that types are known where torch is not loaded before it is needed
    from modelmix.training import Clip, Embedding, Performance, Schedule, Trainer, clipped_sum, make_private

_TRAINING = ("Clip", "Embedding", "Performance", "Schedule", "Trainer", "clipped_sum", "make_private")

__all__ = [
    "BudgetExceeded",
    "Clip",
    "Embedding",
    "EmbeddingMechanism",
    "Gaussian",
    "Guarantee",
    "Laplace",
    "Law",
    "Ledger",
    "Mechanism",
    "Mixed",
    "ModelMixError",
    "Performance",
    "Plan",
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
    # Training needs torch; an epsilon must not.
    if name not in _TRAINING:
        raise AttributeError(f"module 'modelmix' has no attribute {name!r}")
    try:
        from modelmix import training
    except ModuleNotFoundError as error:
        raise ModelMixError(f"{name} needs {error.name}: install it with pip install 'modelmix[train]'.") from None
    return getattr(training, name)

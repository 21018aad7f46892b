"""Numbers only: noise laws, moments, Renyi curves, mechanisms, ledgers, calibration. Never imports torch."""

from modelmix.privacy.accountant import Guarantee, delta, epsilon, epsilon_curve, guarantee, rdp
from modelmix.privacy.calibration import calibrate, max_steps
from modelmix.privacy.comparison import compare
from modelmix.privacy.laws import Gaussian, Laplace, Law, Mixed
from modelmix.privacy.ledger import Ledger
from modelmix.privacy.mechanism import Mechanism, equal_variance_gaussian, mixing_width

__all__ = [
    "Gaussian",
    "Guarantee",
    "Laplace",
    "Law",
    "Ledger",
    "Mechanism",
    "Mixed",
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

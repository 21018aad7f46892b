"""Training with differential privacy: Algorithms 1 and 2 of the paper.

The way of the data: Poisson draw -> fixed-shape chunks -> clipped sum of per-sample gradients -> noise -> mixing of the
last two states -> new state; the ledger line comes before the state.
"""

from modelmix.gradients.clipping import Clip
from modelmix.gradients.engines import clipped_sum
from modelmix.training.advice import ClipAdvice, HistogramBudget, LossConstants, advise_clip
from modelmix.training.embedding import Embedding, random_labels
from modelmix.training.performance import Performance
from modelmix.training.private import PrivateLoader, PrivateOptimizer, make_private
from modelmix.training.randomness import Randomness
from modelmix.training.schedules import Schedule
from modelmix.training.trainer import Trainer

__all__ = [
    "Clip",
    "ClipAdvice",
    "Embedding",
    "HistogramBudget",
    "LossConstants",
    "Performance",
    "PrivateLoader",
    "PrivateOptimizer",
    "Randomness",
    "Schedule",
    "Trainer",
    "advise_clip",
    "clipped_sum",
    "make_private",
    "random_labels",
]

"""Training with differential privacy: Algorithms 1 and 2 of the paper.

The way of the data: Poisson draw -> fixed-shape chunks -> clipped sum of per-sample gradients -> noise -> mixing of the
last two states -> new state; the ledger line comes before the state.
"""

from modelmix.gradients import clipped_sum
from modelmix.gradients.clip import Clip
from modelmix.runs.callbacks import Callback, RunView
from modelmix.training.advice import ClipAdvice, HistogramBudget, LossConstants, advise_clip
from modelmix.training.augment import Augment
from modelmix.training.embedding import Embedding, random_labels
from modelmix.training.options import LoopOptions, RunOptions
from modelmix.training.performance import Performance
from modelmix.training.private import PrivateLoader, PrivateOptimizer, make_private
from modelmix.training.randomness import Randomness
from modelmix.training.rules import Rule, State
from modelmix.training.schedules import Schedule
from modelmix.training.step import PrivateStep
from modelmix.training.trainer import Trainer

__all__ = [
    "Augment",
    "Callback",
    "Clip",
    "ClipAdvice",
    "Embedding",
    "HistogramBudget",
    "LoopOptions",
    "LossConstants",
    "Performance",
    "PrivateLoader",
    "PrivateOptimizer",
    "PrivateStep",
    "Randomness",
    "Rule",
    "RunOptions",
    "RunView",
    "Schedule",
    "State",
    "Trainer",
    "advise_clip",
    "clipped_sum",
    "make_private",
    "random_labels",
]

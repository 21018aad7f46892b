"""How a run is made and kept, in one place."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from os import PathLike
from typing import Any, Literal

from modelmix._checks import whole
from modelmix.errors import ModelMixError
from modelmix.gradients import Engine
from modelmix.runs.callbacks import Callback, check_callbacks
from modelmix.training.performance import Performance


def require_type(name: str, value: object, kind: type, example: str) -> None:
    """Refuse a value of another type in one line."""
    if not isinstance(value, kind):
        raise ModelMixError(f"{name} = {value!r} is not of the right kind: give {example}.")


@dataclass(frozen=True)
class RunOptions:
    """How a run of a ``Trainer`` is made, watched and kept.

    Args:
        resume: go on with the run that is in the folder, if one is.
        seed: makes the run repeatable, for tests only: no certificate is made of it.
        nonfinite: what to do when a sample's gradient is not finite: "drop" (it counts as zero, which the proof
            covers), or "stop" before the step: that depends on the data outside the mechanism, so that the guarantee
            then does not cover whether and when the run stopped.
        test_public: whether the test set is public; only then may what is measured on it be published.
        callbacks: watch the run, see ``Callback``.
        performance: speed and memory.
        engine: made earlier for a model of the same builder and these samples, with what it has compiled; None makes
            one.
        name: of the run, for its page.
        about: what else its config.json says.

    Example:
        >>> RunOptions(seed=1).nonfinite
        'drop'
    """

    resume: bool = False
    seed: int | None = None
    nonfinite: Literal["drop", "stop"] = "drop"
    test_public: bool = False
    callbacks: Sequence[Callback] = ()
    performance: Performance = field(default_factory=Performance)
    engine: Engine | None = None
    name: str = "run"
    about: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name in ("resume", "test_public"):
            require_type(name, getattr(self, name), bool, "True or False")
        if self.engine is not None:
            require_type("engine", self.engine, Engine, "an Engine that was made for this model, or None")
        require_type("about", self.about, Mapping, "a dict of what config.json shall say as well")
        if isinstance(self.callbacks, Callback):
            raise ModelMixError("callbacks is a list: give callbacks=[...].")
        if self.nonfinite not in ("stop", "drop"):
            raise ModelMixError(f"nonfinite = {self.nonfinite!r} is unknown: choose stop or drop.")
        object.__setattr__(self, "callbacks", check_callbacks(self.callbacks))
        if not isinstance(self.performance, Performance):
            raise ModelMixError(f"performance = {self.performance!r} is not a Performance: give mm.Performance(...).")


@dataclass(frozen=True)
class LoopOptions:
    """How a private loop of one's own is made and kept.

    Args:
        chunk: give a draw in parts of at most this many samples; ``step`` acts on the last part. Saves memory.
        seed: makes the run repeatable, for tests only.
        ledger: a file that gets every ledger line before its step is taken, so that a loop that dies loses none; a
            file that exists is continued. Beside it lies FILE.plan, because a loop that is stopped counts as its plan.
            Without it, keep the optimizer's state with every saved model.
    """

    chunk: int | None = None
    seed: int | None = None
    ledger: str | PathLike[str] | None = None

    def __post_init__(self) -> None:
        if self.chunk is not None:
            object.__setattr__(self, "chunk", whole("chunk", self.chunk, "the samples given at once", least=1))

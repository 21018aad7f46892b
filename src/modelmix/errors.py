"""The ways in which ModelMix says no. Each carries one line written for a person."""

from __future__ import annotations


class ModelMixError(ValueError):
    """An input that cannot be right. The message says what is wrong, what is allowed and what to do."""


def for_holder(message: str) -> ModelMixError:
    """Return an error that tells something of private samples: for stderr, never for a file that leaves the house."""
    return ModelMixError(f"{message} (for the data holder's eyes)")


class UnprovedError(ModelMixError):
    """A request for an epsilon that no proof covers.

    Args:
        rule: the fact of the proof that is broken, in words.
        reason: what was found.
        fix: the nearest thing that is covered.
    """

    def __init__(self, rule: str, reason: str, fix: str) -> None:
        super().__init__(f"not proved: {reason} This breaks the rule that {rule}. {fix}")
        self.rule = rule
        self.reason = reason
        self.fix = fix


class BudgetExceeded(ModelMixError):  # noqa: N818, the field speaks of an exceeded budget
    """A step or a release that goes past what was planned. Nothing was spent; ``extend`` the trainer or optimizer."""

"""The two ways in which ModelMix says no. Both carry one line written for a person."""

from __future__ import annotations


class ModelMixError(ValueError):
    """An input that cannot be right. The message says what is wrong, what is allowed and what to do."""


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

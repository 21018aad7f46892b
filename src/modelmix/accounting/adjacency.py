"""Which two datasets an epsilon compares.

All three relations compare a dataset with one that differs in one unit (one sample, unless a run says otherwise):

- **zero-out**: the unit's contribution is removed and everything else, the number of samples included, stays. A run
  whose sampling rate, expected batch or noise was derived from ``len(data)`` can claim this: that number is public.
- **add-or-remove**: the unit is there or not, and the number of samples is private. A run can claim it only if q, B,
  tau and z come from a public constant, the population, which does not move with the data: with B = q * len(data) the
  scale of the noise alone tells n (mu = sqrt(2 d T)/n for d coordinates and T steps).
- **replace-one**: the unit is another one. Twice as far: by way of the dataset without it.

The first two have the same pair of distributions per step, N and (1-q) N + q N(v), hence the same epsilon.
"""

from __future__ import annotations

from typing import Literal, get_args

from modelmix.errors import ModelMixError

Adjacency = Literal["zero-out", "add-or-remove", "replace-one"]
ADJACENCIES: tuple[str, ...] = get_args(Adjacency)
ZERO_OUT: Adjacency = "zero-out"
ADD_OR_REMOVE: Adjacency = "add-or-remove"
REPLACE_ONE: Adjacency = "replace-one"


def check_adjacency(value: object) -> Adjacency:
    """Return a known relation or refuse.

    >>> check_adjacency("zero-out")
    'zero-out'
    """
    if value not in ADJACENCIES:
        raise ModelMixError(f"adjacency = {value!r} is unknown: choose one of {', '.join(ADJACENCIES)}.")
    return value  # type: ignore[return-value]


def relation(adjacency: Adjacency, unit: str, population: int | None) -> str:
    """Say in words which datasets are compared; the one place where a sentence about it is written.

    >>> relation("zero-out", "sample", 100)
    'the contribution of one sample is removed (zero-out; the number of samples, 100, is public)'
    """
    many = "" if population is None else f", {population:,},"
    if adjacency == ADD_OR_REMOVE:
        scale = "a public constant" if population is None else f"the public constant {population:,}"
        return f"one {unit} is added or removed (the number of samples is private; every scale comes from {scale})"
    if adjacency == REPLACE_ONE:
        return f"one {unit} is replaced by any other (replace-one; the number of samples{many} is public)"
    return f"the contribution of one {unit} is removed (zero-out; the number of samples{many} is public)"

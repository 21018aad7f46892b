"""Which datasets are compared, in one sentence each."""

from __future__ import annotations

from dataclasses import replace

import pytest

import modelmix as mm
from modelmix.accounting import guarantee as module
from modelmix.accounting.adjacency import check_adjacency

ZERO = "the contribution of one person is removed (zero-out; the number of samples{} is public)"
PRIVATE = "one person is added or removed (the number of samples is private; every scale comes from {})"
REPLACED = "one person is replaced by any other (replace-one; the number of samples{} is public)"


@pytest.mark.parametrize(
    ("adjacency", "population", "words"),
    [
        ("zero-out", None, ZERO.format("")),
        ("zero-out", 1234, ZERO.format(", 1,234,")),
        ("add-or-remove", None, PRIVATE.format("a public constant")),
        ("add-or-remove", 1234, PRIVATE.format("the public constant 1,234")),
        ("replace-one", None, REPLACED.format("")),
        ("replace-one", 1234, REPLACED.format(", 1,234,")),
    ],
)
def test_every_relation_is_one_sentence(adjacency, population, words):
    found = mm.Guarantee(1.0, 1e-5, "RDP", adjacency=adjacency, unit="person", population=population)
    assert found.relation == words
    observer = "an adversary who sees every released state and knows all other samples."
    scope = f"Holds when {words}, for Poisson sampling, against {observer}"
    assert found.scope == scope
    assert replace(found, seeded=True).scope == f"{scope} S{module.SEEDED[1:]}."
    assert module.SEEDED.startswith("seeded: for tests only")


def test_an_unknown_relation_is_refused():
    for odd in ("zero", None, 3):
        with pytest.raises(mm.ModelMixError, match="choose one of zero-out, add-or-remove, replace-one"):
            check_adjacency(odd)
    with pytest.raises(mm.ModelMixError, match="is unknown"):
        mm.guarantee(mm.Mechanism(1.0, 0.1), 1e-5, steps=1, adjacency="zero")
    for known in ("zero-out", "add-or-remove", "replace-one"):
        assert check_adjacency(known) == known

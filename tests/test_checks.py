"""Checks of single inputs: every edge, on both of its sides."""

from __future__ import annotations

import math

import numpy as np
import pytest

import modelmix as mm
from modelmix._checks import LARGEST, at_least_zero, positive, probability, rate, whole


@pytest.mark.parametrize(
    ("check", "good", "bad"),
    [
        (lambda v: positive("x", v, "x"), [5e-324, 1, 1e308], [0, -1, math.inf, math.nan, True, "1", None, 10**400]),
        (lambda v: positive("x", v, "x", 7.0), [7, 1e-9], [7.0000001, 0]),
        (lambda v: at_least_zero("x", v, "x"), [0, 0.0, 1e308], [-5e-324, math.inf, False]),
        (lambda v: at_least_zero("x", v, "x", 7.0), [0, 7], [7.0000001, -1]),
        (lambda v: rate("q", v, "q"), [1, 1e-300, np.float32(0.5)], [0, 1.0000001]),
        (lambda v: probability("d", v, "d"), [5e-324, 0.5, 1 - 1e-16], [0, 1, 1.5, -0.1]),
        (lambda v: whole("n", v, "n", 2), [2, 3.0, 10**18, np.int64(7)], [1, 2.5, 2.9999, 10**18 + 2**10, math.nan]),
    ],
)
def test_edges(check, good, bad):
    for value in good:
        assert check(value) == value
        assert type(check(value)) in (int, float)
    for value in bad:
        with pytest.raises(mm.ModelMixError) as refusal:
            check(value)
        assert "\n" not in str(refusal.value)
        assert len(str(refusal.value)) < 200


def test_what_is_allowed_is_said():
    for check, words in (
        (lambda: positive("x", 0, "x"), "must be greater than 0."),
        (lambda: positive("x", 0, "x", 7.0), "greater than 0 and at most 7."),
        (lambda: at_least_zero("x", -1, "x"), "must be 0 or more."),
        (lambda: at_least_zero("x", -1, "x", 7.0), "0 or more and at most 7."),
        (lambda: whole("n", 1, "n", 2), "a whole number, 2 or more."),
        (lambda: whole("n", 1e19, "n", 2), "at most 1e[+]18."),
        (lambda: positive("x", 10**400, "x"), "hundreds of digits"),
    ):
        with pytest.raises(mm.ModelMixError, match=words):
            check()
    assert LARGEST == 1e100


def test_large_whole_numbers_keep_their_last_digit():
    assert whole("n", 10**17 + 1, "n", 1) == 10**17 + 1
    assert type(whole("n", np.int64(5), "n", 1)) is int

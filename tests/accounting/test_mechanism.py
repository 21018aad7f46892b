"""The mechanism as a value."""

from __future__ import annotations

import math

import pytest

import modelmix as mm


def test_equal_mechanisms_are_equal_however_written():
    a, b = mm.Mechanism(1, 0.5, 2, 4), mm.Mechanism(1.0, 0.5, 2.0, 4.0)
    assert a == b
    assert hash(a) == hash(b)
    with pytest.raises(AttributeError):
        a.p = 5  # type: ignore[misc]


def test_worst_gradient():
    assert mm.Mechanism(1, 0.1).worst_gradient == ((1.0, 1),)
    assert mm.Mechanism(1, 0.1, 2, 100).worst_gradient == ((0.1, 100),)
    assert mm.Mechanism(1, 0.1, 2, 100, dimension=30).worst_gradient == ((0.1, 30),)
    assert mm.Mechanism(1, 0.1, 2, 100, dimension=300).worst_gradient == ((0.1, 100),)
    # l1: coordinates of c/sqrt(p) until the budget is used up, the rest on one more.
    assert mm.Mechanism(1, 0.1, 2, 100, law="laplace").worst_gradient == ((0.1, 10),)
    ((bound, full), (rest, one)) = mm.Mechanism(1, 0.1, 2, 10, law="laplace").worst_gradient
    assert (full, one) == (3, 1)
    assert full * bound + rest == pytest.approx(1)
    assert mm.Mechanism(1, 0.1, 2, 10, law="laplace", dimension=3).worst_gradient == ((bound, 3),)


def test_fewer_coordinates_than_p():
    """d < p: the exponent is d. One coordinate of c/sqrt(p) is a mechanism of its own."""
    few = mm.Mechanism(0.5, 0.1, 3.0, 100, dimension=1)
    scaled = mm.Mechanism(5.0, 0.1, 30.0)
    assert mm.epsilon(few, 1e-5, steps=100) == pytest.approx(mm.epsilon(scaled, 1e-5, steps=100), rel=1e-9)


def test_equal_variance_gaussian():
    twin = mm.equal_variance_gaussian(mm.Mechanism(0.335, 0.03, 11.25, 100))
    assert twin.noise_multiplier == pytest.approx(math.sqrt(0.335**2 + 11.25**2 / 12))
    assert (twin.mixing_width, twin.p, twin.sample_rate) == (0.0, 1, 0.03)
    few = mm.equal_variance_gaussian(mm.Mechanism(1.0, 0.03, 0.0, 100, dimension=25))
    assert few.noise_multiplier == pytest.approx(2.0), "25 coordinates of 0.1 have norm one half"
    laplace = mm.equal_variance_gaussian(mm.Mechanism(0.5, 0.03, law="laplace"))
    assert laplace.noise_multiplier == pytest.approx(math.sqrt(2) * 0.5)


def test_paper_units():
    assert mm.mixing_width(clip=20, tau=0.0225, eta=0.15, expected_batch=1500) == pytest.approx(11.25)
    assert mm.mixing_width(clip=1, tau=0.05, eta=1, expected_batch=8192) == pytest.approx(409.6)


@pytest.mark.parametrize("wrong", [{"clip": 0}, {"eta": 0}, {"expected_batch": -1}, {"tau": -1}, {"clip": math.nan}])
def test_paper_units_are_checked(wrong):
    with pytest.raises(mm.ModelMixError, match=r"= (0|-1|nan) is not"):
        mm.mixing_width(**{"clip": 1.0, "tau": 0.1, "eta": 1.0, "expected_batch": 10.0, **wrong})


@pytest.mark.parametrize(
    ("field", "bad"),
    [
        ("noise_multiplier", 0), ("noise_multiplier", -1), ("noise_multiplier", math.nan), ("noise_multiplier", "1"),
        ("sample_rate", 0), ("sample_rate", 1.01), ("sample_rate", math.nan),
        ("mixing_width", -1e-9), ("mixing_width", math.inf),
        ("p", 0), ("p", 2.5), ("p", -3), ("p", True), ("p", math.nan),
        ("dimension", 0), ("dimension", 1.5),
        ("law", "cauchy"), ("law", 3),
    ],
)  # fmt: skip
def test_nonsense_is_one_line(field, bad):
    with pytest.raises(mm.ModelMixError) as error:
        mm.Mechanism(**{"noise_multiplier": 1.0, "sample_rate": 0.1, field: bad})
    assert "\n" not in str(error.value)


def test_dictionary_round_trip():
    mechanism = mm.Mechanism(0.335, 0.03, 11.25, 100, dimension=7)
    assert mm.Mechanism.from_dict(mechanism.as_dict()) == mechanism
    with pytest.raises(mm.ModelMixError, match="colour"):
        mm.Mechanism.from_dict({**mechanism.as_dict(), "colour": 1})
    with pytest.raises(mm.ModelMixError, match="ledger"):
        mm.Mechanism(1.0, 0.1, law=mm.Gaussian).as_dict()

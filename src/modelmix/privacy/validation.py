"""Checks of single inputs. Each failure is one line: what is wrong, what is allowed."""

from __future__ import annotations

import math
from numbers import Integral, Real

from modelmix.errors import ModelMixError


def _number(name: str, value: object, meaning: str, allowed: str) -> float:
    if isinstance(value, bool) or not isinstance(value, Real) or not math.isfinite(value):
        raise ModelMixError(f"{name} = {value!r} is not a finite number: {meaning} must be {allowed}.")
    return float(value)


def positive(name: str, value: object, meaning: str) -> float:
    number = _number(name, value, meaning, "greater than 0")
    if number <= 0:
        raise ModelMixError(f"{name} = {number:g} is not allowed: {meaning} must be greater than 0.")
    return number


def at_least_zero(name: str, value: object, meaning: str) -> float:
    number = _number(name, value, meaning, "0 or more")
    if number < 0:
        raise ModelMixError(f"{name} = {number:g} is not allowed: {meaning} must be 0 or more.")
    return number


def rate(name: str, value: object, meaning: str) -> float:
    number = _number(name, value, meaning, "greater than 0 and at most 1")
    if not 0 < number <= 1:
        raise ModelMixError(f"{name} = {number:g} is not allowed: {meaning} must be greater than 0 and at most 1.")
    return number


def probability(name: str, value: object, meaning: str) -> float:
    number = _number(name, value, meaning, "strictly between 0 and 1")
    if not 0 < number < 1:
        raise ModelMixError(f"{name} = {number:g} is not allowed: {meaning} must be strictly between 0 and 1.")
    return number


def whole(name: str, value: object, meaning: str, least: int) -> int:
    """A whole number; 5.0 is taken as 5, 2.5 is refused."""
    number = _number(name, value, meaning, f"a whole number, {least} or more")
    if number != math.floor(number) or number < least:
        raise ModelMixError(f"{name} = {number:g} is not allowed: {meaning} must be a whole number, {least} or more.")
    return int(value) if isinstance(value, Integral) else int(number)

"""How numbers are printed."""

from __future__ import annotations

import math
from decimal import ROUND_CEILING, Decimal


def up(value: float, decimals: int = 4) -> str:
    """A privacy number, rounded up in its last digit."""
    if math.isnan(value):
        return "-"
    if math.isinf(value):
        return "inf"
    exact = Decimal(value)
    if value >= 1e6:
        return f"{float(exact.quantize(Decimal(1).scaleb(exact.adjusted() - 5), ROUND_CEILING)):.5e}"
    return f"{exact.quantize(Decimal(1).scaleb(-decimals), ROUND_CEILING):f}"


def up_digits(value: float, digits: int = 4) -> str:
    """A small privacy number such as delta, rounded up to some significant digits; ``1e-05`` stays as it is.

    >>> up_digits(1e-5), up_digits(1.00001e-5), up_digits(0.0123456)
    ('1e-05', '1.001e-05', '0.01235')
    """
    if not math.isfinite(value) or value == 0:
        return f"{value:g}"
    exact = Decimal(repr(float(value)))  # the number that was written, not the nearest float's digits
    unit = Decimal(1).scaleb(exact.adjusted() - digits + 1)
    return f"{float(exact.quantize(unit, ROUND_CEILING)):.{digits}g}"

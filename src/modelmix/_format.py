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

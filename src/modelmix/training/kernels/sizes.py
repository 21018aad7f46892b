"""Sizes that kernels like."""


def next_power_of_two(n: int) -> int:
    return 1 << max(0, n - 1).bit_length()

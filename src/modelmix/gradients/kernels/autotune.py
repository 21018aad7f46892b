"""Whether the gradients of a convolution are better written down or computed twice: measured, once for every shape."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from modelmix.gradients import kernels
from modelmix.gradients.kernels import Geometry

_MOST_POSITIONS = 512  # with more, twice the arithmetic costs more than the memory it saves
_MOST_BYTES = 2**27
_REPEATS = 3

_KNOWN: dict[object, bool] = {}


def recomputing_is_faster(x: Tensor, g: Tensor, geometry: Geometry) -> bool:
    """Whether ``conv_powers`` and ``conv_clipped_sum`` are faster than ``conv_weight`` and clipping what it wrote."""
    key = (x.device, x.dtype, x.shape[1:], g.shape[1:], geometry)
    if key not in _KNOWN:
        if isinstance(x, FakeTensor) or not x.is_cuda:  # nothing to measure on
            return False
        _KNOWN[key] = _measured(x, g, geometry)
    return _KNOWN[key]


def _measured(x: Tensor, g: Tensor, geometry: Geometry) -> bool:
    if geometry.copies * g.shape[2] * g.shape[3] > _MOST_POSITIONS:
        return False
    weights = g.shape[1] * x.shape[1] // geometry.groups * geometry.kernel[0] * geometry.kernel[1]
    m = max(1, min(256, _MOST_BYTES // (4 * weights)))
    own = torch.Generator(x.device).manual_seed(0)  # the step's random numbers are not for trying things out
    seen, back = (
        torch.randn(m * geometry.copies, *t.shape[1:], device=t.device, generator=own)
        .to(t.dtype)
        .contiguous(memory_format=torch.channels_last)
        for t in (x, g)
    )
    scale = torch.rand(m, dtype=torch.float64, device=x.device, generator=own)
    bound = torch.ones((), dtype=torch.float64, device=x.device)
    numbers = geometry.numbers()
    rounding = 1e-2 if kernels.kept_as(x) == torch.bfloat16 else 1e-4  # what is written down may be rounded

    def written() -> tuple[Tensor, Tensor, Tensor]:
        rows, squares = kernels.conv_weight(seen, back, numbers)
        total, cut = kernels.clipped_sum(rows.reshape(m, weights), scale, bound)
        return squares, total, cut

    def twice() -> tuple[Tensor, Tensor, Tensor]:
        first = kernels.conv_powers(seen, back, numbers, 2)
        total, cut, again = kernels.conv_clipped_sum(seen, back, numbers, scale, bound, 2)
        if not torch.equal(first, again):  # they must be the same numbers, or the clip holds for others than are summed
            raise ArithmeticError
        return first, total.flatten(), cut

    try:
        for mine, right in zip(twice(), written(), strict=True):
            if not bool((mine.double() - right.double()).norm() <= rounding * right.double().norm() + 1e-6):
                return False
        return _milliseconds(twice) < _milliseconds(written)
    except Exception:  # whatever a compiler may not like: the other way has been seen to work
        return False


def _milliseconds(run: Callable[[], object]) -> float:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    run()
    start.record()
    for _ in range(_REPEATS):
        run()
    end.record()
    torch.cuda.synchronize()
    return float(start.elapsed_time(end)) / _REPEATS

"""What torch keeps apart from tensors: random numbers, the precision of products, copies to a device."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager

import torch
from torch import Tensor, nn

from modelmix.errors import ModelMixError


def preserve_torch_rng(device: torch.device) -> AbstractContextManager[None]:
    """Restore torch's global RNG state on exit.

    Args:
        device: whose generator is restored along with the CPU's.
    """
    return torch.random.fork_rng(devices=[device] if device.type == "cuda" else [])


def to_device_async(t: Tensor, device: torch.device) -> Tensor:
    """Copy to ``device`` without blocking.

    Host memory is pinned first: an async copy from pageable memory may read it after the caller has overwritten it,
    with another key, or with other samples and weights.
    """
    if device.type == "cuda" and t.device.type == "cpu":
        return t.pin_memory().to(device, non_blocking=True)
    return t.to(device)


def copy_in_precision(model: nn.Module, dtype: torch.dtype) -> nn.Module:
    """Copy a model in another precision, with what is not trained.

    Raises:
        ModelMixError: if it cannot be copied.
    """
    try:
        return copy.deepcopy(model).to(dtype)
    except Exception as error:
        raise ModelMixError("another precision needs a model that can be copied: leave precision out.") from error


@contextmanager
def full_precision() -> Iterator[None]:
    """Multiply floats without rounding their factors to 11 bits (TF32), as GPUs do by default."""
    with _products(False, "highest"):
        yield


@contextmanager
def allow_tf32(device: torch.device) -> Iterator[None]:
    """Multiply floats with factors rounded to 11 bits (TF32) where ``device`` is many times faster so."""
    if device.type == "cpu":
        yield
        return
    with _products(True, "high"):
        yield


@contextmanager
def _products(cudnn: bool, matrices: str) -> Iterator[None]:
    try:
        before = torch.backends.cudnn.allow_tf32, torch.get_float32_matmul_precision()
    except RuntimeError:  # set in torch's newer way, which the older one cannot read: left as it is
        yield
        return
    torch.backends.cudnn.allow_tf32 = cudnn
    torch.set_float32_matmul_precision(matrices)
    try:
        yield
    finally:
        torch.backends.cudnn.allow_tf32 = before[0]
        torch.set_float32_matmul_precision(before[1])

"""Tensors on their way to an accelerator."""

from __future__ import annotations

import torch
from torch import Tensor


def sent(t: Tensor, device: torch.device) -> Tensor:
    """A tensor on a device. A GPU need not have finished what it was given before.

    Such a copy may be read after the call has returned. From pinned memory that is safe: torch keeps it until then,
    whoever lets go of it. Of other memory CUDA promises nothing, and what is read may by then be another key, or other
    samples and weights.
    """
    if t.device.type != "cpu" or device.type != "cuda":
        return t.to(device)
    return t.pin_memory().to(device, non_blocking=True)

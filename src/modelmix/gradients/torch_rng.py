"""Torch's own generators: what a pass over a network draws from them must not be missing afterwards."""

from __future__ import annotations

from contextlib import AbstractContextManager

import torch


def draws_apart(device: torch.device) -> AbstractContextManager[None]:
    """What is drawn from torch's own generators within, for dropout and the like, is not missing from them outside."""
    return torch.random.fork_rng(devices=[device] if device.type == "cuda" else [])

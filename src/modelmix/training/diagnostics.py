"""What clipping met during a run. Computed from private data without noise: for the data holder, never to publish."""

from __future__ import annotations

import math
from typing import Any

import torch

from modelmix.gradients.clip import Clip, ClippedSum

_BINS = 80
_DECADES = 4.0  # on either side of the clip


class Diagnostics:
    """Counts over all the samples of a run."""

    def __init__(self, clip: Clip, coordinates: int) -> None:
        self._clip, self._coordinates = clip, coordinates
        self.histogram = torch.zeros(_BINS, dtype=torch.int64, device="cpu")
        self.samples = self.clipped = self.truncated = self.truncated_coordinates = 0
        self.steps = self.empty_draws = self.nonfinite = 0
        self.smallest, self.largest = 0, 0

    def add(self, part: ClippedSum) -> None:
        norms = part.norms.cpu()
        finite = norms[torch.isfinite(norms)]
        place = (finite.clamp_min(1e-300).log10() - math.log10(self._clip.c) + _DECADES) * (_BINS / (2 * _DECADES))
        self.histogram += torch.bincount(place.clamp(0, _BINS - 1).long(), minlength=_BINS)
        self.samples += norms.numel()
        self.clipped += int((finite > self._clip.c).sum())
        self.nonfinite += norms.numel() - finite.numel()
        self.truncated += int((part.truncated > 0).sum())
        self.truncated_coordinates += int(part.truncated.sum())

    def add_draw(self, size: int) -> None:
        self.smallest = size if self.steps == 0 else min(self.smallest, size)
        self.largest = max(self.largest, size)
        self.steps += 1
        self.empty_draws += size == 0

    def as_dict(self) -> dict[str, Any]:
        edges = [self._clip.c * 10 ** (_DECADES * (2 * i / _BINS - 1)) for i in range(_BINS + 1)]
        return {
            "norm_histogram": {"edges": edges, "counts": self.histogram.tolist()},
            "norm": self._clip.norm,
            "samples": self.samples,
            "clipped": self.clipped,
            "truncated": self.truncated,
            "truncated_coordinates": self.truncated_coordinates,
            "coordinates": self.samples * self._coordinates,
            "empty_draws": self.empty_draws,
            "drawn": [self.samples / max(1, self.steps), self.smallest, self.largest],
            "nonfinite": self.nonfinite,
        }

    def state(self) -> dict[str, Any]:
        names = ("samples", "clipped", "truncated", "truncated_coordinates", "steps", "empty_draws", "nonfinite")
        return {
            "histogram": self.histogram.tolist(),
            **{name: getattr(self, name) for name in (*names, "smallest", "largest")},
        }

    def restore(self, state: dict[str, Any]) -> None:
        self.histogram = torch.tensor(state["histogram"], dtype=torch.int64, device="cpu")
        for name, value in state.items():
            if name != "histogram":
                setattr(self, name, int(value))

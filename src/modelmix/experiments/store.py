"""Data and features for many runs in one process: loaded once, prepared once, copied to the device once."""

from __future__ import annotations

from pathlib import Path

import torch

from modelmix.data import DataSet, load
from modelmix.experiments.preparation import Prepared, prepare
from modelmix.experiments.recipe import Recipe


class Store:
    """What recipes train on. It keeps one data set at a time, with everything that was prepared from it.

    Args:
        data_dir: where public sets are looked for.
        device: of the runs.
    """

    def __init__(self, data_dir: Path | None, device: torch.device) -> None:
        self._data_dir, self._device = data_dir, device
        self._source = ""
        self._data: DataSet | None = None
        self._prepared: dict[tuple[str | None, str | None], Prepared] = {}

    def prepared(self, recipe: Recipe, run: Path) -> Prepared:
        """What this recipe trains on; ``run`` is the folder of its run, which may have released moments already."""
        if self._data is None or self._source != recipe.data:
            self._data, self._prepared = None, {}  # room before the next one comes
            self._data, self._source = load(recipe.data, self._data_dir), recipe.data
        if recipe.normalise == "private":
            recipe.plan(len(self._data.train))  # refuses a run that cannot pay, before its moments are released
            return prepare(recipe, self._data, self._device, run)
        key = recipe.features, recipe.normalise
        if key not in self._prepared:
            self._prepared[key] = prepare(recipe, self._data, self._device)
        return self._prepared[key]

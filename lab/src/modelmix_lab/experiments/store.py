"""What many runs in one process share: samples and features, copied to the device once, and compiled engines."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch import nn

from modelmix.config.preparation import Prepared, prepare
from modelmix.config.recipe import Recipe
from modelmix.data import DataSet
from modelmix.gradients import Engine
from modelmix.models import Pixels, build
from modelmix.training import Performance


class Store:
    """What runs train on and with. It keeps one data set at a time, with everything that was prepared from it.

    Args:
        data_dir: where public sets are looked for.
        performance: of all the runs.
    """

    def __init__(self, data_dir: Path | None, performance: Performance) -> None:
        self._data_dir, self._performance = data_dir, performance
        self.device = performance.find_device()
        self._source: tuple[Any, ...] = ()
        self._data: DataSet | None = None
        self._prepared: dict[tuple[Any, ...], Prepared] = {}
        self._engines: dict[Any, Engine] = {}

    def data(self, recipe: Recipe) -> DataSet:
        """The images of this recipe, as they are."""
        wanted = recipe.data
        source = wanted.source, wanted.image_size, wanted.classes, wanted.test_public
        if self._data is None or self._source != source:
            self._data, self._prepared = None, {}  # room before the next one comes
            self._data, self._source = recipe.load_data(self._data_dir), source
        return self._data

    def prepared(self, recipe: Recipe, run: Path) -> Prepared:
        """What this recipe trains on; ``run`` is the folder of its run, which may have released moments already."""
        data = self.data(recipe)
        if recipe.features is not None and recipe.features.normalise == "private":
            recipe.plan(len(data.train))  # refuses a run that cannot pay, before its moments are released
            return prepare(recipe, data, self.device, run)
        key = recipe.features, recipe.data.public, recipe.privacy.basis, recipe.privacy.groups
        if key not in self._prepared:
            self._prepared[key] = prepare(recipe, data, self.device, data_dir=self._data_dir)
        return self._prepared[key]

    def engine(self, recipe: Recipe, prepared: Prepared) -> Engine:
        """An engine for the network of this recipe: compiling one can take longer than a short run."""
        shape, classes = prepared.data.shape, len(prepared.data.classes)
        key = recipe.model.kind, shape, classes
        if key not in self._engines:
            knobs = self._performance
            self._engines[key] = Engine(
                Pixels(build(recipe.model.kind, shape, classes)).to(self.device),
                nn.CrossEntropyLoss(),
                prepared.train.head(3),
                name=knobs.engine,
                precision=knobs.precision,
                compiled=knobs.compiled,
            )
        return self._engines[key]

    def forget_engines(self) -> None:
        """The next run makes its own."""
        self._engines = {}

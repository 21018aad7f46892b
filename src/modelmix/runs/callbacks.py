"""What may watch a run: five moments, and public values only. The files that people read are written by such watchers.

class ToTracker(mm.Callback):
    def on_evaluate(self, run):
        mlflow.log_metrics(run.metrics[-1], step=run.step)

mm.Trainer(..., options=mm.RunOptions(callbacks=[ToTracker()])).run()
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor

from modelmix.accounting.guarantee import Guarantee
from modelmix.errors import ModelMixError
from modelmix.runs.events import EventFile
from modelmix.runs.record import Record

if TYPE_CHECKING:
    from modelmix.training.rules import State
    from modelmix.training.trainer import Trainer

EPSILON_SO_FAR = "epsilon_if_stopping_was_fixed_beforehand"
"""What the epsilon of the steps so far is called in files; the guarantee is the plan's."""

_log = logging.getLogger(__name__)


class RunView:
    """What a callback sees of a run.

    Guarantee: everything here is released by the run or public beforehand, but for metrics of a test set that is not
    public, which are for the data holder. With a folder, states and metrics are seen once they are kept: what is not
    kept is taken again with other noise if the process dies, so nobody may have seen it.

    Args:
        run: the trainer.
        until: the step at which this call of ``Trainer.run`` ends.
    """

    def __init__(self, run: Trainer, until: int) -> None:
        self._run, self.until = run, until
        self.interrupted = False
        """Whether an exception ended the run, in ``on_finish``."""

    @property
    def step(self) -> int:
        """Steps taken so far."""
        return self._run.step

    @property
    def steps(self) -> int:
        """Steps of the plan."""
        return self._run.plan.steps

    @property
    def state(self) -> State:
        """The released state."""
        return self._run.state

    @property
    def metrics(self) -> list[dict[str, Any]]:
        """A row for every evaluation so far; its "epsilon" holds if stopping there was fixed beforehand."""
        return self._run.metrics

    @property
    def test_public(self) -> bool:
        """Whether metrics of the test set may be published."""
        return self._run.test_public

    @property
    def guarantee(self) -> Guarantee:
        """What holds for everything the run releases: the epsilon of the whole plan."""
        return self._run.guarantee

    @property
    def folder(self) -> Path | None:
        """The run's folder, if it has one."""
        return self._run.folder

    def state_dict(self) -> dict[str, Tensor]:
        """Return the state dict of the model at the released state."""
        return self._run.state_dict()

    def __str__(self) -> str:
        return self._run.summary


class Callback:
    """Something that watches a run; override the moments that matter.

    An exception that a callback raises ends the run as Ctrl-C does: nothing kept is lost. Stopping early is covered,
    because the guarantee is that of the whole plan.

    Example:
        >>> class Print(Callback):
        ...     def on_evaluate(self, run: RunView) -> None:
        ...         print(run.step, run.metrics[-1])
    """

    def on_start(self, run: RunView) -> None:
        """Act before the first step of a call of ``run``."""

    def on_step(self, run: RunView) -> None:
        """Act after every step."""

    def on_checkpoint(self, run: RunView) -> None:
        """Act after the state and its ledger were kept in the run's folder."""

    def on_evaluate(self, run: RunView) -> None:
        """Act after an evaluation; its row is the last of ``run.metrics``."""

    def on_finish(self, run: RunView) -> None:
        """Act when the call of ``run`` ends, also when it was interrupted."""


def notify(callbacks: Sequence[Callback], moment: str, run: RunView) -> None:
    """Call one moment of every callback, in their order."""
    for each in callbacks:
        getattr(each, moment)(run)


def notify_finish(callbacks: Sequence[Callback], run: RunView) -> None:
    """Tell every callback of the end, whatever the others do; the first exception is raised when all know."""
    problem: BaseException | None = None
    for each in callbacks:
        try:
            each.on_finish(run)
        except BaseException as error:
            problem = problem or error
    if problem is not None:
        raise problem


def check_callbacks(callbacks: Sequence[Callback]) -> tuple[Callback, ...]:
    """Refuse what is not a callback."""
    for each in callbacks:
        if not isinstance(each, Callback):
            raise ModelMixError(f"{each!r} is not a Callback: derive its class from mm.Callback.")
    return tuple(callbacks)


class MetricsFile(Callback):
    """Write metrics of states that are kept to metrics.json and TensorBoard's events.

    What was measured on a test set that is not public is readable by its owner only. The epsilon of a step has its
    condition in its name, because files are read without what was said beside them.
    """

    def __init__(self, record: Record) -> None:
        self._folder = record.folder
        self._published: list[dict[str, Any]] = []
        self._events: EventFile | None = None

    def on_checkpoint(self, run: RunView) -> None:
        """Write what is new."""
        rows, secret = run.metrics, not run.test_public
        if rows == self._published:
            return
        named = [{EPSILON_SO_FAR if name == "epsilon" else name: v for name, v in row.items()} for row in rows]
        self._folder.write_json("metrics.json", {"rows": [_finite(row) for row in named]}, secret=secret)
        if self._events is None:
            self._events = EventFile(self._folder.file("events"), named, secret=secret)
        else:
            self._events.add(named[-1])
        self._published = rows


class ReportPage(Callback):
    """Draw the page of a run from the files of its folder, when it ends."""

    def __init__(self, record: Record) -> None:
        self._path = record.folder.path

    def on_finish(self, run: RunView) -> None:
        """Write report.html, where matplotlib is installed and nothing interrupted the run."""
        from modelmix.report import style
        from modelmix.runs.page import write_report

        if run.interrupted:
            return
        if style.available():
            write_report(self._path)
        else:
            _log.info("no page: it needs matplotlib. pip install 'modelmix[report]', then modelmix report RUN")


def writers(record: Record) -> tuple[Callback, ...]:
    """Return what writes the files of a run that people read."""
    return MetricsFile(record), ReportPage(record)


def _finite(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return a row for JSON, which has no infinities."""
    return {k: v if not isinstance(v, float) or math.isfinite(v) else None for k, v in row.items()}

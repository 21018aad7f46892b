"""A progress bar with the speed of a run and its planned epsilon; silent when nobody is watching."""

from __future__ import annotations

import sys
import time
from typing import Any

from modelmix.runs.callbacks import Callback, RunView

_REFRESH = 0.5


class Progress(Callback):
    """Show a progress bar on stderr.

    Args:
        show: None shows it if stderr is a terminal.
    """

    def __init__(self, show: bool | None = None) -> None:
        self._wanted = show
        self._bar: Any = None

    def on_start(self, run: RunView) -> None:
        """Open the bar."""
        self._from, self._began, self._last = run.step, time.monotonic(), 0.0
        if run.until == run.step or not (sys.stderr.isatty() if self._wanted is None else self._wanted):
            return
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
        from rich.progress import Progress as Bar
        from rich.table import Column

        self._bar = Bar(
            TextColumn("training"),
            BarColumn(),  # the only one that gives way where there is little room
            MofNCompleteColumn(table_column=Column(no_wrap=True)),
            TextColumn("{task.fields[rate]}"),
            TimeRemainingColumn(table_column=Column(no_wrap=True)),
            TextColumn("{task.fields[privacy]}"),
            console=Console(stderr=True),
        )
        self._bar.start()
        self._task = self._bar.add_task("", total=run.until - run.step, rate="", privacy="")

    def on_step(self, run: RunView) -> None:
        """Move the bar, a few times a second at most."""
        now = time.monotonic()
        if self._bar is None or (now - self._last < _REFRESH and run.step != run.until):
            return
        self._last = now
        done = run.step - self._from
        rate = done / max(now - self._began, 1e-9)
        self._bar.update(self._task, completed=done, rate=f"{rate:.1f} steps/s", privacy=str(run))

    def on_finish(self, run: RunView) -> None:
        """Close the bar."""
        if self._bar is not None:
            self._bar.stop()
            self._bar = None

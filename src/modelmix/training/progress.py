"""A line that says how far a run is, how fast, and at what epsilon; silent when nobody is watching."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from types import TracebackType
from typing import Any

_REFRESH = 0.5


class Progress:
    """A progress bar on stderr if that is a terminal, and nothing at all otherwise.

    Args:
        total: steps of this call.
        describe: what to say about privacy so far; called a few times a second at most.
        show: None decides by whether stderr is a terminal.
    """

    def __init__(self, total: int, describe: Callable[[], str], show: bool | None = None) -> None:
        self._describe = describe
        self._total = total
        self._bar: Any = None
        self._task: Any = None
        self._last = 0.0
        self._done = 0
        self._show = total > 0 and (sys.stderr.isatty() if show is None else show)

    def __enter__(self) -> Progress:
        if self._show:
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
            self._task = self._bar.add_task("", total=self._total, rate="", privacy="")
            self._began = time.monotonic()
        return self

    def advance(self) -> None:
        self._done += 1
        if self._bar is None:
            return
        now = time.monotonic()
        if now - self._last >= _REFRESH or self._done == self._total:
            self._last = now
            rate = self._done / max(now - self._began, 1e-9)
            self._bar.update(self._task, completed=self._done, rate=f"{rate:.1f} steps/s", privacy=self._describe())

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.stop()

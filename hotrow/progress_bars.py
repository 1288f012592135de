"""Progress bars for long work. progress.py loads this module, and with it rich, only on a terminal."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    ProgressColumn,
    SpinnerColumn,
    Task,
    TextColumn,
    TimeElapsedColumn,
    TransferSpeedColumn,
)
from rich.text import Text


@contextmanager
def bytes_bar(title: str, total_bytes: int | None) -> Iterator[Callable[[int], None]]:
    """A bar of bytes."""
    with _bar(title, total_bytes, DownloadColumn(), TransferSpeedColumn()) as advance:
        yield advance


@contextmanager
def rows_bar(title: str, total_rows: int) -> Iterator[Callable[[int], None]]:
    """A bar of rows."""
    rows = TextColumn("{task.completed:,.0f}/{task.total:,.0f} rows")
    with _bar(title, total_rows, rows, _RowsPerSecond()) as advance:
        yield advance


@contextmanager
def activity(title: str) -> Iterator[None]:
    """An activity indicator, with the elapsed time."""
    console = Console(stderr=True)
    columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        progress.add_task(title, total=None)
        yield


@contextmanager
def keys_bar(title: str, total_keys: int | None) -> Iterator[Callable[[int], None]]:
    """A bar of keys."""
    with _bar(title, total_keys, TextColumn("{task.completed:,.0f} keys")) as advance:
        yield advance


@contextmanager
def _bar(title: str, total: int | None, *columns: ProgressColumn) -> Iterator[Callable[[int], None]]:
    console = Console(stderr=True)
    all_columns = (TextColumn("{task.description}"), BarColumn(), *columns, TimeElapsedColumn())
    with Progress(*all_columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task(title, total=total)
        yield lambda amount: progress.advance(task, amount)


class _RowsPerSecond(ProgressColumn):
    def render(self, task: Task) -> Text:
        return Text(f"{task.speed or 0:,.0f} rows/s")

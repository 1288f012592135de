"""Progress bars for long work, drawn only where a person looks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeElapsedColumn, TransferSpeedColumn


@contextmanager
def byte_progress(title: str, total_bytes: int | None = None) -> Iterator[Callable[[int], None]]:
    """A bar on stderr; yields the function that is told the bytes done since the last call."""
    console = Console(stderr=True)
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task(title, total=total_bytes)
        yield lambda num_bytes: progress.advance(task, num_bytes)

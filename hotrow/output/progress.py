"""Progress of long work on a terminal. Where stderr is none, nothing is shown, and rich is not loaded."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Literal, TypeAlias

from inference_session.platform.progress import Progress
from inference_session.version_directory import manifest

_Unit: TypeAlias = Literal["bytes", "rows", "keys"]


def byte_progress(title: str, total_bytes: int | None = None) -> AbstractContextManager[Progress]:
    """A bar; yields the function to call with the bytes done since the last call."""
    return _shown(title, "bytes", total_bytes)


def row_progress(title: str, total_rows: int) -> AbstractContextManager[Progress]:
    """A bar; yields the function to call with the rows done since the last call."""
    return _shown(title, "rows", total_rows)


def key_progress(title: str, total_keys: int | None = None) -> AbstractContextManager[Progress]:
    """A bar; yields the function to call with the keys done since the last call."""
    return _shown(title, "keys", total_keys)


def verify_checksums(version_dir: Path) -> None:
    """Read every file of a version, with a bar, and compare it with its manifest; see `manifest.verify`."""
    total_bytes = sum(entry.num_bytes for entry in manifest.read_manifest(version_dir))
    with byte_progress(f"Verifying {version_dir}", total_bytes) as progress:
        manifest.verify(version_dir, checksums=True, progress=progress)


@contextmanager
def waiting(title: str, hint: str = "", *, hint_after_s: float = 30.0) -> Iterator[Progress]:
    """An activity indicator, with the elapsed time. `hint`: a line on stderr, also where that is no terminal, once the
    work has taken longer than most.
    """
    late = threading.Timer(hint_after_s, lambda: print(f"hotrow: {title}: {hint}", file=sys.stderr, flush=True))
    late.daemon = True
    with _shown(title, None, None) as advance:
        if hint:
            late.start()
        try:
            yield advance
        finally:
            late.cancel()


def _shown(title: str, unit: _Unit | None, total: int | None) -> AbstractContextManager[Progress]:
    return _drawn(title, unit, total) if sys.stderr.isatty() else nullcontext(lambda _: None)


@contextmanager
def _drawn(title: str, unit: _Unit | None, total: int | None) -> Iterator[Progress]:
    from rich import progress as bars
    from rich.console import Console
    from rich.text import Text

    class RowsPerSecond(bars.ProgressColumn):
        def render(self, task: bars.Task) -> Text:
            return Text(f"{task.speed or 0:,.0f} rows/s")

    columns: dict[_Unit, tuple[bars.ProgressColumn, ...]] = {
        "bytes": (bars.DownloadColumn(), bars.TransferSpeedColumn()),
        "rows": (bars.TextColumn("{task.completed:,.0f}/{task.total:,.0f} rows"), RowsPerSecond()),
        "keys": (bars.TextColumn("{task.completed:,.0f} keys"),),
    }
    text, elapsed, console = bars.TextColumn("{task.description}"), bars.TimeElapsedColumn(), Console(stderr=True)
    shown = (bars.SpinnerColumn(), text) if unit is None else (text, bars.BarColumn(), *columns[unit])
    with bars.Progress(*shown, elapsed, console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task(title, total=total)
        yield lambda amount: progress.advance(task, amount)

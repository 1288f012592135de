"""A process that shares rows as one with a GPU does, on a machine without one: memory is the host's.

It is sent commands, and answers each: what there is, or the error.
"""

from __future__ import annotations

import gc
import os
import tempfile
from contextlib import nullcontext
from multiprocessing.connection import Connection
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from inference_session.errors import ConfigurationError
from inference_session.tables.table_file import TableFile
from tests.testing.fake_cuda import FakeGpu, install
from tests.testing.fake_driver import FakeDriver
from tests.testing.forked import FORKED
from tests.testing.tables_of_all_kinds import specs

NUM_GPUS = 3
FREE_BYTES = 64 << 20
"""Of each GPU, if nothing else is said."""


class SharingProcess:
    """The process with one of NUM_GPUS GPUs."""

    def __init__(self, own: int, free_bytes: int = FREE_BYTES, *, peers: bool = True) -> None:
        self._connection, others = FORKED.Pipe()
        arguments = (others, tempfile.gettempdir(), own, free_bytes, peers)
        self._process = FORKED.Process(target=_answer, args=arguments, daemon=True)
        self._process.start()
        others.close()

    def call(self, command: str, **arguments: object) -> dict[str, Any]:
        """The answer to a command."""
        self.send(command, **arguments)
        return self.answer()

    def send(self, command: str, **arguments: object) -> None:
        """A command, without waiting for the answer."""
        self._connection.send((command, arguments))

    def answer(self) -> Any:
        """Of the command before."""
        return self._connection.recv()

    def kill(self) -> None:
        self._process.kill()
        self._process.join()
        self._connection.close()


class _Tables:
    """In place of CudaTables, whose `keep` it has: it keeps what that would look up."""

    is_paused = False
    connection: Connection
    keep: Any
    _close_shared: Any

    def __init__(self, files: Any, _device: Any, vectors: Any, placement: Any, **settings: Any) -> None:
        if self.is_paused:
            self.connection.send("paused")
            self.connection.recv()
        self.files, self.vectors, self.placement, self.settings = files, vectors, placement, settings

    def close(self) -> None:
        self._close_shared()

    def are_right(self) -> bool:
        """Whether the shards hold the rows of the files, each where look-ups read it."""
        for file, vectors in zip(self.files, self.vectors, strict=True):
            if hasattr(vectors, "arrays"):
                rows, count = file.vectors, len(vectors.arrays)
                if not all(np.array_equal(array, rows[n::count]) for n, array in enumerate(vectors.arrays)):
                    return False
        return True


class _Process:
    """The commands."""

    def __init__(self, own: int, free_bytes: int, peers: bool) -> None:
        install([FakeGpu("H200", 2 * FREE_BYTES, free_bytes)] * NUM_GPUS, peers=peers)
        from inference_session.device import shared_memory
        from inference_session.tables.cuda import placed_tables

        self._own, self._driver, self._tables = own, FakeDriver(), None
        shared_memory._driver = lambda: self._driver  # type: ignore[assignment]
        _Tables.keep = placed_tables.CudaTables.keep  # type: ignore[attr-defined]
        self._log: list[str] = []
        placed_tables._log.warning = lambda text, *values: self._log.append(text % values)  # type: ignore[method-assign]
        placed_tables.CudaTables = _Tables  # type: ignore[assignment,attr-defined]

    def open(self, folder: str, failing: int | None = None, **settings: Any) -> dict[str, object]:
        """Open the tables of a folder; with `failing`, all calls fail after that many."""
        from inference_session.tables.cuda.placed_tables import open_cuda_tables

        files = [TableFile.open(Path(folder) / spec.folder, spec) for spec in specs()]
        stream: Any = nullcontext()
        stream.synchronize = lambda: None
        device: Any = SimpleNamespace(device_id=self._own, name=f"cuda:{self._own}", stream=stream)
        self._driver.failing, self._driver.num_created = failing, 0
        (self._tables,) = open_cuda_tables(  # type: ignore[assignment]
            files, [device], shard_devices=range(NUM_GPUS), **{"shard": "rows", **settings}
        )
        return self.check()

    def pause(self) -> dict[str, object]:
        """From the next tables on, answer `paused` before they are indexed and copied, and wait for any command."""
        _Tables.is_paused = True
        return {}

    def check(self) -> dict[str, object]:
        """Read all shards."""
        tables: Any = self._tables
        return {
            "right": tables.are_right(),
            "sharded": tables.placement.sharded,
            "on_host": tables.placement.on_host,
            "parts": [vectors.this for vectors in tables.vectors if hasattr(vectors, "arrays")],
            "copied": sorted(tables.settings["copy_bytes"]),
            "created": self._driver.num_created,
            "log": self._log,
        }

    def close(self) -> dict[str, object]:
        self._tables.close()  # type: ignore[attr-defined]
        return self.forget()

    def forget(self) -> dict[str, object]:
        """Let the tables be collected, open or not."""
        self._tables = None
        return self.held()

    def held(self) -> dict[str, object]:
        """What has not been given back, and the number of files that are open."""
        gc.collect()  # mapped files
        driver = self._driver
        held = len(driver.handles) + len(driver.reserved) + len(driver.mapped)
        return {"held": held, "files": len([*Path("/proc/self/fd").iterdir()])}

    def replace(self, folder: str, by: str) -> dict[str, object]:
        """Replace the files of a version by another's, once these have been opened the next time."""
        opened = TableFile.open

        def open_then_replace(path: Path, spec: Any) -> TableFile:
            found = opened(path, spec)
            (Path(by) / spec.folder / "emb_vector").replace(Path(folder) / spec.folder / "emb_vector")
            return found

        TableFile.open = open_then_replace  # type: ignore[method-assign,assignment]
        return {}


def _answer(connection: Connection, temporary: str, own: int, free_bytes: int, peers: bool) -> None:
    """The process: it answers until it is killed, or nobody asks any more."""
    os.environ["TMPDIR"] = tempfile.tempdir = temporary
    process, _Tables.connection = _Process(own, free_bytes, peers), connection
    while True:
        try:
            command, arguments = connection.recv()
        except EOFError:
            return
        try:
            answer = getattr(process, command)(**arguments)
        except ConfigurationError as error:
            answer = {"error": str(error)}
        connection.send(answer)

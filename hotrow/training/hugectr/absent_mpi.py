"""A stand-in for mpi4py, which HugeCTR's scripts import so that HugeCTR can use it."""

from __future__ import annotations

import os
import sys
import threading
from importlib.util import find_spec
from types import ModuleType


class _World:
    """The part of MPI.COMM_WORLD that scripts use: rank and size."""

    def Get_rank(self) -> int:  # noqa: N802  mpi4py's name
        """The number of this process."""
        return int(os.environ.get("RANK", "0"))

    def Get_size(self) -> int:  # noqa: N802  mpi4py's name
        """The number of processes."""
        return int(os.environ.get("WORLD_SIZE", "1"))

    def Barrier(self) -> None:  # noqa: N802  mpi4py's name
        """Nothing: the processes wait for each other when they read, train and save."""

    @property
    def rank(self) -> int:
        """As Get_rank."""
        return self.Get_rank()

    @property
    def size(self) -> int:
        """As Get_size."""
        return self.Get_size()


def provide_mpi() -> None:
    """Register the stand-in as mpi4py, unless the real one is installed."""
    if "mpi4py" in sys.modules or find_spec("mpi4py") is not None:
        return
    package, mpi = ModuleType("mpi4py"), ModuleType("mpi4py.MPI")
    mpi.COMM_WORLD = _World()  # type: ignore[attr-defined]
    mpi.Is_thread_main = lambda: threading.current_thread() is threading.main_thread()  # type: ignore[attr-defined]
    package.MPI = mpi  # type: ignore[attr-defined]
    sys.modules.update({"mpi4py": package, "mpi4py.MPI": mpi})

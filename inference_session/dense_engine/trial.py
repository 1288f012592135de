"""Networks are opened in another process before they are served: ONNX Runtime may end the process that opens one."""

from __future__ import annotations

import json
import os
import resource
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import onnxruntime

from inference_session.dense_engine.network_file import NetworkFile
from inference_session.dense_engine.onnx import OnnxEngine
from inference_session.errors import ModelFormatError, UnsupportedModelError
from inference_session.platform.signal_names import signal_name

_PROGRAM = (
    "import gc, json, sys; gc.disable(); sys.path[:] = json.loads(sys.argv[1]); "
    "from inference_session.dense_engine.trial import open_all; open_all(sys.argv[2:]); gc.freeze()"
)
"""Collections would look for garbage in what it imports, and once more at its end."""


def try_to_open(networks: Sequence[Path], source: str) -> None:
    """Open networks as serving on a processor does, in another process; not at all where Python is part of a program.

    Args:
        networks: ONNX files.
        source: what messages call the model.

    Raises:
        UnsupportedModelError: the other process was ended by a signal; names the signal and the network.
        ModelFormatError: ONNX Runtime cannot load a network.
    """
    if not networks or not sys.executable:  # Python does not know its own program
        return
    status, num_begun = _open_apart([str(path.absolute()) for path in networks])
    if status < 0:
        network = networks[max(num_begun, 1) - 1]
        raise UnsupportedModelError(f"{source}: {_crash(network, -status)}")
    if status:  # an error of Python's, which this process has too
        try:
            for path in networks:
                OnnxEngine(NetworkFile(path), num_threads=1).close()
        except ModelFormatError as error:  # the draft's folder will be gone when somebody reads this
            raise ModelFormatError(f"{source}: {str(error).replace(f'{path.parent}/', '')}") from error


def _open_apart(paths: Sequence[str]) -> tuple[int, int]:
    """The exit status of another process that opens networks, negative if a signal ended it, and how many it began."""
    # The other process finds packages where this one does, and nowhere else: not in its working directory either.
    folders = json.dumps([os.path.abspath(folder) for folder in sys.path])  # noqa: PTH100  "" is the working directory
    program = [sys.executable, "-I", "-c", _PROGRAM, folders, *paths]
    done = subprocess.run(
        program, cwd="/", stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, check=False
    )
    return done.returncode, len(done.stdout)


def open_all(paths: Sequence[str]) -> None:
    """What the other process does. It writes a byte for each network that it begins to open."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # a crash must not fill the disk
    for path in paths:
        os.write(1, b".")
        OnnxEngine(NetworkFile(Path(path)), num_threads=1).close()


def _crash(network: Path, number: int) -> str:
    advice = (
        "the kernel does this where memory is short"
        if number == signal.SIGKILL
        else "if the model is in half precision, import it in float32 (`--tables float16` stores tables in half of the "
        "bytes); else try another release of ONNX Runtime"
    )
    return (
        f"a process that opened {network.name}, as a server does, was ended by {signal_name(number)} in ONNX "
        f"Runtime {onnxruntime.__version__}, and a server would end too; {advice}"
    )

"""Canary requests: a file of one request, and the answer of a version that is known to be good.

It is NumPy's `.npz`, arrays `input/<name>` and `output/<name>`; without outputs, answers are checked only for
NaN and infinities. `hotrow record-canary` writes one.
"""

from __future__ import annotations

import io
import lzma
import tokenize
import zipfile
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from inference_session.errors import CanaryError, ConfigurationError, InvalidRequestError
from inference_session.model_spec import NamedArrays
from inference_session.platform.small_files import write_chosen

BROKEN = (
    *(ValueError, TypeError, EOFError, MemoryError, RuntimeError, KeyError),
    *(zipfile.BadZipFile, zlib.error, lzma.LZMAError, tokenize.TokenError),
)
"""What NumPy and zipfile raise where an archive is damaged, or says of itself that it is encrypted."""
INPUT, OUTPUT = "input/", "output/"

Run = Callable[[NamedArrays], NamedArrays]
"""run(inputs) → all outputs, as InferenceSession.run."""


def record_canary(run: Run, inputs: NamedArrays, path: Path) -> None:
    """Answer a request and write both to a file; CanaryError where an answer is not finite, or all are empty.

    Where the disk is full, a file that was there stays as it was.
    """
    outputs = run(inputs)
    for name, answer in outputs.items():
        _check_finite(name, answer)
    if not any(answer.size for answer in outputs.values()):
        raise CanaryError("canary requests: the request has no sample, so that any version would pass")
    parts = {f"{INPUT}{name}": array for name, array in inputs.items()}
    # NumPy would pickle strings, and readers never unpickle.
    parts |= {f"{OUTPUT}{name}": array for name, array in outputs.items() if array.dtype != object}
    archive = io.BytesIO()
    np.savez(archive, **parts)  # type: ignore[arg-type]  # its stub takes names for its flags
    write_chosen(path, archive.getvalue())


def check_canary(run: Run, path: Path, tolerance: float) -> None:
    """Answer a recorded request and compare.

    Args:
        tolerance: largest mean absolute difference of an output.

    Raises:
        CanaryError: says which output is not finite, or how far it is off.
        ConfigurationError: the file cannot be read, or is not a request to this model.
    """
    inputs, recorded = _split(read_arrays(path), path)
    try:
        outputs = run(inputs)
    except InvalidRequestError as error:
        raise ConfigurationError(f"canary requests {path}: the model does not take this request: {error}") from error
    for name, answer in outputs.items():
        _check_finite(name, answer)
        if name in recorded:
            _check_near(name, answer, recorded[name], tolerance)


def read_arrays(path: Path) -> NamedArrays:
    """The arrays of an .npz file by name, of any shapes and types; ConfigurationError for any other file."""
    try:
        with path.open("rb") as file:
            archive = np.load(file, allow_pickle=False)
            if not isinstance(archive, np.lib.npyio.NpzFile):
                raise TypeError("one array")
            with archive:
                return dict(archive)
    except BROKEN as error:
        # NumPy's own message would advise to unpickle it.
        raise ConfigurationError(f"canary requests {path}: cannot be read: not an .npz file, or damaged") from error
    except OSError as error:
        raise ConfigurationError(f"canary requests {path}: cannot be read: {error.strerror}") from error


def _split(arrays: NamedArrays, path: Path) -> tuple[NamedArrays, NamedArrays]:
    """The inputs and the outputs in a file that `record_canary` has written."""
    inputs, outputs = (
        {name.removeprefix(kind): array for name, array in arrays.items() if name.startswith(kind)}
        for kind in (INPUT, OUTPUT)
    )
    if not inputs:
        raise ConfigurationError(f"canary requests {path}: holds no array {INPUT}NAME, which a request needs")
    return inputs, outputs


def _check_finite(name: str, answer: NDArray[Any]) -> None:
    if np.issubdtype(answer.dtype, np.floating) and not np.isfinite(answer).all():
        num_bad = int((~np.isfinite(answer)).sum())
        raise CanaryError(f"canary requests: {num_bad} of {answer.size} values of output {name!r} are not finite")


def _check_near(name: str, answer: NDArray[Any], recorded: NDArray[Any], tolerance: float) -> None:
    if answer.shape != recorded.shape:
        raise CanaryError(
            f"canary requests: output {name!r} has shape {list(answer.shape)}, but {list(recorded.shape)} was recorded"
        )
    if np.issubdtype(answer.dtype, np.number) and answer.size:
        difference = float(np.abs(answer.astype(float) - recorded).mean())
        if not difference <= tolerance:
            raise CanaryError(
                f"canary requests: output {name!r} differs from the recorded one by {difference:.4g} on average, "
                f"more than canary_tolerance {tolerance:g}"
            )

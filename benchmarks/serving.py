"""What the benchmarks of a real Triton share: how it is started, how models are set, and what a request is made of."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tritonclient.utils import np_to_triton_dtype

from triton_backend.launcher.server import ServerOptions, TritonServer


def serve(repository: Path, *models: str, front: bool = False) -> TritonServer:
    """A server on free ports that is ready, of these models or all; a context manager that stops it."""
    return TritonServer.start(ServerOptions(repository, models, http_port=0, grpc_port=0, metrics_port=0, front=front))


def add_settings(config: Path, settings: Mapping[str, Any]) -> None:
    """Add a model's settings to its config.pbtxt."""
    lines = [f'parameters {{ key: "{name}" value {{ string_value: "{value}" }} }}' for name, value in settings.items()]
    with config.open("a", encoding="utf-8") as file:
        file.write("\n".join(["", *lines, ""]))


def tensors(module: Any, inputs: Mapping[str, NDArray[Any]]) -> list[Any]:
    """The inputs of a request; `module` is tritonclient.grpc or tritonclient.http."""
    made = []
    for name, array in inputs.items():
        made.append(module.InferInput(name, list(array.shape), np_to_triton_dtype(array.dtype)))
        made[-1].set_data_from_numpy(np.ascontiguousarray(array))
    return made

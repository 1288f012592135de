"""The engines for DLRM-DCNv2: hotrow, in process or through Triton, plain ONNX Runtime, and PyTorch."""

from __future__ import annotations

import queue
from abc import ABC, abstractmethod
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import mlperf_model as model
import numpy as np
import onnx
import onnxruntime
from mlperf_model import Arrays
from numpy.typing import NDArray

from inference_session import InferenceSession
from inference_session.model_spec import TABLES_FOLDER
from inference_session.tables.quantized_rows import dequantize_rows
from inference_session.tables.table_file import TableFile
from inference_session.version_directory.session_file import read_spec

_REQUESTS_UNDER_WAY = 32


class Peer(ABC):
    """Answers pairs: inputs by name, [pairs, …] → float32 [pairs]."""

    name: str
    precision = "float32"
    """Precision of the dense network."""

    @abstractmethod
    def answer(self, pairs: Arrays) -> NDArray[np.float32]:
        """The probability of each pair."""

    def close(self) -> None:  # noqa: B027  most have nothing to free
        """Free what it holds."""


class Hotrow(Peer):
    """A session in this process."""

    name = "hotrow"

    def __init__(self, version_dir: Path, settings: dict[str, Any]) -> None:
        self._session = InferenceSession.open(version_dir, **settings)
        self.precision = self._session.config.dense_precision

    def answer(self, pairs: Arrays) -> NDArray[np.float32]:
        return self._session.predict(pairs).reshape(-1)

    def close(self) -> None:
        self._session.close()


class Triton(Peer):
    """hotrow behind a real server, asked over gRPC, one request per sample."""

    name = "hotrow, Triton, gRPC"

    def __init__(self, url: str, model_name: str) -> None:
        import tritonclient.grpc as triton
        from serving import tensors

        self._model, self._client = model_name, triton.InferenceServerClient(url)
        self._tensors = partial(tensors, triton)

    def answer(self, pairs: Arrays) -> NDArray[np.float32]:
        answers: NDArray[np.float32] = self._client.infer(self._model, self._tensors(pairs)).as_numpy(model.OUTPUT)
        return answers.reshape(-1)

    def answer_each(self, requests: Sequence[Arrays]) -> NDArray[np.float32]:
        """The concatenated answers of several requests, some of which are in flight at once."""
        done: queue.SimpleQueue[tuple[int, Any, Any]] = queue.SimpleQueue()
        answers: list[Any] = [None] * len(requests)
        for i, request in enumerate(requests):
            if i >= _REQUESTS_UNDER_WAY:
                self._receive(done, answers)
            self._client.async_infer(
                self._model, self._tensors(request), lambda result, error, i=i: done.put((i, result, error))
            )
        for _ in range(min(len(requests), _REQUESTS_UNDER_WAY)):
            self._receive(done, answers)
        return np.concatenate(answers)

    def close(self) -> None:
        self._client.close()

    def _receive(self, done: Any, answers: list[Any]) -> None:
        i, result, error = done.get()
        if error is not None:
            raise error
        answers[i] = result.as_numpy(model.OUTPUT).reshape(-1)


class PlainOnnxRuntime(Peer):
    """The original graph with its tables inside, float32, as ONNX Runtime runs it."""

    name = "plain ONNX Runtime"

    def __init__(self, folder: Path, tables: Sequence[NDArray[np.float32]], device: str, threads: int) -> None:
        path = folder / "plain.onnx"
        onnx.save(
            model.network(model.random_weights(), tables),
            path,
            save_as_external_data=True,
            location="plain.data",
        )
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads, options.log_severity_level = threads, 3
        provider: Any = "CPUExecutionProvider"
        if device != "cpu":
            provider = ("CUDAExecutionProvider", {"device_id": device.removeprefix("cuda:"), "use_tf32": "0"})
        self._network = onnxruntime.InferenceSession(str(path), options, providers=[provider])

    def answer(self, pairs: Arrays) -> NDArray[np.float32]:
        binding = self._network.io_binding()
        for name, array in pairs.items():
            if isinstance(array, np.ndarray):
                binding.bind_cpu_input(name, array)
            else:
                array.device.synchronize()
                binding.bind_input(name, "cuda", array.device.id, array.dtype.type, array.shape, array.data.ptr)
        binding.bind_output(model.OUTPUT, "cpu")
        self._network.run_with_iobinding(binding)
        answers: NDArray[np.float32] = binding.copy_outputs_to_cpu()[0]
        return answers.reshape(-1)


class PyTorch(Peer):
    """The same network in PyTorch's own operators: EmbeddingBag, Linear, addcmul."""

    def __init__(self, tables: Sequence[NDArray[np.float32]], device: str, threads: int, precision: str) -> None:
        """`precision`: of tables and network, one of PyTorch's types."""
        import torch

        self._torch, self._device, self.precision = torch, device, precision
        self._type = getattr(torch, precision)
        self.name = f"PyTorch {torch.__version__.split('+')[0]}, {precision}"
        torch.set_num_threads(threads)
        self._weights = {name: self._moved(array) for name, array in model.random_weights().items()}
        self._tables = [self._moved(rows) for rows in tables]

    def answer(self, pairs: Arrays) -> NDArray[np.float32]:
        with self._torch.inference_mode():
            inputs = {name: self._torch.as_tensor(array, device=self._device) for name, array in pairs.items()}
            answers: NDArray[np.float32] = self._compute(inputs).float().cpu().numpy()
        return answers.reshape(-1)

    def _moved(self, array: NDArray[np.float32]) -> Any:
        return self._torch.as_tensor(array).to(self._device, self._type)

    def _linear(self, value: Any, name: str) -> Any:
        return self._torch.addmm(self._weights[f"{name}_bias"], value, self._weights[name])

    def _compute(self, inputs: Arrays) -> Any:
        torch, weights = self._torch, self._weights
        bottom = inputs["dense"].to(self._type)
        for i in range(len(model.BOTTOM)):
            bottom = torch.relu(self._linear(bottom, f"bottom_{i}"))
        bags = [
            torch.nn.functional.embedding_bag(inputs[name], rows, mode="sum")
            for name, rows in zip(model.key_names(), self._tables, strict=True)
        ]
        first = value = torch.cat([bottom, *bags], dim=1)
        for i in range(model.NUM_CROSS):
            value = torch.addcmul(value, first, self._linear(value @ weights[f"cross_v_{i}"], f"cross_w_{i}"))
        for i in range(len(model.TOP)):
            value = self._linear(value, f"top_{i}")
            value = value if i + 1 == len(model.TOP) else torch.relu(value)
        return torch.sigmoid(value)


def stored_rows(version_dir: Path) -> list[NDArray[np.float32]]:
    """The rows of each table as hotrow serves them, float32."""
    spec = read_spec(version_dir)
    rows: list[Any] = [None] * len(spec.tables)
    for table in spec.tables:
        file = TableFile.open(version_dir / TABLES_FOLDER / table.folder, table)
        rows[int(table.name.removeprefix("table_"))] = dequantize_rows(file.vectors, table.dtype)
        file.close()
    return rows

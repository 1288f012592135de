"""Asks the served model, over either of Triton's protocols."""

from __future__ import annotations

from types import ModuleType

import numpy as np
from numpy.typing import NDArray

from demo.movielens import Inputs, take

MODEL = "movielens"
BATCH_SIZE = 1000

Predictions = NDArray[np.float32]


class Client:
    """Asks a served model over one of Triton's protocols; `module` is tritonclient.grpc or tritonclient.http."""

    def __init__(self, module: ModuleType, url: str, model: str = MODEL) -> None:
        self._module = module
        self._model = model
        self._client = module.InferenceServerClient(url)

    def predict(self, inputs: Inputs) -> Predictions:
        """Probabilities float32 [samples, tasks], requested in batches."""
        num_samples = len(next(iter(inputs.values())))
        batches = [take(inputs, slice(i, i + BATCH_SIZE)) for i in range(0, num_samples, BATCH_SIZE)]
        return np.concatenate([self._infer(batch) for batch in batches])

    def close(self) -> None:
        self._client.close()

    def _infer(self, inputs: Inputs) -> Predictions:
        tensors = []
        for name, column in inputs.items():
            data_type = "INT64" if column.dtype == np.int64 else "FP32"
            tensors.append(self._module.InferInput(name, column.shape, data_type))
            tensors[-1].set_data_from_numpy(column)
        output = self._module.InferRequestedOutput("OUTPUT0")
        answer: Predictions = self._client.infer(self._model, tensors, outputs=[output]).as_numpy("OUTPUT0")
        return answer

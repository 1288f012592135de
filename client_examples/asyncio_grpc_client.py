"""Ask over gRPC from asyncio: one request per movie, all under way at once. The server joins them into batches.

python client_examples/asyncio_grpc_client.py [--url 127.0.0.1:8001]
"""

from __future__ import annotations

import argparse
import asyncio

import numpy as np
import tritonclient.grpc.aio as triton
from example_request import MODEL, MOVIES, TYPES, inputs, show
from numpy.typing import NDArray


async def ask(client: triton.InferenceServerClient, sample: int) -> NDArray[np.float32]:
    """Predictions float32 [1, tasks] for one row of the request."""
    tensors = []
    for name, array in inputs().items():
        row = array[sample : sample + 1]
        tensor = triton.InferInput(name, row.shape, TYPES[row.dtype.name])
        tensor.set_data_from_numpy(row)
        tensors.append(tensor)
    answer = await client.infer(MODEL, tensors, outputs=[triton.InferRequestedOutput("OUTPUT0")])
    predictions: NDArray[np.float32] = answer.as_numpy("OUTPUT0")
    return predictions


async def main(url: str) -> None:
    async with triton.InferenceServerClient(url) as client:
        answers = await asyncio.gather(*(ask(client, sample) for sample in range(len(MOVIES))))
    show(np.concatenate(answers))


parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--url", default="127.0.0.1:8001", help="host:port of the gRPC endpoint")
asyncio.run(main(parser.parse_args().url))

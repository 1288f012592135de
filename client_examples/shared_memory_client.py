"""Ask through system shared memory: no tensor travels through a socket. Client and server share one machine.

    python client_examples/shared_memory_client.py [--url 127.0.0.1:8001]

A server started with --restrict-apis, or by a Triton of 26.04 or later without --allow-client-shm, refuses this.
A client that asks often registers its region once, and unregisters it when it ends.
"""

from __future__ import annotations

import argparse
import os
import time
from contextlib import ExitStack, suppress

import numpy as np
import tritonclient.grpc as triton
import tritonclient.utils.shared_memory as memory
from example_request import MODEL, TASKS, TYPES, inputs, show
from tritonclient.utils import InferenceServerException

MAX_ATTEMPTS = 1000


def unregister(client: triton.InferenceServerClient, region: str) -> None:
    """Triton may refuse for a moment after an answer, while it still holds the request and its region."""
    for _ in range(MAX_ATTEMPTS):
        with suppress(InferenceServerException):
            client.unregister_system_shared_memory(region)
            return
        time.sleep(0.01)
    client.unregister_system_shared_memory(region)  # raises why not


parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--url", default="127.0.0.1:8001", help="host:port of the gRPC endpoint")
options = parser.parse_args()

arrays = inputs()
shape = (len(arrays["movie_id"]), len(TASKS))
input_bytes, output_bytes = sum(array.nbytes for array in arrays.values()), 4 * shape[0] * shape[1]
region = f"movielens_{os.getpid()}"

with ExitStack() as cleanup:
    client = cleanup.enter_context(triton.InferenceServerClient(options.url))
    # One region holds the inputs, one after another, and then the output.
    handle = memory.create_shared_memory_region(region, f"/{region}", input_bytes + output_bytes)
    cleanup.callback(memory.destroy_shared_memory_region, handle)
    client.register_system_shared_memory(region, f"/{region}", input_bytes + output_bytes)
    cleanup.callback(unregister, client, region)

    tensors, offset = [], 0
    for name, array in arrays.items():
        memory.set_shared_memory_region(handle, [array], offset=offset)
        tensor = triton.InferInput(name, array.shape, TYPES[array.dtype.name])
        tensor.set_shared_memory(region, array.nbytes, offset=offset)
        tensors.append(tensor)
        offset += array.nbytes
    output = triton.InferRequestedOutput("OUTPUT0")
    output.set_shared_memory(region, output_bytes, offset=input_bytes)

    client.infer(MODEL, tensors, outputs=[output])
    show(memory.get_contents_as_numpy(handle, np.float32, shape, offset=input_bytes).copy())

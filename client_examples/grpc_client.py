"""Ask over gRPC.

python client_examples/grpc_client.py [--url 127.0.0.1:8001]
"""

from __future__ import annotations

import argparse

import numpy as np
import tritonclient.grpc as triton
from example_request import MODEL, TASKS, TYPES, inputs, show

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--url", default="127.0.0.1:8001", help="host:port of the gRPC endpoint")
options = parser.parse_args()

tensors = []
for name, array in inputs().items():
    tensor = triton.InferInput(name, array.shape, TYPES[array.dtype.name])
    tensor.set_data_from_numpy(array)
    tensors.append(tensor)

with triton.InferenceServerClient(options.url) as client:
    # The model's own outputs, by name; only what is asked for is computed.
    outputs = [triton.InferRequestedOutput(task) for task in TASKS]
    answer = client.infer(MODEL, tensors, outputs=outputs, client_timeout=10)
    show(np.concatenate([answer.as_numpy(task) for task in TASKS], axis=1))

"""Rank 500 items for one user: the user is sent once, and looked up and computed once.

    hotrow import onnx ranker.onnx --name ranker --repository model_repository --context user_id --context clicks
    hotrow serve --repository model_repository
    python client_examples/rank_candidates.py --model ranker --context user_id --context clicks

Inputs are generated: ids below --max-id, numbers between 0 and 1. With --users 3 one request ranks for three users, and
CANDIDATES says how many of the items each of them gets.
"""

from __future__ import annotations

import argparse
from typing import Any

import numpy as np
import tritonclient.grpc as triton
from numpy.typing import NDArray

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--url", default="127.0.0.1:8001", help="host:port of the gRPC endpoint")
parser.add_argument("--model", required=True, help="a model that was imported with --context")
parser.add_argument("--context", action="append", required=True, help="an input of the user; as at the import")
parser.add_argument("--candidates", type=int, default=500, help="items for each user")
parser.add_argument("--users", type=int, default=1, help="users in the request")
parser.add_argument("--max-id", type=int, default=1000, help="ids are below this")
parser.add_argument("--length", type=int, default=20, help="of lists of any length")
options = parser.parse_args()

random = np.random.default_rng(0)


def generated(tensor: Any) -> NDArray[Any]:
    """Values of one input: a row for each user, or one for each item."""
    rows = options.users if tensor.name in options.context else options.users * options.candidates
    shape = (rows, *(options.length if size < 0 else size for size in tensor.shape[1:]))
    if tensor.datatype == "FP32":
        return random.random(shape, np.float32)
    return random.integers(0, options.max_id, shape).astype(np.int64 if tensor.datatype == "INT64" else np.int32)


with triton.InferenceServerClient(options.url) as client:
    described = [tensor for tensor in client.get_model_metadata(options.model).inputs if tensor.name != "CANDIDATES"]
    arrays = {tensor.name: generated(tensor) for tensor in described}
    if options.users > 1:  # with one user, all candidates belong to that user
        arrays["CANDIDATES"] = np.full(options.users, options.candidates, np.int32)
    types = {tensor.name: tensor.datatype for tensor in described} | {"CANDIDATES": "INT32"}
    tensors = []
    for name, array in arrays.items():
        tensor = triton.InferInput(name, array.shape, types[name])
        tensor.set_data_from_numpy(array)
        tensors.append(tensor)
    answer = client.infer(options.model, tensors, outputs=[triton.InferRequestedOutput("OUTPUT0")])

# A row for each item, in the order in which they were sent: those of the first user, then those of the second …
scores = answer.as_numpy("OUTPUT0")[:, 0].reshape(options.users, options.candidates)
for user, found in enumerate(scores):
    best = np.argsort(-found)[:5]
    print(f"user {user}:", *(f"item {item} {found[item]:.4f}" for item in best), sep="  ")

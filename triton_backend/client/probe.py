"""A generated request that any model should answer, to check whether it still does.

It is as small as the model's inputs allow: each open size 1, all values 0. Not every model accepts such a request
(HugeCTR's and HPS's tensors have to agree with one another). So a parameter marks it, and hotrow's models then answer
a request that they generate. The parameter's value is a key that each `hotrow serve` draws at its start: its backend
processes get it in their environment, and `hotrow health` reads it from a file that only the same user can read. A
client that sends the parameter without the key gets the answer to its own request.
"""

from __future__ import annotations

import hmac
import json
import math
import os
import tempfile
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from inference_session.model_spec import ModelSpec, TensorSpec

PROBE_PARAMETER = "hotrow_probe"
KEY_VARIABLE = "HOTROW_PROBE_KEY"
"""Environment variable with the key, of the server and its backend processes."""
SERVE_FOLDER_PREFIX = "hotrow-serve-"
"""Prefix of the temporary folders in which servers work, one per launcher, readable only by its user."""
DATATYPES = {
    "BOOL": np.bool_,
    "UINT8": np.uint8,
    "UINT16": np.uint16,
    "UINT32": np.uint32,
    "UINT64": np.uint64,
    "INT8": np.int8,
    "INT16": np.int16,
    "INT32": np.int32,
    "INT64": np.int64,
    "FP16": np.float16,
    "FP32": np.float32,
    "FP64": np.float64,
    "BF16": np.float32,
}
"""By the names of the inference protocol; BF16 is sent as FP32."""
_NUM_BYTES = {**{name: np.dtype(of).itemsize for name, of in DATATYPES.items()}, "BF16": 2, "BYTES": 4}
"""Bytes of one element when sent."""


def is_probe(parameters: str) -> bool:
    """Whether a request with these parameters, a JSON object, is a probe: it has the key of this server."""
    key = os.environ.get(KEY_VARIABLE)
    if not key or PROBE_PARAMETER not in parameters:
        return False
    sent = json.loads(parameters).get(PROBE_PARAMETER)
    return isinstance(sent, str) and hmac.compare_digest(sent.encode(), key.encode())


def write_key(folder: Path, grpc_port: int, key: str) -> None:
    """Leave the key in a server's folder, for probes of the same user."""
    _key_file(folder, grpc_port).write_text(key, encoding="ascii")


def find_key(url: str) -> str | None:
    """The key of the server at `host:port`; None where another machine or user runs it."""
    host, _, port = url.rpartition(":")
    if host not in ("localhost", "127.0.0.1", "[::1]") or not port.isdigit():
        return None
    with suppress(OSError, ValueError):
        found = _key_file(Path(tempfile.gettempdir(), f"{SERVE_FOLDER_PREFIX}*"), int(port))
        ours = [path for path in Path("/").glob(str(found.relative_to("/"))) if _is_ours(path.parent)]
        return max(ours, key=lambda path: path.stat().st_mtime_ns).read_text(encoding="ascii")
    return None


def _is_ours(folder: Path) -> bool:
    """Whether our user made a folder; others may make one of this name, with anything in it."""
    return folder.lstat().st_uid == os.geteuid()


def _key_file(folder: Path, grpc_port: int) -> Path:
    return folder / f"probe-key-{grpc_port}"


def probe_inputs(tensors: Iterable[tuple[str, str, tuple[int, ...]]]) -> dict[str, NDArray[Any]] | None:
    """The request for inputs of these names, types and shapes; None where one has a type that cannot be sent."""
    inputs: dict[str, NDArray[Any]] = {}
    for name, datatype, shape in tensors:
        sizes = [max(size, 1) for size in shape]
        if datatype == "BYTES":
            inputs[name] = np.full(sizes, b"", object)
        elif datatype in DATATYPES:
            inputs[name] = np.zeros(sizes, DATATYPES[datatype])
        else:
            return None
    return inputs


def encode_probe(tensors: Iterable[Mapping[str, Any]], key: str) -> tuple[dict[str, str], bytes]:
    """The request over HTTP for inputs as a model's metadata describes them, with the server's key: headers and body.

    Zeros of every type are zero bytes, and so is the length of an empty string.
    """
    inputs = []
    values = b""
    for tensor in tensors:
        shape = [max(int(size), 1) for size in tensor["shape"]]
        num_bytes = math.prod(shape) * _NUM_BYTES[tensor["datatype"]]
        values += bytes(num_bytes)
        inputs.append({**tensor, "shape": shape, "parameters": {"binary_data_size": num_bytes}})
    header = json.dumps({"inputs": inputs, "parameters": {PROBE_PARAMETER: key}}).encode()
    return {"Inference-Header-Content-Length": str(len(header))}, header + values


def probe_request(spec: ModelSpec) -> dict[str, NDArray[Any]]:
    """One sample that a model of hotrow's takes."""
    # Imported here: it takes a second to load, and a probe's command should not wait for it.
    from inference_session.requests.hugectr_csr import DENSE, HPS_COUNTS, HPS_KEYS, KEYS, OFFSETS

    if spec.takes_hugectr_requests:
        options = spec.layout_options
        return {
            DENSE: np.zeros(options["dense_dim"], np.float32),
            KEYS: np.zeros(sum(options["slots"]), options["key_type"]),
            OFFSETS: np.concatenate([np.arange(slots + 1, dtype=np.int32) for slots in options["slots"]]),
        }
    if spec.answers_vectors:
        return {HPS_KEYS: np.zeros(len(spec.tables), np.int64), HPS_COUNTS: np.ones(len(spec.tables), np.int32)}
    return {tensor.name: _zeros(tensor) for tensor in spec.inputs}


def _zeros(tensor: TensorSpec) -> NDArray[Any]:
    shape = [max(size, 1) for size in tensor.shape]
    return np.full(shape, "", object) if tensor.dtype == "object" else np.zeros(shape, tensor.dtype)

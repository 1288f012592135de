"""A generated request that any model should answer, to check whether it still does.

It is as small as the model's inputs allow: each open size 1, all values 0. Not every model accepts such a request
(HugeCTR's and HPS's tensors have to agree with one another). So a parameter marks it, and hotrow's models then answer
a request that they generate. The parameter's value is a key that each `hotrow serve` draws at its start: its backend
processes get it in their environment, and `hotrow health` reads it from a file that only the same user can read. A
client that sends the parameter without the key gets the answer to its own request.

`hotrow serve` loads this module, and it loads no NumPy: probe_inputs.py makes the inputs.
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

PROBE_PARAMETER = "hotrow_probe"
KEY_VARIABLE = "HOTROW_PROBE_KEY"
"""Environment variable with the key, of the server and its backend processes."""
SERVE_FOLDER_PREFIX = "hotrow-serve-"
"""Prefix of the temporary folders in which servers work, one per launcher, readable only by its user."""
_NUM_BYTES = {
    "BOOL": 1, "UINT8": 1, "UINT16": 2, "UINT32": 4, "UINT64": 8, "INT8": 1, "INT16": 2, "INT32": 4, "INT64": 8,
    "FP16": 2, "FP32": 4, "FP64": 8, "BF16": 2, "BYTES": 4,
}  # fmt: skip
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

"""hotrow's library: one loaded model version answers requests from a dense network and embedding tables.

    from inference_session import InferenceSession

    with InferenceSession.open("model_repository/ctr/1") as session:
        predictions = session.predict({"user_id": user_ids, "dense": dense})

Errors are those of `inference_session.errors`, all of them a HotrowError. Settings are the fields of
`inference_session.config.SessionConfig`. HugeCTR's names are in `inference_session.hugectr`, the publisher of changed
rows is `inference_session.update_stream.Publisher`.
"""

from __future__ import annotations

import os
from importlib import import_module
from typing import TYPE_CHECKING, Any

from inference_session.errors import HotrowError

if TYPE_CHECKING:
    from inference_session.requests.batch import Request
    from inference_session.session import InferenceSession

__all__ = ["HotrowError", "InferenceSession", "Request"]

# Read by ONNX Runtime when it is first imported: some releases report to their maker by default, and keep a device's id
# and a database in the user's home for that. A user who wants that sets another value.
os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")

_HOMES = {"InferenceSession": "inference_session.session", "Request": "inference_session.requests.batch"}


def __getattr__(name: str) -> Any:
    # Loaded on first use: Numba and ONNX Runtime take a second, which commands that need neither should not pay.
    if name in _HOMES:
        return getattr(import_module(_HOMES[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)

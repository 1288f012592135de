"""hotrow's library: one loaded model version answers requests from a dense network and embedding tables."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from inference_session.batch import Request
    from inference_session.session import InferenceSession

__all__ = ["InferenceSession", "Request"]

_HOMES = {"InferenceSession": "inference_session.session", "Request": "inference_session.batch"}


def __getattr__(name: str) -> Any:
    # Loaded on first use: Numba and ONNX Runtime take a second, which commands that need neither should not pay.
    if name in _HOMES:
        from importlib import import_module

        return getattr(import_module(_HOMES[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return [*globals(), *__all__]

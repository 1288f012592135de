"""Loading code at low priority, so that the versions that serve meanwhile keep the processor.

What a new process spends before it can open a version, about a third of a second, goes almost all into importing
Numba, NumPy and ONNX Runtime. On Linux a thread may lower its own priority, but not raise it again: so a separate
thread does that, and neither the thread that will serve nor those that a session starts are ever slowed down.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from importlib import import_module
from typing import Any

from inference_session.platform.pacing import without_collections, yield_to_others


def load_quietly(module: str, name: str) -> Any:
    """Import a module, and compile what it needs; returns the attribute of this name. Raises what importing raises."""
    with without_collections(), ThreadPoolExecutor(1, initializer=yield_to_others) as thread:
        loaded = thread.submit(import_module, module).result()
        thread.submit(_load_kernels).result()
    return getattr(loaded, name)


def _load_kernels() -> None:
    from inference_session.kernels.cpu import lookup as cpu
    from inference_session.kernels.cpu.requests import staging

    cpu.compile_kernels()
    staging.compile_kernels()

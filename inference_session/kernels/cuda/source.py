"""The kernels' source, for CuPy and for whatever else compiles it."""

from __future__ import annotations

from pathlib import Path

FILES = (
    "layout.cuh",
    "index.cuh",
    "vectors.cuh",
    "sources.cuh",
    "copies.cuh",
    "pooling.cuh",
    "lookup.cu",
    "order.cu",
    "columns.cu",
    "missing.cu",
    "write.cu",
)
"""In the order in which they use one another."""


def source() -> str:
    """All of it as one translation unit, so that CuPy's cache sees every change."""
    folder = Path(__file__).parent
    return "\n".join((folder / name).read_text(encoding="utf-8") for name in FILES)

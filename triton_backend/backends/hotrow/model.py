"""Entry point of Triton's Python-based backend `hotrow`: the code is the package's, installed next to this folder."""

from triton_backend.backend.quiet_loading import load_quietly


def TritonPythonModel() -> object:  # noqa: N802  Triton's name
    """A model, in the process that serves it. That which Triton asks to complete a config.pbtxt loads no code."""
    return load_quietly("triton_backend.backend.model", "TritonPythonModel")()


__all__ = ["TritonPythonModel"]

"""Entry point of Triton's Python-based backend `hps`: the code is the package's, installed next to this folder."""

from triton_backend.backend.quiet_loading import load_quietly

TritonPythonModel = load_quietly("triton_backend.backend.hugectr_model", "TritonPythonModel")

__all__ = ["TritonPythonModel"]

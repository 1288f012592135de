"""Entry point of Triton's Python-based backend `hotrow`: the code is the package's, installed beside this folder."""

from triton_backend.model import TritonPythonModel

__all__ = ["TritonPythonModel"]

"""Entry point of Triton's Python-based backend `hugectr`: the code is the package's, installed beside this folder."""

from triton_backend.hugectr_model import TritonPythonModel

__all__ = ["TritonPythonModel"]

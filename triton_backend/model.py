"""What `model.py` of a version directory imports that was written for Triton's own Python backend (`--standalone`)."""

from triton_backend.backend.model import TritonPythonModel

__all__ = ["TritonPythonModel"]

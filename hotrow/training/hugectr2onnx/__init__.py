"""HugeCTR's converter to ONNX: `hugectr2onnx.converter.convert`, by the importer that serves HugeCTR's models.

A script writes `from hotrow.training import hugectr2onnx` in place of `import hugectr2onnx`. One that
`python -m hotrow.training.hugectr` runs imports it by its own name. PyTorch is not needed.
"""

from hotrow.training.hugectr2onnx import converter, hugectr_loader

__all__ = ["converter", "hugectr_loader"]

"""The neural part of a model: ONNX Runtime behind a small contract."""

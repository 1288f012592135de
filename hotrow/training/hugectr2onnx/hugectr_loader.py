"""Names of layers, as HugeCTR's converter lists them."""

from hotrow.training.hugectr.arguments.enums import Layer_t
from inference_session.importers.hugectr.graph import LOSS_LAYERS
from inference_session.importers.hugectr.layers import supported_layers

ONNX_LAYER_TYPES = {*supported_layers(), *LOSS_LAYERS}
"""Layers that are converted."""
EXEMPTION_LAYER_TYPES = {layer.value for layer in Layer_t} - ONNX_LAYER_TYPES
"""Layers that are refused by name."""

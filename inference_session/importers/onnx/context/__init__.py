"""Splits a model into what depends on the context alone, which runs once per context, and the rest.

`split_context` first makes a graph that is right by construction: values of the context are computed at one row per
context, and wherever a candidate meets one, a Gather by the sample's context number tiles it. The rewrites then remove
such tiles one kind at a time; what none of them knows stays tiled and is named in the report.
"""

from inference_session.importers.onnx.context.jumps import may_jump
from inference_session.importers.onnx.context.split import ContextSplit, Cut, split_context

__all__ = ["ContextSplit", "Cut", "may_jump", "split_context"]

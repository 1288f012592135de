"""How much memory a model needs, and what hit rate a cache of some size would have: told from a trace of keys."""

from inference_session.sizing.cache_plan import DEFAULT_TARGET, CachePlan, CachePoint, TracedTable
from inference_session.sizing.hit_rate import HitRateCurve, LruCurve, SamplingError, SimulatedCurve
from inference_session.sizing.key_sample import KeySample
from inference_session.sizing.memory import MemoryItem, bytes_in, memory_items
from inference_session.sizing.trace_file import TRACE_FORMATS, TracePart, read_trace

__all__ = [
    "DEFAULT_TARGET",
    "TRACE_FORMATS",
    "CachePlan",
    "CachePoint",
    "HitRateCurve",
    "KeySample",
    "LruCurve",
    "MemoryItem",
    "SamplingError",
    "SimulatedCurve",
    "TracePart",
    "TracedTable",
    "bytes_in",
    "memory_items",
    "read_trace",
]

"""Where look-ups of a session read rows: mapped files, changes before them, or a cache over the parameter server."""

from inference_session.row_source.base import RowSource
from inference_session.row_source.cached_rows import CachedRows
from inference_session.row_source.create import create_row_source, resolved_cache_bytes
from inference_session.row_source.mapped_rows import MappedRows
from inference_session.row_source.updatable_rows import UpdatableRows

__all__ = ["CachedRows", "MappedRows", "RowSource", "UpdatableRows", "create_row_source", "resolved_cache_bytes"]

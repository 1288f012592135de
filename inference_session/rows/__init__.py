"""Where look-ups of a session read rows: mapped files, changes before them, or a cache over the parameter server."""

from inference_session.rows.base import RowSource
from inference_session.rows.cached import CachedRows
from inference_session.rows.create import create_row_source, resolved_cache_bytes
from inference_session.rows.mapped import MappedRows
from inference_session.rows.updated import UpdatableRows

__all__ = ["CachedRows", "MappedRows", "RowSource", "UpdatableRows", "create_row_source", "resolved_cache_bytes"]

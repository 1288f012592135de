"""Where look-ups read rows: mapped files, updates in front of them, or a cache over the parameter server."""

from inference_session.rows.base import Rows, RowWriter, fetch
from inference_session.rows.create import create_rows, resolved_cache_bytes
from inference_session.rows.mapped import MappedRows
from inference_session.rows.stored import StoredRows
from inference_session.rows.updated import UpdatedRows

__all__ = [
    "MappedRows",
    "RowWriter",
    "Rows",
    "StoredRows",
    "UpdatedRows",
    "create_rows",
    "fetch",
    "resolved_cache_bytes",
]

"""Where look-ups read rows: files, updates in front of them, or a cache over the parameter server."""

from inference_session.rows.base import Rows, RowWriter, look_up_keys
from inference_session.rows.create import create_rows, resolved_cache_bytes
from inference_session.rows.files import FileRows, changing_rows
from inference_session.rows.stored import StoredRows

__all__ = [
    "FileRows", "RowWriter", "Rows", "StoredRows", "changing_rows", "create_rows", "look_up_keys",
    "resolved_cache_bytes",
]  # fmt: skip

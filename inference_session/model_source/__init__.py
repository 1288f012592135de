"""Where a model's files come from and go to: a folder of this machine, or HDFS."""

from inference_session.model_source.base import Entry, ModelSource
from inference_session.model_source.copy import Copy, CopyReport
from inference_session.model_source.create import create_source, is_url, local_folder

__all__ = ["Copy", "CopyReport", "Entry", "ModelSource", "create_source", "is_url", "local_folder"]

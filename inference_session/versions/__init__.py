"""A model's content may be replaced while it serves: load beside, warm, activate, drain, close."""

from __future__ import annotations

from inference_session.versions.model_version import ModelVersion
from inference_session.versions.version_manager import VersionManager

__all__ = ["ModelVersion", "VersionManager"]

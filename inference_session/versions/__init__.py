"""Replaces a model's content while it serves: load next to the old content, warm, activate, drain, close."""

from __future__ import annotations

from inference_session.versions.model_version import ModelVersion
from inference_session.versions.version_manager import VersionManager

__all__ = ["ModelVersion", "VersionManager"]

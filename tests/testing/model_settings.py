"""Settings of a model, as its owner writes them into config.pbtxt."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path


def settings_text(settings: Mapping[str, object]) -> str:
    """The lines of config.pbtxt that have these settings."""
    return "".join(
        f'parameters {{ key: "{name}" value {{ string_value: "{value}" }} }}\n' for name, value in settings.items()
    )


def add_settings(config: Path, settings: Mapping[str, object]) -> None:
    """Append settings to a config.pbtxt."""
    with config.open("a", encoding="utf-8") as file:
        file.write("\n" + settings_text(settings))

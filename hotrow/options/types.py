"""Types of the values of options: numbers, and paths that a shell completes on the tab key."""

import math
import os
from pathlib import Path
from typing import Any

import click

from inference_session.errors import ConfigurationError
from inference_session.model_source import local_folder


class Number(click.FloatRange):
    """A number within bounds, as click.FloatRange, which takes NaN as within any."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        number: float = super().convert(value, param, ctx)
        if math.isnan(number):
            self.fail(f"{value!r} is not a number", param, ctx)
        return number


class LocalFolder(click.Path):
    """A folder of this machine, which need not exist unless the option says so."""

    def __init__(self, *, exists: bool = False) -> None:
        super().__init__(exists=exists, file_okay=False, path_type=Path)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Path:
        """The path."""
        try:
            return Path(os.fsdecode(super().convert(local_folder(value), param, ctx)))
        except ConfigurationError as error:
            self.fail(str(error), param, ctx)


class FileOrUrl(click.Path):
    """An existing file on this machine, or an unchanged URL."""

    def __init__(self) -> None:
        super().__init__(exists=True, dir_okay=False)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        """The path or URL."""
        return str(value) if "://" in str(value) else str(super().convert(value, param, ctx))


FILE = click.Path(exists=True, dir_okay=False, path_type=Path)
FOLDER = LocalFolder(exists=True)

# What is no path here passes unchecked. An error must not repeat it: a mistyped URL may contain a password.
PATH_OR_URL = click.Path(readable=False)
FOLDER_OR_URL = click.Path(file_okay=False, readable=False)

"""Types of paths that a shell completes on the tab key."""

from pathlib import Path

import click

FILE = click.Path(exists=True, dir_okay=False, path_type=Path)
FOLDER = click.Path(exists=True, file_okay=False, path_type=Path)

# What is no path here passes unchecked. An error must not repeat it: a mistyped URL may contain a password.
PATH_OR_URL = click.Path(readable=False)
FOLDER_OR_URL = click.Path(file_okay=False, readable=False)

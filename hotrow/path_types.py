"""Paths that a shell completes on the tab key, where a command takes URLs too."""

import click

# What is no path here passes unchecked. An error must not repeat it: a mistyped URL may contain a password.
PATH_OR_URL = click.Path(readable=False)
FOLDER_OR_URL = click.Path(file_okay=False, readable=False)

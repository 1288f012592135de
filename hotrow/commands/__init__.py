"""One module per command, each with a click command called `command`; command_line.py loads them on demand."""

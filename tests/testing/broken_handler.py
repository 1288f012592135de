"""An application's handler of log records that raises."""

import logging


class BrokenHandler(logging.Handler):
    """Of an application whose own log server is gone."""

    def emit(self, record: logging.LogRecord) -> None:
        raise OSError(f"no log server for {record.getMessage()}")

"""hotrow's command line, and `hotrow.training`. The library is the package `inference_session`."""

__version__ = "0.1.0"

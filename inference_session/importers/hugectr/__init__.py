"""HugeCTR's and HPS's files: ps.json, graph JSON, dense weights, sparse folders; and the layout of their requests."""

from inference_session.importers.hugectr.importer import import_hugectr

__all__ = ["import_hugectr"]

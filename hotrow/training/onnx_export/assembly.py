"""A traced network and table files that are already in a draft, put together as a version."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path

from onnx import ModelProto

from hotrow.training.onnx_export.exported_table import ExportedTable
from inference_session.errors import UnsupportedModelError
from inference_session.importers.onnx import TablePlace, import_draft
from inference_session.importers.onnx.carve import CONSTANT_KEYS_ONLY
from inference_session.importers.report import ImportReport

_TRACED_FILE = ".traced.onnx"


def assemble(draft: Path, target: Path, network: ModelProto, files: Mapping[str, ExportedTable]) -> ImportReport:
    """Take the network apart and report the result; the caller writes session.json and the manifest.

    Args:
        network: with the tables as external data.
        files: of the tables, by the names of their initializers.

    Raises:
        UnsupportedModelError: the model uses a table other than by rows; names its module.
    """
    path = draft / _TRACED_FILE
    path.write_bytes(network.SerializeToString())
    places = {name: TablePlace(file.table.name, file.folder) for name, file in files.items()}
    report = import_draft(path, draft, target, places)
    path.unlink()
    _check_cut(report, files)
    kept = {table.folder for table in report.spec.tables}
    for file in files.values():
        if file.folder not in kept:
            shutil.rmtree((draft / file.location).parent)
    return report


def _check_cut(report: ImportReport, files: Mapping[str, ExportedTable]) -> None:
    for item in report.stays_dense:
        file = files.get(item.name)
        if file is not None and item.reason != CONSTANT_KEYS_ONLY:
            raise UnsupportedModelError(f"{file.table.path or 'the model'}: table {file.table.name!r} {item.reason}")

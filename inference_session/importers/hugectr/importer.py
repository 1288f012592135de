"""From HugeCTR's files to the native layout: the graph becomes ONNX, the tables are linked unchanged."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path

from inference_session.errors import ConfigurationError
from inference_session.importers.hugectr.graph import Graph, read_graph
from inference_session.importers.hugectr.kept_rows import Kept, kept_tables
from inference_session.importers.hugectr.onnx_graph import DenseNetwork, build_dense_network
from inference_session.importers.hugectr.ps_fields import PsJson, PsModel
from inference_session.importers.hugectr.ps_json import read_ps_json
from inference_session.importers.hugectr.remote_files import remote_files, with_local_files
from inference_session.importers.hugectr.sparse_folder import SparseFolder, stored_embedding_dim, write_table
from inference_session.importers.report import ImportReport
from inference_session.model_source.fetch import forget
from inference_session.model_spec import (
    DENSE_FILE,
    TABLES_FOLDER,
    LookupSpec,
    ModelSpec,
    TableSpec,
    TensorSpec,
    VectorType,
    folder_names,
    label_names,
)
from inference_session.platform.drafts import draft_version
from inference_session.platform.progress import Progress
from inference_session.requests.hugectr_csr import DENSE, KEYS, OFFSETS, RequestFormat, tables_alone
from inference_session.version_directory.manifest import describe_version
from inference_session.version_directory.publishing import share_unchanged
from inference_session.version_directory.quantizing import quantize_tables
from inference_session.version_directory.version import VersionDirectory


@dataclass(frozen=True)
class _Job:
    """One model to be written."""

    settings: PsJson
    model: PsModel
    directory: Path
    """The empty folder that becomes the version directory."""
    keep_rows_of: Kept = ()
    may_link: bool = True
    progress: Progress | None = None


def import_hugectr(
    ps_json: str | Path,
    repository: Path,
    *,
    model: str | None = None,
    version: int | None = None,
    keep_rows_of: Kept = (),
    tables: VectorType = "float32",
    progress: Progress | None = None,
    complete: Callable[[Path, ModelSpec, PsModel], object] | None = None,
) -> list[ImportReport]:
    """Import one model of ps.json, or all of them, into a model repository. After an error there is none of them.

    Tables are hard links where the file system allows, else copies; they are converted only where `tables` asks for it.

    Args:
        ps_json: a path or an `hdfs://` URL, as are the files that it names.
        model: its name in ps.json; None: all.
        version: None: the one after the highest that exists.
        keep_rows_of: see `write_version`.
        tables: how tables are stored, where that makes them smaller; see `quantizing.narrowed`.
        progress: called with the bytes of keys indexed, then those of all files read for their checksums.
        complete: called with each draft before it appears, to add what a server needs (config.pbtxt); if it
            raises, no model is imported.

    Raises:
        ConfigurationError: ps.json is wrong, or the version exists.
        ModelFormatError: a file is missing, damaged, or does not belong to the graph; names file and field.
        UnsupportedModelError: names the layer that cannot be served.
        OSError, UnavailableError: a file on HDFS cannot be read.
    """
    settings = read_ps_json(ps_json)
    models = settings.models if model is None else (settings.model(model),)
    if keep_rows_of and len(models) > 1:
        raise ConfigurationError(f"{settings.path} has {len(models)} models; name the one whose rows are to be kept")
    written = []
    with ExitStack() as drafts:
        for item in models:
            draft, version_dir = drafts.enter_context(draft_version(repository, item.name, version))
            local = with_local_files(item, progress)
            spec = write_version(settings, local, draft, keep_rows_of=keep_rows_of, tables=tables, progress=progress)
            share_unchanged(draft)
            if complete:
                complete(draft, spec, item)
            written.append((item, version_dir, spec))
            for url in remote_files(item):
                forget(url)
    return [_report(settings, *parts) for parts in written]


def _report(settings: PsJson, model: PsModel, version_dir: Path, spec: ModelSpec) -> ImportReport:
    notes = *_duplicates(version_dir, spec), *_unused_fields(settings, model)
    return ImportReport(version_dir, spec, notes=notes)


def write_version(
    settings: PsJson,
    model: PsModel,
    directory: Path,
    *,
    keep_rows_of: Kept = (),
    tables: VectorType = "float32",
    may_link: bool = True,
    progress: Progress | None = None,
) -> ModelSpec:
    """Write one model into an empty folder, complete with its manifest; returns its spec.

    Args:
        model: may differ from ps.json, e.g. where config.pbtxt names other files.
        keep_rows_of: earlier tables of the model (kept_rows.py). Rows that the model no longer contains are kept, as
            HugeCTR's own update does.
        tables: as `import_hugectr`.
        may_link: False: tables are copied, so that writes to the originals do not change the version.

    Raises:
        as `import_hugectr`.
    """
    job = _Job(settings, model, directory, keep_rows_of, may_link, progress)
    spec = _write_network(job) if model.graph_file else _write_tables_alone(job)
    spec = quantize_tables(directory, spec, tables, progress)
    describe_version(spec, directory, progress)
    return spec


def _write_network(job: _Job) -> ModelSpec:
    settings, model = job.settings, job.model
    graph = read_graph(Path(model.graph_file))
    if len(graph.tables) != len(model.sparse_files):
        raise ConfigurationError(
            f"{settings.path}: model {model.name!r} has {len(model.sparse_files)} sparse_files, but "
            f"{model.graph_file} has {len(graph.tables)} tables in {len(graph.embeddings)} embedding layers; give one "
            "folder for each table"
        )
    statistics = Path(model.statistics_file) if model.statistics_file else None
    network = build_dense_network(graph, Path(model.dense_file), statistics)
    tables = _write_tables(
        job, [embedding.table for embedding in graph.tables], [embedding.embedding_dim for embedding in graph.tables]
    )
    (job.directory / DENSE_FILE).write_bytes(network.model.SerializeToString())
    return _network_spec(settings, model, graph, network, tables)


def _network_spec(
    settings: PsJson, model: PsModel, graph: Graph, network: DenseNetwork, tables: tuple[TableSpec, ...]
) -> ModelSpec:
    slots = tuple(embedding.slot_num for embedding in graph.embeddings)
    form = RequestFormat(graph.dense_dim, slots, settings.key_type, model.max_batch_size)
    folders = {table.name: table.folder for table in tables}
    labels = label_names({label.name: label.dim for label in network.outputs})
    lookups = [
        LookupSpec(folders[embedding.table], f"{KEYS}/{i}", embedding.name, pooling=embedding.combiner)
        for i, embedding in enumerate(graph.embeddings)
    ]
    return ModelSpec(
        inputs=(
            TensorSpec(DENSE, "float32", (-1,)),
            TensorSpec(KEYS, settings.key_type, (-1,)),
            TensorSpec(OFFSETS, "int32", (-1,)),
        ),
        outputs=tuple(TensorSpec(label.name, "float32", (-1, label.dim)) for label in network.outputs),
        tables=tables,
        lookups=tuple(lookups),
        labels=tuple(name for columns in labels.values() for name in columns),
        label_outputs=tuple(labels),
        joinable=network.joinable,
        layout="hugectr",
        layout_options={**asdict(form), "dense_input": graph.dense_name},
        settings=settings.session_settings(model),
        source=f"HugeCTR {settings.generation} {Path(model.graph_file).name}",
    )


def _write_tables_alone(job: _Job) -> ModelSpec:
    """A model of HPS: its answer is the vectors themselves."""
    settings, model = job.settings, job.model
    names = model.table_names or tuple(f"sparse_embedding{i}" for i in range(len(model.sparse_files)))
    folders = [Path(name) for name in model.sparse_files]
    dims = model.embedding_dims or tuple(_embedding_dim(settings, model, folder) for folder in folders)
    tables = _write_tables(job, names, dims)
    return tables_alone(
        tables, source=f"HPS {settings.generation} {settings.path.name}", settings=settings.session_settings(model)
    )


def _embedding_dim(settings: PsJson, model: PsModel, folder: Path) -> int:
    """The embedding size where ps.json does not give it."""
    if dim := stored_embedding_dim(folder):
        return dim
    raise ConfigurationError(
        f"{settings.path}: model {model.name!r} needs 'embedding_vecsize_per_table', because {folder} has no rows"
    )


def _write_tables(job: _Job, names: Sequence[str], dims: Sequence[int]) -> tuple[TableSpec, ...]:
    model, tables = job.model, []
    earlier = kept_tables(job.keep_rows_of, names, dims)
    places = zip(names, folder_names(list(names)), model.sparse_files, dims, earlier, strict=True)
    for i, (name, folder, source, dim, kept) in enumerate(places):
        num_rows = write_table(
            SparseFolder(Path(source), dim, job.settings.key_type),
            job.directory / TABLES_FOLDER / folder,
            kept,
            may_link=job.may_link,
            progress=job.progress,
        )
        tables.append(TableSpec(name, folder, num_rows, dim, default_vector=model.default_value(i)))
    return tuple(tables)


def _duplicates(version_dir: Path, spec: ModelSpec) -> list[str]:
    """Notes on rows that are never found."""
    return [
        f"table {table.spec.name!r}: {table.num_duplicates} rows are never found, because a later row has the same key"
        for table in VersionDirectory(version_dir, spec).open_tables()
        if table.num_duplicates
    ]


def _unused_fields(settings: PsJson, model: PsModel) -> list[str]:
    """Notes on fields of ps.json that have no effect in this release, and on those that neither HugeCTR nor HPS has."""
    kinds = {"fields of ps.json that hotrow ignores": settings.ignored, "unknown fields of ps.json": settings.unknown}
    found = {kind: settings.concerning(fields, model.name) for kind, fields in kinds.items()}
    return [f"{kind}: {', '.join(fields)}" for kind, fields in found.items() if fields]

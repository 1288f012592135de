"""What the examples share: data as Parquet, the import of a trained model, and requests to a real Triton."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import click
import numpy as np
import tritonclient.grpc as grpc_client
from numpy.typing import NDArray

from demo.hugectr_examples.original_formats import Rows
from hotrow.answer_quality.auc import auc
from hotrow.output.formatting import printable
from hotrow.training import hugectr
from hotrow.training.hugectr import tools
from hotrow.training.hugectr.readers.block import Bags, Block
from inference_session.errors import HotrowError, ModelFormatError
from inference_session.importers.hugectr import import_hugectr
from inference_session.importers.hugectr.ps_fields import PsModel
from inference_session.model_spec import ModelSpec
from triton_backend.launcher.server import ServerOptions, TritonServer
from triton_backend.repository.config_writer import write_model_config

BATCH_SIZE = 256
ITERATIONS = click.option(
    "--iterations", type=click.IntRange(min=1), default=300, show_default=True, help="Batches to train on."
)


class Example(click.Command):
    """A command that ends with the message of an error, as `hotrow` does."""

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except HotrowError as error:
            raise click.ClickException(printable(str(error))) from error


def write_data(rows: Rows, folder: Path) -> None:
    """`train.txt` and `eval.txt`: file lists of Parquet files with `_metadata.json`; the last fifth evaluates."""
    for name, part in zip(("train", "eval"), rows.split(), strict=True):
        own = folder / name
        own.mkdir(parents=True, exist_ok=True)
        path = own / "0.parquet"
        tools.write_parquet(path, part.labels, part.dense, part.slots, rows_per_group=100_000)
        params = tools.DataGeneratorParams(
            hugectr.DataReaderType_t.Parquet, 1, part.dense.shape[1], len(part.slots), True, "", "", part.slot_sizes
        )
        tools.write_metadata(own, {path: len(part.labels)}, params)
        tools.write_file_list(folder / f"{name}.txt", [path])


def train_and_serve(
    build: Callable[[Path], hugectr.Model], rows: Rows, folder: Path, name: str, num_iterations: int
) -> None:
    """Train a model by the high-level API on the files of `write_data`, then `serve_and_score` it."""
    write_data(rows, folder)
    model = build(folder)
    model.compile()
    model.summary()
    model.fit(max_iter=num_iterations, display=50, eval_interval=100, snapshot=0)
    serve_and_score(model, num_iterations, folder, name)


def serve_and_score(model: hugectr.Model, iteration: int, folder: Path, name: str) -> None:
    """Save a model, import and serve it, and compare answers with the trainer's on evaluation data."""
    model.save_params_to_files(str(folder / name), iteration)
    model.graph_to_json(str(folder / "graph.json"))
    repository = folder / "model_repository"
    import_hugectr(_write_ps_json(folder, iteration, name), repository, complete=_configure)
    reader = model.get_data_reader_eval()
    reader.set_source()
    block = reader.next_batch()
    reader.set_source()
    if block is None:
        raise ModelFormatError(f"{folder}: holds no batch of {BATCH_SIZE} evaluation samples")
    model.eval()
    for path in (folder / "predictions", folder / "labels"):
        path.unlink(missing_ok=True)
    model.export_predictions(str(folder / "predictions"), str(folder / "labels"))
    trained = np.loadtxt(folder / "predictions", dtype=np.float32)
    with TritonServer.start(ServerOptions(repository, (name,), http_port=0, grpc_port=0, metrics_port=0)) as server:
        answers = _score(server.endpoints["gRPC"], name, block)
    labels = block.labels[:, 0]
    print("\nlabel  served by Triton  the trainer")
    for label, served, own in list(zip(labels, answers, trained, strict=True))[:8]:
        print(f"{label:5.0f}  {served:16.6f}  {own:11.6f}")
    print(
        f"{len(labels)} samples: AUC {auc(labels, answers):.3f}; "
        f"differences of at most {np.abs(answers - trained).max():.1e}"
    )


def _write_ps_json(folder: Path, iteration: int, name: str) -> Path:
    tables = json.loads((folder / "graph.json").read_text())["layers"]
    count = sum("sparse_embedding_hparam" in layer for layer in tables)
    model = {
        "model": name,
        "network_file": "graph.json",
        "dense_file": f"{name}_dense_{iteration}.model",
        "sparse_files": [f"{name}{i}_sparse_{iteration}.model" for i in range(count)],
        "max_batch_size": BATCH_SIZE,
        "gpucache": False,
        "num_of_worker_buffer_in_pool": 1,
        "num_of_refresher_buffer_in_pool": 1,
        "cache_refresh_percentage_per_iteration": 0.2,
        "deployed_device_list": [0],
        "default_value_for_each_table": [0.0] * count,
    }
    path = folder / "ps.json"
    path.write_text(json.dumps({"supportlonglong": True, "models": [model]}, indent=2), encoding="utf-8")
    return path


def _configure(version_dir: Path, spec: ModelSpec, item: PsModel) -> None:
    write_model_config(version_dir, spec, item.name, max_batch_size=item.max_batch_size)


def _score(url: str, name: str, block: Block) -> NDArray[np.float32]:
    """Probabilities [samples], by HugeCTR's own request."""
    arrays: dict[str, NDArray[Any]] = {
        "DES": block.dense.reshape(1, -1),
        "CATCOLUMN": by_sample(block.bags, len(block)).reshape(1, -1),
        "ROWINDEX": np.concatenate([bags.offsets for bags in block.bags]).reshape(1, -1).astype(np.int32),
    }
    types = {"DES": "FP32", "CATCOLUMN": "INT64", "ROWINDEX": "INT32"}
    tensors = []
    for key, array in arrays.items():
        tensors.append(grpc_client.InferInput(key, array.shape, types[key]))
        tensors[-1].set_data_from_numpy(np.ascontiguousarray(array))
    with closing(grpc_client.InferenceServerClient(url)) as client:
        answer: NDArray[np.float32] = client.infer(name, tensors).as_numpy("OUTPUT0").ravel()
    return answer


def by_sample(tables: tuple[Bags, ...], num_samples: int) -> NDArray[np.int64]:
    """Keys by sample, in a sample by table."""
    ends = [bags.offsets[:: (len(bags.offsets) - 1) // num_samples] for bags in tables]
    parts = [bags.keys[end[i] : end[i + 1]] for i in range(num_samples) for bags, end in zip(tables, ends, strict=True)]
    return np.concatenate(parts)

"""DCN on Criteo's format, by HugeCTR's high-level API.

python -m demo.hugectr_examples.dcn_criteo [--criteo DIR] [--rows N] [--iterations N]
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import click

from demo.hugectr_examples.from_movielens import read_movielens, write_criteo
from demo.hugectr_examples.original_formats import CRITEO_SLOT_SIZE, Rows, read_criteo
from demo.hugectr_examples.serving import BATCH_SIZE, ITERATIONS, Example, train_and_serve
from hotrow.training import hugectr
from hotrow.training.hugectr import DenseLayer, Layer_t


def build(folder: Path) -> hugectr.Model:
    """The sample's network, narrower."""
    solver = hugectr.CreateSolver(
        model_name="dcn", max_eval_batches=20, batchsize_eval=BATCH_SIZE, batchsize=1024, lr=0.003, warmup_steps=30,
        i64_input_key=True,
    )  # fmt: skip
    reader = hugectr.DataReaderParams(
        hugectr.DataReaderType_t.Parquet, [str(folder / "train.txt")], eval_source=str(folder / "eval.txt"),
        check_type=hugectr.Check_t.Non, slot_size_array=[CRITEO_SLOT_SIZE] * 26,
    )  # fmt: skip
    optimizer = hugectr.CreateOptimizer(hugectr.Optimizer_t.Adam, hugectr.Update_t.Local)
    model = hugectr.Model(solver, reader, optimizer)
    model.add(hugectr.Input(1, "click", 13, "dense", [hugectr.DataReaderSparseParam("data", 1, True, 26)]))
    kind = hugectr.Embedding_t.DistributedSlotSparseEmbeddingHash
    model.add(hugectr.SparseEmbedding(kind, 100, 8, "sum", "embedding", "data"))
    model.add(DenseLayer(Layer_t.Reshape, ["embedding"], ["flat"], leading_dim=26 * 8))
    model.add(DenseLayer(Layer_t.Concat, ["flat", "dense"], ["features"]))
    model.add(DenseLayer(Layer_t.MultiCross, ["features"], ["crossed"], num_layers=3))
    model.add(DenseLayer(Layer_t.InnerProduct, ["features"], ["fc1"], num_output=128))
    model.add(DenseLayer(Layer_t.ReLU, ["fc1"], ["relu1"]))
    model.add(DenseLayer(Layer_t.Dropout, ["relu1"], ["dropout1"], dropout_rate=0.3))
    model.add(DenseLayer(Layer_t.Concat, ["dropout1", "crossed"], ["both"]))
    model.add(DenseLayer(Layer_t.InnerProduct, ["both"], ["logit"], num_output=1))
    model.add(DenseLayer(Layer_t.BinaryCrossEntropyLoss, ["logit", "click"], ["loss"]))
    return model


def read(criteo: Path | None, folder: Path, max_rows: int) -> Rows:
    """Criteo's own files, or MovieLens written like them."""
    if criteo is None:
        write_criteo(read_movielens(), folder)
    return read_criteo(criteo or folder, max_rows)


@click.command(cls=Example)
@click.option(
    "--criteo", type=click.Path(exists=True, file_okay=False, path_type=Path), help="Folder of train.txt or day_*."
)
@click.option("--rows", type=click.IntRange(min=1), default=1_000_000, show_default=True, help="Rows to read at most.")
@ITERATIONS
def main(criteo: Path | None, rows: int, iterations: int) -> None:
    """Train DCN, serve it on a real Triton, and score evaluation data; without --criteo on MovieLens."""
    with tempfile.TemporaryDirectory(prefix="hotrow-dcn-") as name:
        folder = Path(name)
        train_and_serve(build, read(criteo, folder, rows), folder, "dcn", iterations)


if __name__ == "__main__":
    main()

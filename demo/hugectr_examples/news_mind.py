"""A news recommender with click histories on MIND's format, by HugeCTR's high-level API.

python -m demo.hugectr_examples.news_mind [--mind DIR] [--rows N] [--iterations N]
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import click

from demo.hugectr_examples.from_movielens import read_movielens, write_mind
from demo.hugectr_examples.original_formats import MAX_CLICKS, NUM_CATEGORIES, NUM_NEWS, NUM_READERS, Rows, read_mind
from demo.hugectr_examples.serving import BATCH_SIZE, ITERATIONS, Example, train_and_serve
from hotrow.training import hugectr
from hotrow.training.hugectr import DataReaderSparseParam, DenseLayer, Layer_t

WIDTH = 16


def build(folder: Path) -> hugectr.Model:
    """A model of the averaged clicks and the item: news and their categories."""
    solver = hugectr.CreateSolver(
        model_name="news", max_eval_batches=20, batchsize_eval=BATCH_SIZE, batchsize=1024, lr=0.003, i64_input_key=True
    )
    reader = hugectr.DataReaderParams(
        hugectr.DataReaderType_t.Parquet, [str(folder / "train.txt")], eval_source=str(folder / "eval.txt"),
        check_type=hugectr.Check_t.Non, slot_size_array=[0, NUM_NEWS, 0, NUM_CATEGORIES, NUM_READERS],
    )  # fmt: skip
    model = hugectr.Model(solver, reader, hugectr.CreateOptimizer(update_type=hugectr.Update_t.Local))
    inputs = [
        DataReaderSparseParam("news", [MAX_CLICKS, 1], False, 2),
        DataReaderSparseParam("categories", [MAX_CLICKS, 1], False, 2),
        DataReaderSparseParam("reader", 1, True, 1),
    ]
    model.add(hugectr.Input(1, "click", 1, "dense", inputs))
    kind = hugectr.Embedding_t.DistributedSlotSparseEmbeddingHash
    for name in ("news", "categories", "reader"):
        model.add(hugectr.SparseEmbedding(kind, 50, WIDTH, "mean", f"{name}_vectors", name))
    for name in ("news", "categories"):
        model.add(DenseLayer(Layer_t.Reshape, [f"{name}_vectors"], [f"{name}_pair"], leading_dim=2 * WIDTH))
        halves = [(0, WIDTH), (WIDTH, 2 * WIDTH)]
        model.add(DenseLayer(Layer_t.Slice, [f"{name}_pair"], [f"{name}_past", f"{name}_item"], ranges=halves))
        pair = [f"{name}_past", f"{name}_item"]
        model.add(DenseLayer(Layer_t.ElementwiseMultiply, pair, [f"{name}_match"]))
    model.add(DenseLayer(Layer_t.Reshape, ["reader_vectors"], ["reader_flat"], leading_dim=WIDTH))
    parts = ["news_pair", "news_match", "categories_pair", "categories_match", "reader_flat", "dense"]
    model.add(DenseLayer(Layer_t.Concat, parts, ["features"]))
    model.add(DenseLayer(Layer_t.InnerProduct, ["features"], ["fc1"], num_output=64))
    model.add(DenseLayer(Layer_t.ReLU, ["fc1"], ["relu1"]))
    model.add(DenseLayer(Layer_t.Dropout, ["relu1"], ["dropout1"], dropout_rate=0.2))
    model.add(DenseLayer(Layer_t.InnerProduct, ["dropout1"], ["logit"], num_output=1))
    model.add(DenseLayer(Layer_t.BinaryCrossEntropyLoss, ["logit", "click"], ["loss"]))
    return model


def read(mind: Path | None, folder: Path, max_rows: int) -> Rows:
    """MIND's own files, or MovieLens written like them."""
    if mind is None:
        write_mind(read_movielens(), folder)
    return read_mind(mind or folder, max_rows)


@click.command(cls=Example)
@click.option(
    "--mind",
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    help="Folder of behaviors.tsv and news.tsv.",
)
@click.option(
    "--rows",
    type=click.IntRange(min=1),
    default=1_000_000,
    show_default=True,
    help="News items shown, to read at most.",
)
@ITERATIONS
def main(mind: Path | None, rows: int, iterations: int) -> None:
    """Train the recommender, serve it on a real Triton, and score evaluation data; without --mind on MovieLens."""
    with tempfile.TemporaryDirectory(prefix="hotrow-news-") as name:
        folder = Path(name)
        train_and_serve(build, read(mind, folder, rows), folder, "news", iterations)


if __name__ == "__main__":
    main()

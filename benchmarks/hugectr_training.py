"""HugeCTR's wdl and dcn, trained by hotrow.training.hugectr and by the same network written directly in PyTorch.

python -m benchmarks.hugectr_training [--batch-size N] [--rounds N] [--steps N] [--threads N]

Both train in turns, some steps each; on a GPU so many that several pieces of the data are read in a round. With one
thread, processor time is measured, so that other work on the machine does not count; with more, and where there is a
GPU, the clock. hotrow reads its batches from files in Norm format meanwhile; PyTorch's are ready in memory, on the GPU
where there is one. A second way in PyTorch reads the same files with NumPy between its steps. Afterwards the stages of
hotrow's training are measured one by one: reading files, sending batches to the device, and steps whose batches are on
the device.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from itertools import cycle, islice
from pathlib import Path

import click
import numpy as np
import torch
from torch import Tensor, nn

from hotrow.training import hugectr
from hotrow.training.hugectr import DenseLayer, Layer_t
from hotrow.training.hugectr.readers.batches import batches
from hotrow.training.hugectr.readers.norm import HEADER

SLOT_SIZE = 4000
EMBEDDING_DIM = 16
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
RECORD = np.dtype(
    [("label", "<f4", (1,)), ("dense", "<f4", 13), ("slots", np.dtype([("count", "<i4"), ("key", "<i8")]), 28)]
)
"""Of the Norm files that `write_data` writes: each slot has one key."""
MIN_RECORDS = 40_000
"""Of each file."""


def write_data(folder: Path, batch_size: int) -> None:
    params = hugectr.DataGeneratorParams(
        hugectr.DataReaderType_t.Norm, 1, 13, 28, True, str(folder / "train.txt"), str(folder / "eval.txt"),
        [SLOT_SIZE] * 28, check_type=hugectr.Check_t.Non, num_files=2, eval_num_files=1,
        num_samples_per_file=max(MIN_RECORDS, batch_size),
    )  # fmt: skip
    hugectr.DataGenerator(params).generate()


def hugectr_model(folder: Path, network: str, batch_size: int, update: hugectr.Update_t) -> hugectr.Model:
    solver = hugectr.CreateSolver(batchsize=batch_size, batchsize_eval=batch_size, i64_input_key=True)
    reader = hugectr.DataReaderParams(
        hugectr.DataReaderType_t.Norm, str(folder / "train.txt"), eval_source=str(folder / "eval.txt"),
        check_type=hugectr.Check_t.Non,
    )  # fmt: skip
    model = hugectr.Model(solver, reader, hugectr.CreateOptimizer(update_type=update))
    inputs = [
        hugectr.DataReaderSparseParam("wide_data", 1, True, 2),
        hugectr.DataReaderSparseParam("deep_data", 1, True, 26),
    ]
    model.add(hugectr.Input(1, "label", 13, "dense", inputs))
    kind = hugectr.Embedding_t.DistributedSlotSparseEmbeddingHash
    model.add(hugectr.SparseEmbedding(kind, 1, 1, "sum", "wide", "wide_data"))
    model.add(hugectr.SparseEmbedding(kind, 1, EMBEDDING_DIM, "sum", "deep", "deep_data"))
    model.add(DenseLayer(Layer_t.Reshape, ["deep"], ["flat"], leading_dim=26 * EMBEDDING_DIM))
    model.add(DenseLayer(Layer_t.Concat, ["flat", "dense"], ["features"]))
    bottom = "features"
    for i in (1, 2):
        model.add(DenseLayer(Layer_t.InnerProduct, [bottom], [f"fc{i}"], num_output=1024))
        model.add(DenseLayer(Layer_t.ReLU, [f"fc{i}"], [f"relu{i}"]))
        model.add(DenseLayer(Layer_t.Dropout, [f"relu{i}"], [f"dropout{i}"], dropout_rate=0.5))
        bottom = f"dropout{i}"
    if network == "dcn":
        model.add(DenseLayer(Layer_t.MultiCross, ["features"], ["crossed"], num_layers=6))
        model.add(DenseLayer(Layer_t.Concat, [bottom, "crossed"], ["both"]))
        bottom = "both"
    model.add(DenseLayer(Layer_t.InnerProduct, [bottom], ["fc3"], num_output=1))
    model.add(DenseLayer(Layer_t.Reshape, ["wide"], ["wide_flat"], leading_dim=2))
    model.add(DenseLayer(Layer_t.ReduceSum, ["wide_flat"], ["wide_sum"], axis=1))
    model.add(DenseLayer(Layer_t.Add, ["fc3", "wide_sum"], ["logit"]))
    model.add(DenseLayer(Layer_t.BinaryCrossEntropyLoss, ["logit", "label"], ["loss"]))
    model.compile()
    model.start_data_reading()
    return model


class Direct(nn.Module):
    """The same network in idiomatic PyTorch; the sizes of the tables are known."""

    def __init__(self, network: str, *, sparse: bool) -> None:
        super().__init__()
        self.wide = nn.Embedding(28 * SLOT_SIZE, 1, sparse=sparse)
        self.deep = nn.Embedding(28 * SLOT_SIZE, EMBEDDING_DIM, sparse=sparse)
        width = 26 * EMBEDDING_DIM + 13
        self.layers = nn.Sequential(
            nn.Linear(width, 1024), nn.ReLU(), nn.Dropout(0.5), nn.Linear(1024, 1024), nn.ReLU(), nn.Dropout(0.5)
        )
        num_crosses = 6 if network == "dcn" else 0
        self.crosses = nn.ModuleList(nn.Linear(width, 1, bias=False) for _ in range(num_crosses))
        self.biases = nn.ParameterList(torch.zeros(width) for _ in range(num_crosses))
        self.last = nn.Linear(1024 + (width if num_crosses else 0), 1)

    def forward(self, dense: Tensor, keys: Tensor) -> Tensor:
        x = torch.cat([self.deep(keys[:, 2:]).flatten(1), dense], dim=1)
        y, crossed = self.layers(x), x
        for cross, bias in zip(self.crosses, self.biases, strict=True):
            crossed = x * cross(crossed) + bias + crossed
        top = self.last(torch.cat([y, crossed], dim=1) if len(self.crosses) else y)
        return top + self.wide(keys[:, :2]).sum(dim=1)


Tensors = tuple[Tensor, ...]


def read_directly(folder: Path, batch_size: int) -> Iterator[Tensors]:
    """Dense features, keys and labels of batches without end, read with NumPy and copied to the device."""
    for name in cycle((folder / "train.txt").read_text(encoding="utf-8").split()[1:]):
        records = np.memmap(name, RECORD, "r", offset=HEADER.itemsize)
        for begin in range(0, len(records) - batch_size + 1, batch_size):
            part = records[begin : begin + batch_size]
            columns = map(np.ascontiguousarray, (part["dense"], part["slots"]["key"], part["label"]))
            yield tuple(torch.from_numpy(column).to(DEVICE, non_blocking=True) for column in columns)


def direct_step(network: str, update: hugectr.Update_t, ready: Iterator[Tensors]) -> Callable[[], None]:
    """A step on the next of the batches."""
    is_sparse = update is hugectr.Update_t.Local
    model = Direct(network, sparse=is_sparse).to(DEVICE)
    tables = [*model.wide.parameters(), *model.deep.parameters()]
    others = [p for p in model.parameters() if not any(p is table for table in tables)]
    optimizers: list[torch.optim.Optimizer] = [torch.optim.Adam(others if is_sparse else model.parameters(), lr=0.001)]
    if is_sparse:
        optimizers.append(torch.optim.SparseAdam(tables, lr=0.001))

    def step() -> None:
        dense, keys, labels = next(ready)
        for optimizer in optimizers:
            optimizer.zero_grad()
        nn.functional.binary_cross_entropy_with_logits(model(dense, keys), labels).backward()
        for optimizer in optimizers:
            optimizer.step()

    return step


def stages(model: hugectr.Model, batch_size: int) -> dict[str, Callable[[], object]]:
    """The parts of training that can run side by side, each on its own; the first two are of a piece of batches."""
    trainer, reader = model.trainer, model.get_data_reader_train()
    staging = trainer.staging
    made = map(staging.pack, batches(reader.source, reader.num_at_once * batch_size, repeats=True))
    read = [next(made) for _ in range(4)]
    blocks, sent = cycle(read), cycle([staging.send(block).part(0, batch_size) for block in read])
    return {
        "reading": lambda: next(made),
        "sending": lambda: staging.take(staging.send(next(blocks))),
        "step": lambda: trainer.train(next(sent), 0.001),
    }


def seconds(step: Callable[[], object], num_steps: int, clock: Callable[[], float]) -> float:
    """Seconds of a step, as the mean over several."""
    _finish()
    began = clock()
    for _ in range(num_steps):
        step()
    _finish()
    return (clock() - began) / num_steps


def _finish() -> None:
    if DEVICE.type == "cuda":
        torch.cuda.synchronize()


@click.command()
@click.option("--batch-size", default=2048, show_default=True)
@click.option("--rounds", default=7, show_default=True)
@click.option(
    "--steps", "num_steps", default=40 if DEVICE.type == "cuda" else 4, show_default=True, help="Of each in a round."
)
@click.option("--threads", default=1, show_default=True)
def main(batch_size: int, rounds: int, num_steps: int, threads: int) -> None:
    """Print samples a second of both, and the ratio, by the median and the best round."""
    torch.set_num_threads(threads)
    clock = time.process_time if threads == 1 and DEVICE.type == "cpu" else time.perf_counter
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_data(folder, batch_size)
        for network in ("wdl", "dcn"):
            for update in (hugectr.Update_t.Local, hugectr.Update_t.Global):
                model = hugectr_model(folder, network, batch_size, update)
                steps: dict[str, Callable[[], object]] = {
                    "hotrow": model.train,
                    "PyTorch": direct_step(network, update, cycle(islice(read_directly(folder, batch_size), 8))),
                    "reading": direct_step(network, update, read_directly(folder, batch_size)),
                }
                measure = partial(seconds, num_steps=num_steps, clock=clock)
                times = compare(steps, rounds, measure)
                model.get_data_reader_train().stop()
                model.get_data_reader_eval().stop()
                ours, theirs, reading = (batch_size / statistics.median(taken) for taken in times.values())
                print(
                    f"{network}, Adam {update.value}, batch {batch_size}, {DEVICE.type}, {threads} threads: hotrow "
                    f"{ours:,.0f} samples/s, PyTorch {theirs:,.0f}; ratio {ours / theirs:.2f} "
                    f"(best {min(times['PyTorch']) / min(times['hotrow']):.2f}); "
                    f"PyTorch that reads the files {reading:,.0f}; ratio {ours / reading:.2f}",
                    flush=True,
                )
                print_stages(model, batch_size, compare(stages(model, batch_size), rounds, measure))


def print_stages(model: hugectr.Model, batch_size: int, times: dict[str, list[float]]) -> None:
    piece = batch_size * model.get_data_reader_train().num_at_once
    speeds = {
        way: (batch_size if way == "step" else piece) / statistics.median(taken)
        for way, taken in times.items()
        if min(taken) > 0
    }
    print("  apart: " + ", ".join(f"{way} {speed:,.0f}" for way, speed in speeds.items()), flush=True)


def compare(
    steps: dict[str, Callable[[], object]], rounds: int, measure: Callable[[Callable[[], object]], float]
) -> dict[str, list[float]]:
    """Seconds of a step in each round, by way."""
    times: dict[str, list[float]] = {way: [] for way in steps}
    for round_number in range(rounds + 1):
        for way, step in steps.items():
            taken = measure(step)
            if round_number:  # the first round warms up
                times[way].append(taken)
    return times


if __name__ == "__main__":
    main()

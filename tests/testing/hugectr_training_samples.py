"""The networks of HugeCTR's sample scripts, by their layers, narrower and on synthetic data."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hotrow.training import hugectr
from hotrow.training.hugectr import DataReaderType_t, DenseLayer, Embedding_t, Layer_t, Model, Optimizer_t, Update_t

Build = Callable[[Model], None]
DISTRIBUTED = Embedding_t.DistributedSlotSparseEmbeddingHash
LOCALIZED = Embedding_t.LocalizedSlotSparseEmbeddingHash
EACH = "each"
"""An embedding collection whose look-ups have a top each."""


@dataclass(frozen=True)
class Sample:
    """One script: its data, its embeddings, its network."""

    reader: DataReaderType_t
    dense_dim: int
    sparse: Sequence[tuple[str, int, bool, int]]
    """Arguments of DataReaderSparseParam."""
    tables: Sequence[tuple[str, str, int, str]]
    """Name, bottom, embedding_vec_size, combiner."""
    network: Build
    slot_sizes: Sequence[int]
    """The number of synthetic keys, by slot."""
    nnz: Sequence[int] = ()
    slot_size_array: Sequence[int] | None = None
    """The sizes given to the reader, if not slot_sizes."""
    labels: Sequence[str] = ("label",)
    loss_weights: Sequence[float] = ()
    optimizer: dict[str, Any] = field(default_factory=dict)
    solver: dict[str, Any] = field(default_factory=dict)
    embedding: Embedding_t = DISTRIBUTED
    check: hugectr.Check_t = hugectr.Check_t.Sum
    collection: str = ""
    """The tables are an embedding collection, whose look-ups have a top each, or this one."""

    @property
    def is_long(self) -> bool:
        return self.reader not in (DataReaderType_t.Raw, DataReaderType_t.RawAsync)


def layer(model: Model, kind: Layer_t, bottoms: str, tops: str, **arguments: Any) -> None:
    model.add(DenseLayer(kind, bottoms.split(), tops.split(), **arguments))


def fully_connected(model: Model, bottom: str, stem: str, widths: Sequence[int], *, dropout: float = 0.0) -> str:
    """InnerProduct and ReLU, and Dropout if requested, for each width; returns the last top."""
    for i, width in enumerate(widths, 1):
        layer(model, Layer_t.InnerProduct, bottom, f"{stem}_fc{i}", num_output=width)
        layer(model, Layer_t.ReLU, f"{stem}_fc{i}", f"{stem}_relu{i}")
        bottom = f"{stem}_relu{i}"
        if dropout:
            layer(model, Layer_t.Dropout, bottom, f"{stem}_dropout{i}", dropout_rate=dropout)
            bottom = f"{stem}_dropout{i}"
    return bottom


def binary(model: Model, bottom: str, label: str = "label") -> None:
    layer(model, Layer_t.BinaryCrossEntropyLoss, f"{bottom} {label}", f"loss_{label}")


def criteo(width: int) -> Build:
    def build(model: Model) -> None:
        layer(model, Layer_t.Reshape, "sparse_embedding1", "reshape1", leading_dim=width)
        top = fully_connected(model, "reshape1", "deep", (40, 40, 40))
        layer(model, Layer_t.InnerProduct, top, "fc4", num_output=1)
        binary(model, "fc4")

    return build


def dcn(model: Model) -> None:
    layer(model, Layer_t.Reshape, "sparse_embedding1", "reshape1", leading_dim=26 * 16)
    layer(model, Layer_t.Concat, "reshape1 dense", "concat1")
    layer(model, Layer_t.MultiCross, "concat1", "multicross1", num_layers=6)
    top = fully_connected(model, "concat1", "deep", (64, 64), dropout=0.5)
    layer(model, Layer_t.Concat, f"{top} multicross1", "concat2")
    layer(model, Layer_t.InnerProduct, "concat2", "fc3", num_output=1)
    binary(model, "fc3")


def deepfm(model: Model) -> None:
    layer(model, Layer_t.Reshape, "sparse_embedding1", "reshape1", leading_dim=11)
    layer(model, Layer_t.Slice, "reshape1", "slice11 slice12", ranges=[(0, 10), (10, 11)])
    layer(model, Layer_t.Reshape, "slice11", "reshape2", leading_dim=260)
    layer(model, Layer_t.Reshape, "slice12", "reshape3", leading_dim=26)
    layer(model, Layer_t.WeightMultiply, "dense", "weight_multiply1", weight_dims=[13, 10])
    layer(model, Layer_t.WeightMultiply, "dense", "weight_multiply2", weight_dims=[13, 1])
    layer(model, Layer_t.Concat, "reshape2 weight_multiply1", "concat1")
    top = fully_connected(model, "concat1", "deep", (40, 40, 40), dropout=0.5)
    layer(model, Layer_t.InnerProduct, top, "fc4", num_output=1)
    layer(model, Layer_t.FmOrder2, "concat1", "fmorder2", out_dim=10)
    layer(model, Layer_t.ReduceSum, "fmorder2", "reducesum1", axis=1)
    layer(model, Layer_t.Concat, "reshape3 weight_multiply2", "concat2")
    layer(model, Layer_t.ReduceSum, "concat2", "reducesum2", axis=1)
    layer(model, Layer_t.Add, "fc4 reducesum1 reducesum2", "add")
    binary(model, "add")


def wdl(wide: int) -> Build:
    def build(model: Model) -> None:
        layer(model, Layer_t.Reshape, "sparse_embedding1", "reshape1", leading_dim=26 * 16)
        layer(model, Layer_t.Reshape, "sparse_embedding2", "reshape2", leading_dim=wide)
        layer(model, Layer_t.ReduceSum, "reshape2", "reshape_wide", axis=1)
        layer(model, Layer_t.Concat, "reshape1 dense", "concat1")
        top = fully_connected(model, "concat1", "deep", (64, 64), dropout=0.5)
        layer(model, Layer_t.InnerProduct, top, "fc3", num_output=1)
        layer(model, Layer_t.Add, "fc3 reshape_wide", "add1")
        binary(model, "add1")

    return build


def ncf(model: Model) -> None:
    layer(model, Layer_t.Reshape, "mlp_embedding", "reshape_embedding", leading_dim=64)
    top = fully_connected(model, "reshape_embedding", "mlp", (64, 64, 32, 16), dropout=0.5)
    layer(model, Layer_t.InnerProduct, top, "mlp_out", num_output=1)
    binary(model, "mlp_out")


def gmf(model: Model) -> None:
    layer(model, Layer_t.Reshape, "gmf_embedding", "reshape_embedding", leading_dim=32)
    layer(model, Layer_t.Slice, "reshape_embedding", "user item", ranges=[(0, 15), (16, 31)])
    layer(model, Layer_t.ElementwiseMultiply, "user item", "multiply1")
    layer(model, Layer_t.InnerProduct, "multiply1", "gmf_out", num_output=1)
    binary(model, "gmf_out")


def neumf(model: Model) -> None:
    layer(model, Layer_t.Reshape, "mixed_embedding", "reshape_embedding", leading_dim=144)
    layer(model, Layer_t.Slice, "reshape_embedding", "mlp_embedding gmf_embedding", ranges=[(0, 127), (128, 143)])
    top = fully_connected(model, "mlp_embedding", "mlp", (64, 64, 32, 16), dropout=0.5)
    layer(model, Layer_t.Slice, "gmf_embedding", "user item", ranges=[(0, 7), (8, 15)])
    layer(model, Layer_t.ElementwiseMultiply, "user item", "gmf_multiply")
    layer(model, Layer_t.Concat, f"gmf_multiply {top}", "concat")
    layer(model, Layer_t.InnerProduct, "concat", "neumf_out", num_output=1)
    binary(model, "neumf_out")


def dlrm(model: Model) -> None:
    bottom = fully_connected(model, "dense", "bottom", (64, 32, 16))
    layer(model, Layer_t.Interaction, f"{bottom} sparse_embedding1", "interaction1")
    top = fully_connected(model, "interaction1", "top", (64, 64, 32, 16))
    layer(model, Layer_t.InnerProduct, top, "fc8", num_output=1)
    binary(model, "fc8")


def dlrm_of_collection(bottoms: str) -> Build:
    """As HugeCTR's samples/ftrl and samples/dlrm; `bottoms`: the look-ups' tops, or their one."""

    def build(model: Model) -> None:
        if " " in bottoms:
            layer(model, Layer_t.Concat, bottoms, "vectors")
        else:
            layer(model, Layer_t.Reshape, bottoms, "vectors", shape=[-1, 10, 16])
        relu = hugectr.Activation_t.Relu
        layer(model, Layer_t.MLP, "dense", "mlp1", num_outputs=[32, 16], act_type=relu)
        layer(model, Layer_t.Interaction, "mlp1 vectors", "interaction1")
        layer(model, Layer_t.MLP, "interaction1", "mlp2", num_outputs=[32], act_type=relu)
        layer(model, Layer_t.InnerProduct, "mlp2", "fc", num_output=1)
        binary(model, "fc")

    return build


def dlrm_dcnv2(model: Model) -> None:
    """As HugeCTR's samples/dlrm/train.py, that of MLPerf."""
    relu, none = hugectr.Activation_t.Relu, hugectr.Activation_t.Non
    layer(model, Layer_t.MLP, "dense", "mlp1", num_outputs=[32, 16], act_type=relu)
    layer(model, Layer_t.Concat, "vectors mlp1", "concat1")
    layer(model, Layer_t.MultiCross, "concat1", "interaction1", projection_dim=8, num_layers=3)
    layer(model, Layer_t.MLP, "interaction1", "mlp2", num_outputs=[32, 16, 1], activations=[relu, relu, none])
    binary(model, "mlp2")


def bst(model: Model) -> None:
    steps = 10
    layer(model, Layer_t.Add, " ".join(["dense"] * steps), "length")  # synthetic dense features are below 1
    layer(model, Layer_t.SequenceMask, "length length", "mask", max_sequence_len_from=steps, max_sequence_len_to=steps)
    layer(model, Layer_t.Concat, "cates goods", "history", axis=2)
    for name in ("query", "key", "value"):
        layer(model, Layer_t.InnerProduct, "history", name, num_output=16)
    layer(model, Layer_t.MultiHeadAttention, "query key value mask", "attended", num_attention_heads=4)
    layer(model, Layer_t.Add, "attended query", "shortcut1")
    layer(model, Layer_t.LayerNorm, "shortcut1", "norm1")
    layer(model, Layer_t.InnerProduct, "norm1", "ffn1", num_output=32)
    layer(model, Layer_t.InnerProduct, "ffn1", "ffn2", num_output=16)
    layer(model, Layer_t.Add, "ffn2 norm1", "shortcut2")
    layer(model, Layer_t.LayerNorm, "shortcut2", "norm2")
    layer(model, Layer_t.ReduceMean, "norm2", "reduced", axis=1)
    layer(model, Layer_t.Reshape, "reduced", "pooled", leading_dim=16)
    for name, width in (("user", 6), ("good", 8), ("cate", 8)):
        layer(model, Layer_t.Reshape, name, f"{name}_flat", leading_dim=width)
    layer(model, Layer_t.Concat, "pooled user_flat good_flat cate_flat", "dnn")
    layer(model, Layer_t.InnerProduct, "dnn", "fc1", num_output=32)
    layer(model, Layer_t.PReLU_Dice, "fc1", "dice1", elu_alpha=0.2, eps=1e-8)
    layer(model, Layer_t.InnerProduct, "dice1", "fc2", num_output=1)
    binary(model, "fc2")


def shared_bottom(model: Model) -> None:
    layer(model, Layer_t.Reshape, "embedding", "reshape_embedding", leading_dim=32)
    top = fully_connected(model, "reshape_embedding", "shared", (64, 64), dropout=0.5)
    layer(model, Layer_t.Slice, top, "sliceA sliceB", ranges=[(0, 31), (32, 63)])
    for side in "AB":
        top = fully_connected(model, f"slice{side}", side, (16,), dropout=0.5)
        layer(model, Layer_t.InnerProduct, top, f"{side}_out", num_output=1)
    for side in "AB":
        binary(model, f"{side}_out", f"label{side}")


def mmoe(model: Model) -> None:
    layer(model, Layer_t.Reshape, "embedding", "reshape_embedding", leading_dim=8 * 16)
    experts = [fully_connected(model, "reshape_embedding", f"expert{i}", (32, 16), dropout=0.5) for i in range(3)]
    for side in "AB":
        layer(model, Layer_t.InnerProduct, "reshape_embedding", f"{side}_gate", num_output=3)
        layer(model, Layer_t.Softmax, f"{side}_gate", f"{side}_softmax")
        parts = [f"{side}_part{i}" for i in range(3)]
        layer(model, Layer_t.Slice, f"{side}_softmax", " ".join(parts), ranges=[(0, 1), (1, 2), (2, 3)])
        for i, part in enumerate(parts):
            layer(model, Layer_t.Scale, part, f"{part}_wide", axis=0, factor=16)
            layer(model, Layer_t.ElementwiseMultiply, f"{part}_wide {experts[i]}", f"{part}_of")
        layer(model, Layer_t.Add, " ".join(f"{part}_of" for part in parts), f"{side}_mixed")
        top = fully_connected(model, f"{side}_mixed", f"{side}_tower", (16,), dropout=0.5)
        layer(model, Layer_t.InnerProduct, top, f"{side}_out", num_output=1)
    for side in "AB":
        binary(model, f"{side}_out", f"label{side}")


def din(*, by_product: bool) -> Build:
    """`by_product`: attention is a product of matrices, as in din_try."""
    steps, width = 10, 12

    def build(model: Model) -> None:
        tables = "sparse_embedding_good sparse_embedding_cate"
        layer(model, Layer_t.FusedReshapeConcat, tables, "history item")
        layer(model, Layer_t.Scale, "item", "item_scaled", axis=1, factor=steps)
        layer(model, Layer_t.Sub, "item_scaled history", "sub_ih")
        layer(model, Layer_t.ElementwiseMultiply, "item_scaled history", "mul_ih")
        layer(model, Layer_t.Concat, "item_scaled history sub_ih mul_ih", "concat_ih")
        layer(model, Layer_t.InnerProduct, "concat_ih", "fc_att2", num_output=20)
        layer(model, Layer_t.InnerProduct, "fc_att2", "fc_att3", num_output=1)
        layer(model, Layer_t.Reshape, "fc_att3", "score", leading_dim=steps)
        layer(model, Layer_t.Softmax, "score", "attention")
        if by_product:
            layer(model, Layer_t.Reshape, "attention", "attention3", leading_dim=steps, time_step=1)
            layer(model, Layer_t.Reshape, "history", "history3", leading_dim=width, time_step=steps)
            layer(model, Layer_t.MatrixMultiply, "attention3 history3", "attended3")
            layer(model, Layer_t.Reshape, "attended3", "attended", leading_dim=width)
        else:
            layer(model, Layer_t.Scale, "attention", "attention_wide", axis=0, factor=width)
            layer(model, Layer_t.Reshape, "history", "history_row", leading_dim=steps * width)
            layer(model, Layer_t.ElementwiseMultiply, "attention_wide history_row", "product")
            layer(model, Layer_t.ReduceSum, "product", "attended", axis=1)
        layer(model, Layer_t.Reshape, "history", "history_steps", leading_dim=width, time_step=steps)
        layer(model, Layer_t.ReduceMean, "history_steps", "history_mean", axis=1)
        layer(model, Layer_t.Reshape, "history_mean", "history_flat", leading_dim=width)
        layer(model, Layer_t.Reshape, "sparse_embedding_user", "user", leading_dim=6)
        layer(model, Layer_t.Concat, "user history_flat attended item", "concat_din")
        top = "concat_din"
        for i, num_output in enumerate((40, 16), 1):
            layer(model, Layer_t.InnerProduct, top, f"fc_din{i}", num_output=num_output)
            layer(model, Layer_t.PReLU_Dice, f"fc_din{i}", f"dice_{i}", elu_alpha=0.2, eps=1e-8)
            top = f"dice_{i}"
        layer(model, Layer_t.InnerProduct, top, "fc3", num_output=1)
        binary(model, "fc3")

    return build


_26 = (60,) * 26
_ONE_TABLE = (("sparse_embedding1", "data1", 16, "sum"),)
_CRITEO: dict[str, Any] = {
    "dense_dim": 13,
    "sparse": (("data1", 2, False, 26),),
    "tables": _ONE_TABLE,
    "slot_sizes": _26,
}
_DEEPFM: dict[str, Any] = {**_CRITEO, "tables": (("sparse_embedding1", "data1", 11, "sum"),), "network": deepfm}
_WDL: dict[str, Any] = {
    "dense_dim": 13,
    "tables": (("sparse_embedding2", "wide_data", 1, "sum"), ("sparse_embedding1", "deep_data", 16, "sum")),
}
_NCF_ADAM = {"beta1": 0.25, "beta2": 0.5, "epsilon": 1e-7}
_DIN: dict[str, Any] = {
    "reader": DataReaderType_t.Parquet,
    "dense_dim": 0,
    "sparse": (("UserID", 1, True, 1), ("GoodID", 1, True, 11), ("CateID", 1, True, 11)),
    "tables": (
        ("sparse_embedding_user", "UserID", 6, "sum"),
        ("sparse_embedding_good", "GoodID", 6, "sum"),
        ("sparse_embedding_cate", "CateID", 6, "sum"),
    ),
    "slot_sizes": (50, *(40,) * 11, *(20,) * 11),
    "slot_size_array": (50, *(0,) * 10, 40, *(0,) * 10, 20),
    "optimizer": {"epsilon": 1e-9},
}
_TASKS: dict[str, Any] = {
    "reader": DataReaderType_t.Parquet,
    "dense_dim": 0,
    "labels": ("labelA", "labelB"),
    "loss_weights": (0.5, 0.5),
    "optimizer": _NCF_ADAM,
    "solver": {"metrics_spec": {hugectr.MetricsType.AverageLoss: 0.0, hugectr.MetricsType.AUC: 1.0}},
}
_PAIRS: dict[str, Any] = {
    "reader": DataReaderType_t.Norm,
    "dense_dim": 1,
    "sparse": (("data", 1, True, 2),),
    "slot_sizes": (40, 60),
    "check": hugectr.Check_t.Non,
    "optimizer": _NCF_ADAM,
    "solver": {
        "metrics_spec": {
            hugectr.MetricsType.HitRate: 0.8,
            hugectr.MetricsType.AverageLoss: 0.0,
            hugectr.MetricsType.AUC: 1.0,
        }
    },
}
_NORM, _RAW, _PARQUET = DataReaderType_t.Norm, DataReaderType_t.Raw, DataReaderType_t.Parquet
_RAW_ASYNC = DataReaderType_t.RawAsync
_10 = range(10)
_COLLECTION: dict[str, Any] = {
    "reader": _PARQUET,
    "dense_dim": 13,
    "sparse": [(f"data{i}", 3 if i % 2 else 1, False, 1) for i in _10],
    "tables": [(f"vector{i}", f"data{i}", 16, "average" if i % 3 else "sum") for i in _10],
    "slot_sizes": (60,) * 10,
    "nnz": (1, 3) * 5,
}
_BST: dict[str, Any] = {
    "reader": DataReaderType_t.Parquet,
    "dense_dim": 1,
    "sparse": (
        ("UserID", 1, True, 1), ("GoodID", 1, True, 10), ("Target_Good", 1, True, 1),
        ("CateID", 1, True, 10), ("Target_Cate", 1, True, 1),
    ),
    "tables": (
        ("user", "UserID", 6, "sum"), ("goods", "GoodID", 8, "sum"), ("good", "Target_Good", 8, "sum"),
        ("cates", "CateID", 8, "sum"), ("cate", "Target_Cate", 8, "sum"),
    ),
    "slot_sizes": (50, *(40,) * 11, *(20,) * 11),
    "optimizer": {"epsilon": 1e-9},
}  # fmt: skip
_ADAGRAD = {"optimizer_type": Optimizer_t.AdaGrad, "update_type": Update_t.Local, "initial_accu_value": 0.0}

SAMPLES: dict[str, Sample] = {
    "bst": Sample(network=bst, **_BST),
    "criteo": Sample(
        _NORM, 0, (("data1", 100, False, 1),), (("sparse_embedding1", "data1", 64, "sum"),), criteo(64), (200,), (39,)
    ),
    "criteo_bin": Sample(reader=_RAW, network=criteo(26 * 16), **_CRITEO),
    "criteo_parquet": Sample(reader=_PARQUET, network=criteo(26 * 16), **_CRITEO),
    "criteo_multi_hot": Sample(
        _PARQUET, 13, (("data1", 3, False, 26),), _ONE_TABLE, criteo(26 * 16), _26, (3, 2) * 13
    ),
    "criteo_multi_slots": Sample(
        _NORM, 0, (("data1", 10, False, 10),), _ONE_TABLE, criteo(160), (60,) * 10, (4,) * 10
    ),
    "dcn": Sample(reader=_NORM, network=dcn, **_CRITEO),
    "dcn_bin": Sample(reader=_RAW, network=dcn, **_CRITEO),
    "dcn_parquet": Sample(reader=_PARQUET, network=dcn, **_CRITEO),
    "dcn_localized_embedding": Sample(reader=_NORM, network=dcn, embedding=LOCALIZED, **_CRITEO),
    "deepfm": Sample(reader=_NORM, **_DEEPFM),
    "deepfm_bin": Sample(reader=_RAW, **_DEEPFM),
    "deepfm_parquet": Sample(reader=_PARQUET, **_DEEPFM),
    "din_parquet": Sample(network=din(by_product=False), **_DIN),
    "din_try": Sample(network=din(by_product=True), **_DIN),
    "dlrm_kaggle_fp32": Sample(
        reader=_RAW, network=dlrm, embedding=LOCALIZED, optimizer=_ADAGRAD, solver={"lr": 0.05}, **_CRITEO
    ),
    "dlrm_ftrl": Sample(
        network=dlrm_of_collection(" ".join(f"vector{i}" for i in _10)), collection=EACH, optimizer=_ADAGRAD,
        solver={"lr": 0.05, "use_embedding_collection": True}, **_COLLECTION,
    ),
    "dlrm_dcnv2": Sample(
        network=dlrm_dcnv2, collection="vectors", optimizer=_ADAGRAD,
        **{**_COLLECTION, "reader": _RAW_ASYNC, "sparse": [(f"data{i}", (1, 3)[i % 2], True, 1) for i in _10]},
    ),
    "dlrm_mlperf": Sample(network=dlrm_of_collection("vectors0"), collection="vectors0", **_COLLECTION),
    "gmf": Sample(tables=(("gmf_embedding", "data", 16, "sum"),), network=gmf, **_PAIRS),
    "mmoe_parquet": Sample(
        sparse=(("data", 1, True, 8),), tables=(("embedding", "data", 16, "sum"),), network=mmoe, slot_sizes=(50,) * 8,
        **_TASKS,
    ),
    "ncf": Sample(tables=(("mlp_embedding", "data", 32, "sum"),), network=ncf, **_PAIRS),
    "neumf": Sample(tables=(("mixed_embedding", "data", 72, "sum"),), network=neumf, **_PAIRS),
    "shared_bottom": Sample(
        sparse=(("data", 1, True, 2),), tables=(("embedding", "data", 16, "sum"),), network=shared_bottom,
        slot_sizes=(50, 50), **_TASKS,
    ),
    "wdl": Sample(
        reader=_NORM, sparse=(("wide_data", 30, True, 1), ("deep_data", 2, False, 26)), network=wdl(1),
        slot_sizes=(200, *_26), nnz=(2, *(1,) * 26), **_WDL,
    ),
    "wdl_bin": Sample(
        reader=_RAW, sparse=(("wide_data", 30, True, 2), ("deep_data", 2, False, 26)), network=wdl(2),
        slot_sizes=(200, 200, *_26), **_WDL,
    ),
    "wdl_parquet": Sample(
        reader=_PARQUET, sparse=(("wide_data", 1, True, 2), ("deep_data", 2, False, 26)), network=wdl(2),
        slot_sizes=(200, 200, *_26), **_WDL,
    ),
}  # fmt: skip


def make_data(sample: Sample, folder: Path) -> None:
    # Of a multi-hot RawAsync file without float features the records are those of Raw.
    form = _RAW if sample.reader is _RAW_ASYNC else sample.reader
    hugectr.DataGenerator(
        hugectr.DataGeneratorParams(
            form, len(sample.labels), sample.dense_dim, len(sample.slot_sizes), sample.is_long,
            str(folder / "train.txt"), str(folder / "eval.txt"), sample.slot_sizes, list(sample.nnz), sample.check,
            num_files=2, eval_num_files=1, num_samples_per_file=1000, num_samples=2000, eval_num_samples=1000,
        )
    ).generate()  # fmt: skip


def make_model(sample: Sample, folder: Path, **solver: Any) -> Model:
    """Built and compiled, to be trained on the data in that folder."""
    settings = {
        "max_eval_batches": 3, "batchsize_eval": 200, "batchsize": 100, "lr": 0.01, "i64_input_key": sample.is_long,
        **sample.solver, **solver,
    }  # fmt: skip
    array = sample.slot_sizes if sample.slot_size_array is None else sample.slot_size_array
    reader = hugectr.DataReaderParams(
        sample.reader, [str(folder / "train.txt")], eval_source=str(folder / "eval.txt"), check_type=sample.check,
        num_samples=2000, eval_num_samples=1000, slot_size_array=array if sample.reader is _PARQUET else [],
        async_param=hugectr.AsyncParam(1, 4, multi_hot_reader=True) if sample.reader is _RAW_ASYNC else None,
    )  # fmt: skip
    optimizer = hugectr.CreateOptimizer(**sample.optimizer)
    model = Model(hugectr.CreateSolver(**settings), reader, optimizer)
    sparse = [hugectr.DataReaderSparseParam(*arguments) for arguments in sample.sparse]
    if len(sample.labels) == 1:
        model.add(hugectr.Input(1, sample.labels[0], sample.dense_dim, "dense", sparse))
    else:
        dims = [1] * len(sample.labels)
        model.add(
            hugectr.Input(
                label_dims=dims, label_names=list(sample.labels), dense_dim=sample.dense_dim, dense_name="dense",
                data_reader_sparse_param_array=sparse,
            )
        )  # fmt: skip
    add_embeddings(model, sample, optimizer)
    sample.network(model)
    if sample.loss_weights:
        model.compile(loss_names=list(sample.labels), loss_weights=list(sample.loss_weights))
    else:
        model.compile()
    return model


def add_embeddings(model: Model, sample: Sample, optimizer: hugectr.OptParamsPy) -> None:
    if not sample.collection:
        for name, bottom, width, combiner in sample.tables:
            model.add(hugectr.SparseEmbedding(sample.embedding, 10, width, combiner, name, bottom, optimizer=optimizer))
        return
    collection = hugectr.EmbeddingCollectionConfig(use_exclusive_keys=True)
    tables = [hugectr.EmbeddingTableConfig(f"of {name}", -1, width) for name, _, width, _ in sample.tables]
    tops, bottoms, _, combiners = map(list, zip(*sample.tables, strict=True))
    if sample.collection == EACH:
        for table, top, bottom, combiner in zip(tables, tops, bottoms, combiners, strict=True):
            collection.embedding_lookup(table_config=table, bottom_name=bottom, top_name=top, combiner=combiner)
    else:
        collection.embedding_lookup(tables, bottoms, sample.collection, combiners)
    collection.shard([[table.name for table in tables]], [("mp", [table.name for table in tables])])
    model.add(collection)


def losses(printed: str) -> list[float]:
    return [float(text) for text in re.findall(r"^Iter: \d+ .*Loss: (\S+)", printed, re.MULTILINE)]


def write_ps_json(folder: Path, sample: Sample, prefix: str, iteration: int, *, max_batch: int) -> Path:
    model = {
        "model": "sample",
        "network_file": str(folder / "graph.json"),
        "dense_file": str(folder / f"{prefix}_dense_{iteration}.model"),
        "sparse_files": [str(folder / f"{prefix}{i}_sparse_{iteration}.model") for i in range(len(sample.tables))],
        "max_batch_size": max_batch,
        "gpucache": False,
        "num_of_worker_buffer_in_pool": 1,
        "num_of_refresher_buffer_in_pool": 1,
        "cache_refresh_percentage_per_iteration": 0.2,
        "deployed_device_list": [0],
        "default_value_for_each_table": [0.0] * len(sample.tables),
    }
    statistics = folder / f"{prefix}_dense_{iteration}.model.ntp.json"
    if statistics.exists():
        model["non_trainable_params_file"] = str(statistics)
    path = folder / "ps.json"
    path.write_text(json.dumps({"supportlonglong": sample.is_long, "models": [model]}))
    return path

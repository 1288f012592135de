"""The arguments of `Model`: HugeCTR's classes, their arguments in the order and with the defaults of 3.4.

The keyword arguments after them are of later releases.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from hotrow.training.checks import check, is_from, is_whole, member, number, whole
from hotrow.training.hugectr.arguments.callbacks import TrainingCallback
from hotrow.training.hugectr.arguments.enums import (
    Activation_t,
    AllReduceAlgo,
    Check_t,
    DataReaderType_t,
    DeviceLayout,
    Embedding_t,
    FcPosition_t,
    GroupLayer_t,
    Initializer_t,
    Layer_t,
    LrPolicy_t,
    MetricsType,
    Optimizer_t,
    Regularizer_t,
    Update_t,
)
from hotrow.training.hugectr.arguments.tuning import AsyncParam
from hotrow.training.hugectr.readers.block import SparseInput
from hotrow.training.hugectr.readers.raw import RawFormat
from inference_session.errors import ConfigurationError, UnsupportedModelError
from inference_session.importers.hugectr.data_source import DataSourceParams
from inference_session.importers.hugectr.graph import LOSS_LAYERS
from inference_session.importers.hugectr.layers import reason_against

_REQUIRED: Any = object()
"""Marks an argument without a default that follows one with a default."""
_SOLVER_INSTEAD = {
    "kafka_brockers": "inference_session.update_stream.Publisher and `hotrow publish` send rows to servers",
}
"""Unsupported arguments of the solver, and what to use in their place."""
_LATER_ARGUMENTS: Mapping[Layer_t, Mapping[str, Any]] = {
    Layer_t.MLP: {"num_outputs": None, "use_bias": True, "activations": None, "biases": None},
    Layer_t.MultiCross: {"projection_dim": None},
    Layer_t.MultiHeadAttention: {"num_attention_heads": 1, "transpose_b": False},
    Layer_t.Reshape: {"shape": ()},
    Layer_t.SequenceMask: {
        "max_sequence_len": None, "max_sequence_len_from": None, "max_sequence_len_to": None,
    },
}  # fmt: skip
"""By layer, the arguments of later releases, and their defaults. What is None is not written to the graph JSON."""


@dataclass
class Solver:
    """How a model is trained; `CreateSolver` of HugeCTR.

    Without effect, as they change no result: enable_tf32_compute, use_algorithm_search, use_cuda_graph,
    async_mlp_wgrad, overlap_*, device_layout, use_holistic_cuda_graph, use_overlapped_pipeline, all_reduce_algo,
    grouped_all_reduce, num_iterations_statistics, is_dlrm; and of later releases: eval_overlap,
    *_iteration_overlap, perf_logging, use_embedding_collection.
    """

    model_name: str = ""
    seed: int = 0
    lr_policy: LrPolicy_t = LrPolicy_t.fixed
    lr: float = 0.001
    warmup_steps: int = 1
    decay_start: int = 0
    decay_steps: int = 1
    decay_power: float = 2.0
    end_lr: float = 0.0
    max_eval_batches: int = 100
    batchsize_eval: int = 2048
    batchsize: int = 2048
    vvgpu: Sequence[Sequence[int]] = field(default_factory=lambda: [[0]])
    repeat_dataset: bool = True
    use_mixed_precision: bool = False
    enable_tf32_compute: bool = False
    scaler: float = 1.0
    metrics_spec: Mapping[MetricsType, float] = field(default_factory=lambda: {MetricsType.AUC: 1.0})
    i64_input_key: bool = False
    use_algorithm_search: bool = True
    use_cuda_graph: bool = True
    async_mlp_wgrad: bool = False
    gen_loss_summary: bool = True
    overlap_lr: bool = False
    overlap_init_wgrad: bool = False
    overlap_ar_a2a: bool = False
    device_layout: DeviceLayout = DeviceLayout.LocalFirst
    use_holistic_cuda_graph: bool = False
    use_overlapped_pipeline: bool = False
    all_reduce_algo: AllReduceAlgo = AllReduceAlgo.NCCL
    grouped_all_reduce: bool = False
    num_iterations_statistics: int = 20
    is_dlrm: bool = False
    kafka_brockers: str = ""
    data_source_params: DataSourceParams | None = field(default=None, kw_only=True)
    drop_incomplete_batch: bool = field(default=True, kw_only=True)
    eval_overlap: bool = field(default=False, kw_only=True)
    train_intra_iteration_overlap: bool = field(default=False, kw_only=True)
    train_inter_iteration_overlap: bool = field(default=False, kw_only=True)
    eval_intra_iteration_overlap: bool = field(default=False, kw_only=True)
    eval_inter_iteration_overlap: bool = field(default=False, kw_only=True)
    perf_logging: bool = field(default=False, kw_only=True)
    use_embedding_collection: bool = field(default=False, kw_only=True)
    training_callbacks: Sequence[TrainingCallback] = field(default=(), kw_only=True)

    def __post_init__(self) -> None:
        for name, lowest in (("batchsize", 1), ("batchsize_eval", 1), ("warmup_steps", 0), ("decay_steps", 0)):
            size = whole(f"CreateSolver: {name}", getattr(self, name), lowest)
            check(size < 2**31, f"CreateSolver: {name}", size, f"whole numbers from {lowest} below 2^31")
        for name in ("lr", "end_lr", "decay_start", "max_eval_batches", "scaler"):
            number(f"CreateSolver: {name}", getattr(self, name))
        number("CreateSolver: decay_power", self.decay_power, 1)
        check(is_whole(self.seed), "CreateSolver: seed", self.seed, "whole numbers")
        self.seed = int(self.seed)
        check(
            not self.use_mixed_precision or self.scaler > 0,
            "CreateSolver: scaler", self.scaler, "numbers above 0 with use_mixed_precision",
        )  # fmt: skip
        check(
            isinstance(self.metrics_spec, Mapping)
            and all(isinstance(kind, MetricsType) and is_from(0, goal) for kind, goal in self.metrics_spec.items()),
            "CreateSolver: metrics_spec", self.metrics_spec, "a dict of MetricsType to its target",
        )  # fmt: skip
        check(
            all(isinstance(callback, TrainingCallback) for callback in self.training_callbacks),
            "CreateSolver: training_callbacks", self.training_callbacks, "a list of TrainingCallback",
        )  # fmt: skip
        check(_are_gpus(self.vvgpu), "CreateSolver: vvgpu", self.vvgpu, "a list of lists of GPUs, [[0]]")
        for name, instead in _SOLVER_INSTEAD.items():
            if getattr(self, name):
                raise UnsupportedModelError(f"CreateSolver: {name} is not supported; {instead}")

    @property
    def num_gpus(self) -> int:
        """GPUs of all nodes."""
        return sum(len(gpus) for gpus in self.vvgpu)


@dataclass
class OptParamsPy:
    """An optimizer; `CreateOptimizer` of HugeCTR. `beta`, `lambda1` and `lambda2` are those of Ftrl."""

    optimizer_type: Optimizer_t = Optimizer_t.Adam
    update_type: Update_t = Update_t.Global
    beta1: float = 0.9
    beta2: float = 0.999
    epsilon: float = 1e-7
    initial_accu_value: float = 0.0
    momentum_factor: float = 0.0
    atomic_update: bool = True
    beta: float = field(default=0.0, kw_only=True)
    lambda1: float = field(default=0.0, kw_only=True)
    lambda2: float = field(default=0.0, kw_only=True)

    def __post_init__(self) -> None:
        self.optimizer_type = member("CreateOptimizer: optimizer_type", self.optimizer_type, Optimizer_t)
        self.update_type = member("CreateOptimizer: update_type", self.update_type, Update_t)
        for name in ("beta1", "beta2"):
            number(f"CreateOptimizer: {name}", getattr(self, name), below=1)
        for name in ("epsilon", "initial_accu_value", "momentum_factor", "beta", "lambda1", "lambda2"):
            number(f"CreateOptimizer: {name}", getattr(self, name))


class DataReaderParams:
    """Where training data is, and how it is read.

    `keyset`, `num_workers`, `cache_eval_data` and `read_file_sequentially` change no result, and of `async_param` only
    `multi_hot_reader` and `is_dense_float` do.
    """

    def __init__(
        self,
        data_reader_type: DataReaderType_t,
        source: str | Sequence[str],
        keyset: str | Sequence[str] = "",
        eval_source: str | Sequence[str] = _REQUIRED,
        check_type: Check_t = _REQUIRED,
        cache_eval_data: int = 0,
        num_samples: int = 0,
        eval_num_samples: int = 0,
        float_label_dense: bool = False,
        num_workers: int = 12,
        slot_size_array: Sequence[int] = (),
        async_param: Any = None,
        *,
        data_source_params: DataSourceParams | None = None,
        read_file_sequentially: bool = False,
    ) -> None:
        if data_reader_type is DataReaderType_t.Parquet and check_type is _REQUIRED:
            check_type = Check_t.Non  # as some of HugeCTR's samples leave it out: Parquet files have no checksums
        _check_given("DataReaderParams", eval_source=eval_source, check_type=check_type)
        self.data_reader_type = member("DataReaderParams: data_reader_type", data_reader_type, DataReaderType_t)
        self.source = listed("DataReaderParams: source", source)
        self.eval_source = next(iter(listed("DataReaderParams: eval_source", eval_source)), "")
        if not self.source or not self.source[0] or not self.eval_source:
            raise ConfigurationError("DataReaderParams: source and eval_source name the data, and are required")
        self.check_type = member("DataReaderParams: check_type", check_type, Check_t)
        self.num_samples = whole("DataReaderParams: num_samples", num_samples, 0)
        self.eval_num_samples = whole("DataReaderParams: eval_num_samples", eval_num_samples, 0)
        self.float_label_dense, self.data_source_params = float_label_dense, data_source_params
        self.num_workers, self.cache_eval_data, self.async_param = num_workers, cache_eval_data, async_param
        self.read_file_sequentially = read_file_sequentially
        self.slot_size_array = _sizes("DataReaderParams: slot_size_array", slot_size_array)

    @property
    def raw_format(self) -> RawFormat:
        """How the records of Raw and RawAsync are written."""
        options, is_async = self.async_param, self.data_reader_type is DataReaderType_t.RawAsync
        if is_async and isinstance(options, AsyncParam) and options.multi_hot_reader:
            return RawFormat(False, options.is_dense_float, is_multi_hot=True)
        return RawFormat(self.float_label_dense, self.float_label_dense)


class DataReaderSparseParam:
    """One sparse input: its name, keys per slot (at most, or exactly), and slots."""

    def __init__(self, top_name: str, nnz_per_slot: int | Sequence[int], is_fixed_length: bool, slot_num: int) -> None:
        check(isinstance(top_name, str), "DataReaderSparseParam: top_name", top_name, "a name")
        owner = f"DataReaderSparseParam {top_name!r}"
        self.slot_num = whole(f"{owner}: slot_num", slot_num)
        counts = list(nnz_per_slot) if isinstance(nnz_per_slot, Iterable) else [nnz_per_slot] * slot_num
        are_counts = all(is_whole(count) and 0 <= count < 2**31 for count in counts)
        allowed = "a whole number from 0 below 2^31, or a list of one for each slot"
        check(are_counts, f"{owner}: nnz_per_slot", nnz_per_slot, allowed)
        if len(counts) != slot_num:
            raise ConfigurationError(f"{owner}: {len(counts)} numbers in nnz_per_slot for {slot_num} slots")
        self.top_name, self.is_fixed_length = top_name, is_fixed_length
        self.nnz_per_slot = [int(count) for count in counts]
        self.keys_are_slots = False
        """As in `SparseInput`; look-ups that put their keys' vectors side by side read it so."""

    def sparse_input(self) -> SparseInput:
        """The fields that readers need."""
        counts = tuple(self.nnz_per_slot)
        return SparseInput(
            self.top_name, self.slot_num, counts, self.is_fixed_length, keys_are_slots=self.keys_are_slots
        )


class Input:
    """The data layer: one label by `label_dim` and `label_name`, or several by `label_dims` and `label_names`."""

    def __init__(self, *values: Any, **named: Any) -> None:
        given = _bound(values, named)
        dims, names = given["label_dims"], given["label_names"]
        each = list(dims) if isinstance(dims, Iterable) else [dims]
        are_dims = all(is_whole(dim) and dim >= 1 for dim in each)
        check(are_dims, "Input: label_dims", dims, "a whole number from 1, or a list of them")
        self.label_dims: list[int] = [int(dim) for dim in each]
        self.label_names = listed("Input: label_names", names)
        weights = given.get("label_weights")
        self.label_weights: list[float] = [1.0] * len(self.label_names) if weights is None else list(weights)
        if not len(self.label_dims) == len(self.label_names) == len(self.label_weights):
            raise ConfigurationError(
                f"Input: {len(self.label_names)} label_names, {len(self.label_dims)} label_dims, "
                f"{len(self.label_weights)} label_weights; one each is required"
            )
        self.dense_dim = whole("Input: dense_dim", given["dense_dim"], 0)
        self.dense_name: str = given["dense_name"]
        check(isinstance(self.dense_name, str), "Input: dense_name", self.dense_name, "a name")
        self.data_reader_sparse_param_array: list[DataReaderSparseParam] = list(given["data_reader_sparse_param_array"])


_INPUT = ("label_dims", "label_names", "dense_dim", "dense_name", "data_reader_sparse_param_array")
_OF_RELEASE_3_0 = frozenset({"check_type", "data_reader_type", "eval_source", "source", "sparse_names"})
_ONE_LABEL = {"label_dim": "label_dims", "label_name": "label_names"}


def _bound(values: Sequence[Any], named: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments of `Input` by name; 4.0 has `label_weights` as its third where six are given by position."""
    if found := sorted(_OF_RELEASE_3_0 & named.keys()):
        raise UnsupportedModelError(
            f"Input: {found} are not supported: they belong to release 3.0. Name the data in DataReaderParams, and "
            "each sparse input in its DataReaderSparseParam"
        )
    order = _INPUT if len(values) < 6 else (*_INPUT[:2], "label_weights", *_INPUT[2:])
    given = dict(zip(order, values, strict=False))
    for name, value in named.items():
        known = _ONE_LABEL.get(name, name)
        if known not in (*_INPUT, "label_weights") or known in given:
            raise TypeError(f"Input has no argument {name!r}, or it is given twice")
        given[known] = value
    if missing := [name for name in _INPUT if name not in given]:
        raise TypeError(f"Input lacks {', '.join(missing)}")
    return given


@dataclass
class SparseEmbedding:
    """An embedding layer. Its table grows with the keys it meets: `workspace_size_per_gpu_in_mb` has no effect."""

    embedding_type: Embedding_t
    workspace_size_per_gpu_in_mb: int = 0
    embedding_vec_size: int = _REQUIRED
    combiner: str = _REQUIRED
    sparse_embedding_name: str = _REQUIRED
    bottom_name: str = _REQUIRED
    slot_size_array: Sequence[int] = ()
    optimizer: OptParamsPy | None = None
    hybrid_embedding_param: Any = None
    table: str = field(default="", kw_only=True)
    """The table of an embedding collection, which several layers may share; empty: the layer has its own."""

    @property
    def table_name(self) -> str:
        """The name by which the model's table is loaded and frozen."""
        return self.table or self.sparse_embedding_name

    def __post_init__(self) -> None:
        names = ("embedding_vec_size", "combiner", "sparse_embedding_name", "bottom_name")
        _check_given("SparseEmbedding", **{name: getattr(self, name) for name in names})
        self.embedding_type = member("SparseEmbedding: embedding_type", self.embedding_type, Embedding_t)
        check(self.combiner in ("sum", "mean"), "SparseEmbedding: combiner", self.combiner, "'sum', 'mean'")
        for name, lowest in (("workspace_size_per_gpu_in_mb", 0), ("embedding_vec_size", 1)):
            whole(f"SparseEmbedding: {name}", getattr(self, name), lowest)
        for name in ("sparse_embedding_name", "bottom_name"):
            check(isinstance(getattr(self, name), str), f"SparseEmbedding: {name}", getattr(self, name), "a name")
        self.slot_size_array = _sizes("SparseEmbedding: slot_size_array", self.slot_size_array)
        is_optimizer = self.optimizer is None or isinstance(self.optimizer, OptParamsPy)
        check(is_optimizer, "SparseEmbedding: optimizer", self.optimizer, "what CreateOptimizer returns")


class DenseLayer:
    """A dense layer or a loss. Which arguments count depends on its type, as in HugeCTR."""

    layer_type: Layer_t

    def __init__(
        self,
        layer_type: Layer_t,
        bottom_names: Sequence[str],
        top_names: Sequence[str],
        factor: float = 1.0,
        eps: float = 0.00001,
        gamma_init_type: Initializer_t = Initializer_t.Default,
        beta_init_type: Initializer_t = Initializer_t.Default,
        dropout_rate: float = 0.5,
        elu_alpha: float = 1.0,
        num_output: int = 1,
        weight_init_type: Initializer_t = Initializer_t.Default,
        bias_init_type: Initializer_t = Initializer_t.Default,
        num_layers: int = 0,
        leading_dim: int = 1,
        time_step: int = 0,
        batchsize: int = 1,
        SeqLength: int = 1,  # noqa: N803  HugeCTR's name
        vector_size: int = 1,
        selected: bool = False,
        selected_slots: Sequence[int] = (),
        ranges: Sequence[tuple[int, int]] = (),
        indices: Sequence[int] = (),
        weight_dims: Sequence[int] = (),
        out_dim: int = 0,
        axis: int = 1,
        target_weight_vec: Sequence[float] = (),
        use_regularizer: bool = False,
        regularizer_type: Regularizer_t = Regularizer_t.L1,
        lambda_: float = 0.0,
        pos_type: FcPosition_t = FcPosition_t.Non,
        act_type: Activation_t = Activation_t.Relu,
        **later: Any,
    ) -> None:
        """`lambda`, which no call in Python can spell as a name, may be given as `**{"lambda": 0.1}`.

        `compute_config` and `dense_layer_switches` of later releases change no result.
        """
        values = {name: value for name, value in locals().items() if name not in ("self", "later", "__class__")}
        values["lambda_"] = later.pop("lambda", lambda_)
        values["layer_type"] = member("DenseLayer: layer_type", layer_type, Layer_t)
        vars(self).update(values)
        kind = self.layer_type.value
        self.bottom_names = listed(f"DenseLayer {kind}: bottom_names", bottom_names)
        self.top_names = listed(f"DenseLayer {kind}: top_names", top_names)
        if kind not in LOSS_LAYERS and (reason := reason_against(kind)):
            raise UnsupportedModelError(f"DenseLayer {kind} (top_names {self.top_names}) is not supported: {reason}")
        self._take_later(later)

    def _take_later(self, later: dict[str, Any]) -> None:
        """Arguments of later releases; what is not supported is refused by name."""
        for name in ("compute_config", "dense_layer_switches"):
            later.pop(name, None)
        own = _LATER_ARGUMENTS.get(self.layer_type, {})
        for name, default in own.items():
            setattr(self, name, later.pop(name, default))
        if later:
            also = f", and {', '.join(own)}" if own else ""
            raise UnsupportedModelError(
                f"DenseLayer {self.layer_type.value} (top_names {self.top_names}): the arguments "
                f"{sorted(later)} are not supported; those of release 3.4 are{also}"
            )


@dataclass
class GroupDenseLayer:
    """A sequence of FusedInnerProduct layers, all but the last with ReLU."""

    group_layer_type: GroupLayer_t
    bottom_name_list: Sequence[str]
    top_name_list: Sequence[str]
    num_outputs: Sequence[int]
    last_act_type: Activation_t = Activation_t.Relu

    def layers(self) -> list[DenseLayer]:
        """Its layers; ConfigurationError if names and outputs differ in number."""
        tops, outputs = listed("GroupDenseLayer: top_name_list", self.top_name_list), list(self.num_outputs)
        if len(tops) != len(outputs) or len(outputs) < 2:
            raise ConfigurationError(
                f"GroupDenseLayer: {len(tops)} names in top_name_list for {len(outputs)} num_outputs; "
                "two or more, one each"
            )
        bottoms = [listed("GroupDenseLayer: bottom_name_list", self.bottom_name_list), *([top] for top in tops[:-1])]
        activations = [Activation_t.Relu] * (len(outputs) - 1) + [self.last_act_type]
        return [
            DenseLayer(Layer_t.FusedInnerProduct, bottom, [top], num_output=width, act_type=activation)
            for bottom, top, width, activation in zip(bottoms, tops, outputs, activations, strict=True)
        ]


def _sizes(name: str, values: Any) -> list[int]:
    are_sizes = isinstance(values, Iterable) and all(is_whole(value) and value >= 0 for value in values)
    check(are_sizes, name, values, "a list of whole numbers from 0")
    return list(map(int, values))


def listed(argument: str, names: Any) -> list[str]:
    """Names, or places, of which one may be given without a list; ConfigurationError names the argument."""
    each = [names] if isinstance(names, str) else list(names) if isinstance(names, Iterable) else [names]
    check(all(isinstance(name, str) for name in each), argument, names, "a name, or a list of names")
    return each


def _are_gpus(value: Any) -> bool:
    """Whether it is a list of lists of numbers, none of them empty."""
    kinds = (list, tuple)
    return (
        isinstance(value, kinds)
        and bool(value)
        and all(isinstance(gpus, kinds) and gpus and all(is_whole(gpu) and gpu >= 0 for gpu in gpus) for gpus in value)
    )


def _check_given(owner: str, **values: Any) -> None:
    missing = [name for name, value in values.items() if value is _REQUIRED]
    if missing:
        raise TypeError(f"{owner} lacks {', '.join(missing)}")

"""HugeCTR's JSON configuration: solver, optimizer and layers in one file, as releases before 3.1 take it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hotrow.training.checks import is_whole, number
from hotrow.training.hugectr import Model
from hotrow.training.hugectr.arguments.enums import Check_t, DataReaderType_t, MetricsType
from hotrow.training.hugectr.arguments.parameters import DataReaderParams, OptParamsPy, Solver, listed
from hotrow.training.hugectr.graph.graph_json import read_optimizer
from inference_session.errors import ConfigurationError, HotrowError
from inference_session.importers.hugectr.json_file import JsonFile, read_json

_WITHOUT_EFFECT = frozenset(
    {"algorithm_search", "all_reduce_algo", "cuda_graph", "device_layout", "enable_tf32_compute", "gen_loss_summary"}
)
_WHOLE_NUMBERS = {
    "batchsize": 1, "batchsize_eval": 1, "display": 0, "eval_batches": 0, "eval_interval": 0, "max_eval_batches": 0,
    "max_eval_samples": 0, "max_iter": 1, "num_epochs": 1, "seed": 0, "snapshot": 0,
}  # fmt: skip
"""Fields of the solver that are whole numbers, and the smallest that is allowed."""
_TEXTS = frozenset(
    {
        "dense_model_file", "dense_opt_states_file", "export_predictions_prefix", "input_key_type", "lr_policy",
        "model_name", "snapshot_prefix",
    }
)  # fmt: skip
_FILES = frozenset({"sparse_model_file", "sparse_opt_states_file"})
_SOLVER = _WHOLE_NUMBERS.keys() | _TEXTS | _FILES | {"auc_threshold", "eval_metrics", "gpu", "mixed_precision"}
_SCHEDULE = ("warmup_steps", "decay_start", "decay_steps", "decay_power", "end_lr")


@dataclass(frozen=True)
class Configuration:
    """A file that was read and checked."""

    file: JsonFile
    solver: Solver
    reader: DataReaderParams
    optimizer: OptParamsPy

    @property
    def settings(self) -> Mapping[str, Any]:
        """The section `solver`."""
        return self.file.document["solver"]

    @property
    def prefix(self) -> str:
        """The prefix of file names."""
        return str(self.settings.get("snapshot_prefix", ""))


def read_configuration(path: Path) -> Configuration:
    """Read a configuration.

    Raises:
        ConfigurationError: names the file, the line, the field and what is allowed.
    """
    file = read_json(path, ConfigurationError)
    for section, kind in (("solver", dict), ("optimizer", dict), ("layers", list)):
        if not isinstance(file.document.get(section), kind):
            file.fail((section,), "a list of layers is required" if kind is list else "an object is required")
    solver = file.document["solver"]
    for name in solver:
        if name not in _SOLVER | _WITHOUT_EFFECT:
            file.fail(("solver", name), f"unknown; allowed: {', '.join(sorted(_SOLVER | _WITHOUT_EFFECT))}")
        if (allowed := _allowed(name, solver[name])) is not None:
            file.fail(("solver", name), f"found {solver[name]!r}; allowed: {allowed}")
    if ("max_iter" in solver) == ("num_epochs" in solver):
        file.fail(("solver",), "one of max_iter and num_epochs is required")
    return Configuration(file, _solver(file, solver), _reader(file), _within(file, "optimizer", _optimizer, file))


def train(configuration: Configuration) -> Model:
    """Train as the file says; in the end write the weights, and the graph as `<snapshot_prefix>_graph.json`.

    Raises:
        as `Model.add_document`, `Model.compile` and `Model.fit`.
    """
    settings = configuration.settings
    model = Model(configuration.solver, configuration.reader, configuration.optimizer)
    model.add_document(configuration.file, dense=True)
    model.compile()
    _load(model, settings)
    model.summary()
    model.is_saved_later = True
    model.fit(
        num_epochs=settings.get("num_epochs", 0),
        max_iter=settings.get("max_iter", 0),
        display=settings.get("display", 200),
        eval_interval=settings.get("eval_interval", 1000),
        snapshot=settings.get("snapshot", 10000),
        snapshot_prefix=configuration.prefix,
        export_predictions_prefix=settings.get("export_predictions_prefix", ""),
    )
    model.save_params_to_files(configuration.prefix, model.num_fitted)
    model.graph_to_json(f"{configuration.prefix}_graph.json")
    return model


def _load(model: Model, settings: Mapping[str, Any]) -> None:
    """Load the files that the solver names, if any."""
    loads: dict[str, Callable[[Any], None]] = {
        "dense_model_file": model.load_dense_weights,
        "sparse_model_file": lambda files: model.load_sparse_weights(listed("sparse_model_file", files)),
        "dense_opt_states_file": model.load_dense_optimizer_states,
        "sparse_opt_states_file": lambda files: model.load_sparse_optimizer_states(
            listed("sparse_opt_states_file", files)
        ),
    }
    for name, load in loads.items():
        if name in settings:
            load(settings[name])


def _allowed(name: str, value: Any) -> str | None:
    """What a field of the solver may be, if it is anything else."""
    if name in _WHOLE_NUMBERS and not (is_whole(value) and value >= _WHOLE_NUMBERS[name]):
        return f"whole numbers from {_WHOLE_NUMBERS[name]}"
    if name in _TEXTS and not isinstance(value, str):
        return "text"
    if name in _FILES and not _are(str, value) and not isinstance(value, str):
        return "text, or a list of it"
    if name == "eval_metrics" and not _are(str, value):
        return 'a list of text, such as ["AUC:0.8"]'
    if name == "gpu" and not (_are(int, value) or (_are(list, value) and all(_are(int, gpus) for gpus in value))):
        return "a list of GPUs, or one for each machine"
    return None


def _are(kind: type, value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(type(item) is kind for item in value)


def _solver(file: JsonFile, settings: Mapping[str, Any]) -> Solver:
    gpus = settings.get("gpu", [0])
    size = settings.get("batchsize", 2048)
    size_eval = settings.get("batchsize_eval", size)
    batches = settings.get("max_eval_batches", settings.get("eval_batches", 100))
    if "max_eval_samples" in settings:
        batches = -(-settings["max_eval_samples"] // size_eval)
    target = settings.get("auc_threshold", 1.0)
    metrics: dict[MetricsType, float] = _within(file, "solver", _metrics, settings.get("eval_metrics", ["AUC"]), target)
    arguments: dict[str, Any] = {
        "model_name": settings.get("model_name", ""),
        "seed": settings.get("seed", 0),
        "max_eval_batches": batches,
        "batchsize": size,
        "batchsize_eval": size_eval,
        "vvgpu": gpus if all(isinstance(item, list) for item in gpus) else [gpus],
        "repeat_dataset": "max_iter" in settings,
        "use_mixed_precision": "mixed_precision" in settings,
        "scaler": settings.get("mixed_precision", 1.0),
        "metrics_spec": metrics,
        "i64_input_key": settings.get("input_key_type", "I32") == "I64",
        **learning_rates(file),
    }
    return _within(file, "solver", Solver, **arguments)


def learning_rates(file: JsonFile) -> dict[str, Any]:
    """The learning rate and its schedule, which stand in the optimizer's own section."""
    optimizer = file.document["optimizer"]
    given: dict[str, Any] = {}
    for name, section in optimizer.items():
        if name.endswith("_hparam") and isinstance(section, dict):
            given.update(section)
    rates = {name: given[name] for name in _SCHEDULE if name in given}
    return {**rates, "lr": given["learning_rate"]} if "learning_rate" in given else rates


def _metrics(names: list[str], auc_target: float) -> dict[MetricsType, float]:
    """By metric its target, which a name may have behind a colon."""
    number("auc_threshold", auc_target)
    found = {}
    for text in names:
        name, _, target = text.partition(":")
        if name not in MetricsType.__members__:
            raise ConfigurationError(
                f"eval_metrics: no metric {name!r}; there are {', '.join(MetricsType.__members__)}"
            )
        found[MetricsType[name]] = float(target) if target else auc_target
    return found


def _optimizer(file: JsonFile) -> OptParamsPy:
    return read_optimizer(file.document["optimizer"])


def _reader(file: JsonFile) -> DataReaderParams:
    data = file.document["layers"][0] if file.document["layers"] else {}
    if not isinstance(data, dict) or data.get("type") != "Data":
        file.fail(("layers", 0), "the first layer must be of type 'Data'")
    kind, check = data.get("format", "Norm"), data.get("check", "None")
    if kind not in DataReaderType_t.__members__:
        file.fail(("layers", 0, "format"), f"found {kind!r}; allowed: Norm, Raw, Parquet")
    if check not in [item.value for item in Check_t]:
        file.fail(("layers", 0, "check"), f"found {check!r}; allowed: Sum, None")
    names = ("num_samples", "eval_num_samples", "float_label_dense", "num_workers", "slot_size_array")
    return _within(
        file, "layers", DataReaderParams, DataReaderType_t[kind], data.get("source", ""),
        eval_source=data.get("eval_source", ""), check_type=Check_t(check), **{n: data[n] for n in names if n in data},
    )  # fmt: skip


def _within(file: JsonFile, section: str, make: Any, *arguments: Any, **named: Any) -> Any:
    """Call, and add to an error the place in the file that it comes from."""
    try:
        return make(*arguments, **named)
    except (HotrowError, TypeError, ValueError) as error:
        file.fail((section,), str(error))

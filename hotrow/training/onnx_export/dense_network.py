"""Traces a model around its look-ups: writes an ONNX file whose tables are files that exist already."""

from __future__ import annotations

import logging
import warnings
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from onnx import GraphProto, ModelProto, NodeProto, TensorProto, helper
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from hotrow.training.onnx_export.cutting import Cut
from hotrow.training.onnx_export.exported_table import ExportedTable
from hotrow.training.onnx_export.inputs import (
    DenseInput,
    JaggedInput,
    Lengths,
    Padded,
    ServedInputs,
    traced,
    weights_of,
    width_of,
)
from hotrow.training.onnx_export.near_constants import optimized
from hotrow.training.tables import Table
from inference_session.errors import ConfigurationError, UnsupportedModelError
from inference_session.importers.onnx.weights import refer_to
from inference_session.onnx_graphs import all_nodes, rename

_DOMAIN = "hotrow.training"
_SIZES_HINT = (
    "give an example in which sizes that are independent, such as the numbers of ids and of bags, differ and are "
    "greater than 1: "
)
_ELEM_TYPES = {"float32": TensorProto.FLOAT, "float16": TensorProto.FLOAT16}


def unwrapped(model: nn.Module) -> nn.Module:
    """The model without what trains it on several devices or compiles it."""
    while True:
        inner = _inside(model)
        if inner is model:
            return model
        model = inner


def _inside(module: nn.Module) -> nn.Module:
    if isinstance(module, nn.DataParallel | DistributedDataParallel):
        return module.module
    if type(module).__name__ == "DistributedModelParallel" or type(module).__name__ == "DMPCollection":
        return module.module
    if type(module).__name__ == "OptimizedModule":
        return module._orig_mod
    return module


def cut_copy(model: nn.Module, cuts: Sequence[Cut]) -> nn.Module:
    """The model in evaluation mode, with stand-ins for its look-ups. Shares all else with the live one.

    The live model itself does not change.
    """
    made: dict[int, nn.Module] = {id(cut.module): cut.stand_in(cut) for cut in cuts}
    return _copied(model, made)


def _copied(module: nn.Module, made: dict[int, nn.Module]) -> nn.Module:
    module = unwrapped(module)
    if id(module) in made:
        return made[id(module)]
    twin = made[id(module)] = object.__new__(type(module))
    twin.__dict__.update(module.__dict__)
    twin.__dict__["training"] = False
    children = OrderedDict(
        (name, None if child is None else _copied(child, made)) for name, child in module._modules.items()
    )
    twin.__dict__["_modules"] = children
    for name, value in module.__dict__.items():
        # A list of modules that forward runs in addition to the registered ones.
        if isinstance(value, list) and value and all(isinstance(item, nn.Module) for item in value):
            twin.__dict__[name] = [_copied(item, made) for item in value]
    return twin


def named_outputs(value: Any) -> list[tuple[str | None, Tensor]]:
    """The tensors in the output of forward, in its order, each with its key or field; None where it has none of its
    own.
    """
    value = waited(value)
    parts = _named_parts(value)
    if not parts:
        return [(None, tensor) for tensor in flat_outputs(value)]
    flat = [(name, flat_outputs(part)) for name, part in parts]
    return [(name if len(tensors) == 1 else None, tensor) for name, tensors in flat for tensor in tensors]


def flat_outputs(value: Any) -> list[Tensor]:
    """The tensors in the output of forward, in its order."""
    value = waited(value)
    if isinstance(value, Tensor):
        return [value]
    parts = [part for _, part in _named_parts(value)] or (value if isinstance(value, (list, tuple)) else [])
    if parts:
        return [tensor for part in parts for tensor in flat_outputs(part)]
    if hasattr(value, "length_per_key") and hasattr(value, "values"):  # a KeyedTensor
        return [value.values()]
    return []


def waited(value: Any) -> Any:
    """What one of TorchRec's awaitables gives, which may be waited for only once."""
    return value.wait() if hasattr(value, "wait") and not isinstance(value, Tensor) else value


def _named_parts(value: Any) -> list[tuple[str, Any]]:
    """The items of a dict, or the fields of a dataclass or a named tuple; none of anything else."""
    if isinstance(value, Mapping):
        return list(value.items())
    names = value._fields if isinstance(value, tuple) and hasattr(value, "_fields") else ()
    return [(name, getattr(value, name)) for name in names or getattr(value, "__dataclass_fields__", ())]


class _TracedNetwork(nn.Module):
    """The traced module: maps tables and served arrays to the chosen outputs."""

    def __init__(self, model: nn.Module, tables: list[Table], inputs: ServedInputs, chosen: Sequence[int]) -> None:
        super().__init__()
        self.model = model
        self._tables, self._inputs, self._chosen = tables, inputs, tuple(chosen)

    def forward(self, tables: list[Tensor], arrays: dict[str, Tensor]) -> tuple[Tensor, ...]:
        for table, tensor in zip(self._tables, tables, strict=True):
            table.placeholder = tensor
        try:
            args, kwargs = self._inputs.arguments(_served(self._inputs, arrays))
            outputs = flat_outputs(self.model(*args, **kwargs))
        finally:
            for table in self._tables:
                table.placeholder = None
        return tuple(outputs[index] for index in self._chosen)


def _served(inputs: ServedInputs, arrays: Mapping[str, Tensor]) -> dict[str, Any]:
    return {
        item.name: arrays[item.name] if isinstance(item, DenseInput) else _jagged(item, arrays)
        for item in inputs.inputs.values()
    }


def _jagged(item: JaggedInput, arrays: Mapping[str, Tensor]) -> Any:
    from hotrow.training.onnx_export.served_features import ServedLists, ServedMatrix

    weights = None if item.weights is None else arrays[weights_of(item.name)]
    if isinstance(item.form, Lengths):
        return ServedLists(arrays[item.name], arrays[width_of(item.name)], weights)
    matrix = arrays[item.name]
    return ServedMatrix(matrix, matrix != item.form.pad, weights)


def trace(
    model: nn.Module,
    cuts: Sequence[Cut],
    inputs: ServedInputs,
    chosen: Sequence[int],
    outputs: Sequence[str],
    files: Sequence[ExportedTable],
) -> ModelProto:
    """The model as ONNX, for any number of samples; its tables are initializers in the files given.

    Args:
        model: unwrapped.
        cuts: its look-ups.
        inputs: of the example.
        chosen: which of forward's outputs are served, and
        outputs: their names.
        files: where the tables are, in the order of the cuts.

    Raises:
        UnsupportedModelError: the network cannot be traced, or cannot be written as ONNX.
        ConfigurationError: an output has the name of a served input.
    """
    network = _TracedNetwork(cut_copy(model, cuts), [file.table for file in files], inputs, chosen)
    tables = [file.table.stand_in(file.num_rows) for file in files]
    arrays, shapes = _example(inputs, files[0].table.device)
    with quiet():
        try:
            program = torch.export.export(
                network, (tables, arrays), dynamic_shapes=([None] * len(tables), shapes), strict=False
            )
        except UnsupportedModelError:
            raise
        except Exception as error:
            hint = _SIZES_HINT if "Constraints violated" in str(error) else ""
            raise UnsupportedModelError(f"torch.export cannot trace the model: {hint}{first_lines(error)}") from error
        written = _written(program, table_names(files), len(arrays), len(outputs))
    return _finished(written, list(arrays), list(outputs), files)


def _written(program: Any, tables: Sequence[str], num_inputs: int, num_outputs: int) -> ModelProto:
    """A traced network as ONNX, its tables under these names."""
    try:
        exported: Any = torch.onnx.export(
            program,
            input_names=[*tables, *(f"hotrow_input_{i}" for i in range(num_inputs))],
            output_names=[f"hotrow_output_{i}" for i in range(num_outputs)],
            dynamo=True,
            external_data=False,
            verbose=False,
            optimize=False,
        )
        return optimized(exported)
    except Exception as error:
        raise UnsupportedModelError(f"the dense network cannot be written as ONNX: {first_lines(error)}") from error


def table_names(files: Sequence[ExportedTable]) -> list[str]:
    """The names of the tables' initializers in a traced network."""
    return [f"hotrow_table_{number}" for number in range(len(files))]


def computes_in(network: ModelProto, kind: int) -> bool:
    """Whether weights of a network are of a type of TensorProto, or values are cast to it."""
    casts = (node for node in network.graph.node if node.op_type == "Cast")
    return any(tensor.data_type == kind for tensor in network.graph.initializer) or any(
        item.i == kind for node in casts for item in node.attribute if item.name == "to"
    )


def first_lines(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {' '.join(lines[:4])}"


@contextmanager
def quiet() -> Iterator[None]:
    """Hides the exporters' deprecation warnings and logs."""
    loggers = [logging.getLogger(name) for name in ("torch.onnx", "torch.export", "onnxscript", "onnx_ir")]
    levels = [logger.level for logger in loggers]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for logger in loggers:
            logger.setLevel(logging.ERROR)
        try:
            yield
        finally:
            for logger, level in zip(loggers, levels, strict=True):
                logger.setLevel(level)


def _example(inputs: ServedInputs, device: torch.device) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The arrays that the trace takes, and which of their dimensions are open."""
    sizes = _Sizes()
    copies = 2 if inputs.num_samples == 1 else 1
    tensors: dict[str, Tensor] = {}
    shapes: dict[str, Any] = {}
    for number, item in enumerate(inputs.inputs.values()):
        for name, given in item.arrays().items():
            counts = isinstance(item, JaggedInput) or given.shape[:1] == (inputs.num_samples,)
            array = traced(given, copies if counts else 1, device)
            tensors[name], shapes[name] = sizes.opened(array, item, name, number, counts=counts)
    return tensors, shapes


class _Sizes:
    """The symbols of the dimensions that are open."""

    def __init__(self) -> None:
        self._batch = torch.export.Dim("batch")

    def opened(
        self, array: Tensor, item: DenseInput | JaggedInput, name: str, number: int, *, counts: bool
    ) -> tuple[Tensor, dict[int, Any] | None]:
        """The array, wide enough for the trace, and its open dimensions."""
        if isinstance(item, DenseInput):
            # Of another first dimension, torch finds out whether it is open: offsets of bags are, a matrix may not be.
            return array, {0: self._batch if counts else torch.export.Dim.AUTO} if array.dim() else None
        if isinstance(item.form, Padded):
            while array.shape[1] < 2:  # a size of 1 would become a constant
                array = torch.cat(
                    [array, torch.full_like(array[:, :1], item.form.pad if name == item.name else 0)], dim=1
                )
            return array, {0: self._batch, 1: torch.export.Dim(f"width_{number}")}
        if name == width_of(item.name):
            return array, {0: self._batch}
        while array.shape[0] < 2:
            array = torch.cat([array, array.new_zeros(2)])
        return array, {0: torch.export.Dim(f"total_{number}")}


# What the exporter wrote, finished


def _finished(model: ModelProto, inputs: list[str], outputs: list[str], files: Sequence[ExportedTable]) -> ModelProto:
    graph = model.graph
    forget_sources(model)
    _replace_pooling(graph)
    given = [value.name for value in graph.input]
    read = {name for node in all_nodes(graph) for name in node.input} | {value.name for value in graph.output}
    values = {value.name: value for value in graph.input}
    del graph.input[:]
    for name, file in zip(given, files, strict=False):
        if name in read:
            graph.initializer.append(external_tensor(name, file))
    graph.input.extend(values[name] for name in given[len(files) :] if name in read)
    served = dict(zip(given[len(files) :], inputs, strict=True))
    if clashes := {served[value.name] for value in graph.input} & set(outputs):
        raise ConfigurationError(f"{min(clashes)!r} is the name of a served input as well; give the output another")
    served.update((value.name, name) for value, name in zip(graph.output, outputs, strict=True))
    _rename(graph, served)
    del model.opset_import[:]
    model.opset_import.extend(_opsets(model))
    return model


def forget_sources(model: ModelProto) -> None:
    """Remove the places in source files that the exporter notes."""
    graph = model.graph
    for item in (model, graph, *graph.node, *graph.value_info, *graph.input, *graph.output, *graph.initializer):
        del item.metadata_props[:]


def _opsets(model: ModelProto) -> list[Any]:
    domains = {node.domain for node in all_nodes(model.graph)} | {
        node.domain for function in model.functions for node in function.node
    }
    return [item for item in model.opset_import if not item.domain or item.domain in domains] or [
        helper.make_opsetid("", 18)
    ]


def external_tensor(name: str, file: ExportedTable) -> TensorProto:
    dims = [file.num_rows, file.table.embedding_dim]
    tensor = TensorProto(name=name, data_type=_ELEM_TYPES[file.table.file_type], dims=dims)
    refer_to(tensor, file.location, file.num_rows * file.table.row_bytes)
    return tensor


def _rename(graph: GraphProto, names: dict[str, str]) -> None:
    """Give inputs and outputs their served names; other values with these names are renamed."""
    taken = set(names.values())
    made = {output for node in all_nodes(graph) for output in node.output}
    made |= {tensor.name for tensor in graph.initializer}
    every = {**{name: f"hotrow_{name}" for name in made & taken - set(names)}, **names}
    rename(graph, lambda name: every.get(name, name))


def _replace_pooling(graph: GraphProto) -> None:
    """Sums over lists become the Loop that the importer takes for the pooling of a look-up."""
    nodes = list(graph.node)
    if not any(node.domain == _DOMAIN for node in nodes):
        return
    del graph.node[:]
    for node in nodes:
        graph.node.extend(_pooling_loop(node) if node.domain == _DOMAIN else [node])


def _pooling_loop(node: NodeProto) -> list[NodeProto]:
    vectors, begins, ends = node.input
    output = node.output[0]
    count, go_on, zero = (f"{output}_{part}" for part in ("count", "go_on", "zero"))
    return [
        helper.make_node("Size", [begins], [count]),
        _constant(go_on, TensorProto.BOOL, [], [True]),
        _constant(zero, TensorProto.INT64, [1], [0]),
        helper.make_node("Loop", [count, go_on], [output], body=_pooling_body(output, vectors, begins, ends, zero)),
    ]


def _pooling_body(stem: str, vectors: str, begins: str, ends: str, zero: str) -> GraphProto:
    number, before, after, begin, end, first, last, rows, pooled = (
        f"{stem}_{part}" for part in ("i", "before", "after", "begin", "end", "first", "last", "rows", "sum")
    )
    nodes = [
        helper.make_node("Identity", [before], [after]),
        helper.make_node("Gather", [begins, number], [begin], axis=0),
        helper.make_node("Gather", [ends, number], [end], axis=0),
        helper.make_node("Unsqueeze", [begin, zero], [first]),
        helper.make_node("Unsqueeze", [end, zero], [last]),
        helper.make_node("Slice", [vectors, first, last, zero], [rows]),
        helper.make_node("ReduceSum", [rows, zero], [pooled], keepdims=0),
    ]
    value = helper.make_tensor_value_info
    inputs = [value(number, TensorProto.INT64, []), value(before, TensorProto.BOOL, [])]
    outputs = [value(after, TensorProto.BOOL, []), value(pooled, TensorProto.FLOAT, None)]
    return helper.make_graph(nodes, f"{stem}_body", inputs, outputs)


def _constant(name: str, kind: int, dims: list[int], values: list[Any]) -> NodeProto:
    return helper.make_node("Constant", [], [name], value=helper.make_tensor(name, kind, dims, values))

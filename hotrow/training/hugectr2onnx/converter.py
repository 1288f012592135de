"""`hugectr2onnx.converter`: a model of HugeCTR as one ONNX file, with its tables or without them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper

from hotrow.training.hugectr.arguments.parameters import DataReaderSparseParam
from hotrow.training.hugectr.graph.graph_json import read_data
from inference_session.errors import ConfigurationError, UnsupportedModelError
from inference_session.importers.hugectr.graph import Embedding, Graph, read_graph
from inference_session.importers.hugectr.onnx_graph import build_dense_network
from inference_session.importers.hugectr.sparse_folder import SparseFolder
from inference_session.platform.small_files import write_whole

_MAX_BYTES = 0x70000000
"""An ONNX file holds at most 2 GiB."""
_BYTES_OF_KEY = 24
"""What a key and its row take in the file, at most."""


def convert(
    onnx_model_path: str,
    graph_config: str,
    dense_model: str,
    convert_embedding: bool = False,
    sparse_models: Sequence[str] | None = None,
    ntp_file: str | None = None,
    graph_name: str = "hugectr",
) -> None:
    """Write an ONNX model whose outputs are the predictions, float32 [samples, columns], under the labels' names.

    Its first input is the dense features, float32 [samples, dense_dim], also where dense_dim is 0. The others are with
    `convert_embedding` the keys of each sparse input, int64 [samples, slot_num, nnz_per_slot], else the vectors of each
    embedding, float32 [samples, slot_num, embedding_vec_size]. Keys that a table does not have give zeros: such a key
    fills slots that have fewer keys. A combiner `mean` divides by nnz_per_slot, as in HugeCTR's converter.

    Args:
        sparse_models: a folder for each embedding, in the order of the graph.
        ntp_file: running statistics of BatchNorm layers.

    Raises:
        ConfigurationError: `sparse_models` does not fit the graph.
        ModelFormatError: a file is missing or damaged, or does not belong to the graph.
        UnsupportedModelError: names the layer; or the tables are too large for an ONNX file.
    """
    graph = read_graph(Path(graph_config))
    network = build_dense_network(graph, Path(dense_model), Path(ntp_file) if ntp_file else None).model
    folders = [Path(folder) for folder in sparse_models or ()]
    if convert_embedding:
        if len(folders) != len(graph.tables):
            raise ConfigurationError(
                f"convert: {len(folders)} sparse_models for the {len(graph.tables)} tables of {graph_config}; "
                "one each, in the order of the graph"
            )
        _add_tables(network, graph, folders)
    elif not graph.dense_dim:
        network.graph.input.insert(0, _dense_input(graph))
    network.graph.name = graph_name
    onnx.checker.check_model(network)
    write_whole(Path(onnx_model_path), network.SerializeToString())
    print(f"[HUGECTR2ONNX][INFO]: The model is saved at {onnx_model_path}")


def _dense_input(graph: Graph) -> onnx.ValueInfoProto:
    return helper.make_tensor_value_info(graph.dense_name, TensorProto.FLOAT, ["samples", graph.dense_dim])


def _add_tables(network: onnx.ModelProto, graph: Graph, folders: Sequence[Path]) -> None:
    """Replace the vectors that the network takes by keys, and the nodes that look them up."""
    inputs = read_data(graph.file.document["layers"][0]).data_reader_sparse_param_array
    bottoms = [graph.file.document["layers"][1 + i]["bottom"] for i in range(len(graph.embeddings))]
    sparse = {item.top_name: item for item in inputs}
    tables = {
        table.table: SparseFolder(folder, table.embedding_dim, "int64")
        for folder, table in zip(folders, graph.tables, strict=True)
    }
    _check_size([tables[embedding.table] for embedding in graph.embeddings])
    nodes = list(network.graph.node)
    del network.graph.input[:], network.graph.node[:]
    network.graph.input.extend([_dense_input(graph), *map(_keys_input, inputs)])
    for embedding, bottom in zip(graph.embeddings, bottoms, strict=True):
        name = bottom if isinstance(bottom, str) else bottom[0]
        _add_table(network.graph, embedding, name, max(sparse[name].nnz_per_slot), tables[embedding.table])
    network.graph.node.extend(nodes)
    network.opset_import.append(helper.make_opsetid("ai.onnx.ml", 2))


def _keys_input(item: DataReaderSparseParam) -> onnx.ValueInfoProto:
    dims: list[str | int | None] = ["samples", item.slot_num, max(item.nnz_per_slot)]
    return helper.make_tensor_value_info(item.top_name, TensorProto.INT64, dims)


def _check_size(tables: Sequence[SparseFolder]) -> None:
    num_bytes = sum(table.num_rows * (4 * table.embedding_dim + _BYTES_OF_KEY) for table in tables)
    if num_bytes > _MAX_BYTES:
        raise UnsupportedModelError(
            f"convert: the tables take about {num_bytes} bytes, an ONNX file at most {_MAX_BYTES}; convert with "
            "convert_embedding=False, or serve the model's own files: hotrow import hugectr"
        )


def _add_table(
    network: onnx.GraphProto, embedding: Embedding, bottom: str, nnz_per_slot: int, table: SparseFolder
) -> None:
    """Add a table and its look-up: the key's row, its vector, and the sum or mean of a slot's vectors."""
    name = embedding.name
    keys, vectors = _rows(table)
    unknown = len(vectors) - 1
    network.initializer.append(numpy_helper.from_array(vectors, f"{name}/vectors"))
    network.initializer.append(numpy_helper.from_array(np.array([-2], np.int64), f"{name}/axis"))
    encoder = {"keys_int64s": keys.tolist(), "values_int64s": [*range(len(keys))], "default_int64": unknown}
    sums = [f"{name}/sums" if embedding.combiner == "mean" else name]
    network.node.extend(
        [
            helper.make_node("LabelEncoder", [bottom], [f"{name}/rows"], domain="ai.onnx.ml", **encoder),
            helper.make_node("Gather", [f"{name}/vectors", f"{name}/rows"], [f"{name}/found"]),
            helper.make_node("ReduceSum", [f"{name}/found", f"{name}/axis"], sums, keepdims=0),
        ]
    )
    if embedding.combiner == "mean":
        network.initializer.append(numpy_helper.from_array(np.float32(nnz_per_slot), f"{name}/keys_of_a_slot"))
        network.node.append(helper.make_node("Div", [*sums, f"{name}/keys_of_a_slot"], [name]))


def _rows(table: SparseFolder) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
    """Keys, each once, and the vectors of their rows, with one of zeros behind them for unknown keys.

    Of rows with the same key the last one counts, as in serving. An empty table has one key, whose vector is zeros.
    """
    keys = np.concatenate([np.empty(0, np.int64), *(keys for keys, _ in table.chunks())])
    vectors = np.concatenate([np.empty((0, table.embedding_dim), np.float32), *(rows for _, rows in table.chunks())])
    distinct, last = np.unique(keys[::-1], return_index=True)
    zeros = np.zeros((1, table.embedding_dim), np.float32)
    if not len(distinct):
        return np.zeros(1, np.int64), np.concatenate([zeros, zeros])
    return distinct, np.concatenate([vectors[len(keys) - 1 - last], zeros])

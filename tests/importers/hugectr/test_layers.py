"""Each dense layer against its formula in float64."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from inference_session.errors import ModelFormatError, UnsupportedModelError
from inference_session.importers.hugectr.graph import read_graph
from inference_session.importers.hugectr.layers import supported_layers
from inference_session.importers.hugectr.onnx_graph import build_dense_network
from tests.testing.hugectr_graphs import GraphMaker, assert_agrees, run

EMBEDDINGS = (("emb", 4, 6), ("emb2", 4, 3))


def maker(seed: int = 1, **settings: Any) -> GraphMaker:
    return GraphMaker(seed, dense_dim=6, embeddings=EMBEDDINGS, **settings)


def _flat(graph: GraphMaker, name: str) -> str:
    """One row per sample."""
    shape = graph.tensors[name].shape
    elements = int(np.prod(shape)) // graph.num_samples
    return graph.add("Reshape", name, leading_dim=elements) if shape != (graph.num_samples, elements) else name


def _lengths(graph: GraphMaker) -> list[str]:
    """Two lengths, some of which are not whole, negative, or more than there are positions."""
    for i, name in enumerate(("from", "to")):
        part = graph.add("Slice", "dense", [f"{name}_part"], ranges=[[i, i + 1]])
        graph.add("Add", [part] * 4, name)
    return ["from", "to"]


def _attention(graph: GraphMaker, **mask: int) -> list[str]:
    """Query of 4 positions, key and value of 6, and a mask if requested, of the two lengths or the last."""
    key, value = (
        graph.add("Reshape", name, leading_dim=4, time_step=6)
        for name in ("emb", graph.add("ELU", "emb", elu_param={"alpha": 1}))
    )
    query = graph.add("InnerProduct", "emb2", fc_param={"num_output": 4})
    lengths = _lengths(graph)[-len(mask) :] if mask else []
    return [query, key, value, *([graph.add("SequenceMask", lengths, **mask)] if mask else [])]


def _weights_and_values(graph: GraphMaker) -> list[str]:
    """Softmax of scores, and the values, each by head."""
    *tensors, mask = _attention(graph, max_sequence_len=6)
    graph.add("MultiHeadAttention", tensors, ["scores", "values"], num_attention_heads=2, transpose_b=True)
    graph.add("Softmax", ["scores", mask], "weights", factor=0.5)
    return ["weights", "values"]


def _attention_in_steps(graph: GraphMaker) -> str:
    """As releases before 23.09 have it: scores, their softmax, and a product."""
    return graph.add("MultiHeadAttention", _weights_and_values(graph), transpose_b=False)


LAYERS: dict[str, tuple[str, Callable[[GraphMaker], str]]] = {
    "add": ("Add", lambda g: g.add("Add", ["dense", "dense", g.add("ReLU", "dense")])),
    "batch_norm": ("BatchNorm", lambda g: g.add("BatchNorm", "dense", bn_param={"factor": 1.0, "eps": 1e-3})),
    "cast": ("Cast", lambda g: g.add("Cast", "dense")),
    "concat_2d": ("Concat", lambda g: g.add("Concat", ["dense", g.add("ReLU", "dense")])),
    "concat_3d_axis_1": ("Concat", lambda g: g.add("Concat", ["emb", g.add("ReLU", "emb")], axis=1)),
    "concat_3d_axis_2": ("Concat", lambda g: g.add("Concat", ["emb", "emb2"], axis=2)),
    "concat_3d_default": ("Concat", lambda g: g.add("Concat", ["emb", "emb2"])),
    "dot_product": ("DotProduct", lambda g: g.add("DotProduct", ["dense", g.add("Sigmoid", "dense")])),
    "dropout": ("Dropout", lambda g: g.add("Dropout", "dense", rate=0.9)),
    "elu": ("ELU", lambda g: g.add("ELU", "dense", elu_param={"alpha": 0.6})),
    "multiply": ("ElementwiseMultiply", lambda g: g.add("ElementwiseMultiply", ["dense"] * 3)),
    "fm_order2": ("FmOrder2", lambda g: g.add("FmOrder2", _flat(g, "emb"), out_dim=6)),
    "fm_order2_one_slot": ("FmOrder2", lambda g: g.add("FmOrder2", "dense", out_dim=6)),
    "mlp": ("MLP", lambda g: g.add("MLP", "dense", mlp_param={"num_outputs": [5, 4, 3]})),
    "mlp_of_different_layers": (
        "MLP",
        lambda g: g.add(
            "MLP",
            ["dense", "emb"],
            mlp_param={"num_outputs": [5, 4], "activations": ["None", "Relu"], "biases": [True, False]},
        ),
    ),
    "mlp_without_biases": (
        "MLP",
        lambda g: g.add("MLP", "dense", mlp_param={"num_outputs": [5], "activation": "None", "use_bias": False}),
    ),
    "fused_inner": ("FusedInnerProduct", lambda g: g.add("FusedInnerProduct", "dense", fc_param={"num_output": 5})),
    "fused_reshape": (
        "FusedReshapeConcat",
        lambda g: g.add(
            "Concat", [_flat(g, g.add("FusedReshapeConcat", ["emb", "emb2"], ["history", "item"])), "item"]
        ),
    ),
    "fused_reshape_general": (
        "FusedReshapeConcatGeneral",
        lambda g: g.add("FusedReshapeConcatGeneral", ["emb", "emb2"]),
    ),
    "inner_product": ("InnerProduct", lambda g: g.add("InnerProduct", "dense", fc_param={"num_output": 7})),
    "inner_product_3d": ("InnerProduct", lambda g: g.add("InnerProduct", "emb", fc_param={"num_output": 2})),
    "interaction": ("Interaction", lambda g: g.add("Interaction", ["dense", "emb"])),
    "matrix_multiply": (
        "MatrixMultiply",
        lambda g: g.add("MatrixMultiply", [g.add("Reshape", "emb", leading_dim=4, time_step=6), "emb2"]),
    ),
    "matrix_multiply_4d": ("MatrixMultiply", lambda g: g.add("MatrixMultiply", _weights_and_values(g))),
    "layer_norm": ("LayerNorm", lambda g: g.add("LayerNorm", "dense", ln_param={"eps": 1e-3})),
    "layer_norm_3d": ("LayerNorm", lambda g: g.add("LayerNorm", "emb", ln_param={"eps": 1e-3})),
    "sequence_mask": (
        "SequenceMask",
        lambda g: g.add("SequenceMask", _lengths(g), max_sequence_len_from=3, max_sequence_len_to=5),
    ),
    "sequence_mask_of_one_length": (
        "SequenceMask",
        lambda g: g.add("SequenceMask", _lengths(g)[:1], max_sequence_len=4),
    ),
    "attention": (
        "MultiHeadAttention",
        lambda g: g.add("MultiHeadAttention", _attention(g), num_attention_heads=2),
    ),
    "attention_masked": (
        "MultiHeadAttention",
        lambda g: g.add(
            "MultiHeadAttention",
            _attention(g, max_sequence_len_from=4, max_sequence_len_to=6),
            num_attention_heads=4,
        ),
    ),
    "attention_in_steps": ("MultiHeadAttention", _attention_in_steps),
    "multi_cross_projected": (
        "MultiCross",
        lambda g: g.add("MultiCross", "dense", mc_param={"num_layers": 2, "projection_dim": 3}),
    ),
    "multi_cross": ("MultiCross", lambda g: g.add("MultiCross", "dense", mc_param={"num_layers": 3})),
    "relu": ("ReLU", lambda g: g.add("ReLU", "emb")),
    "reduce_mean": ("ReduceMean", lambda g: g.add("ReduceMean", "emb", axis=1)),
    "reduce_sum": ("ReduceSum", lambda g: g.add("ReduceSum", "emb", axis=2)),
    "reduce_sum_2d": ("ReduceSum", lambda g: g.add("ReduceSum", "dense")),
    "reshape_rows": ("Reshape", lambda g: g.add("Reshape", "emb", leading_dim=6)),
    "reshape_3d": ("Reshape", lambda g: g.add("Reshape", "emb", leading_dim=3, time_step=8)),
    "reshape_shape": ("Reshape", lambda g: g.add("Reshape", "emb", shape=[-1, 6])),
    "reshape_shape_3d": ("Reshape", lambda g: g.add("Reshape", "emb", shape=[-1, 8, 3])),
    "reshape_selected": ("Reshape", lambda g: g.add("Reshape", "emb", selected=[3, 0, 3])),
    "scale_elements": ("Scale", lambda g: g.add("Scale", "dense", scale_param={"axis": 0, "factor": 3.0})),
    "scale_rows": ("Scale", lambda g: g.add("Scale", "dense", scale_param={"axis": 1, "factor": 3.0})),
    "sigmoid": ("Sigmoid", lambda g: g.add("Sigmoid", "dense")),
    "slice": (
        "Slice",
        lambda g: g.add("Concat", [g.add("Slice", "dense", ["a", "b"], ranges=[[0, 4], [2, 6]]), "b"]),
    ),
    "slice_3d": ("Slice", lambda g: g.add("Slice", "emb", ["part"], ranges=[[1, 5]])),
    "softmax": ("Softmax", lambda g: g.add("Softmax", "dense")),
    "softmax_3d": ("Softmax", lambda g: g.add("Softmax", "emb", factor=1.0)),
    "sub": ("Sub", lambda g: g.add("Sub", ["dense", g.add("Sigmoid", "dense")])),
    "weight_multiply": ("WeightMultiply", lambda g: g.add("WeightMultiply", "dense", weight_dims=[6, 3])),
    "prelu_dice": (
        "PReLU_Dice",
        lambda g: g.add("PReLU_Dice", "dense", prelu_dice_param={"alpha": 0.2, "eps": 1e-8}),
    ),
    "prelu_dice_other_names": (
        "PReLU_Dice",
        lambda g: g.add("PReLU_Dice", "dense", prelu_dice_param={"elu_alpha": 0.2, "epsilon": 1e-8}),
    ),
}


def _predict(graph: GraphMaker, tensor: str) -> None:
    graph.loss(graph.add("InnerProduct", _flat(graph, tensor), fc_param={"num_output": 1}))


@pytest.mark.parametrize("name", LAYERS)
def test_a_layer_computes_its_formula(name: str, tmp_path: Path) -> None:
    """ONNX Runtime computes the layer's formula, whatever the weights are."""
    graph = maker()
    _predict(graph, LAYERS[name][1](graph))

    network = assert_agrees(graph, tmp_path)

    assert network.joinable == (not name.startswith("prelu_dice"))


def test_every_supported_layer_is_tested() -> None:
    """Every layer that is served has a test."""
    assert set(supported_layers()) == {kind for kind, _ in LAYERS.values()}


@pytest.mark.parametrize("name", [name for name in LAYERS if not name.startswith("prelu_dice")])
def test_no_samples_give_no_predictions(name: str, tmp_path: Path) -> None:
    """An empty batch passes through every layer."""
    graph = maker()
    _predict(graph, LAYERS[name][1](graph))

    found = run(graph.network(tmp_path), {key: array[:0] for key, array in graph.inputs.items()})

    assert found["label"].shape == (0, 1)


@pytest.mark.parametrize("name", [name for name in LAYERS if not name.startswith("prelu_dice")])
def test_a_sample_is_answered_alike_alone_and_in_a_batch(name: str, tmp_path: Path) -> None:
    """A layer never mixes rows of different samples, so that requests may be joined."""
    graph = maker()
    _predict(graph, LAYERS[name][1](graph))
    network = graph.network(tmp_path)

    alone = run(network, {key: array[2:3] for key, array in graph.inputs.items()})
    together = run(network, graph.inputs)

    np.testing.assert_allclose(alone["label"], together["label"][2:3], atol=1e-6)


@pytest.mark.parametrize(
    ("loss", "columns"), [("BinaryCrossEntropyLoss", 1), ("MultiCrossEntropyLoss", 3), ("CrossEntropyLoss", 4)]
)
def test_a_loss_becomes_its_activation(loss: str, columns: int, tmp_path: Path) -> None:
    """Serving answers probabilities: a sigmoid per task, or a softmax over classes."""
    graph = maker(labels=[("label", columns)])
    graph.loss(graph.add("InnerProduct", "dense", fc_param={"num_output": columns}), loss)

    network = assert_agrees(graph, tmp_path)

    assert [(label.name, label.dim) for label in network.outputs] == [("label", columns)]


def test_cross_entropy_of_a_class_number_has_one_column_per_class(tmp_path: Path) -> None:
    """A label of one column that numbers the class is predicted as the probabilities of all classes."""
    graph = maker(labels=[("label", 1)])
    graph.loss(graph.add("InnerProduct", "dense", fc_param={"num_output": 2}), "CrossEntropyLoss")

    network = assert_agrees(graph, tmp_path)

    assert [label.dim for label in network.outputs] == [2]


def test_tasks_are_answered_in_the_order_of_the_labels(tmp_path: Path) -> None:
    """Several losses make several outputs; the data layer's order counts, not that of the losses."""
    graph = maker(labels=[("clicked", 1), ("bought", 1)])
    graph.loss(graph.add("InnerProduct", "dense", fc_param={"num_output": 1}), label="bought")
    graph.loss(graph.add("InnerProduct", "dense", fc_param={"num_output": 1}), label="clicked")

    network = assert_agrees(graph, tmp_path)

    assert [label.name for label in network.outputs] == ["clicked", "bought"]


def test_without_a_loss_the_last_tensor_is_the_prediction(tmp_path: Path) -> None:
    """Graphs for inference alone end in their own sigmoid."""
    graph = maker()
    last = graph.add("Sigmoid", graph.add("InnerProduct", "dense", fc_param={"num_output": 1}))
    graph.predictions["label"] = graph.tensors[last]

    assert_agrees(graph, tmp_path)


def test_a_chain_of_fused_layers_ignores_what_only_training_reads(tmp_path: Path) -> None:
    """Head, body and tail pass three further tensors along; the last one may leave its ReLU out."""
    graph = maker()
    fc = {"fc_param": {"num_output": 5}}
    graph.add("FusedInnerProduct", "dense", ["a", "a_mask", "a_drelu", "a_db"], position="Head", **fc)
    graph.add(
        "FusedInnerProduct",
        ["a", "a_mask", "a_drelu", "a_db"],
        ["b", "b_mask", "b_drelu", "b_db"],
        position="Body",
        **fc,
    )
    graph.add(
        "FusedInnerProduct",
        ["b", "b_mask", "b_drelu", "b_db"],
        "c",
        position="Tail",
        activation="None",
        fc_param={"num_output": 1},
    )
    graph.loss("c")

    assert_agrees(graph, tmp_path)


def test_a_second_top_of_an_interaction_is_for_training(tmp_path: Path) -> None:
    """It repeats the first, and goes to a fused layer, which leaves it out."""
    graph = maker()
    crossed = graph.add("Interaction", ["dense", "emb"])
    graph.layers[-1]["top"] = [crossed, f"{crossed}_grad"]
    graph.tensors[f"{crossed}_grad"] = graph.tensors[crossed]
    graph.loss(graph.add("FusedInnerProduct", [crossed, f"{crossed}_grad"], fc_param={"num_output": 1}))
    assert_agrees(graph, tmp_path)

    graph = maker()
    graph.layers.append({"type": "Interaction", "bottom": ["dense", "emb"], "top": ["a", "b", "c"]})
    graph.layers.append({"type": "Sigmoid", "bottom": "a", "top": "end"})
    graph_file, dense_file, _ = graph.write(tmp_path)
    with pytest.raises(ModelFormatError, match="produces one tensor, or two where HugeCTR trains, found 3 names"):
        build_dense_network(read_graph(graph_file), dense_file)


WRONG: list[tuple[str, list[str], dict[str, Any], str]] = [
    ("ReLU", ["dense", "dense"], {}, "needs one tensor, found 2"),
    ("Add", ["dense", "emb"], {}, "needs tensors of one shape"),
    ("Add", ["dense"], {}, "needs two or more tensors, found 1"),
    ("Sub", ["dense"] * 3, {}, "needs two tensors, found 3"),
    ("InnerProduct", ["dense"], {"fc_param": {"num_output": 0}}, "num_output"),
    ("InnerProduct", ["dense"], {"fc_param": {"num_output": "4"}}, "found '4'; allowed: whole numbers"),
    ("InnerProduct", ["dense"], {"fc_param": 5}, "expected an object, found 5"),
    ("MLP", ["emb"], {"mlp_param": {"num_outputs": [3]}}, "2 dimensions, found [samples, 4, 6]"),
    ("MLP", ["dense"], {"mlp_param": {"num_outputs": []}}, "at least one layer is required"),
    ("MLP", ["dense"], {"mlp_param": {"num_outputs": [3, 2], "biases": [True]}}, "found [True]; a list of 2"),
    ("MLP", ["dense"], {"mlp_param": {"num_outputs": [3], "activations": "Relu"}}, "found 'Relu'; a list of 1"),
    ("FmOrder2", ["dense"], {"out_dim": 5}, "not a multiple of 5"),
    ("Reshape", ["dense"], {"selected": [0]}, "3 dimensions, found [samples, 6]"),
    ("Reshape", ["emb"], {"leading_dim": 0, "time_step": 0}, 'add it to the layer, for example "shape": [-1, 26, 128]'),
    ("Reshape", ["emb"], {"selected": [9]}, "slot 9 is beyond the 4 slots"),
    ("Slice", ["dense"], {"ranges": [[3, 3]]}, "range [3, 3]"),
    ("Slice", ["dense"], {"ranges": [[0, 7]]}, "range [0, 7]"),
    ("Slice", ["dense"], {"ranges": [[0, 1], [1, 2]]}, "2 ranges for 1 tops"),
    ("Concat", ["emb", "emb2"], {"axis": 1}, "do not match"),
    ("Concat", ["emb", "emb2"], {"axis": 3}, "found 3; the last axis of the tensors is 2"),
    ("Scale", ["dense"], {"scale_param": {"axis": 2, "factor": 2}}, "allowed: 0, 1"),
    ("Scale", ["dense"], {"scale_param": {"axis": 1, "factor": 16_000_000}}, "elements per sample"),
    ("Reshape", ["emb"], {"selected": [0] * 3_000_000}, "produces 18000000 elements per sample"),
    ("WeightMultiply", ["dense"], {"weight_dims": [5, 2]}, "width 6"),
    ("FusedReshapeConcat", ["emb", "emb2"], {}, "two slots"),
    ("Interaction", ["dense", "emb2"], {}, "have vectors of different sizes"),
    ("MatrixMultiply", ["emb", "emb2"], {}, "cannot be multiplied"),
    ("MatrixMultiply", ["emb", "dense"], {}, "[samples, 4, 6] and [samples, 6] cannot be multiplied"),
    ("ReduceSum", ["dense"], {"axis": 2}, "found 2; the last axis of [samples, 6] is 1"),
    ("ELU", ["dense"], {"elu_param": {"alpha": 1e39}}, "found 1e+39; allowed: numbers from"),
    ("PReLU_Dice", ["dense"], {"prelu_dice_param": {"alpha": 1, "eps": -1}}, "found -1; allowed: numbers from 0"),
    ("Softmax", ["dense", "dense"], {}, "4 dimensions, found [samples, 6]"),
    ("SequenceMask", ["dense"], {"max_sequence_len": 4}, "needs lengths [samples, 1], found [samples, 6]"),
    ("MultiHeadAttention", ["dense"], {}, "needs query, key and value, and a mask, or scores and values, found 1"),
    ("MultiHeadAttention", ["emb", "emb", "emb2"], {}, "do not match as query, key and value"),
    (
        "MultiHeadAttention",
        ["emb"] * 3,
        {"num_attention_heads": 4},
        "the width of [samples, 4, 6] is not a multiple of 4",
    ),
    (
        "MultiHeadAttention",
        ["emb"] * 4,
        {"num_attention_heads": 2},
        "[samples, 4, 6] does not have the shape of a mask of [samples, 2, 4, 4]",
    ),
    ("MultiHeadAttention", ["emb", "emb"], {}, "needs a tensor of 4 dimensions, found [samples, 4, 6]"),
    ("BatchNorm", ["dense"], {"bn_param": {"eps": 1e-5}}, "running mean and variance are missing"),
]


@pytest.mark.parametrize(("kind", "bottoms", "parameters", "expected"), WRONG)
def test_a_layer_that_contradicts_itself_is_an_error_that_names_it(
    kind: str, bottoms: list[str], parameters: dict[str, Any], expected: str, tmp_path: Path
) -> None:
    """The message has the file's line, the layer and what is wrong with it."""
    graph = maker()
    graph.layers.append({"type": kind, "bottom": bottoms, "top": "bad", **parameters})
    graph.layers.append({"type": "Sigmoid", "bottom": "bad", "top": "end"})
    graph_file, dense_file, _ = graph.write(tmp_path)
    # Enough weights for any of them: the shapes are what is wrong.
    dense_file.write_bytes(bytes(4000))

    with pytest.raises(ModelFormatError) as error:
        build_dense_network(read_graph(graph_file), dense_file)

    assert expected in str(error.value)
    assert f"{kind} (top 'bad')" in str(error.value)
    assert str(error.value).startswith(f"{graph_file}:1: ")


def test_an_interaction_of_too_many_slots_is_an_error(tmp_path: Path) -> None:
    """Its pairs are counted before any list of them is made."""
    graph = GraphMaker(1, dense_dim=1, embeddings=[("many", 5000, 1)], num_samples=1)
    graph.layers.append({"type": "Interaction", "bottom": ["dense", "many"], "top": "bad"})
    graph_file, dense_file, _ = graph.write(tmp_path)

    with pytest.raises(ModelFormatError, match="produces 25010001 elements per sample"):
        build_dense_network(read_graph(graph_file), dense_file)


REFUSED: list[tuple[str, list[str], dict[str, Any], str]] = [
    ("GRU", ["dense"], {"gru_param": {"num_output": 4}}, "'GRU'"),
    ("Gather", ["dense"], {"indices": [0, 2]}, "'Gather'"),
    ("ReduceMean", ["dense"], {"axis": 0}, "axis 0"),
    ("Reshape", ["dense"], {"leading_dim": 12}, "samples would be mixed"),
    ("Reshape", ["dense"], {"leading_dim": 4}, "within one sample"),
    ("Reshape", ["emb"], {"shape": [24, -1]}, "allowed for 'shape': [-1, leading_dim] and"),
    ("Reshape", ["emb"], {"shape": [-1, 2, 3, 4]}, "allowed for 'shape': [-1, leading_dim] and"),
    ("Reshape", ["emb"], {"shape": [-1, 7]}, "must divide the 24 of a sample"),
    ("MatrixMultiply", ["dense", "dense"], {}, "product over the samples"),
    ("Softmax", ["dense"], {"factor": 0.5}, "factor"),
    ("MultiHeadAttention", ["emb", "emb"], {"transpose_b": True}, "transpose_b"),
    ("FusedInnerProduct", ["dense"], {"activation": "Tanh", "fc_param": {"num_output": 1}}, "'Tanh'"),
    ("MLP", ["dense"], {"mlp_param": {"num_outputs": [1], "activation": "Tanh"}}, "activation 'Tanh' is not supported"),
    ("MLP", ["dense"], {"mlp_param": {"num_outputs": [1], "use_bias": 1}}, "use_bias 1 is not supported"),
]


@pytest.mark.parametrize(("kind", "bottoms", "parameters", "expected"), REFUSED)
def test_what_cannot_be_served_is_refused_by_name(
    kind: str, bottoms: list[str], parameters: dict[str, Any], expected: str, tmp_path: Path
) -> None:
    """Nothing is approximated: the layer is named, with the reason."""
    graph = maker()
    graph.layers.append({"type": kind, "bottom": bottoms, "top": "bad", **parameters})
    graph_file, dense_file, _ = graph.write(tmp_path)

    with pytest.raises(UnsupportedModelError) as error:
        build_dense_network(read_graph(graph_file), dense_file)

    assert expected in str(error.value)
    assert f"{kind} (top 'bad')" in str(error.value)

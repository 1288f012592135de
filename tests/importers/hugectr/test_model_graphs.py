"""The models that HugeCTR ships as samples, small, with weights made up, against the oracle."""

from __future__ import annotations

from pathlib import Path

from tests.testing.hugectr_graphs import GraphMaker, assert_agrees


def _mlp(graph: GraphMaker, tensor: str, *widths: int, dropout: bool = False) -> str:
    for width in widths:
        tensor = graph.add("ReLU", graph.add("InnerProduct", tensor, fc_param={"num_output": width}))
        if dropout:
            tensor = graph.add("Dropout", tensor, rate=0.5)
    return tensor


def _logit(graph: GraphMaker, tensor: str) -> str:
    return graph.add("InnerProduct", tensor, fc_param={"num_output": 1})


def test_dcn_inference(tmp_path: Path) -> None:
    """dcn_inference.json: an MLP over all slots that ends in its own sigmoid, without a loss."""
    graph = GraphMaker(1, dense_dim=13, embeddings=[("sparse_embedding1", 26, 16)])
    wide = graph.add("Concat", [graph.add("Reshape", "sparse_embedding1", leading_dim=416), "dense"])
    last = graph.add("Sigmoid", _logit(graph, _mlp(graph, wide, 200, 200, 200)))
    graph.predictions["label"] = graph.tensors[last]

    assert_agrees(graph, tmp_path)


def test_dcn(tmp_path: Path) -> None:
    """Cross layers in parallel with an MLP; the input is copied implicitly, as two layers use it."""
    graph = GraphMaker(2, dense_dim=13, embeddings=[("sparse_embedding1", 26, 16)])
    wide = graph.add("Concat", [graph.add("Reshape", "sparse_embedding1", leading_dim=416), "dense"])
    crossed = graph.add("MultiCross", wide, mc_param={"num_layers": 6})
    deep = _mlp(graph, wide, 64, 64, dropout=True)
    graph.loss(_logit(graph, graph.add("Concat", [deep, crossed])))

    assert_agrees(graph, tmp_path)


def test_deepfm(tmp_path: Path) -> None:
    """Reshapes over rows, slices, weighted dense features, second-order pairs, an addition of three."""
    graph = GraphMaker(3, dense_dim=13, embeddings=[("sparse_embedding1", 26, 11)])
    graph.add("Reshape", "sparse_embedding1", "reshape1", leading_dim=11)
    graph.add("Slice", "reshape1", ["slice11", "slice12"], ranges=[[0, 10], [10, 11]])
    graph.add("Reshape", "slice11", "reshape2", leading_dim=260)
    graph.add("Reshape", "slice12", "reshape3", leading_dim=26)
    graph.add("Slice", "dense", ["slice21", "slice22"], ranges=[[0, 13], [0, 13]])
    graph.add("WeightMultiply", "slice21", "weighted1", weight_dims=[13, 10])
    graph.add("WeightMultiply", "slice22", "weighted2", weight_dims=[13, 1])
    graph.add("Concat", ["reshape2", "weighted1"], "concat1")
    graph.add("Slice", "concat1", ["slice31", "slice32"], ranges=[[0, 390], [0, 390]])
    deep = _logit(graph, _mlp(graph, "slice31", 40, 40, 40, dropout=True))
    pairs = graph.add("ReduceSum", graph.add("FmOrder2", "slice32", out_dim=10), axis=1)
    first = graph.add("ReduceSum", graph.add("Concat", ["reshape3", "weighted2"]), axis=1)
    graph.loss(graph.add("Add", [deep, pairs, first]))

    assert_agrees(graph, tmp_path)


def test_wide_and_deep(tmp_path: Path) -> None:
    """Two tables; the wide one's sum is added to the deep network's logit."""
    graph = GraphMaker(4, dense_dim=13, embeddings=[("sparse_embedding2", 1, 1), ("sparse_embedding1", 26, 16)])
    deep = graph.add("Concat", [graph.add("Reshape", "sparse_embedding1", leading_dim=416), "dense"])
    logit = _logit(graph, _mlp(graph, deep, 64, 64, dropout=True))
    graph.loss(graph.add("Add", [logit, graph.add("Reshape", "sparse_embedding2", leading_dim=1)]))

    assert_agrees(graph, tmp_path)


def test_dlrm(tmp_path: Path) -> None:
    """Bottom MLP, interaction of all pairs, top MLP; the same with fused layers."""
    graph = GraphMaker(5, dense_dim=13, embeddings=[("sparse_embedding1", 26, 16)])
    bottom = _mlp(graph, "dense", 32, 16)
    top = graph.add("Interaction", [bottom, "sparse_embedding1"])
    for _ in range(2):
        top = graph.add("FusedInnerProduct", top, fc_param={"num_output": 32})
    graph.loss(_logit(graph, top))

    assert_agrees(graph, tmp_path)


def test_din(tmp_path: Path) -> None:
    """Attention of the item to the user's history, by elements as in the JSON sample; Dice looks at the batch."""
    graph = GraphMaker(6, embeddings=[("user", 1, 18), ("good", 11, 18), ("cate", 11, 18)], num_samples=9)
    graph.add("FusedReshapeConcat", ["good", "cate"], ["history", "item"])
    graph.add("Scale", "item", "scaled", scale_param={"axis": 1, "factor": 10})
    graph.add("Sub", ["scaled", "history"], "difference")
    graph.add("ElementwiseMultiply", ["scaled", "history"], "product")
    attended = graph.add("Concat", ["scaled", "history", "difference", "product"])
    score = _logit(graph, graph.add("InnerProduct", attended, fc_param={"num_output": 40}))
    graph.add("Softmax", graph.add("Reshape", score, leading_dim=10), "attention")
    graph.add("Scale", "attention", "weights", scale_param={"axis": 0, "factor": 36})
    weighted = graph.add("DotProduct", ["weights", graph.add("Reshape", "history", leading_dim=360)])
    steps = graph.add("Reshape", weighted, leading_dim=36, time_step=10)
    summed = graph.add("Reshape", graph.add("ReduceSum", steps, axis=1), leading_dim=36)
    mean = graph.add("ReduceMean", graph.add("Reshape", "history", leading_dim=36, time_step=10), axis=1)
    joined = [graph.add("Reshape", "user", leading_dim=18), graph.add("Reshape", mean, leading_dim=36), summed, "item"]
    deep = graph.add("Concat", joined)
    for width in (200, 80):
        deep = graph.add("InnerProduct", deep, fc_param={"num_output": width})
        deep = graph.add("PReLU_Dice", deep, prelu_dice_param={"alpha": 0.2, "eps": 1e-8})
    graph.loss(_logit(graph, deep))

    network = assert_agrees(graph, tmp_path)

    assert not network.joinable


def test_din_with_a_matrix_product(tmp_path: Path) -> None:
    """The later sample weighs the history by a product of matrices, from a softmax of three dimensions."""
    graph = GraphMaker(7, embeddings=[("good", 11, 18), ("cate", 11, 18)])
    graph.add("FusedReshapeConcat", ["good", "cate"], ["history", "item"])
    score = _logit(graph, "history")
    graph.add("Softmax", graph.add("Reshape", score, leading_dim=10, time_step=1), "attention")
    steps = graph.add("Reshape", "history", leading_dim=36, time_step=10)
    weighted = graph.add("Reshape", graph.add("MatrixMultiply", ["attention", steps]), leading_dim=36)
    graph.loss(_logit(graph, graph.add("Concat", [weighted, "item"])))

    assert_agrees(graph, tmp_path)


def test_mmoe(tmp_path: Path) -> None:
    """Three experts, two gates, two towers, two losses: one column per task."""
    graph = GraphMaker(8, embeddings=[("emb", 32, 16)], labels=[("50k_label", 1), ("married_label", 1)])
    shared = graph.add("Reshape", "emb", leading_dim=512)
    experts = [_mlp(graph, shared, 64, 32, dropout=True) for _ in range(3)]
    for task in ("50k_label", "married_label"):
        gate = graph.add("Softmax", graph.add("InnerProduct", shared, fc_param={"num_output": 3}))
        parts = [f"{task}_gate{i}" for i in range(3)]
        graph.add("Slice", gate, parts, ranges=[[0, 1], [1, 2], [2, 3]])
        weighted = [
            graph.add(
                "ElementwiseMultiply",
                [graph.add("Scale", part, scale_param={"axis": 0, "factor": 32}), expert],
            )
            for part, expert in zip(parts, experts, strict=True)
        ]
        tower = _mlp(graph, graph.add("Add", weighted), 16)
        graph.loss(_logit(graph, tower), label=task)

    network = assert_agrees(graph, tmp_path)

    assert [label.name for label in network.outputs] == ["50k_label", "married_label"]


def test_multi_task_with_batch_norm(tmp_path: Path) -> None:
    """A sigmoid per task from one tensor, over layers normalised by their running statistics."""
    graph = GraphMaker(9, dense_dim=8, embeddings=[("emb", 4, 8)], labels=[("label", 4)])
    wide = graph.add("Concat", [graph.add("Reshape", "emb", leading_dim=32), "dense"])
    for width in (24, 12):
        wide = graph.add("InnerProduct", wide, fc_param={"num_output": width})
        wide = graph.add(
            "ELU", graph.add("BatchNorm", wide, bn_param={"factor": 1.0, "eps": 1e-5}), elu_param={"alpha": 1}
        )
    tasks = graph.add("InnerProduct", wide, fc_param={"num_output": 4})
    graph.loss(tasks, "MultiCrossEntropyLoss")

    assert_agrees(graph, tmp_path)

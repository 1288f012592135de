"""Embedding collections: tables that several look-ups share are one table, in training and in serving."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from hotrow.training import hugectr, hugectr2onnx
from hotrow.training.hugectr import EmbeddingCollectionConfig, EmbeddingTableConfig, Layer_t, Model
from hotrow.training.hugectr.readers.block import Bags, Block
from inference_session import InferenceSession
from inference_session.errors import ConfigurationError, ModelFormatError, UnsupportedModelError
from inference_session.importers.hugectr import import_hugectr
from inference_session.importers.hugectr.graph import read_graph
from tests.testing.hugectr_training_samples import binary, layer
from tests.testing.training_jobs import run_ranks

pytestmark = pytest.mark.training

DIM = 4
SGD = hugectr.CreateOptimizer(hugectr.Optimizer_t.SGD, hugectr.Update_t.Local)
ADAGRAD = hugectr.CreateOptimizer(hugectr.Optimizer_t.AdaGrad, hugectr.Update_t.Local, initial_accu_value=0.1)
LOOK_UPS = (("user", "clicked", "sum"), ("item", "shown", "average"), ("item", "history", "average"))
"""Table, bottom and combiner of each look-up."""


def bare_model(kind: hugectr.DataReaderType_t = hugectr.DataReaderType_t.Raw) -> Model:
    solver = hugectr.CreateSolver(batchsize=4, batchsize_eval=4, lr=0.1, use_embedding_collection=True)
    reader = hugectr.DataReaderParams(kind, "train.bin", eval_source="eval.bin", check_type=hugectr.Check_t.Non)
    return Model(solver, reader, SGD)


def data_layer(*, slots: int = 1) -> hugectr.Input:
    sparse = [hugectr.DataReaderSparseParam(name, 3, False, slots) for name in ("clicked", "shown", "history")]
    return hugectr.Input(1, "label", 2, "dense", sparse)


def collection() -> EmbeddingCollectionConfig:
    tables = {"user": EmbeddingTableConfig("user", 100, DIM), "item": EmbeddingTableConfig("item", -1, DIM, ADAGRAD)}
    made = EmbeddingCollectionConfig()
    made.embedding_lookup([tables[name] for name in lists(0)], lists(1), "all", lists(2))
    made.shard([["user", "item"]], [("dp", ["user"]), ("mp", [("item", 1)])])
    return made


def lists(column: int) -> list[str]:
    return [each[column] for each in LOOK_UPS]


def shared_model() -> Model:
    model = bare_model()
    model.add(data_layer())
    model.add(ebc_config=collection())
    layer(model, Layer_t.Concat, "all dense", "joined")
    layer(model, Layer_t.InnerProduct, "joined", "logit", num_output=1)
    binary(model, "logit")
    model.compile()
    return model


def batch() -> Block:
    """Four samples; `shown` and `history` have keys in common, and one history is empty."""
    random = np.random.default_rng(7)
    offsets = np.array([0, 1, 2, 3, 4]), np.array([0, 2, 3, 4, 6]), np.array([0, 3, 3, 5, 6])
    bags = tuple(Bags(random.integers(0, 5, int(ends[-1])), ends) for ends in offsets)
    return Block(np.array([[1], [0], [1], [1]], np.float32), random.normal(size=(4, 2)).astype(np.float32), bags)


def expected_inputs(tables: dict[str, dict[int, torch.Tensor]], block: Block) -> torch.Tensor:
    """What the network reads, from the rows and a loop."""
    columns = []
    for (table, _, combiner), bags in zip(LOOK_UPS, block.bags, strict=True):
        sums = []
        for begin, end in zip(bags.offsets[:-1], bags.offsets[1:], strict=True):
            vectors = [tables[table][key] for key in bags.keys[begin:end].tolist()]
            total = sum(vectors, torch.zeros(DIM))
            sums.append(total / max(len(vectors), 1) if combiner == "average" else total)
        columns.append(torch.stack(sums))
    return torch.cat([*columns, torch.from_numpy(block.dense)], dim=1)


@pytest.mark.parametrize("is_as_on_gpu", [False, True])
def test_look_ups_of_one_table_learn_its_rows_in_one_step(is_as_on_gpu: bool) -> None:
    model, block = shared_model(), batch()
    for table in model.trainer.tables:
        table.finds_distinct = not is_as_on_gpu
    model.trainer.train(block, 0.0)  # makes the rows
    user, item = model.trainer.tables
    assert (user.name, item.name) == ("user", "item")
    before, states = item.weight.clone(), item.states[0].clone()
    rows = item.weight.clone().requires_grad_()
    tables = {"user": dict(zip(user.keys.tolist(), user.weight, strict=True))}
    tables["item"] = dict(zip(item.keys.tolist(), rows, strict=True))
    weight, bias = (each.detach().clone() for each in model.trainer.weights)
    logits = expected_inputs(tables, block) @ weight + bias
    torch.nn.functional.binary_cross_entropy_with_logits(logits, torch.from_numpy(block.labels)).backward()
    model.trainer.train(block, 0.5)
    assert rows.grad is not None
    accumulated = states + rows.grad**2
    torch.testing.assert_close(item.states[0], accumulated)
    torch.testing.assert_close(item.weight, before - 0.5 * rows.grad / (accumulated.sqrt() + 1e-7))


def test_look_ups_of_release_3_7_have_two_dimensions() -> None:
    """They learn as those of later releases with a Reshape: HugeCTR's own script joins them with dense features."""
    block = batch()
    logits = []
    for is_older in (True, False):
        model = bare_model()
        model.add(data_layer())
        model.add(planned_collection() if is_older else collection())
        layer(model, Layer_t.Concat, "a b c dense" if is_older else "all dense", "joined")
        layer(model, Layer_t.InnerProduct, "joined", "logit", num_output=1)
        binary(model, "logit")
        model.compile()
        for _ in range(3):
            model.trainer.train(block, 0.5)
        logits.append(model.trainer.evaluate(block)[0])
    np.testing.assert_array_equal(*logits)


def planned_collection() -> EmbeddingCollectionConfig:
    user = hugectr.EmbeddingTablePlaceHolder(id_space=0, max_vocabulary_size=100, ev_size=DIM, min_key=0, max_key=100)
    item = hugectr.EmbeddingTablePlaceHolder(1, 100, DIM, 0, 100, opt_params_py=ADAGRAD)
    planner = hugectr.EmbeddingPlanner()
    planner.embedding_lookup(emb_table=user, bottom_name="clicked", top_name="a", combiner="sum")
    planner.embedding_lookup(item, "shown", "b", "average")
    planner.embedding_lookup(item, "history", "c", "average")
    return planner.create_embedding_collection(plan_file="plan.json")


def test_a_shared_table_is_saved_and_served_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    model, block = shared_model(), batch()
    for _ in range(5):
        model.trainer.train(block, 0.5)
    model.save_params_to_files("m", 5)
    model.graph_to_json("graph.json")
    sparse = [f"m{i}_sparse_5.model" for i in range(2)]
    assert sorted(str(path) for path in Path().glob("m*_sparse_5.model") if path.is_dir()) == sparse
    again = bare_model()
    again.construct_from_json("graph.json", include_dense_network=True)
    again.compile()
    again.load_sparse_weights({"user": sparse[0], "item": sparse[1]})
    again.load_dense_weights("m_dense_5.model")
    expected, _ = again.trainer.evaluate(block)
    again.graph_to_json("again.json")
    assert json.loads(Path("again.json").read_text()) == json.loads(Path("graph.json").read_text())
    write_ps_json(tmp_path, sparse)
    (report,) = import_hugectr(tmp_path / "ps.json", tmp_path / "repository")
    assert [table.name for table in report.spec.tables] == ["user", "item"]
    by_sample = [b.keys[b.offsets[i] : b.offsets[i + 1]] for i in range(4) for b in block.bags]
    inputs = {
        "DES": block.dense.ravel(),
        "CATCOLUMN": np.concatenate(by_sample).astype(np.uint32),
        "ROWINDEX": np.concatenate([bags.offsets for bags in block.bags]).astype(np.int32),
    }
    with InferenceSession.open(report.version_dir) as session:
        np.testing.assert_allclose(session.predict(inputs), expected, atol=1e-6)
    hugectr2onnx.converter.convert("m.onnx", "graph.json", "m_dense_5.model", True, sparse)


def _learn(rank: int, folder: str, prefix: str, num_ranks: int) -> None:
    os.chdir(folder)
    os.environ.update({"WORLD_SIZE": str(num_ranks), "RANK": str(rank)})
    learn(prefix)


def learn(prefix: str) -> None:
    """Train some steps, save, and keep the answers."""
    model, block = shared_model(), batch()
    for _ in range(5):
        model.trainer.train(block, 0.5)
    predictions, _ = model.trainer.evaluate(block)
    model.save_params_to_files(prefix, 5)
    if os.environ.get("RANK", "0") == "0":
        np.save(f"{prefix}_predictions.npy", predictions)


def test_several_processes_learn_a_collection_as_one_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each keeps the rows of its keys, of a table that two look-ups share too."""
    monkeypatch.chdir(tmp_path)
    learn("one")
    run_ranks(_learn, str(tmp_path), "several", 2, num_ranks=2)
    found = [np.load(f"{prefix}_predictions.npy") for prefix in ("several", "one")]
    np.testing.assert_allclose(found[0], found[1], atol=1e-6, rtol=0)
    for i, num_states in enumerate((0, 1)):
        (keys, *values), (expected_keys, *expected) = (saved(f"{prefix}{i}") for prefix in ("several", "one"))
        assert keys == expected_keys
        assert len(values[1]) == num_states
        for array, other in zip(values, expected, strict=True):
            np.testing.assert_allclose(array, other, atol=1e-6, rtol=0)


def saved(table: str) -> tuple[list[int], NDArray[np.float32], NDArray[np.float32]]:
    """Keys, ascending, and their vectors, [keys, DIM], and states, [states, keys, DIM]."""
    keys = np.fromfile(f"{table}_sparse_5.model/key", np.int64)
    order, shape = np.argsort(keys), (-1, len(keys), DIM)
    vectors, states = (
        np.fromfile(path, np.float32).reshape(shape)[:, order]
        for path in (f"{table}_sparse_5.model/emb_vector", f"{table}_opt_sparse_5.model")
    )
    return keys[order].tolist(), vectors[0], states


def test_a_planner_of_earlier_releases_makes_the_same_collection(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    planner, made = hugectr.EmbeddingPlanner(), EmbeddingCollectionConfig()
    for number, (_, bottom, combiner) in enumerate(LOOK_UPS):
        now = EmbeddingTableConfig(str(number), 100, DIM, ADAGRAD)
        then = EmbeddingTableConfig(
            table_id=number, max_vocabulary_size=100, ev_size=DIM, min_key=0, max_key=9, opt_params_py=ADAGRAD
        )
        planner.embedding_lookup(table_config=then, bottom_name=bottom, top_name=f"top{number}", combiner=combiner)
        made.embedding_lookup(now, bottom, f"top{number}", combiner)
    documents = []
    for one in (planner.create_embedding_collection("plan.json"), made):
        model = bare_model()
        model.add(data_layer())
        model.add(one)
        model.graph_to_json("graph.json")
        documents.append(json.loads(Path("graph.json").read_text()))
    assert documents[0] == documents[1]


def test_concat_of_release_3_7_has_two_dimensions() -> None:
    """The vectors of all keys of a sample are one row."""
    model, planner = bare_model(), hugectr.EmbeddingPlanner()
    model.add(data_layer())
    user = hugectr.EmbeddingTablePlaceHolder(0, 100, DIM, 0, 100)
    planner.embedding_lookup(user, "clicked", "vectors", "concat")
    model.add(planner.create_embedding_collection("plan.json"))
    layer(model, Layer_t.Concat, "vectors dense", "joined")
    layer(model, Layer_t.InnerProduct, "joined", "logit", num_output=1)
    binary(model, "logit")
    model.compile()
    assert model.trainer.network.translated.tensors["vectors"].dims == (3 * DIM,)


def side_by_side_model(*, are_apart: bool) -> Model:
    """Three keys of `clicked` side by side; or each in an input of its own."""
    model, made = bare_model(hugectr.DataReaderType_t.Norm), EmbeddingCollectionConfig()
    bottoms = ["first", "second", "third"] if are_apart else ["clicked"]
    counts = [1, 1, 1] if are_apart else [3]
    sparse = [hugectr.DataReaderSparseParam(name, n, False, 1) for name, n in zip(bottoms, counts, strict=True)]
    model.add(hugectr.Input(1, "label", 2, "dense", sparse))
    tables, combiners = [USER] * len(bottoms), ["concat"] * len(bottoms)
    if are_apart:
        made.embedding_lookup(tables, bottoms, "all", combiners)
    else:
        made.embedding_lookup(USER, "clicked", "vectors", "concat")
    model.add(made)
    if not are_apart:
        layer(model, Layer_t.Reshape, "vectors", "all", leading_dim=3 * DIM)
    layer(model, Layer_t.Concat, "all dense", "joined")
    layer(model, Layer_t.InnerProduct, "joined", "logit", num_output=1)
    binary(model, "logit")
    model.compile()
    return model


def test_concat_puts_the_vectors_of_all_keys_side_by_side(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the order of the keys; it learns as look-ups of one key each do, and is served so."""
    monkeypatch.chdir(tmp_path)
    generator = hugectr.DataGeneratorParams(
        hugectr.DataReaderType_t.Norm, 1, 2, 1, False, "train.bin", "eval.bin", [50], [3],
        check_type=hugectr.Check_t.Non, num_files=1, eval_num_files=1, num_samples_per_file=64,
    )  # fmt: skip
    hugectr.DataGenerator(generator).generate()
    model, apart = side_by_side_model(are_apart=False), side_by_side_model(are_apart=True)
    assert model.trainer.network.translated.tensors["vectors"].dims == (1, 3 * DIM)
    model.start_data_reading()
    for _ in range(5):
        block = model.get_data_reader_train().next_batch()
        assert block is not None
        model.trainer.train(block, 0.5)
        (bags,) = block.bags
        assert bags.num_bags == 3 * len(block)
        singles = tuple(Bags(bags.keys[i::3].copy(), width=1) for i in range(3))
        apart.trainer.train(Block(block.labels, block.dense, singles), 0.5)
    assert block is not None
    expected, _ = model.trainer.evaluate(block)
    np.testing.assert_allclose(
        apart.trainer.evaluate(Block(block.labels, block.dense, singles))[0], expected, atol=1e-6
    )
    model.save_params_to_files("m", 5)
    model.graph_to_json("graph.json")
    again = bare_model()
    again.construct_from_json("graph.json", include_dense_network=True)
    again.graph_to_json("again.json")
    assert json.loads(Path("again.json").read_text()) == json.loads(Path("graph.json").read_text())
    write_ps_json(tmp_path, ["m0_sparse_5.model"])
    (report,) = import_hugectr(tmp_path / "ps.json", tmp_path / "repository")
    sent = {
        "DES": block.dense.ravel(),
        "CATCOLUMN": block.bags[0].keys.astype(np.uint32),
        "ROWINDEX": block.bags[0].offsets.astype(np.int32),
    }
    with InferenceSession.open(report.version_dir) as session:
        np.testing.assert_allclose(session.predict(sent), expected, atol=1e-6)


def test_concat_wants_as_many_keys_in_each_sample() -> None:
    model = side_by_side_model(are_apart=False)
    source = model._source(train=True)
    (item,) = source.shape.sparse
    even, uneven = Bags(np.arange(6), np.array([0, 3, 6])), Bags(np.arange(5), np.array([0, 3, 5]))
    assert source._slots(item, even, 0).num_bags == 6
    with pytest.raises(ModelFormatError, match=r"train.bin: sample 8 has 2 keys of 'clicked'; 3 are expected"):
        source._slots(item, uneven, 7)


def write_ps_json(folder: Path, sparse: list[str]) -> None:
    model = {
        "model": "m", "network_file": str(folder / "graph.json"), "dense_file": str(folder / "m_dense_5.model"),
        "sparse_files": [str(folder / name) for name in sparse], "max_batch_size": 4, "gpucache": False,
        "num_of_worker_buffer_in_pool": 1, "num_of_refresher_buffer_in_pool": 1,
        "cache_refresh_percentage_per_iteration": 0.2, "deployed_device_list": [0],
        "default_value_for_each_table": [0.0] * len(sparse),
    }  # fmt: skip
    (folder / "ps.json").write_text(json.dumps({"supportlonglong": False, "models": [model]}))


def test_tables_of_one_name_and_two_widths_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    shared_model().graph_to_json("graph.json")
    document = json.loads(Path("graph.json").read_text())
    document["layers"][3]["sparse_embedding_hparam"]["embedding_vec_size"] = 5
    Path("graph.json").write_text(json.dumps(document))
    with pytest.raises(ModelFormatError, match="found 5; a layer before has 4 for the same table 'item'"):
        read_graph(Path("graph.json"))


USER = EmbeddingTableConfig("user", 100, DIM)


def two_combiners() -> None:
    model, made = bare_model(), EmbeddingCollectionConfig()
    model.add(data_layer())
    made.embedding_lookup(USER, "clicked", "a", "concat")
    made.embedding_lookup(USER, "clicked", "b", "sum")
    model.add(made)


def looked_up_by_concat() -> EmbeddingCollectionConfig:
    made = EmbeddingCollectionConfig()
    made.embedding_lookup(EmbeddingTableConfig("side by side", 100, DIM), "clicked", "b", "concat")
    return made


def summed() -> EmbeddingCollectionConfig:
    made = EmbeddingCollectionConfig()
    made.embedding_lookup(USER, "clicked", "a", "sum")
    return made


def pooled() -> hugectr.SparseEmbedding:
    return hugectr.SparseEmbedding(
        hugectr.Embedding_t.DistributedSlotSparseEmbeddingHash, 0, DIM, "sum", "a", "clicked"
    )


def added(*makes: Callable[[], Any]) -> None:
    model = bare_model()
    model.add(data_layer())
    for make in makes:
        model.add(make())


@pytest.mark.parametrize("other", [summed, pooled])
def test_what_is_refused_changes_no_input(other: Callable[[], Any]) -> None:
    model = bare_model()
    model.add(data_layer())
    model.add(other())
    with pytest.raises(UnsupportedModelError, match="'a' and a look-up with 'concat' read 'clicked'"):
        model.add(looked_up_by_concat())
    layer(model, Layer_t.Reshape, "a", "flat", leading_dim=DIM)
    layer(model, Layer_t.Concat, "flat dense", "joined")
    layer(model, Layer_t.InnerProduct, "joined", "logit", num_output=1)
    binary(model, "logit")
    model.compile()


def embedding_named_as_a_table() -> None:
    model = bare_model()
    model.add(data_layer())
    model.add(collection())
    model.add(
        hugectr.SparseEmbedding(hugectr.Embedding_t.DistributedSlotSparseEmbeddingHash, 0, DIM, "sum", "item", "shown")
    )


def looked_up(bottom: str = "clicked", combiner: str = "sum", *, slots: int = 1) -> None:
    model, made = bare_model(), EmbeddingCollectionConfig()
    model.add(data_layer(slots=slots))
    made.embedding_lookup(EmbeddingTableConfig("user", 100, DIM), bottom, "top", combiner)
    model.add(made)
    model.add(made)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: looked_up("unknown"), r"top_name 'top'\): no sparse input 'unknown'"),
        (lambda: looked_up(slots=2), "'clicked' has 2 slots; .* have slot_num 1"),
        (two_combiners, r"top_name 'b'\): 'sum' of 'clicked', which another .* reads with 'concat', is not supported"),
        (lambda: added(looked_up_by_concat, pooled), "'a' and a look-up with 'concat' read 'clicked'"),
        (lambda: added(looked_up_by_concat, summed), "'sum' of 'clicked', which another .* reads with 'concat'"),
        (lambda: looked_up(combiner="max"), r"combiner is 'max'; allowed: \['average', 'concat', 'mean', 'sum'\]"),
        (looked_up, r"the model has tables \['user'\] already"),
        (embedding_named_as_a_table, "the model has a table 'item' already"),
        (lambda: EmbeddingCollectionConfig().embedding_lookup([USER, USER], "ab", "t", ["sum", "sum"]), "are lists"),
        (lambda: collection().shard([["other"]], []), r"no table \['other'\]; there are \['user', 'item'\]"),
        (lambda: collection().shard([], [("row", ["user"])]), "strategy is 'row'; allowed: 'mp', 'dp'"),
        (lambda: collection().embedding_lookup(EmbeddingTableConfig("b", 1, 1), "a", "t", "sum"), "'all' has all"),
        (lambda: EmbeddingCollectionConfig().embedding_lookup([], [], "t", []), "0 tables, 0 bottom_name"),
        (lambda: EmbeddingTableConfig("a", 10, 0), "ev_size is 0; allowed: whole numbers from 1"),
        (lambda: EmbeddingTableConfig("a", -2, 4), "max_vocabulary_size is -2; allowed: whole numbers from -1"),
        (lambda: EmbeddingTableConfig("a", 10, 4, None, "zeros"), "init_param_or_empty is not supported"),
    ],
)
def test_what_is_wrong_is_refused_by_name(call: Callable[[], Any], message: str) -> None:
    with pytest.raises((ConfigurationError, UnsupportedModelError), match=message):
        call()

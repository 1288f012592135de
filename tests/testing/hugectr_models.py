"""Model folders as HugeCTR's users have them, with requests and their expected answers.

The weights are made up. The answers are computed from HugeCTR's formulas in float64 (`hugectr_oracle`), on vectors
that are looked up in dictionaries and pooled one key at a time; no code of hotrow takes part. A folder holds

    graph.json <model>_dense_0.model <model><table>_sparse_0.model/{key,emb_vector} ps.json config.pbtxt
    requests.npz            arrays `<request>__<input>`
    expected.npz            the predictions for them, float32 [samples, label_dim]

and that of the wide and deep model also `hps_*` (its tables alone, as HPS serves them), `v2/` (the next version, and
the answers where its rows are written over those of the first) and `malformed.json` (requests that must be refused, or
answered in spite of something odd).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tests.testing.hugectr_graphs import GraphMaker
from tests.testing.model_settings import settings_text

Bags = list[list[int]]
"""The keys of one table in a request, slot by slot, sample after sample."""
Inputs = dict[str, NDArray[Any]]
Rows = dict[int, NDArray[np.float32]]

_HIGHEST = 2**63 - 1
_DATA_TYPES = {"float32": "FP32", "float64": "FP64", "int64": "INT64", "int32": "INT32", "uint32": "UINT32"}


@dataclass
class HugectrModel:
    """One version of a model: its graph with weights, and its tables."""

    name: str
    graph: GraphMaker
    embeddings: list[tuple[str, list[int]]]
    """Of each table: its layer, and how many keys each slot may hold."""
    combiner: str
    max_batch_size: int
    rows: list[Rows]

    def dim(self, table: int) -> int:
        """The table's embedding_dim."""
        return self.graph.width(self.embeddings[table][0])

    def predict(self, request: Question) -> NDArray[np.float32]:
        """The predictions, [samples, label_dim]."""
        inputs: Inputs = {"dense": request.dense}
        for table, (layer, slots) in enumerate(self.embeddings):
            pooled = [self._pool(table, bag) for bag in request.bags[table]]
            inputs[layer] = np.array(pooled).reshape(len(request.dense), len(slots), self.dim(table))
        return np.concatenate(list(self.graph.answers(inputs).values()), axis=1).astype(np.float32)

    def _pool(self, table: int, bag: list[int]) -> NDArray[np.float64]:
        total = np.zeros(self.dim(table))
        for key in bag:
            total += self.row(table, key)
        return total / len(bag) if bag and self.combiner == "mean" else total

    def row(self, table: int, key: int) -> NDArray[np.float32]:
        """The key's vector, zeros for a key that the table lacks."""
        return self.rows[table].get(key, np.zeros(self.dim(table), np.float32))

    def vectors(self, keys: Sequence[Sequence[int]]) -> NDArray[np.float32]:
        """The vectors of each table's keys, flat."""
        found = [self.row(table, key) for table, some in enumerate(keys) for key in some]
        return np.concatenate([np.empty(0, np.float32), *found])


@dataclass
class Question:
    """A request, before it is encoded."""

    dense: NDArray[np.float32]
    """[samples, dense_dim]"""
    bags: list[Bags] = field(default_factory=list)

    def encode(self) -> Inputs:
        """DES, CATCOLUMN (sample by sample, table by table) and ROWINDEX (table by table), each [1, length]."""
        keys = []
        for sample in range(len(self.dense)):
            for bags in self.bags:
                num_slots = len(bags) // len(self.dense)
                keys += [key for bag in bags[sample * num_slots : (sample + 1) * num_slots] for key in bag]
        offsets = [np.cumsum([0, *map(len, bags)]) for bags in self.bags]
        return {
            "DES": self.dense.reshape(1, -1),
            "CATCOLUMN": np.array([keys], np.int64),
            "ROWINDEX": np.concatenate(offsets)[None].astype(np.int32),
        }


def write_wide_and_deep(folder: Path) -> None:
    """`hugectr_wdl`: one table of 1 element for two slots, one of 16 for 26, sums."""
    tables = [("sparse_embedding2", [2] * 2), ("sparse_embedding1", [2] * 26)]
    random = np.random.default_rng(1)
    rows = [_random_rows(random, 6000, 1), _random_rows(random, 13_000, 16)]
    for key in list(rows[0])[:50]:  # some keys occur in both tables
        rows[1][key] = rows[1].pop(next(iter(rows[1])))
    model = HugectrModel("hugectr_wdl", _wide_and_deep(1), tables, "sum", 64, rows)
    requests = _questions(model, random)
    _write_model(folder, model, requests)
    _write_hps(folder, model, random)
    _write_next(folder / "v2", model, requests, random)
    _write_malformed(folder, model, random)


def write_cross_network(folder: Path) -> None:
    """`hugectr_dcn`: one table of 16 elements for 26 slots of one to five keys, means."""
    slots = [1, 3, 2, 1, 1, 4, 1, 1, 2, 1, 1, 1, 5, 1, 1, 2, 1, 1, 1, 3, 1, 1, 1, 2, 1, 1]
    random = np.random.default_rng(2)
    tables = [("sparse_embedding1", slots)]
    model = HugectrModel("hugectr_dcn", _cross_network(), tables, "mean", 128, [_random_rows(random, 12_000, 16)])
    _write_model(folder, model, _questions(model, random))


def _wide_and_deep(seed: int) -> GraphMaker:
    graph = GraphMaker(seed, dense_dim=13, embeddings=[("sparse_embedding2", 2, 1), ("sparse_embedding1", 26, 16)])
    deep = graph.add("Concat", [graph.add("Reshape", "sparse_embedding1", leading_dim=416), "dense"])
    for width in (192, 128):
        deep = graph.add("ReLU", graph.add("InnerProduct", deep, fc_param={"num_output": width}))
        deep = graph.add("Dropout", deep, rate=0.5)
    wide = graph.add("ReduceSum", graph.add("Reshape", "sparse_embedding2", leading_dim=2), axis=1)
    graph.loss(graph.add("Add", [graph.add("InnerProduct", deep, fc_param={"num_output": 1}), wide]))
    return graph


def _cross_network() -> GraphMaker:
    graph = GraphMaker(3, dense_dim=13, embeddings=[("sparse_embedding1", 26, 16)])
    joined = graph.add("Concat", [graph.add("Reshape", "sparse_embedding1", leading_dim=416), "dense"])
    graph.add("Slice", joined, ["left", "right"], ranges=[[0, 429], [0, 429]])
    crossed = graph.add("MultiCross", "left", mc_param={"num_layers": 3})
    deep = "right"
    for width in (128, 64):
        deep = graph.add("ReLU", graph.add("InnerProduct", deep, fc_param={"num_output": width}))
    both = graph.add("Concat", [deep, crossed])
    graph.loss(graph.add("InnerProduct", both, fc_param={"num_output": 1}))
    return graph


def _random_rows(random: np.random.Generator, num_rows: int, dim: int) -> Rows:
    keys = random.choice(np.unique(random.integers(-(2**63), _HIGHEST, num_rows + 100)), num_rows, replace=False)
    vectors = random.normal(scale=0.3, size=(num_rows, dim)).astype(np.float32)
    return dict(zip(keys.tolist(), vectors, strict=True))


def _questions(model: HugectrModel, random: np.random.Generator) -> dict[str, Question]:
    """Requests of all sizes: with every slot full, with empty ones, with keys unknown, repeated and nearly equal."""
    known = [list(rows) for rows in model.rows]

    def draw(table: int) -> int:
        return known[table][int(random.integers(len(known[table])))]

    def unknown(table: int) -> int:
        key = int(random.integers(-(2**63), _HIGHEST))
        return key if key not in model.rows[table] else unknown(table)

    def mixed(table: int) -> int:
        return draw(table) if random.random() < 0.5 else unknown(table)

    def near(table: int) -> int:
        return (draw(table) ^ (1 << int(random.integers(62)))) if random.random() < 0.5 else draw(table)

    few = [[draw(table) for _ in range(3)] for table in range(len(known))]

    def repeated(table: int) -> int:
        return few[table][int(random.integers(3))]

    def question(num_samples: int, key: Callable[[int], int] = draw, *, full: bool = False, least: int = 0) -> Question:
        dense = random.normal(size=(num_samples, 13)).astype(np.float32)
        asked = Question(dense)
        for table, (_, slots) in enumerate(model.embeddings):
            lengths = [most if full else int(random.integers(least, most + 1)) for most in slots * num_samples]
            asked.bags.append([[key(table) for _ in range(length)] for length in lengths])
        return asked

    one = question(1)
    same = Question(np.repeat(one.dense, 5, axis=0), [bags * 5 for bags in one.bags])
    largest = model.max_batch_size
    return {
        "fixed_nnz": question(10, full=True),
        "one_sample": question(1),
        "one_sample_full": question(1, full=True),
        "two_samples": question(2),
        "max_batch": question(largest),
        "max_batch_full": question(largest, full=True),
        "empty_slots": question(8),
        "unknown_half": question(12, mixed, least=1),
        "unknown_rows": question(6, unknown, least=1),
        "duplicates": question(7, repeated, least=1),
        "odd_17": question(17),
        "near_keys": question(6, near),
        "identical_rows": same,
    }


def _write_model(folder: Path, model: HugectrModel, requests: dict[str, Question], version: int = 0) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    layers = json.loads(json.dumps(model.graph.layers))
    for sparse, (_, slots) in zip(layers[0]["sparse"], model.embeddings, strict=True):
        sparse.update(nnz_per_slot=slots, is_fixed_length=False)
    for layer in layers:
        if "sparse_embedding_hparam" in layer:
            layer["sparse_embedding_hparam"]["combiner"] = model.combiner
    (folder / "graph.json").write_text(json.dumps({"layers": layers}), encoding="utf-8")
    dense = f"{model.name}_dense_{version}.model"
    (folder / dense).write_bytes(model.graph.weights.file())
    sparse_files = [f"{model.name}{table}_sparse_{version}.model" for table in range(len(model.rows))]
    for name, rows in zip(sparse_files, model.rows, strict=True):
        (folder / name).mkdir()
        np.array(list(rows), np.int64).tofile(folder / name / "key")
        np.array(list(rows.values())).tofile(folder / name / "emb_vector")
    files = {"sparse_files": sparse_files, "dense_file": dense, "network_file": "graph.json"}
    _write_ps_json(folder / "ps.json", model, {"model": model.name, **files})
    config = _config(model)
    if version:
        config += settings_text({"sparse_files": ",".join(sparse_files), "dense_file": dense})
    (folder / "config.pbtxt").write_text(config, encoding="utf-8")
    if not version:
        arrays = {f"{name}__{key}": value for name, asked in requests.items() for key, value in asked.encode().items()}
        np.savez(folder / "requests.npz", **arrays)  # type: ignore[arg-type]
    _write_answers(folder / "expected.npz", model, requests)


def _write_answers(path: Path, model: HugectrModel, requests: dict[str, Question]) -> None:
    np.savez(path, **{name: model.predict(asked) for name, asked in requests.items()})  # type: ignore[arg-type]


def _write_ps_json(path: Path, model: HugectrModel, fields: dict[str, Any]) -> None:
    settings = {
        "deployed_device_list": [0],
        "max_batch_size": str(model.max_batch_size),
        "default_value_for_each_table": [0.0] * len(model.rows),
        "hit_rate_threshold": "1.0",
        "gpucacheper": "0.5",
        "gpucache": "true",
        "cache_refresh_percentage_per_iteration": 0.2,
    }
    content = {"supportlonglong": True, "models": [{**fields, **settings}]}
    path.write_text(json.dumps(content), encoding="utf-8")


def _tensor(name: str, data_type: str) -> str:
    return f'{{ name: "{name}" data_type: TYPE_{data_type} dims: [ -1 ] }}'


def _config(model: HugectrModel, *, hps: bool = False) -> str:
    name, backend = (f"{model.name}_hps", "hps") if hps else (model.name, "hugectr")
    inputs = [("DES", "FP32"), ("CATCOLUMN", "INT64"), ("ROWINDEX", "INT32")]
    inputs = [("KEYS", "INT64"), ("NUMKEYS", "INT32")] if hps else inputs
    return (
        f'name: "{name}"\nbackend: "{backend}"\nmax_batch_size: {model.max_batch_size},\n'
        f"input [ {', '.join(_tensor(*item) for item in inputs)} ]\noutput [ {_tensor('OUTPUT0', 'FP32')} ]\n"
        "instance_group [ { count: 1 kind: KIND_GPU gpus: [ 0 ] } ]\n"
        + ("" if hps else settings_text({"config": "graph.json"}))
    )


def _write_hps(folder: Path, model: HugectrModel, random: np.random.Generator) -> None:
    """The model's tables as HPS serves them, with requests."""
    tables = {
        "model": f"{model.name}_hps",
        "sparse_files": [f"{model.name}{table}_sparse_0.model" for table in range(2)],
        "embedding_table_names": [layer for layer, _ in model.embeddings],
        "embedding_vecsize_per_table": [model.dim(table) for table in range(2)],
        "maxnum_catfeature_query_per_table_per_sample": [4, 52],
    }
    _write_ps_json(folder / "hps_ps.json", model, tables)
    (folder / "hps_config.pbtxt").write_text(_config(model, hps=True), encoding="utf-8")
    wide, deep = (list(rows) for rows in model.rows)
    both = sorted(set(wide) & set(deep))[:12]
    strange = [0, -1, 1, _HIGHEST, -(2**63), 2**32]
    asked: dict[str, tuple[list[int], list[int]]] = {
        "basic": (wide[:50], deep[:100]),
        "one_each": (wide[7:8], deep[7:8]),
        "only_deep": ([], deep[:52]),
        "only_wide": (wide[:4], []),
        "unknown_mix": ([*wide[:30], *deep[-32:]], [*deep[:30], *wide[-40:]]),
        "all_unknown": (strange, strange),
        "repeated": (wide[:3] * 7, deep[:6] * 6),
        "same_keys_both_tables": (both, both),
        "near_keys": ([key ^ 1 for key in wide[:45]], [key ^ (1 << 62) for key in deep[:45]]),
        "largest": (random.choice(wide, 256).tolist(), random.choice(deep, 3328).tolist()),
    }
    arrays = {}
    for request, keys in asked.items():
        arrays[f"{request}__KEYS"] = np.array([[*keys[0], *keys[1]]], np.int64)
        arrays[f"{request}__NUMKEYS"] = np.array([[len(keys[0]), len(keys[1])]], np.int32)
    np.savez(folder / "hps_requests.npz", **arrays)  # type: ignore[arg-type]
    answers = {request: model.vectors(keys) for request, keys in asked.items()}
    np.savez(folder / "hps_expected.npz", **answers)  # type: ignore[arg-type]


def _write_next(folder: Path, model: HugectrModel, requests: dict[str, Question], random: np.random.Generator) -> None:
    """Other dense weights; of each table 7 % of the rows changed, 3 % added and 2 % removed."""
    rows = []
    for table, old in enumerate(model.rows):
        new, keys = dict(old), list(old)
        for key in keys[: len(keys) * 7 // 100]:
            new[key] = old[key] + np.float32(0.5)
        for key in keys[-len(keys) // 50 :]:
            del new[key]
        rows.append({**new, **_random_rows(random, len(keys) * 3 // 100, model.dim(table))})
    newer = HugectrModel(model.name, _wide_and_deep(5), model.embeddings, model.combiner, model.max_batch_size, rows)
    _write_model(folder, newer, requests, version=1)
    newer.rows = [{**old, **new} for old, new in zip(model.rows, rows, strict=True)]
    _write_answers(folder / "expected_upsert.npz", newer, requests)


@dataclass
class _Case:
    """A request of two samples that has an error."""

    name: str
    inputs: Inputs
    outcome: str = "error"
    """"error", "ok" or "either"."""
    answers: NDArray[np.float32] | None = None
    rows: Sequence[int] = (0, 1)
    """The samples whose answers are known."""
    model: str = "hugectr_wdl"
    outputs: Sequence[str] = ("OUTPUT0",)

    def entry(self) -> dict[str, Any]:
        """In the form of malformed.json."""
        expect: dict[str, Any] = {"outcome": self.outcome}
        if self.answers is not None:
            expect["check_rows"] = list(self.rows)
            expect["expected_rows"] = [self.answers[row].tolist() for row in self.rows]
        inputs = {name: _entry(array) for name, array in self.inputs.items()}
        return {
            "id": self.name,
            "model": self.model,
            "inputs": inputs,
            "requested_outputs": list(self.outputs),
            "expect": expect,
        }


def _entry(array: NDArray[Any]) -> dict[str, Any]:
    names = {"nan": "NaN", "inf": "Infinity", "-inf": "-Infinity"}
    values = [names.get(str(value), value) for value in array.ravel().tolist()]
    return {"datatype": _DATA_TYPES[array.dtype.name], "shape": list(array.shape), "data": values}


def _write_malformed(folder: Path, model: HugectrModel, random: np.random.Generator) -> None:
    known = [list(rows) for rows in model.rows]
    bags: list[Bags] = [
        [some[2 * i : 2 * i + 1 + i % 2] for i in range(2 * len(slots))]
        for some, (_, slots) in zip(known, model.embeddings, strict=True)
    ]
    bags[0][1], bags[1][3] = [], []
    good = Question(random.normal(size=(2, 13)).astype(np.float32), bags)
    cases = [*_wrong_offsets(good), *_wrong_arrays(good), *_odd_requests(model, good), *_wrong_hps(known)]
    content = {"cases": [case.entry() for case in cases]}
    (folder / "malformed.json").write_text(json.dumps(content), encoding="utf-8")


def _wrong_offsets(good: Question) -> Iterator[_Case]:
    """ROWINDEX holds 5 offsets of the first table, then 53 of the second."""
    inputs = good.encode()
    offsets = inputs["ROWINDEX"]

    def case(name: str, changed: NDArray[Any]) -> _Case:
        return _Case(f"rowindex_{name}", {**inputs, "ROWINDEX": changed})

    def at(name: str, *changes: tuple[int, int]) -> _Case:
        changed = offsets.copy()
        for index, value in changes:
            changed[0, index] = value
        return case(name, changed)

    yield at("first_not_zero", (0, 1))
    yield at("second_block_not_zero", (5, 3))
    yield case("global_offsets", offsets + np.repeat([0, offsets[0, 4]], [5, 53])[None].astype(np.int32))
    yield at("not_monotonic", (20, 50))
    yield at("decreasing_at_end", (57, int(offsets[0, 56]) - 1))
    yield at("negative", (2, -1))
    yield at("all_negative_block", *((index, -3) for index in range(5)))
    yield at("last_too_large", (57, int(offsets[0, 57]) + 1))
    yield at("huge_offset", (57, 2**31 - 1))
    yield at("int_min", (57, -(2**31)))
    yield at("sum_overflow", (4, 2_000_000_000), (57, 2_000_000_000))
    yield case("one_short", offsets[:, :-1])
    yield case("one_long", np.append(offsets, offsets[:, -1:], axis=1))
    yield case("single_block", np.append(offsets[:, :5], offsets[:, 6:] + offsets[0, 4], axis=1))
    yield case("empty", offsets[:, :0])
    yield case("int64", offsets.astype(np.int64))
    yield case("fp32", offsets.astype(np.float32))


def _wrong_arrays(good: Question) -> Iterator[_Case]:
    """Dense features and keys of other lengths and types; inputs that are missing or empty."""
    inputs = good.encode()
    dense, keys, none = inputs["DES"], inputs["CATCOLUMN"], np.empty((1, 0))
    changed: list[tuple[str, str, NDArray[Any]]] = [
        ("des_one_short", "DES", dense[:, :-1]),
        ("des_one_sample_less", "DES", dense[:, :13]),
        ("des_one_sample_more", "DES", np.append(dense, dense[:, :13], axis=1)),
        ("des_empty", "DES", dense[:, :0]),
        ("des_fp64", "DES", dense.astype(np.float64)),
        ("des_int32", "DES", dense.astype(np.int32)),
        ("catcolumn_int32", "CATCOLUMN", keys.astype(np.int32)),
        ("catcolumn_uint32", "CATCOLUMN", keys.astype(np.uint32)),
        ("catcolumn_fp32", "CATCOLUMN", keys.astype(np.float32)),
        ("catcolumn_empty", "CATCOLUMN", keys[:, :0]),
        ("catcolumn_one_missing", "CATCOLUMN", keys[:, :-1]),
        ("catcolumn_one_more", "CATCOLUMN", np.append(keys, keys[:, :1], axis=1)),
    ]
    for name, tensor, array in changed:
        yield _Case(name, {**inputs, tensor: array})
    for tensor in inputs:
        yield _Case(f"missing_{tensor.lower()}", {name: array for name, array in inputs.items() if name != tensor})
    yield _Case("empty_request", {name: none.astype(array.dtype) for name, array in inputs.items()})
    nothing = {"DES": dense[:, :0], "CATCOLUMN": keys[:, :0], "ROWINDEX": np.zeros((1, 2), np.int32)}
    yield _Case("zero_samples", nothing, "either")
    many = Question(np.zeros((65, 13), np.float32), [[[]] * 130, [[]] * 1690])
    yield _Case("too_many_samples", many.encode())


def _odd_requests(model: HugectrModel, good: Question) -> Iterator[_Case]:
    """Unusual requests that may or must be answered: other shapes, extreme numbers, no key at all."""
    inputs, right = good.encode(), model.predict(good)
    yield _Case("control_valid", inputs, "ok", right)
    yield _Case("unknown_input", {**inputs, "EXTRA": np.zeros((1, 1), np.float32)})
    yield _Case("unknown_output", inputs, outputs=["OUTPUT7"])
    yield _Case("batch_dim_two", {**inputs, "DES": good.dense}, "either", right)
    yield _Case("rank_one", {name: array[0] for name, array in inputs.items()}, "either", right)
    yield _Case("rank_three", {**inputs, "DES": good.dense[None]}, "either", right)
    for name, sample, values in (
        ("des_nan", 0, [np.nan]),
        ("des_all_nan", 1, [np.nan] * 13),
        ("des_infinite", 1, [np.inf, -np.inf]),
        ("des_huge", 0, [3e38]),
    ):
        dense = good.dense.copy()
        dense[sample, : len(values)] = values
        yield _Case(name, {**inputs, "DES": dense.reshape(1, -1)}, "ok", right, rows=[1 - sample])
    for name, slot, keys in (("key_int64_max", 0, [_HIGHEST]), ("slot_with_50_keys", 27, list(model.rows[1])[:50])):
        changed = Question(good.dense, [good.bags[0], [*good.bags[1]]])
        changed.bags[1][slot] = keys
        yield _Case(name, changed.encode(), "ok" if len(keys) == 1 else "either", model.predict(changed))
    empty = Question(good.dense, [[[] for _ in bags] for bags in good.bags])
    yield _Case("no_key_at_all", empty.encode(), "ok", model.predict(empty))


def _wrong_hps(known: list[list[int]]) -> Iterator[_Case]:
    """Counts that are not those of the keys, and arrays of other types."""
    keys = np.array([[*known[0][:2], *known[1][:3]]], np.int64)

    def case(name: str, counts: Sequence[int], sent: NDArray[Any] = keys, outcome: str = "error") -> _Case:
        inputs = {"KEYS": sent, "NUMKEYS": np.array([counts], np.int32)}
        return _Case(f"hps_{name}", inputs, outcome, model="hugectr_wdl_hps")

    yield case("counts_too_large", [2, 4])
    yield case("counts_too_small", [2, 2])
    yield case("negative_count", [-2, 7])
    yield case("huge_count", [2**31 - 1, 3])
    yield case("one_table", [5])
    yield case("three_tables", [2, 2, 1])
    yield case("keys_int32", [2, 3], keys.astype(np.int32))
    yield case("empty", [0, 0], keys[:, :0], "either")
    yield _Case("hps_missing_numkeys", {"KEYS": keys}, model="hugectr_wdl_hps")
    wide = {"KEYS": keys, "NUMKEYS": np.array([[2, 3]], np.int64)}
    yield _Case("hps_numkeys_int64", wide, model="hugectr_wdl_hps")

"""Keys that are columns of one matrix, and that the same operators compute."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from inference_session import InferenceSession
from tests.testing.onnx_evaluation import run_network
from tests.testing.onnx_models import check, import_model, model_of, table

ROWS = 1000
STEPS = {
    "wrap": "n_{b} = Less({a}, zero) w_{b} = Add({a}, {x}) {b} = Where(n_{b}, w_{b}, {a})",
    "narrow": "c_{b} = Cast<to = 6>({a}) {b} = Cast<to = 7>(c_{b})",
    "scaled": "c_{b} = Cast<to = 1>({a}) m_{b} = Mul(c_{b}, {f}) {b} = Cast<to = 7>(m_{b})",
    "limit": "{b} = Clip({a}, low, high)",
    "squares": "{b} = Mul({a}, {a})",
    **{kind: f"{{b}} = {kind}({{a}}, {{x}})" for kind in ("Mod", "Max", "Min", "Add", "Mul", "Sub")},
}
"""How a graph may make keys `b` of keys `a`, an integer `x` and a float `f`."""


def model_with(
    columns: list[int],
    steps: list[tuple[str, list[int]]],
    *,
    picks: str = "int64",
    kind: str = "int64",
    opset: int = 17,
) -> onnx.ModelProto:
    """Each column goes through the steps, with its own number in each, then becomes a row number by a modulo."""
    lines, weights = [], {f"w{i}": table(ROWS, 2 + i, seed=i) for i in range(len(columns))}
    for i, column in enumerate(columns):
        weights[f"c{i}"] = np.array(column if picks == "int64" else [column])
        lines.append(f"g{i} = Gather<axis = 1>(ids, c{i}) k{i}_0 = Cast<to = 7>(g{i})")
        for j, (name, numbers) in enumerate(steps):
            lines.append(STEPS[name].format(a=f"k{i}_{j}", b=f"k{i}_{j + 1}", x=f"x{i}_{j}", f=f"f{i}_{j}"))
            weights[f"x{i}_{j}"] = np.array(numbers[i])
            weights[f"f{i}_{j}"] = np.array(numbers[i] / 7, np.float32)
        lines.append(f"k{i} = Mod(k{i}_{len(steps)}, rows) v{i} = Gather(w{i}, k{i})")
        lines.append(f"y{i} = Flatten(v{i})")
    joined = ", ".join(f"y{i}" for i in range(len(columns)))
    weights |= {"rows": np.array(ROWS), "zero": np.array(0), "low": np.array(-30), "high": np.array(3000)}
    graph = f"m ({kind}[b, 6] ids) => (float[b, c] y) {{ {' '.join(lines)} y = Concat<axis = 1>({joined}) }}"
    return model_of(graph, weights, opset=opset)


def ids_like(seed: int, dtype: str, num_samples: int) -> np.ndarray[Any, Any]:
    rng, limits = np.random.default_rng(seed), np.iinfo(dtype)
    drawn = rng.integers(-5000, 5000, (num_samples, 6))
    return np.where(rng.random(drawn.shape) < 0.1, rng.choice([limits.min, limits.max, 0], drawn.shape), drawn).astype(
        dtype
    )


def operators(version: Path) -> Counter[str]:
    return Counter(node.op_type for node in onnx.load(version / "keys.onnx").graph.node)


@settings(max_examples=12)
@given(
    columns=st.one_of(st.just(list(range(6))), st.lists(st.integers(-6, 5), min_size=4, max_size=7)),
    kinds=st.lists(st.sampled_from(sorted(STEPS)), max_size=4),
    picks=st.sampled_from(["int64", "int64[1]"]),
    dtype=st.sampled_from(["int32", "int64"]),
    opset=st.sampled_from([12, 13, 17, 18]),
    data=st.data(),
)
def test_keys_are_those_of_the_original(  # noqa: PLR0917
    columns: list[int],
    kinds: list[str],
    picks: str,
    dtype: str,
    opset: int,
    data: st.DataObject,
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    """Columns in any order, also several times; numbers that are equal or differ by column; keys of any size."""
    number = st.integers(-3000, 3000).filter(bool)
    numbers = st.one_of(number.map(lambda n: [n] * len(columns)), st.lists(number, min_size=len(columns)))
    steps = [(kind, data.draw(numbers)) for kind in kinds]
    inputs = [{"ids": ids_like(i, dtype, num)} for i, num in enumerate((1, 3, 17))]
    model = model_with(columns, steps, picks=picks, kind=dtype, opset=opset)

    report = check(tmp_path_factory.mktemp("stacking"), model, *inputs)

    found = operators(report.version_dir)
    assert found["Split"] == 1
    assert sum(found.values()) < len(columns) * (len(steps) + 2)


def test_a_modulo_of_all_columns_is_one_operator(tmp_path: Path) -> None:
    report = check(tmp_path, model_with(list(range(6)), []), {"ids": ids_like(0, "int64", 5)})

    assert operators(report.version_dir) == {"Mod": 1, "Split": 1}
    assert len(onnx.load(report.version_dir / "keys.onnx").graph.initializer) == 2


def test_long_chains_are_stacked(tmp_path: Path) -> None:
    """Each of whose values is read twice: longer than Python's recursion, and with more paths than can be counted."""
    columns = list(range(4))
    model = model_with(columns, [("squares", columns), ("Mod", [7919] * 4)] * 300)

    report = check(tmp_path, model, {"ids": ids_like(0, "int64", 3)})

    assert operators(report.version_dir)["Split"] == 1


def test_columns_of_other_operators_are_stacked_apart(tmp_path: Path) -> None:
    """Four with a limit below, and four without; one that is multiplied by another stays as it is."""
    lines = [f"g{i} = Gather<axis = 1>(ids, c{i}) k{i} = Mod(g{i}, rows)" for i in range(4)]
    lines += [f"g{i} = Gather<axis = 1>(ids, c{i}) m{i} = Max(g{i}, zero) k{i} = Mod(m{i}, rows)" for i in range(4, 8)]
    lines += ["p = Mul(g0, g5) k8 = Mod(p, rows)", *(f"v{i} = Gather(w, k{i})" for i in range(9))]
    joined = ", ".join(f"v{i}" for i in range(9))
    graph = f"m (int64[b, 8] ids) => (float[b, c] y) {{ {' '.join(lines)} y = Concat<axis = 1>({joined}) }}"
    weights = {
        "w": table(ROWS),
        "rows": np.array(ROWS),
        "zero": np.array(0),
        **{f"c{i}": np.array(i) for i in range(8)},
    }
    ids = np.random.default_rng(0).integers(-100, 1000, (7, 8))

    report = check(tmp_path, model_of(graph, weights), {"ids": ids}, {"ids": ids[:1]})

    found = operators(report.version_dir)
    assert (found["Split"], found["Mod"], found["Max"], found["Mul"]) == (2, 3, 1, 1)


def test_columns_of_contexts_and_of_candidates(tmp_path: Path) -> None:
    """Of a matrix each, with one modulo; a context that is given once, and one that is repeated."""
    lines = [f"g{i} = Gather<axis = 1>(user, c{i}) k{i} = Mod(g{i}, rows)" for i in range(4)]
    lines += [f"g{i} = Gather<axis = 1>(item, c{i - 4}) k{i} = Mod(g{i}, rows)" for i in range(4, 9)]
    lines += [f"v{i} = Gather(w, k{i})" for i in range(9)]
    joined = ", ".join(f"v{i}" for i in range(9))
    graph = f"""m (int64[n, 4] user, int64[n, 5] item) => (float[n, 1] y) {{ {" ".join(lines)}
        x = Concat<axis = 1>({joined}) h = MatMul(x, first) r = Relu(h) y = MatMul(r, last) }}"""
    rng = np.random.default_rng(0)
    weights = {"w": table(ROWS), "rows": np.array(ROWS), **{f"c{i}": np.array(i) for i in range(5)}}
    weights |= {"first": rng.random((36, 8), np.float32), "last": rng.random((8, 1), np.float32)}
    version = import_model(tmp_path, model_of(graph, weights), context=["user"]).version_dir
    assert operators(version) == {"Mod": 2, "Split": 2}
    with InferenceSession.open(version) as session:
        for length in (1, 5, 1, 7):
            user, item = rng.integers(-9999, 9999, (1, 4)), rng.integers(-9999, 9999, (length, 5))
            repeated = {"user": np.repeat(user, length, axis=0), "item": item}
            expected = run_network(tmp_path / "model.onnx", repeated)["y"]
            for inputs in (repeated, {"user": user, "item": item}):
                np.testing.assert_allclose(session.run(inputs)["y"], expected, rtol=1e-5)


NOT_STACKED = {
    "three columns": ("k{i} = Mod(g{i}, rows)", 3),
    "a limit for each": ("k{i} = Clip(g{i}, low{i}, high)", 5),
    "a running sum": ("s{i} = CumSum(g{i}, zero) k{i} = Mod(s{i}, rows)", 5),
    "a logarithm": ("f{i} = Cast<to = 1>(g{i}) l{i} = Log(f{i}) k{i} = Cast<to = 7>(l{i})", 5),
}


@pytest.mark.parametrize("case", NOT_STACKED)
def test_other_keys_stay_as_they_are(case: str, tmp_path: Path) -> None:
    made, num = NOT_STACKED[case]
    lines = [f"g{i} = Gather<axis = 1>(ids, c{i}) {made.format(i=i)} v{i} = Gather(w, k{i})" for i in range(num)]
    joined = ", ".join(f"v{i}" for i in range(num))
    graph = f"m (int64[b, 6] ids) => (float[b, c] y) {{ {' '.join(lines)} y = Concat<axis = 1>({joined}) }}"
    weights = {"w": table(ROWS), "rows": np.array(ROWS), "zero": np.array(0), "high": np.array(ROWS - 1)}
    weights |= {f"c{i}": np.array(i) for i in range(6)} | {f"low{i}": np.array(i) for i in range(6)}
    ids = np.random.default_rng(0).integers(1, 1000, (7, 6))

    report = check(tmp_path, model_of(graph, weights), {"ids": ids})

    assert operators(report.version_dir)["Split"] == 0


def test_keys_whose_dimensions_a_look_up_needs_stay_as_they_are(tmp_path: Path) -> None:
    """Each fills an input of the network by itself, which is added up over an axis."""
    lines = [f"g{i} = Gather<axis = 1>(ids, c{i}) k{i} = Mod(g{i}, rows) v{i} = Gather(w, k{i})" for i in range(5)]
    total = "a = Add(v0, v1) b1 = Add(v2, v3) c = Add(a, b1) y = Add(c, v4)"
    graph = f"m (int64[b, 6] ids) => (float[b, c] y) {{ {' '.join(lines)} {total} }}"
    weights = {"w": table(ROWS), "rows": np.array(ROWS), **{f"c{i}": np.array(i) for i in range(5)}}
    ids = np.random.default_rng(0).integers(-100, 1000, (7, 6))

    report = check(tmp_path, model_of(graph, weights), {"ids": ids})

    assert operators(report.version_dir)["Split"] == 0

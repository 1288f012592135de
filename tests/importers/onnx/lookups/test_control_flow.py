"""Row reads inside Loop, Scan and If."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tests.testing.onnx_models import check, model_of, table

KEYS = np.array([[0, 1], [999, -1], [-1000, 7]], np.int64)

LOOP = """m (int64[b, 2] keys) => (float[n, 2, 4] y) {
    s = Shape(keys)  z = Constant<value = int64 {0}>()  n = Gather(s, z)  t = Constant<value = bool {1}>()
    y = Loop(n, t)<body = body (int64 i, bool c) => (bool co, float[d, 4] v) {
        co = Identity(c)  BODY }> }"""


@pytest.mark.parametrize(
    ("body", "direct"),
    [
        ("k = Gather(keys, i)  v = Gather(w, k)", True),
        ("k = Gather(keys, i)  o = Constant<value = int64 {3}>()  h = Abs(k)  q = Mod(h, o)  v = Gather(w, q)", False),
        (
            """f = Constant<value = int64[1] {-1}>()  j = Reshape(i, f)  o = Constant<value = int64[1] {1}>()
            e = Add(j, o)  x = Constant<value = int64[1] {-2}>()  k = Slice(keys, j, e, x)
            r = Squeeze(k, x)  v = Gather(w, r)""",
            True,
        ),
        (
            """f = Constant<value = int64[1] {-1}>()  j = Reshape(i, f)  p = Cast<to = 6>(j)
            o = Constant<value = int32[1] {1}>()  e = Add(p, o)  x = Constant<value = int32[1] {-2}>()
            k = Slice(keys, p, e, x)  h = Constant<value = int64[1] {0}>()  r = Squeeze(k, h)  v = Gather(w, r)""",
            True,
        ),
        ("k = Gather(keys, i)  g = Gather(w, k)  v = Gather(w, k)", True),
    ],
)
def test_reads_in_a_loop_are_moved_out(tmp_path: Path, body: str, direct: bool) -> None:
    """Keys selected from the request's, or computed from them, are looked up before the Loop runs."""
    model = model_of(LOOP.replace("BODY", body), {"w": table()})

    report = check(tmp_path, model, {"keys": KEYS}, {"keys": KEYS[:0]}, {"keys": KEYS[:1]})

    assert [t.name for t in report.tables] == ["w"]
    assert (report.spec.lookups[0].keys == "keys") == direct


def test_bags_of_different_sizes_in_a_loop(tmp_path: Path) -> None:
    """Keys that are computed inside may be more or fewer in each iteration."""
    graph = """m (int64[l] keys, int64[b] begins, int64[b] ends) => (float[n, 4] y) {
        s = Shape(ends)  z = Constant<value = int64 {0}>()  n = Gather(s, z)  t = Constant<value = bool {1}>()
        f = Constant<value = int64[1] {-1}>()  two = Constant<value = int64 {2}>()
        y = Loop(n, t)<body = body (int64 i, bool c) => (bool co, float[4] v) {
            co = Identity(c)  p = Gather(begins, i)  q = Gather(ends, i)  a = Reshape(p, f)  e = Reshape(q, f)
            k = Slice(keys, a, e)  d = Mul(k, two)  g = Gather(w, d)
            x = Constant<value = int64[1] {0}>()  v = ReduceSum<keepdims = 0>(g, x) }> }"""
    inputs = {"keys": np.arange(10), "begins": np.array([0, 3, 3]), "ends": np.array([3, 3, 10])}

    report = check(tmp_path, model_of(graph, {"w": table()}), inputs)

    assert len(report.tables) == 1
    assert not report.spec.batched


def test_keys_carried_from_iteration_to_iteration(tmp_path: Path) -> None:
    """The parts of the Loop's state that the keys need are computed with them."""
    graph = """m (int64[b, 2] keys) => (float[4, b, 2, 4] y) {
        n = Constant<value = int64 {4}>()  t = Constant<value = bool {1}>()  h = Constant<value = int64 {500}>()
        fk, ff, y = Loop(n, t, keys, x)<body = body (int64 i, bool c, int64[b, 2] k, float s) =>
            (bool co, int64[b, 2] kn, float sn, float[b, 2, 4] v) {
            co = Identity(c)  k2 = Add(k, i)  kn = Mod(k2, h)  g = Gather(w, kn)  v = Add(g, s)
            sn = ReduceMax<keepdims = 0>(v) }> }"""
    model = model_of(graph, {"w": table(), "x": np.float32(0)})

    report = check(tmp_path, model, {"keys": KEYS})

    assert len(report.tables) == 1


def test_keys_that_a_loop_finds_by_vectors_stay_dense(tmp_path: Path) -> None:
    """A beam search cannot be taken apart; the table stays, with the reason."""
    graph = """m (int64[b] keys) => (float[4, b, 4] y) {
        n = Constant<value = int64 {4}>()  t = Constant<value = bool {1}>()
        f, y = Loop(n, t, keys)<body = body (int64 i, bool c, int64[b] k) => (bool co, int64[b] kn, float[b, 4] v) {
            co = Identity(c)  v = Gather(w, k)  kn = ArgMax<axis = 1, keepdims = 0>(v) }> }"""

    report = check(tmp_path, model_of(graph, {"w": table()}), {"keys": KEYS[:, 0]})

    assert not report.tables
    assert "depend on looked-up vectors" in report.stays_dense[0].reason


def test_a_table_carried_through_a_loop_unchanged(tmp_path: Path) -> None:
    """jax2onnx hands tables to a Loop as state that never changes."""
    graph = """m (int64[b] keys) => (float[4, b, 4] y) {
        n = Constant<value = int64 {4}>()  t = Constant<value = bool {1}>()
        f, y = Loop(n, t, w)<body = body (int64 i, bool c, float[1000, 4] u) =>
            (bool co, float[1000, 4] un, float[b, 4] v) {
            co = Identity(c)  un = Identity(u)  k = Add(keys, i)  v = Gather(u, k) }> }"""

    report = check(tmp_path, model_of(graph, {"w": table()}), {"keys": np.array([1, 2, 900])})

    assert len(report.tables) == 1


SCAN = """m (int64[l, b] keys, float[l, b] x) => (float[l, b, 4] y) {
    y = Scan<num_scan_inputs = 2, body = body (int64[b] k, float[b] f) => (float[b, 4] v) { BODY }>(keys, x) }"""


@pytest.mark.parametrize("body", ["v = Gather(w, k)", "n = Neg(k)  h = Abs(n)  v = Gather(w, h)"])
def test_reads_in_a_scan_are_moved_out(tmp_path: Path, body: str) -> None:
    """Vectors of all steps are looked up first, then scanned along."""
    model = model_of(SCAN.replace("BODY", body), {"w": table()})

    report = check(tmp_path, model, {"keys": KEYS % 999, "x": np.ones((3, 2), np.float32)})

    assert len(report.tables) == 1


def test_a_scan_with_state_and_directions(tmp_path: Path) -> None:
    """State and a reversed scan input are kept as they are."""
    graph = """m (int64[b] keys) => (float[4] last, float[l, 4] y) {
        last, y = Scan<num_scan_inputs = 1, scan_input_directions = [1],
            body = body (float[4] s, int64 k) => (float[4] sn, float[4] v) {
            g = Gather(w, k)  sn = Add(s, g)  v = Identity(sn) }>(zero, keys) }"""
    model = model_of(graph, {"w": table(), "zero": np.zeros(4, np.float32)})

    report = check(tmp_path, model, {"keys": KEYS[:, 0]})

    assert len(report.tables) == 1


IF = """m (int64[b] keys, bool flag) => (float[b, 4] y) {
    y = If(flag)<then_branch = then () => (float[b, 4] u) { THEN },
        else_branch = other () => (float[b, 4] v) { ELSE }> }"""


@pytest.mark.parametrize(
    ("then", "other"),
    [
        ("u = Gather(w, keys)", "z = Gather(w2, keys)  v = Neg(z)"),
        ("a = Abs(keys)  u = Gather(w, a)", "z = Gather(w, keys)  v = Neg(z)"),
    ],
)
def test_reads_in_branches_are_moved_out(tmp_path: Path, then: str, other: str) -> None:
    """A branch's keys are looked up only when that branch is taken."""
    model = model_of(IF.replace("THEN", then).replace("ELSE", other), {"w": table(), "w2": table(seed=1)})
    keys = np.array([0, 999, -500], np.int64)

    feeds = [{"keys": keys, "flag": np.array(flag)} for flag in (True, False)]
    report = check(tmp_path, model, *feeds)

    assert len(report.tables) == (2 if "w2" in other else 1)


def test_no_keys_in_a_branch(tmp_path: Path) -> None:
    """Samples without keys, of whatever length the other branch's are."""
    branches = """p = Gather(w, keys)  u = ReduceSum <keepdims=0> (p, one)  ELSE
        q = Gather(w, keys)  v = ReduceMax <keepdims=0> (q, one)"""
    then, other = branches.split("ELSE")
    graph = IF.replace("keys,", "keys, int64[1] one,").replace("[b] keys", "[b, k] keys")
    model = model_of(graph.replace("THEN", then).replace("ELSE", other), {"w": table()})

    feeds = [{"keys": keys, "flag": np.array(True), "one": np.array([1])} for keys in (KEYS, KEYS[:, :0])]
    report = check(tmp_path, model, *feeds)

    assert len(report.tables) == 1


def test_ranks_that_onnx_infers_wrongly(tmp_path: Path) -> None:
    """ONNX keeps the axis of one that ONNX Runtime drops here: what look-ups yield is not declared by that."""
    model = model_of(
        """g (int64[n, 2] keys) => (float[n, 4] y) {
            columns = SplitToSequence <axis=1, keepdims=0> (keys, one)  k = SequenceAt(columns, one)
            y = Gather(w, k) }""",
        {"w": table(), "one": np.array(1)},
    )

    report = check(tmp_path, model, {"keys": KEYS})

    assert len(report.tables) == 1


def test_nested_bodies(tmp_path: Path) -> None:
    """A read in a branch in a Loop moves out of both."""
    body = """one = Constant<value = int64 {1}>()  even = Less(i, one)
        v = If(even)<then_branch = then () => (float[d, 4] a) { k = Gather(keys, i)  a = Gather(w, k) },
            else_branch = other () => (float[d, 4] e) { k = Gather(keys, i)  h = Abs(k)
            nine = Constant<value = int64 {9}>()  q = Mod(h, nine)  g = Gather(w, q)  e = Neg(g) }>"""

    report = check(tmp_path, model_of(LOOP.replace("BODY", body), {"w": table()}), {"keys": KEYS})

    assert len(report.tables) == 1


def test_branches_that_numbers_choose_are_tried(tmp_path: Path) -> None:
    """A small number that stands alone may choose one: the output had the size that the other branch makes."""
    graph = """m (int64[b] keys, int64 kind) => (float y) {
        v = Gather(w, keys)  is_short = Equal(kind, two)
        y = If (is_short) <then_branch = t () => (float a) { a = Slice(v, zero, one, one) },
                           else_branch = e () => (float o) { o = Identity(v) }> }"""
    constants = {"w": table(), "two": np.array(2), "zero": np.array([0]), "one": np.array([1])}
    inputs = [{"keys": np.array([1, 2, 999]), "kind": np.array(kind)} for kind in (2, 5)]

    report = check(tmp_path, model_of(graph, constants), *inputs)

    assert report.spec.outputs[0].shape == (-1, -1)

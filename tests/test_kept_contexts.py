"""Contexts that are kept between requests: reused only while nothing that they depend on has changed."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from inference_session import InferenceSession, Request
from inference_session.errors import ConfigurationError, HotrowError
from inference_session.execution.kept_contexts import Context, ContextMemory
from inference_session.importers.report import ImportReport
from inference_session.model_spec import CANDIDATES
from inference_session.parameter_server.write_log import WriteLog
from tests.testing.onnx_models import import_model, model_of, table
from tests.testing.stored_model import push

DIM, ROWS = 4, 10
Tables = dict[str, NDArray[np.float32]]
TEXT = """g (int64[n] user, int64[n, length] clicks, int64[n] item) => (float[n, 1] score) {
    u = Gather(users, user)
    h = Gather(items, clicks)
    p = ReduceSum<keepdims = 0>(h, one)
    t = Gather(items, item)
    row = Unsqueeze(t, one)
    product = Mul(h, row)
    s = ReduceSum<keepdims = 1>(product, last)
    weighted = Mul(h, s)
    i = ReduceSum<keepdims = 0>(weighted, one)
    x = Concat<axis = 1>(u, p, t, i)
    score = MatMul(x, w)
}"""
"""Of the context, the user's vector and the clicks' vectors are read for every candidate."""
WEIGHTS = np.random.default_rng(5).standard_normal((4 * DIM, 1)).astype(np.float32)


@pytest.fixture(scope="module")
def imported(tmp_path_factory: pytest.TempPathFactory) -> ImportReport:
    """A model of small tables."""
    constants = {"users": table(ROWS, DIM, 1), "items": table(ROWS, DIM, 2), "w": WEIGHTS}
    constants |= {"one": np.array([1]), "last": np.array([-1])}
    model = model_of(TEXT, constants)
    return import_model(tmp_path_factory.mktemp("kept"), model, context=["user", "clicks"], min_rows=2)


def answer(tables: Tables, inputs: dict[str, NDArray[Any]], counts: list[int]) -> NDArray[np.float64]:
    """What the model gives for these rows, in float64."""
    owners = np.repeat(np.arange(len(counts)), counts)
    users, items = (tables[name].astype(float) for name in ("users", "items"))
    u, h, t = users[inputs["user"]][owners], items[inputs["clicks"]][owners], items[inputs["item"]]
    interest = (h * (h * t[:, None]).sum(axis=2, keepdims=True)).sum(axis=1)
    return np.concatenate([u, h.sum(axis=1), t, interest], axis=1) @ WEIGHTS


def ranking_of(user: int, num_items: int, *, length: int = 3) -> dict[str, NDArray[Any]]:
    """The same user has always the same clicks, some of them counted from the end, as every second user is."""
    clicks = np.random.default_rng(user).integers(-ROWS, ROWS, (1, length))
    items = np.random.default_rng(num_items).integers(0, ROWS, num_items)
    return {"user": np.array([user - ROWS if user % 2 else user]), "clicks": clicks, "item": items}


def assert_score(session: InferenceSession, tables: Tables, inputs: dict[str, NDArray[Any]]) -> None:
    """The session answers as the rows are now."""
    wanted = answer(tables, inputs, [len(inputs["item"])])
    np.testing.assert_allclose(session.run(inputs)["score"], wanted, rtol=1e-4, atol=1e-4)


def fresh_tables() -> Tables:
    """The tables as they were imported."""
    return {"users": table(ROWS, DIM, 1), "items": table(ROWS, DIM, 2)}


def test_a_user_who_asks_again_is_not_computed_again(imported: ImportReport) -> None:
    """Nor looked up: with other candidates, alone, next to others, and with histories of other lengths."""
    with InferenceSession.open(imported.version_dir, context_cache_bytes=1 << 20) as session:
        for num_items in (5, 9, 5):
            assert_score(session, fresh_tables(), ranking_of(7, num_items))
        stats = session.stats()
        assert stats["contexts_reused_total"] == 2
        assert stats["contexts_total"] == 3
        assert stats["tables"]["users"]["lookup_keys"] == 1
        requests = [ranking_of(7, 4), ranking_of(8, 6), ranking_of(8, 3, length=5), ranking_of(7, 2)]
        found = session.run_many([Request(inputs) for inputs in requests])
        for inputs, one in zip(requests, found, strict=True):
            assert not isinstance(one, HotrowError)
            wanted = answer(fresh_tables(), inputs, [len(inputs["item"])])
            np.testing.assert_allclose(one["score"], wanted, rtol=1e-4, atol=1e-4)
        assert session.stats()["contexts_reused_total"] == 4
        assert session.stats()["tables"]["users"]["lookup_keys"] == 3


def test_nothing_is_kept_unless_asked_for(imported: ImportReport) -> None:
    """The setting is off by default."""
    with InferenceSession.open(imported.version_dir) as session:
        session.run(ranking_of(7, 5))
        session.run(ranking_of(7, 5))
        assert session.stats()["contexts_reused_total"] == 0
        assert session.stats()["tables"]["users"]["lookup_keys"] == 2


def test_an_unsuitable_value_is_refused(imported: ImportReport) -> None:
    """It is refused like that of any setting."""
    with pytest.raises(ConfigurationError, match="context_cache_bytes"):
        InferenceSession.open(imported.version_dir, context_cache_bytes=-1)


actions = st.lists(
    st.one_of(
        st.tuples(st.just("rank"), st.integers(0, 2), st.integers(1, 6)),
        st.tuples(st.just("update"), st.sampled_from(["users", "items"]), st.integers(0, ROWS - 1)),
        st.tuples(st.just("erase"), st.sampled_from(["users", "items"]), st.integers(0, ROWS - 1)),
        st.tuples(st.just("refresh"), st.just(""), st.just(0)),
    ),
    min_size=5,
    max_size=40,
)


@pytest.fixture
def session(imported: ImportReport, tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[InferenceSession]:
    """Over a RocksDB, with a cache of this many bytes."""
    url = f"rocksdb://{tmp_path}/rows"
    push(imported.version_dir, url)
    settings = {"persistent_store": url, "cache_bytes": request.param, "context_cache_bytes": 1 << 20}
    with InferenceSession.open(imported.version_dir, **settings) as opened:
        yield opened


@pytest.mark.parametrize("session", [0, 1 << 20], indirect=True, ids=["no cache", "cache"])
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None, max_examples=30)
@given(drawn=actions)
def test_a_kept_context_is_never_stale(session: InferenceSession, drawn: list[tuple[str, Any, int]]) -> None:
    """After any updates, erasures and refreshes, each request is answered by the present rows."""
    tables = fresh_tables()
    for name, rows in tables.items():
        session.update(name, np.arange(ROWS), rows)
    if drawn:
        for _ in range(2):
            assert_score(session, tables, ranking_of(1, 3))
        assert session.stats()["contexts_reused_total"]
    for step, (action, what, number) in enumerate(drawn):
        if action == "rank":
            assert_score(session, tables, ranking_of(what, number))
        elif action == "update":
            row = np.random.default_rng(step).standard_normal((1, DIM), np.float32)
            session.update(what, [number], row)
            tables[what][number] = row
        elif action == "erase":
            session.erase(what, [number])
            tables[what][number] = 0
        else:
            session.refresh()


@pytest.mark.parametrize("session", [1 << 20], indirect=True)
def test_contexts_of_unknown_keys_are_not_kept_over_stores(session: InferenceSession) -> None:
    """Any process may add a missing row later: the default vector is answered, and nothing is kept."""
    inputs = {**ranking_of(3, 4), "user": np.array([ROWS + 5])}
    session.run(inputs)
    session.run(inputs)
    assert session.stats()["contexts_reused_total"] == 0


def test_the_memory_is_bounded() -> None:
    """The context that was used longest ago goes first; one that does not fit is not kept."""
    memory = ContextMemory(100, WriteLog())

    def context(num_bytes: int) -> Context:
        return Context({}, np.zeros(0, np.int64), 0, num_bytes)

    memory.put(b"a", context(40))
    memory.put(b"b", context(40))
    assert memory.get(b"a") is not None
    memory.put(b"c", context(40))
    assert memory.get(b"b") is None
    assert memory.get(b"a") is not None
    memory.put(b"d", context(101))
    assert memory.get(b"d") is None


def test_several_contexts_in_one_request(imported: ImportReport) -> None:
    """Some are kept, some are not, one comes twice, one has no candidates."""
    with InferenceSession.open(imported.version_dir, context_cache_bytes=1 << 20) as session:
        session.run(ranking_of(1, 5))
        parts = [ranking_of(user, count) for user, count in ((1, 2), (2, 3), (1, 4), (3, 1))]
        counts = [2, 3, 4, 0]
        inputs = {name: np.concatenate([part[name] for part in parts]) for name in ("user", "clicks")}
        inputs["item"] = np.concatenate([part["item"] for part in parts[:3]])
        found = session.run({**inputs, CANDIDATES: np.array(counts, np.int32)})
        wanted = answer(fresh_tables(), inputs, counts)
        np.testing.assert_allclose(found["score"], wanted, rtol=1e-4, atol=1e-4)
        assert session.stats()["contexts_reused_total"] == 2


@pytest.mark.parametrize("session", [0, 1 << 20], indirect=True, ids=["no cache", "cache"])
def test_each_kind_of_change_is_noticed(session: InferenceSession) -> None:
    """An update of the user, of a click, an erased row, a refresh: once each, the context is computed again."""
    tables, inputs = fresh_tables(), ranking_of(4, 5)
    row = np.full((1, DIM), 0.25, np.float32)
    for name, key in (("users", 4), ("items", int(inputs["clicks"][0, 1]))):
        for _ in range(2):
            assert_score(session, tables, inputs)
        reused = session.stats()["contexts_reused_total"]
        session.update(name, [key], row)
        tables[name][key] = row
        assert_score(session, tables, inputs)
        assert session.stats()["contexts_reused_total"] == reused
    session.erase("users", [4])
    tables["users"][4] = 0
    assert_score(session, tables, inputs)
    session.update("users", [4], row)
    session.refresh()
    tables["users"][4] = row
    assert_score(session, tables, inputs)


def test_inputs_that_change_meanwhile_change_no_other_answer(
    imported: ImportReport, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As memory that is shared with a client may: what is kept for a context was computed from its inputs."""
    tables = {"users": table(ROWS, DIM, 1), "items": table(ROWS, DIM, 2)}
    with InferenceSession.open(imported.version_dir, context_cache_bytes=1 << 20) as session:
        kept = session._model.kept_contexts
        assert kept is not None
        changing, batch_of = ranking_of(1, 3), kept.batch_of

        def changed(wanted: Any) -> Any:
            changing["clicks"][...] = 0
            return batch_of(wanted)

        with monkeypatch.context() as patch:
            patch.setattr(kept, "batch_of", changed)
            session.run(changing)

        assert_score(session, tables, ranking_of(1, 3))
        assert session.stats()["contexts_reused_total"] == 1

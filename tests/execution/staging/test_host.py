"""Requests that compiled code stages get the same answers as on the general path."""

from __future__ import annotations

import pickle
import threading
import tracemalloc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from inference_session import InferenceSession, Request
from inference_session.dense_engine.network_file import NetworkFile
from inference_session.dense_engine.onnx import OnnxEngine
from inference_session.errors import HotrowError, InvalidRequestError
from inference_session.execution.staging import host as staged
from inference_session.execution.staging.forms import is_readable
from inference_session.kernels import array_headers
from inference_session.model_spec import TensorSpec
from inference_session.requests.outputs import Outputs
from inference_session.rows.files import changing_rows
from inference_session.version_directory.manifest import write_manifest
from tests.testing import staged_model
from tests.testing.onnx_evaluation import run_network
from tests.testing.onnx_models import import_model, model_of, table
from tests.testing.stored_model import push, url_of

KINDS = ("files", "threads", "updates", "cache", "tiny cache", "key graph", "key graph and cache")


def open_plain(directory: Path, **options: Any) -> InferenceSession:
    """A session that stages nothing: the oracle."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("inference_session.execution.staging.create.stage_on_host", lambda *_: None)
        return InferenceSession.open(directory, **options)


def open_updated(directory: Path) -> InferenceSession:
    """A session whose rows an update stream could change."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            "inference_session.execution.model.create_rows",
            lambda version, config, devices: changing_rows(version.open_tables()),
        )
        return InferenceSession.open(directory)


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("staged")
    version = root / "repository" / "staged" / "1"
    staged_model.write(version)
    staged_model.write(with_key_graph(version), key_graph=True)
    push(version, url_of(version))
    return version


def with_key_graph(directory: Path) -> Path:
    """The model that answers the same, and computes keys."""
    return directory.with_name("2")


@pytest.fixture(scope="module")
def plain(directory: Path) -> Iterator[InferenceSession]:
    with open_plain(directory) as session:
        yield session


@pytest.fixture(scope="module", params=KINDS)
def session(directory: Path, request: pytest.FixtureRequest) -> Iterator[InferenceSession]:
    """Sessions over rows of all kinds, that answer the same."""
    store = {"persistent_store": f"rocksdb://{directory.parents[2]}/db"}
    options: dict[str, dict[str, Any]] = {
        "files": {},
        "threads": {"lookup_threads": 2},
        "cache": {**store, "cache_bytes": 1 << 20},
        "tiny cache": {**store, "cache_bytes": 4000},
        "key graph": {},
        "key graph and cache": {**store, "cache_bytes": 4000},
    }
    kind = request.param
    directory = with_key_graph(directory) if "key graph" in kind else directory
    with open_updated(directory) if kind == "updates" else InferenceSession.open(directory, **options[kind]) as opened:
        yield opened


def arrays_of(requests: list[dict[str, Any]]) -> list[Any]:
    return [request[tensor.name] for request in requests for tensor in staged_model.SPEC.inputs]


def assert_same(found: Any, expected: Any) -> None:
    """Equal to the last bit."""
    assert isinstance(expected, dict), expected
    assert isinstance(found, dict), found
    assert list(found) == list(expected)
    for name, array in expected.items():
        assert found[name].dtype == array.dtype, name
        np.testing.assert_array_equal(found[name], array, err_msg=name)


batches = st.tuples(
    st.lists(st.tuples(st.integers(1, 90), st.integers(0, 6)), min_size=1, max_size=6),
    st.integers(0, 4),
    st.integers(0, 2**32 - 1),
)


@settings(max_examples=60)
@given(batch=batches, again=st.booleans())
def test_staged_requests_are_answered_as_any_others(
    session: InferenceSession, plain: InferenceSession, batch: Any, again: bool
) -> None:
    """Joined or alone, of any sizes, with bags of other lengths in each request."""
    sizes, length, seed = batch
    rng = np.random.default_rng(seed)
    requests = [staged_model.inputs(n, rng, length=length, num_items=items) for n, items in sizes]
    before = session.stats()

    for _ in range(1 + again):  # the second time over what the first has bound
        found = session.fast_path.run(arrays_of(requests), len(requests))

    expected = plain.run_many([Request(request) for request in requests])
    assert found is not None
    for answer, wanted in zip(found.split(), expected, strict=True):
        assert_same(answer, wanted)
    after = session.stats()
    assert after["requests"] - before["requests"] == len(requests) * (1 + again)
    assert after["samples"] - before["samples"] == sum(n for n, _ in sizes) * (1 + again)
    assert after["batches"] - before["batches"] == 1 + again
    assert after["failed_requests"] == before["failed_requests"]


def test_a_batch_without_an_answer_is_counted_once(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As a failed request: every way of answering it finds that its outputs do not fit together."""

    def fail(*_: object) -> None:
        raise HotrowError("lengths")

    monkeypatch.setattr(Outputs, "predictions", fail)
    with InferenceSession.open(directory, warm_up_s=0) as session:
        with pytest.raises(HotrowError, match="lengths"):
            session.run(staged_model.inputs(5, np.random.default_rng(0)))
        stats = session.stats()
    assert (stats["requests"], stats["failed_requests"], stats["batches"], stats["samples"]) == (1, 1, 1, 5)


@pytest.mark.parametrize("key_graph", [False, True])
def test_what_is_counted_per_table_is_what_the_plain_way_counts(directory: Path, key_graph: bool) -> None:
    directory = with_key_graph(directory) if key_graph else directory
    requests = [staged_model.inputs(n, np.random.default_rng(n)) for n in (1, 7, 30)]
    counts = []
    for opened in (InferenceSession.open, open_plain):
        with opened(directory) as session:
            session.run_many([Request(request) for request in requests])
            counts.append(session.stats()["tables"])
    assert counts[0] == counts[1]
    assert sum(each["default_vectors"] for each in counts[0].values())


def test_every_way_of_asking_takes_it(
    directory: Path, plain: InferenceSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By name in any order, also of arrays that have been pickled; all outputs, some, or the predictions."""
    inputs = staged_model.inputs(5, np.random.default_rng(0))
    pickled = pickle.loads(pickle.dumps(inputs))  # noqa: S301  made here
    assert pickled["bag"].dtype is not inputs["bag"].dtype
    shuffled = dict(reversed(inputs.items()))
    expected = plain.run(inputs)
    with InferenceSession.open(directory) as session:
        monkeypatch.setattr(session.layout, "check", lambda _: pytest.fail("took the way of other requests"))
        assert_same(session.run(shuffled), expected)
        assert_same(session.run(pickled), expected)
        assert_same(session.run_many([Request(pickled), Request(inputs)])[0], expected)
        assert_same(session.run(inputs, ["OUTPUT0"]), {"OUTPUT0": expected["OUTPUT0"]})
        assert_same(
            session.run_many([Request(inputs, ("click", "flags_out"))] * 2)[1],
            plain.run(inputs, ["click", "flags_out"]),
        )
        np.testing.assert_array_equal(session.predict(inputs), expected["OUTPUT0"])


def misaligned(array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    memory = np.zeros(array.nbytes + 1, np.uint8)
    copy = memory[1:].view(array.dtype).reshape(array.shape)
    copy[...] = array
    return copy


def read_only(array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    array = array.copy()
    array.flags.writeable = False
    return array


@pytest.mark.parametrize("form", [misaligned, read_only])
@pytest.mark.parametrize("name", ["packed", "codes", "items", "factors", "steps", "flags"])
def test_memory_of_any_kind_is_read(directory: Path, plain: InferenceSession, form: Any, name: str) -> None:
    inputs = staged_model.inputs(9, np.random.default_rng(1))
    with InferenceSession.open(directory) as session:
        found = session.fast_path.run(arrays_of([{**inputs, name: form(inputs[name])}]), 1)
    assert found is not None
    assert_same(found.split()[0], plain.run(inputs))


def test_only_numpy_arrays_take_memory(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And, on a GPU, the device: inputs that lie there would wait for the batch before only to be refused."""
    inputs = staged_model.inputs(3, np.random.default_rng(4))
    with InferenceSession.open(directory) as session:
        pool = session.replicas.all[0].staging_pool
        taken: list[None] = []
        assert pool is not None
        new = pool.new
        monkeypatch.setattr(pool, "new", lambda: taken.append(None) or new())

        pool.free.clear()
        found = session.run({name: array.tolist() for name, array in inputs.items()})

        assert len(taken) == 1, "before the lists were converted"
        pool.free.clear()
        assert_same(session.run(inputs), found)
        assert len(taken) == 2


class Kind(np.ndarray[Any, Any]):
    """A foreign subclass of arrays."""


UNFIT = {
    "strided": lambda a: np.repeat(a, 2, axis=0)[::2],
    "column by column": lambda a: np.asfortranarray(np.stack([a, a]))[0],
    "other bytes": lambda a: a.astype(a.dtype.newbyteorder(">")),
    "other type": lambda a: a.astype(np.float64),
    "unsigned": lambda a: a.astype(np.uint64),
    "more dimensions": lambda a: a[None],
    "fewer dimensions": lambda a: a[:, 0],
    "more columns": lambda a: np.concatenate([a, a], axis=1),
    "more samples": lambda a: np.concatenate([a, a]),
    "no samples": lambda a: a[:0],
    "a subclass": lambda a: a.view(Kind),
    "a list": lambda a: a.tolist(),
    "none": lambda _: None,
    "text": lambda _: "text",
    "objects": lambda a: a.astype(object),
    "huge": lambda a: np.zeros((len(a), 0, 2**40), a.dtype),
}


@pytest.mark.parametrize("name", ["packed", "codes", "bag"])
@pytest.mark.parametrize("form", UNFIT.values(), ids=UNFIT)
def test_what_does_not_fit_is_left_to_the_plain_way(
    directory: Path, plain: InferenceSession, form: Any, name: str
) -> None:
    """The general path answers it, or says what is wrong; other requests of the batch are not affected."""
    good = staged_model.inputs(6, np.random.default_rng(2))
    bad = {**good, name: form(good[name])}
    with InferenceSession.open(directory) as session:
        assert session.fast_path.run(arrays_of([good, bad]), 2) is None
        outcomes = [outcome(lambda each=each: each.run(bad)) for each in (session, plain)]
        assert type(outcomes[0]) is type(outcomes[1])
        if isinstance(outcomes[0], Exception):
            assert str(outcomes[0]) == str(outcomes[1])
        else:
            assert_same(*outcomes)
        if isinstance(bad[name], np.ndarray):
            answers = [each.run_many([Request(good), Request(bad)]) for each in (session, plain)]
            assert_same(answers[0][0], answers[1][0])
            assert str(answers[0][1]) == str(answers[1][1])


def outcome(call: Any) -> Any:
    try:
        return call()
    except (HotrowError, AttributeError, TypeError) as error:
        return error


@pytest.mark.parametrize("outputs", [5, "click", [["click"]]])
def test_outputs_that_are_no_list_of_names_fail_alone(directory: Path, outputs: Any) -> None:
    """They are an error of their request, as they are for models without this way."""
    inputs = staged_model.inputs(2, np.random.default_rng(0))
    with InferenceSession.open(directory) as session:
        good, bad = session.run_many([Request(inputs, np.array(["click"])), Request(inputs, outputs)])  # type: ignore[arg-type]
        assert isinstance(good, dict)
        np.testing.assert_array_equal(good["click"], session.run(inputs)["click"])
        assert isinstance(bad, InvalidRequestError)


def test_names_that_do_not_fit_get_their_messages(directory: Path) -> None:
    inputs = staged_model.inputs(2, np.random.default_rng(0))
    with InferenceSession.open(directory) as session:
        with pytest.raises(InvalidRequestError, match="no input 'more'"):
            session.run({**inputs, "more": inputs["bag"]})
        with pytest.raises(InvalidRequestError, match="'bag' is missing"):
            session.run({("bags" if name == "bag" else name): array for name, array in inputs.items()})
        with pytest.raises(InvalidRequestError, match="no output 'x'"):
            session.run(inputs, ["x"])
        with pytest.raises(InvalidRequestError, match=r"no output \['click'\]"):
            session.run(inputs, [["click"]])  # type: ignore[list-item]
        with pytest.raises(InvalidRequestError, match="outputs are 5, expected a list of names"):
            session.run(inputs, 5)  # type: ignore[arg-type]
        assert session.fast_path.run(arrays_of([inputs])[:-1], 1) is None
        assert session.stats()["failed_requests"] == 4


def test_sizes_that_have_to_agree(directory: Path) -> None:
    """The lengths of requests in a batch, where they are no bags."""
    rng = np.random.default_rng(0)
    first, second = staged_model.inputs(2, rng, length=3), staged_model.inputs(2, rng, length=4)
    with InferenceSession.open(directory) as session:
        assert session.fast_path.run(arrays_of([first, second]), 2) is None
        answers: list[Any] = session.run_many([Request(first), Request(second)])
        assert [answer["alone_out"].shape[1] for answer in answers] == [3, 4]


def test_batches_that_are_too_large_take_the_plain_way(
    directory: Path, plain: InferenceSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    inputs = staged_model.inputs(50, np.random.default_rng(0))
    monkeypatch.setattr(staged, "MAX_BYTES", 10_000)
    monkeypatch.setattr(staged, "MAX_REQUESTS", 3)
    with InferenceSession.open(directory) as session:
        assert session.fast_path.run(arrays_of([inputs]), 1) is None
        assert_same(session.run(inputs), plain.run(inputs))
        one = staged_model.inputs(1, np.random.default_rng(0))
        assert session.fast_path.run(arrays_of([one] * 20), 20) is None


def test_outputs_of_many_shapes_take_bounded_memory(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each shape's outputs have memory of their own, which is kept for the next batch of that shape."""
    monkeypatch.setattr("inference_session.execution.staging.key_graph.MAX_BYTES", 1 << 20)
    batches = [staged_model.inputs(n, np.random.default_rng(0), length=50) for n in range(1, 61)]
    num_bytes = 0
    with InferenceSession.open(directory) as session:
        session.run(batches[-1])  # the memory of its inputs and vectors is enough for the others
        tracemalloc.start()
        for inputs in batches:
            for _ in range(2):
                assert session.fast_path.run(arrays_of([inputs]), 1) is not None
            num_bytes += sum(array.nbytes for array in session.run(inputs).values())
        kept_bytes, _ = tracemalloc.get_traced_memory()
        tracemalloc.stop()
    assert num_bytes > 5 << 20
    assert kept_bytes < 3 << 20


def test_batches_of_many_numbers_of_requests_share_their_counts(directory: Path) -> None:
    """One array has the unknown keys of any of them: with one for each number, 4,096 numbers took gigabytes."""
    one = staged_model.inputs(1, np.random.default_rng(0))
    with InferenceSession.open(directory) as session:
        for num_requests in (3, 5):
            assert session.fast_path.run(arrays_of([one] * num_requests), num_requests) is not None
        pool = session.replicas.all[0].staging_pool
        assert pool is not None
        (staging,) = pool.free
        records = staging._records  # type: ignore[attr-defined]  # of a HostStaging
    assert np.shares_memory(records[3].lookup.num_unknown, records[5].lookup.num_unknown)


def test_more_elements_than_allowed_are_refused(directory: Path) -> None:
    inputs = staged_model.inputs(50, np.random.default_rng(0))
    with (
        InferenceSession.open(directory, max_keys_per_request=249) as session,
        pytest.raises(InvalidRequestError, match="250 elements"),
    ):
        session.run(inputs)


def test_unknown_keys_are_refused_where_they_have_to_be(directory: Path) -> None:
    inputs = staged_model.inputs(5, np.random.default_rng(0))
    known = {name: np.zeros_like(array) for name, array in inputs.items()}
    with InferenceSession.open(directory, unknown_keys="reject") as session:
        assert session.fast_path.run(arrays_of([known]), 1) is not None
        with pytest.raises(HotrowError, match="unknown keys: "):
            session.run(inputs)
        assert session.stats()["failed_requests"] == 1


def test_updates_are_answered_at_once(directory: Path) -> None:
    """Rows that change, come and go between two batches of one shape."""
    inputs = {name: np.ones_like(array) for name, array in staged_model.inputs(3, np.random.default_rng(0)).items()}
    with open_updated(directory) as session:
        assert session.fast_path.run(arrays_of([inputs]), 1) is not None
        session.rows.writer.update("wide", np.array([1]), np.full((1, 16), 7, np.float32))
        answer = session.run(inputs)
        np.testing.assert_array_equal(answer["alone_out"], np.full((3, 3, 16), 7))
        session.rows.writer.erase("wide", np.array([1]))
        unknown = session.stats()["tables"]["wide"]["default_vectors"]
        answer = session.run(inputs)
        np.testing.assert_array_equal(answer["alone_out"], np.full((3, 3, 16), 2))
        assert session.stats()["tables"]["wide"]["default_vectors"] - unknown == 3 + 9


@pytest.mark.parametrize("key_graph", [False, True])
def test_threads_have_memory_of_their_own(directory: Path, plain: InferenceSession, key_graph: bool) -> None:
    """Also while rows come and go in a cache, and where keys are computed."""
    requests = [staged_model.inputs(n, np.random.default_rng(n)) for n in range(1, 9)]
    expected = [plain.run(request) for request in requests]
    wrong: list[int] = []
    store = f"rocksdb://{directory.parents[2]}/db"
    directory = with_key_graph(directory) if key_graph else directory
    with InferenceSession.open(directory, persistent_store=store, cache_bytes=4000) as session:

        def ask(number: int) -> None:
            for i in range(40):
                at = (number + i) % len(requests)
                found = session.fast_path.run(arrays_of([requests[at]]), 1)
                same = found and all(map(np.array_equal, found.split()[0].values(), expected[at].values()))
                wrong.extend([] if same else [at])

        threads = [threading.Thread(target=ask, args=(number,)) for number in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert not wrong


@pytest.mark.parametrize("outputs", [None, ("click",), ("click", "codes_out")])
def test_answers_stay_as_they_are(directory: Path, outputs: tuple[str, ...] | None) -> None:
    """Later batches do not write over them."""
    first, second = (staged_model.inputs(4, np.random.default_rng(seed)) for seed in (0, 1))
    with InferenceSession.open(directory) as session:
        answers = [session.run(first, outputs) for _ in range(3)]
        kept = [{name: array.copy() for name, array in answer.items()} for answer in answers]
        for _ in range(3):
            session.run(second, outputs)
        for answer, copy in zip(answers, kept, strict=True):
            assert_same(answer, copy)


def test_where_headers_cannot_be_read_nothing_is_staged(
    directory: Path, plain: InferenceSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    inputs = staged_model.inputs(4, np.random.default_rng(0))
    monkeypatch.setattr(staged, "can_read_arrays", lambda: False)
    with InferenceSession.open(directory) as session:
        assert session.fast_path.run(arrays_of([inputs]), 1) is None
        assert_same(session.run(inputs), plain.run(inputs))


def test_headers_are_where_they_are_looked_for() -> None:
    """On every Python and NumPy that is tested; else hotrow is slower than necessary."""
    assert array_headers.can_read_arrays()


@pytest.mark.parametrize("place", ["DATA", "RANK", "SIZES", "STRIDES", "DTYPE", "FLAGS", "LIST_ITEMS", "OBJECT_TYPE"])
def test_headers_that_lie_elsewhere_are_not_read(place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each place is compared with what Python says."""
    monkeypatch.setattr(array_headers, place, getattr(array_headers, place) - 8)
    assert not array_headers.can_read_arrays.__wrapped__()


def test_networks_may_refuse_values(tmp_path: Path) -> None:
    """The one request gets the error, the others their answers."""
    graph = (
        "g (int64[n, 1] ids, int64[n] at) => (float[n, 4] y)"
        " { e = Gather(emb, ids) f = Flatten(e) s = Gather(few, at) y = Add(f, s) }"
    )
    few = table(3, 4)
    version = import_model(tmp_path, model_of(graph, {"emb": table(), "few": few})).version_dir
    good, bad = ({"ids": np.array([[1]]), "at": np.array([at])} for at in (2, 3))
    with InferenceSession.open(version) as session:
        answers: list[Any] = session.run_many([Request(good), Request(bad)])
        assert isinstance(answers[1], InvalidRequestError)
        np.testing.assert_allclose(answers[0]["y"], table()[[1]] + few[[2]])


def test_outputs_whose_shapes_follow_from_values(tmp_path: Path) -> None:
    """Such outputs do not stay bound to memory of one size."""
    onnx.save(model_of("g (float[n] x) => (int64[1, m] y) { y = NonZero(x) }", {}), tmp_path / "m.onnx")
    engine = OnnxEngine(NetworkFile(tmp_path / "m.onnx"), num_threads=1)
    x = np.zeros(5, np.float32)
    run = engine.bind({"x": x}, ["y"])
    assert run is not None
    for places in ([1, 3], [0, 4], [2], [0, 1, 2], [2], [], [1, 3]):
        x[:] = 0
        x[places] = 1
        np.testing.assert_array_equal(run.run()[0], [places])
    assert engine.bind({"x": x}, []) is None


MADE = {
    "wrap": "n_{b} = Less({a}, zero) w_{b} = Add({a}, {x}) {b} = Where(n_{b}, w_{b}, {a})",  # as JAX and Keras write it
    "int32": "c_{b} = Cast<to = 6>({a}) {b} = Cast<to = 7>(c_{b})",
    "float": "c_{b} = Cast<to = 1>({a}) {b} = Cast<to = 7>(c_{b})",
    "reversed": "r_{b} = Neg({a}) {b} = Add(r_{b}, {x})",
    **{kind: f"{{b}} = {kind}({{a}}, {{x}})" for kind in ("Mod", "Max", "Min", "Add", "Mul")},
}
"""How a key graph may make keys `b` of keys `a` and a number `x`."""


@settings(max_examples=10)
@given(
    steps=st.lists(st.tuples(st.sampled_from(sorted(MADE)), st.integers(-3000, 3000).filter(bool)), max_size=4),
    dtype=st.sampled_from(["int32", "int64", "uint32"]),
    seed=st.integers(0, 2**32 - 1),
)
def test_keys_that_a_graph_computes(
    steps: list[tuple[str, int]], dtype: str, seed: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Any graph gives the answers of ONNX Runtime on the whole model, for batches of changing sizes."""
    lines = [MADE[kind].format(x=f"x{i}", a=f"k{i}", b=f"k{i + 1}") for i, (kind, _) in enumerate(steps)]
    graph = f"""m ({dtype}[b, 3] ids, int64[b] more) => (float[b, 16] y) {{ k0 = Cast<to = 7>(ids) {" ".join(lines)}
        k = Mod(k{len(steps)}, rows) v = Gather(w, k) f = Flatten(v)
        shifted = Add(more, rows) m = Mod(shifted, rows) u = Gather(w, m) y = Concat<axis = 1>(f, u) }}"""
    numbers = {f"x{i}": np.array(number) for i, (_, number) in enumerate(steps)}
    weights = {"w": table(), "rows": np.array(1000), "zero": np.array(0), **numbers}
    folder, rng, limits = tmp_path_factory.mktemp("keys"), np.random.default_rng(seed), np.iinfo(dtype)
    directory = import_model(folder, model_of(graph, weights)).version_dir
    ends = [limits.min, limits.min + 1, limits.max, limits.max - 1, 0]
    with InferenceSession.open(directory) as session:
        for num_requests, num_samples in ((1, 1), (3, 2), (1, 5), (1, 1), (2, 40), (3, 2), (1, 5)):
            drawn = rng.integers(max(limits.min, -5000), 5000, (num_requests * num_samples, 3))
            ids = np.where(rng.random(drawn.shape) < 0.1, rng.choice(ends, drawn.shape), drawn).astype(dtype)
            more = rng.integers(-1000, 1000, len(ids))
            parts = zip(np.split(ids, num_requests), np.split(more, num_requests), strict=True)
            found = session.fast_path.run([array for part in parts for array in part], num_requests)
            expected = run_network(folder / "model.onnx", {"ids": ids, "more": more})["y"]
            assert found is not None
            np.testing.assert_array_equal(np.concatenate([each["y"] for each in found.split()]), expected)


def test_keys_that_a_graph_puts_in_one_list(tmp_path: Path) -> None:
    """Several rows for each sample, as `(ids + offsets).view(-1)` makes them, with pooling and without."""
    text = """m (int64[n, 3] ids, int64[n, 2, 4] bags) => (float[n, 12] y, float[n, 8] z) {
        a = Add(ids, shifts) list = Reshape(a, all) v = Gather(w, list) y = Reshape(v, threes)
        b = Mod(bags, rows) pairs = Reshape(b, fours) u = Gather(w, pairs) p = ReduceSum<keepdims = 0>(u, last)
        z = Reshape(p, eights) }"""
    shapes = {"all": [-1], "threes": [-1, 12], "fours": [-1, 4], "eights": [-1, 8]}
    constants = {name: np.array(shape) for name, shape in shapes.items()}
    constants |= {"shifts": np.array([0, 300, 600]), "rows": np.array(1000), "last": np.array([1]), "w": table()}
    report, rng = import_model(tmp_path, model_of(text, constants)), np.random.default_rng(0)
    assert [lookup.pooling for lookup in report.spec.lookups] == ["none", "sum"]
    with InferenceSession.open(report.version_dir) as session:
        for num_requests, num_samples in ((1, 1), (3, 2), (1, 5), (1, 1), (2, 40), (3, 2), (1, 6)):
            requests = [
                {"ids": rng.integers(0, 300, (num_samples, 3)), "bags": rng.integers(0, 5000, (num_samples, 2, 4))}
                for _ in range(num_requests)
            ]
            found = session.fast_path.run([array for each in requests for array in each.values()], num_requests)
            assert found is not None
            for request, answer in zip(requests, found.split(), strict=True):
                for name, expected in run_network(tmp_path / "model.onnx", request).items():
                    np.testing.assert_allclose(answer[name], expected, rtol=1e-5, atol=1e-6)


def test_key_graphs_may_refuse_values(tmp_path: Path) -> None:
    """The one request gets the error, the others their answers, and later requests are staged as before."""
    text = """m (int64[n] at, int64[n] more) => (float[n, 4] y) {
        k = Gather(few, at) j = Add(k, more) v = Gather(w, j) y = Neg(v) }"""
    few, vectors = np.arange(500)[::-1].copy(), table()
    directory = import_model(tmp_path, model_of(text, {"few": few, "w": vectors})).version_dir
    good, bad = ({"at": np.array([at]), "more": np.array([3])} for at in (2, 500))
    with InferenceSession.open(directory) as session:
        for requests in ([good, bad], [good, good], [good, good], [bad, good], [good, good]):
            staged_answer = session.fast_path.run([array for each in requests for array in each.values()], 2)
            answers: list[Any] = session.run_many([Request(request) for request in requests])
            assert (staged_answer is None) == (bad in requests)
            for request, answer in zip(requests, answers, strict=True):
                if request is bad:
                    assert isinstance(answer, InvalidRequestError)
                else:
                    np.testing.assert_array_equal(answer["y"], -vectors[few[[2]] + 3])


def test_keys_of_contexts_and_candidates_are_computed(tmp_path: Path) -> None:
    """For a context that is given once, for one that is repeated, and for keys that follow from both."""
    text = """m (int64[n] user, int64[n, 3] clicks, int64[n] item, float[n, 4] price) => (float[n, 1] y) {
        ku = Mod(user, rows) vu = Gather(w, ku) kc = Max(clicks, zero) kd = Mod(kc, rows) vc = Gather(w, kd)
        pc = ReduceSum<keepdims = 0>(vc, one) both = Add(user, item) km = Mod(both, rows) vm = Gather(w, km)
        ki = Mod(item, rows) vi = Gather(w, ki) x = Concat<axis = 1>(vu, pc, vi, vm, price)
        h = MatMul(x, first) r = Relu(h) y = MatMul(r, last) }"""
    rng = np.random.default_rng(0)
    weights = {"first": rng.random((20, 8), np.float32), "last": rng.random((8, 1), np.float32)}
    numbers = {"rows": np.array(1000), "zero": np.array(0), "one": np.array([1])}
    model = model_of(text, {"w": table(), **numbers, **weights})
    directory = import_model(tmp_path, model, context=["user", "clicks"]).version_dir
    with InferenceSession.open(directory) as session:
        for num_requests, length in ((1, 1), (1, 5), (3, 5), (1, 5), (3, 1), (2, 7), (3, 5)):
            given = [
                {"user": rng.integers(0, 9999, 1), "clicks": rng.integers(-5, 9999, (1, 3))}
                for _ in range(num_requests)
            ]
            items = [
                {"item": rng.integers(0, 9999, length), "price": rng.random((length, 4), np.float32)} for _ in given
            ]
            repeated = [
                {name: np.repeat(array, length, axis=0) for name, array in context.items()} for context in given
            ]
            for contexts in (given, repeated):
                requests = [{**context, **item} for context, item in zip(contexts, items, strict=True)]
                arrays = [request[tensor.name] for request in requests for tensor in session.spec.inputs]
                found = session.fast_path.run(arrays, num_requests)
                assert found is not None
                for answer, context, item in zip(found.split(), repeated, items, strict=True):
                    expected = run_network(tmp_path / "model.onnx", {**context, **item})["y"]
                    np.testing.assert_allclose(answer["y"], expected, rtol=1e-5)


@pytest.mark.parametrize(
    "keys",
    [
        "z = Mul(ids, zero) i = Equal(z, ids) p = NonZero(i) q = Squeeze(p, first) k = Mul(q, q)",
        "distinct = Unique(ids) k = Abs(distinct)",
    ],
)
def test_keys_whose_shape_follows_from_values_are_left_to_the_plain_way(tmp_path: Path, keys: str) -> None:
    text = f"""m (int64[n] ids) => (float[n, 4] y) {{ {keys} v = Gather(w, k) s = ReduceSum<keepdims = 0>(v, first)
        c = Unsqueeze(ids, last) f = Cast<to = 1>(c) y = Add(f, s) }}"""
    weights = {"w": table(), "zero": np.array(0), "first": np.array([0]), "last": np.array([1])}
    directory = import_model(tmp_path, model_of(text, weights)).version_dir
    assert (directory / "keys.onnx").exists()
    with InferenceSession.open(directory) as session:
        assert session.replicas.all[0].staging_pool is not None
        for ids in ([1, 2], [1, 2], [0, 2], [5, 5], [0, 0], [1, 2], [3, 0]):
            inputs = {"ids": np.array(ids)}
            expected = run_network(tmp_path / "model.onnx", inputs)["y"]
            for _ in range(2):
                np.testing.assert_allclose(session.run(inputs)["y"], expected, rtol=1e-6)


@pytest.mark.parametrize("module", ["key_graph", "host"])
def test_no_vectors_of_earlier_keys_are_read_where_plans_have_been_dropped(
    module: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fewer keys than the network's plan was made for: the others were those of a batch before."""
    monkeypatch.setattr(f"inference_session.execution.staging.{module}.are_full", lambda runs: len(runs) >= 2)
    text = """m (int64[n, 3] ids) => (float[n, 4] y) { c = Gather<axis = 1>(ids, zero)
        top = ReduceMax<keepdims = 1>(c, rows) some = Slice(ids, rows, top, columns) k = Abs(some)
        v = Gather(w, k) y = ReduceMax<keepdims = 0>(v, columns) }"""
    constants = {"w": table(), "zero": np.array(0), "rows": np.array([0]), "columns": np.array([1])}
    directory = import_model(tmp_path, model_of(text, constants)).version_dir
    rng = np.random.default_rng(0)
    with InferenceSession.open(directory) as session:
        assert session.replicas.all[0].staging_pool is not None
        for num_samples, num_keys in ((2, 3), (3, 3), (4, 3), (4, 2), (2, 2), (3, 1), (5, 1), (5, 3), (2, 1), (3, 2)):
            inputs = {"ids": np.insert(rng.integers(0, 1000, (num_samples, 2)), 0, num_keys, axis=1)}
            expected = run_network(tmp_path / "model.onnx", inputs)["y"]
            np.testing.assert_array_equal(session.run(inputs)["y"], expected)


def test_a_bound_run_says_what_the_network_refuses(tmp_path: Path) -> None:
    onnx.save(
        model_of("g (int64[n] x) => (float[n, 4] y) { y = Gather(emb, x) }", {"emb": table(3)}), tmp_path / "m.onnx"
    )
    engine = OnnxEngine(NetworkFile(tmp_path / "m.onnx"), num_threads=1)
    x = np.array([1, 5])
    run = engine.bind({"x": x}, ["y"])
    assert run is not None
    for at in (0, 5, 1, 7, 2):  # before and after the outputs are bound
        x[1] = at
        if at > 2:
            with pytest.raises(InvalidRequestError, match="cannot compute these values"):
                run.run()
        else:
            np.testing.assert_array_equal(run.run()[0], table(3)[[1, at]])
    assert run.results is not None, "the outputs stay bound"


def test_what_passes_through_a_network_is_not_the_memory_that_it_was_in(tmp_path: Path) -> None:
    """Nor is it that of the first run's outputs, which ONNX Runtime allocates."""
    onnx.save(model_of("g (float[n] x) => (float[n] y) { y = Identity(x) }", {}), tmp_path / "m.onnx")
    x = np.zeros(5, np.float32)
    run = OnnxEngine(NetworkFile(tmp_path / "m.onnx"), num_threads=1).bind({"x": x}, ["y"])
    assert run is not None
    answers = []
    for i in range(4):
        x[:] = i
        found = run.run()[0]
        x[:] = 9
        answers.append(found.copy())
    np.testing.assert_array_equal(answers, np.repeat(np.arange(4), 5).reshape(4, 5))


@pytest.mark.parametrize("outputs", [None, ("OUTPUT0",), ("y", "x"), ("x", "OUTPUT0")])
@pytest.mark.parametrize("labels", ["float[b, 4] x, float[b, 4] y", "float[b] x, float[b] y"])
def test_each_batch_has_its_own_outputs(tmp_path: Path, labels: str, outputs: tuple[str, ...] | None) -> None:
    """Those that are joined to predictions too, when other requests of equal sizes follow."""
    last = "Identity(v)" if "4" in labels else "ReduceSum<keepdims = 0>(v, axis)"
    text = f"m (int64[b] k) => ({labels}) {{ v = Gather(w, k)  r = {last}  x = Sigmoid(r)  y = Tanh(r) }}"
    model = model_of(text, {"w": table(), "axis": np.array([1])})
    directory = import_model(tmp_path, model).version_dir
    rng = np.random.default_rng(0)
    with InferenceSession.open(directory) as session, open_plain(directory) as plain:
        for _ in range(4):
            requests = [{"k": rng.integers(0, 1000, n)} for n in (2, 3)]
            found = session.fast_path.run([request["k"] for request in requests], 2, outputs)
            expected = plain.run_many([Request(request, outputs) for request in requests])
            for answer, wanted in zip(found.split(), expected, strict=True):
                assert_same(answer, wanted)


class _FullMemory:
    """NumPy, whose `zeros` fails once, at the call of that number."""

    def __init__(self, fails_at: int) -> None:
        self._left = fails_at

    def __getattr__(self, name: str) -> Any:
        return getattr(np, name)

    def zeros(self, *arguments: Any) -> Any:
        self._left -= 1
        if self._left < 0:
            raise MemoryError
        return np.zeros(*arguments)


def test_requests_are_answered_after_a_lack_of_memory(
    directory: Path, plain: InferenceSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whichever array there was no memory for, the next batch finds arrays that fit each other."""
    rng = np.random.default_rng(1)
    requests = [staged_model.inputs(1, rng) for _ in range(staged._FIRST_REQUESTS + 1)]
    expected = plain.run_many([Request(request) for request in requests])
    with InferenceSession.open(directory) as session:
        for fails_at in range(3):
            with monkeypatch.context() as patch:
                patch.setattr(staged, "np", _FullMemory(fails_at))
                with pytest.raises(MemoryError):
                    session.fast_path.run(arrays_of(requests), len(requests))
        found = session.fast_path.run(arrays_of(requests), len(requests))

    assert found is not None
    for answer, wanted in zip(found.split(), expected, strict=True):
        assert_same(answer, wanted)


@pytest.mark.parametrize(("dtype", "readable"), [("int64", True), ("bool", True), ("object", False)])
@pytest.mark.parametrize("unit", ["", "datetime64", "timedelta64"])
def test_types_are_told_by_dtype_objects_that_stay(dtype: str, readable: bool, unit: str) -> None:
    """Of times, NumPy makes a new one each time: another type's could get the address of one that was freed."""
    assert is_readable(TensorSpec("x", unit or dtype, (-1,))) == (readable and not unit)


@pytest.mark.parametrize("shape", [(1, 1), (2, 2), (3, 1), (1, 3), (3, 4)])
def test_rows_without_a_dimension_of_their_own(tmp_path: Path, shape: tuple[int, int]) -> None:
    """A table of biases [rows] gives [samples, keys], not [samples, keys, 1], which broadcasts to another answer."""
    text = """m (int64[b, l] k) => (float[b, 4] y) { v = Gather(w, k)  bias = Gather(x, k)  f = Unsqueeze(bias, last)
        p = Softmax<axis = 1>(f)  r = Mul(v, p)  y = ReduceSum<keepdims = 0>(r, second) }"""
    weights = {"w": table(), "x": table()[:, 0].copy(), "last": np.array([-1]), "second": np.array([1])}
    directory = import_model(tmp_path, model_of(text, weights)).version_dir
    network = onnx.load(directory / "dense.onnx")
    for value in network.graph.input:
        value.type.tensor_type.ClearField("shape")  # some imported networks declare none
    onnx.save(network, directory / "dense.onnx")
    write_manifest(directory)
    keys = np.random.default_rng(0).integers(0, 1000, shape)

    with InferenceSession.open(directory) as session:
        joined = session.fast_path.run([keys], 1)

    factors = np.exp(weights["x"][keys])
    factors /= factors.sum(1, keepdims=True)
    assert joined is not None
    np.testing.assert_allclose(joined.split()[0]["y"], (weights["w"][keys] * factors[..., None]).sum(1), rtol=1e-5)

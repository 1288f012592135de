"""Sessions over several GPUs of one process: the answers of the processor, from each GPU, copied or sharded.

Runs where there are two CUDA devices: `make test PYTEST_ARGS="-m gpu"`.
"""

from __future__ import annotations

import gc
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from inference_session import InferenceSession
from inference_session.device.discovery import unusable, unusable_for_sessions
from inference_session.errors import ConfigurationError, SessionClosedError
from inference_session.execution.replicas import DeviceThread
from inference_session.versions import VersionManager
from tests.testing import small_model
from tests.testing.servers import PATIENCE_S

NO_PAIR = unusable_for_sessions(0) or unusable(1)
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(NO_PAIR is not None, reason=f"no two GPUs: {NO_PAIR}")]


@pytest.fixture(scope="module")
def version(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, small_model.Arrays]:
    """A version directory and its tables."""
    directory = tmp_path_factory.mktemp("gpus") / "1"
    return directory, small_model.write(directory)


@pytest.fixture(scope="module", params=["rows", "none", "auto"])
def session(request: pytest.FixtureRequest, version: tuple[Path, small_model.Arrays]) -> Iterator[InferenceSession]:
    """On two GPUs."""
    with InferenceSession.open(version[0], device="cuda:0,1", shard=request.param, warm_up_s=10) as opened:
        placement = opened.stats()["gpu"]
        assert placement["device"] == "cuda:0,1"
        assert len(placement["sharded"]) == (3 if request.param == "rows" else 0)
        yield opened


def assert_right(session: InferenceSession, tables: small_model.Arrays, num_samples: int, seed: int) -> None:
    """A random request has the answer that NumPy gives."""
    inputs = small_model.random_inputs(num_samples, np.random.default_rng(seed))
    answer = session.run(inputs)
    for name, values in small_model.expected(tables, inputs).items():
        np.testing.assert_allclose(answer[name], values, rtol=0, atol=1e-5)


@pytest.mark.parametrize("num_samples", [0, 1, 7, 64, 1000])
def test_all_outputs_agree_with_numpy(
    session: InferenceSession, version: tuple[Path, small_model.Arrays], num_samples: int
) -> None:
    """Plain, joined and pooled look-ups, float16 rows, default vectors, stored keys and row numbers."""
    for seed in range(5):
        assert_right(session, version[1], num_samples, seed)


def test_threads_are_answered_by_both_gpus(
    session: InferenceSession, version: tuple[Path, small_model.Arrays], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Requests at once get their own answers; two are on different GPUs at the same time."""
    met = threading.Barrier(2, timeout=PATIENCE_S)
    run = DeviceThread.run
    held = []

    def meet(thread: DeviceThread, work: Callable[[], object]) -> object:
        def together() -> object:
            held.append(threading.current_thread())
            if len(held) <= 2:
                met.wait()  # ends only if another request is being answered as well
            return work()

        return run(thread, together)

    with monkeypatch.context() as patch, ThreadPoolExecutor(2) as pool:
        patch.setattr(DeviceThread, "run", meet)
        list(pool.map(lambda seed: assert_right(session, version[1], 3, seed), range(2)))
    assert len(set(held)) == 2
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda seed: assert_right(session, version[1], 1 + seed % 50, seed), range(400)))


def test_both_gpus_look_rows_up_themselves(session: InferenceSession, version: tuple[Path, small_model.Arrays]) -> None:
    """`lookup` gives the rows of each table."""
    tables = version[1]
    assert np.array_equal(session.lookup("user.weight", np.arange(50)), tables["user_weight"])
    assert np.array_equal(session.lookup("hashed", tables["hashed/key"]), tables["hashed"])


def test_a_swap_is_one_for_all_gpus(tmp_path: Path) -> None:
    """Each answer is wholly of one content or the other, on each GPU, while the content is replaced again and again."""
    directory = tmp_path / "1"
    contents = [small_model.write(directory)]
    with VersionManager(
        directory, lambda: InferenceSession.open(directory, device="cuda:0,1", shard="rows")
    ) as versions:
        for seed in (1, 2, 3):
            other = tmp_path / f"other{seed}"
            contents.append(small_model.write(other, seed=seed))
            stop = threading.Event()

            def ask(number: int, stop: threading.Event = stop, seed: int = seed) -> None:
                rng = np.random.default_rng(number)
                while not stop.is_set():
                    inputs = small_model.random_inputs(5, rng)
                    with versions.lease() as session:
                        answer = session.run(inputs)
                    possible = [small_model.expected(each, inputs) for each in contents[seed - 1 : seed + 1]]
                    assert any(
                        all(np.allclose(answer[name], values, atol=1e-5) for name, values in each.items())
                        for each in possible
                    )

            with ThreadPoolExecutor(4) as pool:
                asking = [pool.submit(ask, number) for number in range(4)]
                directory.rename(tmp_path / f"old{seed}")
                other.rename(directory)
                assert versions.update()
                stop.set()
                for each in asking:
                    each.result()


def test_a_closed_session_answers_no_more(version: tuple[Path, small_model.Arrays]) -> None:
    """Requests under way on both GPUs are answered, or fail because the session is closed."""
    session = InferenceSession.open(version[0], device="cuda:all", shard="rows")
    asked = threading.Barrier(5, timeout=PATIENCE_S)

    def ask(number: int) -> None:
        for i in range(1000):
            if i == 20:
                asked.wait()
            try:
                assert_right(session, version[1], 5, number)
            except SessionClosedError:
                return
        raise AssertionError("never closed")

    with ThreadPoolExecutor(4) as pool:
        asking = [pool.submit(ask, number) for number in range(4)]
        asked.wait()
        session.close()
        for each in asking:
            each.result()


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"device": "cuda:0,99"}, "device cannot be 'cuda:0,99': this process sees"),
        ({"device": "cuda:0,1", "shard": "rows", "cache_bytes": 100}, "shard=rows needs .* may take 100"),
        ({"device": "cuda:0,1", "dense_precision": "bfloat16"}, "dense_precision cannot be 'bfloat16' on cuda:0"),
    ],
)
def test_what_cannot_be_served_is_refused(
    version: tuple[Path, small_model.Arrays], settings: dict[str, object], reason: str
) -> None:
    """When the version is opened, with the reason."""
    with pytest.raises(ConfigurationError, match=reason):
        InferenceSession.open(version[0], **settings)


def test_a_failed_gpu_makes_the_model_unavailable(tmp_path: Path) -> None:
    """Whichever of the GPUs fails: no request is answered, and readiness says why. The session can be closed."""
    small_model.write(tmp_path / "1")
    script = f"""
import numpy as np
import cupy
from inference_session import InferenceSession
from inference_session.errors import UnavailableError
from tests.testing import small_model
session = InferenceSession.open({str(tmp_path / "1")!r}, device="cuda:0,1", shard="rows")
inputs = small_model.random_inputs(4, np.random.default_rng(0))
for _ in range(5):
    session.run(inputs)
with cupy.cuda.Device(1):
    breaking = cupy.RawKernel('extern "C" __global__ void break_it(int* p) {{ *p = 1; }}', "break_it")
    breaking((1,), (1,), (np.uint64(16),))
    try:
        cupy.cuda.Device(1).synchronize()
    except Exception as error:
        print(error)
for _ in range(20):
    try:
        session.run(inputs)
    except UnavailableError as error:
        assert "has failed" in str(error), error
        break
else:
    raise AssertionError("answered")
assert "has failed" in session.failure
for _ in range(4):
    try:
        session.run(inputs)
    except UnavailableError as error:
        assert "has failed" in str(error), error
    else:
        raise AssertionError("answered")
session.close()
print("all as expected", flush=True)
import os
os._exit(0)
"""
    done = subprocess.run(
        [sys.executable, "-c", script], check=False, capture_output=True, text=True, timeout=200, cwd=Path.cwd()
    )
    assert "all as expected" in done.stdout, done.stdout + done.stderr


class OfTheOtherGpu:
    """Garbage that only a collection frees; its destructor leaves another GPU current."""

    def __init__(self) -> None:
        self.itself = self

    def __del__(self) -> None:
        from cupy.cuda import runtime

        runtime.setDevice(1)


def test_a_collection_of_garbage_keeps_the_gpu_of_a_request() -> None:
    """Whatever the destructors do that it runs in the middle of the request."""
    import cupy
    from cupy.cuda import runtime

    from inference_session.device.cuda import CudaDevice

    device = CudaDevice(0)
    with device.request():
        OfTheOtherGpu()
        gc.collect()
        assert runtime.getDevice() == 0
        assert cupy.cuda.get_current_stream().ptr == device.stream.ptr

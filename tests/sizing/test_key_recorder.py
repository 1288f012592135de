"""Recording the keys of a served model: what was asked for, per table, in bounded files."""

from __future__ import annotations

import json
import resource
from pathlib import Path

import numpy as np
import pytest

from inference_session import InferenceSession
from inference_session.errors import ConfigurationError, TraceFormatError, UnknownKeyError
from inference_session.sizing.key_recorder import KeyRecorder, read_recording
from inference_session.sizing.key_sample import KeySample
from tests.testing import small_model
from tests.testing.onnx_models import import_model, model_of, table
from tests.testing.servers import wait_until
from tests.testing.triton_models import write_ctr


def _recorded(folder: Path, num_tables: int = 3) -> dict[str, KeySample]:
    samples: dict[str, KeySample] = {}
    for part in read_recording(folder):
        assert part.table is not None
        sample = samples.setdefault(part.table, KeySample(10**6))
        sample.add_sampled(part.keys, part.num_keys or 0, part.halvings)
    assert len(samples) == num_tables
    return samples


def _only_folder(path: Path) -> Path:
    (folder,) = path.iterdir()
    return folder


def test_a_session_records_its_keys(tmp_path: Path) -> None:
    """Every key of every look-up is recorded by table, in order; keys of the warm-up are not."""
    small_model.write(tmp_path / "ctr" / "3")
    rng = np.random.default_rng(0)
    requests = [small_model.random_inputs(n, rng) for n in (1, 4, 9)]

    with InferenceSession.open(tmp_path / "ctr" / "3", record_keys=str(tmp_path / "keys")) as session:
        for request in requests:
            session.run(request)

    samples = _recorded(_only_folder(tmp_path / "keys"))
    users = np.concatenate([np.tile(request["user"][:, 0], 2) for request in requests])
    codes = np.concatenate([2 * request["codes"].ravel() for request in requests])
    items = np.concatenate([request["items"].ravel() for request in requests])
    assert samples["user_weight"].keys.tolist() == users.tolist()
    assert samples["code"].keys.tolist() == codes.tolist()
    assert samples["hashed"].keys.tolist() == items.tolist()
    assert samples["hashed"].num_keys == len(items)


def test_keys_of_a_refused_request_are_recorded_once(tmp_path: Path) -> None:
    """The fast path looks them up first, then `run_many`, which says which table they are unknown in."""
    write_ctr(tmp_path / "ctr" / "1")
    settings = {"record_keys": str(tmp_path / "keys"), "unknown_keys": "reject"}
    request = {"ids": np.array([[1, 2, 10**6]]), "dense": np.zeros((1, 2), np.float32)}

    with InferenceSession.open(tmp_path / "ctr" / "1", **settings) as session, pytest.raises(UnknownKeyError):
        session.run(request)

    samples = _recorded(_only_folder(tmp_path / "keys"), num_tables=1)
    assert samples["item"].keys.tolist() == [1, 2, 10**6]


def test_recording_goes_on_after_a_look_up_without_keys(tmp_path: Path) -> None:
    """All that a request with a kept context may need is there already."""
    text = """g (int64[n, 1] user, float[n, 4] item) => (float[n, 1] score) {
        u = Gather(users, user)
        flat = Squeeze(u, one)
        squared = Mul(flat, flat)
        product = Mul(squared, item)
        score = ReduceSum<keepdims = 1>(product, one)
    }"""
    model = model_of(text, {"users": table(), "one": np.array([1])})
    report = import_model(tmp_path, model, context=["user"])
    settings = {"record_keys": str(tmp_path / "keys"), "context_cache_bytes": 1 << 20}

    with InferenceSession.open(report.version_dir, **settings) as session:
        for user in (3, 3, 4):
            session.run({"user": np.array([[user]]), "item": np.zeros((2, 4), np.float32)})

    assert _recorded(_only_folder(tmp_path / "keys"), num_tables=1)["users"].keys.tolist() == [3, 4]


def test_nothing_is_recorded_unless_asked(tmp_path: Path) -> None:
    """Without the setting there is no file and no thread."""
    small_model.write(tmp_path / "ctr" / "1")

    with InferenceSession.open(tmp_path / "ctr" / "1") as session:
        session.run(small_model.random_inputs(2, np.random.default_rng(0)))

    assert [path.name for path in tmp_path.iterdir()] == ["ctr"]


def test_files_stay_within_their_bytes(tmp_path: Path) -> None:
    """A long recording keeps a fair sample: all uses of some keys, at a known rate."""
    small_model.write(tmp_path / "ctr" / "1")
    rng = np.random.default_rng(0)
    asked = []

    settings = {"record_keys": str(tmp_path / "keys"), "record_keys_bytes": 3 * 4096}
    with InferenceSession.open(tmp_path / "ctr" / "1", **settings) as session:
        for _ in range(20):
            request = small_model.random_inputs(100, rng)
            asked.append(request["items"].ravel())
            session.run(request)

    folder = _only_folder(tmp_path / "keys")
    sample = _recorded(folder)["hashed"]
    kept = set(sample.keys.tolist())
    (file,) = folder.glob("hashed.*.keys")
    assert file.stat().st_size <= 4096
    assert sample.rate < 1
    assert sample.keys.tolist() == [key for key in np.concatenate(asked).tolist() if key in kept]
    assert sample.num_keys == 20 * 500


def test_recording_goes_on_after_a_full_disk(tmp_path: Path) -> None:
    """Meanwhile keys are dropped and counted. No key is torn, and none is counted that is not there."""
    small_model.write(tmp_path / "ctr" / "1")
    requests = [small_model.random_inputs(6000, np.random.default_rng(seed)) for seed in range(3)]
    unlimited = resource.getrlimit(resource.RLIMIT_FSIZE)

    with InferenceSession.open(tmp_path / "ctr" / "1", record_keys=str(tmp_path / "keys")) as session:
        folder = _only_folder(tmp_path / "keys")
        session.run(requests[0])
        wait_until(lambda: _recorded(folder)["hashed"].num_keys == 30_000, "the first keys")
        resource.setrlimit(resource.RLIMIT_FSIZE, (300_001, unlimited[1]))
        try:
            session.run(requests[1])
            wait_until(lambda: _num_dropped(folder) >= 30_000, "keys to be dropped")
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, unlimited)
        session.run(requests[2])

    asked = [requests[number]["items"].ravel() for number in (0, 2)]
    assert _recorded(folder)["hashed"].keys.tolist() == np.concatenate(asked).tolist()
    assert _recorded(folder)["hashed"].num_keys == 60_000


def _num_dropped(folder: Path) -> int:
    return int(json.loads((folder / "trace.json").read_text())["dropped_keys"])


def test_a_folder_that_cannot_be_made_fails_the_load(tmp_path: Path) -> None:
    """The error names the setting."""
    small_model.write(tmp_path / "ctr" / "1")
    (tmp_path / "file").touch()

    with pytest.raises(ConfigurationError, match="setting 'record_keys' cannot be"):
        InferenceSession.open(tmp_path / "ctr" / "1", record_keys=str(tmp_path / "file"))


def test_closing_twice_is_harmless(tmp_path: Path) -> None:
    """A recorder without keys leaves an empty recording."""
    recorder = KeyRecorder(tmp_path, ("t",), max_bytes=4096)
    recorder.close()
    recorder.close()

    assert _recorded(tmp_path, 1)["t"].num_keys == 0


@pytest.mark.parametrize(
    "summary",
    ["", "[]", '{"tables": 3}', '{"tables": {"t": {"num_keys": -1}}}', '{"tables": {"../t": {}}}'],
)
def test_a_damaged_summary_is_named(tmp_path: Path, summary: str) -> None:
    """The amount that was recorded is never guessed."""
    (tmp_path / "trace.json").write_text(summary)

    with pytest.raises(TraceFormatError, match=r"trace\.json"):
        list(read_recording(tmp_path))


def test_a_recording_is_read_while_it_is_written(tmp_path: Path) -> None:
    """If a table has two files, the one with fewer keys counts: it is complete, and the other is removed soon."""
    recorder = KeyRecorder(tmp_path, ("t",), max_bytes=4096)
    recorder.close()
    np.arange(3).tofile(tmp_path / "t.2.keys")
    (tmp_path / ".t.3.keys").touch()

    sample = _recorded(tmp_path, 1)["t"]

    assert sample.rate == 0.25
    assert set(sample.keys.tolist()) <= {0, 1, 2}


def test_keys_without_their_file(tmp_path: Path) -> None:
    """A recording that has lost a file says so."""
    KeyRecorder(tmp_path, ("t",), max_bytes=4096).close()
    (tmp_path / "t.0.keys").unlink()

    with pytest.raises(TraceFormatError, match="names table 't', but the file with its keys is missing"):
        list(read_recording(tmp_path))


def test_a_folder_of_recordings_names_them(tmp_path: Path) -> None:
    """For the setting's folder, the error lists the recordings in it."""
    (tmp_path / "ctr-1-x").mkdir()
    KeyRecorder(tmp_path / "ctr-1-x", ("t",), max_bytes=4096).close()

    with pytest.raises(
        TraceFormatError, match=r"not a recording, because it has no trace\.json; recordings below it: .*ctr-1-x"
    ):
        list(read_recording(tmp_path))

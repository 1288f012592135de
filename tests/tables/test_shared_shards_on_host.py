"""Shards that several processes share, without a GPU: the driver's calls are made up, over memory that they do share.

What kernels read is tested where there are GPUs (`test_shared_shards.py`).
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from inference_session.device.placement import Place, bytes_on_each
from inference_session.platform.open_files import FileExchange, OpenFiles, close_all, private_folder
from tests.testing import sharing_process
from tests.testing.fake_driver import GRANULARITY
from tests.testing.forked import prepare_forks
from tests.testing.sharing_process import NUM_GPUS, SharingProcess
from tests.testing.tables_of_all_kinds import SHAPES, specs, write_files

SHARDED = [name for name, num_rows, *_ in SHAPES if num_rows]
Start = Callable[..., SharingProcess]


@pytest.fixture(scope="module", autouse=True)
def forks() -> None:
    """Processes fork from one that has imported what they need."""
    prepare_forks(sharing_process.__name__)


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A version's tables."""
    folder = tmp_path_factory.mktemp("original")
    write_files(folder)
    return folder


@pytest.fixture
def folder(original: Path, tmp_path: Path) -> Path:
    """A version's tables, which no other test shares."""
    return shutil.copytree(original, tmp_path / "version")


@pytest.fixture(autouse=True)
def meeting(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder for temporary files."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return private_folder()


@pytest.fixture
def start() -> Iterator[Start]:
    """Starts processes, which end with the test."""
    running: list[SharingProcess] = []

    def started(own: int, **settings: int) -> SharingProcess:
        running.append(SharingProcess(own, **settings))
        return running[-1]

    yield started
    for process in running:
        process.kill()


def places(*sharded: str) -> list[Place]:
    """Where tables lie if these are divided."""
    return ["shards" if spec.name in sharded else "device" for spec in specs()]


def test_one_process_makes_the_rows_and_the_others_map_them(start: Start, folder: Path) -> None:
    """Whichever comes first, and whichever ends; each looks up as the GPU that it has."""
    processes = [start(own) for own in range(NUM_GPUS)]
    for process in processes:
        process.send("open", folder=str(folder))
    answers = [process.answer() for process in processes]
    assert sorted(answer["created"] for answer in answers) == [0, 0, NUM_GPUS]
    for own, answer in enumerate(answers):
        assert (answer["right"], answer["sharded"], answer["parts"]) == (True, SHARDED, [own] * len(SHARDED))
    processes[0].kill()
    assert processes[1].call("close")["held"] == 0
    assert processes[2].call("check")["right"]
    again = start(0).call("open", folder=str(folder))
    assert (again["right"], again["created"]) == (True, 0)


def test_processes_index_and_copy_at_the_same_time(start: Start, folder: Path) -> None:
    """Once the rows that they share are there: the other tables take minutes, too."""
    first = start(0)
    first.call("pause")
    first.send("open", folder=str(folder))
    assert first.answer() == "paused"
    answer = start(1).call("open", folder=str(folder))
    assert (answer["right"], answer["created"]) == (True, 0)
    first.send("go on")
    assert first.answer()["right"]


@pytest.mark.parametrize("is_first", [True, False])
def test_a_call_that_fails_leaves_nothing_behind(start: Start, folder: Path, meeting: Path, is_first: bool) -> None:
    """At any of them, in the process that makes the memory and in one that maps it; the next attempt succeeds."""
    other, process = start(0), start(1)
    if not is_first:
        other.call("open", folder=str(folder))
    before, sockets = process.call("held"), len([*meeting.iterdir()]) if not is_first else 1
    errors: list[str] = []
    while "error" in (answer := process.call("open", folder=str(folder), failing=len(errors))):
        errors.append(answer["error"])
        assert process.call("held") == before
        assert len([*meeting.iterdir()]) == sockets
    assert len(errors) == NUM_GPUS * (5 if is_first else 4)
    assert (answer["right"], answer["created"]) == (True, NUM_GPUS * is_first)
    assert sum("memory ran out on cuda:" in error for error in errors) == NUM_GPUS * is_first
    for error in errors:
        assert error.endswith(("or use more GPUs or smaller tables", "failed with CUDA's error 1; set shard=none"))
    assert process.call("close") == before


def test_tables_that_nobody_closes_give_their_memory_back(start: Start, folder: Path, meeting: Path) -> None:
    """Once nothing refers to them, as closed ones do."""
    process = start(0)
    before = process.call("held")
    for command in ("forget", "close"):
        process.call("open", folder=str(folder))
        assert len([*meeting.iterdir()]) == 2
        assert process.call(command) == before
        assert [path.stem for path in meeting.iterdir()] == ["lock"]


def test_processes_that_cannot_share_read_from_host_memory(start: Start, folder: Path, meeting: Path) -> None:
    """Tables that do not fit, unless `rows` asks for shards; those that fit need no other process."""
    meeting.chmod(0o755)
    process = start(0)
    error = process.call("open", folder=str(folder))["error"]
    assert error.startswith(f"shard cannot be 'rows': {meeting} must be a folder of this user")
    answer = process.call("open", folder=str(folder), shard="auto", cache_bytes=300_000)
    assert (answer["sharded"], answer["on_host"]) == ([], ["wide"])
    answer = process.call("open", folder=str(folder), shard="auto")
    assert (answer["sharded"], answer["on_host"]) == ([], [])


def test_gpus_that_cannot_read_each_other_are_mentioned_only_where_tables_do_not_fit(
    start: Start, folder: Path
) -> None:
    """Instances on GPUs without such a way between them are usual: nobody asked for shards there."""
    process = start(0, peers=False)
    assert process.call("open", folder=str(folder), shard="auto")["log"] == []
    (warning,) = process.call("open", folder=str(folder), shard="auto", cache_bytes=300_000)["log"]
    assert warning.startswith("Rows are not sharded: cuda:0 cannot read the memory of cuda:1 ")


def test_rows_of_other_files_or_settings_are_not_shared(start: Start, folder: Path, original: Path) -> None:
    """Equal contents are not enough: what is compared is the files."""
    start(0).call("open", folder=str(folder))
    process = start(1)
    for settings in ({"folder": str(original)}, {"folder": str(folder), "cache_bytes": 32 << 20}):
        answer = process.call("open", **settings)
        assert (answer["right"], answer["created"]) == (True, NUM_GPUS)
        process.call("close")


def test_a_version_that_links_to_the_files_of_another_shares_its_rows(
    start: Start, folder: Path, tmp_path: Path
) -> None:
    """As one does in which only the network is new; the links do not keep the first version from being opened again."""
    process = start(0)
    process.call("open", folder=str(folder))
    linked = shutil.copytree(folder, tmp_path / "linked", copy_function=os.link)
    for each in (linked, folder):
        answer = start(1).call("open", folder=str(each))
        assert (answer["right"], answer["created"]) == (True, 0)


def test_files_that_are_replaced_while_they_are_opened_are_others(start: Start, folder: Path, tmp_path: Path) -> None:
    """A process passes on the rows that it has mapped, not those that have the name by then."""
    write_files(tmp_path / "new", seed=1)
    first = start(0)
    first.call("replace", folder=str(folder), by=str(tmp_path / "new"))
    assert first.call("open", folder=str(folder))["right"]
    second = start(1).call("open", folder=str(folder))
    assert (second["right"], second["created"]) == (True, NUM_GPUS)


def test_the_first_process_says_where_tables_lie(start: Start, folder: Path) -> None:
    """By its own free memory, and also to a process on a GPU with more of it."""
    needed = bytes_on_each(specs(), places("wide"), NUM_GPUS)
    all_of_them = bytes_on_each(specs(), places(), NUM_GPUS)
    first = start(0, free_bytes=needed * 5 // 4 + 2).call("open", folder=str(folder), shard="auto")
    assert (first["sharded"], first["right"]) == (["wide"], True)
    second = start(1, free_bytes=all_of_them * 5 // 4 - 2).call("open", folder=str(folder), shard="auto")
    assert (second["sharded"], second["right"], second["created"]) == (["wide"], True, 0)


def test_a_process_needs_no_room_for_rows_that_are_there(start: Start, folder: Path) -> None:
    """One that is started again, or one more on the same GPU: without them its tables would not fit."""
    needed = bytes_on_each(specs(), places(*SHARDED), NUM_GPUS)
    processes = [start(0), start(0, free_bytes=needed // 4)]
    for process in processes:
        answer = process.call("open", folder=str(folder))
        assert (answer["right"], answer["created"]) == (True, NUM_GPUS * (process is processes[0]))
    for process in processes:
        process.call("close")
    error = start(0, free_bytes=1000).call("open", folder=str(folder))["error"]
    assert error.startswith(f"shard=rows needs {needed} bytes on each of {NUM_GPUS} GPUs, where tables may take 800 ")


@pytest.mark.parametrize(
    ("num_tables", "sizes", "error"),
    [
        (len(SHAPES) - 1, [GRANULARITY] * NUM_GPUS, "another process shares rows of other tables, or of other GPUs"),
        (len(SHAPES), [GRANULARITY] * (NUM_GPUS - 1), "another process shares rows of other tables, or of other GPUs"),
        (len(SHAPES), [GRANULARITY] * (NUM_GPUS - 1) + [1], "cuMemMap failed with CUDA's error 1; set shard=none"),
    ],
)
def test_memory_of_another_kind_is_refused(
    folder: Path, meeting: Path, num_tables: int, sizes: list[int], error: str
) -> None:
    """And nothing of it stays open."""
    process = SharingProcess(0)
    before = process.call("held")
    process.call("open", folder=str(folder))
    (name,) = [path.stem for path in meeting.iterdir() if path.stem != "lock"]
    process.call("close")
    memories = [os.memfd_create("memory") for _ in sizes]
    for memory, size in zip(memories, sizes, strict=True):
        os.ftruncate(memory, size)
    description = json.dumps(places(*SHARDED)[:num_tables]).encode()
    offer = FileExchange(name).offer(OpenFiles(description, memories))
    assert process.call("open", folder=str(folder))["error"].endswith(error)
    assert process.call("held") == before
    offer.close()
    close_all(memories)
    process.kill()

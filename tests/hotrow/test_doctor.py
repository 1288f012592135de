"""`hotrow doctor`: what it finds on this machine, and on one with a fault."""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from hotrow.command_line import cli
from hotrow.commands.doctor import command
from hotrow.doctor import machine
from hotrow.doctor import repository as repository_checks
from hotrow.doctor.checks import Plan, examine
from hotrow.doctor.findings import Finding
from hotrow.doctor.services import check_services
from inference_session import InferenceSession
from inference_session.dense_engine import openvino
from inference_session.device import discovery
from inference_session.parameter_server.namespace import Namespace
from inference_session.parameter_server.rocksdb.store import RocksDbStore
from inference_session.sizing import memory
from tests.testing import small_model
from tests.testing.hugectr_source import Source
from tests.testing.model_settings import add_settings
from tests.testing.servers import RedisServer, wait_until
from tests.testing.triton_models import write_ctr
from triton_backend.client.probe import SERVE_FOLDER_PREFIX
from triton_backend.launcher import installation
from triton_backend.launcher.ports import write_served_ports
from triton_backend.launcher.reaper import SHARED_MEMORY

_ANY_PORTS = (0, 0, 0)


@pytest.fixture
def repository() -> Iterator[Path]:
    """A repository with a model, in a folder that every user may read."""
    folder = Path(tempfile.mkdtemp(prefix="hotrow-test-"))
    folder.chmod(0o755)
    write_ctr(folder / "ctr" / "1")
    yield folder
    shutil.rmtree(folder)


def _findings(check: str, **plan: object) -> list[Finding]:
    found = list(examine(Plan(ports=_ANY_PORTS, **plan)))  # type: ignore[arg-type]
    return [finding for finding in found if finding.check == check]


def test_every_warning_has_a_fix(repository: Path) -> None:
    """Each problem comes with its fix."""
    for finding in examine(Plan(repository, ports=_ANY_PORTS)):
        assert finding.message
        assert finding.level == "ok" or finding.fix


def test_a_taken_port_is_a_problem() -> None:
    """By its number, and with the flag that chooses another."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        port = listener.getsockname()[1]
        found = list(examine(Plan(ports=(0, port, 0))))

    (finding,) = [finding for finding in found if finding.check == f"port {port}"]
    assert finding.level == "problem"
    assert "--grpc-port" in finding.fix


def test_a_port_of_a_running_server_is_no_problem(tmp_path: Path) -> None:
    """The machine serves already; only a second server would need another port."""
    folder = tmp_path / f"{SERVE_FOLDER_PREFIX}x"
    folder.mkdir()
    code = "import socket, time; s = socket.create_server(('127.0.0.1', 0)); print(s.getsockname()[1], flush=True)"
    command = [sys.executable, "-S", "-c", f"{code}; time.sleep(1000)"]
    with subprocess.Popen(command, cwd=folder, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        port = int(server.stdout.readline())
        write_served_ports(folder, [port, 1, 2])
        _, finding, _ = machine.check_ports("127.0.0.1", (0, port, 0))
        server.kill()

    assert (finding.check, finding.level) == (f"port {port}", "ok")
    assert finding.message == "a running `hotrow serve` has it; for another server, choose another by --grpc-port"


def test_no_server_is_a_problem(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Neither on PATH nor in the wheel: the fix installs one."""
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(installation, "INSTALLED", tmp_path)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)

    (finding,) = _findings("tritonserver")

    assert finding.level == "problem"
    assert "pip install" in finding.fix


def test_a_server_that_does_not_start_is_a_problem(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The program's own message is repeated."""
    program = tmp_path / "bin" / "tritonserver"
    program.parent.mkdir()
    program.write_text("#!/bin/sh\necho libdcgm.so.3: cannot open shared object file >&2\nexit 127\n")
    program.chmod(0o755)
    stub = tmp_path / "backends" / "python" / installation.STUB
    stub.parent.mkdir(parents=True)
    stub.write_text(f"libpython{sys.version_info.major}.{sys.version_info.minor}.so.1.0")
    monkeypatch.setenv("PATH", f"{program.parent}:{os.environ['PATH']}")

    (finding,) = _findings("tritonserver")

    assert finding.level == "problem"
    assert "does not start: libdcgm.so.3: cannot open" in finding.message


def test_little_shared_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Less than is needed is reported with the flags of containers."""
    monkeypatch.setattr(machine, "LEAST_SHARED_BYTES", 1 << 60)

    finding = _findings(str(SHARED_MEMORY))[0]

    assert finding.level != "ok"
    assert "--shm-size" in finding.fix


def test_shared_memory_of_servers_that_are_gone() -> None:
    """A file that names a process which has ended is named, one of a process that runs is not."""
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    left = SHARED_MEMORY / f"hotrow_{ended.pid}_test"
    used = SHARED_MEMORY / f"hotrow_{os.getpid()}_test"
    left.touch()
    used.touch()
    try:
        fixes = " ".join(finding.fix for finding in _findings(str(SHARED_MEMORY)))
    finally:
        left.unlink()
        used.unlink()

    assert f"rm {SHARED_MEMORY}/hotrow_" in fixes
    assert f"hotrow_{ended.pid}_*" in fixes
    assert f"hotrow_{os.getpid()}_" not in fixes


def _as_nobody(check: Callable[[], list[Finding]]) -> list[Finding]:
    """With a user's rights, also where tests run as root."""
    if os.geteuid() != 0:
        return check()
    os.seteuid(65534)
    try:
        return check()
    finally:
        os.seteuid(0)


def test_a_check_that_fails_is_a_finding(monkeypatch: pytest.MonkeyPatch) -> None:
    """A path that the user may not read is a separate problem, and the other checks go on."""
    locked = PermissionError(13, "Permission denied", "/locked/libpython.so")

    def refuse() -> Path:
        raise locked

    monkeypatch.setattr(machine, "libpython_directory", refuse)

    found = list(examine(Plan(ports=_ANY_PORTS)))

    assert any(f.level == "problem" and "/locked/libpython.so: Permission denied" in f.message for f in found)
    assert found[-1].check in repository_checks.PACKAGES


def test_files_that_cannot_be_read(repository: Path) -> None:
    """The first is named, and the command that opens them."""
    path = repository / "ctr" / "1" / "dense.onnx"
    path.chmod(0)

    (finding,) = _as_nobody(lambda: list(repository_checks.check_permissions(repository)))

    assert finding.level == "problem"
    assert finding.message.startswith(str(path))
    assert finding.fix == f"chmod -R a+rX {repository}"


def test_an_index_that_cannot_be_kept(repository: Path) -> None:
    """A table of stored keys without an index, in a read-only folder, costs each process an index."""
    small_model.write(repository / "small" / "1")
    folder = repository / "small" / "1" / "tables" / "hashed"
    folder.chmod(0o555)

    (finding,) = _as_nobody(lambda: list(repository_checks.check_permissions(repository)))
    assert (finding.level, str(folder) in finding.message) == ("warning", True)

    folder.chmod(0o755)
    InferenceSession.open(repository / "small" / "1").close()
    (finding,) = repository_checks.check_permissions(repository)
    assert finding.level == "ok"


@pytest.mark.parametrize(("share", "level"), [(0.5, "problem"), (1.5, "warning"), (100, "ok")])
def test_memory_that_models_need(repository: Path, monkeypatch: pytest.MonkeyPatch, share: float, level: str) -> None:
    """Compared with what is available: for the processes, for the tables, for a swap."""
    monkeypatch.setattr(repository_checks, "available_bytes", lambda: round(share * memory.PROCESS_BYTES))

    (finding,) = _findings("memory", repository=repository)

    assert finding.level == level


def test_a_package_that_a_model_needs(repository: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without it the model would not load; a password in its URL is not shown."""
    add_settings(repository / "ctr" / "config.pbtxt", {"volatile_store": "redis://:secret@127.0.0.1:1/0"})
    add_settings(repository / "ctr" / "config.pbtxt", {"update_stream": "kafka://127.0.0.1:1"})
    monkeypatch.setattr(repository_checks, "find_spec", lambda name: None if name == "confluent_kafka" else name)

    found = list(examine(Plan(repository, ports=_ANY_PORTS)))

    (finding,) = [finding for finding in found if finding.check == "confluent_kafka"]
    assert (finding.level, finding.fix) == ("problem", 'pip install "hotrow[kafka]"')
    assert "secret" not in str(found)


def test_stores_and_brokers_that_do_not_listen(repository: Path, tmp_path: Path) -> None:
    """A Redis, a broker and a RocksDB that were not started or filled yet, each with the way out, and no password."""
    add_settings(repository / "ctr" / "config.pbtxt", {"volatile_store": "redis://:secret@127.0.0.1:1/0"})
    add_settings(repository / "ctr" / "config.pbtxt", {"persistent_store": f"rocksdb://{tmp_path}/db"})
    add_settings(repository / "ctr" / "config.pbtxt", {"update_stream": "kafka://user:secret@127.0.0.1:1"})

    found = [*_findings("stores", repository=repository), *_findings("brokers", repository=repository)]

    assert {(finding.level, finding.message) for finding in found} == {
        ("warning", "Redis at 127.0.0.1:1: Connection refused"),
        ("problem", f"there is no RocksDB in {tmp_path}/db"),
        ("warning", "Kafka at 127.0.0.1:1: Connection refused"),
    }
    assert all(finding.fix for finding in found)


def test_stores_that_listen(tmp_path: Path) -> None:
    """By host and port, by socket, and in a folder."""
    RocksDbStore(tmp_path / "db", Namespace("ctr", "1"), {"table": 2}, writable=True).close()
    with RedisServer() as redis:
        urls = [redis.url, f"unix://{redis.socket_path}", f"rocksdb://{tmp_path}/db"]
        # Redis listens on its socket a moment later than on its port.
        wait_until(lambda: [finding.level for finding in check_services(urls)] == ["ok"] * 3, "all to listen")

    wrong = ["redis://h:x", "redis://redis..internal:6379", "unix:///none", "not a URL"]
    assert [finding.level for finding in check_services(wrong)] == ["problem", "warning", "warning"]


def test_a_rocksdb_that_may_not_be_entered_is_a_finding(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever asks the doctor wants to hear that."""

    def refuse(_: Path) -> bool:
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(Path, "exists", refuse)
    (finding,) = check_services(["rocksdb:///closed/db"])
    assert (finding.level, finding.message) == (
        "problem",
        "the RocksDB in /closed/db cannot be opened: Permission denied",
    )


def test_what_computes_dense_networks(repository: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Engine and precision of each model; bfloat16 that is not available is a problem."""
    (exact,) = _findings("dense network", repository=repository)
    assert (exact.level, exact.message) == ("ok", "ctr: ONNX Runtime, float32")
    add_settings(repository / "ctr" / "config.pbtxt", {"dense_precision": "bfloat16"})

    monkeypatch.setattr(openvino, "unusable_bfloat16", lambda: None)
    (usable,) = _findings("dense network", repository=repository)
    assert (usable.level, usable.message) == ("ok", "ctr: OpenVINO, bfloat16")
    monkeypatch.setattr(openvino, "unusable_bfloat16", lambda: "this processor is too old")
    (unusable,) = _findings("dense network", repository=repository)
    assert (unusable.level, unusable.fix) == ("problem", "set dense_precision of ctr to float32")
    assert "too old" in unusable.message


def test_tensorrt_that_is_not_installed(repository: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is a problem; the fix names setting and model."""
    add_settings(repository / "ctr" / "config.pbtxt", {"dense_engine": "tensorrt"})
    monkeypatch.setattr(discovery, "unusable_tensorrt", lambda: "TensorRT is not installed")

    (finding,) = _findings("dense network", repository=repository)

    assert (finding.level, finding.fix) == ("problem", "set dense_engine of ctr to onnxruntime")
    assert finding.message == "ctr: TensorRT, float32: TensorRT is not installed"


def test_how_tables_are_mapped(repository: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The part of all tables that is in large pages, by their sizes; the fix if that part is small."""
    assert not _findings("large pages", repository=repository)  # its table is smaller than one
    file = repository / "ctr" / "1" / "tables" / "item" / "emb_vector"
    monkeypatch.setattr(repository_checks, "large_page_fraction", lambda path: 1.0 if path == file else None)
    monkeypatch.setattr(repository_checks, "large_page_setting", lambda: "never")
    (much,) = _findings("large pages", repository=repository)
    monkeypatch.setattr(repository_checks, "large_page_fraction", lambda path: 0.25)
    (little,) = _findings("large pages", repository=repository)

    assert much.message.startswith("100% of 800 B of tables are mapped in pages of 2 MiB; transparent_hugepage: never")
    assert not much.fix
    assert little.message.startswith("25%")
    assert "hotrow copy" in little.fix


def test_hugectr_s_files_are_looked_for(repository: Path) -> None:
    """A model folder that is served in place counts with its files, and is a problem where one of them is missing."""
    source = Source(repository / "small")
    source.ps_json()
    (source.folder / "config.pbtxt").write_text('backend: "hugectr"\n')
    (source.folder / "1").mkdir()
    (memory,) = _findings("memory", repository=repository)
    assert memory.level == "ok"
    assert not _findings("permissions", repository=repository)[0].fix

    key = source.table_folder(0) / "key"
    key.unlink()
    (finding,) = _findings("repository", repository=repository)
    assert finding.level == "problem"
    assert finding.message == f"{key}: No such file or directory"


@pytest.mark.parametrize(
    ("setting", "value", "message"),
    [
        ("cach_bytes", "1", "unknown setting 'cach_bytes'; did you mean 'cache_bytes'?"),
        ("cache_bytes", "1x", "setting 'cache_bytes' cannot be '1x'; allowed: whole numbers from 0"),
        ("max_samples_per_request", "0", "setting 'max_samples_per_request' cannot be '0'"),
        ("EXECUTION_ENV_PATH", "env.tar.gz", ""),
    ],
)
def test_settings_that_fail_a_load(repository: Path, setting: str, value: str, message: str) -> None:
    """The model and the setting are named, as the load would; names in capitals are Triton's own."""
    add_settings(repository / "ctr" / "config.pbtxt", {setting: value})

    (finding,) = _findings("repository", repository=repository)

    assert finding.level == ("problem" if message else "ok")
    assert not message or finding.message.startswith(f"model 'ctr': config.pbtxt: parameters: {message}")


def test_a_repository_that_cannot_be_served(repository: Path) -> None:
    """A bad setting or a missing version is found before a server meets it."""
    add_settings(repository / "ctr" / "config.pbtxt", {"volatile_store": "redis://h"})
    add_settings(repository / "ctr" / "config.pbtxt", {"cache_bytes": "plenty"})
    (finding,) = _findings("repository", repository=repository)
    assert (finding.level, "'plenty'" in finding.message) == ("problem", True)

    shutil.rmtree(repository / "ctr" / "1")
    (finding,) = _findings("repository", repository=repository)
    assert "contains no version" in finding.message


def test_as_a_process(repository: Path) -> None:
    """Exit code 0 without a problem, 1 with one; JSON has the same findings."""
    run = [sys.executable, "-m", "hotrow", "doctor", "--http-port=0", "--grpc-port=0", "--metrics-port=0"]

    good = subprocess.run([*run, "--repository", repository], capture_output=True, text=True, check=False)
    bad = subprocess.run([*run, "--repository", "nowhere", "--json"], capture_output=True, text=True, check=False)

    assert (good.returncode, good.stderr) == (0, "")
    assert good.stdout.splitlines()[-1].startswith("0 problems, ")
    assert bad.returncode == 1
    problems = [finding for finding in json.loads(bad.stdout) if finding["level"] == "problem"]
    assert [finding["check"] for finding in problems] == ["repository"]
    assert "no such folder" in problems[0]["message"]


@pytest.mark.gpu
@pytest.mark.skipif(discovery.unusable(0) is not None, reason=f"no GPU: {discovery.unusable(0)}")
def test_hidden_gpus_are_no_problem(repository: Path) -> None:
    """As where somebody wants the processor used."""
    run = [sys.executable, "-m", "hotrow", "doctor", "--http-port=0", "--grpc-port=0", "--metrics-port=0"]
    hidden = os.environ | {"CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run([*run, "--repository", repository], env=hidden, capture_output=True, text=True, check=False)

    assert done.returncode == 0, done.stdout
    assert "none, as CUDA_VISIBLE_DEVICES is ''" in done.stdout


def test_a_repository_elsewhere() -> None:
    """HDFS is not checked; the finding names the command that copies its models here."""
    result = CliRunner().invoke(command, ["--repository", "hdfs://namenode/models"])

    assert result.exit_code == 2
    assert "hotrow copy" in result.stderr


def test_every_command_that_needs_the_client_is_named() -> None:
    """Only `top` was: who read the findings learned of the others from their errors."""
    context = click.Context(cli)
    commands = {name: cli.get_command(context, name) for name in cli.list_commands(context)}
    asking = {
        name
        for name, command in commands.items()
        if command and any("--url" in option.opts for option in command.params)
    }

    purpose = repository_checks.PACKAGES["tritonclient"][1]

    assert "load" in asking
    assert [name for name in sorted(asking) if not re.search(rf"\b{name}\b", purpose)] == []


def test_numpy_1_is_advised_for_pythons_that_have_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """It has no wheels for Python 3.13."""
    monkeypatch.setattr(machine, "find_installation", lambda: None)
    monkeypatch.setattr(machine, "_is_bundled", lambda _: True)
    monkeypatch.setattr("numpy.__version__", "2.5.0")

    (finding,) = machine.check_numpy()

    assert finding.level == "warning"
    assert finding.fix.endswith("pip install 'numpy<2', with Python 3.12 or earlier")

"""Faults of HDFS: what the error says, and how soon."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from hdfs import Client

from inference_session.errors import ConfigurationError, HotrowError, SourceError, UnavailableError
from inference_session.model_source import Copy, create_source, hdfs_source, transfer
from inference_session.model_source.hdfs_url import HdfsUrl
from tests.testing.certificates import new_authority
from tests.testing.hadoop import Hdfs
from tests.testing.programs import PROGRAM_S
from tests.testing.servers import PATIENCE_S, answering, encrypting, free_port, serving, wait_until
from tests.testing.sources import CONTENT, put


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Do not retry for seconds a call that is known to fail."""
    monkeypatch.setattr(hdfs_source, "PAUSES_S", (0.01, 0.01))


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Try as long as processes take to start on a busy machine."""
    monkeypatch.setattr(hdfs_source, "PAUSES_S", (0.1,) * 10 * PATIENCE_S)
    monkeypatch.setattr(hdfs_source, "RETRY_TIMEOUT_S", float(PATIENCE_S))


def test_urls_have_a_port_if_none_is_given() -> None:
    """9870 is the port of an hdfs:// URL without one, and the path is taken as it stands, normalised."""
    assert str(HdfsUrl.parse("hdfs://name/a//b/")) == "hdfs://name:9870/a/b"
    assert HdfsUrl.parse("hdfs://name:1234/a%20b?c#d").path == "/a%20b?c#d"
    assert HdfsUrl.parse("swebhdfs://[::1]/a").http_url == "https://[::1]:9871"


@pytest.mark.parametrize(
    ("url", "said"),
    [
        ("s3://bucket/a", "s3://.*allowed: a path, hdfs://"),
        ("hdfs:///a", "needs the NameNode's host"),
        ("hdfs://name:9870", "no path"),
        ("hdfs://name:port/a", "malformed"),
        ("hdfs://name:0/a", "needs"),
        ("hdfs://me:secret@name/a", "HADOOP_USER_NAME"),
    ],
)
def test_wrong_urls_are_refused(url: str, said: str) -> None:
    """An invalid URL is an error that says what is allowed, and shows no password."""
    with pytest.raises(ConfigurationError, match=said) as refused:
        create_source(url)
    assert "secret" not in str(refused.value)


def test_nobody_at_the_port(impatient: None) -> None:
    """A host that is down is named with its port and the path, after some attempts."""
    port = free_port()
    with pytest.raises(UnavailableError, match=f"hdfs://127.0.0.1:{port}/a/b: no connection to the NameNode"):
        create_source(f"hdfs://127.0.0.1:{port}/a/b").stat("")


def test_a_name_without_an_address(impatient: None) -> None:
    """It is said to be that, as it often is the name of a DataNode that only the cluster knows."""
    place = "no-such-host.invalid:9870"
    with pytest.raises(UnavailableError, match=f"NameNode at {place}; this machine finds no address of that name"):
        create_source(f"hdfs://{place}/a/b").stat("")


def test_no_attempt_begins_when_the_time_is_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """A DataNode that times out each time would make one more take another 20 seconds."""
    monkeypatch.setattr(hdfs_source, "PAUSES_S", (0.01, 0.01))
    monkeypatch.setattr(hdfs_source, "RETRY_TIMEOUT_S", 0.0)
    accepted: list[socket.socket] = []
    with serving(accepted.append) as port, pytest.raises(UnavailableError, match="closed the connection"):
        create_source(f"hdfs://127.0.0.1:{port}/a").stat("")
    assert len(accepted) == 1


def test_the_wrong_port(hdfs: Hdfs) -> None:
    """The NameNode's RPC port, which Hadoop's own hdfs:// URLs have, is told apart from the one that is needed."""
    with pytest.raises(SourceError, match=f"127.0.0.1:{hdfs.rpc_port} does not answer as WebHDFS"):
        create_source(f"hdfs://127.0.0.1:{hdfs.rpc_port}/a").stat("")


def test_no_tls_is_told_apart_from_a_certificate_without_trust(impatient: None, tmp_path: Path) -> None:
    """Each has its own way out: another port or scheme, or the authority."""
    issued = new_authority(tmp_path / "authority").issue("127.0.0.1")
    with answering(b"HTTP/1.1 400 Bad Request\r\n\r\n") as port, encrypting(port, issued.file, issued.key) as tls_port:
        with pytest.raises(UnavailableError, match="it speaks no TLS there: give its port of HTTPS"):
            create_source(f"swebhdfs://127.0.0.1:{port}/a").stat("")
        with pytest.raises(UnavailableError, match="its certificate is of no authority that is trusted here"):
            create_source(f"swebhdfs://127.0.0.1:{tls_port}/a").stat("")
        with pytest.raises(UnavailableError, match="if that is its port of HTTPS, write swebhdfs://"):
            create_source(f"hdfs://127.0.0.1:{tls_port}/a").stat("")
    for scheme, port in (("hdfs", 9870), ("swebhdfs", 9871)):
        with pytest.raises(UnavailableError, match=f"PORT is that of its web page, {port} unless it was changed"):
            create_source(f"{scheme}://127.0.0.1:{free_port()}/a").stat("")


@pytest.mark.parametrize("body", [b"[]", b'{"FileStatus": 5}', b"<html>", b"", b"[" * 100_000])
def test_another_web_server(body: bytes) -> None:
    """A server with other answers is not taken for HDFS, whatever they are."""
    with saying(body) as port, pytest.raises(SourceError, match="does not answer as WebHDFS"):
        create_source(f"hdfs://127.0.0.1:{port}/a").stat("")


_LENGTHS: tuple[Any, ...] = (-1, "5", [], 1.5, 2**63)
"""What no file can have."""
FILE = {"pathSuffix": "b", "type": "FILE", "length": 5, "modificationTime": 1}


@pytest.mark.parametrize(
    "child",
    [{"pathSuffix": name} for name in ("../b", "..", "c/d", "", "a", None)]
    + [{"length": length} for length in _LENGTHS],
    ids=str,
)
def test_a_folder_holds_plain_files(child: dict[str, object]) -> None:
    """A listing with a name that leads elsewhere or occurs twice, or an invalid size, is not a NameNode's."""
    children = [{**FILE, "pathSuffix": "a"}, {**FILE, **child}]
    body = {"FileStatus": {**FILE, "type": "DIRECTORY"}, "FileStatuses": {"FileStatus": children}}
    with (
        saying(json.dumps(body).encode()) as port,
        create_source(f"hdfs://127.0.0.1:{port}/a") as source,
        pytest.raises(SourceError, match="does not answer as WebHDFS"),
    ):
        source.entries()


def test_folders_without_end_are_refused() -> None:
    """A NameNode whose every folder holds another one."""
    folder = {**FILE, "type": "DIRECTORY"}
    body = {"FileStatus": folder, "FileStatuses": {"FileStatus": [folder, {**FILE, "pathSuffix": "a"}]}}
    with (
        saying(json.dumps(body).encode(), num_pieces=1) as port,
        create_source(f"hdfs://127.0.0.1:{port}/a") as source,
        pytest.raises(SourceError, match="folders are nested more than 1000 deep"),
    ):
        source.entries()


@pytest.mark.parametrize("packages", [("requests",), ("hdfs",), ("requests", "urllib3", "hdfs")])
def test_missing_packages_are_named(packages: tuple[str, ...]) -> None:
    """Of those that the extra brings, a machine may have none, or some for other programs."""
    code = (
        f"import sys; sys.modules.update(dict.fromkeys({packages}));"
        "from inference_session.model_source import create_source; create_source('hdfs://name/a')"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=PROGRAM_S, check=False)

    error = "inference_session.errors.ConfigurationError: hdfs:// needs the package `hdfs`: pip install 'hotrow[hdfs]'"
    assert done.stderr.splitlines()[-1] == error


@contextmanager
def saying(body: bytes, num_pieces: int = 100) -> Iterator[int]:
    """A web server that gives the same answer to all requests, in about so many pieces."""
    head = b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\nConnection: close\r\n\r\n" % len(body)
    with answering(head + body, num_pieces) as port:
        yield port


def test_tokens_are_sent_and_never_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, impatient: None
) -> None:
    """With token authentication every request carries the token, and no error or log line does."""
    received: list[bytes] = []

    def hang_up(connection: socket.socket) -> None:
        received.append(connection.recv(65_536))

    (tmp_path / "token").write_text("SeCrEt\n")
    monkeypatch.setenv("HOTROW_HDFS_AUTH", "token")
    monkeypatch.setenv("HOTROW_HDFS_TOKEN_FILE", str(tmp_path / "token"))
    with serving(hang_up) as port, pytest.raises(UnavailableError) as failed:
        create_source(f"hdfs://127.0.0.1:{port}/a").stat("")
    assert b"delegation=SeCrEt" in received[0]
    assert "SeCrEt" not in "".join(map(str, (failed.value, failed.value.__cause__, caplog.text)))


@pytest.mark.parametrize(("kind", "said"), [("ldap", "allowed: simple, token, kerberos"), ("token", "TOKEN_FILE")])
def test_authentication_must_be_complete(kind: str, said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A way of authentication that is unknown, or lacks its file, is an error before anything is sent."""
    monkeypatch.setenv("HOTROW_HDFS_AUTH", kind)
    with pytest.raises(ConfigurationError, match=said):
        create_source("hdfs://name/a")


@pytest.mark.parametrize(
    ("kind", "said"), [("simple", "set HOTROW_HDFS_AUTH to kerberos or token"), ("token", "HOTROW_HDFS_TOKEN_FILE")]
)
def test_a_refused_login_says_what_to_do(kind: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As by a NameNode with Kerberos."""
    (tmp_path / "token").write_text("expired\n")
    monkeypatch.setenv("HOTROW_HDFS_AUTH", kind)
    monkeypatch.setenv("HOTROW_HDFS_TOKEN_FILE", str(tmp_path / "token"))
    refusal = b"HTTP/1.1 401 Authentication required\r\nWWW-Authenticate: Negotiate\r\nContent-Length: 0\r\n\r\n"
    with answering(refusal) as port, pytest.raises(SourceError, match=f"refuses access: .*{said}"):
        create_source(f"hdfs://127.0.0.1:{port}/a").stat("")


def test_permissions_are_those_of_the_user(hdfs: Hdfs, monkeypatch: pytest.MonkeyPatch) -> None:
    """HADOOP_USER_NAME says who writes; a user without permission gets an error that says so."""
    monkeypatch.setenv("HADOOP_USER_NAME", "somebody")
    with create_source(hdfs.url + "/") as source, pytest.raises(SourceError, match="denied: user=somebody"):
        source.make_folder("theirs")


def test_safe_mode_is_named(hdfs: Hdfs, impatient: None) -> None:
    """A NameNode in safe mode is waited for, and named if it stays there."""
    with create_source(hdfs.url + "/safe") as source:
        with hdfs.safe_mode(), pytest.raises(UnavailableError, match="safe mode"):
            source.make_folder("a")
        source.make_folder("a")


def test_safe_mode_that_ends_is_waited_for(hdfs: Hdfs, patient: None) -> None:
    """A call that a NameNode in safe mode refuses is repeated until it has left safe mode."""
    with create_source(hdfs.url + "/safe") as source:
        with hdfs.safe_mode():
            thread = threading.Thread(target=source.make_folder, args=("b",))
            thread.start()
            assert source.stat("b") is None
        thread.join()
        assert source.stat("b") is not None


def test_a_full_target_is_named(hdfs: Hdfs) -> None:
    """A file that does not fit in its folder's quota is an error, though the DataNode may say that all is well."""
    with create_source(hdfs.url + "/small") as source:
        source.make_folder("")
        hdfs.admin("-setSpaceQuota", "6m", "/small")
        with pytest.raises(SourceError, match=r"small/file: 10240000 bytes were written, \d+ are there; the .* full"):
            put(source, "file", CONTENT)


def test_what_a_datanode_has_not_kept_is_written_again(hdfs: Hdfs, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that has just come back may report success and keep nothing."""
    write = Client.write
    dropped: list[bytes] = []

    def drop_first(client: Client, path: str, data: Iterator[bytes], **settings: Any) -> None:
        """Make the file, without its content, the first time."""
        if dropped:
            write(client, path, data=data, **settings)
        else:
            dropped.append(b"".join(data))
            write(client, path, data=b"", **settings)

    monkeypatch.setattr(Client, "write", drop_first)
    with create_source(hdfs.url + "/dropped") as source:
        put(source, "file", CONTENT)

        assert dropped == [CONTENT]
        assert source.read("file", 0, len(CONTENT)) == CONTENT


@pytest.fixture(scope="module")
def own_hdfs() -> Iterator[Hdfs]:
    """A cluster for tests that kill its DataNode, and start it again."""
    with Hdfs() as cluster:
        yield cluster


def test_a_datanode_that_dies_is_waited_for(own_hdfs: Hdfs, monkeypatch: pytest.MonkeyPatch, patient: None) -> None:
    """Reads go on at their byte, and files can be written, when a DataNode that was killed is back."""
    monkeypatch.setenv("HADOOP_USER_NAME", "root")
    with create_source(own_hdfs.url + "/") as source:
        put(source, "content", CONTENT)

        own_hdfs.kill("DataNode")
        read: list[bytes] = []
        thread = threading.Thread(target=lambda: read.append(source.read("content", 0, len(CONTENT))))
        thread.start()
        own_hdfs.start("DataNode")
        thread.join()
        assert read == [CONTENT]

        def chunks(begin: int) -> list[bytes]:
            if not killed:
                killed.append(True)
                own_hdfs.kill("DataNode")
                own_hdfs.start("DataNode")
            return [CONTENT[begin:]]

        killed: list[bool] = []
        source.write("again", chunks)
        assert source.read("again", 0, len(CONTENT)) == CONTENT


@pytest.mark.parametrize("damage", ["cut", "flipped"])
def test_a_block_that_is_damaged_is_an_error(
    own_hdfs: Hdfs, monkeypatch: pytest.MonkeyPatch, impatient: None, damage: str
) -> None:
    """HDFS finds it by its checksums; the error names the file, and the DataNode as the one that fails."""
    monkeypatch.setenv("HADOOP_USER_NAME", "root")
    monkeypatch.setattr(hdfs_source, "TIMEOUT_S", (5.0, 5.0))
    with create_source(f"{own_hdfs.url}/{damage}") as source:
        before = _blocks(own_hdfs)
        put(source, "file", CONTENT)
        block = min(_blocks(own_hdfs) - before)
        content = bytearray(block.read_bytes())
        content[len(content) // 2] ^= 0xFF
        block.write_bytes(content if damage == "flipped" else content[: len(content) // 2])

        said = r"file: the DataNode (stopped sending after byte \d+; .*fsck|at \S+ did not answer in time)"
        with pytest.raises(UnavailableError, match=f"{damage}/{said}"):
            source.read("file", 0, len(CONTENT))


def _blocks(cluster: Hdfs) -> set[Path]:
    return {path for path in cluster.folder.rglob("blk_*") if path.suffix != ".meta"}


def test_a_cluster_that_counts_its_datanode_as_dead_is_waited_for(
    own_hdfs: Hdfs, monkeypatch: pytest.MonkeyPatch, patient: None
) -> None:
    """The NameNode refuses to say where to read or write until a DataNode has reported to it again."""
    monkeypatch.setenv("HADOOP_USER_NAME", "root")
    with create_source(own_hdfs.url + "/") as source, ThreadPoolExecutor(2) as threads:
        put(source, "early", CONTENT)
        own_hdfs.kill("DataNode")
        wait_until(lambda: not own_hdfs.has_datanode(), "the NameNode to notice")
        written = threads.submit(put, source, "late", CONTENT)
        read = threads.submit(source.read, "early", 0, len(CONTENT))
        own_hdfs.start("DataNode")
        written.result()
        assert read.result() == CONTENT
        assert source.read("late", 0, len(CONTENT)) == CONTENT


def can_be_written(hdfs: Hdfs) -> bool:
    """Whether there is a DataNode that takes files."""
    with create_source(f"{hdfs.url}/trials") as source:
        try:
            put(source, str(time.monotonic_ns()), b"1")
        except HotrowError:
            return False
    return True


@pytest.mark.parametrize("known", [None, 0, 1000])
def test_a_file_that_grows_while_it_is_written_is_begun_again(hdfs: Hdfs, known: int | None) -> None:
    """A writer died, and its DataNode made the file, or wrote its last bytes, after we had asked for the length: the
    content is whole and in place.
    """
    with create_source(f"{hdfs.url}/grows/{known}") as source:
        assert isinstance(source, hdfs_source.HdfsSource)
        put(source, "file", CONTENT[:500_000])
        told = None if known is None else {"type": "FILE", "length": known, "modificationTime": 1}
        now, stale = source.status, [told]
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(source, "status", lambda path: stale.pop() if stale else now(path))
            source.write("file", lambda begin: [CONTENT[begin:]])
        assert not stale
        assert source.read("file", 0, len(CONTENT)) == CONTENT
        assert source.stat("file") == source.entries("file")[0]
        assert source.entries("file")[0].num_bytes == len(CONTENT)


def test_a_file_whose_writer_died_is_begun_again(
    own_hdfs: Hdfs, monkeypatch: pytest.MonkeyPatch, impatient: None, tmp_path: Path
) -> None:
    """A copy whose DataNode died amid a file fails, and the next one completes it, though HDFS holds that file open."""
    (tmp_path / "table").mkdir()
    (tmp_path / "table" / "emb_vector").write_bytes(CONTENT * 5)
    monkeypatch.setenv("HADOOP_USER_NAME", "root")
    monkeypatch.setattr(transfer, "CHUNK_BYTES", 1 << 20)
    done = [0]

    def kill(num_bytes: int) -> None:
        done[0] += num_bytes
        if done[0] > 3 * len(CONTENT) and done[0] - num_bytes <= 3 * len(CONTENT):
            own_hdfs.kill("DataNode")

    with Copy(tmp_path / "table", f"{own_hdfs.url}/table") as copy, pytest.raises(UnavailableError, match="DataNode"):
        copy.run(kill)
    own_hdfs.start("DataNode")
    wait_until(lambda: can_be_written(own_hdfs), "the DataNode to be back")
    monkeypatch.setattr(hdfs_source, "PAUSES_S", (0.2,) * 10)
    with Copy(tmp_path / "table", f"{own_hdfs.url}/table") as copy:
        copy.run()
    with create_source(f"{own_hdfs.url}/table") as source:
        assert source.read("emb_vector", 0, 5 * len(CONTENT)) == CONTENT * 5

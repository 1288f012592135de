"""A real NameNode and DataNode for tests: Hadoop's jars out of PyPI and Debian packages, run by the machine's Java.

Hadoop 2.7.3 comes in the source package of pyspark 2.4.8 (which has no wheel), the part of Jersey that WebHDFS
needs in Debian packages. Only the jars are kept, in the user's cache folder, so that this is fetched once per machine.
"""

from __future__ import annotations

import http.client
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.testing.packages import kept_folder, run_or_skip, unpack_debian
from tests.testing.servers import PATIENCE_S, free_port, wait_until

PACKAGE = "pyspark==2.4.8"
JERSEY = (
    "libjersey1-core-java",
    "libjersey1-server-java",
    "libjersey1-servlet-java",
    "libjsr311-api-java",
    "libasm-java",
)
_JARS = re.compile(
    r"(hadoop-(annotations|auth|common|hdfs)|commons-(cli|codec|collections|configuration|io|lang|logging|net)|activation"
    r"|guava|htrace-core|httpclient|httpcore|jackson-(core|mapper)-asl|javax.servlet-api|jaxb-api|jetty|jetty-util|jsp-api"
    r"|jsr305|leveldbjni-all|log4j|netty|netty-all|protobuf-java|slf4j-(api|log4j12)|xmlenc)-\d.*\.jar"
)
_LOGGING = """log4j.rootLogger=WARN,console
log4j.appender.console=org.apache.log4j.ConsoleAppender
log4j.appender.console.layout=org.apache.log4j.SimpleLayout
"""
_MODULES = ("lang", "util", "util.concurrent", "nio", "net", "io")
_OPENED = [f"--add-opens=java.base/java.{name}=ALL-UNNAMED" for name in _MODULES]
JVM = (
    *_OPENED,
    "--add-opens=java.base/sun.nio.ch=ALL-UNNAMED",
    "--add-opens=java.security.jgss/sun.security.krb5=ALL-UNNAMED",
    *("-Xmx192m", "-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1", "-Djava.net.preferIPv4Stack=true"),
    # Processes that live for seconds spend most of these on loading classes, a sixth of it on verifying them.
    *("-XX:+UnlockDiagnosticVMOptions", "-XX:-BytecodeVerificationRemote"),
)


def jars() -> Path:
    """The folder of jars, which is filled the first time; skips where it cannot be, or where there is no Java."""
    if shutil.which("java") is None:
        pytest.skip("no java on PATH, which HDFS needs (Debian: default-jre-headless)")
    return kept_folder("hadoop-2.7.3", _fetch)


def _fetch(folder: Path) -> None:
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "download", "--quiet", "--no-deps"]
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=".hadoop-") as temporary:
        downloads, staging = Path(temporary, "downloads"), Path(temporary, "jars")
        downloads.mkdir()
        staging.mkdir()
        command = [*pip, "--no-binary", "pyspark", "--no-build-isolation", "--dest", str(downloads), PACKAGE]
        run_or_skip(command, downloads, "a Hadoop")
        for jar in unpack_debian(JERSEY, downloads, "a Hadoop").rglob("*.jar"):
            if jar.is_file() and not jar.is_symlink():
                shutil.copy(jar, staging)
        with tarfile.open(next(downloads.glob("*.tar.gz"))) as archive:
            for member in archive:
                if _JARS.fullmatch(Path(member.name).name) and (content := archive.extractfile(member)) is not None:
                    (staging / Path(member.name).name).write_bytes(content.read())
        staging.rename(folder)


class Hdfs:
    """One NameNode and one DataNode on free ports of the loopback. A context manager."""

    def __init__(self) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="hotrow-hdfs-"))
        self.http_port, self.rpc_port = free_port(), free_port()
        self._data_ports = [free_port() for _ in range(3)]
        self._class_path = ""
        self._processes: dict[str, subprocess.Popen[bytes]] = {}

    @property
    def host(self) -> str:
        """host:port as URLs name it."""
        return f"127.0.0.1:{self.http_port}"

    @property
    def url(self) -> str:
        """URL of the root folder, without a slash behind it."""
        return f"hdfs://{self.host}"

    def start(self, name: str) -> None:
        """Start `NameNode` or `DataNode`, without waiting for it."""
        module = f"org.apache.hadoop.hdfs.server.{name.lower()}.{name}"
        with (self.folder / f"{name}.log").open("ab") as log:
            self._processes[name] = subprocess.Popen(self._java(module), stdout=log, stderr=log, cwd=self.folder)

    def kill(self, name: str, number: signal.Signals = signal.SIGKILL) -> None:
        """End `NameNode` or `DataNode` at once."""
        process = self._processes.pop(name)
        process.send_signal(signal.SIGCONT)
        process.send_signal(number)
        process.wait()

    def pause(self, name: str, *, resume: bool = False) -> None:
        """Freeze a process, or let it go on."""
        self._processes[name].send_signal(signal.SIGCONT if resume else signal.SIGSTOP)

    def await_ready(self) -> None:
        """Return when the DataNode can be written to."""
        wait_until(self._is_ready, "the NameNode to have a DataNode and to leave safe mode")

    def has_datanode(self) -> bool:
        """Whether the NameNode counts a DataNode as alive; it notices a dead one after 14 seconds."""
        return self._beans("Hadoop:service=NameNode,name=FSNamesystemState")["NumLiveDataNodes"] != 0

    def admin(self, *arguments: str) -> None:
        """`hdfs dfsadmin`."""
        command = self._java("org.apache.hadoop.hdfs.tools.DFSAdmin", *arguments)
        subprocess.run(command, check=True, cwd=self.folder, capture_output=True)

    @contextmanager
    def safe_mode(self) -> Iterator[None]:
        """Refuse writes meanwhile."""
        self.admin("-safemode", "enter")
        try:
            yield
        finally:
            self.admin("-safemode", "leave")

    def __enter__(self) -> Hdfs:
        try:
            self._configure()
            format_ = self._java("org.apache.hadoop.hdfs.server.namenode.NameNode", "-format", "-nonInteractive")
            subprocess.run(format_, check=True, cwd=self.folder, capture_output=True)
            self.start("NameNode")
            self.start("DataNode")
            self.await_ready()
        except BaseException:
            self.__exit__(None, None, None)
            raise
        return self

    def __exit__(self, *_: object) -> None:
        for name in list(self._processes):
            self.kill(name)
        shutil.rmtree(self.folder, ignore_errors=True)

    def _java(self, module: str, *arguments: str) -> list[str]:
        folders = (f"-Dhadoop.log.dir={self.folder}", f"-Djava.io.tmpdir={self.folder}")
        return ["java", *JVM, *folders, "-cp", self._class_path, module, *arguments]

    def _configure(self) -> None:
        for name in ("hdfs", "datanode", "static"):
            (self.folder / "webapps" / name).mkdir(parents=True)
        (self.folder / "log4j.properties").write_text(_LOGGING, encoding="utf-8")
        self._class_path = os.pathsep.join([str(self.folder), f"{jars()}/*"])
        data, http_data, ipc_data = (f"127.0.0.1:{port}" for port in self._data_ports)
        self._write_site("core-site.xml", {"fs.defaultFS": f"hdfs://127.0.0.1:{self.rpc_port}"})
        self._write_site(
            "hdfs-site.xml",
            {
                "dfs.namenode.http-address": self.host,
                "dfs.namenode.name.dir": f"file://{self.folder}/name",
                "dfs.datanode.data.dir": f"file://{self.folder}/data",
                "dfs.datanode.address": data,
                "dfs.datanode.http.address": http_data,
                "dfs.datanode.ipc.address": ipc_data,
                "dfs.replication": "1",
                "dfs.blocksize": str(4 << 20),
                "dfs.namenode.safemode.extension": "0",
                "dfs.namenode.heartbeat.recheck-interval": "2000",
                "dfs.heartbeat.interval": "1",
                "dfs.client.block.write.replace-datanode-on-failure.policy": "NEVER",
                "dfs.datanode.directoryscan.interval": "-1",
            },
        )

    def _write_site(self, name: str, settings: dict[str, str]) -> None:
        properties = "".join(f"<property><name>{n}</name><value>{v}</value></property>" for n, v in settings.items())
        (self.folder / name).write_text(f"<configuration>{properties}</configuration>\n", encoding="utf-8")

    def _is_ready(self) -> bool:
        for name, process in self._processes.items():
            assert process.poll() is None, f"{name} ended: {(self.folder / f'{name}.log').read_text()[-2000:]}"
        try:
            state = self._beans("Hadoop:service=NameNode,name=FSNamesystemState")
            safe = self._beans("Hadoop:service=NameNode,name=NameNodeInfo")["Safemode"]
        except (OSError, http.client.HTTPException, LookupError, ValueError):
            return False
        return bool(state["NumLiveDataNodes"] == 1 and state["NumStaleDataNodes"] == 0 and not safe)

    def _beans(self, query: str) -> dict[str, object]:
        connection = http.client.HTTPConnection("127.0.0.1", self.http_port, timeout=PATIENCE_S)
        try:
            connection.request("GET", f"/jmx?qry={query}")
            beans: list[dict[str, object]] = json.load(connection.getresponse())["beans"]
        finally:
            connection.close()
        return beans[0]

"""Reading from HDFS: `hotrow copy` and its chunks compared with the `hdfs` package's own reader, on a real NameNode.

    python benchmarks/hdfs.py [--mib 512] [--repeats 5]

Starts a NameNode and a DataNode on this machine, or reads from a cluster: `--url hdfs://HOST:PORT/folder`, where a
file of that size is made and removed. Prints the best of several runs of each, taken in turn, and the ratios.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

sys.path.pop(0)  # this folder, where `hdfs` would be this file
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import hdfs

from inference_session.model_source import Copy
from inference_session.model_source.create import create_source
from inference_session.model_source.hdfs_source import HdfsSource
from inference_session.model_source.transfer import read_ahead
from tests.testing.hadoop import Hdfs

_READ_BYTES = 1 << 20


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mib", type=int, default=512, help="size of the file")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--url", help="a folder of a cluster; default: one is started here")
    options = parser.parse_args()
    with _cluster(options.url) as url, tempfile.TemporaryDirectory() as folder, create_source(url) as source:
        assert isinstance(source, HdfsSource)
        block = os.urandom(1 << 20)
        source.remove("benchmark")
        source.write("benchmark", lambda begin: [block] * (options.mib - (begin >> 20)))
        try:
            _measure(source, url, Path(folder), options.mib << 20, options.repeats)
        finally:
            source.remove("benchmark")


@contextlib.contextmanager
def _cluster(url: str | None) -> Iterator[str]:
    if url:
        yield url
        return
    os.environ["HADOOP_USER_NAME"] = "root"
    with Hdfs() as started:
        yield f"{started.url}/benchmark-{os.getpid()}"


def _measure(source: HdfsSource, url: str, folder: Path, num_bytes: int, repeats: int) -> None:
    subjects: dict[str, Callable[[], None]] = {
        "hdfs package, one stream": lambda: _by_package(source, num_bytes),
        "hotrow, one chunk at a time": lambda: _by_chunks(source, num_bytes, 1),
        "hotrow, 4 chunks at a time": lambda: _by_chunks(source, num_bytes, 4),
        "hotrow copy, written, read back, compared": lambda: _by_copy(url, folder),
    }
    best = dict.fromkeys(subjects, float("inf"))
    for _ in range(repeats):
        for name, run in subjects.items():
            begin = time.perf_counter()
            run()
            best[name] = min(best[name], time.perf_counter() - begin)
    baseline = best["hdfs package, one stream"]
    for name, seconds in best.items():
        print(f"{name:<42} {num_bytes / seconds / 1e6:7.0f} MB/s   x {baseline / seconds:.2f}")


def _by_package(source: HdfsSource, num_bytes: int) -> None:
    client = hdfs.InsecureClient(source.url.http_url, user=os.environ.get("HADOOP_USER_NAME"))
    left = num_bytes
    with client.read(f"{source.url.path}/benchmark") as stream:
        while part := stream.read(_READ_BYTES):
            left -= len(part)
    assert not left


def _by_chunks(source: HdfsSource, num_bytes: int, num_chunks: int) -> None:
    entry = source.stat("benchmark")
    assert entry is not None
    with ThreadPoolExecutor(num_chunks) as readers:
        assert sum(map(len, read_ahead(source, entry, readers, num_chunks=num_chunks))) == num_bytes


def _by_copy(url: str, folder: Path) -> None:
    with Copy(f"{url}/benchmark", folder / "copy") as copy:
        copy.run()
    (folder / "copy").unlink()


if __name__ == "__main__":
    main()

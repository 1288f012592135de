"""A consumer that is killed again and again under load leaves every tier exactly right."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from inference_session.parameter_server.base import EmbeddingStore
from inference_session.parameter_server.create import create_store
from inference_session.parameter_server.namespace import Namespace
from inference_session.update_stream import Publisher
from tests.testing.broker import Broker
from tests.testing.servers import PATIENCE_MS, RedisServer
from tests.testing.small_version import SmallVersion
from tests.testing.stored_model import DIMS, push

NUM_KILLS = 50
NUM_KEYS = 4000
ROUNDS_PER_KILL = 4
"""Of publishing: enough for a consumer to be busy, and not more than a slow machine can apply."""
CONSUMERS = """
import os, sys, time
import inference_session.parameter_server.rocksdb.store, inference_session.update_stream.kafka_stream
from inference_session import InferenceSession
from inference_session.parameter_server.redis import layout, replies, store
directory, volatile, persistent, stream = sys.argv[1:]
InferenceSession.open(directory).close()  # loads the kernels, once for all
layout.compile_kernels()
replies.compile_kernels()
settings = {"volatile_store": volatile, "persistent_store": persistent, "update_stream": stream}
settings["store_timeout_ms"] = 120_000
for line in sys.stdin:
    child = os.fork()
    if child == 0:
        with InferenceSession.open(directory, **settings, catch_up_s=0) as session:
            while True:
                session.lookup("hashed", list(range(200)))
                updates = session.stats()["updates"]
                report = os.getpid(), updates["updated_rows"], updates["lag_messages"]
                os.write(1, b"%d %d %d\\n" % report)  # a line is there or not, whenever this is killed
                time.sleep(0.02)
    os.waitpid(child, 0)
    print("killed", flush=True)
"""
"""Starts a consumer for every line that it reads, when the last one has ended."""


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_fifty_kills_lose_nothing(broker: Broker, small: SmallVersion, tmp_path: Path) -> None:
    """Redis and RocksDB hold the last row published of every key, bit for bit, and none of a deleted key."""
    database = f"rocksdb://{tmp_path}/db"
    push(small.directory, database)
    with RedisServer() as redis:
        command = [sys.executable, "-c", CONSUMERS, str(small.directory), redis.url, database, broker.url]
        rounds = threading.Semaphore(0)
        done = threading.Event()
        expected: dict[int, float | None] = {}

        def publish() -> None:
            rng = np.random.default_rng(0)
            with Publisher(broker.url, small.model) as publisher:
                while rounds.acquire():
                    is_last = done.is_set()
                    keys = rng.choice(NUM_KEYS, 300, replace=False)
                    values = rng.standard_normal(300, np.float32)
                    publisher.publish("hashed", keys, np.stack([values, -values], axis=1))
                    publisher.delete("hashed", keys[:20])
                    expected.update(zip(keys.tolist(), values.tolist(), strict=True))
                    expected.update(dict.fromkeys(keys[:20].tolist()))
                    if is_last:  # a round that no killed consumer has seen
                        return
                    time.sleep(0.05)

        pauses = random.Random(0)
        publisher = threading.Thread(target=publish)
        publisher.start()
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as consumers:
            for _ in range(NUM_KILLS):
                rounds.release(ROUNDS_PER_KILL)
                pid = await_report(consumers, lambda rows, _lag: rows > 0)
                time.sleep(pauses.uniform(0, 0.1))
                kill(consumers, pid)
            done.set()
            rounds.release()
            publisher.join()
            calm = [False] * 50
            kill(consumers, await_report(consumers, lambda rows, lag: is_calm(calm, rows > 0 and lag == 0)))
        for url in (redis.url, database):
            with create_store(url, Namespace(small.model, "1"), DIMS, timeout_ms=PATIENCE_MS) as store:
                check(store, expected)


def await_report(consumers: subprocess.Popen[str], condition: Callable[[int, int], bool]) -> int:
    """Start a consumer; returns its process id when what it reports, rows applied and lag, is as wanted."""
    assert consumers.stdin is not None
    assert consumers.stdout is not None
    consumers.stdin.write("start\n")
    consumers.stdin.flush()
    while True:
        pid, rows, lag = map(int, consumers.stdout.readline().split())
        if condition(rows, lag):
            return pid


def kill(consumers: subprocess.Popen[str], pid: int) -> None:
    """Kill a consumer in the middle of whatever it does."""
    os.kill(pid, signal.SIGKILL)
    assert consumers.stdout is not None
    assert any(line == "killed\n" for line in iter(consumers.stdout.readline, ""))


def is_calm(calm: list[bool], now: bool) -> bool:
    """Whether this many reports in a row were calm."""
    calm.append(now)
    del calm[0]
    return all(calm)


def check(store: EmbeddingStore, expected: dict[int, float | None]) -> None:
    keys = np.array(sorted(expected))
    rows = np.zeros((len(keys), 2), np.float32)
    found = store.fetch("hashed", keys, rows)
    wrong = [
        (key, expected[key], bool(hit), row.tolist())
        for key, hit, row in zip(keys.tolist(), found, rows, strict=True)
        if (expected[key] is not None) != hit or (hit and row.tolist() != [expected[key], -(expected[key] or 0)])
    ]
    assert not wrong, f"{len(wrong)} of {len(keys)} rows are wrong: {wrong[:5]}"

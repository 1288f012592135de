"""One deployment under operations, faults and clients, all drawn from a seed."""

from __future__ import annotations

import contextlib
import random
import shutil
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from inference_session.errors import UnavailableError
from inference_session.formats.publishing import publish_version
from inference_session.update_stream import Publisher
from tests.campaign import faults
from tests.campaign.contents import MODEL, TABLES, Table, random_question, write_version
from tests.campaign.expectations import Content, Expectations, Permit, Writer, Wrong
from tests.campaign.faults import Fault
from tests.campaign.journal import Journal
from tests.campaign.rows import Integers, decode, encode
from tests.campaign.stores import Stores
from tests.campaign.target import SessionTarget
from tests.parameter_server.servers import RedisClusterServers, RedisServer, wait_until
from tests.update_stream.broker import Broker

NUM_CLIENTS = 2
CATCH_UP_S = 60
STEPS_PER_SETTLING = 20
_LONGEST_FAULT_S = 8.0
"""So that what waits for a frozen broker (15 s) never gives up, and the order of its messages is known."""


@dataclass(frozen=True)
class Plan:
    """A deployment."""

    writer: Writer
    volatile: str | None
    """`redis`, `cluster` or None."""
    has_rocksdb: bool
    has_files: bool
    cache_bytes: int

    @classmethod
    def draw(cls, rng: random.Random) -> Plan:
        """Any that the campaign knows."""
        writer = rng.choice(list(Writer))
        if writer is Writer.STREAM and rng.random() < 0.4:
            return cls(writer, None, has_rocksdb=False, has_files=True, cache_bytes=0)
        volatile = rng.choices(("redis", "cluster", None), (6, 2, 1))[0]
        return cls(writer, volatile, True, rng.random() < 0.5, rng.choice((0, 4000, 1 << 20)))


class Episode:
    """Use `run`."""

    def __init__(self, seed: str, journal: Journal, *, plan: Plan | None = None) -> None:
        self.rng = random.Random(seed)
        self.plan = plan or Plan.draw(self.rng)
        self.journal = journal
        self.name = f"{seed} {self.plan}"
        self.expectations = Expectations(self.plan.writer)
        self.expectations.files_show = self.plan.writer is Writer.DIRECT and self.plan.has_files
        self.folder = Path(tempfile.mkdtemp(prefix="hotrow-campaign-"))
        self.repository = self.folder / "repository"
        self.target = SessionTarget({"cache_bytes": self.plan.cache_bytes, "catch_up_s": CATCH_UP_S, "verify": "full"})
        self.stores = self._create_stores()
        self.contents: dict[int, Content] = {}
        """By version, what its folder holds."""
        self.serving = 0
        self.active: dict[Fault, tuple[int, float]] = {}
        """Each fault with the steps that it has left, and when it began."""
        self.publisher: Publisher | None = None
        self._writing = threading.Lock()
        self._ending = threading.Event()
        self.num_answers = self.num_found = 0

    def _create_stores(self) -> Stores:
        plan = self.plan
        return Stores(
            self.folder,
            redis=RedisServer() if plan.volatile == "redis" else None,
            cluster=RedisClusterServers(node_timeout_ms=3000) if plan.volatile == "cluster" else None,
            broker=Broker() if plan.writer is Writer.STREAM else None,
            has_rocksdb=plan.has_rocksdb,
        )

    def run(self, num_steps: int, deadline_s: float = float("inf")) -> None:
        """Do so many steps, or as many as there is time for; what is found goes to the journal."""
        self.journal.begin_episode(self.name)
        try:
            with self.stores:
                self._open()
                with self._under_load():
                    for step in range(1, num_steps + 1):
                        if self._ending.is_set() or time.monotonic() > deadline_s:
                            break
                        self._step()
                        if step % STEPS_PER_SETTLING == 0:
                            self._settle()
                    self._settle()
                self.target.close()
        except Wrong as error:
            self._find(str(error))
        except Exception:  # noqa: BLE001  a finding, and the next episode has nothing to do with it
            self._find(traceback.format_exc())
        finally:
            self._end()

    def _end(self) -> None:
        self._ending.set()
        with contextlib.suppress(Exception):
            self.target.close()
        shutil.rmtree(self.folder, ignore_errors=True)

    def _open(self) -> None:
        if self.stores.broker is not None:
            self.publisher = Publisher(self.stores.broker.url, MODEL)
        self.publish_version()
        if self.publisher is not None:
            self._make_topics()
        self.load(1)

    def _make_topics(self) -> None:
        self.serving = 1
        for table in TABLES:
            self.write(table, np.arange(1))
        self._flushed()

    def _find(self, text: str) -> None:
        self.num_found += 1
        if self.num_found == 1:
            self.journal.finding(self.name, text)
        self._ending.set()

    # Clients and writers.

    @contextlib.contextmanager
    def _under_load(self) -> Iterator[None]:
        works = [*[self._ask] * NUM_CLIENTS, self._write]
        seeds = [self.rng.randrange(2**32) for _ in works]
        threads = [
            threading.Thread(target=self._repeat, args=(work, seed)) for work, seed in zip(works, seeds, strict=True)
        ]
        for thread in threads:
            thread.start()
        try:
            yield
        finally:
            self._ending.set()
            for thread in threads:
                thread.join()

    def _repeat(self, work: Callable[[np.random.Generator], None], seed: int) -> None:
        rng = np.random.default_rng(seed)
        while not self._ending.is_set():
            try:
                work(rng)
            except Wrong as error:
                self._find(str(error))
            except Exception:  # noqa: BLE001  a finding
                self._find(traceback.format_exc())
            self._ending.wait(float(rng.uniform(0.002, 0.02)))

    def _ask(self, rng: np.random.Generator) -> None:
        question = random_question(rng)
        ticket = self.expectations.ask(question)
        try:
            answer = self.target.ask(question.inputs)
        except Exception as error:  # noqa: BLE001  judged below
            self.expectations.fail(ticket, error)
        else:
            self.expectations.check(ticket, answer)
        self.num_answers += 1

    def _write(self, rng: np.random.Generator) -> None:
        table = TABLES[int(rng.integers(len(TABLES)))]
        keys = rng.choice(len(table.keys), int(rng.integers(1, 16)), replace=False)
        with self._writing:
            self.write(table, keys, delete=bool(rng.random() < 0.25))

    def write(self, table: Table, keys: Integers, *, delete: bool = False) -> None:
        """Update or erase keys, by their positions, in whichever way the deployment has. Hold `_writing`."""
        version = self.serving
        numbers = self.expectations.begin_write(version, table, keys, delete=delete)
        self.journal.kinds["deletions" if delete else "writes"] += 1
        tag = 0 if self.plan.writer is Writer.STREAM else self.contents[version].tag
        vectors = encode(table.number, keys, tag, numbers)
        if self.publisher is not None:
            self._publish(table, keys, None if delete else vectors)
            return
        try:
            if delete:
                self.target.session.erase(table.name, table.keys[keys])
            else:
                self.target.session.update(table.name, table.keys[keys], vectors)
        except UnavailableError as error:
            self.journal.note(f"refused write: {error}")
            self.expectations.doubt(version, table, keys)
            if not any(fault.what == "persistent" for fault in self.active):
                raise
        else:
            self.expectations.acknowledge(version, table, keys, numbers)

    def _publish(self, table: Table, keys: Integers, vectors: np.ndarray | None) -> None:
        assert self.publisher is not None
        if vectors is None:
            self.publisher.delete(table.name, table.keys[keys])
        else:
            self.publisher.publish(table.name, table.keys[keys], vectors)

    # Operations and faults.

    def _step(self) -> None:
        for fault, (left, began_s) in list(self.active.items()):
            if left <= 0 or time.monotonic() - began_s > _LONGEST_FAULT_S:
                self._heal(fault)
            else:
                self.active[fault] = left - 1, began_s
        if self.rng.random() < 0.4 and len(self.active) < 2:
            self._start_fault()
        else:
            self._operate()
        self._ending.wait(self.rng.uniform(0.05, 0.5))

    def _start_fault(self) -> None:
        possible = self._possible_faults()
        busy = {fault.what for fault in self.active}
        drawn = self.rng.choice(possible)() if possible else None
        duration = self.rng.randrange(5)
        if drawn is not None and drawn.what not in busy:
            self.journal.fault(type(drawn).__name__)
            self.expectations.permit(type(drawn).__name__, *drawn.permits)
            self.active[drawn] = duration, time.monotonic()
            drawn.start()

    def _possible_faults(self) -> list[Callable[[], Fault]]:
        found: list[Callable[[], Fault]] = []
        if self.stores.redis is not None:
            found += faults.redis_faults(self.stores.redis)
        if self.stores.cluster is not None:
            found += faults.cluster_faults(self.stores.cluster)
        if self.stores.broker is not None:
            broker = self.stores.broker
            found += [lambda: faults.BrokerFrozen(broker)]
        return found

    def _heal(self, fault: Fault) -> None:
        self.journal.note(f"heals: {type(fault).__name__}")
        fault.heal()
        del self.active[fault]
        self.expectations.lift(type(fault).__name__)

    def is_healthy(self, what: str) -> bool:
        """Whether no fault of it is under way."""
        return all(fault.what != what for fault in self.active)

    def _operate(self) -> None:
        operations = [self.swap, self.roll_back, self.replace_in_place, self.refresh, self.sweep, self.push_again]
        self.rng.choice(operations)()

    def publish_version(self) -> int:
        """A version from a training appears in the repository; its number."""
        version = max(self.contents, default=0) + 1
        content = Content(version * 100, version, version)
        source = self.folder / "sources" / str(version)
        write_version(source, content=content.number, tag=content.tag, settings=self.stores.settings(version))
        directory = publish_version(source, self.repository, MODEL, version=version).version_dir
        self.stores.push_all(directory, volatile=self.is_healthy("volatile"))
        if not self.plan.has_files:
            shutil.rmtree(directory / "tables")
        self.contents[version] = content
        self.expectations.add(content)
        return version

    def load(self, version: int) -> None:
        """Have a version serve."""
        directory = self.repository / MODEL / str(version)
        self._replace(self.contents[version], lambda: self.target.load(directory))
        self.serving = version

    def _replace(self, new: Content, act: Callable[[], None]) -> None:
        """Have another content take over by `act`, and say what may be answered meanwhile and afterwards."""
        old = self.contents.get(self.serving)
        with self._writing:
            published = self.expectations.begun(new.version)
            is_current = self.plan.writer is Writer.DIRECT or (self.is_healthy("stream") and self._flushed())
            if not is_current:
                self.expectations.permit("stream behind", Permit.OLD_ROWS)
            if not self.plan.has_rocksdb and (old is None or old.version != new.version):
                self.expectations.begin_again(new.version)
        with self._writing if self.plan.writer is Writer.DIRECT else contextlib.nullcontext():
            self.expectations.may_serve([one for one in (old, new) if one is not None])
            began_s = time.monotonic()
            act()
            self.expectations.may_serve([new])
            self.contents[new.version], self.serving = new, new.version
        if self.plan.writer is Writer.STREAM and is_current and time.monotonic() - began_s < CATCH_UP_S:
            self.expectations.raise_to(new.version, published)

    def _flushed(self) -> bool:
        if self.publisher is not None:
            self.publisher.flush()
        return True

    def swap(self) -> None:
        """A new version."""
        self.journal.operation("swap")
        self.load(self.publish_version())

    def roll_back(self) -> None:
        """An older version, or a newer one that was left."""
        others = sorted(self.contents.keys() - {self.serving})
        if others:
            version = self.rng.choice(others)
            self.journal.operation("roll back", f"to {version}")
            self.load(version)

    def replace_in_place(self) -> None:
        """Another dense network in the folder of the version that serves."""
        self.journal.operation("replace in place")
        old = self.contents[self.serving]
        new = Content(old.number + 1, old.version, old.tag)
        directory, beside = self.repository / MODEL / str(self.serving), self.folder / "beside"
        write_version(beside, content=new.number, tag=new.tag, settings=self.stores.settings(new.version))
        for name in ("dense.onnx", "MANIFEST.json"):
            (beside / name).replace(directory / name)
        shutil.rmtree(beside)
        self.expectations.add(new)
        self._replace(new, self._update_in_place)

    def _update_in_place(self) -> None:
        assert self.target.update_in_place(), "the new content was not taken"

    def refresh(self) -> None:
        """The cache is read again from the stores."""
        self.journal.operation("refresh")
        with contextlib.suppress(UnavailableError):
            self.target.session.refresh()

    def sweep(self) -> None:
        """Every key is asked for, which evicts what is hot."""
        self.journal.operation("sweep")
        for table in TABLES:
            self.target.session.lookup(table.name, table.keys)

    def push_again(self) -> None:
        """Rows of a version that does not serve are pushed once more."""

    # When all is well again.

    def _settle(self) -> None:
        """All faults heal, and every row is its last write: in what is answered, and in each store that has it."""
        self.journal.note("settles")
        for fault in list(self.active):
            self._heal(fault)
        if self._ending.is_set():
            return
        wait_until(self._is_well, "all tiers and the stream to be well again")
        with self._writing:
            self._repeat_doubtful()
            self._flushed()
            if self.plan.writer is Writer.STREAM:
                wait_until(lambda: not self._differing(), "all updates to be served")
            self.expectations.lift("stream behind")
            self.target.session.refresh()
            self.expectations.raise_to(self.serving, self.expectations.begun(self.serving))
            differing = self._differing()
            if differing:
                raise Wrong("asked: every row, when all was well again\n" + "\n".join(differing[:5]))
            self._check_stores()

    def _is_well(self) -> bool:
        tiers = self.target.stats()["tiers"] if self.plan.has_rocksdb else {}
        return all(tier["failure"] is None for tier in tiers.values())

    def _repeat_doubtful(self) -> None:
        for table in TABLES:
            unsure = np.flatnonzero(self.expectations.history(self.serving, table).unsure)
            if len(unsure):
                self.write(table, unsure)

    def _differing(self) -> list[str]:
        return [text for table in TABLES for text in self._differing_rows(table)]

    def _differing_rows(self, table: Table) -> Iterator[str]:
        vectors = self.target.session.lookup(table.name, table.keys)
        yield from self._compare(table, vectors, "served")

    def _compare(self, table: Table, vectors: np.ndarray, where: str) -> Iterator[str]:
        whole, tags, numbers = decode(table.number, np.arange(len(vectors)), vectors)
        for key, wanted in self.expectations.settled_rows(self.serving, table):
            found = int(numbers[key]) if whole[key] else None
            if found != wanted or (found is None and not (vectors[key] == table.default).all()):
                yield f"{where}: {table.name}, position {key}: found {vectors[key].tolist()} ({found}), allowed: {wanted}"

    def _check_stores(self) -> None:
        """No store has an old row; the persistent one has all."""
        settings = self.stores.settings(self.serving)
        for name in ("volatile_store", "persistent_store"):
            if name in settings:
                with self.stores.open(settings[name], self.serving) as store:
                    for table in TABLES:
                        self._check_store(store, table, name)

    def _check_store(self, store, table: Table, name: str) -> None:  # type: ignore[no-untyped-def]
        vectors = np.zeros((len(table.keys), 8), np.float32)
        found = store.fetch(table.name, table.keys, vectors)
        whole, _, numbers = decode(table.number, np.arange(len(vectors)), vectors)
        history = self.expectations.history(self.serving, table)
        for key, newest in enumerate(history.begun.tolist()):
            missing = history.is_missing(key, newest)
            is_right = not found[key] if missing else bool(whole[key]) and int(numbers[key]) == newest
            may_lack = name == "volatile_store"
            if not is_right and (found[key] or not may_lack):
                raise Wrong(
                    f"asked: the {name} for {table.name}, position {key}\nfound: {vectors[key].tolist()} ({found[key]})\n"
                    f"allowed: {'nothing' if missing else newest}"
                )

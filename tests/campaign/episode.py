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
from functools import partial
from pathlib import Path

import numpy as np

from tests.campaign import faults
from tests.campaign.clock import Clock
from tests.campaign.contents import TABLES, random_question
from tests.campaign.expectations import Expectations, WrongAnswerError
from tests.campaign.faults import Faults
from tests.campaign.journal import Journal
from tests.campaign.operator import Operator
from tests.campaign.plan import CATCH_UP_S, Plan
from tests.campaign.settling import settle, wrong_in_stores
from tests.campaign.stores import Stores
from tests.campaign.target import SessionTarget, Target, TritonTarget
from tests.campaign.writers import DirectWriter, RowWriter, StreamWriter

NUM_CLIENTS = 2
STEPS_PER_SETTLING = 20
MEAN_PAUSE_S = 0.011
"""Of a client, between two requests."""
_FAULT_FRACTION = 0.4
"""Of steps."""


class Episode:
    """Use `run`."""

    def __init__(
        self, seed: str, journal: Journal, *, plan: Plan | None = None, mean_pause_s: float = MEAN_PAUSE_S
    ) -> None:
        self._rng = random.Random(seed)
        self.plan = plan or Plan.draw(self._rng)
        self.name = f"{seed} {self.plan}"
        self.num_answers = 0
        self.expectations = Expectations(self.plan.writer)
        self._journal = journal
        self._mean_pause_s = mean_pause_s
        self._folder = Path(tempfile.mkdtemp(prefix="hotrow-campaign-"))
        self._stores = Stores(self.plan, self._folder)
        self._target = self._create_target()
        self._clock = Clock(self._folder / "clock", is_own=not self.plan.on_triton) if self.plan.has_clock else None
        self._faults = Faults(self._rng, journal, self.expectations, is_redis_alone=self.plan.is_redis_alone)
        self._operator = Operator(
            self.plan,
            self._folder,
            stores=self._stores,
            target=self._target,
            expectations=self.expectations,
            faults=self._faults,
        )
        self._ending = threading.Event()
        self._finding = threading.Lock()

    def run(self, num_steps: int, deadline_s: float = float("inf")) -> None:
        """Do this many steps, or as many as there is time for; findings go to the journal."""
        self._journal.begin_episode(self.name)
        with contextlib.ExitStack() as closing, self._reported():
            closing.callback(shutil.rmtree, self._folder, ignore_errors=True)
            if self._clock is not None:
                closing.enter_context(self._clock)
            closing.enter_context(self._stores)
            closing.callback(self._target.close)
            closing.enter_context(self._reported())
            closing.callback(self._faults.heal_all)
            writer = self._begin()
            with self._under_load(writer):
                for step in range(1, num_steps + 1):
                    if self._ending.is_set() or time.monotonic() > deadline_s:
                        break
                    self._step()
                    if step in {num_steps, *range(0, num_steps, STEPS_PER_SETTLING)}:
                        self._settle(writer)

    @contextlib.contextmanager
    def _reported(self) -> Iterator[None]:
        """Reports the first error of an episode as a finding; it does not affect the next episode."""
        try:
            yield
        except Exception as error:  # noqa: BLE001
            text = str(error) if isinstance(error, WrongAnswerError) else traceback.format_exc()
            with self._finding:
                if not self._ending.is_set():
                    self._ending.set()
                    self._journal.finding(self.name, f"{text}\n{self._describe()}")

    def _describe(self) -> str:
        try:
            return "\n".join([self._target.describe(), *self._missing_in_topics(), *self._wrong_in_stores()])
        except Exception as error:  # noqa: BLE001  whatever is wrong with it is being reported already
            return repr(error)

    def _missing_in_topics(self) -> list[str]:
        """Messages that the broker does not show although it has confirmed them."""
        writer = self._operator.writer
        if not isinstance(writer, StreamWriter) or not self._faults.is_healthy("stream"):
            return []
        with writer.lock:
            writer.flush()
            return writer.missing(self._operator.serving)[:5]

    def _wrong_in_stores(self) -> list[str]:
        """What the stores hold wrongly; where that is nothing, the cache has the wrong rows."""
        if not all(map(self._faults.is_healthy, ("volatile", "persistent", "stream"))):
            return []
        with self._operator.writer.lock if self._operator.writer else contextlib.nullcontext():
            wrong = wrong_in_stores(self.expectations, self._operator.serving, self._stores)
        return wrong[:5] or ["a new reader finds every newest row in the stores"]

    def _create_target(self) -> Target:
        settings = {"cache_bytes": self.plan.cache_bytes, "catch_up_s": CATCH_UP_S, "verify": "full"}
        if self.plan.on_triton:
            return TritonTarget(self._folder / "repository", settings)
        return SessionTarget(settings)

    def _begin(self) -> RowWriter:
        """Let the first version serve, and create the faults."""
        version = self._operator.publish()
        writer = self._operator.writer = self._create_writer()
        if isinstance(writer, StreamWriter):  # makes the topics
            for table in TABLES:
                writer.write(self._operator.contents[version], table, np.arange(1), delete=False)
        self._operator.load(version)
        self._faults.possible = self._possible_faults(writer)
        return writer

    def _create_writer(self) -> RowWriter:
        if self._stores.stream_url is not None:
            return StreamWriter(self._stores.stream_url, self.expectations)
        assert isinstance(self._target, SessionTarget)
        keeper = "volatile" if self.plan.is_redis_alone else "persistent"
        return DirectWriter(self._target, self.expectations, lambda: not self._faults.is_healthy(keeper))

    def _possible_faults(self, writer: RowWriter) -> list[Callable[[], faults.Fault]]:
        stores, found = self._stores, []
        if stores.redis is not None:
            found += faults.redis_faults(stores.redis)
        if stores.redis_proxy is not None:
            found += faults.network_faults("volatile", stores.redis_proxy)
        if stores.cluster is not None:
            found += faults.fleet_faults(stores.cluster, stores.cluster.servers)
        if stores.sentinels is not None:
            found += faults.sentinel_faults(stores.sentinels)
        if stores.small_disk is not None:
            small_disk = stores.small_disk
            found.append(lambda: faults.DiskFull(small_disk))
        elif self.plan.has_small_disk:
            self._journal.note("no disk is filled: a file system cannot be mounted here")
        if stores.broker is not None and isinstance(writer, StreamWriter):
            found += faults.broker_faults(stores.broker, lambda lose: writer.lose(self._operator.serving, lose))
        if stores.broker_proxy is not None:
            found += faults.network_faults("stream", stores.broker_proxy)
        if self._clock is not None:
            found += faults.clock_faults(self._clock)
        if isinstance(self._target, TritonTarget):
            found += faults.triton_faults(self._target, self._operator)
        return found

    @contextlib.contextmanager
    def _under_load(self, writer: RowWriter) -> Iterator[None]:
        works = [*[self._ask] * NUM_CLIENTS, partial(self._write, writer)]
        seeds = [self._rng.randrange(2**32) for _ in works]
        threads = [
            threading.Thread(target=self._repeat, args=(work, seed)) for work, seed in zip(works, seeds, strict=True)
        ]
        for thread in threads:
            thread.start()
        try:
            with self._reported():
                yield
        finally:
            self._ending.set()
            for thread in threads:
                thread.join()

    def _repeat(self, work: Callable[[np.random.Generator], None], seed: int) -> None:
        rng = np.random.default_rng(seed)
        while not self._ending.is_set():
            with self._reported():
                work(rng)
            self._ending.wait(self._mean_pause_s * float(rng.uniform(0.2, 1.8)))

    def _ask(self, rng: np.random.Generator) -> None:
        question = random_question(rng)
        ticket = self.expectations.ask(question)
        try:
            answer = self._target.ask(question.inputs)
        except Exception as error:  # noqa: BLE001  judged by the model
            self.expectations.fail(ticket, error)
        else:
            self.expectations.check(ticket, answer)
        self.num_answers += 1

    def _write(self, writer: RowWriter, rng: np.random.Generator) -> None:
        table = TABLES[int(rng.integers(len(TABLES)))]
        keys = rng.choice(len(table.keys), int(rng.integers(1, 16)), replace=False)
        with writer.lock:
            writer.write(self._operator.serving, table, keys, delete=bool(rng.random() < 0.25))

    def _step(self) -> None:
        self._faults.pass_step()
        if self._rng.random() >= _FAULT_FRACTION or not self._faults.start_one():
            self._operate()
        self._ending.wait(self._rng.uniform(0.05, 0.5))

    def _operate(self) -> None:
        operator = self._operator
        possible: list[tuple[str, Callable[[], None]]] = [("refresh", operator.refresh), ("sweep", operator.sweep)]
        if all(map(self._faults.is_healthy, ("server", "volatile" if self.plan.is_redis_alone else "persistent"))):
            possible.append(("swap", operator.swap))
            if self.plan.has_stores or self._faults.is_healthy("stream"):
                possible.append(("replace in place", operator.replace_in_place))
            possible += [
                ("swap after damage", operator.swap_after_damage),
                ("damage what serves", operator.damage_what_serves),
            ]
            if self.plan.has_rocksdb and not self.plan.has_small_disk and self._faults.is_healthy("stream"):
                possible.append(("replace database", operator.replace_database))
            if operator.others:
                possible.append(("roll back", lambda: operator.load(self._rng.choice(operator.others))))
        name, operate = self._rng.choice(possible)
        self._journal.operation(name)
        operate()

    def _settle(self, writer: RowWriter) -> None:
        self._journal.note("settles")
        self._faults.heal_all()
        settle(self.expectations, self._operator.serving, self._target, self._stores, writer)

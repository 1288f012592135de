"""The devices of a session, each with the whole model, and the choice of the device that answers a batch."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from queue import SimpleQueue
from typing import TypeVar

from inference_session.device.base import Device
from inference_session.errors import SessionClosedError, UnavailableError
from inference_session.execution.network import Network
from inference_session.execution.staging.base import StagingPool

_Result = TypeVar("_Result")


class DeviceThread:
    """Runs all of a session's work on a device: in the caller's thread, or in its own thread.

    With several GPUs each has its own thread: only the thread that recorded a CUDA graph can launch it.
    """

    def __init__(self, device: Device, *, is_own: bool) -> None:
        self.device = device
        self._waiting: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._putting = threading.Lock()
        self._closed = False
        self._thread: threading.Thread | None = None
        if is_own:
            self._thread = threading.Thread(target=self._work, name=f"hotrow-{device.name}", daemon=True)
            self._thread.start()

    def run(self, work: Callable[[], _Result]) -> _Result:
        """What the work returns, or raises; SessionClosedError after `close`."""
        if self._thread is None:
            return work()
        # A plain lock and queue: futures take twice the processor time.
        done, results, errors = threading.Lock(), [], []

        def job() -> None:
            try:
                results.append(work())
            except BaseException as error:  # noqa: BLE001  it is the caller's
                errors.append(error)
            done.release()

        done.acquire()
        with self._putting:
            if self._closed:
                raise SessionClosedError("the session has been closed")
            self._waiting.put(job)
        done.acquire()
        if errors:
            raise errors.pop()
        return results.pop()

    def close(self) -> None:
        """End the thread after the work that waits for it. May be called twice."""
        with self._putting:
            self._closed = True
            self._waiting.put(None)
        if self._thread is not None:
            self._thread.join()

    def _work(self) -> None:
        while (job := self._waiting.get()) is not None:
            job()
            del job  # so that what the job refers to can be freed while the thread waits


@dataclass
class Replica:
    """The networks of a model on one device, and the thread that runs them."""

    network: Network
    ranking: Network
    """The network for requests that rank candidates; the same where the model has no other for them."""
    thread: DeviceThread
    staging_pool: StagingPool | None = None
    """Stages the arrays of requests on the fast path; None: this model has no fast path."""
    num_under_way: int = 0
    """Batches that the device was given and has not answered."""
    num_given: int = 0
    """All batches that the device has finished, with answers or with an error."""

    @property
    def device(self) -> Device:
        """Where the networks run."""
        return self.thread.device


class Replicas:
    """The same model on several devices, or on one. Safe to use from several threads."""

    def __init__(self, replicas: Sequence[Replica]) -> None:
        self.all = tuple(replicas)
        self._lock = threading.Lock()

    def run(self, work: Callable[[Replica], _Result]) -> _Result:
        """Run the work on the device with the fewest batches in progress; among equals, devices take turns.

        Work that returns None has not answered the batch. The device then keeps its turn: the batch comes again.

        Raises:
            UnavailableError: one of several devices has failed; it may have rows that another one wants.
        """
        if len(self.all) == 1:
            return work(self.all[0])
        if (failure := self.failure) is not None:
            raise UnavailableError(failure)
        with self._lock:
            replica = min(self.all, key=lambda each: (each.num_under_way, each.num_given))
            replica.num_under_way += 1
        is_done = True
        try:
            result = replica.thread.run(lambda: work(replica))
            is_done = result is not None
            return result
        finally:
            with self._lock:
                replica.num_under_way -= 1
                replica.num_given += is_done

    @property
    def failure(self) -> str | None:
        """Why a device cannot be used any more; None: all can."""
        return next((each.device.failure for each in self.all if each.device.failure is not None), None)

    def close(self) -> None:
        """End the devices' threads; work that waits for them is done before."""
        for replica in self.all:
            replica.thread.close()

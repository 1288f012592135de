"""Batches of one data set, read ahead by a thread into a bounded queue.

The thread reads several small batches at once, which are cut apart where they are given out. For each piece that it
makes, it takes the interpreter's lock from the thread that trains some times; the fewer pieces, the less it disturbs.
"""

from __future__ import annotations

import queue
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import suppress

from hotrow.training.hugectr.readers.block import Block, RecordShape, joined
from hotrow.training.hugectr.readers.sources import Source
from inference_session.errors import ModelFormatError

_NUM_AHEAD = 4
"""The most pieces that wait in the queue."""
_PIECE_BATCHES, _PIECE_BYTES = 8, 4 << 20
"""A piece has as many batches as it may, and as these bytes hold, but one at least."""
_POLL_S = 0.1


def batches(source: Source, size: int, *, repeats: bool) -> Iterator[Block]:
    """Batches of `size` samples; without `repeats` the last one may have fewer.

    Raises:
        ModelFormatError, OSError: as `Source.blocks`; also if no record exists to repeat.
    """
    waiting: list[Block] = []
    num_waiting = 0

    def num_wanted() -> int:
        return size - num_waiting

    for block in _endless(source, num_wanted) if repeats else source.blocks(num_wanted):
        begin = 0
        while num_waiting + len(block) - begin >= size:
            end = begin + size - num_waiting
            yield joined([*waiting, block.part(begin, end)])
            waiting, num_waiting, begin = [], 0, end
        if begin < len(block):
            waiting.append(block.part(begin, len(block)))
            num_waiting += len(block) - begin
    if waiting:
        yield joined(waiting)


def _endless(source: Source, num_wanted: Callable[[], int]) -> Iterator[Block]:
    while True:
        num_samples = 0
        for block in source.blocks(num_wanted):
            num_samples += len(block)
            yield block
        if not num_samples:
            raise ModelFormatError(f"{source.place}: holds no records")


class _Ahead:
    """A thread that fills the queue, until it is closed or the records end."""

    def __init__(self, made: Iterator[Block]) -> None:
        self.found: queue.Queue[Block | BaseException | None] = queue.Queue(_NUM_AHEAD)
        self._is_closed = threading.Event()
        self._thread = threading.Thread(target=self._run, args=(made,), name="hugectr-reader", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop reading; returns when the thread has ended."""
        self._is_closed.set()
        if threading.current_thread() is not self._thread:  # where garbage is collected, that may be the reader
            self._thread.join()

    def _run(self, made: Iterator[Block]) -> None:
        try:
            for batch in made:
                if not self._put(batch):
                    return
            self._put(None)
        except BaseException as error:  # noqa: BLE001  raised again where the batch is asked for
            self._put(error)

    def _put(self, item: Block | BaseException | None) -> bool:
        while not self._is_closed.is_set():
            try:
                self.found.put(item, timeout=_POLL_S)
            except queue.Full:
                continue
            return True
        return False


class DataReader:
    """The result of `Model.get_data_reader_train` and `get_data_reader_eval`.

    In epoch mode it ends with the data, and starts again by `set_source`; in repeat mode it never ends.
    """

    def __init__(
        self,
        source: Source,
        batch_size: int,
        *,
        repeats: bool,
        prepare: Callable[[Block], Block] = lambda block: block,
        begin: Callable[[Block], Block] = lambda block: block,
    ) -> None:
        """
        Args:
            prepare: gets each piece, of one batch or several, in the reading thread.
            begin: gets each piece in the thread that asks for batches, before the batches before it are used up.
        """
        self.source = source
        """Where records are read."""
        self._prepare, self._begin = prepare, begin
        self._begun: deque[Block | BaseException | None] = deque()
        """What comes next: batches, an error, or the end."""
        self._batch_size = batch_size
        self.num_at_once = _batches_at_once(batch_size, source.shape)
        """The batches of a piece."""
        self._repeats = repeats
        self._ahead: _Ahead | None = None
        self._is_eof = False

    def set_source(self, file_name: str = "") -> None:
        """Read another file list from its beginning, or the same one again."""
        self.stop()
        if file_name:
            self.source = self.source.elsewhere(file_name)
        self.start()

    set_file_list_source = set_source
    """The name before release 3.0."""

    def is_started(self) -> bool:
        """Whether records are being read."""
        return self._ahead is not None

    def is_eof(self) -> bool:
        """Whether all records have been given out."""
        return self._is_eof

    def start(self) -> None:
        """Begin to read, unless that is done."""
        if self._ahead is None:
            self._is_eof = False
            pieces = batches(self.source, self.num_at_once * self._batch_size, repeats=self._repeats)
            self._ahead = _Ahead(map(self._prepare, pieces))
            self._close = weakref.finalize(self, self._ahead.close)

    def stop(self) -> None:
        """Stop reading."""
        if self._ahead is not None:
            self._close()
            self._ahead = None
        self._begun.clear()

    def next_batch(self) -> Block | None:
        """The next batch; None at the end. Errors of the thread are raised here."""
        if self._ahead is None or self._is_eof:
            return None
        if not self._begun:
            self._take(self._ahead.found.get())
        item = self._begun.popleft()
        if len(self._begun) < self.num_at_once:
            with suppress(queue.Empty):
                self._take(self._ahead.found.get_nowait())
        if isinstance(item, BaseException):
            self._is_eof = True
            raise item
        self._is_eof = item is None
        return item

    def _take(self, item: Block | BaseException | None) -> None:
        """Begin a piece, and cut it into batches."""
        if not isinstance(item, Block):
            self._begun.append(item)
            return
        piece, size = self._begin(item), self._batch_size
        self._begun.extend(piece.part(begin, begin + size) for begin in range(0, len(piece), size))


def _batches_at_once(batch_size: int, shape: RecordShape) -> int:
    most_bytes = 4 * (shape.label_dim + shape.dense_dim) + 8 * int(shape.most_keys.sum())
    return max(1, min(_PIECE_BATCHES, _PIECE_BYTES // max(1, batch_size * most_bytes)))

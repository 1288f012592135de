"""The allowed answers: a model of the served rows, without stores, caches, threads or time.

Each key of each table has a history of writes, counted from 1; 0 stands for the row in the version's files. A
write has *begun* from the moment that it is handed over. The *floor* of a key in a version is the oldest write that
may still be answered: it rises when a write is acknowledged as visible, and when an answer shows a newer one. An answer
is right if

* the content that gave it was serving at some time between question and answer;
* each of its rows is a write between the key's floor at the question and the newest begun at the answer, or the default
  vector where that write is a deletion, or there is no row;
* all rows of the answer belong to its content, or to the update stream.

Weaker guarantees that the documentation states are `Permit`s; they are lifted when their fault has healed.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from enum import Enum

import numpy as np
from numpy.typing import NDArray

from tests.campaign.contents import TABLES, Arrays, Question, Table
from tests.campaign.rows import Integers, decode


class Permit(Enum):
    """Deviations that are allowed while a fault, or its effect, lasts; each value is the page that says so."""

    DEFAULTS = "settings.md, on_store_failure: default vectors while the only store that has a row is out"
    ERRORS = "run-a-server.md, 'When a backend process dies': requests fail until the new process answers"
    OLD_ROWS = (
        "settings.md, catch_up_s: a version serves before it has applied all that was published; update-rows.md, "
        "Topics: one that was made anew is read again from its oldest message, and rows may be older until that is "
        "done; use-stores.md: what Redis alone has lost, or does not answer, is answered by the older rows of the files"
    )


class Writer(Enum):
    """The writer of a deployment; never two, because the order of a key's writes would not be known."""

    STREAM = "stream"
    """One history for all versions; the rows' tag is 0."""
    DIRECT = "direct"
    """`update` and `erase`: a history for each version, whose tag its rows bear."""


@dataclass(frozen=True)
class Content:
    """The content of a version directory at one time."""

    number: int
    """The number that the dense network outputs."""
    version: int
    tag: int
    """Of the rows in its files."""


class History:
    """The writes of one table's keys."""

    def __init__(self, table: Table) -> None:
        self.begun = np.zeros(len(table.keys), np.int64)
        self.unsure = np.zeros(len(table.keys), np.bool_)
        """The newest write failed, and may have taken effect or not."""
        self.deletions: set[tuple[int, int]] = set()
        self.has_file_row = np.arange(len(table.keys)) < table.num_in_files

    def begin(self, keys: Integers, *, delete: bool = False) -> Integers:
        """Count a write of these keys, each there once; returns its numbers."""
        self.begun[keys] += 1
        if delete:
            self.deletions.update(zip(keys.tolist(), self.begun[keys].tolist(), strict=True))
        return self.begun[keys].copy()

    def is_missing(self, key: int, number: int) -> bool:
        """Whether a write leaves no row."""
        return (key, number) in self.deletions or (number == 0 and not self.has_file_row[key])


@dataclass
class View:
    """A version as clients see it."""

    tag: int
    histories: tuple[History, ...]
    floors: list[Integers] = field(default_factory=list)
    shown: list[Integers] = field(default_factory=list)
    """The newest writes that answers have shown."""

    def __post_init__(self) -> None:
        self.floors = [np.zeros_like(history.begun) for history in self.histories]
        self.shown = [np.zeros_like(history.begun) for history in self.histories]


@dataclass
class Ticket:
    """A question under way, and the state of the model when it was asked."""

    question: Question
    moment: int
    floors: dict[int, list[Integers]]
    """By version and table, of all keys."""


class WrongAnswerError(AssertionError):
    """An answer that is not allowed; states the question, the answer, and the allowed answers."""


class Expectations:
    """The answers that are allowed now. All methods may be called from any thread."""

    def __init__(self, writer: Writer) -> None:
        self.writer = writer
        self.files_show = False
        """Whether a deleted key may be answered with its row in the files: direct writes over versions with files."""
        self.num_checked = 0
        """Rows that were compared."""
        self._lock = threading.RLock()
        self._shared = tuple(map(History, TABLES))
        self._views: dict[int, View] = {}
        self._contents: dict[int, Content] = {}
        self._moment = 0
        self._serving: dict[int, int | None] = {}
        """By content: when it ceased to serve; None: it may serve now."""
        self._permits: dict[Permit, int | None] = {}
        """When a permit was lifted; None: it holds."""
        self._holders: dict[Permit, set[str]] = {permit: set() for permit in Permit}

    # Called by operations and faults.

    def add(self, content: Content) -> None:
        """A content that may serve later."""
        with self._lock:
            self._contents[content.number] = content
            if content.version not in self._views:
                own = self._shared if self.writer is Writer.STREAM else tuple(map(History, TABLES))
                self._views[content.version] = View(content.tag, own)

    def may_serve(self, contents: Iterable[Content]) -> None:
        """From now on any of these answers, and no other."""
        with self._lock:
            self._moment += 1
            numbers = {content.number for content in contents}
            for number in list(self._serving):
                if number not in numbers and self._serving[number] is None:
                    self._serving[number] = self._moment
            self._serving.update(dict.fromkeys(numbers))

    def permit(self, holder: str, *permits: Permit) -> None:
        """Allow these until `lift`."""
        with self._lock:
            for permit in permits:
                self._holders[permit].add(holder)
                self._permits[permit] = None

    def lift(self, holder: str) -> None:
        """Withdraw the permits of a holder; they stay valid for earlier questions."""
        with self._lock:
            self._moment += 1
            for permit, holders in self._holders.items():
                if holder in holders:
                    holders.discard(holder)
                    if not holders:
                        self._permits[permit] = self._moment

    def history(self, version: int, table: Table) -> History:
        """The writes of a version's table."""
        return self._views[version].histories[table.number]

    def begin_write(self, version: int, table: Table, keys: Integers, *, delete: bool = False) -> Integers:
        """A write is about to be handed over; returns its numbers."""
        with self._lock:
            return self.history(version, table).begin(keys, delete=delete)

    def acknowledge(self, version: int, table: Table, keys: Integers, numbers: Integers) -> None:
        """All questions from now on see this write or a later one."""
        with self._lock:
            floors = self._views[version].floors[table.number]
            floors[keys] = np.maximum(floors[keys], numbers)
            self.history(version, table).unsure[keys] = False

    def doubt(self, version: int, table: Table, keys: Integers) -> None:
        """The newest write of these keys failed: it may have taken effect or not."""
        with self._lock:
            self.history(version, table).unsure[keys] = True

    def raise_to(self, version: int, begun: list[Integers]) -> None:
        """A version has all writes up to these."""
        with self._lock:
            for floors, numbers in zip(self._views[version].floors, begun, strict=True):
                np.maximum(floors, numbers, out=floors)

    def forget_shown(self, version: int) -> None:
        """A version may have lost all that was written."""
        with self._lock:
            for floors in self._views[version].floors:
                floors[:] = 0

    def begun(self, version: int) -> list[Integers]:
        """The newest writes of a version's keys, by table."""
        with self._lock:
            return [history.begun.copy() for history in self._views[version].histories]

    def permits(self, permit: Permit) -> bool:
        """Whether a permit holds now."""
        return permit in self._permits and self._permits[permit] is None

    # Called by clients.

    def ask(self, question: Question) -> Ticket:
        """A question is about to be asked."""
        with self._lock:
            floors = {version: [one.copy() for one in view.floors] for version, view in self._views.items()}
            return Ticket(question, self._moment, floors)

    def fail(self, ticket: Ticket, error: BaseException) -> None:
        """A question got an error."""
        with self._lock:
            if not self._held_since(ticket.moment, Permit.ERRORS):
                raise WrongAnswerError(
                    f"asked: {_short(ticket.question)}\nfound: {type(error).__name__}: {error}\nallowed: an answer"
                )

    def check(self, ticket: Ticket, answer: Mapping[str, NDArray[np.float32]]) -> None:
        """A question got an answer.

        Raises:
            WrongAnswerError: the answer is not allowed.
        """
        with self._lock:
            content = self._content_of(ticket, answer["content"])
            for table in TABLES:
                positions = ticket.question.positions[table.name]
                self._check_rows(ticket, content, table, positions, answer[f"{table.name}_rows"])
            self._check_rows(ticket, content, TABLES[2], ticket.question.bag, answer["bag_rows"])

    def _held_since(self, moment: int, permit: Permit) -> bool:
        lifted = self._permits.get(permit, -1)
        return lifted is None or lifted > moment

    def _content_of(self, ticket: Ticket, says: Arrays | NDArray[np.float32]) -> Content:
        numbers = set(np.asarray(says).ravel().tolist())
        serving = {n for n, ceased in self._serving.items() if ceased is None or ceased > ticket.moment}
        if len(numbers) != 1 or not numbers <= serving:
            raise WrongAnswerError(
                f"asked: {_short(ticket.question)}\nfound: an answer of contents {sorted(numbers)}\n"
                f"allowed: one of {sorted(serving)}"
            )
        return self._contents[int(numbers.pop())]

    def _check_rows(
        self, ticket: Ticket, content: Content, table: Table, positions: Integers, vectors: NDArray[np.float32]
    ) -> None:
        keys, rows = positions.ravel(), vectors.reshape(-1, vectors.shape[-1])
        if len(rows) != len(keys):
            raise WrongAnswerError(
                f"asked: {len(keys)} keys of {table.name}\nfound: {len(rows)} rows\nallowed: one for each key"
            )
        self.num_checked += len(keys)
        view = self._views[content.version]
        history, floors = view.histories[table.number], view.floors[table.number]
        lowest = self._floors_at(ticket, content, table)[keys]
        whole, tags, numbers = decode(table.number, keys, rows)
        right = whole & (numbers >= lowest) & (numbers <= history.begun[keys])
        right &= np.where(
            numbers > 0, tags == self._tag_of_writes(content), (tags == content.tag) & history.has_file_row[keys]
        )
        if history.deletions:
            right &= [(k, n) not in history.deletions for k, n in zip(keys.tolist(), numbers.tolist(), strict=True)]
        shown = np.where(right, numbers, 0)
        for at in np.flatnonzero(~right).tolist():
            key, oldest = int(keys[at]), int(lowest[at])
            shown[at] = self._number_shown(ticket, content, table, key=key, lowest=oldest, row=rows[at])
        for numbers in (floors, view.shown[table.number]):
            np.maximum.at(numbers, keys, shown)

    def _floors_at(self, ticket: Ticket, content: Content, table: Table) -> Integers:
        """The floors that held for a question; zeros if it has none for the version, or if old rows are permitted."""
        begun = self._views[content.version].histories[table.number].begun
        if content.version not in ticket.floors or self._held_since(ticket.moment, Permit.OLD_ROWS):
            return np.zeros_like(begun)
        return ticket.floors[content.version][table.number]

    def _tag_of_writes(self, content: Content) -> int:
        return 0 if self.writer is Writer.STREAM else self._views[content.version].tag

    def _number_shown(
        self, ticket: Ticket, content: Content, table: Table, *, key: int, lowest: int, row: NDArray[np.float32]
    ) -> int:
        """The oldest write that a row which is no plain one may show."""
        history = self._views[content.version].histories[table.number]
        newest = int(history.begun[key])
        is_default = bool((row == table.default).all())
        whole, tags, numbers = (part[0] for part in decode(table.number, np.array([key]), row[None]))
        is_file_row = bool(whole and numbers == 0 and tags == content.tag and history.has_file_row[key])
        if is_default or (is_file_row and self.files_show):
            for number in range(lowest, newest + 1):
                if history.is_missing(key, number):
                    return number
            if is_default and self._held_since(ticket.moment, Permit.DEFAULTS):
                return 0
        raise WrongAnswerError(
            f"asked: {table.name}, key {table.keys[key]} (position {key}), of content {content}\n"
            f"found: {_describe(row, bool(whole), int(tags), int(numbers), is_default)}\n"
            f"allowed: writes {lowest} to {newest} of tag {self._tag_of_writes(content)}, of which "
            f"{[n for n in range(lowest, newest + 1) if history.is_missing(key, n)]} leave no row"
            f"; shown before: {self._views[content.version].shown[table.number][key]}"
            f"; permits: {[permit.name for permit in Permit if self._held_since(ticket.moment, permit)]}"
        )

    # The required state when all faults have healed.

    def settled_rows(self, version: int, table: Table) -> Iterator[tuple[int, set[int | None]]]:
        """Each key's position, and the numbers of the writes that may be answered; None: the default vector."""
        history = self.history(version, table)
        for key, number in enumerate(history.begun.tolist()):
            if not history.is_missing(key, number):
                yield key, {number}
            elif number and self.files_show and history.has_file_row[key]:
                yield key, {0, None}
            else:
                yield key, {None}


def _short(question: Question) -> str:
    return ", ".join(f"{name} {positions.tolist()}" for name, positions in question.positions.items())


def _describe(row: NDArray[np.float32], whole: bool, tag: int, number: int, is_default: bool) -> str:
    if is_default:
        return "the default vector"
    return f"write {number} of tag {tag}" if whole else f"no row of this key: {row.tolist()}"

"""Where a copy is put together before it becomes its target by one rename.

.tmp-<name>/journal.json     which source it comes from, and the state of its files
.tmp-<name>/content          what becomes the target
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

from inference_session.errors import HotrowError
from inference_session.model_source.base import Entry, ModelSource
from inference_session.model_source.inventory import Inventory
from inference_session.platform.json_records import own_fields


class DraftCopy:
    """The folder next to the target. A run continues with what a failed run has left there."""

    def __init__(self, place: ModelSource, name: str) -> None:
        """`place`: the folder that the target will be in; `name`: the target's."""
        self.place = place
        self._name = name
        self._folder = f".tmp-{name}"
        self._journal = f"{self._folder}/journal.json"

    def path_of(self, path: str) -> str:
        """Where a file of the source is put, in `place`."""
        return f"{self._folder}/content/{path}".rstrip("/")

    def prepare(self, source: str, inventory: Inventory) -> dict[str, int]:
        """Make all folders, and remove what is not part of this source in its present state; returns the bytes that
        exist by file.
        """
        states = inventory.states()
        earlier = self._read_journal(source)
        self.place.make_folder(self._folder)
        if earlier is None:
            self._empty()
        kept = self._keep_good(states, earlier or {}, set(inventory.folders))
        self._write_journal(source, states)
        for folder in inventory.folders:
            self.place.make_folder(self.path_of(folder))
        return kept

    @contextmanager
    def hold(self) -> Iterator[None]:
        """Keep other copies to this target out: they would write into its files, even once these are in place. After an
        error, the folder is left only if there is something in it to continue with.

        Raises:
            UnavailableError: there is another one.
        """
        with self.place.hold(self._folder):
            try:
                yield
            except Exception:
                with suppress(HotrowError, OSError):  # the place may be what has failed
                    if not any(entry.num_bytes for entry in self._entries()):
                        self.tidy_up()
                raise

    def move_into_place(self) -> None:
        """Make it the target, and remove the draft; ConfigurationError where the target exists by now."""
        self.place.rename(self.path_of(""), self._name)
        self.tidy_up()

    def tidy_up(self) -> None:
        """Remove the draft."""
        self.place.remove(self._folder)

    def _empty(self) -> None:
        """Remove what is in the draft, which itself stays, as it is held."""
        for entry in self.place.entries(self._folder):
            if entry.path.count("/") == 1:
                self.place.remove(entry.path)

    def _keep_good(self, states: dict[str, Any], earlier: dict[str, Any], folders: set[str]) -> dict[str, int]:
        kept: dict[str, int] = {}
        for entry in self._entries():
            path = entry.path.removeprefix(self.path_of("")).lstrip("/")
            if entry.is_folder:
                is_good = path in folders
            else:
                state = states.get(path)
                is_good = state is not None and earlier.get(path) == state and entry.num_bytes <= state[0]
            if not is_good:
                self.place.remove(entry.path)
            elif not entry.is_folder:
                kept[path] = entry.num_bytes
        return kept

    def _entries(self) -> list[Entry]:
        """All files and folders, each folder after its content."""
        top = self.place.stat(self.path_of(""))
        if top is None:
            return []
        return [*reversed(self.place.entries(top.path)), *([top] if top.is_folder else [])]

    def _read_journal(self, source: str) -> dict[str, Any] | None:
        """The states of the files that an earlier run copied from this source; None where there was none."""
        entry = self.place.stat(self._journal)
        # An earlier run may have been killed while it wrote this.
        journal = own_fields(self.place.read(entry.path, 0, entry.num_bytes) if entry else None)
        return journal.get("files") if journal.get("source") == source else None

    def _write_journal(self, source: str, states: dict[str, Any]) -> None:
        text = json.dumps({"source": source, "files": states}).encode()
        self.place.remove(self._journal)
        self.place.write(self._journal, lambda begin: [text[begin:]])

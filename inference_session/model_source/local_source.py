"""Files of this machine."""

from __future__ import annotations

import os
import shutil
from contextlib import AbstractContextManager
from pathlib import Path

from inference_session.errors import ConfigurationError, SourceError
from inference_session.model_source.base import ChunksFrom, Entry, ModelSource
from inference_session.platform.drafts import check_space, flush, flush_tree, hold_folder
from inference_session.platform.large_pages import open_for_writing


class LocalSource(ModelSource):
    """A folder, or one file."""

    def __init__(self, root: Path) -> None:
        self.root = root.absolute()

    def name_of(self, path: str) -> str:
        return str(self.root / path)

    def stat(self, path: str) -> Entry | None:
        """See ModelSource. Links are followed."""
        try:
            stat = (self.root / path).stat()
        except (FileNotFoundError, NotADirectoryError):
            return None
        if (self.root / path).is_dir():
            return Entry(path, 0, "", is_folder=True)
        return Entry(path, stat.st_size, f"{stat.st_mtime_ns}-{stat.st_ino}")

    def entries(self, path: str = "") -> list[Entry]:
        """See ModelSource. Links are followed; a SourceError where they lead in a circle."""
        top = self.stat(path)
        if top is None:
            raise FileNotFoundError(2, os.strerror(2), self.name_of(path))
        return sorted(self._below(path, ())) if top.is_folder else [self._plain(top)]

    def _below(self, path: str, above: tuple[Path, ...]) -> list[Entry]:
        folder = (self.root / path).resolve()
        if folder in above:
            raise SourceError(f"{self.name_of(path)}: a link to a folder above it, which would be followed endlessly")
        entries: list[Entry] = []
        for item in folder.iterdir():
            entry = self.stat(f"{path}/{item.name}".lstrip("/"))
            if entry is None:
                raise SourceError(f"{item}: a broken link, or the file was just removed")
            entries.append(entry if entry.is_folder else self._plain(entry))
            if entry.is_folder:
                entries += self._below(entry.path, (*above, folder))
        return entries

    def _plain(self, entry: Entry) -> Entry:
        if not (self.root / entry.path).is_file():
            raise SourceError(f"{self.name_of(entry.path)}: neither a file nor a folder")
        return entry

    def read(self, path: str, begin: int, num_bytes: int) -> bytes:
        with (self.root / path).open("rb", buffering=0) as file:
            file.seek(begin)
            parts: list[bytes] = []
            left = num_bytes
            while left and (part := file.read(left)):
                parts.append(part)
                left -= len(part)
        if left:
            raise SourceError(
                f"{self.name_of(path)}: the file ends at byte {begin + num_bytes - left}, too early; it may have "
                "been changed while it was read"
            )
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def write(self, path: str, chunks_from: ChunksFrom) -> None:
        target = self.root / path
        target.parent.mkdir(parents=True, exist_ok=True)
        with open_for_writing(target, "ab") as file:
            for chunk in chunks_from(target.stat().st_size):
                file.write(chunk)

    def check_space(self, num_bytes: int) -> None:
        check_space(self.root, num_bytes, "the copy needs")

    def make_folder(self, path: str) -> None:
        (self.root / path).mkdir(parents=True, exist_ok=True)

    def hold(self, path: str) -> AbstractContextManager[None]:
        self.make_folder(path)
        return hold_folder(self.root / path)

    def rename(self, path: str, target: str) -> None:
        if os.path.lexists(self.root / target):
            raise ConfigurationError(f"{self.name_of(target)}: already exists; choose another target")
        flush_tree(self.root / path)
        (self.root / path).rename(self.root / target)
        flush((self.root / target).parent)

    def remove(self, path: str) -> None:
        target = self.root / path
        if target.is_dir() and not target.is_symlink():
            shutil.rmtree(target)
        else:
            target.unlink(missing_ok=True)

    def __repr__(self) -> str:
        return f"<LocalSource {str(self.root)!r}>"

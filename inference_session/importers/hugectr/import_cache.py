"""HugeCTR's files as a version directory, made when they are first opened and kept for the next time.

<cache>/<model>-<hash of the model's folder>/
  lock                          held by the process that imports; shared by processes that open
  <hash of the sources>/        what was made of them
    <model>/<version>/          a version directory
    .served                     its time is the last time that the version was opened without an error

The hash of the sources covers every byte of every file, what ps.json says of the model, and hotrow's own importer: a
change of any of them causes a new import. Tables are copied, not linked: training may overwrite the originals.
"""

from __future__ import annotations

import fcntl
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from pathlib import Path

from inference_session.errors import ModelFormatError, UnavailableError
from inference_session.importers.hugectr.importer import write_version
from inference_session.importers.hugectr.ps_fields import PsJson, PsModel
from inference_session.importers.hugectr.remote_files import with_local_files
from inference_session.model_spec import KEY_FILE, VECTOR_FILE
from inference_session.platform.drafts import draft_version
from inference_session.platform.progress import Progress
from inference_session.platform.user_cache import cache_folder, hashed_name, least_recent_first, lock_file
from inference_session.version_directory import manifest, session_file
from inference_session.version_directory.manifest import sha256_of
from inference_session.version_directory.verified_files import FileState, file_state

NUM_KEPT = 3
"""Imports of one model that are kept: the one in use, the one before it for a way back, and one more."""
_SERVED = ".served"


def default_cache_folder() -> Path:
    """`HOTROW_CACHE_DIR`, else `hotrow/imports` in the user's cache folder."""
    return cache_folder() if os.environ.get("HOTROW_CACHE_DIR") else cache_folder() / "imports"


@contextmanager
def cached_import(
    settings: PsJson,
    model: PsModel,
    owner: Path,
    *,
    version: int = 1,
    keep_rows_of: Sequence[Path] = (),
    folder: Path | None = None,
    progress: Progress | None = None,
) -> Iterator[Path]:
    """Yield the version directory of a model, which is imported first if it is not in the cache.

    No process removes it while the context lasts. A session opened in it may live longer: it has mapped its files.

    Args:
        model: one of the settings' models, its files as they are to be read.
        owner: the model's own folder; imports of one owner are kept apart from those of others, and bounded.
        keep_rows_of: see `write_version`.
        folder: the cache; None: `default_cache_folder()`.

    Raises:
        as `import_hugectr`; ConfigurationError also where the cache cannot be written, UnavailableError where a source
        was written to meanwhile.
    """
    model = with_local_files(model, progress)
    imports = _imports(model.name, owner, folder)
    sources = _files(model, keep_rows_of)
    before = _states(sources)
    contents = _statement(settings, model), version, _importer_hash(), *_checksums(sources, progress)
    entry = imports / hashed_name(repr(contents))
    version_dir = entry / model.name / str(version)
    with lock_file(imports) as lock:
        while True:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not version_dir.is_dir():
                with draft_version(entry, model.name, version) as (draft, _):
                    write_version(settings, model, draft, keep_rows_of=keep_rows_of, may_link=False, progress=progress)
                    _refuse_changes(before)
            os.utime(entry)
            _remove_old(imports, entry)
            # Other processes may open it at the same time. Changing the lock releases it for a moment: check again.
            fcntl.flock(lock, fcntl.LOCK_SH)
            if version_dir.is_dir():
                break
        yield version_dir
        (entry / _SERVED).touch()


@contextmanager
def kept_import(name: str, owner: Path, version: int, *, folder: Path | None = None) -> Iterator[Path | None]:
    """Yield the import last opened without an error as this version of a model; None where it is no longer kept.

    No process removes it while the context lasts.

    Args:
        name, owner, folder: as the model's name, `owner` and `folder` of `cached_import`.
    """
    imports = _imports(name, owner, folder)
    with lock_file(imports) as lock:
        fcntl.flock(lock, fcntl.LOCK_SH)
        kept = [entry for entry in _served(imports) if (entry / name / str(version)).is_dir()]
        if kept:
            os.utime(kept[-1])
        yield kept[-1] / name / str(version) if kept else None
        if kept:
            (kept[-1] / _SERVED).touch()


def _imports(name: str, owner: Path, folder: Path | None) -> Path:
    """Where the imports of one model folder are kept."""
    return (folder or default_cache_folder()) / f"{name}-{hashed_name(str(owner.resolve()), 12)}"


def _files(model: PsModel, keep_rows_of: Sequence[Path]) -> list[Path]:
    """All that the import will read."""
    single = [Path(name) for name in (model.graph_file, model.dense_file, model.statistics_file) if name]
    folders = [*map(Path, model.sparse_files), *keep_rows_of]
    return single + [folder / name for folder in folders for name in (KEY_FILE, VECTOR_FILE)]


def _statement(settings: PsJson, model: PsModel) -> tuple[object, ...]:
    """What ps.json says in addition to the files, without their paths."""
    elsewhere = replace(model, sparse_files=(), graph_file="", dense_file="", statistics_file="")
    return bool(model.graph_file), elsewhere, settings.key_type, settings.generation, settings.session_settings(model)


def _checksums(sources: Sequence[Path], progress: Progress | None) -> list[str]:
    with ThreadPoolExecutor() as threads:
        try:
            return list(threads.map(lambda path: sha256_of(path, progress), sources))
        except OSError as error:
            raise ModelFormatError(f"{error.filename}: cannot be read: {error.strerror}") from error


def _states(sources: Sequence[Path]) -> dict[Path, FileState]:
    try:
        return {path: file_state(path) for path in sources}
    except OSError as error:
        raise ModelFormatError(f"{error.filename}: cannot be read: {error.strerror}") from error


def _refuse_changes(before: Mapping[Path, FileState]) -> None:
    for path, state in _states([*before]).items():
        if state != before[path]:
            raise UnavailableError(f"{path}: the file changed while it was imported; load the model again")


@cache
def _importer_hash() -> str:
    """A hash of the code that reads HugeCTR's files, so that a newer hotrow imports again."""
    code = sorted(Path(__file__).parent.rglob("*.py"))
    formats = f"{session_file.FORMAT} {manifest.FORMAT}"
    return hashed_name(formats + "".join(path.read_text(encoding="utf-8") for path in code))


def _remove_old(imports: Path, used: Path) -> None:
    """Remove all but the most recent imports, of which `used` is the newest, and the one that serves.

    Must be called while holding the lock exclusively: no process is opening one.
    """
    others = [path for path in least_recent_first(imports) if path != used]
    for path in set(others[: 1 - NUM_KEPT]) - set(_served(imports)[-1:]):
        shutil.rmtree(path)


def _served(imports: Path) -> list[Path]:
    """The imports that were opened without an error, the last one at the end."""
    served = sorted(imports.glob(f"*/{_SERVED}"), key=lambda path: path.stat().st_mtime_ns)
    return [path.parent for path in served]

"""Functions compiled by Numba, whose machine code is kept on disk, or brought along by an image.

The kept files are pickles with machine code in them, and both are run as they are. So a folder that anybody else could
have written to is not used.
"""

from __future__ import annotations

import fcntl
import functools
import grp
import hashlib
import logging
import os
import pwd
import shutil
import stat
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

import numba
from llvmlite import binding as llvm
from numba.core.caching import CompileResultCacheImpl, FunctionCache, IndexDataCacheFile, NullCache
from numba.core.compiler_lock import global_compiler_lock
from numba.core.registry import cpu_target
from numba.core.runtime.nrt import rtsys

from inference_session.kernels.parts import Kernel

FOLDER = "NUMBA_CACHE_DIR"
"""Where Numba keeps machine code, which it has to be able to write to even where all is there already."""
SHIPPED_FOLDER = "HOTROW_SHIPPED_KERNELS"
"""What an image brings along, which that folder begins with: it usually lies in a volume, which is empty at first."""

Function = TypeVar("Function", bound=Callable[..., Any])

_CHECKS = ("BOUNDSCHECK", "DEBUGINFO_DEFAULT", "DISABLE_JIT")
"""Settings of Numba, for all functions of a process, with which kernels compile to other code, or not at all."""
_CHECKSUM_BYTES = 16
_PAUSE_S = 0.05

_log = logging.getLogger(__name__)


class _Files(IndexDataCacheFile):
    """The index of a function, and a file of machine code for each of its signatures.

    Numba numbers these files one after the other. Two processes that compile a function for different types at once
    would give both the same number, and a third would then run the machine code of the wrong types. Here the number
    follows from the signature, and the file is there before the index points to it.

    Numba would also run machine code with a changed bit. Here each file ends with its checksum, which unpickling does
    not read.
    """

    def save(self, key: Any, data: Any) -> None:
        number = int.from_bytes(hashlib.blake2b(self._dump(key), digest_size=8).digest(), "big")
        name = self._data_name(number)
        self._save_data(name, data)
        self._save_index({**self._load_index(), key: name})

    def _save_data(self, name: str, data: Any) -> None:
        content = self._dump(data)
        with self._open_for_write(self._data_path(name)) as file:
            file.write(content + _checksum(content))

    def _load_data(self, name: str) -> Any:
        content = Path(self._data_path(name)).read_bytes()
        if _checksum(content[:-_CHECKSUM_BYTES]) != content[-_CHECKSUM_BYTES:]:
            raise ValueError(f"{name} is damaged")
        return super()._load_data(name)


def _checksum(content: bytes) -> bytes:
    return hashlib.blake2b(content, digest_size=_CHECKSUM_BYTES).digest()


class _Overloads(CompileResultCacheImpl):
    """What is kept of a compiled function: its machine code.

    Numba also keeps LLVM bitcode, for functions that will call it. These get it as a part (parts.py).

    Numba also keeps an environment for each function that was compiled into this one, and imports their modules, some
    of which are large parts of its compiler. Here those that the machine code does not read are left out.
    """

    def reduce(self, data: Any) -> Any:
        (name, kind, (machine_code, _)), *others, environments = super().reduce(data)
        code = str(data.library._final_module)
        read = tuple(one for one in environments if code.count(one.env_name) > 1)  # once where it is declared
        return (name, kind, (machine_code, _no_bitcode())), *others, read

    def rebuild(self, target_context: Any, payload: Any) -> Any:
        _, description, *_ = payload
        engine = target_context.codegen()._engine
        # Numba learns from the bitcode which functions the machine code has.
        engine._defined_symbols.update((description.llvm_func_name, description.llvm_cpython_wrapper_name))
        return super().rebuild(target_context, payload)


@functools.cache
def _no_bitcode() -> bytes:
    return bytes(llvm.parse_assembly("").as_bitcode())


class _MachineCode(FunctionCache):
    """On disk. Numba would import all of its compiler before it loads any, which takes longer than everything else
    that a process does before it serves, and 20 MiB; compiling imports it where nothing was found. And it would fail
    where files are damaged, as by a loss of power, or the disk is full.

    One process at a time compiles a function, while others wait: where a server starts many models, each of them would
    compile all of them otherwise.
    """

    _impl_class = _Overloads
    timeout_s = 120.0
    """How long to wait for another process that compiles a function: it usually takes a few seconds, but may have
    been stopped. 0 once one has taken longer: no other function is waited for then.
    """
    _turn: int | None = None
    """The open file that is locked while this process compiles the function."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__(function)
        numbas = self._cache_file
        self._cache_file = _Files(self.cache_path, self._impl.filename_base, numbas._source_stamp)

    def load_overload(self, sig: Any, target_context: Any) -> Any:
        """The function as it is kept; None where the caller has to compile it, and then to save it."""
        loaded = self._loaded(sig, target_context)
        if loaded is None:
            _announce()
            self._begin_turn()
            loaded = self._loaded(sig, target_context)
        if loaded is not None:
            self.end_turn()
        return loaded

    def _loaded(self, sig: Any, target_context: Any) -> Any:
        try:
            return self._load_overload(sig, target_context)
        except Exception:  # noqa: BLE001 - a damaged pickle may raise any error, and so may what is made of it
            with suppress(OSError):
                self.flush()  # else what is compiled now could not be kept either
            return None

    def save_overload(self, sig: Any, data: Any) -> None:
        with suppress(OSError):
            super().save_overload(sig, data)
        self.end_turn()

    def _begin_turn(self) -> None:
        """Wait while another process compiles the function, as long as that may take."""
        with suppress(OSError):  # a file system without locks: each process compiles
            path = Path(self.cache_path) / f"{self._impl.filename_base}.lock"
            self._turn = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            end = time.monotonic() + _MachineCode.timeout_s
            while not _is_locked(self._turn):
                if time.monotonic() >= end:
                    _MachineCode.timeout_s = 0.0
                    break
                time.sleep(_PAUSE_S)

    def end_turn(self) -> None:
        """Let another process compile the function."""
        if self._turn is not None:
            os.close(self._turn)
            self._turn = None


def _is_locked(descriptor: int) -> bool:
    """Lock a file for this process, if no other process has locked it."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


class KeptCode(NullCache):
    """The machine code of a function, which is looked for when it is first asked for.

    Most functions are only called by other compiled functions, whose machine code contains them.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function

    @cached_property
    def files(self) -> Any:
        """As Numba sees them; none where it finds no folder that it may write to, or that others may write to."""
        with suppress(RuntimeError):  # a read-only image without a home: each process compiles
            kept = _MachineCode(self._function)
            if _is_ours(Path(kept.cache_path)):
                return kept
        return NullCache()

    @property
    def cache_path(self) -> Any:
        return self.files.cache_path

    def load_overload(self, sig: Any, target_context: Any) -> Any:
        return self.files.load_overload(sig, target_context)

    def save_overload(self, sig: Any, data: Any) -> None:
        self.files.save_overload(sig, data)

    def give_up(self) -> None:
        """The function cannot be compiled for these types."""
        if isinstance(self.files, _MachineCode):
            self.files.end_turn()

    def flush(self) -> None:
        self.files.flush()


class _KeptKernel(Kernel):
    """A kernel whose machine code is kept."""

    _cache: KeptCode

    def compile(self, sig: Any) -> Any:
        # Without the lock, another thread could begin its turn before this one gives up.
        with global_compiler_lock, _own_options():
            try:
                return super().compile(sig)
            except BaseException:
                self._cache.give_up()
                raise


@contextmanager
def _own_options() -> Iterator[None]:
    """Compile as if an application had not asked Numba to check its own functions, or not to compile them."""
    numba.config.reload_config()
    options = vars(numba.config)
    asked = {name: options[name] for name in _CHECKS}
    options.update(dict.fromkeys(_CHECKS, 0))
    try:
        yield
    finally:
        options.update(asked)


def compiled(function: Callable[..., Any], signature: str | None = None, **options: Any) -> Any:
    """As `numba.njit`, kept on disk where there is a folder for it.

    With a signature it is compiled, or loaded, at once and for those types only, else when it is first called.
    """
    _unpack_shipped()
    dispatcher: Any = _KeptKernel(function, targetoptions={"nopython": True, **options})
    if options.get("_nrt", True):  # machine code from the disk calls it; compiling would initialize it
        rtsys.initialize(cpu_target.target_context)
    dispatcher._cache = KeptCode(function)
    dispatcher._compilation_chain_init_hook = _load_no_extensions
    if signature is not None:
        dispatcher.compile(signature)
        dispatcher.disable_compile()
    return dispatcher


def _load_no_extensions() -> None:
    """Before it loads a kernel, Numba would look through all installed packages for extensions of its compiler."""


def of_ints(function: Function) -> Function:
    """A compiled function, called with whole numbers only: Numba does not look at their types in each call.

    That takes half of the time of a small kernel. It is compiled, or loaded, at once.
    """
    try:
        kinds = (numba.int64,) * function.py_func.__code__.co_argcount  # type: ignore[attr-defined]
        function.compile(kinds)  # type: ignore[attr-defined]
        entry: Function = function.overloads[kinds].entry_point  # type: ignore[attr-defined]
    except (AttributeError, KeyError):  # no documented part of Numba
        return function
    return entry


@functools.cache
def _announce() -> None:
    """Say once why a process does nothing for a while."""
    _log.warning("Compiling kernels for this machine, which may take a minute. Later processes use them too.")


@functools.cache
def _unpack_shipped() -> None:
    """Copy all of it, or nothing where the folder is there: another processor's code may be in it under equal names."""
    shipped, folder = os.environ.get(SHIPPED_FOLDER), Path(os.environ.get(FOLDER, ""))
    if not shipped or not folder.name or folder.exists() or not _is_ours(Path(shipped)):
        return
    with suppress(OSError):  # no such folder, or none that may be written to: Numba compiles
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".tmp-", dir=folder.parent, ignore_cleanup_errors=True) as staging:
            copy = Path(shutil.copytree(shipped, Path(staging) / folder.name))
            for inner in (copy, *(path for path in copy.rglob("*") if path.is_dir())):
                inner.chmod(inner.stat().st_mode | stat.S_IRWXU)
            copy.rename(folder)  # fails where another process was first


@functools.cache
def _is_ours(folder: Path) -> bool:
    """Whether no other user can have put machine code into a folder. A folder that is refused is logged."""
    above = [Path(chosen)] if (chosen := os.environ.get(FOLDER)) else []
    with suppress(OSError):
        paths: tuple[Path | os.DirEntry[str], ...] = (*above, folder, *_below(folder))
        for path in paths:
            if reason := open_to_others(path):
                _log.warning(
                    "The compiled kernels in %s are not used, because they are code and %s. This process "
                    "compiles its own, "
                    "which may take a minute. Give the folder and its files to the user of this process, with mode "
                    "0755, or set %s to another folder.",
                    folder,
                    reason,
                    FOLDER,
                )
                return False
    return True


def _below(folder: Path | os.DirEntry[str]) -> Iterator[os.DirEntry[str]]:
    """What lies in a folder and in its folders. There are many files where kernels have changed often."""
    with suppress(PermissionError), os.scandir(folder) as entries:
        for entry in entries:
            yield entry
            if entry.is_dir(follow_symlinks=False):
                yield from _below(entry)


def open_to_others(path: Path | os.DirEntry[str]) -> str | None:
    """Why users other than root and ours may write to a file or folder; None: they may not, or there is none."""
    try:
        state = path.stat(follow_symlinks=False)
    except FileNotFoundError:
        return None
    if state.st_uid not in (0, os.geteuid()):
        return f"{os.fspath(path)} belongs to another user ({state.st_uid})"
    if stat.S_ISLNK(state.st_mode):
        return open_to_others(Path(path).resolve())
    if state.st_mode & stat.S_IWOTH:
        return f"all users may write to {os.fspath(path)}"
    if state.st_mode & stat.S_IWGRP and not is_private_group(state.st_gid):
        return f"users of group {state.st_gid} may write to {path}"
    return None


@functools.cache
def is_private_group(group: int) -> bool:
    """Whether only root and our user are in a group, as in the group that many systems create for each user."""
    ours = {"root", *(user.pw_name for user in pwd.getpwall() if user.pw_uid == os.geteuid())}
    with suppress(KeyError):  # a group without a name lists no members
        if set(grp.getgrgid(group).gr_mem) - ours:
            return False
    return all(user.pw_name in ours for user in pwd.getpwall() if user.pw_gid == group)

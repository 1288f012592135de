"""`python -m tests.fuzz TARGET…`: feed each reader damaged files until its time is over.

The same seed makes the same files. Errors are printed, and the files that caused them stay in the folder.
"""

from __future__ import annotations

import faulthandler
import logging
import os
import resource
import sys
import tempfile
import time
import traceback
from pathlib import Path

import click
import onnxruntime

from tests.fuzz.mutator import Mutator
from tests.fuzz.target import Target
from tests.fuzz.targets import TARGETS

HANG_S = 60.0
"""A reader that takes longer on one file hangs, also on a slow machine."""
MEMORY_BYTES = (4 << 30) + (128 << 20) * (os.cpu_count() or 1)
"""The most memory a reader may use beyond the program's at its start. Each thread (one per core) reserves some."""


def fuzz(target: Target, folder: Path, *, seed: int, seconds: float, max_files: int) -> int:
    """Returns how many damaged files were read."""
    folder.mkdir(parents=True, exist_ok=True)
    files = target.prepare(folder)
    sound = [path.read_bytes() for path in files]
    target.read(folder)
    _limit_memory()
    mutator = Mutator(seed)
    deadline = time.monotonic() + seconds
    for num_files in range(max_files):
        if time.monotonic() > deadline:
            return num_files
        which = mutator.random.randrange(len(files))
        replace(files[which], mutator.mutated(sound[which]))
        faulthandler.dump_traceback_later(HANG_S, exit=True)
        try:
            target.read(folder)
        except target.errors:
            pass
        except Exception:
            click.echo(f"file {num_files} of seed {seed}: {files[which]}")
            raise
        faulthandler.cancel_dump_traceback_later()
        restore(files, sound)
    return max_files


def replace(path: Path, content: bytes) -> None:
    """As a new file: the old one may still be mapped."""
    path.unlink(missing_ok=True)
    path.write_bytes(content)


def restore(files: list[Path], sound: list[bytes]) -> None:
    """Restore all files: a reader may repair files that belong to a damaged one."""
    for path, content in zip(files, sound, strict=True):
        if not path.exists() or path.read_bytes() != content:
            replace(path, content)


def _limit_memory() -> None:
    used = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0]) * resource.getpagesize()
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    limit = used + MEMORY_BYTES
    resource.setrlimit(resource.RLIMIT_AS, (limit if hard == resource.RLIM_INFINITY else min(limit, hard), hard))


def _fuzz_apart(name: str, folder: Path, **limits: int | float) -> bool:
    """Fuzz in a process of its own, which starts with all modules loaded; says whether it ended well."""
    process = os.fork()
    if process:
        return os.waitpid(process, 0)[1] == 0
    status = 1
    try:
        click.echo(f"{name}: {fuzz(TARGETS[name], folder, **limits)} damaged files")
        status = 0
    except Exception:  # noqa: BLE001  a finding
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        os._exit(status)


@click.command()
@click.argument("targets", type=click.Choice(list(TARGETS)), nargs=-1, required=True)
@click.option("--seconds", type=float, default=60.0, show_default=True, help="For each target.")
@click.option("--max-files", type=int, default=10**9, help="End after this number of files.")
@click.option("--seed", type=int, default=0, show_default=True)
@click.option("--folder", type=click.Path(path_type=Path), help="Where the files are; default: a new folder.")
def main(targets: tuple[str, ...], seconds: float, max_files: int, seed: int, folder: Path | None) -> None:
    """Feed readers of foreign bytes with damaged files; fails if anything but an error of ours comes out."""
    faulthandler.enable()
    logging.disable()
    onnxruntime.set_default_logger_severity(4)
    folder = folder or Path(tempfile.mkdtemp(prefix="hotrow-fuzz-"))
    limits = {"seed": seed, "seconds": seconds, "max_files": max_files}
    failed = [name for name in targets if not _fuzz_apart(name, folder / name, **limits)]
    if failed:
        raise click.ClickException(f"failed: {', '.join(failed)}")


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    main()

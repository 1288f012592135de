"""`python -m tests.fuzz.coverage_guided TARGET`: as `python -m tests.fuzz`, by atheris.

It keeps files that reach new code, and mutates those. Needs `pip install atheris`, on platforms with wheels. With
PYTHONHASHSEED set, the same seed feeds the same files in the same order; the time only says how many of them.

A file is fed as its number among the target's files, one byte, then its content. Errors are printed, and files kept
in the folder as `crash-…`, `timeout-…` or `oom-…`.
"""

from __future__ import annotations

import logging
import re
import sys
import tempfile
from pathlib import Path

import atheris
import click
import onnxruntime

from tests.fuzz.mutator import Mutator

READERS = ("inference_session", "triton_backend", "hotrow")
COMPILED = re.compile(r"^@\w*kernel|^import numba|^from numba|^from \S+ import .*\bcompiled\b", re.MULTILINE)
"""Part of the source of modules that Numba compiles; Numba does not support instrumented code."""
MEMORY_MIB = 4096
HANG_S = 60


def kernel_modules() -> list[str]:
    """Names of the modules that Numba compiles."""
    root = Path(__file__).parents[2]
    sources = (path for reader in READERS for path in (root / reader).rglob("*.py"))
    kernels = (path for path in sources if COMPILED.search(path.read_text(encoding="utf-8")))
    return [".".join(path.relative_to(root).with_suffix("").parts) for path in kernels]


with atheris.instrument_imports(include=READERS, exclude=kernel_modules()):
    from tests.fuzz.__main__ import replace, restore
    from tests.fuzz.targets import TARGETS


def fuzz(name: str, folder: Path, *, seed: int, seconds: int, max_files: int) -> None:
    """Ends the process: with status 0 when the time is over, or when `max_files` files were read."""
    target, (files_folder, corpus) = TARGETS[name], (folder / "files", folder / "corpus")
    files_folder.mkdir(parents=True)
    corpus.mkdir()
    files = target.prepare(files_folder)
    sound = [path.read_bytes() for path in files]
    for number, content in enumerate(sound):
        (corpus / str(number)).write_bytes(bytes([number]) + content)
    target.read(files_folder)  # which may take a minute where kernels have to be compiled

    def read(data: bytes) -> None:
        number = data[0] % len(files) if data else 0
        replace(files[number], data[1:])
        try:
            target.read(files_folder)
        except target.errors:
            pass
        finally:
            restore(files, sound)

    def mutated(data: bytes, max_size: int, seed: int) -> bytes:
        if seed % 2 and data:
            return (data[:1] + Mutator(seed).mutated(data[1:]))[:max_size]
        return bytes(atheris.Mutate(data, max_size))

    longest = 2 * max(map(len, sound)) + 10_000
    options = [f"-max_total_time={seconds}", f"-seed={seed or 1}", f"-max_len={longest}", f"-timeout={HANG_S}"]
    options += [
        f"-runs={max_files}",
        f"-rss_limit_mb={MEMORY_MIB}",
        "-keep_seed=1",
        f"-artifact_prefix={folder}/",
        str(corpus),
    ]
    atheris.Setup([sys.argv[0], *options], read, custom_mutator=mutated)
    atheris.Fuzz()


@click.command()
@click.argument("target", type=click.Choice(list(TARGETS)))
@click.option("--seconds", type=float, default=60.0, show_default=True)
@click.option("--max-files", type=int, default=2**31 - 1, help="End after this number of files.")
@click.option("--seed", type=int, default=0, show_default=True)
@click.option("--folder", type=click.Path(path_type=Path), help="Where the files are; default: a new folder.")
def main(target: str, seconds: float, max_files: int, seed: int, folder: Path | None) -> None:
    """Feed a reader of untrusted bytes with files that atheris generates."""
    logging.disable()
    onnxruntime.set_default_logger_severity(4)
    folder = folder or Path(tempfile.mkdtemp(prefix="hotrow-fuzz-"))
    fuzz(target, folder, seed=seed % 2**31, seconds=int(seconds), max_files=max_files)


if __name__ == "__main__":
    main()

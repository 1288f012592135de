"""Compiled kernels are kept on disk, and found again only while all of their inputs are the same."""

from __future__ import annotations

import grp
import os
import pickle
import pwd
import shutil
import stat
import subprocess
import sys
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

import pytest

from inference_session.kernels.machine_code import is_private_group, open_to_others
from tests.testing.forked import ForkedPrograms

ROOT = Path(__file__).parents[2]
HEAD = "from inference_session.kernels.cpu.intrinsics import kernel\n"
OUTER = HEAD + "from inner import inner\n@kernel\ndef outer(a):\n    return inner(a) * 10\n"
RUN = (
    "import sys, outer; print(outer.outer(1), sum(outer.outer.stats.cache_hits.values()));"
    "assert bool(outer.outer.stats.cache_misses) == ('numba.np.arraymath' in sys.modules)"
)
"""Only who compiles imports the compiler, which takes longer than all the rest."""
CALL = "import outer; print(outer.outer({}))"
NUMBA = """
import numba
from inference_session.kernels import machine_code
from inference_session.kernels.cpu import intrinsics

def prepare():
    numba.config.reload_config()
"""
"""What each of these programs would import first, which takes longer than all the rest. It compiles and loads nothing.
"""


@pytest.fixture(scope="module")
def programs() -> Iterator[ForkedPrograms]:
    """Runs programs in fresh processes, as far as compiled kernels are concerned."""
    with ForkedPrograms(NUMBA, {"PYTHONPATH": str(ROOT)}) as programs:
        yield programs


@pytest.fixture(scope="module")
def modules(tmp_path_factory: pytest.TempPathFactory, programs: ForkedPrograms) -> Path:
    """A folder of `outer` and `inner`, with their machine code in `compiled`, which tests copy."""
    folder = tmp_path_factory.mktemp("modules")
    (folder / "outer.py").write_text(OUTER)
    assert run_outer(programs, folder, "a + 1") == [20, 0]
    return folder


@pytest.fixture
def compiled(modules: Path, tmp_path: Path) -> Path:
    """A copy of the machine code of `modules`."""
    return Path(shutil.copytree(modules / "compiled", tmp_path / "compiled"))


def run_outer(programs: ForkedPrograms, folder: Path, inner: str, **settings: str) -> list[int]:
    """What outer(1) returns in a fresh process, and how often it was found compiled."""
    (folder / "inner.py").write_text(HEAD + f"@kernel\ndef inner(a):\n    return {inner}\n")
    return run(programs, folder, folder / "compiled", **settings)[0]


def run(programs: ForkedPrograms, modules: Path, compiled: Path, **settings: str) -> tuple[list[int], str]:
    """What outer(1) returns in a fresh process, how often it was found compiled, and what the process logs."""
    environment = {"PYTHONPATH": f"{modules}:{ROOT}", "NUMBA_CACHE_DIR": str(compiled), **settings}
    done = programs.run(RUN, environment)
    assert done.returncode == 0, done.stderr
    return [int(word) for word in done.stdout.split()], done.stderr


def test_a_kernel_is_compiled_anew_when_one_that_it_calls_changes(programs: ForkedPrograms, tmp_path: Path) -> None:
    """Numba alone would go on with the old one, as the caller's own file is the same."""
    (tmp_path / "outer.py").write_text(OUTER)
    assert run_outer(programs, tmp_path, "a + 1") == [20, 0]
    assert run_outer(programs, tmp_path, "a + 1") == [20, 1]
    assert run_outer(programs, tmp_path, "a + 5") == [60, 0]


def test_whoever_compiles_says_so_once(programs: ForkedPrograms, tmp_path: Path) -> None:
    """The wait is explained, also where no logging is set up; where everything is compiled already there is none."""
    (tmp_path / "outer.py").write_text(OUTER)
    environment = {"PYTHONPATH": f"{tmp_path}:{ROOT}", "NUMBA_CACHE_DIR": str(tmp_path / "compiled")}
    (tmp_path / "inner.py").write_text(HEAD + "@kernel\ndef inner(a):\n    return a\n")
    times = []
    for _ in range(2):
        done = programs.run("import outer; outer.outer(1); outer.outer(1.5)", environment)
        assert done.returncode == 0, done.stderr
        times.append(done.stderr.count("Compiling kernels"))
    assert times == [1, 0]


def test_kernels_that_an_image_ships_are_found_in_an_empty_volume(
    programs: ForkedPrograms, modules: Path, compiled: Path, tmp_path: Path
) -> None:
    """Numba itself uses no folder that it cannot write to; a folder that is not empty is left unchanged."""
    volume, shipped = tmp_path / "volume/kernels", str(compiled)
    subprocess.run(["chmod", "-R", "a-w", shipped], check=True)

    assert run(programs, modules, volume, HOTROW_SHIPPED_KERNELS=shipped)[0] == [20, 1]
    assert [path.name for path in volume.parent.iterdir()] == ["kernels"]
    assert all(path.stat().st_mode & stat.S_IWUSR for path in [volume, *volume.iterdir()])

    (tmp_path / "own").mkdir()
    assert run(programs, modules, tmp_path / "own", HOTROW_SHIPPED_KERNELS=shipped)[0] == [20, 0]


@pytest.mark.parametrize("shipped", ["absent", "outer.py"])
def test_a_folder_of_shipped_kernels_that_is_none_does_no_harm(
    shipped: str, programs: ForkedPrograms, tmp_path: Path
) -> None:
    """They are compiled, as without it."""
    (tmp_path / "outer.py").write_text(OUTER)
    assert run_outer(programs, tmp_path, "a + 1", HOTROW_SHIPPED_KERNELS=str(tmp_path / shipped)) == [20, 0]


@pytest.mark.parametrize(("suffix", "size"), [("nbi", 0), ("nbc", 20)])
def test_damaged_machine_code_is_compiled_anew(
    suffix: str, size: int, programs: ForkedPrograms, modules: Path, compiled: Path
) -> None:
    """A file that a loss of power cut off costs the next process time, and later ones none."""
    for file in compiled.rglob(f"*.{suffix}"):
        os.truncate(file, size)

    assert run(programs, modules, compiled)[0] == [20, 0]
    assert run(programs, modules, compiled)[0] == [20, 1]


def test_machine_code_with_a_changed_bit_is_compiled_anew(
    programs: ForkedPrograms, modules: Path, compiled: Path
) -> None:
    """Numba would run it, whatever it does then."""
    for file in compiled.rglob("*.nbc"):
        content = bytearray(file.read_bytes())
        content[len(content) // 2] ^= 1
        file.write_bytes(content)

    assert run(programs, modules, compiled)[0] == [20, 0]
    assert run(programs, modules, compiled)[0] == [20, 1]


@pytest.mark.parametrize(
    "content", [b"\x80\x04}.", b"cnowhere\nnothing\n.", b"\xff" * 99], ids=["dict", "name", "junk"]
)
def test_an_index_of_something_else_is_compiled_anew(
    content: bytes, programs: ForkedPrograms, modules: Path, compiled: Path
) -> None:
    """Whatever error it raises when it is read."""
    for file in compiled.rglob("*.nbi"):
        file.write_bytes(pickle.dumps(metadata.version("numba")) + content)

    assert run(programs, modules, compiled)[0] == [20, 0]
    assert run(programs, modules, compiled)[0] == [20, 1]


def test_a_loaded_kernel_is_compiled_into_another(programs: ForkedPrograms, tmp_path: Path) -> None:
    """It is loaded for calls from Python, and compiled as a part of the other one."""
    (tmp_path / "outer.py").write_text(OUTER)
    (tmp_path / "inner.py").write_text(HEAD + "@kernel\ndef inner(a):\n    return a + 1\n")
    environment = {"PYTHONPATH": f"{tmp_path}:{ROOT}", "NUMBA_CACHE_DIR": str(tmp_path / "compiled")}
    program = "import inner; print(inner.inner(1), sum(inner.inner.stats.cache_hits.values()))"
    for run_too, answers in (("", "2 0"), (RUN, "2 1 20 0"), (RUN, "2 1 20 1")):
        done = programs.run(f"{program}; {run_too}", environment)
        assert " ".join(done.stdout.split()) == answers, done.stderr


def test_a_kernel_inside_another_has_no_machine_code_of_its_own(programs: ForkedPrograms, compiled: Path) -> None:
    """Which takes as long as that of the kernel it is in, until Python calls it."""
    modules, environment = compiled.parent, {"NUMBA_CACHE_DIR": str(compiled.parent / "empty")}
    (modules / "outer.py").write_text(OUTER)
    (modules / "inner.py").write_text(HEAD + "@kernel\ndef inner(a):\n    return a + 1\n")
    program = (
        "import outer; from inner import inner;"
        "print(outer.outer(1), len(inner.signatures), inner(2), len(inner.signatures), inner(2.5), outer.outer(3))"
    )
    done = programs.run(program, {**environment, "PYTHONPATH": f"{modules}:{ROOT}"})
    assert done.stdout == "20 0 3 1 3.5 40\n", done.stderr


def test_a_kernel_is_loaded_without_modules_that_it_does_not_run(programs: ForkedPrograms, tmp_path: Path) -> None:
    """Numba compiles a function of its module for arrays into this one, and looks for extensions of itself."""
    (tmp_path / "outer.py").write_text(
        f"{HEAD}import numpy as np\n@kernel\ndef outer(rows, a):\n    rows[0] = (a, a)\n    return a * 10\n"
    )
    environment = {"PYTHONPATH": f"{tmp_path}:{ROOT}", "NUMBA_CACHE_DIR": str(tmp_path / "compiled")}
    program = (
        "import sys, outer; from numba.core import entrypoints;"
        "print(outer.outer(outer.np.zeros((1, 2)), 1), 'numba.np.arrayobj' in sys.modules);"
        "print(entrypoints._already_initialized)"
    )
    for compiles in (True, False):
        done = programs.run(program, environment)
        assert done.stdout.split() == ["10", str(compiles), str(compiles)], done.stderr


def test_processes_that_compile_for_different_types_at_once_keep_both_apart(
    programs: ForkedPrograms, tmp_path: Path
) -> None:
    """Both read the empty index; then one writes its entry, the other all that it has, and the first its code."""
    (tmp_path / "inner.py").write_text(HEAD + "@kernel\ndef inner(a):\n    return a\n")
    (tmp_path / "outer.py").write_text(OUTER)
    environment = {"PYTHONPATH": f"{tmp_path}:{ROOT}", "NUMBA_CACHE_DIR": str(tmp_path / "compiled")}

    def run_program(program: str) -> str:
        done = programs.run(program, environment)
        assert done.returncode == 0, done.stderr
        return done.stdout

    other = (  # it does not wait, as on a file system without locks
        "import outer; files = outer.outer._cache.files; type(files).timeout_s = 0\n"
        "files._cache_file._load_index = dict; outer.outer(3)"
    )
    run_program(
        "import outer, subprocess, sys\n"
        "files = outer.outer._cache.files._cache_file\n"
        "save = files._save_data\n"
        f"other = [sys.executable, '-c', {other!r}]\n"
        "files._save_data = lambda *given: (subprocess.run(other, check=True), save(*given))\n"
        "outer.outer(3.5)\n"
    )

    assert run_program(CALL.format("3")) == "30\n"
    assert run_program(CALL.format("3.5")) == "35.0\n"


def test_of_two_processes_one_compiles_and_the_other_waits(programs: ForkedPrograms, tmp_path: Path) -> None:
    """As when a server starts several models. Here both find nothing, and then one after the other may begin."""
    (tmp_path / "inner.py").write_text(HEAD + "@kernel\ndef inner(a):\n    return a\n")
    (tmp_path / "outer.py").write_text(OUTER)
    environment = {"PYTHONPATH": f"{tmp_path}:{ROOT}", "NUMBA_CACHE_DIR": str(tmp_path / "compiled")}
    compiling = "import outer; outer.outer(1); print(sum(outer.outer.stats.cache_misses.values()))"
    done = programs.run(
        "import fcntl, outer, sys\n"
        "from subprocess import PIPE, Popen\n"
        "files = outer.outer._cache.files\n"
        "turn = open(f'{files.cache_path}/{files._impl.filename_base}.lock', 'w')\n"
        "fcntl.flock(turn, fcntl.LOCK_EX)\n"
        f"command = [sys.executable, '-c', {compiling!r}]\n"
        "both = [Popen(command, stdout=PIPE, stderr=PIPE, text=True) for _ in range(2)]\n"
        "assert all('Compiling kernels' in one.stderr.readline() for one in both)\n"
        "turn.close()\n"
        "print(*sorted(int(one.communicate()[0]) for one in both))\n",
        environment,
    )
    assert done.stdout == "0 1\n", done.stderr


def test_nobody_waits_for_a_function_that_could_not_be_compiled(programs: ForkedPrograms, tmp_path: Path) -> None:
    """Of types that it cannot take: the process lives on, and others may compile the function for their own."""
    (tmp_path / "inner.py").write_text(HEAD + "@kernel\ndef inner(a):\n    return a\n")
    (tmp_path / "outer.py").write_text(OUTER)
    environment = {"PYTHONPATH": f"{tmp_path}:{ROOT}", "NUMBA_CACHE_DIR": str(tmp_path / "compiled")}
    done = programs.run(
        "import contextlib, fcntl, numba, outer\n"
        "with contextlib.suppress(numba.TypingError):\n"
        "    outer.outer('text')\n"
        "files = outer.outer._cache.files\n"
        "turn = open(f'{files.cache_path}/{files._impl.filename_base}.lock', 'w')\n"
        "fcntl.flock(turn, fcntl.LOCK_EX | fcntl.LOCK_NB)\n"
        "turn.close()\n"
        "print(outer.outer(1))\n",
        environment,
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("setting", ["NUMBA_BOUNDSCHECK", "NUMBA_DEBUGINFO", "NUMBA_DISABLE_JIT"])
def test_an_application_debugs_its_own_functions_only(setting: str, programs: ForkedPrograms, tmp_path: Path) -> None:
    """Kernels raised an IndexError, or could not be compiled."""
    (tmp_path / "outer.py").write_text(
        f"{HEAD}@kernel\ndef outer(numbers):\n    return numbers[3] * max(numbers[0], 1)\n"
    )
    environment = {"PYTHONPATH": f"{tmp_path}:{ROOT}", "NUMBA_CACHE_DIR": str(tmp_path / "compiled")}
    program = (
        "import numba, numpy, outer; asked = {**vars(numba.config)}\n"
        "print(outer.outer(numpy.arange(2, 9)[:2]), sum(outer.outer.stats.cache_hits.values()))\n"
        "assert asked == vars(numba.config)\n"
    )
    for settings, found in (({setting: "1"}, "0"), ({}, "1")):
        done = programs.run(program, {**environment, **settings})
        assert (done.returncode, done.stdout) == (0, f"10 {found}\n"), done.stderr


def test_a_full_disk_keeps_nothing_and_fails_nothing(programs: ForkedPrograms, tmp_path: Path) -> None:
    """Machine code that cannot be saved is used anyway."""
    full = "import resource\nresource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))\n"
    (tmp_path / "outer.py").write_text(full + OUTER)
    assert run_outer(programs, tmp_path, "a + 1") == [20, 0]
    assert run_outer(programs, tmp_path, "a + 1") == [20, 0]


@pytest.mark.parametrize("opened", ["folder", "inner folder", "file", "chosen folder of a link"])
def test_kernels_that_others_may_have_written_are_not_used(
    opened: str, programs: ForkedPrograms, modules: Path, compiled: Path, tmp_path: Path
) -> None:
    """Numba's files are pickles: a file that others may have written is not loaded, and the log names the folder."""
    index = next(compiled.rglob("*.nbi"))
    places = {"folder": compiled, "inner folder": index.parent, "file": index, "chosen folder of a link": compiled}
    places[opened].chmod(0o777)
    index.write_bytes(pickle.dumps(PlantedPickle(str(tmp_path / "ran"))))
    chosen = compiled
    if opened == "chosen folder of a link":
        chosen = tmp_path / "link"
        chosen.symlink_to(compiled)

    answer, warning = run(programs, modules, chosen)

    assert answer == [20, 0]
    assert not (tmp_path / "ran").exists()
    assert f"all users may write to {places[opened]}" in warning
    assert warning.count("NUMBA_CACHE_DIR") == 1


class PlantedPickle:
    """Makes a file when it is unpickled."""

    def __init__(self, path: str) -> None:
        self.path = path

    def __reduce__(self) -> tuple[object, ...]:
        return open, (self.path, "w")


def test_who_may_write_to_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The owner, root, and a group without other members may. Other owners and groups, and all users, are reported."""
    (tmp_path / "file").touch(0o644)
    assert open_to_others(tmp_path / "file") is None
    assert open_to_others(tmp_path / "absent") is None
    monkeypatch.setattr(grp, "getgrgid", lambda group: grp.struct_group(("shared", "x", group, ["root", "mallory"])))
    is_private_group.cache_clear()
    (tmp_path / "file").chmod(0o664)
    assert "users of group" in str(open_to_others(tmp_path / "file"))
    monkeypatch.undo()
    is_private_group.cache_clear()
    monkeypatch.setattr(pwd, "getpwall", list)
    assert open_to_others(tmp_path / "file") is None
    is_private_group.cache_clear()
    (tmp_path / "file").chmod(0o602)
    assert "all users" in str(open_to_others(tmp_path / "file"))
    owner = (tmp_path / "file").stat().st_uid
    os.chown(tmp_path / "file", owner or 4321, -1)  # root may change the owner; other users pretend to be somebody else
    monkeypatch.setattr(os, "geteuid", lambda: 1234)
    assert "another user" in str(open_to_others(tmp_path / "file"))


NOT_COMPILED = """
import importlib, pkgutil
import inference_session
from numba.core.dispatcher import Dispatcher
from inference_session.execution.all_kernels import compile_all

def names(code):
    return {*code.co_names}.union(*(names(inner) for inner in code.co_consts if hasattr(inner, "co_names")))

if __name__ == "__main__":
    compile_all()
    packages = pkgutil.walk_packages(inference_session.kernels.cpu.__path__, "inference_session.kernels.cpu.")
    modules = [importlib.import_module(package.name) for package in packages]
    kernels = {k for module in modules for k in vars(module).values() if isinstance(k, Dispatcher)}
    called = {k.py_func.__globals__.get(name) for k in kernels for name in names(k.py_func.__code__)}
    print(*sorted(k.__name__ for k in kernels - called if not k.signatures))
"""
"""Prints the kernels that no other one calls, and that nothing has compiled or loaded."""
SIZING = ["assign_groups", "count_stack_distances", "replay_keys", "select_keys"]
"""What `hotrow size` compiles when it is asked for a trace's hit rates."""


def test_an_image_compiles_all_that_serving_wants(tmp_path: Path) -> None:
    """By the command in the Dockerfile, which has to end well, and leave no kernel of serving to be compiled."""
    assert "-m inference_session.execution.all_kernels\n" in (ROOT / "Dockerfile").read_text()
    (tmp_path / "program.py").write_text(NOT_COMPILED)
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, tmp_path / "program.py"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == SIZING

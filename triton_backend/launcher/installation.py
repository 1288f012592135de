"""Finds a tritonserver and what it needs to run models written in Python by *this* interpreter.

The Python backend starts a `stub` program per model instance, linked against the shared library of one Python
version. It imports from the site-packages of the `python3` that comes first on PATH, and ignores PYTHONPATH.
"""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import sys
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from inference_session.errors import HotrowError

INSTALLED = Path("/opt/tritonserver")
STUB = "triton_python_backend_stub"
_PYTHON = f"{sys.version_info.major}.{sys.version_info.minor}"
_OUR_BACKENDS = Path(__file__).parents[1] / "backends"
# What the Python backend must be able to import, for models of `backend: "python"` too.
_OUR_PACKAGES = ("inference_session", "triton_backend")


class ServerNotFoundError(HotrowError, RuntimeError):
    """No tritonserver is installed, or it lacks what Python models need; the message says what to install."""


@dataclass(frozen=True)
class Installation:
    """A tritonserver that can run this interpreter's models."""

    executable: Path
    backends: Path
    """Its folder of backends, one of them `python`."""
    stub: Path
    """The stub program for this Python version."""
    library_directories: tuple[Path, ...]
    """For LD_LIBRARY_PATH."""

    @property
    def caches(self) -> Path:
        """Its folder of response caches."""
        return self.executable.parent.parent / "caches"

    def prepare(self, folder: Path) -> Path:
        """Lay out a backend directory below `folder`: the server's backends and ours; returns it."""
        directory = folder / "backends"
        directory.mkdir()
        ours = our_backends()
        for backend in self.backends.iterdir():
            if backend.is_dir() and backend.name not in ("python", *(path.name for path in ours)):
                (directory / backend.name).symlink_to(backend)
        # Copies, because Triton refuses files of a Python-based backend that are links to outside its folder.
        python = directory / "python"
        _copy_folder(self.backends / "python", python)
        shutil.copy2(self.stub, python / STUB)
        for backend in ours:
            _copy_folder(backend, directory / backend.name)
        for package in _OUR_PACKAGES:
            (python / package).symlink_to(_OUR_BACKENDS.parent.parent / package)
        return directory

    def environment(self, folder: Path) -> dict[str, str]:
        """The server's environment variables; `folder` may receive a link to this interpreter."""
        environment = dict(os.environ)
        libraries = [str(path) for path in self.library_directories]
        environment["LD_LIBRARY_PATH"] = _joined(*libraries, environment.get("LD_LIBRARY_PATH", ""))
        environment["PATH"] = _joined(str(_python3_folder(folder)), environment.get("PATH", os.defpath))
        # Bytecode written into a version directory would make Triton reload it.
        environment["PYTHONDONTWRITEBYTECODE"] = "1"
        environment["PYTHONUNBUFFERED"] = "1"
        # The server's working directory is not ours.
        for name in ("HOTROW_PS_CONFIG", "HOTROW_CACHE_DIR"):
            if environment.get(name):
                environment[name] = str(Path(environment[name]).absolute())
        # Each pool would otherwise start a thread per core and fight the server's own; sessions set their own numbers.
        for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
            environment.setdefault(name, "1")
        return environment


def our_backends() -> list[Path]:
    """Folders of the backends that hotrow brings, each with a model.py."""
    return sorted(path.parent for path in _OUR_BACKENDS.glob("*/model.py"))


def find_installation() -> Installation:
    """The tritonserver of this machine: on PATH, in /opt/tritonserver, else in the nvidia-pytriton wheel.

    Raises:
        ServerNotFoundError: none exists, or none for this Python version; the message says what to install.
    """
    found = shutil.which("tritonserver")
    executable = Path(found).resolve() if found else INSTALLED / "bin/tritonserver"
    if executable.exists():
        return _installed(executable)
    return _from_wheel()


def _installed(executable: Path) -> Installation:
    backends = executable.parent.parent / "backends"
    stub = backends / "python" / STUB
    if not stub.exists():
        raise ServerNotFoundError(f"{executable} has no Python backend: {stub} does not exist")
    if _PYTHON not in (versions := _stub_versions(stub)):
        raise ServerNotFoundError(
            f"{stub} is built for Python {', '.join(versions) or 'of an unknown version'}, but hotrow runs on "
            f"Python {_PYTHON}; install hotrow for that Python, or build the stub for this one"
        )
    return Installation(executable, backends, stub, (libpython_directory(), executable.parent.parent / "lib"))


def _from_wheel() -> Installation:
    # find_spec of a top-level package does not import it: pytriton's own imports are not needed here.
    spec = importlib.util.find_spec("pytriton")
    if spec is None or not spec.submodule_search_locations:
        raise ServerNotFoundError(
            "no tritonserver on PATH, in /opt/tritonserver or in the nvidia-pytriton package; install one: "
            "pip install 'hotrow[server]', or with NumPy 2 or Python 3.13: "
            "pip install --no-deps 'nvidia-pytriton>=0.7,<0.8'"
        )
    package = Path(next(iter(spec.submodule_search_locations)))
    root = package / "tritonserver"
    stub = root / "python_backend_stubs" / _PYTHON / STUB
    if not stub.exists():
        known = ", ".join(sorted(path.name for path in (root / "python_backend_stubs").glob("*"))) or "none"
        raise ServerNotFoundError(
            f"nvidia-pytriton has no stub for Python {_PYTHON} (available: {known}); use one of these Pythons"
        )
    libraries = (libpython_directory(), package.parent / "nvidia_pytriton.libs")
    return Installation(root / "bin/tritonserver", root / "backends", stub, libraries)


def _stub_versions(stub: Path) -> list[str]:
    """The Python versions whose shared library a stub is linked against: one, unless it is not a stub at all."""
    found = re.findall(rb"libpython(3\.\d+)\.so", stub.read_bytes())
    return sorted({match.decode() for match in found})


def libpython_directory() -> Path:
    """The folder of this Python's shared library, which the stub needs; ServerNotFoundError if it does not exist."""
    name = f"libpython{_PYTHON}.so.1.0"
    for directory in _library_candidates(name):
        if (directory / name).exists():
            return directory
    raise ServerNotFoundError(
        f"{name} is missing: the Python at {sys.executable} was built without its shared library, which Triton needs. "
        f"Debian, Ubuntu: apt-get install libpython{_PYTHON}; pyenv: build with "
        f"PYTHON_CONFIGURE_OPTS=--enable-shared; or use a Python that has it (conda, uv, python.org images)"
    )


def _library_candidates(name: str) -> Iterator[Path]:
    for line in Path("/proc/self/maps").read_text(encoding="utf-8").splitlines():
        if line.endswith(f"/{name}"):
            yield Path(line.partition("/")[1] + line.partition("/")[2]).parent
    for variable in ("LIBDIR", "LIBPL"):
        if directory := sysconfig.get_config_var(variable):
            yield Path(directory)
            yield Path(directory) / (sysconfig.get_config_var("MULTIARCH") or "")
    yield Path(sys.base_prefix) / "lib"
    yield from (Path("/usr/lib"), Path("/usr/lib64"), Path("/usr/local/lib"))
    yield from Path("/usr/lib").glob("*-linux-gnu")


def _python3_folder(folder: Path) -> Path:
    """A folder whose `python3` is this interpreter: the interpreter's own, else one made below `folder`."""
    own = Path(sys.executable).parent
    python3 = own / "python3"
    if python3.exists() and python3.resolve() == Path(sys.executable).resolve():
        return own
    link = folder / "bin" / "python3"
    link.parent.mkdir(exist_ok=True)
    link.symlink_to(sys.executable)
    return link.parent


def _joined(*paths: str) -> str:
    return os.pathsep.join(path for path in paths if path)


def _copy_folder(source: Path, target: Path) -> None:
    """Copy all but stubs and compiled Python; unlike `shutil.copytree`, it ends at the first error, and raises that."""
    target.mkdir()
    for path in source.iterdir():
        if path.is_dir() and path.name != "__pycache__":
            _copy_folder(path, target / path.name)
        elif path.is_file() and path.name != STUB:
            shutil.copy2(path, target / path.name)

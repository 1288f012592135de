"""The checks of `hotrow doctor`: each is a function that yields findings, and changes nothing on the machine."""

from __future__ import annotations

import os
import resource
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

import numpy as np

from hotrow.dense_network import ENGINE_SETTING, SETTING, DenseSettings
from hotrow.findings import Finding, Level
from hotrow.formatting import counted, in_units
from hotrow.service_checks import check_services
from inference_session.errors import ConfigurationError, HotrowError
from inference_session.model_source import is_url
from inference_session.model_spec import (
    DENSE_FILE,
    INDEX_FILE,
    KEY_FILE,
    SESSION_FILE,
    TABLES_FOLDER,
    VECTOR_FILE,
)
from inference_session.platform.mapped_large_pages import large_page_fraction, large_page_setting
from inference_session.platform.memory import available_bytes
from inference_session.sizing.memory import PROCESS_BYTES, MemoryItem, bytes_in, memory_items
from inference_session.version_directory.session_file import read_spec
from triton_backend.launcher.installation import (
    Installation,
    ServerNotFoundError,
    find_installation,
    libpython_directory,
)
from triton_backend.launcher.ports import reserved_ports
from triton_backend.launcher.reaper import SHARED_MEMORY
from triton_backend.repository.in_place import InPlaceModel, in_place_backend, read_model_folder
from triton_backend.repository.model_config import CONFIG_FILE, ModelConfig, configured_cache_bytes
from triton_backend.repository.servable import ServableModel, find_models

LEAST_SHARED_BYTES = 64 << 20
"""A container's default, enough for a few models and small requests."""
LEAST_OPEN_FILES = 1024
_NEWEST_PYTHON, _OLDEST_PYTHON = (3, 13), (3, 10)
_START_TIMEOUT_S = 30
_ENOUGH_LARGE_PAGES = 0.5
PACKAGES = {
    "rocksdict": ("rocksdb", "store rocksdb://", ("rocksdb://",)),
    "confluent_kafka": ("kafka", "update streams kafka://", ("kafka://",)),
    "hdfs": ("hdfs", "sources hdfs://", ("hdfs://",)),
    "tritonclient": ("client", "`hotrow top --url` and the examples", ()),
    "openvino": ("openvino", "dense_precision bfloat16", ("bfloat16",)),
    "matplotlib": ("report", "`hotrow size --plot`", ()),
}
"""By module: hotrow's extra that installs it, its purpose, and prefixes of settings' values that need it."""


@dataclass(frozen=True)
class Plan:
    """The models to serve, and where."""

    repository: Path | None = None
    host: str = "127.0.0.1"
    ports: tuple[int, int, int] = (8000, 8001, 8002)
    """HTTP, gRPC, metrics."""


class _Needs(NamedTuple):
    """The requirements of a model."""

    items: list[MemoryItem]
    urls: set[str]
    """The values of its settings, including secrets: never show them."""
    tables: list[Path] = []  # noqa: RUF012  a default that is never changed
    """Vector files that are memory-mapped."""
    dense: DenseSettings | None = None
    """None: it has no dense network."""


def examine(plan: Plan) -> Iterator[Finding]:
    """All findings, in the order in which to fix them; a check without permission is a finding, too."""
    checks = {
        "Python": _python(),
        "tritonserver": _server(),
        "NumPy": _numpy(),
        "GPU": _gpu(),
        str(SHARED_MEMORY): _shared_memory(),
        "ports": _ports(plan),
        "open files": _limits(),
        "compiled kernels": _kernel_cache(),
        "repository": _repository(plan.repository) if plan.repository else _packages(set()),
    }
    for name, findings in checks.items():
        yield from _with_failures(name, findings)


def _with_failures(check: str, findings: Iterator[Finding]) -> Iterator[Finding]:
    """The findings of a check, and a problem if it fails itself."""
    try:
        yield from findings
    except (OSError, subprocess.SubprocessError) as error:
        message = f"cannot be read by user {os.geteuid()}: {_in_words(error)}"
        yield Finding(
            check, "problem", message, ("run `hotrow doctor` as the user that serves, or give this user read access")
        )


def _in_words(error: Exception) -> str:
    return f"{error.filename}: {error.strerror}" if isinstance(error, OSError) and error.filename else str(error)


def _python() -> Iterator[Finding]:
    version = sys.version_info[:2]
    text = f"{sys.version.split()[0]} at {sys.executable}"
    if _OLDEST_PYTHON <= version <= _NEWEST_PYTHON:
        yield Finding("Python", "ok", text)
    else:
        yield Finding("Python", "warning", f"{text}; tested versions: 3.10 to 3.13", "use one of these versions")
    try:
        yield Finding("libpython", "ok", str(libpython_directory()))
    except ServerNotFoundError as error:
        message, _, fix = str(error).partition(". ")
        yield Finding("libpython", "problem", message, fix)


def _server() -> Iterator[Finding]:
    try:
        installation = find_installation()
    except ServerNotFoundError as error:
        message, _, fix = str(error).partition("; ")
        yield Finding("tritonserver", "problem", message, fix or 'pip install "hotrow[server]"')
        return
    complaint = _try_to_start(installation)
    if complaint:
        fix = f"run it to see what is missing: {installation.executable} --help"
        yield Finding("tritonserver", "problem", f"{installation.executable} does not start: {complaint}", fix)
    else:
        yield Finding("tritonserver", "ok", f"{_server_version(installation)} at {installation.executable}")


def _try_to_start(installation: Installation) -> str:
    """Have the server print its help; returns the error, empty if none."""
    with tempfile.TemporaryDirectory(prefix="hotrow-doctor-") as folder:
        try:
            result = subprocess.run(
                [str(installation.executable), "--help"],
                env=installation.environment(Path(folder)),
                capture_output=True,
                timeout=_START_TIMEOUT_S,
                check=False,
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            return str(error)
    printed = (result.stdout + result.stderr).decode(errors="replace")
    return "" if "--model-repository" in printed else printed.strip()[-300:] or f"exit status {result.returncode}"


def _server_version(installation: Installation) -> str:
    version_file = installation.executable.parent.parent / "TRITON_VERSION"
    if version_file.exists():
        return f"Triton {version_file.read_text(encoding='utf-8').strip()}"
    return f"nvidia-pytriton {metadata.version('nvidia-pytriton')}" if _is_bundled(installation) else "Triton"


def _is_bundled(installation: Installation) -> bool:
    return "pytriton" in installation.executable.parts


def _numpy() -> Iterator[Finding]:
    try:
        bundled = _is_bundled(find_installation())
    except ServerNotFoundError:
        bundled = False
    if bundled and not np.__version__.startswith("1."):
        message = f"{np.__version__}, but the bundled server is built for NumPy 1: models with strings cannot be loaded"
        yield Finding("NumPy", "warning", message, "if you have such models: pip install 'numpy<2'")
    else:
        yield Finding("NumPy", "ok", np.__version__)


def _gpu() -> Iterator[Finding]:
    driver = Path("/proc/driver/nvidia/version")
    if not any(Path("/dev").glob("nvidia[0-9]*")):
        yield Finding("GPU", "ok", "none; models are served on the CPU")
        if driver.exists():
            fix = "give the container its GPUs: docker run --gpus all, or nvidia.com/gpu in Kubernetes"
            yield Finding("GPU", "warning", "the machine has an NVIDIA driver, but this process sees no GPU", fix)
        return
    text = driver.read_text(encoding="utf-8").splitlines()[0] if driver.exists() else "NVIDIA, driver unknown"
    yield Finding("GPU", "ok", text)
    if find_spec("cupy") is None:
        yield Finding("CuPy", "warning", "not installed; the GPU is not used", 'pip install "hotrow[gpu]"')
    else:
        yield _cuda()
        yield _network_on_gpu()


def _network_on_gpu() -> Finding:
    import onnxruntime

    if "CUDAExecutionProvider" in onnxruntime.get_available_providers():
        return Finding("ONNX Runtime", "ok", f"{onnxruntime.__version__} with CUDA")
    fix = "pip uninstall -y onnxruntime onnxruntime-gpu && pip install onnxruntime-gpu"
    return Finding("ONNX Runtime", "warning", "has no CUDA provider; the GPU is not used", fix)


def _cuda() -> Finding:
    # In a separate process: CUDA, once initialized here, would hold GPU memory, and a broken CUDA may crash.
    code = "import cupy; print(cupy.cuda.runtime.getDeviceCount(), int(cupy.arange(3).sum()))"
    # Python imports from its working directory first, where other users may have put files.
    program = [sys.executable, "-c", code]
    result = subprocess.run(program, cwd="/", capture_output=True, text=True, timeout=120, check=False)
    if result.returncode == 0:
        return Finding("CUDA", "ok", f"{result.stdout.split()[0]} usable")
    reason = (result.stderr.strip().splitlines() or [f"exit status {result.returncode}"])[-1]
    fix = (
        "install the CuPy that matches the driver: cupy-cuda12x or cupy-cuda13x; add [ctk] if there is no CUDA"
        " toolkit; nvidia-smi shows the driver's CUDA"
    )
    return Finding("CUDA", "problem", f"CuPy cannot use it: {reason}", fix)


def _shared_memory() -> Iterator[Finding]:
    name = str(SHARED_MEMORY)
    if not _may(SHARED_MEMORY, os.W_OK | os.X_OK):
        yield Finding(name, "problem", "does not exist or is not writable", "mount a writable tmpfs there")
        return
    usage = shutil.disk_usage(SHARED_MEMORY)
    text = f"{in_units(usage.free)} free of {in_units(usage.total)}"
    if usage.free < LEAST_SHARED_BYTES:
        fix = "docker run --shm-size=1g; in Kubernetes an emptyDir of medium Memory mounted there"
        level: Level = "problem" if usage.free < LEAST_SHARED_BYTES // 16 else "warning"
        yield Finding(name, level, f"{text}; large requests will fail", fix)
    else:
        yield Finding(name, "ok", text)
    if leftovers := sorted(path for path in SHARED_MEMORY.glob("hotrow_*") if _is_left_over(path)):
        size = in_units(sum(path.stat().st_size for path in leftovers))
        fix = "rm " + " ".join(sorted({f"{SHARED_MEMORY}/hotrow_{path.name.split('_')[1]}_*" for path in leftovers}))
        yield Finding(name, "warning", f"{len(leftovers)} files, {size}, of servers that no longer run", fix)


def _is_left_over(path: Path) -> bool:
    """Whether the `hotrow serve` that named the file by its process is gone."""
    process = path.name.split("_")[1]
    return process.isdecimal() and not Path("/proc", process).exists()


def _ports(plan: Plan) -> Iterator[Finding]:
    for flag, port in zip(("--http-port", "--grpc-port", "--metrics-port"), plan.ports, strict=True):
        yield _port(plan.host, flag, port)


def _port(host: str, flag: str, port: int) -> Finding:
    try:
        with reserved_ports({flag: (host, port)}):
            return Finding(f"port {port}", "ok", f"free on {host}")
    except ConfigurationError as error:
        message, _, fix = str(error).partition("; ")
        return Finding(f"port {port}", "problem", message, f"{fix}, or stop the process that listens there (ss -ltnp)")


def _limits() -> Iterator[Finding]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < LEAST_OPEN_FILES:
        message = f"at most {soft}; each connection and each table needs some"
        fix = f"ulimit -n {hard if hard != resource.RLIM_INFINITY else 65536}"
        yield Finding("open files", "warning", message, fix)
    else:
        yield Finding("open files", "ok", "no limit" if soft == resource.RLIM_INFINITY else f"at most {soft}")


def _kernel_cache() -> Iterator[Finding]:
    """The folder that Numba chooses for machine code (docs/reference/settings.md, NUMBA_CACHE_DIR)."""
    from inference_session import kernels
    from inference_session.kernels.machine_code import open_to_others

    package = Path(next(iter(kernels.__path__)))
    chosen = os.environ.get("NUMBA_CACHE_DIR")
    user = Path(os.environ.get("XDG_CACHE_HOME") or Path(os.path.expanduser("~")) / ".cache")  # noqa: PTH111
    candidates = [Path(chosen)] if chosen else [package / "__pycache__", package, user]
    for folder in candidates:
        if _may_write(folder) and (reason := open_to_others(folder)):
            message = f"{reason}, so every process compiles its own, which takes about a minute"
            yield Finding(
                "compiled kernels",
                "warning",
                message,
                f"set NUMBA_CACHE_DIR to a folder of your own, or chmod go-w {folder}",
            )
            return
        if _may_write(folder):
            yield Finding("compiled kernels", "ok", f"kept in {folder}")
            return
    message = f"cannot be kept in {candidates[0]}, so every process compiles its own, which takes about a minute"
    yield Finding("compiled kernels", "warning", message, "set NUMBA_CACHE_DIR to a writable folder")


def _may_write(folder: Path) -> bool:
    """Whether files in the folder, or the folder itself, can be created."""
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent
    return _may(folder, os.W_OK | os.X_OK)


def _repository(repository: Path) -> Iterator[Finding]:
    try:
        models = find_models(repository.absolute())
        needs = [_needs(repository.absolute(), model) for model in models]
    except (HotrowError, OSError) as error:
        yield Finding(
            "repository", "problem", _in_words(error), "correct or remove what is named; `hotrow import` creates models"
        )
        yield from _packages(set())
        return
    yield Finding("repository", "ok", f"{counted(len(models), 'model')}: {', '.join(model.name for model in models)}")
    yield from check_permissions(repository)
    for model, need in zip(models, needs, strict=True):
        if need.dense is not None:
            yield _dense_network(model.name, need.dense)
    yield from _large_pages([path for need in needs for path in need.tables])
    yield _memory([item for need in needs for item in need.items])
    urls = {url for need in needs for url in need.urls}
    yield from check_services(urls)
    yield from _packages(urls)


def check_permissions(repository: Path) -> Iterator[Finding]:
    paths = [repository, *repository.rglob("*")]
    closed = [path for path in paths if not _may(path, os.R_OK | (os.X_OK if path.is_dir() else 0))]
    # HugeCTR's own folders get none: a copy is served.
    keys = [path for path in paths if path.name == KEY_FILE and path.parent.parent.name == TABLES_FOLDER]
    tables = [path.parent for path in keys if not (path.parent / INDEX_FILE).exists()]
    unwritable = [folder for folder in tables if not _may(folder, os.W_OK)]
    if closed:
        message = f"{closed[0]} cannot be read by user {os.geteuid()}{_others(closed)}"
        yield Finding("permissions", "problem", message, f"chmod -R a+rX {repository}")
    if unwritable:
        message = (
            f"{unwritable[0]} has no index and is not writable, so each process builds its own{_others(unwritable)}"
        )
        fix = "open the version once where its folder is writable; InferenceSession.open writes the index there"
        yield Finding("permissions", "warning", message, fix)
    if not closed and not unwritable:
        yield Finding("permissions", "ok", f"all of {len(paths)} files and folders can be read")


def _large_pages(tables: list[Path]) -> Iterator[Finding]:
    """How much of the tables is mapped in pages of 2 MiB (docs/explanation/performance.md: Measured)."""
    known = {path: fraction for path in tables if (fraction := large_page_fraction(path)) is not None}
    if not known:
        return
    total = sum(path.stat().st_size for path in known)
    share = sum(fraction * path.stat().st_size for path, fraction in known.items()) / total
    setting = large_page_setting()
    text = f"{share:.0%} of {in_units(total)} of tables are mapped in pages of 2 MiB"
    text += f"; transparent_hugepage: {setting}" if setting else ""
    fix = (
        "copy the versions with `hotrow copy`, which writes whole pages: look-ups in tables of 4 M rows took half to"
        " two thirds of the time; the file system has to be XFS, or ext4 on Linux 6.16 or newer"
    )
    yield Finding("large pages", "ok", text, fix if share < _ENOUGH_LARGE_PAGES else "")


def _dense_network(model: str, settings: DenseSettings) -> Finding:
    """Which library computes the network of a model."""
    from inference_session.dense_engine.openvino import unusable_bfloat16
    from inference_session.device.discovery import unusable_tensorrt

    text = f"{model}: {settings.engine_name}, {settings.precision}"
    if settings.precision == "bfloat16" and (reason := unusable_bfloat16()):
        return Finding("dense network", "problem", f"{text}: {reason}", f"set {SETTING} of {model} to float32")
    if settings.engine == "tensorrt" and (reason := unusable_tensorrt()):
        fix = f"set {ENGINE_SETTING} of {model} to onnxruntime"
        return Finding("dense network", "problem", f"{text}: {reason}", fix)
    return Finding("dense network", "ok", text)


def _may(path: Path, mode: int) -> bool:
    return os.access(path, mode, effective_ids=True)


def _others(paths: list[Path]) -> str:
    return f"; {len(paths) - 1} more have the same problem" if len(paths) > 1 else ""


def _memory(items: list[MemoryItem]) -> Finding:
    available = available_bytes()
    private, files = bytes_in(items, "process"), bytes_in(items, "page cache")
    text = f"{in_units(available)} available; processes need {in_units(private)}, tables {in_units(files)}"
    fix = "more memory, a smaller cache_bytes, or fewer models on this machine; `hotrow size` shows what needs it"
    if private > available:
        return Finding("memory", "problem", f"{text}: too little", fix)
    if private + files > available:
        return Finding("memory", "warning", f"{text}: tables will be read from disk again and again", fix)
    if 2 * (private + files) > available:
        return Finding("memory", "warning", f"{text}: too little for two versions of each, as during swaps", fix)
    return Finding("memory", "ok", text)


def _needs(repository: Path, model: ServableModel) -> _Needs:
    """The needs of its highest version; nothing if another backend serves it."""
    folder = repository / model.name
    parameters = ModelConfig.read(folder / CONFIG_FILE).parameters
    if backend := in_place_backend(model.backend):
        return _needs_in_place(read_model_folder(folder, model.name, parameters, backend))
    version_dir = folder / str(model.versions[-1])
    if not (version_dir / SESSION_FILE).exists():
        return _Needs([], set())
    spec = read_spec(version_dir)
    items = memory_items(spec, version_dir, cache_bytes=configured_cache_bytes(spec, version_dir))
    settings = {**spec.settings, **parameters}
    dense = DenseSettings.of(settings) if (version_dir / DENSE_FILE).exists() else None
    tables = [version_dir / TABLES_FOLDER / table.folder / VECTOR_FILE for table in spec.tables]
    return _Needs(items, set(map(str, settings.values())), [path for path in tables if path.exists()], dense)


def _needs_in_place(found: InPlaceModel) -> _Needs:
    """The needs of HugeCTR's files, from their sizes: what a load makes of them takes about as much."""
    settings = found.ps_json.session_settings(found.model) | dict(found.session_settings)
    sources = found.model.sparse_files
    files = [Path(source, name) for source in sources if not is_url(source) for name in (KEY_FILE, VECTOR_FILE)]
    items = [
        MemoryItem("files", "page cache", sum(file.stat().st_size for file in files), 1),
        MemoryItem("program", "process", PROCESS_BYTES, 1),
    ]
    dense = DenseSettings.of(settings) if found.model.graph_file else None
    tables = [path for path in files if path.name == VECTOR_FILE]
    return _Needs(items, {*settings.values(), *sources}, tables, dense)


def _packages(urls: set[str]) -> Iterator[Finding]:
    for module, (extra, purpose, schemes) in PACKAGES.items():
        needed = any(url.startswith(scheme) for url in urls for scheme in schemes)
        if find_spec(module) is not None:
            yield Finding(module, "ok", f"installed, for {purpose}")
        elif needed:
            message = f"not installed, but models in the repository need it for {purpose}"
            yield Finding(module, "problem", message, f'pip install "hotrow[{extra}]"')
        else:
            yield Finding(module, "ok", f'not installed; for {purpose}: pip install "hotrow[{extra}]"')

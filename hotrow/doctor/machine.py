"""The checks of `hotrow doctor` of this machine: each is a function that yields findings, and changes nothing."""

from __future__ import annotations

import os
import resource
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path

import numpy as np

from hotrow.doctor.findings import Finding, Level
from hotrow.output.formatting import in_units
from inference_session.errors import ConfigurationError
from triton_backend.launcher.installation import (
    Installation,
    ServerNotFoundError,
    find_installation,
    libpython_directory,
)
from triton_backend.launcher.ports import reserved_ports, served_ports
from triton_backend.launcher.reaper import SHARED_MEMORY

LEAST_SHARED_BYTES = 64 << 20
"""A container's default, enough for a few models and small requests."""
LEAST_OPEN_FILES = 1024
_NEWEST_PYTHON, _OLDEST_PYTHON = (3, 13), (3, 10)
_START_TIMEOUT_S = 30
_VISIBLE_GPUS = "CUDA_VISIBLE_DEVICES"
_NONE_VISIBLE = ("", "-1", "none", "void", "NoDevFiles")
"""What people write to hide all GPUs."""


def check_python() -> Iterator[Finding]:
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


def check_server() -> Iterator[Finding]:
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


def check_numpy() -> Iterator[Finding]:
    try:
        bundled = _is_bundled(find_installation())
    except ServerNotFoundError:
        bundled = False
    if bundled and not np.__version__.startswith("1."):
        message = f"{np.__version__}, but the bundled server is built for NumPy 1: models with strings cannot be loaded"
        fix = "if you have such models: pip install 'numpy<2', with Python 3.12 or earlier"
        yield Finding("NumPy", "warning", message, fix)
    else:
        yield Finding("NumPy", "ok", np.__version__)


def check_gpu() -> Iterator[Finding]:
    driver = Path("/proc/driver/nvidia/version")
    if not any(Path("/dev").glob("nvidia[0-9]*")):
        yield Finding("GPU", "ok", "none; models are served on the CPU")
        if driver.exists():
            fix = "give the container its GPUs: docker run --gpus all, or nvidia.com/gpu in Kubernetes"
            yield Finding("GPU", "warning", "the machine has an NVIDIA driver, but this process sees no GPU", fix)
        return
    if (visible := os.environ.get(_VISIBLE_GPUS)) is not None and visible.strip() in _NONE_VISIBLE:
        yield Finding("GPU", "ok", f"none, as {_VISIBLE_GPUS} is {visible!r}; models are served on the CPU")
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


def check_shared_memory() -> Iterator[Finding]:
    name = str(SHARED_MEMORY)
    if not may(SHARED_MEMORY, os.W_OK | os.X_OK):
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


def check_ports(host: str, ports: Iterable[int]) -> Iterator[Finding]:
    served = served_ports()
    for flag, port in zip(("--http-port", "--grpc-port", "--metrics-port"), ports, strict=True):
        yield _port(host, flag, port, is_served=port in served)


def _port(host: str, flag: str, port: int, *, is_served: bool) -> Finding:
    try:
        with reserved_ports({flag: (host, port)}):
            return Finding(f"port {port}", "ok", f"free on {host}")
    except ConfigurationError as error:
        message, _, fix = str(error).partition("; ")
        if is_served:
            return Finding(f"port {port}", "ok", f"a running `hotrow serve` has it; for another server, {fix}")
        return Finding(f"port {port}", "problem", message, f"{fix}, or stop the process that listens there (ss -ltnp)")


def check_limits() -> Iterator[Finding]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < LEAST_OPEN_FILES:
        message = f"at most {soft}; each connection and each table needs some"
        fix = f"ulimit -n {hard if hard != resource.RLIM_INFINITY else 65536}"
        yield Finding("open files", "warning", message, fix)
    else:
        yield Finding("open files", "ok", "no limit" if soft == resource.RLIM_INFINITY else f"at most {soft}")


def check_kernel_cache() -> Iterator[Finding]:
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
    return may(folder, os.W_OK | os.X_OK)


def may(path: Path, mode: int) -> bool:
    return os.access(path, mode, effective_ids=True)

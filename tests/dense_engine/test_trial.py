"""Networks that end the process that opens them do so in another one."""

from __future__ import annotations

import signal
import sys
from pathlib import Path

import onnx
import pytest

from inference_session.dense_engine import trial
from inference_session.errors import ModelFormatError, UnsupportedModelError
from tests.testing.onnx_models import import_model, two_lookups

OPEN_APART = trial._open_apart
"""Where most tests fork a process, as `tests/conftest.py` says, these start one."""


@pytest.fixture(autouse=True)
def in_a_new_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trial, "_open_apart", OPEN_APART)


@pytest.fixture
def network(tmp_path: Path) -> Path:
    """An ONNX file."""
    path = tmp_path / "dense.onnx"
    onnx.save(two_lookups(), path)
    return path


def _dies(number: int, begun: str = ".") -> str:
    """A process that begins to open networks, as many as there are points, and is ended at the last one."""
    return f"import os; os.write(1, b'{begun}'); os.kill(os.getpid(), {number:d})"


def test_another_process_opens_networks(network: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It finds hotrow and ONNX Runtime; this process does not open them again."""
    (network.parent / "onnxruntime.py").write_text("raise SystemExit(1)")
    monkeypatch.chdir(network.parent)
    monkeypatch.delattr(trial, "OnnxEngine")
    trial.try_to_open([Path(network.name)], "model.onnx")


def test_the_network_and_the_signal_are_named(network: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And the way out."""
    monkeypatch.setattr(trial, "_PROGRAM", _dies(signal.SIGSEGV, ".."))
    with pytest.raises(
        UnsupportedModelError, match=r"^half\.onnx: a process that opened keys\.onnx, .*SIGSEGV.*float32"
    ):
        trial.try_to_open([network, network.with_name("keys.onnx")], "half.onnx")


def test_a_signal_without_a_name_is_numbered(network: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As real-time signals are."""
    monkeypatch.setattr(trial, "_PROGRAM", _dies(40))
    with pytest.raises(UnsupportedModelError, match="ended by signal 40 in ONNX"):
        trial.try_to_open([network], "model.onnx")


def test_a_lack_of_memory_is_no_crash(network: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel kills the other process."""
    monkeypatch.setattr(trial, "_PROGRAM", _dies(signal.SIGKILL))
    with pytest.raises(UnsupportedModelError, match=r"SIGKILL.*memory is short"):
        trial.try_to_open([network], "model.onnx")


def test_without_a_program_of_its_own_python_starts_none(network: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a program that Python is a part of."""
    monkeypatch.setattr(trial, "_PROGRAM", _dies(signal.SIGSEGV))
    monkeypatch.setattr(sys, "executable", "")
    trial.try_to_open([network], "model.onnx")


def test_errors_of_the_other_process_are_raised_here(network: Path) -> None:
    """Where it ends with an error of Python's. They name the file that a person knows, not that of a draft."""
    network.write_bytes(b"damaged")
    with pytest.raises(ModelFormatError, match=rf"^model.onnx: {network.name}: ONNX Runtime cannot load it") as caught:
        trial.try_to_open([network], "model.onnx")
    assert str(network) not in str(caught.value)


def test_an_import_refuses_what_would_end_a_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is left of it."""
    monkeypatch.setattr(trial, "_PROGRAM", _dies(signal.SIGSEGV))
    with pytest.raises(UnsupportedModelError, match=r"^model\.onnx: a process that opened dense\.onnx"):
        import_model(tmp_path, two_lookups())
    assert not (tmp_path / "repository").exists()

"""Standard output: any encoding, any width, pipes, and streams that the parent process has closed."""

from __future__ import annotations

import contextlib
import io
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import onnx
import pytest

from hotrow.output.progress import waiting
from hotrow.output.streams import print_json
from tests.testing.command_line import hotrow, run_main
from tests.testing.onnx_models import model_of, table
from tests.testing.programs import PROGRAM_S
from tests.testing.servers import PATIENCE_S, wait_until

_NAME = "модель." + "embedding_bag_collection." * 4 + "weight😀é"


def test_work_that_takes_long_gives_a_hint(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a terminal too, and not where the work ends before."""
    errors = io.StringIO()
    monkeypatch.setattr(sys, "stderr", errors)
    with waiting("Loading ctr", "see the log", hint_after_s=PATIENCE_S):
        pass
    assert not errors.getvalue()

    with waiting("Loading ctr", "see the log", hint_after_s=0):
        wait_until(lambda: errors.getvalue() == "hotrow: Loading ctr: see the log\n", "the hint")


@pytest.fixture
def version_dir(tmp_path: Path) -> Path:
    """An imported model with a table of a long name that few encodings have."""
    graph = "g (int64[n, 3] x) => (float[n, 12] y) { e = Gather(W, x) y = Flatten(e) }"
    model = model_of(graph, {"W": table()})
    model.graph.initializer[0].name = model.graph.node[0].input[0] = _NAME
    onnx.save(model, tmp_path / "model.onnx")
    hotrow("import", "onnx", tmp_path / "model.onnx", "--name", "ctr", "--repository", tmp_path / "repository")
    return tmp_path / "repository" / "ctr" / "1"


def _run(*arguments: object, redirection: str = "", **environment: str) -> subprocess.CompletedProcess[bytes]:
    command = ["sh", "-c", f'exec "$@" {redirection}', "sh", sys.executable, "-m", "hotrow", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, env={**os.environ, **environment}, check=False)


@pytest.mark.parametrize("encoding", ["ascii", "latin-1", "utf-8"])
def test_any_encoding_of_the_output_will_do(version_dir: Path, encoding: str) -> None:
    """Text has escapes for characters that it lacks, and JSON is right."""
    for arguments in (("inspect", version_dir), ("size", version_dir)):
        ended = run_main(*arguments, encoding=encoding)
        assert (ended.code, ended.err) == (0, "")
    described = json.loads(run_main("inspect", version_dir, "--json", encoding=encoding).out)
    assert described["tables"][0]["name"] == _NAME


def test_output_into_text_in_memory_has_no_encoding() -> None:
    """Programs that call hotrow may collect its output so; letters stay as they are."""
    with contextlib.redirect_stdout(io.StringIO()) as out:
        print_json({"ä": 1})
    assert out.getvalue() == '{\n "ä": 1\n}\n'


def test_programs_read_unbroken_lines(version_dir: Path) -> None:
    """A long name and its numbers are in one line of a pipe."""
    lines = _run("inspect", version_dir, PYTHONIOENCODING="utf-8", COLUMNS="40").stdout.decode().splitlines()
    (line,) = [line for line in lines if _NAME in line]
    assert "16000" in line


@pytest.mark.parametrize("redirection", [">&-", "2>&-", "<&- >&- 2>&-"])
@pytest.mark.parametrize("command", ["inspect", "size"])
def test_streams_may_be_closed(version_dir: Path, redirection: str, command: str) -> None:
    """What they would show is dropped."""
    done = _run(command, version_dir, redirection=redirection)
    assert (done.returncode, done.stderr) == (0, b"")


@pytest.mark.parametrize("command", ["inspect", "inspect --json", "size"])
def test_output_to_a_full_disk_is_an_error_of_one_line(version_dir: Path, command: str) -> None:
    """Python itself does not try to write the rest once more."""
    done = _run(*command.split(), version_dir, redirection="> /dev/full", PYTHONUNBUFFERED="")
    assert (done.returncode, done.stderr) == (1, b"hotrow: standard output: No space left on device\n")


def test_no_file_takes_the_number_of_a_closed_stream() -> None:
    """Libraries print to these numbers whatever file they are."""
    program = (
        "import os; from hotrow.output.streams import prepare_standard_streams; prepare_standard_streams();"
        "os._exit(os.open('/dev/null', os.O_RDONLY))"
    )
    command = ["sh", "-c", 'exec "$@" <&- >&- 2>&-', "sh", sys.executable, "-c", program]
    assert subprocess.run(command, check=False).returncode == 3


_INTERRUPTED_IMPORT = """
import os, signal, sys
from hotrow.interrupts import raise_after_imports

class Slow:
    def find_spec(self, name, path, target=None):
        if name == "slow":
            os.kill(os.getpid(), signal.SIGINT)
            print("the import ends", flush=True)

sys.meta_path.insert(0, Slow())
raise_after_imports()
try:
    try:
        import slow
    except ImportError:
        print("the import ended", flush=True)
        signal.pause()
except KeyboardInterrupt:
    print("interrupted", flush=True)
"""


def test_an_interrupt_waits_for_the_end_of_an_import() -> None:
    """A package whose import is broken off raises errors of its own."""
    done = subprocess.run(
        [sys.executable, "-c", _INTERRUPTED_IMPORT], capture_output=True, text=True, timeout=PROGRAM_S, check=True
    )
    assert done.stdout.splitlines() == ["the import ends", "the import ended", "interrupted"]


def test_an_interrupt_before_the_start_leaves_no_traceback() -> None:
    """While the command line is loaded, Ctrl-C ends the process as any signal does."""
    program = "import os, signal, hotrow.interrupts as i; i.end_at_once(); os.kill(os.getpid(), signal.SIGINT)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, check=False)
    assert (done.returncode, done.stderr) == (-signal.SIGINT, b"")


def test_an_ignored_interrupt_stays_ignored() -> None:
    """A shell makes commands in the background ignore Ctrl-C."""
    program = (
        "import signal, hotrow.interrupts as i; i.end_at_once(); i.raise_after_imports();"
        "assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN"
    )
    subprocess.run(["sh", "-c", 'trap "" INT; exec "$@"', "sh", sys.executable, "-c", program], check=True)

"""The command line: what it prints, where, and with which exit code."""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import click
import numpy as np
import onnx
import pytest
from click.shell_completion import CompletionItem, ShellComplete

from hotrow import command_line
from hotrow.command_line import main
from inference_session.errors import UnavailableError
from inference_session.tables.table_index import ensure_index
from inference_session.version_directory.manifest import describe_version
from inference_session.version_directory.session_file import read_spec
from tests.testing import small_model
from tests.testing.model_settings import add_settings
from tests.testing.onnx_models import model_of, table
from triton_backend.client.server import RemoteServer

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Iterator[Run]:
    """Runs `hotrow` with these arguments; exit code, stdout, stderr. Ctrl-C ends the tests afterwards as before."""

    def run(*arguments: object) -> tuple[int, str, str]:
        monkeypatch.setattr("sys.argv", ["hotrow", *map(str, arguments)])
        with pytest.raises(SystemExit) as caught:
            main()
        printed = capsys.readouterr()
        return int(caught.value.code or 0), printed.out, printed.err

    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    yield run
    for number, handler in handlers.items():
        signal.signal(number, handler)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """An ONNX file with one table, `W`."""
    graph = "agraph (int64[N, 3] x) => (float[N, 4] y) { g = Gather(W, x) y = ReduceSum <keepdims = 0> (g, axes) }"
    path = tmp_path / "model.onnx"
    onnx.save(model_of(graph, {"W": table(), "axes": np.array([1])}), path)
    return path


@pytest.fixture
def version_dir(run: Run, model: Path, tmp_path: Path) -> Path:
    """That model, imported."""
    code, _, _ = run("import", "onnx", model, "--name", "ctr", "--repository", tmp_path / "repository")
    assert code == 0
    return tmp_path / "repository" / "ctr" / "1"


def test_an_import_renames(run: Run, model: Path, tmp_path: Path) -> None:
    """Inputs and outputs, where the option says so; each of them once."""
    to = ["import", "onnx", model, "--name", "ctr", "--repository", tmp_path / "repository"]

    for wrong, message in (
        (["--rename", "y"], "'y' is not OLD=NEW"),
        (["--rename", "y=a", "--rename", "y=b"], "an input or output can be renamed once"),
        (["--rename", "z=a"], "has no input or output 'z' to rename; it has 'x', 'y'"),
    ):
        code, _, errors = run(*to, *wrong)
        assert code != 0
        assert message in errors
    code, printed, _ = run(*to, "--rename", "x=items", "--rename", "y=click")
    assert code == 0
    assert "read by 'items'" in printed
    assert "Predictions: click_0" in printed
    config = (tmp_path / "repository/ctr/config.pbtxt").read_text(encoding="utf-8")
    assert '"items"' in config
    assert '"click"' in config


@pytest.mark.parametrize("content", [b"", b"two words\n", "schl\u00fcssel".encode(), b"\x80\xff"])
def test_a_key_file_without_a_key_is_named(run: Run, tmp_path: Path, content: bytes) -> None:
    """A binary file ended the command with a traceback, and an empty one was sent as a key."""
    (tmp_path / "key").write_bytes(content)

    code, _, errors = run("versions", "ctr", "--url", "localhost:1", "--key-file", tmp_path / "key")

    assert code == 1
    assert errors.startswith(f"hotrow: {tmp_path / 'key'}: a key is one word")


def test_a_device_in_place_of_a_key_file_is_named(run: Run) -> None:
    """It was read without end."""
    code, _, errors = run("versions", "ctr", "--url", "localhost:1", "--key-file", "/dev/zero")

    assert code == 1
    assert errors.startswith("hotrow: /dev/zero: a key is one word")


@pytest.mark.parametrize("url", [os.fsdecode(b"\xff:1"), "localhost:abc", ":8001"])
def test_an_address_that_is_none_is_named(run: Run, url: str) -> None:
    """One that is no text ended the command with a traceback."""
    code, _, errors = run("health", "--model", "ctr", "--url", url)

    assert code == 1
    assert errors == f"hotrow: {url!r} is not the address of a server; expected HOST:GRPC_PORT\n"


@pytest.mark.parametrize(
    ("command", "option"),
    [
        ("health", "--timeout"),
        ("quantize", "--max-error"),
        ("size", "--target"),
        ("smoke-test", "--tolerance"),
        ("top", "--interval"),
    ],
)
def test_a_number_that_is_none_is_refused(run: Run, command: str, option: str) -> None:
    """NaN is in every range of click; a size was recommended for it."""
    code, _, errors = run(command, option, "nan")

    assert code == 2
    assert f"Invalid value for '{option}': 'nan' is not a number" in errors


@pytest.mark.parametrize("seconds", ["inf", "1e300"])
def test_a_time_limit_beyond_a_day_is_refused(run: Run, seconds: str) -> None:
    """The probe said at once that the server had not answered within it."""
    code, _, errors = run("health", "--model", "ctr", "--timeout", seconds)

    assert code == 2
    assert "is not in the range 0.1<=x<=86400" in errors


def test_a_folder_whose_name_is_not_utf8_is_named(run: Run, model: Path, version_dir: Path, tmp_path: Path) -> None:
    """Libraries said that there was no such file, or raised a UnicodeEncodeError."""
    folder = tmp_path / os.fsdecode(b"a\xff")
    commands = [
        ("import", "onnx", model, "--name", "ctr", "--repository", folder),
        ("push", version_dir, "--to", f"rocksdb://{folder}/rows"),
    ]
    for command in commands:
        code, _, errors = run(*command)

        assert code == 1
        assert "a\ufffd" in errors
        assert errors.endswith("a name in this path is not UTF-8, which libraries cannot open; rename it\n")


@pytest.mark.parametrize("path", [(), ("import",), ("import", "onnx"), ("import", "hugectr"), ("serve",), ("inspect",)])
def test_everything_has_help(run: Run, path: tuple[str, ...]) -> None:
    """Each command and group explains itself."""
    code, out, _ = run(*path, "--help")

    assert code == 0
    assert out.startswith(" ".join(("Usage: hotrow", *path)))


@pytest.mark.parametrize(
    ("words", "found"),
    [
        (["sevre"], "No such command 'sevre'; did you mean serve?"),
        (["import", "onxx"], "No such command 'onxx'; did you mean onnx?"),
        (["import", "model.pb"], "No such command 'model.pb'; commands: dynamicemb, hugectr, onnx, torch"),
    ],
)
def test_a_word_that_is_no_command_is_answered_by_those_that_are(run: Run, words: list[str], found: str) -> None:
    """A file where the format was left out, too."""
    code, _, err = run(*words)

    assert code == 2
    assert f"Error: {found}\n" in err


@pytest.mark.parametrize("name", command_line.cli.list_commands(click.Context(command_line.cli)))
def test_every_command_can_be_loaded(run: Run, name: str) -> None:
    """The names in the list of commands are those of modules."""
    assert run(name, "--help")[0] == 0


def test_a_command_works_where_stderr_is_closed(model: Path, tmp_path: Path) -> None:
    """As under a supervisor that closes it: no progress is shown."""
    program = "from hotrow.command_line import main; main()"
    command = [sys.executable, "-c", program, "import", "onnx", model, "--name", "ctr", "--repository", tmp_path]
    subprocess.run(["sh", "-c", 'exec "$@" 2>&-', "sh", *command], stdout=subprocess.DEVNULL, check=True)


def test_help_shows_every_command_with_a_sentence(run: Run) -> None:
    """No text is cut off in the middle."""
    out = run("--help")[1]

    for name in command_line.cli.list_commands(click.Context(command_line.cli)):
        assert f"\n  {name} " in out
    assert "..." not in out.split("Models:")[1]
    assert "..." not in run("import", "--help")[1].split("Commands:")[1]


def test_import_reports_and_numbers_versions(run: Run, model: Path, version_dir: Path) -> None:
    """A second import becomes version 2, and the report names tables and predictions."""
    repository = version_dir.parent.parent

    code, out, err = run("import", "onnx", model, "--name", "ctr", "--repository", repository)

    assert (code, err) == (0, "")
    assert f"as {repository / 'ctr' / '2'}" in out
    assert "'W': 1000 rows x 4 float32, read by 'x', sum" in out
    assert "Predictions: y_0, y_1, y_2, y_3" in out


def test_a_saved_model_of_tensorflow_is_named(run: Run, tmp_path: Path) -> None:
    """It is a folder, and was refused as one; the command that converts it is named."""
    (tmp_path / "saved").mkdir()
    (tmp_path / "saved" / "saved_model.pb").touch()

    code, _, err = run("import", "onnx", tmp_path / "saved", "--name", "ctr", "--repository", tmp_path / "new")

    assert code == 2
    assert f"python -m tf2onnx.convert --saved-model {tmp_path / 'saved'} --opset 17 --output model.onnx" in err


def test_a_path_that_cannot_be_looked_into_is_named_as_it_was_given(run: Run, tmp_path: Path) -> None:
    """Not as the folder of a SavedModel, which it might be."""
    code, _, err = run("import", "onnx", tmp_path / ("m" * 300), "--name", "ctr", "--repository", tmp_path / "new")

    assert code == 2
    assert "does not exist" in err
    assert "saved_model" not in err


def test_an_existing_version_is_refused_in_one_line(run: Run, model: Path, version_dir: Path) -> None:
    """Nothing is overwritten."""
    code, out, err = run(
        "import", "onnx", model, "--name", "ctr", "--repository", version_dir.parent.parent, "--version", 1
    )

    assert (code, out) == (1, "")
    assert err == f"hotrow: {version_dir}: already exists; choose another version\n"


def test_a_damaged_model_is_one_line(run: Run, model: Path, tmp_path: Path) -> None:
    """An .onnx file that was cut short is named, and leaves nothing behind."""
    model.write_bytes(model.read_bytes()[:-100])

    code, _, err = run("import", "onnx", model, "--name", "cut", "--repository", tmp_path / "new")

    assert code == 1
    assert err.startswith(f"hotrow: {model}: not readable as an ONNX model")
    assert err.count("\n") == 1
    assert not (tmp_path / "new").exists()


def test_what_the_file_system_refuses_is_one_line(run: Run, model: Path, tmp_path: Path) -> None:
    """A path that cannot be written to is named, without a traceback."""
    (tmp_path / "repository").mkdir()
    (tmp_path / "repository" / "ctr").write_text("a file where a folder should be")

    code, _, err = run("import", "onnx", model, "--name", "ctr", "--repository", tmp_path / "repository")

    assert code == 1
    assert err == f"hotrow: {tmp_path / 'repository' / 'ctr'}: File exists\n"


def test_a_full_disk_is_named(run: Run, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing of the import is left there."""
    repository = tmp_path / "repository"
    monkeypatch.setattr(os, "fsync", _refuse)

    code, _, err = run("import", "onnx", model, "--name", "ctr", "--repository", repository)

    assert code == 1
    assert re.fullmatch(rf"hotrow: {re.escape(str(repository / 'ctr'))}/\S+: No space left on device\n", err)
    assert not repository.exists()


def test_a_disk_without_room_for_the_tables_is_named(
    run: Run, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the bytes that are needed, and those that are free."""
    repository = tmp_path / "repository"
    monkeypatch.setattr("shutil.disk_usage", lambda path: SimpleNamespace(total=100, free=10))

    code, _, err = run("import", "onnx", model, "--name", "ctr", "--repository", repository)

    assert code == 1
    place = re.escape(str(repository / "ctr"))
    assert re.fullmatch(rf"hotrow: {place}: the tables need \d+ bytes, but only 10 are free\n", err)
    assert not repository.exists()


def _refuse(_: int) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_a_url_in_place_of_a_folder_is_refused(run: Run, model: Path, version_dir: Path, tmp_path: Path) -> None:
    """It was taken for a path, and `hdfs:` for a folder of this machine. It may contain a password."""
    to = ("--repository", "hdfs://user:password@namenode/models")
    for command in (
        ("import", "onnx", model, "--name", "ctr", *to),
        ("publish-version", version_dir, "--name", "ctr", *to),
        ("doctor", *to),
        ("size", to[1]),
        ("inspect", to[1]),
    ):
        code, _, err = run(*command)

        assert code == 2
        assert "a URL is no folder of this machine; `hotrow copy` copies to and from HDFS" in err
        assert "password" not in err


@pytest.mark.parametrize("name", ["", "../up", "a b", ".hidden", "a/b"])
def test_names_that_are_no_folders_are_usage_errors(run: Run, model: Path, tmp_path: Path, name: str) -> None:
    """A model's name must be a folder name."""
    code, _, err = run("import", "onnx", model, "--name", name, "--repository", tmp_path / "new")

    assert code == 2
    assert f"{name!r} may contain only letters" in err
    assert not (tmp_path / "new").exists()


def test_inspect_shows_full_digits(run: Run, version_dir: Path) -> None:
    """Rows and bytes are printed in full, for people and for programs."""
    _, out, _ = run("inspect", version_dir, "--verify")
    _, text, _ = run("inspect", version_dir, "--json")

    assert "16000" in out
    assert "Checksums of all files match" in out
    described = json.loads(text)
    assert described["inputs"] == [{"name": "x", "dtype": "int64", "shape": [-1, 3]}]
    assert described["tables"][0]["rows"] == 1000
    assert described["total_table_bytes"] == 16_000
    assert described["tasks"] == ["y_0", "y_1", "y_2", "y_3"]


def test_inspect_tells_what_computes_the_network(run: Run, version_dir: Path) -> None:
    """Engine and precision, as config.pbtxt sets them, and how much of the network bfloat16 concerns."""
    _, exact, _ = run("inspect", version_dir, "--json")
    add_settings(version_dir.parent / "config.pbtxt", {"dense_precision": "bfloat16"})
    _, text, _ = run("inspect", version_dir, "--json")
    _, shown, _ = run("inspect", version_dir)

    assert json.loads(exact)["dense_network"] == {"engine": "ONNX Runtime", "precision": "float32"}
    described = json.loads(text)["dense_network"]
    assert (described["engine"], described["precision"]) == ("OpenVINO", "bfloat16")
    products, num_all = described["matrix_products"], described["all_matrix_products"]
    assert f"Dense network: OpenVINO, bfloat16 for {products} of {num_all} matrix products" in shown


@pytest.mark.parametrize(
    ("layout", "batched", "shown"),
    [("tensors", True, "joined into batches"), ("tensors", False, "computed one by one"), ("hps", False, "joined")],
)
def test_inspect_tells_whether_requests_are_joined(
    run: Run, version_dir: Path, layout: str, batched: bool, shown: str
) -> None:
    """Those of HPS are, although they have no samples."""
    describe_version(replace(read_spec(version_dir), layout=layout, batched=batched), version_dir)

    assert f"Requests: {shown}" in run("inspect", version_dir)[1]
    assert json.loads(run("inspect", version_dir, "--json")[1])["joinable"] == ("joined" in shown)


def test_inspect_tells_how_a_table_is_mapped(run: Run, tmp_path: Path) -> None:
    """As a fraction of large pages; a table smaller than one page has none."""
    small_model.write(tmp_path / "1")
    _, text, _ = run("inspect", tmp_path / "1", "--json")
    assert {table["large_pages_fraction"] for table in json.loads(text)["tables"]} == {None}
    model = model_of(
        "g (int64[n, 3] x) => (float[n, 96] y) { e = Gather(W, x) y = Flatten(e) }", {"W": table(1 << 15, 32)}
    )
    onnx.save(model, tmp_path / "large.onnx")
    run("import", "onnx", tmp_path / "large.onnx", "--name", "large", "--repository", tmp_path / "repository")
    _, text, _ = run("inspect", tmp_path / "repository" / "large" / "1", "--json")
    _, shown, _ = run("inspect", tmp_path / "repository" / "large" / "1")
    (fraction,) = [table["large_pages_fraction"] for table in json.loads(text)["tables"]]
    assert fraction in {0.0, 1.0}  # as file system and kernel allow
    assert f"{fraction:.0%}" in shown


def _flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def _cut(path: Path) -> None:
    data = path.read_bytes()
    path.write_bytes(data[: len(data) // 2])


FILES = ["dense.onnx", "tables/W/emb_vector", "session.json"]


@pytest.mark.parametrize(
    ("file", "damage"),
    [
        *((file, damage) for file in FILES for damage in (_flip, _cut, Path.unlink)),
        ("MANIFEST.json", _cut),
        ("MANIFEST.json", Path.unlink),
    ],
)
def test_inspect_names_the_damaged_file(run: Run, version_dir: Path, file: str, damage: Callable[[Path], None]) -> None:
    """With any damage, `--verify` ends with status 1 and one line that names the file."""
    damage(version_dir / file)

    code, _, err = run("inspect", version_dir, "--verify")

    assert code == 1
    assert err.startswith(f"hotrow: {version_dir / file}: ")
    assert err.count("\n") == 1


def test_inspect_names_a_damaged_index(run: Run, tmp_path: Path) -> None:
    """Index files are in no manifest, yet `--verify` reads them; one that is missing is no damage."""
    small_model.write(tmp_path / "1")
    index = tmp_path / "1" / "tables" / "hashed" / "index"

    assert run("inspect", tmp_path / "1", "--verify")[0] == 0
    ensure_index(index.parent, np.fromfile(index.with_name("key"), np.int64))
    assert run("inspect", tmp_path / "1", "--verify")[0] == 0
    _flip(index)
    code, _, err = run("inspect", tmp_path / "1", "--verify")

    assert code == 1
    assert err.startswith(f"hotrow: {index}: ")


def test_inspect_of_another_folder_says_what_is_missing(run: Run, tmp_path: Path) -> None:
    """The error for a folder that is no version directory names what it lacks, and a version where it has one."""
    missing = f"hotrow: {tmp_path / 'session.json'}: no such file; "
    code, _, err = run("inspect", tmp_path)
    assert (code, err) == (1, f"{missing}a version directory, such as model_repository/ctr/1, has one\n")

    for name in ("2", "3"):
        (tmp_path / name).mkdir()
    assert "none of whose versions has one; `hotrow import` writes versions that do" in run("inspect", tmp_path)[2]

    (tmp_path / "2" / "session.json").touch()
    assert f"give one of its version directories, such as {tmp_path / '2'}" in run("inspect", tmp_path)[2]


def test_serve_names_what_cannot_be_served(run: Run, version_dir: Path) -> None:
    """A model that the repository lacks is refused before a server is started."""
    shutil.rmtree(version_dir)

    code, _, err = run("serve", "--repository", version_dir.parent.parent)

    assert code == 1
    assert err.startswith("hotrow: ")
    assert "ctr" in err
    assert err.count("\n") == 1


def test_serve_takes_no_words_but_flags(run: Run, version_dir: Path) -> None:
    """The server ignores a model's name there, and serves all models."""
    code, _, err = run("serve", "--repository", version_dir.parent.parent, "ctr")

    assert code == 2
    assert "'ctr' is no flag of tritonserver; --repository and --model name what to serve" in err


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--http-port=9000"], "tritonserver's --http-port itself: give --http-port before `--`"),
        (["--id=a", "--grpc-address", "::"], "tritonserver's --grpc-address itself: give --host before `--`"),
        (["--model-control-mode=poll"], "tritonserver's --model-control-mode itself"),
        (["--allow-http=false"], "tritonserver's --allow-http itself: it watches the server over HTTP"),
    ],
)
def test_serve_refuses_flags_that_it_relies_on(run: Run, version_dir: Path, flags: list[str], said: str) -> None:
    """With some it would wait without end for a server that is ready elsewhere."""
    code, _, err = run("serve", "--repository", version_dir.parent.parent, "--", *flags)

    assert code == 2
    assert f"Error: `hotrow serve` sets {said}" in err


HEAVY = ("numba", "onnx", "onnxruntime", "confluent_kafka", "redis", "rocksdict", "matplotlib", "cupy")
LOAD_ALL = f"""
import sys, click
from hotrow.command_line import cli
context = click.Context(cli)
assert all(cli.get_command(context, name) for name in cli.list_commands(context))
print([name for name in {HEAVY} if name in sys.modules])
"""
COMPLETE = """
import sys, click
from hotrow.command_line import cli
print([item.value for item in cli.shell_complete(click.Context(cli), "pu")])
print([name for name in sys.modules if name.startswith("hotrow.commands.")])
"""


def _printed(code: str) -> list[str]:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return done.stdout.splitlines()


def test_help_is_light() -> None:
    """No command imports a large package, or one that may be missing, before it runs."""
    assert _printed(LOAD_ALL) == ["[]"]


def test_serve_is_light() -> None:
    """The launcher starts the server before it loads a large package: its backend processes load what they need."""
    loaded = "import sys, hotrow.commands.serve; print([name for name in ('numpy', 'rich') if name in sys.modules])"
    assert _printed(loaded) == ["[]"]


def test_completion_loads_no_command() -> None:
    """The tab key completes names of commands without their modules."""
    assert _printed(COMPLETE) == ["['publish-version', 'push', 'publish']", "[]"]


@pytest.mark.parametrize(
    ("words", "kind"),
    [
        ("import onnx", "file"),
        ("inspect", "dir"),
        ("push", "dir"),
        ("serve --repository", "dir"),
        ("doctor --repository", "dir"),
        ("copy", "file"),
        ("copy hdfs://namenode/models/ctr/7", "file"),
        ("follow ctr --source", "dir"),
    ],
)
def test_the_tab_key_completes_paths(words: str, kind: str) -> None:
    """Also where a command takes a path or a URL."""
    assert [item.type for item in _completed(words, "mo")] == [kind]


def test_the_tab_key_completes_models_and_versions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a repository, if one is named; else of the server, and nothing where none answers."""
    for name in ("ctr", "ctr2", "other", ".hidden"):
        (tmp_path / name).mkdir()
    index = [{"name": "ctr", "version": "1"}, {"name": "ctr", "version": "12"}, {"name": "new"}]

    def repository_index(server: RemoteServer, timeout_s: float) -> list[dict[str, str]]:
        if server._url == "here:1":
            return index
        raise UnavailableError

    monkeypatch.setattr(RemoteServer, "repository_index", repository_index)

    def values(words: str, incomplete: str = "") -> list[str]:
        return [item.value for item in _completed(words, incomplete)]

    assert values(f"serve --repository {tmp_path} --model", "c") == ["ctr", "ctr2"]
    assert values(f"publish-version new --repository {tmp_path} --name", "o") == ["other"]
    assert values("publish-version new --name") == []
    assert values("health --url here:1 --model") == ["ctr", "new"]
    assert values("roll-back --url here:1", "n") == ["new"]
    assert values("load --url here:1 ctr --version") == ["1", "12"]
    assert values("load --url away:1") == []


def _completed(words: str, incomplete: str) -> list[CompletionItem]:
    return ShellComplete(command_line.cli, {}, "hotrow", "_HOTROW_COMPLETE").get_completions(words.split(), incomplete)

"""README and docs/ name only what exists: commands, options, settings, metrics, files and names of the code."""

from __future__ import annotations

import ast
import functools
import json
import re
import subprocess
from collections.abc import Iterator
from dataclasses import fields
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import yaml

from inference_session import InferenceSession
from inference_session.config import SessionConfig
from inference_session.update_stream import Publisher
from tests.testing.manual import (
    PAGES,
    ROOT,
    Block,
    blocks,
    check_command_line,
    check_mention,
    code_spans,
    options,
    shell_commands,
)
from tests.testing.metrics_documentation import documented_metrics
from triton_backend.repository import text_format

ALL_BLOCKS = [block for page in PAGES for block in blocks(page)]
LANGUAGES = {"sh", "python", "protobuf", "yaml", "json", "text", "mermaid"}
SOURCES = ("inference_session", "triton_backend", "hotrow", "demo", "benchmarks", "client_examples", "deploy", "tests")
WIDTH = 100
SHORT_PATHS = (ROOT, ROOT / "inference_session", ROOT / "triton_backend")
"""Where the path of a file may begin in the text."""
OUR_PARAMETERS = {"packed_input", "max_samples_per_request", "ps", "config"}

SPANS = {"hotrow check", "hotrow look-up", "hotrow network", "hotrow answer", "hotrow COMMAND --help"}
"""Spans of traces, and a placeholder: these are no commands."""
PLACES = {"hotrow/imports", "hotrow/sources", "hotrow/state", "HOTROW_CACHE_DIR/state", "nvcr.io/nvidia/tritonserver"}
"""Folders of the machine and images: these are no files of the repository."""
FOREIGN = {
    # tritonserver
    *(
        "--backend-config",
        "--disable-auto-complete-config",
        "--exit-on-error",
        "--http-max-input-size",
        "--model-config-name",
    ),
    *(
        "--model-control-mode",
        "--model-namespacing",
        "--grpc-infer-allocation-pool-size",
        "--strict-readiness",
        "default_queue_policy",
        "max_queue_delay_microseconds",
        "max_queue_size",
        "response_cache",
        "--rate-limit",
        "rate_limiter",
        "model_warmup",
        "async_exec",
    ),
    *("nv_inference_compute_infer_duration_us", "nv_inference_pending_request_count"),
    # docker, hdfs fetchdt, Kerberos, mv, pip, requests, bash and click
    *("--build-arg", "--restart", "--print", "HTTP/HOST", "--exchange", "--no-deps", "REQUESTS_CA_BUNDLE"),
    *("_HOTROW_COMPLETE", "bash_source"),
    # Keras and Kafka
    *("IntegerLookup", "StringLookup", "get_vocabulary", "LogAppendTime"),
    # HugeCTR, TorchRec and NCCL
    *("slot_id", "HashZchManagedCollisionModule", "NCCL_MIN_P2P_NCHANNELS"),
    *("hierarchical_parameter_server", "sparse_operation_kit"),
}
"""Names of other programs."""
EXAMPLES = {
    *("wdl_dense_1000", "wdl_opt_dense_1000", "wdl0_sparse_1000", "wdl0_opt_sparse_1000"),
    *("wdl0_sparse_1000.model/key", "model_repository/clicks/config.pbtxt"),
}
"""Files that the reader makes."""
COMPOSED = {"HOTROW_PS_CONFIG_HUGECTR", "hotrow_tier_"}
"""Names that the code puts together, and the beginning that others share."""


def of_language(language: str) -> list[Block]:
    return [block for block in ALL_BLOCKS if block.language == language]


@functools.cache
def source_text() -> str:
    """All code of the repository, and the names of its files."""
    listed = subprocess.run(["git", "ls-files", *SOURCES], cwd=ROOT, capture_output=True, text=True, check=True)
    paths = [ROOT / name for name in listed.stdout.splitlines()]
    paths += [ROOT / name for name in ("pyproject.toml", "Makefile", "Dockerfile")]
    texts = [path.read_text(encoding="utf-8") for path in paths if path != Path(__file__) and _is_text(path)]
    return "\n".join([listed.stdout, *texts])


def _is_text(path: Path) -> bool:
    return (
        path.suffix in {".py", ".cu", ".cuh", ".h", ".yaml", ".yml", ".json", ".conf", ".toml", ".pbtxt", ""}
        and path.is_file()
    )


@functools.cache
def source_words() -> frozenset[str]:
    return frozenset(re.findall(r"[A-Za-z_]\w*", source_text()))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_every_block_names_its_language(page: Path) -> None:
    """So that the other tests know what to do with it."""
    assert [str(block) for block in blocks(page) if block.language not in LANGUAGES] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_prose_is_narrow(page: Path) -> None:
    """As CONTRIBUTING.md says, also where a change made lines longer. Tables and blocks may be wider."""
    prose = re.sub(r"^ *```.*?^ *```$", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    lines = (line for line in prose.splitlines() if not line.startswith(("|", "![")))
    assert [line for line in lines if len(line) > WIDTH] == []


@pytest.mark.parametrize("block", of_language("sh"), ids=str)
def test_commands_exist_with_their_options(block: Block) -> None:
    """Bash reads the block; `hotrow` has each command and option, `make` each target, and Python each module."""
    subprocess.run(["bash", "-n"], input=block.text, text=True, check=True)
    for words in shell_commands(block.text):
        if words[0] == "hotrow":
            check_command_line(words[1:])
        elif words[0] == "make":
            assert re.search(rf"^{words[1]}:", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE), words
        elif words[0].endswith("python"):
            assert _is_program(block, words), words


def _is_program(block: Block, words: list[str]) -> bool:
    """A module or file of the repository, a file that the page has written, or one that is the reader's own."""
    if words[1] == "-m":
        path = ROOT / words[2].replace(".", "/")
        return path.with_suffix(".py").exists() or (path / "__main__.py").exists()
    return (ROOT / words[1]).exists() or words[1] in {other.title for other in blocks(block.page)}


@pytest.mark.parametrize(
    "line", ["serv", "serve --repositories x", "serve", "load ctr --version x", "import --name", "import onx x"]
)
def test_a_wrong_command_is_noticed(line: str) -> None:
    """No such command, no such option, a required one left out, or a value that is not allowed."""
    with pytest.raises(ValueError, match="hotrow"):
        check_command_line(line.split())


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_commands_in_sentences_exist(page: Path) -> None:
    """With their options; in a sentence, words may be left out."""
    wrong = []
    for span in code_spans(page):
        for command in re.split(r" && | \| ", span):
            if command.startswith("hotrow ") and command not in SPANS:
                try:
                    check_mention(command)
                except ValueError as error:
                    wrong.append(f"{span}: {error}")
    assert wrong == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_names_in_sentences_exist(page: Path) -> None:
    """Names with an underscore or capitals inside, options, and paths of files: in the code or in the page's blocks."""
    wrong = set()
    own = "\n".join(block.title + block.text for block in blocks(page))
    for span in code_spans(page):
        found = {word for word in re.findall(r"[A-Za-z_]\w*", span) if _is_of_code(word) and word not in source_words()}
        found |= {word for word in re.findall(r"(?<![\w-])--[a-z][\w-]*", span) if not _is_option(word)}
        if re.fullmatch(r"[\w.-]+(/[\w.-]+)+/?", span):
            found |= {span} if not any((place / span).exists() for place in SHORT_PATHS) else set()
        wrong |= {name for name in found - PLACES - FOREIGN - EXAMPLES - COMPOSED if name not in own}
    assert wrong == set()


def _is_of_code(word: str) -> bool:
    return "_" in word.strip("_") or re.search("[a-z][A-Z]", word) is not None


def _is_option(word: str) -> bool:
    return word in options() or f'"{word}"' in source_text()


@pytest.mark.parametrize("page", [*PAGES, ROOT / "CHANGELOG.md", ROOT / "CONTRIBUTING.md"], ids=lambda page: page.stem)
def test_links_lead_somewhere(page: Path) -> None:
    """To a file of the repository, and to a heading of it where they name one."""
    wrong = []
    for target in re.findall(r"\]\((?!https?://)([^)\s]+)\)", page.read_text(encoding="utf-8")):
        name, _, anchor = target.partition("#")
        path = (page.parent / name).resolve() if name else page
        if not path.exists() or (anchor and anchor not in anchors(path)):
            wrong.append(target)
    assert wrong == []


def anchors(page: Path) -> set[str]:
    """The names of a page's headings in links."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\s-]", "", heading).strip().lower().replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_metrics_exist(page: Path) -> None:
    """Those that the page of metrics has, which is compared with a real server's."""
    named = set(re.findall(r"\bhotrow_[a-z_]+[a-z]\b(?![.\[])", page.read_text(encoding="utf-8")))
    known = documented_metrics().keys() | COMPOSED
    assert {name for name in named if name not in known and name not in source_words()} == set()
    assert {name for name in named if name.endswith("_total") and name not in known} == set()


@pytest.mark.parametrize("block", of_language("protobuf"), ids=str)
def test_settings_exist(block: Block) -> None:
    """We can parse each configuration, and each of its parameters is a setting with an allowed value."""
    parameters = text_format.parse(block.text)["parameters"]
    for parameter in _flat(parameters):
        name, value = parameter["key"][0], parameter["value"][0]["string_value"][0]
        assert name in {field.name for field in fields(SessionConfig)} | OUR_PARAMETERS
        if name not in OUR_PARAMETERS:
            SessionConfig.resolve({name: value})


def _flat(values: Any) -> Iterator[Any]:
    for value in values:
        if isinstance(value, list):
            yield from _flat(value)
        else:
            yield value


@pytest.mark.parametrize("block", of_language("json"), ids=str)
def test_json_is_json(block: Block) -> None:
    """A block of JSON can be parsed."""
    json.loads(block.text)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("block", of_language("yaml"), ids=str)
def test_fields_of_a_container_exist(block: Block) -> None:
    """YAML in these pages is a part of a container of Kubernetes, valid by its schema."""
    import kubernetes_validate

    container = {"name": "hotrow", "image": "hotrow", **yaml.safe_load(block.text)}
    pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "hotrow"}, "spec": {"containers": [container]}}
    kubernetes_validate.validate(pod, "1.31", strict=True)
    for probe in container.values():
        if isinstance(probe, dict) and "exec" in probe:
            check_command_line(probe["exec"]["command"][1:])


@pytest.mark.parametrize("block", of_language("python"), ids=str)
def test_names_of_python_exist(block: Block) -> None:
    """The code compiles; the names that it imports from us exist, as do the methods of sessions and publishers."""
    tree = ast.parse(block.text)
    imported: dict[str, Any] = {"session": InferenceSession, "publisher": Publisher}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] in SOURCES:
            module = import_module(str(node.module))
            for name in node.names:
                imported[name.asname or name.name] = _member(module, name.name)
    imported.setdefault("training", import_module("hotrow.training"))
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in imported:
            _member(imported[node.value.id], node.attr)


def _member(owner: Any, name: str) -> Any:
    """The owner's member of that name; for a module that needs other packages, its `__all__` decides."""
    if name in getattr(owner, "__all__", ()):
        return getattr(owner, name, None) if not owner.__name__.endswith("training") else None
    try:
        return getattr(owner, name)
    except AttributeError:
        return import_module(f"{owner.__name__}.{name}")

"""Which package may import which, deferred imports included; docs/explanation/architecture.md says why."""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterator, Mapping
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

from tests.testing.statements import statements

ROOT = Path(__file__).parents[1]
PACKAGES = ("inference_session", "triton_backend", "hotrow")
FOREIGN = {"triton_backend", "triton_python_backend_utils", "torch", "hotrow"}
"""What the library never imports."""
LIBRARY = {
    # Each package of the library, and those that it may import; lower ones come first.
    "errors": "",
    "platform": "errors",
    "urls": "errors platform",
    "model_spec": "errors",
    "kernels": "errors",
    "stats": "kernels model_spec",
    "config": "errors platform urls",
    "requests": "config errors kernels model_spec platform",
    "device": "errors kernels model_spec platform",
    "tables": "device errors kernels model_spec platform",
    "onnx_graphs": "",
    "dense_engine": "config device errors model_spec onnx_graphs platform",
    "embedding_cache": "device errors kernels model_spec platform stats tables",
    "version_directory": "config dense_engine errors model_spec platform tables",
    "model_source": "errors platform version_directory",
    "parameter_server": "config errors kernels model_spec platform stats tables urls version_directory",
    "update_stream": "errors model_spec platform requests rows stats tables urls version_directory",
    "rows": "config device embedding_cache errors kernels model_source model_spec parameter_server platform stats"
    " tables version_directory",
    "sizing": "config device embedding_cache errors kernels model_spec tables version_directory",
    "execution": "config dense_engine device embedding_cache errors kernels model_spec parameter_server platform"
    " requests rows sizing stats tables update_stream version_directory",
    "importers": "config dense_engine errors kernels model_source model_spec onnx_graphs platform requests tables"
    " version_directory",
    "session": "config dense_engine device errors execution kernels model_spec requests rows sizing stats update_stream"
    " version_directory",
    "versions": "errors model_spec session stats version_directory",
    "hugectr": "errors importers requests session",
    "inference_session": "errors requests session",
}
TRITON = {
    "triton_backend.repository": "",
    "triton_backend.client": "triton_backend.repository",
    "triton_backend.backend": "triton_backend.client triton_backend.repository",
    "triton_backend.launcher": "triton_backend.backend triton_backend.client triton_backend.repository",
    "triton_backend.model": "triton_backend.backend",
    "triton_backend.backends": "triton_backend.backend",
}


def modules() -> dict[str, Path]:
    paths = (path for package in PACKAGES for path in (ROOT / package).rglob("*.py"))
    named = {".".join(path.relative_to(ROOT).with_suffix("").parts): path for path in paths}
    return {name.removesuffix(".__init__"): path for name, path in named.items()}


@functools.cache
def imports_in(path: Path) -> list[ast.Import | ast.ImportFrom]:
    """All imports of a file, wherever in it that is done."""
    return [node for node in statements(path) if isinstance(node, (ast.Import, ast.ImportFrom))]


def imported(path: Path, known: Mapping[str, Path]) -> Iterator[str]:
    """Our own modules that a module imports."""
    for node in imports_in(path):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name in known)
        elif node.module:
            assert not node.level, f"{path}: relative imports hide where a module is"
            names = (f"{node.module}.{alias.name}" for alias in node.names)
            yield from (
                name if name in known else node.module for name in names if node.module.split(".")[0] in PACKAGES
            )


@pytest.fixture(scope="module")
def imports() -> dict[str, set[str]]:
    """The modules that each of ours imports."""
    known = modules()
    return {name: {*imported(path, known)} - {name} for name, path in known.items()}


def package_of(module: str) -> str:
    """The name in the tables above of the part that a module belongs to."""
    top, *rest = module.split(".")
    if top == "inference_session":
        return rest[0] if rest else top
    return f"{top}.{rest[0]}" if top == "triton_backend" and rest else top


def test_no_modules_import_each_other(imports: dict[str, set[str]]) -> None:
    """Not even by way of others, or in functions."""
    try:
        TopologicalSorter(imports).prepare()
    except CycleError as error:
        pytest.fail(" → ".join(error.args[1]))


def test_packages_import_what_is_below_them(imports: dict[str, set[str]]) -> None:
    """The library knows nothing of Triton, and no package of one that is built on it."""
    for module, others in imports.items():
        package = package_of(module)
        for other in sorted({package_of(each) for each in others} - {package, "inference_session", "triton_backend"}):
            if package in LIBRARY:
                assert other in LIBRARY[package].split(), f"{module} imports {other}"
            elif package in TRITON:
                assert other in {*LIBRARY, *TRITON[package].split()}, f"{module} imports {other}"
            else:
                assert package == "hotrow" or other != "hotrow", f"{module} imports {other}"


def test_the_permitted_directions_have_no_circle() -> None:
    """So that there is an order in which the packages can be read."""
    for permitted in (LIBRARY, TRITON):
        TopologicalSorter({package: others.split() for package, others in permitted.items()}).prepare()


def test_the_library_imports_neither_triton_nor_a_framework() -> None:
    """It runs where there is neither."""
    for path in (ROOT / "inference_session").rglob("*.py"):
        for node in imports_in(path):
            names = [node.module or ""] if isinstance(node, ast.ImportFrom) else [alias.name for alias in node.names]
            for name in names:
                assert name.split(".")[0] not in FOREIGN, path


def imports_of_tests() -> Iterator[tuple[Path, str, str]]:
    """Each name that a test or a benchmark imports from a module: the file, the module, the name."""
    for path in (*(ROOT / "tests").rglob("*.py"), *(ROOT / "benchmarks").rglob("*.py")):
        for node in imports_in(path):
            if isinstance(node, ast.ImportFrom):
                assert not node.level, f"{path}: relative imports hide where a module is"
                yield from ((path, node.module or "", alias.name) for alias in node.names)
            else:
                yield from ((path, alias.name, "") for alias in node.names)


def test_what_tests_share_lies_in_testing() -> None:
    """No test or benchmark imports from a test. The campaign and the fuzzer are programs, with modules of their own."""
    for path, module, name in imports_of_tests():
        parts = [*module.split("."), name]
        if parts[0] == "tests":
            assert not any(part.startswith("test_") or part == "conftest" for part in parts), f"{path} imports {module}"
            own = parts[1] in {"campaign", "fuzz"} and ROOT / "tests" / parts[1] in path.parents
            assert own or parts[1] == "testing", f"{path} imports {module}"


def test_tests_import_no_private_names() -> None:
    """Tests use only public names of the product."""
    for path, module, name in imports_of_tests():
        if module.split(".")[0] in PACKAGES:
            assert not name.startswith("_"), f"{path} imports {name} from {module}"

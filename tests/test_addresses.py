"""No code takes the address of an object that nothing keeps: it would be freed before the address is used."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from tests.testing import ROOT

FOLDERS = ("inference_session", "triton_backend", "hotrow", "benchmarks", "tests")
TAKE_ADDRESSES = {"address_of", "addressof", "id"}
"""Functions, of their argument."""
MAKE_RECORDS = {"key_segments", "segment", "table_record"}
"""Functions, of those of their arguments that are arrays or lists of arrays."""
HAS_ADDRESS = {"ctypes", "data_ptr", "__array_interface__"}
"""Attributes of arrays and tensors."""
KEPT = {"self._device.empty", "self._device.stage"}
"""Give memory that is a request's until it ends."""
WORDS = re.compile(rf"\b({'|'.join({*TAKE_ADDRESSES, *MAKE_RECORDS, *HAS_ADDRESS, 'ptr'})})\b")
TEMPORARY = (ast.Call, ast.List, ast.Dict, ast.Set, ast.ListComp, ast.BinOp, ast.JoinedStr)


def addressed(node: ast.AST) -> list[ast.expr]:
    """The objects whose addresses an expression takes."""
    function = _name(node.func) if isinstance(node, ast.Call) else ""
    if isinstance(node, ast.Call) and function in TAKE_ADDRESSES:
        return node.args
    if isinstance(node, ast.Call) and function in MAKE_RECORDS:
        parts = (part for each in node.args for part in (each.elts if isinstance(each, ast.List) else [each]))
        return [part for part in parts if ast.unparse(part).startswith("np.")]
    if isinstance(node, ast.Attribute) and node.attr in HAS_ADDRESS:
        return [node.value]
    if isinstance(node, ast.Attribute) and node.attr == "ptr" and isinstance(node.value, ast.Attribute):
        return [node.value.value] if node.value.attr == "data" else []
    return []


def _name(function: ast.expr) -> str:
    """The last part of a function's name; none if it has no name."""
    if isinstance(function, ast.Attribute):
        return function.attr
    return function.id if isinstance(function, ast.Name) else ""


def addresses_of_temporaries(source: str) -> Iterator[str]:
    if WORDS.search(source) is None:  # most sources: to parse them all takes seconds
        return
    for node in ast.walk(ast.parse(source)):
        for found in addressed(node):
            if isinstance(found, TEMPORARY) and not (isinstance(found, ast.Call) and ast.unparse(found.func) in KEPT):
                yield f"line {found.lineno}: {ast.unparse(node)}"


def test_addresses_are_of_objects_that_have_a_name() -> None:
    """The name keeps the object until the compiled code that reads it has returned."""
    for path in (path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py")):
        found = list(addresses_of_temporaries(path.read_text(encoding="utf-8")))
        assert not found, f"{path.relative_to(ROOT)}, {found[0]}: give the object a name, or pass it instead"


def test_faults_of_this_kind_are_found() -> None:
    """As they were in our code."""
    for fault in (
        "stage(id([]), 1)",
        "scatter(vectors.contiguous().data_ptr())",
        "call(np.zeros(3).ctypes.data)",
        "call(address_of(np.ascontiguousarray(x)))",
        "call(cupy.zeros(3).data.ptr)",
        "look_up(segment(np.array([[0, 1]]), output))",
        "look_up(key_segments([np.array([0, 1])], [output]))",
    ):
        assert list(addresses_of_temporaries(fault)), fault
    assert not list(addresses_of_temporaries("call(address_of(x), id(y), z.ctypes.data)"))

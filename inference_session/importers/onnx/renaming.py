"""Other names for a network's inputs and outputs, such as `click` in place of `Identity:0`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from onnx import GraphProto

from inference_session.errors import ConfigurationError
from inference_session.model_spec import BLOCK_CONTEXT, CANDIDATES, PREDICTIONS, ROW_CONTEXT
from inference_session.onnx_graphs import all_graphs, constants, defined, rename

_RESERVED = frozenset({PREDICTIONS, CANDIDATES, ROW_CONTEXT, BLOCK_CONTEXT})


def rename_inputs_and_outputs(path: Path, graph: GraphProto, new_names: Mapping[str, str]) -> None:
    """Give inputs and outputs the names that they are to have.

    Args:
        path: the model's file, for messages.
        graph: is changed.
        new_names: by the names in the file; others keep theirs. Two may swap names.

    Raises:
        ConfigurationError: names what is not there, is wanted twice, or is taken.
    """
    if not new_names:
        return
    optional = constants(graph)
    own = [value.name for value in (*graph.input, *graph.output) if value.name not in optional]
    kept = {name for scope in all_graphs(graph) for name in defined(scope)} - new_names.keys()
    given: dict[str, str] = {}
    for name, new in new_names.items():
        if name not in own:
            there = ", ".join(map(repr, dict.fromkeys(own)))
            raise ConfigurationError(f"{path} has no input or output {name!r} to rename; it has {there}")
        if not new or new in _RESERVED:
            raise ConfigurationError(
                f"{name!r} cannot be renamed to {new!r}, which hotrow reserves; choose another name"
            )
        if new in kept:
            raise ConfigurationError(
                f"{name!r} cannot be renamed to {new!r}: the network has a value of that name; choose another name"
            )
        if new in given:
            raise ConfigurationError(f"{given[new]!r} and {name!r} cannot both be renamed to {new!r}")
        given[new] = name
    rename(graph, lambda name: new_names.get(name, name))

"""One network of a model, with everything that runs before it: the graph that computes its keys, and its look-ups."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from inference_session.dense_engine.base import DenseEngine
from inference_session.dense_engine.onnx import OnnxEngine
from inference_session.errors import ModelFormatError, UnknownKeyError
from inference_session.execution.lookups import ModelLookups
from inference_session.execution.plan import BoundPlan, ExecutionPlan, FreshPlan
from inference_session.model_spec import BLOCK_CONTEXT, ROW_CONTEXT, SESSION_FILE, ModelSpec
from inference_session.platform.bounded_memory import BoundedMemory
from inference_session.requests.batch import JoinedBatch
from inference_session.requests.outputs import Answer
from inference_session.tables.base import RowReader

_MAX_PLANS = 1024


class RunResult(NamedTuple):
    """The result of a run of a network."""

    outputs: Answer
    num_unknown: NDArray[np.int64]
    """Keys per look-up that were answered with the default vector."""


class Engines(NamedTuple):
    """What computes a network."""

    dense: DenseEngine
    keys: OnnxEngine | None
    """Computes its keys; None: all keys are inputs."""


class Network:
    """Gives each batch the plan by which its keys are looked up and the dense network runs. Thread-safe.

    Args:
        spec: of the model, with the look-ups of this network.
        keys: computes keys from inputs; None: all are inputs.
        keys_follow_inputs: whether the keys of look-ups are inputs of the model (RequestLayout.keys_follow_inputs).
    """

    def __init__(
        self,
        spec: ModelSpec,
        reader: RowReader,
        dense: DenseEngine,
        keys: OnnxEngine | None,
        *,
        keys_follow_inputs: bool,
    ) -> None:
        self.spec = spec
        self.reader = reader
        self.dense = dense
        self.tables = np.array(spec.looked_up_tables, np.intp)
        """For each look-up, the number of its table."""
        self.keys = keys
        self.key_names = tuple(sorted(keys.output_names)) if keys else ()
        """The results of the key graph."""
        self._lookups = ModelLookups(
            spec,
            by_column=reader.device.reads_by_column,
            keys_follow_inputs=keys_follow_inputs,
            narrow_inputs=dense.narrow_inputs,
            concat_inputs=dense.concat_inputs,
        )
        self.may_record = reader.is_launched and self._lookups.follow_shapes
        """Whether batches may have a RecordedPlan."""
        self._plans: BoundedMemory[Hashable, FreshPlan | BoundPlan] = BoundedMemory(_MAX_PLANS)

    def plan(self, batch: JoinedBatch, outputs: Sequence[str]) -> ExecutionPlan:
        """The plan by which a batch computes these outputs. Keys that are computed are added to the batch.

        InvalidRequestError: keys do not fit each other.
        """
        outputs = tuple(outputs)
        self._compute_keys(batch)
        self._lookups.cut_bags(batch)
        shape = self._shape(batch, outputs)
        plan = known = self._plans.get(shape)
        if plan is None:
            plan = self._fresh(batch, outputs)
            self._plans.put(shape, plan)
        # A shape that follows from lengths of lists may never come again, and recording takes as long as some batches.
        may_come_again = known is not None or not self._lookups.irregular_shapes(batch)
        if isinstance(plan, FreshPlan) and plan.may_record and may_come_again and self.dense.may_bind(outputs):
            plan = plan.recorded(batch)
            self._plans.put(shape, plan)
        return plan

    def known_plan(self, batch: JoinedBatch, outputs: tuple[str, ...]) -> ExecutionPlan | None:
        """The plan of a batch whose keys need not be cut, if there is one already. Computed keys are added to it."""
        self._compute_keys(batch)
        return self._plans.get(self._shape(batch, outputs))

    def refuse_unknown(self, num_unknown: NDArray[np.int64]) -> None:
        """UnknownKeyError if any of these numbers of unknown keys, int64 [look-ups], is above 0."""
        if num_unknown.any():
            lookup = self.spec.lookups[int(np.flatnonzero(num_unknown)[0])]
            table = self.spec.table_in(lookup.table)
            raise UnknownKeyError(
                f"unknown keys: {num_unknown.sum()}, the first of them in table {table.name!r}, which has "
                f"{table.num_rows} rows; with the setting unknown_keys=default_vector they get default vectors"
            )

    def _compute_keys(self, batch: JoinedBatch) -> None:
        if self.keys:
            results = self.keys.run({name: batch.array(name) for name in self.keys.input_names}, self.key_names)
            batch.add(dict(zip(self.key_names, results, strict=True)))

    def _shape(self, batch: JoinedBatch, outputs: tuple[str, ...]) -> Hashable:
        """The properties that batches of one plan share."""
        computed = [batch.array(name).shape for name in self.key_names] if self.may_record else ()
        return (batch.num_samples, batch.shapes, self._lookups.irregular_shapes(batch), outputs, *computed)

    def _fresh(self, batch: JoinedBatch, outputs: tuple[str, ...]) -> FreshPlan:
        geometry = self._lookups.geometry(batch)
        return FreshPlan(self._lookups, geometry, self.reader, self.dense, outputs, may_record=self.may_record)


_KEY_TYPES = ("int64", "int32", "uint32")


def check_network(
    spec: ModelSpec, directory: Path, values: Mapping[str, str], engines: Engines, files: tuple[str, str]
) -> None:
    """Refuse networks and look-ups that session.json does not fit, before every request fails on them.

    Args:
        values: the types of what a request gives (RequestLayout.values).
        files: the names of the engines' networks.
    """
    _check_reads(spec, directory, values, engines, files)
    for lookup in spec.lookups:
        for field, name, allowed in (("keys", lookup.keys, _KEY_TYPES), ("weights", lookup.weights, ("float32",))):
            if name is not None and values.get(name, allowed[0]) not in allowed:
                raise ModelFormatError(
                    f"{directory / SESSION_FILE}: field '{field}' of a lookup of {lookup.table!r}: {name!r} is"
                    f" {values[name]}, but must be {' or '.join(allowed)}"
                )
    for file, engine in zip(files, engines, strict=True):
        _check_types(directory, values, file, {} if engine is None else engine.input_types)


def _check_reads(
    spec: ModelSpec, directory: Path, values: Mapping[str, str], engines: Engines, files: tuple[str, str]
) -> None:
    """Refuse a network or a look-up that reads what nothing before it provides."""
    dense, keys = engines
    inputs = values.keys() | ({ROW_CONTEXT, BLOCK_CONTEXT} if spec.ranking else set())
    known = inputs | (keys.output_names if keys else frozenset())
    looked_up = {lookup.dense_input for lookup in spec.lookups}
    for reader, wanted, given in (
        (files[1], keys.input_names if keys else frozenset(), inputs),
        ("a lookup", {name for lookup in spec.lookups for name in lookup.reads}, known),
        (files[0], dense.input_names, known | looked_up),
    ):
        if missing := sorted(wanted - given):
            raise ModelFormatError(
                f"{directory / SESSION_FILE}: {reader} reads {missing[0]!r}, which no input, look-up or graph provides"
            )


def _check_types(directory: Path, values: Mapping[str, str], file: str, wanted: Mapping[str, str]) -> None:
    """Refuse a network that reads inputs of the model as other types."""
    for name, dtype in wanted.items():
        if values.get(name, dtype) != dtype:
            raise ModelFormatError(f"{directory / SESSION_FILE}: {name!r} is {values[name]}, but {file} reads {dtype}")


def check_outputs(spec: ModelSpec, directory: Path, made: frozenset[str], file: str) -> None:
    """Refuse a network that lacks an output of the model; `check_network` refuses one that lacks an input."""
    if missing := [tensor.name for tensor in spec.outputs if tensor.name not in made]:
        raise ModelFormatError(f"{directory / SESSION_FILE}: output {missing[0]!r} is not an output of {file}")

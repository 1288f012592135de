"""HugeCTR's and HPS's requests in a session: decoded one by one, joined like all others."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np

from inference_session.errors import ModelFormatError
from inference_session.model_spec import ModelSpec
from inference_session.platform.json_records import read_record, read_value
from inference_session.requests.batch import CheckedRequest, Part, RaggedBags, Request, RequestLayout
from inference_session.requests.hugectr_csr import (
    DENSE,
    HPS_COUNTS,
    HPS_KEYS,
    KEYS,
    OFFSETS,
    RequestFormat,
    decode_keys,
    decode_request,
)
from inference_session.requests.outputs import Answer, Outputs


class HugectrLayout(RequestLayout):
    """DES, CATCOLUMN and ROWINDEX: dense features, and per table a bag for each slot of each sample.

    Where each bag has one key, keys are arrays like those of any model; otherwise they are ragged.
    """

    def __init__(self, spec: ModelSpec, outputs: Outputs, *, network_inputs: frozenset[str], max_elements: int) -> None:
        super().__init__(spec, outputs, network_inputs=network_inputs, max_elements=max_elements)
        options = dict(spec.layout_options)
        try:
            self.dense_input: str = read_value(str, options.pop("dense_input", None), "dense_input")
            self.format = read_record(RequestFormat, options)
        except ValueError as error:
            raise ModelFormatError(f"'layout_options' of session.json do not describe 'hugectr': {error}") from error
        expected = (DENSE, "float32"), (KEYS, self.format.key_type), (OFFSETS, "int32")
        if (found := tuple((tensor.name, tensor.dtype) for tensor in spec.inputs)) != expected:
            raise ModelFormatError(f"the layout 'hugectr' has inputs {expected}, found {found}")
        self._check_sample(DENSE, self.format.dense_dim)
        self._check_sample(KEYS, sum(self.format.slots))
        self.parts = [(f"{KEYS}/{table}", slots) for table, slots in enumerate(self.format.slots)]
        keys = dict.fromkeys((name for name, _ in self.parts), self.format.key_type)
        self.values = {self.dense_input: "float32", **keys}
        ends = itertools.accumulate(self.format.slots)
        self.columns = {n: slice(end - width, end) for (n, width), end in zip(self.parts, ends, strict=True)}
        """Where the keys of each table are among those of a sample, if each slot has one key."""

    def check(self, request: Request) -> CheckedRequest:
        for name, array in request.inputs.items():
            self._check_size(name, array)
        decoded = decode_request(request.inputs, self.format)
        parts: dict[str, Part] = {self.dense_input: decoded.dense}
        if decoded.ragged is None:
            matrix = decoded.keys.reshape(decoded.num_samples, sum(self.format.slots), 1)
            parts.update((name, matrix[:, own]) for name, own in self.columns.items())
        else:
            for (name, slots), bags in zip(self.parts, decoded.ragged, strict=True):
                parts[name] = RaggedBags(
                    decoded.keys, bags.begins, bags.ends, (decoded.num_samples, slots), bags.num_keys
                )
        outputs = self.outputs.resolve(request.outputs)
        return CheckedRequest(parts, outputs, decoded.num_samples, shapes=(decoded.ragged is None,))

    def generated(self, num_samples: int) -> Request:
        """One key per bag."""
        slots = self.format.slots
        offsets = [np.arange(num_samples * width + 1, dtype=np.int32) for width in slots]
        dense = np.zeros(num_samples * self.format.dense_dim, np.float32)
        keys = np.zeros(num_samples * sum(slots), self.format.key_type)
        return Request({DENSE: dense, KEYS: keys, OFFSETS: np.concatenate(offsets)})


class HpsLayout(RequestLayout):
    """KEYS and NUMKEYS: the keys of each table, answered with the vectors themselves, flat, table by table."""

    has_network = False

    def __init__(self, spec: ModelSpec, outputs: Outputs, *, network_inputs: frozenset[str], max_elements: int) -> None:
        super().__init__(spec, outputs, network_inputs=network_inputs, max_elements=max_elements)
        self._names = [f"{HPS_KEYS}/{table}" for table in range(len(spec.tables))]
        self._vectors = tuple(lookup.dense_input for lookup in spec.lookups)
        self.values = dict.fromkeys(self._names, "int64")

    def check(self, request: Request) -> CheckedRequest:
        for name, array in request.inputs.items():
            self._check_size(name, array)
        keys, offsets = decode_keys(request.inputs, len(self._names))
        parts: dict[str, Part] = {
            name: keys[offsets[table] : offsets[table + 1]] for table, name in enumerate(self._names)
        }
        outputs = self.outputs.resolve(request.outputs)
        return CheckedRequest(parts, outputs, num_samples=1, shapes=())

    def generated(self, num_samples: int) -> Request:
        """Zeros: this many keys per table."""
        num_tables = len(self._names)
        keys = np.zeros(num_samples * num_tables, np.int64)
        return Request({HPS_KEYS: keys, HPS_COUNTS: np.full(num_tables, num_samples, np.int32)})

    def computed(self, requests: Sequence[CheckedRequest]) -> tuple[str, ...]:  # noqa: ARG002
        """The vectors of each table."""
        return self._vectors

    def split(self, computed: Answer, requests: Sequence[CheckedRequest]) -> list[Answer]:
        """See RequestLayout. In a batch the vectors of one table are adjacent for all requests."""
        answers: list[Answer] = []
        begins = [0] * len(self._names)
        for request in requests:
            ends = [begin + request.inputs[name].shape[0] for begin, name in zip(begins, self._names, strict=True)]
            own = [computed[name][b:e] for name, b, e in zip(self._vectors, begins, ends, strict=True)]
            answers.append(dict.fromkeys(request.outputs, np.concatenate(own, axis=None)))
            begins = ends
        return answers

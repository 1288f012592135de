"""HugeCTR's and HPS's requests as a session sees them: decoded one by one, joined like any others."""

from __future__ import annotations

import numpy as np

from inference_session.batch import CheckedRequest, Part, Ragged, Request, RequestLayout
from inference_session.errors import ModelFormatError
from inference_session.formats.hugectr.csr import (
    DENSE,
    HPS_COUNTS,
    HPS_KEYS,
    KEYS,
    OFFSETS,
    RequestFormat,
    decode_keys,
    decode_request,
)
from inference_session.formats.native import ModelSpec
from inference_session.outputs import Outputs


class HugectrLayout(RequestLayout):
    """DES, CATCOLUMN and ROWINDEX: dense features, and per table one ragged bag for each slot of each sample."""

    def __init__(self, spec: ModelSpec, outputs: Outputs) -> None:
        options = dict(spec.layout_options)
        try:
            self._dense_input = str(options.pop("dense_input"))
            self._format = RequestFormat(**{**options, "slots": tuple(options["slots"])})
        except (KeyError, TypeError) as error:
            raise ModelFormatError(f"layout_options {dict(spec.layout_options)!r} do not describe 'hugectr'") from error
        self._outputs = outputs

    def check(self, request: Request) -> CheckedRequest:
        decoded = decode_request(request.inputs, self._format)
        parts: dict[str, Part] = {self._dense_input: decoded.dense}
        for table, (bags, slots) in enumerate(zip(decoded.bags, self._format.slots, strict=True)):
            shape = (decoded.num_samples, slots)
            parts[f"{KEYS}/{table}"] = Ragged(decoded.keys, bags.begins, bags.ends, shape)
        outputs = self._outputs.resolve(request.outputs)
        return CheckedRequest(parts, outputs, decoded.num_samples, shapes=())

    def made_up(self, num_samples: int) -> Request:
        """One key per bag."""
        slots = self._format.slots
        offsets = [np.arange(num_samples * width + 1, dtype=np.int32) for width in slots]
        dense = np.zeros(num_samples * self._format.dense_dim, np.float32)
        keys = np.zeros(num_samples * sum(slots), self._format.key_type)
        return Request({DENSE: dense, KEYS: keys, OFFSETS: np.concatenate(offsets)})


class HpsLayout(RequestLayout):
    """KEYS and NUMKEYS: the keys of each table, answered with the vectors themselves."""

    def __init__(self, spec: ModelSpec, outputs: Outputs) -> None:
        self._num_tables = len(spec.tables)
        self._outputs = outputs

    def check(self, request: Request) -> CheckedRequest:
        keys, offsets = decode_keys(request.inputs, self._num_tables)
        parts: dict[str, Part] = {
            f"{HPS_KEYS}/{table}": keys[offsets[table] : offsets[table + 1]] for table in range(self._num_tables)
        }
        outputs = self._outputs.resolve(request.outputs)
        return CheckedRequest(parts, outputs, num_samples=1, shapes=())

    def made_up(self, num_samples: int) -> Request:
        """So many keys per table."""
        keys = np.zeros(num_samples * self._num_tables, np.int64)
        return Request({HPS_KEYS: keys, HPS_COUNTS: np.full(self._num_tables, num_samples, np.int32)})

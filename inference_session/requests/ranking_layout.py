"""Requests that rank candidates: the inputs of the context have a row per context, the others a row per candidate."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from inference_session.errors import InvalidRequestError
from inference_session.model_spec import BLOCK_CONTEXT, CANDIDATES, ROW_CONTEXT, ModelSpec, NamedArrays
from inference_session.requests.batch import CheckedRequest, JoinedBatch, Part, RaggedBags, Request
from inference_session.requests.blocks import Blocks, arrange
from inference_session.requests.outputs import Outputs
from inference_session.requests.tensor_layout import TensorLayout

_MAX_ARRAYS = 4096
"""Arrays that a request is divided into, at most: each takes Python 0.2 us."""


class RankingLayout(TensorLayout):
    """A request carries the model's own inputs: for C contexts and N candidates, those of the context [C, …], the
    others [N, …], and CANDIDATES, int32 [C], says how many candidates each context has.

    Without it, one context has all candidates, and a request with as many contexts as candidates is an ordinary one.
    """

    def __init__(self, spec: ModelSpec, outputs: Outputs, *, network_inputs: frozenset[str], max_elements: int) -> None:
        super().__init__(spec, outputs, network_inputs=network_inputs, max_elements=max_elements)
        self._context = frozenset(spec.context)
        self._may_pad = spec.ranking is not None and spec.ranking.may_pad
        self._is_divided = spec.is_divided
        self._largest_input = spec.ranking.largest_input if spec.ranking else None
        self.replayed: tuple[tuple[int, int], ...] = ()
        """Contexts, and candidates of each, of the batches that the device replays. Others are filled up to them."""

    def check(self, request: Request) -> CheckedRequest:
        """See RequestLayout. Of ordinary requests, `num_candidates` is None."""
        given = request.inputs.get(CANDIDATES)
        arrays = {name: array for name, array in request.inputs.items() if name != CANDIDATES}
        inputs, shapes, (num_samples, num_contexts) = self._check_inputs(arrays)
        counts = _num_candidates(given, num_samples, num_contexts)
        is_ordinary = num_samples == num_contexts and bool((counts == 1).all())
        outputs = self.outputs.resolve(request.outputs)
        if is_ordinary:
            return CheckedRequest(inputs, outputs, num_samples, shapes)
        if not self._is_divided:
            return CheckedRequest(self._repeated(inputs, counts), outputs, num_samples, shapes, counts)
        if self._largest_input is not None and any(exceeds(array, self._largest_input) for array in inputs.values()):
            return CheckedRequest(self._repeated(inputs, counts), outputs, num_samples, shapes)
        return CheckedRequest(inputs, outputs, num_samples, (CANDIDATES, *shapes), counts)

    def generated_ranking(self, num_contexts: int, num_candidates: int) -> Request:
        """A request of zeros to warm up with, of this many contexts with this many candidates each."""
        total = num_contexts * num_candidates
        inputs = {e.name: self._zeros(e, num_contexts if e.context else total) for e in self._inputs}
        return Request({**inputs, CANDIDATES: np.full(num_contexts, num_candidates, np.int32)})

    def join(self, requests: Sequence[CheckedRequest]) -> JoinedBatch:
        """See RequestLayout. The rows of contexts are concatenated, and those of candidates too, in blocks."""
        batch = super().join(requests)
        if requests[0].num_candidates is None or not self._is_divided:
            return batch
        counts = np.concatenate([request.num_candidates for request in requests if request.num_candidates is not None])
        parts = {name: batch.parts(name) for name in requests[0].inputs}
        ragged = {name for name, part in parts.items() if isinstance(part[0], RaggedBags)}
        # Ragged bags are neither moved into blocks nor repeated.
        may_pad = self._may_pad and ragged <= self._context
        blocks = arrange(counts, may_pad=may_pad, replayed=() if ragged else self.replayed)
        if blocks.candidates is not None:
            contexts = np.minimum(np.arange(blocks.num_contexts), len(counts) - 1)
            is_filled = blocks.num_contexts > len(counts)
            for name in requests[0].inputs:
                if name not in self._context:
                    parts[name] = [batch.array(name)[blocks.candidates]]
                elif is_filled:
                    parts[name] = [batch.array(name)[contexts]]
        return self._in_blocks(parts, requests, blocks)

    def of_contexts(self, rows: Sequence[NamedArrays]) -> JoinedBatch:
        """A batch of contexts alone: for each, its inputs by name, [1, …]."""
        parts: dict[str, list[Part]] = {name: [row[name] for row in rows] for name in self._context}
        batch = JoinedBatch(parts, len(rows), tuple(parts[name][0].shape[1:] for name in sorted(parts)))
        self._even_out(batch)
        return batch

    def repeated(self, requests: Sequence[CheckedRequest]) -> list[CheckedRequest] | None:
        """See RequestLayout. None also where a network that is not divided has got them in this form."""
        if not self._is_divided:
            return None
        found = []
        for request in requests:
            if request.num_candidates is None:
                return None
            inputs = self._repeated(request.inputs, request.num_candidates)  # type: ignore[arg-type]  # not yet joined
            shapes = request.shapes[1:]  # type: ignore[index]  # CANDIDATES is the first
            found.append(CheckedRequest(inputs, request.outputs, request.num_samples, shapes))
        return found

    def _repeated(self, inputs: NamedArrays, counts: NDArray[np.int64]) -> NamedArrays:
        """The inputs, those of the context with a row for each of its candidates."""
        rows = np.repeat(np.arange(len(counts)), counts)
        return {name: array[rows] if name in self._context else array for name, array in inputs.items()}

    @staticmethod
    def _in_blocks(parts: dict[str, list[Part]], requests: Sequence[CheckedRequest], blocks: Blocks) -> JoinedBatch:
        shapes = (blocks.num_contexts, len(blocks.block_context), requests[0].shapes)
        batch = JoinedBatch(parts, len(blocks.row_context), shapes)
        batch.add({ROW_CONTEXT: blocks.row_context, BLOCK_CONTEXT: blocks.block_context})
        batch.output_rows = blocks.rows
        return batch


def gives_one_context(spec: ModelSpec, inputs: Mapping[str, Any]) -> bool:
    """Whether a request has one context, to which CANDIDATES assigns all candidates; the first inputs of both kinds say
    the same.
    """
    given = inputs.get(CANDIDATES)
    if len(inputs) != len(spec.inputs) + 1 or type(given) is not np.ndarray:
        return False
    if given.dtype != np.int32 or given.shape != (1,):
        return False
    firsts = [next(inputs.get(each.name) for each in spec.inputs if each.context == kind) for kind in (True, False)]
    lengths = [array.shape[:1] for array in firsts if type(array) is np.ndarray]
    return lengths == [(1,), (int(given[0]),)]


def split_by_context(spec: ModelSpec, inputs: Mapping[str, Any], max_elements: int) -> list[NDArray[Any]] | None:
    """Divide a request of several contexts: the arrays of a request for each of them. None: it cannot be divided.

    Compiled code takes these arrays, as if they were those of several requests.
    """
    given = inputs.get(CANDIDATES)
    if len(inputs) != len(spec.inputs) + 1 or type(given) is not np.ndarray or given.dtype != np.int32:
        return None
    if given.ndim != 1 or not 2 <= len(given) <= _MAX_ARRAYS // len(spec.inputs) or given.min() < 1:
        return None
    ends = np.cumsum(given, dtype=np.int64).tolist()
    arrays: list[tuple[NDArray[Any], bool]] = []
    for tensor in spec.inputs:
        array, length = inputs.get(tensor.name), len(given) if tensor.context else ends[-1]
        if type(array) is not np.ndarray or array.shape[:1] != (length,) or array.size > max_elements:
            return None
        arrays.append((array, tensor.context))
    return [
        array[i : i + 1] if is_contexts else array[begin:end]
        for i, (begin, end) in enumerate(pairwise([0, *ends]))
        for array, is_contexts in arrays
    ]


def exceeds(array: NDArray[Any], largest: float) -> bool:
    """Whether an array has a float that is larger, of either sign, or that is not a number."""
    if array.dtype.kind != "f":
        return False
    flat = array.reshape(-1)
    with np.errstate(over="ignore", invalid="ignore"):
        # No element is larger than the Euclidean norm, which takes a third of the time of a maximum.
        # As Python's floats: NumPy 2 compares in the type of the array, in which a limit may be infinite.
        return not (float(flat.dot(flat)) <= largest**2 or float(np.abs(flat).max(initial=0)) <= largest)


def _num_candidates(given: NDArray[Any] | None, num_samples: int, num_contexts: int) -> NDArray[np.int64]:
    """The number of candidates of each context, as the request says or implies."""
    if given is None:
        if num_contexts not in (1, num_samples):
            raise InvalidRequestError(
                f"the context's inputs have {num_contexts} rows and the others {num_samples}: input {CANDIDATES!r}, "
                f"int32 [{num_contexts}], must say how many of these belong to each context"
            )
        return np.full(num_contexts, num_samples if num_contexts == 1 else 1, np.int64)
    if given.dtype != np.int32 or given.shape != (num_contexts,):
        raise InvalidRequestError(
            f"input {CANDIDATES!r} is {given.dtype} {list(given.shape)}, expected int32 [{num_contexts}], a number for "
            "each context"
        )
    counts = given.astype(np.int64)
    if (counts < 0).any():
        raise InvalidRequestError(f"input {CANDIDATES!r} holds {counts.min()}, expected numbers of at least 0")
    if counts.sum() != num_samples:
        raise InvalidRequestError(
            f"input {CANDIDATES!r} has the sum {counts.sum()}, expected {num_samples}, the number of rows of the "
            "candidates' inputs"
        )
    return counts

"""The operands of Concat that DenseEngine.concat_inputs may replace, and the look-ups that fill what replaces them."""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import replace
from itertools import groupby

from inference_session.dense_engine.base import ConcatInput, ConcatOperands
from inference_session.model_spec import LookupSpec, ModelSpec


def concat_operands(spec: ModelSpec, *, on_gpu: bool) -> ConcatOperands | None:
    """Inputs of the model's network of which a concat input may be made: no request changes their widths. None: none.

    `on_gpu`: whether the network is on a GPU. On a processor, HugeCTR's requests gain too little by it.
    """
    blocks = [(name, [*lookups]) for name, lookups in groupby(spec.lookups, lambda lookup: lookup.dense_input)]
    names = [name for name, _ in blocks]
    widths = {name: _width(spec, block) for name, block in blocks if names.count(name) == 1}
    vectors = {name: width for name, width in widths.items() if width != 0}
    given = {name: width for name, width in _given(spec).items() if name not in names}
    # Numbers beyond the limit of such a model get the original's answers to the last bit: sums keep their order.
    is_bitwise = spec.ranking is not None and spec.ranking.largest_input is not None
    has_layout = spec.has_own_inputs or (on_gpu and spec.takes_hugectr_requests)
    usable = spec.batched and has_layout and vectors and given and not is_bitwise
    return ConcatOperands(vectors, given) if usable else None


def with_concat_inputs(spec: ModelSpec, concat_inputs: Collection[ConcatInput]) -> ModelSpec:
    """The model whose look-ups fill concat inputs, in place of those that these replace."""
    names = {vectors: each.name for each in concat_inputs for vectors in each.vectors}
    lookups = tuple(
        replace(lookup, dense_input=names[lookup.dense_input], joined=True) if lookup.dense_input in names else lookup
        for lookup in spec.lookups
    )
    return replace(spec, lookups=lookups)


def _given(spec: ModelSpec) -> dict[str, int]:
    """What requests give, by the network's names: float32, and elements of a sample."""
    if spec.takes_hugectr_requests:
        options = spec.layout_options
        return {str(options.get("dense_input")): options.get("dense_dim") or 0}  # the layout refuses other types
    floats = [tensor for tensor in spec.inputs if tensor.dtype == "float32"]
    return {tensor.name: width for tensor in floats if (width := _elements(tensor.shape))}


def _width(spec: ModelSpec, lookups: Collection[LookupSpec]) -> int | None:
    """Elements that look-ups write for each sample; 0: that depends on the request; None: on keys that are computed."""
    widths = [_width_of(spec, lookup) for lookup in lookups]
    if 0 in widths:
        return 0
    return None if None in widths else sum(filter(None, widths))


def _width_of(spec: ModelSpec, lookup: LookupSpec) -> int | None:
    dim = spec.table_in(lookup.table).embedding_dim
    shape = next((tensor.shape for tensor in spec.inputs if tensor.name == lookup.keys), None)
    if lookup.bags is not None:
        return 0
    if spec.takes_hugectr_requests:
        return 0 if lookup.pooling == "none" else dim * _slots(spec).get(lookup.keys, 0)
    if shape is None:
        return None if lookup.pooling == "none" else dim
    if lookup.pooling != "none":
        return dim if len(shape) == 2 else 0
    if lookup.columns is not None:
        return dim * (lookup.columns[1] - lookup.columns[0])
    return dim * _elements(shape)


def _slots(spec: ModelSpec) -> dict[str, int]:
    """The bags of a sample of each table, by the names of keys, where requests are HugeCTR's."""
    # Imported where needed: it takes half a second to load.
    from inference_session.requests.hugectr_csr import KEYS

    slots = spec.layout_options.get("slots")
    named = enumerate(slots if isinstance(slots, (list, tuple)) else ())
    return {f"{KEYS}/{table}": number for table, number in named if isinstance(number, int)}


def _elements(shape: tuple[int, ...]) -> int:
    """Of a sample; 0 where that depends on the request."""
    return math.prod(shape[1:]) if shape and min(shape[1:], default=1) > 0 else 0

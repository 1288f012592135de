"""Which layout a model's requests have."""

from __future__ import annotations

from inference_session.model_spec import ModelSpec
from inference_session.requests.batch import RequestLayout
from inference_session.requests.ranking_layout import RankingLayout
from inference_session.requests.tensor_layout import TensorLayout


def layout_of(spec: ModelSpec) -> type[RequestLayout]:
    """The kind of layout."""
    if spec.has_own_inputs:
        return TensorLayout if spec.ranking is None else RankingLayout
    # Imported where needed: their dependencies take half a second to load.
    from inference_session.requests.hugectr_layout import HpsLayout, HugectrLayout

    return HpsLayout if spec.answers_vectors else HugectrLayout

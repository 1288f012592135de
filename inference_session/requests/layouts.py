"""Which layout a model's requests have: the one place that knows layouts by their names in session.json."""

from __future__ import annotations

from inference_session.model_spec import ModelSpec
from inference_session.requests.batch import RequestLayout
from inference_session.requests.ranking_layout import RankingLayout
from inference_session.requests.tensor_layout import TensorLayout


def layout_of(spec: ModelSpec) -> type[RequestLayout]:
    """The kind of layout."""
    if spec.layout == "tensors":
        return TensorLayout if spec.ranking is None else RankingLayout
    # Imported where needed: what they build on takes half a second to load.
    from inference_session.requests.hugectr_layout import HpsLayout, HugectrLayout

    return {"hugectr": HugectrLayout, "hps": HpsLayout}[spec.layout]

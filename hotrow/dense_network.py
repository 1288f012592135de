"""The engine and precision that compute a version's dense network."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from inference_session.config import SessionConfig
from inference_session.model_spec import DENSE_FILE, RANKING_FILE, ModelSpec
from triton_backend.repository.model_config import configured_session

SETTING = "dense_precision"
ENGINE_SETTING = "dense_engine"


class DenseSettings(NamedTuple):
    """A model's settings for its dense network."""

    precision: str
    engine: str

    @classmethod
    def of(cls, settings: Mapping[str, Any]) -> DenseSettings:
        """The settings of a model, with defaults for those not set."""
        default = SessionConfig()
        precision = settings.get(SETTING, default.dense_precision)
        return cls(str(precision), str(settings.get(ENGINE_SETTING, default.dense_engine)))

    @property
    def engine_name(self) -> str:
        """The library that computes the network, as text for people."""
        if self.precision == "bfloat16":
            return "OpenVINO"
        return "TensorRT" if self.engine == "tensorrt" else "ONNX Runtime"


def describe_dense_network(spec: ModelSpec, version_dir: Path) -> dict[str, Any] | None:
    """Engine, precision, and for bfloat16 the matrix products computed in it; None: there is no network."""
    if not (version_dir / DENSE_FILE).exists():
        return None
    config = configured_session(spec, version_dir)
    settings = DenseSettings(config.dense_precision, config.dense_engine)
    precision = settings.precision
    facts: dict[str, Any] = {"engine": settings.engine_name, "precision": precision}
    if precision == "bfloat16":
        # Imported where needed: ONNX takes a while to load.
        from inference_session.dense_engine.network_file import NetworkFile
        from inference_session.dense_engine.openvino import read_division

        served = RANKING_FILE if spec.is_divided else DENSE_FILE
        division = read_division(NetworkFile(version_dir / served))
        facts |= {"matrix_products": division.num_products, "all_matrix_products": division.num_all_products}
    return facts

"""What computes the dense network of a version: which engine, how exactly."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from inference_session.config import SessionConfig
from inference_session.model_spec import DENSE_FILE, RANKING_FILE, ModelSpec
from triton_backend.repository.model_config import configured_session

SETTING = "dense_precision"


def configured_precision(*sources: Mapping[str, Any]) -> str:
    """`dense_precision` as these settings say, of which the first comes first."""
    return str(next((source[SETTING] for source in sources if SETTING in source), SessionConfig.dense_precision))


def engine_name(precision: str) -> str:
    """What computes at that precision."""
    return "OpenVINO" if precision == "bfloat16" else "ONNX Runtime"


def describe_dense_network(spec: ModelSpec, version_dir: Path) -> dict[str, Any] | None:
    """Engine, precision, and for bfloat16 the matrix products that are computed so; None: there is no network."""
    if not (version_dir / DENSE_FILE).exists():
        return None
    precision = configured_session(spec, version_dir).dense_precision
    facts: dict[str, Any] = {"engine": engine_name(precision), "precision": precision}
    if precision == "bfloat16":
        # Imported where needed: ONNX takes a while to load.
        from inference_session.dense_engine.openvino import read_division

        served = DENSE_FILE if spec.ranking is None else RANKING_FILE
        division = read_division(version_dir / served)
        facts |= {"matrix_products": division.num_products, "all_matrix_products": division.num_all_products}
    return facts

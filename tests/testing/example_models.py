"""Models of the size that users begin with: two of HugeCTR, and two of ONNX, with requests and their answers.

They are made for the tests in seconds. Where the environment variable HOTROW_REAL_DATA names a folder with others
(`models/<folder>/...`, the same files), the same tests run on those.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from tests.testing.hugectr_models import write_cross_network, write_wide_and_deep
from tests.testing.onnx_recommenders import write_multi_task, write_pairwise

REAL_DATA = "HOTROW_REAL_DATA"


@dataclass(frozen=True)
class ExampleModels:
    """Their folders, not to be written to."""

    wide_and_deep: Path
    """hugectr_wdl: `hugectr_models.py` describes its content."""
    cross_network: Path
    """hugectr_dcn."""
    multi_task: Path
    """model.onnx, requests.npz, expected.npz: three tasks over 22 inputs."""
    pairwise: Path
    """The same files: one matrix of ids, interactions of pairs."""

    @property
    def onnx(self) -> tuple[Path, Path]:
        """The folders of the two ONNX models."""
        return self.multi_task, self.pairwise


def example_models(folder: Path) -> ExampleModels:
    """Write the models into an empty folder, or take those that the environment names."""
    if real := os.environ.get(REAL_DATA):
        names = ("hugectr_wdl", "hugectr_dcn", "kuairand_mmoe_torch", "kuairand_dlrm_jax")
        return ExampleModels(*(Path(real) / "models" / name for name in names))
    models = ExampleModels(*(folder / name for name in ("hugectr_wdl", "hugectr_dcn", "multi_task", "pairwise")))
    write_wide_and_deep(models.wide_and_deep)
    write_cross_network(models.cross_network)
    write_multi_task(models.multi_task)
    write_pairwise(models.pairwise)
    return models

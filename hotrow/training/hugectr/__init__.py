"""HugeCTR's training API on PyTorch: existing scripts train models that hotrow serves. Needs `hotrow[torch]`.

    from hotrow.training import hugectr          # instead of `import hugectr`

or, without a change, `python -m hotrow.training.hugectr SCRIPT.py`. docs/reference/hugectr-training.md says
what each call does here.

    model.py      `Model`: what a script builds, trains, evaluates and saves; session.py is that of releases before 3.1
    arguments/    the classes and enumerations that a script gives to it
    graph/        its layers, and HugeCTR's JSON of them
    readers/      training data, batch by batch
    trainer/      network, tables, optimizers, losses and metrics
    snapshots/    the files that it is saved to, and goes on from
    inference.py, tools.py    HugeCTR's modules of these names
"""

from __future__ import annotations

import sys
from importlib import import_module
from typing import TYPE_CHECKING, Any

from hotrow.training.hugectr import inference, tools
from hotrow.training.hugectr.arguments.callbacks import TrainingCallback
from hotrow.training.hugectr.arguments.embedding_collection import (
    EmbeddingCollectionConfig,
    EmbeddingPlanner,
    EmbeddingTableConfig,
    EmbeddingTablePlaceHolder,
)
from hotrow.training.hugectr.arguments.enums import (
    Activation_t,
    Alignment_t,
    AllReduceAlgo,
    Check_t,
    CommunicationStrategy,
    CommunicationType,
    CompressionStrategy,
    DataReaderSparse_t,
    DataReaderType_t,
    DeviceLayout,
    Distribution_t,
    Embedding_t,
    FcPosition_t,
    GroupLayer_t,
    HybridEmbeddingType,
    Initializer_t,
    Layer_t,
    LrPolicy_t,
    MetricsRawType,
    MetricsType,
    Optimizer_t,
    PowerLaw_t,
    Regularizer_t,
    SourceType_t,
    Tensor_t,
    TrainPSType_t,
    Update_t,
)
from hotrow.training.hugectr.arguments.parameters import (
    DataReaderParams,
    DataReaderSparseParam,
    DenseLayer,
    GroupDenseLayer,
    Input,
    OptParamsPy,
    Solver,
    SparseEmbedding,
)
from hotrow.training.hugectr.arguments.tuning import (
    AsyncParam,
    DenseLayerComputeConfig,
    DenseLayerSwitchs,
    HybridEmbeddingParam,
    MemoryCacheConfig,
    TrainingCacheParams,
)
from hotrow.training.hugectr.tools import DataGenerator, DataGeneratorParams
from hotrow.training.hugectr.trainer.schedule import LearningRateScheduler
from inference_session.errors import ConfigurationError
from inference_session.importers.hugectr import data_source as data
from inference_session.importers.hugectr.data_source import (
    DataSource,
    DataSourceParams,
    DataSourceType_t,
    FileSystemType_t,
)

if TYPE_CHECKING:
    from hotrow.training.hugectr.model import Model

CreateSolver = Solver
CreateOptimizer = OptParamsPy
CreateETC = CreateMOS = TrainingCacheParams
CreateHMemCache = MemoryCacheConfig

__all__ = [
    "Activation_t", "Alignment_t", "AllReduceAlgo", "AsyncParam", "Check_t", "CommunicationStrategy",
    "CommunicationType", "CompressionStrategy", "CreateETC", "CreateHMemCache", "CreateMOS", "CreateOptimizer",
    "CreateSolver", "DataGenerator", "DataGeneratorParams", "DataReaderParams", "DataReaderSparseParam",
    "DataReaderSparse_t", "DataReaderType_t", "DataSource", "DataSourceParams", "DataSourceType_t", "DenseLayer",
    "DenseLayerComputeConfig", "DenseLayerSwitchs", "DeviceLayout", "Distribution_t", "EmbeddingCollectionConfig",
    "EmbeddingPlanner", "EmbeddingTableConfig", "EmbeddingTablePlaceHolder", "Embedding_t", "FcPosition_t",
    "FileSystemType_t", "GroupDenseLayer", "GroupLayer_t", "HybridEmbeddingParam", "HybridEmbeddingType",
    "Initializer_t", "Input", "Layer_t", "LearningRateScheduler", "LrPolicy_t", "MetricsRawType", "MetricsType",
    "Model", "OptParamsPy", "Optimizer_t", "PowerLaw_t", "Regularizer_t", "Solver", "SourceType_t", "SparseEmbedding",
    "Tensor_t", "TrainPSType_t", "TrainingCallback", "Update_t", "data", "inference", "install", "tools",
]  # fmt: skip

_OF_SESSIONS = frozenset({"Session", "get_learning_rate_scheduler", "solver_parser_helper"})
"""Names of releases before 3.1."""


def __getattr__(name: str) -> Any:
    if name in ("Model", "ModelPerfExt"):  # the latter is that of the samples of DLRM in releases 3.3 to 3.7
        return _model_class()
    if name in _OF_SESSIONS:
        _model_class()
        return getattr(import_module("hotrow.training.hugectr.session"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def _model_class() -> Any:
    """The class `Model`, loaded when it is first used, as it imports PyTorch."""
    try:
        from hotrow.training.hugectr.model import Model
    except ModuleNotFoundError as missing:
        if (missing.name or "").partition(".")[0] != "torch":
            raise
        raise ConfigurationError("training.hugectr needs the package `torch`: pip install 'hotrow[torch]'") from missing
    globals()["Model"] = Model
    return Model


def install() -> None:
    """Make `import hugectr` and `import hugectr2onnx` mean our packages, and `from mpi4py import MPI` work everywhere.

    Raises:
        ConfigurationError: PyTorch is not installed.
    """
    from hotrow.training import hugectr2onnx
    from hotrow.training.hugectr.absent_mpi import provide_mpi

    _model_class()
    package = sys.modules[__name__]
    for name, module in (("", package), (".inference", inference), (".data", data), (".tools", tools)):
        sys.modules[f"hugectr{name}"] = module
    for name, converter in (
        ("", hugectr2onnx),
        (".converter", hugectr2onnx.converter),
        (".hugectr_loader", hugectr2onnx.hugectr_loader),
    ):
        sys.modules[f"hugectr2onnx{name}"] = converter
    provide_mpi()

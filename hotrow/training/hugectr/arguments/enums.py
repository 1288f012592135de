"""HugeCTR's enumerations, by its names. A value is what the graph JSON calls the member."""

# ruff: noqa: N801  HugeCTR's names

from __future__ import annotations

from enum import Enum


class Check_t(Enum):
    """How files of the Norm format are checked."""

    Sum = "Sum"
    Non = "None"


class DataReaderType_t(Enum):
    """Formats of training data."""

    Norm = "Norm"
    Raw = "Raw"
    Parquet = "Parquet"
    RawAsync = "RawAsync"


class DataReaderSparse_t(Enum):
    """Kinds of sparse inputs of releases before 3.1; without effect."""

    Distributed = "Distributed"
    Localized = "Localized"


class SourceType_t(Enum):
    """Kinds of sources; without effect."""

    FileList = "FileList"
    Mmap = "Mmap"
    Parquet = "Parquet"


class Embedding_t(Enum):
    """Kinds of embedding layers; those that train differ in HugeCTR in where rows are, not in what is computed."""

    DistributedSlotSparseEmbeddingHash = "DistributedSlotSparseEmbeddingHash"
    LocalizedSlotSparseEmbeddingHash = "LocalizedSlotSparseEmbeddingHash"
    LocalizedSlotSparseEmbeddingOneHot = "LocalizedSlotSparseEmbeddingOneHot"
    HybridSparseEmbedding = "HybridSparseEmbedding"


class Initializer_t(Enum):
    """First values of weights."""

    Default = "Default"
    Uniform = "Uniform"
    XavierNorm = "XavierNorm"
    XavierUniform = "XavierUniform"
    Zero = "Zero"


class GroupLayer_t(Enum):
    """Groups of layers."""

    GroupFusedInnerProduct = "GroupFusedInnerProduct"


class Layer_t(Enum):
    """Kinds of dense layers, those that are refused among them."""

    Add = "Add"
    BatchNorm = "BatchNorm"
    BinaryCrossEntropyLoss = "BinaryCrossEntropyLoss"
    Cast = "Cast"
    Concat = "Concat"
    CrossEntropyLoss = "CrossEntropyLoss"
    DotProduct = "DotProduct"
    Dropout = "Dropout"
    ELU = "ELU"
    ElementwiseMultiply = "ElementwiseMultiply"
    FmOrder2 = "FmOrder2"
    FusedInnerProduct = "FusedInnerProduct"
    FusedReshapeConcat = "FusedReshapeConcat"
    FusedReshapeConcatGeneral = "FusedReshapeConcatGeneral"
    GRU = "GRU"
    Gather = "Gather"
    InnerProduct = "InnerProduct"
    Interaction = "Interaction"
    LayerNorm = "LayerNorm"
    MLP = "MLP"
    MatrixMultiply = "MatrixMultiply"
    MultiCross = "MultiCross"
    MultiCrossEntropyLoss = "MultiCrossEntropyLoss"
    MultiHeadAttention = "MultiHeadAttention"
    PReLU_Dice = "PReLU_Dice"
    ReLU = "ReLU"
    ReLUHalf = "ReLUHalf"
    ReduceMean = "ReduceMean"
    ReduceSum = "ReduceSum"
    Reshape = "Reshape"
    Scale = "Scale"
    Select = "Select"
    SequenceMask = "SequenceMask"
    Sigmoid = "Sigmoid"
    Slice = "Slice"
    Softmax = "Softmax"
    Sub = "Sub"
    WeightMultiply = "WeightMultiply"


class LrPolicy_t(Enum):
    """How the learning rate changes; HugeCTR has one policy, with warm-up and decay."""

    fixed = "fixed"


class Optimizer_t(Enum):
    """Optimizers."""

    Adam = "Adam"
    AdaGrad = "AdaGrad"
    MomentumSGD = "MomentumSGD"
    Nesterov = "Nesterov"
    SGD = "SGD"
    Ftrl = "Ftrl"


class Update_t(Enum):
    """Which rows of a table an optimizer changes in a step."""

    Local = "Local"
    Global = "Global"
    LazyGlobal = "LazyGlobal"


class Activation_t(Enum):
    """Activation of FusedInnerProduct."""

    Relu = "Relu"
    Non = "None"


class FcPosition_t(Enum):
    """Position of a FusedInnerProduct in its group; without effect."""

    Non = "None"
    Head = "Head"
    Body = "Body"
    Tail = "Tail"
    Isolated = "Isolated"


class Regularizer_t(Enum):
    """Regularizers of losses."""

    L1 = "L1"
    L2 = "L2"


class Alignment_t(Enum):
    """Alignment of RawAsync."""

    Auto = "Auto"
    Non = "None"


class MetricsType(Enum):
    """Metrics of evaluation."""

    AUC = "AUC"
    AverageLoss = "AverageLoss"
    HitRate = "HitRate"
    NDCG = "NDCG"
    SMAPE = "SMAPE"


class MetricsRawType(Enum):
    """The input of metrics; without effect."""

    Loss = "Loss"
    Pred = "Pred"
    Label = "Label"


class Tensor_t(Enum):
    """Which values of a tensor `check_out_tensor` returns."""

    Train = "Train"
    Evaluate = "Evaluate"


class DeviceLayout(Enum):
    """Layout of devices; without effect."""

    LocalFirst = "LocalFirst"
    NodeFirst = "NodeFirst"


class AllReduceAlgo(Enum):
    """How gradients are summed; without effect."""

    OneShot = "OneShot"
    NCCL = "NCCL"


class TrainPSType_t(Enum):
    """Parameter servers of the embedding training cache; without effect."""

    Staged = "Staged"
    Cached = "Cached"


class CommunicationType(Enum):
    """Links of hybrid embeddings; without effect."""

    IB_NVLink_Hier = "IB_NVLink_Hier"
    IB_NVLink = "IB_NVLink"
    NVLink_SingleNode = "NVLink_SingleNode"


class HybridEmbeddingType(Enum):
    """Kinds of hybrid embeddings; without effect."""

    Distributed = "Distributed"


class Distribution_t(Enum):
    """How keys that DataGenerator makes are distributed."""

    Uniform = "Uniform"
    PowerLaw = "PowerLaw"


class PowerLaw_t(Enum):
    """Exponents of the power law: 0.9, 1.1, 1.3, or `alpha`."""

    Long = "Long"
    Medium = "Medium"
    Short = "Short"
    Specific = "Specific"


class CommunicationStrategy(Enum):
    """Links of embedding collections; without effect."""

    Uniform = "Uniform"
    Hierarchical = "Hierarchical"


class CompressionStrategy(Enum):
    """What embedding collections send between GPUs; without effect."""

    Reduction = "Reduction"
    Unique = "Unique"

"""Small live models, and comparisons with their exports."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from hotrow import training
from inference_session import InferenceSession

Lists = Sequence[Sequence[int]]


def features(lists: Mapping[str, Lists], weights: Mapping[str, Sequence[Sequence[float]]] | None = None) -> Any:
    """A KeyedJaggedTensor of lists of ids by feature."""
    from torchrec import KeyedJaggedTensor

    values = [key for of_feature in lists.values() for ids in of_feature for key in ids]
    lengths = [len(ids) for of_feature in lists.values() for ids in of_feature]
    factors = None
    if weights is not None:
        factors = torch.tensor([w for name in lists for ws in weights[name] for w in ws], dtype=torch.float32)
    return KeyedJaggedTensor(
        keys=list(lists),
        values=torch.tensor(values, dtype=torch.int64),
        lengths=torch.tensor(lengths, dtype=torch.int32),
        weights=factors,
    )


def random_lists(random: np.random.Generator, num_samples: int, num_rows: int, longest: int = 5) -> list[list[int]]:
    """Lists of 0 to `longest` ids, duplicates among them."""
    counts = random.integers(0, longest + 1, num_samples)
    return [random.integers(0, num_rows, count).tolist() for count in counts]


def padded_matrix(lists: Lists, pad: int = -1) -> NDArray[np.int64]:
    """The lists as clients send them."""
    width = max(1, *map(len, lists))
    return np.array([[*ids, *[pad] * (width - len(ids))] for ids in lists], np.int64)


def bag_configs(num_tables: int = 2, *, dim: int = 8, rows: int = 40, means: Sequence[int] = (1,)) -> list[Any]:
    """Tables t0, t1, … of features f0, f1, …; some are pooled by their mean."""
    from torchrec import EmbeddingBagConfig, PoolingType

    return [
        EmbeddingBagConfig(
            name=f"t{i}",
            embedding_dim=dim,
            num_embeddings=rows + 10 * i,
            feature_names=[f"f{i}"],
            pooling=PoolingType.MEAN if i in means else PoolingType.SUM,
        )
        for i in range(num_tables)
    ]


class Clicks(nn.Module):
    """A collection of bags and dense features in, one probability out."""

    def __init__(self, collection: nn.Module, width: int, num_dense: int = 3) -> None:
        super().__init__()
        self.bags = collection
        self.layers = nn.Sequential(nn.Linear(width + num_dense, 8), nn.ReLU(), nn.Dropout(0.5), nn.Linear(8, 1))

    def forward(self, dense: Tensor, sparse: Any) -> Tensor:
        pooled = self.bags(sparse)
        pooled = pooled[0] if isinstance(pooled, tuple) else pooled
        names = sorted(pooled.keys())
        vectors = [pooled[name] for name in names]
        return torch.sigmoid(self.layers(torch.cat([dense, *vectors], dim=1)))


def answers(
    directory: Path, inputs: Mapping[str, NDArray[Any]], outputs: Sequence[str] = ("click",)
) -> list[NDArray[Any]]:
    """What a version answers."""
    with InferenceSession.open(directory, device="cpu") as session:
        found = session.run(dict(inputs), list(outputs))
    return [found[name] for name in outputs]


def live(model: nn.Module, *args: Any) -> NDArray[Any]:
    """The model's output in evaluation mode."""
    mode = model.training
    model.eval()
    with torch.no_grad():
        output = model(*args)
    model.train(mode)
    return output.cpu().numpy()


def export(model: nn.Module, folder: Path, **options: Any) -> Path:
    """Export as model `ctr`; returns the version directory."""
    options = {"outputs": ["click"], **options}
    version = training.export(model, repository=folder, name="ctr", **options)
    return folder / "ctr" / str(version)


def bag_collection(num_tables: int = 2) -> Any:
    """An EmbeddingBagCollection of several tables."""
    from torchrec import EmbeddingBagCollection

    return EmbeddingBagCollection(bag_configs(num_tables))


def batch(seed: int, num_samples: int = 6, num_tables: int = 2, rows: int = 40) -> tuple[Any, Any]:
    """Random dense features and ids of some samples."""
    random = np.random.default_rng(seed)
    lists = {f"f{i}": random_lists(random, num_samples, rows) for i in range(num_tables)}
    return torch.from_numpy(random.random((num_samples, 3)).astype(np.float32)), features(lists)


def train(model: nn.Module, optimizer: Any, seed: int, **options: Any) -> None:
    """One step on a random batch."""
    model(*batch(seed, **options)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()


def exported(model: nn.Module, folder: Path, name: str, **options: Any) -> Path:
    """Export a model with padded inputs under a name; returns the version directory."""
    version = training.export(
        model,
        example=batch(0, **options),
        inputs=training.padded(max_len=5),
        outputs=["click"],
        repository=folder,
        name=name,
    )
    return folder / name / str(version)


def serves(session: InferenceSession, expected: dict[str, Any]) -> bool:
    """Whether a session serves these rows, by table, bit by bit."""
    return all(np.array_equal(session.lookup(name, np.arange(len(rows))), rows) for name, rows in expected.items())


def table_rows(model: Any) -> dict[str, Any]:
    """The rows of all tables of a live model."""
    return {name: bag.weight.detach().numpy() for name, bag in model.bags.embedding_bags.items()}


def managed_collisions(*, bags: bool = True, **options: Any) -> Any:
    """A collection whose ids are mapped to rows as they come; options are those of MCHManagedCollisionModule."""
    from torchrec import EmbeddingBagCollection, EmbeddingCollection, EmbeddingConfig
    from torchrec.modules.mc_embedding_modules import (
        ManagedCollisionEmbeddingBagCollection,
        ManagedCollisionEmbeddingCollection,
    )
    from torchrec.modules.mc_modules import (
        DistanceLFU_EvictionPolicy,
        ManagedCollisionCollection,
        MCHManagedCollisionModule,
    )

    configs: Any = bag_configs()
    if not bags:
        configs = [
            EmbeddingConfig(c.num_embeddings, c.embedding_dim, c.name, feature_names=c.feature_names) for c in configs
        ]
    collisions = {
        config.name: MCHManagedCollisionModule(
            zch_size=config.num_embeddings,
            device=torch.device("cpu"),
            eviction_policy=DistanceLFU_EvictionPolicy(),
            eviction_interval=1,
            **options,
        )
        for config in configs
    }
    collection = ManagedCollisionCollection(collisions, configs)
    if bags:
        return ManagedCollisionEmbeddingBagCollection(EmbeddingBagCollection(configs), collection)
    return ManagedCollisionEmbeddingCollection(EmbeddingCollection(configs), collection)


class MaskedMean(nn.Module):
    """The mean of a history in which 0 means nothing, and numbers that are nearly 0 or 1, as users write them."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.items = nn.Embedding(2000, 4)

    def forward(self, history: Any) -> Any:
        mask = (history != 0).float().unsqueeze(-1)
        mean = (self.items(history) * mask).sum(1) / (mask.sum(1) + 1e-9)
        return torch.cat([mean, torch.log(torch.relu(mean) + 1e-9), mean * 1.000005], dim=1)


class BranchedMean(MaskedMean):
    """The same, or twice as much, in branches."""

    def forward(self, history: Any) -> Any:
        mask = (history != 0).float().unsqueeze(-1)
        total, count = (self.items(history) * mask).sum(1), mask.sum(1)
        return torch.cond(
            total.sum() > 1e9, lambda t, c: t * 2 / (c + 1e-9), lambda t, c: t / (c + 1e-9), (total, count)
        )


HISTORIES = np.array([[5, 7, 0], [0, 0, 0], [1999, 0, 0], [0, 3, 0]])
"""One of which has nothing in it."""

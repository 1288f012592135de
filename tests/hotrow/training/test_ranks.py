"""Several ranks export one version: each writes its own rows, and the version has all of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("torchrec")

from hotrow import training  # noqa: E402
from inference_session import InferenceSession  # noqa: E402
from inference_session.errors import HotrowError  # noqa: E402
from tests.testing import training_jobs as jobs  # noqa: E402
from tests.testing import training_models as models  # noqa: E402

pytestmark = [pytest.mark.training, pytest.mark.filterwarnings("ignore")]

WAYS = ["row_wise", "table_wise", "column_wise", "data_parallel"]


def _model() -> Any:
    from torchrec import EmbeddingBagCollection

    torch.manual_seed(0)
    return models.Clicks(EmbeddingBagCollection(models.bag_configs(4, dim=8)), 32)


def _batch(seed: int, num_samples: int = 6) -> tuple[Any, dict[str, list[list[int]]]]:
    random = np.random.default_rng(seed)
    lists = {f"f{i}": models.random_lists(random, num_samples, 40) for i in range(4)}
    return torch.from_numpy(random.random((num_samples, 3)).astype(np.float32)), lists


def _train_and_export(rank: int, folder: Path) -> None:
    """Train differently sharded tables; save the answers of rank 0, and all rows, next to the version."""
    model = jobs.distributed(_model(), {"bags": {f"t{i}": way for i, way in enumerate(WAYS)}})
    optimizer = torch.optim.SGD([p for name, p in model.named_parameters() if "layers" in name], lr=0.1)
    for step in range(3):
        dense, lists = _batch(10 * step + rank)
        model(dense, models.features(lists)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    dense, lists = _batch(rank)
    version = training.export(
        model,
        example=(dense, models.features(lists)),
        inputs=training.padded(max_len=5),
        outputs=["click"],
        repository=folder,
        name="ctr",
    )
    assert version == 1
    answers = models.live(model, dense, models.features(lists))
    rows = {name: jobs.gathered(model, f"bags.embedding_bags.{name}.weight") for name in ("t0", "t1", "t2", "t3")}
    if rank == 0:
        np.savez(folder / "live.npz", click=answers, **rows)


def test_tables_sharded_in_every_way_arrive_whole(tmp_path: Path) -> None:
    """By rows, columns, tables and replicated, after steps of training, from 2 ranks."""
    jobs.run_ranks(_train_and_export, tmp_path)

    live = np.load(tmp_path / "live.npz")
    dense, lists = _batch(0)
    sent = {"dense": dense.numpy(), **{name: models.padded_matrix(ids) for name, ids in lists.items()}}
    (found,) = models.answers(tmp_path / "ctr" / "1", sent)
    np.testing.assert_allclose(found, live["click"], atol=1e-6)
    with InferenceSession.open(tmp_path / "ctr" / "1", device="cpu") as session:
        for table in session.spec.tables:
            assert np.array_equal(session.lookup(table.name, np.arange(table.num_rows)), live[table.name])


def _fail_on_one_rank(rank: int, folder: Path) -> None:
    model = _model()
    dense, lists = _batch(rank)
    example = (dense, models.features(lists)) if rank == 0 else dense
    with pytest.raises(HotrowError, match="does not match forward"):
        training.export(
            model,
            example=example,
            inputs=training.padded(max_len=5),
            outputs=["click"],
            repository=folder,
            name="ctr",
        )


def test_what_fails_on_one_rank_fails_on_all(tmp_path: Path) -> None:
    """No rank waits for the other, and no version appears."""
    jobs.run_ranks(_fail_on_one_rank, tmp_path)

    assert not list(tmp_path.rglob("session.json"))

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
from tests.testing.broker import Broker  # noqa: E402
from tests.testing.servers import wait_until  # noqa: E402

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


# Managed collisions

IDS = np.array([-(2**63), -7, -1, 0, 1, 5, 2**40, 2**61, 2**62 - 1, 2**62, 2**62 + 9, 2**63 - 2, 2**63 - 1])


def _hashed(ids: Any, size: int) -> Any:
    return torch.remainder(ids * 7 + 3, size)


COLLISIONS: dict[str, dict[str, Any]] = {
    "raw": {},
    "hashed": {"input_hash_size": 4001, "input_hash_func": _hashed},
    "small": {"input_hash_size": 41},
}
"""Options of the modules: ids as they are, hashed to fewer, and most of them beyond the ranges of the shards."""


def _id_lists(seed: int) -> dict[str, list[list[int]]]:
    random = np.random.default_rng(seed)
    lists = {f"f{i}": models.random_lists(random, 9, 13 + 100) for i in range(2)}
    return {name: [[int(IDS[i]) if i < 13 else i for i in ids] for ids in part] for name, part in lists.items()}


def _collide(rank: int, folder: Path, options: str, url: str) -> None:
    """Train, export, train on while a publisher follows; save answers of the first moment and rows of the second."""
    # FBGEMM empties rows that change their ids on GPUs only; here they keep their vectors.
    library = torch.library.Library("fbgemm", "IMPL")
    library.impl("reset_weight_momentum", lambda *_arguments: None, "CPU")
    torch.manual_seed(0)
    plain = models.Clicks(models.managed_collisions(**COLLISIONS[options]), 16)
    model: Any = jobs.distributed(plain, {"bags": {"t0": "row_wise", "t1": "row_wise"}})
    optimizer = torch.optim.SGD([p for name, p in model.named_parameters() if "layers" in name], lr=0.0)
    dense = torch.zeros(9, 3)

    def train(seed: int) -> None:
        model.train()(dense, models.features(_id_lists(2 * seed + rank))).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    for seed in range(3):
        train(seed)
    example = (dense, models.features(_id_lists(50 + rank)))
    forms = training.padded(max_len=5, pad=-99)
    training.export(model, example=example, inputs=forms, outputs=["click"], repository=folder, name="ctr")
    answers = [models.live(model, dense, models.features(_id_lists(seed))) for seed in range(40)]
    with training.UpdatePublisher(model, url, "ctr") as updates:
        for seed in range(3, 6):
            train(seed)
            updates.step()
    modules = model.module.bags._managed_collision_collection._managed_collision_modules
    known = {name: module._mch_sorted_raw_ids.numpy() for name, module in modules.items()}
    rows = {name: module._mch_remapped_ids_mapping.numpy() for name, module in modules.items()}
    tables = {name: jobs.gathered(model, f"bags._embedding_module.embedding_bags.{name}.weight") for name in known}
    np.savez(folder / f"known{rank}.npz", **known)
    np.savez(folder / f"rows{rank}.npz", **rows)
    if rank == 0:
        np.savez(folder / "live.npz", answers=np.stack(answers), **tables)


@pytest.mark.parametrize("options", list(COLLISIONS))
def test_managed_collisions_in_two_shards(tmp_path: Path, options: str, broker: Broker) -> None:
    """Known and unknown ids are answered as by the live model; each shard's unknown ids have a vector of their own."""
    jobs.run_ranks(_collide, tmp_path, options, broker.url)

    live = np.load(tmp_path / "live.npz")
    with InferenceSession.open(tmp_path / "ctr" / "1", device="cpu") as session:
        for seed in range(40):
            lists = {name: models.padded_matrix(ids, pad=-99) for name, ids in _id_lists(seed).items()}
            found = session.run({"dense": np.zeros((9, 3), np.float32), **lists}, ["click"])["click"]
            np.testing.assert_allclose(found, live["answers"][seed], atol=1e-6)
    with InferenceSession.open(tmp_path / "ctr" / "1", device="cpu", update_stream=broker.url) as session:
        for rank in range(2):
            known, rows = (np.load(tmp_path / f"{part}{rank}.npz") for part in ("known", "rows"))
            for name in ("t0", "t1"):
                is_id = known[name] < 2**63 - 1
                ids, expected = known[name][is_id], live[name][rows[name][is_id]]
                wait_until(lambda n=name, i=ids, e=expected: np.array_equal(session.lookup(n, i), e), f"{name}'s rows")


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

"""Rows that training touches reach the servers, in order, and none is lost."""

from __future__ import annotations

from datetime import datetime, timedelta, timezone
from functools import partial
from pathlib import Path

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("torchrec")

from hypothesis import given  # noqa: E402
from hypothesis import strategies as st  # noqa: E402
from torch import nn  # noqa: E402

from hotrow import training  # noqa: E402
from hotrow.training.onnx_export.cutting import find_cuts  # noqa: E402
from hotrow.training.row_updates import published_keys, publisher  # noqa: E402
from hotrow.training.row_updates.outbox import Changes, merge  # noqa: E402
from hotrow.training.row_updates.touched_rows import Watch  # noqa: E402
from inference_session import InferenceSession  # noqa: E402
from inference_session.errors import ConfigurationError, SessionClosedError, UnavailableError, UnsupportedModelError  # noqa: E402
from inference_session.update_stream.announcements import Announcements  # noqa: E402
from inference_session.urls.kafka_url import KafkaUrl  # noqa: E402
from tests.testing import training_jobs as jobs  # noqa: E402
from tests.testing import training_models as models  # noqa: E402
from tests.testing.broker import Broker  # noqa: E402
from tests.testing.servers import PATIENCE_S, wait_until  # noqa: E402
from tests.testing.training_models import bag_collection, batch, exported, managed_collisions, serves, table_rows, train  # noqa: E402
from tests.testing.transaction_broker import TransactionBroker  # noqa: E402

pytestmark = [pytest.mark.training, pytest.mark.filterwarnings("ignore")]


def test_touched_rows_arrive_bit_equal(tmp_path: Path, broker: Broker) -> None:
    """Every few steps, what is left at the end, and in a name of their own."""
    model = models.Clicks(bag_collection(), 16)
    directory = exported(model, tmp_path, "touched")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    with (
        InferenceSession.open(directory, device="cpu", update_stream=broker.url) as session,
        training.UpdatePublisher(model, broker.url, "touched", every_steps=3) as updates,
    ):
        for seed in range(8):
            train(model, optimizer, seed)
            updates.step()
        updates.close()

        wait_until(lambda: serves(session, table_rows(model)), "all rows to be served")
        assert 0 < updates.stats.num_rows <= 3 * (40 + 50)


def test_rows_of_lost_steps_are_published_once_brokers_answer(
    tmp_path: Path, broker: Broker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a restored checkpoint: a step that could not ask which rows these are leaves that to the next one."""
    model = models.Clicks(bag_collection(), 16)
    directory = exported(model, tmp_path, "restored")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    checkpoint = training.Checkpoint(model, optimizer, tmp_path / "checkpoints")
    checkpoint.save(0)

    def refuse(*_: object) -> None:
        raise UnavailableError("no Kafka broker answers")

    with (
        InferenceSession.open(directory, device="cpu", update_stream=broker.url) as session,
        training.UpdatePublisher(model, broker.url, "restored") as updates,
    ):
        train(model, optimizer, 0)
        updates.step()
        wait_until(lambda: serves(session, table_rows(model)), "the lost step to be served")
        checkpoint.restore()
        with monkeypatch.context() as patched:
            patched.setattr(publisher, "published_keys", refuse)
            with pytest.raises(UnavailableError, match="no Kafka broker answers"):
                updates.step()
        updates.step()
        wait_until(lambda: serves(session, table_rows(model)), "the restored rows to be served")


def test_what_is_only_read_is_not_published(broker: Broker, tmp_path: Path) -> None:
    """Not by an evaluation, nor by an export."""
    model = models.Clicks(bag_collection(), 16)
    with training.UpdatePublisher(model, broker.url, "only_read") as updates:
        models.live(model, *batch(0))
        exported(model, tmp_path, "only_read")
        updates.step()
        updates.close()

        assert updates.stats.num_rows == 0
    assert not any(module._forward_pre_hooks for module in model.modules())


def test_ids_are_noted_though_the_trainer_uses_their_memory_again() -> None:
    """As it does where it copies each batch to the same place."""
    model, batch = nn.Sequential(nn.Embedding(9, 2)), torch.tensor([[1, 3]])
    watch = Watch(find_cuts(model))
    for _ in range(3):
        model(batch)
        batch += 1
    assert watch.touched[0].take().tolist() == [1, 2, 3, 4, 5]
    watch.close()


def test_ids_that_lose_their_rows_are_deleted(tmp_path: Path, broker: Broker) -> None:
    """Managed collisions: raw ids are published, and evicted ones answered as unknown again."""
    torch.manual_seed(0)
    model = models.Clicks(managed_collisions(), 16).train()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for seed in range(3):
        train(model, optimizer, seed, num_samples=20, rows=60)
    directory = exported(model, tmp_path, "collisions")

    with (
        InferenceSession.open(directory, device="cpu", update_stream=broker.url) as session,
        training.UpdatePublisher(model, broker.url, "collisions", every_steps=2) as updates,
    ):
        for seed in range(3, 20):
            train(model, optimizer, seed, num_samples=20, rows=10**6)
            updates.step()
        updates.close()

        assert updates.stats.num_deleted > 0
        collection = model.bags._managed_collision_collection._managed_collision_modules
        weights = {
            name: bag.weight.detach().numpy() for name, bag in model.bags._embedding_module.embedding_bags.items()
        }
        everything = np.arange(10**6)
        for name, module in collection.items():
            ids = module._mch_sorted_raw_ids
            known = ids < torch.iinfo(torch.int64).max
            expected = np.tile(session.spec.table(name).default_vector, (10**6, 1)).astype(np.float32)
            expected[ids[known].numpy()] = weights[name][module._mch_remapped_ids_mapping[known].numpy()]
            wait_until(
                lambda n=name, e=expected: np.array_equal(session.lookup(n, everything), e), f"the rows of {name}"
            )


WAYS = ["row_wise", "table_wise", "column_wise", "data_parallel"]


def _train_on_ranks(rank: int, folder: Path, url: str) -> None:
    """Train differently sharded tables; save whole tables, with their final rows, next to the version."""
    torch.manual_seed(0)
    ways = {f"t{i}": way for i, way in enumerate(WAYS)}
    model = jobs.distributed(models.Clicks(bag_collection(4), 32), {"bags": ways})
    exported(model, folder, "ranks", num_tables=4)
    updates = training.UpdatePublisher(model, url, "ranks", every_steps=2)
    dense = [p for name, p in model.named_parameters() if "layers" in name or "t3" in name]
    optimizer = torch.optim.SGD(dense, lr=0.1)
    for step in range(5):
        train(model, optimizer, 10 * step + rank, num_tables=4)
        updates.step()
    updates.announce(1)
    updates.close()
    rows = {name: jobs.gathered(model, f"bags.embedding_bags.{name}.weight") for name in ("t0", "t1", "t2", "t3")}
    if rank == 0:
        np.savez(folder / "live.npz", **rows)


def test_rows_of_all_ranks_arrive_whole(tmp_path: Path, broker: Broker) -> None:
    """Sharded by rows, tables and columns, and replicated: under their numbers in the whole table."""
    jobs.run_ranks(_train_on_ranks, tmp_path, broker.url)

    expected = dict(np.load(tmp_path / "live.npz"))
    directory = tmp_path / "ranks" / "1"
    with InferenceSession.open(directory, device="cpu", update_stream=broker.url) as session:
        wait_until(lambda: serves(session, expected), "all rows to be served")
    with InferenceSession.open(directory, device="cpu") as session:
        changed = [
            (session.lookup(name, np.arange(len(rows))) != rows).any(axis=1).sum() for name, rows in expected.items()
        ]
    assert all(changed)
    with Announcements(KafkaUrl.parse(broker.url), "ranks") as announcements:
        wait_until(lambda: announcements.newest(1.0) == 1, "the announcement")


def _train_with_fsdp(rank: int, folder: Path, url: str) -> None:
    """Each rank reads rows that the other holds; save all rows next to the version."""
    from torch.distributed.fsdp import fully_shard

    torch.manual_seed(0)
    model, whole = (nn.Sequential(nn.Embedding(9, 4), nn.Linear(4, 1)) for _ in range(2))
    to_version = partial(
        training.export, example=torch.tensor([1, 2]), outputs=["click"], repository=folder, name="fsdp"
    )
    to_version(model)
    for module in (model[0], model):
        fully_shard(module)
    with pytest.raises(UnsupportedModelError, match=r"the model: fully_shard divides its weights; .* restore"):
        to_version(model)
    optimizer = torch.optim.Adagrad(model.parameters(), lr=0.1)
    with training.UpdatePublisher(model, url, "fsdp") as updates:
        for keys in ([0, 8, 3], [7, 1, 3]):
            model(torch.tensor(keys[rank:])).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            updates.step()
    with torch.no_grad():
        model.eval()(torch.tensor([1, 2]))
    training.Checkpoint(model, optimizer, folder / "checkpoints").save(1)
    rows = model[0].weight.full_tensor().detach().numpy()
    optimizer_of_whole = torch.optim.Adagrad(whole.parameters(), lr=0.1)
    assert training.Checkpoint(whole, optimizer_of_whole, folder / "checkpoints").restore() == 2
    assert np.array_equal(whole[0].weight.detach().numpy(), rows)
    assert to_version(whole) == 2
    if rank == 0:
        np.save(folder / "live.npy", rows)


def test_rows_that_fsdp_divides_arrive_whole(tmp_path: Path, broker: Broker) -> None:
    """Whichever rank has read them. A model that is not divided is exported, from a checkpoint."""
    jobs.run_ranks(_train_with_fsdp, tmp_path, broker.url)

    expected = {"0": np.load(tmp_path / "live.npy")}
    with InferenceSession.open(tmp_path / "fsdp" / "1", device="cpu", update_stream=broker.url) as session:
        wait_until(lambda: serves(session, expected), "all rows to be served")


def test_a_broker_that_goes_away_is_an_error_and_loses_nothing(tmp_path: Path) -> None:
    """`step` raises; unconfirmed rows are sent when the brokers are back."""
    model = models.Clicks(bag_collection(), 16)
    directory = exported(model, tmp_path, "outage")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with Broker() as broker:
        updates = training.UpdatePublisher(model, broker.url, "outage", timeout_s=2.0)
        broker.stop()
        train(model, optimizer, 1)
        with pytest.raises(UnavailableError, match="unconfirmed rows are kept"):
            _step_until_it_fails(updates)
        train(model, optimizer, 2)
        broker.start()  # empty, so all rows must be sent again
        wait_until(lambda: _closes(updates), "the brokers to take the rows")

        with InferenceSession.open(directory, device="cpu", update_stream=broker.url) as session:
            wait_until(lambda: serves(session, table_rows(model)), "all rows to be served")
    with pytest.raises(SessionClosedError):
        updates.step()


def _step_until_it_fails(updates: training.UpdatePublisher) -> None:
    import time

    end = time.monotonic() + PATIENCE_S
    while time.monotonic() < end:
        updates.step()
        time.sleep(0.05)


def _closes(updates: training.UpdatePublisher) -> bool:
    try:
        updates.close()
    except UnavailableError:
        return False
    return True


def test_bad_arguments_are_refused(broker: Broker) -> None:
    """And leave no hooks behind."""
    model = models.Clicks(bag_collection(), 16)
    with pytest.raises(ConfigurationError, match="every_steps"):
        training.UpdatePublisher(model, broker.url, "ctr", every_steps=0)
    with pytest.raises(ConfigurationError, match="must both be text"):
        training.UpdatePublisher(model, None, "ctr")  # type: ignore[arg-type]
    with Broker() as other:
        other.stop()
        with pytest.raises(UnavailableError, match="no Kafka broker answers"):
            training.UpdatePublisher(model, other.url, "ctr", timeout_s=1.0)
    assert not any(module._forward_pre_hooks for module in model.modules())


def test_no_text_shows_the_password_of_a_broker(broker: Broker, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither that of an object, nor of an error."""
    url = broker.url.replace("://", "://trainer:secret@") + "?security_protocol=plaintext"
    model = models.Clicks(bag_collection(), 16)

    with training.UpdatePublisher(model, url, "ctr") as updates:
        texts = [repr(updates)]
    with pytest.raises(ConfigurationError, match="must both be text") as no_name:
        training.UpdatePublisher(model, url, None)  # type: ignore[arg-type]
    monkeypatch.setattr(published_keys, "_BROKER_TIMEOUT_S", 0.1)
    with Broker() as other:
        other.stop()
        with pytest.raises(UnavailableError, match="no Kafka broker answers") as no_broker:
            published_keys.published_keys(
                url.replace(broker.url[8:], other.url[8:]), "ctr", "user", 4, datetime.now(timezone.utc)
            )

    assert "trainer" in texts[0]
    assert not [text for text in (*texts, str(no_name.value), str(no_broker.value)) if "secret" in text]


def test_published_keys_are_read_to_the_end_of_the_topic() -> None:
    """Where the last offsets have no message, as they are marks of transactions or were compacted."""
    vector, moment = np.ones(4, np.float32).tobytes(), datetime.now(timezone.utc)
    with TransactionBroker() as broker:
        topic = "hps_et.ctr.user"
        for transaction, key in enumerate([5, 6, 7]):
            broker.send(topic, (key.to_bytes(8, "little"), vector), transaction=transaction)
        broker.commit(topic, 0)
        broker.abort(topic, 1)
        broker.commit(topic, 2)
        assert published_keys.published_keys(broker.url, "ctr", "user", 4, moment).tolist() == [5, 7]


def test_published_keys_of_a_clock_that_was_set_back_are_found(broker: Broker) -> None:
    """What lies behind a message that was published since the moment was published since, whatever its date."""
    vector, moment = np.ones(4, np.float32).tobytes(), datetime.now(timezone.utc)
    topic, before = "hps_et.set_back.user", moment - timedelta(days=1)
    for key, date in ((5, before), (6, moment), (7, before)):
        broker.send_dated(topic, date + timedelta(milliseconds=1), (key.to_bytes(8, "little"), vector))
    assert published_keys.published_keys(broker.url, "set_back", "user", 4, moment).tolist() == [6, 7]


def test_a_version_that_is_none_is_refused_before_it_is_queued(broker: Broker) -> None:
    """Otherwise every later call would fail with it, `close` too."""
    updates = training.UpdatePublisher(models.Clicks(bag_collection(), 16), broker.url, "ctr")
    for version in (0, -1, "1", None, 2**63):
        with pytest.raises(ConfigurationError, match="versions are whole numbers"):
            updates.announce(version)  # type: ignore[arg-type]
    updates.close()


KEYS = st.lists(st.integers(-3, 3), max_size=6, unique=True)


@given(st.lists(st.tuples(KEYS, st.sets(st.integers(-3, 3))), min_size=2, max_size=5))
def test_changes_that_wait_are_joined_as_if_sent_one_after_the_other(rounds: list[tuple[list[int], set[int]]]) -> None:
    """The last change of each key counts."""
    oracle: dict[int, float | None] = {}
    joined: Changes | None = None
    for number, (keys, deleted) in enumerate(rounds):
        gone = sorted(deleted - set(keys))
        changes = Changes(
            "t",
            np.array(keys, np.int64),
            np.full((len(keys), 2), number, np.float32),
            np.array(gone, np.int64),
        )
        joined = changes if joined is None else merge(joined, changes)
        oracle.update(dict.fromkeys(keys, float(number)))
        oracle.update(dict.fromkeys(gone))
    assert joined is not None
    assert len(set(joined.keys.tolist()) | set(joined.deleted.tolist())) == len(joined.keys) + len(joined.deleted)
    found = {**dict(zip(joined.keys.tolist(), joined.vectors[:, 0].tolist(), strict=True))}
    assert found == {key: value for key, value in oracle.items() if value is not None}
    assert set(joined.deleted.tolist()) == {key for key, value in oracle.items() if value is None}

"""A Keras model publishes versions and rows while `fit` runs."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
os.environ.setdefault("KERAS_BACKEND", "torch")
keras = pytest.importorskip("keras")

from hotrow import training  # noqa: E402
from hotrow.training.keras_callback import export_keras  # noqa: E402
from inference_session import InferenceSession  # noqa: E402
from inference_session.errors import ConfigurationError, UnavailableError, UnsupportedModelError  # noqa: E402
from inference_session.update_stream.announcements import Announcements  # noqa: E402
from inference_session.urls.kafka_url import KafkaUrl  # noqa: E402
from tests.testing.broker import Broker  # noqa: E402
from tests.testing.servers import wait_until  # noqa: E402

pytestmark = [pytest.mark.training, pytest.mark.filterwarnings("ignore")]

RANDOM = np.random.default_rng(0)


def _model() -> Any:
    """Two tables of one shape, so that only their rows tell them apart."""
    keras.utils.set_random_seed(0)
    layers = keras.layers
    users, items = (keras.Input((3,), dtype="int32", name=name) for name in ("user", "item"))
    vectors = [
        layers.GlobalAveragePooling1D()(layers.Embedding(200, 8, name=f"{name}s")(ids))
        for name, ids in (("user", users), ("item", items))
    ]
    click = layers.Dense(1, activation="sigmoid", name="click")(layers.Concatenate()(vectors))
    model = keras.Model([users, items], click)
    model.compile("adam", "binary_crossentropy")
    return model


def _fit(model: Any, callback: Any, **options: Any) -> None:
    ids = [RANDOM.integers(0, 200, (256, 3)).astype(np.int32) for _ in range(2)]
    model.fit(ids, RANDOM.integers(0, 2, 256), batch_size=32, verbose=0, callbacks=[callback], **options)


def _serves(session: InferenceSession, model: Any) -> bool:
    return all(
        np.array_equal(
            session.lookup(name, np.arange(200)), keras.ops.convert_to_numpy(model.get_layer(name).embeddings)
        )
        for name in ("users", "items")
    )


def test_versions_and_rows_of_a_fit(tmp_path: Path, broker: Broker) -> None:
    """A version an epoch, announced; rows of later steps, momentum's too, arrive bit-equal."""
    model = _model()
    callback = training.KerasCallback("keras", repository=tmp_path, url=broker.url, every_steps=3)

    _fit(model, callback, epochs=2)

    assert callback.versions == [1, 2]
    with Announcements(KafkaUrl.parse(broker.url), "keras") as announcements:
        wait_until(lambda: announcements.newest(1.0) == 2, "the announcement")
    _fit(model, training.KerasCallback("keras", url=broker.url, every_steps=3), epochs=1)
    directory = tmp_path / "keras" / "2"
    with InferenceSession.open(directory, device="cpu", update_stream=broker.url) as session:
        wait_until(lambda: _serves(session, model), "all rows to be served")


def test_rows_of_a_fit_that_failed_are_sent_by_the_next(tmp_path: Path) -> None:
    """A broker that goes away ends `fit`; the rows that it did not confirm are not lost."""
    model = _model()
    model.compile("sgd", "binary_crossentropy")  # moves only the rows of its batch
    few = [np.full((32, 3), row, np.int32) for row in (1, 2)]
    model.predict(few, verbose=0)
    export_keras(model, tmp_path, "keras")
    with Broker() as broker:
        callback = training.KerasCallback("keras", url=broker.url, every_steps=1, timeout_s=2)
        away = keras.callbacks.LambdaCallback(on_train_batch_begin=lambda batch, logs: broker.stop())
        with pytest.raises(UnavailableError, match="unconfirmed rows are kept"):
            model.fit([few[1], few[0]], np.ones(32), batch_size=32, verbose=0, callbacks=[callback, away])
        broker.start()

        model.fit(few, np.ones(32), batch_size=32, verbose=0, callbacks=[callback])

        with InferenceSession.open(tmp_path / "keras" / "1", device="cpu", update_stream=broker.url) as session:
            wait_until(lambda: _serves(session, model), "all rows to be served")


def test_a_version_answers_as_the_model(tmp_path: Path) -> None:
    """Tables are called as their layers."""
    model = _model()
    _fit(model, training.KerasCallback("keras", repository=tmp_path), epochs=1)

    sent = {name: RANDOM.integers(0, 200, (5, 3)).astype(np.int32) for name in ("user", "item")}
    with InferenceSession.open(tmp_path / "keras" / "1", device="cpu") as session:
        found = session.predict(sent)
        assert _serves(session, model)
    expected = model.predict([sent["user"], sent["item"]], verbose=0)
    np.testing.assert_allclose(found, expected, atol=1e-6)


def test_bad_arguments_are_refused() -> None:
    """And models without tables."""
    with pytest.raises(ConfigurationError, match="a repository for versions, a url for rows"):
        training.KerasCallback("ctr")
    with pytest.raises(ConfigurationError, match="every_steps"):
        training.KerasCallback("ctr", repository="x", every_steps=0)
    with pytest.raises(ConfigurationError, match="a URL is no folder of this machine"):
        training.KerasCallback("ctr", repository="hdfs://namenode/models")
    dense = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
    dense.compile("sgd", "mse")
    with pytest.raises(UnsupportedModelError, match="no Embedding layer"):
        dense.fit(np.zeros((4, 3)), np.zeros(4), verbose=0, callbacks=[training.KerasCallback("ctr", repository="x")])

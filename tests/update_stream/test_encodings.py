"""Both encodings against a plain oracle, and every kind of message that cannot be applied."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from inference_session.errors import ConfigurationError
from inference_session.update_stream.encodings import KeyValue, decode, encode_batch, encode_keys, encode_vectors
from inference_session.update_stream.publisher import crc32
from inference_session.update_stream.topics import table_of, topic_name
from inference_session.urls.kafka_url import KafkaUrl

KEYS = st.integers(-(2**63), 2**63 - 1)


def row(key: int, vector: list[float] | None, width: int = 8) -> KeyValue:
    value = None if vector is None else np.array(vector, "<f4").tobytes()
    return (key.to_bytes(width, "little", signed=width == 8), value)


def batch(keys: list[int], vectors: np.ndarray, width: int) -> bytes:
    """The batch encoding, written out by hand."""
    parts = [b"HCTR", (4 * vectors.shape[1]).to_bytes(4, "little")]
    for key, vector in zip(keys, vectors, strict=True):
        parts += [key.to_bytes(width, "little", signed=width == 8), vector.astype("<f4").tobytes()]
    return b"".join(parts)


@given(
    st.lists(
        st.tuples(
            st.lists(st.tuples(KEYS, st.booleans()), min_size=1, max_size=5),
            st.sampled_from(["row", "batch", "narrow"]),
        ),
        max_size=20,
    ),
    st.integers(1, 5),
)
def test_the_last_row_of_every_key_is_decoded(sends: list[tuple[list[tuple[int, bool]], str]], dim: int) -> None:
    """Rows, batches and deletions in any mixture give what applying them one by one gives."""
    rng = np.random.default_rng(0)
    messages: list[KeyValue] = []
    expected: dict[int, list[float] | None] = {}
    for rows, kind in sends:
        vectors = rng.normal(size=(len(rows), dim)).astype(np.float32)
        if kind == "batch":
            messages.append((None, encode_batch(np.array([key for key, _ in rows], np.int64), vectors)))
            expected |= {key: vector.tolist() for (key, _), vector in zip(rows, vectors, strict=True)}
            continue
        for (any_key, deleted), vector in zip(rows, vectors, strict=True):
            key = any_key % 2**32 if kind == "narrow" else any_key
            expected[key] = None if deleted else vector.tolist()
            messages.append(row(key, expected[key], 4 if kind == "narrow" else 8))

    updates = decode(messages, dim)

    found: dict[int, list[float] | None] = dict(zip(updates.keys.tolist(), updates.vectors.tolist(), strict=True))
    assert found | dict.fromkeys(updates.deleted.tolist()) == expected
    assert len(updates.keys) + len(updates.deleted) == len(expected)
    assert not updates.refusals


@pytest.mark.parametrize("width", [8, 4])
@pytest.mark.parametrize("dim", [1, 2, 16, 128])
@pytest.mark.parametrize("hashed", [False, True])
def test_the_width_of_a_batchs_keys_is_told(width: int, dim: int, hashed: bool) -> None:
    """Also where the length would allow both widths: 17 rows of wide keys are as long as 18 of narrow ones."""
    rng = np.random.default_rng(dim)
    for num_rows in (1, 17, 18, dim + 1, dim + 2, (dim + 1) * (dim + 2)):
        keys = rng.integers(0, 2 ** (8 * width - 1) - 1 if hashed else 1000, num_rows)
        vectors = rng.normal(scale=0.1, size=(num_rows, dim)).astype(np.float32)

        updates = decode([(b"", batch(keys.tolist(), vectors, width))], dim)

        expected = dict(zip(keys.tolist(), vectors.tolist(), strict=True))
        assert dict(zip(updates.keys.tolist(), updates.vectors.tolist(), strict=True)) == expected


@pytest.mark.parametrize("value", [np.nan, np.inf, 1e20, 1e-39])
@pytest.mark.parametrize("dim", [1, 4, 16])
def test_rows_of_a_training_that_diverged_are_not_taken_for_others(value: float, dim: int) -> None:
    """Vectors that no trained model has are implausible as keys, too: the usual width is taken."""
    rng = np.random.default_rng(dim)
    for num_rows in (dim + 1, 50 * (dim + 1)):
        keys = np.arange(num_rows)[::-1]
        vectors = (value * rng.uniform(0.5, 2, (num_rows, dim))).astype(np.float32)

        updates = decode([(None, batch(keys.tolist(), vectors, 8))], dim, allow_non_finite=True)

        assert set(updates.keys.tolist()) == set(keys.tolist())


WHOLE = batch([1, 2], np.ones((2, 3), np.float32), 8)


@pytest.mark.parametrize(
    ("message", "reason", "text"),
    [
        ((None, None), "no_key", "neither key nor value"),
        ((b"abc", b"\0" * 12), "key_width", "a key has 3 bytes, expected 8 or 4"),
        (row(1, [1, 2]), "vector_width", "a vector has 8 bytes, expected 12"),
        (row(1, []), "vector_width", "a vector has 0 bytes"),
        ((None, b"\0" * 12), "unknown_encoding", "expected b'HCTR'"),
        ((None, b""), "unknown_encoding", "starts with b''"),
        ((None, WHOLE[:7]), "truncated", "fewer than the 8 of its header"),
        ((None, WHOLE[:-1]), "truncated", "ends within a row"),
        (
            (None, batch([1], np.ones((1, 4), np.float32), 8)),
            "vector_width",
            "vectors of a batch have 16 bytes, expected 12",
        ),
        (row(1, [1, np.nan, 1]), "not_finite", "NaN or infinite"),
        (row(-1, [1, 1, 1]), "key_width", "a key is below 0, so it is not a row number"),
    ],
)
def test_what_cannot_be_applied_is_refused_alone(message: KeyValue, reason: str, text: str) -> None:
    """A malformed message among good ones is refused with its reason, and they are applied."""
    updates = decode([row(7, [1, 2, 3]), message, (None, WHOLE)], 3, min_key=0)

    assert [(refusal.position, refusal.reason) for refusal in updates.refusals] == [(1, reason)]
    assert text in updates.refusals[0].text
    assert sorted(updates.keys.tolist()) == [1, 2, 7]


def test_a_header_without_rows_is_harmless() -> None:
    """It is neither an update nor an error, whatever size it declares."""
    for size in (12, 16, 0):
        updates = decode([(None, b"HCTR" + size.to_bytes(4, "little"))], 3)
        assert not len(updates.keys) + len(updates.deleted) + len(updates.refusals)


def test_rows_that_are_not_finite_are_refused_one_by_one() -> None:
    """The others of their batch are applied; where they are allowed, all are."""
    vectors = np.array([[1, 1], [np.inf, 1], [2, 2]], np.float32)
    message = (None, encode_batch(np.arange(3), vectors))

    assert decode([message], 2).keys.tolist() == [0, 2]
    assert len(decode([message], 2).refusals) == 1
    assert decode([message], 2, allow_non_finite=True).keys.tolist() == [0, 1, 2]


def test_a_row_may_begin_with_the_magic() -> None:
    """A message with a key and the width of a vector is a row, whatever its bytes."""
    value = b"HCTR" + np.ones(3, "<f4").tobytes()
    updates = decode([((5).to_bytes(8, "little"), value)], 4)
    assert updates.vectors.tobytes() == value


@given(st.lists(st.tuples(st.none() | st.binary(max_size=12), st.none() | st.binary(max_size=80)), max_size=5))
def test_no_bytes_are_too_strange(messages: list[tuple[bytes | None, bytes | None]]) -> None:
    """Any message is decoded or refused."""
    decode(messages, 3)


def test_single_rows_are_encoded_as_hps_reads_them() -> None:
    """The raw bytes of the key, and those of the vector."""
    assert encode_keys(np.array([1, -1])) == [b"\1" + b"\0" * 7, b"\xff" * 8]
    assert encode_vectors(np.array([[1.0, 2.0]], np.float32)) == [np.array([1, 2], "<f4").tobytes()]


@given(st.lists(KEYS, max_size=20))
def test_keys_go_where_librdkafka_would_send_them(keys: list[int]) -> None:
    """By the CRC-32 of their bytes."""
    import zlib

    array = np.array(keys, np.int64)
    assert crc32(array).tolist() == [zlib.crc32(key.tobytes()) for key in array]


def test_topics_belong_to_one_table() -> None:
    """For both generations; deeper topics, or topics elsewhere, are not ours."""
    assert topic_name("hps_et", "ctr", "user") == "hps_et.ctr.user"
    assert table_of("hps_et.ctr.user", "ctr") == table_of("hctr_et.ctr.user", "ctr") == "user"
    for topic in (
        "hps_et.ctr.v2.user",
        "hps_et.ctr2.user",
        "hps_et.ctr.",
        "hps_et.ctr",
        "ctr.user",
        "x.hps_et.ctr.user",
    ):
        assert table_of(topic, "ctr") is None, topic
    with pytest.raises(ConfigurationError, match="is not a valid Kafka topic; allowed: up to 249 letters"):
        topic_name("hps_et", "a model", "user")


@pytest.mark.parametrize(
    "text",
    [
        "localhost:9092",
        "redis://h:1",
        "kafka://",
        "kafka://h:0",
        "kafka://h:99999",
        "kafka://h:1,",
        "kafka://[:1",
        "kafka://h:1?acks=0",
        "kafka://h/p",
    ],
)
def test_malformed_urls_are_refused(text: str) -> None:
    """The message says what is allowed."""
    with pytest.raises(ConfigurationError, match="allowed"):
        KafkaUrl.parse(text)


def test_a_urls_password_may_stand_in_a_file(tmp_path: Path) -> None:
    """It is in the client's settings and in no text; a user is required, too."""
    (tmp_path / "secret").write_text("hidden\n", encoding="utf-8")
    text = f"kafka://me@one:1?password_file={tmp_path}/secret"
    url = KafkaUrl.parse(text)

    assert (url.client_settings()["sasl.username"], url.client_settings()["sasl.password"]) == ("me", "hidden")
    assert set(url.client_settings()) == {
        *("bootstrap.servers", "sasl.username", "sasl.password", "security.protocol", "sasl.mechanism")
    }
    assert str(url) == text
    assert "hidden" not in repr(url)
    with pytest.raises(ConfigurationError, match="needs a user"):
        KafkaUrl.parse(f"kafka://one:1?password_file={tmp_path}/secret")


def test_urls_keep_their_password() -> None:
    """It is in the client's settings and in no text."""
    url = KafkaUrl.parse("kafka://me:secret@one:1,two?security_protocol=sasl_ssl&tls_ca_certificate=/ca")

    assert url.brokers == ("one:1", "two:9092")
    assert url.client_settings() == {
        "bootstrap.servers": "one:1,two:9092",
        "sasl.username": "me",
        "sasl.password": "secret",
        "sasl.mechanism": "PLAIN",
        "security.protocol": "sasl_ssl",
        "ssl.ca.location": "/ca",
    }
    assert "secret" not in f"{url} {url!r}"

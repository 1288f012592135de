"""Stores by URL."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from inference_session.errors import ConfigurationError
from inference_session.parameter_server.create import create_store
from inference_session.parameter_server.namespace import Namespace, split_tag
from inference_session.parameter_server.rocksdb.store import RocksDbStore
from inference_session.urls.store_url import OPTIONS, StoreUrl


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("redis://cache", StoreUrl("redis", "cache")),
        ("redis://cache:7000/3", StoreUrl("redis", "cache", 7000, db=3)),
        ("redis://:secret@cache/", StoreUrl("redis", "cache", password="secret")),  # noqa: S106 - nobody's
        ("rediss://me:s%40e%2Fc:r@[::1]:1", StoreUrl("rediss", "::1", 1, "me", "s@e/c:r")),
        (
            "redis+cluster://node:7001?connections=3",
            StoreUrl("redis+cluster", "node", 7001, options={"connections": "3"}),
        ),
        ("unix:///run/redis.sock?db=2", StoreUrl("unix", path="/run/redis.sock", db=2, options={"db": "2"})),
        ("rocksdb:///data/my%20rows", StoreUrl("rocksdb", path="/data/my rows")),
    ],
)
def test_a_url_is_taken_apart(text: str, expected: StoreUrl) -> None:
    """Every part finds its place, percent signs undone."""
    assert StoreUrl.parse(text) == expected


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("memcached://host", r"'memcached' is unknown; allowed: redis://.*rocksdb://"),
        ("/just/a/path", r"no scheme; allowed: redis://"),
        ("redis://", r"needs a host"),
        ("redis://host:port", r"malformed host or port"),
        ("redis://host:99999", r"malformed host or port"),
        ("redis://host/users", r"database 'users'"),
        ("redis+cluster://host/1", r"0, the only one of a Cluster"),
        ("redis://host?conections=3", r"unknown option 'conections'; allowed: partitions, connections"),
        ("rocksdb://folder/db", r"absolute path and no host"),
        ("rocksdb://", r"absolute path"),
        ("rocksdb:///db?x=1", r"unknown option 'x'; allowed: none"),
        ("unix://", r"absolute path"),
    ],
)
def test_a_url_that_is_wrong_says_why(text: str, message: str) -> None:
    """The message names what was found and what is allowed."""
    with pytest.raises(ConfigurationError, match=message):
        StoreUrl.parse(text)


SECRETS = st.text(st.characters(min_codepoint=33, max_codepoint=126), min_size=6, max_size=12).map(
    lambda s: "Q" + s + "Q"
)


@given(
    SECRETS,
    st.sampled_from(["redis", "rediss", "redis+cluster", "redis+sentinel"]),
    st.sampled_from(["/1", "", ":x", "/db", "?a=b", ",b:2/rows/1", "/rows/x"]),
)
def test_no_text_made_of_a_url_shows_the_password(secret: str, scheme: str, rest: str) -> None:
    """Neither str, repr nor an error contains it, even if the URL is malformed."""
    from urllib.parse import quote

    for written in (quote(secret, safe=""), secret.replace("/", "").replace("#", "").replace("?", "")):
        try:
            url = StoreUrl.parse(f"{scheme}://user:{written}@host{rest}")
        except ConfigurationError as error:
            texts = [str(error), repr(error)]
        else:
            texts = [str(url), repr(url), f"{url}"]
        assert not any(secret in text or written in text for text in texts)


def test_a_url_written_and_read_again_is_the_same() -> None:
    """Without a password, str gives what parse takes."""
    for text in (
        "redis://a:1/2",
        "unix:///s?db=1",
        "rocksdb:///d",
        "redis+cluster://[::1]:7?partitions=16",
        "redis+sentinel://a:1,[::1]:2/rows/3",
    ):
        assert str(StoreUrl.parse(text)) == text
        assert StoreUrl.parse(str(StoreUrl.parse(text))) == StoreUrl.parse(text)


def test_the_password_is_shown_as_stars() -> None:
    """The text shows that there is one."""
    assert str(StoreUrl.parse("redis://me:secret@host:1/2")) == "redis://me:***@host:1/2"
    assert str(StoreUrl.parse("redis://:secret@host:1")) == "redis://:***@host:1"


def test_a_password_may_stand_in_a_file(tmp_path: Path) -> None:
    """It is read and in no text; the URL shows the file instead."""
    (tmp_path / "secret").write_text("p@ss word\n", encoding="utf-8")
    text = f"redis://me@host:1?password_file={tmp_path}/secret"
    url = StoreUrl.parse(text)

    assert (url.user, url.password) == ("me", "p@ss word")
    assert str(url) == text
    assert "p@ss" not in repr(url)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "No such file"),
        (b"", "one line with a password"),
        (b"hidden\nhidden", "one line with a password"),
        (b"hidden\xff", "it is not UTF-8 text"),
        (b"hidden" * 1000, "one line with a password"),
    ],
)
def test_a_file_without_a_password_is_refused(content: bytes | None, message: str, tmp_path: Path) -> None:
    """The error names the file, and shows nothing of its content."""
    if content is not None:
        (tmp_path / "secret").write_bytes(content)
    with pytest.raises(ConfigurationError, match=message) as caught:
        StoreUrl.parse(f"rediss://host?password_file={tmp_path}/secret")
    assert f"{tmp_path}/secret" in str(caught.value)
    assert "hidden" not in f"{caught.value} {caught.value.__cause__}"


def test_a_password_has_one_place(tmp_path: Path) -> None:
    """A URL with a password and a file of one is refused, and so is a file that is somewhere else for each process."""
    with pytest.raises(ConfigurationError, match="both a password and password_file") as caught:
        StoreUrl.parse(f"redis://:hidden@host?password_file={tmp_path}/secret")
    assert "hidden" not in str(caught.value)
    with pytest.raises(ConfigurationError, match="allowed: an absolute path"):
        StoreUrl.parse("redis://host?password_file=secret")


def test_a_url_opens_its_store(tmp_path: Path) -> None:
    """The scheme decides the class."""
    with create_store(f"rocksdb://{tmp_path}/db", Namespace("m", "1"), {"t": 2}, writable=True) as store:
        assert isinstance(store, RocksDbStore)
    for scheme in set(OPTIONS) - {"rocksdb", "unix"}:
        name = "/rows" if scheme.endswith("+sentinel") else ""
        with create_store(f"{scheme}://127.0.0.1:1{name}", Namespace("m", "1"), {"t": 2}) as store:
            assert type(store).__name__ == "RedisStore"


@pytest.mark.parametrize("option", ["partitions=0", "partitions=65537", "partitions=1e3", "connections=100000"])
def test_a_number_that_would_take_up_the_machine_is_refused(option: str) -> None:
    """The URL, the option and what is allowed are named, and nothing is opened."""
    with pytest.raises(ConfigurationError, match=rf"{option}': \w+ cannot be '.*'; allowed: whole numbers from 1 to "):
        create_store(f"redis://127.0.0.1:1?{option}", Namespace("m", "1"), {"t": 2})


def test_tags_are_those_of_hps_or_bear_the_version() -> None:
    """A tag is made of its parts and falls apart into them."""
    assert Namespace("ctr").tag("user") == "hps_et.ctr.user"
    assert Namespace("ctr", "12").tag("user") == "hps_et.ctr@12.user"
    for model in ("ctr", "my.model", "a-b_c"):
        for version in (None, "1", "20261121"):
            assert split_tag(Namespace(model, version).tag("user_id")) == (Namespace(model, version), "user_id")
    assert split_tag("hctr_et.ctr.user") is None
    assert split_tag("hps_et.user") is None

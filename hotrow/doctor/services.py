"""The checks of `hotrow doctor` of the stores and brokers that models name: whether something listens there."""

from __future__ import annotations

import socket
from collections.abc import Iterable, Iterator
from pathlib import Path

from hotrow.doctor.findings import Finding
from inference_session.errors import ConfigurationError
from inference_session.urls.kafka_url import SCHEME as KAFKA
from inference_session.urls.kafka_url import KafkaUrl
from inference_session.urls.store_url import OPTIONS, StoreUrl

_TIMEOUT_S = 2.0


def check_services(values: Iterable[str]) -> Iterator[Finding]:
    """Findings for those settings' values that are URLs of stores and brokers; never shows a password."""
    for value in sorted(values):
        scheme = value.partition("://")[0]
        try:
            if scheme == KAFKA:
                yield from map(_broker, KafkaUrl.parse(value).brokers)
            elif scheme in OPTIONS:
                yield from _store(StoreUrl.parse(value))
        except ConfigurationError as error:
            yield Finding("stores", "problem", str(error), "correct the setting in config.pbtxt")


def _store(url: StoreUrl) -> Iterator[Finding]:
    if url.scheme == "rocksdb":
        yield _rocksdb(url.path)
        return
    for address in url.sentinels or ((url.host, url.port),):
        reason = _refusal(url.path or address)
        place = f"Redis at {url.path or ':'.join(map(str, address))}"
        fix = "start it: as long as it does not answer, models without another store are not loaded"
        yield _finding("stores", place, reason, fix)


def _broker(address: str) -> Finding:
    host, _, port = address.rpartition(":")
    fix = "start it: updates wait as long as no broker answers"
    return _finding("brokers", f"Kafka at {address}", _refusal((host.strip("[]"), int(port))), fix)


def _rocksdb(path: str) -> Finding:
    try:
        is_there = (Path(path) / "CURRENT").exists()  # names the files of the database
    except OSError as error:
        fix = "let the user that runs the server read and write it"
        return Finding("stores", "problem", f"the RocksDB in {path} cannot be opened: {error.strerror}", fix)
    if is_there:
        return Finding("stores", "ok", f"RocksDB in {path}")
    fix = f"`hotrow push VERSION_DIR --to rocksdb://{path}` creates one"
    return Finding("stores", "problem", f"there is no RocksDB in {path}", fix)


def _finding(check: str, place: str, reason: str, fix: str) -> Finding:
    return Finding(check, "warning", f"{place}: {reason}", fix) if reason else Finding(check, "ok", f"{place} listens")


def _refusal(address: str | tuple[str, int]) -> str:
    """Why nothing can be sent to a socket's path, or a host and port; nothing if it can."""
    try:
        if isinstance(address, tuple):
            socket.create_connection(address, _TIMEOUT_S).close()
        else:
            with socket.socket(socket.AF_UNIX) as connection:
                connection.settimeout(_TIMEOUT_S)
                connection.connect(address)
    except OSError as error:
        return error.strerror or str(error)
    except UnicodeError:
        return "not the name of a host"
    return ""

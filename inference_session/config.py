"""The settings of a session: one frozen object, from config.pbtxt parameters, session.json and defaults.

docs/reference/settings.md has a heading for each; a test compares the two.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from datetime import datetime
from difflib import get_close_matches
from pathlib import Path
from typing import Any, Literal

from inference_session.errors import ConfigurationError
from inference_session.platform.file_names import as_file_name
from inference_session.platform.json_records import is_text
from inference_session.urls.kafka_url import KafkaUrl
from inference_session.urls.store_url import DEFAULT_TIMEOUT_MS, StoreUrl


def _choice(*allowed: str) -> Callable[[Any], str]:
    def parse(value: Any) -> str:
        if value not in allowed:
            raise ValueError(f"allowed: {', '.join(allowed)}")
        return str(value)

    return parse


_MAX_THREADS = 1024
"""The most threads of one pool. A number mistyped by a few digits would take all threads that the machine allows."""
_MAX_BATCH = 1 << 24
DEFAULT_MAX_KEYS = 10_000_000
_MAX_COUNT = 2**63 - 1
_WHOLE_NUMBER = re.compile("[+-]?[0-9]{1,20}")
"""Python reads other texts as numbers, too, such as `1_000`."""
_MAX_TIME = 10**9
"""In seconds or milliseconds. Threads and sockets cannot wait for all numbers that are longer."""


def _count(at_least: int, at_most: int | None = None) -> Callable[[Any], int]:
    allowed = f"allowed: whole numbers from {at_least}" + (f" to {at_most}" if at_most else "")

    def parse(value: Any) -> int:
        text = str(value).strip()
        number = int(text) if _WHOLE_NUMBER.fullmatch(text) else at_least - 1
        if not at_least <= number <= (at_most or _MAX_COUNT):
            raise ValueError(allowed)
        return number

    return parse


def _number(low: float, high: float) -> Callable[[Any], float]:
    def parse(value: Any) -> float:
        text = str(value)
        try:
            number = float(text) if text.isascii() and "_" not in text else math.nan
        except ValueError:
            number = math.nan
        if not low <= number <= high:
            raise ValueError(f"allowed: numbers from {low:g}" + (f" to {high:.12g}" if high < math.inf else ""))
        return number

    return parse


def _seconds(value: Any) -> float:
    return _number(0, _MAX_TIME)(value)


def _flag(value: Any) -> bool:
    text = str(value).lower()
    if text not in ("true", "false"):
        raise ValueError("allowed: true, false")
    return text == "true"


def _url(kind: type[StoreUrl] | type[KafkaUrl]) -> Callable[[Any], StoreUrl | KafkaUrl | None]:
    """The URL of a store or an update stream. Errors never show all of it: it may hold a password. Empty: none."""

    def parse(value: Any) -> StoreUrl | KafkaUrl | None:
        if value is None or value == "" or isinstance(value, kind):
            return value or None
        if not _is_printable(text := str(value)):
            raise ConfigurationError(f"the URL must be {_PRINTABLE}")
        return kind.parse(text)

    return parse


def _text(value: Any) -> str:
    """A text or a path. Empty: none."""
    if not isinstance(value, (str, os.PathLike)) or not _is_printable(text := str(value)):
        raise ValueError(f"allowed: {_PRINTABLE}")
    return text


def _path(value: Any) -> str:
    """As the calls of this process take it. Empty: none."""
    return as_file_name(_text(value))


_PRINTABLE = "text that UTF-8 can express, without zero characters"


def _is_printable(text: str) -> bool:
    """Whether it can be a path, or go to a server."""
    return is_text(text) and "\0" not in text


def _pattern(value: Any) -> str:
    text = _text(value)
    try:
        re.compile(text)
    except (re.error, RecursionError, OverflowError) as error:
        raise ValueError(f"allowed: regular expressions ({error})") from error
    return text


def _moment(value: Any) -> datetime | None:
    """A point in time. Empty: none."""
    if value is None or value == "" or isinstance(value, datetime):
        return value or None
    try:
        moment = datetime.fromisoformat(str(value).replace("Z", "+00:00"))
    except ValueError:
        moment = datetime.min  # has no zone, so it is refused as well
    if moment.tzinfo is None:
        raise ValueError("allowed: a date and time with its zone, such as 2026-01-31T12:00:00Z")
    return moment


def _device(value: Any) -> str:
    text = str(value)
    kind, _, numbers = text.partition(":")
    each = numbers.split(",")
    is_list = (
        kind == "cuda" and text.isascii() and all(map(str.isdecimal, each)) and len(set(map(int, each))) == len(each)
    )
    if is_list or text in ("auto", "cpu", "cuda:all"):
        return text
    raise ValueError("allowed: auto, cpu, cuda:N, and for several GPUs cuda:N,M or cuda:all (N, M: numbers of GPUs)")


def _gpus(value: Any) -> str:
    """Empty: none."""
    text = str(value)
    if text and (not text.startswith("cuda:") or _device(text) == "cuda:all"):
        raise ValueError("allowed: cuda:N,M (N, M: numbers of GPUs)")
    return text


def _folder(value: Any) -> str:
    """Empty: none."""
    text = _path(value)
    if text and not Path(text).is_absolute():
        raise ValueError("allowed: the absolute path of a folder")
    return text


def _setting(default: Any, parse: Callable[[Any], Any]) -> Any:
    return field(default=default, metadata={"parse": parse})


@dataclass(frozen=True)
class SessionConfig:
    """How one version is opened and served."""

    device: str = _setting("auto", _device)
    """Where look-ups and the dense network run: `auto` (a GPU if there is one), `cpu`, `cuda:N`; on several GPUs:
    `cuda:N,M`, `cuda:all`."""
    shard: Literal["auto", "rows", "none"] = _setting("auto", _choice("auto", "rows", "none"))
    """On several GPUs, which tables have their rows divided among them: `auto` (the largest, if not all tables fit on
    each GPU), `rows` (all), `none`. Each GPU has a copy of the others."""
    shard_devices: str = _setting("", _gpus)
    """Where each GPU has a process of its own: all of those GPUs, `cuda:N,M`, among which `shard` divides rows. Each
    process reads the memory of all. Empty: only the GPUs of `device`."""
    verify: Literal["sizes", "full"] = _setting("sizes", _choice("sizes", "full"))
    """What is checked when the version is opened: sizes and shapes, or every byte's checksum as well."""
    unknown_keys: Literal["default_vector", "reject"] = _setting("default_vector", _choice("default_vector", "reject"))
    """What happens to a key that its table does not hold: it gets the table's default vector and is counted, or only
    the request that holds it is rejected."""
    dense_precision: Literal["float32", "tf32", "float16", "bfloat16"] = _setting(
        "float32", _choice("float32", "tf32", "float16", "bfloat16")
    )
    """How exactly the dense network is computed: on a GPU, `tf32` and `float16` are faster, with relative errors of
    about 1e-3, and `float16` holds numbers up to 65504 only. On a processor, `bfloat16` is faster for wide layers."""
    dense_engine: Literal["onnxruntime", "tensorrt"] = _setting("onnxruntime", _choice("onnxruntime", "tensorrt"))
    """What computes the dense network: ONNX Runtime, or on a GPU TensorRT, where its libraries are installed."""
    tensorrt_max_samples: int = _setting(1024, _count(1, _MAX_BATCH))
    """With `dense_engine` `tensorrt`: the largest batch that the network is compiled for."""
    dense_threads: int = _setting(0, _count(0, _MAX_THREADS))
    """Threads of the dense network for one batch. 0: half the processor's cores, at least one, at most eight."""
    lookup_threads: int = _setting(0, _count(0, _MAX_THREADS))
    """Threads of one look-up, taken only by large ones. 0: as `dense_threads`."""
    context_cache_bytes: int = _setting(0, _count(0))
    """Memory for results computed from contexts. A context that comes again is not computed again while no row that it
    looked up has changed. 0: nothing is kept. For models imported with context inputs, on a CPU."""
    max_keys_per_request: int = _setting(DEFAULT_MAX_KEYS, _count(1))
    """A request with more elements than this in any of its inputs is rejected."""
    volatile_store: StoreUrl | None = _setting(None, _url(StoreUrl))  # noqa: RUF009  as the others
    """URL of the store that is asked first for rows that the cache lacks (docs/reference/stores.md)."""
    persistent_store: StoreUrl | None = _setting(None, _url(StoreUrl))  # noqa: RUF009  as the others
    """URL of the store that is asked next, and holds all rows."""
    store_namespace: Literal["version", "shared"] = _setting("version", _choice("version", "shared"))
    """Which rows are read in the stores: the version's own, or those that all versions share, as in HPS."""
    store_timeout_ms: int = _setting(DEFAULT_TIMEOUT_MS, _count(1, _MAX_TIME))
    """The longest that a request waits for one store."""
    on_store_failure: Literal["default_vector", "error"] = _setting(
        "default_vector", _choice("default_vector", "error")
    )
    """What happens to a key that no store has while one is down."""
    cache_bytes: int | None = _setting(None, _count(0))
    """Memory of the cache over the stores. 0: no cache. None: as `cache_fraction` says."""
    cache_fraction: float = _setting(0.2, _number(0, 1))
    """Size of that cache as a fraction of all rows of all tables. 0: no cache."""
    insert_mode: Literal["sync", "async"] = _setting("sync", _choice("sync", "async"))
    """Whether a request waits for the rows that the cache lacks, or may be answered without them."""
    hit_rate_threshold: float = _setting(0.9, _number(0, 1))
    """With `insert_mode` `async`: the hit rate from which on a look-up does not wait."""
    cache_missed_keys: bool = _setting(True, _flag)
    """Whether rows that the volatile store lacks are copied there."""
    touch_rows: bool = _setting(True, _flag)
    """Whether rows that are read from the volatile store are marked as used there."""
    keep_versions: int = _setting(2, _count(0))
    """The newest versions up to this one whose rows stay in the volatile store. 0: all."""
    refresh_interval_s: float = _setting(0.0, _seconds)
    """Time between two refreshes of the cache from the stores. 0: only when `refresh` is called."""
    record_keys: str = _setting("", _folder)
    """Folder below which the keys that are looked up are recorded, for `hotrow size`. Empty: nothing is recorded."""
    record_keys_bytes: int = _setting(256 << 20, _count(1 << 12))
    """Largest size of one recording. A longer trace is sampled."""

    update_stream: KafkaUrl | None = _setting(None, _url(KafkaUrl))  # noqa: RUF009  as the others
    """URL of the brokers from which changed rows come while serving."""
    update_filter: str = _setting(".+", _pattern)
    """Regular expression: the topics of the model that are followed, among those of its tables."""
    update_since: datetime | None = _setting(None, _moment)  # noqa: RUF009  as the others
    """Updates published before this are not applied: the version has learned from them. None: all are applied."""
    non_finite_updates: Literal["refuse", "apply"] = _setting("refuse", _choice("refuse", "apply"))
    """What happens to an update with NaN or infinite elements."""
    catch_up_s: float = _setting(10.0, _seconds)
    """The longest that opening a version waits until it has applied what was published before."""

    warm_up_s: float = _setting(0.0, _seconds)
    """The longest that opening a version spends on fetching hot rows and on running batches of several sizes."""
    state_dir: str = _setting("", _path)
    """Folder where a session keeps which rows are hot, for the next version or process. Empty: nothing is kept."""
    canary_requests: str = _setting("", _path)
    """A file of recorded requests and answers (canary.py) that a version has to answer before it serves."""
    canary_tolerance: float = _setting(0.2, _number(0, math.inf))
    """How far answers may be from the recorded ones: the mean absolute difference of any output."""
    watch_interval_s: float = _setting(0.0, _seconds)
    """How often MANIFEST.json is looked at, so that new content in the same folder is served. 0: never."""

    @property
    def names_several_gpus(self) -> bool:
        """Whether `device` may be several."""
        return "," in self.device or self.device == "cuda:all"

    @property
    def has_store(self) -> bool:
        """Whether rows come from stores, through a cache."""
        return self.volatile_store is not None or self.persistent_store is not None

    @property
    def shard_device_ids(self) -> list[int]:
        """The GPUs of `shard_devices`; none where that is a single one."""
        found = [int(number) for number in self.shard_devices.removeprefix("cuda:").split(",") if number]
        return found if len(found) > 1 else []

    def check_devices(self, num_devices: int) -> None:
        """Refuse settings that are not supported with this many devices."""
        others = self.shard_device_ids
        if others and self.device not in [f"cuda:{number}" for number in others]:
            raise ConfigurationError(
                f"shard_devices {self.shard_devices!r} lacks the GPU of this process, device {self.device!r}: name one"
                " of them in device, or leave shard_devices out"
            )
        if self.shard != "rows":
            return
        if num_devices == 1 and not others:
            raise ConfigurationError(
                f"shard=rows divides rows among several GPUs, but device {self.device!r} is one device: name several"
                " (cuda:0,1), or leave shard out"
            )
        if self.has_store:
            raise ConfigurationError(
                "shard=rows divides the rows of table files, but with volatile_store or persistent_store each GPU has"
                " its own cache over the stores; leave shard out"
            )

    @property
    def num_dense_threads(self) -> int:
        """`dense_threads` with 0 resolved for this machine."""
        return self.dense_threads or max(1, min(8, _num_cores() // 2))

    @property
    def num_lookup_threads(self) -> int:
        """`lookup_threads` with 0 resolved for this machine."""
        return self.lookup_threads or self.num_dense_threads

    @classmethod
    def resolve(cls, *sources: Mapping[str, Any]) -> SessionConfig:
        """Settings from several sources, the first one that has a setting wins; then the defaults.

        Raises:
            ConfigurationError: names the setting, the value and what is allowed.
        """
        parsers = {f.name: f.metadata["parse"] for f in fields(cls)}
        values: dict[str, Any] = {}
        for name, value in ((name, value) for source in reversed(sources) for name, value in source.items()):
            if name not in parsers:
                meant = get_close_matches(name, parsers)
                known = f"did you mean {meant[0]!r}?" if meant else f"known settings: {', '.join(sorted(parsers))}"
                raise ConfigurationError(f"unknown setting {name!r}; {known}")
            try:
                values[name] = parsers[name](value)
            except ConfigurationError as error:  # of a URL, which must not be shown
                raise ConfigurationError(f"setting {name!r}: {error}") from None
            except ValueError as error:
                raise ConfigurationError(f"setting {name!r} cannot be {value!r}; {error}") from error
        return cls(**values)


def _num_cores() -> int:
    """Cores this process may run on, which in a container are fewer than the machine has."""
    return len(os.sched_getaffinity(0))

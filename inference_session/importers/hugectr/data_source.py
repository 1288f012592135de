"""HugeCTR's `DataSourceParams` and `DataSource`: model files between HDFS and this machine."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import Enum

from inference_session.errors import ConfigurationError
from inference_session.model_source import Copy

_RPC_PORTS = frozenset({9000, 8020, 9820})
"""Ports at which Hadoop's own protocol is usually spoken, which HugeCTR uses."""
_WEB_PORT = 9870


class FileSystemType_t(str, Enum):  # noqa: N801  HugeCTR's name
    """Where files are, for releases from 3.9 on."""

    Local = "local"
    HDFS = "hdfs"
    S3 = "s3"
    GCS = "gcs"
    Other = "other"


DataSourceType_t = FileSystemType_t
"""The name in releases 3.9 to 4.2."""


@dataclass
class DataSourceParams:
    """The parameters of 3.4, and `source` (or `type`), `server` and `port` of later releases, also by position.

    `port` is that of WebHDFS. The usual ports of Hadoop's own protocol (9000, HugeCTR's default, 8020, 9820) mean 9870.

    Raises:
        ConfigurationError: a source other than Local and HDFS.
    """

    use_hdfs: bool | FileSystemType_t = False
    namenode: str = "localhost"
    port: int = 9000
    hdfs_train_source: str = ""
    hdfs_train_filelist: str = ""
    hdfs_eval_source: str = ""
    hdfs_eval_filelist: str = ""
    hdfs_dense_model: str = ""
    hdfs_dense_opt_states: str = ""
    hdfs_sparse_model: Sequence[str] = ()
    hdfs_sparse_opt_states: Sequence[str] = ()
    local_train_source: str = ""
    local_train_filelist: str = ""
    local_eval_source: str = ""
    local_eval_filelist: str = ""
    local_dense_model: str = ""
    local_dense_opt_states: str = ""
    local_sparse_model: Sequence[str] = ()
    local_sparse_opt_states: Sequence[str] = ()
    hdfs_model_home: str = ""
    local_model_home: str = ""
    type: FileSystemType_t | None = None
    server: str | None = None
    source: FileSystemType_t | None = None

    def __post_init__(self) -> None:
        if isinstance(self.use_hdfs, FileSystemType_t):
            self.source = self.use_hdfs
        self.source = self.source or self.type
        if self.source and self.source not in (FileSystemType_t.Local, FileSystemType_t.HDFS):
            raise ConfigurationError(
                f"DataSourceParams: source {self.source.name} is not supported; expected Local or HDFS"
            )
        if self.source is not None:
            self.use_hdfs = self.source is FileSystemType_t.HDFS

    @property
    def is_hdfs(self) -> bool:
        """Whether files are on HDFS."""
        return bool(self.use_hdfs)

    def place_of(self, path: str) -> str:
        """What a path means by these parameters: itself, or a URL. URLs of this server and port mean it too."""
        server = self.server or self.namenode
        if self.is_hdfs:
            path = path.removeprefix(f"hdfs://{server}:{self.port}/")
        if not self.is_hdfs or "://" in path:
            return path
        port = _WEB_PORT if self.port in _RPC_PORTS else self.port
        return f"hdfs://{server}:{port}/{path.lstrip('/')}"


class DataSource:
    """The files that a DataSourceParams names."""

    def __init__(self, params: DataSourceParams) -> None:
        self._params = params

    def move_to_local(self) -> None:
        """Copy each `hdfs_…` file to the `local_…` path at its position; files that exist here are refused.

        Raises:
            ConfigurationError: lists of different lengths, a file that exists, or files that are not on HDFS.
            OSError, UnavailableError: HDFS cannot be read; run it again to go on.
        """
        if not self._params.is_hdfs:
            raise ConfigurationError("DataSourceParams: use_hdfs is False, so there is nothing to move")
        for source, target in self._pairs():
            with Copy(self._params.place_of(source), target) as copy:
                copy.run()

    def _pairs(self) -> Iterator[tuple[str, str]]:
        names = [name for name in DataSourceParams.__dataclass_fields__ if name.startswith("hdfs_")]
        for name in names:
            local = name.replace("hdfs_", "local_")
            sources, targets = (_listed(getattr(self._params, side)) for side in (name, local))
            if sources and targets and len(sources) != len(targets):
                raise ConfigurationError(
                    f"DataSourceParams: {len(sources)} {name}, but {len(targets)} {local}; give one for each"
                )
            yield from zip(sources, targets, strict=False)


def _listed(value: str | Sequence[str]) -> Sequence[str]:
    if isinstance(value, str):
        return (value,) if value else ()
    return value

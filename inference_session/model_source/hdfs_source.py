"""Files on HDFS, through WebHDFS and the `hdfs` package.

A NameNode says where a file's blocks are, a DataNode reads or writes them. After a failure that may pass (a DataNode
has just died, a NameNode is in safe mode) the work is tried again for some seconds; a read continues where it had
stopped. Messages never repeat those of the HTTP client: they show whole URLs, and these hold delegation tokens.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import urlsplit

from inference_session.errors import ConfigurationError, HotrowError, SourceError, UnavailableError, as_thrown
from inference_session.model_source.base import ChunksFrom, Entry, ModelSource
from inference_session.model_source.hdfs_url import HdfsUrl

try:
    import requests
    from hdfs import Client, HdfsError, InsecureClient, TokenClient
    from urllib3.exceptions import HTTPError

    from inference_session.model_source.hdfs_escapes import EscapingSession
except ImportError as missing:
    raise ConfigurationError("hdfs:// needs the package `hdfs`: pip install 'hotrow[hdfs]'") from missing

AUTHENTICATION = "HOTROW_HDFS_AUTH"
TOKEN_FILE = "HOTROW_HDFS_TOKEN_FILE"  # noqa: S105  the name of a variable
TIMEOUT_S = (5.0, 20.0)
"""Timeouts of connecting, and between two pieces of an answer."""
PAUSES_S = (0.2, 0.5, 1.0, 2.0, 4.0)
"""Pauses between attempts."""
RETRY_TIMEOUT_S = 45.0
"""No attempt begins later than this after the first."""
MAX_DEPTH = 1000
"""HDFS's own limit."""
_MAX_CONNECTIONS = 32
_READ_BYTES = 1 << 20
_MAX_REASON = 300
_PASSING = ("StandbyException", "RetriableException", "SafeModeException")
_NO_DATANODE = ("Failed to find datanode", "No active nodes contain this block")
"""What the NameNode says of a write, and of a read, while it counts as dead each DataNode that could serve it, for
instance the only one while it starts again.
"""
_PASSING_TEXTS = ("safe mode", "is not sufficiently replicated yet", *_NO_DATANODE)
"""The second: the last block of a file to append to has not been reported by its DataNode yet."""
_LEASED = ("AlreadyBeingCreatedException", "RecoveryInProgressException", "Cannot obtain block length")
"""Part of the error for a file that a writer has not closed."""

Result = TypeVar("Result")


class HdfsSource(ModelSource):
    """A folder of HDFS, or one file."""

    def __init__(self, url: HdfsUrl) -> None:
        """Nothing is sent before it is needed. ConfigurationError where the environment asks for what is missing."""
        self.url = url
        self._session = EscapingSession(url.address)
        self._session.mount(
            url.http_url, requests.adapters.HTTPAdapter(pool_connections=8, pool_maxsize=_MAX_CONNECTIONS)
        )
        self._client = _create_client(url, self._session)

    def name_of(self, path: str) -> str:
        return f"{str(self.url).rstrip('/')}/{path}".rstrip("/")

    def stat(self, path: str) -> Entry | None:
        return self._try(path, lambda: self._stat(path))

    def entries(self, path: str = "") -> list[Entry]:
        top = self.stat(path)
        if top is None:
            raise SourceError(f"{self.name_of(path)}: no such file or folder")
        return sorted(self._below(path)) if top.is_folder else [top]

    def _below(self, path: str) -> list[Entry]:
        entries: list[Entry] = []
        folders = [path]
        while folders:
            folder = folders.pop()
            if folder.count("/") >= MAX_DEPTH:
                raise SourceError(f"{self.name_of('')}: folders are nested more than {MAX_DEPTH} deep")
            children = self._try(folder, partial(self._children, folder))
            entries += children
            folders += [child.path for child in children if child.is_folder]
        return entries

    def _children(self, path: str) -> list[Entry]:
        statuses = self._client.list(self._path(path), status=True)
        children = [_entry(f"{path}/{_checked_name(name)}".lstrip("/"), status) for name, status in statuses]
        if len({child.path for child in children}) != len(children):
            raise ValueError
        return children

    def read(self, path: str, begin: int, num_bytes: int) -> bytes:
        parts: list[bytes] = []
        self._try(path, lambda: self._read_on(path, begin, num_bytes, parts))
        return b"".join(parts)

    def _read_on(self, path: str, begin: int, num_bytes: int, parts: list[bytes]) -> None:
        """Read the rest, which the parts lack."""
        left = num_bytes - sum(map(len, parts))
        if not left:
            return
        self._session.prepare_for(self._client, self._path(path))
        sent = self._client.read(self._path(path), offset=begin + num_bytes - left, length=left)
        with sent as stream, contextlib.suppress(HTTPError):  # of a stream that ends early; it does not name the node
            while left and (part := stream.read(min(left, _READ_BYTES))):
                parts.append(part)
                left -= len(part)
        if left:
            end = self.status(path)
            if end is None or end["length"] < begin + num_bytes:
                raise SourceError(
                    f"{self.name_of(path)}: the file ends before byte {begin + num_bytes}; it may have been "
                    "changed while it was read"
                )
            raise UnavailableError(
                f"{self.name_of(path)}: the DataNode stopped sending after byte {begin + num_bytes - left}; if it does"
                " so again, `hdfs fsck` says whether the file's blocks are damaged"
            )

    def write(self, path: str, chunks_from: ChunksFrom) -> None:
        """See ModelSource. One request carries all that is left: HDFS has one writer per file."""
        try:
            failure = self._try(path, lambda: self._write_on(path, chunks_from))
        except _LeasedError as error:
            failure = error
        if isinstance(failure, _LeasedError):
            # The previous writer died with its DataNode, and holds the lease for a minute. Start the file again.
            self.remove(path)
            failure = self._try(path, lambda: self._write_on(path, chunks_from))
        if failure is not None:
            raise failure

    def _write_on(self, path: str, chunks_from: ChunksFrom) -> BaseException | None:
        """Write from the file's end; returns an error after which the same must not be tried again: that of the chunks
        themselves, or a _LeasedError where the file had grown before it was appended to.
        """
        self._session.prepare_for(self._client, self._path(path))
        before = self.status(path)
        begin = before["length"] if before else 0
        sent = _CountedChunks(chunks_from(begin))
        try:
            self._client.write(self._path(path), data=iter(sent), append=before is not None)
        except (requests.RequestException, HTTPError, HotrowError, OSError):
            if sent.failure is None:
                raise
            return sent.failure
        except HdfsError as error:
            if error.exception != "FileAlreadyExistsException":
                raise
            # The DataNode of a writer that had died made the file after its state was read: append to it next time.
            raise _LeasedError(f"{self.name_of(path)}: another writer made the file") from None
        return self._check_length(path, begin, begin + sent.num_bytes)

    def _check_length(self, path: str, begin: int, expected: int) -> _LeasedError | None:
        after = self.status(path)
        length = after["length"] if after else 0
        if length > expected:
            # The DataNode of a writer that had died closed the file, with more bytes in it, after its length was read.
            return _LeasedError(f"{self.name_of(path)}: another writer added {length - expected} bytes")
        # A DataNode that reaches a quota, or has no room for another block, may report success. So may one that has
        # just come back: it keeps nothing, and takes the same bytes a moment later.
        if length < expected:
            kind = UnavailableError if length == begin else SourceError
            raise kind(
                f"{self.name_of(path)}: {expected} bytes were written, {length} are there; the file system may be full"
                " or its quota used up"
            )
        return None

    def make_folder(self, path: str) -> None:
        self._try(path, lambda: self._client.makedirs(self._path(path)))

    def rename(self, path: str, target: str) -> None:
        self._refuse_existing(target)
        name = path.rpartition("/")[2]
        with self._translated(path):
            renamed = self._client._rename(self._path(path), destination=self._path(target)).json()["boolean"]
            inside = self.status(f"{target}/{name}") if renamed else None
            if inside is not None and self.status(path) is None:
                # Another process has made a folder there meanwhile: HDFS moved ours into it. Move it back.
                self._client._rename(self._path(f"{target}/{name}"), destination=self._path(path))
                renamed = False
        if not renamed:
            self._refuse_existing(target)
            raise SourceError(f"{self.name_of(path)}: cannot be renamed to {self.name_of(target)}")

    def remove(self, path: str) -> None:
        self._try(path, lambda: self._client.delete(self._path(path), recursive=True))

    def close(self) -> None:
        self._session.close()

    def __repr__(self) -> str:
        return f"<HdfsSource {str(self.url)!r}>"

    def _path(self, path: str) -> str:
        return f"{self.url.path.rstrip('/')}/{path}".rstrip("/") or "/"

    def _stat(self, path: str) -> Entry | None:
        status = self.status(path)
        return None if status is None else _entry(path, status)

    def status(self, path: str) -> dict[str, Any] | None:
        """What the NameNode says of a path, by WebHDFS's names; None: nothing is there."""
        try:
            status: dict[str, Any] = self._client.status(self._path(path))
        except HdfsError as error:
            if error.exception == "FileNotFoundException":
                return None
            raise
        return status

    def _refuse_existing(self, target: str) -> None:
        if self.stat(target) is not None:
            raise ConfigurationError(f"{self.name_of(target)}: already exists; choose another target")

    def _try(self, path: str, work: Callable[[], Result]) -> Result:
        """The result of some work, which is tried again after failures that may pass."""
        begin = time.monotonic()
        pauses = iter(PAUSES_S)
        while True:
            try:
                with self._translated(path):
                    return work()
            except UnavailableError:  # noqa: PERF203  it is what the loop is for
                pause = next(pauses, None)
                if pause is None or time.monotonic() + pause - begin > RETRY_TIMEOUT_S:
                    raise
                time.sleep(pause)

    @contextlib.contextmanager
    def _translated(self, path: str) -> Iterator[None]:
        """Translate errors of the packages that this module uses into ours."""
        try:
            yield
        except HotrowError:
            raise
        except HdfsError as error:
            raise self._of_hdfs(path, as_thrown(error)) from None
        except (KeyError, TypeError, ValueError, RecursionError) as error:  # an unknown answer, e.g. of a web server
            as_thrown(error)
            raise SourceError(f"{self.name_of(path)}: {self._not_webhdfs()}") from None
        except (requests.RequestException, HTTPError) as error:
            raise UnavailableError(f"{self.name_of(path)}: {self._of_http(as_thrown(error))}") from None

    def _of_hdfs(self, path: str, error: HdfsError) -> HotrowError:
        text = error.message.decode(errors="replace") if isinstance(error.message, bytes) else str(error.message)
        reason = " ".join(text.split("\tat ")[0].split())[:_MAX_REASON]
        if error.exception in _LEASED or any(part in text for part in _LEASED):
            return _LeasedError(f"{self.name_of(path)}: {reason}")
        if error.exception in _PASSING or any(part in text for part in _PASSING_TEXTS):
            return UnavailableError(f"{self.name_of(path)}: {reason}")
        if "Authentication failure" in text:
            return SourceError(f"{self.name_of(path)}: the NameNode refuses access: {_why_refused(self.url)}")
        if error.exception is None:
            return SourceError(f"{self.name_of(path)}: {self._not_webhdfs()}")
        return SourceError(f"{self.name_of(path)}: {reason} ({error.exception})")

    def _of_http(self, error: Exception) -> str:
        """The failure, without the URL."""
        request = getattr(error, "request", None)
        node = urlsplit(getattr(request, "url", None) or self.url.http_url).netloc
        what = "NameNode" if node == self.url.address else "DataNode"
        if isinstance(error, requests.exceptions.SSLError):
            return f"no TLS connection to the {what} at {node}{_of_tls(error)}"
        if isinstance(error, requests.Timeout):
            return f"the {what} at {node} did not answer in time"
        if "NameResolutionError" in repr(error):
            return f"no connection to the {what} at {node}; this machine finds no address of that name"
        if "NewConnectionError" in repr(error):
            hint = f"; PORT is that of its web page, {self.url.default_port} unless it was changed"
            return f"no connection to the {what} at {node}{'' if what == 'DataNode' else hint}"
        is_plain = what == "NameNode" and self.url.scheme != "swebhdfs"
        hint = "; if that is its port of HTTPS, write swebhdfs:// in place of the scheme" if is_plain else ""
        return f"the {what} at {node} closed the connection{hint}"

    def _not_webhdfs(self) -> str:
        return f"{self.url.address} does not answer as WebHDFS; check that this is the NameNode's HTTP port"


class _LeasedError(UnavailableError):
    """Another process is writing the file, or was."""


class _CountedChunks:
    """Passes chunks on, and records the number of bytes and the error that ended them."""

    def __init__(self, chunks: Iterable[bytes]) -> None:
        self._chunks = chunks
        self.num_bytes = 0
        self.failure: BaseException | None = None

    def __iter__(self) -> Iterator[bytes]:
        try:
            for chunk in self._chunks:
                self.num_bytes += len(chunk)
                yield chunk
        except BaseException as error:
            self.failure = error
            raise


def _of_tls(error: Exception) -> str:
    """Why there is no TLS connection, as far as the error tells, and what to do."""
    text = repr(error)
    if "WRONG_VERSION_NUMBER" in text:
        return "; it speaks no TLS there: give its port of HTTPS (9871 unless it was changed), or hdfs:// for HTTP"
    if "CERTIFICATE_VERIFY_FAILED" in text or "doesn't match" in text:
        return "; its certificate is of no authority that is trusted here, or of another name: see REQUESTS_CA_BUNDLE"
    return ""


def _entry(path: str, status: dict[str, Any]) -> Entry:
    """ValueError, KeyError or TypeError where the NameNode's answer has another form."""
    if status["type"] == "DIRECTORY":
        return Entry(path, 0, "", is_folder=True)
    return Entry(path, _checked_length(status), f"{status['modificationTime']}-{status.get('fileId', '')}")


def _checked_length(status: dict[str, Any]) -> int:
    length = status["length"]
    if type(length) is not int or not 0 <= length < 2**63:
        raise ValueError
    return length


def _checked_name(name: object) -> str:
    """A child's name; one that would lead out of its folder is refused."""
    if not isinstance(name, str) or not name or {"/", "\0"} & {*name} or name in (".", ".."):
        raise ValueError
    return name


def _create_client(url: HdfsUrl, session: requests.Session) -> Client:
    """The client for the way of authentication that the environment names."""
    kind = os.environ.get(AUTHENTICATION, "simple")
    settings: dict[str, Any] = {"timeout": TIMEOUT_S, "session": session}
    if kind == "simple":
        return InsecureClient(url.http_url, user=os.environ.get("HADOOP_USER_NAME"), **settings)
    if kind == "token":
        return TokenClient(url.http_url, _token(), **settings)
    if kind == "kerberos":
        try:
            from hdfs.ext.kerberos import KerberosClient
        except ImportError as missing:
            raise ConfigurationError(
                f"{AUTHENTICATION}=kerberos needs the package `requests-kerberos`: pip install 'hotrow[kerberos]'"
            ) from missing
        return KerberosClient(url.http_url, **settings)
    raise ConfigurationError(f"{AUTHENTICATION} cannot be {kind!r}; allowed: simple, token, kerberos")


def _why_refused(url: HdfsUrl) -> str:
    """What may be wrong with the way of authentication that the environment names."""
    kind = os.environ.get(AUTHENTICATION, "simple")
    if kind == "kerberos":
        return f"`klist` has to show a ticket that is valid; HTTP/{url.host} has to be a principal of the NameNode"
    if kind == "token":
        return f"the token in the file that {TOKEN_FILE} names may be another cluster's, or expired"
    return f"a user's name is not enough for it; set {AUTHENTICATION} to kerberos or token"


def _token() -> str:
    """The delegation token in the file that the environment names."""
    path = os.environ.get(TOKEN_FILE)
    if not path:
        raise ConfigurationError(
            f"{AUTHENTICATION}=token needs {TOKEN_FILE}, the path of a file that contains a delegation token"
        )
    try:
        return Path(path).read_text(encoding="ascii").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigurationError(f"{TOKEN_FILE}: {path!r} cannot be read as text: {type(error).__name__}") from error

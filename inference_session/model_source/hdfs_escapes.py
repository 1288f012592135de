"""Names with a % in them on HDFS: DataNodes of some releases (Hadoop 2.7 among them) decode such a path twice.

They would read and write another file than the requested one. So, before the first such path goes to a DataNode, a
request asks it for something that it must refuse; its error message shows what it has decoded.
"""

from __future__ import annotations

import threading
from typing import Any
from urllib.parse import urlsplit

import requests

_PROBE = "/hotrow%zz"
"""`%zz` is no escape sequence: a server that decodes it reports an error."""
_BLOCK_BYTES = 1
"""HDFS refuses files with such small blocks, so the probe creates no file."""


class EscapingSession(requests.Session):
    """Escapes paths as those DataNodes need it, once it has detected them."""

    def __init__(self, name_node: str) -> None:
        """`name_node`: its host:port, which decodes paths once."""
        super().__init__()
        self._name_node = name_node
        self._decodes_twice: bool | None = None
        self._asking = threading.Lock()

    def prepare_for(self, client: Any, path: str) -> None:
        """Find out how DataNodes decode, if this path makes a difference; `client` is the HDFS client over this."""
        if "%" not in path:
            return
        with self._asking:
            if self._decodes_twice is None:
                location = client._create(_PROBE, blocksize=_BLOCK_BYTES, overwrite=False).headers["location"]
                answer = client._request(method="PUT", url=location, data=b"")
                self._decodes_twice = "escape sequence" in answer.text

    def send(self, request: requests.PreparedRequest, **settings: Any) -> requests.Response:
        """See requests.Session; redirections pass through here as well."""
        parts = urlsplit(request.url or "")
        if self._decodes_twice and parts.netloc != self._name_node:
            request.url = parts._replace(path=parts.path.replace("%", "%25")).geturl()
        return super().send(request, **settings)

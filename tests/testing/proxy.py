"""A TCP proxy whose network can be cut, slowed, or made to swallow everything or to damage it."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Callable
from enum import Enum

_CHUNK_BYTES = 65_536
_SLOW_S = 0.05


class Network(Enum):
    """How bytes are handled."""

    GOOD = "passed on"
    CUT = "connections are closed, and no new one is taken"
    SILENT = "nothing arrives; what was sent meanwhile is late"
    SLOW = "each piece takes a twentieth of a second longer"


class Proxy:
    """Passes connections to its port on to another one of this machine. A context manager."""

    def __init__(
        self, target_port: int, delay: Callable[[bytes, bool], object] = lambda _data, _is_answer: None
    ) -> None:
        """`delay` is called before bytes, 64 KiB at most, are passed on: with them, and whether they are an answer."""
        self._target_port, self._delay = target_port, delay
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self.damage: tuple[bytes, bytes] | None = None
        """Bytes of answers, which must come in one piece, and as many others that take their place."""
        self._network = Network.GOOD
        self._changed = threading.Condition()
        self._sockets: set[socket.socket] = set()
        self._accepting = threading.Thread(target=self._accept, daemon=True)

    def set(self, network: Network) -> None:
        """Set the state of the network from now on."""
        with self._changed:
            self._network = network
            self._changed.notify_all()
            if network is Network.CUT:
                self._hang_up()

    def __enter__(self) -> Proxy:
        self._accepting.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.set(Network.CUT)
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._accepting.join()

    def _hang_up(self) -> None:
        for one in self._sockets:
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)
        self._sockets.clear()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                outside, _ = self._listener.accept()
                try:
                    self._connect(outside)
                except OSError:  # no process listens there now
                    outside.close()

    def _connect(self, outside: socket.socket) -> None:
        inside = socket.create_connection(("127.0.0.1", self._target_port))
        with self._changed:
            self._sockets |= {outside, inside}
            if self._network is Network.CUT:
                self._hang_up()
        for source, sink in ((outside, inside), (inside, outside)):
            source.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            threading.Thread(target=self._pump, args=(source, sink, source is inside), daemon=True).start()

    def _pump(self, source: socket.socket, sink: socket.socket, is_answer: bool) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(_CHUNK_BYTES):
                with self._changed:
                    self._changed.wait_for(lambda: self._network is not Network.SILENT)
                if self._network is Network.SLOW:
                    time.sleep(_SLOW_S)
                self._delay(data, is_answer)
                damage = self.damage if is_answer else None
                sink.sendall(data if damage is None else data.replace(*damage))
        with self._changed:
            self._sockets -= {source, sink}
        for one in (source, sink):  # each direction ends both; the other one's thread closes nothing that is in use
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)
        source.close()

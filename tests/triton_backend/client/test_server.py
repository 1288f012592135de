"""What a server refuses, in the words of its operator."""

from __future__ import annotations

from typing import Any

import pytest

from triton_backend.client.server import RemoteError, RemoteServer


def test_a_server_that_loads_by_itself_alone_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton says `polling` in the mode `none` too, and not what to do."""

    def answer(method: str, *_: Any, **__: Any) -> dict[str, Any]:
        if method != "load_model":
            return {}
        raise RemoteError("explicit model load / unload is not allowed if polling is enabled")

    with RemoteServer("localhost:8001") as server:
        monkeypatch.setattr(server, "_call", answer)
        with pytest.raises(RemoteError, match=r"8001 loads models by itself alone.*--model-control-mode=explicit"):
            server.load("ctr")

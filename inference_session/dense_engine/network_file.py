"""A network to be opened: an ONNX file, or what has been made of it in memory."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple


class NetworkFile(NamedTuple):
    """An ONNX file, which messages name, and what is opened in its place, if anything is."""

    path: Path
    made: bytes | None = None
    """Another ONNX file's content; None: the file itself is opened."""

    def content(self) -> bytes:
        """What is opened, without weights in other files; OSError where it cannot be read."""
        return self.path.read_bytes() if self.made is None else self.made

    def harmful_optimizers(self) -> list[str]:
        """Optimisations of ONNX Runtime that end the process for some networks, and speed nothing up in this one."""
        # This one, which is for convolutions and pooling, crashes in ONNX Runtime 1.32 on transformers in half
        # precision. Operators are named in plain text.
        try:
            content = self.content()
        except OSError:  # the engine says why
            return []
        return [] if b"Conv" in content or b"Pool" in content else ["NchwcTransformer"]

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
        # This one is for convolutions and pooling. In ONNX Runtime 1.32 it crashes on transformers in half precision.
        return [] if self.may_have("Conv", "Pool") else ["NchwcTransformer"]

    def may_have(self, *operators: str) -> bool:
        """Whether a node may have one of these operators, or one whose name contains theirs: it is plain text there."""
        try:
            content = self.content()
        except OSError:  # the engine says why
            return False
        return any(operator.encode() in content for operator in operators)

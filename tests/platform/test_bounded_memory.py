"""The bounded memory of values that are expensive to make."""

from __future__ import annotations

from inference_session.platform.bounded_memory import BoundedMemory


def test_what_was_used_longest_ago_is_forgotten() -> None:
    """Reading counts as use, and so does replacing a value; there are never more values than asked for."""
    memory: BoundedMemory[str, int] = BoundedMemory(2)
    memory.put("a", 1)
    memory.put("b", 2)
    assert memory.get("a") == 1
    memory.put("c", 3)
    assert (memory.get("a"), memory.get("b"), memory.get("c")) == (1, None, 3)
    memory.put("a", 4)
    memory.put("d", 5)
    assert (memory.get("a"), memory.get("c"), memory.get("d")) == (4, None, 5)
    assert len(memory) == 2

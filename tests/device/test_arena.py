"""Memory of requests on a GPU: pieces do not overlap, and those of like requests lie in the same places."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from inference_session.device.arena import Arena

REQUESTS = st.lists(st.lists(st.integers(0, 5000), max_size=8), min_size=1, max_size=8)


@settings(max_examples=50)
@given(requests=REQUESTS)
def test_pieces_are_apart_and_come_again(requests: list[list[int]]) -> None:
    """A request like an earlier one gets the same places, whatever came in between."""
    arena = Arena(bytearray, 1024)
    places: dict[tuple[int, ...], list[tuple[int, int]]] = {}
    for sizes in (*requests, *requests):
        taken = []
        for size in sizes:
            block, begin = arena.take(size)
            assert begin % 256 == 0
            assert begin + size <= len(block)
            taken.append((id(block), begin))
        for i, (block, begin) in enumerate(taken):
            for other, start in taken[i + 1 :]:
                assert block != other or start >= begin + sizes[i]
        assert places.setdefault(tuple(sizes), taken) == taken
        arena.reset()


@given(sizes=st.lists(st.integers(0, 5000), max_size=6), more=st.lists(st.integers(0, 5000), max_size=6))
def test_what_is_taken_behind_a_position_is_free_again(sizes: list[int], more: list[int]) -> None:
    """Memory for something in between does not move the pieces after it."""
    arena = Arena(bytearray, 1024)
    for _ in range(2):  # the second time all blocks are there
        first = [arena.take(size) for size in sizes]
        position = arena.position()
        for size in more:
            arena.take(size)
        arena.reset(position)
        between = [arena.take(size) for size in sizes]
        arena.reset()
    assert [arena.take(size) for size in (*sizes, *sizes)] == [*first, *between]

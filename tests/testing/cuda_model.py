"""The CUDA kernels' arithmetic of keys, lanes, tags and slots, in plain Python (kernels/cuda/*.cu*).

Each function has the name of a kernel function: tests compare the arithmetic with its purpose, without a GPU.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

LANES = 32
SLOTS = 62
MAX_BAGS_PER_TILE = 8
SUM_BLOCK = 32
NUM_TAGS = 254
_MASK = 2**64 - 1


def stored_key(key: int, num_row_numbers: int) -> int:
    """The one key that a row is kept under; num_row_numbers is 0 where keys are no row numbers."""
    return key + num_row_numbers if 0 > key >= -num_row_numbers else key


def hash_key(key: int) -> int:
    """Of an int64."""
    mixed = key & _MASK
    mixed = (mixed ^ mixed >> 33) * 0xFF51AFD7ED558CCD & _MASK
    mixed = (mixed ^ mixed >> 33) * 0xC4CEB9FE1A85EC53 & _MASK
    return mixed ^ mixed >> 33


def bucket_of(hashed: int, num_buckets: int) -> int:
    """The one bucket that a key may be in."""
    return (hashed >> 32) * num_buckets >> 32


def tag_of(hashed: int) -> int:
    """1 … 254."""
    return 1 + ((hashed & 0xFFFF) * NUM_TAGS >> 16)


def place_of(key: int, num_buckets: int, first_key: int) -> tuple[int, int, bool]:
    """Bucket, tag, and whether no other key with the third has both."""
    number = key - first_key & _MASK
    bits = (num_buckets * NUM_TAGS).bit_length() - 1
    if number >> bits:
        hashed = hash_key(key)
        return bucket_of(hashed, num_buckets), tag_of(hashed), False
    mask, half = (1 << bits) - 1, (bits + 1) // 2
    mixed = (number ^ number >> half) * 0xFF51AFD7ED558CCD & mask
    mixed = (mixed ^ mixed >> half) * 0xC4CEB9FE1A85EC53 & mask
    mixed ^= mixed >> half
    product = mixed * num_buckets
    assert product <= _MASK
    return product >> bits, 1 + ((product & mask) * NUM_TAGS >> bits), True


def match_word(word: int, pattern: int) -> int:
    """Four bits, one per byte of a 32-bit word that equals that of `pattern`."""
    differing = word ^ pattern
    zero = ~(((differing & 0x7F7F7F7F) + 0x7F7F7F7F | differing) | 0x7F7F7F7F) & 0xFFFFFFFF
    return ((zero >> 7) * 0x10204080 & 0xFFFFFFFF) >> 28


def match_slots(bucket: bytes, tag: int) -> int:
    """One bit per slot of a bucket of 64 bytes whose tag is the given one."""
    words = [int.from_bytes(bucket[i : i + 4], "little") for i in range(0, 64, 4)]
    bits = sum(match_word(word, tag * 0x01010101) << 4 * i for i, word in enumerate(words))
    return bits & (1 << SLOTS) - 1


def candidates(matches: int) -> Iterator[int]:
    """Slots in the order in which their keys are read."""
    while matches:
        yield (matches & -matches).bit_length() - 1
        matches &= matches - 1


def first_from(slots: int, start: int) -> int:
    """The first of some slots from a given one on, round the end."""
    later = slots & ((1 << SLOTS) - 1) << start & _MASK
    return next(candidates(later or slots))


def spread(bits: int) -> int:
    """Four bytes of 0 or 1 from four bits."""
    return (bits & 15) * 0x00204081 & 0x01010101


def segment_of(first_tiles: Sequence[int], tile: int) -> int:
    """The last segment that begins at or before a tile; `first_tiles` has one entry more than there are segments."""
    low, high = 0, len(first_tiles) - 2
    while low < high:
        middle = (low + high + 1) // 2
        if first_tiles[middle] <= tile:
            low = middle
        else:
            high = middle - 1
    return low


def in_order(first: int, second: int) -> list[int]:
    """Which lane takes the place of each: those of `first`, of `second`, the others."""
    order = [0] * LANES
    others = ~(first | second) & 0xFFFFFFFF
    for lane in range(LANES):
        before = (1 << lane) - 1
        in_first, in_second = first >> lane & 1, second >> lane & 1
        like_this = first if in_first else second if in_second else others
        ahead = 0 if in_first else first.bit_count() if in_second else (first | second).bit_count()
        order[ahead + (like_this & before).bit_count()] = lane
    return order


def lanes_per_row(steps: int) -> int:
    """A power of two."""
    return LANES if steps >= LANES else 1 << (steps - 1).bit_length()


def copied(steps: int, num_keys: int, in_flight: int) -> Iterator[tuple[int, int]]:
    """(key, step) in the order in which `copy_rows` copies them, one lane after the other."""
    width = lanes_per_row(steps)
    rows_at_once = LANES // width
    for first in range(0, num_keys, rows_at_once * in_flight):
        for begin in range(0, steps, width):
            for i in range(in_flight):
                for lane in range(LANES):
                    key, step = first + i * rows_at_once + lane // width, begin + (lane & width - 1)
                    if key < num_keys and step < steps:
                        yield key, step


def copied_tile(width: int, in_flight: int) -> Iterator[tuple[int, int, int]]:
    """(lane whose row it is, number of the vector that it is written to, step), as `copy_tile` copies them."""
    rows_at_once = LANES // width
    for first in range(0, LANES, rows_at_once * in_flight):
        for i in range(in_flight):
            for lane in range(LANES):
                group, rounds = lane // width, first // rows_at_once + i
                yield first + i * rows_at_once + group, group + rounds * rows_at_once, lane % width


def places_of_keys(begins: Sequence[int], lengths: Sequence[int]) -> list[int]:
    """As `Bags` of pooling.cuh: where among the segment's keys each key of a tile's bags is."""
    ends = [0] * LANES
    ends[: len(lengths)] = lengths
    distance = 1
    while distance < MAX_BAGS_PER_TILE:
        ends = [end + (ends[lane - distance] if lane >= distance else 0) for lane, end in enumerate(ends)]
        distance *= 2
    firsts = [begin - (end - length) for begin, end, length in zip(begins, ends, lengths, strict=False)]
    total = ends[MAX_BAGS_PER_TILE - 1]
    bags = [sum(key >= end for end in ends[: len(lengths) - 1]) for key in range(total)]
    return [firsts[bag] + key for key, bag in enumerate(bags)]


def group_after(group: int, before: int, width: int) -> int:
    """Which of the next rows a group of lanes takes first, after as many keys of the bag."""
    return group - before & LANES // width - 1


def pool_bags(lengths: Sequence[int], width: int) -> list[list[tuple[int, int]]]:
    """For each key of each bag of a tile: which block of sums it is in, and which group of lanes adds it."""
    ends = [sum(lengths[: bag + 1]) for bag in range(len(lengths))]
    pooled: list[list[tuple[int, int]]] = [[] for _ in lengths]
    bag, begin, block, block_end = 0, 0, 0, min(ends[0], SUM_BLOCK)

    def end_blocks_at(place: int) -> None:
        nonlocal bag, begin, block, block_end
        while bag < len(lengths) and block_end == place:
            block += 1
            if place == ends[bag]:
                bag, begin, block = bag + 1, place, 0
            block_end = min(ends[bag] if bag < len(lengths) else ends[-1], place + SUM_BLOCK)

    for base in range(0, ends[-1], LANES):
        place, stop = base, min(base + LANES, ends[-1])
        while place < stop:
            end_blocks_at(place)
            to = min(stop, block_end)
            groups = {group_after(group, place - begin, width): group for group in range(LANES // width)}
            pooled[bag].extend((block, groups[key % (LANES // width)]) for key in range(to - place))
            place = to
    return pooled

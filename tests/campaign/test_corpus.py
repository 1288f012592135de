"""Short campaigns on seeds that once found an error, each on the deployment in which it was found."""

from __future__ import annotations

import logging

import pytest

from tests.campaign.episode import Episode
from tests.campaign.expectations import Writer
from tests.campaign.journal import Journal
from tests.campaign.plan import SMALL_CACHE_BYTES, Plan

NUM_STEPS = 15
MEAN_PAUSE_S = 0.08
"""Of a client: the episodes share the processor with other tests."""
CORPUS = {
    "5:2": Plan(Writer.DIRECT, "redis", by_proxy=True, has_rocksdb=True, has_files=False),
    "1:0": Plan(Writer.DIRECT, "redis", has_rocksdb=True, has_files=False, cache_bytes=SMALL_CACHE_BYTES),
    "41:0": Plan(Writer.DIRECT, "redis", has_rocksdb=True),
    "21:0": Plan(Writer.DIRECT, "cluster", has_rocksdb=True),
    "a": Plan(Writer.STREAM, by_proxy=True),
    "d": Plan(Writer.DIRECT, "redis", has_rocksdb=True, cache_bytes=SMALL_CACHE_BYTES, has_small_disk=True),
    "42:0": Plan(Writer.STREAM, has_rocksdb=True, cache_bytes=SMALL_CACHE_BYTES, on_triton=True),
    "x2:0": Plan(Writer.DIRECT, "redis", cache_bytes=SMALL_CACHE_BYTES, has_clock=True),
    "90101:13": Plan(Writer.STREAM),
    "532901:14": Plan(Writer.DIRECT, "redis", cache_bytes=SMALL_CACHE_BYTES),
    "908317:21": Plan(Writer.STREAM, "redis"),
    "825503:6": Plan(Writer.STREAM, "sentinel", cache_bytes=SMALL_CACHE_BYTES),
    "905516:4": Plan(Writer.STREAM, "sentinel", has_rocksdb=True, cache_bytes=1 << 20),
    "471902:1": Plan(Writer.DIRECT, "cluster", has_rocksdb=True, has_files=False, cache_bytes=1 << 20),
}
"""By seed. What they found: an older Redis believed for half a second after it was started again; its older rows
believed by the next session; marks of erased rows dropped with it; a Redis never used again that was away from the
first write on; a damaged file shared with the next version; a RocksDB's table half made on a full disk, for good; an
error of the Kafka client that was none of ours; the first erased row of a table not known to be erased; rows that went
back as new content took over in place; a row of Redis alone, erased and written again, lost as what was promoted before
was checked; rows of the files in Redis that another process had erased; rows of a RocksDB that its reader saw too old
as the writer closed it, and too old as it was opened meanwhile. Row numbers from the end, which showed older rows, are
found by many of them.
"""


@pytest.mark.slow
@pytest.mark.parametrize("seed", CORPUS)
def test_nothing_is_found_any_more(seed: str) -> None:
    """Few steps: `make campaign` does many."""
    journal = Journal()
    logging.getLogger().addHandler(journal)
    try:
        episode = Episode(seed, journal, plan=CORPUS[seed], mean_pause_s=MEAN_PAUSE_S)
        episode.run(NUM_STEPS)
    finally:
        logging.getLogger().removeHandler(journal)

    assert journal.findings == []
    assert episode.num_answers > 0

"""`python -m tests.campaign --minutes N --seed N`: see CONTRIBUTING.md."""

from __future__ import annotations

import argparse
import logging
import secrets
import sys
import time

from tests.campaign.episode import Episode
from tests.campaign.journal import Journal


def main() -> int:
    """Run episodes until the time is over; the last line sums them up, and the status is 1 if anything was found."""
    parser = argparse.ArgumentParser(description="Random operations and faults; every answer is checked.")
    parser.add_argument("--minutes", type=float, default=5)
    parser.add_argument("--seed", type=int, default=None)
    parser.add_argument("--episode", type=int, default=None, help="This one alone, once.")
    parser.add_argument("--steps", type=int, default=60, help="Of one episode.")
    parser.add_argument("--verbose", action="store_true")
    options = parser.parse_args()
    seed = secrets.randbelow(10**6) if options.seed is None else options.seed
    print(f"campaign seed={seed}", flush=True)
    journal = Journal(verbose=options.verbose)
    logging.getLogger().addHandler(journal)
    end_s = time.monotonic() + 60 * options.minutes
    num_checked, number = 0, options.episode or 0
    while time.monotonic() < end_s:
        episode = Episode(f"{seed}:{number}", journal)
        found, asked = len(journal.findings), journal.num_operations
        episode.run(options.steps, end_s)
        num_checked += episode.num_answers
        print(
            f"episode {episode.name}: {journal.num_operations - asked} operations, {episode.num_answers} answers, "
            f"{episode.expectations.num_checked} rows, {len(journal.findings) - found} findings",
            flush=True,
        )
        number += 1
        if options.episode is not None:
            break
    print(", ".join(f"{kind}: {count}" for kind, count in sorted(journal.kinds.items())))
    print(
        f"campaign seed={seed}: {journal.num_operations} operations, {journal.num_faults} faults, "
        f"{num_checked} answers checked, {len(journal.findings)} findings"
    )
    return bool(journal.findings)


sys.exit(main())

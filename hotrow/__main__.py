"""`python -m hotrow`, and what the command `hotrow` runs."""

import atexit
import gc

from hotrow.interrupts import end_at_once

_OBJECTS_PER_COLLECTION = 10_000


def main() -> None:
    """Run the command line."""
    end_at_once()
    # A command imports much and leaves little garbage. What scanning the imported code costs, above all at the end, is
    # a third of the processor time of a command that loads Numba and ONNX Runtime.
    gc.set_threshold(_OBJECTS_PER_COLLECTION)
    atexit.register(gc.freeze)
    from hotrow.command_line import main as run

    run()


if __name__ == "__main__":
    main()

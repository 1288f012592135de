"""`python -m hotrow.training.hugectr SCRIPT.py [ARGS]`: runs a training script of HugeCTR unchanged."""

from __future__ import annotations

import os
import runpy
import sys
import traceback
from pathlib import Path

from hotrow.output.formatting import printable
from hotrow.training import hugectr
from inference_session.errors import HotrowError


def main() -> None:
    """Run the script named first; it sees the arguments behind it, and imports hugectr and mpi4py."""
    if len(sys.argv) < 2 or sys.argv[1] in ("-h", "--help"):
        print("usage: python -m hotrow.training.hugectr SCRIPT.py [ARGS]", file=sys.stderr)
        sys.exit(0 if len(sys.argv) > 1 else 2)
    script, sys.argv = sys.argv[1], sys.argv[1:]
    if not Path(script).exists():
        print(f"hotrow: {printable(script)}: no such script", file=sys.stderr)
        sys.exit(1)
    if script.endswith(".json"):
        name = printable(script)
        print(f"hotrow: {name}: a JSON configuration is trained by `hotrow train {name}`", file=sys.stderr)
        sys.exit(1)
    sys.path.insert(0, os.path.dirname(os.path.abspath(script)))  # noqa: PTH100, PTH120  as Python does it
    try:
        hugectr.install()
        runpy.run_path(script, run_name="__main__")
    except HotrowError as error:
        lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == script]
        place = f"{script}:{lines[-1]}: " if lines else ""
        print(f"hotrow: {printable(f'{place}{error}')}", file=sys.stderr)
        sys.exit(1)


if __name__ == "__main__":
    main()

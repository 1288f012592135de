"""Code that tests and benchmarks share: servers, brokers, models, contracts."""

from pathlib import Path

ROOT = Path(__file__).parents[2]
"""The repository."""

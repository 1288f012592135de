"""Device lists that cannot be served are refused with what there is and what is needed; CUDA's answers are made up."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.testing import ROOT
from tests.testing.forked import ForkedPrograms

IMPORTS = """
import sys
from pathlib import Path
from types import SimpleNamespace
import numpy as np
from tests.testing.fake_cuda import FakeGpu, install, used
from inference_session.config import SessionConfig
from inference_session.device.discovery import open_devices, require_gpus
from inference_session.errors import ConfigurationError
from inference_session.model_spec import TableSpec
from inference_session.tables.table_file import TableFile, write_table

def prepare():
    pass
"""
PRELUDE = f"""{IMPORTS}
def gpus(*free):
    return [FakeGpu("H200", 1000_000, each) for each in free]

unequal = [FakeGpu("H200", 9, 9), FakeGpu("A100", 7, 7)]

def open_tables(**settings):
    from inference_session.tables.cuda.placed_tables import open_cuda_tables
    folder = Path(sys.argv[1])
    write_table(folder, [np.zeros((1000, 16), np.float32)], keys=None)
    file = TableFile.open(folder, TableSpec("t", "t", 1000, 16, keys="row_number"))
    devices = [SimpleNamespace(device_id=number, name=f"cuda:{{number}}") for number in range(2)]
    open_cuda_tables([file], devices, **settings)

def open_in_process(device, shard_devices):
    from inference_session.rows.create import open_device_tables
    config = SessionConfig(device=device, shard_devices=shard_devices)
    open_device_tables([], config, [SimpleNamespace(device_id=1)])

def refused(ask):
    try:
        ask()
    except ConfigurationError as error:
        print(error)
    else:
        raise SystemExit("accepted")
"""


@pytest.fixture(scope="module")
def programs() -> Iterator[ForkedPrograms]:
    """Runs programs in processes of their own: what CUDA says is remembered by a process."""
    with ForkedPrograms(IMPORTS, os.environ | {"PYTHONPATH": str(ROOT)}) as programs:
        yield programs


@pytest.mark.parametrize(
    ("script", "message"),
    [
        (
            'install(gpus(5, 5)); refused(lambda: open_devices("cuda:0,3"))',
            "device cannot be 'cuda:0,3': this process sees 2 GPUs, numbered from cuda:0",
        ),
        (
            'install([]); refused(lambda: open_devices("cuda:all"))',
            "device cannot be 'cuda:all': this process sees 0 GPUs, numbered from cuda:0",
        ),
        (
            'install(unequal); refused(lambda: open_devices("cuda:1,0"))',
            (
                "device names GPUs that are not alike: cuda:1 is A100 with 7 bytes, cuda:0 is H200 with 9 bytes; name"
                " GPUs of one kind"
            ),
        ),
        (
            'install(gpus(5, 5)); refused(lambda: open_in_process("cuda:1", "cuda:1,3"))',
            "shard_devices names cuda:3, but this process sees 2 GPUs, numbered from cuda:0",
        ),
        (
            'install(unequal); refused(lambda: open_in_process("cuda:1", "cuda:0,1"))',
            (
                "shard_devices names GPUs that are not alike: cuda:0 is H200 with 9 bytes, cuda:1 is A100 with 7 bytes;"
                " name GPUs of one kind"
            ),
        ),
        (
            "install(gpus(90_000, 30_000)); refused(lambda: open_tables(cache_bytes=80_000))",
            (
                "cache_bytes needs 64000 bytes on cuda:1, which has 30000 free of 1000000: set a smaller value or"
                " free some memory"
            ),
        ),
        (
            'install(gpus(90_000, 30_000)); refused(lambda: open_tables(shard="rows"))',
            (
                "shard=rows needs 32000 bytes on each of 2 GPUs, where tables may take 24000 (cuda:1 has 30000 bytes"
                " free): use more GPUs, or set shard=auto, which leaves the largest tables in host memory"
            ),
        ),
        (
            'install(gpus(90_000, 90_000), peers=False); refused(lambda: open_tables(shard="rows"))',
            (
                "shard cannot be 'rows': cuda:0 cannot read the memory of cuda:1 (neither NVLink nor PCIe lets it); set"
                " shard=none, or use other GPUs"
            ),
        ),
    ],
)
def test_what_cannot_be_served_is_refused(script: str, message: str, programs: ForkedPrograms, tmp_path: Path) -> None:
    """Missing GPUs, unequal ones, too little memory on one, and no way from one to the other."""
    program = f"{PRELUDE}sys.argv[1:] = [{str(tmp_path / 't')!r}]\n{script}"
    done = programs.run(program, os.environ | {"PYTHONPATH": str(ROOT)})
    assert done.stdout.strip() == message, done.stdout + done.stderr


@pytest.mark.parametrize(
    ("script", "found"),
    [
        ('install(gpus(5, 5, 5)); print(require_gpus("cuda:1"), set(used))', "[1] {1}"),
        ('install(gpus(5, 5, 5)); print(require_gpus("cuda:all"), set(used))', "[0, 1, 2] {0, 1, 2}"),
        (
            'install(gpus(5, 5, 5)); refused(lambda: open_in_process("cuda:1", "cuda:0,3")); print(used)',
            "shard_devices names cuda:3, but this process sees 3 GPUs, numbered from cuda:0\n[]",
        ),
    ],
)
def test_gpus_that_a_process_does_not_use_are_left_alone(script: str, found: str, programs: ForkedPrograms) -> None:
    """CUDA takes some 500 MB on each GPU that a process makes current: of all processes together, gigabytes."""
    done = programs.run(f"{PRELUDE}\n{script}", os.environ | {"PYTHONPATH": str(ROOT)})
    assert done.stdout.strip() == found, done.stdout + done.stderr

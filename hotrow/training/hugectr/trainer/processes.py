"""The processes of a job: one alone, or those that torchrun started; each GPU of `vvgpu` has one."""

from __future__ import annotations

import atexit
import os
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from hotrow.training.hash_embeddings.key_index import owners
from inference_session.errors import ConfigurationError

_ROWS_AT_ONCE = 1 << 20
_SIZES_OF_MPI = ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE")
"""How Open MPI and MPICH tell a process how many there are."""


@dataclass(frozen=True)
class Processes:
    """One process among all. Each reads the whole batch, computes its part, and keeps the rows of its keys."""

    rank: int
    count: int
    device: torch.device

    def part(self, num_samples: int) -> tuple[int, int]:
        """The samples of a batch that this process computes: begin and end."""
        share = num_samples // self.count
        return (self.rank * share, (self.rank + 1) * share) if num_samples % self.count == 0 else (0, num_samples)

    def owns(self, keys: Tensor) -> Tensor:
        """Whether this process keeps the rows of keys, int64 [n]: bool [n]. The row of a key is on `key % count`."""
        return owners(keys, self.count) == self.rank

    def rows_of_all(self, tensor: Tensor) -> Iterator[Tensor]:
        """On process 0 the rows of all processes, some at a time, by rank; the others send theirs and get none.

        All processes run it to its end.
        """
        if self.count == 1:
            yield from tensor.split(_ROWS_AT_ONCE)
            return
        for rank, count in enumerate(self._counts(len(tensor))):
            for begin in range(0, count, _ROWS_AT_ONCE):
                size = min(_ROWS_AT_ONCE, count - begin)
                if self.rank == rank == 0:
                    yield tensor[begin : begin + size]
                elif self.rank == rank:
                    dist.send(tensor[begin : begin + size].to(self.device).contiguous(), 0)
                elif self.rank == 0:
                    piece = torch.empty((size, *tensor.shape[1:]), dtype=tensor.dtype, device=self.device)
                    dist.recv(piece, rank)
                    yield piece

    def _counts(self, number: int) -> list[int]:
        """The numbers of all processes."""
        counts = torch.zeros(self.count, dtype=torch.int64, device=self.device)
        counts[self.rank] = number
        dist.all_reduce(counts)
        return [int(count) for count in counts]

    def add_up(self, tensor: Tensor) -> Tensor:
        """The sum over all processes, in place."""
        if self.count > 1:
            dist.all_reduce(tensor)
        return tensor

    def average(self, tensors: Sequence[Tensor]) -> None:
        """The mean over all processes, in place."""
        if self.count == 1:
            return
        for tensor in tensors:
            dist.all_reduce(tensor)
            tensor.div_(self.count)

    def any(self, holds: bool) -> bool:
        """Whether something holds for any process."""
        return bool(self.add_up(torch.tensor(int(holds), device=self.device)))

    def gathered(self, tensor: Tensor, num_samples: int) -> Tensor:
        """The parts of all processes, concatenated along the first axis."""
        if self.count == 1 or num_samples % self.count:
            return tensor
        parts = [torch.empty_like(tensor) for _ in range(self.count)]
        dist.all_gather(parts, tensor.contiguous())
        return torch.cat(parts)

    def wait(self) -> None:
        """Wait until all processes are here."""
        if self.count > 1:
            dist.barrier()


def join_processes(vvgpu: Sequence[Sequence[int]]) -> Processes:
    """Take part in the job that torchrun started, or start one process per GPU where there are several.

    Raises:
        ConfigurationError: `vvgpu` names several machines, or fewer GPUs than there are processes; or MPI has started
            several.
    """
    num_gpus = sum(len(gpus) for gpus in vvgpu)
    has_gpus = torch.cuda.is_available()
    count = int(os.environ.get("WORLD_SIZE", "1"))
    if count == 1 and not dist.is_initialized():
        _refuse_mpi()
        if num_gpus > 1:
            _start_or_say(vvgpu, num_gpus)
        return Processes(0, 1, torch.device("cuda", vvgpu[0][0]) if has_gpus else torch.device("cpu"))
    if not dist.is_initialized():
        dist.init_process_group("nccl" if has_gpus else "gloo")
        atexit.register(_leave)
    local = int(os.environ.get("LOCAL_RANK", "0"))
    if has_gpus:
        gpus = vvgpu[min(int(os.environ.get("GROUP_RANK", "0")), len(vvgpu) - 1)]
        if local >= len(gpus):
            raise ConfigurationError(
                f"vvgpu names {len(gpus)} GPUs, but process {local} asks for one; start {len(gpus)}"
            )
        torch.cuda.set_device(gpus[local])
    device = torch.device("cuda", torch.cuda.current_device()) if has_gpus else torch.device("cpu")
    return Processes(dist.get_rank(), dist.get_world_size(), device)


def _refuse_mpi() -> None:
    """Processes that MPI has started know nothing of each other here: each would write the files of all."""
    for name in _SIZES_OF_MPI:
        size = os.environ.get(name, "")
        if size.isdecimal() and int(size) > 1:
            raise ConfigurationError(
                f"MPI has started {size} processes ({name}), and each would train alone; start the script with "
                "torchrun --nnodes MACHINES --nproc-per-node PROCESSES -m hotrow.training.hugectr SCRIPT.py"
            )


def _leave() -> None:
    """End the threads of gloo, which may abort a process that ends before them. NCCL might wait for a failed rank."""
    if dist.is_initialized() and dist.get_backend() == "gloo":
        dist.destroy_process_group()


def _start_or_say(vvgpu: Sequence[Sequence[int]], num_gpus: int) -> None:
    """Restart this program once per GPU if this machine has the GPUs; else print that one process trains alone."""
    num_here = torch.cuda.device_count()
    if len(vvgpu) > 1 and num_here:
        raise ConfigurationError(
            f"vvgpu names {len(vvgpu)} machines; start the script on each with torchrun --nnodes {len(vvgpu)} "
            f"--nproc-per-node {len(vvgpu[0])} -m hotrow.training.hugectr SCRIPT.py"
        )
    if num_here > max(max(gpus) for gpus in vvgpu):
        command = start_command(sys.orig_argv, num_gpus)
        os.execv(command[0], command)  # noqa: S606  the same program with the same arguments
    print(
        f"vvgpu names {num_gpus} GPUs, this machine has {num_here}: one process trains whole batches on "
        f"{'a GPU' if num_here else 'the processor'}",
        flush=True,
    )


def start_command(arguments: Sequence[str], num_processes: int) -> list[str]:
    """The command that starts the program of these arguments (the interpreter's first) once per GPU."""
    program = list(arguments[1:])
    while program and program[0].startswith("-") and program[0] != "-m":
        program.pop(0)
    starter = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={num_processes}"]
    return [*starter, *program]

"""The processes of a job: one alone, or those that torchrun started; each GPU of `vvgpu` has one."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from inference_session.errors import ConfigurationError


@dataclass(frozen=True)
class Processes:
    """One process among all. Each reads the whole batch, computes its part, and keeps all rows."""

    rank: int
    count: int
    device: torch.device

    def part(self, num_samples: int) -> tuple[int, int]:
        """The samples of a batch that this process computes: begin and end."""
        share = num_samples // self.count
        return (self.rank * share, (self.rank + 1) * share) if num_samples % self.count == 0 else (0, num_samples)

    def average(self, tensors: Sequence[Tensor]) -> None:
        """The mean over all processes, in place."""
        if self.count == 1:
            return
        for tensor in tensors:
            dist.all_reduce(tensor)
            tensor.div_(self.count)

    def gathered(self, tensor: Tensor, num_samples: int) -> Tensor:
        """The parts of all processes, concatenated."""
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
        ConfigurationError: `vvgpu` names several machines, or fewer GPUs than there are processes.
    """
    num_gpus = sum(len(gpus) for gpus in vvgpu)
    has_gpus = torch.cuda.is_available()
    count = int(os.environ.get("WORLD_SIZE", "1"))
    if count == 1 and not dist.is_initialized():
        if num_gpus > 1:
            _start_or_say(vvgpu, num_gpus)
        return Processes(0, 1, torch.device("cuda", vvgpu[0][0]) if has_gpus else torch.device("cpu"))
    if not dist.is_initialized():
        dist.init_process_group("nccl" if has_gpus else "gloo")
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
        f"{'a GPU' if num_here else 'the processor'}, with the same results",
        flush=True,
    )


def start_command(arguments: Sequence[str], num_processes: int) -> list[str]:
    """The command that starts the program of these arguments (the interpreter's first) once per GPU."""
    program = list(arguments[1:])
    while program and program[0].startswith("-") and program[0] != "-m":
        program.pop(0)
    starter = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={num_processes}"]
    return [*starter, *program]

"""Jobs of several processes, as torchrun starts them: on this machine's processors, or a GPU for each."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import multiprocessing, nn

from tests.testing.forked import prepare_forks
from tests.testing.servers import free_port

PATIENCE_S = 120


def run_ranks(job: Callable[..., None], *arguments: Any, num_ranks: int = 2, on_gpus: bool = False) -> None:
    """Run `job(rank, *arguments)` in as many processes of a group; raises what one of them did."""
    run_processes(_rank, job, free_port(), num_ranks, on_gpus, arguments, num_processes=num_ranks)


def run_processes(job: Callable[..., None], *arguments: Any, num_processes: int = 1) -> None:
    """Run `job(number, *arguments)` in as many processes, with this one's environment; raises what one of them did.

    They are forked from one that has imported PyTorch and TorchRec, which takes longer than most jobs.
    """
    prepare_forks(__name__, "torchrec.distributed.model_parallel")
    given = (job, dict(os.environ), arguments)
    multiprocessing.start_processes(_run, given, nprocs=num_processes, start_method="forkserver")


def _run(number: int, job: Callable[..., None], environment: dict[str, str], arguments: tuple[Any, ...]) -> None:
    os.environ.update(environment)
    job(number, *arguments)


def _rank(  # noqa: PLR0917  as torch calls it
    rank: int, job: Callable[..., None], port: int, num_ranks: int, on_gpus: bool, arguments: tuple[Any, ...]
) -> None:
    torch.set_num_threads(1)
    if on_gpus:
        torch.cuda.set_device(rank)
    os.environ.update({"LOCAL_WORLD_SIZE": str(num_ranks), "LOCAL_RANK": str(rank)})
    place = f"tcp://127.0.0.1:{port}"
    backend = "nccl" if on_gpus else "gloo"
    dist.init_process_group(backend, place, rank=rank, world_size=num_ranks, timeout=timedelta(seconds=PATIENCE_S))
    try:
        job(rank, *arguments)
        dist.barrier()
    finally:
        dist.destroy_process_group()
    # A thread of gloo may outlive its group, and then aborts a process that ends in the usual way.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def distributed(model: nn.Module, plan: dict[str, dict[str, str]], *, learning_rate: float = 0.1) -> nn.Module:
    """The model as TorchRec trains it: sharded as the plan says, by module and table."""
    from fbgemm_gpu.split_embedding_configs import EmbOptimType
    from torchrec.distributed.embedding import EmbeddingCollectionSharder
    from torchrec.distributed.embedding_types import EmbeddingComputeKernel
    from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
    from torchrec.distributed.mc_embeddingbag import ManagedCollisionEmbeddingBagCollectionSharder
    from torchrec.distributed.model_parallel import DistributedModelParallel
    from torchrec.distributed.sharding_plan import (
        column_wise,
        construct_module_sharding_plan,
        data_parallel,
        row_wise,
        table_wise,
    )
    from torchrec.distributed.types import ShardingPlan

    kernel = EmbeddingComputeKernel.FUSED.value
    ways: dict[str, Any] = {
        "row_wise": lambda: row_wise(compute_kernel=kernel),
        "table_wise": lambda: table_wise(rank=dist.get_world_size() - 1, compute_kernel=kernel),
        "column_wise": lambda: column_wise(ranks=list(range(dist.get_world_size())), compute_kernel=kernel),
        "data_parallel": data_parallel,
    }
    fused = {"optimizer": EmbOptimType.EXACT_ROWWISE_ADAGRAD, "learning_rate": learning_rate}

    class Bags(EmbeddingBagCollectionSharder):
        # TorchRec offers row-wise bags on the processor only where the sharder says so.
        def sharding_types(self, compute_device_type: str) -> list[str]:
            return ["row_wise", "table_wise", "column_wise", "data_parallel"]

    sharders = {
        "EmbeddingBagCollection": Bags(fused_params=fused),
        "EmbeddingCollection": EmbeddingCollectionSharder(fused_params=fused),
        "ManagedCollisionEmbeddingBagCollection": ManagedCollisionEmbeddingBagCollectionSharder(
            ebc_sharder=Bags(fused_params=fused)
        ),
    }
    plans = {}
    for path, tables in plan.items():
        module = model.get_submodule(path)
        sharder = sharders[type(module).__name__]
        chosen = {name: ways[way]() for name, way in tables.items()}
        plans[path] = construct_module_sharding_plan(
            module, chosen, sharder, local_size=dist.get_world_size(), device_type="cpu"
        )
    return DistributedModelParallel(
        model, device=torch.device("cpu"), plan=ShardingPlan(plans), sharders=list(sharders.values())
    )


def gathered(model: Any, name: str) -> Any:
    """A whole table, assembled by TorchRec."""
    weight = model.state_dict()[name]
    if not hasattr(weight, "local_shards"):
        return weight.detach().numpy()
    whole = torch.zeros(weight.size()) if dist.get_rank() == 0 else None
    weight.gather(0, whole)
    return np.zeros(0) if whole is None else whole.numpy()

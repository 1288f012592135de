"""Which fast path a model has on a device, if it has one."""

from __future__ import annotations

from dataclasses import replace

from inference_session.device.host import HOST
from inference_session.execution.network import Network
from inference_session.execution.staging.base import StagingPool
from inference_session.execution.staging.host import stage_on_host
from inference_session.execution.staging.ranking import join_pools
from inference_session.model_spec import ModelSpec
from inference_session.requests.batch import RequestLayout


def create_staging_pool(layout: RequestLayout, network: Network, ranking: Network | None) -> StagingPool | None:
    """What stages requests to a model; None: `run_many` takes all of them.

    Args:
        layout: of the requests.
        network: answers them; of a model with context inputs, those that repeat the context.
        ranking: answers requests that give the context once; None: `run_many` takes these.
    """
    spec = network.spec
    if spec.ranking is None:
        return _stage(spec, layout, network)
    whole = replace(spec, inputs=tuple(replace(tensor, context=False) for tensor in spec.inputs))
    repeating = _stage(whole, layout, network)
    once = None if ranking is None else _stage(ranking.spec, layout, ranking)
    return join_pools(spec, network.reader.device, repeating, once) if repeating or once else None


def _stage(spec: ModelSpec, layout: RequestLayout, network: Network) -> StagingPool | None:
    if network.reader.device is HOST:
        return stage_on_host(spec, layout, network)
    # Imported where needed: the reader of HugeCTR's requests takes half a second to load.
    from inference_session.execution.staging.cuda import stage_on_gpu

    return stage_on_gpu(spec, layout, network)

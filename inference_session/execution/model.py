"""A model version on the devices of a session: its networks and rows are opened, and put together as replicas."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from inference_session.config import SessionConfig
from inference_session.dense_engine.base import DenseEngine
from inference_session.dense_engine.create import create_engine
from inference_session.dense_engine.network_file import NetworkFile
from inference_session.dense_engine.onnx import OnnxEngine
from inference_session.dense_engine.vectors import VectorEngine
from inference_session.device.base import Device
from inference_session.device.host import HOST
from inference_session.errors import ConfigurationError
from inference_session.execution.concat_operands import concat_operands, with_concat_inputs
from inference_session.execution.network import Engines, Network, check_network, check_outputs
from inference_session.execution.replicas import DeviceThread, Replica, Replicas
from inference_session.execution.staging.create import create_staging_pool
from inference_session.model_spec import DENSE_FILE, KEYS_FILE, RANKING_FILE, RANKING_KEYS_FILE, ModelSpec
from inference_session.requests.batch import RequestLayout
from inference_session.requests.layouts import layout_of
from inference_session.requests.outputs import Outputs
from inference_session.requests.ranking_layout import RankingLayout
from inference_session.rows.base import Rows
from inference_session.rows.create import create_rows
from inference_session.version_directory.version import VersionDirectory

if TYPE_CHECKING:
    from inference_session.execution.kept_contexts import KeptContexts

_log = logging.getLogger(__name__)


class _NetworkSpec(NamedTuple):
    """One of a version's networks: which look-ups it has, and which files."""

    spec: ModelSpec
    """Of the model, with the look-ups of this network."""
    dense: str
    keys: str
    """The network that computes the keys; there is no such file where all keys are inputs."""

    def spec_for(self, engine: DenseEngine) -> ModelSpec:
        """The same with look-ups as the engine takes their vectors."""
        return with_concat_inputs(self.spec, engine.concat_inputs)


class Model(NamedTuple):
    """What a session computes answers with."""

    spec: ModelSpec
    layout: RequestLayout
    rows: Rows
    replicas: Replicas
    """In the order of the readers of `rows`."""
    kept_contexts: KeptContexts | None
    """Ranks candidates and keeps their contexts, where the settings ask for it."""
    rejects_unknown: bool
    """Whether unknown keys are an error of the request."""


def open_model(version: VersionDirectory, config: SessionConfig, devices: Sequence[Device]) -> Model:
    """Open the engines of a version, then its rows, on each device.

    Raises:
        ModelFormatError: a file is missing, damaged or not what session.json says.
        ConfigurationError: the version or a device cannot do what a setting asks for.
    """
    spec = version.spec
    # Only what is looked up without a wait for stores is recorded; the other requests wait at the same time.
    has_threads = len(devices) > 1 and not config.has_store
    threads = [DeviceThread(device, is_own=has_threads) for device in devices]
    specs = _network_specs(spec)
    engines = [
        [thread.run(partial(_open_engines, version.path, each, config, thread)) for each in specs] for thread in threads
    ]
    names = [engine.input_names for own in engines[0] for engine in own if engine is not None]
    layout = layout_of(spec)(
        spec, Outputs(spec), network_inputs=frozenset().union(*names), max_elements=config.max_keys_per_request
    )
    for each, own in zip(specs, engines[0], strict=True):
        check_network(each.spec_for(own.dense), version.path, layout.values, own, (each.dense, each.keys))
    with contextlib.ExitStack() as opened:
        rows = create_rows(version, config, [thread.device for thread in threads])
        opened.callback(rows.close)
        replicas = []
        for thread, on_device, reader in zip(threads, engines, rows.readers, strict=True):
            networks = [
                Network(each.spec_for(own.dense), reader, *own, keys_follow_inputs=layout.keys_follow_inputs)
                for each, own in zip(specs, on_device, strict=True)
            ]
            replicas.append(_replica(networks, thread, layout, may_rank_at_once=not config.context_cache_bytes))
        kept_contexts = _keep_contexts(version, config, rows, layout)
        opened.pop_all()
    return Model(spec, layout, rows, Replicas(replicas), kept_contexts, config.unknown_keys == "reject")


def _replica(
    networks: Sequence[Network], thread: DeviceThread, layout: RequestLayout, *, may_rank_at_once: bool
) -> Replica:
    """The networks of `_network_specs` on a device, with a fast path.

    `may_rank_at_once`: whether the fast path may compute a context and its candidates together.
    """
    network, ranking = networks[0], networks[-1]
    # A network on a GPU over rows of the processor reads a copy of each batch's vectors: it is bound to no memory.
    is_split = network.reader.device is HOST and thread.device is not HOST
    once = ranking if may_rank_at_once and ranking is not network else None
    pool = None if is_split else create_staging_pool(layout, network, once)
    return Replica(network, ranking, thread, pool)


def _network_specs(spec: ModelSpec) -> list[_NetworkSpec]:
    """The model's network, then the one that ranks candidates, if the model has another for them."""
    network = _NetworkSpec(spec, DENSE_FILE, KEYS_FILE)
    if spec.ranking is None or spec.ranking.undivided:
        return [network]
    return [network, _NetworkSpec(replace(spec, lookups=spec.ranking.lookups), RANKING_FILE, RANKING_KEYS_FILE)]


def _open_engines(directory: Path, network: _NetworkSpec, config: SessionConfig, thread: DeviceThread) -> Engines:
    """The engines of a network, on the thread's device."""
    spec = network.spec
    if not layout_of(spec).has_network:
        return Engines(VectorEngine([lookup.dense_input for lookup in spec.lookups]), None)
    dense = _create_engine(directory / network.dense, spec, config, thread)
    check_outputs(spec, directory, dense.output_names, network.dense)
    keys_path = directory / network.keys
    return Engines(dense, OnnxEngine(NetworkFile(keys_path), num_threads=1) if keys_path.exists() else None)


def _create_engine(path: Path, spec: ModelSpec, config: SessionConfig, thread: DeviceThread) -> DenseEngine:
    """The dense engine; if ONNX Runtime cannot use the GPU, and no setting requires it, it runs on the CPU, where the
    thread's rows, which are opened later, are then looked up too.
    """
    vectors = {lookup.dense_input for lookup in spec.lookups}
    # Rows of a context are fewer than those of candidates: they do not stand next to each other.
    operands = concat_operands(spec, on_gpu=thread.device is not HOST) if path.name == DENSE_FILE else None
    try:
        return create_engine(path, config, thread.device, vectors, operands)
    except ConfigurationError as error:
        if config.device != "auto" or thread.device is HOST:
            raise
        _log.warning("Using the CPU: %s", error)
        thread.device = HOST
        return _create_engine(path, spec, config, thread)


def _keep_contexts(
    version: VersionDirectory, config: SessionConfig, rows: Rows, layout: RequestLayout
) -> KeptContexts | None:
    if not config.context_cache_bytes or not isinstance(layout, RankingLayout):
        return None
    if not version.spec.is_divided:
        raise ConfigurationError(
            f"setting 'context_cache_bytes': {version.path} was imported without dividing the network, so no "
            "results of a context alone exist that could be kept"
        )
    if rows.readers[0].device is not HOST:
        raise ConfigurationError("setting 'context_cache_bytes': contexts can be kept only on the CPU; set device=cpu")
    # Imported where needed: ONNX takes a while to load.
    from inference_session.execution.kept_contexts import open_kept_contexts

    return open_kept_contexts(version, config, rows, layout)

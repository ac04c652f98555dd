"""`PdkvConnector`, which vLLM loads: it translates, and decides nothing.

vLLM makes one in its scheduler and one in each worker. They know their half (`scheduler.py`,
`worker.py`) and vLLM's classes; what travels between them is in `messages.py`.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import secrets
import time
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from pdkv.backends import get_backend
from pdkv.control.zmq import ZmqControl
from pdkv.control.zmq_keys import CurveSecurity
from pdkv.endpoint import Node
from pdkv.errors import ConfigError
from pdkv.interfaces import ControlChannel, ReadyEvent
from pdkv.observe import Recorder
from pdkv.pool.aux import AuxBuffers
from pdkv.rendezvous import EngineRecord
from pdkv.rendezvous.client import RendezvousClient
from pdkv_vllm.layout import INTERIORS, CacheShape, read_caches
from pdkv_vllm.messages import Orders, RankCard, RankVotes
from pdkv_vllm.metrics import PdkvPromMetrics, PdkvStats
from pdkv_vllm.scheduler import Progress, SchedulerHalf
from pdkv_vllm.settings import Settings
from pdkv_vllm.vllm_api import (
    CacheHitSource,
    KVConnectorBase_V1,
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorTransferResults,
    KVConnectorWorkerMetadata,
    RequestStatus,
    SupportsHMA,
    get_current_attn_backend,
    get_tensor_model_parallel_rank,
    init_logger,
)
from pdkv_vllm.worker import WorkerHalf

__all__ = ["PdkvConnector"]

# Under vLLM's own logger, so that its handlers print what the two halves log.
_log = init_logger("vllm.pdkv")


@dataclass
class _Metadata(KVConnectorMetadata):
    orders: Orders


@dataclass
class _WorkerMetadata(KVConnectorWorkerMetadata):
    votes: RankVotes

    def aggregate(self, other: KVConnectorWorkerMetadata) -> KVConnectorWorkerMetadata:
        """The votes of both."""
        assert isinstance(other, _WorkerMetadata)
        return _WorkerMetadata(self.votes.joined(other.votes))


@dataclass
class _Handshake(KVConnectorHandshakeMetadata):
    card: RankCard = field()


class PdkvConnector(KVConnectorBase_V1, SupportsHMA):
    """vLLM's KVConnectorBase_V1 over pdkv. One KV cache group; TP of any size on either side."""

    _cache_hit_source = CacheHitSource.P2P

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self._settings = Settings.read(self._kv_transfer_config.kv_connector_extra_config)
        _check_supported(vllm_config, kv_cache_config)
        engine_id = self._kv_transfer_config.engine_id
        self._name = self._settings.name or engine_id
        # The same in all processes of one life: engine_id is drawn at start unless it is given,
        # instance_id always.
        life = f"{engine_id}/{vllm_config.instance_id}".encode()
        self._incarnation = hashlib.sha256(life).digest()[:16]
        self._scheduler: SchedulerHalf | None = None
        self._worker: WorkerHalf | None = None
        self._card: RankCard | None = None
        self._directories: list[RendezvousClient] = []
        if role == KVConnectorRole.SCHEDULER:
            self._scheduler = self._make_scheduler()

    # -- beside the scheduler ---------------------------------------------------------------------

    def on_new_request(self, request: Any) -> None:
        """A request arrived."""
        assert self._scheduler is not None
        self._scheduler.add(
            request.request_id, request.kv_transfer_params, request.num_prompt_tokens
        )

    def get_num_new_matched_tokens(
        self, request: Any, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        """How much of the prompt comes from prefill."""
        assert self._scheduler is not None
        return self._scheduler.match(request.request_id, num_computed_tokens)

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        """There are blocks for it."""
        assert self._scheduler is not None
        (block_ids,) = blocks.get_block_ids()
        self._scheduler.allocated(request.request_id, block_ids, num_external_tokens)

    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        """What the workers must do in this step."""
        assert self._scheduler is not None
        state = scheduler_output.kv_connector_block_state

        def blocks_of(request_id: str) -> list[int]:
            (block_ids,) = state.get_block_ids(request_id)
            return list(block_ids)

        preempted = scheduler_output.preempted_req_ids or ()
        orders = self._scheduler.step(_progress(scheduler_output), preempted, blocks_of)
        time.sleep(self._scheduler.nap_s)
        return _Metadata(orders)

    def update_connector_output(self, connector_output: Any) -> None:
        """What the workers said."""
        assert self._scheduler is not None
        meta = connector_output.kv_connector_worker_meta
        self._scheduler.update(
            connector_output.finished_sending or (),
            connector_output.finished_recving or (),
            meta.votes if isinstance(meta, _WorkerMetadata) else None,
        )

    def request_finished(
        self, request: Any, block_ids: list[int]
    ) -> tuple[bool, dict[str, Any] | None]:
        """vLLM is through with it."""
        assert self._scheduler is not None
        whole = (RequestStatus.FINISHED_STOPPED, RequestStatus.FINISHED_LENGTH_CAPPED)
        return self._scheduler.finished(request.request_id, is_whole=request.status in whole)

    def request_finished_all_groups(
        self, request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        """The same; there is one group."""
        return self.request_finished(request, block_ids[0])

    def set_xfer_handshake_metadata(
        self, metadata: dict[int, KVConnectorHandshakeMetadata]
    ) -> None:
        """The cards of all workers."""
        assert self._scheduler is not None
        record = self._scheduler.set_cards(
            {rank: found.card for rank, found in metadata.items() if isinstance(found, _Handshake)}
        )
        if self._settings.rendezvous and self._kv_transfer_config.is_kv_producer:
            self._publish(record)

    def has_pending_push_work(self) -> bool:
        """Whether steps are needed although vLLM has no request."""
        return self._scheduler is not None and self._scheduler.has_work

    # -- in the workers ---------------------------------------------------------------------------

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """Read the layout, and start this rank's node."""
        caches = read_caches(kv_caches, self._shape(next(iter(kv_caches.values()))))
        settings = self._settings
        num_rows = settings.num_aux_rows or self._kv_cache_config.num_blocks
        aux = AuxBuffers(num_rows=num_rows)
        with _running_on(settings.cpus):
            node = Node(
                backend=get_backend(settings.backend)(**settings.backend_options),
                control=self._control(),
                layout=caches.layout,
                rank_id=get_tensor_model_parallel_rank(),
                pool=caches.pool(aux),
                aux=aux,
                incarnation=self._incarnation,
                limits=settings.limits,
                recorder=Recorder(max_requests=256),
            )
        is_cuda = next(iter(kv_caches.values())).is_cuda
        self._worker = WorkerHalf(
            node,
            block_size=self._vllm_config.cache_config.block_size,
            pages_per_block=caches.pages_per_block,
            make_ready=_cuda_event if is_cuda else _nothing,
        )
        self._card = RankCard(layout=caches.layout, address=node.address)
        _log.info("pdkv node at %s, %d regions", node.address, len(caches.regions))

    def get_handshake_metadata(self) -> KVConnectorHandshakeMetadata | None:
        """This rank's card."""
        return None if self._card is None else _Handshake(self._card)

    def handle_preemptions(self, kv_connector_metadata: KVConnectorMetadata) -> None:
        """Blocks of preempted requests are about to be overwritten."""
        if self._worker is not None:
            self._worker.recall(_orders(kv_connector_metadata))

    def bind_connector_metadata(self, connector_metadata: KVConnectorMetadata) -> None:
        """The step begins: what is asked of peers goes out before the forward pass."""
        super().bind_connector_metadata(connector_metadata)
        if self._worker is not None:
            self._worker.begin(_orders(connector_metadata))

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """Begun already."""

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Loads are asynchronous: a request is not computed before its cache is here."""

    def save_kv_layer(
        self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any
    ) -> None:
        """Layers of a step go together, after it."""

    def wait_for_save(self) -> None:
        """The step is computed: it may go."""
        if self._worker is not None:
            self._worker.computed(_orders(self._get_connector_metadata()))

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        """Requests whose blocks are quiet on this rank."""
        if self._worker is None:
            return KVConnectorTransferResults()
        results = self._worker.results(finished_req_ids)
        return KVConnectorTransferResults(
            finished_sending=results.sent,
            finished_recving=results.received,
            failed_recving=results.failed,
        )

    def build_connector_worker_meta(self) -> KVConnectorWorkerMetadata | None:
        """This rank's votes, where it is not alone."""
        votes = None if self._worker is None else self._worker.votes()
        return None if votes is None else _WorkerMetadata(votes)

    def get_kv_connector_stats(self) -> PdkvStats | None:
        """Figures since the last step."""
        data = None if self._worker is None else self._worker.tally.take()
        return None if data is None else PdkvStats(data=data)

    def shutdown(self) -> None:
        """The process ends."""
        for directory in self._directories:
            directory.close()
        if self._worker is not None:
            self._worker.close()

    # -- metrics ----------------------------------------------------------------------------------

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> PdkvStats:
        """The class of the figures."""
        return PdkvStats() if data is None else PdkvStats(data=data)

    @classmethod
    def build_prom_metrics(
        cls,
        vllm_config: Any,
        metric_types: Any,
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> PdkvPromMetrics:
        """Their Prometheus metrics."""
        return PdkvPromMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)

    # -- inside -----------------------------------------------------------------------------------

    def _make_scheduler(self) -> SchedulerHalf:
        config = self._vllm_config
        if self._settings.rendezvous:
            self._directories.append(self._look_at_directory())
        return SchedulerHalf(
            incarnation=self._incarnation,
            name=self._name,
            block_size=config.cache_config.block_size,
            num_ranks=config.parallel_config.tensor_parallel_size,
            directory=self._directories[0] if self._directories else None,
            new_room=lambda: secrets.randbits(63),
            clock=time.monotonic,
            generation=time.time_ns(),
            resolve_s=self._settings.resolve_s,
        )

    def _control(self) -> ControlChannel:
        settings, security = self._settings, None
        if settings.keys is not None:
            security = CurveSecurity.load(settings.keys.secret_file, settings.keys.allow_dir)
        return ZmqControl(
            settings.listen,
            advertise=settings.advertise,
            security=security,
            trust_network=settings.trust_network,
        )

    def _shape(self, first: torch.Tensor) -> CacheShape:
        config, caches = self._vllm_config, self._kv_cache_config
        model, spec = config.model_config, caches.kv_cache_groups[0].kv_cache_spec
        is_latent = bool(model.use_mla)
        backend = get_current_attn_backend(config).get_name()
        interior = self._settings.interior or INTERIORS.get(backend, "opaque")
        return CacheShape(
            tp_rank=get_tensor_model_parallel_rank(),
            tp_size=config.parallel_config.tensor_parallel_size,
            total_kv_heads=1 if is_latent else model.get_total_num_kv_heads(),
            block_size=config.cache_config.block_size,
            num_blocks=caches.num_blocks,
            head_size_k=spec.head_size,
            head_size_v=0 if is_latent else spec.head_size_v,
            interior="latent" if is_latent else interior,
            interior_tag=f"{backend}{_cpu_kind() if first.device.type == 'cpu' else ''}",
            chunk_tokens=self._settings.chunk_tokens,
        )

    def _publish(self, record: EngineRecord) -> None:
        """Tell the directory of every rank. The scheduler does it for all: they live together."""
        while len(self._directories) < record.layout.parallel.num_ranks:
            self._directories.append(self._look_at_directory())
        for rank_id in range(record.layout.parallel.num_ranks):
            self._directories[rank_id].publish(record.rank_record(rank_id))

    def _look_at_directory(self) -> RendezvousClient:
        return RendezvousClient(self._control(), self._settings.rendezvous)


def _progress(scheduler_output: Any) -> Mapping[str, Progress]:
    """Who is computed in this step, and how far each one was."""
    new = scheduler_output.num_scheduled_tokens
    cached = scheduler_output.scheduled_cached_reqs
    had = dict(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
    had |= {r.req_id: r.num_computed_tokens for r in scheduler_output.scheduled_new_reqs}
    return {name: Progress(had[name], count) for name, count in new.items()}


def _orders(metadata: KVConnectorMetadata) -> Orders:
    assert isinstance(metadata, _Metadata)
    return metadata.orders


def _check_supported(vllm_config: Any, kv_cache_config: Any) -> None:
    """ConfigError for what this connector can't do, at start-up."""
    parallel = vllm_config.parallel_config
    for name in (
        "pipeline_parallel_size",
        "prefill_context_parallel_size",
        "decode_context_parallel_size",
    ):
        if getattr(parallel, name, 1) != 1:
            raise ConfigError(f"{name} must be 1 with PdkvConnector")
    if len(kv_cache_config.kv_cache_groups) != 1:
        raise ConfigError(
            f"{len(kv_cache_config.kv_cache_groups)} KV cache groups: PdkvConnector moves one; try "
            "--disable-hybrid-kv-cache-manager"
        )


def _cpu_kind() -> str:
    """What decides how vLLM's CPU kernels arrange the inside of a block."""
    has_tiles = "amx_tile" in Path("/proc/cpuinfo").read_text()
    return f":{torch.backends.cpu.get_cpu_capability()}{'+AMX' if has_tiles else ''}"


@contextlib.contextmanager
def _running_on(cpus: Collection[int]) -> Iterator[None]:
    """Threads that are started meanwhile may run on these CPUs, this one as before afterwards."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, cpus or before)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


def _nothing() -> ReadyEvent | None:
    return None


def _cuda_event() -> ReadyEvent | None:
    event = torch.cuda.Event()  # type: ignore[no-untyped-call]
    event.record()
    return event

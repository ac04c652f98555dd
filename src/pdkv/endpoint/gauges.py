"""What a node's registry shows of the moment: set when somebody reads, never while requests run.

Layer 5.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from pdkv.endpoint.links import Links
from pdkv.endpoint.records import Receiving
from pdkv.endpoint.requests import Requests
from pdkv.observe import Registry

__all__ = ["set_gauges"]


def set_gauges(
    registry: Registry,
    *,
    requests: Requests,
    links: Links,
    counters: Mapping[str, int],
    refused: Mapping[str, int],
) -> None:
    """Called where the core runs. `refused`: what the control channel counts itself."""
    for event, count in counters.items():
        registry.set("pdkv_node_events_total", count, event)
    for reason, count in refused.items():
        registry.set("pdkv_control_refused_total", count, reason)
    registry.set("pdkv_live_requests", len(requests.receivers), "decode")
    registry.set("pdkv_live_requests", len(requests.senders), "prefill")
    registry.set("pdkv_quarantined_requests", len(requests.quarantine))
    registry.set("pdkv_healthy", float(not requests.problems()))
    waits: Counter[tuple[str, str]] = Counter()
    for owner in requests.owners():
        role = "decode" if isinstance(owner, Receiving) else "prefill"
        waits[role, owner.machine.wait.name.lower()] += 1
    registry.reset("pdkv_waiting_requests")
    for (role, wait), count in waits.items():
        registry.set("pdkv_waiting_requests", count, role, wait)
    registry.reset("pdkv_peers")
    for state, count in Counter(peer.state.value for peer in links.peers).items():
        registry.set("pdkv_peers", count, state)
    if requests.staging is not None:
        staging = requests.staging
        num_tags, wait_s = staging.without_region(requests.senders.values())
        registry.set("pdkv_staging_free_regions", staging.pool.available)
        registry.set("pdkv_staging_waiting_tags", num_tags, "prefill")
        registry.set("pdkv_staging_waiting_tags", staging.pool.num_waiting, "decode")
        registry.set("pdkv_staging_wait_seconds", wait_s)

"""What a node shows to those who ask from outside: `python -m pdkv top`. Read-only.

Refuses to know sockets: a `QueryServer` (`pdkv.control.zmq_query`) carries questions and answers,
on a thread of its own. Layer 5.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from pdkv.endpoint.base import Endpoint
from pdkv.endpoint.node import Node
from pdkv.observe import Status, encode_status

__all__ = ["StatusSource"]

_MAX_WAITING = 256  # what a viewer can show; the oldest come first


class StatusSource:
    """`endpoints`: those whose queues and group shall be shown too. Any thread may ask."""

    def __init__(self, node: Node, endpoints: Sequence[Endpoint] = ()) -> None:
        self._node = node
        self._endpoints = tuple(endpoints)

    def status(self) -> Status:
        """Health and metrics as of now. ConfigError where the node does not answer."""
        node = self._node
        health = node.health(_MAX_WAITING)
        problems, waiting = list(health.problems), list(health.waiting)
        for endpoint in self._endpoints:
            more_problems, more_waiting = endpoint.own_health(health.now)
            problems += [problem for problem in more_problems if problem not in problems]
            waiting += more_waiting[:_MAX_WAITING]
        return Status(
            address=node.address,
            incarnation=node.incarnation.hex(),
            rank_id=node.rank_id,
            num_ranks=node.group_size,
            backend=node.backend_name,
            health=msgspec.structs.replace(
                health, problems=tuple(problems), waiting=tuple(waiting)
            ),
            samples=node.metrics() if node.recorder is not None else (),
        )

    def answer(self, question: bytes) -> bytes:
        """For a `QueryServer`: whatever is asked, the answer is the status."""
        return encode_status(self.status())

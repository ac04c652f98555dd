"""How the NIXL backend keeps its books, against a double of the agent: no nixl needed.

For what two real processes on one host can't show: mixed kinds of memory, and errors at every step.
"""

from __future__ import annotations

from typing import Any

import pytest

from pdkv.backends import nixl
from pdkv.backends.nixl_memory import Memory, encode_metadata
from pdkv.errors import TransferError
from pdkv.interfaces import Completion
from pdkv.layout import MemoryRegion
from pdkv.testing.backend_pair import runs_of

HOST, DEVICE = MemoryRegion(1000, 1000), MemoryRegion(5000, 1000, "cuda:3")
PEER_HOST, PEER_DEVICE = MemoryRegion(11000, 1000), MemoryRegion(15000, 1000, "cuda:1")


class AgentDouble:
    """Remembers what was asked; `status` answers for each handle, an exception is raised."""

    def __init__(self) -> None:
        self.transfers: list[tuple[str, Any, str, Any, bytes]] = []
        self.status: dict[int, object] = {}
        self.released: list[int] = []
        self.sent: list[bytes] = []
        self.removed: list[str] = []
        self.refuse_initialize_after = 99

    def register_memory(self, rows, segment):
        return rows

    def deregister_memory(self, descriptors):
        pass

    def get_reg_descs(self, rows, segment):
        return rows

    def add_remote_agent(self, metadata):
        return metadata

    def remove_remote_agent(self, peer):
        self.removed.append(peer)

    def get_xfer_descs(self, rows, segment):
        return segment, rows.tolist()

    def initialize_xfer(self, operation, local, remote, peer, notification):
        if len(self.transfers) >= self.refuse_initialize_after:
            raise RuntimeError("NOT_FOUND")
        self.transfers.append((*local, *remote, notification))
        return len(self.transfers) - 1

    def transfer(self, handle):
        return self._answer(handle)

    def check_xfer_state(self, handle):
        return self._answer(handle)

    def _answer(self, handle):
        status = self.status.get(handle, "PROC")
        if isinstance(status, Exception):
            raise status
        return status

    def release_xfer_handle(self, handle):
        self.released.append(handle)

    def send_notif(self, peer, notification):
        if isinstance(self.status.get("send"), Exception):
            raise self.status["send"]
        self.sent.append(notification)


@pytest.fixture
def agent() -> AgentDouble:
    return AgentDouble()


@pytest.fixture
def backend(agent: AgentDouble, monkeypatch: pytest.MonkeyPatch) -> nixl.NixlBackend:
    monkeypatch.setattr(nixl, "load_api", lambda: None)
    monkeypatch.setattr(nixl, "make_agent", lambda *_, **__: agent)
    backend = nixl.NixlBackend()
    backend.register([HOST, DEVICE])
    assert (
        backend.connect(encode_metadata("p", "host", Memory([PEER_HOST, PEER_DEVICE]), b"p")) == "p"
    )
    return backend


MIXED = runs_of([(1000, 15000, 10), (5000, 15100, 20), (5100, 15200, 30)])


def test_runs_of_one_kind_are_one_handle_that_carries_the_notification(backend, agent) -> None:
    backend.post("p", runs_of([(5000, 15000, 10), (5500, 15500, 20)]), b"tag")
    assert agent.transfers == [
        ("VRAM", [[5000, 10, 3], [5500, 20, 3]], "VRAM", [[15000, 10, 1], [15500, 20, 1]], b"tag")
    ]


def test_runs_of_two_kinds_are_notified_by_hand_when_all_of_them_are_done(backend, agent) -> None:
    transfer_id = backend.post("p", MIXED, b"tag")
    assert agent.transfers == [
        ("DRAM", [[1000, 10, 0]], "VRAM", [[15000, 10, 1]], b""),
        ("VRAM", [[5000, 20, 3], [5100, 30, 3]], "VRAM", [[15100, 20, 1], [15200, 30, 1]], b""),
    ]
    agent.status[1] = "DONE"
    assert backend.poll(0.0) == []
    assert agent.sent == []
    agent.status[0] = "DONE"
    assert backend.poll(0.0) == [Completion(transfer_id)]
    assert agent.sent == [b"tag"]
    assert sorted(agent.released) == [0, 1]
    assert backend.poll(0.0) == []
    assert agent.sent == [b"tag"]


def test_failure_of_one_handle_fails_the_transfer_and_keeps_its_handles(backend, agent) -> None:
    transfer_id = backend.post("p", MIXED, b"tag")
    agent.status[1] = RuntimeError("DISCONNECT")
    (completion,) = backend.poll(0.0)
    assert completion == Completion(transfer_id, "RuntimeError: DISCONNECT", quiet=False)
    assert agent.released == []
    assert backend.poll(0.0) == []
    with pytest.raises(TransferError, match="failed earlier"):
        backend.post("p", MIXED, b"tag")
    with pytest.raises(TransferError, match="failed earlier"):
        backend.connect(encode_metadata("p", "host", Memory([PEER_HOST]), b"p"))
    backend.disconnect("p")
    assert sorted(agent.released) == [0, 1]
    assert agent.removed == ["p"]
    assert backend.connect(encode_metadata("p", "host", Memory([PEER_HOST]), b"p")) == "p"


def test_status_that_nixl_never_gave_before_is_an_error(backend, agent) -> None:
    agent.status[0] = "ERR"
    transfer_id = backend.post("p", runs_of([(1000, 11000, 10)]), b"tag")
    assert backend.poll(0.0) == [
        Completion(transfer_id, "TransferError: NIXL says ERR", quiet=False)
    ]


def test_refusal_before_anything_was_posted_leaves_the_peer_alive(backend, agent) -> None:
    agent.refuse_initialize_after = 1
    with pytest.raises(TransferError, match="NOT_FOUND"):
        backend.post("p", MIXED, b"tag")
    assert agent.released == [0]
    assert backend.poll(0.0) == []
    agent.refuse_initialize_after = 99
    assert backend.post("p", MIXED, b"tag") is not None


def test_lost_notification_after_complete_data_is_a_quiet_error(backend, agent) -> None:
    transfer_id = backend.post("p", MIXED, b"tag")
    agent.status.update({0: "DONE", 1: "DONE", "send": RuntimeError("DISCONNECT")})
    (completion,) = backend.poll(0.0)
    assert completion.transfer_id == transfer_id
    assert "DISCONNECT" in completion.error
    assert completion.quiet


def test_no_runs_with_a_notification_that_can_not_be_sent_raise(backend, agent) -> None:
    agent.status["send"] = RuntimeError("DISCONNECT")
    with pytest.raises(TransferError, match="DISCONNECT"):
        backend.post("p", runs_of([]), b"tag")
    assert backend.poll(0.0) == []


def test_close_releases_what_is_in_flight_and_what_was_abandoned(backend, agent) -> None:
    backend.post("p", runs_of([(1000, 11000, 10)]), b"")
    agent.status[1] = RuntimeError("DISCONNECT")
    backend.post("p", runs_of([(1000, 11000, 10)]), b"")
    backend.close()
    backend.close()
    assert sorted(agent.released) == [0, 1]
    assert agent.removed == ["p"]


@pytest.mark.parametrize("device", ["cuda", "cuda:", "cuda:x", "cuda:-1", "cuda:99999", "xpu:0"])
def test_metadata_with_an_unknown_device_is_refused(backend, device: str) -> None:
    with pytest.raises(TransferError):
        Memory([MemoryRegion(1, 1, device)])


def test_metadata_under_another_name_is_refused(backend) -> None:
    with pytest.raises(TransferError, match="under the name"):
        backend.connect(encode_metadata("somebody", "host", Memory([PEER_HOST]), b"else"))


def test_region_at_the_end_of_the_address_space_is_refused(backend) -> None:
    with pytest.raises(TransferError, match="64-bit"):
        backend.register([MemoryRegion((1 << 64) - 8, 8)])

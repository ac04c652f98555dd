"""Registered memory in NIXL's terms: kinds of memory, device numbers, and the metadata of a peer.

A NIXL descriptor carries a device number, and a list of them one kind of memory; pdkv's runs carry
addresses alone. So metadata names the peer's regions beside NIXL's own bytes. Part of the NIXL
plug, without importing nixl. Layer 4.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np
import numpy.typing as npt

from pdkv.backends.regions import RegionTable
from pdkv.errors import TransferError
from pdkv.layout import MemoryRegion

__all__ = ["Memory", "decode_metadata", "encode_metadata", "rows_by_segment"]


class Memory:
    """One process's registered memory.

    By index into `table.regions`: is_vram, bool [num_regions]; device_ids, uint64 [num_regions].
    segment: the one kind of all regions, or "" where there are both.
    """

    def __init__(self, regions: Sequence[MemoryRegion] = ()) -> None:
        self.table = RegionTable(regions)
        self.refresh()

    def refresh(self) -> None:
        """Follow a change of the table."""
        kinds = [_segment(r.device) for r in self.table.regions]
        self.is_vram = np.array([segment == "VRAM" for segment, _ in kinds], np.bool_)
        self.device_ids = np.array([device_id for _, device_id in kinds], np.uint64)
        segments = {segment for segment, _ in kinds}
        self.segment = segments.pop() if len(segments) == 1 else ""

    def descriptors(
        self,
        addresses: npt.NDArray[np.uint64],
        nbytes: npt.NDArray[np.uint64],
        index: npt.NDArray[np.intp],
    ) -> npt.NDArray[np.uint64]:
        """NIXL's rows (address, nbytes, device number) of runs in the regions `index`."""
        rows = np.empty((len(addresses), 3), np.uint64)
        rows[:, 0] = addresses
        rows[:, 1] = nbytes
        rows[:, 2] = self.device_ids[index]
        return rows


def rows_by_segment(
    regions: Sequence[MemoryRegion],
) -> dict[str, list[tuple[int, int, int, str]]]:
    """Registration rows (address, nbytes, device number, "") for each kind of memory."""
    rows: dict[str, list[tuple[int, int, int, str]]] = {}
    for region in regions:
        segment, device_id = _segment(region.device)
        rows.setdefault(segment, []).append((region.address, region.nbytes, device_id, ""))
    return rows


def _segment(device: str) -> tuple[str, int]:
    if device == "cpu":
        return "DRAM", 0
    kind, _, index = device.partition(":")
    if kind != "cuda" or not index.isdecimal() or len(index) > 4:
        raise TransferError(f'a region\'s device must be "cpu" or "cuda:N", got {device!r}')
    return "VRAM", int(index)


class _Metadata(msgspec.Struct, frozen=True, array_like=True, tag="pdkv-nixl-2"):
    agent: str
    host: str
    regions: tuple[MemoryRegion, ...]
    nixl: bytes


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(_Metadata)


def encode_metadata(agent: str, host: str, memory: Memory, nixl: bytes) -> bytes:
    """What `connect` takes at a peer; `nixl` is NIXL's own."""
    return _encoder.encode(_Metadata(agent, host, memory.table.regions, nixl))


def decode_metadata(metadata: bytes) -> tuple[str, str, Memory, bytes]:
    """Agent name, host, memory, NIXL's own metadata; TransferError for anything else."""
    try:
        record = _decoder.decode(metadata)
    except msgspec.DecodeError as e:
        raise TransferError(f"not the metadata of a nixl backend: {e}") from e
    return record.agent, record.host, Memory(record.regions), record.nixl

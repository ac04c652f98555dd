"""What a message costs: codec, and a round over ZeroMQ against the same fields as eleven frames.

    python benchmarks/bench_protocol.py [--pages 1000] [--rounds 400]

The eleven frames are what engines send today: each field a frame of its own, numbers as decimal
text, page ids as int32. Both ways are timed in turn within one run, so that what counts is their
ratio. A round is: build, send over TCP loopback, receive, parse, page ids as an array; of 64
messages in flight, as when a scheduler admits a batch, and of one alone, where most of the time is
two wake-ups of ZeroMQ's thread that both ways pay.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import numpy as np
import zmq

from pdkv.plan import Tag
from pdkv.protocol import (
    Identity,
    Notification,
    TransferInfo,
    decode,
    decode_frame,
    decode_notification,
    encode,
    encode_frame,
    encode_notification,
    pack_page_ids,
)

LIFE = bytes(range(16))
BARS = {"encode": 2.0, "decode": 1.5, "ratio": 0.45}


def transfer_info(num_pages: int) -> TransferInfo:
    """One decode rank's word about a prompt of so many pages."""
    return TransferInfo(
        room=1 << 40,
        attempt=12_345,
        incarnation=LIFE,
        num_tokens=num_pages * 16,
        decode_prefix_len=0,
        dst_page_ids=pack_page_ids(np.random.default_rng(1).permutation(num_pages)),
        dst_state_ids=(),
        dst_aux_index=7,
        is_dummy=False,
        num_readers=4,
    )


def each_us(
    call: Callable[[], object], repeats: int = 60, number: int = 2000
) -> tuple[float, float]:
    """Median and least CPU time of one call, in microseconds: who else runs counts for nothing."""
    times = []
    for _ in range(repeats):
        began = time.process_time()
        for _ in range(number):
            call()
        times.append((time.process_time() - began) / number * 1e6)
    return statistics.median(times), min(times)


class Loopback:
    """A PUSH and a PULL socket over TCP, in one thread."""

    def __init__(self) -> None:
        self.context = zmq.Context()
        self.pull = self.context.socket(zmq.PULL)
        port = self.pull.bind_to_random_port("tcp://127.0.0.1")
        self.push = self.context.socket(zmq.PUSH)
        self.push.connect(f"tcp://127.0.0.1:{port}")

    def close(self) -> None:
        for socket in (self.push, self.pull):
            socket.close(0)
        self.context.term()


class OneFrame:
    """pdkv's way."""

    def send(self, wire: Loopback, info: TransferInfo) -> None:
        frame = encode_frame(
            info,
            from_incarnation=LIFE,
            from_rank_id=3,
            to_incarnation=LIFE,
            epoch=1,
            sequence=1000,
        )
        wire.push.send(frame)

    def receive(self, wire: Loopback) -> int:
        received = decode(decode_frame(wire.pull.recv()).body)
        assert isinstance(received, TransferInfo)
        return len(received.page_ids())


class ElevenFrames:
    """The same content, a frame a field."""

    def send(self, wire: Loopback, info: TransferInfo) -> None:
        wire.push.send_multipart(
            [
                str(info.room).encode(),
                str(info.attempt).encode(),
                info.incarnation,
                str(info.num_tokens).encode(),
                str(info.decode_prefix_len).encode(),
                info.dst_page_ids,
                b"",
                str(info.dst_aux_index).encode(),
                b"0",
                str(info.num_readers).encode(),
                b"",
            ]
        )

    def receive(self, wire: Loopback) -> int:
        parts = wire.pull.recv_multipart()
        numbers = [int(parts[i].decode()) for i in (0, 1, 3, 4, 7, 8, 9)]
        assert len(numbers) == 7
        return len(np.frombuffer(parts[5], dtype=np.int32))


def rounds_us(info: TransferInfo, num_rounds: int, batch: int) -> tuple[float, float]:
    """Median time of a message in each way, taken in turn: one frame, eleven frames."""
    wire = Loopback()
    ways = (OneFrame(), ElevenFrames())
    times: tuple[list[float], list[float]] = ([], [])
    for _ in range(num_rounds):
        for way, taken in zip(ways, times, strict=True):
            began = time.perf_counter()
            for _ in range(batch):
                way.send(wire, info)
            for _ in range(batch):
                way.receive(wire)
            taken.append((time.perf_counter() - began) / batch * 1e6)
    wire.close()
    return statistics.median(times[0]), statistics.median(times[1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--pages", type=int, default=1000)
    parser.add_argument("--rounds", type=int, default=400)
    options = parser.parse_args()
    info = transfer_info(options.pages)
    data = encode(info)
    note = Notification(Identity(1, 2, LIFE), Tag(3, 0, 17))
    noted = encode_notification(note)
    print(f"TransferInfo with {options.pages} pages: {len(data)} bytes")
    print(f"{'':24}{'median':>10}{'least':>10}{'bar':>8}   us")
    for name, call in {
        "encode": lambda: encode(info),
        "decode": lambda: decode(data),
        "encode notification": lambda: encode_notification(note),
        "decode notification": lambda: decode_notification(noted),
    }.items():
        median, least = each_us(call)
        print(f"{name:24}{median:10.2f}{least:10.2f}{BARS.get(name, ''):>8}")
    for batch, bar in ((64, BARS["ratio"]), (1, "")):
        num_rounds = options.rounds if batch > 1 else 10 * options.rounds
        one, eleven = rounds_us(info, num_rounds, batch)
        print(f"round, {batch} in flight: one frame {one:.1f} us, eleven {eleven:.1f} us, ", end="")
        print(f"ratio {one / eleven:.2f}" + (f" (bar {bar})" if bar else ""))


if __name__ == "__main__":
    main()

"""The asyncio face: with a thread, without one, in a group, and when the node goes away."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence

import numpy as np
import pytest

from pdkv.backends.loopback import LoopbackBackend, LoopbackFabric
from pdkv.control.memory import MemoryControl, MemoryNetwork
from pdkv.endpoint import (
    AsyncEndpoint,
    Bootstrapped,
    DecodeEndpoint,
    EndpointEvent,
    Node,
    Outcome,
    PrefillEndpoint,
    Released,
    RequestFailed,
    Succeeded,
)
from pdkv.errors import ConfigError
from pdkv.layout import EngineLayout
from pdkv.pool.aux import AuxBuffers
from pdkv.pool.kv import KVPool
from pdkv.protocol import Identity
from pdkv.rendezvous import EngineRecord
from pdkv.request import Key, Vote
from support import AUX, small_layout

PAGES = np.arange(4, dtype=np.int32)


class Pair:
    """A prefill engine of one rank, and a decode engine of `num_ranks`, in one process."""

    def __init__(self, *, threaded: bool, num_ranks: int = 1) -> None:
        fabric, network = LoopbackFabric(), MemoryNetwork()
        self.pools: list[KVPool] = []

        def node(name: str, layout: EngineLayout, rank: int, life: int) -> Node:
            aux, pool = AuxBuffers(AUX, num_rows=8), KVPool(layout, rank, 32)
            self.pools.append(pool)  # peers write to its memory
            return Node(
                backend=LoopbackBackend(fabric=fabric),
                control=MemoryControl(network, f"{name}/{rank}"),
                layout=layout,
                rank_id=rank,
                pool=pool.layout(aux),
                aux=aux,
                incarnation=bytes([life] * 16),
                threaded=threaded,
            )

        one, many = small_layout(), small_layout(tp_size=num_ranks)
        self.prefill_node = node("p", one, 0, 1)
        self.decode_nodes = [node("d", many, rank, 2) for rank in range(num_ranks)]
        self.record = EngineRecord(
            incarnation=bytes([1] * 16), layout=one, addresses=(self.prefill_node.address,)
        )

    def close(self) -> None:
        for node in (self.prefill_node, *self.decode_nodes):
            node.close()

    def submit(self, decode: DecodeEndpoint, room: int = 5, attempt: int = 1) -> object:
        return decode.submit(
            room=room,
            attempt=attempt,
            prefill=self.record,
            num_tokens=16,
            page_ids=PAGES,
            aux_index=attempt,
        )


def serve(prefill: PrefillEndpoint, room: int = 5) -> object:
    handle = prefill.open(room, 16)
    prefill.send(handle, tokens=range(16), page_ids=PAGES)
    prefill.finish(handle, Outcome.CONTINUE, aux_index=1)
    return handle


@pytest.mark.parametrize("threaded", [True, False])
def test_a_request_is_awaited_on_both_sides(threaded: bool) -> None:
    pair = Pair(threaded=threaded)

    async def main() -> None:
        decode = AsyncEndpoint(DecodeEndpoint(pair.decode_nodes[0]))
        prefill = AsyncEndpoint(PrefillEndpoint(pair.prefill_node))
        tasks = [asyncio.create_task(side.run()) for side in (decode, prefill)]
        received = decode.track(pair.submit(decode.endpoint))  # type: ignore[arg-type]
        sent = prefill.track(serve(prefill.endpoint))  # type: ignore[arg-type]
        outcome = await asyncio.wait_for(received.outcome, 10)
        assert isinstance(outcome, Succeeded)
        assert isinstance(await asyncio.wait_for(sent.outcome, 10), Succeeded)
        await asyncio.wait_for(asyncio.gather(received.released, sent.released), 10)
        assert not decode._tracked
        assert not prefill._tracked
        pair.close()
        await asyncio.wait_for(asyncio.gather(*tasks), 10)

    asyncio.run(main())


def test_events_come_in_order_to_whoever_reads_them() -> None:
    pair = Pair(threaded=False)

    async def main() -> list[EndpointEvent]:
        decode = AsyncEndpoint(DecodeEndpoint(pair.decode_nodes[0]))
        prefill = AsyncEndpoint(PrefillEndpoint(pair.prefill_node))
        tasks = [asyncio.create_task(side.run()) for side in (decode, prefill)]
        seen: list[EndpointEvent] = []

        async def read() -> None:
            async for event in decode.events():
                seen.append(event)
                if isinstance(event, Released):
                    pair.close()

        reader = asyncio.create_task(read())
        await asyncio.sleep(0)
        pair.submit(decode.endpoint)  # type: ignore[arg-type]
        serve(prefill.endpoint)  # type: ignore[arg-type]
        await asyncio.wait_for(asyncio.gather(reader, *tasks), 10)
        return seen

    kinds = [type(event) for event in asyncio.run(main())]
    assert kinds == [Bootstrapped, Succeeded, Released]


def test_a_failure_is_a_value() -> None:
    pair = Pair(threaded=False)

    async def main() -> None:
        decode = AsyncEndpoint(DecodeEndpoint(pair.decode_nodes[0]))
        prefill = PrefillEndpoint(pair.prefill_node)
        task = asyncio.create_task(decode.run())
        identity = pair.submit(decode.endpoint)  # type: ignore[arg-type]
        tracked = decode.track(identity)  # type: ignore[arg-type]
        decode.endpoint.abort(identity, "changed my mind")  # type: ignore[attr-defined]
        outcome = await asyncio.wait_for(tracked.outcome, 10)
        assert isinstance(outcome, RequestFailed)
        assert outcome.cause == "changed my mind"
        prefill.poll(0.0)
        pair.close()
        await task

    asyncio.run(main())


def test_requests_that_are_not_over_when_the_node_closes_say_so() -> None:
    pair = Pair(threaded=True)

    async def main() -> None:
        decode = AsyncEndpoint(DecodeEndpoint(pair.decode_nodes[0]))
        task = asyncio.create_task(decode.run())
        awaited = decode.track(pair.submit(decode.endpoint))  # type: ignore[arg-type]
        decode.track(pair.submit(decode.endpoint, 6, 2))  # type: ignore[arg-type]
        await asyncio.sleep(0)
        pair.close()
        await asyncio.wait_for(task, 10)
        with pytest.raises(ConfigError, match="closed before"):
            await awaited.outcome

    asyncio.run(main())


def test_a_cancelled_run_ends_and_the_node_lives_on() -> None:
    pair = Pair(threaded=True)

    async def main() -> None:
        decode = AsyncEndpoint(DecodeEndpoint(pair.decode_nodes[0]))
        task = asyncio.create_task(decode.run())
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert not pair.decode_nodes[0].is_closed

    asyncio.run(main())
    pair.close()


def test_a_group_gathers_its_votes_once_a_round() -> None:
    pair = Pair(threaded=False, num_ranks=3)

    async def main() -> None:
        barrier: list[asyncio.Future[None]] = []
        votes: list[Mapping[Key, Vote]] = []

        async def gather(mine: Mapping[Key, Vote]) -> Sequence[Mapping[Key, Vote]]:
            """A collective of the ranks of this process."""
            nonlocal votes
            votes.append(mine)
            if len(votes) == 3:
                everybody, votes = votes, []
                for future in barrier:
                    future.set_result(None)
                barrier.clear()
                results.append(everybody)
                return everybody
            barrier.append(asyncio.get_running_loop().create_future())
            await barrier[-1]
            return results[-1]

        results: list[list[Mapping[Key, Vote]]] = []
        ranks = [AsyncEndpoint(DecodeEndpoint(n), gather=gather) for n in pair.decode_nodes]
        prefill = AsyncEndpoint(PrefillEndpoint(pair.prefill_node))
        tasks = [asyncio.create_task(side.run()) for side in (*ranks, prefill)]
        tracked = [rank.track(pair.submit(rank.endpoint)) for rank in ranks]  # type: ignore[arg-type]
        serve(prefill.endpoint)  # type: ignore[arg-type]
        outcomes = await asyncio.wait_for(asyncio.gather(*(t.outcome for t in tracked)), 10)
        assert all(isinstance(outcome, Succeeded) for outcome in outcomes)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

        with pytest.raises(ConfigError, match="gather their votes"):
            AsyncEndpoint(ranks[0].endpoint)

    asyncio.run(main())
    pair.close()


def test_what_would_never_be_told_is_not_tracked() -> None:
    pair = Pair(threaded=False)

    async def main() -> None:
        decode = AsyncEndpoint(DecodeEndpoint(pair.decode_nodes[0]))
        task = asyncio.create_task(decode.run())
        identity = pair.submit(decode.endpoint)  # type: ignore[arg-type]
        tracked = decode.track(identity)  # type: ignore[arg-type]
        wrong: object
        for wrong in ("room 5", None, 5, Identity(5, 1, bytes(16))):
            with pytest.raises(ConfigError, match="no request that lives here"):
                decode.track(wrong)  # type: ignore[arg-type]
        decode.endpoint.close()
        assert isinstance(await asyncio.wait_for(tracked.outcome, 10), RequestFailed)
        await asyncio.wait_for(tracked.released, 10)
        with pytest.raises(ConfigError, match="no request that lives here"):
            decode.track(identity)  # type: ignore[arg-type]
        pair.close()
        await asyncio.wait_for(task, 10)

    asyncio.run(main())


def test_run_is_for_one_loop_and_one_task_and_may_be_called_again() -> None:
    pair = Pair(threaded=False)

    async def main() -> None:
        decode = AsyncEndpoint(DecodeEndpoint(pair.decode_nodes[0]))
        prefill = AsyncEndpoint(PrefillEndpoint(pair.prefill_node))
        task = asyncio.create_task(decode.run())
        await asyncio.sleep(0)
        with pytest.raises(ConfigError, match="running already"):
            await decode.run()
        with pytest.raises(ConfigError, match="event loop"):
            await asyncio.to_thread(asyncio.run, decode.run())
        tracked = decode.track(pair.submit(decode.endpoint))  # type: ignore[arg-type]
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        with pytest.raises(ConfigError, match="run was cancelled before"):
            await tracked.outcome
        tasks = [asyncio.create_task(side.run()) for side in (decode, prefill)]
        reader = asyncio.create_task(anext(decode.events()))
        serve(prefill.endpoint)  # type: ignore[arg-type]
        assert isinstance(await asyncio.wait_for(reader, 10), EndpointEvent)
        pair.close()
        await asyncio.wait_for(asyncio.gather(*tasks), 10)

    asyncio.run(main())


def test_a_collective_that_fails_is_named_by_whatever_was_awaited() -> None:
    pair = Pair(threaded=False)

    async def gather(votes: Mapping[Key, Vote]) -> Sequence[Mapping[Key, Vote]]:
        raise OSError("the collective is lost")

    async def main() -> None:
        decode = AsyncEndpoint(DecodeEndpoint(pair.decode_nodes[0]), gather=gather)
        tracked = decode.track(pair.submit(decode.endpoint))  # type: ignore[arg-type]
        with pytest.raises(OSError, match="collective is lost"):
            await decode.run()
        with pytest.raises(ConfigError, match="collective is lost"):
            await tracked.outcome

    asyncio.run(main())
    pair.close()

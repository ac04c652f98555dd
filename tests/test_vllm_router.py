"""The example's router between two servers that only write down what they are asked."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("aiohttp")
sys.path.insert(0, str(Path(__file__).parent.parent / "examples"))

import aiohttp
from aiohttp import web
from aiohttp.test_utils import TestServer, unused_port

from vllm_router import Router

PATH = "/v1/completions"
ANSWER = {"do_remote_prefill": True, "room": 5, "prefill": "record"}
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class Vllm:
    """A server: what it was asked, how it answers, and how many clients went away."""

    def __init__(self, answer: dict[str, Any], *, status: int = 200, waits: bool = False) -> None:
        self.asked: list[dict[str, Any]] = []
        self.num_left = 0
        self._answer, self._status, self._waits = answer, status, waits

    async def serve(self, request: web.Request) -> web.StreamResponse:
        self.asked.append(await request.json())
        try:
            if self._waits:
                await asyncio.Event().wait()
        except asyncio.CancelledError:
            self.num_left += 1
            raise
        return web.json_response(self._answer, status=self._status)


async def started(handler: Handler, **options: Any) -> TestServer:
    app = web.Application()
    app.router.add_post(PATH, handler)
    if options:
        app.cleanup_ctx.append(options["context"])
    server = TestServer(app)
    await server.start_server()  # which cancels handlers whose client goes away
    return server


def ask(
    prefill: Vllm | None,
    decode: Vllm,
    *,
    is_concurrent: bool,
    patience_s: float = 10.0,
    until: Callable[[], bool] = lambda: True,
) -> tuple[int, dict[str, Any]]:
    """One request through a router; (0, {}) when the client lost its patience."""

    async def run() -> tuple[int, dict[str, Any]]:
        servers = [await started(s.serve) for s in (prefill, decode) if s is not None]
        urls = [f"http://127.0.0.1:{server.port}" for server in servers]
        if prefill is None:
            urls.insert(0, f"http://127.0.0.1:{unused_port()}")
        router = Router(prefill=[("p0", urls[0])], decode=[urls[1]], is_concurrent=is_concurrent)
        front = await started(router.serve, context=router.session)
        found: tuple[int, dict[str, Any]] = (0, {})
        try:
            async with aiohttp.ClientSession() as session, asyncio.timeout(patience_s):
                body = {"prompt": [1, 2], "max_tokens": 8, "stream": True}
                async with session.post(front.make_url(PATH), json=body) as response:
                    found = response.status, await response.json(content_type=None)
        except TimeoutError:
            pass
        async with asyncio.timeout(10.0):
            while not until():
                await asyncio.sleep(0)
        for server in (front, *servers):
            await server.close()
        return found

    return asyncio.run(run())


def test_one_after_the_other_decode_gets_what_prefill_answered() -> None:
    prefill, decode = Vllm({"kv_transfer_params": ANSWER}), Vllm({"text": "hello"})
    assert ask(prefill, decode, is_concurrent=False) == (200, {"text": "hello"})
    (first,), (second,) = prefill.asked, decode.asked
    assert (first["max_tokens"], "stream" in first) == (1, False)
    assert first["kv_transfer_params"] == {"do_remote_decode": True}
    assert (second["max_tokens"], second["stream"]) == (8, True)
    assert second["kv_transfer_params"] == ANSWER


def test_both_at_once_share_a_room() -> None:
    prefill, decode = Vllm({"kv_transfer_params": ANSWER}), Vllm({"text": "hello"})
    assert ask(prefill, decode, is_concurrent=True) == (200, {"text": "hello"})
    first, second = (server.asked[0]["kv_transfer_params"] for server in (prefill, decode))
    assert first["room"] == second["room"]
    assert second["prefill_name"] == "p0"


@pytest.mark.parametrize("is_concurrent", [False, True])
def test_without_a_prompt_the_request_fails_and_decode_is_not_kept(is_concurrent: bool) -> None:
    prefill, decode = Vllm({"error": "full"}, status=503), Vllm({}, waits=True)
    status, body = ask(
        prefill,
        decode,
        is_concurrent=is_concurrent,
        until=lambda: decode.num_left == len(decode.asked),
    )
    assert status == 502
    assert "503" in body["error"]["message"]


@pytest.mark.parametrize("is_concurrent", [False, True])
def test_a_prefill_server_that_is_away_is_said_to_be(is_concurrent: bool) -> None:
    status, body = ask(None, Vllm({}, waits=True), is_concurrent=is_concurrent)
    assert status == 502
    assert "connect" in body["error"]["message"].lower()


def test_a_decode_server_that_refuses_ends_the_prefill_leg() -> None:
    prefill, decode = Vllm({}, waits=True), Vllm({"error": "no"}, status=400)
    found = ask(prefill, decode, is_concurrent=True, until=lambda: prefill.num_left == 1)
    assert found == (400, {"error": "no"})


def test_a_client_that_goes_away_ends_both_legs() -> None:
    prefill, decode = Vllm({}, waits=True), Vllm({}, waits=True)
    found = ask(
        prefill,
        decode,
        is_concurrent=True,
        patience_s=1.0,
        until=lambda: (prefill.num_left, decode.num_left) == (1, 1),
    )
    assert found == (0, {})

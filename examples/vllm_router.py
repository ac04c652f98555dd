"""A router for vLLM servers that run PdkvConnector: two legs for each request.

    python examples/vllm_router.py --flow concurrent --rendezvous tcp://127.0.0.1:7000 \\
        --prefill p0=http://127.0.0.1:8100 --decode http://127.0.0.1:8200

sequential: prefill computes and answers, then decode is asked with what it answered. Nobody but
the router needs to know any address. concurrent: both are asked at once, with one room, and what
prefill has computed goes over while it computes on. Decode must then know prefill before it
answers: this process runs a rendezvous server, where prefill servers register under the names given
here (`name` and `rendezvous` in their kv_connector_extra_config).

Servers are taken in turn. What a real router adds: health, load, and caches of prefixes.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import secrets
from collections.abc import AsyncIterator, Iterator
from typing import Any

import aiohttp
from aiohttp import web

from pdkv.control.zmq import ZmqControl
from pdkv.rendezvous.server import RendezvousServer

_LAST_WORD_S = 10.0


class PrefillFailed(Exception):
    """The leg at prefill ended without a computed prompt."""


class Router:
    """`prefill`: (name, URL) of each server; `decode`: URLs."""

    def __init__(
        self, *, prefill: list[tuple[str, str]], decode: list[str], is_concurrent: bool
    ) -> None:
        self._prefill: Iterator[tuple[str, str]] = itertools.cycle(prefill)
        self._decode: Iterator[str] = itertools.cycle(decode)
        self._is_concurrent = is_concurrent
        self._session: aiohttp.ClientSession | None = None

    async def session(self, app: web.Application) -> AsyncIterator[None]:
        """For as long as the application runs."""
        connector = aiohttp.TCPConnector(limit=0)
        timeout = aiohttp.ClientTimeout(total=None)
        async with aiohttp.ClientSession(connector=connector, timeout=timeout) as session:
            self._session = session
            yield

    async def serve(self, request: web.Request) -> web.StreamResponse:
        """One request. A client that goes away ends both legs."""
        body = await request.json()
        name, prefill = next(self._prefill)
        decode = next(self._decode) + request.path
        try:
            if not self._is_concurrent:
                params = await self._compute(prefill + request.path, body, {})
                return await self._generate(request, decode, body, params)
            room = secrets.randbits(63)
            params = {"do_remote_prefill": True, "room": room, "prefill_name": name}
            first = asyncio.create_task(self._compute(prefill + request.path, body, {"room": room}))
            second = asyncio.create_task(self._generate(request, decode, body, params))
            return await both(first, second)
        except (PrefillFailed, aiohttp.ClientError) as error:
            return web.json_response({"error": {"message": str(error)}}, status=502)

    async def _compute(
        self, url: str, body: dict[str, Any], params: dict[str, Any]
    ) -> dict[str, Any]:
        """The leg at prefill: one token, which decode samples again. Returns what decode needs."""
        assert self._session is not None
        asked = {k: v for k, v in body.items() if k not in ("stream", "stream_options")}
        asked |= {"max_tokens": 1, "kv_transfer_params": {"do_remote_decode": True, **params}}
        asked |= {k: 1 for k in ("max_completion_tokens", "min_tokens") if k in body}
        async with self._session.post(url, json=asked) as response:
            answer = await response.json(content_type=None)
        if response.status != 200 or not answer.get("kv_transfer_params"):
            raise PrefillFailed(f"prefill answered {response.status}: {answer}")
        found: dict[str, Any] = answer["kv_transfer_params"]
        return found

    async def _generate(
        self, request: web.Request, url: str, body: dict[str, Any], params: dict[str, Any]
    ) -> web.StreamResponse:
        """The leg at decode, passed on as it comes."""
        assert self._session is not None
        asked = body | {"kv_transfer_params": params}
        async with self._session.post(url, json=asked) as upstream:
            kind = {"Content-Type": upstream.headers.get("Content-Type", "application/json")}
            response = web.StreamResponse(status=upstream.status, headers=kind)
            await response.prepare(request)
            async for piece in upstream.content.iter_any():
                await response.write(piece)
            await response.write_eof()
        return response


async def both(
    prefill: asyncio.Task[dict[str, Any]], decode: asyncio.Task[web.StreamResponse]
) -> web.StreamResponse:
    """What decode answers. A leg that fails ends the other: it would wait for nothing."""
    try:
        await asyncio.wait((prefill, decode), return_when=asyncio.FIRST_COMPLETED)
        if not decode.done():
            prefill.result()
        response = await decode
        if response.status == 200:  # prefill is about to answer
            await asyncio.wait((prefill,), timeout=_LAST_WORD_S)
        return response
    finally:
        for leg in (prefill, decode):
            leg.cancel()
        await asyncio.gather(prefill, decode, return_exceptions=True)


def named(text: str) -> tuple[str, str]:
    """NAME=URL, or a URL alone."""
    name, found, url = text.partition("=")
    return (name, url.rstrip("/")) if found else ("", text.rstrip("/"))


def main() -> None:
    """Serve until interrupted."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--prefill", type=named, action="append", required=True)
    parser.add_argument("--decode", action="append", required=True)
    parser.add_argument("--flow", choices=("sequential", "concurrent"), default="sequential")
    parser.add_argument("--rendezvous", help="where to run a rendezvous server")
    parser.add_argument("--port", type=int, default=8000)
    options = parser.parse_args()
    router = Router(
        prefill=options.prefill,
        decode=[url.rstrip("/") for url in options.decode],
        is_concurrent=options.flow == "concurrent",
    )
    app = web.Application()
    app.cleanup_ctx.append(router.session)
    for path in ("/v1/completions", "/v1/chat/completions"):
        app.router.add_post(path, router.serve)
    with contextlib.ExitStack() as stack:
        if options.rendezvous:
            stack.enter_context(RendezvousServer(ZmqControl(options.rendezvous)))
        # Without cancellation a client that goes away would leave both legs running.
        web.run_app(app, host="127.0.0.1", port=options.port, handler_cancellation=True, print=None)


if __name__ == "__main__":
    main()

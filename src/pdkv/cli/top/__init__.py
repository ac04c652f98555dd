"""`python -m pdkv top HOST:PORT`: what a node does, as it does it.

    top 127.0.0.1:7070                 live, a frame a second, until Ctrl-C
    top 127.0.0.1:7070 --once          one frame, for a pipe or a log
    top 127.0.0.1:7070 --once --json   the same as data
    top HOST:PORT#KEY --secret ME.key_secret --allow FOLDER    a node with keys

The node must offer it: `QueryServer(StatusSource(node, [endpoint]).answer, "tcp://HOST:PORT")`
(docs/observability.md). It is only ever read. Layer 6, rich: `pip install pdkv[top]`.
"""

from __future__ import annotations

import argparse
import sys
import time

import msgspec

from pdkv.cli._address import endpoint_of
from pdkv.cli._numbers import count, seconds
from pdkv.cli._progress import Progress
from pdkv.control.zmq_keys import CurveSecurity
from pdkv.control.zmq_query import QueryClient
from pdkv.errors import PdkvError
from pdkv.observe import Status, decode_status

__all__ = ["main"]


def main(arguments: list[str]) -> int:
    """Show one node; 1 where it does not answer."""
    options = _parser().parse_args(arguments)
    try:
        with QueryClient(endpoint_of(options.address), security=_security(options)) as client:
            return _show(client, options)
    except PdkvError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 0


def _show(client: QueryClient, options: argparse.Namespace) -> int:
    if options.json:
        while True:
            print(msgspec.json.encode(_wait(client, options)).decode(), flush=True)
            if options.once:
                return 0
            time.sleep(options.interval)
    try:
        from pdkv.cli.top import screen
    except ImportError:
        print("error: top needs rich: pip install pdkv[top]; or use --json", file=sys.stderr)
        return 1
    if options.once:
        screen.print_once(_wait(client, options), options.rows)
        return 0
    first = _wait(client, options)
    screen.run(first, lambda: _ask(client, options), options.interval, options.rows)
    return 0


def _wait(client: QueryClient, options: argparse.Namespace) -> Status:
    """Ask while no picture is on the screen."""
    with Progress(f"waiting for {options.address}"):
        return _ask(client, options)


def _ask(client: QueryClient, options: argparse.Namespace) -> Status:
    return decode_status(client.ask(b"status", options.timeout))


def _security(options: argparse.Namespace) -> CurveSecurity | None:
    if options.secret is None:
        return None
    return CurveSecurity.load(options.secret, options.allow)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m pdkv top", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("address", metavar="HOST:PORT", help="where the node answers; #KEY behind")
    parser.add_argument("--once", action="store_true", help="one frame, then end")
    parser.add_argument("--json", action="store_true", help="data instead of a picture")
    parser.add_argument("--interval", type=seconds, default=1.0, help="seconds between frames")
    parser.add_argument("--timeout", type=seconds, default=5.0, help="seconds to wait for answers")
    parser.add_argument("--rows", type=count, default=12, help="of each list")
    parser.add_argument("--secret", help="own key (NAME.key_secret), for a node with keys")
    parser.add_argument("--allow", default=".", help="folder with the node's public key")
    return parser

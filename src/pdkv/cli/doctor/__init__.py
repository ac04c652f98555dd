"""`python -m pdkv doctor`: can this machine do what pdkv needs, and what to do where it can't.

    doctor                          look at this machine, with transfers between two processes
    doctor --serve HOST:PORT        lend memory to another machine's doctor
    doctor --to HOST:PORT           write into it: the control plane, the data plane, the speed

Exit status 1 when something fails. Layer 6.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import textwrap
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

from pdkv.cli._address import endpoint_of
from pdkv.cli._numbers import seconds
from pdkv.cli._progress import Progress
from pdkv.cli.doctor import checks
from pdkv.cli.doctor.checks import Finding
from pdkv.errors import ConfigError, PdkvError

__all__ = ["main", "table"]

_LEND_S, _STEP_S = 300.0, 10.0
_SIGNS = {"ok": "ok  ", "note": "note", "warn": "WARN", "fail": "FAIL"}


def main(arguments: list[str]) -> int:
    """Look at this machine, or be one side of a transfer between two; 1 when something fails."""
    parser = _parser()
    options = parser.parse_args(arguments)
    if (options.transports or options.bind) and not (options.serve or options.to):
        parser.error("--transports and --bind are of a transfer: give --serve or --to as well")
    try:
        options.serve = options.serve and endpoint_of(options.serve, any_port=True)
        options.to = options.to and endpoint_of(options.to)
        options.bind = options.bind and endpoint_of(options.bind, any_port=True)
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    if options.seconds is None:
        options.seconds = _LEND_S if options.serve else _STEP_S
    if options.json and (options.serve or options.to):
        return _probe(options)
    with Progress("starting NIXL") as progress:
        if options.serve:
            return _probe(options, progress)
        if options.to:
            progress.step(f"transfer to {options.to}")
            where = (options.to, options.bind, options.transports)
            return _show([checks.to_other(*where, options.seconds)], progress, as_json=False)
        progress.step("looking at this machine")
        return _show(checks.run_all(options.seconds), progress, as_json=options.json)


def _show(findings: Iterable[Finding], progress: Progress, *, as_json: bool) -> int:
    """Each as soon as it is there."""
    has_failed = False
    for finding in findings:
        has_failed |= finding.state == "fail"
        progress.step("")
        print(json.dumps(finding._asdict()) if as_json else table([finding]), flush=True)
        progress.step("trying transfers between two processes")
    return 1 if has_failed else 0


def _probe(options: argparse.Namespace, progress: Progress | None = None) -> int:
    """One side of a transfer. `progress` ends with the first word that is said."""
    try:
        from pdkv.cli.doctor import probe

        say = probe.say_json if options.json else probe.say_words
        if progress is not None:
            say = partial(_say_at_last, progress, say)
        if options.serve:
            return probe.serve(options.serve, options.transports, options.seconds, say)
        bind = options.bind or probe.own_address(options.to)
        return probe.write(options.to, bind, options.transports, options.seconds, say)
    except (ImportError, PdkvError) as error:
        if options.json:
            failed = "import" if isinstance(error, ImportError) else "address"
            print(json.dumps({"failed": failed, "text": str(error)}))
        else:
            print(f"error: {error}", file=sys.stderr)
        return 1


def _say_at_last(progress: Progress, say: Callable[..., None], **words: Any) -> None:
    progress.step("")
    say(**words)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m pdkv doctor", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--serve", metavar="HOST:PORT", help="lend memory, for --seconds")
    parser.add_argument("--to", metavar="HOST:PORT", help="write to a doctor that serves")
    parser.add_argument(
        "--bind",
        metavar="HOST:PORT",
        help="with --to: own address (default: the one that leads there)",
    )
    parser.add_argument("--transports", help="UCX_TLS of the transfer, e.g. tcp")
    wait = "how long to lend memory (300), or to wait for a step (10)"
    parser.add_argument("--seconds", type=seconds, help=wait)
    parser.add_argument("--json", action="store_true", help="one JSON object a line")
    return parser


def table(findings: Iterable[Finding]) -> str:
    """One line a finding, and below it what to do."""
    width = max(60, shutil.get_terminal_size().columns)
    lines = []
    for finding in findings:
        lines.append(f"{_SIGNS[finding.state]}  {finding.subject:<34} {finding.detail}")
        if finding.advice:
            advice = textwrap.wrap(f"-> {finding.advice}", width - 8)
            lines += [f"        {line}" for line in advice]
    return "\n".join(lines)

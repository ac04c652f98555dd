"""`python -m pdkv doctor`: can this machine do what pdkv needs, and what to do where it can't.

    doctor                          look at this machine, with transfers between two processes
    doctor --serve tcp://HOST:PORT  lend memory to another machine's doctor
    doctor --to tcp://HOST:PORT     write into it: the control plane, the data plane, the speed

Exit status 1 when something fails. Layer 6.
"""

from __future__ import annotations

import argparse
import json
import shutil
import textwrap
from collections.abc import Iterable

from pdkv.cli.doctor.checks import Finding, run_all

__all__ = ["main", "table"]

_SIGNS = {"ok": "ok  ", "note": "note", "warn": "WARN", "fail": "FAIL"}


def main(arguments: list[str]) -> int:
    """Look at this machine, or be one side of a transfer between two; 1 when something fails."""
    parser = argparse.ArgumentParser(prog="python -m pdkv doctor", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--serve", metavar="ADDRESS", help="lend memory, for --seconds")
    parser.add_argument("--to", metavar="ADDRESS", help="write to a doctor that serves")
    parser.add_argument("--bind", default="tcp://127.0.0.1:0", help="with --to: own address")
    parser.add_argument("--transports", help="UCX_TLS of the transfer, e.g. tcp")
    parser.add_argument("--seconds", type=float, default=10.0, help="how long to wait for a step")
    parser.add_argument("--json", action="store_true", help="one JSON object a line")
    options = parser.parse_args(arguments)
    if options.serve or options.to:
        from pdkv.cli.doctor import probe

        if options.serve:
            return probe.serve(options.serve, options.transports, seconds=options.seconds)
        return probe.write(options.to, options.bind, options.transports, seconds=options.seconds)
    found = []
    for finding in run_all(options.seconds):
        found.append(finding)
        print(json.dumps(finding._asdict()) if options.json else table([finding]), flush=True)
    return 1 if any(finding.state == "fail" for finding in found) else 0


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

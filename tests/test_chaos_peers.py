"""Peers that are killed and stopped at random moments: the short form of scripts/chaos_peers.py."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from pdkv.backends import mooncake_engine, nixl_agent

ROOT = Path(__file__).parent.parent
pytestmark = [pytest.mark.slow, pytest.mark.check]


def run(*arguments: str) -> dict:
    path = os.pathsep.join([str(ROOT / "src"), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [
            sys.executable,
            str(ROOT / "scripts" / "chaos_peers.py"),
            "--rounds",
            "2",
            "--watch",
            "2",
            *arguments,
        ],
        capture_output=True,
        text=True,
        check=False,
        timeout=240,
        env={**os.environ, "PYTHONPATH": path},
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("transports", ["", "tcp"], ids=["cma", "tcp"])
def test_nixl_survives_its_peers(transports: str) -> None:
    try:
        nixl_agent.load_api()
    except ImportError as e:
        pytest.skip(str(e))
    report = run("--backend", "nixl", "--transports", transports)
    assert report["succeeded"] > 0


def test_mooncake_survives_its_peers() -> None:
    try:
        mooncake_engine.load_module()
    except ImportError as e:
        pytest.skip(str(e))
    assert run("--backend", "mooncake")["succeeded"] > 0

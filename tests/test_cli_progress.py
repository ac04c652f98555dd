"""What a command says while it takes long."""

from __future__ import annotations

import io
import re
import subprocess
import sys
from pathlib import Path

from pdkv.cli._progress import Progress
from waiting import wait_for

SRC = Path(__file__).parent.parent / "src"


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_what_is_quick_says_nothing() -> None:
    for stream in (io.StringIO(), Terminal()):
        with Progress("adding", stream=stream):
            pass
        assert stream.getvalue() == ""


def test_a_terminal_shows_the_step_and_it_goes_again() -> None:
    stream = Terminal()
    with Progress("round 1", stream=stream, after_s=0.001) as progress:
        wait_for(lambda: "round 1 ... 0 s" in stream.getvalue())
        progress.step("round 2")
        wait_for(lambda: "round 2 ..." in stream.getvalue())
    assert re.search(r"\r +\r$", stream.getvalue())


def test_a_pipe_gets_a_line_a_step() -> None:
    stream = io.StringIO()
    with Progress("round 1", stream=stream, after_s=0.001) as progress:
        wait_for(lambda: stream.getvalue() == "round 1 ...\n")
        progress.step("round 2")
        wait_for(lambda: stream.getvalue() == "round 1 ...\nround 2 ...\n")
        progress.step("")


def test_helpers_of_the_commands_are_no_commands() -> None:
    command = [sys.executable, "-m", "pdkv", "_progress"]
    found = subprocess.run(
        command, capture_output=True, text=True, check=False, cwd=SRC, timeout=60
    )
    assert found.returncode == 2
    assert "{bench,doctor,keys,plan,top}" in found.stderr

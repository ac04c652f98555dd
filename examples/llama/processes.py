"""How the processes of the example start: forked from one that has imported torch and done nothing.

Importing torch takes a process two seconds, and there are ten of them.
"""

from __future__ import annotations

import multiprocessing
import os
from multiprocessing.context import ForkServerContext
from pathlib import Path


def context() -> ForkServerContext:
    """Makes processes. Their environment is that of the first call."""
    here = str(Path(__file__).parent)
    paths = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    if here not in paths:
        # The server is a new interpreter, and must find the modules to import.
        os.environ["PYTHONPATH"] = os.pathsep.join([here, *filter(None, paths)])
    found = multiprocessing.get_context("forkserver")
    found.set_forkserver_preload(["rank"])
    return found

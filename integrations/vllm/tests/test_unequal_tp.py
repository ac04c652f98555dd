"""TP2 to TP3 with six KV heads, neither of which divides the other."""

from __future__ import annotations

import random

import pytest
from servers import Deployment, completion, tokens_of

MODEL, TP_SIZES = "random6", (2, 3)
# Five workers that spin share two cores: a node may not run for half a minute, and then be silent.
LIMITS = {"bootstrap_s": 300.0, "progress_s": 300.0, "peer_lost_s": 100.0, "handshake_s": 300.0}


@pytest.mark.parametrize("flow", ["sequential", "concurrent"])
def test_the_tokens_are_those_of_one_server(deployment: Deployment, flow: str) -> None:
    rng = random.Random(flow)
    for num_tokens in (1, 33, 100):
        asked = [rng.randrange(100, 40_000) for _ in range(num_tokens)]
        answer = deployment.ask(flow, completion(asked, 3))
        assert answer["choices"][0]["finish_reason"] == "length"
        assert tokens_of(answer) == tokens_of(deployment.prefill.complete(asked, 3))

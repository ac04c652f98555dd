"""Two vLLM servers with this connector, TP1 and TP1, behind a router for each flow."""

from __future__ import annotations

import random
import signal
import time
import urllib.error

import pytest
from servers import Deployment, Server, completion, post, tokens_of

MODEL, TP_SIZES = "smollm2", (1, 1)
LIMITS = {"bootstrap_s": 60.0}
TOKEN_NBYTES = 30 * 2 * 3 * 64 * 4  # layers, K and V, heads, head size, float32
BLOCK, CHUNK = 32, 256


def prompt(num_tokens: int, seed: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(100, 40_000) for _ in range(num_tokens)]


def wait_for_free_blocks(*servers: Server, limit_s: float = 120.0) -> None:
    deadline = time.monotonic() + limit_s
    while any(server.metrics()["vllm:kv_cache_usage_perc"] for server in servers):
        assert time.monotonic() < deadline, "blocks are still in use"
        time.sleep(0.5)


def sent_bytes(deployment: Deployment) -> float:
    deployment.prefill.complete([7])  # figures come with the next step
    time.sleep(0.2)
    return deployment.prefill.metrics()["vllm:pdkv_sent_bytes_sum"]


@pytest.mark.parametrize("flow", ["sequential", "concurrent"])
@pytest.mark.parametrize("num_tokens", [1, 31, 32, 33, 300, 1000])
def test_the_tokens_are_those_of_one_server(
    deployment: Deployment, flow: str, num_tokens: int
) -> None:
    asked = prompt(num_tokens, seed=num_tokens if flow == "concurrent" else -num_tokens)
    answer = deployment.ask(flow, completion(asked, 12))
    assert answer["choices"][0]["finish_reason"] == "length"
    assert tokens_of(answer) == tokens_of(deployment.prefill.complete(asked, 12))


def test_a_second_turn_moves_the_new_tokens_alone(deployment: Deployment) -> None:
    first = prompt(10 * BLOCK, seed=50)
    deployment.ask("concurrent", completion(first, 1))
    before = sent_bytes(deployment)
    second = first + prompt(3 * BLOCK, seed=51)
    answer = deployment.ask("concurrent", completion(second, 4))
    assert sent_bytes(deployment) - before == 3 * BLOCK * TOKEN_NBYTES
    assert tokens_of(answer) == tokens_of(deployment.prefill.complete(second, 4))


def test_chunks_go_while_the_next_is_computed(deployment: Deployment) -> None:
    sent_bytes(deployment)
    before = deployment.prefill.metrics()["vllm:pdkv_late_bytes_sum"]
    deployment.ask("concurrent", completion(prompt(4 * CHUNK, seed=60), 1))
    sent_bytes(deployment)
    late = deployment.prefill.metrics()["vllm:pdkv_late_bytes_sum"] - before
    assert 0 < late <= 1.5 * CHUNK * TOKEN_NBYTES


def test_a_client_that_goes_away_leaves_no_block_behind(deployment: Deployment) -> None:
    url = "http://127.0.0.1:8300/v1/completions"
    for seed, patience_s in enumerate((0.05, 0.5, 1.5)):
        with pytest.raises((TimeoutError, urllib.error.URLError)):
            post(url, completion(prompt(1500, seed=70 + seed), 200), timeout_s=patience_s)
    wait_for_free_blocks(deployment.prefill, deployment.decode)


def test_an_unknown_prefill_server_is_not_waited_for(deployment: Deployment) -> None:
    asked = {"do_remote_prefill": True, "room": 1, "prefill_name": "nobody"}
    answer = deployment.decode.complete(prompt(40, seed=80), 2, kv_transfer_params=asked)
    assert answer["choices"][0]["finish_reason"] == "length"


def test_a_decode_server_that_died_is_another_one_when_it_is_back(deployment: Deployment) -> None:
    deployment.prefill.complete(prompt(200, seed=90), kv_transfer_params={"do_remote_decode": True})
    deployment.decode.stop(signal.SIGKILL)
    deployment.decode.start()
    deployment.decode.wait()
    for flow in ("sequential", "concurrent"):
        asked = prompt(100, seed=len(flow))
        answer = deployment.ask(flow, completion(asked, 4))
        assert tokens_of(answer) == tokens_of(deployment.prefill.complete(asked, 4))
    wait_for_free_blocks(deployment.prefill, deployment.decode)

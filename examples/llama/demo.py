"""One conversation through a prefill and a decode engine, and proof that not one token changed.

`make demo`. Three pairs of engines hold the same conversation: TP1 -> TP1, TP1 -> TP3 and TP3 ->
TP1, each rank a process, the KV cache crossing between them over NIXL. Each token is compared with
an undivided run, which transformers has checked; the bytes between each two ranks with arithmetic.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

BEGAN = time.monotonic()
# NIXL's UCX and gloo stay on this host; one thread per process, as the ranks share few cores.
os.environ |= {"UCX_NET_DEVICES": "lo", "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
os.environ |= {"TOKENIZERS_PARALLELISM": "false", "TQDM_DISABLE": "1"}
INSTALL = "run `make setup`, or pip install -e '.[examples]'"

try:
    import torch
    import weights
    from engine import Engine, EngineFailed, answers
    from reference import Referee, Turn, converse

    from pdkv.heads import distribute_heads
except ModuleNotFoundError as error:
    sys.exit(f"demo: {error.name} is missing: {INSTALL}")

PAIRS = ((1, 1), (1, 3), (3, 1))
MAX_NEW_TOKENS = 10
SYSTEM = (
    "You are a patient guide who answers in one short sentence. These are the notes for today's "
    "tour of the harbour. The lighthouse was built in 1847 by Anna Berg, stands 32 metres tall, "
    "and its lamp turns once every 12 seconds. The old fish market opens at 6 in the morning and "
    "sells cod, herring and mussels. The ferry Aurora leaves for the island at 9, 12 and 15, takes "
    "40 minutes, and costs 8 coins. The island has one village, two beaches and a small museum of "
    "maps. Dogs may travel for free. In winter the ferry leaves only at 12."
)
QUESTIONS = [
    "Who built the lighthouse, and in which year? Please say how tall it is, too.",
    "Thank you. We would like to visit the island with our dog. When does the ferry leave, and "
    "what does the trip cost for two people?",
    "And what can we see on the island once we have arrived there in the afternoon?",
    "Good. Which fish could we buy at the market in the morning before we leave, and when does "
    "it open?",
]
LEGEND = """\
         bytes, descriptors: all ranks together; of a partial last page only its tokens move
         plan, post, wire: sums over the tags of the slowest prefill rank
         hand-over: from the last K and V computed at prefill to the request being runnable
         first token: since the request came to decode; without: no side holds a prefix"""
HEADER = (
    "       prompt prefix pages   bytes descrip- |   plan   post   wire  hand- | first token, ms\n"
    "  turn tokens   held moved   moved     tors |     ms     ms     ms   over | prefix  without"
)


class Different(Exception):
    """A token or a number of bytes is not what it must be."""


def say(text: str) -> None:
    print(text, flush=True)


def stage(text: str) -> None:
    say(f"{time.monotonic() - BEGAN:5.1f} s  {text}")


def run_turn(
    prefill: Engine, decode: Engine, record: bytes, turn: Turn, *, room: int, reuse: bool, end: int
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """One request; what each prefill and each decode rank reports of it."""
    num_tokens = len(turn.answer) if reuse else 2
    request = {"room": room, "prompt": turn.prompt, "reuse": reuse}
    decode.command(
        "decode",
        prefill=record,
        requests=[{**request, "max_new_tokens": num_tokens}],
        end_token=end,
    )
    prefill.command("prefill", requests=[request])
    sent, received = ([reports for (reports,) in side] for side in answers(prefill, decode))
    for engine, reports in ((prefill, sent), (decode, received)):
        for rank, report in enumerate(reports):
            if report["failed"]:
                raise engine.failure(rank, f"failed the request: {report['failed']}")
    for rank, report in enumerate(received):
        if report["tokens"] != turn.answer[:num_tokens]:
            raise Different(
                f"{prefill.name} -> {decode.name}, decode rank {rank}: tokens {report['tokens']}, "
                f"but the undivided run has {turn.answer[:num_tokens]}"
            )
    check_bytes(prefill, decode, turn, sent, received)
    return sent, received


def check_bytes(
    prefill: Engine,
    decode: Engine,
    turn: Turn,
    sent: list[dict[str, Any]],
    received: list[dict[str, Any]],
) -> None:
    """For each two ranks: tokens sent x heads shared x layers x bytes of K and V of a head.

    Of a partial last page only its tokens are sent, so pages don't occur in the rule.
    """
    kv = prefill.layout.kv.components[0]
    per_head = sum(field.head_nbytes for field in kv.fields)
    slices = distribute_heads(
        src_tp_size=prefill.tp_size,
        dst_tp_size=decode.tp_size,
        total_kv_heads=kv.fields[0].total_heads,
    )
    for src in range(prefill.tp_size):
        for dst in range(decode.tp_size):
            shared = sum(s.num_heads for s in slices if (s.src_rank, s.dst_rank) == (src, dst))
            num_tokens = len(turn.prompt) - received[dst]["prefix"]
            rule = num_tokens * shared * len(kv.layer_ids) * per_head
            wrote = sent[src]["stats"]["nbytes_by_peer"].get(dst, 0)
            awaited = received[dst]["stats"]["nbytes_by_peer"].get(src, 0)
            if not rule == wrote == awaited:
                raise Different(
                    f"bytes of prefill rank {src} to decode rank {dst}: wrote {wrote}, "
                    f"awaited {awaited}, by the rule {rule}"
                )


def row(
    number: int,
    turn: Turn,
    sent: list[dict[str, Any]],
    received: list[dict[str, Any]],
    without_ms: float,
) -> str:
    """A line of the table: sums over ranks of bytes and descriptors, the slowest rank's times."""
    stats = [report["stats"] for report in sent]
    plan, post, wire = (
        1e3 * max(s[name] for s in stats) for name in ("plan_s", "post_s", "wire_s")
    )
    computed_at = max(report["computed_at"] for report in sent)
    hand_over = 1e3 * (max(report["runnable_at"] for report in received) - computed_at)
    first = 1e3 * received[0]["first_token_s"]
    return (
        f"  {number:>4} {len(turn.prompt):>6} {received[0]['prefix']:>6} "
        f"{received[0]['num_pages']:>5} {sum(s['nbytes'] for s in stats):>7} "
        f"{sum(s['num_descriptors'] for s in stats):>8} | {plan:>6.1f} {post:>6.1f} {wire:>6.1f} "
        f"{hand_over:>6.1f} | {first:>6.0f} {without_ms:>8.0f}"
    )


def run_pair(src_tp: int, dst_tp: int, folder: Path, turns: list[Turn], end: int) -> float:
    """The whole conversation between two fresh engines; the smallest gap that they met."""
    gaps = []
    with Engine("prefill", src_tp, folder) as prefill, Engine("decode", dst_tp, folder) as decode:
        addresses, _ = answers(prefill, decode)
        record = prefill.record(addresses)
        say(HEADER)
        for number, turn in enumerate(turns, 1):
            sent, received = run_turn(
                prefill, decode, record, turn, room=2 * number, reuse=True, end=end
            )
            without = received
            if number > 1:
                if not received[0]["prefix"]:
                    raise Different(f"turn {number}: decode held no prefix of the turns before")
                # The same prompt in a room of its own, with nothing held on either side.
                _, without = run_turn(
                    prefill, decode, record, turn, room=2 * number + 1, reuse=False, end=end
                )
            gaps += sent[0]["gaps"] + received[0]["gaps"]
            say(row(number, turn, sent, received, 1e3 * without[0]["first_token_s"]))
    return min(gaps)


def main() -> None:
    torch.set_num_threads(1)
    stage("SmolLM2-135M-Instruct, float32, greedy (the first run dequantises it: 15 s)")
    folder = weights.prepare()
    with Referee() as referee:
        stage("one undivided run, against which all others are checked")
        turns = converse(folder, SYSTEM, QUESTIONS, MAX_NEW_TOKENS)
        referee.ask(turns)
        tokenizer = weights.load_tokenizer(folder)
        end = tokenizer.token_to_id("<|im_end|>")
        for question, turn in zip(QUESTIONS, turns, strict=True):
            say(f"         > {question}\n           {tokenizer.decode(turn.answer)} ...")
        gaps = [turn.smallest_gap for turn in turns]
        num_tokens = sum(len(turn.answer) for turn in turns)
        say(LEGEND)
        for number, (src_tp, dst_tp) in enumerate(PAIRS):
            num_ranks = src_tp + dst_tp
            stage(f"prefill TP{src_tp} -> decode TP{dst_tp}: starting {num_ranks} processes")
            gaps.append(run_pair(src_tp, dst_tp, folder, turns, end))
            if number == 0:
                stage(f"does transformers choose the same {num_tokens} tokens?")
                if objection := referee.objection(timeout_s=120):
                    raise Different(objection)
    pairs = ", ".join(f"TP{src_tp} -> TP{dst_tp}" for src_tp, dst_tp in PAIRS)
    stage(
        f"PROVED over {pairs}: {len(turns)} turns, each of the {num_tokens} tokens is that of the "
        "undivided run and of transformers, each byte count is the rule's; smallest gap between "
        f"two best logits {min(gaps):.3f}"
    )


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("demo: stopped by SIGTERM"))
    try:
        main()
    except KeyboardInterrupt:
        sys.exit("demo: interrupted; all engines are stopped")
    except ModuleNotFoundError as error:
        sys.exit(f"demo: {error.name} is missing: {INSTALL}")
    except (EngineFailed, Different, FileNotFoundError) as failure:
        sys.exit(f"demo FAILED: {failure}")

"""What the tokens must be: one undivided run of the same weights, itself checked by transformers.

No pdkv transfer, no chunks, no tensor parallelism: each turn is computed as a whole.
"""

from __future__ import annotations

import signal
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np
import torch
from model import NUM_PAGES, Llama, engine_layout
from processes import context
from weights import find_gguf, load, load_tokenizer

from pdkv.pool.kv import KVPool


@dataclass(frozen=True)
class Turn:
    """A prompt (with all that was said before), the answer, and the narrowest decision in it."""

    prompt: list[int]
    answer: list[int]
    smallest_gap: float


def converse(folder: Path, system: str, questions: list[str], max_new_tokens: int) -> list[Turn]:
    """Greedy answers of the undivided model; each turn's prompt holds the turns before."""
    config, weights = load(folder)
    tokenizer = load_tokenizer(folder)
    model = Llama(config, weights, KVPool(engine_layout(config, tp_size=1), 0, NUM_PAGES))
    pages = np.arange(NUM_PAGES, dtype=np.int32)
    end = tokenizer.token_to_id("<|im_end|>")
    tokens = tokenizer.encode(f"<|im_start|>system\n{system}").ids
    turns = []
    for question in questions:
        marked = f"<|im_end|>\n<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n"
        prompt = tokens + tokenizer.encode(marked).ids
        answer: list[int] = []
        gaps = []
        hidden = model.forward(prompt, 0, pages)
        while len(answer) < max_new_tokens:
            token, gap = model.best_token(hidden)
            gaps.append(gap)
            answer.append(token)
            if token == end:
                break
            hidden = model.forward([token], len(prompt) + len(answer) - 1, pages)
        turns.append(Turn(prompt, answer, min(gaps)))
        tokens = prompt + [token for token in answer if token != end]
    return turns


class Referee:
    """transformers in a process of its own: it takes its time while the engines work."""

    def __init__(self) -> None:
        processes = context()
        self._pipe, theirs = processes.Pipe()
        self._process = processes.Process(target=_referee, args=(theirs,), daemon=True)
        self._process.start()
        theirs.close()

    def __enter__(self) -> Referee:
        return self

    def __exit__(self, *_: object) -> None:
        self._pipe.close()
        self._process.kill()
        self._process.join()

    def ask(self, turns: list[Turn]) -> None:
        """Hand over what is to be checked."""
        self._pipe.send(turns)

    def objection(self, timeout_s: float) -> str:
        """Where transformers chooses another token; empty when it agrees with each."""
        if not self._pipe.poll(timeout_s):
            return f"transformers did not answer within {timeout_s:g} s"
        try:
            return self._pipe.recv()
        except EOFError:
            return "the process that runs transformers has died; its output is above"


def _referee(pipe: Connection) -> None:
    """Reads the GGUF file by itself. One pass over the whole conversation answers for all turns."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    torch.set_num_threads(1)
    from transformers import AutoModelForCausalLM, logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    path = find_gguf()
    model = AutoModelForCausalLM.from_pretrained(
        path.parent, gguf_file=path.name, dtype=torch.float32
    )
    try:
        turns = pipe.recv()
    except EOFError:  # the demo has failed before
        return
    with torch.inference_mode():
        logits = model(torch.tensor([turns[-1].prompt + turns[-1].answer])).logits[0]
    objections = []
    for number, turn in enumerate(turns, 1):
        first = len(turn.prompt) - 1
        theirs = logits[first : first + len(turn.answer)].argmax(-1).tolist()
        if theirs != turn.answer:
            objections.append(
                f"turn {number}: transformers says {theirs}, the undivided run {turn.answer}"
            )
    pipe.send("; ".join(objections))

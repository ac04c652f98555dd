"""What decode's prefix cache is worth in a conversation: `python benchmarks/bench_multi_turn.py`.

Five rounds with the example's engine (SmolLM2-135M, TP1 -> TP1, the queues of both sides) over the
loopback backend, whose link has a given speed; with and without the prefix cache of decode.
Prefill has one in both cases. The conversation is about a document: the first turn brings it (with
the system prompt and a question, 512 tokens), the later ones add a question of 40 tokens and the
answer before it, of 8. Time to first token counts from the arrival of the request at both
engines until decode may run it. `--clock virtual` (the default) takes `--token-ms` for each token
that prefill computes, so that the figures are those of the protocol and not of a busy machine;
`--clock real` takes the time that the model takes.

The model that the figures are compared with: prefill computes CHUNK tokens at a time, a transfer
chunk may go when its last token is computed, and the link sends one after the other:

    free = 0;  for each chunk: free = max(free, computed) + nbytes / speed;  first token at `free`

What the link is in a time to first token is said in two ways, both of the round without the prefix:
*busy* is the part of it in which the link moves bytes, *alone* the part in which it does nothing
else than that, because all is computed. No reuse of K and V on decode's side can save what prefill
computes; so the bar is about *alone*.

The exit status is 1 unless, in every round, the bytes are those of the tokens that decode lacked
(else it ends at once), the time is within 10 % of that model, and after the first round the prefix
gains at least 50 % wherever the link alone is 60 % of the time to first token or more.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).parent.parent / "examples" / "llama"))

from model import AUX_FIELDS, CHUNK_TOKENS, NUM_PAGES, PAGE_SIZE, Llama, engine_layout
from weights import load, prepare

from multi_turn_bars import Round, show, show_bounds
from pdkv.backends.loopback import LoopbackBackend, LoopbackFabric
from pdkv.backends.loopback_link import LinkModel
from pdkv.control.memory import MemoryControl, MemoryNetwork
from pdkv.endpoint import DecodeEndpoint, Node, PrefillEndpoint
from pdkv.endpoint.scheduling import DecodeDriver, PrefillDriver
from pdkv.pool import (
    AuxBuffers,
    DecodeReqToTokenPool,
    KVPool,
    PageAllocator,
    RadixPrefixCache,
)
from pdkv.queues import (
    DecodeContext,
    DecodeRequest,
    DecodeStage,
    DecodeStages,
    PrefillRequest,
    PrefillStage,
    PrefillStages,
    QueueSettings,
    RequestMemory,
    RequestReady,
)
from pdkv.rendezvous import EngineRecord, Known

NUM_ROUNDS, FIRST_TOKENS, MORE_TOKENS, ANSWER_TOKENS = 5, 512, 40, 8
TICK_S = 5e-4
SPEEDS = (10.0, 20.0, 50.0, 70.0, 100.0, 200.0, 300.0, 1000.0)  # MB/s


class Clock:
    """Seconds. A virtual one moves when somebody says that time has passed."""

    def __init__(self, token_s: float | None, tick_s: float) -> None:
        self.token_s, self.tick_s = token_s, tick_s
        self._now = 100.0

    def __call__(self) -> float:
        return time.monotonic() if self.token_s is None else self._now

    def computed(self, num_tokens: int) -> None:
        self._now += num_tokens * (self.token_s or 0.0)

    def tick(self) -> None:
        self._now += self.tick_s


class Remembered:
    """What prefill has computed before, by prompt. On a virtual clock its time is given, and all
    runs have the same prompts; what decode reads is what was sent to it all the same."""

    def __init__(self) -> None:
        self._known: dict[tuple[int, bytes], tuple[torch.Tensor, list[torch.Tensor]]] = {}

    def forward(
        self, model: Llama, prompt: np.ndarray, chunk: range, page_ids: np.ndarray
    ) -> torch.Tensor:
        """As `model.forward` of a chunk of a prompt."""
        at = np.arange(chunk.start, chunk.stop)
        slots = torch.from_numpy(page_ids[at // PAGE_SIZE].astype(np.int64) * PAGE_SIZE)
        slots += torch.from_numpy(at % PAGE_SIZE)
        rows = [tensor.flatten(0, 1) for tensor in model.kv.page_tensors()]
        key = chunk.start, prompt[: chunk.stop].tobytes()
        if key in self._known:
            hidden, kept = self._known[key]
            for row, values in zip(rows, kept, strict=True):
                row[slots] = values
            return hidden
        hidden = model.forward(prompt[chunk.start : chunk.stop].tolist(), chunk.start, page_ids)
        self._known[key] = hidden, [row[slots] for row in rows]
        return hidden


class Conversation:
    """Both engines in this process, and the link between them."""

    def __init__(
        self,
        folder: Path,
        clock: Clock,
        *,
        nbytes_per_s: float,
        with_prefix: bool,
        decode_pages: int = NUM_PAGES,
        settings: QueueSettings | None = None,
        remembered: Remembered | None = None,
    ) -> None:
        self.remembered = remembered
        self.clock, self.nbytes_per_s = clock, nbytes_per_s
        fabric, network = LoopbackFabric(), MemoryNetwork()
        config, weights = load(folder)
        self.layout = engine_layout(config, 1)
        self.aux, self.models, nodes = [], [], []
        for name in ("prefill", "decode"):
            aux, kv = AuxBuffers(AUX_FIELDS, 4), KVPool(self.layout, 0, NUM_PAGES)
            self.aux.append(aux)
            self.models.append(Llama(config, weights, kv))
            nodes.append(
                Node(
                    backend=LoopbackBackend(
                        fabric=fabric, link=LinkModel(nbytes_per_s=nbytes_per_s)
                    ),
                    control=MemoryControl(network, name),
                    layout=self.layout,
                    pool=kv.layout(aux),
                    aux=aux,
                    incarnation=name.encode().ljust(16),
                    threaded=False,
                    clock=clock,
                )
            )
        self.nodes = nodes
        source, target = PrefillEndpoint(nodes[0]), DecodeEndpoint(nodes[1])
        record = EngineRecord(
            incarnation=nodes[0].incarnation, layout=self.layout, addresses=(nodes[0].address,)
        )
        pairing = nodes[0].own_pairing
        self.prefill = PrefillStages(
            _memory(self.aux[0], sends_prefix=True),
            source,
            lambda tokens, n, component: pairing.src_page_range(0, tokens, n, component=component),
        )
        memory = _memory(
            self.aux[1], is_decode=True, with_prefix=with_prefix, num_pages=decode_pages
        )
        context = DecodeContext(memory=memory, transport=target, settings=settings)
        self.decode = DecodeStages(context, lambda request: Known(record))
        self.drivers = (PrefillDriver(source, self.prefill), DecodeDriver(target, self.decode))

    def turn(self, room: int, prompt: list[int]) -> Round:
        """One request from both arrivals to the last token of its answer."""
        began = self.clock()
        asked = DecodeRequest(room=room, prompt=prompt, max_new_tokens=ANSWER_TOKENS)
        given = PrefillRequest(room=room, prompt=prompt)
        self.decode.add(asked)
        self.prefill.bootstrap.add(given)
        held = [0, 0]
        ready_at, computed_at, token_s = 0.0, 0.0, self.clock.token_s or 0.0
        while asked.stage is not DecodeStage.ENDED or self.prefill.inflight.num_unreleased:
            self.clock.tick()
            for event in self.drivers[1].step(self.clock()):
                if isinstance(event, RequestReady):
                    ready_at = self.clock()
                    held[1] = asked.holding.match.num_tokens
                    asked.outputs.append(int(asked.aux["first_token"]))
            self.generate()
            self.drivers[0].step(self.clock())
            self.prefill.admit()
            # What prefill held goes out before the next chunk is computed, as with a node's thread:
            # one step posts it, the next one finds it on the link.
            for _ in range(2):
                self.nodes[0].step(self.clock())
            if given.stage is PrefillStage.COMPUTING:
                held[0] = given.num_cached
                before = self.clock()
                num = self.compute(given)
                computed_at = self.clock()
                if self.clock.token_s is None:
                    token_s = (self.clock() - before) / num
        return Round(
            num_tokens=len(prompt),
            held_by_prefill=held[0],
            held_by_decode=held[1],
            first_token_s=ready_at - began,
            computed_s=computed_at - began,
            model_s=self.predict(len(prompt), *held, token_s),
            nbytes=given.stats.nbytes,
            answer=tuple(asked.outputs),
        )

    def compute(self, request: PrefillRequest) -> int:
        """The next tokens of a prompt, which are sent; how many."""
        start, stop = request.num_sent, min(request.num_sent + CHUNK_TOKENS, len(request.prompt))
        model, prompt, pages = self.models[0], request.prompt, request.page_ids
        if self.remembered is not None:
            hidden = self.remembered.forward(model, prompt, range(start, stop), pages)
        else:
            hidden = model.forward(prompt[start:stop].tolist(), start, pages)
        self.clock.computed(stop - start)
        self.prefill.inflight.send(request, stop)
        if stop == len(request.prompt):
            token = self.models[0].best_token(hidden)[0]
            self.aux[0].write(request.aux_index, first_token=token)
            self.prefill.inflight.finish(request)
        return stop - start

    def generate(self) -> None:
        """One token of each running request, or its end."""
        self.decode.take_batch()
        for request in self.decode.prepare(self.clock()):
            if len(request.outputs) == request.max_new_tokens:
                self.decode.finish(request)
                continue
            pages = request.holding.all_pages
            hidden = self.models[1].forward(request.outputs[-1:], request.num_kv, pages)
            self.decode.append(request, self.models[1].best_token(hidden)[0])

    def predict(self, num_tokens: int, computed: int, held: int, token_s: float) -> float:
        """Seconds to the first token by the model in this file's docstring."""
        free = 0.0
        for start in range(0, num_tokens, CHUNK_TOKENS):
            stop = min(start + CHUNK_TOKENS, num_tokens)
            num_steps = max(0, -(-(stop - computed) // CHUNK_TOKENS))
            at = min(num_steps * CHUNK_TOKENS, num_tokens - computed) * token_s
            num_sent = max(0, stop - max(start, held))
            if num_sent:
                seconds = (
                    num_sent * self.token_nbytes / self.nbytes_per_s if self.nbytes_per_s else 0
                )
                free = max(free, at) + seconds
        return max(free, (num_tokens - computed) * token_s)

    @property
    def token_nbytes(self) -> int:
        """Bytes of K and V of one token, all layers."""
        kv = self.layout.kv.components[0]
        return kv.element_nbytes * len(kv.layer_ids)

    def close(self) -> None:
        """Give everything back."""
        for node in self.nodes:
            node.close()


def _memory(
    aux: AuxBuffers,
    *,
    is_decode: bool = False,
    with_prefix: bool = True,
    sends_prefix: bool = False,
    num_pages: int = NUM_PAGES,
) -> RequestMemory:
    slots = DecodeReqToTokenPool(4, NUM_PAGES * PAGE_SIZE, "cpu", 4) if is_decode else None
    return RequestMemory(
        pages=PageAllocator(num_pages, PAGE_SIZE),
        slots=slots,
        aux=aux,
        prefix=RadixPrefixCache(PAGE_SIZE) if with_prefix else None,
        sends_prefix=sends_prefix,
    )


def converse(
    folder: Path,
    *,
    nbytes_per_s: float,
    with_prefix: bool,
    token_s: float | None,
    tick_s: float = TICK_S,
    first_tokens: int = FIRST_TOKENS,
    remembered: Remembered | None = None,
) -> list[Round]:
    """Five rounds; each prompt holds the rounds before. ValueError for a wrong number of bytes."""
    vocab = load(folder)[0].vocab
    rng = np.random.default_rng(0)
    conversation = Conversation(
        folder,
        Clock(token_s, tick_s),
        nbytes_per_s=nbytes_per_s,
        with_prefix=with_prefix,
        remembered=remembered,
    )
    prompt = rng.integers(0, vocab, first_tokens).tolist()
    rounds = []
    for room in range(1, NUM_ROUNDS + 1):
        made = conversation.turn(room, prompt)
        rule = (made.num_tokens - made.held_by_decode) * conversation.token_nbytes
        if made.nbytes != rule:
            raise ValueError(f"round {room}: {made.nbytes} bytes crossed, by the rule {rule}")
        rounds.append(made)
        prompt = prompt + list(made.answer) + rng.integers(0, vocab, MORE_TOKENS).tolist()
    conversation.close()
    return rounds


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--clock", choices=("virtual", "real"), default="virtual")
    parser.add_argument("--token-ms", type=float, default=3.0, help="prefill, virtual clock")
    parser.add_argument(
        "--mb-per-s", type=float, nargs="*", default=list(SPEEDS), help="0: no limit"
    )
    args = parser.parse_args()
    folder = prepare()
    kv = engine_layout(load(folder)[0], 1).kv.components[0]
    token_nbytes = kv.element_nbytes * len(kv.layer_ids)
    token_s = 1e-3 * args.token_ms if args.clock == "virtual" else None
    remembered = Remembered() if args.clock == "virtual" else None
    missed = []
    for speed in (1e6 * mb for mb in args.mb_per_s):
        runs = [
            converse(
                folder, nbytes_per_s=speed, with_prefix=p, token_s=token_s, remembered=remembered
            )
            for p in (False, True)
        ]
        link = f"link of {speed / 1e6:g} MB/s" if speed else "link without limit"
        print(f"{link}, {args.clock} clock")
        missed += [f"{link}: {bar}" for bar in show(*runs, speed, token_nbytes)]
    if args.mb_per_s:
        show_bounds(*runs, token_nbytes)
    for bar in missed:
        print(f"MISSED  {bar}")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())

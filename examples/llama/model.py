"""A Llama with a paged KV cache, one tensor-parallel rank of it. One sequence at a time.

The cache tensors are `pdkv.pool.kv.KVPool`'s, so what attention reads and writes is the very memory
that prefill sends and decode receives. Heads are cut by `pdkv.heads.owned_heads`, the rule that the
transfer follows; everything else is cut as evenly as can be. Two sums over the ranks per layer.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812
from weights import Config, Weights

from pdkv.heads import owned_heads
from pdkv.layout import AuxField, EngineLayout, KVLayout
from pdkv.pool.kv import KVPool

PAGE_SIZE, NUM_PAGES = 16, 96
CHUNK_TOKENS = 64  # what prefill computes at once, and what it would like to send at once
AUX_FIELDS = (AuxField("first_token", "int64"),)


def engine_layout(config: Config, tp_size: int) -> EngineLayout:
    """What an engine of this example publishes of its cache."""
    kv = KVLayout.mha(
        num_layers=config.num_layers,
        total_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        dtype="float32",
        aux=AUX_FIELDS,
    )
    return EngineLayout.simple(kv, page_size=PAGE_SIZE, tp_size=tp_size, chunk_tokens=CHUNK_TOKENS)


class Llama:
    """Weights of one rank. With `tp_size` > 1 the default process group must be there."""

    def __init__(
        self, config: Config, weights: Weights, kv: KVPool, *, tp_rank: int = 0, tp_size: int = 1
    ) -> None:
        self.config, self.tp_rank, self.tp_size, self.kv = config, tp_rank, tp_size, kv
        size, group = config.head_dim, config.num_heads // config.num_kv_heads
        kv_heads = owned_heads(tp_rank, tp_size, config.num_kv_heads)
        # Query heads that belong to these KV heads; where KV heads are replicated, a part of them.
        per_rank = config.num_heads // tp_size
        q_heads = range(tp_rank * per_rank, (tp_rank + 1) * per_rank)
        assert {head // group for head in q_heads} == set(kv_heads), "TP size cuts a GQA group"
        q_rows = slice(q_heads.start * size, q_heads.stop * size)
        kv_rows = slice(kv_heads.start * size, kv_heads.stop * size)
        ffn_rows = _even_part(config.ffn, tp_rank, tp_size)
        self._num_q, self._num_kv = len(q_heads), len(kv_heads)
        self._embedding = weights["token_embd.weight"]
        self._vocab = _even_part(config.vocab, tp_rank, tp_size)
        self._norm = weights["output_norm.weight"]
        self._layers = []
        for i in range(config.num_layers):
            w = {k.split(".")[2]: t for k, t in weights.items() if k.startswith(f"blk.{i}.")}
            w["attn_qkv"] = torch.cat(
                [w.pop("attn_q")[q_rows], w.pop("attn_k")[kv_rows], w.pop("attn_v")[kv_rows]]
            )
            w["attn_output"] = w["attn_output"][:, q_rows].contiguous()
            w["ffn_gate"], w["ffn_up"] = w["ffn_gate"][ffn_rows], w["ffn_up"][ffn_rows]
            w["ffn_down"] = w["ffn_down"][:, ffn_rows].contiguous()
            self._layers.append(w)
        powers = torch.arange(0, size, 2, dtype=torch.float32) / size
        self._frequencies = config.rope_base**-powers

    @torch.inference_mode()
    def forward(self, token_ids: Sequence[int], start: int, page_ids: np.ndarray) -> torch.Tensor:
        """Compute positions [start, start + len(token_ids)); return the last one's hidden state.

        `page_ids` hold the sequence from position 0 on; K and V of the new positions go into them.
        """
        stop, eps = start + len(token_ids), self.config.norm_eps
        positions = torch.arange(stop)
        page_size = self.kv.tensor("kv", "k", 0).shape[1]
        pages = torch.from_numpy(page_ids.astype(np.int64))
        slots = pages[positions // page_size] * page_size + positions % page_size
        angles = torch.outer(positions[start:].float(), self._frequencies)
        turn = torch.polar(torch.ones_like(angles), angles)[:, None]
        mask = positions[None, :] <= positions[start:, None]
        x = self._embedding[torch.tensor(token_ids)]
        for i, w in enumerate(self._layers):
            normed = F.rms_norm(x, x.shape[-1:], w["attn_norm"], eps)
            attended = self._attend(i, normed, start, slots, turn, mask)
            x = x + self._sum(F.linear(attended, w["attn_output"]))
            normed = F.rms_norm(x, x.shape[-1:], w["ffn_norm"], eps)
            wide = F.silu(F.linear(normed, w["ffn_gate"])) * F.linear(normed, w["ffn_up"])
            x = x + self._sum(F.linear(wide, w["ffn_down"]))
        return F.rms_norm(x[-1], x.shape[-1:], self._norm, eps)

    @torch.inference_mode()
    def best_token(self, hidden: torch.Tensor) -> tuple[int, float]:
        """The greedy choice, and by how much its logit beats the next best."""
        logits = F.linear(hidden, self._embedding[self._vocab])
        values, ids = logits.topk(2)
        # float64 holds ids and float32 logits exactly; two candidates a rank are all that crosses.
        mine = torch.stack([values.double(), (ids + self._vocab.start).double()])
        parts = [torch.empty_like(mine) for _ in range(self.tp_size)]
        if self.tp_size > 1:
            dist.all_gather(parts, mine)
        else:
            parts = [mine]
        values, ids = torch.cat(parts, dim=1)
        best = values.topk(2)
        return int(ids[best.indices[0]]), float(best.values[0] - best.values[1])

    def _attend(
        self,
        layer: int,
        x: torch.Tensor,
        start: int,
        slots: torch.Tensor,
        turn: torch.Tensor,
        mask: torch.Tensor,
    ) -> torch.Tensor:
        qkv = F.linear(x, self._layers[layer]["attn_qkv"]).unflatten(-1, (-1, self.config.head_dim))
        q, k, v = qkv.split([self._num_q, self._num_kv, self._num_kv], dim=1)
        keys = self.kv.tensor("kv", "k", layer).flatten(0, 1)
        values = self.kv.tensor("kv", "v", layer).flatten(0, 1)
        keys[slots[start:]] = _rotate(k, turn)
        values[slots[start:]] = v
        out = F.scaled_dot_product_attention(
            _rotate(q, turn).transpose(0, 1)[None],
            keys[slots].transpose(0, 1)[None],
            values[slots].transpose(0, 1)[None],
            attn_mask=mask,
            enable_gqa=True,
        )
        return out[0].transpose(0, 1).flatten(1)

    def _sum(self, x: torch.Tensor) -> torch.Tensor:
        if self.tp_size > 1:
            dist.all_reduce(x)
        return x


def _rotate(x: torch.Tensor, turn: torch.Tensor) -> torch.Tensor:
    """Rotary positions on adjacent pairs. GGUF stores Q and K rows in the order that this needs
    (Hugging Face's order pairs dimension i with i + head_dim / 2)."""
    pairs = torch.view_as_complex(x.reshape(*x.shape[:-1], -1, 2))
    return torch.view_as_real(pairs * turn).flatten(-2)


def _even_part(total: int, rank: int, size: int) -> slice:
    """This rank's rows where nothing but a fair share is asked for."""
    return slice(total * rank // size, total * (rank + 1) // size)

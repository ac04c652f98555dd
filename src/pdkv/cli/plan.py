"""`python -m pdkv plan`: who sends which heads to whom, as a table, JSON or a picture.

Answers from sizes alone, without an engine or a transfer. Layer 6.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from pdkv.cli._progress import Progress
from pdkv.errors import PdkvError
from pdkv.layout import DTYPE_NBYTES, EngineLayout, KVLayout
from pdkv.plan import Flow, Pairing, Picture, validate
from pdkv.plan.picture import format_nbytes, format_ranges

__all__ = ["main", "pairing_from", "table"]


def main(arguments: list[str]) -> int:
    """Print the plan that the arguments describe; 1 when there is none."""
    options = _parser().parse_args(arguments)
    try:
        with Progress("pairing the ranks") as progress:
            pairing = pairing_from(options)
            progress.step("adding up what each pair of ranks moves")
            flows = pairing.flows(options.prefix, options.tokens)
            progress.step("drawing")
            text = _text(pairing, flows, options)
    except (PdkvError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(text)
    return 0


def _text(pairing: Pairing, flows: tuple[Flow, ...], options: argparse.Namespace) -> str:
    """What is printed; the picture goes to its file."""
    if options.svg:
        picture = Picture(pairing, num_tokens=options.tokens, decode_prefix_len=options.prefix)
        Path(options.svg).write_text(picture.svg(), encoding="utf-8")
    return json.dumps(_as_json(pairing, flows), indent=2) if options.json else table(pairing, flows)


def pairing_from(options: argparse.Namespace) -> Pairing:
    """The two engines that the options describe, validated."""
    kv = KVLayout.mha(
        num_layers=options.layers,
        total_kv_heads=options.kv_heads,
        head_dim=options.head_dim,
        dtype=options.dtype,
    )
    if options.mla:
        kv = KVLayout.mla(
            num_layers=options.layers, latent_dim=options.head_dim, dtype=options.dtype
        )
    src, dst = (
        EngineLayout.simple(
            kv,
            page_size=getattr(options, f"{side}_page_size"),
            tp_size=getattr(options, f"{side}_tp"),
            pp_size=getattr(options, f"{side}_pp"),
            cp_size=getattr(options, f"{side}_cp"),
            interleave=getattr(options, f"{side}_interleave"),
            chunk_tokens=options.chunk_tokens,
            striping=options.striping,
        )
        for side in ("src", "dst")
    )
    return validate(src, dst)


def table(pairing: Pairing, flows: tuple[Flow, ...]) -> str:
    """One line per pair of ranks that moves KV, and what else the pairing decides."""
    rows = [("src", "dst", "heads", "layers", "bytes")]
    rows += [
        (
            str(f.src_rank_id),
            str(f.dst_rank_id),
            format_ranges(f.heads),
            format_ranges(f.layer_ids),
            format_nbytes(f.nbytes),
        )
        for f in flows
    ]
    widths = [max(len(row[i]) for row in rows) for i in range(5)]
    lines = ["  ".join(cell.rjust(w) for cell, w in zip(row, widths, strict=True)) for row in rows]
    num_dst = pairing.dst.parallel.num_ranks
    dummies = {s: d for d in range(num_dst) for s in pairing.dummy_writers(d)}
    aux = ", ".join(f"{pairing.aux_writer(d)}->{d}" for d in range(num_dst))
    lines += [
        "",
        f"{format_nbytes(sum(f.nbytes for f in flows))} in all, in transfer chunks of "
        f"{pairing.grid} tokens",
        f"decode_prefix_len: 0, num_tokens, or a multiple of {pairing.prefix_unit}",
        f"aux rows: {aux}",
    ]
    if dummies:
        told = ", ".join(f"{s} by {d}" for s, d in sorted(dummies.items()))
        lines.append(f"src ranks without a reader, and the dst rank that tells them: {told}")
    return "\n".join(lines)


def _as_json(pairing: Pairing, flows: tuple[Flow, ...]) -> dict[str, object]:
    num_src, num_dst = (e.parallel.num_ranks for e in (pairing.src, pairing.dst))
    return {
        "grid": pairing.grid,
        "prefix_unit": pairing.prefix_unit,
        "striping": pairing.striping,
        "flows": [f._asdict() for f in flows],
        "aux_writers": [pairing.aux_writer(d) for d in range(num_dst)],
        "dummy_writers": [pairing.dummy_writers(d) for d in range(num_dst)],
        "num_readers": [pairing.num_readers(s) for s in range(num_src)],
    }


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m pdkv plan", description=main.__doc__)
    for side, words in (("src", "prefill"), ("dst", "decode")):
        group = parser.add_argument_group(f"{words} engine ({side})")
        group.add_argument(f"--{side}-tp", type=int, default=1, metavar="N")
        group.add_argument(f"--{side}-pp", type=int, default=1, metavar="N")
        group.add_argument(f"--{side}-cp", type=int, default=1, metavar="N")
        group.add_argument(f"--{side}-page-size", type=int, default=16, metavar="TOKENS")
        group.add_argument(
            f"--{side}-interleave",
            type=int,
            default=0,
            metavar="TOKENS",
            help="unit of the round robin over CP ranks (default: one page)",
        )
    model = parser.add_argument_group("model")
    model.add_argument("--kv-heads", type=int, default=8, help="of the model, not of a rank")
    model.add_argument("--mla", action="store_true", help="one latent of --head-dim instead")
    model.add_argument("--head-dim", type=int, default=128)
    model.add_argument("--layers", type=int, default=32)
    model.add_argument("--dtype", choices=sorted(DTYPE_NBYTES), default="bfloat16")
    request = parser.add_argument_group("request")
    request.add_argument("--tokens", type=int, default=4096)
    request.add_argument("--prefix", type=int, default=0, help="decode_prefix_len")
    request.add_argument("--chunk-tokens", type=int, default=256, help="wished transfer chunk")
    request.add_argument("--striping", action="store_true", help="replicas share the load")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    parser.add_argument("--svg", metavar="FILE", help="write a picture as well")
    return parser

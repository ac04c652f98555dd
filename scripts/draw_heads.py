"""Generates the tables and pictures of docs/head-distribution.md from the planner.

    python scripts/draw_heads.py           rewrite them
    python scripts/draw_heads.py --check   exit 1 if the files differ from what would be written

A block between `<!-- begin NAME -->` and `<!-- end NAME -->` belongs to the example of that name.
"""

from __future__ import annotations

import argparse
import re
import sys
from pathlib import Path
from typing import NamedTuple

from pdkv.layout import EngineLayout, KVLayout
from pdkv.plan import Pairing, Picture, validate
from pdkv.plan.picture import format_nbytes, format_ranges

DOCS = Path(__file__).resolve().parent.parent / "docs"
PAGE = DOCS / "head-distribution.md"
NUM_TOKENS = 4096


class Example(NamedTuple):
    name: str
    src_tp: int
    dst_tp: int
    kv_heads: int
    striping: bool = False


EXAMPLES = (
    Example("gqa-tp4-tp2", 4, 2, 8),
    Example("gqa-tp4-tp6", 4, 6, 12),
    Example("replicas-tp8-tp2", 8, 2, 4),
    Example("replicas-tp8-tp2-striped", 8, 2, 4, striping=True),
    Example("mla-tp8-tp1", 8, 1, 1),
    Example("mla-tp8-tp1-striped", 8, 1, 1, striping=True),
    Example("gqa-tp16-tp8", 16, 8, 16),
)


def pairing(example: Example) -> Pairing:
    if example.kv_heads == 1:
        kv = KVLayout.mla(num_layers=32, latent_dim=576, dtype="bfloat16")
    else:
        kv = KVLayout.mha(
            num_layers=32, total_kv_heads=example.kv_heads, head_dim=128, dtype="bfloat16"
        )
    src, dst = (
        EngineLayout.simple(kv, page_size=16, tp_size=tp, striping=example.striping)
        for tp in (example.src_tp, example.dst_tp)
    )
    return validate(src, dst)


def block(example: Example) -> str:
    """Picture and table of one example, as Markdown."""
    pair = pairing(example)
    lines = [
        f"![Who sends which heads to whom](img/{example.name}.svg)",
        "",
        "| src rank | dst rank | heads | at src | at dst | bytes |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for f in pair.flows(0, NUM_TOKENS):
        at_src = tuple(pair.src_heads(f.src_rank_id).index(h) for h in f.heads)
        at_dst = tuple(pair.dst_heads(f.dst_rank_id).index(h) for h in f.heads)
        lines.append(
            f"| {f.src_rank_id} | {f.dst_rank_id} | {format_ranges(f.heads)} | "
            f"{format_ranges(at_src)} | {format_ranges(at_dst)} | {format_nbytes(f.nbytes)} |"
        )
    idle = [s for s in range(example.src_tp) if not pair.readers(s)]
    if idle:
        lines += ["", f"Src ranks without a reader: {format_ranges(tuple(idle))}."]
    return "\n".join(lines)


def files() -> dict[Path, str]:
    """Every generated file and its text; the page keeps what is outside of the blocks."""
    page = PAGE.read_text(encoding="utf-8")
    found = {}
    for example in EXAMPLES:
        begin, end = (f"<!-- {word} {example.name} -->" for word in ("begin", "end"))
        pattern = re.escape(begin) + ".*?" + re.escape(end)
        text = f"{begin}\n\n{block(example)}\n\n{end}"
        page, count = re.subn(pattern, lambda _, text=text: text, page, flags=re.DOTALL)
        if count != 1:
            raise SystemExit(f"{PAGE} needs one block {begin} ... {end}, has {count}")
        picture = Picture(pairing(example), num_tokens=NUM_TOKENS)
        found[DOCS / "img" / f"{example.name}.svg"] = picture.svg()
    return {PAGE: page, **found}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true")
    check = parser.parse_args().check
    stale = []
    for path, text in files().items():
        if not path.exists() or path.read_text(encoding="utf-8") != text:
            stale.append(path)
            if not check:
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_text(text, encoding="utf-8")
    for path in stale:
        print(f"{'differs' if check else 'wrote'}: {path.relative_to(DOCS.parent)}")
    return 1 if check and stale else 0


if __name__ == "__main__":
    sys.exit(main())

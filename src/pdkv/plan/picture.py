"""A picture of who sends which heads to whom: ranks as columns, heads coloured, arrows with bytes.

`Picture(pairing, num_tokens=...)` shows itself in a notebook (`_repr_svg_`); `svg()` is the text
of a file. The same pairing gives the same text. Layer 1.
"""

from __future__ import annotations

from collections import Counter
from html import escape

from pdkv.plan.pairing import Pairing
from pdkv.plan.traffic import Flow
from pdkv.topology import Parallel

__all__ = ["Picture", "format_nbytes", "format_ranges"]

MARGIN, TITLE, GAP = 16, 22, 210
CELL, CELLS_PER_ROW = 13, 4
MAX_CELLS = 16
STYLE = (
    "text{font-family:system-ui,sans-serif;font-size:11px;fill:#222}"
    ".r{font-weight:600}.h{font-size:8.5px;text-anchor:middle;fill:#111}"
    ".b{font-size:9.5px;text-anchor:middle;paint-order:stroke;stroke:#fff;stroke-width:3px}"
    ".m{text-anchor:middle}"
)


class Picture:
    """Src ranks above, dst ranks below, an arrow for every pair that moves bytes of a component."""

    def __init__(
        self,
        pairing: Pairing,
        *,
        num_tokens: int,
        decode_prefix_len: int = 0,
        component: int = 0,
    ) -> None:
        self.pairing = pairing
        self.component = component
        self.flows = pairing.flows(decode_prefix_len, num_tokens, component)
        spec = pairing.src.kv.components[component]
        self._total_heads = spec.fields[0].total_heads
        self._title = f"{spec.name}, {num_tokens - decode_prefix_len:,} tokens"
        self._src = [pairing.src_heads(i, component) for i in range(pairing.src.parallel.num_ranks)]
        self._dst = [pairing.dst_heads(i, component) for i in range(pairing.dst.parallel.num_ranks)]
        most = max(len(self._src), len(self._dst))
        self._column = 96 if most <= 8 else 72
        self._width = 2 * MARGIN + most * self._column
        self._src_top = MARGIN + 24
        self._src_end = self._src_top + _box_height(self._src)
        self._dst_top = self._src_end + GAP
        self._height = self._dst_top + _box_height(self._dst) + MARGIN

    def svg(self) -> str:
        """The picture as an SVG document."""
        parts = [
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{self._width}" '
            f'height="{self._height}" viewBox="0 0 {self._width} {self._height}" role="img">',
            f"<title>{escape(self._title)}</title><style>{STYLE}</style>",
            '<rect width="100%" height="100%" fill="#fff"/>',
            f'<text x="{MARGIN}" y="{MARGIN + 8}">{escape(self._title)}</text>',
        ]
        out_degree = Counter(f.src_rank_id for f in self.flows)
        in_degree = Counter(f.dst_rank_id for f in self.flows)
        lines, labels = [], []
        seen: Counter[tuple[str, int]] = Counter()
        for flow in sorted(self.flows):
            start = self._port("src", flow.src_rank_id, out_degree[flow.src_rank_id], seen)
            end = self._port("dst", flow.dst_rank_id, in_degree[flow.dst_rank_id], seen)
            lines.append(self._line(flow, start, end))
            near_src = out_degree[flow.src_rank_id] <= in_degree[flow.dst_rank_id]
            labels.append(self._label(flow, start, end, 0.14 if near_src else 0.82))
        parts += lines
        parts += self._boxes("P", self._src, self._src_top, self.pairing.src.parallel)
        parts += self._boxes("D", self._dst, self._dst_top, self.pairing.dst.parallel)
        return "\n".join([*parts, *labels, "</svg>", ""])

    def _repr_svg_(self) -> str:
        return self.svg()

    def _left(self, num_ranks: int, rank_id: int) -> float:
        """Left edge of a rank's column; the shorter side is centred."""
        return (self._width - num_ranks * self._column) / 2 + rank_id * self._column

    def _port(
        self, side: str, rank_id: int, degree: int, seen: Counter[tuple[str, int]]
    ) -> tuple[float, float]:
        """Where an arrow meets a box: the k-th of `degree` evenly spread places."""
        k = seen[side, rank_id]
        seen[side, rank_id] += 1
        ranks, y = (self._src, self._src_end) if side == "src" else (self._dst, self._dst_top)
        return self._left(len(ranks), rank_id) + self._column * (k + 1) / (degree + 1), y

    def _line(self, flow: Flow, start: tuple[float, float], end: tuple[float, float]) -> str:
        (x0, y0), (x1, y1) = start, end
        most = max(f.nbytes for f in self.flows)
        width = 1.2 + 2.8 * flow.nbytes / most
        tip = f"{x1:.1f},{y1} {x1 - 4:.1f},{y1 - 8} {x1 + 4:.1f},{y1 - 8}"
        colour = self._colour(flow.heads[0], 42)
        bend = GAP * 0.4
        return (
            f'<path d="M{x0:.1f} {y0}C{x0:.1f} {y0 + bend:.0f} {x1:.1f} {y1 - bend:.0f} '
            f'{x1:.1f} {y1 - 6}" fill="none" stroke="{colour}" stroke-width="{width:.1f}"/>'
            f'<polygon points="{tip}" fill="{colour}"/>'
        )

    def _label(
        self, flow: Flow, start: tuple[float, float], end: tuple[float, float], t: float
    ) -> str:
        x = _bezier(start[0], start[0], end[0], end[0], t)
        bend = GAP * 0.4
        y = _bezier(start[1], start[1] + bend, end[1] - bend, end[1], t)
        heads = "h" + format_ranges(flow.heads) if self._total_heads > 1 else ""
        lines = [text for text in (heads, format_nbytes(flow.nbytes)) if text]
        spans = "".join(
            f'<tspan x="{x:.1f}" y="{y + 11 * i:.1f}">{escape(text)}</tspan>'
            for i, text in enumerate(lines)
        )
        return f'<text class="b">{spans}</text>'

    def _boxes(
        self, letter: str, ranks: list[tuple[int, ...]], top: float, parallel: Parallel
    ) -> list[str]:
        parts = []
        height = _box_height(ranks)
        for rank_id, heads in enumerate(ranks):
            left = self._left(len(ranks), rank_id)
            middle = left + self._column / 2
            parts.append(
                f'<rect x="{left + 4:.1f}" y="{top}" width="{self._column - 8}" '
                f'height="{height}" rx="4" fill="#fafafa" stroke="#888"/>'
                f'<text class="r m" x="{middle:.1f}" y="{top + 14}">{letter}{rank_id}</text>'
                f"<title>{_coordinates(parallel, rank_id)}, heads {format_ranges(heads)}</title>"
            )
            parts += self._cells(heads, middle, top + TITLE)
        return parts

    def _cells(self, heads: tuple[int, ...], middle: float, top: float) -> list[str]:
        if len(heads) > MAX_CELLS:
            return [
                f'<text class="m" x="{middle:.1f}" y="{top + 10}">{format_ranges(heads)}</text>'
            ]
        parts = []
        for i, head in enumerate(heads):
            row, column = divmod(i, CELLS_PER_ROW)
            in_row = min(CELLS_PER_ROW, len(heads) - row * CELLS_PER_ROW)
            x = middle + (column - in_row / 2) * CELL
            y = top + row * CELL
            parts.append(
                f'<rect x="{x:.1f}" y="{y}" width="{CELL - 1}" height="{CELL - 1}" rx="2" '
                f'fill="{self._colour(head, 74)}"/>'
                f'<text class="h" x="{x + (CELL - 1) / 2:.1f}" y="{y + 9}">{head}</text>'
            )
        return parts

    def _colour(self, head: int, lightness: int) -> str:
        return f"hsl({head * 360 // self._total_heads + 205},65%,{lightness}%)"


def format_nbytes(nbytes: int) -> str:
    """Bytes in the largest binary unit that keeps a digit before the point."""
    value = float(nbytes)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if value < 1024:
            return (
                f"{value:.0f} {unit}"
                if value >= 100 or value.is_integer()
                else f"{value:.1f} {unit}"
            )
        value /= 1024
    return f"{value:.1f} TiB"


def format_ranges(ids: tuple[int, ...]) -> str:
    """0,1,2,5 as "0-2,5"; order is kept."""
    parts: list[list[int]] = []
    for i in ids:
        if parts and i == parts[-1][1] + 1:
            parts[-1][1] = i
        else:
            parts.append([i, i])
    return ",".join(str(a) if a == b else f"{a}-{b}" for a, b in parts)


def _coordinates(parallel: Parallel, rank_id: int) -> str:
    rank = parallel.rank(rank_id)
    return f"pp{rank.pp_rank} cp{rank.cp_rank} tp{rank.tp_rank}"


def _box_height(ranks: list[tuple[int, ...]]) -> int:
    most = max(len(heads) for heads in ranks)
    rows = 1 if most > MAX_CELLS else -(-most // CELLS_PER_ROW)
    return TITLE + rows * CELL + 6


def _bezier(a: float, b: float, c: float, d: float, t: float) -> float:
    u = 1 - t
    return u * u * u * a + 3 * u * u * t * b + 3 * u * t * t * c + t * t * t * d

"""Draws the status of a node with rich. Layer 6."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from pdkv.cli.top.figures import phase_rows, rates
from pdkv.errors import PdkvError
from pdkv.observe import Status

__all__ = ["frame", "print_once", "run"]


def print_once(status: Status, rows: int) -> None:
    """One frame; in a pipe without colours."""
    Console().print(frame(status, None, rows))


def run(first: Status, ask: Callable[[], Status], interval_s: float, rows: int) -> None:
    """Frames until Ctrl-C. A node that is silent is shown as it was, and that it is."""
    before = status = first
    console = Console()
    if not console.is_terminal:
        while True:
            console.print(frame(status, before if before is not status else None, rows))
            time.sleep(interval_s)
            before, status = status, ask()
    with Live(frame(status, None, rows), screen=True, auto_refresh=False) as live:
        while True:
            time.sleep(interval_s)
            try:
                before, status = status, ask()
            except PdkvError as error:
                lost = Text(f"no answer: {error}", style="bold red")
                live.update(Group(lost, frame(status, before, rows)), refresh=True)
                continue
            live.update(frame(status, before, rows), refresh=True)


def frame(status: Status, before: Status | None, rows: int) -> RenderableType:
    """Everything about one node, as of `status`; rates against the one `before`."""
    parts: list[RenderableType | None] = [_head(status), _totals(status, before)]
    parts += [_phases(status, before)] if status.samples else [Text("no recorder: no metrics")]
    parts += [_waiting(status, rows), _quarantine(status, rows), _peers(status, rows)]
    parts += [_counters(status)]
    return Group(*(part for part in parts if part is not None))


def _head(status: Status) -> Text:
    health = status.health
    text = Text.assemble(
        ("pdkv ", "bold"),
        f"rank {status.rank_id} of {status.num_ranks}, {status.incarnation[:8]}, "
        f"{status.address}, {status.backend}, {health.num_live} live   ",
    )
    if not health.problems:
        return text.append("healthy", style="bold green")
    text.append("UNHEALTHY: it admits nothing", style="bold red")
    for problem in health.problems:
        text.append(f"\n  {problem}", style="red")
    return text


def _totals(status: Status, before: Status | None) -> Text:
    found = rates(status, before)
    words = [
        f"{name} {found.totals[name]:,.0f}" + (f" ({rate:,.1f}/s)" if rate is not None else "")
        for name, rate in sorted(found.requests.items())
    ]
    if found.nbytes:
        speed = f" ({_nbytes(found.nbytes_per_s)}/s)" if found.nbytes_per_s is not None else ""
        words.append(f"sent {_nbytes(found.nbytes)}{speed}")
        words.append(f"{found.staged_share:.0%} staged")
        words.append(f"{found.descriptors_per_tag:.1f} descriptors a tag")
    return Text("   ".join(words) or "nothing finished yet")


def _phases(status: Status, before: Status | None) -> Table | None:
    found = phase_rows(status, before)
    if not found:
        return None
    table = _table("phase", ("role", "phase", "requests", "mean", "p50 <", "p99 <", ""))
    for row in found:
        times = [_seconds(row.mean), _seconds(row.p50), _seconds(row.p99)]
        since = "" if row.is_recent else "since start"
        table.add_row(row.role, row.phase, f"{row.num:,}", *times, since)
    return table


def _waiting(status: Status, rows: int) -> Table | None:
    waiting = sorted(status.health.waiting, key=lambda w: -w.waited_s)
    if not waiting:
        return None
    table = _table(
        f"waiting: {len(waiting)} shown, the longest first",
        ("request", "where", "state", "for", "waits for"),
    )
    for each in waiting[:rows]:
        table.add_row(each.key, each.place, each.poll, _seconds(each.waited_s), each.reason)
    return table


def _quarantine(status: Status, rows: int) -> Table | None:
    held = status.health.quarantine
    if not held:
        return None
    table = _table(
        f"quarantine: {status.health.num_quarantined}",
        ("request", "side", "pages", "for", "until", "peer's life", "ended for"),
    )
    for each in held[:rows]:
        life, cause = each.engine[:8], each.cause
        pages = str(each.num_pages)
        table.add_row(
            each.key, each.place, pages, _seconds(each.waited_s), each.reason, life, cause
        )
    return table


def _peers(status: Status, rows: int) -> RenderableType | None:
    peers = status.health.peers
    if not peers:
        return None
    states = Counter(peer.state for peer in peers)
    title = "peers: " + ", ".join(f"{num} {state}" for state, num in sorted(states.items()))
    bad = [peer for peer in peers if peer.state != "ready"]
    if not bad:
        return Text(title)
    table = _table(title, ("address", "rank", "life", "state", "heard", "requests", "why"))
    for peer in bad[:rows]:
        heard = "never" if peer.heard_s == float("inf") else f"{peer.heard_s:.1f} s ago"
        rank, num = str(peer.rank_id), str(peer.num_requests)
        table.add_row(peer.address, rank, peer.engine[:8], peer.state, heard, num, peer.reason)
    return table


def _counters(status: Status) -> Text | None:
    counted = sorted(status.health.counters.items())
    words = [f"{name} {num:,}" for name, num in counted if num]
    words += [f"refused {r.address}: {r.text}" for r in status.health.refusals[-3:]]
    return Text("   ".join(words), style="yellow") if words else None


def _table(title: str, columns: tuple[str, ...]) -> Table:
    table = Table(title=title, title_justify="left", box=None, pad_edge=False, title_style="bold")
    for column in columns:
        is_number = column in ("requests", "mean", "p50 <", "p99 <", "for", "pages", "rank")
        table.add_column(column, justify="right" if is_number else "left", style="")
    return table


def _seconds(value: float) -> str:
    if value == float("inf"):
        return "inf"
    for unit, size in (("s", 1.0), ("ms", 1e-3), ("us", 1e-6)):
        if value >= size:
            return f"{value / size:.3g} {unit}"
    return "0"


def _nbytes(value: float | None) -> str:
    size = value or 0.0
    for unit in ("B", "KB", "MB", "GB"):
        if size < 1000:
            return f"{size:.3g} {unit}"
        size /= 1000
    return f"{size:.3g} TB"

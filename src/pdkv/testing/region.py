"""A gather and a scatter as one plan: what ends where, by way of a staging region. Layer 6."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypedDict

import numpy as np
import numpy.typing as npt

from pdkv.plan import Route, Runs, TableCopy, Tag, gather_copies, scatter_copies, staged_nbytes
from pdkv.plan.pages import PageIds
from pdkv.testing.oracle import OracleError

__all__ = ["Arguments", "through_a_region"]

_REGION = 1 << 46  # an address that no case uses

Ints = npt.NDArray[np.int64]


class Arguments(TypedDict):
    """What a plan of a tag needs beside the tag."""

    decode_prefix_len: int
    num_tokens: int
    src_page_ids: PageIds
    dst_page_ids: PageIds


def through_a_region(route: Route, tag: Tag, arguments: Arguments) -> Runs:
    """The copies from pages to pages that a staged tag amounts to.

    Raises OracleError where gather and scatter don't fill and empty the same bytes once, inside
    what `staged_nbytes` says.
    """
    lengths = {
        "decode_prefix_len": arguments["decode_prefix_len"],
        "num_tokens": arguments["num_tokens"],
    }
    src_ids, dst_ids = arguments["src_page_ids"], arguments["dst_page_ids"]
    gather = gather_copies(route, tag, **lengths, src_page_ids=src_ids, region=_REGION)
    scatter = scatter_copies(route, tag, **lengths, dst_page_ids=dst_ids, region=_REGION)
    src, at_src, src_nbytes = _sorted(_expand(gather), tag)
    region, pages, sizes = _expand(scatter)
    dst, at_dst, dst_nbytes = _sorted((pages, region, sizes), tag)
    end = int((at_src + src_nbytes).max()) - _REGION
    if end > staged_nbytes(route, tag, **lengths):
        raise OracleError(f"{tag} fills more of its region than it says")
    if int(src_nbytes.sum()) != int(dst_nbytes.sum()):
        raise OracleError(f"{tag}: {src_nbytes.sum()} bytes gathered, {dst_nbytes.sum()} scattered")
    cuts = np.union1d(at_src, at_dst)
    i = np.searchsorted(at_src, cuts, side="right") - 1
    j = np.searchsorted(at_dst, cuts, side="right") - 1
    if min(i.min(), j.min()) < 0:
        raise OracleError(f"{tag}: gather and scatter begin at different places")
    ends = np.minimum(at_src[i] + src_nbytes[i], at_dst[j] + dst_nbytes[j])
    if (ends <= cuts).any():
        raise OracleError(f"{tag}: something is gathered and not scattered, or the other way round")
    columns = (src[i] + cuts - at_src[i], dst[j] + cuts - at_dst[j], ends - cuts)
    return Runs(*(column.astype(np.uint64) for column in columns))


def _expand(copies: Sequence[TableCopy]) -> tuple[Ints, Ints, Ints]:
    """(src, dst, nbytes) of every run."""
    src = [(c.src_bases[:, None] + c.src_offsets).ravel() for c in copies]
    dst = [(c.dst_bases[:, None] + c.dst_offsets).ravel() for c in copies]
    nbytes = [np.full(c.num_runs, c.run_nbytes, np.int64) for c in copies]
    return np.concatenate(src), np.concatenate(dst), np.concatenate(nbytes)


def _sorted(runs: tuple[Ints, Ints, Ints], tag: Tag) -> tuple[Ints, Ints, Ints]:
    """(pages, region, nbytes) by place in the region, where no two may overlap."""
    order = np.argsort(runs[1])
    pages, region, nbytes = (column[order] for column in runs)
    if (region[:-1] + nbytes[:-1] > region[1:]).any():
        raise OracleError(f"{tag}: two runs have one place in the region")
    return pages, region, nbytes

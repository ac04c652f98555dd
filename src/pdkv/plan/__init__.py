"""Placement: owned boxes -> who sends what to whom -> the bytes of one transfer chunk.

`validate(src, dst)` gives a `Pairing` (once per pair of engines), `Pairing.route` a `Route` (once
per pair of ranks), `Route.plan` the `Runs` of one `Tag`. Layer 1: numpy and layer 0 only.
"""

from pdkv.plan.cost import CostModel, Estimate
from pdkv.plan.geometry import Tag
from pdkv.plan.pages import are_distinct
from pdkv.plan.pairing import Pairing, validate
from pdkv.plan.picture import Picture
from pdkv.plan.prepared import Indices, PreparedLists, Sizes
from pdkv.plan.route import Route
from pdkv.plan.runs import RunBuffer, Runs, StridedRuns, coalesce, coalesce_pages
from pdkv.plan.staged import gather_copies, scatter_copies, staged_nbytes
from pdkv.plan.tables import Cast, TableCopy
from pdkv.plan.traffic import Flow

__all__ = [
    "Cast",
    "CostModel",
    "Estimate",
    "Flow",
    "Indices",
    "Pairing",
    "Picture",
    "PreparedLists",
    "Route",
    "RunBuffer",
    "Runs",
    "Sizes",
    "StridedRuns",
    "TableCopy",
    "Tag",
    "are_distinct",
    "coalesce",
    "coalesce_pages",
    "gather_copies",
    "scatter_copies",
    "staged_nbytes",
    "validate",
]

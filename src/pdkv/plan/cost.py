"""Direct or staged: what a tag costs either way, from its descriptors and bytes.

Constants are parameters; the defaults were measured with NIXL over UCX between two processes of
one host (655,360 runs of 512 bytes in 1.8 s; 160 runs of 2 MiB in 40 ms; gathering and scattering
335 MB with one thread in 64 and 72 ms). Refuses to know whether staging is to be had. Layer 1.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

__all__ = ["CostModel", "Estimate"]


class Estimate(NamedTuple):
    """Size of a tag: an upper bound of its descriptors, and its bytes."""

    num_descriptors: int
    nbytes: int


@dataclass(frozen=True, kw_only=True)
class CostModel:
    """Seconds of a transfer as a linear function of descriptors and bytes.

    descriptor_s: each descriptor of a direct write. wire_nbytes_per_s: large writes.
    gather_nbytes_per_s, scatter_nbytes_per_s: the copies at either end of a staged write, of long
    runs; copy_run_s: what each run costs both of them beside its bytes.
    staged_s: what a staged write costs beside (grant, launch, one more hop of messages).
    """

    descriptor_s: float = 2.7e-6
    wire_nbytes_per_s: float = 8.4e9
    gather_nbytes_per_s: float = 5.2e9
    scatter_nbytes_per_s: float = 4.6e9
    copy_run_s: float = 0.0
    staged_s: float = 1e-3

    def direct(self, estimate: Estimate) -> float:
        """Seconds of writing each run where it belongs."""
        wire_s = estimate.nbytes / self.wire_nbytes_per_s
        return estimate.num_descriptors * self.descriptor_s + wire_s

    def staged(self, estimate: Estimate) -> float:
        """Seconds of gathering, one large write, and scattering."""
        per_nbyte = (
            1 / self.gather_nbytes_per_s
            + 1 / self.wire_nbytes_per_s
            + 1 / self.scatter_nbytes_per_s
        )
        runs_s = estimate.num_descriptors * self.copy_run_s
        return self.staged_s + self.descriptor_s + runs_s + estimate.nbytes * per_nbyte

    def break_even_nbytes(self) -> float:
        """Size of runs at which both ways cost the same, for tags with many of them."""
        copies = 1 / self.gather_nbytes_per_s + 1 / self.scatter_nbytes_per_s
        return max(0.0, self.descriptor_s - self.copy_run_s) / copies

    def choose(self, estimate: Estimate) -> Literal["direct", "staged"]:
        """The cheaper way; direct when they are equal, since it holds no memory."""
        return "staged" if self.staged(estimate) < self.direct(estimate) else "direct"

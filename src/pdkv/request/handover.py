"""What decode has when prefill stops before the end of the prompt. Pure arithmetic. Layer 2."""

from __future__ import annotations

from pdkv.plan import Pairing, Tag

__all__ = ["covered_tokens", "is_covered"]


def covered_tokens(pairing: Pairing, computed: int, decode_prefix_len: int, num_tokens: int) -> int:
    """How many positions decode has in whole when prefill computed `computed` and stops.

    Whole transfer chunks only. A row or a window is the state after the last position and nothing
    before it, so an engine with one of those covers all or only what decode held.
    """
    if computed >= num_tokens:
        return num_tokens
    if any(c.kind == "row" or c.window for c in pairing.src.kv.components):
        return decode_prefix_len
    return max(computed // pairing.grid * pairing.grid, decode_prefix_len)


def is_covered(
    pairing: Pairing, tag: Tag, covered: int, decode_prefix_len: int, num_tokens: int
) -> bool:
    """Whether this tag goes when prefill stops after `covered` positions. Aux always does."""
    components = pairing.src.kv.components
    if covered >= num_tokens or tag.component == len(components):
        return True
    if components[tag.component].kind == "row":
        return False
    return pairing.tag_tokens(tag, decode_prefix_len, num_tokens).stop <= covered

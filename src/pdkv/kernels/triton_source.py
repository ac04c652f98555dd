"""The text of the Triton kernels. It is Triton's language, not Python: no types, no exceptions.

One thread moves one *unit*, 16 bytes where alignment allows. Two things make each access 128 bits
wide: the base that comes out of a table is declared aligned (`multiple_of`), and offsets are
counted in units, so that the words of a unit are adjacent for the compiler too. Programs walk over
tiles of all pieces, so any number of them does; the launcher chooses. 64-bit offsets throughout.

Refuses to know tensors and checks. Needs triton; only `pdkv.kernels.triton` imports it. Layer 3.
"""

# mypy: ignore-errors

from __future__ import annotations

import triton
import triton.language as tl

__all__ = ["cast_table", "copy_table"]

_SHARED = ["src_bases", "dst_bases", "src_offsets", "dst_offsets", "num_tiles", "num_all_tiles"]


# One variant for each set of constants, whatever the alignment of a table or the size of a count.
@triton.jit(do_not_specialize=[*_SHARED, "num_units"])
def copy_table(
    src_bases,
    dst_bases,
    src_offsets,
    dst_offsets,
    num_units,
    num_tiles,
    num_all_tiles,
    WORD: tl.constexpr,  # noqa: N803
    WORDS: tl.constexpr,  # noqa: N803
    ALIGN: tl.constexpr,  # noqa: N803
    UNITS_PER_RUN: tl.constexpr,  # noqa: N803
    SRC_DENSE: tl.constexpr,  # noqa: N803
    DST_DENSE: tl.constexpr,  # noqa: N803
    BLOCK: tl.constexpr,  # noqa: N803
):
    """Runs of UNITS_PER_RUN units in all pieces; a dense side has run r at r * UNITS_PER_RUN."""
    words = tl.arange(0, WORDS)
    tile = tl.program_id(0)
    while tile < num_all_tiles:
        piece = tile // num_tiles
        src = tl.load(src_bases + piece).to(tl.pointer_type(WORD))
        dst = tl.load(dst_bases + piece).to(tl.pointer_type(WORD))
        src = tl.multiple_of(src, ALIGN)
        dst = tl.multiple_of(dst, ALIGN)
        unit = (tile - piece * num_tiles) * BLOCK + tl.arange(0, BLOCK)
        mask = unit < num_units
        run = unit // UNITS_PER_RUN
        inside = unit - run * UNITS_PER_RUN
        src_unit = unit.to(tl.int64)
        dst_unit = unit.to(tl.int64)
        if not SRC_DENSE:
            src_unit = tl.load(src_offsets + run, mask=mask, other=0) + inside
        if not DST_DENSE:
            dst_unit = tl.load(dst_offsets + run, mask=mask, other=0) + inside
        src_at = src + (src_unit * WORDS)[:, None] + words[None, :]
        dst_at = dst + (dst_unit * WORDS)[:, None] + words[None, :]
        value = tl.load(src_at, mask=mask[:, None])
        tl.store(dst_at, value, mask=mask[:, None])
        tile += tl.num_programs(0)


@triton.jit
def _to_e4m3(values):
    """float32 -> the bits of e4m3fn, to nearest even, +-448 where it is too large.

    By integers: the same on every target, also where there is no instruction for it.
    """
    bits = values.to(tl.int32, bitcast=True)
    sign = (bits >> 24) & 0x80
    size = bits & 0x7FFFFFFF
    # 448 = 0x43E00000. Infinity is clamped, NaN (above it) is not.
    clamped = tl.where(size > 0x43E00000, 0x43E00000, size)
    rounded = clamped + 0x7FFFF + ((clamped >> 20) & 1)
    normal = (rounded >> 20) - (120 << 3)
    # Below 2**-6 the step is 2**-9: adding 2**14 leaves just those bits, rounded.
    small = (clamped.to(tl.float32, bitcast=True) + 16384.0).to(tl.int32, bitcast=True) - 0x46800000
    code = tl.where(clamped < 0x3C800000, small, normal)
    return tl.where(size > 0x7F800000, 0x7F, sign | code)


@triton.jit
def _from_e4m3(code):
    """The bits of e4m3fn (int32, 0..255) -> float32, exactly."""
    sign = (code & 0x80) << 24
    size = code & 0x7F
    normal = ((size << 20) + (120 << 23)).to(tl.float32, bitcast=True)
    value = tl.where(size < 8, size.to(tl.float32) * 0.001953125, normal)
    bits = value.to(tl.int32, bitcast=True)
    bits = tl.where(size == 0x7F, 0x7FC00000, bits)  # the one NaN, of either sign
    return (bits | sign).to(tl.float32, bitcast=True)


@triton.jit
def _to_bfloat16(values):
    """float32 -> the bits of bfloat16, to nearest even."""
    bits = values.to(tl.int32, bitcast=True)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    is_nan = (bits & 0x7FFFFFFF) > 0x7F800000
    return tl.where(is_nan, 0x7FC0, rounded) & 0xFFFF


@triton.jit(do_not_specialize=[*_SHARED, "factors", "num_elements"])
def cast_table(
    src_bases,
    dst_bases,
    src_offsets,
    dst_offsets,
    factors,
    num_elements,
    num_tiles,
    num_all_tiles,
    ELEMENTS_PER_RUN: tl.constexpr,  # noqa: N803
    TO_FP8: tl.constexpr,  # noqa: N803
    PACKED: tl.constexpr,  # noqa: N803
    BLOCK: tl.constexpr,  # noqa: N803
):
    """bfloat16 <-> e4m3fn on the way. Offsets count elements, or groups of 8 when PACKED: then a
    thread moves 16 bytes of bfloat16 and 8 bytes of e4m3fn."""
    tile = tl.program_id(0)
    while tile < num_all_tiles:
        piece = tile // num_tiles
        src = tl.load(src_bases + piece)
        dst = tl.load(dst_bases + piece)
        factor = tl.load(factors + piece)
        at = (tile - piece * num_tiles) * BLOCK + tl.arange(0, BLOCK)
        mask = at < num_elements
        run = at // ELEMENTS_PER_RUN
        inside = at - run * ELEMENTS_PER_RUN
        src_at = tl.load(src_offsets + run, mask=mask, other=0) + inside
        dst_at = tl.load(dst_offsets + run, mask=mask, other=0) + inside
        if PACKED:
            half = tl.arange(0, 2)
            both = mask[:, None]
            if TO_FP8:
                wide = tl.multiple_of(src.to(tl.pointer_type(tl.int64)), 16)
                narrow = dst.to(tl.pointer_type(tl.int64))
                words = tl.load(wide + (src_at * 2)[:, None] + half[None, :], mask=both, other=0)
                packed = tl.zeros_like(words)
                for k in tl.static_range(4):
                    bits = ((words >> (16 * k)) & 0xFFFF).to(tl.int32) << 16
                    code = _to_e4m3(bits.to(tl.float32, bitcast=True) * factor)
                    packed |= code.to(tl.int64) << (8 * k)
                shift = (half * 32).to(tl.int64)
                tl.store(narrow + dst_at, tl.sum(packed << shift[None, :], axis=1), mask=mask)
            else:
                narrow = src.to(tl.pointer_type(tl.int64))
                wide = tl.multiple_of(dst.to(tl.pointer_type(tl.int64)), 16)
                codes = tl.load(narrow + src_at, mask=mask, other=0)
                shift = (half * 32).to(tl.int64)
                codes = codes[:, None] >> shift[None, :]
                packed = tl.zeros_like(codes)
                for k in tl.static_range(4):
                    code = ((codes >> (8 * k)) & 0xFF).to(tl.int32)
                    bits = _to_bfloat16(_from_e4m3(code) * factor)
                    packed |= bits.to(tl.int64) << (16 * k)
                tl.store(wide + (dst_at * 2)[:, None] + half[None, :], packed, mask=both)
        elif TO_FP8:
            bits = tl.load(src.to(tl.pointer_type(tl.int16)) + src_at, mask=mask, other=0)
            values = (bits.to(tl.int32) << 16).to(tl.float32, bitcast=True) * factor
            tl.store(
                dst.to(tl.pointer_type(tl.int8)) + dst_at, _to_e4m3(values).to(tl.int8), mask=mask
            )
        else:
            code = tl.load(src.to(tl.pointer_type(tl.int8)) + src_at, mask=mask, other=0)
            bits = _to_bfloat16(_from_e4m3(code.to(tl.int32) & 0xFF) * factor)
            tl.store(dst.to(tl.pointer_type(tl.int16)) + dst_at, bits.to(tl.int16), mask=mask)
        tile += tl.num_programs(0)

"""What two engines agree on before any address is known: refusals, fan-in, grid, tags, pages."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable

import msgspec
import pytest

from pdkv.errors import ConfigError, LayoutMismatch
from pdkv.heads import head_writers
from pdkv.layout import (
    Component,
    EngineLayout,
    Field,
    HeadMap,
    KVLayout,
    Placement,
    TokenShard,
)
from pdkv.plan import Pairing, Picture, Tag, validate

MHA = KVLayout.mha(num_layers=4, total_kv_heads=8, head_dim=8, dtype="bfloat16")
MLA = KVLayout.mla(num_layers=4, latent_dim=32, dtype="bfloat16")


def engine(kv: KVLayout = MHA, **sizes: object) -> EngineLayout:
    return EngineLayout.simple(kv, **{"page_size": 4, "chunk_tokens": 1, **sizes})  # type: ignore[arg-type]


def with_shard(layout: EngineLayout, *owners: int, interleave: int = 0) -> EngineLayout:
    shard = TokenShard(owners=owners, interleave=interleave)
    return msgspec.structs.replace(layout, token_shard=shard)


def with_placement(layout: EngineLayout, **changes: object) -> EngineLayout:
    first = msgspec.structs.replace(layout.placements[0], **changes)
    return msgspec.structs.replace(layout, placements=(first, *layout.placements[1:]))


class TestRefusals:
    """Each names the field and both values."""

    @pytest.mark.parametrize(
        ("src", "dst", "field", "values"),
        [
            (engine(), engine(MLA), "kv.components.kv.fields.names", (("k", "v"), ("latent",))),
            (
                engine(),
                engine(KVLayout.mha(num_layers=4, total_kv_heads=8, head_dim=8, dtype="float16")),
                "kv.components.kv.fields.k.dtype",
                ("bfloat16", "float16"),
            ),
            (engine(), engine(tp_size=3), "placements.kv.head_maps", (1, 3)),
            (engine(tp_size=16), engine(tp_size=12), "placements.kv.head_maps", (16, 12)),
            (engine(), engine(page_size=0), "placements.kv.page_size", (4, 0)),
            (engine(), engine(page_size="4"), "placements.kv.page_size", (4, "4")),
            (engine(), engine(chunk_tokens=0), "chunk_tokens", (1, 0)),
            (engine(), engine(chunk_tokens=2.5), "chunk_tokens", (1, 2.5)),
            (engine(cp_size=2), with_shard(engine(cp_size=2), 0), "token_shard.owners", None),
            (engine(), with_shard(engine(), 0, interleave=-1), "token_shard.interleave", (0, -1)),
            (
                engine(),
                with_placement(engine(), layers_by_pp_rank=((0, 1, 2),)),
                "placements.kv.layers_by_pp_rank",
                (((0, 1, 2, 3),), ((0, 1, 2),)),
            ),
            (
                engine(),
                with_placement(engine(), head_maps=(HeadMap("k", ((0, 1, 2),)),)),
                "placements.kv.head_maps",
                None,
            ),
            (engine(), msgspec.structs.replace(engine(), placements=()), "placements", None),
        ],
        ids=lambda x: x if isinstance(x, str) else "",
    )
    def test_what_cannot_be_bridged_names_the_field_and_both_values(
        self, src: EngineLayout, dst: EngineLayout, field: str, values: tuple[object, object] | None
    ) -> None:
        with pytest.raises(LayoutMismatch) as caught:
            validate(src, dst)
        assert caught.value.field == field
        if values is not None:
            assert (caught.value.src, caught.value.dst) == values
        assert repr(caught.value.dst) in str(caught.value)

    @pytest.mark.parametrize(
        ("ask", "what"),
        [
            (lambda p: p.writers(-1), "rank_id -1"),
            (lambda p: p.readers(2), "rank_id 2"),
            (lambda p: p.num_readers(2), "rank_id 2"),
            (lambda p: p.aux_writer(-1), "rank_id -1"),
            (lambda p: p.tags(1, 0, 8), "rank_id 1"),
            (lambda p: p.pair_nbytes(-1, 0, 0, 8), "rank_id -1"),
            (lambda p: p.num_src_pages(2, 8), "rank_id 2"),
            (lambda p: p.num_src_pages(0, -8), "num_tokens -8"),
            (lambda p: p.num_dst_pages(-1, 0, 8), "rank_id -1"),
            (lambda p: p.src_heads(-1), "rank_id -1"),
            (lambda p: p.dst_heads(0, 1), "no component 1"),
            (lambda p: p.flows(0, 8, 1), "no component 1"),
            (lambda p: p.flows(0, 8, -1), "no component -1"),
            (lambda p: Picture(p, num_tokens=8, component=-1), "no component -1"),
        ],
    )
    def test_a_rank_or_component_that_is_not_there_is_named(
        self, ask: Callable[[Pairing], object], what: str
    ) -> None:
        with pytest.raises(ConfigError, match=what):
            ask(validate(engine(tp_size=2), engine()))

    def test_sizes_that_are_no_whole_numbers_are_refused_where_they_are_given(self) -> None:
        with pytest.raises(ConfigError, match=r"positive integers: 2\.5 and 8"):
            Field("k", 2.5, 8, "int8")  # type: ignore[arg-type]
        with pytest.raises(ConfigError, match=r"tp_size must be an integer .*, got 2\.0"):
            engine(tp_size=2.0)

    def test_elements_that_a_token_shard_would_cut(self) -> None:
        scales = Component(
            name="scales",
            layer_ids=(0,),
            fields=(Field("s", 8, 1, "float32"),),
            tokens_per_element=4,
        )
        kv = msgspec.structs.replace(MHA, components=(*MHA.components, scales))
        validate(engine(kv, cp_size=2), engine(kv))
        for bad in (with_shard(engine(kv, cp_size=2), 0, 1), engine(kv, cp_size=2, interleave=2)):
            with pytest.raises(LayoutMismatch, match="would cut elements of 'scales'"):
                validate(bad, engine(kv))

    def test_components_that_share_page_ids_need_one_page_size(self) -> None:
        draft = Component(name="draft", layer_ids=(9,), fields=(Field("k", 8, 8, "float16"),))
        kv = msgspec.structs.replace(MHA, components=(*MHA.components, draft))
        other = with_placement(engine(kv), page_size=8)
        with pytest.raises(LayoutMismatch, match="share page ids"):
            validate(engine(kv), other)


class TestFanIn:
    def test_page_sizes_and_tp_sizes_that_do_not_divide_are_taken(self) -> None:
        pairing = validate(engine(tp_size=4, page_size=6), engine(tp_size=2, page_size=4))
        assert pairing.writers(0) == (0, 1)
        assert pairing.readers(3) == (1,)
        assert pairing.prefix_unit == 12

    def test_every_rank_without_a_reader_hears_from_exactly_one_dst_rank(self) -> None:
        pairing = validate(engine(MLA, tp_size=8), engine(MLA, tp_size=2))
        assert [pairing.writers(d) for d in range(2)] == [(0,), (4,)]
        assert [pairing.dummy_writers(d) for d in range(2)] == [(1, 3, 6), (2, 5, 7)]
        assert [pairing.num_readers(s) for s in range(8)] == [1] * 8

    def test_readers_of_one_replica_are_all_awaited(self) -> None:
        pairing = validate(engine(MLA, tp_size=2), engine(MLA, tp_size=8))
        assert pairing.readers(0) == (0, 1, 2, 3)
        assert pairing.num_readers(0) == 4

    def test_engines_of_hundreds_of_ranks_pair_in_a_moment(self) -> None:
        kv = KVLayout.mha(num_layers=2, total_kv_heads=64, head_dim=8, dtype="bfloat16")
        pairing = validate(engine(kv, tp_size=256), engine(kv, tp_size=192))
        for dst_rank in (0, 1, 100, 191):
            writers = head_writers(dst_rank, src_tp_size=256, dst_tp_size=192, total_kv_heads=64)
            assert pairing.writers(dst_rank) == writers

    def test_aux_comes_from_the_last_stage(self) -> None:
        pairing = validate(engine(tp_size=2, pp_size=2), engine(tp_size=2, pp_size=2))
        # The last stage's ranks 2 and 3 write to dst stage 1; dst stage 0 gets aux from rank 2.
        assert [pairing.aux_writer(d) for d in range(4)] == [2, 2, 2, 3]
        assert pairing.writers(0) == (0, 2)

    def test_context_parallel_ranks_without_a_common_token_do_not_meet(self) -> None:
        both = engine(cp_size=2)
        pairing = validate(both, both)
        assert pairing.writers(0) == (0,)
        assert pairing.writers(1) == (1,)
        assert validate(both, engine(cp_size=2, interleave=1)).writers(1) == (0, 1)


class TestGrid:
    def test_it_reaches_both_wishes_in_multiples_of_both_spans(self) -> None:
        src = engine(page_size=6, chunk_tokens=100)
        dst = engine(page_size=4, cp_size=2, chunk_tokens=50)
        assert validate(src, dst).grid == 120

    def test_with_striping_a_full_chunk_has_a_unit_for_each_replica(self) -> None:
        src, dst = (engine(MLA, tp_size=n, striping=True) for n in (8, 1))
        assert validate(src, dst).grid == 32
        assert validate(src, engine(MLA)).grid == 4

    @pytest.mark.parametrize(("src_tp", "dst_tp"), [(8, 1), (8, 2), (6, 4), (3, 2), (2, 8)])
    def test_replicas_share_a_full_chunk_equally_and_a_request_within_two_units(
        self, src_tp: int, dst_tp: int
    ) -> None:
        src, dst = (engine(MLA, tp_size=n, striping=True) for n in (src_tp, dst_tp))
        pairing = validate(src, dst)
        unit_nbytes = 4 * 4 * 64  # tokens of a page, layers, latent
        for num_tokens in (pairing.grid, 3 * pairing.grid, pairing.grid + 5, 7, 1):
            sent: Counter[int] = Counter(dict.fromkeys(range(src_tp), 0))
            for flow in pairing.flows(0, num_tokens):
                sent[flow.src_rank_id] += flow.nbytes
            assert sum(sent.values()) == dst_tp * num_tokens * 4 * 64
            spread = max(sent.values()) - min(sent.values())
            if num_tokens % pairing.grid == 0:
                assert spread == 0
            # Every reader's share of the last, partial chunk is cut at whole units.
            readers_per_writer = math.ceil(dst_tp / src_tp)
            assert spread <= 2 * unit_nbytes * readers_per_writer


class TestPrefix:
    def test_legal_ones(self) -> None:
        pairing = validate(engine(page_size=6), engine(page_size=4))
        for prefix in (0, 12, 24, 25):
            pairing.check_prefix(prefix, 25)
        for prefix, num_tokens in ((6, 25), (1, 25), (26, 25), (-12, 25), (0, 0)):
            with pytest.raises(ConfigError):
                pairing.check_prefix(prefix, num_tokens)

    def test_a_map_that_depends_on_the_length_allows_none(self) -> None:
        zigzag = with_shard(engine(cp_size=2), 0, 1, 1, 0)
        with pytest.raises(ConfigError, match="depends on num_tokens"):
            validate(engine(), zigzag).check_prefix(8, 16)
        validate(zigzag, engine()).check_prefix(8, 16)

    def test_a_full_hit_sends_no_kv_and_still_aux_and_state(self) -> None:
        state = Component(
            name="state",
            layer_ids=(0, 1, 2, 3),
            fields=(Field("h", 8, 4, "float32"),),
            kind="row",
            own_page_ids=True,
        )
        window = Component(
            name="swa",
            layer_ids=(5,),
            fields=(Field("k", 8, 4, "float16"),),
            window=6,
            own_page_ids=True,
        )
        kv = msgspec.structs.replace(MHA, components=(*MHA.components, state, window))
        layout = engine(kv, chunk_tokens=8)
        pairing = validate(layout, layout)
        assert pairing.writer_tags(0, 0, 17, 17) == (
            Tag(0, 2, 1),
            Tag(0, 2, 2),
            Tag(0, 1, 0),
            Tag(0, 3, 0),
        )
        assert pairing.num_dst_pages(0, 17, 17) == 0
        assert pairing.dst_page_range(0, 17, 17, component=2) == range(2, 5)
        assert pairing.tag_tokens(Tag(0, 2, 1), 17, 17) == range(11, 16)
        assert pairing.tag_tokens(Tag(0, 1, 0), 17, 17) == range(17)


class TestTagsAndPages:
    def test_tags_come_in_the_order_in_which_they_are_ready(self) -> None:
        pairing = validate(engine(tp_size=2, chunk_tokens=8), engine(chunk_tokens=8))
        assert pairing.chunks(8, 30) == range(1, 4)
        assert [pairing.chunk_tokens(k, 8, 30) for k in range(1, 4)] == [
            range(8, 16),
            range(16, 24),
            range(24, 30),
        ]
        assert pairing.writer_tags(0, 0, 8, 30) == (
            Tag(0, 0, 1),
            Tag(0, 0, 2),
            Tag(0, 0, 3),
            Tag(0, 1, 0),
        )
        assert pairing.tags(0, 8, 30) == {
            *pairing.writer_tags(0, 0, 8, 30),
            *pairing.writer_tags(1, 0, 8, 30),
        }

    def test_a_writer_without_an_element_in_a_chunk_has_no_tag_there(self) -> None:
        src, dst = (engine(MLA, tp_size=n, striping=True) for n in (4, 1))
        pairing = validate(src, dst)
        # One unit in the last chunk of 16: only the first replica sends it.
        assert pairing.writer_tags(0, 0, 0, 17) == (Tag(0, 0, 0), Tag(0, 0, 1), Tag(0, 1, 0))
        assert pairing.writer_tags(3, 0, 0, 17) == (Tag(3, 0, 0),)

    def test_page_lists_of_both_sides(self) -> None:
        pairing = validate(engine(page_size=4), engine(page_size=8, cp_size=2, interleave=2))
        assert pairing.num_src_pages(0, 21) == 6
        assert pairing.src_page_range(0, range(4, 9), 21) == range(1, 3)
        assert pairing.src_page_range(0, range(5, 5), 21) == range(0)
        # dst ranks hold 11 and 10 of 21 tokens; a prefix of 16 is one page on each.
        assert [pairing.num_dst_pages(d, 0, 21) for d in (0, 1)] == [2, 2]
        assert [pairing.num_dst_pages(d, 16, 21) for d in (0, 1)] == [1, 1]

    def test_contiguous_shards_follow_the_length_of_the_prompt(self) -> None:
        pairing = validate(with_shard(engine(cp_size=2), 0, 1), engine())
        assert [pairing.num_src_pages(s, 13) for s in (0, 1)] == [2, 2]
        assert pairing.src_page_range(1, range(8), 13) == range(1)
        assert pairing.writer_tags(1, 0, 0, 13) == (Tag(1, 0, 1), Tag(1, 0, 2), Tag(1, 0, 3))


def test_placements_may_come_in_any_order_of_layers() -> None:
    src = with_placement(engine(pp_size=2), layers_by_pp_rank=((3, 0), (2, 1)))
    pairing = validate(src, engine())
    assert [f.layer_ids for f in pairing.flows(0, 8)] == [(0, 3), (1, 2)]


def test_a_placement_is_needed_for_each_component() -> None:
    extra = Placement(component="other", layers_by_pp_rank=((0,),), page_size=4)
    layout = engine()
    more = msgspec.structs.replace(layout, placements=(*layout.placements, extra))
    with pytest.raises(LayoutMismatch, match="one placement for each component"):
        validate(layout, more)


@pytest.mark.parametrize("striping", [False, True])
def test_what_a_pair_moves_of_a_long_prompt_is_what_its_tags_carry(striping: bool) -> None:
    src = engine(MLA, tp_size=2, cp_size=3, interleave=2, striping=striping)
    dst = with_shard(engine(MLA, cp_size=2, striping=striping), 0, 1, 1, 0, interleave=4)
    pairing, maps = validate(src, dst), [list(e.token_shard.owners) for e in (src, dst)]
    holders = [
        [owners[t // e.token_shard.interleave % len(owners)] for t in range(1000)]
        for e, owners in zip((src, dst), maps, strict=True)
    ]
    for dst_id in range(2):
        held = Counter(a for a, b in zip(*holders, strict=True) if b == dst_id)
        whole = [f for f in pairing.flows(0, 1000) if f.dst_rank_id == dst_id]
        assert sum(f.nbytes for f in whole) == 4 * 64 * sum(held.values())
        by_cp = Counter[int]()
        for f in whole:
            by_cp[src.parallel.rank(f.src_rank_id).cp_rank] += f.num_elements // 4
        assert by_cp == held

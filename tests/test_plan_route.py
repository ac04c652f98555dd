"""From a tag and two page lists to bytes: what is joined, what is refused, and 64 bits."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest

from pdkv.errors import ConfigError, LayoutMismatch
from pdkv.layout import (
    ComponentPool,
    EngineLayout,
    FieldPool,
    HeadMap,
    KVLayout,
    MemoryRegion,
    PoolLayout,
    TokenShard,
)
from pdkv.plan import (
    CostModel,
    Estimate,
    PreparedLists,
    Route,
    RunBuffer,
    Runs,
    Tag,
    coalesce,
    coalesce_pages,
    geometry,
    validate,
)
from pdkv.plan.pages import are_distinct, require_distinct

KV = KVLayout.mha(num_layers=2, total_kv_heads=4, head_dim=8, dtype="bfloat16")
HEAD = 16
TAG = Tag(0, 0, 0)


def engine(tp_size: int = 1, page_size: int = 4, **sizes: int) -> EngineLayout:
    return EngineLayout.simple(KV, page_size=page_size, tp_size=tp_size, **sizes)


def pool(
    tp_size: int = 1,
    page_size: int = 4,
    num_pages: int = 16,
    *,
    hnd: bool = False,
    base: int = 1 << 20,
    one_buffer: bool = False,
) -> PoolLayout:
    """Two layers of K and V in four buffers, or K beside V in each page."""
    heads = 4 // tp_size
    token = heads * HEAD
    page = page_size * token * (2 if one_buffer else 1)
    strides = (page, HEAD, page_size * HEAD) if hnd else (page, token, HEAD)
    nbytes = num_pages * page
    if one_buffer:
        layers = [base, base + nbytes]
        k, v = layers, [b + page // 2 for b in layers]
    else:
        layers = [base + i * nbytes for i in range(4)]
        k, v = layers[:2], layers[2:]
    return PoolLayout(
        components=(
            ComponentPool(
                name="kv",
                layer_ids=(0, 1),
                page_size=page_size,
                num_pages=num_pages,
                fields=(FieldPool("k", tuple(k), *strides), FieldPool("v", tuple(v), *strides)),
            ),
        ),
        regions=tuple(MemoryRegion(b, nbytes) for b in layers),
        aux_base=0,
    )


def route(src: tuple[EngineLayout, PoolLayout], dst: tuple[EngineLayout, PoolLayout]) -> Route:
    return validate(src[0], dst[0]).route(0, 0, src[1], dst[1])


def plan(one: Route, src: list[int], dst: list[int], num_tokens: int, **more: object) -> Runs:
    arguments = {"decode_prefix_len": 0, "num_tokens": num_tokens, **more}
    return one.plan(TAG, src_page_ids=src, dst_page_ids=dst, **arguments)  # type: ignore[arg-type]


class TestJoining:
    def test_equal_tp_needs_one_run_per_page_and_buffer(self) -> None:
        same = (engine(), pool())
        assert plan(route(same, same), [1, 3, 5], [2, 6, 4], 12).num_runs == 4 * 3

    def test_pages_that_follow_each_other_on_both_sides_are_one_run(self) -> None:
        same = (engine(), pool())
        runs = plan(route(same, same), [1, 2, 3, 7], [5, 6, 8, 9], 16)
        assert runs.num_runs == 4 * 3
        assert sorted(set(runs.nbytes.tolist())) == [256, 512]

    def test_k_beside_v_in_one_buffer_is_one_run_per_page(self) -> None:
        for hnd in (False, True):
            same = (engine(), pool(one_buffer=True, hnd=hnd))
            assert plan(route(same, same), [1, 3], [2, 6], 8).num_runs == 2 * 2

    def test_a_partial_last_page_of_hnd_is_cut_head_by_head(self) -> None:
        same = (engine(), pool(hnd=True))
        runs = plan(route(same, same), [1, 3], [2, 6], 6)
        assert runs.num_runs == 4 * (1 + 4)
        assert runs.total_nbytes == 6 * 4 * HEAD * 4

    def test_head_slices_of_nhd_are_one_run_per_token_and_of_hnd_one_per_page(self) -> None:
        for hnd, num_runs in ((False, 8), (True, 2)):
            one = route((engine(2), pool(2, hnd=hnd)), (engine(), pool(hnd=hnd)))
            assert plan(one, [1, 3], [2, 6], 8).num_runs == 4 * num_runs

    def test_no_run_spans_two_regions_that_touch(self) -> None:
        same = (engine(), pool(num_pages=1))
        assert plan(route(same, same), [0], [0], 4).num_runs == 4

    def test_strided_rows_join_tokens_of_pages_in_a_row(self) -> None:
        one = route((engine(2), pool(2)), (engine(), pool()))
        arguments = {"src_page_ids": [1, 2, 5], "dst_page_ids": [3, 4, 9]}
        strided = one.plan_strided(TAG, decode_prefix_len=0, num_tokens=12, **arguments)
        assert sorted(strided.count.tolist()) == [4] * 4 + [8] * 4
        assert set(strided.src_stride.tolist()) == {2 * HEAD}
        assert set(strided.dst_stride.tolist()) == {4 * HEAD}
        assert strided.expand().total_nbytes == 12 * 2 * HEAD * 4

    def test_coalesce_keeps_bytes_and_order(self) -> None:
        src = np.array([0, 10, 20, 40, 50], np.uint64)
        dst = np.array([100, 110, 130, 150, 160], np.uint64)
        runs = coalesce(Runs(src, dst, np.full(5, 10, np.uint64)))
        assert runs.src.tolist() == [0, 20, 40]
        assert runs.nbytes.tolist() == [20, 10, 20]
        apart = Runs(src[::2], dst[::2], np.full(3, 10, np.uint64))
        assert coalesce(apart) is apart

    def test_coalesce_pages(self) -> None:
        src, dst = np.array([4, 5, 6, 9], np.int32), np.array([1, 2, 7, 8], np.int32)
        first_src, first_dst, number = coalesce_pages(src, dst)
        assert (first_src.tolist(), first_dst.tolist()) == ([4, 6, 9], [1, 7, 8])
        assert number.tolist() == [2, 1, 1]
        assert len(coalesce_pages(src[:0], dst[:0])[2]) == 0
        with pytest.raises(ValueError, match="4 src pages for 3"):
            coalesce_pages(src, dst[:3])


class TestRefusals:
    @pytest.mark.parametrize(
        ("src", "dst", "message"),
        [
            ([1], [2, 6], "src_page_ids has 1 entries, not 2"),
            ([1, 3], [2, 6, 7], "dst_page_ids has 3 entries, not 2"),
            ([1, -1], [2, 6], "not known"),
            ([1, 16], [2, 6], "outside of 16 pages"),
            ([1, 3], [2, 1 << 40], "outside of 16 pages"),
            ([1, 3], [-7, 2], "outside of 16 pages"),
            ([1, 3], [2, 2], "names page 2 twice"),
            ([1, 3], [[2, 6]], "one row of integers"),
            ([1.0, 3.0], [2, 6], "one row of integers"),
        ],
    )
    def test_page_lists(self, src: list[int], dst: list[int], message: str) -> None:
        same = (engine(), pool())
        with pytest.raises(ConfigError, match=message):
            plan(route(same, same), src, dst, 8)

    def test_a_page_named_twice_among_many_is_found_with_a_buffer_too(self) -> None:
        ids, buffer = np.random.default_rng(5).permutation(64), RunBuffer()
        require_distinct(ids, 64, buffer)
        ids[40] = ids[7]
        for kept in (buffer, None):
            with pytest.raises(ConfigError, match=f"names page {ids[7]} twice"):
                require_distinct(ids, 64, kept)
        require_distinct(ids[8:40], 64, buffer)

    def test_whether_ids_are_distinct_is_one_answer_however_many_there_are(self) -> None:
        buffer, rng = RunBuffer(), np.random.default_rng(6)
        for num_ids, num_pages in ((0, 8), (1, 8), (3, 8), (1 << 16, 1 << 17), (70_000, 1 << 17)):
            ids = rng.permutation(num_pages)[:num_ids]
            assert are_distinct(ids)
            assert are_distinct(ids, num_pages, buffer)
            if num_ids > 1:
                ids[-1] = ids[num_ids // 2]
                assert not are_distinct(ids)
                assert not are_distinct(ids, num_pages, buffer)

    def test_a_page_of_another_writer_that_the_pool_lacks_is_named_with_a_buffer_too(self) -> None:
        src = msgspec.structs.replace(
            engine(cp_size=2), token_shard=TokenShard(owners=(0, 1), interleave=4)
        )
        one = route((src, pool()), (engine(), pool()))
        for ids in ([2, 99, 3], [3, -1, 2]):
            for buffer in (None, RunBuffer()):
                with pytest.raises(ConfigError, match=f"dst_page_ids: id {ids[1]} "):
                    plan(one, [1, 4], ids, 12, buffer=buffer)

    def test_a_page_that_is_not_known_may_stay_so_until_it_is_needed(self) -> None:
        layout = engine(chunk_tokens=4)
        one = route((layout, pool()), (layout, pool()))
        assert plan(one, [1, -1], [2, 6], 8).total_nbytes == 4 * 4 * HEAD * 4

    @pytest.mark.parametrize("tag", [Tag(1, 0, 0), Tag(0, 1, 0), Tag(0, 5, 0), Tag(0, 0, 1)])
    def test_tags_that_the_pair_does_not_send(self, tag: Tag) -> None:
        one = route((engine(), pool()), (engine(), pool()))
        with pytest.raises(ConfigError):
            one.plan(
                tag, decode_prefix_len=0, num_tokens=8, src_page_ids=[1, 3], dst_page_ids=[2, 6]
            )

    def test_pools_that_are_not_what_was_published(self) -> None:
        good = pool()
        (kv,) = good.components
        k, v = kv.fields

        def with_kv(**changes: object) -> PoolLayout:
            changed = msgspec.structs.replace(kv, **changes)
            return msgspec.structs.replace(good, components=(changed,))

        outside = msgspec.structs.replace(good, regions=good.regions[:3])
        overlap = msgspec.structs.replace(k, token_stride=4)
        few = msgspec.structs.replace(k, bases=k.bases[:1])
        for bad, field in (
            (with_kv(page_size=8), "pool.kv.page_size"),
            (with_kv(layer_ids=(0, 2)), "pool.kv.layer_ids"),
            (with_kv(num_pages=0), "pool.kv.num_pages"),
            (with_kv(num_pages=17), "pool.kv.k.bases"),
            (with_kv(fields=(k,)), "pool.kv.fields"),
            (with_kv(fields=(overlap, v)), "pool.kv.k.strides"),
            (with_kv(fields=(few, v)), "pool.kv.k.bases"),
            (with_kv(fields=(k, msgspec.structs.replace(k, name="v"))), "pool.kv.bases"),
            (with_kv(name="other"), "pool.components"),
            (msgspec.structs.replace(good, components=()), "pool.kv"),
            (outside, "pool.kv.v.bases"),
            (msgspec.structs.replace(good, aux_row_nbytes=8), "pool.aux_row_nbytes"),
            (
                msgspec.structs.replace(good, aux_row_nbytes=8, aux_num_rows=2, aux_base=8),
                "pool.aux_base",
            ),
            (
                msgspec.structs.replace(good, regions=(*good.regions, good.regions[0])),
                "pool.regions",
            ),
        ):
            for pools in ((bad, good), (good, bad)):
                with pytest.raises(LayoutMismatch) as caught:
                    validate(engine(), engine()).route(0, 0, *pools)
                assert caught.value.field == field

    def test_a_new_pool_of_the_same_rank_is_checked_again(self) -> None:
        pairing = validate(engine(), engine())
        pairing.route(0, 0, pool(), pool())
        with pytest.raises(LayoutMismatch):
            pairing.route(0, 0, pool(), msgspec.structs.replace(pool(), regions=()))

    def test_aux_rows_outside_the_buffer(self) -> None:
        one = pool()
        region = MemoryRegion(1 << 30, 64)
        aux = msgspec.structs.replace(
            one,
            regions=(*one.regions, region),
            aux_base=region.address,
            aux_row_nbytes=16,
            aux_num_rows=4,
        )
        found = route((engine(), aux), (engine(), aux))
        runs = found.plan_aux(3, 1)
        assert (int(runs.src[0]) - region.address, int(runs.dst[0]) - region.address) == (48, 16)
        for pair in ((4, 0), (0, -1)):
            with pytest.raises(ConfigError):
                found.plan_aux(*pair)
        assert route((engine(), one), (engine(), one)).plan_aux(0, 0).num_runs == 0


class TestSixtyFourBits:
    """160 buffers of a million slots of 16 heads: offsets far beyond 32 bits."""

    def pool(self, base: int) -> PoolLayout:
        page, num_pages = 16, 1 << 16
        token = 16 * HEAD
        nbytes = num_pages * page * token
        fields = tuple(
            FieldPool(
                name,
                tuple(base + (2 * i + j) * nbytes for i in range(80)),
                page * token,
                token,
                HEAD,
            )
            for j, name in enumerate("kv")
        )
        kv = ComponentPool(
            name="kv",
            layer_ids=tuple(range(80)),
            page_size=page,
            num_pages=num_pages,
            fields=fields,
        )
        return PoolLayout(components=(kv,), regions=(MemoryRegion(base, 160 * nbytes),))

    def test_addresses_and_indices_do_not_wrap(self) -> None:
        kv = KVLayout.mha(num_layers=80, total_kv_heads=32, head_dim=8, dtype="bfloat16")
        swapped = tuple(tuple(range(16 * r, 16 * r + 16))[::-1] for r in range(2))
        layout = EngineLayout.simple(kv, page_size=16, tp_size=2)
        placement = msgspec.structs.replace(
            layout.placements[0], head_maps=(HeadMap("k", swapped), HeadMap("v", swapped))
        )
        reversed_heads = msgspec.structs.replace(layout, placements=(placement,))
        base = 0x7F00_0000_0000
        one = validate(layout, reversed_heads).route(0, 0, self.pool(base), self.pool(1 << 40))
        last = (1 << 16) - 1
        arguments = {"decode_prefix_len": 0, "num_tokens": 16}
        runs = one.plan(TAG, src_page_ids=[last], dst_page_ids=[last - 1], **arguments)
        assert runs.num_runs == 160 * 16 * 16
        end = base + 160 * (1 << 20) * 16 * HEAD
        assert int((runs.src + runs.nbytes).max()) == end
        assert int(runs.src.min()) == base + (1 << 28) - 4096
        lists = PreparedLists(one, 0)
        assert int(lists.src_rows[:, 3].sum()) == 160 * 16 * (1 << 20) > 1 << 31
        indices = lists.plan(TAG, src_page_ids=[last], dst_page_ids=[last - 1], **arguments)
        assert indices.src.dtype == np.int64
        assert int(indices.src.max()) == 160 * 16 * (1 << 20) - 1


class TestBuffers:
    def test_a_reused_buffer_gives_the_same_plan_whatever_was_in_it(self) -> None:
        buffer = RunBuffer()
        same = route((engine(), pool()), (engine(), pool()))
        sliced = route((engine(2), pool(2)), (engine(), pool()))
        for _ in range(2):
            for one, src, dst, num_tokens in (
                (same, [1, 3, 5], [2, 6, 4], 12),
                (same, [1, 2, 5], [2, 3, 4], 11),
                (sliced, [1, 3], [2, 6], 8),
                (same, [1], [2], 4),
                (sliced, [1], [2], 2),
            ):
                fresh = plan(one, src, dst, num_tokens)
                reused = plan(one, src, dst, num_tokens, buffer=buffer)
                for a, b in zip(fresh, reused, strict=True):
                    assert a.tolist() == b.tolist()


class TestCost:
    def test_an_estimate_bounds_the_plan(self) -> None:
        one = route((engine(2), pool(2)), (engine(), pool()))
        estimate = one.estimate(TAG, decode_prefix_len=0, num_tokens=8)
        runs = plan(one, [1, 3], [2, 6], 8)
        assert estimate == Estimate(runs.num_runs, runs.total_nbytes)
        same = route((engine(), pool()), (engine(), pool()))
        assert same.estimate(TAG, decode_prefix_len=0, num_tokens=8).num_descriptors == 8
        assert plan(same, [1, 2], [2, 3], 8).num_runs == 4

    def test_many_small_runs_are_staged_and_few_large_ones_are_not(self) -> None:
        model = CostModel()
        assert model.choose(Estimate(655_360, 655_360 * 512)) == "staged"
        assert model.choose(Estimate(160, 160 * (2 << 20))) == "direct"
        free = CostModel(descriptor_s=0.0)
        assert free.choose(Estimate(655_360, 655_360 * 512)) == "direct"


def test_page_lists_may_be_views_of_any_integer_type() -> None:
    same = (engine(), pool())
    ids = np.array([5, 9, 3, 9, 1, 9], np.int32)[::2]
    runs = plan(route(same, same), ids, np.arange(12, dtype=np.uint16)[2::4][::-1], 12)  # type: ignore[arg-type]
    assert runs.total_nbytes == 12 * 4 * HEAD * 4


class TestKeptAnswers:
    """What a pair of ranks shares of a transfer chunk is kept from one plan to the next."""

    def arguments(self, num_tokens: int, prefix: int) -> dict[str, object]:
        pages = [1, 3, 5, 7][: -(-num_tokens // 4)]
        return {
            "decode_prefix_len": prefix,
            "num_tokens": num_tokens,
            "src_page_ids": pages,
            "dst_page_ids": [2, 9, 4, 6][: len(pages) - prefix // 4],
        }

    @pytest.mark.parametrize("owners", [(0, 1), (0, 1, 1, 0)])
    def test_a_map_that_depends_on_the_length_is_cut_anew_for_each(
        self, owners: tuple[int, ...]
    ) -> None:
        src = msgspec.structs.replace(
            EngineLayout.simple(KV, page_size=4, cp_size=2, chunk_tokens=4),
            token_shard=TokenShard(owners=owners),
        )
        dst = engine(chunk_tokens=4)
        used = validate(src, dst).route(0, 0, pool(), pool())
        for num_tokens in (16, 9, 12, 10, 16):
            fresh = validate(src, dst).route(0, 0, pool(), pool())
            unit = -(-num_tokens // len(owners))
            own = sum(
                len(range(i * unit, min((i + 1) * unit, num_tokens)))
                for i, owner in enumerate(owners)
                if owner == 0
            )
            more = self.arguments(num_tokens, 0)
            more["src_page_ids"] = [1, 3, 5, 7][: -(-own // 4)]
            for got, want in zip(used.plan(TAG, **more), fresh.plan(TAG, **more), strict=True):
                assert got.tolist() == want.tolist()

    def test_an_error_in_a_list_is_found_though_the_chunk_is_known(self) -> None:
        one = route((engine(), pool()), (engine(), pool()))
        arguments = self.arguments(16, 0)
        one.plan(TAG, **arguments)
        with pytest.raises(ConfigError, match="names page 2 twice"):
            one.plan(TAG, **{**arguments, "dst_page_ids": [2, 9, 2, 6]})
        with pytest.raises(ConfigError, match="not known"):
            one.plan(TAG, **{**arguments, "src_page_ids": [1, -1, 5, 7]})

    def test_they_are_bounded_and_what_is_too_large_is_not_kept(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(geometry, "_MAX_KEPT_SEGMENTS", 4)
        pairing = validate(engine(), engine())
        one = pairing.route(0, 0, pool(), pool())
        kept = pairing._geometry._parts_cache
        for num_tokens in (4, 8, 12, 16, 4):
            one.plan(TAG, **self.arguments(num_tokens, 0))
            assert sum(len(cut) for parts in kept.values() for _, cut in parts) <= 4
        monkeypatch.setattr(geometry, "_MAX_KEPT_SEGMENTS", 2)
        one.plan(TAG, **self.arguments(12, 0))
        assert not kept


class TestSharedBytes:
    """A pool in which a byte belongs to two layers or fields would be written twice."""

    @staticmethod
    def of(strides: tuple[int, int, int], k: list[int], v: list[int], num_pages: int) -> PoolLayout:
        first, last = min(k + v), max(k + v) + num_pages * max(strides)
        kv = ComponentPool(
            name="kv",
            layer_ids=(0, 1),
            page_size=4,
            num_pages=num_pages,
            fields=(FieldPool("k", tuple(k), *strides), FieldPool("v", tuple(v), *strides)),
        )
        return PoolLayout(components=(kv,), regions=(MemoryRegion(first, last - first),))

    def test_each_byte_counted_says_the_same(self) -> None:
        rng, found = np.random.default_rng(11), set()
        for _ in range(300):
            num_pages = int(rng.integers(1, 4))
            inner = [(4 * HEAD, HEAD), (HEAD, 4 * HEAD), (8 * HEAD, HEAD)][rng.integers(3)]
            strides = (int(rng.choice([16, 32, 64])) * HEAD, *inner)
            if strides[0] < 4 * inner[0]:
                continue
            at = [int(x) * HEAD // 2 + 4096 for x in rng.choice(200, 4, replace=False)]
            one = np.zeros((num_pages, 4, 4, HEAD), np.int64)
            for axis, (stride, size) in enumerate(zip((*strides, 1), one.shape, strict=True)):
                shape = [-1 if i == axis else 1 for i in range(4)]
                one += (stride * np.arange(size)).reshape(shape)
            taken = np.concatenate([base + one.ravel() for base in at])
            apart = len(np.unique(taken)) == len(taken)
            found.add(apart)
            same = (engine(), self.of(strides, at[:2], at[2:], num_pages))
            if apart:
                route(same, same)
            else:
                with pytest.raises(LayoutMismatch, match="two layers or fields share bytes"):
                    route(same, same)
        assert found == {True, False}

    def test_k_and_v_of_two_widths_in_one_page_or_one_token_are_apart(self) -> None:
        kv = KVLayout.mha(
            num_layers=2, total_kv_heads=4, head_dim=8, v_head_dim=4, dtype="bfloat16"
        )
        layout = EngineLayout.simple(kv, page_size=4)
        for page, token, v_at, v_token in ((384, 64, 256, 32), (384, 96, 64, 96)):
            fields = (
                FieldPool("k", (4096, 4096 + 16 * page), page, token, 16),
                FieldPool("v", (4096 + v_at, 4096 + 16 * page + v_at), page, v_token, 8),
            )
            one = ComponentPool(
                name="kv", layer_ids=(0, 1), page_size=4, num_pages=16, fields=fields
            )
            there = PoolLayout(components=(one,), regions=(MemoryRegion(4096, 32 * page),))
            route((layout, there), (layout, there))
            moved = msgspec.structs.replace(fields[1], bases=(4096 + v_at - 8, 1 << 13))
            bad = msgspec.structs.replace(one, fields=(fields[0], moved))
            bad_pool = msgspec.structs.replace(there, components=(bad,))
            with pytest.raises(LayoutMismatch, match="two layers or fields share bytes"):
                route((layout, there), (layout, bad_pool))

    def test_memory_that_is_no_address_is_named(self) -> None:
        far = msgspec.structs.replace(pool(), regions=(MemoryRegion(1 << 63, 64),))
        with pytest.raises(LayoutMismatch, match=r"pool\.regions.*are no addresses"):
            route((engine(), pool()), (engine(), far))


def test_a_plan_refuses_a_prefix_that_no_request_may_have() -> None:
    one = route((engine(), pool()), (engine(), pool()))
    with pytest.raises(ConfigError, match="decode_prefix_len 3 must be a multiple of 4"):
        plan(one, [1, 2], [3, 4], 8, decode_prefix_len=3)
    for component in (1, -1):
        with pytest.raises(ConfigError, match=f"no component {component}"):
            PreparedLists(one, component)

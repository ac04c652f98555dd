"""Where a page is many runs, a tag is posted as indices into lists that are prepared once."""

from __future__ import annotations

import numpy as np
import pytest

from pdkv.endpoint import Succeeded
from pdkv.endpoint.links import CAPABILITIES, JOINED_NOTIFICATIONS
from pdkv.errors import TransferError
from pdkv.interfaces import BackendLimits
from pdkv.limits import Limits
from pdkv.plan import PreparedLists, Sizes
from support import Engine, World, model_cache, small_layout
from test_endpoint import ask, check, compute, pages_of, serve

NUM_TOKENS = 30  # four grids of 8, of which the last ends inside a page
PAGE_NBYTES = 4 * 6 * 4 * 4  # tokens, heads, head_dim, float32: one field of one layer


@pytest.fixture
def limits() -> Limits:
    return Limits()


class Posts:
    """Bytes of each post of a prefill rank, by what it was made of."""

    def __init__(self, engine: Engine) -> None:
        self.by_index: list[int] = []
        self.num_lists = 0
        backend = engine.backends[0]
        prepare, post = backend.prepare, backend.post_prepared

        def prepared(*arguments: object) -> int:
            self.num_lists += 1
            return prepare(*arguments)  # type: ignore[arg-type]

        def posted(number: int, src: np.ndarray, dst: np.ndarray, note: bytes) -> int | None:
            _, lists = backend._lists[number]
            self.by_index.append(lists.runs(src, dst).total_nbytes)
            return post(number, src, dst, note)

        backend.prepare = prepared  # type: ignore[method-assign]
        backend.post_prepared = posted  # type: ignore[method-assign]


def transfer(world: World, prefill: Engine, decode: Engine, attempt: int = 1) -> None:
    """One request, whose bytes are all in their places and nowhere else."""
    cache = model_cache(prefill.layout, NUM_TOKENS, seed=attempt)
    src, dst = pages_of(NUM_TOKENS, seed=attempt), pages_of(NUM_TOKENS, seed=attempt + 50)
    compute(prefill, cache, src)
    for pool in decode.pools:
        for tensor in pool._tensors.values():
            tensor.zero_()
    ask(decode, prefill, 5, attempt, NUM_TOKENS, dst)
    serve(prefill, 5, NUM_TOKENS, src)
    world.run(steps=60)
    assert len(decode.events(Succeeded)) == attempt
    check(decode, cache, dst, 0, NUM_TOKENS)


def many_layers(**changes: object) -> object:
    return small_layout(num_layers=8, **changes)


def test_each_kv_tag_is_one_post_of_indices_and_the_lists_are_made_once(world: World) -> None:
    prefill, decode = world.engine("p", many_layers()), world.engine("d", many_layers())
    posts = Posts(prefill)
    for attempt in (1, 2, 3):
        transfer(world, prefill, decode, attempt)
    assert posts.num_lists == 1
    assert len(posts.by_index) == 3 * 4
    (sent, *_) = prefill.events(Succeeded)
    assert sent.stats.nbytes == NUM_TOKENS * 8 * 2 * PAGE_NBYTES // 4
    assert sent.stats.num_tags == 4


@pytest.mark.parametrize("sizes", [(2, 1), (1, 2), (2, 3)])
def test_slices_of_heads_land_where_they_belong(world: World, sizes: tuple[int, int]) -> None:
    prefill = world.engine("p", many_layers(tp_size=sizes[0]))
    decode = world.engine("d", many_layers(tp_size=sizes[1]))
    posts = Posts(prefill)
    transfer(world, prefill, decode)
    assert posts.by_index


def test_parts_keep_the_limits_of_a_post(world: World) -> None:
    prefill, decode = world.engine("p", many_layers()), world.engine("d", many_layers())
    posts = Posts(prefill)
    prefill.backends[0].limits = BackendLimits(max_nbytes_per_post=5 * PAGE_NBYTES)
    transfer(world, prefill, decode)
    assert max(posts.by_index) == 5 * PAGE_NBYTES
    assert sum(posts.by_index) == NUM_TOKENS * 8 * 2 * PAGE_NBYTES // 4


def test_a_page_that_no_post_can_hold_goes_as_cut_runs(world: World) -> None:
    prefill, decode = world.engine("p", many_layers()), world.engine("d", many_layers())
    posts = Posts(prefill)
    prefill.backends[0].limits = BackendLimits(max_nbytes_per_post=PAGE_NBYTES // 2)
    transfer(world, prefill, decode)
    # The last tag has half a page, element by element: that fits.
    assert sum(posts.by_index) < 2 * 8 * PAGE_NBYTES


def test_memory_that_has_no_lists_goes_as_runs(world: World) -> None:
    prefill, decode = world.engine("p", many_layers()), world.engine("d", many_layers())

    def refuse(*_: object) -> int:
        raise TransferError("a row spans two regions")

    prefill.backends[0].prepare = refuse  # type: ignore[method-assign]
    transfer(world, prefill, decode)


def test_few_layers_make_no_lists(world: World) -> None:
    prefill, decode = world.engine("p", small_layout()), world.engine("d", small_layout())
    posts = Posts(prefill)
    transfer(world, prefill, decode)
    assert not posts.num_lists


def test_what_a_peer_says_anew_makes_new_lists_and_gives_the_old_back(world: World) -> None:
    prefill, decode = world.engine("p", many_layers()), world.engine("d", many_layers())
    posts = Posts(prefill)
    transfer(world, prefill, decode)
    links = decode.nodes[0].core.links
    links.capabilities = tuple(c for c in CAPABILITIES if c != JOINED_NOTIFICATIONS)
    (peer,) = links.peers
    links._greet(peer, world.now)
    transfer(world, prefill, decode, attempt=2)
    assert posts.num_lists == 2
    assert len(prefill.backends[0]._lists) == 1


def test_sizes_of_descriptors_by_index() -> None:
    rows = np.array([[0, 8, 8, 3], [64, 8, 8, 2], [128, 4, 4, 5]], np.uint64)
    sizes = Sizes(rows)
    assert sizes.of(np.array([4, 0, 2], np.int32)).tolist() == [8]
    assert sizes.of(np.array([9, 5])).tolist() == [4]
    assert sizes.of(np.array([0, 9, 4])).tolist() == [8, 4, 8]
    for outside in ([0, 10], [10], [-1, 2]):
        with pytest.raises(IndexError):
            sizes.of(np.array(outside))


def test_the_lists_of_a_route_have_the_sizes_that_its_plans_move(world: World) -> None:
    prefill, decode = world.engine("p", many_layers()), world.engine("d", many_layers())
    transfer(world, prefill, decode)
    (peer,) = prefill.nodes[0].core.links.peers
    lists = PreparedLists(peer.route, 0)
    index = np.arange(int(lists.src_rows[:, 3].sum()))
    nbytes, counts = lists.src_rows[:, 1], lists.src_rows[:, 3].astype(np.int64)
    np.testing.assert_array_equal(Sizes(lists.src_rows).of(index), np.repeat(nbytes, counts))

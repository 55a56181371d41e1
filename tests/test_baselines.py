"""The baselines: one loop drives all managers, they give the numbers known from the field, and never lie."""

import inspect
import subprocess
import sys
from pathlib import Path

import hypothesis.strategies as st
import pytest
from cache_models import ShadowStorage, StorageBroken
from hypothesis import example, given

from radixkv import DuplicateRequest, OutOfBlocks, PrefixCache, TokenKey, UnknownRequest, baselines
from radixkv.baselines import ALLOCATORS, CacheManager, FlatHashCache, PagedAllocator, SlotAllocator
from radixkv.tokens import block_digest, root_digest

BLOCK_SIZES = [1, 2, 4, 16]


def manager_of(name: str, num_blocks: int, block_size: int, max_len: int = 64, **options):
    """A manager by the name that the command line gives it."""
    if name == "slot":
        return SlotAllocator(num_blocks, block_size, max_len, **options)
    return ALLOCATORS[name](num_blocks, block_size, **options)


def radix_by_blocks(num_blocks: int, block_size: int) -> PrefixCache:
    """A PrefixCache whose hits are whole blocks, as a flat map's are."""
    return PrefixCache(num_blocks, block_size, keep_partial=False, min_copy_tokens=block_size)


def run(manager: CacheManager, request_id, tokens, namespace=None, **ticks):
    """Plays a whole request, prompt only; its hit in tokens."""
    hit = manager.allocate(request_id, tokens, namespace, **ticks).num_cached_tokens
    manager.commit(request_id, len(tokens), **ticks)
    manager.free(request_id, **ticks)
    return hit


def hit(manager: CacheManager, tokens, namespace=None) -> int:
    """Cached tokens of a prompt."""
    return manager.lookup_prefix(tokens, namespace).num_tokens


# ---------------------------------------------------------------- one loop for all


@pytest.mark.parametrize("name", ALLOCATORS)
def test_every_manager_has_the_driving_calls_with_the_same_arguments(name):
    """A driver written against `CacheManager` must run with each; more arguments may follow, with defaults."""
    for call, wanted in vars(CacheManager).items():
        if call.startswith("_"):
            continue
        if isinstance(wanted, property):
            assert hasattr(manager_of(name, 8, 4, 16), call)
            continue
        own = list(inspect.signature(getattr(ALLOCATORS[name], call)).parameters.values())
        known = list(inspect.signature(wanted).parameters.values())
        assert [(p.name, p.kind, p.default) for p in own[: len(known)]] == [(p.name, p.kind, p.default) for p in known]
        assert all(p.default is not p.empty for p in own[len(known) :])


@pytest.mark.parametrize("block_size", BLOCK_SIZES)
@pytest.mark.parametrize("name", ALLOCATORS)
def test_one_loop_drives_every_manager_to_the_end_of_a_workload(name, block_size):
    """Chats that grow, fork and end: each manager serves all of them, and holds nothing for anybody afterwards."""
    storage = ShadowStorage(512 // block_size, block_size)
    manager = manager_of(name, 512 // block_size, block_size, storage=storage)
    hits = 0
    for turn in range(3):
        for chat in range(4):
            prompt = [1, 2, 3, 4, 5, 6, 7, 8, *[chat] * (turn * 9 + 1)]
            allocation = manager.allocate(chat, prompt, "tenant", tick=10 * turn + chat)
            assert 0 <= allocation.num_cached_tokens <= len(prompt) - 1
            hits += allocation.num_cached_tokens
            manager.commit(chat, len(prompt))
            manager.check()
        for chat in range(4):
            manager.fork(chat, f"{chat}'")
            for sibling in (chat, f"{chat}'"):
                for token in range(9):
                    slot = manager.append_token(sibling, token)
                    assert slot // block_size in manager.block_table(sibling)
                    manager.commit(sibling, manager.num_tokens(sibling))
                    manager.check()
        assert len(manager.request_ids) == 8
        assert manager.reset() is False
        for request_id in manager.request_ids:
            manager.free(request_id)
            manager.check()
        assert manager.num_private_blocks == manager.num_protected_blocks == 0
    assert (hits > 0) == (name in {"radix", "hash"})
    assert manager.stats.requests == 12
    assert manager.stats.hit_tokens == hits
    assert manager.reset() is True
    assert manager.num_free_blocks == manager.num_blocks


@pytest.mark.parametrize("name", ALLOCATORS)
def test_a_refused_allocation_says_the_numbers_and_changes_nothing(name):
    """A scheduler waits with a request that does not fit, and relies on nothing having moved (A016)."""
    manager = manager_of(name, 4, 4, 16)
    manager.allocate("a", range(12))
    before = manager.show(), manager.stats.as_dict()
    assert not manager.can_allocate(8)
    with pytest.raises(OutOfBlocks) as caught:
        manager.allocate("b", range(50, 58))
    needed, free = (4, 0) if name == "slot" else (2, 1)
    assert (caught.value.needed, caught.value.free, caught.value.evictable) == (needed, free, 0)
    assert (manager.show(), manager.stats.as_dict()) == before
    manager.check()


@pytest.mark.parametrize("name", ALLOCATORS)
def test_request_ids_are_refused_when_unknown_or_taken_and_can_be_used_again(name):
    """Two requests under one id would share a table (A043)."""
    manager = manager_of(name, 32, 4, 16)
    manager.allocate("x", [1, 2, 3])
    with pytest.raises(DuplicateRequest, match="'x'"):
        manager.allocate("x", [4])
    with pytest.raises(UnknownRequest, match="'y'"):
        manager.free("y")
    manager.free("x")
    with pytest.raises(UnknownRequest, match="'x'"):
        manager.free("x")
    manager.allocate("x", [1, 2, 3])
    manager.check()


@pytest.mark.parametrize("name", ALLOCATORS)
@pytest.mark.parametrize("wrong", [{"num_blocks": 0}, {"block_size": 0}, {"storage": ShadowStorage(9, 4)}])
def test_a_manager_that_cannot_work_is_refused_when_made(name, wrong):
    """A wrong size would show much later, as a wrong slot."""
    options = {"num_blocks": 8, "block_size": 4, "max_len": 16} | wrong
    with pytest.raises(ValueError, match=r"num_blocks|block_size|storage"):
        manager_of(name, options.pop("num_blocks"), options.pop("block_size"), **options)


# ---------------------------------------------------------------- the numbers known from the field


def admitted(manager: CacheManager, num_tokens: int) -> int:
    """How many different requests of so many tokens fit at once."""
    count = 0
    while manager.can_allocate(num_tokens):
        manager.allocate(count, [count] * num_tokens)
        count += 1
    with pytest.raises(OutOfBlocks):
        manager.allocate(count, [count] * num_tokens)
    return count


def test_a_pool_of_65536_tokens_holds_32_slots_of_2048_but_85_block_tables_of_768():
    """Why there are block tables: most of a reserved slot is never used."""
    slots = SlotAllocator(4_096, 16, max_len=2_048)
    paged = PagedAllocator(4_096, 16)
    assert admitted(slots, 768) == 32
    assert admitted(paged, 768) == 85
    assert slots.num_wasted_slots == 32 * (2_048 - 768)
    assert paged.num_wasted_slots == 0
    slots.check()
    paged.check()


@pytest.mark.parametrize(("name", "num_blocks"), [("radix", 214), ("hash", 214), ("paged", 3_350), ("slot", 6_400)])
def test_50_requests_with_a_shared_prompt_of_1024_tokens_need_214_blocks_instead_of_3350(name, num_blocks):
    """Why there is a prefix cache: 64 shared blocks once, and 3 own blocks for each, all 50 running."""
    manager = manager_of(name, 6_400, 16, max_len=2_048)
    for request in range(50):
        prompt = [*range(1_024), *[10_000 + request] * 40]
        manager.allocate(request, prompt)
        manager.commit(request, len(prompt))
    assert len(manager.request_ids) == 50
    assert manager.num_private_blocks + manager.num_cached_blocks == num_blocks
    manager.check()


@pytest.mark.parametrize("name", ["radix", "hash"])
def test_requests_that_computed_the_same_start_at_once_share_it_after_committing(name):
    """All arrived before the first had committed, so the duplicates are given back then (A004)."""
    manager = manager_of(name, 3_350, 16)
    prompts = [[*range(1_024), *[10_000 + request] * 40] for request in range(50)]
    for request, prompt in enumerate(prompts):
        manager.allocate(request, prompt)
    assert manager.num_private_blocks == 3_350
    for request, prompt in enumerate(prompts):
        manager.commit(request, len(prompt))
    assert manager.num_private_blocks + manager.num_cached_blocks == 214
    assert manager.ref_count(manager.block_table(0)[0]) == 51
    manager.check()


def test_wasted_slots_are_less_than_a_block_for_each_block_table_and_most_of_a_short_request_in_a_slot():
    """Internal fragmentation, which is what the two layouts differ in."""
    slots, paged = SlotAllocator(64, 16, max_len=256), PagedAllocator(64, 16)
    for manager in (slots, paged):
        manager.allocate("a", range(20))
        manager.allocate("b", range(32))
    assert slots.num_wasted_slots == 256 - 20 + 256 - 32
    assert paged.num_wasted_slots == 12
    paged.fork("a", "c")
    assert paged.num_wasted_slots == 12, "a shared tail is one block"
    paged.append_token("c", 1)
    assert paged.num_wasted_slots == 12 + 11


# ---------------------------------------------------------------- slots


def test_a_slot_is_one_contiguous_run_reserved_from_the_start():
    """Attention can read it as a view, and no request waits for a block in the middle of its life."""
    slots = SlotAllocator(10, 4, max_len=11)
    assert slots.allocate("a", [1]).num_new_blocks == 3
    table = slots.block_table("a")
    assert table == tuple(range(table[0], table[0] + 3))
    assert [slots.append_token("a", 9) for _ in range(10)] == [table[0] * 4 + offset for offset in range(1, 11)]
    assert slots.block_table("a") == table
    with pytest.raises(ValueError, match="max_len = 11"):
        slots.append_token("a", 9)
    assert slots.num_tokens("a") == 11


def test_slots_never_scatter_however_requests_come_and_go():
    """All runs have one length, so a free block outside the remainder always belongs to a free run."""
    slots = SlotAllocator(10, 4, max_len=12)
    for end in ("abc", "cab", "bca", "ba", "c"):
        for request in "abc":
            if request not in slots.request_ids:
                slots.allocate(request, [1])
        assert slots.num_free_blocks == 1
        for request in end:
            slots.free(request)
            slots.check()


def test_a_slot_refuses_what_can_never_fit():
    """Waiting for room would be waiting for ever (A018)."""
    slots = SlotAllocator(8, 4, max_len=10)
    assert slots.can_allocate(10)
    assert not slots.can_allocate(11)
    with pytest.raises(ValueError, match="11 tokens; allowed: up to max_len = 10"):
        slots.allocate("a", range(11))
    with pytest.raises(ValueError, match="max_len is 33"):
        SlotAllocator(8, 4, max_len=33)
    with pytest.raises(ValueError, match="max_len is 0"):
        SlotAllocator(8, 4, max_len=0)


def test_forking_a_slot_copies_it_and_a_failed_copy_takes_nothing():
    """Nothing can be shared inside a reserved run, so n > 1 pays for each sample at once."""
    storage = ShadowStorage(9, 4)
    slots = SlotAllocator(9, 4, max_len=12, storage=storage)
    slots.allocate("a", range(6))
    storage.broken = True
    with pytest.raises(StorageBroken):
        slots.fork("a", "b")
    assert slots.request_ids == ("a",)
    assert slots.num_free_blocks == 6
    storage.broken = False
    slots.fork("a", "b")
    first, second = slots.block_table("a")[0], slots.block_table("b")[0]
    assert storage.copies == [(first, second, 4), (first + 1, second + 1, 2)]
    assert not set(slots.block_table("a")) & set(slots.block_table("b"))
    slots.fork("b", "c")
    with pytest.raises(OutOfBlocks):
        slots.fork("c", "d")
    slots.check()


# ---------------------------------------------------------------- block tables without sharing


@pytest.mark.parametrize("num_tokens", [4, 8, 9])
def test_a_block_table_grows_by_a_block_only_at_a_boundary(num_tokens):
    """Blocks are ceil(tokens / block_size) at every step (A009)."""
    paged = PagedAllocator(8, 4)
    paged.allocate("a", range(num_tokens))
    for total in range(num_tokens, num_tokens + 10):
        assert len(paged.block_table("a")) == -(-total // 4)
        paged.append_token("a", 7)


def test_forks_of_a_block_table_copy_only_the_block_that_one_of_them_writes():
    """Parent of 20 tokens, then each appends its own (B052)."""
    paged = PagedAllocator(8, 16)
    paged.allocate("parent", range(20))
    full, tail = paged.block_table("parent")
    paged.fork("parent", "child")
    paged.append_token("child", 1)
    copy = paged.block_table("child")[1]
    assert [paged.ref_count(block_id) for block_id in (full, tail, copy)] == [2, 1, 1]
    paged.append_token("parent", 2)
    assert paged.block_table("parent") == (full, tail)
    assert paged.stats.cow_copies == 1
    paged.free("parent")
    paged.free("child")
    assert paged.num_free_blocks == 8


def test_nothing_is_ever_found_without_a_cache():
    """A baseline that shared by accident would flatter itself."""
    for manager in (PagedAllocator(8, 4), SlotAllocator(8, 4, 16)):
        assert [run(manager, "a", range(9)), run(manager, "b", range(9)), hit(manager, range(9))] == [0, 0, 0]
        assert manager.num_cached_blocks == manager.evict(8) == 0


# ---------------------------------------------------------------- the flat hash against the tree

TOKENS = st.lists(st.integers(0, 1), max_size=20)
NAMESPACES = st.sampled_from([None, "", "a", "b", ("a", "b"), ("ab",)])


@pytest.mark.parametrize("block_size", BLOCK_SIZES)
@given(
    requests=st.lists(
        st.tuples(st.integers(0, 30), st.integers(0, 60), TOKENS, NAMESPACES, st.integers(0, 20), st.booleans()),
        max_size=25,
    )
)
def test_tree_and_flat_hash_agree_on_every_hit(block_size, requests):
    """Without pressure both know all that was committed, so that a difference would be a wrong hit in one of them."""
    radix, flat = radix_by_blocks(2_048, block_size), FlatHashCache(2_048, block_size)
    said: list[list[int]] = [[]]
    running = []
    for number, (index, cut, extra, namespace, computed, ends) in enumerate(requests):
        start = said[index % len(said)]
        tokens = start[: cut % (len(start) + 1)] + extra
        found = radix.lookup_prefix(tokens, namespace)
        assert hit(flat, tokens, namespace) == len(found.block_ids) * block_size
        if not tokens:
            continue
        said.append(tokens)
        allocations = [manager.allocate(number, tokens, namespace) for manager in (radix, flat)]
        assert allocations[0] == allocations[1]
        running.append(number)
        for manager in (radix, flat):
            manager.commit(number, max(allocations[0].num_cached_tokens, min(computed, len(tokens))))
            if ends:
                manager.free(running[computed % len(running)])
        if ends:
            running.pop(computed % len(running))
        assert flat.num_cached_blocks == radix.num_cached_blocks
        assert flat.num_private_blocks == radix.num_private_blocks
        assert flat.num_protected_blocks == radix.num_protected_blocks
        assert flat.stats == radix.stats
    flat.check()
    radix.check()


@pytest.mark.parametrize("block_size", BLOCK_SIZES)
@given(
    num_blocks=st.integers(2, 12),
    requests=st.lists(st.tuples(st.integers(0, 30), st.integers(0, 60), TOKENS), max_size=40),
)
def test_tree_and_flat_hash_evict_the_same_blocks_of_requests_that_follow_each_other(block_size, num_blocks, requests):
    """Both give up the oldest first and the end before the start, so a replay hits the same in both."""
    radix, flat = radix_by_blocks(num_blocks, block_size), FlatHashCache(num_blocks, block_size)
    said: list[list[int]] = [[]]
    for tick, (index, cut, extra) in enumerate(requests):
        start = said[index % len(said)]
        tokens = (start[: cut % (len(start) + 1)] + extra)[: num_blocks * block_size]
        if tokens:
            said.append(tokens)
            assert run(flat, tick, tokens, tick=tick) == run(radix, tick, tokens, tick=tick)
            assert flat.stats == radix.stats
    flat.check()


# ---------------------------------------------------------------- what the flat hash finds


@pytest.mark.parametrize("block_size", BLOCK_SIZES)
def test_a_hit_is_whole_blocks_and_leaves_a_token_to_compute(block_size):
    """Without one computed token there is nothing to predict the next from (A001)."""
    for num_tokens in (1, 15, 16, 17, 31, 32, 33):
        flat = FlatHashCache(64, block_size)
        assert run(flat, "a", range(num_tokens)) == 0
        assert hit(flat, range(num_tokens)) == num_tokens // block_size * block_size
        assert run(flat, "b", range(num_tokens)) == (num_tokens - 1) // block_size * block_size
        flat.check()


def test_only_computed_blocks_are_found():
    """A block is allocated before its KV exists; a hit on it then would read garbage (A005)."""
    flat = FlatHashCache(16, 4)
    flat.allocate("a", range(12))
    assert hit(flat, range(12)) == 0
    flat.commit("a", 7)
    assert hit(flat, range(12)) == 4
    flat.free("a")
    assert hit(flat, range(12)) == 4
    assert flat.num_free_blocks == 15


def test_evicted_blocks_are_not_found_again():
    """Their ids hold other tokens by then (A006)."""
    flat = FlatHashCache(4, 4)
    run(flat, "a", [1] * 16)
    run(flat, "b", [2] * 16)
    assert (hit(flat, [1] * 16), hit(flat, [2] * 16)) == (0, 16)
    assert flat.stats.evicted_blocks == 4
    flat.check()


def test_the_end_of_the_oldest_request_goes_first():
    """A start can serve other prompts, an end hardly; and without its start an end could not be found at all."""
    flat = FlatHashCache(8, 4)
    run(flat, "old", [1] * 16)
    run(flat, "new", [2] * 16)
    assert flat.evict(1) == 1
    assert (hit(flat, [1] * 16), hit(flat, [2] * 16)) == (12, 16)
    run(flat, "again", [1] * 9)
    assert flat.evict(5) == 5
    assert (hit(flat, [1] * 16), hit(flat, [2] * 16)) == (8, 0), "its start was used later, so the other one went"
    assert flat.evict(100) == 2
    flat.check()


def test_order_of_use_is_by_tick_and_not_by_the_order_of_calls():
    """A replay may end requests in another order than they were used."""
    flat = FlatHashCache(8, 4)
    run(flat, "late", [1] * 4, tick=20)
    run(flat, "early", [2] * 4, tick=10)
    flat.evict(1)
    assert (hit(flat, [1] * 4), hit(flat, [2] * 4)) == (4, 0)


def test_a_late_end_with_an_early_tick_makes_nothing_older():
    """The latest use counts, whether it was by others or by the request that ends."""
    for use in ("others", "own"):
        flat = FlatHashCache(8, 4)
        flat.allocate("a", [1] * 5, tick=1)
        if use == "own":
            flat.commit("a", 4, tick=30)
        else:
            flat.commit("a", 4, tick=1)
        if use == "others":
            run(flat, "b", [1] * 5, tick=30)
        run(flat, "between", [2] * 4, tick=20)
        flat.free("a", tick=3)
        flat.evict(1)
        assert (hit(flat, [1] * 4), hit(flat, [2] * 4)) == (4, 0), use
        flat.check()


def test_forks_hold_the_blocks_that_one_of_them_committed():
    """They read the same blocks, so the end of the one that committed must not make them evictable."""
    for manager in (FlatHashCache(8, 4), radix_by_blocks(8, 4)):
        manager.allocate("a", range(10))
        manager.fork("a", "b")
        manager.commit("a", 8)
        manager.check()
        with pytest.raises(ValueError, match="8 were computed before"):
            manager.commit("b", 4)
        manager.free("a")
        assert (manager.num_protected_blocks, manager.num_evictable_blocks, manager.num_private_blocks) == (2, 0, 1)
        assert manager.evict(8) == 0
        manager.free("b")
        assert (manager.num_evictable_blocks, manager.num_free_blocks) == (2, 6)
        manager.check()


def test_a_fork_that_ended_holds_nothing_that_is_committed_later():
    """A table that is gone can never let go again, so its blocks would be protected for ever."""
    for manager in (FlatHashCache(8, 4), radix_by_blocks(8, 4)):
        manager.allocate("a", range(10))
        manager.fork("a", "b")
        manager.free("b")
        manager.commit("a", 8)
        manager.check()
        manager.free("a")
        assert manager.num_protected_blocks == 0


def test_looking_changes_no_order():
    """A probe of what is cached must not keep it cached (C107)."""
    flat = FlatHashCache(8, 4)
    run(flat, "a", [1] * 4)
    run(flat, "b", [2] * 4)
    for _ in range(3):
        hit(flat, [1] * 4)
    flat.evict(1)
    assert (hit(flat, [1] * 4), hit(flat, [2] * 4)) == (0, 4)


def test_what_a_request_hits_is_no_room_for_it():
    """12 blocks: 6 cached in one chain, 2 in use, 4 free; 11 or 9 blocks are wanted, 4 of them hits (A016)."""
    flat = FlatHashCache(12, 4)
    run(flat, "chain", range(24))
    flat.allocate("runs", range(100, 108))
    before = flat.show(), flat.stats.as_dict()
    with pytest.raises(OutOfBlocks) as caught:
        flat.allocate("too long", [*range(16), *range(200, 228)])
    assert (caught.value.needed, caught.value.free, caught.value.evictable) == (7, 4, 2)
    assert (flat.show(), flat.stats.as_dict()) == before
    assert flat.allocate("fits", [*range(16), *range(200, 220)]).num_cached_tokens == 16
    assert hit(flat, range(24)) == 20
    assert flat.stats.evicted_blocks == 1
    flat.check()


def test_a_copy_on_write_keeps_the_cached_block_and_every_one_behind_it_in_reach():
    """A request that rewrites a shared block gets a copy; that the original is still held keeps the chain whole."""
    storage = ShadowStorage(4, 4)
    flat = FlatHashCache(4, 4, storage=storage)
    flat.allocate("a", range(12))
    flat.commit("a", 12)
    original = flat.block_table("a")
    copy = flat.write("a", 1)
    assert flat.block_table("a") == (original[0], copy, original[2])
    assert storage.copies == [(original[1], copy, 4)]
    assert (flat.ref_count(original[1]), flat.ref_count(copy), flat.num_evictable_blocks) == (1, 1, 0)
    flat.check()
    flat.free("a")
    assert (hit(flat, range(12)), flat.num_free_blocks) == (12, 1)
    flat.check()


# ---------------------------------------------------------------- the chain of digests

LOOK_ALIKES = [
    ([1, 2, 3, 4], [4, 3, 2, 1]),
    ([1, 2, 3, 4], [2, 1, 4, 3]),
    ([1, 1, 2, 2], [1, 2, 2, 1]),
    ([1, 2, 3, 4], [1, 2, 3, 4 + 256]),
    ([1, 2, 3, 4], [1, 2, 3 + 65_536, 4]),
    ([0, 0, 0, 0], [2**31 - 1, 0, 0, 0]),
    ([0, 0, 0, 1], [0, 0, 1, 0]),
    ([0, 0, 0, 0], [0, 0, 0, 2**32 - 1]),
]


@pytest.mark.parametrize(("one", "other"), LOOK_ALIKES)
@pytest.mark.parametrize("make", [FlatHashCache, radix_by_blocks])
def test_blocks_that_look_alike_miss_each_other(make, one, other):
    """Order, multiset, and ids that agree in their low bytes must not be confused (A032)."""
    cache = make(8, 4)
    run(cache, "a", one)
    assert cache.lookup_prefix(one).block_ids != ()
    assert cache.lookup_prefix(other).block_ids == ()
    run(cache, "b", other)
    assert cache.num_cached_blocks == 2


@given(
    before=st.lists(st.integers(0, 2**32 - 1), min_size=4, max_size=4),
    other=st.lists(st.integers(0, 2**32 - 1), min_size=4, max_size=4),
    block=st.lists(st.integers(0, 2**32 - 1), min_size=4, max_size=4),
)
@example(before=[0] * 4, other=[0, 0, 0, 1], block=[0] * 4)
def test_equal_tokens_after_different_starts_miss_each_other(before, other, block):
    """The KV of a token depends on all tokens before it, so its digest must too."""
    flat = FlatHashCache(8, 4)
    run(flat, "a", before + block)
    assert hit(flat, before + block) == 8
    assert hit(flat, other + block) == (8 if other == before else 0)
    assert hit(flat, block + before) == (8 if block == before else 4 if block == before else 0)


def test_namespaces_never_share():
    """Position and spelling count; the missing, None and empty one are the same (B080, B082, A030)."""
    names = [None, " ", "a", "b", ("a", "b"), ("b", "a"), ("ab",), ("a", ""), ("", "a"), ("1:a",)]
    flat = FlatHashCache(64, 4)
    for number, name in enumerate(names):
        assert hit(flat, range(4), name) == 0
        run(flat, number, range(4), name)
        assert hit(flat, range(4), name) == 4
        assert flat.num_cached_blocks == number + 1
    assert hit(flat, range(4), "") == hit(flat, range(4)) == 4
    with pytest.raises(TypeError, match="namespace"):
        flat.lookup_prefix(range(4), 0)
    flat.check()


def test_digests_are_the_same_in_every_process():
    """They may name files and cross the network, so the seed of Python's own hash must not matter (A046)."""
    program = (
        "from radixkv.baselines import FlatHashCache\n"
        "flat = FlatHashCache(8, 4)\n"
        "flat.allocate('a', range(8), ('salt', 'x')); flat.commit('a', 8)\n"
        "print(*(digest.hex() for digest in flat._by_digest))"
    )
    printed = set()
    for seed in ("0", "1", "random"):
        environment = {"PYTHONHASHSEED": seed, "PYTHONPATH": str(Path(baselines.__file__).parents[1])}
        ran = subprocess.run(
            [sys.executable, "-c", program], capture_output=True, text=True, env=environment, check=True
        )
        printed.add(ran.stdout.strip())
    first = block_digest(root_digest(("salt", "x")), TokenKey(range(4)).data)
    second = block_digest(first, TokenKey(range(4, 8)).data)
    assert printed == {f"{first.hex()} {second.hex()}"}


# ---------------------------------------------------------------- digests that collide


@pytest.mark.parametrize("num_digests", [1, 2, 5])
@given(
    requests=st.lists(st.tuples(st.integers(0, 30), st.integers(0, 60), TOKENS, NAMESPACES, st.booleans()), max_size=25)
)
def test_no_collision_ever_gives_a_block_of_other_tokens(num_digests, requests):
    """With a hash of 1, 2 or 5 values nearly all digests collide; the tokens are compared, so hits only get fewer."""

    def weak_digest(previous: bytes, tokens: bytes) -> bytes:
        return bytes([sum(previous + tokens) % num_digests])

    storage = ShadowStorage(8, 2)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(baselines, "block_digest", weak_digest)
        flat = FlatHashCache(8, 2, storage=storage)
        said: list[list[int]] = [[]]
        for number, (index, cut, extra, namespace, ends) in enumerate(requests):
            start = said[index % len(said)]
            tokens = (start[: cut % (len(start) + 1)] + extra)[:16]
            try:
                cached = flat.allocate(number, tokens, namespace).num_cached_tokens if tokens else 0
            except OutOfBlocks:
                for request_id in flat.request_ids:
                    flat.free(request_id)
                continue
            if not tokens:
                continue
            said.append(tokens)
            within = TokenKey([], namespace).namespace
            slots = [block_id * 2 + offset for block_id in flat.block_table(number) for offset in (0, 1)]
            values = [(within, tuple(tokens[: position + 1])) for position in range(len(tokens))]
            assert [storage.slots[slot] for slot in slots[:cached]] == values[:cached]
            for slot, value in zip(slots[cached:], values[cached:], strict=False):
                storage.slots[slot] = value
            flat.commit(number, len(tokens))
            flat.check()
            if ends:
                flat.free(number)
                flat.check()


def test_a_block_whose_digest_is_taken_stays_private_until_its_request_ends(monkeypatch):
    """Keeping the older of two colliding blocks changes nothing for those who read it."""
    monkeypatch.setattr(baselines, "block_digest", lambda previous, tokens: b"same")
    flat = FlatHashCache(8, 4)
    flat.allocate("a", [1] * 4)
    flat.allocate("b", [2] * 8)
    flat.commit("a", 4)
    flat.commit("b", 8)
    assert (flat.num_cached_blocks, flat.num_private_blocks) == (1, 2)
    assert (hit(flat, [1] * 4), hit(flat, [2] * 8)) == (4, 0)
    flat.check()
    flat.free("b")
    assert flat.num_free_blocks == 7


# ---------------------------------------------------------------- the recount


DAMAGE = {
    "a reader too many": lambda flat: setattr(flat._tables["a"].path[0], "num_readers", 2),
    "other tokens": lambda flat: setattr(flat._tables["a"].path[0], "tokens", bytes(16)),
    "a lost digest": lambda flat: flat._by_digest.pop(flat._tables["a"].path[0].digest),
    "a block that is never evicted": lambda flat: flat._order.popitem(),
    "a block under a wrong tick": lambda flat: flat._order.setdefault(0, flat._order.popitem()[1]),
    "a released block in use": lambda flat: flat.pool.release([flat.block_table("a")[-1]]),
    "a block named twice": lambda flat: flat._tables["a"].block_ids.__setitem__(1, flat._tables["a"].block_ids[0]),
    "a wrong count": lambda flat: setattr(flat, "_num_evictable", 1),
}


@pytest.mark.parametrize("damage", DAMAGE.values(), ids=DAMAGE)
def test_the_recount_of_the_flat_hash_sees_damage(damage):
    """A recount that agrees with everything would make every other test blind."""
    flat = FlatHashCache(8, 4)
    run(flat, "before", [5] * 8)
    flat.allocate("a", range(9))
    flat.commit("a", 9)
    flat.check()
    damage(flat)
    with pytest.raises(AssertionError):
        flat.check()


def test_the_recount_of_slots_sees_a_run_that_is_not_contiguous():
    """Attention would read another request's blocks through the view."""
    slots = SlotAllocator(8, 4, max_len=12)
    slots.allocate("a", [1])
    slots._tables["a"].block_ids.reverse()
    with pytest.raises(AssertionError, match="not contiguous"):
        slots.check()


def test_show_names_requests_and_cached_blocks_in_text_where_there_is_a_tokenizer():
    """A person looks at it when something is wrong."""
    flat = FlatHashCache(64, 4)
    for number in range(5):
        flat.allocate(number, [number] * 5)
        flat.commit(number, 5)
    shown = flat.show(decode=lambda ids: "".join(chr(65 + token) for token in ids), most=2)
    assert "'AAAA" in shown
    assert "more requests" in shown
    assert "more cached blocks" in shown
    assert "request 0" in flat.show()
    assert repr(flat) == "FlatHashCache(num_blocks=64, block_size=4, 54 free, 5 cached, 5 private)"

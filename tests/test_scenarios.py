"""Public bug reports about prefix caches, restated for this one; the ids are those of the project's list of scenarios.

A driver that computes is played by `compute` and `run`: they write into each slot the tokens up to its own.
"""

import gc
import sys
from array import array

import pytest
from cache_models import (
    ShadowStorage,
    assert_holds_its_tokens,
    assert_tree_holds_its_tokens,
    compute,
    resident,
    run,
    state,
)
from sortedcontainers import SortedList

from radixkv import DuplicateRequest, OutOfBlocks, PrefixCache, TokenKey, UnknownRequest
from radixkv.eviction import policy_of
from radixkv.node import Use
from radixkv.tokens import pack
from radixkv.tree import RadixTree

BLOCK_SIZES = [1, 4, 16]


def shadowed(num_blocks, block_size, **options):
    """A cache whose slots remember what was written to them."""
    return PrefixCache(num_blocks, block_size, storage=ShadowStorage(num_blocks, block_size), **options)


def compute_all(cache, request_id):
    """The forward pass over all tokens that are not computed yet, and its commit."""
    for _ in compute(cache, request_id):
        pass
    cache.commit(request_id, cache.num_tokens(request_id))


def generate(cache, request_id, new_tokens):
    """Prefill, then one step for each token after the first: the last sampled token is never computed."""
    compute_all(cache, request_id)
    for token_id in new_tokens[:-1]:
        cache.append_token(request_id, token_id)
        compute_all(cache, request_id)


def assert_idle(cache):
    """Nothing runs, and every block is free or evictable."""
    cache.check()
    assert cache.request_ids == ()
    assert cache.num_private_blocks == cache.num_protected_blocks == 0
    assert cache.num_free_blocks + cache.num_evictable_blocks == cache.num_blocks


# ---------------------------------------------------------------- boundaries


@pytest.mark.parametrize("num_tokens", [1, 15, 16, 17, 31, 32, 33])
def test_a_prompt_sent_again_hits_all_but_its_last_token(num_tokens):
    """A001: with the whole prompt cached there is still one token to compute, and no shared block is written for it."""
    cache = shadowed(8, 16)
    prompt = list(range(num_tokens))
    assert run(cache, "first", prompt) == 0
    kept = list(cache.storage.slots)
    allocation = cache.allocate("second", prompt)
    assert allocation.num_cached_tokens == num_tokens - 1
    assert allocation.num_shared_blocks == (num_tokens - 1) // 16
    compute_all(cache, "second")
    cached_slots = [b * 16 + i for b, _ in resident(cache.tree).values() for i in range(16)]
    assert all(cache.storage.slots[slot] == kept[slot] for slot in cached_slots if kept[slot] is not None)
    assert_holds_its_tokens(cache, "second")
    cache.free("second")
    assert_tree_holds_its_tokens(cache)
    assert_idle(cache)


@pytest.mark.parametrize("keep_partial", [True, False])
@pytest.mark.parametrize("num_new_tokens", [1, 2, 11, 12, 16, 17])
@pytest.mark.parametrize("block_size", BLOCK_SIZES)
def test_a_finished_request_leaves_exactly_what_it_computed(block_size, num_new_tokens, keep_partial):
    """A002: the last sampled token never had keys and values. Without partial leaves whole blocks stay, no more."""
    cache = shadowed(64, block_size, keep_partial=keep_partial)
    cache.allocate("a", range(5))
    generate(cache, "a", range(100, 100 + num_new_tokens))
    cache.free("a")
    num_computed = 5 + num_new_tokens - 1
    stored = num_computed if keep_partial else num_computed // block_size * block_size
    said = [*range(5), *range(100, 100 + num_new_tokens)]
    assert cache.lookup_prefix(said).num_tokens == stored
    assert cache.num_cached_blocks == -(-stored // block_size)
    assert_tree_holds_its_tokens(cache)
    assert_idle(cache)


@pytest.mark.parametrize("num_tokens", [4, 8, 9])
def test_a_new_block_is_taken_only_when_its_first_token_comes(num_tokens):
    """A009: an allocator that looks one token ahead wastes a block for each request at a boundary."""
    cache = PrefixCache(num_blocks=8, block_size=4)
    cache.allocate("a", range(num_tokens))
    for length in range(num_tokens, 14):
        table = cache.block_table("a")
        assert len(table) == -(-length // 4) == cache.num_private_blocks
        assert cache.num_tokens("a") == length
        slot = cache.append_token("a", 50)
        assert slot == cache.block_table("a")[-1] * 4 + length % 4
        assert cache.block_table("a")[: len(table)] == table


@pytest.mark.parametrize("num_tokens", [1, 15, 16, 17, 31])
def test_inserts_of_less_than_a_block_store_nothing_in_full_blocks(num_tokens):
    """A010: 0 or 16 tokens in full blocks; no empty edge, and a match of any length is an answer, not a crash."""
    cache = PrefixCache(num_blocks=8, block_size=16, keep_partial=False)
    assert cache.lookup_prefix([]).num_tokens == 0
    run(cache, "a", range(num_tokens))
    assert cache.num_cached_blocks * 16 == num_tokens // 16 * 16
    for length in range(35):
        assert cache.lookup_prefix(range(length)).num_tokens == min(length, num_tokens // 16 * 16)
    assert all(node.label or node.parent is None for node in cache.tree.nodes())
    assert_idle(cache)


def test_a_tree_takes_an_insert_of_nothing():
    """A010, for zero tokens: no root, no child with an empty key, no count."""
    tree = RadixTree(16, policy_of("lru", 16))
    inserted = tree.insert(TokenKey([]), array("I"), 1)
    assert len(inserted.blocks) == inserted.num_existing == 0
    assert list(tree.nodes()) == []
    tree.check()


@pytest.mark.parametrize("block_size", [1, 16])
def test_the_second_turn_hits_the_generated_tokens_of_the_first(block_size):
    """A013: 149 of 150, since the last sampled token was never computed; the prompt alone would give 100 or 96."""
    cache = shadowed(300, block_size)
    prompt, reply = list(range(100)), list(range(1000, 1050))
    cache.allocate("turn 1", prompt)
    generate(cache, "turn 1", reply)
    cache.free("turn 1")
    allocation = cache.allocate("turn 2", prompt + reply + list(range(50)))
    assert allocation.num_cached_tokens == 149
    assert_holds_its_tokens(cache, "turn 2")
    in_blocks = PrefixCache(300, block_size, keep_partial=False)
    run(in_blocks, "turn 1", prompt + reply[:-1])
    assert in_blocks.allocate("turn 2", prompt + reply).num_cached_tokens == 149 // block_size * block_size


# ---------------------------------------------------------------- accounting


def test_splitting_a_locked_node_keeps_the_counts_of_protected_and_evictable():
    """A003: the two halves of a split under a lock are protected, the new branch is not."""
    tree = RadixTree(16, policy_of("lru", 16))
    tree.insert(TokenKey(range(1, 33)), array("I", [0, 1]), 1)
    node = tree.lock((), tree.match(TokenKey(range(1, 33))))
    assert (tree.num_protected * 16, tree.num_evictable * 16) == (32, 0)
    tree.insert(TokenKey([*range(1, 17), *range(99, 115)]), array("I", [2, 3]), 2)
    assert (tree.num_protected * 16, tree.num_evictable * 16) == (32, 16)
    tree.check()
    tree.unlock_node(node)
    assert (tree.num_protected * 16, tree.num_evictable * 16) == (0, 48)
    tree.check()


def test_a_request_that_does_not_fit_waits_and_what_it_hits_is_no_room_for_it():
    """A016: counting its own hit as evictable admits a request, evicts its prefix under it, or fails half-way."""
    cache = shadowed(12, 1)
    run(cache, "chain A", range(6))
    cache.allocate("running", [50, 51])
    assert (cache.num_evictable_blocks, cache.num_private_blocks, cache.num_free_blocks) == (6, 2, 4)
    before = state(cache)
    with pytest.raises(OutOfBlocks) as refusal:
        cache.allocate("new", [0, 1, 2, 3, *range(60, 67)])
    assert (refusal.value.needed, refusal.value.free, refusal.value.evictable) == (7, 4, 2)
    assert state(cache) == before
    first_four = cache.lookup_prefix([0, 1, 2, 3]).block_ids
    allocation = cache.allocate("new", [0, 1, 2, 3, *range(60, 65)])
    assert (allocation.num_shared_blocks, allocation.num_new_blocks) == (4, 5)
    assert cache.block_table("new")[:4] == first_four
    assert cache.stats.evicted_blocks == 1
    assert cache.lookup_prefix(range(6)).num_tokens == 5, "only as much of the tail as was missing"
    cache.check()


def test_locking_and_unlocking_leaves_all_counts_as_before():
    """A014: while a handle is held nothing on its path is evicted; afterwards everything is."""
    tree = RadixTree(16, policy_of("lru", 16))
    tree.insert(TokenKey(range(16)), array("I", [0]), 1)
    tree.insert(TokenKey(range(32)), array("I", [0, 1]), 2)
    counts = (tree.num_blocks, tree.num_protected, tree.num_evictable)
    node = tree.lock((), tree.match(TokenKey(range(32))))
    assert len(tree.evict(100)) == 0
    assert len(tree.match(TokenKey(range(32))).blocks) == 2
    tree.unlock_node(node)
    assert (tree.num_blocks, tree.num_protected, tree.num_evictable) == counts
    assert len(tree.evict(100)) * 16 == 32
    tree.check()


def test_a_request_counts_once_however_often_it_was_refused():
    """A040, the cache's part: waiting for blocks is no query, and hits are counted when they are used."""
    cache = PrefixCache(num_blocks=4, block_size=16)
    run(cache, "before", range(32))
    cache.allocate("running", range(100, 132))
    queries = cache.stats.as_dict()
    for _ in range(50):
        with pytest.raises(OutOfBlocks):
            cache.allocate("waits", range(49))
    assert cache.stats.as_dict() == queries
    cache.free("running")
    cache.allocate("waits", range(49))
    now = cache.stats.as_dict()
    assert now["requests"] - queries["requests"] == 1
    assert now["prompt_tokens"] - queries["prompt_tokens"] == 49
    assert now["hit_tokens"] - queries["hit_tokens"] == 32


# ---------------------------------------------------------------- whose block is it


@pytest.mark.parametrize("block_size", BLOCK_SIZES)
def test_two_cold_requests_with_the_same_prompt_end_up_on_the_same_blocks(block_size):
    """A004: the second one's duplicates are freed only when its table names the tree's blocks instead."""
    cache = shadowed(200, block_size)
    prompt = list(range(48))
    cache.allocate("a", prompt)
    assert cache.allocate("b", prompt).num_cached_tokens == 0
    compute_all(cache, "a")
    compute_all(cache, "b")
    assert cache.block_table("a") == cache.block_table("b")
    assert [cache.ref_count(block_id) for block_id in cache.block_table("b")] == [3] * (48 // block_size)
    taken = cache.num_free_blocks - 20 // block_size - 1
    cache.allocate("takes what is free", range(1000, 1000 + taken * block_size))
    compute_all(cache, "takes what is free")
    for token_id in range(500, 520):
        cache.append_token("b", token_id)
        compute_all(cache, "b")
        cache.check()
        for request_id in cache.request_ids:
            assert_holds_its_tokens(cache, request_id)


@pytest.mark.parametrize("abort_first", [False, True])
def test_blocks_are_found_only_after_they_were_computed(abort_first):
    """A005: eight equal prompts admitted in one step share nothing yet; one aborted before its pass leaves nothing."""
    cache = shadowed(64, 16)
    prompt = list(range(40))
    for request_id in range(8):
        assert cache.allocate(request_id, prompt).num_cached_tokens == 0
        assert cache.lookup_prefix(prompt).num_tokens == 0
    if abort_first:
        cache.free(0)
        assert cache.lookup_prefix(prompt).num_tokens == 0
        assert_tree_holds_its_tokens(cache)
    for request_id in cache.request_ids:
        compute_all(cache, request_id)
        assert_holds_its_tokens(cache, request_id)
    assert cache.num_cached_blocks == 2, "the same two blocks, once"
    assert cache.allocate("later", prompt).num_cached_tokens == 32
    for request_id in cache.request_ids:
        cache.free(request_id)
    assert cache.lookup_prefix(prompt).num_tokens == 40
    assert_tree_holds_its_tokens(cache)
    assert_idle(cache)


def test_a_recycled_block_is_not_found_under_its_old_tokens():
    """A006: an index that keeps the old entry serves B's keys and values to A."""
    cache = shadowed(4, 4)
    a, b = list(range(16)), list(range(100, 116))
    run(cache, "a", a)
    run(cache, "b", b)
    assert cache.lookup_prefix(a).num_tokens == 0
    assert len(cache.lookup_prefix(b).block_ids) == 4
    assert len(resident(cache.tree)) == cache.num_cached_blocks == 4
    assert_tree_holds_its_tokens(cache)


@pytest.mark.parametrize("stop", ["allocated", "half computed", "computed", "grown", "forked"])
@pytest.mark.parametrize("block_size", BLOCK_SIZES)
def test_a_request_can_be_aborted_at_any_point(block_size, stop):
    """A007: its locks and private blocks go, what it computed may stay, and another request with its hit is safe."""
    cache = shadowed(80, block_size)
    run(cache, "before", range(20))
    cache.allocate("other", range(21))
    cache.allocate("a", range(40))
    if stop != "allocated":
        for position in compute(cache, "a", 40 if stop != "half computed" else 30):
            cache.commit("a", position + 1)
    if stop in ("grown", "forked"):
        cache.append_token("a", 7)
    if stop == "forked":
        cache.fork("a", "b")
        cache.append_token("b", 8)
        cache.free("b")
    cache.free("a")
    cache.check()
    for call in (cache.free, cache.block_table):
        with pytest.raises(UnknownRequest, match="'a'"):
            call("a")
    compute_all(cache, "other")
    assert_holds_its_tokens(cache, "other")
    cache.free("other")
    assert_tree_holds_its_tokens(cache)
    assert_idle(cache)


def test_an_id_is_refused_while_it_runs_and_free_again_afterwards():
    """A043: the first one is not disturbed; tokens and blocks of two requests under one id would mix."""
    cache = PrefixCache(num_blocks=4, block_size=4)
    cache.allocate("x", [1, 2])
    before = state(cache)
    with pytest.raises(DuplicateRequest, match="'x' is running already"):
        cache.allocate("x", [3])
    assert state(cache) == before
    cache.free("x")
    assert cache.allocate("x", [3]).num_cached_tokens == 0


def test_a_block_is_freed_once():
    """B079: the second free is refused and hands nothing out twice, and a foreign id frees nothing."""
    cache = PrefixCache(num_blocks=6, block_size=2)
    cache.allocate("a", range(6))
    assert [cache.ref_count(block_id) for block_id in cache.block_table("a")] == [1, 1, 1]
    cache.free("a")
    for wrong in ("a", "never there", 7, None):
        with pytest.raises(UnknownRequest, match=repr(wrong)):
            cache.free(wrong)
    tables = [cache.allocate(i, [100 + i, 0]) and cache.block_table(i) for i in range(6)]
    assert sorted(block_id for table in tables for block_id in table) == list(range(6))
    assert cache.num_free_blocks == 0


@pytest.mark.parametrize("parent_first", [True, False])
@pytest.mark.parametrize("computed", [True, False], ids=["computed parent", "uncomputed parent"])
def test_forks_copy_the_shared_tail_when_they_part(parent_first, computed):
    """B052: block 1 stays shared, the tail is copied by whoever writes first, and each branch is its own."""
    cache = shadowed(16, 16)
    cache.allocate("parent", range(20))
    if computed:
        compute_all(cache, "parent")
    cache.fork("parent", "child")
    first, tail = cache.block_table("parent")
    assert cache.append_token("child", 500) // 16 not in (first, tail)
    copy = cache.block_table("child")[1]
    in_tree = int(computed)
    assert [cache.ref_count(block_id) for block_id in (first, tail, copy)] == [2 + in_tree, 1, 1]
    if computed:
        assert cache.storage.block(copy)[:4] == cache.storage.block(tail)[:4] != [None] * 4
    cache.append_token("parent", 600)
    assert cache.block_table("parent") == (first, tail), "the last owner of the tail writes in place"
    for step in range(1, 20):
        for request_id, token_id in (("parent", 600 + step), ("child", 500 + step)):
            compute_all(cache, request_id)
            cache.append_token(request_id, token_id)
            cache.check()
    for request_id in ("parent", "child"):
        compute_all(cache, request_id)
        assert_holds_its_tokens(cache, request_id)
    assert cache.block_table("parent")[0] == cache.block_table("child")[0]
    order = ["parent", "child"] if parent_first else ["child", "parent"]
    cache.free(order[0])
    assert_holds_its_tokens(cache, order[1])
    cache.free(order[1])
    assert cache.lookup_prefix([*range(20), *range(600, 620)]).num_tokens == 40
    assert cache.lookup_prefix([*range(20), *range(500, 520)]).num_tokens == 40
    assert_tree_holds_its_tokens(cache)
    assert_idle(cache)
    assert cache.reset()
    assert cache.num_free_blocks == 16


def test_a_handle_given_back_twice_or_after_a_reset_changes_nobody_elses_protection():
    """B065: request ids are the handles. A second free is an error; no reset happens under a running request."""
    cache = PrefixCache(num_blocks=8, block_size=2)
    run(cache, "before", range(8))
    cache.allocate("a", range(8))
    cache.allocate("b", range(8))
    cache.free("a")
    protected = cache.num_protected_blocks
    with pytest.raises(UnknownRequest):
        cache.free("a")
    assert not cache.reset()
    assert cache.num_protected_blocks == protected == 3
    cache.allocate("c", [0, 1, 2, 3, 9])  # splits the node that "b" holds
    cache.free("b")
    assert cache.num_protected_blocks == 2
    cache.free("c")
    assert_idle(cache)


# ---------------------------------------------------------------- what keeps apart


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ([5] * 4, [5 + 256] * 4),
        ([0] * 4, [256] * 4),
        ([5] * 4, [5 + 65_536] * 4),
        ([2**31 - 1] * 4, [0] * 4),
        ([2**32 - 1] * 4, [2**31 - 1] * 4),
        ([1, 2, 3, 4], [4, 3, 2, 1]),
        ([1, 1, 2, 2], [2, 2, 1, 1]),
        ([1, 256, 0, 0], [1, 0, 256, 0]),
    ],
)
@pytest.mark.parametrize("block_size", [1, 2, 4])
def test_sequences_that_a_weak_hash_confuses_miss_each_other(block_size, one, other):
    """A032: ids that agree in their low bits, and the same tokens in another order."""
    cache = PrefixCache(num_blocks=16, block_size=block_size)
    run(cache, "one", one)
    same = next(i for i in range(5) if i == 4 or one[i] != other[i])
    assert cache.lookup_prefix(other).num_tokens == same
    run(cache, "other", other)
    assert cache.lookup_prefix(one).num_tokens == cache.lookup_prefix(other).num_tokens == 4
    cache.check()


def test_salt_adapter_both_and_neither_are_four_namespaces():
    """B080: "X" given as a salt is not "X" given as an adapter."""
    cache = shadowed(32, 4)
    prompt = list(range(12))
    four = [None, ("X", ""), ("", "X"), ("X", "X")]
    for number, namespace in enumerate(four):
        assert run(cache, number, prompt, namespace) == 0
    for number, namespace in enumerate(four):
        assert run(cache, number, prompt, namespace) == 11
    assert_tree_holds_its_tokens(cache)


def test_no_salt_is_the_empty_salt_and_a_number_is_refused():
    """B082: None, '' and missing are the same; ' ' is another; 0 is refused and admits nothing."""
    cache = PrefixCache(num_blocks=8, block_size=4)
    run(cache, "missing", range(8))
    for namespace in (None, "", ()):
        assert cache.lookup_prefix(range(8), namespace).num_tokens == 8
    assert cache.lookup_prefix(range(8), " ").num_tokens == 0
    for call in (cache.lookup_prefix, lambda tokens, namespace: cache.allocate("a", tokens, namespace)):
        with pytest.raises(TypeError, match="namespace must be None, a string or a tuple of strings, not 0"):
            call(range(8), 0)
    assert cache.request_ids == ()


# ---------------------------------------------------------------- eviction


def test_two_hundred_distinct_requests_pass_through_a_small_pool():
    """A011: nothing private remains after any of them, and the next one is always admitted."""
    cache = shadowed(32, 4)
    for number in range(201):
        assert run(cache, number, range(number * 100, number * 100 + 10)) == 0
        assert cache.num_private_blocks == 0
        assert cache.num_free_blocks + cache.num_evictable_blocks == 32
        assert (cache.stats.evicted_blocks > 0) == (number >= 10)
    assert_tree_holds_its_tokens(cache)
    cache.check()


def test_what_is_used_stays_and_the_oldest_of_the_rest_goes():
    """A034: H is used after each of c1, c2, c3 and outlives them; c1 is the oldest when room for one is needed."""
    cache = PrefixCache(num_blocks=5, block_size=1)
    hot, others = [1], [[2], [3], [4], [5], [6]]
    run(cache, "H", hot)
    for number, tokens in enumerate(others):
        run(cache, number, tokens)
        assert cache.allocate("H again", [*hot, 9]).num_cached_tokens == 1
        cache.free("H again")
        cached = [other for other in others if cache.lookup_prefix(other).num_tokens]
        assert cached == others[max(0, number - 2) : number + 1]
    assert cache.stats.evicted_blocks == 2
    assert cache.lookup_prefix(hot).num_tokens == 1


def test_only_childless_blocks_are_evicted():
    """A036: chain A B C and branch A D. B follows C, A comes last, and nothing is left that no walk reaches."""
    cache = PrefixCache(num_blocks=8, block_size=2)
    a, b, c, d = [0, 0], [1, 1], [2, 2], [3, 3]
    run(cache, 1, a + b + c)
    run(cache, 2, a + d)
    found = []
    while cache.evict(1):
        cache.check()
        assert len(resident(cache.tree)) == cache.num_cached_blocks
        found.append([cache.lookup_prefix(tokens).num_tokens // 2 for tokens in (a + b + c, a + d)])
    assert found == [[2, 2], [1, 2], [1, 1], [0, 0]]
    assert cache.num_free_blocks == 8
    assert list(cache.tree.nodes()) == []


def test_as_many_blocks_are_evicted_as_were_asked_for():
    """B055: 1, 10, then the remaining 89; freeing whole leaves or looping for ever are the two classic faults."""
    cache = PrefixCache(num_blocks=100, block_size=1)
    for number in range(100):
        run(cache, number, [number])
    assert [cache.evict(1), cache.evict(10), cache.evict(1_000), cache.evict(1)] == [1, 10, 89, 0]
    assert cache.num_free_blocks == 100


def test_a_long_leaf_is_trimmed_by_just_the_blocks_needed():
    """B055's sibling: one leaf of 50 blocks loses its last one, not its prefix."""
    cache = PrefixCache(num_blocks=50, block_size=2)
    run(cache, "long", range(100))
    cache.allocate("short", [500])
    assert cache.lookup_prefix(range(100)).num_tokens == 98
    assert cache.stats.evicted_blocks == 1


class CountingList(SortedList):
    """Counts what is done to the eviction order."""

    operations = 0

    def add(self, value):
        CountingList.operations += 1
        super().add(value)

    def remove(self, value):
        CountingList.operations += 1
        super().remove(value)

    def pop(self, index=-1):
        CountingList.operations += 1
        return super().pop(index)

    def __iter__(self):
        raise AssertionError("evicting must not walk through all leaves")


@pytest.mark.parametrize("num_leaves", [1_000, 10_000])
def test_evicting_a_block_touches_one_leaf_however_many_there_are(num_leaves, monkeypatch):
    """A037: counted, not timed. Each eviction is one step in a sorted container; a heap rebuilt per call is linear."""
    monkeypatch.setattr("radixkv.tree.SortedList", CountingList)
    tree = RadixTree(1, policy_of("lru", 1))
    for number in range(num_leaves):
        tree.insert(TokenKey([number]), array("I", [number]), number)
    CountingList.operations = 0
    for number in range(500):
        assert list(tree.evict(1)) == [number]
    assert CountingList.operations == 500


# ---------------------------------------------------------------- depth, look-ups, leaks, flush


def deep_chain(cache, depth):
    """A chain of that many nodes: each block was last used at a tick of its own."""
    tokens = list(range(depth))
    block_ids = cache.pool.allocate(depth)
    node = cache.tree.root(())
    for token_id, block_id in zip(tokens, block_ids, strict=True):
        use = Use(depth - token_id, 0)
        node = cache.tree.insert_below(node, pack([token_id]), array("I", [block_id]), use).node
    cache.pool.give_to_tree(block_ids)
    return tokens


def test_a_chain_of_thousands_of_nodes_needs_no_recursion():
    """A038: every operation under the default recursion limit, the collector of dropped objects included."""
    depth = 5_500
    assert sys.getrecursionlimit() < depth
    cache = PrefixCache(num_blocks=depth + 10, block_size=1)
    tokens = deep_chain(cache, depth)
    assert cache.tree.num_nodes >= 5_000
    cache.check()
    assert cache.show(most=10**6).count("\n") >= 5_000
    assert cache.lookup_prefix(tokens).num_tokens == depth
    assert cache.tree.insert(TokenKey(tokens), array("I", range(depth)), 0).num_existing == depth
    allocation = cache.allocate("a", [*tokens, 1], tick=0)
    assert allocation.num_cached_tokens == depth
    cache.fork("a", "b")
    cache.append_token("b", 2)
    cache.commit("a", depth + 1)
    cache.commit("b", depth + 2)
    cache.check()
    cache.free("a")
    cache.free("b")
    cache.check()
    assert cache.evict(3) == 3
    assert cache.reset()
    assert cache.num_free_blocks == depth + 10
    deep_chain(cache, depth)
    del cache
    gc.collect()


def test_ten_thousand_look_ups_change_neither_order_nor_pins():
    """C107: asking how much is cached is no use, or a router's probes would keep old entries alive."""
    cache = PrefixCache(num_blocks=3, block_size=4)
    for number in range(3):
        run(cache, number, [number] * 4)
    before = state(cache)
    key = TokenKey([0] * 4)
    for _ in range(10_000):
        cache.lookup_prefix(key)
    assert state(cache) == before
    run(cache, "press", [9] * 4)
    assert [cache.lookup_prefix([number] * 4).num_tokens for number in range(3)] == [0, 4, 4]


def test_thousands_of_requests_leave_no_objects_behind():
    """B077: requests, handles, nodes and roots, also of namespaces seen once, of aborted and of refused requests."""
    cache = PrefixCache(num_blocks=16, block_size=2)

    def some_requests(first, number):
        for request_id in range(first, first + number):
            namespace = f"user {request_id}" if request_id % 2 else None
            cache.allocate(request_id, [request_id, 1, 2, 3, 4], namespace)
            if request_id % 3:
                cache.commit(request_id, 5)
            if request_id % 5 == 0:
                cache.fork(request_id, "child")
                cache.append_token("child", 7)
                cache.free("child")
            with pytest.raises(OutOfBlocks):
                cache.allocate("too long", range(40), f"refused {request_id}")
            cache.free(request_id)
            assert len(cache.tree.namespaces()) <= cache.num_cached_blocks, "a root without blocks was kept"
            if namespace:
                cache.drop_namespace(namespace)

    def objects():
        gc.collect()
        return len(gc.get_objects())

    some_requests(0, 200)
    before, nodes_before = objects(), cache.tree.num_nodes
    some_requests(200, 3_000)
    assert cache.tree.num_nodes <= nodes_before + 2
    assert len(cache.tree.namespaces()) <= 1
    assert cache.request_ids == ()
    assert objects() <= before + 100
    cache.check()


def test_a_reset_is_refused_truthfully_while_requests_run():
    """B049: False and nothing changed under a running request; True, everything free and no hit at idle."""
    cache = PrefixCache(num_blocks=8, block_size=2)
    run(cache, "done", range(8))
    cache.allocate("running", range(6))
    before = state(cache)
    assert cache.reset() is False
    assert state(cache) == before
    cache.free("running")
    assert cache.reset() is True
    assert cache.num_free_blocks == 8
    assert cache.lookup_prefix(range(8)).num_tokens == 0
    cache.check()

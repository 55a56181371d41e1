"""`PrefixCache` call by call: what is refused and how, forks, part-block hits, and copies that fail."""

import pytest
from cache_models import (
    ShadowStorage,
    StorageBroken,
    assert_holds_its_tokens,
    assert_tree_holds_its_tokens,
    compute,
    resident,
    run,
    state,
)

from radixkv import DuplicateRequest, OutOfBlocks, PrefixCache, RadixKVError, TokenKey, UnknownRequest
from radixkv.baselines import FlatHashCache
from radixkv.node import RadixNode


def shadowed(num_blocks, block_size, **options):
    """A cache whose slots remember what was written to them."""
    return PrefixCache(num_blocks, block_size, storage=ShadowStorage(num_blocks, block_size), **options)


def compute_all(cache, request_id):
    """The forward pass over all tokens that are not computed yet, and its commit."""
    for _ in compute(cache, request_id):
        pass
    cache.commit(request_id, cache.num_tokens(request_id))


# ---------------------------------------------------------------- what is refused


@pytest.mark.parametrize(
    ("options", "kind", "message"),
    [
        ({"num_blocks": 0}, ValueError, "num_blocks is 0; allowed: 1 <= num_blocks"),
        ({"num_blocks": -4}, ValueError, "num_blocks is -4; allowed: 1 <= num_blocks"),
        ({"num_blocks": 2**31}, ValueError, "num_blocks is 2147483648; allowed"),
        ({"num_blocks": 4.0}, TypeError, "num_blocks must be an integer, not 4.0"),
        ({"num_blocks": True}, TypeError, "num_blocks must be an integer, not True"),
        ({"block_size": 0}, ValueError, "block_size is 0; allowed: 1 and more"),
        ({"block_size": "16"}, TypeError, "block_size must be an integer, not '16'"),
        ({"min_copy_tokens": 0}, ValueError, "min_copy_tokens is 0; allowed: 1 and more"),
        ({"min_copy_tokens": 1.5}, TypeError, "min_copy_tokens must be an integer, not 1.5"),
        ({"policy": "newest"}, ValueError, "unknown eviction policy 'newest'; allowed: lru"),
        ({"policy": 7}, TypeError, "policy must be a name, an EvictionPolicy or a function, not 7"),
        ({"storage": ShadowStorage(8, 8)}, ValueError, "storage has 8 blocks of 8 tokens, the cache 8 of 4"),
        ({"storage": ShadowStorage(9, 4)}, ValueError, "storage has 9 blocks of 4 tokens, the cache 8 of 4"),
    ],
)
def test_a_cache_that_cannot_work_is_refused_when_it_is_made(options, kind, message):
    """The message names what was given and what is allowed; later it would be wrong slots."""
    with pytest.raises(kind, match=message):
        PrefixCache(**{"num_blocks": 8, "block_size": 4, **options})


REFUSED = [
    ("allocate", ("a", [1]), {}, DuplicateRequest, "a request with the id 'a' is running already"),
    ("allocate", (1.5, [1]), {}, TypeError, "a request id must be a string or an integer, not 1.5"),
    ("allocate", (None, [1]), {}, TypeError, "a request id must be a string or an integer, not None"),
    ("allocate", (True, [1]), {}, TypeError, "a request id must be a string or an integer, not True"),
    ("allocate", (("a", 1), [1]), {}, TypeError, r"a request id must be a string or an integer, not \('a', 1\)"),
    ("allocate", ("b", []), {}, ValueError, "token_ids is empty; allowed: one token and more"),
    ("allocate", ("b", "text"), {}, TypeError, "token_ids must be integers, not str"),
    ("allocate", ("b", None), {}, TypeError, "sequence of integers, not None"),
    ("allocate", ("b", [1, -2]), {}, ValueError, r"token id at position 1 is -2; allowed: 0 <= id < 2\*\*32"),
    ("allocate", ("b", [2**32]), {}, ValueError, "token id at position 0 is 4294967296; allowed"),
    ("allocate", ("b", [1, 2.5]), {}, TypeError, "token id at position 1 must be an integer, not 2.5"),
    ("allocate", ("b", [1], 0), {}, TypeError, "namespace must be None, a string or a tuple of strings, not 0"),
    ("allocate", ("b", TokenKey([1], "x"), "y"), {}, ValueError, "the key's namespace is .*'x'.*, the call's 'y'"),
    ("allocate", ("b", [1]), {"tick": -1}, ValueError, "tick is -1; allowed: 0 and more"),
    ("allocate", ("b", [1]), {"tick": 1.0}, TypeError, "tick must be an integer, not 1.0"),
    ("allocate", ("b", [1]), {"priority": -1}, ValueError, "priority is -1; allowed: 0 and more"),
    ("allocate", ("b", [1]), {"priority": "high"}, TypeError, "priority must be an integer, not 'high'"),
    ("allocate", ("b", [1]), {"ttl": 0}, ValueError, "ttl is 0; allowed: 1 and more"),
    ("allocate", ("b", [1] * 100), {}, OutOfBlocks, "needed=25 free=4 evictable=2"),
    ("append_token", ("b", 1), {}, UnknownRequest, "no running request has the id 'b'"),
    ("append_token", ("a", -1), {}, ValueError, "is -1; allowed"),
    ("append_token", ("a", "x"), {}, TypeError, "must be an integer, not 'x'"),
    ("append_token", ("a", None), {}, TypeError, "must be an integer, not None"),
    ("commit", ("b", 1), {}, UnknownRequest, "no running request has the id 'b'"),
    ("commit", ("a", 7), {}, ValueError, "num_computed_tokens is 7; only 6 tokens have a slot"),
    ("commit", ("a", 4), {}, ValueError, "num_computed_tokens is 4; 5 were computed before"),
    ("commit", ("a", -1), {}, ValueError, "num_computed_tokens is -1; 5 were computed before"),
    ("commit", ("a", 6.0), {}, TypeError, "num_computed_tokens must be an integer, not 6.0"),
    ("commit", ("a", 6), {"tick": -1}, ValueError, "tick is -1; allowed: 0 and more"),
    ("fork", ("b", "c"), {}, UnknownRequest, "no running request has the id 'b'"),
    ("fork", ("a", "a"), {}, DuplicateRequest, "a request with the id 'a' is running already"),
    ("fork", ("a", None), {}, TypeError, "a request id must be a string or an integer, not None"),
    ("write", ("b", 0), {}, UnknownRequest, "no running request has the id 'b'"),
    ("write", ("a", 2), {}, IndexError, "block_index is 2; the table has 2 blocks"),
    ("write", ("a", -1), {}, IndexError, "block_index is -1; the table has 2 blocks"),
    ("write", ("a", "0"), {}, TypeError, "block_index must be an integer, not '0'"),
    ("free", ("b",), {}, UnknownRequest, "no running request has the id 'b'"),
    ("free", ([],), {}, UnknownRequest, r"no running request has the id \[\]"),
    ("free", ("a",), {"tick": -1}, ValueError, "tick is -1; allowed: 0 and more"),
    ("free", ("a",), {"tick": "now"}, TypeError, "tick must be an integer, not 'now'"),
    ("evict", (-1,), {}, ValueError, "num_blocks is -1; allowed: 0 and more"),
    ("evict", (1.0,), {}, TypeError, "num_blocks must be an integer, not 1.0"),
    ("can_allocate", (-1,), {}, ValueError, "num_tokens is -1; allowed: 0 and more"),
    ("can_allocate", ("9",), {}, TypeError, "num_tokens must be an integer, not '9'"),
    ("lookup_prefix", ("text",), {}, TypeError, "token_ids must be integers, not str"),
    ("lookup_prefix", ([1, -2],), {}, ValueError, "token id at position 1 is -2; allowed"),
    ("lookup_prefix", ([1], 5), {}, TypeError, "namespace must be None, a string or a tuple of strings, not 5"),
    ("block_table", ("b",), {}, UnknownRequest, "no running request has the id 'b'"),
    ("num_tokens", ("b",), {}, UnknownRequest, "no running request has the id 'b'"),
    ("ref_count", (-1,), {}, ValueError, "block_id is -1; allowed: 0 <= block_id < 8"),
    ("ref_count", (8,), {}, ValueError, "block_id is 8; allowed: 0 <= block_id < 8"),
    ("ref_count", (None,), {}, TypeError, "block_id must be an integer, not None"),
]


@pytest.mark.parametrize(("call", "args", "options", "kind", "message"), REFUSED, ids=lambda value: str(value)[:40])
def test_a_wrong_argument_is_named_and_changes_nothing(call, args, options, kind, message):
    """A caller that goes on after an error must find the cache as it was: counters, order of use, tables and tree."""
    cache = shadowed(8, 4)
    run(cache, "before", range(8))
    cache.allocate("a", [9] * 6)
    for _ in compute(cache, "a", 5):
        pass
    cache.commit("a", 5)
    before = state(cache)
    with pytest.raises(kind, match=message):
        getattr(cache, call)(*args, **options)
    assert state(cache) == before
    cache.check()


def test_errors_stand_in_one_tree_and_read_as_sentences():
    """Callers catch what they know: KeyError for a missing id, ValueError for one taken, or all of this package's."""
    assert issubclass(UnknownRequest, KeyError)
    assert issubclass(DuplicateRequest, ValueError)
    assert all(issubclass(kind, RadixKVError) for kind in (OutOfBlocks, UnknownRequest, DuplicateRequest))
    assert str(UnknownRequest("x")) == "no running request has the id 'x'"
    assert str(OutOfBlocks(3, 2, 1)) == "out of blocks: needed=3 free=2 evictable=1"


# ---------------------------------------------------------------- room


@pytest.mark.parametrize("block_size", [1, 2, 4, 16])
def test_a_prompt_that_fills_the_whole_pool_runs_again_and_again(block_size):
    """The second time all but the last block is its own hit, and the last one is evicted to make room for itself."""
    cache = shadowed(3, block_size)
    prompt = list(range(3 * block_size))
    assert run(cache, 1, prompt) == 0
    assert run(cache, 2, prompt) == 3 * block_size - 1
    assert_tree_holds_its_tokens(cache)
    assert cache.allocate(3, prompt).num_cached_tokens == 3 * block_size - 1
    assert_holds_its_tokens(cache, 3)
    compute_all(cache, 3)
    with pytest.raises(OutOfBlocks, match="needed=1 free=0 evictable=0"):
        cache.append_token(3, 1)
    cache.check()


def test_a_pool_of_one_block_serves_one_request_after_another():
    """The block to copy from is the only one there is: it is evicted, handed out, and still holds what is copied."""
    cache = shadowed(1, 4)
    assert run(cache, 1, [1, 2, 3]) == 0
    allocation = cache.allocate(2, [1, 2, 9])
    assert (allocation.num_cached_tokens, allocation.num_shared_blocks) == (2, 0)
    assert_holds_its_tokens(cache, 2)
    compute_all(cache, 2)
    cache.free(2)
    assert cache.lookup_prefix([1, 2, 3]).num_tokens == 2
    assert cache.lookup_prefix([1, 2, 9]).num_tokens == 3
    with pytest.raises(OutOfBlocks, match="needed=2 free=0 evictable=1"):
        cache.allocate(3, range(5))
    assert cache.can_allocate(4)
    assert not cache.can_allocate(5)


def test_room_is_what_is_free_or_evictable():
    """`can_allocate` looks; it must agree with what an allocation of unrelated tokens may do."""
    cache = PrefixCache(num_blocks=6, block_size=2)
    run(cache, "idle", range(4))
    cache.allocate("running", [50, 51, 52])
    for num_tokens in range(14):
        assert cache.can_allocate(num_tokens) == (num_tokens <= 8)
    cache.allocate("new", range(60, 68))
    assert cache.stats.evicted_blocks == 2
    assert not cache.can_allocate(1)
    assert cache.can_allocate(0)


def test_a_request_that_grows_keeps_one_contiguous_run_while_it_can():
    """Attention reads a contiguous run as a view; next fit alone would put each new block behind another request's."""
    cache = PrefixCache(num_blocks=16, block_size=2)
    cache.allocate("a", range(4))
    cache.allocate("later", range(50, 52))
    cache.free("later")
    for token_id in range(8):
        cache.append_token("a", token_id)
    assert cache.block_table("a") == (0, 1, 2, 3, 4, 5)


# ---------------------------------------------------------------- hits inside a block


def test_a_hit_inside_a_block_copies_from_the_block_that_shares_most():
    """Of several candidates a neighbour in sort order shares the most leading tokens, full block or partial leaf."""
    cache = shadowed(16, 4)
    for number, tokens in enumerate([[1, 1, 1, 1], [1, 2, 2, 2], [1, 2, 3], [1, 2, 4, 4, 5]]):
        run(cache, number, tokens)
    for prompt, hit in [([1, 2, 3, 9], 3), ([1, 2, 2, 9], 3), ([1, 2, 9, 9], 2), ([1, 1, 1, 1, 1], 4), ([2, 1], 0),
                        ([1, 2, 4, 4, 5, 5], 5), ([1, 0, 0, 0], 1), ([1, 9, 9, 9], 1)]:  # fmt: skip
        assert cache.lookup_prefix(prompt).num_tokens == hit
        assert cache.allocate("x", prompt).num_cached_tokens == hit
        assert_holds_its_tokens(cache, "x")
        cache.free("x")
        cache.check()


def test_a_partial_leaf_goes_when_longer_tokens_cover_it_and_not_before():
    """Kept beside its own continuation it would cost a block for nothing, and be the start of a sibling."""
    cache = shadowed(16, 4)
    run(cache, 1, [1, 2])
    assert cache.num_cached_blocks == 1
    run(cache, 2, [1])
    assert cache.num_cached_blocks == 1, "a start of what is there adds nothing"
    run(cache, 3, [1, 3])
    assert cache.num_cached_blocks == 2
    run(cache, 4, [1, 2, 3])
    assert cache.num_cached_blocks == 2, "the longer one takes the shorter one's place"
    run(cache, 5, [1, 2, 3, 4, 5])
    assert sorted(tokens for _, tokens in resident(cache.tree)) == [(1, 2, 3, 4), (1, 2, 3, 4, 5), (1, 3)]
    cache.check()
    assert_tree_holds_its_tokens(cache)


def test_a_copy_that_saves_less_than_asked_for_is_not_made():
    """`min_copy_tokens`: below it computing is cheaper than copying; the hit is then whole blocks."""
    cache = shadowed(16, 8, min_copy_tokens=3)
    run(cache, 1, range(13))
    for num_same, hit in [(9, 8), (10, 8), (11, 11), (12, 12)]:
        assert cache.allocate("x", [*range(num_same), 99]).num_cached_tokens == hit
        cache.free("x")
    cache = shadowed(16, 8, min_copy_tokens=3)
    run(cache, 1, range(10))
    assert cache.lookup_prefix(range(10)).num_tokens == 8, "a leaf that would never be copied from is not kept"


def test_a_partial_leaf_holds_only_what_was_computed():
    """Slots behind the computed tokens hold nothing, though tokens have been appended there."""
    cache = shadowed(4, 8)
    cache.allocate("a", range(5))
    compute_all(cache, "a")
    cache.append_token("a", 5)
    cache.free("a")
    assert cache.lookup_prefix(range(6)).num_tokens == 5
    assert_tree_holds_its_tokens(cache)


# ---------------------------------------------------------------- copies that fail


def test_a_failed_copy_admits_nothing_and_the_same_call_works_afterwards():
    """Storage on another device may fail: no lock, block or count may be left behind."""
    cache = shadowed(4, 4)
    run(cache, 1, range(6))
    counts = (cache.num_free_blocks, cache.num_evictable_blocks, cache.stats.as_dict())
    cache.storage.broken = True
    with pytest.raises(StorageBroken):
        cache.allocate(2, [0, 1, 2, 9])
    assert (cache.num_free_blocks, cache.num_evictable_blocks, cache.stats.as_dict()) == counts
    assert cache.request_ids == ()
    cache.check()
    cache.storage.broken = False
    assert cache.allocate(2, [0, 1, 2, 9]).num_cached_tokens == 3
    assert_holds_its_tokens(cache, 2)


def test_a_failed_copy_on_write_leaves_the_fork_on_the_shared_block():
    """The token is not appended, the new block is given back, and a second try works."""
    cache = shadowed(4, 4)
    cache.allocate("a", range(2))
    compute_all(cache, "a")
    cache.fork("a", "b")
    before = state(cache)
    cache.storage.broken = True
    for call in (lambda: cache.append_token("b", 7), lambda: cache.write("b", 0)):
        with pytest.raises(StorageBroken):
            call()
        assert state(cache) == before
    cache.storage.broken = False
    cache.append_token("b", 7)
    assert_holds_its_tokens(cache, "b")
    assert (cache.num_tokens("a"), cache.num_tokens("b")) == (2, 3)


# ---------------------------------------------------------------- forks and writes


@pytest.mark.parametrize("order", ["abc", "acb", "bac", "bca", "cab", "cba"])
@pytest.mark.parametrize("block_size", [1, 2, 4, 16])
def test_a_fork_of_a_fork_outlives_its_parents_in_any_order(block_size, order):
    """The shared tail has three owners; each branch goes its way, and whoever ends takes only what is its own."""
    cache = shadowed(60, block_size)
    cache.allocate("a", range(5))
    compute_all(cache, "a")
    cache.fork("a", "b")
    cache.append_token("b", 50)
    cache.fork("b", "c")
    cache.append_token("c", 60)
    cache.append_token("a", 70)
    for request_id in "abc":
        compute_all(cache, request_id)
    for ended in order:
        for request_id in cache.request_ids:
            assert_holds_its_tokens(cache, request_id)
        cache.free(ended)
        cache.check()
    assert_tree_holds_its_tokens(cache)
    for tokens in ([*range(5), 70], [*range(5), 50], [*range(5), 50, 60]):
        assert cache.lookup_prefix(tokens).num_tokens == len(tokens)
    assert cache.num_free_blocks + cache.num_evictable_blocks == 60


def test_blocks_that_one_fork_commits_are_held_by_all_that_name_them():
    """The parent's lock alone would let them be evicted under the child as soon as the parent ends."""
    cache = shadowed(6, 2)
    cache.allocate("parent", range(5))
    cache.fork("parent", "child")
    compute_all(cache, "parent")
    assert cache.block_table("parent") != cache.block_table("child"), "the pass copied what it wrote"
    compute_all(cache, "child")
    assert cache.block_table("parent")[:2] == cache.block_table("child")[:2]
    cache.fork("child", "grandchild")
    for token_id in (7, 8):
        cache.append_token("grandchild", token_id)
    cache.free("child")
    cache.free("parent")
    assert cache.evict(6) <= 1
    cache.check()
    assert_holds_its_tokens(cache, "grandchild")


def test_a_commit_by_the_only_writer_locks_the_blocks_for_every_fork():
    """A driver whose forks wait while one computes for all: nothing is copied, and each fork holds the path itself."""
    cache = shadowed(6, 2)
    cache.allocate("parent", range(5))
    cache.fork("parent", "child")
    table = cache.block_table("parent")
    for _ in compute(cache, "parent", 4, for_all_forks=True):
        pass
    cache.commit("parent", 4)
    cache.check()
    assert cache.block_table("child") == table
    assert cache.num_protected_blocks == 2
    cache.free("parent")
    assert cache.num_protected_blocks == 2
    assert cache.evict(6) == 0
    assert_holds_its_tokens(cache, "child")


@pytest.mark.parametrize("first", ["writer", "other"])
def test_writing_in_place_to_a_cached_block_copies_it_for_the_writer_only(first):
    """The tree's block is immutable: others go on reading it, and the writer's copy is freed with the writer."""
    cache = shadowed(12, 4)
    run(cache, "before", range(8))
    cache.allocate("writer", range(9))
    cache.allocate("other", range(9))
    shared = cache.block_table("other")
    own = cache.write("writer", 0)
    assert own not in shared
    assert cache.write("writer", 0) == own, "the copy is private: no second one"
    cache.storage.slots[own * 4] = "something else"
    assert [cache.ref_count(block_id) for block_id in (shared[0], own, shared[1])] == [2, 1, 3]
    compute_all(cache, "other")
    assert_holds_its_tokens(cache, "other")
    assert cache.allocate("later", range(9)).num_cached_tokens == 8
    assert_holds_its_tokens(cache, "later")
    cache.fork("writer", "child")
    assert cache.ref_count(own) == 2
    cache.check()
    for request_id in [first, *({"writer", "other"} - {first}), "child", "later"]:
        cache.free(request_id)
        cache.check()
    assert_tree_holds_its_tokens(cache)
    assert cache.stats.cow_copies == 1
    assert cache.num_free_blocks + cache.num_evictable_blocks == 12


def test_a_tail_that_a_fork_still_writes_to_is_not_kept():
    """As a partial leaf it would be immutable and findable while the fork appends to it."""
    cache = shadowed(8, 4)
    cache.allocate("a", range(2))
    compute_all(cache, "a")
    cache.fork("a", "b")
    cache.free("a")
    assert cache.num_cached_blocks == 0
    cache.append_token("b", 9)
    assert cache.stats.cow_copies == 0, "the last owner writes in place"
    compute_all(cache, "b")
    cache.free("b")
    assert cache.lookup_prefix([0, 1, 9]).num_tokens == 3
    assert_tree_holds_its_tokens(cache)


# ---------------------------------------------------------------- time, statistics, looking


def test_without_ticks_each_call_counts_one_and_a_tick_given_sets_the_clock():
    """A replay gives ticks and is exact; other callers never think of them; both may take turns."""
    cache = PrefixCache(num_blocks=8, block_size=1)
    cache.allocate("a", [1])
    cache.commit("a", 1)
    cache.free("a")
    assert [node.tick for node in cache.tree.nodes() if node.blocks] == [3]
    run(cache, "b", [2], tick=10)
    run(cache, "c", [3])
    assert [node.tick for node in cache.tree.nodes() if node.blocks] == [3, 10, 13]
    run(cache, "late", [4], tick=5)
    assert cache.evict(2) == 2
    assert [cache.lookup_prefix([token_id]).num_tokens for token_id in (1, 2, 3, 4)] == [0, 1, 1, 0]


def test_an_earlier_tick_never_makes_a_path_look_older():
    """Recency only rises: a request that comes with an old tick must not have a hot prefix evicted."""
    cache = PrefixCache(num_blocks=8, block_size=1)
    run(cache, "hot", [1, 2], tick=20)
    run(cache, "other", [7], tick=15)
    run(cache, "old", [1, 2, 3], tick=10)
    assert cache.evict(2) == 2
    assert cache.lookup_prefix([1, 2, 3]).num_tokens == 2
    assert cache.lookup_prefix([7]).num_tokens == 0
    cache.check()


def test_a_lower_priority_counts_once_the_time_of_a_higher_one_is_over():
    """A prefix once used at priority 5 for two ticks kept that entry, and a later use at priority 1 was lost."""
    cache = PrefixCache(num_blocks=8, block_size=1, policy="priority")
    for request_id, tokens, tick, options in [
        ("a", [1], 1, {"priority": 5, "ttl": 2}), ("b", [1, 3], 10, {"priority": 1}), ("c", [7], 11, {}),
    ]:  # fmt: skip
        cache.allocate(request_id, tokens, tick=tick, **options)
        cache.commit(request_id, len(tokens), tick=tick)
        cache.free(request_id, tick=tick)
    assert cache.evict(2) == 2
    assert cache.lookup_prefix([1, 3]).num_tokens == 1
    run(cache, "d", [8], tick=12)
    assert cache.evict(1) == 1
    assert cache.lookup_prefix([1]).num_tokens == 1
    assert cache.lookup_prefix([8]).num_tokens == 0
    cache.check()


@pytest.mark.parametrize("num_blocks_a_call", [1, 2])
def test_evicting_two_blocks_is_evicting_one_twice_when_a_priority_has_ended(num_blocks_a_call):
    """A parent that became a leaf in the middle of a call kept a priority whose time was over until the next call."""
    cache = PrefixCache(num_blocks=8, block_size=1, policy="priority")
    cache.allocate("a", [1], tick=1, priority=5, ttl=2)
    cache.commit("a", 1, tick=1)
    cache.free("a", tick=1)
    run(cache, "b", [1, 2], tick=2)
    run(cache, "c", [7], tick=11)
    for _ in range(2 // num_blocks_a_call):
        assert cache.evict(num_blocks_a_call) == num_blocks_a_call
    assert cache.lookup_prefix([1]).num_tokens == 0
    assert cache.lookup_prefix([7]).num_tokens == 1
    cache.check()


def test_requests_are_counted_in_tokens_and_in_blocks():
    """What was shared, what was copied, and what had to go to make room."""
    cache = PrefixCache(num_blocks=4, block_size=4)
    assert cache.stats.token_hit_rate is None
    assert cache.stats.block_hit_rate is None
    run(cache, 1, range(10))
    cache.allocate(2, [*range(9), 50])
    cache.fork(2, 3)
    with pytest.raises(OutOfBlocks):
        cache.allocate("too long", range(100, 200))
    assert cache.stats.as_dict() == {
        "requests": 2, "prompt_tokens": 20, "hit_tokens": 9, "prompt_blocks": 6, "hit_blocks": 2, "committed_blocks": 2,
        "evicted_blocks": 0, "partial_copies": 1, "copied_tokens": 1, "cow_copies": 0,
    }  # fmt: skip
    assert cache.stats.token_hit_rate == 9 / 20
    assert cache.stats.block_hit_rate == 2 / 6


def test_text_of_the_cache_names_its_counts_its_requests_and_its_tree():
    """What a person sees first when something is odd."""
    cache = PrefixCache(num_blocks=8, block_size=4)
    run(cache, 1, range(8), "tenant")
    cache.allocate("a", range(9), "tenant")
    text = cache.show()
    assert text.startswith("8 blocks of 4 tokens: 5 free, 0 evictable, 2 protected, 1 private\n")
    assert "request 'a': 9 tokens (8 cached, 8 computed), blocks 0-1 | 2" in text
    assert "namespace tenant" in text
    assert "5 free, 2 cached, 1 private" in repr(cache)


def test_a_broken_cache_says_what_is_broken():
    """`check` recounts what pool, tables and tree say of each other; every test relies on its eyes."""
    cache = PrefixCache(num_blocks=8, block_size=2)
    run(cache, 1, range(4))
    cache.allocate("a", range(7))
    table = cache._tables["a"]
    cache.check()
    private = table.block_ids[-1]

    def broken(sentence):
        with pytest.raises(AssertionError, match=sentence):
            cache.check()

    cache.pool.share([private])
    broken(f"1 tables own block {private}, the pool counts 2")
    cache.pool.release([private])
    node: RadixNode = table.node
    node.lock_ref += 1
    broken("lock_ref of .* should be 1")
    node.lock_ref -= 1
    leaked = cache.pool.allocate(1)
    broken("a private block is in no table")
    cache.pool.release(leaked)
    table.tokens[0] ^= 1
    broken("its path holds other tokens")
    table.tokens[0] ^= 1
    table.num_computed = 99
    broken("more computed tokens than tokens")


@pytest.mark.parametrize("manager", [PrefixCache, FlatHashCache])
class TestAdmission:
    """What a scheduler asks of `allocate` beyond blocks for a prompt."""

    def test_spare_blocks_must_be_left_over_and_nothing_changes_if_they_are_not(self, manager):
        """A016: admission that leaves no room for growth would be undone by the next decode. The hit is no room."""
        cache = manager(num_blocks=12, block_size=4)
        cache.allocate("old", range(24))
        cache.commit("old", 24)
        cache.free("old")  # 6 blocks evictable, 6 free
        prompt = [*range(16), *range(100, 116)]  # hits 4 blocks, needs 4; beside the hit, 6 + 2 remain
        before = cache.show()
        with pytest.raises(OutOfBlocks, match="needed=9 free=6 evictable=2"):
            cache.allocate("new", prompt, spare_blocks=5)
        assert cache.show() == before
        assert cache.allocate("new", prompt, spare_blocks=4).num_new_blocks == 4
        cache.check()

    @pytest.mark.parametrize(("most", "cached"), [(None, 15), (15, 15), (14, 14), (9, 9), (8, 8), (3, 3), (0, 0)])
    def test_a_request_may_use_less_of_the_cache_than_there_is(self, manager, most, cached):
        """Log-probabilities of prompt tokens need their logits: those tokens are computed, whatever is cached."""
        cache = manager(num_blocks=16, block_size=4)
        cache.allocate("first", range(16))
        cache.commit("first", 16)
        cache.free("first")
        allocation = cache.allocate("again", range(16), max_cached_tokens=most)
        assert allocation.num_cached_tokens == (cached if manager is PrefixCache else cached // 4 * 4)
        cache.commit("again", 16)  # its duplicates are re-pointed
        cache.free("again")
        cache.check()
        assert cache.num_cached_blocks == 4

    def test_a_resumed_request_is_not_counted_again(self, manager):
        """A040: hit rates would rise with every preemption."""
        cache = manager(num_blocks=16, block_size=4)
        cache.allocate("a", range(16))
        cache.commit("a", 16)
        cache.free("a")
        before = cache.stats.as_dict()
        assert cache.allocate("a", range(18), is_resumed=True).num_cached_tokens == 16
        after = cache.stats.as_dict()
        for name in ("requests", "prompt_tokens", "hit_tokens", "prompt_blocks", "hit_blocks"):
            assert after[name] == before[name]

    @pytest.mark.parametrize("arguments", [{"spare_blocks": -1}, {"max_cached_tokens": -1}])
    def test_negative_numbers_are_refused(self, manager, arguments):
        """They would make room that is not there."""
        with pytest.raises(ValueError, match="is -1; allowed: 0 and more"):
            manager(num_blocks=4, block_size=4).allocate("a", [1], **arguments)

"""Policies: which leaf goes first, and that counts and priorities survive splits."""

from __future__ import annotations

import random
from array import array
from collections.abc import Callable
from typing import Any

import pytest

from radixkv import PrefixCache
from radixkv.eviction import POLICIES, CostAware, EvictionPolicy, policy_of
from radixkv.node import RadixNode, Use
from radixkv.tokens import TokenKey
from radixkv.tree import RadixTree

Model = dict[tuple[int, ...], dict[str, Any]]


def victims(policy: str, ranks: Callable[[tuple[int, ...], dict[str, Any]], Any], seed: int) -> None:
    """Drives a cache one request at a time beside a model that evicts block by block, and compares what remains.

    The model: a dict from each cached prefix of whole blocks (block size 1: of tokens) to what is known of its last
    block. Evict: the leaf with the lowest rank, the deepest first, one block at a time.
    """
    rng = random.Random(seed)
    capacity = 12
    cache = PrefixCache(capacity + 6, 1, policy)
    model: Model = {}
    prompts: list[list[int]] = [[]]
    for tick in range(1, 300):
        base = rng.choice(prompts)
        prompt = base[: rng.randrange(len(base) + 1)] + [rng.randrange(4) for _ in range(rng.randrange(1, 4))]
        prompt = prompt[:6]
        prompts = [*prompts[-6:], prompt]
        cache.allocate("r", prompt, tick=tick)
        cache.commit("r", len(prompt), tick=tick)
        cache.free("r", tick=tick)
        for end in range(1, len(prompt) + 1):
            entry = model.setdefault(tuple(prompt[:end]), {"created": tick, "uses": 0})
            entry["tick"] = tick
            entry["uses"] += 1
        over = len(model) - capacity
        if over > 0:
            assert cache.evict(over) == over
        for _ in range(over):
            leaves = [p for p in model if not any(q[:-1] == p for q in model)]
            victim = min(leaves, key=lambda p: (ranks(p, model[p]), -len(p)))
            # Two leaves of equal rank and depth are told apart by nothing that the definition names.
            same = [p for p in leaves if (ranks(p, model[p]), len(p)) == (ranks(victim, model[victim]), len(victim))]
            gone = [p for p in same if cache.lookup_prefix(list(p)).num_tokens < len(p)]
            assert gone, f"{policy}: none of {same} was evicted\n{cache.show()}"
            del model[gone[0]]
        cache.check()
        assert cache.num_cached_blocks == len(model)
        assert all(cache.lookup_prefix(list(p)).num_tokens == len(p) for p in model)


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize(
    ("policy", "ranks"),
    [
        ("lru", lambda p, e: e["tick"]),
        ("mru", lambda p, e: -e["tick"]),
        ("fifo", lambda p, e: e["created"]),
        ("lfu", lambda p, e: (e["uses"], e["tick"])),
        ("slru", lambda p, e: (e["uses"] > 1, e["tick"])),
    ],
)
def test_eviction_equals_evicting_block_by_block(policy: str, ranks: Any, seed: int) -> None:
    """Runs, splits and merges are bookkeeping: the outcome is that of a list of blocks."""
    victims(policy, ranks, seed)


def tree_with(policy: str) -> RadixTree:
    """An empty tree with blocks of four tokens."""
    return RadixTree(4, policy_of(policy, 4))


def test_a_split_keeps_the_highest_priority_at_the_shared_head() -> None:
    """C116: high priority for [1..16], low for [1..8, 99..]: the head stays high; the low tail goes first."""
    tree = tree_with("priority")
    tree.insert(TokenKey(range(1, 17)), array("I", range(4)), Use(1, 1, priority=5))
    tree.insert(TokenKey([*range(1, 9), *range(99, 107)]), array("I", [0, 1, 4, 5]), Use(2, 2, priority=1))
    tree.check()
    assert list(tree.evict(2)) == [5, 4]
    assert list(tree.evict(4)) == [3, 2, 1, 0]


def test_counts_never_fall_on_a_split() -> None:
    """C116: the head was used by three requests, its old tail by two, the new tail by one."""
    tree = tree_with("lfu")
    old, new = TokenKey(range(16)), TokenKey([*range(8), *range(50, 58)])
    for tick in (1, 2):
        tree.insert(old, array("I", range(4)), tick)
    tree.insert(new, array("I", [0, 1, 4, 5]), 3)
    uses = {tuple(node.blocks): node.uses for node in tree.nodes() if node.parent is not None}
    assert uses == {(0, 1): 3, (2, 3): 2, (4, 5): 1}
    assert list(tree.evict(2)) == [5, 4]


def test_a_priority_ends_with_its_time_to_live() -> None:
    """Soft retention: until then it outlives what is newer; afterwards it is judged by its age like all else."""
    cache = PrefixCache(8, 4, "priority")

    def run(request_id: str, first: int, tick: int, **options: Any) -> list[int]:
        prompt = list(range(first, first + 8))
        cache.allocate(request_id, prompt, tick=tick, **options)
        cache.commit(request_id, 8, tick=tick)
        cache.free(request_id, tick=tick)
        cache.check()
        return prompt

    kept = run("kept", 0, 1, priority=3, ttl=10)
    others = [run(f"other {tick}", 100 * tick, tick) for tick in (2, 3, 4, 5, 6)]
    assert cache.lookup_prefix(kept).num_tokens == 8
    assert cache.lookup_prefix(others[0]).num_tokens == 0
    run("late", 5000, 11)
    assert cache.lookup_prefix(kept).num_tokens == 0


def test_a_priority_without_end_is_no_pin() -> None:
    """Nothing is pinned for good: with nothing of lower priority left, it goes too."""
    cache = PrefixCache(4, 4, "priority")
    cache.allocate("a", list(range(8)), priority=9)
    cache.commit("a", 8)
    cache.free("a")
    cache.allocate("b", list(range(50, 66)))
    cache.check()
    assert cache.num_cached_blocks == 0


def test_the_cost_policy_keeps_the_deep_and_ages_the_unused() -> None:
    """Of two leaves used once the one near the root is cheaper and goes first; the deep one goes in the end."""
    policy = CostAware(block_size=1, parity=4)
    cache = PrefixCache(12, 1, policy)

    def run(prompt: list[int]) -> list[int]:
        cache.allocate("r", prompt)
        cache.commit("r", len(prompt))
        cache.free("r")
        cache.check()
        return prompt

    deep = run(list(range(8)))
    shallow = run([100, 101])
    run([200, 201, 202])
    assert cache.lookup_prefix(deep).num_tokens == 8
    assert cache.lookup_prefix(shallow).num_tokens < 2
    for start in range(300, 400, 4):
        run([start, start + 1, start + 2])
    assert cache.lookup_prefix(deep).num_tokens < 8
    assert policy.age > 0


def test_a_user_may_pass_a_function_or_an_object() -> None:
    """Smallest first token first; as a function, and as a policy that says what it looks at."""

    def first_token(node: RadixNode) -> int:
        return int.from_bytes(node.label[:4], "big")

    class FirstToken(EvictionPolicy):
        fields = ("tick",)

        def rank(self, node: RadixNode) -> int:
            return first_token(node)

    for policy in (first_token, FirstToken()):
        cache = PrefixCache(6, 2, policy)
        for start in (50, 10, 30):
            cache.allocate("r", [start, start + 1])
            cache.commit("r", 2)
            cache.free("r")
        cache.evict(1)
        assert [cache.lookup_prefix([s, s + 1]).num_tokens for s in (50, 10, 30)] == [2, 0, 2]


def test_an_unknown_policy_is_refused_by_name() -> None:
    """The message lists what is allowed."""
    with pytest.raises(ValueError, match=r"unknown eviction policy 'lur'.*lru"):
        PrefixCache(4, 4, "lur")
    with pytest.raises(TypeError, match="must be a name"):
        PrefixCache(4, 4, 7)  # type: ignore[arg-type]


def test_what_a_split_left_behind_is_merged_when_it_is_alike() -> None:
    """A branch comes and goes, the first sequence is used again as a whole: one node, as in the beginning."""
    cache = PrefixCache(16, 2)

    def run(prompt: list[int]) -> None:
        cache.allocate("r", prompt)
        cache.commit("r", len(prompt))
        cache.free("r")
        cache.check()

    main = list(range(8))
    run(main)
    assert cache.tree.num_nodes == 1
    run([*main[:4], 50, 51])
    assert cache.tree.num_nodes == 3
    run([*main, 9])  # the branch is the oldest leaf now
    assert cache.evict(1) == 1
    assert cache.lookup_prefix([*main[:4], 50, 51]).num_tokens == 4
    run([*main, 9])
    assert cache.tree.num_nodes == 2  # the whole path, and a partial leaf with the ninth token
    assert cache.lookup_prefix([*main, 9]).num_tokens == 9


def test_parts_that_the_policy_tells_apart_are_not_merged() -> None:
    """The head was used by two requests, the tail by one: to LFU they are not alike, to LRU they are."""
    for policy, num_nodes in (("lfu", 2), ("lru", 1)):
        cache = PrefixCache(16, 2, policy, keep_partial=False)
        for tick, prompt in enumerate(([0, 1, 2, 3], [0, 1, 9], [0, 1, 2, 3, 4, 5])):
            cache.allocate("r", prompt, tick=tick)
            cache.commit("r", len(prompt), tick=tick)
            cache.free("r", tick=tick)
            cache.check()
        assert cache.tree.num_nodes == num_nodes + (policy == "lfu"), cache.show()


def test_a_growing_request_makes_one_node() -> None:
    """Decoding commits a block at a time; the tree does not show it."""
    for policy in POLICIES:
        cache = PrefixCache(64, 2, policy)
        cache.allocate("r", [1])
        for token in range(2, 60):
            cache.append_token("r", token)
            cache.commit("r", token)
            cache.check()
        assert cache.tree.num_nodes == 1, policy

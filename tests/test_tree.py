"""`RadixTree` against a model that knows blocks and no nodes, and the order in which it evicts."""

import random
from array import array

import pytest
from cache_models import BlockModel, resident, tree_state
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from radixkv import TokenKey
from radixkv.eviction import policy_of
from radixkv.node import Use
from radixkv.tokens import pack
from radixkv.tree import RadixTree

NAMESPACES = [(), ("a",)]
INDEX = st.integers(0, 99)  # picks one of what there is, modulo its number


def lru_tree(block_size):
    """An empty tree that evicts the least recently used first."""
    return RadixTree(block_size, policy_of("lru", block_size))


class TreeMachine(RuleBasedStateMachine):
    """Inserts, locks, and evicts at ticks that repeat and run backwards. The test case of `machine` sets block_size."""

    block_size = 0

    @initialize()
    def start(self):
        self.tree = lru_tree(self.block_size)
        self.model = BlockModel(self.block_size)
        self.next_id = 0
        self.said = [()]
        self.locks = []  # (namespace, tokens of the locked path, node at its end)

    def new_blocks(self, number):
        self.next_id += number
        return array("I", range(self.next_id - number, self.next_id))

    def say(self, index, cut, extra):
        """A sequence that begins as an earlier one."""
        start = self.said[index % len(self.said)]
        tokens = start[: cut % (len(start) + 1)] + tuple(byte % 2 for byte in extra)
        self.said.append(tokens)
        return tokens

    def full(self, tokens):
        return tokens[: len(tokens) // self.block_size * self.block_size]

    def protected(self):
        return {path for namespace, tokens, _ in self.locks for path in self.model.full_paths(namespace, tokens)}

    def check_inserted(self, inserted, namespace, tokens, offered, before):
        """What was there keeps its blocks; the rest has those that were offered; a partial start of it is gone."""
        paths = self.model.full_paths(namespace, tokens)
        assert inserted.num_existing == sum(path in before for path in paths)
        now = resident(self.tree)
        kept = [before[path][0] for path in paths if path in before]
        assert [now[path][0] for path in paths] == kept + list(offered)[len(kept) :]
        assert sorted(inserted.dropped) == sorted(before[path][0] for path in before.keys() - now.keys())

    @rule(index=INDEX, cut=INDEX, extra=st.binary(max_size=40), namespace=st.sampled_from(NAMESPACES),
          tick=st.integers(0, 9))  # fmt: skip
    def insert(self, index, cut, extra, namespace, tick):
        tokens = self.full(self.say(index, cut, extra[: 3 * self.block_size]))
        offered = self.new_blocks(len(tokens) // self.block_size)
        before = resident(self.tree)
        inserted = self.tree.insert(TokenKey(tokens, namespace), offered, tick)
        self.check_inserted(inserted, namespace, tokens, offered, before)
        assert list(inserted.blocks) == [resident(self.tree)[p][0] for p in self.model.full_paths(namespace, tokens)]
        self.model.use(namespace, tokens, tick)

    @rule(index=INDEX, cut=INDEX, extra=st.binary(max_size=20), namespace=st.sampled_from(NAMESPACES),
          tick=st.integers(0, 9))  # fmt: skip
    def lock(self, index, cut, extra, namespace, tick):
        tokens = self.say(index, cut, extra)
        match = self.tree.match(TokenKey(tokens, namespace))
        evictable, on_path = self.tree.num_evictable, self.tree.num_unlocked_on_path(match)
        node = self.tree.lock(namespace, match)
        assert self.tree.num_evictable == evictable - on_path
        tokens = tokens[: len(match.blocks) * self.block_size]
        assert self.tree.path_key(node) == pack(tokens)
        assert self.tree.path_blocks(node) == match.blocks
        self.tree.touch(node, Use(tick, tick))
        self.model.use(namespace, tokens, tick)
        self.locks.append((namespace, tokens, node))

    @precondition(lambda self: self.locks)
    @rule(index=INDEX)
    def unlock(self, index):
        _, _, node = self.locks.pop(index % len(self.locks))
        self.tree.unlock_node(node)

    @precondition(lambda self: self.locks)
    @rule(index=INDEX, extra=st.binary(max_size=40), tick=st.integers(0, 9))
    def grow_below_a_lock(self, index, extra, tick):
        """What a commit does: insert below the end of a path, and move the lock down."""
        index %= len(self.locks)
        namespace, tokens, node = self.locks[index]
        more = self.full(tuple(byte % 2 for byte in extra[: 3 * self.block_size]))
        if not more:
            return
        offered = self.new_blocks(len(more) // self.block_size)
        before, may_extend = resident(self.tree), node.lock_ref == 1
        inserted = self.tree.insert_below(node, pack(more), offered, Use(tick, tick), may_extend)
        self.tree.lock_node(inserted.node)
        self.tree.unlock_node(node)
        self.locks[index] = (namespace, tokens + more, inserted.node)
        self.said.append(tokens + more)
        self.model.use(namespace, tokens + more, tick)
        now = resident(self.tree)
        paths = self.model.full_paths(namespace, tokens + more)[len(tokens) // self.block_size :]
        assert list(inserted.blocks) == [now[path][0] for path in paths]
        assert inserted.num_existing == sum(path in before for path in paths)
        assert sorted(inserted.dropped) == sorted(before[path][0] for path in before.keys() - now.keys())

    @precondition(lambda self: self.locks and self.block_size > 1)
    @rule(index=INDEX, extra=st.binary(min_size=1, max_size=15), tick=st.integers(0, 9))
    def keep_a_partly_filled_block(self, index, extra, tick):
        namespace, tokens, node = self.locks[index % len(self.locks)]
        partial = tuple(byte % 2 for byte in extra[: self.block_size - 1])
        (block_id,) = self.new_blocks(1)
        before = resident(self.tree)
        inserted = self.tree.insert_partial(node, pack(partial), block_id, Use(tick, tick))
        is_new = self.model.keep_partial(namespace, tokens + partial, tick)
        if is_new:
            self.model.use(namespace, tokens, tick)
        assert inserted.num_existing == int(not is_new)
        assert sorted(inserted.dropped) == sorted(before[p][0] for p in before.keys() - resident(self.tree).keys())

    @rule(num_blocks=st.integers(0, 6))
    def evict(self, num_blocks):
        before = resident(self.tree)
        evictable = self.tree.num_evictable
        evicted = list(self.tree.evict(num_blocks))
        lost = before.keys() - resident(self.tree).keys()
        assert len(evicted) == min(num_blocks, evictable)
        assert sorted(evicted) == sorted(before[path][0] for path in lost)
        rank = {block_id: (tick, -len(tokens)) for (_, tokens), (block_id, tick) in before.items()}
        ranks = [(tick, depth // self.block_size) for tick, depth in (rank[block_id] for block_id in evicted)]
        assert ranks == sorted(ranks), "not one by one, the oldest and deepest first"
        self.model.lose(lost, len(evicted), self.protected())

    @rule(index=INDEX, cut=INDEX, extra=st.binary(max_size=20), namespace=st.sampled_from(NAMESPACES),
          limit=st.none() | st.integers(0, 40))  # fmt: skip
    def match(self, index, cut, extra, namespace, limit):
        tokens = self.say(index, cut, extra)
        limit = None if limit is None else min(limit, len(tokens))
        before = tree_state(self.tree)
        match = self.tree.match(TokenKey(tokens, namespace), limit)
        self.tree.num_unlocked_on_path(match)
        self.tree.show()
        assert tree_state(self.tree) == before, "looking changed something"
        num_full, num_tokens = self.model.match(namespace, tokens[:limit])
        assert (len(match.blocks), match.partial_tokens) == (num_full, num_tokens - num_full * self.block_size)
        ids = resident(self.tree)
        assert list(match.blocks) == [ids[path][0] for path in self.model.full_paths(namespace, tokens)[:num_full]]
        if match.partial_tokens:
            copied_from = [path for path, (block_id, _) in ids.items() if block_id == match.partial_block]
            assert [within for within, _ in copied_from] == [namespace]
            assert copied_from[0][1][:num_tokens] == tokens[:num_tokens]

    @invariant()
    def agrees_with_the_model(self):
        self.tree.check()
        assert {path: tick for path, (_, tick) in resident(self.tree).items()} == self.model.ticks
        assert self.tree.num_blocks == len(self.model.ticks)
        assert self.tree.num_protected == len(self.protected())
        for namespace, tokens, node in self.locks:
            assert self.tree.path_key(node) == pack(tokens), "a lock holds another path than it was taken for"
            assert self.tree.namespace_of(node) == namespace

    def teardown(self):
        for _, _, node in getattr(self, "locks", []):
            self.tree.unlock_node(node)
            self.tree.check()
        if hasattr(self, "tree"):
            assert len(self.tree.evict(10**9)) == len(self.model.ticks)
            assert tree_state(self.tree) == [[], [], [], 0, 0, 0], "an empty tree keeps something"


def machine(size):
    """The test case of the machine at one block size."""
    return type(f"TreeMachine{size}", (TreeMachine,), {"block_size": size}).TestCase


TestBlockSize1 = machine(1)
TestBlockSize2 = machine(2)
TestBlockSize4 = machine(4)
TestBlockSize16 = machine(16)


# ---------------------------------------------------------------- the order of eviction


def evict_one_by_one(blocks, num_blocks):
    """The model in ten lines, path -> tick: takes the childless block that is oldest, then deepest, and again."""
    victims = []
    while blocks and len(victims) < num_blocks:
        childless = [p for p in blocks if not any(q[:-1] == p for q in blocks)]
        victim = min(childless, key=lambda path: (blocks[path], -len(path), path))
        victims.append((blocks.pop(victim), len(victim)))
    return victims


@given(seed=st.integers(0, 10**6), num_ticks=st.sampled_from([3, 40]))
def test_lru_evicts_as_if_block_by_block_the_oldest_first_among_equals_the_deepest(seed, num_ticks):
    """Trimming whole runs is only faster: no block may outlive one that was used later, however the edges are cut."""
    rng = random.Random(seed)
    tree, blocks = lru_tree(1), {}
    block_of, next_id = {}, 0
    for _ in range(60):
        if rng.random() < 0.7:
            path = tuple(rng.randrange(2) for _ in range(rng.randrange(1, 9)))
            tick = rng.randrange(num_ticks)
            inserted = tree.insert(TokenKey(path), array("I", range(next_id, next_id + len(path))), tick)
            next_id += len(path)
            for depth, block_id in enumerate(inserted.blocks, start=1):
                blocks[path[:depth]] = max(blocks.get(path[:depth], 0), tick)
                block_of[path[:depth]] = block_id
            continue
        num_blocks = rng.randrange(1, 7)
        evicted = list(tree.evict(num_blocks))
        paths = {block_of[path]: path for path in blocks}
        ticks_before = dict(blocks)
        wanted = evict_one_by_one(blocks, num_blocks)
        assert [(ticks_before[paths[block_id]], len(paths[block_id])) for block_id in evicted] == wanted
        # Among equals in both any may go: the model follows the tree.
        blocks = {path: tick for path, tick in ticks_before.items() if block_of[path] not in evicted}
        tree.check()


def test_equals_take_turns_so_that_a_deep_path_does_not_pay_for_a_shallow_one():
    """The old way emptied one leaf before it touched the next: here that would evict the first block of `deep`."""
    tree = lru_tree(1)
    deep, shallow = tree.insert(TokenKey([1, 2, 3, 4]), array("I", [1, 2, 3, 4]), 5), None
    shallow = tree.insert(TokenKey([9, 8]), array("I", [9, 8]), 5)
    assert list(tree.evict(2)) == [4, 3]
    assert set(tree.evict(2)) == {2, 8}
    assert set(tree.evict(2)) == {1, 9}
    assert deep.num_existing == shallow.num_existing == 0


def test_a_use_does_not_refresh_what_hangs_below_it():
    """Recency is by path: the part of an edge that was not matched keeps its tick, or the wrong blocks would go."""
    tree = lru_tree(1)
    tree.insert(TokenKey([1, 2, 3, 4]), array("I", range(4)), 1)
    tree.insert(TokenKey([7]), array("I", [7]), 2)
    node = tree.lock((), tree.match(TokenKey([1, 2])))
    tree.touch(node, Use(3, 3))
    tree.unlock_node(node)
    assert list(tree.evict(3)) == [3, 2, 7]


def test_new_blocks_do_not_borrow_a_later_tick_from_the_node_that_they_extend():
    """A growing edge has one tick. Ticks that a caller gives out of order once made old blocks pass for recent ones."""
    tree = lru_tree(1)
    tree.insert(TokenKey([1]), array("I", [1]), 10)
    node = tree.lock((), tree.match(TokenKey([1])))
    tree.insert_below(node, pack([2]), array("I", [2]), Use(5, 5), may_extend=True)
    tree.insert(TokenKey([7]), array("I", [7]), 7)
    tree.unlock_node(node)
    assert list(tree.evict(2)) == [2, 7]


# ---------------------------------------------------------------- shape


def test_an_edge_is_split_where_sequences_part_and_merged_again_when_that_is_over():
    """A tree stays as small as its content: one edge, two halves with a branch, and nothing of it after eviction."""
    tree = lru_tree(1)
    tree.insert(TokenKey([1, 2, 3, 4]), array("I", [1, 2, 3, 4]), 1)
    assert tree.num_nodes == 1
    tree.insert(TokenKey([1, 2, 9]), array("I", [5, 6, 7]), 1)
    assert tree.num_nodes == 3
    assert sorted((list(node.blocks), node.end) for node in tree.nodes() if node.blocks) == [
        ([1, 2], 2), ([3, 4], 4), ([7], 3)
    ]  # fmt: skip
    tree.evict(7)
    assert list(tree.nodes()) == []


def test_a_lock_that_split_an_edge_leaves_no_trace():
    """A014: lock then unlock leaves shape and counters as they were."""
    tree = lru_tree(1)
    tree.insert(TokenKey([1, 2, 3, 4]), array("I", [1, 2, 3, 4]), 1)
    node = tree.lock((), tree.match(TokenKey([1, 2])))
    assert (tree.num_nodes, tree.num_protected, tree.num_evictable) == (2, 2, 2)
    tree.unlock_node(node)
    assert (tree.num_nodes, tree.num_protected, tree.num_evictable) == (1, 0, 4)
    tree.check()


def test_unlocking_more_often_than_locking_fails_at_once():
    """B065: a lock given back twice would take another request's protection away."""
    tree = lru_tree(1)
    tree.insert(TokenKey([1]), array("I", [1]), 1)
    mine = tree.lock((), tree.match(TokenKey([1])))
    tree.unlock_node(mine)
    with pytest.raises(AssertionError, match="unlocked more often than locked"):
        tree.unlock_node(mine)
    tree.check()


def test_a_lock_outlives_a_split_of_its_node():
    """B065: the holder keeps the lower half, which still ends where its path ends, and holds the upper through it."""
    tree = lru_tree(1)
    tree.insert(TokenKey([1, 2, 3, 4]), array("I", [1, 2, 3, 4]), 1)
    node = tree.lock((), tree.match(TokenKey([1, 2, 3, 4])))
    tree.insert(TokenKey([1, 2, 9]), array("I", [5, 6, 7]), 2)
    assert list(tree.evict(9)) == [7]
    tree.unlock_node(node)
    assert list(tree.evict(9)) == [4, 3, 2, 1]
    tree.check()


def test_more_blocks_than_the_key_has_tokens_are_refused():
    """A run without tokens could never be found, nor evicted in its place."""
    tree = lru_tree(4)
    with pytest.raises(ValueError, match="2 blocks of 4 tokens for a key of 7 tokens"):
        tree.insert(TokenKey(range(7)), array("I", [1, 2]), 1)


def test_text_of_the_tree_names_ranges_blocks_locks_and_namespaces_and_ends():
    """A person reads it: first tokens as ids or as text, and a count of what was left out."""
    tree = lru_tree(1)
    tree.insert(TokenKey([1, 2, 3], ("a", "b")), array("I", [4, 5, 6]), 7)
    tree.insert(TokenKey([1, 9], ("a", "b")), array("I", [8, 9]), 8)
    text = tree.show()
    assert "3 nodes, 4 blocks of 1 tokens, 0 protected" in text
    assert "namespace a/b" in text
    assert "└─ [0, 1) blocks 4  tick 8  1" in text
    assert "   ├─ [1, 3) blocks 5-6  tick 7  2 3" in text
    assert "   └─ [1, 2) blocks 9  tick 8  9" in text
    assert "'<2,3>'" in tree.show(decode=lambda ids: f"<{','.join(map(str, ids))}>")
    assert tree.show(most=2).endswith("… and 2 more")


def test_a_broken_tree_says_what_is_broken_and_shows_itself():
    """`check` is what the tests rely on: it must not be blind."""
    tree = lru_tree(1)
    node = tree.insert(TokenKey([1, 2]), array("I", [1, 2]), 1).node
    breaks = [
        ("num_blocks", tree, 5, "num_blocks says 5"),
        ("num_protected", tree, 1, "0 protected, counter says 1"),
        ("tick", node, 9, "a child was used later than its parent"),
        ("end", node, 3, "depth"),
        ("label", node, pack([1, 2, 3]), "not as many tokens as its run has slots"),
        ("blocks", node, array("I", [1, 1]), "block 1 is in two places"),
        ("lock_ref", node, 1, "lock_ref"),
    ]
    for name, owner, wrong, sentence in breaks:
        right = getattr(owner, name)
        setattr(owner, name, wrong)
        with pytest.raises(AssertionError, match=f"(?s){sentence}.*radix tree: "):
            tree.check()
        setattr(owner, name, right)
    tree.check()

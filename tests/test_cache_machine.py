"""`PrefixCache` under any calls in any order, at block sizes 1, 2, 4 and 16, against a model that knows blocks only.

The storage's slots remember which tokens wrote them, so a block that is handed out twice, copied too late, found too
early or found by the wrong prompt shows as wrong content. The model says each hit to the token, each victim of an
eviction and each refusal, also when room is short, ticks come out of order, copies fail, and forks share what they
write.
"""

import pytest
from cache_models import (
    BlockModel,
    ShadowStorage,
    StorageBroken,
    assert_holds_its_tokens,
    assert_tree_holds_its_tokens,
    compute,
    resident,
    state,
)
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from radixkv import DuplicateRequest, OutOfBlocks, PrefixCache, TokenKey, UnknownRequest

NAMESPACES = [(), ("a",), ("a", "b")]
# Where a call stands in time: none (the cache counts), or so many ticks from the latest one. Some go backwards.
DELTAS = st.sampled_from([None, None, None, 0, 1, 3, -1, -4])
RARELY = st.sampled_from([False] * 5 + [True])
INDEX = st.integers(0, 99)  # picks one of what there is, modulo its number


class Running:
    """What the machine knows of a running request."""

    def __init__(self, namespace, tokens, num_shared, num_computed, family):
        self.namespace = namespace
        self.tokens = tokens
        self.num_shared = num_shared
        self.num_computed = num_computed
        self.family = family  # of forks


class CacheMachine(RuleBasedStateMachine):
    block_size = 0

    @initialize(
        num_blocks=st.sampled_from([1, 2, 5, 9, 20]), keep_partial=st.sampled_from([True, True, False]),
        min_copy_tokens=st.sampled_from([1, 1, 2]),
    )  # fmt: skip
    def start(self, num_blocks, keep_partial, min_copy_tokens):
        self.storage = ShadowStorage(num_blocks, self.block_size)
        self.cache = PrefixCache(
            num_blocks, self.block_size, storage=self.storage,
            keep_partial=keep_partial, min_copy_tokens=min_copy_tokens,
        )  # fmt: skip
        self.model = BlockModel(self.block_size)
        self.running = {}
        self.said = [((), ())]  # every sequence that ever ran, to continue from
        self.now = 0
        self.num_requests = 0

    # ------------------------------------------------------------ helpers

    def pick(self, index):
        """One of the running requests: its id and what is known of it."""
        request_id = sorted(self.running)[index % len(self.running)]
        return request_id, self.running[request_id]

    def new_id(self):
        self.num_requests += 1
        return self.num_requests

    def ticks(self, delta):
        """The arguments that give a tick so far from now, and the tick."""
        if delta is None:
            return {}, self.now + 1
        tick = max(0, self.now + delta)
        return {"tick": tick}, tick

    def protected(self, *more):
        """The paths that running requests, and sequences given as (namespace, tokens), hold in the tree."""
        held = [(r.namespace, r.tokens[: r.num_shared * self.block_size]) for r in self.running.values()]
        return {path for start in [*held, *more] for path in self.model.full_paths(*start)}

    def take(self, num_blocks, call, *more_protected, broken=False):
        """Runs a call that takes blocks; checks whether it may, and what it evicted. Its result; None if refused.

        broken: the storage fails, and the call needs it.
        """
        before = state(self.cache)
        free, protected = self.cache.num_free_blocks, self.protected(*more_protected)
        evictable = len(self.model.ticks.keys() - protected)
        evicted_before = self.cache.stats.evicted_blocks
        if num_blocks > free + evictable:
            with pytest.raises(OutOfBlocks) as refusal:
                call()
            told = (refusal.value.needed, refusal.value.free, refusal.value.evictable)
            assert told == (num_blocks, free, evictable)
            assert state(self.cache) == before, "a refused call changed something"
            return None
        result = None
        try:
            result = call()
        except StorageBroken:
            assert broken
            assert list(state(self.cache)[1]) == list(before[1]), "a failed copy left a request behind"
        num_evicted = max(0, num_blocks - free)
        self.model.lose(self.model.ticks.keys() - resident(self.cache.tree).keys(), num_evicted, protected)
        assert self.cache.stats.evicted_blocks == evicted_before + num_evicted
        return result

    # ------------------------------------------------------------ rules

    @rule(index=INDEX, cut=INDEX, extra=st.binary(max_size=40), namespace=st.sampled_from(NAMESPACES), fresh=RARELY,
          delta=DELTAS, broken=RARELY)  # fmt: skip
    def allocate(self, index, cut, extra, namespace, fresh, delta, broken):
        said_in, start = self.said[index % len(self.said)]
        namespace = namespace if fresh else said_in
        tokens = start[: cut % (len(start) + 1)] + tuple(byte % 2 for byte in extra[: 2 * self.block_size + 2])
        if not tokens:
            return
        num_full, hit = self.model.match(namespace, tokens[:-1])
        num_copied = hit - num_full * self.block_size
        if num_copied < self.cache.min_copy_tokens:
            num_copied = 0
        hit = num_full * self.block_size + num_copied
        needed = -(-len(tokens) // self.block_size) - num_full
        request_id, (ticks, tick) = self.new_id(), self.ticks(delta)
        self.storage.broken = broken
        allocation = self.take(
            needed,
            lambda: self.cache.allocate(request_id, tokens, namespace, **ticks),
            (namespace, tokens[: num_full * self.block_size]),
            broken=broken and num_copied > 0,
        )
        self.storage.broken = False
        if allocation is None:
            assert request_id not in self.cache.request_ids
            return
        assert allocation.num_cached_tokens == hit <= len(tokens) - 1
        assert (allocation.num_shared_blocks, allocation.num_new_blocks) == (num_full, needed)
        self.model.use(namespace, tokens[: num_full * self.block_size], tick)
        self.now = max(self.now, tick)
        self.running[request_id] = Running(namespace, tokens, num_full, hit, request_id)
        self.said.append((namespace, tokens))

    @precondition(lambda self: self.running)
    @rule(index=INDEX, all_of_it=st.booleans(), part=INDEX, for_all_forks=st.booleans(), delta=DELTAS, broken=RARELY)
    def compute_and_commit(self, index, all_of_it, part, for_all_forks, delta, broken):
        request_id, request = self.pick(index)
        stop = len(request.tokens)
        if not all_of_it:
            stop = request.num_computed + part % (stop - request.num_computed + 1)
        written = request.num_computed
        forward = compute(self.cache, request_id, stop, for_all_forks)
        while written < stop:
            block_id = self.cache.block_table(request_id)[written // self.block_size]
            must_copy = self.cache.ref_count(block_id) > 1 and not for_all_forks
            self.storage.broken = broken and must_copy
            position = self.take(int(must_copy), lambda: next(forward), broken=self.storage.broken)
            self.storage.broken = False
            if position is None:
                break
            written += 1
        self.commit(request_id, written, delta)

    def commit(self, request_id, num_computed, delta):
        request, (ticks, tick) = self.running[request_id], self.ticks(delta)
        tables_before = {other_id: self.cache.block_table(other_id) for other_id in self.running}
        self.cache.commit(request_id, num_computed, **ticks)
        self.now = max(self.now, tick)
        request.num_computed = num_computed
        num_full = num_computed // self.block_size
        if num_full <= request.num_shared:
            return
        self.model.use(request.namespace, request.tokens[: num_full * self.block_size], tick)
        # What kept its id went to the tree. Forks that name it too now hold their path up to there.
        given = set(tables_before[request_id][request.num_shared : num_full])
        given.intersection_update(self.cache.block_table(request_id))
        request.num_shared = num_full
        for other_id, other in self.running.items():
            if other.family == request.family:
                held = [at + 1 for at, block_id in enumerate(tables_before[other_id]) if block_id in given]
                other.num_shared = max([other.num_shared, *held])
                other.num_computed = max(other.num_computed, other.num_shared * self.block_size)

    @precondition(lambda self: self.running)
    @rule(index=INDEX, token=st.integers(0, 1), broken=RARELY)
    def append_token(self, index, token, broken):
        request_id, request = self.pick(index)
        table = self.cache.block_table(request_id)
        at_boundary = len(request.tokens) % self.block_size == 0
        must_copy = not at_boundary and self.cache.ref_count(table[-1]) > 1
        self.storage.broken = broken
        slot = self.take(
            int(at_boundary or must_copy),
            lambda: self.cache.append_token(request_id, token),
            broken=broken and must_copy,
        )
        self.storage.broken = False
        if slot is None:
            assert self.cache.block_table(request_id) == table
            return
        now_table = self.cache.block_table(request_id)
        block_id, offset = divmod(slot, self.block_size)
        assert (block_id, offset) == (now_table[-1], len(request.tokens) % self.block_size)
        assert self.cache.ref_count(block_id) == 1, "a token goes to a block that others read"
        assert now_table[: len(request.tokens) // self.block_size] == table[: len(request.tokens) // self.block_size]
        request.tokens += (token,)
        self.said.append((request.namespace, request.tokens))

    @precondition(lambda self: self.running)
    @rule(index=INDEX)
    def fork(self, index):
        parent_id, parent = self.pick(index)
        child_id = self.new_id()
        counts = [self.cache.ref_count(block_id) for block_id in self.cache.block_table(parent_id)]
        free = self.cache.num_free_blocks
        self.cache.fork(parent_id, child_id)
        assert self.cache.block_table(child_id) == self.cache.block_table(parent_id)
        assert [self.cache.ref_count(b) for b in self.cache.block_table(child_id)] == [count + 1 for count in counts]
        assert self.cache.num_free_blocks == free
        self.running[child_id] = Running(
            parent.namespace, parent.tokens, parent.num_shared, parent.num_computed, parent.family
        )

    @precondition(lambda self: self.running)
    @rule(index=INDEX, place=INDEX, broken=RARELY)
    def write(self, index, place, broken):
        request_id, _ = self.pick(index)
        table = self.cache.block_table(request_id)
        place %= len(table)
        must_copy = self.cache.ref_count(table[place]) > 1
        self.storage.broken = broken
        block_id = self.take(int(must_copy), lambda: self.cache.write(request_id, place), broken=broken and must_copy)
        self.storage.broken = False
        if block_id is None:
            assert self.cache.block_table(request_id) == table
            return
        assert (block_id != table[place]) == must_copy
        assert self.cache.ref_count(block_id) == 1
        assert self.cache.block_table(request_id) == (*table[:place], block_id, *table[place + 1 :])

    @precondition(lambda self: self.running)
    @rule(index=INDEX, delta=DELTAS)
    def free(self, index, delta):
        request_id, request = self.pick(index)
        ticks, tick = self.ticks(delta)
        table = self.cache.block_table(request_id)
        own = sum(self.cache.ref_count(block_id) == 1 for block_id in table)
        free = self.cache.num_free_blocks + self.cache.num_cached_blocks
        first = request.num_shared * self.block_size
        num_partial = request.num_computed - first
        keeps = (
            self.cache.keep_partial
            and num_partial >= self.cache.min_copy_tokens
            and self.cache.ref_count(table[request.num_shared]) == 1
        )
        self.cache.free(request_id, **ticks)
        self.now = max(self.now, tick)
        self.model.use(request.namespace, request.tokens[:first], tick)
        if keeps:
            self.model.keep_partial(request.namespace, request.tokens[: request.num_computed], tick)
        del self.running[request_id]
        assert self.cache.num_free_blocks + self.cache.num_cached_blocks == free + own, "not all of it came back"

    @rule(num_blocks=st.integers(0, 6))
    def evict(self, num_blocks):
        protected = self.protected()
        evicted = self.cache.evict(num_blocks)
        assert evicted == min(num_blocks, len(self.model.ticks.keys() - protected))
        self.model.lose(self.model.ticks.keys() - resident(self.cache.tree).keys(), evicted, protected)

    @rule()
    def reset(self):
        before = state(self.cache)
        if self.running:
            assert self.cache.reset() is False
            assert state(self.cache) == before
        else:
            assert self.cache.reset() is True
            assert self.cache.num_free_blocks == self.cache.num_blocks
            self.model.ticks.clear()

    @rule(index=INDEX, cut=INDEX, extra=st.binary(max_size=20), namespace=st.sampled_from(NAMESPACES), fresh=RARELY)
    def lookup(self, index, cut, extra, namespace, fresh):
        said_in, start = self.said[index % len(self.said)]
        namespace = namespace if fresh else said_in
        tokens = start[: cut % (len(start) + 1)] + tuple(byte % 2 for byte in extra)
        before = state(self.cache)
        found = self.cache.lookup_prefix(TokenKey(tokens, namespace))
        self.cache.can_allocate(len(tokens))
        self.cache.show()
        assert state(self.cache) == before, "looking changed something"
        num_full, num_tokens = self.model.match(namespace, tokens)
        assert (len(found.block_ids), found.num_tokens) == (num_full, num_tokens)
        held = [slot for block_id in found.block_ids for slot in self.storage.block(block_id)]
        assert held == [(namespace, tokens[: position + 1]) for position in range(len(held))]

    @rule(index=INDEX)
    def wrong_arguments(self, index):
        cache, before = self.cache, state(self.cache)
        refused = [
            (UnknownRequest, lambda: cache.free("nobody")),
            (UnknownRequest, lambda: cache.commit("nobody", 1)),
            (UnknownRequest, lambda: cache.append_token("nobody", 1)),
            (UnknownRequest, lambda: cache.fork("nobody", "child")),
            (UnknownRequest, lambda: cache.write("nobody", 0)),
            (ValueError, lambda: cache.allocate("new", [])),
            (ValueError, lambda: cache.allocate("new", [1], tick=-1)),
            (ValueError, lambda: cache.allocate("new", [1, -1])),
            (TypeError, lambda: cache.allocate("new", [1], namespace=0)),
            (ValueError, lambda: cache.evict(-1)),
        ]
        if self.running:
            request_id, request = self.pick(index)
            num_tokens, num_computed = len(request.tokens), request.num_computed
            refused += [
                (DuplicateRequest, lambda: cache.allocate(request_id, [1])),
                (DuplicateRequest, lambda: cache.fork(request_id, request_id)),
                (ValueError, lambda: cache.commit(request_id, num_tokens + 1)),
                (ValueError, lambda: cache.commit(request_id, num_computed - 1)),
                (ValueError, lambda: cache.commit(request_id, num_tokens, tick=-1)),
                (ValueError, lambda: cache.append_token(request_id, 2**32)),
                (IndexError, lambda: cache.write(request_id, -(-num_tokens // self.block_size))),
                (IndexError, lambda: cache.write(request_id, -1)),
                (ValueError, lambda: cache.free(request_id, tick=-1)),
                (TypeError, lambda: cache.free(request_id, tick=0.5)),
            ]
        for kind, call in refused:
            with pytest.raises(kind):
                call()
            assert state(cache) == before

    # ------------------------------------------------------------ what always holds

    @invariant()
    def recounts(self):
        self.cache.check()
        cache = self.cache
        assert cache.num_free_blocks + cache.num_cached_blocks + cache.num_private_blocks == cache.num_blocks
        assert cache.num_protected_blocks == len(self.protected())
        assert cache.num_protected_blocks + cache.num_evictable_blocks == cache.num_cached_blocks
        assert set(cache.request_ids) == set(self.running)

    @invariant()
    def holds_the_blocks_that_the_model_holds(self):
        assert {path: tick for path, (_, tick) in resident(self.cache.tree).items()} == self.model.ticks

    @invariant()
    def every_slot_holds_the_tokens_that_it_stands_for(self):
        assert_tree_holds_its_tokens(self.cache)
        for request_id, request in self.running.items():
            table = self.cache._tables[request_id]
            assert (table.num_tokens, table.num_computed) == (len(request.tokens), request.num_computed)
            assert_holds_its_tokens(self.cache, request_id)

    def teardown(self):
        if not hasattr(self, "cache"):
            return
        for request_id in self.cache.request_ids:
            self.cache.free(request_id)
            self.cache.check()
        assert self.cache.num_protected_blocks == self.cache.num_private_blocks == 0
        assert self.cache.reset()
        assert self.cache.num_free_blocks == self.cache.num_blocks
        assert list(self.cache.tree.nodes()) == [], "an empty cache keeps roots"


def machine(size):
    """The test case of the machine at one block size: at least 150 walks, more where the profile wants more."""
    case = type(f"CacheMachine{size}", (CacheMachine,), {"block_size": size}).TestCase
    case.settings = settings(max_examples=max(150, settings.default.max_examples))
    return case


TestBlockSize1 = machine(1)
TestBlockSize2 = machine(2)
TestBlockSize4 = machine(4)
TestBlockSize16 = machine(16)

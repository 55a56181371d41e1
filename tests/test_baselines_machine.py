"""Random walks over each baseline, compared after every step with a model in which a block is a Python object.

The model searches everything and keeps no counter. Slots remember which tokens were written to them, so that a block
that is freed, evicted or written too early shows as wrong contents, wherever the fault lies.
"""

import itertools

import hypothesis.strategies as st
import pytest
from cache_models import ShadowStorage, StorageBroken
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from radixkv import DuplicateRequest, OutOfBlocks, UnknownRequest
from radixkv.baselines import FlatHashCache, PagedAllocator, SlotAllocator

NAMESPACES = [None, "a", ("a", "b")]
INDEX = st.integers(0, 1_000)
RARELY = st.integers(0, 5).map(lambda number: number == 0)
OFTEN = st.integers(0, 2).map(lambda number: number > 0)
DELTAS = st.sampled_from([None, None, 0, 1, 3, -2])
# How much of an earlier sequence a prompt begins with, how many blocks' worth of tokens follow, and which.
PROMPT = st.tuples(INDEX, st.one_of(st.none(), INDEX), st.sampled_from([0.3, 1, 1.5, 2, 3]), st.integers(0, 255))


class Block:
    """A physical block; which one it is does not matter to the model."""


class Request:
    def __init__(self, namespace, tokens, tick, family):
        self.namespace = namespace
        self.tokens = tokens
        self.tick = tick
        self.family = family
        self.blocks = []
        self.num_held = 0
        self.num_computed = 0
        self.num_written = 0
        self.own_values = {}

    def value(self, position):
        """What the slot of a computed token must hold."""
        return self.own_values.get(position, (self.namespace, self.tokens[: position + 1]))


class Model:
    """Blocks as objects. `cached`: path -> block; `used`: path -> (tick, when let go) of its last use."""

    def __init__(self, num_blocks, block_size, blocks_per_run):
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.blocks_per_run = blocks_per_run
        self.cached = {}
        self.used = {}
        self.running = {}
        self.clock = itertools.count()
        self.num_evicted = 0

    def path(self, request, index):
        return request.namespace, request.tokens[: (index + 1) * self.block_size]

    def held(self):
        return {self.path(request, index) for request in self.running.values() for index in range(request.num_held)}

    def evictable(self):
        return self.cached.keys() - self.held()

    def in_tables(self):
        return {block for request in self.running.values() for block in request.blocks}

    def num_free(self):
        return self.num_blocks - len(self.in_tables() | set(self.cached.values()))

    def num_private(self):
        return len(self.in_tables() - set(self.cached.values()))

    def owners(self, block):
        tables = sum(request.blocks.count(block) for request in self.running.values())
        return tables + (block in self.cached.values())

    def match(self, namespace, tokens):
        path = []
        for end in range(self.block_size, len(tokens) + 1, self.block_size):
            if (namespace, tokens[:end]) not in self.cached:
                break
            path.append((namespace, tokens[:end]))
        return path

    def blocks_for(self, num_tokens):
        return self.blocks_per_run or -(-num_tokens // self.block_size)

    def evict(self, num_blocks):
        for path in sorted(self.evictable(), key=self.used.__getitem__)[:num_blocks]:
            del self.cached[path], self.used[path]
            self.num_evicted += 1

    def make_room(self, num_blocks):
        self.evict(max(0, num_blocks - self.num_free()))

    def let_go(self, request, tick):
        """The request is no longer in `running`; its last block is let go first."""
        held = self.held()
        for index in reversed(range(request.num_held)):
            path = self.path(request, index)
            then = max(self.used.get(path, (0, 0))[0], tick)
            self.used[path] = (then, next(self.clock) if path not in held else -1)

    def hand_over(self, request, num_full, tick):
        request.tick = max(request.tick, tick)
        for index in range(request.num_held, num_full):
            request.blocks[index] = self.cached.setdefault(self.path(request, index), request.blocks[index])
        request.num_held = num_full

    def commit(self, request, num_computed, tick):
        request.num_computed = num_computed
        num_full = num_computed // self.block_size
        if num_full <= request.num_held:
            return
        self.hand_over(request, num_full, tick)
        for fork in self.running.values():
            findable = set(self.cached.values())
            last = max((at + 1 for at, block in enumerate(fork.blocks) if block in findable), default=0)
            if fork.family == request.family and last > fork.num_held:
                self.hand_over(fork, last, tick)
                fork.num_computed = max(fork.num_computed, last * self.block_size)


def state(manager):
    """All that a call may change, as plain values."""
    tables = [
        (
            table.request_id, bytes(table.tokens), list(table.block_ids), [held.block_id for held in table.path],
            table.num_computed, table.num_cached_tokens, table.tick, {fork.request_id for fork in table.forks},
        )
        for table in manager._tables.values()
    ]  # fmt: skip
    cached = order = None
    if isinstance(manager, FlatHashCache):
        cached = [
            (block.digest, block.block_id, block.num_readers, block.tick) for block in manager._by_digest.values()
        ]
        order = [(tick, [held.block_id for held in same_tick]) for tick, same_tick in manager._order.items()]
    pool = [list(manager.pool._owners), bytes(manager.pool._used)]
    return [manager.stats.as_dict(), manager._tick, tables, pool, cached, order]


class BaselineMachine(RuleBasedStateMachine):
    kind = ""
    block_size = 0

    @initialize(num_blocks=st.integers(3, 20), max_blocks=st.integers(1, 3))
    def start(self, num_blocks, max_blocks):
        self.storage = ShadowStorage(num_blocks, self.block_size)
        self.max_len = None
        if self.kind == "slot":
            self.max_len = max(1, max_blocks * self.block_size - 1)
            self.manager = SlotAllocator(num_blocks, self.block_size, self.max_len, storage=self.storage)
        else:
            make = {"paged": PagedAllocator, "hash": FlatHashCache}[self.kind]
            self.manager = make(num_blocks, self.block_size, storage=self.storage)
        self.model = Model(num_blocks, self.block_size, self.max_len and -(-self.max_len // self.block_size))
        self.said = []
        self.now = 0
        self.ids = itertools.count()

    def prompt(self, index, cut, num_blocks, bits):
        """A sequence said before, whole or cut, and further tokens; and the namespace in which it was said."""
        namespace, start = self.said[index % len(self.said)] if self.said else (None, ())
        start = start if cut is None else start[: cut % (len(start) + 1)]
        more = range(max(1, int(num_blocks * self.block_size)))
        return namespace, start + tuple(bits >> position % 8 & 1 for position in more)

    def pick(self, index):
        request_id = list(self.model.running)[index % len(self.model.running)]
        return request_id, self.model.running[request_id]

    def ticks(self, delta):
        """The keyword for a call, and the tick that it means."""
        if delta is None:
            return {}, self.now + 1
        tick = max(0, self.now + delta)
        return {"tick": tick}, tick

    def refused(self, call, needed, pinned=()):
        """True if the call has to be refused, which then is checked: the numbers, and that nothing changed."""
        free, evictable = self.model.num_free(), len(self.model.evictable() - set(pinned))
        if needed <= free + evictable:
            return False
        before = state(self.manager)
        with pytest.raises(OutOfBlocks) as caught:
            call()
        assert (caught.value.needed, caught.value.free, caught.value.evictable) == (needed, free, evictable)
        assert state(self.manager) == before
        return True

    def breaks(self, call, needed):
        """The call has to copy, and the copy fails: room may have been made, and nothing else happened."""
        before = state(self.manager)[2]
        self.storage.broken = True
        with pytest.raises(StorageBroken):
            call()
        self.storage.broken = False
        assert state(self.manager)[2] == before
        self.model.make_room(needed)

    # ------------------------------------------------------------ rules

    @rule(prompt=PROMPT, fresh=RARELY, namespace=st.sampled_from(NAMESPACES), delta=DELTAS)
    def allocate(self, prompt, fresh, namespace, delta):
        said_in, tokens = self.prompt(*prompt)
        namespace = namespace if fresh else said_in
        request_id, (ticks, tick) = f"r{next(self.ids)}", self.ticks(delta)

        def call():
            return self.manager.allocate(request_id, tokens, namespace, **ticks)

        if self.max_len and len(tokens) > self.max_len:
            assert not self.manager.can_allocate(len(tokens))
            with pytest.raises(ValueError, match="max_len"):
                call()
            return
        path = self.model.match(namespace, tokens[:-1]) if self.kind == "hash" else []
        needed = self.model.blocks_for(len(tokens)) - len(path)
        if self.refused(call, needed, path):
            return
        allocation = call()
        assert allocation.request_id == request_id
        assert allocation.num_cached_tokens == len(path) * self.block_size <= len(tokens) - 1
        assert (allocation.num_shared_blocks, allocation.num_new_blocks) == (len(path), needed)
        request = self.model.running[request_id] = Request(namespace, tokens, tick, request_id)
        request.num_held = len(path)
        request.num_computed = len(path) * self.block_size
        self.model.make_room(needed)
        request.blocks = [self.model.cached[held] for held in path] + [Block() for _ in range(needed)]
        self.now = max(self.now, tick)
        self.said.append((namespace, tokens))

    # Hypothesis leaves some rules out of each walk. More ways to begin keep the walks from idling.

    @rule(prompt=PROMPT, written=OFTEN, delta=DELTAS)
    def allocate_and_fork(self, prompt, written, delta):
        num_running = len(self.model.running)
        self.allocate(prompt, False, None, delta)
        if len(self.model.running) > num_running:
            if written:
                self.compute_and_commit(-1, True, 0, False, delta)
            self.fork(-1, False)

    @rule(prompt=PROMPT, fresh=RARELY, namespace=st.sampled_from(NAMESPACES), delta=DELTAS)
    def allocate_and_compute(self, prompt, fresh, namespace, delta):
        num_running = len(self.model.running)
        self.allocate(prompt, fresh, namespace, delta)
        if len(self.model.running) > num_running:
            self.compute_and_commit(-1, True, 0, True, delta)

    @rule(prompt=PROMPT, fresh=RARELY, namespace=st.sampled_from(NAMESPACES), delta=DELTAS)
    def serve(self, prompt, fresh, namespace, delta):
        num_running = len(self.model.running)
        self.allocate_and_compute(prompt, fresh, namespace, delta)
        if len(self.model.running) > num_running:
            self.free(-1, delta)

    @precondition(lambda self: self.model.running)
    @rule(index=INDEX, all_of_it=OFTEN, part=INDEX, commits=OFTEN, delta=DELTAS)
    def compute_and_commit(self, index, all_of_it, part, commits, delta):
        """commits: if not, a fork may come between forward pass and commit, and share what is then committed."""
        request_id, request = self.pick(index)
        written = max(request.num_computed, request.num_written)
        num_left = len(request.tokens) - written
        for position in range(written, written + (num_left if all_of_it else part % (num_left + 1))):
            if not self.write_place(request_id, request, position // self.block_size):
                break
            self.put(request_id, request, position)
            written += 1
        request.num_written = written
        if not commits:
            return
        ticks, tick = self.ticks(delta)
        self.manager.commit(request_id, written, **ticks)
        self.now = max(self.now, tick)
        if self.kind == "hash":
            self.model.commit(request, written, tick)
        else:
            request.num_computed = written

    def put(self, request_id, request, position):
        """The forward pass writes the KV of one token."""
        index, offset = divmod(position, self.block_size)
        slot = self.manager.block_table(request_id)[index] * self.block_size + offset
        self.storage.slots[slot] = request.value(position)

    def write_place(self, request_id, request, index, broken=False):
        """Asks for a place to write, in manager and model; False if there was no room or the copy failed."""
        must_copy = self.model.owners(request.blocks[index]) > 1

        def call():
            return self.manager.write(request_id, index)

        if self.refused(call, int(must_copy)):
            return False
        if must_copy and broken:
            self.breaks(call, 1)
            return False
        block_id = call()
        assert block_id == self.manager.block_table(request_id)[index]
        assert self.manager.ref_count(block_id) == 1
        if must_copy:
            self.model.make_room(1)
            request.blocks[index] = Block()
        return True

    @precondition(lambda self: self.model.running)
    @rule(index=INDEX, place=INDEX, broken=RARELY)
    def overwrite(self, index, place, broken):
        request_id, request = self.pick(index)
        place %= -(-len(request.tokens) // self.block_size)
        if not self.write_place(request_id, request, place, broken):
            return
        if self.kind == "hash" and place >= request.num_held:
            return  # other contents would become findable under these tokens
        first = place * self.block_size
        for position in range(first, min(first + self.block_size, request.num_computed)):
            request.own_values[position] = (request_id, next(self.ids))
            self.put(request_id, request, position)

    @precondition(lambda self: self.model.running)
    @rule(index=INDEX, token=st.integers(0, 1), broken=RARELY)
    def append_token(self, index, token, broken):
        request_id, request = self.pick(index)
        place, offset = divmod(len(request.tokens), self.block_size)

        def call():
            return self.manager.append_token(request_id, token)

        if len(request.tokens) == self.max_len:
            before = state(self.manager)
            with pytest.raises(ValueError, match="max_len"):
                call()
            assert state(self.manager) == before
            return
        is_new = place == len(request.blocks)
        must_copy = not is_new and self.model.owners(request.blocks[place]) > 1
        if self.refused(call, int(is_new or must_copy)):
            return
        if must_copy and broken:
            self.breaks(call, 1)
            return
        slot = call()
        if is_new or must_copy:
            self.model.make_room(1)
            request.blocks[place:] = [Block()]
        block_id = self.manager.block_table(request_id)[place]
        assert slot == block_id * self.block_size + offset
        assert self.manager.ref_count(block_id) == 1
        request.tokens += (token,)
        self.said.append((request.namespace, request.tokens))

    @precondition(lambda self: self.model.running)
    @rule(index=INDEX, broken=RARELY)
    def fork(self, index, broken):
        parent_id, parent = self.pick(index)
        child_id = next(self.ids)

        def call():
            self.manager.fork(parent_id, child_id)

        needed = self.model.blocks_per_run or 0
        if self.refused(call, needed):
            return
        if needed and broken:
            self.breaks(call, needed)
            return
        call()
        child = self.model.running[child_id] = Request(parent.namespace, parent.tokens, parent.tick, parent.family)
        child.num_held, child.num_computed = parent.num_held, parent.num_computed
        child.num_written = parent.num_written
        child.own_values = dict(parent.own_values)
        child.blocks = [Block() for _ in range(needed)] if needed else parent.blocks[:]

    @precondition(lambda self: self.model.running)
    @rule(index=INDEX, delta=DELTAS)
    def free(self, index, delta):
        request_id, request = self.pick(index)
        ticks, tick = self.ticks(delta)
        self.manager.free(request_id, **ticks)
        self.now = max(self.now, tick)
        del self.model.running[request_id]
        self.model.let_go(request, max(request.tick, tick))

    @precondition(lambda self: self.said)
    @rule(num_blocks=st.sampled_from([1, 1, 2, 3, 6, 0]))
    def evict(self, num_blocks):
        expected = min(num_blocks, len(self.model.evictable()))
        assert self.manager.evict(num_blocks) == expected
        self.model.evict(expected)

    @precondition(lambda self: self.said)
    @rule(at_rest=RARELY)
    def reset(self, at_rest):
        before = state(self.manager)
        if not at_rest and not self.model.running:
            return  # or hardly anything would stay cached for long
        if self.model.running:
            assert self.manager.reset() is False
            assert state(self.manager) == before
        else:
            assert self.manager.reset() is True
            assert self.manager.num_free_blocks == self.manager.num_blocks
            self.model.cached.clear()
            self.model.used.clear()

    @precondition(lambda self: self.said)
    @rule(prompt=PROMPT, namespace=st.sampled_from(NAMESPACES))
    def look(self, prompt, namespace):
        said_in, tokens = self.prompt(*prompt)
        before = state(self.manager)
        for within in (said_in, namespace):
            found = self.manager.lookup_prefix(tokens, within)
            path = self.model.match(within, tokens)
            assert (found.num_tokens, len(found.block_ids)) == (len(path) * self.block_size, len(path))
            held = [slot for block_id in found.block_ids for slot in self.storage.block(block_id)]
            assert held == [(within, tokens[: position + 1]) for position in range(len(held))]
            room = self.model.num_free() + len(self.model.evictable())
            fits = self.max_len is None or len(tokens) <= self.max_len
            needed = self.model.blocks_for(len(tokens)) if tokens else 0
            assert self.manager.can_allocate(len(tokens)) == (fits and needed <= room)
        assert "blocks" in self.manager.show() and repr(self.manager)
        assert state(self.manager) == before, "looking changed something"

    @precondition(lambda self: self.said)
    @rule(index=INDEX)
    def wrong_arguments(self, index):
        manager, before = self.manager, state(self.manager)
        wrong = [
            (UnknownRequest, lambda: manager.free("nobody")),
            (UnknownRequest, lambda: manager.commit("nobody", 1)),
            (UnknownRequest, lambda: manager.append_token("nobody", 1)),
            (UnknownRequest, lambda: manager.fork("nobody", "child")),
            (UnknownRequest, lambda: manager.write("nobody", 0)),
            (UnknownRequest, lambda: manager.block_table(["nobody"])),
            (ValueError, lambda: manager.allocate("new", [])),
            (ValueError, lambda: manager.allocate("new", [1], tick=-1)),
            (ValueError, lambda: manager.allocate("new", [-1])),
            (TypeError, lambda: manager.allocate("new", [1], namespace=0)),
            (TypeError, lambda: manager.allocate(1.5, [1])),
            (ValueError, lambda: manager.evict(-1)),
            (TypeError, lambda: manager.evict(True)),
            (ValueError, lambda: manager.can_allocate(-1)),
            (ValueError, lambda: manager.ref_count(manager.num_blocks)),
            (ValueError, lambda: manager.ref_count(-1)),
        ]
        if self.model.running:
            request_id, request = self.pick(index)
            num_tokens, num_computed, num_blocks = len(request.tokens), request.num_computed, len(request.blocks)
            wrong += [
                (DuplicateRequest, lambda: manager.allocate(request_id, [1])),
                (DuplicateRequest, lambda: manager.fork(request_id, request_id)),
                (ValueError, lambda: manager.commit(request_id, num_tokens + 1)),
                (ValueError, lambda: manager.commit(request_id, num_computed - 1)),
                (ValueError, lambda: manager.commit(request_id, num_tokens, tick=-1)),
                (ValueError, lambda: manager.append_token(request_id, 2**32)),
                (IndexError, lambda: manager.write(request_id, num_blocks)),
                (IndexError, lambda: manager.write(request_id, -1)),
                (ValueError, lambda: manager.free(request_id, tick=-1)),
                (TypeError, lambda: manager.free(request_id, tick=0.5)),
            ]
        for kind, call in wrong:
            with pytest.raises(kind):
                call()
            assert state(manager) == before

    # ------------------------------------------------------------ what always holds

    @invariant()
    def recounts(self):
        self.manager.check()

    @invariant()
    def counts_as_the_model_counts(self):
        manager, model = self.manager, self.model
        assert manager.num_free_blocks == model.num_free()
        assert manager.num_cached_blocks == len(model.cached)
        assert manager.num_private_blocks == model.num_private()
        assert manager.num_evictable_blocks == len(model.evictable())
        assert manager.num_protected_blocks == len(model.cached) - len(model.evictable())
        assert manager.request_ids == tuple(model.running)
        assert manager.stats.evicted_blocks == model.num_evicted
        filled = {
            (block, at * self.block_size + offset)
            for request in model.running.values()
            for at, block in enumerate(request.blocks)
            for offset in range(self.block_size)
            if at * self.block_size + offset < len(request.tokens)
        }
        assert manager.num_wasted_slots == len(model.in_tables()) * self.block_size - len(filled)

    @invariant()
    def names_one_physical_block_for_each_block_of_the_model(self):
        pairs = set()
        for request_id, request in self.model.running.items():
            table = self.manager.block_table(request_id)
            assert self.manager.num_tokens(request_id) == len(request.tokens)
            pairs.update(zip(request.blocks, table, strict=True))
        for (namespace, tokens), block in self.model.cached.items():
            found = self.manager.lookup_prefix(tokens, namespace)
            assert found.num_tokens == len(tokens)
            pairs.add((block, found.block_ids[-1]))
        assert len({block for block, _ in pairs}) == len({block_id for _, block_id in pairs}) == len(pairs)
        for block, block_id in pairs:
            assert self.manager.ref_count(block_id) == self.model.owners(block)

    @invariant()
    def every_slot_holds_the_tokens_that_it_stands_for(self):
        for request_id, request in self.model.running.items():
            assert self.manager._tables[request_id].num_computed == request.num_computed
            slots = [slot for block_id in self.manager.block_table(request_id) for slot in self.storage.block(block_id)]
            for position in range(request.num_computed):
                assert slots[position] == request.value(position), f"{request_id!r} at {position}"

    def teardown(self):
        if not hasattr(self, "manager"):
            return
        for request_id in self.manager.request_ids:
            self.manager.free(request_id)
            self.manager.check()
        assert self.manager.num_private_blocks == self.manager.num_protected_blocks == 0
        assert self.manager.reset()
        assert self.manager.num_free_blocks == self.manager.num_blocks


def machine(kind, size):
    """The test case of one baseline at one block size."""
    case = type(f"{kind.title()}Machine{size}", (BaselineMachine,), {"kind": kind, "block_size": size}).TestCase
    if kind != "hash":  # little state, so that half of the walks find as much
        case.settings = settings(max_examples=settings().max_examples // 2)
    return case


TestSlotBlockSize1 = machine("slot", 1)
TestSlotBlockSize2 = machine("slot", 2)
TestSlotBlockSize4 = machine("slot", 4)
TestSlotBlockSize16 = machine("slot", 16)
TestPagedBlockSize1 = machine("paged", 1)
TestPagedBlockSize2 = machine("paged", 2)
TestPagedBlockSize4 = machine("paged", 4)
TestPagedBlockSize16 = machine("paged", 16)
TestHashBlockSize1 = machine("hash", 1)
TestHashBlockSize2 = machine("hash", 2)
TestHashBlockSize4 = machine("hash", 4)
TestHashBlockSize16 = machine("hash", 16)

"""`BlockPool` against a dict that says who owns each block."""

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from radixkv import OutOfBlocks
from radixkv.pool import ROOM, BlockPool

TREE = "tree"


def pool_state(pool):
    """All that a call may change, but for where the next search for a run begins."""
    return list(pool._owners), bytes(pool._used), pool.num_free, pool.num_cached


class PoolMachine(RuleBasedStateMachine):
    @initialize(num_blocks=st.sampled_from([1, 2, 3, 8, 13]))
    def start(self, num_blocks):
        self.pool = BlockPool(num_blocks)
        self.owners = {}  # block id -> number of tables, or TREE; free blocks are missing

    def some(self, owned, picks):
        """Some of the blocks, without repeats, in an order of hypothesis' choice."""
        return list(dict.fromkeys(owned[pick % len(owned)] for pick in picks)) if owned else []

    def free_runs_of(self, length):
        return [
            first
            for first in range(self.pool.num_blocks - length + 1)
            if not any(block_id in self.owners for block_id in range(first, first + length))
        ]

    @rule(num_blocks=st.integers(0, 14), after=st.none() | st.integers(0, 12))
    def allocate(self, num_blocks, after):
        after = None if after is None else after % self.pool.num_blocks
        free = self.pool.num_blocks - len(self.owners)
        if num_blocks > free:
            before = pool_state(self.pool)
            with pytest.raises(OutOfBlocks, match=f"needed={num_blocks} free={free} evictable=0"):
                self.pool.allocate(num_blocks, after)
            assert pool_state(self.pool) == before
            return
        runs = self.free_runs_of(num_blocks)
        block_ids = list(self.pool.allocate(num_blocks, after))
        assert len(block_ids) == num_blocks
        assert block_ids == sorted(set(block_ids)), "ids repeat or do not ascend"
        assert not self.owners.keys() & set(block_ids), "a block that has an owner was handed out"
        if num_blocks and runs:
            assert block_ids[-1] - block_ids[0] == num_blocks - 1, f"scattered, though there is a run at {runs}"
            assert after is None or after + 1 not in runs or block_ids[0] == after + 1
        self.owners.update(dict.fromkeys(block_ids, 1))

    @rule(picks=st.lists(st.integers(0, 99), max_size=5))
    def share(self, picks):
        block_ids = self.some(sorted(self.owners), picks)
        if any(self.owners[block_id] == TREE for block_id in block_ids):
            before = pool_state(self.pool)
            with pytest.raises(ValueError, match="is not private"):
                self.pool.share(block_ids)
            assert pool_state(self.pool) == before
            return
        self.pool.share(iter(block_ids))
        for block_id in block_ids:
            self.owners[block_id] += 1

    @rule(picks=st.lists(st.integers(0, 99), max_size=5))
    def give_to_tree(self, picks):
        block_ids = self.some(sorted(block_id for block_id, owner in self.owners.items() if owner != TREE), picks)
        self.pool.give_to_tree(block_ids)
        self.owners.update(dict.fromkeys(block_ids, TREE))

    @rule(picks=st.lists(st.integers(0, 99), max_size=5))
    def release(self, picks):
        block_ids = self.some(sorted(self.owners), picks)
        freed = [block_id for block_id in block_ids if self.owners[block_id] in (1, TREE)]
        assert self.pool.release(block_ids) == len(freed)
        for block_id in block_ids:
            if block_id in freed:
                del self.owners[block_id]
            else:
                self.owners[block_id] -= 1

    @precondition(lambda self: self.owners)
    @rule(picks=st.lists(st.integers(0, 99), min_size=1, max_size=3), wrong=st.integers(0, 99))
    def refuse(self, picks, wrong):
        good = self.some(sorted(self.owners), picks)
        strangers = [-1, self.pool.num_blocks, *(b for b in range(self.pool.num_blocks) if b not in self.owners)]
        stranger = strangers[wrong % len(strangers)]
        before = pool_state(self.pool)
        with pytest.raises(ValueError, match=f"block {stranger} cannot be released: it is not allocated"):
            self.pool.release([*good, stranger])
        with pytest.raises(ValueError, match="twice in one call"):
            self.pool.release([*good, good[0]])
        with pytest.raises(ValueError, match=f"block {stranger} is not private"):
            self.pool.share([stranger])
        assert pool_state(self.pool) == before

    @invariant()
    def agrees_with_the_dict(self):
        pool = self.pool
        pool.check()
        in_tree = [block_id for block_id, owner in self.owners.items() if owner == TREE]
        assert (pool.num_free, pool.num_cached) == (pool.num_blocks - len(self.owners), len(in_tree))
        assert pool.num_free + pool.num_cached + pool.num_private == pool.num_blocks
        for block_id in range(pool.num_blocks):
            owner = self.owners.get(block_id, 0)
            assert pool.is_cached(block_id) == (owner == TREE)
            assert pool.num_owners(block_id) == (1 if owner == TREE else owner)


TestPoolMachine = PoolMachine.TestCase


def test_all_blocks_are_handed_out_once_and_a_second_release_is_refused():
    """B079: a block in the free list twice would be given to two requests."""
    pool = BlockPool(5)
    blocks = [pool.allocate(1)[0] for _ in range(5)]
    assert sorted(blocks) == [0, 1, 2, 3, 4]
    assert {pool.num_owners(block_id) for block_id in blocks} == {1}
    assert pool.release([3]) == 1
    with pytest.raises(ValueError, match="block 3 cannot be released: it is not allocated"):
        pool.release([3])
    with pytest.raises(ValueError, match="block 5 cannot be released"):
        pool.release([5])
    assert pool.num_free == 1
    assert list(pool.allocate(1)) == [3]
    pool.check()


def test_a_table_grows_in_place_while_its_successors_are_free():
    """A run whose ids ascend by one is a view of the pool for attention; the hint keeps it so beside other requests."""
    pool = BlockPool(10)
    assert list(pool.allocate(2)) == [0, 1]
    assert list(pool.allocate(2)) == [2, 3]
    pool.release([2])
    assert list(pool.allocate(1, after=1)) == [2], "the next fit would have been 4"
    assert list(pool.allocate(1, after=9)) == [3 + 1], "nothing follows the last block"


def test_runs_that_grow_side_by_side_stay_contiguous():
    """Requests that decode together take blocks in turns; without room between them every block would be a new run."""
    pool = BlockPool(1024, most_room=ROOM)
    tables = [list(pool.allocate(3)) for _ in range(8)]
    for _ in range(8):
        for table in tables:
            table += pool.allocate(1, after=table[-1])
    assert all(table == list(range(table[0], table[0] + 11)) for table in tables)
    pool = BlockPool(1024)
    first, second = pool.allocate(3), pool.allocate(3)
    assert list(pool.allocate(1, after=first[-1])) == [second[-1] + 1]


def test_room_is_left_behind_runs_found_on_the_way_round_too():
    """The free blocks behind a request that still grows are its room, and no place for another."""
    pool = BlockPool(256, most_room=ROOM)
    growing = pool.allocate(10)
    others = pool.allocate(200), pool.allocate(35)
    pool.release(others[0])
    assert pool.allocate(100)[0] == 10 + 200 // 64
    assert list(pool.allocate(3, after=growing[-1])) == [10, 11, 12]


def test_room_never_makes_an_allocation_fail_or_scatter():
    """Room is what is left over: a run that fits only without it is still one run, and all blocks can be had."""
    pool = BlockPool(640, most_room=ROOM)
    for _ in range(20):
        pool.allocate(8)
    longest = max(map(len, bytes(pool._used).split(b"\1")))
    run = pool.allocate(longest)
    assert list(run) == list(range(run[0], run[0] + longest))
    assert len(pool.allocate(pool.num_free)) + longest == 640 - 160
    pool.check()


def test_runs_are_searched_all_round_before_blocks_are_scattered():
    """Next fit begins behind the last run, so a run before it must be found as well; then the lowest blocks serve."""
    pool = BlockPool(8)
    pool.allocate(8)
    pool.release([0, 1, 2, 5, 7])
    assert list(pool.allocate(3)) == [0, 1, 2]
    pool.release([1])
    assert list(pool.allocate(3)) == [1, 5, 7]
    assert pool.show().startswith("8 blocks: 0 free, 0 cached, 8 private")


@pytest.mark.parametrize("num_blocks", [0, -1, 2**31])
def test_a_pool_has_a_positive_number_of_blocks_that_fits_a_signed_int(num_blocks):
    """Block ids go to kernels as 32-bit integers."""
    with pytest.raises(ValueError, match=f"num_blocks is {num_blocks}; allowed: 1 <="):
        BlockPool(num_blocks)


@pytest.mark.parametrize("num_blocks", [1.0, "8", None, True])
def test_a_number_of_blocks_is_an_integer(num_blocks):
    """True is an int to Python, and surely a mistake."""
    with pytest.raises(TypeError, match=f"num_blocks must be an integer, not {num_blocks!r}"):
        BlockPool(num_blocks)

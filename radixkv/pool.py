"""Who owns which block.

The pool holds `num_blocks` block ids and nothing else: no tokens, no tensors. A block is in exactly one state:

    free      nobody owns it
    private   one or more block tables own it (more than one after a fork)
    cached    the tree owns it; tables that read it hold a lock on its node instead of owning it

Moves: free -> private (`allocate`), private -> cached (`give_to_tree`), private or cached -> free (`release`).
A table's reference to a cached block is *not* counted here: the lock on the node at the end of its path keeps all the
blocks of the path, so a request that hits 500 blocks costs one increment and not 500.

Invariants: free + private + cached = num_blocks; an id is handed out at most once until it is released.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable

from .arguments import integer
from .errors import OutOfBlocks

FREE = 0
CACHED = -1  # in `_owners`; a positive number counts the tables that own the block
_ONE_OWNER = array("i", (1,))
# Room for 256 tokens in blocks of 16. With twice as much, hardly more neighbours were contiguous.
ROOM = 16
_ROOM_SHARE = 64  # a run's room is at most this part of what is free: little in a small or nearly full pool


class BlockPool:
    """Hands out block ids, in ascending contiguous runs where it can.

    most_room: so many free blocks are left before and behind a new run while there are plenty, so that it and its
    neighbour can grow in place. With `ROOM`, beside others that come, grow and go in a pool with room for all, 97 % of
    neighbours in a table were contiguous, and 60 to 70 % with 0 (`radixkv bench attention`). Where nothing grows, runs
    tile the pool only with 0.

    >>> pool = BlockPool(8)
    >>> list(pool.allocate(3)), pool.num_free
    ([0, 1, 2], 5)
    """

    __slots__ = ("_cursor", "_owners", "_used", "most_room", "num_blocks", "num_cached", "num_free")

    def __init__(self, num_blocks: int, most_room: int = 0) -> None:
        if not 1 <= integer(num_blocks, "num_blocks") < 2**31:
            raise ValueError(f"num_blocks is {num_blocks}; allowed: 1 <= num_blocks < 2**31")
        self.num_blocks = num_blocks
        self.most_room = most_room
        self.num_free = num_blocks
        self.num_cached = 0
        self._owners = array("i", bytes(4 * num_blocks))
        self._used = bytearray(num_blocks)  # 0 = free; a run of n free blocks is found as n zero bytes, by memchr
        self._cursor = 0

    @property
    def num_private(self) -> int:
        """Blocks owned by at least one table."""
        return self.num_blocks - self.num_free - self.num_cached

    def num_owners(self, block_id: int) -> int:
        """Tables that own the block, or 1 for the tree; 0 if it is free."""
        return abs(self._owners[block_id])

    def is_exclusive(self, block_id: int) -> bool:
        """One table owns the block and nobody else reads it, so it may be written in place."""
        return self._owners[block_id] == 1

    def is_cached(self, block_id: int) -> bool:
        """The tree owns the block."""
        return self._owners[block_id] == CACHED

    def allocate(self, num_blocks: int, after: int | None = None) -> array[int]:
        """Takes `num_blocks` free blocks for one table; their ids, ascending by one where there is such a run.

        after: a block id; its successors are preferred, so that a growing request keeps one contiguous run.
        Raises OutOfBlocks, and takes nothing, if fewer are free. O(num_blocks), plus a memchr over the pool.
        """
        if num_blocks > self.num_free:
            raise OutOfBlocks(num_blocks, self.num_free, 0)
        if num_blocks == 0:
            return array("I")
        if after is not None and self._used.startswith(bytes(num_blocks), after + 1):
            block_ids = self._take_run(after + 1, after + 1 + num_blocks)
        else:
            start = self._place(num_blocks)
            if start >= 0:
                block_ids = self._take_run(start, start + num_blocks)
                self._cursor = start + num_blocks
            else:
                block_ids = self._take_scattered(num_blocks)
        self.num_free -= num_blocks
        return block_ids

    def _place(self, num_blocks: int) -> int:
        """Where a new run of free blocks should begin; negative if there is none.

            run of one request │ room │ new run │ room │
                               start  └ here

        Requests that grow side by side take turns: without room between them, each would find its successor taken.
        """
        room = min(self.most_room, self.num_free // _ROOM_SHARE)
        if room:
            start = self._find(bytes(num_blocks + 2 * room))
            if start >= 0:
                return start + room if start > 0 else 0  # nothing grows into the pool's first blocks
        return self._find(bytes(num_blocks))

    def _find(self, wanted: bytes) -> int:
        """Next fit: going round keeps long runs whole, where first fit would nibble at the same low ids for ever."""
        start = self._used.find(wanted, self._cursor)
        return start if start >= 0 else self._used.find(wanted)

    def _take_scattered(self, num_blocks: int) -> array[int]:
        """The lowest free blocks, run by run: there is no single run of that length."""
        used = self._used
        block_ids = array("I")
        start = 0
        while len(block_ids) < num_blocks:
            start = used.find(0, start)
            stop = used.find(1, start)
            if stop < 0:
                stop = self.num_blocks
            stop = min(stop, start + num_blocks - len(block_ids))
            block_ids.extend(self._take_run(start, stop))
            start = stop
        return block_ids

    def _take_run(self, start: int, stop: int) -> array[int]:
        """The free blocks [start, stop), now with one owner each. By slices: a loop took longer than the search."""
        self._used[start:stop] = b"\1" * (stop - start)
        self._owners[start:stop] = _ONE_OWNER * (stop - start)
        return array("I", range(start, stop))

    def share(self, block_ids: Iterable[int]) -> None:
        """Counts one more owning table for each block (a fork). Raises ValueError for one that no table owns."""
        block_ids = list(block_ids)
        for block_id in block_ids:
            if not 0 <= block_id < self.num_blocks or self._owners[block_id] <= 0:
                raise ValueError(f"block {block_id} is not private, so no other table can own it too")
        for block_id in block_ids:
            self._owners[block_id] += 1

    def give_to_tree(self, block_ids: Iterable[int]) -> None:
        """Private blocks become cached ones, whichever tables owned them until now."""
        owners = self._owners
        for block_id in block_ids:
            assert owners[block_id] > 0, f"block {block_id} is not private, so no table can hand it to the tree"
            owners[block_id] = CACHED
            self.num_cached += 1

    def release(self, block_ids: Iterable[int]) -> int:
        """Takes away one owner of each block; the number of blocks that are free now because of it. O(len(block_ids)).

        Raises ValueError, with nothing changed, for a block that is free already or never existed.
        """
        block_ids = list(block_ids)
        owners = self._owners
        for block_id in block_ids:
            if not 0 <= block_id < self.num_blocks or owners[block_id] == FREE:
                raise ValueError(f"block {block_id} cannot be released: it is not allocated")
        if len(set(block_ids)) != len(block_ids):
            raise ValueError("a block cannot be released twice in one call")
        num_freed = 0
        for block_id in block_ids:
            if owners[block_id] > 1:
                owners[block_id] -= 1
                continue
            if owners[block_id] == CACHED:
                self.num_cached -= 1
            owners[block_id] = FREE
            self._used[block_id] = 0
            num_freed += 1
        self.num_free += num_freed
        return num_freed

    def check(self) -> None:
        """Recounts the pool; AssertionError with a sentence if a count is wrong."""
        owners = self._owners
        num_free = sum(1 for count in owners if count == FREE)
        num_cached = sum(1 for count in owners if count == CACHED)
        assert min(owners) >= CACHED, f"a block has a negative number of owners\n{self.show()}"
        assert num_free == self.num_free, f"{num_free} blocks are free, num_free says {self.num_free}\n{self.show()}"
        assert num_cached == self.num_cached, f"{num_cached} cached, num_cached says {self.num_cached}\n{self.show()}"
        for block_id, count in enumerate(owners):
            assert (count == FREE) == (self._used[block_id] == 0), f"block {block_id} is free in one map only"

    def show(self) -> str:
        """The pool as one line of counts and one of characters: `.` free, `c` cached, `1`-`9` owning tables."""
        strip = "".join("." if n == FREE else "c" if n == CACHED else str(min(n, 9)) for n in self._owners[:256])
        more = "…" if self.num_blocks > 256 else ""
        counts = f"{self.num_free} free, {self.num_cached} cached, {self.num_private} private"
        return f"{self.num_blocks} blocks: {counts}\n{strip}{more}"

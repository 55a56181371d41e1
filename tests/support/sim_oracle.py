"""What a replay must give, block by block: dicts of blocks, and leaves found by looking at all of them.

Written from the definitions and from nothing else. A block is the tuple of all units up to its end, so that equal units
behind different ones are different blocks. `replay_blocks` is slow and obvious; `replay_many` is the same for traces of
a hundred thousand blocks: numbers for blocks, and a heap of leaves.
"""

import heapq
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Any, TypeAlias

Units: TypeAlias = Sequence[int]
Block: TypeAlias = tuple[int, ...]
NEVER = float("inf")


@dataclass
class Cached:
    """What is known of a cached block: its number of units, when it was inserted and used last, and how often."""

    depth: int
    created: tuple[int, int]
    last_use: tuple[int, int]
    uses: int


class AmbiguousVictim(Exception):
    """Two leaves are equal in all that the policy names, so the definition leaves open which one goes."""


def blocks_of(units: Units, size: int = 1) -> list[Block]:
    """The full blocks of a prompt, `size` units each."""
    return [tuple(units[:end]) for end in range(size, len(units) + 1, size)]


class BlockCache:
    """Blocks under a capacity. Used at `(request, step)`: step 0 is the prompt, step 1 its output."""

    def __init__(self, policy: str, capacity: int | None, size: int = 1) -> None:
        self.policy = policy
        self.capacity = capacity
        self.size = size
        self.blocks: dict[Block, Cached] = {}
        self.age = 0.0
        self.ages: dict[Block, float] = {}
        self.num_evicted = 0

    def hit(self, units: Units) -> int:
        """The longest run of leading blocks that are all cached."""
        return len(list(takewhile(self.blocks.__contains__, blocks_of(units, self.size))))

    def use(self, units: Units, request: int, step: int = 0, counted: frozenset[Block] = frozenset()) -> None:
        """Inserts and uses all blocks of a path. Those in `counted` were counted for this request already."""
        for block in blocks_of(units, self.size):
            cached = self.blocks.setdefault(block, Cached(len(block), (request, step), (0, 0), 0))
            cached.last_use = (request, step)
            cached.uses += block not in counted
            self.ages[block] = self.age

    def leaves(self) -> list[Block]:
        """Blocks that no other cached block goes on from."""
        parents = {block[: -self.size] for block in self.blocks}
        return [block for block in self.blocks if block not in parents]

    def rank(self, block: Block, next_use: dict[Block, float]) -> Any:
        """What the policy sorts by; the lowest goes first, among equals the deepest."""
        cached = self.blocks[block]
        depth = cached.depth // self.size
        return {
            "lru": cached.last_use,
            "priority": cached.last_use,
            "mru": (-cached.last_use[0], -cached.last_use[1]),
            "fifo": cached.created[0],
            "lfu": (cached.uses, cached.last_use),
            "slru": (cached.uses > 1, cached.last_use),
            "cost": self.ages[block] + cached.uses * (1 + depth / (24_576 / self.size)),
            "optimal": -next_use.get(block, NEVER),
        }[self.policy]

    def fit(self, next_use: dict[Block, float] | None = None) -> None:
        """Drops one leaf after the other while over capacity."""
        while self.capacity is not None and len(self.blocks) > self.capacity:
            order = sorted(
                (self.rank(block, next_use or {}), -len(block), self.blocks[block].created[1], block)
                for block in self.leaves()
            )
            if self.policy == "cost" and len(order) > 1 and order[0][:2] == order[1][:2]:
                raise AmbiguousVictim
            rank, _, _, victim = order[0]
            del self.blocks[victim]
            self.num_evicted += 1
            if self.policy == "cost":
                self.age = max(self.age, rank)


def replay_blocks(
    prompts: Sequence[Units],
    policy: str,
    capacity: int | None,
    *,
    size: int = 1,
    limits: Sequence[int] | None = None,
    outputs: Sequence[tuple[int, Units]] | None = None,
) -> tuple[list[int], int | None]:
    """Hit blocks of each request, and how many blocks were evicted. Stops before a victim that is left open: then None.

    limits    units of each prompt that a hit can have at most
    outputs   of each request: how many of its prompt's units are full, and the units of the output behind those
    """
    cache = BlockCache(policy, capacity, size)
    hits: list[int] = []
    for index, prompt in enumerate(prompts):
        num_hits = cache.hit(prompt)
        hits.append(num_hits if limits is None else min(num_hits, limits[index] // size))
        cache.use(prompt, index)
        num_full, output = outputs[index] if outputs is not None else (0, ())
        if len(output):
            cache.use([*prompt[:num_full], *output], index, 1, frozenset(blocks_of(prompt, size)))
        next_use: dict[Block, float] = {}
        if policy == "optimal":
            for later in range(len(prompts) - 1, index, -1):
                next_use.update(dict.fromkeys(blocks_of(prompts[later], size), later))
        try:
            cache.fit(next_use)
        except AmbiguousVictim:
            return hits, None
    return hits, cache.num_evicted


# ---------------------------------------------------------------- the same for many blocks


def numbered(prompts: Iterable[Units]) -> Iterator[list[int]]:
    """Each prompt's blocks as numbers: one number for each path of units, in order of first sight."""
    numbers: dict[tuple[int, int], int] = {}
    for prompt in prompts:
        path = []
        number = -1
        for unit in prompt:
            number = numbers.setdefault((number, unit), len(numbers))
            path.append(number)
        yield path


def replay_many(paths: Sequence[list[int]], policy: str, capacity: int | None) -> list[int]:
    """Hit blocks of each request, for "lru", "fifo", "lfu" and "optimal". paths: as `numbered` gives them."""
    num_blocks = 1 + max((max(path) for path in paths if path), default=-1)
    next_uses: list[list[float]] = []
    if policy == "optimal":
        coming = [NEVER] * num_blocks
        for index in range(len(paths) - 1, -1, -1):
            next_uses.append([coming[block] for block in paths[index]])
            for block in paths[index]:
                coming[block] = index
        next_uses.reverse()
    is_cached = bytearray(num_blocks)
    num_children = [0] * num_blocks
    parent = [-1] * num_blocks
    depth = [0] * num_blocks
    created, uses = [0] * num_blocks, [0] * num_blocks
    rank: list[Any] = [None] * num_blocks
    leaves: list[tuple[Any, int, int]] = []
    hits = []
    num_cached = 0
    for index, path in enumerate(paths):
        hits.append(len(list(takewhile(is_cached.__getitem__, path))))
        before = -1
        for place, block in enumerate(path):
            if not is_cached[block]:
                is_cached[block] = 1
                num_cached += 1
                created[block], uses[block] = index, 0
                parent[block], depth[block] = before, place
                if before >= 0:
                    num_children[before] += 1
            uses[block] += 1
            if policy == "lru":
                rank[block] = index
            elif policy == "fifo":
                rank[block] = created[block]
            elif policy == "lfu":
                rank[block] = (uses[block], index)
            else:
                rank[block] = -next_uses[index][place]
            before = block
        if path and num_children[path[-1]] == 0:
            heapq.heappush(leaves, (rank[path[-1]], -depth[path[-1]], path[-1]))
        while capacity is not None and num_cached > capacity:
            its_rank, _, block = heapq.heappop(leaves)
            if not is_cached[block] or num_children[block] or its_rank != rank[block]:
                continue
            is_cached[block] = 0
            num_cached -= 1
            before = parent[block]
            if before >= 0:
                num_children[before] -= 1
                if num_children[before] == 0:
                    heapq.heappush(leaves, (rank[before], -depth[before], before))
    return hits

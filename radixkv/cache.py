"""`PrefixCache`: the one object that engine, simulator and notebooks drive.

Ties the pool, the tree and the block tables together and keeps this sentence true: every block is free, or private to
block tables, or cached in the tree, and in exactly one of these states. `check()` recounts it.

The life of a request:

    allocate   longest cached start shared and locked; the rest of the prompt gets private blocks
    (compute)  the caller writes K and V of the tokens from `num_cached_tokens` on
    commit     full, computed blocks go to the tree; where it had the same tokens already, the table is re-pointed
    append_token, (compute), commit, ... once for each generated token
    free       the lock goes; what was committed stays cached, the rest is free at once

Not safe for use from several threads at once: one owner drives it, as a scheduler does.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal, Protocol

from .arguments import at_least, integer
from .block_table import BlockTable
from .errors import DuplicateRequest, OutOfBlocks, UnknownRequest
from .events import BlockLog, Listener
from .eviction import EvictionPolicy, policy_of
from .node import RadixNode, Use
from .pool import ROOM, BlockPool
from .stats import CacheStats
from .tokens import (
    TOKEN_BYTES,
    Namespace,
    NamespaceLike,
    TokenKey,
    block_digest,
    normalize_namespace,
    pack_one,
    root_digest,
)
from .tree import RadixTree


class Storage(Protocol):
    """What the cache asks of the owner of the tensors (`radixkv.storage.KVStorage`)."""

    num_blocks: int
    block_size: int

    def copy_block(self, source: int, target: int, num_tokens: int) -> None:
        """Copies K and V of the first `num_tokens` slots of a block, in all layers."""


@dataclass(frozen=True)
class PrefixMatch:
    """What of a prompt is cached: `num_tokens` to the token, `block_ids` of the full blocks among them."""

    num_tokens: int
    run: array[int]

    @cached_property
    def block_ids(self) -> tuple[int, ...]:
        """Ids of the full blocks, in token order."""
        return tuple(self.run)


@dataclass(frozen=True)
class Allocation:
    """What a request got. Compute starts at token `num_cached_tokens`.

    num_cached_tokens   prompt tokens whose KV is in place, at most len(prompt) - 1
    num_shared_blocks   leading blocks shared with the tree; the hit's other tokens were copied into the next block
    num_new_blocks      blocks taken from the pool
    """

    request_id: str | int
    num_cached_tokens: int
    num_shared_blocks: int
    num_new_blocks: int


@dataclass(frozen=True)
class Miss:
    """Why a prompt is not cached beyond its first `num_cached_tokens` tokens.

    hit              it is cached as a whole
    evicted          the next block was here, and had to go (known only with `remember_evicted`)
    diverged         the cache goes on from here with other tokens
    other namespace  another namespace has more of it, which is never shared
    never seen       none of these
    """

    num_cached_tokens: int
    reason: Literal["hit", "evicted", "diverged", "other namespace", "never seen"]


class PrefixCache:
    """A paged KV cache with a radix tree over what it holds.

    num_blocks, block_size   the pool: blocks, and tokens per block
    policy            which unlocked leaf goes first: "lru", "lfu", "fifo", "mru", "slru", "priority", "cost", an
                      `EvictionPolicy`, or a function that ranks a node (lowest first)
    storage           owner of the tensors, for copies; None where there are none (simulation)
    keep_partial      a finished request's partly filled last block stays findable
    min_copy_tokens   a hit inside a block is taken by copying only if it saves at least so many tokens
    remember_evicted  digests of evicted blocks to remember, for `explain_miss`; costs a SHA-256 per committed block

    In a notebook a cache draws itself; with `cache.decode` set to a tokenizer's `decode`, with text on the nodes.

    >>> cache = PrefixCache(num_blocks=8, block_size=4)
    >>> prompt = [1, 2, 3, 4, 5, 6]
    >>> cache.allocate("a", prompt).num_cached_tokens
    0
    >>> cache.commit("a", 6); cache.free("a")
    >>> cache.allocate("b", prompt + [7]).num_cached_tokens
    6
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int = 16,
        policy: str | EvictionPolicy | Callable[[RadixNode], Any] = "lru",
        storage: Storage | None = None,
        *,
        keep_partial: bool = True,
        min_copy_tokens: int = 1,
        remember_evicted: int = 0,
    ) -> None:
        at_least(1, block_size, "block_size")
        at_least(1, min_copy_tokens, "min_copy_tokens")
        at_least(0, remember_evicted, "remember_evicted")
        if storage is not None and (storage.num_blocks, storage.block_size) != (num_blocks, block_size):
            raise ValueError(
                f"the storage has {storage.num_blocks} blocks of {storage.block_size} tokens, "
                f"the cache {num_blocks} of {block_size}"
            )
        self.block_size = block_size
        self.num_blocks = num_blocks
        self.keep_partial = keep_partial
        self.min_copy_tokens = min_copy_tokens
        self.pool = BlockPool(num_blocks, most_room=ROOM)
        self.tree = RadixTree(block_size, policy_of(policy, block_size))
        self.stats = CacheStats()
        self.storage = storage
        self.decode: Callable[[list[int]], str] | None = None  # a tokenizer's, for the text in pictures
        self._tables: dict[str | int, BlockTable] = {}
        self._namespace_stats: dict[Namespace, CacheStats] = {}
        self._remember_evicted = remember_evicted
        self._log = BlockLog(remember_evicted) if remember_evicted else None
        self._tick = 0

    # ---------------------------------------------------------------- counts

    @property
    def num_free_blocks(self) -> int:
        """Blocks that nobody owns."""
        return self.pool.num_free

    @property
    def num_cached_blocks(self) -> int:
        """Blocks in the tree; evictable + protected."""
        return self.pool.num_cached

    @property
    def num_private_blocks(self) -> int:
        """Blocks that belong to running requests only. free + cached + private = num_blocks."""
        return self.pool.num_private

    @property
    def num_evictable_blocks(self) -> int:
        """Cached blocks on no running request's path."""
        return self.tree.num_evictable

    @property
    def num_protected_blocks(self) -> int:
        """Cached blocks on a running request's path."""
        return self.tree.num_protected

    @property
    def request_ids(self) -> tuple[str | int, ...]:
        """Ids of the running requests, in order of arrival."""
        return tuple(self._tables)

    def ref_count(self, block_id: int) -> int:
        """Owners of a block: the tree (one at most) plus the block tables that name it. O(running requests' blocks)."""
        if not 0 <= integer(block_id, "block_id") < self.num_blocks:
            raise ValueError(f"block_id is {block_id}; allowed: 0 <= block_id < {self.num_blocks}")
        tables = sum(table.block_ids.count(block_id) for table in self._tables.values())
        return tables + self.pool.is_cached(block_id)

    def block_table(self, request_id: str | int) -> tuple[int, ...]:
        """Physical block ids of a running request, in logical order."""
        return tuple(self._table(request_id).block_ids)

    def table(self, request_id: str | int) -> BlockTable:
        """The block table of a running request as the cache keeps it, to look at: in a notebook it draws itself."""
        return self._table(request_id)

    def num_tokens(self, request_id: str | int) -> int:
        """Tokens of a running request that have a slot."""
        return self._table(request_id).num_tokens

    # ---------------------------------------------------------------- looking up

    def lookup_prefix(self, token_ids: TokenKey | Iterable[int] | Any, namespace: NamespaceLike = None) -> PrefixMatch:
        """How much of a prompt is cached, exact to the token. Read-only: not even the order of use changes.

        `allocate` uses at most len(token_ids) - 1 of it, since one token must be computed to predict the next.
        O(nodes on the path) and a memcmp over the tokens.
        """
        match = self.tree.match(TokenKey.of(token_ids, namespace))
        return PrefixMatch(len(match.blocks) * self.block_size + match.partial_tokens, match.blocks)

    def can_allocate(self, num_tokens: int) -> bool:
        """Whether there is room for `num_tokens` more tokens of one request, counting free and evictable blocks."""
        at_least(0, num_tokens, "num_tokens")
        return self._blocks_for(num_tokens) <= self.num_free_blocks + self.num_evictable_blocks

    # ---------------------------------------------------------------- the life of a request

    def allocate(
        self,
        request_id: str | int,
        token_ids: TokenKey | Iterable[int] | Any,
        namespace: NamespaceLike = None,
        *,
        tick: int | None = None,
        priority: int = 0,
        max_cached_tokens: int | None = None,
        spare_blocks: int = 0,
        is_resumed: bool = False,
        ttl: int | None = None,
    ) -> Allocation:
        """A block table for a prompt: its longest cached start shared, the rest from the pool.

        Where the prompt leaves the tree inside a block, the leading tokens' KV is copied into the request's own block.
        priority, ttl: for the "priority" policy; what the request uses keeps that priority for `ttl` ticks (None: until
        it is evicted all the same, when nothing of lower priority is left).
        max_cached_tokens: use at most so much of the cache; 0 for a request that needs all of its prompt computed.
        spare_blocks: so many blocks must be left, free or evictable, for the growth of the running requests.
        is_resumed: the request was counted in `stats` when it came first, and gave its blocks up since.
        Raises OutOfBlocks, with nothing changed, if free blocks and those evictable beside the hit do not suffice;
        DuplicateRequest; ValueError for an empty prompt. If the storage fails to copy, nothing is taken (blocks
        evicted to make room stay evicted). O(nodes on the path + blocks).
        """
        self._require_new(request_id)
        key = TokenKey.of(token_ids, namespace)
        num_tokens = len(key)
        if num_tokens == 0:
            raise ValueError("token_ids is empty; allowed: one token and more")
        at_least(0, priority, "priority")
        if ttl is not None and integer(ttl, "ttl") < 1:
            raise ValueError(f"ttl is {ttl}; allowed: 1 and more, or None")
        at_least(0, spare_blocks, "spare_blocks")
        most_cached = num_tokens - 1
        if max_cached_tokens is not None:
            most_cached = min(most_cached, at_least(0, max_cached_tokens, "max_cached_tokens"))
        tick = self._checked_tick(tick)
        use = Use(tick, tick, 1, priority, tick + ttl if priority and ttl is not None else None)
        # 1. Look, change nothing. One prompt token is always computed, hence the limit.
        match = self.tree.match(key, most_cached)
        num_shared = len(match.blocks)
        num_copied = match.partial_tokens if match.partial_tokens >= self.min_copy_tokens else 0
        # 2. Is there room? What the hit itself pins is no room.
        needed = self._blocks_for(num_tokens) - num_shared
        evictable = self.num_evictable_blocks - self.tree.num_unlocked_on_path(match)
        if needed + spare_blocks > self.num_free_blocks + evictable:
            raise OutOfBlocks(needed + spare_blocks, self.num_free_blocks, evictable)
        # 3. Pin the hit, then make room beside it.
        node = self.tree.lock(key.namespace, match)
        new_blocks = self._take(needed, after=match.blocks[-1] if num_shared else None, now=tick)
        # 4. The block to copy from may have been evicted just now, and even be the target: its content still stands,
        #    since nothing has been written since.
        if num_copied:
            try:
                self._copy(match.partial_block, new_blocks[0], num_copied)
            except BaseException:
                self.pool.release(new_blocks)
                self.tree.unlock_node(node)
                raise
            self.stats.partial_copies += 1
            self.stats.copied_tokens += num_copied
        # 5. Nothing can fail from here on.
        self.tree.touch(node, use)
        table = BlockTable(request_id, key.namespace, self.block_size, node, use)
        table.tokens += key.data
        table.block_ids = match.blocks + new_blocks
        table.num_shared = num_shared
        table.num_cached_tokens = table.num_computed = num_shared * self.block_size + num_copied
        self._tables[request_id] = table
        self._tick = max(self._tick, tick)
        if not is_resumed:
            namespace_stats = self._namespace_stats.get(key.namespace)
            if namespace_stats is None:
                namespace_stats = self._namespace_stats[key.namespace] = CacheStats()
            for stats in (self.stats, namespace_stats):
                stats.count_request(num_tokens, table.num_cached_tokens, len(table.block_ids), num_shared)
        return Allocation(request_id, table.num_cached_tokens, num_shared, needed)

    def append_token(self, request_id: str | int, token_id: int) -> int:
        """The slot to which a further token of the request goes. A block is taken only at a block boundary.

        Writing there is safe: if a fork shares the tail block, this request gets its own copy first (copy-on-write).
        Raises OutOfBlocks with nothing changed. O(1), but for a copy.
        """
        table = self._table(request_id)
        packed = pack_one(token_id)
        index, offset = divmod(len(table.tokens) // TOKEN_BYTES, self.block_size)
        if offset == 0:
            table.block_ids.extend(self._take(1, after=table.block_ids[-1]))
        elif not self.pool.is_exclusive(table.block_ids[index]):
            self._copy_on_write(table, index)
        table.tokens += packed
        return table.block_ids[index] * self.block_size + offset

    def commit(self, request_id: str | int, num_computed_tokens: int, *, tick: int | None = None) -> None:
        """Says that K and V of the request's first `num_computed_tokens` tokens are written.

        Full blocks among them become findable and immutable. Where the tree had the same tokens already (two requests
        computed them at once), the table is re-pointed to the tree's blocks and the duplicates are free. Full blocks
        that forks share are computed for all of them: one commit counts for each.
        Raises ValueError for more tokens than have a slot, or fewer than before. O(blocks that are new to the tree).
        """
        table = self._table(request_id)
        if integer(num_computed_tokens, "num_computed_tokens") > table.num_tokens:
            raise ValueError(
                f"num_computed_tokens is {num_computed_tokens}; only {table.num_tokens} tokens have a slot"
            )
        if num_computed_tokens < table.num_computed:
            raise ValueError(f"num_computed_tokens is {num_computed_tokens}; {table.num_computed} were computed before")
        tick = self._checked_tick(tick)
        self._tick = max(self._tick, tick)
        table.num_computed = num_computed_tokens
        num_full = num_computed_tokens // self.block_size
        if num_full <= table.num_shared:
            return
        self._hand_to_tree(table, num_full, tick)
        # Forks own the same private blocks, which now are the tree's: they too must hold them by a lock.
        if len(table.forks) == 1:
            return
        for fork in table.forks:
            num_full = len(fork.block_ids)
            while num_full > fork.num_shared and not self.pool.is_cached(fork.block_ids[num_full - 1]):
                num_full -= 1
            if num_full > fork.num_shared:
                self._hand_to_tree(fork, num_full, tick)
                fork.num_computed = max(fork.num_computed, num_full * self.block_size)

    def _hand_to_tree(self, table: BlockTable, num_full: int, tick: int) -> None:
        """Makes the table's first `num_full` blocks a path of the tree, and moves its lock to the end of it."""
        first = table.num_shared
        block_bytes = self.block_size * TOKEN_BYTES
        label = bytes(table.tokens[first * block_bytes : num_full * block_bytes])
        old_node = table.node
        may_extend = old_node.lock_ref == 1
        parent_block = old_node.blocks[-1] if old_node.blocks else None
        mine = table.block_ids[first:num_full]
        inserted = self.tree.insert_below(old_node, label, mine, table.use.at(tick), may_extend)
        existing = inserted.num_existing
        new = mine[existing:]
        self.pool.give_to_tree(new)
        duplicates = [a for a, b in zip(mine[:existing], inserted.blocks, strict=False) if a != b]
        self.pool.release([*duplicates, *inserted.dropped])
        table.block_ids[first:num_full] = inserted.blocks
        if self._log is not None:
            if existing:
                parent_block = inserted.blocks[existing - 1]
            self._log.stored(table.namespace, parent_block, label[existing * block_bytes :], new, block_bytes)
        table.num_shared = num_full
        table.node = inserted.node
        # Down first, then up: in between, both ends are locked, so nothing on the path is ever evictable.
        self.tree.lock_node(inserted.node)
        self.tree.unlock_node(old_node)
        self.stats.committed_blocks += len(new)

    def fork(self, parent_id: str | int, child_id: str | int) -> None:
        """A request that continues from another's tokens and shares every block of it. Takes no block; O(blocks).

        The first of them that writes into the shared tail gets its own copy then (`append_token`, `write`).
        """
        parent = self._table(parent_id)
        self._require_new(child_id)
        child = BlockTable(child_id, parent.namespace, self.block_size, parent.node, parent.use)
        child.tokens += parent.tokens
        child.block_ids = parent.block_ids[:]
        child.num_shared = parent.num_shared
        child.num_computed = parent.num_computed
        child.num_cached_tokens = parent.num_cached_tokens
        child.detached = set(parent.detached)
        self.pool.share(parent.private_blocks())
        self.tree.lock_node(parent.node)
        parent.forks.add(child)
        child.forks = parent.forks
        self._tables[child_id] = child

    def write(self, request_id: str | int, block_index: int) -> int:
        """The block to write to at this place of the request's table: its own copy if others read the old one.

        Raises OutOfBlocks with nothing changed; IndexError for a place beyond the table.
        """
        table = self._table(request_id)
        if not 0 <= integer(block_index, "block_index") < len(table.block_ids):
            raise IndexError(f"block_index is {block_index}; the table has {len(table.block_ids)} blocks")
        if table.must_copy_before_writing(block_index, self.pool):
            self._copy_on_write(table, block_index)
        return table.block_ids[block_index]

    def free(self, request_id: str | int, *, tick: int | None = None) -> None:
        """Ends a request, at any point of its life. What was committed stays cached; the rest is free at once."""
        table = self._table(request_id)
        tick = self._checked_tick(tick)
        self._tick = max(self._tick, tick)
        private = table.private_blocks()
        tail = self._keep_partial_tail(table, tick)
        if tail is not None:
            private.remove(tail)
        self.pool.release(private)
        self.tree.touch(table.node, table.use.at(tick), above=table.node)
        self.tree.unlock_node(table.node)
        table.forks.discard(table)
        del self._tables[request_id]

    def _keep_partial_tail(self, table: BlockTable, tick: int) -> int | None:
        """The tail block, if its computed tokens were handed to the tree as a partial leaf; None if not wanted."""
        first = table.num_shared * self.block_size
        num_tokens = table.num_computed - first
        if not self.keep_partial or not self.min_copy_tokens <= num_tokens:
            return None
        block_id = table.block_ids[table.num_shared]
        if self.pool.num_owners(block_id) > 1:
            return None  # a fork goes on writing to it
        label = bytes(table.tokens[first * TOKEN_BYTES : table.num_computed * TOKEN_BYTES])
        inserted = self.tree.insert_partial(table.node, label, block_id, table.use.at(tick))
        if inserted.num_existing:
            return None
        self.pool.give_to_tree(inserted.blocks)
        self.pool.release(inserted.dropped)
        return block_id

    # ---------------------------------------------------------------- room

    def evict(self, num_blocks: int) -> int:
        """Frees up to `num_blocks` evictable blocks, the policy's first choice first; how many were freed."""
        at_least(0, num_blocks, "num_blocks")
        return self._evict(num_blocks, self._tick)

    def _evict(self, num_blocks: int, now: int) -> int:
        evicted = self.tree.evict(num_blocks, now)
        self.stats.evicted_blocks += len(evicted)
        if self._log is not None:
            self._log.removed(evicted)
        return self.pool.release(evicted)

    def reset(self) -> bool:
        """Empties the cache and says True; with requests running it changes nothing and says False."""
        if self._tables:
            return False
        for namespace in self.tree.namespaces():
            self.pool.release(self.tree.remove_namespace(namespace))
        if self._log is not None:
            self._log.cleared()
        return True

    def drop_namespace(self, namespace: NamespaceLike) -> bool:
        """Forgets a namespace, blocks and statistics, and says True; while it is in use, changes nothing: False."""
        namespace = normalize_namespace(namespace)
        if any(table.namespace == namespace for table in self._tables.values()):
            return False
        blocks = self.tree.remove_namespace(namespace)
        if self._log is not None:
            self._log.removed(blocks)
        self.pool.release(blocks)
        self._namespace_stats.pop(namespace, None)
        return True

    def _blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def _take(self, num_blocks: int, after: int | None = None, now: int = 0) -> array[int]:
        """Takes blocks from the pool, evicting only as many as are missing. Raises OutOfBlocks before any change."""
        missing = num_blocks - self.pool.num_free
        if missing > 0:
            if missing > self.num_evictable_blocks:
                raise OutOfBlocks(num_blocks, self.num_free_blocks, self.num_evictable_blocks)
            self._evict(missing, max(now, self._tick))
        return self.pool.allocate(num_blocks, after)

    def _copy(self, source: int, target: int, num_tokens: int) -> None:
        if self.storage is not None and source != target:
            self.storage.copy_block(source, target, num_tokens)

    def _copy_on_write(self, table: BlockTable, index: int) -> None:
        """Re-points one place of the table to a private copy of its block."""
        source = table.block_ids[index]
        (target,) = self._take(1)
        try:
            self._copy(source, target, table.tokens_filled(index))
        except BaseException:
            self.pool.release((target,))
            raise
        if not self.pool.is_cached(source):
            self.pool.release((source,))
        table.replace(index, target)
        self.stats.cow_copies += 1

    # ---------------------------------------------------------------- following it

    def namespace_stats(self, namespace: NamespaceLike) -> CacheStats:
        """The requests of one namespace, counted apart. Kept for each namespace ever used, until `drop_namespace`."""
        return self._namespace_stats.get(normalize_namespace(namespace), CacheStats())

    def subscribe(self, listener: Listener) -> Callable[[], None]:
        """Calls `listener` with each event from now on; what was given back ends that.

        First it hears of all that is cached, so that it can follow from any moment. An error that it raises reaches the
        caller of the cache after the change: a listener should not raise. Costs a SHA-256 per committed block; without
        listeners events cost nothing.
        """
        if self._log is None:
            self._log = BlockLog(self._remember_evicted)
        listeners = self._log.listeners
        others = listeners[:]
        listeners[:] = [listener]  # the others know what is cached
        try:
            for node in self.tree.nodes():
                if len(node.label) == len(node.blocks) * self.block_size * TOKEN_BYTES and node.parent is not None:
                    parent = node.parent.blocks[-1] if node.parent.blocks else None
                    namespace = self.tree.namespace_of(node)
                    self._log.stored(namespace, parent, node.label, node.blocks, self.block_size * TOKEN_BYTES)
        finally:
            listeners[:] = [*others, listener]

        def unsubscribe() -> None:
            if listener in listeners:
                listeners.remove(listener)
            if not listeners and not self._remember_evicted:
                self._log = None

        return unsubscribe

    def explain_miss(self, token_ids: TokenKey | Iterable[int] | Any, namespace: NamespaceLike = None) -> Miss:
        """Why a prompt is not cached further than it is. Read-only. For people, not for each request: O(namespaces)."""
        key = TokenKey.of(token_ids, namespace)
        match = self.tree.match(key)
        num_cached = len(match.blocks) * self.block_size + match.partial_tokens
        if num_cached == len(key):
            return Miss(num_cached, "hit")
        if self._log is not None:
            block_bytes = self.block_size * TOKEN_BYTES
            digest = root_digest(key.namespace)
            for index in range(min(len(match.blocks) + 1, len(key) // self.block_size)):
                digest = block_digest(digest, key.data[index * block_bytes : (index + 1) * block_bytes])
            if self._log.was_evicted(digest):
                return Miss(num_cached, "evicted")
        for other in self.tree.namespaces():
            there = self.tree.match(TokenKey.from_packed(key.data, other))
            if len(there.blocks) * self.block_size + there.partial_tokens > num_cached:
                return Miss(num_cached, "other namespace")
        goes_on = match.node is not None and (match.offset < len(match.node.blocks) or bool(match.node.children))
        return Miss(num_cached, "diverged" if goes_on and num_cached else "never seen")

    # ---------------------------------------------------------------- arguments

    def _table(self, request_id: str | int) -> BlockTable:
        try:
            return self._tables[request_id]
        except (KeyError, TypeError):
            raise UnknownRequest(request_id) from None

    def _require_new(self, request_id: str | int) -> None:
        if isinstance(request_id, bool) or not isinstance(request_id, (str, int)):
            raise TypeError(f"a request id must be a string or an integer, not {request_id!r}")
        if request_id in self._tables:
            raise DuplicateRequest(request_id)

    def _checked_tick(self, tick: int | None) -> int:
        """The time of this call: the caller's, or one more than the last."""
        if tick is None:
            return self._tick + 1
        return at_least(0, tick, "tick")

    # ---------------------------------------------------------------- looking

    def check(self) -> None:
        """Recounts everything from scratch; AssertionError with one sentence if something is broken. O(everything)."""
        self.pool.check()
        self.tree.check()
        in_tree = [block_id for node in self.tree.nodes() for block_id in node.blocks]
        assert len(in_tree) == self.num_cached_blocks, (
            f"the tree holds {len(in_tree)} blocks, the pool counts otherwise"
        )
        for block_id in in_tree:
            assert self.pool.is_cached(block_id), f"block {block_id} is in the tree, but the pool does not say so"
        tables_naming: dict[int, int] = {}
        locks: dict[int, int] = {}
        for request_id, table in self._tables.items():
            assert table.request_id == request_id, f"{table.show()} stands under {request_id!r}"
            table.check()
            assert len(table.forks) == 1 or all(fork.forks is table.forks for fork in table.forks), "forks disagree"
            path = self.tree.path_blocks(table.node)
            assert len(path) == table.num_shared, f"{table.show()}: its path has {len(path)} blocks"
            tokens = self.tree.path_key(table.node)
            assert table.tokens.startswith(tokens), f"{table.show()}: its path holds other tokens"
            for index, block_id in enumerate(path):
                assert index in table.detached or table.block_ids[index] == block_id, f"{table.show()}: not its path"
            for block_id in table.private_blocks():
                assert not self.pool.is_cached(block_id), (
                    f"{table.show()}: block {block_id} is the tree's, without a lock"
                )
                tables_naming[block_id] = tables_naming.get(block_id, 0) + 1
            locks[id(table.node)] = locks.get(id(table.node), 0) + 1
        for block_id, count in tables_naming.items():
            owners = self.pool.num_owners(block_id)
            assert owners == count, f"{count} tables own block {block_id}, the pool counts {owners}"
        assert len(tables_naming) == self.num_private_blocks, "a private block is in no table"
        for node in self.tree.nodes():
            expected = locks.get(id(node), 0) + sum(child.lock_ref > 0 for child in node.children.values())
            assert node.lock_ref == expected, f"lock_ref of {node!r} should be {expected}\n{self.show()}"
        total = self.num_free_blocks + self.num_cached_blocks + self.num_private_blocks
        assert total == self.num_blocks, f"free + cached + private = {total}, the pool has {self.num_blocks}"

    def show(self, decode: Callable[[list[int]], str] | None = None, most: int = 60) -> str:
        """Pool, running requests and tree as text. decode: a tokenizer's `decode`, to show text instead of ids."""
        head = (
            f"{self.num_blocks} blocks of {self.block_size} tokens: {self.num_free_blocks} free, "
            f"{self.num_evictable_blocks} evictable, {self.num_protected_blocks} protected, "
            f"{self.num_private_blocks} private"
        )
        tables = [table.show() for table in self._tables.values()]
        return "\n".join([head, *tables, self.tree.show(decode, most)])

    def _repr_mimebundle_(self, include: object = None, exclude: object = None) -> dict[str, str]:
        """The cache as a picture, for notebooks, and as `show` for terminals. `cache.decode` gives the nodes' text."""
        from .render import draw_cache, mime_bundle, safe

        return mime_bundle(draw_cache(self), self.show(safe(self.decode)))

    def __repr__(self) -> str:
        return (
            f"PrefixCache(num_blocks={self.num_blocks}, block_size={self.block_size}, {self.num_free_blocks} free, "
            f"{self.num_cached_blocks} cached, {self.num_private_blocks} private)"
        )

"""Three managers to measure `PrefixCache` against, behind the same driving calls.

    SlotAllocator    a slot for the longest possible request, one contiguous run each: the layout before block tables
    PagedAllocator   blocks on demand through a block table, nothing shared but by forks
    FlatHashCache    the same, and full blocks are found again by a chained hash: the classic prefix cache

`CacheManager` says what the driving calls are, so that one loop drives all four. What every block is in (free, private,
cached), what the calls return, count and raise, and that a failed call changes nothing, is as in `PrefixCache`.

Knows nothing of tensors beyond the `Storage` that copies blocks.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol

from sortedcontainers import SortedDict

from .arguments import at_least, integer
from .cache import Allocation, PrefixCache, PrefixMatch, Storage
from .errors import DuplicateRequest, OutOfBlocks, UnknownRequest
from .node import describe_blocks
from .pool import BlockPool
from .stats import CacheStats
from .tokens import TOKEN_BYTES, Namespace, NamespaceLike, TokenKey, block_digest, pack_one, root_digest, unpack


class CacheManager(Protocol):
    """The calls by which an engine or a simulator drives whatever hands out its blocks. `PrefixCache` documents them.

    A caller that holds to these can change the manager without changing a line.
    """

    @property
    def block_size(self) -> int:
        """Tokens per block."""

    @property
    def num_blocks(self) -> int:
        """Blocks in the pool; free + cached + private."""

    @property
    def num_free_blocks(self) -> int:
        """Blocks that nobody owns."""

    @property
    def num_cached_blocks(self) -> int:
        """Blocks that can be found by their tokens; evictable + protected."""

    @property
    def num_private_blocks(self) -> int:
        """Blocks that belong to running requests only."""

    @property
    def num_evictable_blocks(self) -> int:
        """Cached blocks that no running request needs."""

    @property
    def num_protected_blocks(self) -> int:
        """Cached blocks that a running request needs."""

    @property
    def request_ids(self) -> tuple[str | int, ...]:
        """Ids of the running requests, in order of arrival."""

    @property
    def stats(self) -> CacheStats:
        """Totals since the manager was made."""

    def ref_count(self, block_id: int) -> int:
        """Owners of a block: the cache (one at most) plus the block tables that name it."""

    def block_table(self, request_id: str | int) -> tuple[int, ...]:
        """Physical block ids of a running request, in logical order."""

    def num_tokens(self, request_id: str | int) -> int:
        """Tokens of a running request that have a slot."""

    def lookup_prefix(self, token_ids: TokenKey | Iterable[int] | Any, namespace: NamespaceLike = None) -> PrefixMatch:
        """How much of a prompt is cached. Read-only."""

    def can_allocate(self, num_tokens: int) -> bool:
        """Whether there is room for `num_tokens` more tokens of one request."""

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
    ) -> Allocation:
        """A block table for a prompt, or OutOfBlocks with nothing changed."""

    def append_token(self, request_id: str | int, token_id: int) -> int:
        """The slot to which a further token of the request goes."""

    def commit(self, request_id: str | int, num_computed_tokens: int, *, tick: int | None = None) -> None:
        """Says that K and V of the request's first `num_computed_tokens` tokens are written."""

    def fork(self, parent_id: str | int, child_id: str | int) -> None:
        """A request that continues from another's tokens."""

    def write(self, request_id: str | int, block_index: int) -> int:
        """The block to write to at this place of the request's table."""

    def free(self, request_id: str | int, *, tick: int | None = None) -> None:
        """Ends a request, at any point of its life."""

    def evict(self, num_blocks: int) -> int:
        """Frees up to `num_blocks` evictable blocks; how many were freed."""

    def reset(self) -> bool:
        """Empties the cache and says True; with requests running it changes nothing and says False."""

    def check(self) -> None:
        """Recounts everything from scratch; AssertionError with one sentence if something is broken."""

    def show(self) -> str:
        """The state as text for people."""


# ---------------------------------------------------------------- block tables


class _Table:
    """One running request's blocks.

    path          the cached blocks that it holds, from the first on (none where nothing is cached)
    block_ids     as many begin with the path's blocks, but for those that the request replaced by a private copy
    num_computed  leading tokens whose KV exists
    tick          of the latest use of the path by this request
    forks         all tables with which it may share private blocks, itself included
    """

    __slots__ = (
        "block_ids", "forks", "namespace", "num_cached_tokens", "num_computed", "path", "request_id", "tick", "tokens",
    )  # fmt: skip

    def __init__(self, request_id: str | int, namespace: Namespace, tick: int) -> None:
        self.request_id = request_id
        self.namespace = namespace
        self.tick = tick
        self.tokens = bytearray()
        self.block_ids = array("I")
        self.path: list[CachedBlock] = []
        self.num_computed = 0
        self.num_cached_tokens = 0
        self.forks: set[_Table] = {self}

    @property
    def num_tokens(self) -> int:
        """Tokens that have a slot."""
        return len(self.tokens) // TOKEN_BYTES

    def private_blocks(self) -> list[int]:
        """Ids of the blocks that belong to tables and not to the cache."""
        own = [have for have, held in zip(self.block_ids, self.path, strict=False) if have != held.block_id]
        return [*own, *self.block_ids[len(self.path) :]]

    def show(self, decode: Callable[[list[int]], str] | None) -> str:
        """The table in a line, with the first tokens."""
        return (
            f"request {self.request_id!r}: {self.num_tokens} tokens ({self.num_cached_tokens} cached, "
            f"{self.num_computed} computed), blocks {describe_blocks(self.block_ids[: len(self.path)])} | "
            f"{describe_blocks(self.block_ids[len(self.path) :])}  {_first_tokens(self.tokens, decode)}"
        )


class _TableManager:
    """The driving calls over a pool and block tables. As it stands nothing is cached; subclasses say where they differ.

    What they may replace: `_blocks_for` (how many blocks tokens take), `_require_fits` (a limit on tokens), `_match`,
    `_hold`, `_let_go`, `_cache_full_blocks` and `_evict` (finding blocks again).
    """

    def __init__(self, num_blocks: int, block_size: int = 16, *, storage: Storage | None = None) -> None:
        self.block_size = at_least(1, block_size, "block_size")
        self.pool = BlockPool(num_blocks)
        self.num_blocks = num_blocks
        if storage is not None and (storage.num_blocks, storage.block_size) != (num_blocks, block_size):
            raise ValueError(
                f"the storage has {storage.num_blocks} blocks of {storage.block_size} tokens, "
                f"{type(self).__name__} {num_blocks} of {block_size}"
            )
        self.storage = storage
        self.stats = CacheStats()
        self._tables: dict[str | int, _Table] = {}
        self._tick = 0
        self._block_bytes = block_size * TOKEN_BYTES

    # ---------------------------------------------------------------- counts

    @property
    def num_free_blocks(self) -> int:
        """Blocks that nobody owns."""
        return self.pool.num_free

    @property
    def num_cached_blocks(self) -> int:
        """Blocks that can be found by their tokens; evictable + protected."""
        return self.pool.num_cached

    @property
    def num_private_blocks(self) -> int:
        """Blocks that belong to running requests only. free + cached + private = num_blocks."""
        return self.pool.num_private

    @property
    def num_evictable_blocks(self) -> int:
        """Cached blocks that no running request holds."""
        return 0

    @property
    def num_protected_blocks(self) -> int:
        """Cached blocks that a running request holds."""
        return self.num_cached_blocks - self.num_evictable_blocks

    @property
    def num_wasted_slots(self) -> int:
        """Slots that running requests have and no token is in: internal fragmentation. O(running requests)."""
        # Only blocks after the last token are empty, and forks that share a tail have filled it alike.
        unfilled = {
            table.block_ids[-1]: len(table.block_ids) * self.block_size - table.num_tokens
            for table in self._tables.values()
        }
        return sum(unfilled.values())

    @property
    def request_ids(self) -> tuple[str | int, ...]:
        """Ids of the running requests, in order of arrival."""
        return tuple(self._tables)

    def ref_count(self, block_id: int) -> int:
        """Owners of a block: the cache (one at most) plus the block tables that name it.

        O(1); for a cached block O(running requests' blocks).
        """
        if at_least(0, block_id, "block_id") >= self.num_blocks:
            raise ValueError(f"block_id is {block_id}; allowed: 0 <= block_id < {self.num_blocks}")
        if not self.pool.is_cached(block_id):
            return self.pool.num_owners(block_id)
        return 1 + sum(table.block_ids.count(block_id) for table in self._tables.values())

    def block_table(self, request_id: str | int) -> tuple[int, ...]:
        """Physical block ids of a running request, in logical order."""
        return tuple(self._table(request_id).block_ids)

    def num_tokens(self, request_id: str | int) -> int:
        """Tokens of a running request that have a slot."""
        return self._table(request_id).num_tokens

    # ---------------------------------------------------------------- looking up

    def lookup_prefix(self, token_ids: TokenKey | Iterable[int] | Any, namespace: NamespaceLike = None) -> PrefixMatch:
        """How much of a prompt is cached, in whole blocks. Read-only: not even the order of use changes."""
        key = TokenKey.of(token_ids, namespace)
        path = self._match(key, len(key))
        return PrefixMatch(len(path) * self.block_size, array("I", [cached.block_id for cached in path]))

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
    ) -> Allocation:
        """A block table for a prompt: what is cached of its first len - 1 tokens shared, the rest from the pool.

        max_cached_tokens, spare_blocks, is_resumed: as in `PrefixCache.allocate`. priority: checked, and no policy here
        asks for it.
        Raises OutOfBlocks, with nothing changed, if free blocks and those evictable beside the hit do not suffice;
        DuplicateRequest; ValueError for an empty prompt. O(blocks).
        """
        self._require_new(request_id)
        key = TokenKey.of(token_ids, namespace)
        num_tokens = len(key)
        if num_tokens == 0:
            raise ValueError("token_ids is empty; allowed: one token and more")
        self._require_fits(num_tokens)
        at_least(0, priority, "priority")
        at_least(0, spare_blocks, "spare_blocks")
        most_cached = num_tokens - 1
        if max_cached_tokens is not None:
            most_cached = min(most_cached, at_least(0, max_cached_tokens, "max_cached_tokens"))
        tick = self._checked_tick(tick)
        # 1. Look, change nothing. One prompt token is always computed, hence the limit.
        path = self._match(key, most_cached)
        # 2. Is there room? What the hit itself holds is no room.
        needed = self._blocks_for(num_tokens) - len(path)
        evictable = self.num_evictable_blocks - sum(cached.num_readers == 0 for cached in path)
        if needed + spare_blocks > self.num_free_blocks + evictable:
            raise OutOfBlocks(needed + spare_blocks, self.num_free_blocks, evictable)
        # 3. Hold the hit, then make room beside it.
        self._hold(path)
        table = _Table(request_id, key.namespace, tick)
        table.tokens += key.data
        table.path = path
        table.block_ids.extend(cached.block_id for cached in path)
        table.block_ids.extend(self._take(needed, after=path[-1].block_id if path else None))
        table.num_cached_tokens = table.num_computed = len(path) * self.block_size
        self._tables[request_id] = table
        self._tick = max(self._tick, tick)
        if not is_resumed:
            num_blocks = -(-num_tokens // self.block_size)
            self.stats.count_request(num_tokens, table.num_cached_tokens, num_blocks, len(path))
        return Allocation(request_id, table.num_cached_tokens, len(path), needed)

    def append_token(self, request_id: str | int, token_id: int) -> int:
        """The slot to which a further token of the request goes. A block is taken only when all of its own are full.

        Writing there is safe: if a fork shares the tail block, this request gets its own copy first (copy-on-write).
        Raises OutOfBlocks with nothing changed. O(1), but for a copy.
        """
        table = self._table(request_id)
        packed = pack_one(token_id)
        self._require_fits(table.num_tokens + 1)
        index, offset = divmod(table.num_tokens, self.block_size)
        if index == len(table.block_ids):
            table.block_ids.extend(self._take(1, after=table.block_ids[-1]))
        else:
            self._copy_if_shared(table, index)
        table.tokens += packed
        return table.block_ids[index] * self.block_size + offset

    def commit(self, request_id: str | int, num_computed_tokens: int, *, tick: int | None = None) -> None:
        """Says that K and V of the request's first `num_computed_tokens` tokens are written.

        Raises ValueError for more tokens than have a slot, or fewer than before.
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
        self._cache_full_blocks(table, num_computed_tokens // self.block_size, tick)

    def fork(self, parent_id: str | int, child_id: str | int) -> None:
        """A request that continues from another's tokens and shares every block of it. Takes no block; O(blocks).

        The first of them that writes into the shared tail gets its own copy then (`append_token`, `write`).
        """
        parent = self._table(parent_id)
        self._require_new(child_id)
        child = self._copy_of(parent, child_id)
        child.block_ids = parent.block_ids[:]
        self.pool.share(parent.private_blocks())
        self._hold(child.path)
        parent.forks.add(child)
        child.forks = parent.forks
        self._tables[child_id] = child

    @staticmethod
    def _copy_of(parent: _Table, child_id: str | int) -> _Table:
        """A table for the same tokens, without blocks yet."""
        child = _Table(child_id, parent.namespace, parent.tick)
        child.tokens += parent.tokens
        child.path = parent.path[:]
        child.num_computed = parent.num_computed
        child.num_cached_tokens = parent.num_cached_tokens
        return child

    def write(self, request_id: str | int, block_index: int) -> int:
        """The block to write to at this place of the request's table: its own copy if others read the old one.

        Raises OutOfBlocks with nothing changed; IndexError for a place beyond the table.
        """
        table = self._table(request_id)
        if not 0 <= integer(block_index, "block_index") < len(table.block_ids):
            raise IndexError(f"block_index is {block_index}; the table has {len(table.block_ids)} blocks")
        self._copy_if_shared(table, block_index)
        return table.block_ids[block_index]

    def free(self, request_id: str | int, *, tick: int | None = None) -> None:
        """Ends a request, at any point of its life. What is cached stays cached; the rest is free at once.

        O(blocks).
        """
        table = self._table(request_id)
        tick = self._checked_tick(tick)
        self._tick = max(self._tick, tick)
        self.pool.release(table.private_blocks())
        self._let_go(table.path, max(table.tick, tick))
        table.forks.discard(table)
        del self._tables[request_id]

    # ---------------------------------------------------------------- room

    def evict(self, num_blocks: int) -> int:
        """Frees up to `num_blocks` evictable blocks, the least recently used first; how many were freed."""
        evicted = self._evict(at_least(0, num_blocks, "num_blocks"))
        self.stats.evicted_blocks += len(evicted)
        return self.pool.release(evicted)

    def reset(self) -> bool:
        """Empties the cache and says True; with requests running it changes nothing and says False."""
        if self._tables:
            return False
        self.pool.release(self._evict(self.num_cached_blocks))
        return True

    def _take(self, num_blocks: int, after: int | None = None) -> array[int]:
        """Takes blocks from the pool, evicting only as many as are missing. Raises OutOfBlocks before any change."""
        missing = num_blocks - self.pool.num_free
        if missing > 0:
            if missing > self.num_evictable_blocks:
                raise OutOfBlocks(num_blocks, self.num_free_blocks, self.num_evictable_blocks)
            self.evict(missing)
        return self.pool.allocate(num_blocks, after)

    def _copy_if_shared(self, table: _Table, index: int) -> None:
        """Re-points one place of the table to a private copy of its block, if the cache or a fork reads that block."""
        source = table.block_ids[index]
        is_cached = self.pool.is_cached(source)
        if not is_cached and self.pool.num_owners(source) == 1:
            return
        target = self._take(1)
        self._copy((source,), target, table.num_tokens - index * self.block_size)
        if not is_cached:
            self.pool.release((source,))
        table.block_ids[index] = target[0]
        self.stats.cow_copies += 1

    def _copy(self, sources: Sequence[int], targets: array[int], num_tokens: int) -> None:
        """Copies the first `num_tokens` slots, block by block. If that fails, the targets are free again."""
        if self.storage is None:
            return
        try:
            for index, (source, target) in enumerate(zip(sources, targets, strict=True)):
                num_left = num_tokens - index * self.block_size
                if num_left > 0:
                    self.storage.copy_block(source, target, min(num_left, self.block_size))
        except BaseException:
            self.pool.release(targets)
            raise

    # ---------------------------------------------------------------- where the managers differ

    def _blocks_for(self, num_tokens: int) -> int:
        """Blocks that so many tokens of one request take."""
        return -(-num_tokens // self.block_size)

    def _require_fits(self, num_tokens: int) -> None:
        """Raises ValueError if no request can have so many tokens."""

    def _match(self, key: TokenKey, limit: int) -> list[CachedBlock]:
        """The longest run of leading blocks that are cached, within the key's first `limit` tokens. Read-only."""
        return []

    def _hold(self, path: list[CachedBlock]) -> None:
        """Protects cached blocks for one more table."""

    def _let_go(self, path: list[CachedBlock], tick: int) -> None:
        """Takes the protection of one table off, and marks the blocks as used at `tick`."""

    def _cache_full_blocks(self, table: _Table, num_full: int, tick: int) -> None:
        """Makes the table's first `num_full` blocks findable, whose KV exists."""

    def _evict(self, num_blocks: int) -> array[int]:
        """Ids of up to `num_blocks` evictable blocks that can no longer be found; the caller releases them."""
        return array("I")

    # ---------------------------------------------------------------- arguments

    def _table(self, request_id: str | int) -> _Table:
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
        return self._tick + 1 if tick is None else at_least(0, tick, "tick")

    # ---------------------------------------------------------------- looking

    def check(self) -> None:
        """Recounts everything from scratch; AssertionError with one sentence and the state if something is broken."""
        self.pool.check()
        try:
            self._check()
        except AssertionError as broken:
            raise AssertionError(f"{broken}\n{self.show()}") from None

    def _check(self) -> None:
        tables_owning: dict[int, int] = {}
        for request_id, table in self._tables.items():
            name = f"request {request_id!r}"
            assert table.request_id == request_id, f"{table.request_id!r} stands under {request_id!r}"
            assert len(table.block_ids) == self._blocks_for(table.num_tokens), f"{name} has not the blocks it needs"
            assert len(set(table.block_ids)) == len(table.block_ids), f"{name} names a block twice"
            assert len(table.path) <= len(table.block_ids), f"{name} holds more cached blocks than it has blocks"
            assert len(table.path) * self.block_size <= table.num_computed, f"{name} cached what was not computed"
            assert table.num_computed <= table.num_tokens, f"{name} has more computed tokens than tokens"
            assert table in table.forks, f"{name} is not among its own forks"
            assert all(fork.forks is table.forks for fork in table.forks), f"{name}: its forks disagree"
            for block_id in table.private_blocks():
                assert not self.pool.is_cached(block_id), f"{name} reads cached block {block_id} without holding it"
                tables_owning[block_id] = tables_owning.get(block_id, 0) + 1
        for block_id, count in tables_owning.items():
            owners = self.pool.num_owners(block_id)
            assert owners == count, f"{count} tables own block {block_id}, the pool counts {owners}"
        assert len(tables_owning) == self.num_private_blocks, "a private block is in no table"

    def show(self, decode: Callable[[list[int]], str] | None = None, most: int = 60) -> str:
        """Pool and running requests as text. decode: a tokenizer's `decode`, to show text instead of token ids."""
        lines = [
            f"{self.num_blocks} blocks of {self.block_size} tokens: {self.num_free_blocks} free, "
            f"{self.num_evictable_blocks} evictable, {self.num_protected_blocks} protected, "
            f"{self.num_private_blocks} private, {self.num_wasted_slots} slots without a token"
        ]
        lines += [table.show(decode) for table in list(self._tables.values())[:most]]
        if len(self._tables) > most:
            lines.append(f"… and {len(self._tables) - most} more requests")
        return "\n".join(lines)

    def _cached_blocks(self) -> Iterable[tuple[int, bool, int]]:
        """Of each cached block its id, whether a running request holds it, and the tick of its last use."""
        return ()

    def _repr_mimebundle_(self, include: object = None, exclude: object = None) -> dict[str, str]:
        """The pool as a picture, for notebooks, and as `show` for terminals."""
        from .render import draw_pool, mime_bundle

        return mime_bundle(draw_pool(self, self._cached_blocks()), self.show())

    def __repr__(self) -> str:
        return (
            f"{type(self).__name__}(num_blocks={self.num_blocks}, block_size={self.block_size}, "
            f"{self.num_free_blocks} free, {self.num_cached_blocks} cached, {self.num_private_blocks} private)"
        )


# ---------------------------------------------------------------- without a cache


class PagedAllocator(_TableManager):
    """Blocks on demand through a block table; nothing is ever found again.

    What it wastes is less than a block per request. Forks share all blocks until one of them writes (copy-on-write).
    `commit` only counts. Source: the block tables of PagedAttention (Kwon et al., 2023).

    >>> paged = PagedAllocator(num_blocks=8, block_size=4)
    >>> paged.allocate("a", [1, 2, 3, 4, 5]).num_new_blocks, paged.num_wasted_slots
    (2, 3)
    """


class SlotAllocator(_TableManager):
    """One contiguous run of blocks per request, long enough for `max_len` tokens, taken when the request arrives.

    The layout of a KV tensor with one row per sequence. No request ever waits in the middle of its life, and none can
    have more than `max_len` tokens (ValueError); the price is that most of the pool is reserved and empty.
    `block_table` names the whole run. `num_blocks % blocks per run` blocks are never used. A fork needs a run of its
    own at once, and copies into it what the parent has.

    >>> slots = SlotAllocator(num_blocks=8, block_size=4, max_len=16)
    >>> slots.allocate("a", [1, 2, 3, 4, 5]).num_new_blocks, slots.num_wasted_slots
    (4, 11)
    """

    def __init__(self, num_blocks: int, block_size: int, max_len: int, *, storage: Storage | None = None) -> None:
        super().__init__(num_blocks, block_size, storage=storage)
        self.max_len = at_least(1, max_len, "max_len")
        self._blocks_per_run = -(-max_len // block_size)
        if self._blocks_per_run > num_blocks:
            raise ValueError(f"max_len is {max_len}; allowed: up to {num_blocks * block_size}, which is the whole pool")

    def can_allocate(self, num_tokens: int) -> bool:
        """Whether a run is free, and `num_tokens` fit in one."""
        return super().can_allocate(num_tokens) and num_tokens <= self.max_len

    def fork(self, parent_id: str | int, child_id: str | int) -> None:
        """A request that continues from another's tokens, in a run of its own into which they are copied.

        Raises OutOfBlocks, and changes nothing, if no run is free or the copy fails. O(max_len / block_size).
        """
        parent = self._table(parent_id)
        self._require_new(child_id)
        child = self._copy_of(parent, child_id)
        child.block_ids = self._take(self._blocks_per_run)
        self._copy(parent.block_ids, child.block_ids, parent.num_tokens)
        self._tables[child_id] = child

    def _blocks_for(self, num_tokens: int) -> int:
        # All runs have one length, so that they tile the pool from block 0 on and a free run is always found whole.
        return self._blocks_per_run if num_tokens else 0

    def _require_fits(self, num_tokens: int) -> None:
        if num_tokens > self.max_len:
            raise ValueError(f"a request of {num_tokens} tokens; allowed: up to max_len = {self.max_len}")

    def _check(self) -> None:
        super()._check()
        for table in self._tables.values():
            first = table.block_ids[0]
            contiguous = array("I", range(first, first + self._blocks_per_run))
            assert table.block_ids == contiguous, f"the run of request {table.request_id!r} is not contiguous"


# ---------------------------------------------------------------- the flat chained hash


class CachedBlock:
    """A full block that can be found by its digest.

    tokens, previous, namespace   what the digest stands for: packed tokens, the cached block before (None: it is the
                                  first), and where it may be found
    position      its place in the sequence, from 0
    num_readers   running requests that hold it
    tick          of the last use by a request that ended
    """

    __slots__ = ("block_id", "digest", "namespace", "num_readers", "position", "previous", "tick", "tokens")

    def __init__(
        self, block_id: int, digest: bytes, tokens: bytes, previous: CachedBlock | None, namespace: Namespace
    ) -> None:
        self.block_id = block_id
        self.digest = digest
        self.tokens = tokens
        self.previous = previous
        self.namespace = namespace
        self.position: int = 0 if previous is None else previous.position + 1
        self.num_readers = 0
        self.tick = 0

    def holds(self, tokens: bytes, previous: CachedBlock | None, namespace: Namespace) -> bool:
        """Whether the block really holds these tokens, behind that block: a digest alone is not believed.

        Comparing the block before by identity extends the comparison to all tokens before it.
        """
        return self.previous is previous and self.tokens == tokens and self.namespace == namespace


class FlatHashCache(_TableManager):
    """Full blocks are found again by a chained SHA-256 in a flat map; least recently used ones go first.

        digest of block j = SHA-256(digest of block j - 1, tokens of block j)      `tokens.block_digest`
        digest before block 0 = SHA-256(namespace)                                 `tokens.root_digest`

    `commit` makes full, computed blocks findable. Where the map has the same tokens already, the table is re-pointed to
    the block there and its own is free, as in `PrefixCache`. Every hit compares the tokens, so a collision of digests
    can only cost a hit: the block that came second, and those after it, stay private to their request.

    Order of eviction: by the tick of the last use; within one ended request its last block first, so that the starts,
    which others can share, survive longest. A block before another is therefore never evicted first, and no cached
    block is out of reach.

    What it gives up against the tree:
    - whole blocks only: the tokens of a prompt that match into a block are computed again;
    - a digest per block on every look-up, where the tree compares a whole edge at once; and one count per block to hold
      and to let go, where the tree locks a path by one node;
    - no structure: it cannot say which requests share which run, show or attend to a shared run once, keep a run
      contiguous, or drop what hangs below a prefix.

    >>> flat = FlatHashCache(num_blocks=8, block_size=4)
    >>> flat.allocate("a", [1, 2, 3, 4, 5]).num_cached_tokens
    0
    >>> flat.commit("a", 5); flat.free("a")
    >>> flat.allocate("b", [1, 2, 3, 4, 5, 6]).num_cached_tokens
    4
    """

    def __init__(self, num_blocks: int, block_size: int = 16, *, storage: Storage | None = None) -> None:
        super().__init__(num_blocks, block_size, storage=storage)
        self._by_digest: dict[bytes, CachedBlock] = {}
        # Blocks that no request holds, by tick, and within a tick in the order in which they were let go. A container
        # per tick: sorting single blocks would cost more than their digests.
        self._order: SortedDict[int, OrderedDict[CachedBlock, None]] = SortedDict()
        self._num_evictable = 0

    @property
    def num_evictable_blocks(self) -> int:
        """Cached blocks that no running request holds."""
        return self._num_evictable

    def _match(self, key: TokenKey, limit: int) -> list[CachedBlock]:
        path: list[CachedBlock] = []
        previous = None
        digest = root_digest(key.namespace)
        for start in range(0, limit // self.block_size * self._block_bytes, self._block_bytes):
            tokens = key.data[start : start + self._block_bytes]
            digest = block_digest(digest, tokens)
            cached = self._by_digest.get(digest)
            if cached is None or not cached.holds(tokens, previous, key.namespace):
                break
            path.append(cached)
            previous = cached
        return path

    def _hold(self, path: list[CachedBlock]) -> None:
        for cached in path:
            cached.num_readers += 1
            if cached.num_readers == 1:
                same_tick = self._order[cached.tick]
                del same_tick[cached]
                if not same_tick:
                    del self._order[cached.tick]
                self._num_evictable -= 1

    def _let_go(self, path: list[CachedBlock], tick: int) -> None:
        for cached in reversed(path):
            cached.tick = max(cached.tick, tick)
            cached.num_readers -= 1
            if cached.num_readers == 0:
                same_tick = self._order.get(cached.tick)
                if same_tick is None:
                    same_tick = self._order[cached.tick] = OrderedDict()
                same_tick[cached] = None
                self._num_evictable += 1

    def _cache_full_blocks(self, table: _Table, num_full: int, tick: int) -> None:
        if num_full <= len(table.path):
            return
        self._hand_over(table, num_full, tick)
        # Forks own the same private blocks, which now are the cache's: they too must hold them.
        for fork in table.forks:
            num_full = len(fork.block_ids)
            while num_full > len(fork.path) and not self.pool.is_cached(fork.block_ids[num_full - 1]):
                num_full -= 1
            if num_full > len(fork.path):
                self._hand_over(fork, num_full, tick)
                fork.num_computed = max(fork.num_computed, num_full * self.block_size)

    def _hand_over(self, table: _Table, num_full: int, tick: int) -> None:
        """Extends the table's path to its first `num_full` blocks: new ones join the map, duplicates are re-pointed."""
        table.tick = max(table.tick, tick)
        previous = table.path[-1] if table.path else None
        digest = previous.digest if previous else root_digest(table.namespace)
        for index in range(len(table.path), num_full):
            tokens = bytes(table.tokens[index * self._block_bytes : (index + 1) * self._block_bytes])
            digest = block_digest(digest, tokens)
            cached = self._by_digest.get(digest)
            block_id = table.block_ids[index]
            if cached is None:
                cached = self._by_digest[digest] = CachedBlock(block_id, digest, tokens, previous, table.namespace)
                cached.num_readers = 1
                self.pool.give_to_tree((block_id,))
                self.stats.committed_blocks += 1
            elif cached.holds(tokens, previous, table.namespace):
                self._hold([cached])
                if cached.block_id != block_id:
                    self.pool.release((block_id,))
                    table.block_ids[index] = cached.block_id
            else:
                return  # the digest stands for other tokens
            table.path.append(cached)
            previous = cached

    def _evict(self, num_blocks: int) -> array[int]:
        evicted = array("I")
        while self._order and len(evicted) < num_blocks:
            tick, same_tick = self._order.peekitem(0)
            while same_tick and len(evicted) < num_blocks:
                cached, _ = same_tick.popitem(last=False)
                del self._by_digest[cached.digest]
                evicted.append(cached.block_id)
            if not same_tick:
                del self._order[tick]
        self._num_evictable -= len(evicted)
        return evicted

    def _check(self) -> None:
        super()._check()
        blocks = {cached.block_id for cached in self._by_digest.values()}
        assert len(blocks) == len(self._by_digest), "two digests name the same block"
        assert len(blocks) == self.num_cached_blocks, f"{len(blocks)} blocks can be found, the pool counts otherwise"
        readers: dict[CachedBlock, int] = {}
        for table in self._tables.values():
            for position, cached in enumerate(table.path):
                start = position * self._block_bytes
                assert cached.position == position, f"request {table.request_id!r} holds a block at a wrong place"
                assert table.tokens.startswith(cached.tokens, start), f"request {table.request_id!r} holds other tokens"
                assert cached.previous is (table.path[position - 1] if position else None), "a path is no chain"
                readers[cached] = readers.get(cached, 0) + 1
        for digest, cached in self._by_digest.items():
            name, previous = f"cached block {cached.block_id}", cached.previous
            assert self.pool.is_cached(cached.block_id), f"{name} is not the cache's, says the pool"
            assert cached.num_readers == readers.pop(cached, 0), f"{name} has another number of readers"
            before = root_digest(cached.namespace) if previous is None else previous.digest
            assert cached.digest == digest == block_digest(before, cached.tokens), f"{name} has another digest"
            waits = cached in self._order.get(cached.tick, ())
            assert waits == (cached.num_readers == 0), f"{name} can be evicted while held, or not while nobody holds it"
            if previous is not None:
                assert self._by_digest.get(previous.digest) is previous, f"{name} is out of reach"
                assert previous.namespace == cached.namespace, f"{name} follows a block of another namespace"
                assert previous.tick >= cached.tick, f"{name} was used later than the block before it"
        assert not readers, "a running request holds a block that cannot be found"
        num_waiting = sum(map(len, self._order.values()))
        assert num_waiting == self._num_evictable, f"{num_waiting} blocks can be evicted, the counter says otherwise"
        assert all(self._order.values()), "an empty tick was kept"

    def _cached_blocks(self) -> Iterable[tuple[int, bool, int]]:
        return ((cached.block_id, cached.num_readers > 0, cached.tick) for cached in self._by_digest.values())

    def show(self, decode: Callable[[list[int]], str] | None = None, most: int = 60) -> str:
        """Pool, running requests and cached blocks, in order of arrival, as text."""
        lines = [super().show(decode, most)]
        for cached in list(self._by_digest.values())[:most]:
            after = "" if cached.previous is None else f" after block {cached.previous.block_id}"
            lines.append(
                f"{cached.digest.hex()[:12]} → block {cached.block_id}{after}, {cached.num_readers} readers, "
                f"tick {cached.tick}  {_first_tokens(cached.tokens, decode)}"
            )
        if len(self._by_digest) > most:
            lines.append(f"… and {len(self._by_digest) - most} more cached blocks")
        return "\n".join(lines)


# By the names that the command line uses; that each is a CacheManager is for mypy to check here.
ALLOCATORS: dict[str, Callable[..., CacheManager]] = {
    "radix": PrefixCache,
    "hash": FlatHashCache,
    "paged": PagedAllocator,
    "slot": SlotAllocator,
}


def _first_tokens(packed: bytes | bytearray, decode: Callable[[list[int]], str] | None) -> str:
    """The first tokens in a few characters."""
    if decode is None:
        return " ".join(map(str, unpack(packed[: 8 * TOKEN_BYTES])))
    return repr(decode(unpack(packed[: 12 * TOKEN_BYTES])))[:50]

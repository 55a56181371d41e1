"""Small obvious models that the tests of the cache compare with, and ways to look at all of its state.

A *path* stands for one cached block: the namespace, and all tokens from the first to the last one in the block. The
path says what the block must hold, because the keys and values of a token depend on every token before it.
"""

from collections.abc import Iterable, Iterator
from typing import Any, TypeAlias

from radixkv import PrefixCache
from radixkv.node import RootNode
from radixkv.tokens import unpack
from radixkv.tree import RadixTree

Tokens: TypeAlias = tuple[int, ...]
Path: TypeAlias = tuple[tuple[str, ...], Tokens]


class StorageBroken(Exception):
    """What a `ShadowStorage` raises instead of copying, when told to."""


class ShadowStorage:
    """A storage whose slots remember the path that wrote them, instead of keys and values."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.slots: list[Path | None] = [None] * (num_blocks * block_size)
        self.broken = False
        self.copies: list[tuple[int, int, int]] = []

    def copy_block(self, source: int, target: int, num_tokens: int) -> None:
        if self.broken:
            raise StorageBroken
        self.copies.append((source, target, num_tokens))
        first, onto = source * self.block_size, target * self.block_size
        self.slots[onto : onto + num_tokens] = self.slots[first : first + num_tokens]

    def block(self, block_id: int) -> list[Path | None]:
        """What the slots of a block hold."""
        return self.slots[block_id * self.block_size : (block_id + 1) * self.block_size]


class BlockModel:
    """The cached blocks one by one: path -> tick of the last use. No nodes, no locks, no order: all is searched."""

    def __init__(self, block_size: int) -> None:
        self.block_size = block_size
        self.ticks: dict[Path, int] = {}

    def full_paths(self, namespace: tuple[str, ...], tokens: Tokens) -> list[Path]:
        """The paths of the full blocks of a sequence."""
        return [(namespace, tokens[:end]) for end in range(self.block_size, len(tokens) + 1, self.block_size)]

    def match(self, namespace: tuple[str, ...], tokens: Tokens) -> tuple[int, int]:
        """Full blocks of the longest cached start, and its tokens, those of a further block's start included."""
        num_full = 0
        for path in self.full_paths(namespace, tokens):
            if path not in self.ticks:
                break
            num_full += 1
        start = num_full * self.block_size
        next_blocks = [
            cached
            for within, cached in self.ticks
            if within == namespace and 0 < len(cached) - start <= self.block_size and cached[:start] == tokens[:start]
        ]
        return num_full, max([start, *(common_tokens(tokens, cached) for cached in next_blocks)])

    def use(self, namespace: tuple[str, ...], tokens: Tokens, tick: int) -> None:
        """The full blocks of a sequence are cached, and were used at `tick`."""
        for path in self.full_paths(namespace, tokens):
            self._drop_partial_starts_of(path)
            self.ticks[path] = max(self.ticks.get(path, 0), tick)

    def keep_partial(self, namespace: tuple[str, ...], tokens: Tokens, tick: int) -> bool:
        """The partly filled last block of a sequence is cached too, unless one that begins like it already is."""
        size = len(tokens)
        if (namespace, tokens) in self.ticks:  # the very same: it and the path to it are used once more
            self.use(namespace, tokens, tick)
            self.ticks[namespace, tokens] = max(self.ticks[namespace, tokens], tick)
            return False
        if any(within == namespace and cached[:size] == tokens for within, cached in self.ticks):
            return False
        self._drop_partial_starts_of((namespace, tokens))
        self.ticks[namespace, tokens] = tick
        return True

    def _drop_partial_starts_of(self, path: Path) -> None:
        namespace, tokens = path
        for size in range(len(tokens)):
            if size % self.block_size:
                self.ticks.pop((namespace, tokens[:size]), None)

    def lose(self, lost: Iterable[Path], num_blocks: int, protected: set[Path]) -> None:
        """Blocks were evicted: it must have been `num_blocks`, the oldest unprotected, among equals the deepest."""
        rank = {
            path: (tick, -len(path[1]) // self.block_size)  # the deeper the block, the lower
            for path, tick in self.ticks.items()
            if path not in protected
        }
        lost = list(lost)
        assert not protected.intersection(lost), "a protected block was evicted"
        assert sorted(rank[path] for path in lost) == sorted(rank.values())[:num_blocks], "not oldest, deepest first"
        for path in lost:
            del self.ticks[path]


def common_tokens(left: Tokens, right: Tokens) -> int:
    """Number of leading tokens that both share."""
    for count, (a, b) in enumerate(zip(left, right, strict=False)):
        if a != b:
            return count
    return min(len(left), len(right))


def resident(tree: RadixTree) -> dict[Path, tuple[int, int]]:
    """Every block of the tree by its path: its id and the tick of its node."""
    blocks: dict[Path, tuple[int, int]] = {}
    size = tree.block_size
    starts: dict[int, Path] = {}
    for node in tree.nodes():
        if isinstance(node, RootNode):
            starts[id(node)] = (node.namespace, ())
            continue
        namespace, before = starts[id(node.parent)]
        tokens = before + tuple(unpack(node.label))
        starts[id(node)] = (namespace, tokens)
        for index, block_id in enumerate(node.blocks):
            path = (namespace, tokens[: len(before) + (index + 1) * size])
            assert path not in blocks, "two blocks of the tree hold the same tokens"
            blocks[path] = (block_id, node.tick)
    return blocks


def tree_state(tree: RadixTree) -> list[Any]:
    """All that a call may change in a tree, as plain values."""
    nodes = [
        (node.label, list(node.blocks), node.end, node.lock_ref, node.tick, node.serial, node.order_entry)
        for node in tree.nodes()
    ]
    return [nodes, list(tree._roots), list(tree._order), tree.num_blocks, tree.num_protected, tree.num_nodes]


def state(cache: PrefixCache) -> list[Any]:
    """All that a call may change in a cache, as plain values: two equal states are the same to every later call."""
    tables = {
        request_id: (
            bytes(table.tokens), list(table.block_ids), table.node, table.num_shared, table.num_computed,
            table.num_cached_tokens, set(table.detached), {fork.request_id for fork in table.forks},
        )
        for request_id, table in cache._tables.items()
    }  # fmt: skip
    pool = [list(cache.pool._owners), bytes(cache.pool._used), cache.pool.num_free, cache.pool.num_cached]
    return [tree_state(cache.tree), tables, pool, cache.stats.as_dict(), cache._tick]


def compute(
    cache: PrefixCache, request_id: str | int, stop: int | None = None, for_all_forks: bool = False
) -> Iterator[int]:
    """Writes the path of each token of a request that is not computed yet, up to `stop`; the positions as it goes.

    Stands for the forward pass. It asks for each block before writing to it, as a driver must whose forks compute at
    the same time; one that computes `for_all_forks` what they share writes it where they all read it.
    """
    table = cache._tables[request_id]
    tokens = tuple(unpack(table.tokens))
    for position in range(table.num_computed, len(tokens) if stop is None else stop):
        index, offset = divmod(position, cache.block_size)
        block_id = table.block_ids[index] if for_all_forks else cache.write(request_id, index)
        cache.storage.slots[block_id * cache.block_size + offset] = (table.namespace, tokens[: position + 1])
        yield position


def run(cache: PrefixCache, request_id: str | int, tokens: Iterable[int], namespace: Any = None, **ticks: int) -> int:
    """Plays a whole request, prompt only: allocate, compute, commit, free. Its hit in tokens."""
    tokens = list(tokens)
    hit = cache.allocate(request_id, tokens, namespace, **ticks).num_cached_tokens
    if cache.storage is not None:
        for _ in compute(cache, request_id):
            pass
    cache.commit(request_id, len(tokens), **ticks)
    cache.free(request_id, **ticks)
    return hit


def assert_holds_its_tokens(cache: PrefixCache, request_id: str | int) -> None:
    """Every computed slot of a request holds exactly the tokens up to its own."""
    table = cache._tables[request_id]
    tokens = tuple(unpack(table.tokens))
    for position in range(table.num_computed):
        held = cache.storage.slots[table.slot(position)]
        assert held == (table.namespace, tokens[: position + 1]), f"request {request_id!r}, token {position}: {held}"


def assert_tree_holds_its_tokens(cache: PrefixCache) -> None:
    """Every slot of every cached block holds exactly the tokens up to its own."""
    for (namespace, tokens), (block_id, _) in resident(cache.tree).items():
        first = (len(tokens) - 1) // cache.block_size * cache.block_size
        held = cache.storage.block(block_id)[: len(tokens) - first]
        wanted = [(namespace, tokens[: position + 1]) for position in range(first, len(tokens))]
        assert held == wanted, f"block {block_id} should hold {wanted}, not {held}"

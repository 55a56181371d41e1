"""The radix tree: which runs of blocks hold which token sequences.

Owns nodes, locks, and the order in which unlocked leaves are evicted. Knows nothing of the pool, requests or tensors.

Edges are split at block boundaries only, so that a block belongs to exactly one node:

    before                          after insert([A B X Y]), one letter = one block

    root ── A B C D   7 8 9 10      root ── A B   7 8 ┬── C D   9 10
                                                      └── X Y   3 4

Where a prompt leaves the tree in the middle of a block, the block that shares the most leading tokens is one of at most
two neighbours in the sorted children (or the next block of the same edge); `match` names it, so that its K and V can be
copied instead of computed.

Invariants (`check`): siblings differ in their first block; only a root is empty; a label has as many tokens as its run
has slots, except in a partial leaf, which is a leaf, never locked, and no prefix of a sibling; lock_ref = requests that
end here + locked children; the eviction order holds exactly the unlocked leaves; a parent's tick is never below its
child's.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator
from itertools import pairwise
from operator import attrgetter
from typing import Any, NamedTuple

from sortedcontainers import SortedList

from .node import NO_CHILDREN, Children, RadixNode, Ranking, RootNode, Use, describe_blocks
from .tokens import TOKEN_BYTES, Namespace, TokenKey, common_prefix, unpack


class Match(NamedTuple):
    """Where a key leaves the tree. Valid until the tree changes.

    node, offset    the path ends `offset` blocks into `node`; node is None where the namespace has no root
    blocks          ids of the full blocks on the path, in token order
    partial_block, partial_tokens   a cached block whose first `partial_tokens` tokens come next in the key (0: none)
    """

    node: RadixNode | None
    offset: int
    blocks: array[int]
    partial_block: int
    partial_tokens: int


class Inserted(NamedTuple):
    """What `insert` did.

    node          where the inserted sequence ends
    blocks        the tree's blocks for it; the first `num_existing` were there before
    num_existing  blocks for which the tree already had the tokens: the caller keeps the ids it offered for them
    dropped       blocks of a partial leaf that the new tokens made redundant: no longer the tree's
    """

    node: RadixNode
    blocks: array[int]
    num_existing: int
    dropped: array[int]


class RadixTree:
    """A radix tree over packed token sequences, one root per namespace.

    policy: ranks unlocked leaves; the lowest rank is evicted first, among equals the deepest.
    """

    def __init__(self, block_size: int, policy: Ranking) -> None:
        self.block_size = block_size
        self.num_blocks = 0
        self.num_protected = 0
        self.num_nodes = 0  # roots not counted
        self._block_bytes = block_size * TOKEN_BYTES
        self._policy = policy
        self._rank = policy.rank
        self._counts_uses = "uses" in policy.fields
        self._alike = attrgetter(*policy.fields)
        self._roots: dict[Namespace, RootNode] = {}
        self._order: SortedList[tuple[Any, ...]] = SortedList()
        self._expiring: SortedList[tuple[int, int, RadixNode]] = (
            SortedList()
        )  # leaves in the order with a priority that ends
        self._serial = 0

    @property
    def num_evictable(self) -> int:
        """Cached blocks on no locked path."""
        return self.num_blocks - self.num_protected

    # ---------------------------------------------------------------- reading

    def match(self, key: TokenKey, limit: int | None = None) -> Match:
        """The longest start of the key's first `limit` tokens (default: all) that is in the tree.

        Read-only: neither shape, locks nor recency change. O(nodes on the path + matched bytes / memcmp speed).
        """
        root = self._roots.get(key.namespace)
        if root is None:
            return Match(None, 0, array("I"), 0, 0)
        stop = len(key.data) if limit is None else limit * TOKEN_BYTES
        return self._descend(root, key.data, 0, stop)

    def _descend(self, node: RadixNode, data: bytes, start: int, stop: int, *, to_the_token: bool = True) -> Match:
        """`match` for the bytes data[start:stop], from the end of `node` downwards.

        to_the_token: look beside the path too; without it the match has no partial block.
        """
        block_bytes = self._block_bytes
        blocks = array("I")
        while start + block_bytes <= stop:
            child = node.children.get(data[start : start + block_bytes])
            if child is None:
                break
            node = child
            label = node.label
            if data.startswith(label, start, stop):
                start += len(label)
                blocks.extend(node.blocks)
                continue
            offset, partial_tokens = divmod(common_prefix(label, data, start, stop), self.block_size)
            blocks.extend(node.blocks[:offset])
            return Match(node, offset, blocks, node.blocks[offset], partial_tokens)
        partial_block, partial_tokens = 0, 0
        if to_the_token and node.children and start < stop:
            partial_block, partial_tokens = self._closest_child(node, data[start : min(start + block_bytes, stop)])
        return Match(node, len(node.blocks), blocks, partial_block, partial_tokens)

    def _closest_child(self, node: RadixNode, head: bytes) -> tuple[int, int]:
        """The first block of the child that shares the most leading tokens with `head`, and how many (0: none).

        In a sorted sequence the longest common prefix with any value is attained beside the place where it would stand.
        """
        best_block, best_tokens = 0, 0
        for first_block in node.children.around(head):
            # The first token alone decides most cases, and costs a tenth of counting.
            if first_block is not None and first_block[:TOKEN_BYTES] == head[:TOKEN_BYTES]:
                num_tokens = common_prefix(first_block, head, 0, len(head))
                if num_tokens > best_tokens:
                    best_block, best_tokens = node.children[first_block].blocks[0], num_tokens
        return best_block, best_tokens

    def path_blocks(self, node: RadixNode) -> array[int]:
        """Ids of all blocks from the root to the end of `node`, in token order. O(path)."""
        runs = [ancestor.blocks for ancestor in self._ancestors(node)]
        blocks = array("I")
        for run in reversed(runs):
            blocks.extend(run)
        return blocks

    def namespace_of(self, node: RadixNode) -> Namespace:
        """The namespace that the node belongs to. O(depth)."""
        *_, root = self._ancestors(node)
        assert isinstance(root, RootNode)
        return root.namespace

    def path_key(self, node: RadixNode) -> bytes:
        """Packed tokens from the root to the end of `node`. O(path)."""
        return b"".join(reversed([ancestor.label for ancestor in self._ancestors(node)]))

    def num_unlocked_on_path(self, match: Match) -> int:
        """Evictable blocks that locking the matched path would protect. O(unlocked nodes on it)."""
        node = match.node
        if node is None or node.lock_ref > 0:
            return 0
        count = match.offset
        for ancestor in self._ancestors(node.parent):
            if ancestor.lock_ref > 0:
                break
            count += len(ancestor.blocks)
        return count

    def nodes(self) -> Iterator[RadixNode]:
        """Every node, roots included, parents before children, in token order."""
        stack: list[RadixNode] = [root for _, root in sorted(self._roots.items(), reverse=True)]
        while stack:
            node = stack.pop()
            yield node
            stack.extend(reversed(node.children.in_order()))

    @staticmethod
    def _ancestors(node: RadixNode | None) -> Iterator[RadixNode]:
        """The node itself, its parent, and so on to the root."""
        while node is not None:
            yield node
            node = node.parent

    # ---------------------------------------------------------------- adding

    def insert(self, key: TokenKey, blocks: array[int], use: int | Use) -> Inserted:
        """Adds the key's full blocks, of which `blocks` names one id each; see `insert_below`. use: or just a tick."""
        root = self.root(key.namespace)
        num_bytes = len(blocks) * self._block_bytes
        if num_bytes > len(key.data):
            raise ValueError(f"{len(blocks)} blocks of {self.block_size} tokens for a key of {len(key)} tokens")
        use = Use(use, use) if isinstance(use, int) else use
        inserted = self.insert_below(root, key.data[:num_bytes], blocks, use)
        self._drop_root_if_empty(root)  # nothing was added
        return inserted

    def insert_below(
        self, node: RadixNode, label: bytes, blocks: array[int], use: Use, may_extend: bool = False
    ) -> Inserted:
        """Adds `label`, whole blocks of tokens, below the end of `node`, and marks the path as used.

        Where the tree has those tokens already its own blocks stay. may_extend: the caller holds the only lock that
        ends at `node`; if nothing hangs below it and the policy sees no difference, its edge grows instead of getting a
        child, so that a request that decodes for long makes one node and not one per block.
        O(nodes walked + len(blocks)).
        """
        if self._policy.age:
            use = use._replace(age=self._policy.age)
        match = self._descend(node, label, 0, len(label), to_the_token=False)
        num_existing = len(match.blocks)
        assert match.node is not None
        end = self._split(match.node, match.offset)
        self.touch(end, use, above=node)
        new_label = label[num_existing * self._block_bytes :]
        dropped = array("I")
        if new_label:
            new_blocks = blocks[num_existing:]
            dropped = self._drop_covered_partial(end, new_label[: self._block_bytes])
            may_extend = may_extend and end is node and node.parent is not None and not node.children
            if may_extend and self._alike(node) == self._alike(use):
                node.label += new_label
                node.blocks.extend(new_blocks)
                node.end += len(new_blocks)
                self.num_blocks += len(new_blocks)
                self.num_protected += len(new_blocks)
            else:
                end = self._attach(end, new_label, new_blocks, use)
        return Inserted(end, match.blocks + blocks[num_existing:], num_existing, dropped)

    def insert_partial(self, node: RadixNode, label: bytes, block_id: int, use: Use) -> Inserted:
        """Keeps a partly filled block as a leaf below the end of `node`, unless a child starts with its tokens already.

        label: fewer tokens than a block has, and at least one. O(log children).
        """
        assert 0 < len(label) < self._block_bytes, "a partial leaf holds less than a block and more than nothing"
        _, first_block = node.children.around(label)
        if first_block is not None and first_block.startswith(label):
            child = node.children[first_block]
            if first_block == label:  # the same partial leaf, used once more
                self.touch(child, use, above=node)
            return Inserted(child, child.blocks[:1], 1, array("I"))
        dropped = self._drop_covered_partial(node, label)
        self.touch(node, use, above=node)
        blocks = array("I", (block_id,))
        leaf = self._attach(node, label, blocks, use)
        return Inserted(leaf, blocks, 0, dropped)

    def _drop_covered_partial(self, parent: RadixNode, head: bytes) -> array[int]:
        """Removes the partial leaf below `parent` whose tokens `head` begins with; its block, or none.

        There is one at most, and it stands just before `head`: whatever stood between would begin with its tokens too.
        """
        first_block = parent.children.around(head)[0] if parent.children else None
        if first_block is None or len(first_block) == self._block_bytes or not head.startswith(first_block):
            return array("I")
        child = parent.children[first_block]
        self._leave_order(child)
        self._detach(child)
        return child.blocks

    def _attach(self, parent: RadixNode, label: bytes, blocks: array[int], use: Use) -> RadixNode:
        """A new leaf below `parent`, unlocked and in the eviction order; the caller marks the path as used."""
        leaf = RadixNode(label, blocks, parent, parent.end + len(blocks), use, self._next_serial())
        if not parent.children:
            self._leave_order(parent)
            parent.children = Children()
        parent.children[label[: self._block_bytes]] = leaf
        self.num_nodes += 1
        self.num_blocks += len(blocks)
        self._join_order(leaf)
        return leaf

    def _detach(self, node: RadixNode) -> None:
        """Unlinks a leaf that is in no order and on no locked path."""
        assert node.parent is not None and node.lock_ref == 0 and not node.children
        children = node.parent.children
        del children[node.label[: self._block_bytes]]
        if not children:
            node.parent.children = NO_CHILDREN
        self.num_nodes -= 1
        self.num_blocks -= len(node.blocks)

    def _split(self, node: RadixNode, offset: int) -> RadixNode:
        """The node that ends `offset` blocks into `node`: the node itself at its end, else a new upper half.

            parent ── A B C D (node)    becomes    parent ── A B (upper) ── C D (node)

        `node` stays the lower half, because whoever holds it as the end of a path means its end.
        """
        if offset == len(node.blocks):
            return node
        assert node.parent is not None and 0 < offset < len(node.blocks), "an edge is split between two of its blocks"
        cut = offset * self._block_bytes
        end = node.end - len(node.blocks) + offset
        use = Use(node.tick, node.created, node.uses, node.priority, node.expires, node.age)
        upper = RadixNode(node.label[:cut], node.blocks[:offset], node.parent, end, use, self._next_serial())
        node.parent.children[node.label[: self._block_bytes]] = upper
        node.label = node.label[cut:]
        node.blocks = node.blocks[offset:]
        node.parent = upper
        upper.children = Children()
        upper.children[node.label[: self._block_bytes]] = node
        upper.lock_ref = 1 if node.lock_ref else 0
        self.num_nodes += 1
        return upper

    def root(self, namespace: Namespace) -> RootNode:
        """The root of a namespace, made if it is not there; it goes again when it is empty and unlocked."""
        root = self._roots.get(namespace)
        if root is None:
            root = self._roots[namespace] = RootNode(namespace, self._next_serial())
        return root

    def _drop_root_if_empty(self, root: RadixNode) -> None:
        """Forgets an unused root, so that a namespace seen once does not cost memory for ever."""
        assert isinstance(root, RootNode)
        if not root.children and root.lock_ref == 0:
            del self._roots[root.namespace]

    def _next_serial(self) -> int:
        self._serial += 1
        return self._serial

    # ---------------------------------------------------------------- locks and recency

    def lock(self, namespace: Namespace, match: Match) -> RadixNode:
        """The node at the end of the matched path, now protected; split off where the path ends inside a node.

        The part of that node that was not matched keeps its tick and stays evictable. Undone by `unlock_node`.
        """
        node = self.root(namespace) if match.node is None else match.node
        node = self._split(node, match.offset)
        self.lock_node(node)
        return node

    def lock_node(self, node: RadixNode) -> None:
        """Protects the path to the end of `node`. Climbs only to the first ancestor that is locked already."""
        while True:
            node.lock_ref += 1
            if node.lock_ref > 1:
                return
            self.num_protected += len(node.blocks)
            self._leave_order(node)
            if node.parent is None:
                return
            node = node.parent

    def unlock_node(self, node: RadixNode) -> None:
        """Takes one lock off; what no other lock protects becomes evictable. AssertionError if it is not locked."""
        while True:
            assert node.lock_ref > 0, f"unlocked more often than locked: {node!r}"
            node.lock_ref -= 1
            if node.lock_ref > 0:
                return
            self.num_protected -= len(node.blocks)
            if node.parent is None:
                self._drop_root_if_empty(node)
                return
            if not node.children:
                self._join_order(node)
            else:
                node = self._merge_with_only_child(node)
            assert node.parent is not None
            node = node.parent

    def _merge_with_only_child(self, node: RadixNode) -> RadixNode:
        """Undoes a split whose reason is gone: one unlocked child, and a policy that sees no difference. What remains.

            parent ── A B (node) ── C D (child)    becomes    parent ── A B C D (child)

        The child remains because its depth, children and place in the eviction order stay as they are. O(run).
        """
        if len(node.children) > 1:
            return node
        (child,) = node.children.values()
        is_partial = len(child.label) < self._block_bytes
        if child.lock_ref or is_partial or self._alike(node) != self._alike(child):
            return node
        assert node.parent is not None
        child.label = node.label + child.label
        child.blocks = node.blocks + child.blocks
        child.parent = node.parent
        node.parent.children[child.label[: self._block_bytes]] = child
        self.num_nodes -= 1
        return child

    def touch(self, node: RadixNode, use: Use, above: RadixNode | None = None) -> None:
        """Marks the path to the end of `node` as used; nothing below it.

        Recency and priority are raised on the whole path; a parent is never below its child in either, so the climb
        stops at the first ancestor that stands high enough. `uses` is counted, for policies that ask, on the part of
        the path below `above` (None: from the root), so that a request which grows its path counts once in each node.
        """
        tick, age = use.tick, self._policy.age
        ancestor: RadixNode | None = node
        while ancestor is not None and ancestor.tick < tick:
            if ancestor.order_entry is None:
                ancestor.tick = tick
                ancestor.age = age
            else:
                self._set(ancestor, tick=tick, age=age)
            ancestor = ancestor.parent
        if use.priority:
            wanted = _retention(use, tick)
            ancestor = node
            while ancestor is not None and _retention(ancestor, tick) < wanted:
                self._set(ancestor, priority=use.priority, expires=use.expires)
                ancestor = ancestor.parent
        if self._counts_uses:
            ancestor = node
            while ancestor is not None and ancestor is not above:
                self._set(ancestor, uses=ancestor.uses + 1)
                ancestor = ancestor.parent

    def _set(self, node: RadixNode, **changes: Any) -> None:
        """Changes what a rank may depend on, and moves the node in the order if it stands there."""
        is_ranked = node.order_entry is not None
        if is_ranked:
            self._leave_order(node)
        for name, value in changes.items():
            setattr(node, name, value)
        if is_ranked:
            self._join_order(node)

    def _join_order(self, node: RadixNode) -> None:
        node.order_entry = (self._rank(node), -node.end, node.serial, node)
        self._order.add(node.order_entry)
        if node.expires is not None:
            self._expiring.add((node.expires, node.serial, node))

    def _leave_order(self, node: RadixNode) -> None:
        if node.order_entry is not None:
            self._order.remove(node.order_entry)
            self._left_order(node)

    def _left_order(self, node: RadixNode) -> None:
        node.order_entry = None
        if node.expires is not None:
            self._expiring.remove((node.expires, node.serial, node))

    # ---------------------------------------------------------------- evicting

    def evict(self, num_blocks: int, now: int = 0) -> array[int]:
        """Ids of up to `num_blocks` blocks that left the tree, fewer only if no more are evictable.

        now: the tick at which priorities whose time is over count no longer.

        Exact: the leaf of the lowest rank is trimmed from its end by just the blocks needed, and a parent that becomes
        a leaf takes its place in the order. The same as evicting block by block in (rank, deepest first) order.
        O(log leaves) per leaf touched + O(num_blocks).
        """
        while self._expiring and self._expiring[0][0] <= now:
            self._set(self._expiring[0][2], priority=0, expires=None)
        order = self._order
        evicted = array("I")
        while len(evicted) < num_blocks and order:
            rank, _, _, node = order.pop(0)
            self._left_order(node)
            self._policy.evicted(rank)
            count = min(num_blocks - len(evicted), len(node.blocks))
            if order and order[0][0] == rank:  # equals take turns, or a deep leaf would pay for a shallow one
                count = min(count, max(1, node.end - order[0][3].end))
            evicted.extend(reversed(node.blocks[-count:]))
            if count < len(node.blocks):
                node.blocks = node.blocks[:-count]
                node.label = node.label[: len(node.blocks) * self._block_bytes]
                node.end -= count
                self.num_blocks -= count
                self._join_order(node)
                continue
            self._detach(node)
            parent = node.parent
            if not parent.children and parent.lock_ref == 0:
                if parent.parent is None:
                    self._drop_root_if_empty(parent)
                else:
                    if parent.expires is not None and parent.expires <= now:
                        self._set(parent, priority=0, expires=None)
                    self._join_order(parent)
        return evicted

    def remove_namespace(self, namespace: Namespace) -> array[int]:
        """Ids of the blocks of a whole namespace, which are no longer the tree's. Nothing in it may be locked."""
        blocks = array("I")
        root = self._roots.pop(namespace, None)
        stack: list[RadixNode] = [root] if root is not None else []
        while stack:
            node = stack.pop()
            assert node.lock_ref == 0, f"a namespace is removed while {node!r} is locked"
            self._leave_order(node)
            blocks.extend(node.blocks)
            self.num_nodes -= node is not root
            stack.extend(node.children.values())
        self.num_blocks -= len(blocks)
        return blocks

    # ---------------------------------------------------------------- looking

    def namespaces(self) -> list[Namespace]:
        """Namespaces that hold blocks or are locked."""
        return list(self._roots)

    def check(self) -> None:
        """Recounts everything from scratch; AssertionError with one sentence and the tree if something is broken."""
        try:
            self._check()
        except AssertionError as broken:
            raise AssertionError(f"{broken}\n{self.show()}") from None

    def _check(self) -> None:
        num_blocks = num_protected = num_nodes = 0
        leaves = []
        owner: dict[int, RadixNode] = {}
        for node in self.nodes():
            children = node.children
            assert node.lock_ref >= sum(child.lock_ref > 0 for child in children.values()), (
                "lock_ref misses a locked child"
            )
            assert children or children is NO_CHILDREN, "a node without children keeps a container of its own"
            for first_block, child in children.items():
                assert child.parent is node, "a child does not point to its parent"
                assert child.label.startswith(first_block), "a child does not stand under its first block"
                assert child.end == node.end + len(child.blocks), "a child's depth is not its parent's plus its run"
                assert child.tick <= node.tick, "a child was used later than its parent"
            keys = [child.label[: self._block_bytes] for child in children.in_order()]
            assert keys == sorted(children), "children are out of order"
            for left, right in pairwise(keys):
                assert not right.startswith(left), "a partial leaf is the start of a sibling"
            if node.parent is None:
                assert not node.label and not node.blocks, "a root has tokens or blocks"
                assert children or node.lock_ref, "an unused root was kept"
                continue
            num_nodes += 1
            num_blocks += len(node.blocks)
            num_protected += len(node.blocks) * (node.lock_ref > 0)
            assert node.label, "a node that is no root is empty"
            if len(node.label) != len(node.blocks) * self._block_bytes:
                partial = len(node.blocks) == 1 and len(node.label) < self._block_bytes
                assert partial, "a label has not as many tokens as its run has slots"
                assert not children and node.lock_ref == 0, "a partial leaf is locked or has children"
            for block_id in node.blocks:
                assert block_id not in owner, f"block {block_id} is in two places of the tree"
                owner[block_id] = node
            if node.is_leaf and node.lock_ref == 0:
                leaves.append(node)
            else:
                assert node.order_entry is None, "a node that is locked or has children can be evicted"
        assert num_nodes == self.num_nodes, f"{num_nodes} nodes, num_nodes says {self.num_nodes}"
        assert num_blocks == self.num_blocks, f"{num_blocks} blocks, num_blocks says {self.num_blocks}"
        assert num_protected == self.num_protected, f"{num_protected} protected, counter says {self.num_protected}"
        assert len(leaves) == len(self._order), (
            "the eviction order has more or fewer nodes than there are unlocked leaves"
        )
        num_expiring = sum(leaf.expires is not None for leaf in leaves)
        assert num_expiring == len(self._expiring), "leaves whose priority ends are not those that wait for it"
        for leaf in leaves:
            entry = (self._rank(leaf), -leaf.end, leaf.serial, leaf)
            assert leaf.order_entry == entry, f"{leaf!r} stands in the eviction order with an old rank"
            assert entry in self._order, f"{leaf!r} is missing from the eviction order"

    def show(self, decode: Callable[[list[int]], str] | None = None, most: int = 60) -> str:
        """The tree as text, a line per node: range of tokens, run, lock, tick, first tokens.

        decode: turns token ids into text, for instance a tokenizer's `decode`. Lines beyond `most` are counted only.
        """
        lines = [
            f"radix tree: {self.num_nodes} nodes, {self.num_blocks} blocks of {self.block_size} tokens, "
            f"{self.num_protected} protected"
        ]
        bars: dict[int, str] = {}
        for count, node in enumerate(self.nodes()):
            if count == most:
                lines.append(f"… and {self.num_nodes + len(self._roots) - most} more")
                break
            if isinstance(node, RootNode):
                lines.append(f"namespace {'/'.join(node.namespace) or '(default)'}")
                bars[id(node)] = ""
                continue
            assert node.parent is not None
            is_last = node.parent.children.in_order()[-1] is node
            bar = bars[id(node.parent)]
            bars[id(node)] = bar + ("   " if is_last else "│  ")
            first = (node.end - len(node.blocks)) * self.block_size
            if decode is None:
                text = " ".join(map(str, unpack(node.label[: 8 * TOKEN_BYTES])))
            else:
                text = repr(decode(unpack(node.label[: 12 * TOKEN_BYTES])))[:50]
            lines.append(
                f"{bar}{'└─' if is_last else '├─'} [{first}, {first + node.num_tokens}) "
                f"blocks {describe_blocks(node.blocks)}  {f'lock {node.lock_ref}  ' if node.lock_ref else ''}"
                f"tick {node.tick}  {text}"
            )
        return "\n".join(lines)


def _retention(use: RadixNode | Use, now: int) -> tuple[int, float]:
    """Soft retention as something to compare: the higher priority counts, among equals the one that lasts longer.

    One whose time is over is none: inner nodes keep it until they are leaves and `evict` resets it.
    """
    if use.expires is None:
        return use.priority, float("inf")
    return (use.priority, use.expires) if use.expires > now else (0, 0)

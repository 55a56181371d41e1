"""One running request's blocks: which physical block holds which of its tokens.

    block_ids    3 4 5 │ 9 12
                 └───┘   └──┘
             cached, under   private: owned by this table, and by its forks
             one lock at     as long as they have not diverged
             `node`

The first `num_shared` blocks are the path to `node` in the tree, protected by one lock. The rest is private. A cached
block that the request wants to write in place is replaced by a private copy; `detached` names the places of those.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator

from .node import RadixNode, Use, describe_blocks
from .pool import BlockPool
from .tokens import TOKEN_BYTES, Namespace


class BlockTable:
    """The block table of one request, with the tokens whose slots it names.

    tokens        packed ids of all tokens that have a slot: the prompt and what was appended
    num_computed  leading tokens whose KV exists, as the request's owner said with `commit`
    num_cached_tokens   prompt tokens whose KV came from the cache
    use           when the request came, and the priority it gave to what it uses
    forks         all tables with which this one may share private blocks, itself included
    """

    __slots__ = (
        "block_ids", "block_size", "detached", "forks", "namespace", "node", "num_cached_tokens", "num_computed",
        "num_shared", "request_id", "tokens", "use",
    )  # fmt: skip

    def __init__(self, request_id: str | int, namespace: Namespace, block_size: int, node: RadixNode, use: Use) -> None:
        self.request_id = request_id
        self.namespace = namespace
        self.block_size = block_size
        self.node = node
        self.use = use
        self.tokens = bytearray()
        self.block_ids = array("I")
        self.num_shared = 0
        self.num_computed = 0
        self.num_cached_tokens = 0
        self.detached: set[int] = set()
        self.forks: set[BlockTable] = {self}

    @property
    def num_tokens(self) -> int:
        """Tokens that have a slot."""
        return len(self.tokens) // TOKEN_BYTES

    def slot(self, position: int) -> int:
        """The slot of the token at `position`: block_id * block_size + offset."""
        index, offset = divmod(position, self.block_size)
        return self.block_ids[index] * self.block_size + offset

    def private_indices(self) -> Iterator[int]:
        """Places in the table whose blocks belong to tables and not to the tree."""
        yield from sorted(self.detached)
        yield from range(self.num_shared, len(self.block_ids))

    def private_blocks(self) -> list[int]:
        """Ids of those blocks."""
        return [self.block_ids[index] for index in self.private_indices()]

    def must_copy_before_writing(self, index: int, pool: BlockPool) -> bool:
        """Someone else reads the block at this place: the tree, or a fork."""
        return not pool.is_exclusive(self.block_ids[index])

    def replace(self, index: int, block_id: int) -> None:
        """Names another block at this place, private to this table."""
        self.block_ids[index] = block_id
        if index < self.num_shared:
            self.detached.add(index)

    def tokens_filled(self, index: int) -> int:
        """Tokens that have a slot in the block at this place: block_size, but for the tail."""
        return min(self.block_size, self.num_tokens - index * self.block_size)

    def check(self) -> None:
        """AssertionError with a sentence if the table is not one."""
        needed = -(-self.num_tokens // self.block_size)
        assert len(self.block_ids) == needed, f"{self.show()}: {needed} blocks are needed for its tokens"
        assert self.num_shared <= len(self.block_ids), f"{self.show()}: more shared blocks than blocks"
        assert self.num_computed <= self.num_tokens, f"{self.show()}: more computed tokens than tokens"
        assert len(set(self.block_ids)) == len(self.block_ids), f"{self.show()}: a block stands in it twice"
        assert self in self.forks, f"{self.show()}: not among its own forks"

    def show(self) -> str:
        """The table in a line."""
        return (
            f"request {self.request_id!r}: {self.num_tokens} tokens ({self.num_cached_tokens} cached, "
            f"{self.num_computed} computed), blocks {describe_blocks(self.block_ids[: self.num_shared])} | "
            f"{describe_blocks(self.block_ids[self.num_shared :])}"
        )

    def _repr_mimebundle_(self, include: object = None, exclude: object = None) -> dict[str, str]:
        """The table as a picture, for notebooks, and as `show` for terminals."""
        from .render import draw_block_table, mime_bundle

        return mime_bundle(draw_block_table(self), self.show())

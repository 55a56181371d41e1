"""Adapters: each drives one prefix cache, ours or a peer's, through the calls that the benchmarks time.

An adapter is imported in the process that measures it and nowhere else, so that a peer's Python may be another one than
ours. A peer is never a dependency: where its package is not there, making the adapter raises ImportError and the
benchmark goes on without it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, Protocol


class Tree(Protocol):
    """A prefix tree without its allocator. Tokens are inserted, matched and evicted in whole blocks.

    `match`, `locations`, `lock`, `insert`, `evict` and `unlock` are timed and do nothing else; what converts to and
    from the tree's own types (`key`, `cut`, `value`, `blocks_of`) is not.
    """

    def key(self, token_ids: Sequence[int]) -> Any:
        """The token ids in the tree's own type."""

    def cut(self, key: Any, num_tokens: int) -> Any:
        """The first `num_tokens` of a key."""

    def value(self, block_ids: Sequence[int]) -> Any:
        """The blocks of a sequence as `insert` takes them."""

    def match(self, key: Any) -> tuple[int, Any]:
        """How many leading tokens are cached, and a handle to where they end."""

    def locations(self, match: Any) -> Any:
        """Where the KV of the matched tokens is, as an engine needs it."""

    def lock(self, match: Any) -> Any:
        """Protects the matched path; what `unlock` wants back."""

    def insert(self, key: Any, value: Any, num_known: int) -> int:
        """Adds a sequence; how many leading tokens were there before. num_known: of these, how many the caller knew."""

    def unlock(self, lock: Any) -> None:
        """Ends the protection."""

    def evict(self, num_tokens: int) -> Any:
        """Evicts at least so many tokens; where their KV was."""

    def blocks_of(self, locations: Any) -> list[int]:
        """What `locations` or `evict` gave, as block ids."""

    def num_nodes(self, match: Any) -> int | None:
        """Nodes on the matched path; None where the tree does not tell."""


class PromptCache(Protocol):
    """A whole cache manager: admits a prompt and lets it go. All three calls are timed."""

    def prepare(self, token_ids: list[int]) -> Any:
        """A request in the manager's own type: packed, or hashed."""

    def admit(self, request: Any) -> int:
        """Looks up the prompt and allocates the rest; tokens that hit."""

    def release(self, request: Any) -> None:
        """The prompt is computed and the request ends; its blocks stay cached."""


@dataclass(frozen=True)
class System:
    """What can be measured: its adapter, and the option of the command line that says where it is."""

    name: str
    adapter: str  # module:class, below this package
    kind: str  # "tree" or "manager"
    source: str  # the name in `--peer-path NAME=DIR`; "" for ours
    argument: str = ""

    def make(self, block_size: int, num_tokens: int, directory: Path | None) -> Any:
        """The adapter around a new, empty cache with room for `num_tokens`. Raises ImportError if it is not there."""
        module, _, name = self.adapter.partition(":")
        return getattr(import_module(f"{__name__}.{module}"), name)(block_size, num_tokens, directory, self.argument)


OURS_TREE = System("radixkv tree", "ours:OurTree", "tree", "")
OURS_MANAGER = System("radixkv", "ours:OurManager", "manager", "")
PEERS = (
    System("SGLang Rust", "sglang:SGLangTree", "tree", "sglang", "rust"),
    System("SGLang Python", "sglang:SGLangTree", "tree", "sglang", "radix"),
    System("mini-sglang", "mini_sglang:MiniSGLangTree", "tree", "mini-sglang"),
    System("vLLM", "vllm:VLLMManager", "manager", "vllm"),
)
SYSTEMS = {system.name: system for system in (OURS_TREE, OURS_MANAGER, *PEERS)}

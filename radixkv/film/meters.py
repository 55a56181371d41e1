"""What a cache counts, read at one moment."""

from __future__ import annotations

from typing import NamedTuple

from ..cache import PrefixCache


class Meters(NamedTuple):
    """Totals of a cache's life, then what it holds: requests that run, and blocks by state."""

    requests: int
    prompt_tokens: int
    hit_tokens: int
    committed_blocks: int
    evicted_blocks: int
    cow_copies: int
    running: int
    free: int
    evictable: int
    protected: int
    private: int

    @classmethod
    def of(cls, cache: PrefixCache) -> Meters:
        """As they are now. O(running requests)."""
        stats = cache.stats
        return cls(
            stats.requests,
            stats.prompt_tokens,
            stats.hit_tokens,
            stats.committed_blocks,
            stats.evicted_blocks,
            stats.cow_copies,
            len(cache.request_ids),
            cache.num_free_blocks,
            cache.num_evictable_blocks,
            cache.num_protected_blocks,
            cache.num_private_blocks,
        )

    @property
    def cached(self) -> int:
        """Blocks in the tree."""
        return self.evictable + self.protected

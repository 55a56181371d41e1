"""How often what happened. Each admitted request is counted once, however long it waited."""

from __future__ import annotations

from dataclasses import asdict, dataclass


@dataclass
class CacheStats:
    """Totals since the cache was made.

    requests        calls of `allocate` that succeeded
    prompt_tokens   tokens of their prompts
    hit_tokens      of these, tokens whose KV came from the cache, whether shared as whole blocks or copied
    prompt_blocks   blocks of their prompts, a partial last one included
    hit_blocks      of these, blocks shared with the tree
    committed_blocks   blocks that joined the tree (duplicates of cached ones not counted)
    evicted_blocks     blocks that left it to make room
    partial_copies     part-block copies that made a hit exact to the token
    copied_tokens      tokens whose KV those copied
    cow_copies         copy-on-write copies
    """

    requests: int = 0
    prompt_tokens: int = 0
    hit_tokens: int = 0
    prompt_blocks: int = 0
    hit_blocks: int = 0
    committed_blocks: int = 0
    evicted_blocks: int = 0
    partial_copies: int = 0
    copied_tokens: int = 0
    cow_copies: int = 0

    def count_request(self, prompt_tokens: int, hit_tokens: int, prompt_blocks: int, hit_blocks: int) -> None:
        """Adds one admitted request."""
        self.requests += 1
        self.prompt_tokens += prompt_tokens
        self.hit_tokens += hit_tokens
        self.prompt_blocks += prompt_blocks
        self.hit_blocks += hit_blocks

    @property
    def token_hit_rate(self) -> float | None:
        """hit_tokens / prompt_tokens; None before the first request."""
        return self.hit_tokens / self.prompt_tokens if self.prompt_tokens else None

    @property
    def block_hit_rate(self) -> float | None:
        """hit_blocks / prompt_blocks; None before the first request."""
        return self.hit_blocks / self.prompt_blocks if self.prompt_blocks else None

    def as_dict(self) -> dict[str, int]:
        """The counters by name."""
        return asdict(self)

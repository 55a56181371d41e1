"""What an engine is made with: checked when made, never changed afterwards. Imports no torch."""

from __future__ import annotations

import re
from dataclasses import dataclass

_UNITS = {"": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "kib": 2**10, "mib": 2**20, "gib": 2**30}


def parse_size(size: int | str) -> int:
    """A size in bytes: an integer as it is, or text such as "2GiB" or "500 MB". Raises ValueError otherwise."""
    if isinstance(size, int) and not isinstance(size, bool):
        num_bytes = size
    else:
        found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([kmg]i?b)?\s*", str(size), re.IGNORECASE)
        if found is None:
            raise ValueError(
                f"size {size!r} is not understood; allowed: bytes, or a number with KB, MB, GB, KiB, MiB, GiB"
            )
        num_bytes = int(float(found[1]) * _UNITS[(found[2] or "").lower()])
    if num_bytes <= 0:
        raise ValueError(f"size {size!r} is not positive")
    return num_bytes


@dataclass(frozen=True)
class EngineConfig:
    """The engine's limits.

    block_size              tokens per block
    num_blocks              blocks in the pool
    max_model_len           tokens of one request at most, prompt and output together
    max_num_seqs            requests that run at once at most
    max_num_batched_tokens  tokens computed in one step, which a single longer prompt may exceed
    policy                  eviction policy of the cache
    enable_prefix_caching   off: nothing is kept, nothing is found; for comparison
    """

    block_size: int
    num_blocks: int
    max_model_len: int
    max_num_seqs: int = 64
    max_num_batched_tokens: int = 8192
    policy: str = "lru"
    enable_prefix_caching: bool = True

    def __post_init__(self) -> None:
        for name in ("block_size", "num_blocks", "max_model_len", "max_num_seqs", "max_num_batched_tokens"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int):
                raise TypeError(f"{name} must be an integer, not {value!r}")
            if value < 1:
                raise ValueError(f"{name} is {value}; allowed: 1 and more")

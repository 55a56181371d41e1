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


# The names by which `EngineConfig` chooses; each is explained where it is done, in `scheduler.py` and `preemption.py`.
ORDERS = ("fcfs", "longest-prefix")
VICTIMS = ("lifo", "largest", "least-progress")
PREEMPTIONS = ("recompute", "swap")
# Ways to run a model and to attend, explained in `models/decoder.py` and `attention/plan.py`.
MODEL_IMPLS = ("auto", "native", "transformers")
ATTENTIONS = ("auto", "tree", "gather")


@dataclass(frozen=True)
class EngineConfig:
    """The engine's limits and policies.

    block_size              tokens per block
    num_blocks              blocks in the pool
    max_model_len           tokens of one request at most, prompt and output together
    max_num_seqs            sequences that run at once at most; never more than max_num_batched_tokens, so that each of
                            them gets a token in every step
    max_num_batched_tokens  tokens computed in one step at most; a longer prompt is prefilled in chunks
    policy                  eviction policy of the cache
    enable_prefix_caching   off: nothing is kept, nothing is found; for comparison
    order                   who is admitted next: "fcfs" (first come, first served) or "longest-prefix" (who hits most)
    max_overtakes           so many later requests may be admitted before a waiting one; from then on it goes first
    victim                  who gives its blocks up when a decode finds none: "lifo" (who was admitted last), "largest"
                            (who has the most tokens), "least-progress" (who has the fewest output tokens)
    preemption              how it comes back: "recompute" (what the cache has lost is computed again) or "swap" (it is
                            copied back from host memory)
    num_swap_blocks         blocks that host memory holds for "swap"; who finds no room there is recomputed
    attention               "tree" (what requests share is read once for all of them), "gather" (each reads its own), or
                            "auto" (tree where it pays)
    """

    block_size: int
    num_blocks: int
    max_model_len: int
    max_num_seqs: int = 64
    max_num_batched_tokens: int = 8192
    policy: str = "lru"
    enable_prefix_caching: bool = True
    order: str = "fcfs"
    max_overtakes: int = 32
    victim: str = "lifo"
    preemption: str = "recompute"
    num_swap_blocks: int = 0
    attention: str = "auto"

    def __post_init__(self) -> None:
        least = {"num_swap_blocks": 0}
        for name in (
            "block_size", "num_blocks", "max_model_len", "max_num_seqs", "max_num_batched_tokens", "max_overtakes",
            *least,
        ):  # fmt: skip
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int):
                raise TypeError(f"{name} must be an integer, not {value!r}")
            if value < least.get(name, 1):
                raise ValueError(f"{name} is {value}; allowed: {least.get(name, 1)} and more")
        names = {"order": ORDERS, "victim": VICTIMS, "preemption": PREEMPTIONS, "attention": ATTENTIONS}
        for name, allowed in names.items():
            value = getattr(self, name)
            if value not in allowed:
                raise ValueError(f"{name} is {value!r}; allowed: {', '.join(allowed)}")

    @property
    def max_running(self) -> int:
        """Sequences that may run at once."""
        return min(self.max_num_seqs, self.max_num_batched_tokens)

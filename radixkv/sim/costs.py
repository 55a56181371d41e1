"""What hits are worth in seconds, under a stated model: computing again against copying back, and time to first token.

Prefill is linear in tokens here: attention's quadratic part is left out, which favours recomputing long prompts.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ..traces.trace import Trace
from .records import Replay


@dataclass(frozen=True)
class CostModel:
    """Rates of one machine and one model. The defaults: 8 billion parameters in 16 bits on a data-centre GPU.

    prefill_tokens_per_s   tokens computed a second
    kv_bytes_per_token     K and V over all layers; 128 KiB for 32 layers of 8 KV heads, 128 wide, in 16 bits
    links                  where KV can lie, and GB/s from there: memory of the host over PCIe 4 x16, and an NVMe disk
    link_latency_s         before the first byte, per restore
    """

    prefill_tokens_per_s: float = 10_000.0
    kv_bytes_per_token: int = 131_072
    links: Mapping[str, float] = field(default_factory=lambda: {"host": 25.0, "disk": 5.0})
    link_latency_s: float = 0.0005

    def __post_init__(self) -> None:
        numbers = {
            "prefill_tokens_per_s": self.prefill_tokens_per_s,
            "kv_bytes_per_token": self.kv_bytes_per_token,
            **{f"links[{name!r}]": speed for name, speed in self.links.items()},
        }
        for name, value in numbers.items():
            if not value > 0:
                raise ValueError(f"{name} is {value}; allowed: more than 0")
        if not self.link_latency_s >= 0:
            raise ValueError(f"link_latency_s is {self.link_latency_s}; allowed: 0 and more")

    def recompute_s(self, num_tokens: int) -> float:
        """Seconds to compute so many tokens."""
        return num_tokens / self.prefill_tokens_per_s

    def restore_s(self, num_tokens: int, link: str) -> float:
        """Seconds to copy the KV of so many tokens over a link; 0 for none."""
        if not num_tokens:
            return 0.0
        return self.link_latency_s + num_tokens * self.kv_bytes_per_token / (self.links[link] * 1e9)

    def break_even_tokens(self, link: str) -> float | None:
        """Tokens from which restoring is faster; None: it never is."""
        gain_s = 1 / self.prefill_tokens_per_s - self.kv_bytes_per_token / (self.links[link] * 1e9)
        return self.link_latency_s / gain_s if gain_s > 0 else None

    def describe(self) -> str:
        """The model in a line."""
        links = ", ".join(f"{name} {speed:g} GB/s" for name, speed in self.links.items())
        return (
            f"prefill {self.prefill_tokens_per_s:g} tokens/s, {self.kv_bytes_per_token} bytes of KV a token, {links}, "
            f"{self.link_latency_s:g} s latency; time to first token = prefill + restore, no queueing"
        )


@dataclass(frozen=True)
class CostPoint:
    """Time to first token if all hits lie in one place.

    place                  "nowhere" (no cache), "device" (a hit costs nothing), or a link's name
    mean, median, p99      of the estimated time to first token, over the counted requests
    total_s                their sum: what the machine spends before first tokens
    restored_requests      hits for which copying is faster than computing; the others are computed
    break_even_tokens      hits of at least so many tokens are worth copying; None: none are
    """

    definition: str
    place: str
    requests: int
    mean_ttft_s: float
    median_ttft_s: float
    p99_ttft_s: float
    total_s: float
    restored_requests: int
    break_even_tokens: float | None

    def as_dict(self) -> dict[str, Any]:
        """The record for JSON."""
        return {name: getattr(self, name) for name in self.__dataclass_fields__}


def ttft_estimate(trace: Trace, replay: Replay, model: CostModel | None = None) -> list[CostPoint]:
    """Recompute against restore: no cache, all hits on the device, and all hits behind each link.

    Empty where the trace cannot tell what is a hit, or no request is counted. O(requests · links).
    """
    model = model or CostModel()
    hits = replay.per_request_hit_tokens
    counted = range(replay.first_counted, len(trace.requests))
    if hits is None or not counted:
        return []
    lengths = [trace.requests[index].num_prompt_tokens for index in counted]
    hit_tokens = [hits[index] for index in counted]
    definition = f"{model.describe()}; hits: {replay.definition}"
    points = []
    for place in ("nowhere", "device", *model.links):
        ttfts_s, num_restored = [], 0
        for length, hit in zip(lengths, hit_tokens, strict=True):
            computed_s, again_s = model.recompute_s(length - hit), model.recompute_s(hit)
            if place == "nowhere":
                ttfts_s.append(computed_s + again_s)
            elif place == "device":
                ttfts_s.append(computed_s)
            else:
                restore_s = model.restore_s(hit, place)
                num_restored += 0 < restore_s < again_s
                ttfts_s.append(computed_s + min(restore_s, again_s))
        ttfts_s.sort()
        points.append(
            CostPoint(
                definition=definition,
                place=place,
                requests=len(counted),
                mean_ttft_s=statistics.fmean(ttfts_s),
                median_ttft_s=statistics.median(ttfts_s),
                p99_ttft_s=ttfts_s[min(len(ttfts_s) - 1, int(0.99 * len(ttfts_s)))],
                total_s=sum(ttfts_s),
                restored_requests=num_restored,
                break_even_tokens=model.break_even_tokens(place) if place in model.links else None,
            )
        )
    return points

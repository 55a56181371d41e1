"""The simulator: what would prefix caching do for this traffic?

    replay      a trace against the caches of this package: which policy, capacity, block size, what is cached when
    exact_curve, sampled_curve   LRU at every capacity in one pass, or from a sample
    optimum     what no policy can beat
    capacity_sweep, block_size_sweep, hit_sources   is it the policy or the capacity, which block size, whose hits
    memory_over_time, concurrency   what slots, pages and shared blocks hold, and how many requests fit
    ttft_estimate   what hits are worth in seconds, computed again or copied back

Each gives a record that says in a line how its numbers are defined.
"""

from .blocks import BlockView, known_outputs
from .costs import CostModel, CostPoint, ttft_estimate
from .curve import curve_error, exact_curve, sampled_curve
from .memory import MemoryUse, concurrency, memory_over_time
from .optimum import optimum
from .records import CurveError, GroupHits, MissRatioCurve, Replay, hits_by, hits_by_turn
from .replay import ServiceTimes, replay
from .segments import SegmentTree
from .sweep import (
    BlockSizePoint,
    HitSources,
    PolicyPoint,
    block_size_sweep,
    capacities_of,
    capacity_sweep,
    hit_sources,
)

__all__ = [
    "BlockSizePoint",
    "BlockView",
    "CostModel",
    "CostPoint",
    "CurveError",
    "GroupHits",
    "HitSources",
    "MemoryUse",
    "MissRatioCurve",
    "PolicyPoint",
    "Replay",
    "SegmentTree",
    "ServiceTimes",
    "block_size_sweep",
    "capacities_of",
    "capacity_sweep",
    "concurrency",
    "curve_error",
    "exact_curve",
    "hit_sources",
    "hits_by",
    "hits_by_turn",
    "known_outputs",
    "memory_over_time",
    "optimum",
    "replay",
    "sampled_curve",
    "ttft_estimate",
]

"""The simulator: what would prefix caching do for this traffic?

    replay      a trace against the caches of this package: which policy, capacity, block size, what is cached when
    exact_curve, sampled_curve   LRU at every capacity in one pass, or from a sample
    optimum     what no policy can beat

Each gives a record that says in a line how its numbers are defined.
"""

from .blocks import BlockView, known_outputs
from .curve import curve_error, exact_curve, sampled_curve
from .optimum import optimum
from .records import CurveError, GroupHits, MissRatioCurve, Replay, hits_by, hits_by_turn
from .replay import ServiceTimes, replay
from .segments import SegmentTree

__all__ = [
    "BlockView",
    "CurveError",
    "GroupHits",
    "MissRatioCurve",
    "Replay",
    "SegmentTree",
    "ServiceTimes",
    "curve_error",
    "exact_curve",
    "hits_by",
    "hits_by_turn",
    "known_outputs",
    "optimum",
    "replay",
    "sampled_curve",
]

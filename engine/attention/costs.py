"""What a part of attention costs on a CPU, and so when a tree pays: a linear model with measured constants.

    one part          call + KV heads * head + elements * (read + copy where they are scattered)
    several rows      padded_call + rows * KV heads * head + elements * (read + copy + spill if they outgrow the cache)
    merging           level for each part that is merged, then merge + results * merge_element

where the elements are those of K and V that the part goes through, once for all of its queries. Time for the products
is no part of it: it is the same however the keys are divided among parts. It appears in predictions only, as `product`.

The constants were measured on one core of a server CPU with AVX-512 and AMX, at 3 KV heads of 64 and 8 of 128, with
`radixkv bench attention`, which measures the cases that they decide and prints the predictions beside them; calls are
taken to cost twice what they do there: in a step, a model's weights go through the caches between two of them. With the
higher costs a step of 32 rows took 2 to 9 % less time, and others the same. They are in nanoseconds, but only their
ratios decide, and those move little between machines.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

CACHE_BYTES = 2**20
"""What stays in a core's cache between being gathered and being read: half of a 2 MiB second-level cache."""


class Costs(NamedTuple):
    """Constants of one dtype, in nanoseconds."""

    call: float
    """A part: the fused operation, and the views around it."""
    padded_call: float
    """Rows side by side: two gathers, a mask, and a part."""
    head: float
    """A KV head of a part, or of one of the rows side by side: its matrix products."""
    read: float
    """An element of K or V that comes from memory."""
    reread: float
    """One that another row of the same step has just read."""
    copy: float
    """An element that is gathered first, because its slots do not ascend by one."""
    spill: float
    """An element that was gathered beyond the cache's room, and comes from memory a second time."""
    level: float
    """Putting a part's values and log-sum-exps where they are merged."""
    merge: float
    """Merging, in steps that merge anything."""
    merge_element: float
    """For each number on each level."""
    product: float
    """A query head times an element of a key, or a weight times an element of a value. Decides nothing."""


_FLOAT32 = Costs(
    call=36e3, padded_call=52e3, head=1e3, read=0.36, reread=0.16, copy=0.30, spill=0.35, level=7e3, merge=15e3,
    merge_element=0.25, product=0.032,
)  # fmt: skip
_HALF = Costs(
    call=36e3, padded_call=60e3, head=2.5e3, read=0.28, reread=0.17, copy=0.12, spill=0.20, level=7e3, merge=15e3,
    merge_element=0.25, product=0.012,
)  # fmt: skip


def costs_of(dtype: torch.dtype) -> Costs:
    """The constants for keys and values of a dtype."""
    return _HALF if dtype.itemsize == 2 else _FLOAT32

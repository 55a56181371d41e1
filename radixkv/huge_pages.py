"""Asks the kernel to back memory by huge pages, so that reading much of it is not slowed down by looking addresses up.

A decode step reads every weight once, and the KV of each request. In pages of 4 KiB, hundreds of megabytes need more
translations than a processor keeps, and in a virtual machine each of them is looked up twice. With pages of 2 MiB a
step of a 135-million-parameter model took about a fifth less time (one core of a virtual machine, batch 1 and 8).

Linux only; anywhere else, and where the kernel says no, nothing happens and nothing is lost.
"""

from __future__ import annotations

import ctypes
import sys
from bisect import bisect_right
from collections.abc import Iterable
from pathlib import Path

HUGE_PAGE_BYTES = 2**21
_MADV_HUGEPAGE = 14  # from now on, back what is touched by huge pages
_MADV_COLLAPSE = 25  # move what is there already into huge pages; Linux 6.1


def advise_range(address: int, num_bytes: int) -> None:
    """Asks for huge pages under a range of memory, for the part of it that fills whole ones. O(1): nothing is moved."""
    _advise(address, address + num_bytes, _MADV_HUGEPAGE)


def advise_mappings_of(addresses: Iterable[int]) -> None:
    """Asks for huge pages under the anonymous mappings that hold these addresses, and moves what is in them there.

    For many objects of less than a huge page each, which an allocator has put side by side. O(bytes of the mappings).
    """
    mappings = _anonymous_mappings()
    starts = [start for start, _ in mappings]
    found = {bisect_right(starts, address) - 1 for address in addresses}
    for index in sorted(found - {-1}):
        for advice in (_MADV_HUGEPAGE, _MADV_COLLAPSE):
            _advise(*mappings[index], advice)


def _advise(start: int, stop: int, advice: int) -> None:
    first = -(-start // HUGE_PAGE_BYTES) * HUGE_PAGE_BYTES
    last = stop // HUGE_PAGE_BYTES * HUGE_PAGE_BYTES
    if first < last and sys.platform == "linux":
        madvise = ctypes.CDLL(None).madvise
        madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
        madvise(first, last - first, advice)  # a refusal is an answer too


def _anonymous_mappings() -> list[tuple[int, int]]:
    """Start and end of the process's private memory that no file is behind, ascending."""
    maps = Path("/proc/self/maps")
    if not maps.exists():
        return []
    mappings = []
    for line in maps.read_text().splitlines():
        bounds, permissions, _, _, inode, *name = line.split()
        if permissions == "rw-p" and inode == "0" and name in ([], ["[heap]"]):
            start, stop = (int(bound, 16) for bound in bounds.split("-"))
            mappings.append((start, stop))
    return mappings

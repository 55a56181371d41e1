"""Advice on huge pages changes nothing but the time it takes to read: what is in memory stays, wherever it lies."""

import ctypes
import mmap
import sys
from pathlib import Path

import pytest

from radixkv import huge_pages
from radixkv.huge_pages import HUGE_PAGE_BYTES, advise_mappings_of, advise_range


def filled(num_bytes):
    """Private memory with a pattern in it, and its address."""
    memory = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) if sys.platform != "win32" else None
    if memory is None:
        pytest.skip("no anonymous private mappings here")
    for start in range(0, num_bytes, 4096):
        memory[start : start + 8] = start.to_bytes(8, "little")
    return memory, ctypes.addressof(ctypes.c_char.from_buffer(memory))


def assert_unchanged(memory):
    """Each page begins with its own number."""
    for start in range(0, len(memory), 4096):
        assert memory[start : start + 8] == start.to_bytes(8, "little")


def test_what_is_in_memory_stays():
    """Pages are moved under a running program."""
    memory, address = filled(5 * HUGE_PAGE_BYTES + 4096)
    advise_range(address, len(memory))
    assert_unchanged(memory)
    advise_mappings_of([address, address + len(memory) - 1])
    assert_unchanged(memory)


def test_addresses_of_nothing_and_of_files_are_left_alone():
    """A weight may live in a file that is mapped, or have been freed."""
    advise_mappings_of([])
    advise_mappings_of([0, 4096, 2**63])
    advise_range(4096, 10)
    advise_range(4096, 0)


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="mappings are told by Linux only")
def test_only_whole_huge_pages_inside_the_mapping_are_named(monkeypatch):
    """Advice that reaches past its memory would speak of somebody else's."""
    asked = []
    monkeypatch.setattr(huge_pages, "_advise", lambda start, stop, advice: asked.append((start, stop)))
    memory, address = filled(3 * HUGE_PAGE_BYTES)
    advise_mappings_of([address + 5])
    (bounds,) = set(asked)
    assert bounds[0] <= address < bounds[1]
    assert bounds in huge_pages._anonymous_mappings()
    assert len(memory) == 3 * HUGE_PAGE_BYTES

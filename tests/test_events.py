"""Events: whoever replays them knows which full blocks are resident, at any time and from any moment on."""

from __future__ import annotations

import random
import subprocess
import sys

import pytest

from radixkv import OutOfBlocks, PrefixCache
from radixkv.events import BlocksRemoved, BlocksStored, CacheCleared
from radixkv.tokens import TOKEN_BYTES, block_digest, root_digest


class Follower:
    """Replays events into a set, and checks that each of them makes sense."""

    def __init__(self) -> None:
        self.resident: set[bytes] = set()

    def __call__(self, event: object) -> None:
        match event:
            case BlocksStored(digests, parent, namespace, tokens):
                assert parent is None or parent in self.resident, "stored behind a block that is not there"
                digest = root_digest(namespace) if parent is None else parent
                step = len(tokens) // len(digests)
                for index, name in enumerate(digests):
                    digest = block_digest(digest, tokens[index * step : (index + 1) * step])
                    assert digest == name, "the digest is not that of the tokens"
                    assert name not in self.resident, "stored twice"
                    self.resident.add(name)
            case BlocksRemoved(digests):
                for name in digests:
                    self.resident.remove(name)  # KeyError: removed twice, or never stored
            case CacheCleared():
                self.resident.clear()


def resident_digests(cache: PrefixCache) -> set[bytes]:
    """The digests of all full blocks in the tree, from scratch."""
    block_bytes = cache.block_size * TOKEN_BYTES
    found = set()
    for node in cache.tree.nodes():
        digest = root_digest(cache.tree.namespace_of(node))
        path = cache.tree.path_key(node)
        for start in range(0, len(path) - block_bytes + 1, block_bytes):
            digest = block_digest(digest, path[start : start + block_bytes])
            found.add(digest)
    return found


def random_step(cache: PrefixCache, rng: random.Random, live: list[int], step: int) -> None:
    """Does one thing or another; what does not fit the pool is passed over."""
    kind = rng.random()
    if kind < 0.4:
        prompt = [rng.randrange(3) for _ in range(rng.randrange(1, 5 * cache.block_size))]
        try:
            cache.allocate(step, prompt, namespace=rng.choice([None, "a"]))
        except OutOfBlocks:
            return
        live.append(step)
    elif live and kind < 0.6:
        request_id = rng.choice(live)
        cache.commit(request_id, cache.num_tokens(request_id))
    elif live and kind < 0.7:
        cache.fork(rng.choice(live), step)
        live.append(step)
    elif live and kind < 0.8:
        try:
            cache.append_token(rng.choice(live), rng.randrange(3))
        except OutOfBlocks:
            return
    elif kind < 0.85:
        cache.evict(rng.randrange(4))
    elif kind < 0.86:
        cache.reset()
    elif kind < 0.87:
        cache.drop_namespace("a")
    elif live:
        cache.free(live.pop(rng.randrange(len(live))))


@pytest.mark.parametrize("block_size", [1, 2, 4])
def test_replayed_events_give_the_set_of_resident_blocks(block_size: int) -> None:
    """B088: at every moment, through inserts, evictions, forks and flushes; a late listener catches up at once."""
    rng = random.Random(block_size)
    cache = PrefixCache(24, block_size)
    early = Follower()
    cache.subscribe(early)
    late = None
    live: list[int] = []
    for step in range(3000):
        random_step(cache, rng, live, step)
        if step == 1500:
            late = Follower()
            cache.subscribe(late)
        if step % 20 == 0:
            expected = resident_digests(cache)
            assert early.resident == expected
            assert late is None or late.resident == expected
    assert early.resident, "the walk never stored anything"


def test_nothing_is_hashed_while_nobody_listens(monkeypatch: pytest.MonkeyPatch) -> None:
    """Events cost nothing without a listener, and again nothing after the last one has left."""

    def refuse(*arguments: object) -> bytes:
        raise AssertionError("a digest was computed")

    cache = PrefixCache(8, 2)
    cache.subscribe(lambda event: None)()
    monkeypatch.setattr("radixkv.events.block_digest", refuse)
    cache.allocate("a", [1, 2, 3, 4])
    cache.commit("a", 4)
    cache.free("a")
    assert cache.evict(8) == 2


def test_unsubscribing_ends_the_calls_and_leaves_other_listeners() -> None:
    """One listener's end is not another's."""
    cache = PrefixCache(8, 2)
    first, second = Follower(), Follower()
    stop = cache.subscribe(first)
    cache.subscribe(second)
    stop()
    stop()  # harmless
    cache.allocate("a", [1, 2, 3])
    cache.commit("a", 3)
    assert not first.resident
    assert len(second.resident) == 1


def test_a_block_written_in_place_still_names_its_parent() -> None:
    """The table's copy of a cached block has no digest of its own; the next block hangs behind the tree's."""
    cache = PrefixCache(16, 2)
    follower = Follower()
    cache.subscribe(follower)
    cache.allocate("a", [1, 2])
    cache.commit("a", 2)
    cache.write("a", 0)
    for token in (3, 4):
        cache.append_token("a", token)
    cache.commit("a", 4)
    assert follower.resident == resident_digests(cache)
    assert len(follower.resident) == 2


def test_digests_are_the_same_in_every_process() -> None:
    """Another hash seed, the same digest: what was stored yesterday is found today (A046 for names)."""
    code = "from radixkv.tokens import *; print(block_digest(root_digest(('salt', 'x')), pack([1, 2, 3])).hex())"
    outputs = {
        subprocess.run(
            [sys.executable, "-c", code], env={"PYTHONHASHSEED": seed}, capture_output=True, text=True, check=True
        ).stdout
        for seed in ("1", "2")
    }
    assert outputs == {
        block_digest(root_digest(("salt", "x")), bytes([0, 0, 0, 1, 0, 0, 0, 2, 0, 0, 0, 3])).hex() + "\n"
    }

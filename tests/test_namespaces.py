"""Namespaces: nothing is shared across them; each has its statistics, and can be dropped. And why a prompt missed."""

from __future__ import annotations

import pytest

from radixkv import PrefixCache, namespace_of

PROMPT = list(range(8))


def run(cache: PrefixCache, request_id: str, prompt: list[int], namespace: object = None) -> int:
    """Runs a prompt to its end; the tokens it hit."""
    hit = cache.allocate(request_id, prompt, namespace).num_cached_tokens  # type: ignore[arg-type]
    cache.commit(request_id, len(prompt))
    cache.free(request_id)
    cache.check()
    return hit


def test_a_salt_and_an_adapter_of_the_same_name_share_nothing() -> None:
    """B080: plain, salt X, adapter X, both: four namespaces."""
    cache = PrefixCache(64, 4)
    names = [None, namespace_of(salt="X"), namespace_of(adapter="X"), namespace_of(salt="X", adapter="X"), "X"]
    assert [run(cache, "r", PROMPT, name) for name in names] == [0] * 5
    assert [run(cache, "r", PROMPT, name) for name in names] == [7] * 5


def test_a_new_version_of_an_adapter_starts_cold() -> None:
    """B083: other weights under the same name must not be served from old KV."""
    cache = PrefixCache(64, 4)
    assert run(cache, "r", PROMPT, namespace_of(adapter="a", version="1")) == 0
    assert run(cache, "r", PROMPT, namespace_of(adapter="a", version="2")) == 0
    assert run(cache, "r", PROMPT, namespace_of(adapter="a", version="1")) == 7


def test_tagged_fields_are_checked() -> None:
    """A number is no field, and a version belongs to an adapter."""
    with pytest.raises(TypeError, match="salt must be a string, not 0"):
        namespace_of(salt=0)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="without an adapter"):
        namespace_of(version="1")
    assert namespace_of(salt="") == namespace_of() == ()


def test_each_namespace_is_counted_apart() -> None:
    """A030: one tenant's traffic does not show in another's numbers."""
    cache = PrefixCache(64, 4)
    for _ in range(3):
        run(cache, "r", PROMPT, "a")
    run(cache, "r", PROMPT, "b")
    a, b = cache.namespace_stats("a"), cache.namespace_stats("b")
    assert (a.requests, a.prompt_tokens, a.hit_tokens) == (3, 24, 14)
    assert (b.requests, b.prompt_tokens, b.hit_tokens) == (1, 8, 0)
    assert cache.namespace_stats("never used").requests == 0
    assert (cache.stats.requests, cache.stats.hit_tokens) == (4, 14)


def test_dropping_a_namespace_forgets_it_and_leaves_the_others() -> None:
    """And is refused, with nothing changed, while a request runs in it."""
    cache = PrefixCache(64, 4)
    run(cache, "r", PROMPT, "a")
    run(cache, "r", PROMPT, "b")
    cache.allocate("running", PROMPT, "a")
    assert not cache.drop_namespace("a")
    assert cache.lookup_prefix(PROMPT, "a").num_tokens == 8
    cache.free("running")
    assert cache.drop_namespace("a")
    cache.check()
    assert cache.lookup_prefix(PROMPT, "a").num_tokens == 0
    assert cache.lookup_prefix(PROMPT, "b").num_tokens == 8
    assert cache.namespace_stats("a").requests == 0
    assert cache.num_free_blocks + cache.num_cached_blocks == 64
    assert cache.drop_namespace("never used")


def test_a_miss_is_explained() -> None:
    """Hit, evicted, diverged, in another namespace, never seen."""
    cache = PrefixCache(4, 4, remember_evicted=100)
    run(cache, "r", PROMPT)
    assert cache.explain_miss(PROMPT).reason == "hit"
    diverged = cache.explain_miss([*PROMPT[:6], 99, 99])
    assert (diverged.reason, diverged.num_cached_tokens) == ("diverged", 6)
    assert cache.explain_miss([50, 51, 52, 53, 54]).reason == "never seen"
    assert cache.explain_miss(PROMPT, "b").reason == "other namespace"
    assert cache.explain_miss([*PROMPT, 8, 9, 10, 11]).reason == "never seen"
    run(cache, "big", list(range(100, 116)))  # takes all four blocks
    assert cache.explain_miss(PROMPT).reason == "evicted"
    run(cache, "r", PROMPT)
    assert cache.explain_miss(PROMPT).reason == "hit"


def test_explaining_changes_nothing() -> None:
    """It is a look, not a use."""
    cache = PrefixCache(8, 4, remember_evicted=10)
    run(cache, "r", PROMPT)
    before = cache.show()
    cache.explain_miss([1, 2, 3])
    assert cache.show() == before

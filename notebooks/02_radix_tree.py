# ---
# jupyter:
#   jupytext:
#     formats: ipynb,py:percent
#     text_representation:
#       extension: .py
#       format_name: percent
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # How does a radix tree find, share, protect and give up what it has cached?
#
# The keys and values of a token depend on every token before it, so two requests can share them exactly as far as their
# texts begin alike. The tree keeps each such beginning once: a node is a piece of text with the blocks that hold it,
# and the way from the root to a node *is* the beginning of a block table. Four operations are all there is: match,
# split, lock, evict.
#
# Everything here fits on paper: a token is a letter, a block holds four of them, the pool has twelve blocks. No model,
# no tensors, no data.

# %%
import IPython.display

from radixkv import PrefixCache
from radixkv.render import draw_cache, mime_bundle
from radixkv.tokens import unpack


def letters(text: str) -> list[int]:
    """One token a letter."""
    return [ord(letter) for letter in text]


def decode(token_ids: list[int]) -> str:
    """The text of such tokens."""
    return "".join(map(chr, token_ids))


cache = PrefixCache(num_blocks=12, block_size=4, policy="lru")
cache.decode = decode

# %% [markdown]
# ## Match: one walk, to the token, and nothing changes
#
# A request lives through `allocate`, `commit` and `free`. The first one finds nothing. What it committed stays.


# %%
def serve(name: str, text: str) -> int:
    """Runs a request from beginning to end; tokens that it had from the cache."""
    found = cache.allocate(name, letters(text))
    cache.commit(name, len(text))  # here an engine would have computed keys and values
    cache.free(name)
    return found.num_cached_tokens


assert serve("first", "the cat sat down") == 0
before = cache.show(decode)
for text in ("the cat sat down", "the cat ran home", "the cow", "a cat sat down"):
    found = cache.lookup_prefix(letters(text))
    print(f"{text!r}: {found.num_tokens} tokens, {len(found.block_ids)} whole blocks {found.block_ids}")
assert cache.show(decode) == before  # a look changes neither shape nor order
print(before)

# %% [markdown]
# `the cow` is found to the fifth letter, one letter into the second block. `a cat sat down` has three words of what is
# cached, but does not *begin* like it, so it finds nothing: its keys and values would be others.

# %%
hits = [cache.lookup_prefix(letters(text)).num_tokens for text in ("the cat ran home", "the cow", "a cat sat down")]
assert hits == [8, 5, 0]
assert serve("again", "the cat sat down") == 15  # all of it is cached, but one token must be computed to get the next

# %% [markdown]
# ## Split: where two texts part, a node ends
#
# `the cat ran home` begins like what is cached for two blocks. The node of four blocks becomes one of two, which both
# texts share, with a child for each way on. 8 blocks of text take 6 blocks of memory.


# %%
def draw(title: str, old_nodes: set[int]) -> None:
    """The cache, with the nodes outlined that are new."""
    new_nodes = nodes() - old_nodes
    IPython.display.display(
        mime_bundle(draw_cache(cache, changed=new_nodes, title=title), cache.show(decode)), raw=True
    )


def nodes() -> set[int]:
    """The serial numbers of the nodes."""
    return {node.serial for node in cache.tree.nodes()}


old = nodes()
assert serve("second", "the cat ran home") == 8
draw("Split: what both texts begin with is kept once", old)
assert cache.tree.num_nodes == 3 and cache.num_cached_blocks == 6

# %% [markdown]
# ## Lock: what a running request stands on cannot go
#
# `the car is red` matches into a block: four letters are shared as a whole block, and `ca` of the next one is *copied*
# into the request's own block instead of computed. While it runs, the path that it shares is locked. Its other blocks
# are its own; nobody finds them before they are committed.

# %%
old = nodes()
found = cache.allocate("third", letters("the car is red"))
draw("Lock: the running request protects what it shares, and only that", old)
print(found)
assert found.num_cached_tokens == 6 and found.num_shared_blocks == 1  # 4 tokens shared, 2 copied
assert (cache.num_protected_blocks, cache.num_private_blocks, cache.num_evictable_blocks) == (1, 3, 5)
assert cache.lookup_prefix(letters("the car is red")).num_tokens == 6  # not committed, so not found

# %%
cache.commit("third", len("the car is red"))
assert cache.lookup_prefix(letters("the car is red")).num_tokens == 12  # full blocks; the tail is still written to
locks = {node.end: node.lock_ref for node in cache.tree.nodes() if node.lock_ref and node.parent}
print("lock_ref of the nodes on its path, by the number of blocks up to their end:", locks)
cache.free("third")
assert cache.num_protected_blocks == cache.num_private_blocks == 0
assert cache.lookup_prefix(letters("the car is red")).num_tokens == 14  # its last, partly filled block is kept too
print(cache.show(decode))

# %% [markdown]
# A namespace is a wall: another tenant, or another adapter, has a root of its own, and not even the same text is found.

# %%
assert cache.lookup_prefix(letters("the cat sat down"), namespace="tenant-b").num_tokens == 0
print(cache.explain_miss(letters("the cat sat down"), namespace="tenant-b"))
print(cache.explain_miss(letters("the cat sat up")))

# %% [markdown]
# ## Evict: the leaf that was used longest ago, from its end, and no block more than needed
#
# Three blocks are free, and a request comes that needs five. Before that, `the cat sat down` is used once more, so the
# oldest leaf is `ran home`.

# %%
assert serve("fourth", "the cat sat down") == 15
assert cache.num_free_blocks == 3
old = nodes()
assert serve("fifth", "a dog barks at night") == 0
draw("Evict: 'ran home' made room, everything that was used since is still there", old)

assert cache.stats.evicted_blocks == 2  # five are needed, three were free
left = {text: cache.lookup_prefix(letters(text)).num_tokens for text in ("the cat sat down", "the cat ran home")}
assert left == {"the cat sat down": 16, "the cat ran home": 8}

# %% [markdown]
# Block by block to the end: only leaves go, so what many requests begin with is the last of its branch, and nothing
# is ever cached that cannot be reached.


# %%
def texts() -> dict[int, str]:
    """What each cached block holds."""
    found = {}
    for node in cache.tree.nodes():
        for place, block_id in enumerate(node.blocks):
            found[block_id] = decode(unpack(node.label))[4 * place : 4 * place + 4]
    return found


order = []
while cache.num_cached_blocks:
    before = texts()
    assert cache.evict(1) == 1
    cache.check()  # recounts everything
    order += [text for block_id, text in before.items() if block_id not in texts()]
print(" → ".join(map(repr, order)))
assert order.index("the ") > max(map(order.index, ("cat ", "sat ", "down", "car ", "is r", "ed")))
assert order.index("down") < order.index("sat ") < order.index("cat ")
assert cache.num_free_blocks == cache.num_blocks

# %% [markdown]
# ## What was learned
#
# - One walk finds the longest cached beginning, exact to the token: whole blocks are shared, the rest is copied.
# - A split costs a node, no block: what two texts begin with is kept once.
# - A lock at the end of a path is enough, for only leaves are ever evicted: whatever stands above is safe.
# - Eviction takes single blocks from the end of the oldest leaf, as many as are missing, so the beginnings that
#   requests share live longest.
#
# **To try next.** Make the cache with `policy="mru"` or `"lfu"`, or with `policy=lambda node: -node.end` (the deepest
# first): which text goes then? Set `block_size=2`: what becomes of the copies? Give `remember_evicted=100` and ask
# `cache.explain_miss` after the eviction. Which policy is best is a question about traffic: `04_real_traffic`.

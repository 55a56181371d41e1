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
# # What do forks share, when do they stop sharing, and how much memory does that save?
#
# Several samples of one prompt, the beams of a beam search and the branches of a search tree all begin with the same
# tokens, and part while they are being written. A *fork* copies a block table, not the blocks. The first that writes
# into a block which others read gets a copy of that one block (*copy-on-write*).
#
# No model is needed: what a fork shares does not depend on what the tokens mean. The beams below are those of the
# engine's own beam search, on random log-probabilities.

# %%
import itertools
import random

import matplotlib.pyplot as plt

from engine.beam_search import BeamSearch, BeamSearchParams
from radixkv import PrefixCache
from radixkv.baselines import SlotAllocator
from radixkv.workloads import generate

BLUE, ORANGE, INK = "#0072B2", "#D55E00", "#1b2733"
Tables = dict[str | int, tuple[int, ...]]
SHADES = ["#fdd9ab", "#b3d0ea", "#8cb6dd", "#5e97cb", "#2b6ca8"]  # one table, two, three, ... name the block
plt.rcParams.update({"figure.facecolor": "white", "axes.spines.top": False, "axes.spines.right": False})

# %% [markdown]
# ## Four samples of one prompt
#
# A prompt of 14 tokens in blocks of four: three full blocks, and a tail of two tokens. Three forks take no block.

# %%
cache = PrefixCache(num_blocks=16, block_size=4)
cache.allocate("a", range(14))
cache.commit("a", 14)
before_forks = cache.num_free_blocks
for fork in ("b", "c", "d"):
    cache.fork("a", fork)
forked = {name: cache.block_table(name) for name in cache.request_ids}

assert cache.num_free_blocks == before_forks  # a fork is a table
assert set(forked.values()) == {(0, 1, 2, 3)}
assert cache.ref_count(3) == 4 and cache.ref_count(0) == 5  # the tree owns the full blocks too

# %% [markdown]
# Each sample now goes on with a token of its own, which belongs into the tail that all four read. Three of them get a
# copy first. The last one does not: by then nobody else reads the block, and it writes in place.

# %%
for token_id, name in enumerate("abcd", start=100):
    slot = cache.append_token(name, token_id)
    print(f"{name} writes to block {slot // 4}; copies so far: {cache.stats.cow_copies}")
    cache.check()
written = {name: cache.block_table(name) for name in cache.request_ids}

assert cache.stats.cow_copies == 3 and before_forks - cache.num_free_blocks == 3
assert {table[:3] for table in written.values()} == {(0, 1, 2)}  # the full blocks are still shared
assert len({table[3] for table in written.values()}) == 4  # each tail has one reader


# %%
def draw_tables(axis: plt.Axes, tables: Tables, title: str) -> None:
    """Block tables as a grid: a number is a physical block; the darker, the more tables name it."""
    named = [block_id for table in tables.values() for block_id in table]
    for row, table in enumerate(tables.values()):
        for column, block_id in enumerate(table):
            owners = named.count(block_id)
            axis.add_patch(plt.Rectangle((column, row), 0.94, 0.86, color=SHADES[min(owners, 5) - 1]))
            axis.text(column + 0.47, row + 0.45, block_id, ha="center", va="center",
                      fontsize=9 if len(table) < 20 else 6, color="white" if owners > 3 else INK)  # fmt: skip
    axis.set(
        xlim=(0, max(map(len, tables.values()))), ylim=(len(tables), 0), xlabel="logical block (place in the table)"
    )
    axis.set_yticks([row + 0.45 for row in range(len(tables))], tables)
    axis.set_title(f"{title}: {len(named)} in tables, {len(set(named))} in memory", fontsize=11)
    axis.set_xticks([])
    axis.tick_params(length=0)
    axis.spines[:].set_visible(False)


figure, panels = plt.subplots(1, 2, figsize=(9, 2.6), layout="constrained")
draw_tables(panels[0], forked, "forked")
draw_tables(panels[1], written, "after each wrote a token")
figure.suptitle("Four samples share all blocks but the one that they write to (number = physical block)", weight="bold")
plt.show()

# %% [markdown]
# `cache.table("b")` in a notebook draws one table with its tokens; here as text. A committed block is the tree's, and
# others may find it at any time, so even its only user must not write into it: `write` gives it a copy.

# %%
cache.commit("b", 15)
for name in ("a", "c", "d"):
    cache.free(name)
print(cache.table("b").show())
assert cache.ref_count(1) == 2  # the tree and b
copy = cache.write("b", block_index=1)
assert copy != 1 and cache.block_table("b") == (0, copy, 2, written["b"][3])
assert cache.ref_count(1) == 1 and cache.lookup_prefix(range(14)).block_ids == (
    0,
    1,
    2,
)  # what was cached stays as it was
print(cache.table("b").show())
cache.free("b")
cache.check()

# %% [markdown]
# ## Beam search
#
# Of all continuations of all beams the best few live on. A beam with two of them is forked, a beam with none is freed.
# The search is the one that `LLM.beam_search` runs; only the log-probabilities are drawn: minus an exponential each.


# %%
def beams(manager: PrefixCache | SlotAllocator, width: int, num_prompt: int, num_output: int) -> list[Tables]:
    """The block tables of the live beams, after each output token."""
    draws = random.Random(0)
    search = BeamSearch(BeamSearchParams(beam_width=width, max_tokens=num_output + 1), num_prompt, frozenset())
    manager.allocate("beam 0", range(num_prompt))
    live, names, steps = ["beam 0"], itertools.count(1), []
    for _ in range(num_output):
        logprobs = [sorted((-draws.expovariate(1) for _ in range(width)), reverse=True) for _ in live]
        extends = search.advance([list(enumerate(of_beam)) for of_beam in logprobs])
        forks = [(f"beam {next(names)}", extend) for extend in extends]
        for name, extend in forks:
            manager.fork(live[extend.parent], name)
        for name in live:
            manager.free(name)
        for name, extend in forks:
            manager.append_token(name, extend.token_id)
        live = [name for name, _ in forks]
        steps.append({name: manager.block_table(name) for name in live})
    return steps


def saved(tables: Tables) -> float:
    """Share of the blocks in tables that sharing spares."""
    return 1 - len(set().union(*tables.values())) / sum(map(len, tables.values()))


# %%
cache = PrefixCache(num_blocks=100, block_size=4)
steps = beams(cache, width=4, num_prompt=16, num_output=40)
cache.check()
figure, axis = plt.subplots(figsize=(9, 2.4), layout="constrained")
draw_tables(axis, steps[-1], "four beams after 40 tokens (number = physical block)")
figure.suptitle("Beams part only near their ends: the rest of their past is the same", weight="bold")
plt.show()

first = {table[:4] for table in steps[-1].values()}
assert len(first) == 1  # the prompt
assert saved(steps[-1]) > 0.5
print(f"{cache.stats.cow_copies} blocks copied in 40 steps of 4 beams")
assert cache.stats.cow_copies < 4 * 40 / 2

# %% [markdown]
# With slots, a fork is a copy of everything that was said, into a run that is reserved whole. With block tables it is
# at most one block, later.

# %%
slots = SlotAllocator(num_blocks=8 * 14, block_size=4, max_len=56)
slot_steps = beams(slots, width=4, num_prompt=16, num_output=40)
assert {saved(tables) for tables in slot_steps} == {0.0}
in_memory = {
    "slots": max(len(set().union(*tables.values())) for tables in slot_steps),
    "block tables": max(len(set().union(*tables.values())) for tables in steps),
}
print(f"most blocks at once: {in_memory}")
assert in_memory["slots"] > 2 * in_memory["block tables"]

# %% [markdown]
# ## How much is that in practice?
#
# Kwon et al. (PagedAttention, SOSP 2023, figure 15) report what sharing spares, in blocks of those that there would be
# without: on ShareGPT 16.2 to 30.5 % with 2 to 6 samples, and 44.3 to 66.3 % with as many beams. Here the same in
# blocks of 16 for 30 requests with heavy-tailed lengths of that kind (there, 161 prompt and 338 output tokens in the
# mean).


# %%
def samples(manager: PrefixCache, width: int, num_prompt: int, num_output: int) -> list[Tables]:
    """The block tables of independent samples, after each output token."""
    steps = []
    manager.allocate(0, range(num_prompt))
    for sample in range(1, width):
        manager.fork(0, sample)
    for token_id in range(num_output):
        for sample in range(width):
            manager.append_token(sample, token_id)
        steps.append({sample: manager.block_table(sample) for sample in range(width)})
    return steps


load = generate("heavy-tailed", num_requests=30, min_prompt_tokens=56, max_prompt_tokens=1024,
                min_output_tokens=160, max_output_tokens=1024)  # fmt: skip
savings = {}
for kind, generation in (("samples", samples), ("beams", beams)):
    for width in (2, 4, 6):
        num_named = num_in_memory = 0
        for request in load.requests:
            cache = PrefixCache(num_blocks=1000, block_size=16)
            for tables in generation(cache, width, request.num_prompt_tokens, request.num_output_tokens):
                num_named += sum(map(len, tables.values()))
                num_in_memory += len(set().union(*tables.values()))
        savings[kind, width] = 1 - num_in_memory / num_named
        print(f"{width} {kind}: {savings[kind, width]:.1%} of the blocks spared")

# %%
for width in (2, 4, 6):
    assert savings["samples", width] < savings["beams", width] < 1 - 1 / width  # that would be one copy of everything
assert savings["samples", 2] < savings["samples", 4] < savings["samples", 6] < savings["beams", 2]

figure, axis = plt.subplots(figsize=(9, 3.4), layout="constrained")
for place, ((kind, _), share) in enumerate(savings.items()):
    axis.bar(place + (kind == "beams"), 100 * share, color=BLUE if kind == "beams" else ORANGE, width=0.8)
    axis.text(place + (kind == "beams"), 4, f"{share:.0%}", weight="bold", color="white", ha="center")
for left, low, high, label in ((-0.6, 16.2, 30.5, "published, 2 to 6 (Kwon et al., 2023)"), (3.4, 44.3, 66.3, None)):
    axis.add_patch(plt.Rectangle((left, low), 3.2, high - low, fill=False, ec=INK, lw=1.6, ls="--", label=label))
axis.set_xticks([0, 1, 2, 4, 5, 6], [f"{width} {kind}" for kind, width in savings])
axis.set(ylabel="blocks spared by sharing (%)", ylim=(0, 100))
axis.legend(frameon=False, loc="upper left")
axis.set_title("Samples share the prompt; beams share most of what they wrote, too", weight="bold", loc="left")
plt.show()

# %% [markdown]
# ## What was learned
#
# - A fork costs a table and no memory. Writing costs at most one block, and the last reader of a block writes in place.
# - What the tree owns is never written to, not even by its only user: it can be found at any moment.
# - Samples share their prompt and nothing else, so they save more the longer the prompt and the more of them there are.
# - Beams come from few ancestors a short while ago, so nearly all of them is shared, and the price of a wide search is
#   mostly its last blocks. Ours save more than the published range: random log-probabilities prefer no beam for long,
#   so lines die out fast; those of a model may live longer.
#
# **To try next.** Scale the log-probabilities of one beam: when do two lines live side by side? Use blocks of one
# token, or of 128: what happens to the copies, and to what is spared? With a model, `SamplingParams(n=4)` and
# `llm.beam_search(...)` do the same in the engine, and `llm.cache` draws itself.

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
# # What is saved by reading a shared prefix once, and when does it pay?
#
# A prefix cache spares the *computation* of a shared start. But in each decode step every request still *reads* all
# the keys and values (K and V) that it attends to, and of 32 requests below one system prompt each reads the same
# ones. The radix tree knows that they are the same. So attention can go through the shared node once, with the
# queries of all requests below it side by side, and merge each request's own tokens in afterwards:
#
#     system prompt (node) ──┬── own tokens of request 0        weight of a part = softmax over the
#     read once, 32 queries  ├── own tokens of request 1        parts' log-sum-exps: exact, not an
#                            └── ...                            approximation
#
# Here: the attention layers of one decode step, in the shape of SmolLM2 (9 query heads on 3 KV heads of 64), on
# random numbers. No model is needed.

# %%
import statistics
import time

import matplotlib.pyplot as plt
import torch

from engine.attention import attend
from engine.attention.reference import reference_attention
from engine.attention.tree import plan_for
from engine.batch import BatchBuilder, Row, Span
from radixkv import PrefixCache
from radixkv.storage import KVStorage, LayerShape

plt.rcParams.update({"figure.facecolor": "white", "axes.spines.top": False, "axes.spines.right": False})
torch.set_num_threads(1)  # then CPU time says how long it takes, whatever else the machine does
torch.manual_seed(0)
LAYERS, BLOCK, HEADS, KV_HEADS, DIM, OWN = 12, 16, 9, 3, 64, 64
storage = KVStorage(640, BLOCK, [LayerShape(KV_HEADS, DIM, DIM)] * LAYERS)
storage.data.normal_()  # 12 layers x 640 blocks: larger than a core's caches, as a model's K and V are
TOKEN_BYTES = storage.bytes_per_block // BLOCK // LAYERS
print(f"{storage.size_bytes / 2**20:.0f} MiB of K and V, {TOKEN_BYTES:,} bytes a token and layer, one thread")

# %% [markdown]
# ## A batch from the cache
#
# The cache itself makes the block tables: each request has `shared` tokens in common with the others and 64 of its
# own, and decodes one more. What the tables share *is* the tree; nobody tells attention about it.


# %%
def decode_rows(num_requests, shared):
    """One decode row for each request; the first `shared` tokens of all prompts are the same."""
    cache = PrefixCache(storage.num_blocks, BLOCK, storage=storage)
    rows = []
    for number in range(num_requests):
        prompt = [*range(shared), *[100_000 + number] * OWN]
        cache.allocate(number, prompt)
        cache.commit(number, len(prompt))
        cache.append_token(number, 0)
        rows.append(Row([0], len(prompt), cache.block_table(number), key=number))
    return rows


def attend_all(builder, rows, q, k, v):
    """The attention of one step, and what it was told: the batch is built, then all layers run."""
    metadata = builder.build(rows).metadata
    return [attend(q, k, v, storage, layer, metadata) for layer in range(LAYERS)], metadata


for row in decode_rows(3, 64):
    print("block table", row.block_ids)

# %% [markdown]
# ## The same result
#
# `"gather"` reads each row for itself, `"tree"` reads what is shared once. Both agree with the formula in float64,
# worked out query by query over all that the request sees.

# %%
rows = decode_rows(4, 256)
q, k, v = (torch.randn(len(rows), heads, DIM) for heads in (HEADS, KV_HEADS, KV_HEADS))
worst = 0.0
for attention in ("gather", "tree"):
    out, metadata = attend_all(BatchBuilder(BLOCK, attention=attention), rows, q, k, v)
    for index, row in enumerate(metadata.rows):
        keys, values = storage.keys(0)[row.slots], storage.values(0)[row.slots]
        exact = reference_attention(q[index : index + 1], keys, values, torch.tensor([row.start]))
        error = (out[0][index] - exact[0]).abs().max().item()
        worst = max(worst, error)
        assert error < 1e-5, f"{attention}, row {index}: off by {error}"
print(f"largest difference to the formula: {worst:.1e} (float32 rounds at 1.2e-07 of a number)")

# %% [markdown]
# ## What has to be read: exact arithmetic
#
# Of each layer, rows for themselves read the sum of their context lengths; with the tree the distinct slots are
# enough. The plan that attention made says what it saved, and it is the same number.

# %%
COUNTS = (2, 4, 8, 16, 32)
by_row_mib, once_mib = [], []
for num_requests in COUNTS:
    rows = decode_rows(num_requests, 1024)
    q, k, v = (torch.randn(len(rows), heads, DIM) for heads in (HEADS, KV_HEADS, KV_HEADS))
    _, metadata = attend_all(BatchBuilder(BLOCK, attention="tree"), rows, q, k, v)
    num_by_row = sum(row.context_len for row in metadata.rows)
    num_once = 1024 + num_requests * (OWN + 1)
    plan = plan_for(q, storage.keys(0), storage.values(0), metadata, Span())  # the one that was carried out
    assert num_by_row - plan.shared_keys == num_once
    by_row_mib.append(num_by_row * TOKEN_BYTES / 2**20)
    once_mib.append(num_once * TOKEN_BYTES / 2**20)
ratio = by_row_mib[-1] / once_mib[-1]
assert ratio > 11
print(f"32 requests on 1,024 tokens: {by_row_mib[-1]:.1f} or {once_mib[-1]:.1f} MiB a layer, {ratio:.1f} times less")

# %% [markdown]
# ## What it takes: measured
#
# CPU time of the whole step (batch, plan and twelve layers), the ways taking turns, a median. `"auto"` is what the
# engine uses: a cost model with a few measured constants (a call costs so much, a number that is read so much)
# predicts which division is the fastest, and reads row by row where nothing pays.


# %%
def step_times(rows, repeats, ways=("gather", "tree", "auto")):
    """Microseconds a layer, by way, and the plan of "auto"."""
    q, k, v = (torch.randn(len(rows), heads, DIM) for heads in (HEADS, KV_HEADS, KV_HEADS))
    builders = {way: BatchBuilder(BLOCK, attention=way) for way in ways}
    times = {way: [] for way in ways}
    for _ in range(repeats + 1):
        for way in ways:
            started = time.thread_time()
            _, metadata = attend_all(builders[way], rows, q, k, v)
            times[way].append((time.thread_time() - started) * 1e6 / LAYERS)
    plan = plan_for(q, storage.keys(0), storage.values(0), metadata, Span())  # the one that was carried out
    return {way: statistics.median(each[1:]) for way, each in times.items()}, plan


SHARED = (0, 64, 256, 1024, 4096)
measured = {}
for shared in SHARED:
    for count in COUNTS:
        measured[shared, count] = step_times(decode_rows(count, shared), repeats=7 if shared >= 1024 else 21)
at_1k = [measured[1024, count][0] for count in COUNTS]

# %%
figure, (left, right) = plt.subplots(1, 2, figsize=(9.6, 3.8), layout="constrained")
for axis, by_row, once in (
    (left, by_row_mib, once_mib),
    (right, [each["gather"] / 1000 for each in at_1k], [each["tree"] / 1000 for each in at_1k]),
):
    axis.plot(COUNTS, by_row, "o-", color="#D55E00")
    axis.plot(COUNTS, once, "o-", color="#0072B2")
    axis.text(30, by_row[-1], f"each for itself: {by_row[-1]:.1f}", ha="right", va="center", color="#D55E00")
    axis.text(32, once[-1] * 1.1, f"shared part once: {once[-1]:.1f}", ha="right", va="bottom", color="#0072B2")
    axis.set(xlabel="requests that share 1,024 tokens", ylim=0, xlim=(0, 33), xticks=COUNTS)
left.set(title="K and V to read", ylabel="MiB a layer and step")
right.set(title="CPU time, one core", ylabel="milliseconds a layer and step")
figure.suptitle("32 requests below one system prompt: read it once, not 32 times", fontweight="bold")
plt.show()
speedup = at_1k[-1]["gather"] / at_1k[-1]["tree"]
assert speedup > 1.5
print(f"32 requests, 1,024 shared tokens: {speedup:.1f} times faster")

# %% [markdown]
# Time falls less than bytes do: the multiplications stay (each query still meets each key), and so do the short
# tails, each at a place of its own.
#
# ## When does it pay?

# %%
figure, axis = plt.subplots(figsize=(8.4, 4.4), layout="constrained")
gains = {case: times["gather"] / times["auto"] for case, (times, _) in measured.items()}
axis.imshow(
    torch.tensor([*gains.values()]).view(len(SHARED), -1).log2(), cmap="RdBu", vmin=-2.6, vmax=2.6, aspect="auto"
)
for y, shared in enumerate(SHARED):
    for x, count in enumerate(COUNTS):
        plan, gain = measured[shared, count][1], gains[shared, count]
        choice = "row by row" if plan is None else "shared part once" if plan.shared_keys else "short rows together"
        colour = "white" if gain > 2.4 else "black"
        axis.text(x, y, f"{gain:.1f}x\n", ha="center", va="center", fontsize=13, fontweight="bold", color=colour)
        axis.text(x, y, f"\n{choice}", ha="center", va="center", fontsize=8, color=colour)
axis.set_xticks(range(len(COUNTS)), COUNTS)
axis.set_yticks(range(len(SHARED)), [f"{shared:,}" for shared in SHARED])
axis.set(xlabel="requests in the step", ylabel="tokens that all share (64 more each)")
axis.set_title('More requests, a longer prefix: more gain (times faster, and what "auto" chose)', fontweight="bold")
plt.show()

# %% [markdown]
# Is the model's choice a good one? Against the better of the two fixed ways, measured in hindsight:

# %%
regrets = [times["auto"] / min(times["gather"], times["tree"]) for times, _ in measured.values()]
unshared = [measured[0, count][0]["auto"] / measured[0, count][0]["gather"] for count in COUNTS]
for (shared, count), (_, plan) in measured.items():
    if shared == 0:
        assert plan is None or plan.shared_keys == 0
    elif shared >= 1024 and count >= 4:
        assert plan.shared_keys == (count - 1) * shared
assert statistics.geometric_mean(regrets) < 1.2  # "auto" is about as fast as the better way ...
assert statistics.geometric_mean(unshared) < 1.2  # ... and without anything shared, no slower than before
print(f"auto / better of both: {statistics.geometric_mean(regrets):.2f} on average, {max(regrets):.2f} at worst")
print(f"auto / gather where nothing is shared: {statistics.geometric_mean(unshared):.2f} on average")

# %% [markdown]
# ## What was learned
#
# - Requests below one node can read its K and V once. The result is the same up to the rounding of float32, since
#   parts are merged exactly by their log-sum-exps.
# - With 32 requests on a prefix of 1,024 tokens, 11 times fewer bytes are read, and on one CPU core attention is
#   several times faster. It grows with both; two requests need about a thousand shared tokens to gain.
# - Where nothing is shared, or too little, the cost model goes row by row, or puts short rows side by side. What is
#   lost then is only the looking, once a step: up to a tenth here, with two short rows and twelve layers.
#
# **To try:** `torch.bfloat16` in `KVStorage` (half the bytes: does the border move?); `OWN = 512` (the tails then
# weigh more); two levels of sharing, such as a system prompt and below it a document for every four requests;
# `radixkv bench attention`, for the shapes of other models.

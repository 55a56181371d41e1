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
# # How much of real traffic is a repetition, and does it matter what is evicted?
#
# A prefix cache saves what a prompt has in common with the prompts before it. How much that is, no benchmark with made
# prompts can tell. So public traces of real services are replayed here against the same `PrefixCache` that the engine
# uses: first with memory for all, turn by turn; then with little memory, under several policies, beside the best that
# any policy could do.
#
# Without `../shared/data` the notebook generates traffic of similar kinds and says so. No model, no torch.

# %%
from pathlib import Path

import matplotlib.pyplot as plt

import radixkv
from radixkv.sim import capacity_sweep, exact_curve, hit_sources, hits_by_turn, replay
from radixkv.traces import Trace, load
from radixkv.workloads import generate

SHARED = Path(radixkv.__file__).resolve().parents[2] / "shared" / "data"
IS_REAL = (SHARED / "mooncake").is_dir()
BLUE, ORANGE, GREEN, PURPLE, INK = "#0072B2", "#D55E00", "#009E73", "#A3578B", "#1b2733"
plt.rcParams.update({"figure.facecolor": "white", "axes.spines.top": False, "axes.spines.right": False})

# %%
traces: dict[str, Trace] = {}
if IS_REAL:
    traces["coding agents"] = load(SHARED / "claude_code" / "sessions_228.jsonl.gz", limit=1500)
    traces["airline service"] = load(SHARED / "agent" / "tau_bench_gpt-4o-airline.json.gz")
    traces["documents Q&A"] = load(SHARED / "ragpulse" / "0_trace.jsonl.gz")
    traces["chats"] = load(SHARED / "mooncake" / "conversation_trace.jsonl.gz", limit=3000)
else:
    traces["coding agents"] = generate("chat", num_conversations=80, num_system_prompts=10_000, mean_turns=12)
    traces["airline service"] = generate("agent", num_agents=100, system_tokens=1500)
    traces["chats"] = generate("chat", num_conversations=500)
print("public traces, from ../shared/data" if IS_REAL else "generated, since there is no ../shared/data here")
for name, trace in traces.items():
    print(
        f"{name}: {len(trace.requests):,} requests, {sum(r.num_prompt_tokens for r in trace.requests):,} prompt tokens"
    )

# %% [markdown]
# ## By turn, with memory for all
#
# *Coding agents*: sessions of single users (callanjfox/kv-cache-tester). *Airline service*: an agent with tools and one
# long system prompt for all customers (tau-bench; bytes for tokens). *Documents Q&A*: a university's retrieval service
# (RAGPulse), whose prompts are put together as system prompt, retrieved passages, history, question.

# %%
by_turn = {}
for name, trace in traces.items():
    size = 16 if trace.block_size == 1 else None  # traces of hashes have blocks of their own
    result = replay(trace, block_size=size)
    by_turn[name] = {turn.value: turn for turn in hits_by_turn(trace.requests, result) if turn.requests >= 30}
    sources = hit_sources(trace, block_size=size).as_dict()
    within, across = sources["within_rate"], sources["across_rate"]
    parts = "the trace does not tell whose" if within is None else f"{within:.1%} own, {across:.1%} of others"
    print(f"{name}: {result.token_hit_rate:.1%} of all prompt tokens hit ({parts})")

# %%
figure, axis = plt.subplots(figsize=(9, 3.8), layout="constrained")
looks = {"coding agents": (BLUE, 0), "airline service": (ORANGE, -11), "documents Q&A": (GREEN, -4)}
for name, (colour, shift) in looks.items():
    shown = [turn for turn in range(1, 13) if turn in by_turn.get(name, {})]
    rates = [100 * by_turn[name][turn].token_hit_rate for turn in shown]
    if shown:
        axis.plot(shown, rates, "o-", color=colour, ms=4)
        axis.annotate(name, (shown[-1], rates[-1]), xytext=(8, shift), textcoords="offset points", color=colour,
                      weight="bold")  # fmt: skip
axis.set(xlabel="turn of the conversation", ylabel="prompt tokens from the cache (%)", ylim=(0, 102), xlim=(0.7, 14.4))
axis.set_xticks(range(1, 13))
unless = ", unless new documents stand first" if IS_REAL else ""
axis.set_title(f"Later turns are nearly all repetition{unless}", weight="bold", loc="left")
plt.show()

rate = {name: [turns[turn].token_hit_rate for turn in (1, 2, 6)] for name, turns in by_turn.items() if 6 in turns}
assert (
    rate["coding agents"][0] < 0.05 and rate["coding agents"][2] > 0.75
)  # nobody shares a start; all repeat their own
assert rate["airline service"][0] > 0.7 and rate["airline service"][2] > 0.8  # the system prompt serves the first turn
if IS_REAL:
    assert rate["documents Q&A"][0] > rate["documents Q&A"][2]  # falls: new passages stand before the old history

# %% [markdown]
# The line of the documents falls (in the public trace). Each turn retrieves other passages, which stand *before* the
# history, so what was said is the same and its beginning is not: its keys and values must be computed again. The order
# of a prompt's parts decides.
#
# ## With little memory: policies against the optimum
#
# The optimum knows when each block is used next and evicts what is needed last (Belady, 1966). What lies between a
# policy and the optimum, a better choice of victims could gain; what lies between the optimum and the grey line, only
# more memory can.

# %%
SHARES = (0.02, 0.05, 0.1, 0.2, 0.5)
sweeps, at_a_tenth = {}, {}
for name in ("chats", "coding agents"):
    trace, size = traces[name], 16 if traces[name].block_size == 1 else None
    curve = exact_curve(trace, block_size=size)  # LRU at every capacity, in one pass
    capacities = [round(share * curve.num_blocks) for share in SHARES]
    sweeps[name] = capacity_sweep(trace, capacities, ("lru", "cost", "lfu"), block_size=size)
    for point in sweeps[name]:
        assert point.replay.hit_blocks <= point.optimum.hit_blocks <= point.infinite.hit_blocks
        if point.replay.policy == "lru":  # the one pass says what the cache does
            assert point.replay.hit_blocks == curve.hit_blocks(point.replay.num_blocks)
    tenth = capacities[2]
    points = [*capacity_sweep(trace, [tenth], ("fifo", "slru"), block_size=size), *sweeps[name]]
    at_a_tenth[name] = {point.replay.policy: point for point in points if point.replay.num_blocks == tenth}
    print(f"{name}: {tenth:,} blocks, a tenth of those that come")
    for policy, point in at_a_tenth[name].items():
        print(f"  {policy:8} {point.replay.block_hit_rate:6.1%}  regret {point.regret:.1%}")

# %%
figure, panels = plt.subplots(1, 2, figsize=(9, 3.8), layout="constrained")
styles = {"optimal": ("optimum", INK, "--"), "lru": ("LRU", BLUE, "-"), "cost": ("cost-aware", GREEN, "-"),
          "lfu": ("LFU", ORANGE, "-")}  # fmt: skip
for axis, (name, points) in zip(panels, sweeps.items(), strict=True):
    axis.axhline(100 * points[0].infinite.block_hit_rate, color="#b0b7be", lw=5, alpha=0.6, label="memory for all")
    for policy, (label, colour, line) in styles.items():
        rates = [100 * point.replay.block_hit_rate for point in points if point.replay.policy == policy]
        axis.plot([100 * share for share in SHARES], rates, line, marker="o", ms=4, color=colour, label=label)
    axis.set(
        xscale="log", xlabel="memory (% of all distinct blocks)", ylabel="blocks from the cache (%)", ylim=(0, None)
    )
    axis.set_xticks([100 * share for share in SHARES], [f"{100 * share:g}" for share in SHARES])
    axis.minorticks_off()
    axis.set_title(name)
panels[0].legend(frameon=False, loc="lower right", fontsize=9)
gets = {name: of["lru"].replay.hit_blocks / of["optimal"].replay.hit_blocks for name, of in at_a_tenth.items()}
figure.suptitle(
    f"With 10 % of the memory LRU gets {gets['chats']:.0%} of the possible hits in chats, "
    f"{gets['coding agents']:.0%} with agents", weight="bold",
)  # fmt: skip
plt.show()

# %%
for of_policy in at_a_tenth.values():
    assert of_policy["lfu"].regret > of_policy["lru"].regret  # frequency is no substitute for recency
assert at_a_tenth["chats"]["lru"].regret > 0.1
if IS_REAL:
    assert at_a_tenth["chats"]["lru"].capacity_gap < 0.01  # the optimum needs no more memory than this
    assert at_a_tenth["coding agents"]["lru"].regret < 0.1 < 0.5 < at_a_tenth["coding agents"]["lfu"].regret

# %% [markdown]
# LFU fails for a reason: what a conversation needs next is the turn that was just said, which has been used once. LFU
# throws that away, and keeps what was used often by conversations that are over. Segmented LRU has the same fault.
#
# ## What was learned
#
# (Numbers of the public traces.)
#
# - It is the service that decides how much is repeated: coding agents 94 % of their prompt tokens, documents Q&A 31 %,
#   chats of the public at large a third.
# - Who shares with whom differs, too: coding agents only repeat themselves, so a cache must keep *their* session; where
#   one system prompt serves all customers, even the first turn is a hit.
# - What changes belongs at the end of a prompt: with passages before the history, a longer conversation hits less.
# - On one-off chats LRU gets less than half of what the optimum gets from the same memory: most blocks are never asked
#   for again, and the past does not tell which. With agents it gets nine tenths: recency is nearly all one needs.
#
# **To try next.** `policy=` takes a function of a node: can you beat LRU on `chats` at a tenth of the memory? Replay
# with `cache_outputs=True`: how much of turn 2 is the answer of turn 1? Run `radixkv simulate` on your own traffic,
# with `--curve --by-turn --sweep`.

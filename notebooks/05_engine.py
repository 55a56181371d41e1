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
# # What does a prefix cache save a chat, and does it change the answer?
#
# In a chat every turn sends everything again: the system prompt, all that was said, and one new message. Only the
# last is new to the model. With the cache, `num_cached_tokens` of the prompt are there already, and the time to first
# token (TTFT) is that of the rest.
#
# Here: SmolLM2-135M-Instruct in float32 on a CPU, a travel desk and a cooking school, each turn once with the cache
# and once without.

# %%
import os
import tempfile
import time
from itertools import pairwise, takewhile

import matplotlib.pyplot as plt
import torch
from IPython import display as ipython

from engine import LLM, SamplingParams
from engine.chats import ChatSession, builtin_chats
from engine.errors import DemoModelUnavailable
from radixkv.render import draw_cache

plt.rcParams.update({"figure.facecolor": "white", "axes.spines.top": False, "axes.spines.right": False})
torch.set_num_threads(1)  # then CPU time says how long it takes, whatever else the machine does


def save_stand_in(directory):
    """A small random model and a tokenizer of single characters, for machines without the demo model."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    characters = [*map(chr, range(33, 127)), "Ġ", "Ċ"]  # how a byte-level tokenizer writes space and line feed
    tokenizer = Tokenizer(models.BPE({character: index for index, character in enumerate(characters)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(directory)
    sizes = {"hidden_size": 128, "intermediate_size": 384, "num_hidden_layers": 6, "num_attention_heads": 4}
    config = LlamaConfig(vocab_size=len(characters), max_position_embeddings=8192, initializer_range=0.2, **sizes)
    config.eos_token_id = None  # no character ends a reply
    torch.manual_seed(0)
    LlamaForCausalLM(config).save_pretrained(directory)


# %%
options = {"dtype": "float32", "num_blocks": 96, "block_size": 16}
try:
    llm = LLM(os.environ.get("RADIXKV_DEMO_MODEL", "smollm2-135m"), **options)
    print("The model is SmolLM2-135M-Instruct.")
except DemoModelUnavailable as error:
    with tempfile.TemporaryDirectory() as directory:
        save_stand_in(directory)
        llm = LLM(directory, **{**options, "num_blocks": 1024})
    print(f"A small random model stands in, so its words mean nothing: {error}")
llm.cache.decode = llm.tokenizer.decode  # the text on the nodes in pictures
cold = llm.without_cache()  # the same weights, a pool of its own, and nothing is kept

# %% [markdown]
# ## The play
#
# Four turns of a traveller's chat; then another traveller at the same desk, whose chat begins with the same system
# prompt; then a pupil of the cooking school, under another system prompt. `ChatSession` keeps the token ids of what
# was said, so that each prompt is the last prompt and reply, id by id, and a new end.
#
# TTFT is taken as CPU time from the call to the first streamed token.

# %%
params = SamplingParams(max_tokens=24)


def ask(engine, prompt):
    """The output for a prompt, and CPU seconds to its first token."""
    started = time.process_time()
    deltas = engine.stream({"prompt_token_ids": prompt}, params)
    first = next(deltas)
    ttft_s = time.process_time() - started
    *_, last = [first, *deltas]
    return last.output, ttft_s


_ = cold.generate("Warm up, please. " * 20, SamplingParams(max_tokens=2))  # a process's first pass pays for memory

# %%
chats = {chat.name: chat for chat in builtin_chats()}
travel, ferry, bread = chats["night-train-to-vienna"], chats["ferry-with-bicycles"], chats["flat-bread-for-beginners"]
sessions = {chat.name: ChatSession(llm.tokenizer, chat.system) for chat in (travel, ferry, bread)}
play = [(travel, 0), (travel, 1), (travel, 2), (travel, 3), (ferry, 0), (bread, 0)]
names = [*(f"traveller, turn {turn + 1}" for _, turn in play[:4]), "another traveller", "cooking school"]
results, pictures, num_in_tree = [], [], []
for place, (chat, turn) in enumerate(play):
    session = sessions[chat.name]
    prompt = session.user(chat.turns[turn].user)
    # Who goes first alternates, so that a slow spell of the machine hits both alike.
    order = (llm, cold) if place % 2 else (cold, llm)
    outputs = {engine: ask(engine, prompt) for engine in order}
    session.assistant(outputs[llm][0].outputs[0].token_ids)
    results.append((outputs[llm], outputs[cold]))
    num_in_tree.append(sum(node.num_tokens for node in llm.cache.tree.nodes()))
    pictures.append(draw_cache(llm.cache, title=f"After: {names[place]}"))

# %% [markdown]
# ## The same answers
#
# In float32 on a CPU the token ids are the same with and without the cache, every one of them.

# %%
for name, ((warm, _), (full, _)) in zip(names, results, strict=True):
    assert warm.outputs[0].token_ids == full.outputs[0].token_ids, name
    assert full.num_cached_tokens == 0
    num_tokens, num_cached = len(warm.prompt_token_ids), warm.num_cached_tokens
    print(f"{name:20}{num_cached:4} of {num_tokens} prompt tokens cached  {warm.outputs[0].text[:60]!r}")

# %% [markdown]
# Each later turn hits the whole turn before: its prompt and its reply, but for the one token that was sampled last
# and so was never put through the model.

# %%
warms = [warm for (warm, _), _ in results]
for before, after in pairwise(warms[:4]):
    assert after.num_cached_tokens >= len(before.prompt_token_ids) + len(before.outputs[0].token_ids) - 1
assert warms[0].num_cached_tokens == 0
both = zip(warms[0].prompt_token_ids, warms[4].prompt_token_ids, strict=False)
num_shared = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], both))
assert warms[4].num_cached_tokens == num_shared  # the other traveller: the system prompt, exact to the token
assert warms[5].num_cached_tokens < 32  # the school's prompt begins with the same mark of the chat format, no more

# %% [markdown]
# ## What it saves

# %%
with_s, without_s = ([seconds for _, seconds in column] for column in zip(*results, strict=True))
cached = [warm.num_cached_tokens for warm in warms]
lengths = [len(warm.prompt_token_ids) for warm in warms]
figure, (left, right) = plt.subplots(1, 2, figsize=(10, 3.9), sharey=True, layout="constrained")
rows = range(len(names))
left.barh(rows, cached, color="#56B4E9", label="from the cache")
left.barh(rows, [a - b for a, b in zip(lengths, cached, strict=True)], left=cached, color="#D55E00", label="computed")
left.set_yticks(rows, names)
left.set(xlabel="prompt tokens", ylim=(5.6, -0.6))
left.legend(loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=2, frameon=False)
right.barh([y - 0.2 for y in rows], without_s, 0.38, color="#999999", label="without the cache")
right.barh([y + 0.2 for y in rows], with_s, 0.38, color="#0072B2", label="with it")
for y, (fast, slow) in enumerate(zip(with_s, without_s, strict=True)):
    if slow > 1.5 * fast:
        right.text(fast, y + 0.2, f" {slow / fast:.1f}x sooner", va="center", color="#0072B2", fontweight="bold")
right.set(xlabel="time to first token, seconds of CPU time")
right.legend(loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=2, frameon=False)
figure.suptitle("Only what is new is computed, so the first token comes sooner", fontweight="bold")
plt.show()
for place in (1, 2, 3):
    assert without_s[place] > 2 * with_s[place]  # measured: about five times and more
assert llm.cache.stats.token_hit_rate > 0.5

# %% [markdown]
# ## The tree growing
#
# Width is tokens, from left to right as a prompt reads. Turn by turn the chat grows at its end, as one branch; the
# other traveller branches off where the system prompt ends; the school has a branch of its own.

# %%
print("tokens in the tree after each prompt:", *num_in_tree)
for picture in pictures[3:5]:
    ipython.display(ipython.SVG(picture))
ipython.display(llm.cache)  # a cache draws itself

# %%
llm.cache.check()  # recounts every block; nothing is lost
assert llm.cache.num_private_blocks == 0
assert llm.cache.num_free_blocks + llm.cache.num_evictable_blocks == llm.cache.num_blocks

# %% [markdown]
# ## What was learned
#
# - From the second turn on, nine tenths of a prompt come from the cache, and the first token comes several times
#   sooner. The longer the chat, the more: TTFT without the cache grows with the whole chat, with it only with the new
#   message.
# - The first turn gains too, if anybody used the same system prompt before; the very first of all gains nothing.
# - The answer is the same, token by token (float32, CPU). In bfloat16 sums may round otherwise in batches of another
#   shape.
# - It costs blocks of a pool that would lie idle, and they are given up as soon as somebody needs them.
#
# **To try:** your own chat (`radixkv replay --chats my_chats.jsonl --compare`); `policy="fifo"` with `num_blocks=40`,
# so that something has to go; `llm.chat(...)` instead of the session, which tokenises replies again; and in this
# notebook, before the play, `from radixkv.widget import CacheView; CacheView(llm.cache)`, which follows the tree
# live.

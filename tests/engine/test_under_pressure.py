"""Whatever the pool's size, the step's budget and the policies: every request says what it says alone.

Tiny random models in float32, driven step by step, so that requests arrive while others run; the cache is recounted
after each step. The truth is a solo run in an engine with room for everything.
"""

import functools
import itertools
import random
from collections import Counter

import pytest
from hypothesis import event, given, settings
from hypothesis import strategies as st

torch = pytest.importorskip("torch", reason="the engine needs torch")
pytest.importorskip("transformers", reason="the engine needs transformers")

from engine import LLM, SamplingParams  # noqa: E402
from engine.models.decoder import Decoder  # noqa: E402
from engine.request import RequestState  # noqa: E402
from tiny_models import VOCAB_SIZE, tiny_model  # noqa: E402

MODELS = ["llama", "mistral-sliding"]
BLOCK_SIZES = [1, 4, 16]
BUDGETS = [1, 7, 16, 8192]
VICTIMS = ["lifo", "largest", "least-progress"]
PREEMPTIONS = ["recompute", "swap"]
SHARES = [1.0, 0.5, 0.25]  # of the blocks that all requests need together
ORDERS = ["fcfs", "longest-prefix"]


def prompt(length, seed):
    """Random token ids, the same for the same seed."""
    return random.Random(seed).choices(range(3, VOCAB_SIZE), k=length)


STEM = prompt(40, 0)
# Starts that end inside a block and at its border, one prompt twice, one of a single token; greedy and drawn, with and
# without penalties; outputs that grow by several blocks, one that needs none, and two that may end early.
REQUESTS = [
    (STEM[:33] + prompt(3, 1), SamplingParams(max_tokens=36, ignore_eos=True)),
    (STEM[:16], SamplingParams(max_tokens=56, temperature=0.8, top_p=0.9, seed=1, ignore_eos=True)),
    (prompt(1, 2), SamplingParams(max_tokens=50, temperature=1.0, frequency_penalty=1.5, seed=2, ignore_eos=True)),
    (STEM[:33] + prompt(3, 1), SamplingParams(max_tokens=24, temperature=3.0, top_k=20, seed=3)),
    (prompt(17, 5), SamplingParams(max_tokens=32, repetition_penalty=1.3, presence_penalty=0.5)),
    (STEM, SamplingParams(max_tokens=1)),
    (STEM[:31] + prompt(9, 7), SamplingParams(max_tokens=30, temperature=1.0, top_p=0.5, seed=4, ignore_eos=True)),
]


@functools.cache
def decoder_of(name, model_impl="auto"):
    """The decoder of a tiny model; built once, since nothing here changes it."""
    return Decoder.load(tiny_model(name), model_impl=model_impl)


@functools.cache
def solo(name, index):
    """Tokens and finish reason of one of `REQUESTS`, alone in a new engine without a cache and any fast path."""
    ids, params = REQUESTS[index]
    decoder = decoder_of(name, "transformers")
    llm = LLM(decoder, num_blocks=6, enable_prefix_caching=False, attention="gather")
    (output,) = llm.generate(ids, params)
    assert output.metrics.num_preemptions == 0
    return output.outputs[0].token_ids, output.outputs[0].finish_reason


def blocks_of(index, block_size):
    """Blocks that one of `REQUESTS` needs at its end. The last token sampled needs no slot."""
    ids, params = REQUESTS[index]
    return -(-(len(ids) + params.max_tokens - 1) // block_size)


def blocks_for(share, block_size):
    """A pool of this share of what all `REQUESTS` need together, but with room for the largest."""
    needs = [blocks_of(index, block_size) for index in range(len(REQUESTS))]
    return max(*needs, round(share * sum(needs)))


class Engine:
    """An `LLM` driven step by step, which is recounted after each one. What requests share is always read once."""

    def __init__(self, name, num_blocks, block_size, **options):
        self.name = name
        options = {"attention": "tree", **options}
        self.llm = LLM(decoder_of(name), num_blocks=num_blocks, block_size=block_size, **options)
        self.core, self.cache, self.config = self.llm.core, self.llm.cache, self.llm.core.scheduler.config
        self.num_steps = 0
        self.num_tokens = 0
        run = self.core.runner.run

        def counting(scheduled, cache):
            self.num_tokens = sum(len(work.token_ids) for work in scheduled)
            return run(scheduled, cache)

        self.core.runner.run = counting

    def add(self, index):
        """Queues one of `REQUESTS` and gives it back."""
        request = self.llm.make_request(*REQUESTS[index])
        self.core.add_request(request)
        return request

    def step(self):
        """One step, within the limits, after which every block is accounted for."""
        self.num_tokens = 0
        self.core.step()
        self.num_steps += 1
        self.cache.check()
        assert self.num_tokens <= self.config.max_num_batched_tokens
        assert len(self.core.scheduler.running) <= self.config.max_running
        assert self.num_tokens or not self.core.has_requests, "requests wait, and a step did nothing"
        if all(request.state is not RequestState.PREEMPTED for request in self.core.scheduler.requests()):
            self.assert_host_memory_is_empty()
        assert self.num_steps < 5000, "the engine moves, but gets nowhere"

    def finish(self):
        """Steps until nothing waits or runs; then nothing is left of any request."""
        while self.core.has_requests:
            self.step()
        assert self.cache.request_ids == ()
        assert self.cache.num_private_blocks == self.cache.num_protected_blocks == 0
        assert self.cache.num_free_blocks + self.cache.num_cached_blocks == self.cache.num_blocks
        assert self.core.num_requests == 0
        self.assert_host_memory_is_empty()
        if not self.config.enable_prefix_caching:
            assert self.cache.num_cached_blocks == 0

    def assert_host_memory_is_empty(self):
        """Nothing is kept there for a request that runs or has ended."""
        if self.core.scheduler.swap is not None:
            assert self.core.scheduler.swap.size_bytes == 0

    def assert_says_what_it_says_alone(self, request, index):
        """Tokens and end are those of the solo run."""
        assert (request.output_token_ids, request.finish_reason) == solo(self.name, index)


# A case of the table for each of these; the other choices are spread over the cases. Each begins with one that surely
# preempts: a quarter of the blocks, nothing shared, and the requests with the shortest prompts come first, all at once.
CASES = list(itertools.product(MODELS, BLOCK_SIZES, PREEMPTIONS))
REST = list(itertools.product(SHARES, BUDGETS, [True, False], ORDERS, VICTIMS))
NUM_SLICES = 17  # more than there are cases, and no factor of the 144: a slice of 8 or 9 has every value of each choice


@pytest.mark.parametrize(("name", "block_size", "preemption"), CASES)
def test_tokens_equal_the_solo_run_under_any_pressure(name, block_size, preemption):
    """Preemption, chunks, hits, order and eviction are matters of time; small pools must really have preempted."""
    place = CASES.index((name, block_size, preemption))
    preemptions = Counter()
    hardest = (0.25, 8192, False, "fcfs", VICTIMS[place % len(VICTIMS)])
    for number, choices in enumerate([hardest, *REST[place::NUM_SLICES]]):
        share, budget, is_caching, order, victim = choices
        engine = Engine(
            name,
            blocks_for(share, block_size),
            block_size,
            max_num_batched_tokens=budget,
            enable_prefix_caching=is_caching,
            victim=victim,
            preemption=preemption,
            order=order,
        )
        shuffled = random.Random(place * 100 + number)
        arrivals = shuffled.sample(range(len(REQUESTS)), len(REQUESTS))
        if number == 0:
            arrivals.sort(key=lambda index: len(REQUESTS[index][0]))
        requests = {}
        for index in arrivals:
            requests[index] = engine.add(index)
            for _ in range(shuffled.choice((0, 0, 1, 4)) if number else 0):
                engine.step()
        engine.finish()
        for index, request in requests.items():
            engine.assert_says_what_it_says_alone(request, index)
        counters = engine.core.metrics().counters
        assert counters.preemptions.total() == sum(request.num_preemptions for request in requests.values())
        assert set(counters.preemptions) <= {preemption}, "host memory has room for all"
        if preemption == "swap":
            assert counters.recomputed_tokens == 0
            assert counters.swapped_in_blocks <= counters.swapped_out_blocks
        preemptions[share] += counters.preemptions.total()
        assert preemptions[0.25] > 0
    assert preemptions[1.0] == 0


# A quarter of the profile's examples: each runs a model for dozens of steps, 200 of them for minutes.
@settings(max_examples=max(25, settings.default.max_examples // 4))
@given(data=st.data())
def test_arrivals_and_aborts_at_any_time_change_no_token(data):
    """Any pool that holds the largest request, any room for swapping, and requests that go at any moment.

    What was aborted had said the start of what it says alone.
    """
    name = data.draw(st.sampled_from(MODELS), "model")
    block_size = data.draw(st.sampled_from(BLOCK_SIZES), "block size")
    arrivals = data.draw(
        st.lists(st.tuples(st.integers(0, len(REQUESTS) - 1), st.integers(0, 6)), min_size=2, max_size=7),
        "request, and steps before the next",
    )
    needs = [blocks_of(index, block_size) for index, _ in arrivals]
    preemption = data.draw(st.sampled_from(PREEMPTIONS), "preemption")
    engine = Engine(
        name,
        data.draw(st.integers(max(needs), max(*needs, sum(needs) * 2 // 3)), "blocks"),
        block_size,
        max_num_batched_tokens=data.draw(st.sampled_from(BUDGETS), "budget"),
        max_num_seqs=data.draw(st.sampled_from([2, 3, 64]), "sequences"),
        enable_prefix_caching=data.draw(st.booleans(), "caching"),
        order=data.draw(st.sampled_from(ORDERS), "order"),
        max_overtakes=data.draw(st.sampled_from([1, 32]), "overtakes"),
        victim=data.draw(st.sampled_from(VICTIMS), "victim"),
        preemption=preemption,
        swap_memory=data.draw(st.sampled_from(["3KiB", "20KiB", "1GiB"]), "host memory"),
    )
    requests, aborted = [], set()
    for index, num_steps in arrivals:
        requests.append((engine.add(index), index))
        for _ in range(num_steps):
            engine.step()
    for num_steps in data.draw(st.lists(st.integers(0, 12), max_size=3), "steps before each abort"):
        for _ in range(num_steps):
            engine.step()
        request, _ = data.draw(st.sampled_from(requests), "aborted")
        if engine.core.abort(request.request_id) is not None:
            aborted.add(request)
        engine.cache.check()
        assert engine.core.abort(request.request_id) is None
    engine.finish()
    for request, index in requests:
        if request in aborted:
            assert request.finish_reason == "abort"
            assert request.output_token_ids == solo(name, index)[0][: len(request.output_token_ids)]
        else:
            engine.assert_says_what_it_says_alone(request, index)
    counters = engine.core.metrics().counters
    assert counters.finished.total() == len(requests)
    for kind in counters.preemptions:
        event(f"preempted: {kind}")


@pytest.mark.parametrize(("victim", "num_swap_blocks"), [("lifo", 12), ("largest", 16), ("least-progress", 12)])
def test_a_request_is_swapped_only_while_host_memory_has_room_for_it(victim, num_swap_blocks):
    """Who finds no room there is recomputed; both kinds in one run, and neither changes a token."""
    bytes_per_block = 2 * 2 * 2 * 16 * 4 * 4  # K and V, layers, KV heads, head_dim, tokens, bytes
    room = num_swap_blocks * bytes_per_block
    engine = Engine(
        "llama",
        blocks_for(0.25, 4),
        4,
        victim=victim,
        preemption="swap",
        enable_prefix_caching=False,
        swap_memory=room,
    )
    assert engine.core.runner.bytes_per_block == bytes_per_block
    requests = [(engine.add(index), index) for index in range(len(REQUESTS))]
    most_kept = 0
    while engine.core.has_requests:
        engine.step()
        most_kept = max(most_kept, engine.core.scheduler.swap.size_bytes)
    engine.finish()
    assert 0 < most_kept <= room
    counters = engine.core.metrics().counters
    assert counters.preemptions["swap"] > 0
    assert counters.preemptions["recompute"] > 0
    assert counters.recomputed_tokens > 0
    for request, index in requests:
        engine.assert_says_what_it_says_alone(request, index)


@pytest.mark.parametrize("budget", [7, 8192])
@pytest.mark.parametrize("preemption", PREEMPTIONS)
@pytest.mark.parametrize("is_caching", [True, False], ids=["cache", "no cache"])
@pytest.mark.parametrize("name", MODELS)
def test_a_preemption_after_any_number_of_tokens_changes_nothing(name, is_caching, preemption, budget):
    """A021: around the borders of blocks of 16, and in the middle of a prefill; tokens, count and reason as if alone.

    What is computed again is what neither the cache nor host memory kept: with neither, prompt and outputs.
    """
    for index, num_outputs in itertools.product((0, 1), (0, 1, 15, 16, 17)):
        engine = Engine(
            name,
            16,
            16,
            max_num_batched_tokens=budget,
            enable_prefix_caching=is_caching,
            preemption=preemption,
        )
        request = engine.add(index)
        engine.step()
        while len(request.output_token_ids) < num_outputs:
            engine.step()
        num_computed = request.num_computed_tokens
        engine.core.scheduler._preempt(request)
        engine.cache.check()
        assert engine.cache.num_private_blocks == engine.cache.num_protected_blocks == 0
        engine.finish()
        engine.assert_says_what_it_says_alone(request, index)
        assert request.num_preemptions == 1
        is_lost = preemption == "recompute" and not is_caching
        assert request.num_recomputed_tokens == (num_computed if is_lost else 0)


@pytest.mark.parametrize("preemption", PREEMPTIONS)
@pytest.mark.parametrize("block_size", BLOCK_SIZES[:2])
def test_tenants_share_nothing_however_often_they_are_preempted(block_size, preemption):
    """A030: the same prompt from three tenants; who comes back looks in its own namespace, and so do those who wait."""
    engine = Engine("llama", 96 // block_size, block_size, preemption=preemption)
    ids, params = REQUESTS[1]
    tenants = ["a", "b", None, "a", "b"]
    requests = []
    for namespace in tenants:
        request = engine.llm.make_request({"prompt_token_ids": ids, "namespace": namespace}, params)
        engine.core.add_request(request)
        requests.append(request)
    engine.finish()
    assert sum(request.num_preemptions for request in requests) > 0
    for request in requests:
        engine.assert_says_what_it_says_alone(request, 1)
    assert [request.num_cached_tokens for request in requests] == [0, 0, 0, len(ids) - 1, len(ids) - 1]
    assert engine.cache.lookup_prefix(ids, "c").num_tokens == 0

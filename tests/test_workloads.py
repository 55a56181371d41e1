"""Workloads: generated traffic has the structure that its name promises, and is the same wherever it is made."""

from __future__ import annotations

import hashlib
import json
import math
import os
import statistics
import subprocess
import sys
from array import array
from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import replace
from itertools import combinations, pairwise
from pathlib import Path
from typing import Any

import pytest

from radixkv import workloads
from radixkv.tokens import common_prefix, pack
from radixkv.traces import Trace, TraceRequest, load
from radixkv.workloads import GENERATORS, defaults, generate, write

SMALL: dict[str, dict[str, Any]] = {
    "chat": {"num_conversations": 12, "num_system_prompts": 3, "system_tokens": 30, "message_tokens": 9},
    "few-shot": {"num_requests": 30, "num_tasks": 4, "example_tokens": 10, "question_tokens": 7},
    "agent": {
        "num_agents": 6,
        "system_tokens": 40,
        "task_tokens": 10,
        "call_tokens": 8,
        "result_tokens": 12,
        "subagent_system_tokens": 20,
        "subagent_chance": 0.3,
    },
    "tree-of-thought": {"num_problems": 4, "instruction_tokens": 20, "num_thoughts": 3, "num_kept": 2},
    "heavy-tailed": {"num_requests": 30, "max_prompt_tokens": 500, "max_output_tokens": 100},
    "tenants": {"num_conversations": 12, "num_tenants": 4, "system_tokens": 30, "message_tokens": 9},
}
TPOT_S = 0.05  # the default of all generators whose requests wait for outputs
ROUNDING_S = 1e-6  # arrivals are rounded to microseconds


def small(name: str, seed: int = 0, **parameters: Any) -> Trace:
    """A workload of a few dozen requests."""
    return generate(name, seed, **(SMALL[name] | parameters))


def prompt_of(request: TraceRequest) -> array[int]:
    """The tokens of the prompt."""
    assert request.units is not None
    return request.units


def output_of(request: TraceRequest) -> array[int]:
    """The tokens of the output."""
    assert request.output_units is not None
    return request.output_units


def num_shared(a: TraceRequest, b: TraceRequest) -> int:
    """Tokens with which both prompts start."""
    key = pack(prompt_of(b))
    return common_prefix(pack(prompt_of(a)), key, 0, len(key))


def threads_of(trace: Trace) -> dict[str, list[TraceRequest]]:
    """The requests of each thread, in arrival order."""
    threads: dict[str, list[TraceRequest]] = defaultdict(list)
    for request in trace.requests:
        assert request.thread is not None
        threads[request.thread].append(request)
    return threads


PRINT_DIGEST = """
import hashlib, json, sys
from radixkv.workloads import generate
traces = [generate(name, 3, **parameters) for name, parameters in json.loads(sys.argv[1]).items()]
print(hashlib.sha256(repr(traces).encode()).hexdigest())
"""


# What all of them keep to --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("hash_seed", ["0", "1"])
def test_a_workload_is_the_same_in_every_process(hash_seed: str) -> None:
    """Two people who name the same seed compare results on the same traffic, whatever their hash seed."""
    ran = subprocess.run(
        [sys.executable, "-c", PRINT_DIGEST, json.dumps(SMALL)],
        capture_output=True,
        text=True,
        cwd=Path(__file__).parents[1],
        env={**os.environ, "PYTHONHASHSEED": hash_seed},
        check=False,
    )
    assert ran.returncode == 0, ran.stderr
    traces = [small(name, seed=3) for name in GENERATORS]
    assert ran.stdout.strip() == hashlib.sha256(repr(traces).encode()).hexdigest()


@pytest.mark.parametrize("name", GENERATORS)
def test_another_seed_is_another_workload(name: str) -> None:
    """Repeating an experiment with other seeds must give other samples, in times as well as in lengths."""
    first, second = small(name, seed=1), small(name, seed=2)
    assert small(name, seed=1) == first
    assert first.requests[0].arrival_s != second.requests[0].arrival_s
    lengths = [[request.num_prompt_tokens for request in trace.requests] for trace in (first, second)]
    assert lengths[0] != lengths[1]


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("name", GENERATORS)
def test_every_request_has_its_place_in_a_thread(name: str, seed: int) -> None:
    """Hit rates by turn, and within against across conversations, rest on threads, turns and parents."""
    trace = small(name, seed)
    trace.check()
    assert (trace.name, trace.block_size, trace.num_skipped) == (name, 1, 0)
    for requests in threads_of(trace).values():
        assert [request.turn for request in requests] == list(range(1, len(requests) + 1))
    for request in trace.requests:
        assert len(prompt_of(request)) > 0 and len(output_of(request)) > 0
        assert (request.tenant is not None) == (name == "tenants")
        if request.parent is not None:
            assert trace.requests[request.parent].thread == request.thread


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("name", GENERATORS)
def test_a_prompt_starts_with_prompt_and_output_of_what_it_continues(name: str, seed: int) -> None:
    """Only so does caching outputs pay; and nobody can ask on before the answer is there."""
    trace = small(name, seed)
    for request in trace.requests:
        if request.parent is not None:
            parent = trace.requests[request.parent]
            said = prompt_of(parent) + output_of(parent)
            assert prompt_of(request)[: len(said)] == said
            assert request.arrival_s >= parent.arrival_s + TPOT_S * len(output_of(parent)) - ROUNDING_S


@pytest.mark.parametrize("name", sorted(GENERATORS.keys() - {"agent"}))
def test_a_token_stands_at_one_path_only(name: str) -> None:
    """Prompts that part share nothing behind, so what a workload shares is what was meant, and no accident."""
    before: dict[int, int] = {}
    for request in small(name).requests:
        sequence = prompt_of(request) + output_of(request)
        assert before.setdefault(sequence[0], -1) == -1
        for previous, token in pairwise(sequence):
            assert before.setdefault(token, previous) == previous


@pytest.mark.parametrize("name", GENERATORS)
def test_rates_and_waits_leave_what_is_said_as_it_is(name: str) -> None:
    """A sweep over the rate compares the same conversations, closer together or farther apart."""
    slower: dict[str, Any] = {
        parameter: 3 * value for parameter, value in defaults(name).items() if parameter.endswith("_s")
    }
    quick, slow = small(name), small(name, rate=defaults(name)["rate"] / 7, **slower)
    assert slow.requests[-1].arrival_s > 3 * quick.requests[-1].arrival_s

    def contents(trace: Trace) -> list[TraceRequest]:
        requests = [replace(request, arrival_s=0.0, parent=None) for request in trace.requests]
        return sorted(requests, key=lambda request: (request.thread, request.turn))

    assert contents(quick) == contents(slow)


def test_starts_are_a_poisson_process() -> None:
    """Gaps have the mean 1/rate and, as exponential ones do, a deviation as large. Four standard errors of 3,000."""
    trace = small("heavy-tailed", num_requests=3_000, rate=4.0)
    gaps = [b.arrival_s - a.arrival_s for a, b in pairwise(trace.requests)]
    assert statistics.mean(gaps) == pytest.approx(0.25, rel=4 / math.sqrt(3_000))
    assert statistics.stdev(gaps) == pytest.approx(0.25, rel=4 * math.sqrt(2 / 3_000))


def test_lengths_and_numbers_of_turns_have_their_means() -> None:
    """A parameter is the mean of what is drawn, spread or not; log-normal ones come out at that spread."""
    trace = generate("few-shot", num_requests=3_000, num_shots=1, example_tokens=1, question_tokens=200, spread=0.8)
    tail = [len(prompt_of(request)) - 51 for request in trace.requests]
    assert statistics.mean(tail) == pytest.approx(200, rel=0.07)  # four standard errors: 4·0.95/sqrt(3,000)
    assert statistics.stdev(map(math.log, tail)) == pytest.approx(0.8, abs=0.05)
    turns = Counter(
        request.thread
        for request in generate("chat", num_conversations=3_000, mean_turns=2.5, system_tokens=1, spread=0).requests
    )
    assert statistics.mean(turns.values()) == pytest.approx(2.5, rel=0.06)  # deviation sqrt(2.5·1.5)
    assert Counter(turns.values())[1] / 3_000 == pytest.approx(1 / 2.5, abs=0.04)


def test_lengths_without_spread_are_all_alike() -> None:
    """Experiments with block sizes want lengths that are known to the token."""
    for conversation in threads_of(small("chat", spread=0, output_tokens=11)).values():
        for turn, request in enumerate(conversation):
            assert (len(prompt_of(request)), len(output_of(request))) == (30 + 9 + turn * (9 + 11), 11)


def test_default_sizes_are_a_few_thousand_requests_in_little_memory() -> None:
    """Somebody who tries a workload without any parameters waits seconds and keeps the machine."""
    for name in GENERATORS:
        trace = generate(name)
        assert 1_500 <= len(trace.requests) <= 5_000
        prompts = {id(request.units): len(prompt_of(request)) for request in trace.requests}
        assert 4 * sum(prompts.values()) < 100e6


# Who shares what -----------------------------------------------------------------------------------------------------


def test_conversations_share_a_whole_system_prompt_or_nothing() -> None:
    """Across conversations a cache can hit system prompts, within one all that was said before."""
    trace = small("chat", num_conversations=40, spread=0)
    first = [requests[0] for requests in threads_of(trace).values()]
    assert {num_shared(a, b) for a, b in combinations(first, 2)} == {0, 30}
    assert len({prompt_of(request)[0] for request in first}) == 3
    for request in trace.requests:
        assert (request.parent is None) == (request.turn == 1)
        assert request.parent is None or trace.requests[request.parent].turn == (request.turn or 0) - 1
        assert len(prompt_of(request)) > 30


def test_people_think_before_they_go_on() -> None:
    """The wait between an answer and the next message decides what is still cached. Its mean is the parameter."""
    trace = small("chat", num_conversations=600, mean_turns=3, think_s=20, tpot_s=0.5, output_tokens=8)
    waits = [
        request.arrival_s
        - (trace.requests[request.parent].arrival_s + 0.5 * trace.requests[request.parent].num_output_tokens)
        for request in trace.requests
        if request.parent is not None
    ]
    assert len(waits) > 900
    assert min(waits) >= -ROUNDING_S
    assert statistics.mean(waits) == pytest.approx(20, rel=4 / math.sqrt(len(waits)))


def test_questions_share_the_examples_of_their_task_and_the_instruction_with_all() -> None:
    """A prefix tree has two levels to find here; block hashes see the first only if it fills blocks."""
    trace = small("few-shot", spread=0, instruction_tokens=13, num_shots=3)
    shared = Counter(num_shared(a, b) for a, b in combinations(trace.requests, 2))
    assert set(shared) == {13, 13 + 3 * 10}
    assert len({prompt_of(request)[13] for request in trace.requests}) == 4
    assert {len(prompt_of(request)) for request in trace.requests} == {13 + 3 * 10 + 7}
    assert {request.turn for request in trace.requests} == {1}


def test_agents_share_their_system_prompt_and_sub_agents_another_one() -> None:
    """Sub-agents come with tools of their own, so they hit each other's start and never the agent's."""
    trace = small("agent", num_agents=12)
    first = {thread: requests[0] for thread, requests in threads_of(trace).items()}
    agents = [request for thread, request in first.items() if "/" not in thread]
    subagents = [request for thread, request in first.items() if "/" in thread]
    assert len(agents) == 12 and len(subagents) > 12
    assert {num_shared(a, b) for a, b in combinations(agents, 2)} == {40}
    assert {num_shared(a, b) for a, b in combinations(subagents, 2)} == {20}
    assert {num_shared(a, b) for a in agents for b in subagents} == {0}


def test_an_agent_waits_for_its_sub_agents_and_goes_on_with_their_answers() -> None:
    """What sub-agents say stands in two places, behind different paths: equal tokens that must not be a hit."""
    trace = small("agent", subagent_chance=1, max_subagents=3, mean_steps=4)
    threads = threads_of(trace)
    numbers: Counter[int] = Counter()
    for thread, requests in threads.items():
        if "/" in thread:
            assert thread.count("/") == 1, "sub-agents call tools only"
            continue
        num_seen = 0
        for step, following in pairwise(requests):
            done_s = step.arrival_s + TPOT_S * step.num_output_tokens
            result = prompt_of(following)[len(prompt_of(step)) + len(output_of(step)) :]
            answers, ends, number = array("I"), [], 0
            while answers != result:
                subagent = threads[f"{thread}/{num_seen + number}"]
                assert subagent[0].arrival_s == pytest.approx(done_s, abs=ROUNDING_S)
                answers += output_of(subagent[-1])
                ends.append(subagent[-1].arrival_s + TPOT_S * subagent[-1].num_output_tokens)
                number += 1
            assert following.arrival_s == pytest.approx(max(ends), abs=ROUNDING_S)
            numbers[number] += 1
            num_seen += number
        assert f"{thread}/{num_seen}" not in threads
    assert set(numbers) == {1, 2, 3}


def test_without_sub_agents_an_agent_is_one_loop() -> None:
    """The plain loop of calls and results is the usual case; the result of a tool takes its time."""
    trace = small("agent", subagent_chance=0, spread=0, call_tokens=5, result_tokens=6, task_tokens=3, num_agents=20)
    threads = threads_of(trace)
    assert set(threads) == {str(number) for number in range(20)}
    for requests in threads.values():
        assert [len(prompt_of(request)) for request in requests] == [43 + 11 * k for k in range(len(requests))]
        gaps = [b.arrival_s - a.arrival_s for a, b in pairwise(requests)]
        assert all(gap >= 5 * TPOT_S - ROUNDING_S for gap in gaps)


@pytest.mark.parametrize(("num_thoughts", "num_kept"), [(3, 2), (2, 5), (1, 1)])
def test_thoughts_branch_from_one_prompt_and_the_kept_ones_go_on(num_thoughts: int, num_kept: int) -> None:
    """The tree is what a prefix tree is for: siblings share all of their prompt, cousins what stands above both."""
    trace = small("tree-of-thought", num_levels=3, num_thoughts=num_thoughts, num_kept=num_kept, spread=0)
    for requests in threads_of(trace).values():
        levels = [[request for request in requests if request.parent is None]]
        while levels[-1]:
            kept = {index for index, request in enumerate(trace.requests) if any(request is r for r in levels[-1])}
            levels.append([request for request in requests if request.parent in kept])
        assert levels.pop() == []
        assert sum(map(len, levels)) == len(requests)
        num_nodes = [1]
        for _ in range(2):
            num_nodes.append(min(num_kept, num_nodes[-1] * num_thoughts))
        assert [len(level) for level in levels] == [num_thoughts * nodes for nodes in num_nodes]
        for above, level in pairwise(levels):
            assert len({request.arrival_s for request in level}) == 1, "a level starts together"
            done_s = max(request.arrival_s + TPOT_S * request.num_output_tokens for request in above)
            assert level[0].arrival_s >= done_s - ROUNDING_S
        for level, nodes in zip(levels, num_nodes, strict=True):
            siblings = defaultdict(list)
            for request in level:
                siblings[prompt_of(request).tobytes()].append(request)
            assert [len(group) for group in siblings.values()] == [num_thoughts] * nodes
            for group in siblings.values():
                assert len({output_of(request)[0] for request in group}) == num_thoughts, "thoughts differ at once"
                assert len({id(request.units) for request in group}) == 1, "and share the prompt in memory"
    first = [requests[0] for requests in threads_of(trace).values()]
    assert {num_shared(a, b) for a, b in combinations(first, 2)} == {20}


def test_heavy_tailed_requests_share_nothing() -> None:
    """What slots waste is about lengths alone, so no hit may blur it."""
    trace = small("heavy-tailed")
    assert trace.num_units == sum(request.num_prompt_tokens for request in trace.requests)
    assert {num_shared(a, b) for a, b in combinations(trace.requests, 2)} == {0}
    assert len(threads_of(trace)) == len(trace.requests)


def test_a_few_of_the_heavy_tailed_lengths_hold_most_tokens() -> None:
    """Lengths stay in their bounds and follow the bounded Pareto law; a tenth of the prompts has half of the tokens."""
    low, high, index = 16, 16_384, 1.1
    trace = small("heavy-tailed", num_requests=3_000, min_prompt_tokens=low, max_prompt_tokens=high, tail_index=index)
    lengths = sorted((request.num_prompt_tokens for request in trace.requests), reverse=True)
    assert low <= lengths[-1] <= low + 1 and lengths[0] <= high
    assert max(request.num_output_tokens for request in trace.requests) <= 100
    assert min(request.num_output_tokens for request in trace.requests) == 32
    for x in (32, 128, 512):
        share = ((low / x) ** index - (low / high) ** index) / (1 - (low / high) ** index)
        error = 4 * math.sqrt(share * (1 - share) / 3_000)
        assert sum(length >= x for length in lengths) / 3_000 == pytest.approx(share, abs=error)
    assert sum(lengths[:300]) > sum(lengths) / 2


def test_tenants_share_nothing_with_each_other() -> None:
    """What one tenant cached must never serve another; here it could not, so any hit across is a fault."""
    trace = small("tenants", num_conversations=40, spread=0)
    first = [requests[0] for requests in threads_of(trace).values()]
    for a, b in combinations(first, 2):
        assert num_shared(a, b) == (30 if a.tenant == b.tenant else 0)
    assert {request.tenant for request in first} == {f"tenant-{k}" for k in range(1, 5)}
    tokens: dict[str | None, set[int]] = defaultdict(set)
    for request in trace.requests:
        tokens[request.tenant].update(prompt_of(request), output_of(request))
    assert all(not a & b for a, b in combinations(tokens.values(), 2))
    assert all(len({request.tenant for request in requests}) == 1 for requests in threads_of(trace).values())


@pytest.mark.parametrize("exponent", [0, 0.7, 1.0, 1.5])
def test_tenants_are_busy_by_zipfs_law(exponent: float) -> None:
    """The number of conversations falls along a line in logarithms, whose slope is the exponent."""
    trace = generate(
        "tenants",
        num_conversations=6_000,
        num_tenants=40,
        exponent=exponent,
        mean_turns=1,
        **dict.fromkeys(("system_tokens", "message_tokens", "output_tokens"), 1),
        spread=0,
    )
    counts = Counter(request.tenant for request in trace.requests)
    ranks = range(1, 11)
    slope, _ = statistics.linear_regression(
        [math.log(k) for k in ranks], [math.log(counts[f"tenant-{k}"]) for k in ranks]
    )
    assert slope == pytest.approx(-exponent, abs=0.1)


# Files ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("suffix", [".jsonl", ".jsonl.gz"])
@pytest.mark.parametrize("name", GENERATORS)
def test_what_is_written_is_read_back(tmp_path: Path, name: str, suffix: str) -> None:
    """A workload on disk is the workload, outputs and parents too, and the same bytes each time."""
    trace = small(name)
    path = tmp_path / f"workload{suffix}"
    write(trace, path)
    written = path.read_bytes()
    assert written.startswith(b"\x1f\x8b") == suffix.endswith(".gz")
    assert load(path) == trace
    write(small(name), path)
    assert path.read_bytes() == written


def test_the_definition_says_how_to_make_the_trace_again() -> None:
    """Whoever finds the file later can repeat it, or change one parameter."""
    line = small("tree-of-thought", seed=5).definition
    assert line.startswith("generated, tree-of-thought(seed=5, num_problems=4, rate=0.1, instruction_tokens=20,")
    assert "\n" not in line


# Arguments -----------------------------------------------------------------------------------------------------------


def test_generate_is_the_generator_of_that_name() -> None:
    """The command line knows names and parameters only by these tables."""
    assert generate("few-shot", 4, num_requests=9) == workloads.few_shot(4, num_requests=9)
    assert generate("few-shot", seed=4, num_requests=9) == generate("few-shot", 4, num_requests=9)
    assert defaults("few-shot")["num_shots"] == 5 and "seed" not in defaults("few-shot")
    for name, generator in GENERATORS.items():
        assert generator is getattr(workloads, name.replace("-", "_"))


def test_unknown_names_and_parameters_are_refused_with_those_that_there_are() -> None:
    """A slip on the command line should cost one look at the message."""
    with pytest.raises(ValueError, match="workload 'chats' is not one of chat, few-shot, agent"):
        generate("chats")
    with pytest.raises(ValueError, match="workload 'chats' is not one of chat, few-shot, agent"):
        defaults("chats")
    with pytest.raises(ValueError, match="'shots' of the workload 'few-shot' is not one of num_requests, rate, num_"):
        generate("few-shot", shots=3)


@pytest.mark.parametrize(
    ("name", "parameters", "error", "message"),
    [
        ("chat", {"num_conversations": 0}, ValueError, "num_conversations is 0; allowed: 1 and more"),
        ("chat", {"num_conversations": 2.0}, TypeError, "num_conversations must be an integer, not 2.0"),
        ("chat", {"rate": 0}, ValueError, "rate is 0; allowed: numbers above 0"),
        ("chat", {"rate": math.inf}, ValueError, "rate is inf; allowed: numbers above 0"),
        ("chat", {"mean_turns": 0.9}, ValueError, "mean_turns is 0.9; allowed: numbers of 1 and more"),
        ("chat", {"think_s": -0.1}, ValueError, "think_s is -0.1; allowed: numbers of 0 and more"),
        ("chat", {"spread": 3.1}, ValueError, "spread is 3.1; allowed: 0 to 3"),
        ("chat", {"output_tokens": 0}, ValueError, "output_tokens is 0; allowed: numbers of 1 and more"),
        ("agent", {"subagent_chance": 1.5}, ValueError, "subagent_chance is 1.5; allowed: 0 to 1"),
        ("agent", {"max_subagents": 0}, ValueError, "max_subagents is 0; allowed: 1 and more"),
        ("tenants", {"exponent": -1}, ValueError, "exponent is -1; allowed: numbers of 0 and more"),
        ("heavy-tailed", {"tail_index": 0}, ValueError, "tail_index is 0; allowed: numbers above 0"),
        (
            "heavy-tailed",
            {"min_output_tokens": 9, "max_output_tokens": 8},
            ValueError,
            "min_output_tokens is 9; allowed: 1 to max_output_tokens, which is 8",
        ),
        ("chat", {"seed": "7"}, TypeError, "seed must be an integer, not '7'"),
    ],
)
def test_values_out_of_range_are_refused_with_value_and_rule(
    name: str, parameters: dict[str, Any], error: type[Exception], message: str
) -> None:
    """A bound just missed is told before anything is generated."""
    with pytest.raises(error) as caught:
        generate(name, **parameters)
    assert str(caught.value) == message


@pytest.mark.parametrize(
    ("name", "parameter"), [(name, parameter) for name in GENERATORS for parameter in defaults(name)]
)
def test_every_parameter_is_checked(name: str, parameter: str) -> None:
    """No parameter may be negative, a text, a bool or not a number; one that is added must have a rule."""
    make: Callable[..., Trace] = GENERATORS[name]
    for value in ("1", True, None):
        with pytest.raises(TypeError, match=f"^{parameter} must be "):
            make(**{parameter: value})
    with pytest.raises(ValueError, match=f"^{parameter} is -1; allowed: "):
        make(**{parameter: -1})
    with pytest.raises((TypeError, ValueError), match=f"^{parameter} .*nan"):
        make(**{parameter: math.nan})


def test_the_least_values_that_are_allowed_make_a_workload() -> None:
    """Bounds are inclusive where the rule says so: one request of one token, at once."""
    for name in GENERATORS:
        least: dict[str, Any] = {
            parameter: 0.0 if parameter.endswith(("_s", "_chance")) or parameter in ("exponent", "spread") else 1
            for parameter in defaults(name)
        }
        trace = generate(name, **least)
        trace.check()
        assert len(trace.requests) == 1
        assert len(output_of(trace.requests[0])) == 1

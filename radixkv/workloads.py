"""Synthetic traffic: seeded generators, each of which gives a `Trace` whose units are tokens, outputs known.

    chat              conversations of many turns, behind a few system prompts
    few-shot          questions of many tasks, each task with its own worked examples
    agent             agents that call tools and hand work to sub-agents: long prompts that grow step by step
    tree-of-thought   reasoning that branches: several thoughts from one prompt, the best of them go on
    heavy-tailed      lengths without a typical size, and nothing shared
    tenants           conversations of tenants with their own system prompts, few tenants busy and many idle

>>> trace = generate("chat", seed=7, num_conversations=20)
>>> write(trace, "chat.jsonl.gz")

Common to all of them:

- A workload is a function of its arguments, the same in every process. Times are drawn apart from contents, so another
  rate or think time leaves what is said as it is.
- No token stands in two texts: prompts share what one was built from, and part where the first text of their own
  begins. Ids count upwards from 0 and exceed any vocabulary; id mod vocabulary size suits a model.
- Arrivals are a Poisson process of `rate` conversations, requests, agents or problems per second. Whatever waits
  for an output arrives once that is done, at `tpot_s` seconds a token, and an exponential wait is over.
- A request that continues another one (`parent`) has its prompt and output as the start of its prompt. `thread` is the
  conversation, agent, sub-agent or problem, `turn` counts its requests in arrival order.
- Lengths are log-normal; a parameter `…_tokens` is their mean and `spread` the standard deviation of their logarithm,
  0 for lengths that are all alike. 1.0 is close to what public data have: 0.99 for the prompts and 0.86 for the outputs
  of the Azure 2023 conversation trace, 1.13 for OASST answers, 0.91 for the outputs of 228 coding-agent sessions. What
  stands before all tasks (an instruction, an agent's system prompt) is exactly that long. Numbers of turns and steps
  are geometric, with mean `mean_…`.
- A parameter's name tells what it may be: `num_…`, `min_…` and `max_…` an integer of 1 and more; `…_tokens` and
  `mean_…` a number of 1 and more; `…_s` and `exponent` one of 0 and more; `rate` and `tail_index` one above 0;
  `…_chance` one from 0 to 1; `spread` one from 0 to 3.

A default without a source is a round number of ours.
"""

from __future__ import annotations

import inspect
import math
import random
from array import array
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from operator import attrgetter
from typing import Any

from radixkv.arguments import at_least, integer
from radixkv.traces import Trace, TraceRequest, write
from radixkv.traces.native import NAME as FORMAT


def chat(
    seed: int = 0,
    *,
    num_conversations: int = 1_000,
    rate: float = 1.0,
    num_system_prompts: int = 10,
    system_tokens: float = 500,
    mean_turns: float = 4,
    message_tokens: float = 160,
    output_tokens: float = 340,
    think_s: float = 30,
    tpot_s: float = 0.05,
    spread: float = 1.0,
) -> Trace:
    """Conversations of many turns; each starts with one of a few system prompts, any of them as likely.

    A message and its answer have the mean lengths of ShareGPT, 161 and 338 tokens (Kwon et al., PagedAttention, SOSP
    2023, figure 11).
    """
    workload = _Workload("chat", locals())
    systems = [workload.text(system_tokens) for _ in range(num_system_prompts)]
    for number, start_s in enumerate(workload.starts(num_conversations)):
        system = systems[workload.contents.randrange(num_system_prompts)]
        _converse(workload, start_s, str(number), system, None, mean_turns, message_tokens, output_tokens, think_s)
    return workload.trace()


def tenants(
    seed: int = 0,
    *,
    num_conversations: int = 1_000,
    rate: float = 1.0,
    num_tenants: int = 100,
    exponent: float = 1.0,
    system_tokens: float = 1_000,
    mean_turns: float = 3,
    message_tokens: float = 160,
    output_tokens: float = 340,
    think_s: float = 30,
    tpot_s: float = 0.05,
    spread: float = 1.0,
) -> Trace:
    """Conversations of tenants by Zipf's law: the k-th busiest, `tenant-k`, has a share proportional to k^-exponent.

    Each tenant has a system prompt, which all its conversations start with; tenants share nothing. Exponent 1 is what
    S-LoRA takes for the adapters of many customers (Sheng et al., MLSys 2024); web proxies see 0.64 to 0.83 for pages
    (Breslau et al., INFOCOM 1999); with 0 all tenants are as busy. Lengths as in `chat`.
    """
    workload = _Workload("tenants", locals())
    systems = [workload.text(system_tokens) for _ in range(num_tenants)]
    shares = list(accumulate((k + 1) ** -exponent for k in range(num_tenants)))
    for number, start_s in enumerate(workload.starts(num_conversations)):
        (k,) = workload.contents.choices(range(num_tenants), cum_weights=shares)
        name = f"tenant-{k + 1}"
        _converse(workload, start_s, str(number), systems[k], name, mean_turns, message_tokens, output_tokens, think_s)
    return workload.trace()


def _converse(
    workload: _Workload,
    start_s: float,
    thread: str,
    system: array[int],
    tenant: str | None,
    mean_turns: float,
    message_tokens: float,
    output_tokens: float,
    think_s: float,
) -> None:
    """One conversation: each prompt is all that was said before, then a new message."""
    said, previous, now_s = system, None, start_s
    for _ in range(workload.count(mean_turns)):
        prompt = said + workload.text(message_tokens)
        previous = workload.request(now_s, prompt, workload.text(output_tokens), thread, previous, tenant)
        said = previous.prompt + previous.output
        now_s = workload.done_s(previous) + workload.wait(think_s)


def few_shot(
    seed: int = 0,
    *,
    num_requests: int = 4_000,
    rate: float = 5.0,
    num_tasks: int = 57,
    num_shots: int = 5,
    instruction_tokens: float = 50,
    example_tokens: float = 100,
    question_tokens: float = 100,
    output_tokens: float = 20,
    spread: float = 1.0,
) -> Trace:
    """Questions that each stand behind the same few worked examples of their task, any task as likely.

    A prompt is an instruction, the same in all tasks, the `num_shots` examples of the task, and a question of its own.
    57 tasks of 5 examples are MMLU (Hendrycks et al., ICLR 2021). Every request is a thread of one turn.
    """
    workload = _Workload("few-shot", locals())
    instruction = workload.exactly(instruction_tokens)
    tasks = [
        sum((workload.text(example_tokens) for _ in range(num_shots)), start=instruction) for _ in range(num_tasks)
    ]
    for number, start_s in enumerate(workload.starts(num_requests)):
        prompt = tasks[workload.contents.randrange(num_tasks)] + workload.text(question_tokens)
        workload.request(start_s, prompt, workload.text(output_tokens), str(number))
    return workload.trace()


def agent(
    seed: int = 0,
    *,
    num_agents: int = 100,
    rate: float = 0.2,
    system_tokens: float = 4_000,
    task_tokens: float = 300,
    mean_steps: float = 12,
    call_tokens: float = 200,
    result_tokens: float = 400,
    tool_s: float = 10,
    subagent_chance: float = 0.05,
    max_subagents: int = 3,
    subagent_system_tokens: float = 2_000,
    mean_subagent_steps: float = 6,
    tpot_s: float = 0.05,
    spread: float = 1.0,
) -> Trace:
    """Agents that work on a task in a loop: the output calls a tool, whose result the next prompt ends with.

    All agents start with the same system prompt and tools. With `subagent_chance` a step calls 1 to `max_subagents`
    sub-agents instead, all at once: threads `NUMBER/0`, `NUMBER/1` … of the agent, which start with another system
    prompt, the same for all of them, and a task of their own. Their last outputs, one after the other, are the result,
    and come when the last of them is done. So these tokens stand at two places, and only the path tells them apart.

    12 steps are the mean of the tau-bench trajectories for airlines; 200 tokens a call and 400 a result are close to
    the medians of 228 coding-agent sessions. Those sessions as a whole are larger: on average 39 steps, 15,000 tokens
    of system prompt and tools, 420 tokens an output and 1,100 a result.
    """
    workload = _Workload("agent", locals())
    system = workload.exactly(system_tokens)
    subagent_system = workload.exactly(subagent_system_tokens)

    def steps(start_s: float, thread: str, system: array[int], mean_steps: float, spawns: bool) -> _Draft:
        """The requests of an agent or sub-agent; gives the last of them."""
        now_s, num_subagents = start_s, 0
        prompt = system + workload.text(task_tokens)
        step = workload.request(now_s, prompt, workload.text(call_tokens), thread)
        for _ in range(workload.count(mean_steps) - 1):
            now_s = workload.done_s(step)
            if spawns and workload.contents.random() < subagent_chance:
                num_new = workload.contents.randint(1, max_subagents)
                last = [
                    steps(now_s, f"{thread}/{number}", subagent_system, mean_subagent_steps, False)
                    for number in range(num_subagents, num_subagents + num_new)
                ]
                num_subagents += num_new
                now_s = max(map(workload.done_s, last))
                result = sum(map(attrgetter("output"), last), start=array("I"))
            else:
                now_s += workload.wait(tool_s)
                result = workload.text(result_tokens)
            prompt = step.prompt + step.output + result
            step = workload.request(now_s, prompt, workload.text(call_tokens), thread, step)
        return step

    for number, start_s in enumerate(workload.starts(num_agents)):
        steps(start_s, str(number), system, mean_steps, True)
    return workload.trace()


def tree_of_thought(
    seed: int = 0,
    *,
    num_problems: int = 60,
    rate: float = 0.1,
    instruction_tokens: float = 600,
    problem_tokens: float = 100,
    num_levels: int = 3,
    num_thoughts: int = 5,
    num_kept: int = 5,
    thought_tokens: float = 100,
    judge_s: float = 2,
    tpot_s: float = 0.05,
    spread: float = 1.0,
) -> Trace:
    """Problems solved by a search in breadth: `num_thoughts` outputs from a prompt, and the best `num_kept` go on.

    All prompts start with the same instruction. On each level every kept node gives `num_thoughts` requests with the
    same prompt, which arrive together; when the last one is done and judged, each kept thought is part of a prompt of
    the next level. Which ones are kept is drawn, and how they are judged is no part of the trace. Levels and the 5 kept
    are those of the Game of 24 (Yao et al., Tree of Thoughts, NeurIPS 2023), where a node proposes as many as it finds.
    """
    workload = _Workload("tree-of-thought", locals())
    instruction = workload.exactly(instruction_tokens)
    for number, start_s in enumerate(workload.starts(num_problems)):
        nodes: list[tuple[array[int], _Draft | None]] = [(instruction + workload.text(problem_tokens), None)]
        now_s = start_s
        for _ in range(num_levels):
            level = [
                workload.request(now_s, prompt, workload.text(thought_tokens), str(number), parent)
                for prompt, parent in nodes
                for _ in range(num_thoughts)
            ]
            now_s = max(map(workload.done_s, level)) + workload.wait(judge_s)
            kept = workload.contents.sample(level, min(num_kept, len(level)))
            nodes = [(thought.prompt + thought.output, thought) for thought in kept]
    return workload.trace()


def heavy_tailed(
    seed: int = 0,
    *,
    num_requests: int = 4_000,
    rate: float = 5.0,
    tail_index: float = 1.1,
    min_prompt_tokens: int = 128,
    max_prompt_tokens: int = 65_536,
    min_output_tokens: int = 32,
    max_output_tokens: int = 4_096,
) -> Trace:
    """Requests that share nothing, with bounded Pareto lengths: most are short, a few hold most of the tokens.

    The share of prompts longer than x falls as x^-tail_index, down to 0 at the maximum; outputs likewise. The longer
    halves of the prompts of the Mooncake conversation trace and of the outputs of both Azure 2023 traces have indices
    of 1.1 to 1.2 (Hill's estimator). Every request is a thread of one turn.
    """
    workload = _Workload("heavy-tailed", locals())
    for least, most, name in (
        (min_prompt_tokens, max_prompt_tokens, "prompt_tokens"),
        (min_output_tokens, max_output_tokens, "output_tokens"),
    ):
        if least > most:
            raise ValueError(f"min_{name} is {least}; allowed: 1 to max_{name}, which is {most}")
    for number, start_s in enumerate(workload.starts(num_requests)):
        prompt = workload.fresh(workload.pareto(tail_index, min_prompt_tokens, max_prompt_tokens))
        output = workload.fresh(workload.pareto(tail_index, min_output_tokens, max_output_tokens))
        workload.request(start_s, prompt, output, str(number))
    return workload.trace()


GENERATORS: dict[str, Callable[..., Trace]] = {
    "chat": chat,
    "few-shot": few_shot,
    "agent": agent,
    "tree-of-thought": tree_of_thought,
    "heavy-tailed": heavy_tailed,
    "tenants": tenants,
}


def generate(name: str, seed: int = 0, **parameters: Any) -> Trace:
    """The workload of that name; `parameters` are those of the generator, where the defaults do not fit.

    Raises ValueError for a name or parameter that there is not and for a value out of range, TypeError for a value of
    the wrong type. O(tokens); the defaults give 2,000 to 4,000 requests in a second or two.
    """
    allowed = defaults(name)
    for parameter in parameters:
        if parameter not in allowed:
            raise ValueError(f"parameter {parameter!r} of the workload {name!r} is not one of {', '.join(allowed)}")
    return GENERATORS[name](seed, **parameters)


def defaults(name: str) -> dict[str, int | float]:
    """The parameters that a workload has beside the seed, each with its default. Raises ValueError for other names."""
    if name not in GENERATORS:
        raise ValueError(f"workload {name!r} is not one of {', '.join(GENERATORS)}")
    _, *parameters = inspect.signature(GENERATORS[name]).parameters.values()
    return {parameter.name: parameter.default for parameter in parameters}


def _check(name: str, value: Any) -> None:
    """Refuses a parameter that breaks the rule of its name, as the module's docstring has them."""
    if name == "seed":
        integer(value, name)
        return
    if name.startswith(("num_", "min_", "max_")):
        at_least(1, value, name)
        return
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(f"{name} must be a number, not {value!r}")
    if name in ("rate", "tail_index"):
        is_allowed, allowed = value > 0, "numbers above 0"
    elif name.endswith("_chance"):
        is_allowed, allowed = 0 <= value <= 1, "0 to 1"
    elif name == "spread":
        is_allowed, allowed = 0 <= value <= 3, "0 to 3"
    elif name.endswith("_s") or name == "exponent":
        is_allowed, allowed = value >= 0, "numbers of 0 and more"
    else:
        assert name.endswith("_tokens") or name.startswith("mean_"), f"no rule for a parameter named {name}"
        is_allowed, allowed = value >= 1, "numbers of 1 and more"
    if not (is_allowed and math.isfinite(value)):
        raise ValueError(f"{name} is {value}; allowed: {allowed}")


@dataclass(slots=True, eq=False)
class _Draft:
    """A request whose place in the trace is not known yet."""

    arrival_s: float
    prompt: array[int]
    output: array[int]
    thread: str
    parent: _Draft | None
    tenant: str | None


class _Workload:
    """A trace in the making: what is drawn for it, and the requests so far.

    parameters   all arguments of the generator, which its first line hands over as `locals()`
    """

    def __init__(self, name: str, parameters: Mapping[str, Any]) -> None:
        for parameter, value in parameters.items():
            _check(parameter, value)
        self._name = name
        self._shown = ", ".join(f"{parameter}={value}" for parameter, value in parameters.items())
        self._rate: float = parameters["rate"]
        self._spread: float = parameters.get("spread", 0.0)
        self._tpot_s: float = parameters.get("tpot_s", 0.0)
        # A text as seed: the same numbers in every process. Contents must not depend on how often a time is drawn.
        self.contents = random.Random(f"{name} {parameters['seed']} contents")
        self._times = random.Random(f"{name} {parameters['seed']} times")
        self._num_tokens = 0
        self._drafts: list[_Draft] = []

    # Times ----------------------------------------------------------------------------------------------------------

    def starts(self, num_starts: int) -> Iterator[float]:
        """The times of a Poisson process. They are drawn first, so that what follows each start cannot move them."""
        yield from accumulate([self.wait(1 / self._rate) for _ in range(num_starts)])

    def wait(self, mean_s: float) -> float:
        """An exponential time; one number is drawn whatever the mean."""
        return mean_s * self._times.expovariate(1.0)

    def done_s(self, request: _Draft) -> float:
        """When the request's output is complete."""
        return request.arrival_s + self._tpot_s * len(request.output)

    # Contents -------------------------------------------------------------------------------------------------------

    def fresh(self, num_tokens: int) -> array[int]:
        """Tokens that stand nowhere else."""
        self._num_tokens += num_tokens
        return array("I", range(self._num_tokens - num_tokens, self._num_tokens))

    def exactly(self, num_tokens: float) -> array[int]:
        """A text of that length."""
        return self.fresh(round(num_tokens))

    def text(self, mean_tokens: float) -> array[int]:
        """A text of log-normal length with that mean, rounded, at least one token."""
        deviation = self._spread * self.contents.normalvariate(0.0, 1.0) - self._spread**2 / 2
        return self.fresh(max(1, round(mean_tokens * math.exp(deviation))))

    def count(self, mean: float) -> int:
        """A geometric number of at least 1 with that mean: after each one, the next comes with the same chance."""
        remaining = 1.0 - self.contents.random()  # (0, 1]
        return 1 if mean == 1 else 1 + int(math.log(remaining) / math.log1p(-1 / mean))

    def pareto(self, index: float, least: int, most: int) -> int:
        """A bounded Pareto number, cut to an integer. By inversion of its distribution function."""
        above = 1.0 - self.contents.random() * (1.0 - (least / most) ** index)
        return min(most, int(least * above ** (-1 / index)))

    # Requests -------------------------------------------------------------------------------------------------------

    def request(
        self,
        arrival_s: float,
        prompt: array[int],
        output: array[int],
        thread: str,
        parent: _Draft | None = None,
        tenant: str | None = None,
    ) -> _Draft:
        """Adds a request. Those that arrive together stay in the order in which they are added."""
        draft = _Draft(round(arrival_s, 6), prompt, output, thread, parent, tenant)
        self._drafts.append(draft)
        return draft

    def trace(self) -> Trace:
        """The requests in arrival order, with their turns and parents."""
        drafts: Sequence[_Draft] = sorted(self._drafts, key=attrgetter("arrival_s"))
        place = {draft: index for index, draft in enumerate(drafts)}
        num_turns: Counter[str] = Counter()
        requests: list[TraceRequest] = []
        for draft in drafts:
            num_turns[draft.thread] += 1
            requests.append(
                TraceRequest(
                    arrival_s=draft.arrival_s,
                    num_prompt_tokens=len(draft.prompt),
                    num_output_tokens=len(draft.output),
                    units=draft.prompt,
                    output_units=draft.output,
                    thread=draft.thread,
                    turn=num_turns[draft.thread],
                    tenant=draft.tenant,
                    parent=None if draft.parent is None else place[draft.parent],
                )
            )
        return Trace(
            name=self._name,
            format=FORMAT,
            requests=requests,
            block_size=1,
            weights=None,
            counts_partial=True,
            num_skipped=0,
            definition=f"generated, {self._name}({self._shown}): by arrival, no token in two texts, outputs known",
        )


__all__ = [
    "GENERATORS",
    "agent",
    "chat",
    "defaults",
    "few_shot",
    "generate",
    "heavy_tailed",
    "tenants",
    "tree_of_thought",
    "write",
]

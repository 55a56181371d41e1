"""The prefix tree beside its peers: what a request costs the scheduler, apart from any model.

What is measured, in µs on the CPU clock of the thread (other work on the machine hardly moves it), the clock's own cost
taken off:

    workload   2,000 requests of 48 live conversations that share 8 system prompts, in a pool too small for all: the
               tree alone, by the same calls as the peers get
    facade     the same requests through `PrefixCache`: tree, pool, block tables and statistics
    evict      freeing 4 blocks beside 1 k to 1 M idle leaves
    chain      a path of 400 nodes
    lookup     a cached prompt of 1 k to 128 k tokens, packed before, and what packing costs
    admit      a fully cached prompt through a whole manager: prepare, look up, allocate, free
    memory     bytes of metadata per cached token after the workload

The ceiling: a match must compare every matched token once. At 4 bytes a token and about 10 GB/s for memcmp from memory
that is 0.4 ns a token, 13 µs for a prompt of 32 k; what is above it is the price of the structure.

Every matched block is compared with the tokens that were stored in it, outside the timer, so that a system that is used
wrongly fails instead of being fast. Each measurement runs in a process of its own; the systems take turns, and the
median of the repetitions counts. A peer that cannot be imported is left out with a line on stderr.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import random
import statistics
import subprocess
import sys
import time
import tracemalloc
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

from engine.arguments import positive
from engine.bench.peers import OURS_MANAGER, OURS_TREE, PEERS, SYSTEMS, PromptCache, System, Tree
from engine.bench.report import Result, Table, print_report

PARTS = ("workload", "facade", "evict", "chain", "lookup", "admit", "memory")

T = TypeVar("T")
Metrics = dict[str, dict[str, float]]  # quantity -> {"value": the one to compare, "p99": ...}


@dataclass(frozen=True)
class Settings:
    """Sizes of everything that is measured."""

    requests: int = 2000
    block_sizes: tuple[int, ...] = (1, 16)
    pool_tokens: int = 131_072
    seed: int = 7
    leaves: tuple[int, ...] = (1_000, 10_000, 50_000, 200_000, 1_000_000)
    peer_leaves: int = 50_000  # beyond it a peer takes minutes and gigabytes to fill
    leaf_tokens: int = 64
    evictions: int = 40
    chain_nodes: int = 400
    chain_tokens: int = 32  # per node
    prompts: tuple[int, ...] = (1_024, 8_192, 32_768, 131_072)
    samples: int = 60  # of one call that changes nothing


# ---------------------------------------------------------------- the workload


@dataclass(frozen=True)
class ChatRequest:
    """Prompt and answer together; the prompt is the first `num_prompt_tokens`."""

    token_ids: list[int]
    num_prompt_tokens: int


def chat_workload(
    num_requests: int,
    seed: int,
    *,
    groups: int = 8,
    conversations: int = 48,
    system_tokens: int = 512,
    max_tokens: int = 8192,
    edited: float = 0.10,
    abandoned: float = 0.03,
) -> Iterator[ChatRequest]:
    """Requests of chats that take turns at random; a pure function of its arguments.

    Each chat starts with the system prompt of its group; a turn adds 40 to 120 tokens of the user and 60 to 180 of the
    answer. A share of the turns goes back to where an earlier turn began and continues differently. A chat that was
    abandoned, or would outgrow `max_tokens`, makes place for a new one.
    """
    draw = random.Random(seed)

    def text(num_tokens: int) -> list[int]:
        return [draw.randrange(32000) for _ in range(num_tokens)]

    systems = [text(system_tokens) for _ in range(groups)]
    # Each: the tokens so far, and where in them its turns began.
    chats: list[tuple[list[int], list[int]]] = [(systems[draw.randrange(groups)], []) for _ in range(conversations)]
    for _ in range(num_requests):
        index = draw.randrange(conversations)
        history, turns = chats[index]
        if len(history) + 300 > max_tokens or draw.random() < abandoned:
            history, turns = systems[draw.randrange(groups)], []
        if turns and draw.random() < edited:
            start = draw.choice(turns)
            history = history[:start]
            turns = [turn for turn in turns if turn < start]
        turns = [*turns, len(history)]
        prompt = history + text(draw.randint(40, 120))
        token_ids = prompt + text(draw.randint(60, 180))
        chats[index] = (token_ids, turns)
        yield ChatRequest(token_ids, len(prompt))


class StoredTokens:
    """The truth that matches are held against: which tokens were written to which block. Knows no tree."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self._tokens: dict[int, list[int]] = {}

    def write(self, block_ids: Sequence[int], token_ids: Sequence[int]) -> None:
        """Stores the tokens in these blocks, from the first slot of the first block on."""
        size = self.block_size
        for index, block_id in enumerate(block_ids):
            self._tokens[block_id] = list(token_ids[index * size : (index + 1) * size])

    def verify(self, block_ids: Sequence[int], token_ids: Sequence[int]) -> None:
        """AssertionError if these blocks do not start with these tokens."""
        stored = [token_id for block_id in block_ids for token_id in self._tokens.get(block_id, ())]
        if stored[: len(token_ids)] != list(token_ids):
            raise AssertionError("a match names blocks that hold other tokens")

    def copy_block(self, source: int, target: int, num_tokens: int) -> None:
        """Copies the first tokens of a block, as an engine copies their K and V."""
        self._tokens[target] = self._tokens[source][:num_tokens]


# ---------------------------------------------------------------- the clock


class Stopwatch:
    """Collects how long single calls take, in µs by name."""

    def __init__(self) -> None:
        self.samples: dict[str, list[float]] = {}
        self._overhead_ns = 0
        self._overhead_ns = int(statistics.median(self._empty_ns() for _ in range(2000)))

    def _empty_ns(self) -> int:
        start = time.thread_time_ns()
        return time.thread_time_ns() - start

    def time(self, name: str, call: Callable[..., T], *arguments: Any) -> T:
        """What the call returns."""
        start = time.thread_time_ns()
        returned = call(*arguments)
        elapsed = time.thread_time_ns() - start - self._overhead_ns
        self.samples.setdefault(name, []).append(max(elapsed, 0) / 1000)
        return returned

    def metrics(self) -> Metrics:
        """Median and 99th percentile of each name."""
        return {name: {"value": statistics.median(times), "p99": _p99(times)} for name, times in self.samples.items()}

    def sum_per(self, count: int, *names: str) -> float:
        """Mean time that the calls of these names (none: all) took together per request."""
        return sum(sum(times) for name, times in self.samples.items() if not names or name in names) / count


def _p99(values: list[float]) -> float:
    return sorted(values)[min(len(values) - 1, int(len(values) * 0.99))]


def _settle() -> None:
    """Collects garbage and takes what stays out of later collections, so that none of them meets a timed call."""
    gc.collect()
    gc.freeze()


# ---------------------------------------------------------------- the parts


def measure_workload(make: Callable[[int], Tree], block_size: int, settings: Settings) -> Metrics:
    """The requests one after the other: match, lock, evict as needed, insert twice, unlock."""
    tree = make(settings.pool_tokens)
    stored = StoredTokens(settings.pool_tokens // block_size, block_size)
    free = list(range(stored.num_blocks - 1, -1, -1))
    watch = Stopwatch()
    prompt_tokens = hit_tokens = 0
    for request in chat_workload(settings.requests, settings.seed):
        token_ids = request.token_ids
        key = tree.key(token_ids)
        query = tree.cut(key, request.num_prompt_tokens - 1)  # one token is always computed
        num_hit, match = watch.time("match", tree.match, query)
        locations = watch.time("locations", tree.locations, match)
        known = tree.blocks_of(locations)
        if len(known) * block_size != num_hit:
            raise AssertionError(f"{num_hit} tokens matched, but {len(known)} blocks were named")
        stored.verify(known, token_ids[:num_hit])
        lock = watch.time("lock", tree.lock, match)
        needed = -(-len(token_ids) // block_size) - len(known)
        if needed > len(free):
            evicted = watch.time("evict", tree.evict, (needed - len(free)) * block_size)
            free += tree.blocks_of(evicted)
        new = [free.pop() for _ in range(needed)]
        stored.write(new, token_ids[num_hit:])
        blocks = known + new
        for name, num_tokens, num_known in (
            ("insert prefill", request.num_prompt_tokens, num_hit),
            ("insert finish", len(token_ids), request.num_prompt_tokens // block_size * block_size),
        ):
            num_full = num_tokens // block_size
            value = tree.value(blocks[:num_full])
            part = tree.cut(key, num_full * block_size)
            num_existing = watch.time(name, tree.insert, part, value, num_known)
            if num_existing != num_known:
                raise AssertionError(f"{num_existing} tokens were in the tree, {num_known} had been put there")
        free += blocks[len(token_ids) // block_size :]  # the unfilled last block
        watch.time("unlock", tree.unlock, lock)
        prompt_tokens += request.num_prompt_tokens
        hit_tokens += num_hit
    metrics = watch.metrics()
    metrics["Σ per request"] = {"value": watch.sum_per(settings.requests)}
    metrics["matched, M tokens/s"] = {
        "value": hit_tokens / settings.requests / watch.sum_per(settings.requests, "match", "locations")
    }
    metrics["hit rate"] = {"value": hit_tokens / prompt_tokens}
    return metrics


def measure_facade(block_size: int, settings: Settings) -> Metrics:
    """The same requests through `PrefixCache`, answer tokens appended one by one."""
    from radixkv.cache import PrefixCache
    from radixkv.tokens import TokenKey

    stored = StoredTokens(settings.pool_tokens // block_size, block_size)
    cache = PrefixCache(stored.num_blocks, block_size, storage=stored)
    watch = Stopwatch()

    def append_all(request_id: int, token_ids: list[int]) -> None:
        for token_id in token_ids:
            cache.append_token(request_id, token_id)

    answer_tokens = 0
    for number, request in enumerate(chat_workload(settings.requests, settings.seed)):
        token_ids, num_prompt = request.token_ids, request.num_prompt_tokens
        key = TokenKey(token_ids[:num_prompt])
        num_hit = watch.time("allocate", cache.allocate, number, key).num_cached_tokens
        blocks = cache.block_table(number)
        stored.verify(blocks, token_ids[:num_hit])
        first = num_hit // block_size
        stored.write(blocks[first:], token_ids[first * block_size : num_prompt])
        watch.time("commit prefill", cache.commit, number, num_prompt)
        watch.time("append_token, all", append_all, number, token_ids[num_prompt:])
        first = num_prompt // block_size
        stored.write(cache.block_table(number)[first:], token_ids[first * block_size :])
        watch.time("commit finish", cache.commit, number, len(token_ids))
        watch.time("free", cache.free, number)
        answer_tokens += len(token_ids) - num_prompt
    metrics = watch.metrics()
    appending = watch.sum_per(answer_tokens, "append_token, all")
    metrics["append_token, each"] = {"value": appending}
    metrics["Σ without append_token"] = {
        "value": watch.sum_per(settings.requests, "allocate", "commit prefill", "commit finish", "free")
    }
    metrics["Σ per request"] = {"value": watch.sum_per(settings.requests)}
    hit_rate = cache.stats.token_hit_rate
    metrics["hit rate"] = {"value": 0.0 if hit_rate is None else hit_rate}
    return metrics


def measure_evict(make: Callable[[int], Tree], block_size: int, num_leaves: int, settings: Settings) -> Metrics:
    """Freeing one leaf's worth of blocks beside many idle leaves."""
    leaf_tokens = settings.leaf_tokens
    blocks_per_leaf = leaf_tokens // block_size
    tree = make(num_leaves * leaf_tokens)
    rest = [random.Random(settings.seed).randrange(32000) for _ in range(leaf_tokens - 1)]
    for leaf in range(num_leaves):
        key = tree.cut(tree.key([leaf, *rest]), leaf_tokens)
        tree.insert(key, tree.value(range(leaf * blocks_per_leaf, (leaf + 1) * blocks_per_leaf)), 0)
    _settle()
    watch = Stopwatch()
    for _ in range(settings.evictions):
        evicted = watch.time(f"evict beside {num_leaves:,} leaves", tree.evict, leaf_tokens)
        if len(tree.blocks_of(evicted)) < blocks_per_leaf:
            raise AssertionError("evicted less than was asked for")
    return watch.metrics()


def measure_chain(make: Callable[[int], Tree], block_size: int, settings: Settings) -> Metrics:
    """A path of many short nodes: bare, and with a leaf beside each node, which keeps it a node whatever is locked."""
    bare = _measure_chain(make, block_size, settings, with_branches=False)
    branched = _measure_chain(make, block_size, settings, with_branches=True)
    return bare | {f"{name}, with branches": value for name, value in branched.items()}


def _measure_chain(make: Callable[[int], Tree], block_size: int, settings: Settings, *, with_branches: bool) -> Metrics:
    draw = random.Random(settings.seed)
    blocks_per_node = settings.chain_tokens // block_size
    tree = make(2 * settings.chain_nodes * settings.chain_tokens)
    token_ids: list[int] = []
    blocks: list[int] = []
    next_block = 0
    for node in range(settings.chain_nodes):
        if with_branches:
            branch = tree.key(token_ids + [40_000 + node] * block_size)
            tree.insert(
                tree.cut(branch, len(token_ids) + block_size), tree.value([*blocks, next_block]), len(token_ids)
            )
            next_block += 1
        token_ids += [draw.randrange(32000) for _ in range(settings.chain_tokens)]
        blocks += range(next_block, next_block + blocks_per_node)
        next_block += blocks_per_node
        key = tree.cut(tree.key(token_ids), len(token_ids))
        tree.insert(key, tree.value(blocks), len(token_ids) - settings.chain_tokens)
    query = tree.key([*token_ids, 1])
    _settle()
    watch = Stopwatch()
    for _ in range(settings.samples):
        num_hit, match = watch.time("match", tree.match, query)
        locations = watch.time("locations", tree.locations, match)
        if num_hit != len(token_ids) or tree.blocks_of(locations) != blocks:
            raise AssertionError("the chain was not matched to its end")
        num_nodes = tree.num_nodes(match)
        if num_nodes not in (None, settings.chain_nodes):
            raise AssertionError(f"the chain has {num_nodes} nodes, not {settings.chain_nodes}")
        if with_branches:  # a lock may merge what nothing keeps apart
            lock = watch.time("lock", tree.lock, match)
            watch.time("unlock", tree.unlock, lock)
    metrics = watch.metrics()
    sums = {"match + locations": _sum_of(metrics, "match", "locations")}
    if with_branches:
        sums["lock + unlock"] = _sum_of(metrics, "lock", "unlock")
    return sums


def measure_lookup(make: Callable[[int], Tree], block_size: int, num_tokens: int, settings: Settings) -> Metrics:
    """A prompt that was stored whole, looked up again."""
    draw = random.Random(settings.seed)
    tree = make(num_tokens)
    token_ids = [draw.randrange(32000) for _ in range(num_tokens)]
    blocks = list(range(num_tokens // block_size))
    tree.insert(tree.cut(tree.key(token_ids), num_tokens), tree.value(blocks), 0)
    longer = [*token_ids, 1]
    _settle()
    watch = Stopwatch()
    for _ in range(settings.samples):
        query = watch.time("pack", tree.key, longer)
        num_hit, match = watch.time("match", tree.match, query)
        locations = watch.time("locations", tree.locations, match)
        if num_hit != num_tokens or tree.blocks_of(locations) != blocks:
            raise AssertionError("the prompt was not matched to its end")
    metrics = watch.metrics()
    return {
        f"{num_tokens:,} tokens, packed": _sum_of(metrics, "match", "locations"),
        f"{num_tokens:,} tokens, packing": metrics["pack"],
    }


def measure_admit(make: Callable[[int], PromptCache], block_size: int, num_tokens: int, settings: Settings) -> Metrics:
    """A fully cached prompt through a whole manager."""
    draw = random.Random(settings.seed)
    cache = make(num_tokens + 4 * block_size)
    token_ids = [draw.randrange(32000) for _ in range(num_tokens)]
    first = cache.prepare(token_ids)
    cache.admit(first)
    cache.release(first)
    _settle()
    watch = Stopwatch()
    for _ in range(max(settings.samples // 4, 1)):
        request = watch.time("prepare", cache.prepare, token_ids)
        num_hit = watch.time("admit", cache.admit, request)
        if not num_tokens - block_size <= num_hit < num_tokens:
            raise AssertionError(f"{num_hit} of {num_tokens} tokens hit")
        watch.time("release", cache.release, request)
    metrics = watch.metrics()
    return {
        f"{num_tokens:,} tokens, look up + allocate + free": _sum_of(metrics, "admit", "release"),
        f"{num_tokens:,} tokens, with packing or hashing": _sum_of(metrics, "prepare", "admit", "release"),
    }


def measure_memory(block_size: int, settings: Settings) -> Metrics:
    """What `PrefixCache` holds after the workload, tokens and pool included, as Python's allocator counts it."""
    from radixkv.cache import PrefixCache

    tracemalloc.start()
    cache = PrefixCache(settings.pool_tokens // block_size, block_size)
    for number, request in enumerate(chat_workload(settings.requests, settings.seed)):
        cache.allocate(number, request.token_ids[: request.num_prompt_tokens])
        cache.commit(number, request.num_prompt_tokens)
        for token_id in request.token_ids[request.num_prompt_tokens :]:
            cache.append_token(number, token_id)
        cache.commit(number, len(request.token_ids))
        cache.free(number)
    num_cached = cache.num_cached_blocks * block_size
    gc.collect()
    with_cache, _ = tracemalloc.get_traced_memory()
    del cache
    gc.collect()
    without, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    return {"bytes per cached token": {"value": (with_cache - without) / num_cached}}


def _sum_of(metrics: Metrics, *names: str) -> dict[str, float]:
    """The named calls as if they were one (percentiles added: an upper bound)."""
    return {statistic: sum(metrics[name][statistic] for name in names) for statistic in ("value", "p99")}


# ---------------------------------------------------------------- one measurement, in its own process


@dataclass(frozen=True)
class Task:
    """One measurement: which part, of which system, at which size (leaves or tokens, where the part has one)."""

    part: str
    system: str
    block_size: int
    size: int = 0
    directory: str | None = None  # where the peer's package is
    python: str = field(default=sys.executable, compare=False)


def measure(task: Task, settings: Settings) -> Metrics:
    """The quantities of one task, measured in this process. Raises ImportError if the system is not there."""
    if task.part == "facade":
        return measure_facade(task.block_size, settings)
    if task.part == "memory":
        return measure_memory(task.block_size, settings)
    directory = None if task.directory is None else Path(task.directory)

    def make(num_tokens: int) -> Any:
        return SYSTEMS[task.system].make(task.block_size, num_tokens, directory)

    if task.part == "probe":
        make(task.block_size)
        return {}
    if task.part == "workload":
        return measure_workload(make, task.block_size, settings)
    if task.part == "chain":
        return measure_chain(make, task.block_size, settings)
    sized: dict[str, Callable[..., Metrics]] = {
        "evict": measure_evict,
        "lookup": measure_lookup,
        "admit": measure_admit,
    }
    return sized[task.part](make, task.block_size, task.size, settings)


def worker(argument: str) -> None:
    """What the child process does: measures the task in `argument` and prints the quantities as a line of JSON."""
    given = json.loads(argument)
    try:
        answer: dict[str, Any] = {"metrics": measure(Task(**given["task"]), Settings(**given["settings"]))}
    except ImportError as error:
        answer = {"missing": str(error)}
    print(json.dumps(answer))


class NotThere(Exception):
    """A peer that cannot be measured here, and why."""


def measure_in_child(task: Task, settings: Settings) -> Metrics:
    """The quantities of one task, measured in a process of its own with one thread. Raises NotThere, RuntimeError."""
    root = str(Path(__file__).resolve().parents[2])
    one_thread = {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"}
    ran = subprocess.run(
        [task.python, "-m", "engine.bench.tree", json.dumps({"task": asdict(task), "settings": asdict(settings)})],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, **one_thread, "PYTHONHASHSEED": "0", "PYTHONPATH": root},
    )
    lines = ran.stdout.splitlines()
    if ran.returncode or not lines:
        last = ran.stderr.strip().splitlines()[-1:] or [f"exit status {ran.returncode}"]
        raise RuntimeError(f"{task.system}, {task.part}: {last[0]}")
    answer = json.loads(lines[-1])
    if "missing" in answer:
        raise NotThere(answer["missing"])
    metrics: Metrics = answer["metrics"]
    return metrics


# ---------------------------------------------------------------- the whole benchmark


def plan(parts: Sequence[str], settings: Settings, peers: Sequence[System]) -> list[list[Task]]:
    """What to run: lists of tasks that are compared with each other, so that they run one after the other."""
    trees = [OURS_TREE, *(peer for peer in peers if peer.kind == "tree")]
    managers = [OURS_MANAGER, *(peer for peer in peers if peer.kind == "manager")]
    groups = []
    biggest = max(settings.block_sizes)
    for part in parts:
        if part == "workload":
            groups += [[Task(part, tree.name, size) for tree in trees] for size in settings.block_sizes]
        elif part == "facade":
            groups += [[Task(part, OURS_MANAGER.name, size)] for size in settings.block_sizes]
        elif part == "evict":
            groups += [
                [Task(part, tree.name, biggest, n) for tree in trees if tree is OURS_TREE or n <= settings.peer_leaves]
                for n in settings.leaves
            ]
        elif part == "chain":
            groups.append([Task(part, tree.name, biggest) for tree in trees])
        elif part == "lookup":
            groups += [[Task(part, tree.name, biggest, n) for tree in trees] for n in settings.prompts]
        elif part == "admit":
            groups += [[Task(part, manager.name, biggest, n) for manager in managers] for n in settings.prompts]
        elif part == "memory":
            groups.append([Task(part, OURS_MANAGER.name, biggest)])
    return groups


@dataclass
class Measured:
    """All quantities so far: by part and block size, by name, by system; and the peers that are there."""

    peers: tuple[System, ...]
    values: dict[tuple[str, int], dict[str, dict[str, list[dict[str, float]]]]] = field(default_factory=dict)

    def add(self, task: Task, metrics: Metrics) -> None:
        """Takes one repetition of one task."""
        table = self.values.setdefault((task.part, task.block_size), {})
        for name, statistics_of_name in metrics.items():
            table.setdefault(name, {}).setdefault(task.system, []).append(statistics_of_name)

    def tables(self) -> dict[tuple[str, int], dict[str, Metrics]]:
        """By part and block size, by name, by system: medians over the repetitions.

        The facade does what a tree does and more, so its sums stand beside the peers' sums over their tree alone.
        """
        tables = {
            where: {name: {system: _median_of(runs) for system, runs in row.items()} for name, row in table.items()}
            for where, table in self.values.items()
        }
        for (part, block_size), table in tables.items():
            of_trees = tables.get(("workload", block_size), {}).get("Σ per request", {})
            if part == "facade":
                for name in ("Σ without append_token", "Σ per request"):
                    table[name].update(
                        {system: value for system, value in of_trees.items() if system != OURS_TREE.name}
                    )
        return tables


def _median_of(runs: list[dict[str, float]]) -> dict[str, float]:
    return {statistic: statistics.median(run[statistic] for run in runs) for statistic in runs[0]}


def find_peers(
    directories: dict[str, Path], settings: Settings, say: Callable[[str], None]
) -> tuple[dict[str, Task], tuple[System, ...]]:
    """For each peer that can be imported a task that says how to run it, and those peers. `say` gets the others."""
    found: dict[str, Task] = {}
    for peer in PEERS:
        place = directories.get(peer.source)
        own_python = place / "bin" / "python" if place else None
        if own_python is not None and own_python.exists():  # a virtual environment with the peer in it
            how = Task("probe", peer.name, max(settings.block_sizes), python=str(own_python))
        else:
            how = Task("probe", peer.name, max(settings.block_sizes), directory=str(place) if place else None)
        try:
            measure_in_child(how, settings)
        except (NotThere, RuntimeError, OSError) as error:
            say(f"without {peer.name}: {error}")
        else:
            found[peer.name] = how
    return found, tuple(peer for peer in PEERS if peer.name in found)


def run(
    parts: Sequence[str],
    settings: Settings,
    *,
    repeat: int,
    with_peers: bool,
    directories: dict[str, Path],
    say: Callable[[str], None],
) -> Measured:
    """Measures the parts `repeat` times, the systems in turn; `say` gets a line of progress at a time."""
    how, peers = find_peers(directories, settings, say) if with_peers else ({}, ())
    measured = Measured(peers)
    groups = plan(parts, settings, peers)
    total = repeat * sum(map(len, groups))
    number = 0
    for _ in range(repeat):
        for group in groups:
            for task in group:
                number += 1
                size = f", {task.size:,}" if task.size else ""
                say(f"[{number}/{total}] {task.part}, block size {task.block_size}{size}: {task.system}")
                if task.system in how:
                    known = how[task.system]
                    task = replace(task, directory=known.directory, python=known.python)
                measured.add(task, measure_in_child(task, settings))
    return measured


_TITLES = {
    "workload": "The tree alone, µs per call, median/p99",
    "facade": "The whole PrefixCache, µs per call, median/p99 (the peers: their tree alone)",
    "evict": "Evicting 4 blocks of 16 tokens, µs, median/p99",
    "chain": "A path of 400 nodes of 32 tokens, µs, median/p99",
    "lookup": "Looking up a cached prompt, µs, median/p99",
    "admit": "Admitting a fully cached prompt, µs, median/p99",
    "memory": "Memory",
}
_UNITS = {"matched, M tokens/s": "M tokens/s", "hit rate": "share", "bytes per cached token": "bytes"}


def summarize(measured: Measured) -> tuple[list[Table], list[Result]]:
    """Tables for people and results for scripts."""
    tables, results = [], []
    ours_names = (OURS_TREE.name, OURS_MANAGER.name)
    for (part, block_size), rows in measured.tables().items():
        present = [peer.name for peer in measured.peers if any(peer.name in row for row in rows.values())]
        cells = []
        for name, row in rows.items():
            ours = next((row[system] for system in ours_names if system in row), None)
            others = {peer: row[peer] for peer in present if peer in row}
            if ours is None:
                continue  # a call that only the peers make
            unit = _UNITS.get(name, "µs")
            for peer, theirs in others.items() or [(None, None)]:
                more: dict[str, Any] = {"part": part, "block_size": block_size}
                if "p99" in ours:
                    more |= {"ours_p99": ours["p99"], "peer_p99": theirs["p99"] if theirs else None}
                results.append(Result(name, ours["value"], unit, theirs["value"] if theirs else None, peer, more))
            ratios = [_ratio(ours, others.get(peer)) for peer in present]
            cells.append((name, _cell(ours), *(_cell(others.get(peer)) for peer in present), *ratios))
        columns = ("", "radixkv", *present, *(f"ratio to {peer}" for peer in present))
        tables.append(Table(f"{_TITLES[part]}; block size {block_size}", columns, cells))
    return tables, results


def _cell(value: dict[str, float] | None) -> str:
    if value is None:
        return ""
    return "/".join(f"{number:.1f}" if number >= 2 else f"{number:.3g}" for number in value.values())


def _ratio(ours: dict[str, float], theirs: dict[str, float] | None) -> str:
    return f"{ours['value'] / theirs['value']:.2f}" if theirs and theirs["value"] else ""


# ---------------------------------------------------------------- the command line


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `radixkv bench tree`."""
    defaults = Settings()
    parser.add_argument(
        "--requests",
        metavar="N",
        type=positive,
        default=defaults.requests,
        help="of the workload (default: %(default)s)",
    )
    parser.add_argument(
        "--block-sizes",
        metavar="N",
        type=int,
        nargs="+",
        choices=(1, 2, 4, 8, 16, 32),
        default=list(defaults.block_sizes),
        help="tokens a block, 1 to 32; what is measured at one size only takes the biggest (default: 1 16)",
    )
    parser.add_argument(
        "--repeat", metavar="N", type=positive, default=3, help="the median counts (default: %(default)s)"
    )
    parser.add_argument("--only", nargs="+", choices=PARTS, metavar="PART", help=f"measure only: {', '.join(PARTS)}")
    parser.add_argument(
        "--peers",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="measure the peers that can be imported too (default: yes)",
    )
    sources = sorted({peer.source for peer in PEERS})
    parser.add_argument(
        "--peer-path",
        metavar="NAME=DIR",
        action="append",
        default=[],
        type=_peer_path,
        help=f"where a peer's package lies, or a virtual environment that has it; NAME: {', '.join(sources)}",
    )
    parser.add_argument("--json", action="store_true", help="print the JSON object without the tables")


def _peer_path(text: str) -> tuple[str, Path]:
    name, equals, directory = text.partition("=")
    sources = sorted({peer.source for peer in PEERS})
    if not equals or name not in sources:
        raise argparse.ArgumentTypeError(f"{text!r} is not NAME=DIR with NAME one of {', '.join(sources)}")
    path = Path(directory).absolute()
    if not path.is_dir():
        raise argparse.ArgumentTypeError(f"{directory!r} is not a directory")
    return name, path


def run_from_arguments(arguments: argparse.Namespace) -> None:
    """Runs `radixkv bench tree`: progress on stderr, tables and one line of JSON on stdout."""
    settings = Settings(requests=arguments.requests, block_sizes=tuple(dict.fromkeys(arguments.block_sizes)))
    measured = run(
        arguments.only or PARTS,
        settings,
        repeat=arguments.repeat,
        with_peers=arguments.peers,
        directories=dict(arguments.peer_path),
        say=lambda line: print(line, file=sys.stderr, flush=True),
    )
    tables, results = summarize(measured)
    print_report("tree", tables, results, only_json=arguments.json)


if __name__ == "__main__":
    worker(sys.argv[1])

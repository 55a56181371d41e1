"""`radixkv simulate`: what would prefix caching do for this traffic? Imports no torch.

Each question is a call of `radixkv.sim` (or, for preemption, of `engine.pressure`) and gives records; this module turns
options into calls, and records into tables, JSON, CSV and plots.
"""

from __future__ import annotations

import argparse
import csv
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from engine.arguments import positive
from engine.bench.report import Table, print_table
from engine.plots import Findings, draw
from engine.pressure import preemption_pressure
from radixkv import workloads
from radixkv.baselines import ALLOCATORS
from radixkv.eviction import POLICIES
from radixkv.sim import (
    CostModel,
    MemoryUse,
    Replay,
    ServiceTimes,
    block_size_sweep,
    capacity_sweep,
    concurrency,
    curve_error,
    exact_curve,
    hit_sources,
    hits_by,
    hits_by_turn,
    memory_over_time,
    optimum,
    replay,
    sampled_curve,
    ttft_estimate,
)
from radixkv.traces import FORMATS, Trace, load, write

NOT_AVAILABLE = "not available"

EXAMPLES = """\
  radixkv simulate trace.jsonl.gz                                  what an infinite cache would hit
  radixkv simulate trace.jsonl.gz --num-blocks 1000 10000 --policy lru lfu optimal --by-turn
  radixkv simulate trace.jsonl.gz --sweep --plot sweep.png         every policy at six capacities, and its regret
  radixkv simulate trace.jsonl.gz --curve --plot curve.png         LRU at every capacity, in one pass
  radixkv simulate trace.csv --memory --num-blocks 20000           slot, paged, hash and radix under one memory
  radixkv simulate --generate chat --set num_conversations=200 --block-sizes 1 16 64 --cache-outputs
  radixkv simulate trace.jsonl --costs --link host=25 --link disk=5 --json"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `radixkv simulate`."""
    what = parser.add_argument_group("the traffic")
    what.add_argument("trace", metavar="TRACE", nargs="?", help="a trace file or folder, plain or gzipped")
    what.add_argument("--format", choices=FORMATS, default="auto", help="of the trace (default: %(default)s)")
    what.add_argument("--limit", metavar="N", type=positive, help="read the first N requests only")
    what.add_argument("--skip-bad", action="store_true", help="pass over malformed rows, and count them")
    what.add_argument("--round-robin", action="store_true", help="request 1 of every conversation, then request 2, ...")
    what.add_argument(
        "--generate", metavar="NAME", choices=workloads.GENERATORS, help=f"instead of a trace: {_names()}"
    )
    what.add_argument(
        "--set", metavar="KEY=VALUE", action="append", default=[], help="a parameter of the generator; may be repeated"
    )
    what.add_argument("--seed", metavar="N", type=int, default=0, help="of the generator (default: 0)")
    what.add_argument("--write", metavar="FILE", type=Path, help="write what was read or generated as a trace file")

    cache = parser.add_argument_group("the cache")
    cache.add_argument(
        "--allocator",
        nargs="+",
        choices=ALLOCATORS,
        help="radix, hash, paged, slot (default: radix; with --memory all)",
    )
    cache.add_argument(
        "--policy",
        nargs="+",
        choices=(*POLICIES, "optimal", "all"),
        default=["lru"],
        metavar="POLICY",
        help=f"{', '.join(POLICIES)}, optimal (what no policy can beat), or all (default: lru)",
    )
    cache.add_argument("--num-blocks", metavar="N", type=_capacity, nargs="+", help="capacities (default: inf)")
    cache.add_argument("--block-size", metavar="N", type=positive, help="tokens a block (default: the trace's own)")
    cache.add_argument(
        "--token-exact", action="store_true", help="hits that go on into a block, as the engine has them"
    )
    cache.add_argument(
        "--cache-outputs", action="store_true", help="outputs are cached too, where the trace tells them"
    )
    cache.add_argument("--per-worker", action="store_true", help="a cache for each worker that the trace names")
    cache.add_argument(
        "--visible",
        choices=("arrival", "prefill", "finish"),
        help="with time passing: from when on a request's blocks are found (default: no time passes)",
    )
    cache.add_argument("--warmup", metavar="SHARE", type=float, default=0.0, help="of the requests, not counted")

    ask = parser.add_argument_group("questions (default: the hit rate)")
    ask.add_argument("--by-turn", action="store_true", help="hit rate by turn number")
    ask.add_argument("--by-tenant", action="store_true", help="hit rate by tenant")
    ask.add_argument("--per-request", action="store_true", help="hit blocks of each request, in JSON")
    ask.add_argument("--sources", action="store_true", help="hits within a conversation against across")
    ask.add_argument(
        "--sweep", action="store_true", help="every policy at several capacities, and regret to the optimum"
    )
    ask.add_argument("--curve", action="store_true", help="LRU at every capacity: the miss-ratio curve, exact")
    ask.add_argument("--sample", metavar="RATE", type=float, help="the curve from a share of the conversations too")
    ask.add_argument("--block-sizes", metavar="N", type=positive, nargs="+", help="compare block sizes")
    ask.add_argument("--memory", action="store_true", help="memory over time by allocator; with --num-blocks, who fits")
    ask.add_argument("--preemption", action="store_true", help="wasted work by policy; needs --num-blocks")
    ask.add_argument("--costs", action="store_true", help="recompute against restore, and time to first token")

    model = parser.add_argument_group("model of time")
    model.add_argument("--tpot", metavar="S", type=float, default=0.05, help="seconds per output token (default: 0.05)")
    model.add_argument(
        "--prefill", metavar="N", type=float, default=10_000.0, help="tokens/s of prefill (default: 10000)"
    )
    model.add_argument("--kv-bytes", metavar="N", type=positive, default=131_072, help="of K and V a token")
    model.add_argument(
        "--link", metavar="NAME=GB/S", action="append", type=_link, help="where KV may lie (default: host, disk)"
    )

    out = parser.add_argument_group("output")
    out.add_argument("--json", action="store_true", help="print one JSON object instead of tables")
    out.add_argument("--csv", metavar="FILE", type=Path, help="write the records of the last table")
    out.add_argument("--plot", metavar="FILE", type=Path, help="draw it: .png, .svg or .pdf (needs matplotlib)")


def _names() -> str:
    return ", ".join(workloads.GENERATORS)


def _capacity(text: str) -> int | None:
    return None if text in ("inf", "infinite") else positive(text)


def _link(text: str) -> tuple[str, float]:
    name, _, speed = text.partition("=")
    try:
        return name, float(speed)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not NAME=GB/S, such as host=25") from None


# ---------------------------------------------------------------- answers


@dataclass
class Answers:
    """What was asked: records for scripts, tables for people, findings for a plot."""

    results: list[dict[str, Any]] = field(default_factory=list)
    more: dict[str, Any] = field(default_factory=dict)
    tables: list[Table] = field(default_factory=list)
    definitions: list[str] = field(default_factory=list)
    rows: list[dict[str, Any]] = field(default_factory=list)
    findings: Findings = field(default_factory=Findings)

    def add(self, name: str, title: str, columns: dict[str, str], records: list[dict[str, Any]]) -> None:
        """A table of records, one column for each field that is named, and the records under `name` in JSON."""
        cells = [tuple(_cell(key, record.get(key)) for key in columns) for record in records]
        self.tables.append(Table(title, tuple(columns.values()), cells))
        self.rows = records
        if name != "results":
            self.more[name] = records
        definition = records[0].get("definition") if records else None
        if definition and definition not in self.definitions:
            self.definitions.append(definition)


def _cell(name: str, value: Any) -> str:
    """A value as a person reads it."""
    if value is None:
        return "infinite" if name == "num_blocks" else NOT_AVAILABLE
    if name.endswith(("rate", "regret", "gap", "share", "ratio", "fragmentation", "error")) and value != "":
        return f"{value:.2%}"
    if isinstance(value, float):
        return f"{value:,.3f}" if abs(value) < 100 else f"{value:,.1f}"
    return f"{value:,}" if isinstance(value, int) else str(value)


def answer(trace: Trace, arguments: argparse.Namespace, progress: Progress) -> Answers:
    """All that was asked about a trace."""
    answers = Answers()
    others = ("sources", "sweep", "curve", "block_sizes", "preemption", "costs")
    wants_others = arguments.sample is not None or any(getattr(arguments, name) for name in others)
    about_requests = ("by_turn", "by_tenant", "per_request", "memory")
    if not wants_others or any(getattr(arguments, name) for name in about_requests):
        _replays(trace, arguments, progress, answers)
    if arguments.sources:
        with progress("hits by source"):
            sources = hit_sources(trace, block_size=arguments.block_size, warmup=arguments.warmup)
        answers.findings.sources.append(sources)
        columns = {"requests": "requests", "total_tokens": "tokens", "within_rate": "within", "across_rate": "across"}
        answers.add("sources", "Hits within a conversation and across", columns, [sources.as_dict()])
    if arguments.sweep:
        _sweep(trace, arguments, progress, answers)
    if arguments.curve or arguments.sample is not None:
        _curve(trace, arguments, progress, answers)
    if arguments.block_sizes:
        _block_sizes(trace, arguments, progress, answers)
    if answers.findings.memory:
        _memory(answers)
    if arguments.preemption:
        _preemption(trace, arguments, progress, answers)
    if arguments.costs:
        _costs(trace, arguments, progress, answers)
    return answers


def _allocators(arguments: argparse.Namespace) -> list[str]:
    """Those that were named; for a comparison of memory all, unless some were."""
    if arguments.allocator is None:
        return list(ALLOCATORS) if arguments.memory else ["radix"]
    return list(dict.fromkeys(arguments.allocator))


def _policies(arguments: argparse.Namespace) -> list[str]:
    return [*POLICIES, "optimal"] if "all" in arguments.policy else list(dict.fromkeys(arguments.policy))


def _service(arguments: argparse.Namespace) -> ServiceTimes | None:
    return None if arguments.visible is None else ServiceTimes(arguments.prefill, arguments.tpot)


def _one_replay(
    trace: Trace, arguments: argparse.Namespace, allocator: str, policy: str, num_blocks: int | None, progress: Any
) -> Replay:
    if policy == "optimal":
        for option in ("cache_outputs", "token_exact", "visible", "per_worker"):
            if getattr(arguments, option):
                raise ValueError(f"--policy optimal does not go with --{option.replace('_', '-')}")
        return optimum(
            trace, num_blocks=num_blocks, block_size=arguments.block_size, warmup=arguments.warmup, progress=progress
        )
    return replay(
        trace,
        allocator=allocator,  # type: ignore[arg-type]
        policy=policy,
        num_blocks=num_blocks,
        block_size=arguments.block_size,
        token_exact=arguments.token_exact,
        warmup=arguments.warmup,
        cache_outputs=arguments.cache_outputs,
        visible=arguments.visible or "finish",
        service=_service(arguments),
        per_worker=arguments.per_worker,
        progress=progress,
    )


def _replays(trace: Trace, arguments: argparse.Namespace, progress: Progress, answers: Answers) -> None:
    uses: dict[tuple[str, int | None], MemoryUse] = {}  # the same for all policies

    def memory_use(allocator: str, num_blocks: int | None) -> MemoryUse:
        if (allocator, num_blocks) not in uses:
            uses[allocator, num_blocks] = _memory_use(trace, allocator, num_blocks, arguments, progress)
        return uses[allocator, num_blocks]

    for allocator in _allocators(arguments):
        for policy in _policies(arguments) if allocator == "radix" else ["lru"] if allocator == "hash" else [None]:
            for num_blocks in arguments.num_blocks or [None]:
                if policy is None:
                    answers.results.append(
                        _without_cache(trace, allocator, num_blocks, memory_use(allocator, num_blocks))
                    )
                    continue
                with progress(f"{allocator}, {policy}, {_cell('num_blocks', num_blocks)} blocks") as report:
                    result = _one_replay(trace, arguments, allocator, policy, num_blocks, report)
                record = result.as_dict(per_request=arguments.per_request)
                if arguments.memory:
                    record["memory"] = memory_use(allocator, num_blocks).as_dict()
                answers.findings.replays.append(result)
                if arguments.by_turn:
                    turns = hits_by_turn(trace.requests, result)
                    record["by_turn"] = [group.as_dict() for group in turns]
                    answers.findings.by_turn.append((result, turns))
                if arguments.by_tenant:
                    tenants = hits_by("tenant", lambda request: request.tenant, trace.requests, result)
                    record["by_tenant"] = [group.as_dict() for group in tenants]
                answers.results.append(record)
    answers.findings.memory = list(uses.values())
    columns = {
        "allocator": "allocator",
        "policy": "policy",
        "num_blocks": "blocks",
        "requests": "requests",
        "block_hit_rate": "block hit rate",
        "token_hit_rate": "token hit rate",
        "evicted_blocks": "evicted",
        "seconds": "seconds",
    }
    answers.add("results", f"{trace.name}: {len(trace.requests):,} requests", columns, answers.results)
    for key, title in (("by_turn", "By turn"), ("by_tenant", "By tenant")):
        rows = [
            {"allocator": r["allocator"], "policy": r["policy"], "num_blocks": r["num_blocks"], **group}
            for r in answers.results
            for group in r.get(key, ())
        ]
        if rows:
            value = key.removeprefix("by_")
            columns = {"allocator": "allocator", "policy": "policy", "num_blocks": "blocks", value: value}
            columns |= {"requests": "requests", "total_tokens": "tokens", "token_hit_rate": "token hit rate"}
            answers.tables.append(
                Table(title, tuple(columns.values()), [tuple(_cell(c, row.get(c)) for c in columns) for row in rows])
            )
            answers.rows = rows
        elif getattr(arguments, key):
            answers.tables.append(Table(f"{title}: {NOT_AVAILABLE}, the trace does not tell", (), []))


def _without_cache(trace: Trace, allocator: str, num_blocks: int | None, use: MemoryUse) -> dict[str, Any]:
    """A slot or paged allocator finds nothing again; what it is asked for is memory."""
    total = sum(request.num_prompt_tokens for request in trace.requests)
    return {
        "allocator": allocator,
        "policy": None,
        "num_blocks": num_blocks,
        "requests": len(trace.requests),
        "total_blocks": None,
        "hit_blocks": 0,
        "block_hit_rate": 0.0,
        "total_tokens": total,
        "hit_tokens": 0,
        "token_hit_rate": 0.0,
        "evicted_blocks": 0,
        "seconds": use.seconds,
        "definition": use.definition,
        "memory": use.as_dict(),
    }


def _memory_use(
    trace: Trace, allocator: str, num_blocks: int | None, arguments: argparse.Namespace, progress: Progress
) -> MemoryUse:
    with progress(f"memory, {allocator}") as report:
        options: dict[str, Any] = {"block_size": arguments.block_size, "tpot_s": arguments.tpot, "progress": report}
        if num_blocks is None:
            return memory_over_time(trace, allocator, **options)
        return concurrency(trace, allocator, num_blocks, **options)


def _sweep(trace: Trace, arguments: argparse.Namespace, progress: Progress, answers: Answers) -> None:
    policies = [policy for policy in _policies(arguments) if policy != "optimal"]
    if arguments.policy == ["lru"]:
        policies = list(POLICIES)
    capacities = [n for n in arguments.num_blocks or () if n is not None] or None
    with progress("policies at each capacity") as report:
        answers.findings.sweep = capacity_sweep(
            trace,
            capacities,
            policies,
            block_size=arguments.block_size,
            warmup=arguments.warmup,
            progress=report,
        )
    columns = {
        "policy": "policy",
        "num_blocks": "blocks",
        "block_hit_rate": "block hit rate",
        "token_hit_rate": "token hit rate",
        "regret": "regret to the optimum",
        "capacity_gap": "optimum to infinite",
    }
    answers.add(
        "sweep", "Is it the policy or the capacity?", columns, [point.as_dict() for point in answers.findings.sweep]
    )


def _curve(trace: Trace, arguments: argparse.Namespace, progress: Progress, answers: Answers) -> None:
    options: dict[str, Any] = {"block_size": arguments.block_size, "warmup": arguments.warmup}
    with progress("miss-ratio curve"):
        answers.findings.curves.append(exact_curve(trace, **options))
        if arguments.sample is not None:
            answers.findings.curves.append(sampled_curve(trace, arguments.sample, **options))
    exact = answers.findings.curves[0]
    capacities = exact.capacities(16)
    rows = []
    for num_blocks in capacities:
        row = {"num_blocks": num_blocks, "miss_ratio": exact.miss_ratio(num_blocks), "definition": exact.definition}
        row["token_hit_rate"] = exact.token_hit_rate(num_blocks)
        if arguments.sample is not None:
            row["sampled_miss_ratio"] = answers.findings.curves[1].miss_ratio(num_blocks)
        rows.append(row)
    columns = {"num_blocks": "blocks", "miss_ratio": "miss ratio", "token_hit_rate": "token hit rate"}
    if arguments.sample is not None:
        columns["sampled_miss_ratio"] = "sampled"
    answers.add("curve", f"LRU at every capacity, in {exact.seconds:.2f} s", columns, rows)
    answers.more["curve"] = exact.as_dict()
    if arguments.sample is not None:
        error = curve_error(answers.findings.curves[1], exact).as_dict()
        answers.more["sampled_curve"] = {**answers.findings.curves[1].as_dict(), "error": error}
        columns = {"sampling_rate": "rate", "mean_error": "mean error", "largest_error": "largest error"}
        answers.tables.append(
            Table("The sample's error", tuple(columns.values()), [tuple(_cell(c, error[c]) for c in columns)])
        )


def _block_sizes(trace: Trace, arguments: argparse.Namespace, progress: Progress, answers: Answers) -> None:
    num_tokens = None
    if arguments.num_blocks and arguments.num_blocks[0] is not None:
        num_tokens = arguments.num_blocks[0] * (arguments.block_size or trace.block_size or 16)
    with progress("block sizes") as report:
        answers.findings.block_sizes = block_size_sweep(
            trace,
            arguments.block_sizes,
            num_tokens=num_tokens,
            policy=next((policy for policy in _policies(arguments) if policy != "optimal"), "lru"),
            cache_outputs=arguments.cache_outputs,
            progress=report,
        )
    columns = {
        "block_size": "block size",
        "num_blocks": "blocks",
        "fragmentation": "fragmentation",
        "table_entries": "table entries",
        "token_hit_rate": "hit rate, whole blocks",
        "exact_hit_rate": "hit rate, exact",
    }
    answers.add("block_sizes", "Block sizes", columns, [point.as_dict() for point in answers.findings.block_sizes])


def _memory(answers: Answers) -> None:
    columns = {
        "allocator": "allocator",
        "num_blocks": "pool",
        "peak_running": "peak running",
        "mean_running": "mean running",
        "peak_tokens": "peak slots",
        "mean_tokens": "mean slots",
        "mean_wasted": "mean wasted",
        "fragmentation": "fragmentation",
        "mean_wait_s": "mean wait s",
        "num_refused": "refused",
    }
    records = [use.as_dict(with_course=True) for use in answers.findings.memory]
    answers.add("memory", "Memory and concurrency", columns, records)


def _preemption(trace: Trace, arguments: argparse.Namespace, progress: Progress, answers: Answers) -> None:
    if not arguments.num_blocks or arguments.num_blocks[0] is None:
        raise ValueError("--preemption needs --num-blocks: without a limit nobody is preempted")
    with progress("preemption") as report:
        answers.findings.preemption = preemption_pressure(
            trace, arguments.num_blocks[0], block_size=arguments.block_size, progress=report
        )
    columns = {
        "victim": "victim",
        "preemption": "way back",
        "preemptions": "preempted",
        "recomputed_tokens": "computed again",
        "wasted_share": "of all",
        "swapped_tokens": "tokens swapped",
        "finish_s": "finish s",
        "mean_ttft_s": "mean TTFT s",
        "longest_wait_s": "longest wait s",
    }
    answers.add(
        "preemption", "Preemption under pressure", columns, [result.as_dict() for result in answers.findings.preemption]
    )


def _costs(trace: Trace, arguments: argparse.Namespace, progress: Progress, answers: Answers) -> None:
    options: dict[str, Any] = {"links": dict(arguments.link)} if arguments.link else {}
    model = CostModel(prefill_tokens_per_s=arguments.prefill, kv_bytes_per_token=arguments.kv_bytes, **options)
    policy = next((policy for policy in _policies(arguments) if policy != "optimal"), "lru")
    num_blocks = arguments.num_blocks[0] if arguments.num_blocks else None
    with progress("hits") as report:
        answers.findings.costs = ttft_estimate(
            trace, _one_replay(trace, arguments, "radix", policy, num_blocks, report), model
        )
    columns = {
        "place": "hits lie",
        "mean_ttft_s": "mean TTFT s",
        "median_ttft_s": "median s",
        "p99_ttft_s": "p99 s",
        "total_s": "total s",
        "restored_requests": "restored",
        "break_even_tokens": "worth it from tokens",
    }
    title = "Recompute or restore, and time to first token"
    if answers.findings.costs:
        answers.add("costs", title, columns, [point.as_dict() for point in answers.findings.costs])
    else:
        answers.more["costs"] = []
        answers.tables.append(Table(f"{title}: {NOT_AVAILABLE}, the trace does not tell what is shared", (), []))


# ---------------------------------------------------------------- the command

Progress = Callable[[str], Any]


@contextmanager
def _bar(title: str) -> Iterator[Callable[[int, int], None] | None]:
    """A bar on stderr, where that is a terminal and rich is installed."""
    if not sys.stderr.isatty():
        yield None
        return
    try:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
        from rich.progress import Progress as RichProgress
    except ModuleNotFoundError:
        yield None
        return
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with RichProgress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task(title, total=None)
        yield lambda done, total: progress.update(task, completed=done, total=total)


def _trace(arguments: argparse.Namespace) -> Trace:
    if (arguments.trace is None) == (arguments.generate is None):
        raise ValueError("give either a trace or --generate")
    if arguments.generate is not None:
        with _bar(f"generating {arguments.generate}"):
            trace = workloads.generate(arguments.generate, arguments.seed, **_parameters(arguments.set))
    else:
        if arguments.set:
            raise ValueError("--set belongs to --generate")
        with _bar("reading") as report:
            trace = load(
                arguments.trace,
                arguments.format,
                skip_bad=arguments.skip_bad,
                limit=arguments.limit,
                progress=report,
            )
    return trace.round_robin() if arguments.round_robin else trace


def _parameters(pairs: Sequence[str]) -> dict[str, int | float]:
    parameters: dict[str, int | float] = {}
    for pair in pairs:
        name, _, value = pair.partition("=")
        try:
            parameters[name] = int(value)
        except ValueError:
            try:
                parameters[name] = float(value)
            except ValueError:
                raise ValueError(f"--set {pair!r}: KEY=VALUE with a number is needed") from None
    return parameters


def run_from_arguments(arguments: argparse.Namespace) -> None:
    """Runs `radixkv simulate`."""
    trace = _trace(arguments)
    if arguments.write is not None:
        write(trace, arguments.write)
        print(f"wrote {len(trace.requests):,} requests to {arguments.write}", file=sys.stderr)
    if trace.num_skipped:
        print(f"skipped {trace.num_skipped:,} bad rows", file=sys.stderr)
    answers = answer(trace, arguments, _bar)
    if arguments.plot is not None:
        draw(answers.findings, trace.name, arguments.plot)
        print(f"drew {arguments.plot}", file=sys.stderr)
    if arguments.csv is not None:
        _write_csv(answers.rows, arguments.csv)
        print(f"wrote {arguments.csv}", file=sys.stderr)
    definition = "; ".join([trace.definition, *answers.definitions])
    if arguments.json:
        document = {
            "trace": trace.name,
            "format": trace.format,
            "num_skipped": trace.num_skipped,
            "definition": definition,
            "results": answers.results,
            **answers.more,
        }
        print(json.dumps(document, ensure_ascii=False))
        return
    for table in answers.tables:
        print_table(table, sys.stdout)
    print(f"\nDefinition: {definition}.")


def _write_csv(rows: Sequence[dict[str, Any]], path: Path) -> None:
    """The records, one a line; lists and tables inside a record are left out."""
    names = [name for name, value in rows[0].items() if not isinstance(value, (list, dict))] if rows else []
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, names, extrasaction="ignore")
        writer.writeheader()
        writer.writerows(rows)

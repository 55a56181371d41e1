"""The scheduler under pressure: what preemption wastes, and what the order of admission is worth.

The real scheduler and the real cache on a clock of their own: a model of time stands in for the forward pass, by
default that of an 8-billion-parameter model on a data-centre GPU (`engine.timed.TimeModel`). So the numbers do not
depend on the machine they are made on, and the same seeds give them again.

    preemption   a heavy-tailed load (log-normal prompts and outputs, half of them short, a few of thousands of tokens)
                 in a pool of about a third of what it could use: who gives way (`victim`) and how it comes back
    order        a load whose prompts share long starts (Zipf over 60 of them, of which the pool holds a third) beside
                 prompts that share nothing: "fcfs" against "longest-prefix"

Wasted are tokens whose KV had to be computed again, and bytes copied to host memory and back. The ceiling is a pool
that holds everything: it preempts nobody and evicts nothing, and stands in the first row of each table.

The median over the seeds counts.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from engine.arguments import positive
from engine.bench.report import Result, Table, print_report
from engine.config import PREEMPTIONS, VICTIMS, EngineConfig
from engine.request import Request
from engine.timed import run_timed, timed_request
from radixkv import PrefixCache, TokenKey

PARTS = ("preemption", "order")
BLOCK_SIZE = 16


@dataclass(frozen=True)
class Settings:
    """Sizes of the two loads."""

    requests: int = 400
    longest: int = 4_000  # tokens of a heavy-tailed prompt, and of an output
    seeds: tuple[int, ...] = (1, 2, 3)
    max_num_seqs: int = 128
    max_num_batched_tokens: int = 2048
    preemption_blocks: int = 700
    order_blocks: int = 3_500
    max_overtakes: int = 32


# ---------------------------------------------------------------- the loads


def heavy_tailed(settings: Settings, seed: int) -> Iterator[Request]:
    """Poisson arrivals, ten a second; prompts of median 150 tokens, outputs of median 120, both with a long tail."""
    draw = random.Random(f"heavy-tailed/{seed}")
    arrival_s = 0.0
    for number in range(settings.requests):
        arrival_s += draw.expovariate(10.0)
        num_prompt = min(settings.longest, max(4, int(draw.lognormvariate(5.0, 1.2))))
        num_output = min(settings.longest, max(1, int(draw.lognormvariate(4.8, 1.3))))
        key = TokenKey([draw.randrange(32_000) for _ in range(num_prompt)])
        yield timed_request(str(number), key, num_output, arrival_s)


def shared_starts(settings: Settings, seed: int) -> Iterator[Request]:
    """Poisson arrivals, sixteen a second; four of five prompts start with one of 60 texts of 1,000 to 4,000 tokens."""
    draw = random.Random(f"shared-starts/{seed}")
    starts = [[draw.randrange(32_000) for _ in range(draw.randrange(1_000, 4_000))] for _ in range(60)]
    weights = [1 / (rank + 1) for rank in range(len(starts))]
    arrival_s = 0.0
    for number in range(settings.requests):
        arrival_s += draw.expovariate(16.0)
        start = draw.choices(starts, weights)[0] if draw.random() < 0.8 else []
        rest = [draw.randrange(32_000) for _ in range(draw.randrange(40, 400))]
        yield timed_request(str(number), TokenKey(start + rest), draw.randrange(20, 200), arrival_s)


# ---------------------------------------------------------------- one run


def measure(load: Callable[[Settings, int], Iterator[Request]], settings: Settings, config: EngineConfig) -> Outcome:
    """The median over the seeds of each quantity."""
    runs = [_measure_once(list(load(settings, seed)), config) for seed in settings.seeds]
    names = Outcome.__dataclass_fields__
    return Outcome(**{name: statistics.median(getattr(run, name) for run in runs) for name in names})


@dataclass(frozen=True)
class Outcome:
    """What one run gave."""

    preemptions: float
    recomputed_tokens: float
    computed_tokens: float
    swapped_mib: float
    finish_s: float
    hit_rate: float
    mean_ttft_s: float
    p99_ttft_s: float
    longest_wait_s: float
    p99_total_s: float


def _measure_once(requests: list[Request], config: EngineConfig) -> Outcome:
    cache = PrefixCache(config.num_blocks, config.block_size, config.policy)
    core = run_timed(requests, config, cache)
    metrics = core.metrics()
    counters = metrics.counters
    ttfts_s = sorted(_known(request.first_token_s) - request.arrival_s for request in requests)
    totals_s = sorted(_known(request.finished_s) - request.arrival_s for request in requests)
    return Outcome(
        preemptions=counters.preemptions.total(),
        recomputed_tokens=counters.recomputed_tokens,
        computed_tokens=counters.prefill_tokens + counters.decode_tokens,
        swapped_mib=(metrics.swapped_out_bytes + metrics.swapped_in_bytes) / 2**20,
        finish_s=core.scheduler.clock(),
        hit_rate=metrics.token_hit_rate or 0.0,
        mean_ttft_s=statistics.fmean(ttfts_s),
        p99_ttft_s=_p99(ttfts_s),
        longest_wait_s=max(_known(request.scheduled_s) - request.arrival_s for request in requests),
        p99_total_s=_p99(totals_s),
    )


def _known(time_s: float | None) -> float:
    assert time_s is not None, "every request has run to its end"
    return time_s


def _p99(ascending: Sequence[float]) -> float:
    return ascending[min(len(ascending) - 1, int(0.99 * len(ascending)))]


# ---------------------------------------------------------------- the two comparisons


def _config(settings: Settings, num_blocks: int) -> EngineConfig:
    return EngineConfig(
        block_size=BLOCK_SIZE,
        num_blocks=num_blocks,
        max_model_len=32_768,
        max_num_seqs=settings.max_num_seqs,
        max_num_batched_tokens=settings.max_num_batched_tokens,
        max_overtakes=settings.max_overtakes,
    )


def _preemption(settings: Settings, say: Callable[[str], None]) -> tuple[list[Table], list[Result]]:
    base = _config(settings, settings.preemption_blocks)
    rows, results = [], []
    for is_caching in (True, False):
        cases = [("no pressure", replace(base, num_blocks=100_000, enable_prefix_caching=is_caching))]
        cases += [
            (
                f"{victim}, {preemption}",
                replace(
                    base,
                    victim=victim,
                    preemption=preemption,
                    num_swap_blocks=100_000 if preemption == "swap" else 0,
                    enable_prefix_caching=is_caching,
                ),
            )
            for victim in VICTIMS
            for preemption in PREEMPTIONS
        ]
        for name, config in cases:
            name = f"{name}, cache {'on' if is_caching else 'off'}"
            say(f"preemption: {name}")
            outcome = measure(heavy_tailed, settings, config)
            rows.append(
                (
                    name,
                    f"{outcome.preemptions:,.0f}",
                    f"{outcome.recomputed_tokens:,.0f}",
                    f"{outcome.recomputed_tokens / outcome.computed_tokens:.1%}",
                    f"{outcome.swapped_mib:,.0f}",
                    f"{outcome.finish_s:.1f}",
                    f"{outcome.mean_ttft_s:.2f}",
                    f"{outcome.p99_ttft_s:.2f}",
                    f"{outcome.p99_total_s:.1f}",
                )
            )
            results.append(Result(f"preemption, {name}: finish", outcome.finish_s, "s", more=_more(outcome)))
    columns = (
        "victim, way back, cache", "preempted", "computed again", "of all", "MiB swapped", "finish s", "mean TTFT s",
        "p99 TTFT s", "p99 total s",
    )  # fmt: skip
    title = f"Heavy-tailed load: {settings.requests} requests, {settings.preemption_blocks:,} blocks of {BLOCK_SIZE}"
    return [Table(title, columns, rows)], results


def _order(settings: Settings, say: Callable[[str], None]) -> tuple[list[Table], list[Result]]:
    base = _config(settings, settings.order_blocks)
    cases = [
        ("fcfs, all fits", replace(base, num_blocks=100_000)),
        ("fcfs", base),
        ("longest-prefix", replace(base, order="longest-prefix")),
        ("longest-prefix, no bound", replace(base, order="longest-prefix", max_overtakes=10**9)),
    ]
    rows, outcomes = [], {}
    for name, config in cases:
        say(f"order: {name}")
        outcome = outcomes[name] = measure(shared_starts, settings, config)
        rows.append(
            (
                name,
                f"{outcome.hit_rate:.1%}",
                f"{outcome.mean_ttft_s:.2f}",
                f"{outcome.p99_ttft_s:.2f}",
                f"{outcome.longest_wait_s:.2f}",
                f"{outcome.finish_s:.1f}",
                f"{outcome.preemptions:,.0f}",
            )
        )
    fcfs, longest = outcomes["fcfs"], outcomes["longest-prefix"]
    results = [
        Result(f"order: {quantity}", getattr(longest, quantity), unit, getattr(fcfs, quantity), "fcfs", _more(longest))
        for quantity, unit in (
            ("hit_rate", "share"),
            ("mean_ttft_s", "s"),
            ("p99_ttft_s", "s"),
            ("longest_wait_s", "s"),
        )
    ]
    columns = ("order", "hit rate", "mean TTFT s", "p99 TTFT s", "longest wait s", "finish s", "preempted")
    title = (
        f"Shared starts: {settings.requests} requests, {settings.order_blocks:,} blocks of {BLOCK_SIZE}, at most "
        f"{settings.max_overtakes} overtakes"
    )
    return [Table(title, columns, rows)], results


def _more(outcome: Outcome) -> dict[str, float]:
    return {name: getattr(outcome, name) for name in Outcome.__dataclass_fields__}


# ---------------------------------------------------------------- command line


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `radixkv bench scheduler`."""
    defaults = Settings()
    parser.add_argument(
        "--requests", metavar="N", type=positive, default=defaults.requests, help="in each load (default: %(default)s)"
    )
    parser.add_argument(
        "--seeds",
        metavar="N",
        type=int,
        nargs="+",
        default=list(defaults.seeds),
        help="of the loads; the median counts (default: 1 2 3)",
    )
    parser.add_argument("--only", nargs="+", choices=PARTS, metavar="PART", help=f"measure only: {', '.join(PARTS)}")
    parser.add_argument("--json", action="store_true", help="print the JSON object without the tables")


def run_from_arguments(arguments: argparse.Namespace) -> None:
    """Runs `radixkv bench scheduler`: progress on stderr, tables and one line of JSON on stdout."""
    settings = Settings(requests=arguments.requests, seeds=tuple(dict.fromkeys(arguments.seeds)))
    tables: list[Table] = []
    results: list[Result] = []
    parts = {"preemption": _preemption, "order": _order}
    for part in arguments.only or PARTS:
        more_tables, more_results = parts[part](settings, lambda line: print(line, file=sys.stderr, flush=True))
        tables += more_tables
        results += more_results
    print_report("scheduler", tables, results, only_json=arguments.json)

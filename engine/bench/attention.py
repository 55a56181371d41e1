"""Attention in one layer of a step: what rows share read once, beside each row reading for itself.

What is measured, in µs on the CPU clock of one thread, median of rounds in which the ways take turns, each round over
several layers so that keys come from memory as they do in a model:

    gather and attend   for each request: its slots gathered, then scaled-dot-product attention
    by row              `attention="gather"`: the same, but contiguous runs are views, and gathers reuse their room
    tree                `attention="tree"`: shared nodes once for all rows below, wherever there are any
    auto                `attention="auto"`: as the cost model says; what the engine does unless told otherwise

All of them write the new keys and values first. Cases: one prompt of 1k tokens continued 2 to 64 times, rows that share
nothing, a system prompt with forked conversations below it, a prefill chunk behind a shared prompt; each with
contiguous and with scattered runs. Beside each time stands what the cost model predicts, and what building the batch
and the plan takes, once for all layers of a step.

The floor: the bytes of the distinct keys and values over the memory's rate, or the products over the rate of a matrix
product, whichever takes longer; both rates are measured first.

    constants   the constants of the cost model, as they are in use and as this machine has them
    pool        how contiguous tables stay while requests come, grow and go: the share of neighbours in a table whose
                ids ascend by one, and of tables that are one run, with room between runs and without
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import dataclass

from engine.arguments import positive
from engine.bench.report import print_report

PARTS = ("cases", "constants", "pool")
DTYPES = ("bfloat16", "float32")


@dataclass(frozen=True)
class Heads:
    """The shape of a layer: query heads, KV heads, and the width of each."""

    num_heads: int
    num_kv_heads: int
    dim: int

    def __str__(self) -> str:
        return f"{self.num_heads}/{self.num_kv_heads}x{self.dim}"


@dataclass(frozen=True)
class Settings:
    """Sizes of everything that is measured."""

    heads: tuple[Heads, ...] = (Heads(9, 3, 64),)
    dtypes: tuple[str, ...] = ("float32", "bfloat16")
    prompt: int = 1024  # tokens that are shared
    rounds: int = 9
    num_layers: int = 4  # whose keys do not stay in a core's cache from one round to the next
    churn_steps: int = 800
    stream_bytes: int = 2**28  # read to measure the memory's rate


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `radixkv bench attention`."""
    defaults = Settings()
    parser.add_argument(
        "--heads",
        metavar="H/KxD",
        type=_heads,
        nargs="+",
        default=list(defaults.heads),
        help="query heads / KV heads x width, such as 32/8x128 (default: 9/3x64)",
    )
    parser.add_argument("--dtypes", nargs="+", choices=DTYPES, default=list(defaults.dtypes), help="(default: both)")
    parser.add_argument(
        "--prompt",
        metavar="N",
        type=positive,
        default=defaults.prompt,
        help="tokens of the shared prompt, 64 and more; the others follow it (default: %(default)s)",
    )
    parser.add_argument(
        "--rounds",
        metavar="N",
        type=positive,
        default=defaults.rounds,
        help="the median counts (default: %(default)s)",
    )
    parser.add_argument("--only", nargs="+", choices=PARTS, metavar="PART", help=f"measure only: {', '.join(PARTS)}")
    parser.add_argument("--json", action="store_true", help="print the JSON object without the tables")


def _heads(text: str) -> Heads:
    try:
        num_heads, rest = text.split("/")
        num_kv_heads, dim = rest.split("x")
        heads = Heads(int(num_heads), int(num_kv_heads), int(dim))
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not H/KxD, such as 9/3x64") from None
    if min(heads.num_heads, heads.num_kv_heads, heads.dim) < 1 or heads.num_heads % heads.num_kv_heads:
        raise argparse.ArgumentTypeError(
            f"{text!r}: the query heads are a multiple of the KV heads, and all are above 0"
        )
    return heads


def run_from_arguments(arguments: argparse.Namespace) -> None:
    """Runs `radixkv bench attention`: progress on stderr, tables and one line of JSON on stdout."""
    from engine.bench.attention_cases import run  # torch from here on

    settings = Settings(
        heads=tuple(dict.fromkeys(arguments.heads)),
        dtypes=tuple(dict.fromkeys(arguments.dtypes)),
        prompt=max(64, arguments.prompt),
        rounds=arguments.rounds,
    )
    tables, results = run(settings, arguments.only or PARTS, lambda line: print(line, file=sys.stderr, flush=True))
    print_report("attention", tables, results, only_json=arguments.json)

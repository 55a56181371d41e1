"""What `radixkv bench attention` measures: the cases, the constants of the cost model, and how a pool's runs hold."""

from __future__ import annotations

import random
import statistics
import time
from array import array
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from engine.attention import attend
from engine.attention.costs import costs_of
from engine.attention.partial import Pool, padded_attention, row_attention
from engine.attention.plan import Shape, predicted_by_row_ns
from engine.attention.tree import plan_for
from engine.batch import BatchBuilder, Row, Span
from engine.bench.attention import Heads, Settings
from engine.bench.report import Result, Table
from radixkv import PrefixCache
from radixkv.pool import ROOM, BlockPool
from radixkv.storage import KVStorage, LayerShape

MODES = ("gather", "tree", "auto")
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
BLOCK_SIZE = 16


@dataclass(frozen=True)
class Case:
    """Rows, each a path of segments (name, tokens) of which equal names are shared, and how many tokens are new."""

    name: str
    paths: tuple[tuple[tuple[str, int], ...], ...]
    num_new: tuple[int, ...]
    is_scattered: bool


def cases(settings: Settings) -> Iterator[Case]:
    """All that is measured."""
    prompt = settings.prompt
    for is_scattered in (False, True):

        def decoding(name: str, paths: list[list[tuple[str, int]]], is_scattered: bool = is_scattered) -> Case:
            return Case(name, tuple(map(tuple, paths)), (1,) * len(paths), is_scattered)

        for num_rows in (2, 8, 32, 64):
            if is_scattered and num_rows != 8:
                continue
            paths = [[("prompt", prompt), (f"own {row}", 17 + row % 16)] for row in range(num_rows)]
            yield decoding(f"{prompt} shared by {num_rows}", paths)
        for num_rows, length in ((1, prompt), (8, prompt // 16), (8, prompt // 4), (8, prompt), (32, prompt // 4)):
            yield decoding(
                f"{num_rows} of {length} unshared", [[(f"own {row}", length - row % 16)] for row in range(num_rows)]
            )
        yield decoding(
            f"{prompt // 2} shared by 8, {prompt // 4} by pairs",
            [
                [("system", prompt // 2), (f"chat {row // 2}", prompt // 4), (f"own {row}", 17 + row)]
                for row in range(8)
            ],
        )
        chunk = prompt // 8
        paths = [[("prompt", prompt), (f"own {row}", chunk + 16 if row == 0 else 17 + row)] for row in range(8)]
        yield Case(
            f"chunk of {chunk} and 7 rows behind {prompt}", tuple(map(tuple, paths)), (chunk, *[1] * 7), is_scattered
        )


class Setup:
    """A case with its pool filled: one batch for each mode, and tensors that stand for what a model computes."""

    def __init__(self, case: Case, heads: Heads, dtype: torch.dtype, num_layers: int) -> None:
        sizes = {name: -(-length // BLOCK_SIZE) for path in case.paths for name, length in path}
        ids = list(range(sum(sizes.values())))
        if case.is_scattered:
            random.Random(1).shuffle(ids)
        blocks: dict[str, list[int]] = {}
        for name, num_blocks in sizes.items():
            blocks[name], ids = ids[:num_blocks], ids[num_blocks:]
        self.rows = []
        for number, (path, num_new) in enumerate(zip(case.paths, case.num_new, strict=True)):
            table = array("I", [block for name, _ in path for block in blocks[name]])
            num_tokens = sum(length for _, length in path)
            self.rows.append(Row([1] * num_new, num_tokens - num_new, table, key=number))
        self.heads = heads
        self.storage = KVStorage(
            sum(sizes.values()), BLOCK_SIZE, [LayerShape(heads.num_kv_heads, heads.dim, heads.dim)] * num_layers, dtype
        )
        for layer in range(num_layers):
            self.storage.keys(layer).normal_()
            self.storage.values(layer).normal_()
        num_tokens = sum(case.num_new)
        self.q = torch.randn(num_tokens, heads.num_heads, heads.dim).to(dtype)
        self.k, self.v = torch.randn(2, num_tokens, heads.num_kv_heads, heads.dim).to(dtype)
        self.builders = {mode: BatchBuilder(BLOCK_SIZE, attention=mode) for mode in MODES}
        self.metadata = {mode: builder.build(self.rows).metadata for mode, builder in self.builders.items()}
        self.slots = [row.table.tensor(0, row.context_len).clone() for row in self.metadata["gather"].rows]
        self.num_kv_tokens = sum(length for name, length in {part for path in case.paths for part in path})
        # A query at position p attends to p + 1 keys.
        self.num_pairs = sum(
            len(row.token_ids) * row.start + len(row.token_ids) * (len(row.token_ids) + 1) // 2 for row in self.rows
        )

    def attend(self, mode: str, layer: int) -> Tensor:
        """One layer, through the function that models call."""
        return attend(self.q, self.k, self.v, self.storage, layer, self.metadata[mode])

    def gather_and_attend(self, layer: int) -> Tensor:
        """One layer, request by request."""
        metadata = self.metadata["gather"]
        self.storage.write(layer, metadata.slot_mapping, self.k, self.v)
        keys, values = self.storage.keys(layer), self.storage.values(layer)
        out = torch.empty_like(self.q)
        for row, slots in zip(metadata.rows, self.slots, strict=True):
            queries = slice(row.query_start, row.query_end)
            k, v = (pool.index_select(0, slots).transpose(0, 1) for pool in (keys, values))  # (K, S, D)
            q = self.q[queries]
            if row.num_queries == 1:
                q = q.view(1, len(k), -1, q.shape[2])  # (1, K, G, D)
                out[queries] = scaled_dot_product_attention(q, k[None], v[None]).view(1, *out.shape[1:])
            else:
                bias = row.bias(Span(), q.dtype, q.device)
                q = q.transpose(0, 1).reshape(len(k), -1, *q.transpose(0, 1).shape[1:])  # (K, G, Q, D)
                k, v = k[:, None].expand(-1, q.shape[1], -1, -1), v[:, None].expand(-1, q.shape[1], -1, -1)
                row_out = scaled_dot_product_attention(q, k, v, attn_mask=bias, is_causal=bias is None)
                out[queries] = row_out.flatten(0, 1).transpose(0, 1)
        return out

    def predicted_us(self) -> float:
        """What the cost model says of "auto"."""
        keys, values, metadata = self.storage.keys(0), self.storage.values(0), self.metadata["auto"]
        plan = plan_for(self.q, keys, values, metadata, Span())
        heads = self.heads
        if plan is None:
            shape = Shape(heads.num_heads, heads.num_kv_heads, heads.dim, heads.dim, keys.dtype, keys.device)
            predicted_ns = predicted_by_row_ns(metadata, Span(), shape)
        else:
            predicted_ns = plan.predicted_ns
        products = self.num_pairs * heads.num_heads * 2 * heads.dim
        return (predicted_ns + products * costs_of(keys.dtype).product) / 1e3

    def plan_us(self, rounds: int) -> float:
        """The batch and the plan of the next step, where only the clock went on."""
        times = []
        for _ in range(rounds):
            start_s = time.thread_time()
            metadata = self.builders["auto"].build(self.rows).metadata
            plan_for(self.q, self.storage.keys(0), self.storage.values(0), metadata, Span())
            times.append(time.thread_time() - start_s)
        return statistics.median(times) * 1e6


@dataclass(frozen=True)
class Rates:
    """What one thread reads and multiplies in a second."""

    bytes_per_s: float
    operations_per_s: dict[str, float]


def measure_rates(settings: Settings) -> Rates:
    """The best of several repetitions, as a floor must be."""
    buffer = torch.ones(settings.stream_bytes // 4)
    bytes_per_s = buffer.nbytes / min(_times_s(buffer.sum, 5))
    operations_per_s = {}
    for name in settings.dtypes:
        left, right = torch.randn(2, 1024, 1024).to(DTYPES[name])
        operations_per_s[name] = 2 * 1024**3 / min(_times_s(lambda left=left, right=right: left @ right, 5))
    return Rates(bytes_per_s, operations_per_s)


def _times_s(call: Callable[[], object], rounds: int) -> list[float]:
    call()
    times_s = []
    for _ in range(rounds):
        start_s = time.thread_time()
        call()
        times_s.append(time.thread_time() - start_s)
    return times_s


def measure_case(setup: Setup, settings: Settings) -> dict[str, float]:
    """µs a layer of each way, the median; raises AssertionError where the ways do not agree."""
    ways: dict[str, Callable[[int], Tensor]] = {"gather and attend": setup.gather_and_attend}
    for mode in MODES:
        ways[mode] = lambda layer, mode=mode: setup.attend(mode, layer)
    truth = setup.gather_and_attend(0)
    order = [row.query_start for row in setup.metadata["auto"].rows]
    assert order == sorted(order) == [row.query_start for row in setup.metadata["gather"].rows]
    tolerance = 1e-4 if truth.dtype == torch.float32 else 0.05
    for way in ways.values():
        torch.testing.assert_close(way(0), truth, atol=tolerance, rtol=tolerance)
    times_s: dict[str, list[float]] = {name: [] for name in ways}
    for number in range(settings.rounds):
        # Each way follows each other one equally often: what the one before leaves in the caches is not to decide.
        names = list(ways) if number % 2 else list(reversed(ways))
        for name in names:
            start_s = time.thread_time()
            for layer in range(settings.num_layers):
                ways[name](layer)
            times_s[name].append((time.thread_time() - start_s) / settings.num_layers)
    return {name: statistics.median(times) * 1e6 for name, times in times_s.items()}


def _cases(settings: Settings, say: Callable[[str], None]) -> tuple[list[Table], list[Result]]:
    rates = measure_rates(settings)
    products = ", ".join(f"{name} {rate / 1e9:.0f} G/s" for name, rate in rates.operations_per_s.items())
    tables = [Table(f"Rates of one thread: memory {rates.bytes_per_s / 1e9:.1f} GB/s, products {products}", (), [])]
    results = []
    for heads in settings.heads:
        for dtype_name in settings.dtypes:
            rows = []
            for case in cases(settings):
                name = f"{case.name}, {'scattered' if case.is_scattered else 'contiguous'}"
                say(f"{heads} {dtype_name}: {name}")
                setup = Setup(case, heads, DTYPES[dtype_name], settings.num_layers)
                times = measure_case(setup, settings)
                num_bytes = setup.num_kv_tokens * 2 * heads.num_kv_heads * heads.dim * DTYPES[dtype_name].itemsize
                num_operations = setup.num_pairs * heads.num_heads * 4 * heads.dim
                floor_us = 1e6 * max(num_bytes / rates.bytes_per_s, num_operations / rates.operations_per_s[dtype_name])
                predicted_us, plan_us = setup.predicted_us(), setup.plan_us(settings.rounds)
                naive, by_row, tree, auto = (times[way] for way in ("gather and attend", *MODES))
                rows.append(
                    (
                        name, f"{floor_us:,.0f}", f"{naive:,.0f}", f"{by_row:,.0f}", f"{tree:,.0f}", f"{auto:,.0f}",
                        f"{naive / auto:.2f}", f"{by_row / auto:.2f}", f"{floor_us / auto:.0%}",
                        f"{predicted_us:,.0f}", f"{plan_us:,.0f}",
                    )
                )  # fmt: skip
                more = {
                    "heads": str(heads), "dtype": dtype_name, "by_row": by_row, "tree": tree, "floor": floor_us,
                    "predicted": predicted_us, "plan": plan_us,
                }  # fmt: skip
                results.append(Result(name, auto, "µs", naive, "gather and attend", more))
            columns = (
                f"{heads}, {dtype_name}", "floor", "gather and attend", "by row", "tree", "auto", "× gather",
                "× by row", "of floor", "predicted", "batch, plan",
            )  # fmt: skip
            tables.append(Table("One layer, µs", columns, rows))
    return tables, results


# ---------------------------------------------------------------- constants


def measure_constants(heads: Heads, dtype: torch.dtype, settings: Settings) -> dict[str, float]:
    """Constants of the cost model in nanoseconds, each from the difference of two measurements."""
    num_slots, long = 2**14, 2**11
    elements = heads.num_kv_heads * 2 * heads.dim
    group = heads.num_heads // heads.num_kv_heads
    # Four times the heads, of which the first are used but where heads are counted.
    keys, values = map(Pool.of, torch.randn(2, num_slots, 4 * heads.num_kv_heads, heads.dim).to(dtype))
    q = torch.randn(8, 4 * heads.num_heads, heads.dim).to(dtype)
    few_keys, few_values = (Pool.of(pool.by_slot[:, : heads.num_kv_heads].contiguous()) for pool in (keys, values))
    few_q = q[:, : heads.num_heads]
    blocks = torch.randperm(num_slots // BLOCK_SIZE)[:, None] * BLOCK_SIZE
    scattered = (blocks + torch.arange(BLOCK_SIZE)).flatten()
    side_by_side = scattered[: 8 * BLOCK_SIZE]
    starts = range(0, num_slots, long)
    workspace: dict[object, Tensor] = {}

    def part(slots: slice | Tensor, q: Tensor = few_q[:1], keys: Pool = few_keys, values: Pool = few_values) -> object:
        return row_attention(q, keys.take(slots, workspace, "keys"), values.take(slots, workspace, "values"), None)

    def padded() -> object:
        k, v = few_keys.take(side_by_side, workspace, "keys"), few_values.take(side_by_side, workspace, "values")
        return padded_attention(few_q, k, v, None)

    def ns(*calls: Callable[[], object], repeat: int = 1) -> float:
        times_s = _times_s(lambda: [call() for _ in range(repeat) for call in calls], settings.rounds)
        return statistics.median(times_s) / len(calls) / repeat * 1e9

    short = ns(lambda: part(slice(0, BLOCK_SIZE)), repeat=50)
    short_of_4 = ns(lambda: part(slice(0, BLOCK_SIZE), q[:1], keys, values), repeat=50)
    warm = ns(lambda: part(slice(0, long // 2)), repeat=8)
    warm_of_8 = ns(lambda: part(slice(0, long // 2), few_q), repeat=8)
    cold = ns(*(lambda start=start: part(slice(start, start + long)) for start in starts))
    copied = ns(*(lambda start=start: part(scattered[start : start + long]) for start in starts))
    product = (warm_of_8 - warm) / (7 * (long // 2) * group * elements)
    of_products = product * group  # for each element of one query's keys and values
    reread = (warm - short) / (long // 2 - BLOCK_SIZE) / elements - of_products
    copy = (copied - cold) / long / elements
    head = (short_of_4 - short) / (3 * heads.num_kv_heads) - BLOCK_SIZE * 2 * heads.dim * (reread + of_products)
    of_elements = BLOCK_SIZE * elements * (reread + of_products)
    return {
        "call": short - heads.num_kv_heads * head - of_elements,
        "padded_call": ns(padded, repeat=50)
        - 8 * (heads.num_kv_heads * head + of_elements + BLOCK_SIZE * elements * copy),
        "head": head,
        "read": (cold - short) / (long - BLOCK_SIZE) / elements - of_products,
        "reread": reread,
        "copy": copy,
        "product": product,
    }


def _constants(settings: Settings, say: Callable[[str], None]) -> tuple[list[Table], list[Result]]:
    rows, results = [], []
    for heads in settings.heads:
        for dtype_name in settings.dtypes:
            say(f"{heads} {dtype_name}: constants of the cost model")
            in_use = costs_of(DTYPES[dtype_name])
            for name, measured in measure_constants(heads, DTYPES[dtype_name], settings).items():
                used = getattr(in_use, name)
                description = f"{heads} {dtype_name}: {name}"
                rows.append((description, f"{used:,.3g}", f"{measured:,.3g}"))
                results.append(Result(description, measured, "ns", used, "in use"))
    return [Table("Constants of the cost model, ns", ("", "in use", "measured"), rows)], results


# ---------------------------------------------------------------- the pool


@dataclass(frozen=True)
class Contiguity:
    """How contiguous tables were, over all samples."""

    pairs: float
    """The share of neighbours in a table whose ids ascend by one."""
    whole: float
    """The share of tables that are one run."""
    runs: float
    """The mean number of runs in a table."""


def churn(num_blocks: int, num_running: int, num_steps: int, most_room: int) -> Contiguity:
    """Requests that come, decode side by side and go; half of their prompts start with one of four of 256 tokens.

    Prompts and outputs are log-normal with median 120. Everything that is computed is committed, so a pool that is too
    small for all evicts.
    """
    draw = random.Random(f"churn/{num_blocks}/{num_running}")
    cache = PrefixCache(num_blocks, BLOCK_SIZE)
    cache.pool = BlockPool(num_blocks, most_room)
    systems = [[draw.randrange(32_000) for _ in range(256)] for _ in range(4)]
    left: dict[int, int] = {}
    next_id = num_pairs = num_ascending = num_tables = num_whole = 0
    for step in range(num_steps):
        while len(left) < num_running:
            length, output = (int(draw.lognormvariate(4.8, 0.8)) + 1 for _ in range(2))
            prompt = [draw.randrange(32_000) for _ in range(length)]
            if draw.random() < 0.5:
                prompt = systems[draw.randrange(4)] + prompt
            cache.allocate(next_id, prompt)
            cache.commit(next_id, len(prompt))
            left[next_id] = output
            next_id += 1
        for request_id in list(left):
            cache.append_token(request_id, draw.randrange(32_000))
            cache.commit(request_id, cache.num_tokens(request_id))
            left[request_id] -= 1
            if not left[request_id]:
                del left[request_id]
                cache.free(request_id)
        if step % 10 == 0 and step >= num_steps // 4:
            for request_id in left:
                table = cache.block_table(request_id)
                ascending = sum(after == before + 1 for before, after in pairwise(table))
                num_pairs += len(table) - 1
                num_ascending += ascending
                num_tables += 1
                num_whole += ascending == len(table) - 1
    return Contiguity(
        num_ascending / max(1, num_pairs), num_whole / num_tables, 1 + (num_pairs - num_ascending) / num_tables
    )


def _pool(settings: Settings, say: Callable[[str], None]) -> tuple[list[Table], list[Result]]:
    rows, results = [], []
    for num_running, num_blocks in ((8, 4_000), (8, 400), (32, 8_000), (32, 2_000)):
        name = f"{num_running} requests, {num_blocks:,} blocks"
        say(f"pool: {name}")
        without, with_room = (
            churn(num_blocks, num_running, settings.churn_steps, most_room) for most_room in (0, ROOM)
        )
        rows.append(
            (
                name,
                *(f"{one.pairs:.1%}" for one in (without, with_room)),
                *(f"{one.whole:.1%}" for one in (without, with_room)),
                *(f"{one.runs:.2f}" for one in (without, with_room)),
            )
        )
        more = {"whole": with_room.whole, "runs": with_room.runs}
        results.append(Result(f"pool, {name}: pairs", with_room.pairs, "share", without.pairs, "no room", more))
    columns = (
        "churn", "pairs, no room", "pairs", "one run, no room", "one run", "runs a table, no room", "runs a table",
    )  # fmt: skip
    return [Table("Contiguity of block tables while requests come, grow and go", columns, rows)], results


def run(settings: Settings, parts: Sequence[str], say: Callable[[str], None]) -> tuple[list[Table], list[Result]]:
    """Tables and results of some parts, measured with one thread."""
    measure = {"cases": _cases, "constants": _constants, "pool": _pool}
    tables: list[Table] = []
    results: list[Result] = []
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    try:
        with torch.inference_mode():
            for part in parts:
                more_tables, more_results = measure[part](settings, say)
                tables += more_tables
                results += more_results
    finally:
        torch.set_num_threads(num_threads)
    return tables, results

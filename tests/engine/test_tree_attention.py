"""Attention that reads what rows share once agrees with formulas in float64, whatever the tree, and never sees idle
slots; the plan behind it reads every visible key exactly once."""

import dataclasses
import random
from array import array
from collections import Counter
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

torch = pytest.importorskip("torch", reason="attention needs torch")

from engine.attention import attend, costs, partial  # noqa: E402
from engine.attention.plan import Shape, make_plan, predicted_by_row_ns  # noqa: E402
from engine.attention.reference import reference_attention  # noqa: E402
from engine.batch import Row, Span, build_batch  # noqa: E402
from radixkv.storage import KVStorage, LayerShape  # noqa: E402

# float32 has 24 bits: sums of at most 100 terms of size about 1, in parts, stay well within 1e-5 of the float64 truth.
TOLERANCE = {"atol": 2e-5, "rtol": 2e-5}

SPANS = [Span(), Span(), Span(window=1), Span(window=9), Span(window=100), Span(chunk=1), Span(chunk=13)]
CPU = torch.device("cpu")

_BASE = {"head": 0.0, "spill": 0.0, "level": 0.0, "merge": 0.0, "merge_element": 0.0, "product": 0.0, "reread": 1.0}
COSTS = {
    "as measured": costs.costs_of(torch.float32),
    # Whatever can be a part of its own is one: each run of a scattered tail is a view.
    "calls for nothing": costs.Costs(call=0.0, padded_call=1e9, read=1.0, copy=1.0, **_BASE),
    # Whatever can be read together is: every decode row goes side by side.
    "calls dear": costs.Costs(call=1e9, padded_call=0.0, read=1.0, copy=1.0, **_BASE),
}


def random_paths(rng, block_size, num_rows, depth):
    """For each row the numbers of its keys; rows below one node of a random tree start with the same ones."""
    paths = [[] for _ in range(num_rows)]
    num_keys = 0

    def new_keys(number):
        nonlocal num_keys
        num_keys += number
        return range(num_keys - number, num_keys)

    def grow(members, level):
        if level == depth or len(members) < 2:
            return
        shared = new_keys(
            rng.choice([0, 1, block_size - 1, block_size, block_size + 1, 2 * block_size, 3 * block_size])
        )
        for index in members:
            paths[index] += shared
        cut = rng.randrange(len(members) + 1)
        for group in (members[:cut], members[cut:]) if rng.random() < 0.7 else (members,):
            grow(group, level + 1)

    members = list(range(num_rows))
    rng.shuffle(members)  # rows of one node are not neighbours in what the batch is made from
    grow(members, 0)
    for path in paths:
        path += new_keys(max(1, rng.choice([1, block_size - 1, block_size, block_size + 1, rng.randint(1, 12)])))
    return paths, num_keys


class Case:
    """A pool full of rows that share blocks, their batch, and what each row should read. Idle slots hold `idle`."""

    def __init__(
        self, seed, block_size=4, heads=(4, 2), dims=(8, 8), num_rows=5, depth=3, is_contiguous=False,
        decode_only=False, idle=float("nan"), attention="tree", dtype=torch.float32,
    ):  # fmt: skip
        rng = random.Random(seed)
        generator = torch.Generator().manual_seed(seed)
        paths, num_keys = random_paths(rng, block_size, num_rows, depth)
        ids = list(range(sum(-(-len(path) // block_size) for path in paths) + 3))
        if not is_contiguous:
            rng.shuffle(ids)
        num_heads, num_kv_heads = heads
        k = torch.randn(num_keys, num_kv_heads, dims[0], generator=generator).to(dtype)
        v = torch.randn(num_keys, num_kv_heads, dims[1], generator=generator).to(dtype)
        layers = [LayerShape(1, 1, 1), LayerShape(num_kv_heads, *dims), LayerShape(num_kv_heads, *dims)]
        self.storage = KVStorage(len(ids), block_size, layers, dtype)
        for layer in (1, 2):
            self.storage.keys(layer).fill_(idle)
            self.storage.values(layer).fill_(idle)
        blocks = {}  # of all the keys up to the block's end: what starts alike is shared, block by block
        self.rows, reads, new = [], [], []
        for index, path in enumerate(paths):
            table = array("I")
            for end in range(block_size, len(path) + block_size, block_size):
                content = tuple(path[:end]) if end <= len(path) else index
                if content not in blocks:
                    blocks[content] = ids.pop(0)
                table.append(blocks[content])
            start = len(path) - 1 if decode_only or rng.random() < 0.6 else rng.randrange(len(path))
            slots = [table[p // block_size] * block_size + p % block_size for p in range(start)]
            for layer in (1, 2):
                self.storage.write(layer, torch.tensor(slots, dtype=torch.long), k[path[:start]], v[path[:start]])
            q = torch.randn(len(path) - start, num_heads, dims[0], generator=generator).to(dtype)
            self.rows.append(Row([7] * len(q), start, table, key=index))
            reads.append((q, k[path], v[path], torch.arange(start, len(path))))
            new.append((q, k[path[start:]], v[path[start:]]))
        self.batch = build_batch(self.rows, block_size, attention=attention)
        # The batch has its own order; logits come in the order of the rows, so they tell where each stands.
        ends = self.batch.logits_indices.tolist()
        order = sorted(range(num_rows), key=lambda index: ends[index])
        self.reads = [reads[index] for index in order]
        self.q, self.k, self.v = (torch.cat([new[index][part] for index in order]) for part in range(3))

    def attend(self, layer=1, metadata=None, **arguments):
        return attend(self.q, self.k, self.v, self.storage, layer, metadata or self.batch.metadata, **arguments)

    def truth(self, scale=None, span=Span(), softcap=None, sinks=None):  # noqa: B008 - immutable
        return torch.cat(
            [reference_attention(*row, scale, span.window, softcap, sinks, span.chunk) for row in self.reads]
        )

    def plan(self, span=Span()):  # noqa: B008 - immutable
        keys, values = self.storage.keys(1), self.storage.values(1)
        shape = Shape(self.q.shape[1], keys.shape[1], keys.shape[2], values.shape[2], keys.dtype, CPU)
        return make_plan(self.batch.metadata, span, shape)


CASES = {
    "seed": st.integers(0, 2**20),
    "block_size": st.sampled_from([1, 2, 4, 16]),
    "num_rows": st.integers(1, 7),
    "depth": st.integers(0, 4),
    "is_contiguous": st.booleans(),
    "decode_only": st.booleans(),
}


@pytest.mark.parametrize("priced", COSTS)
@settings(max_examples=60, deadline=None)
@given(
    **CASES,
    heads=st.sampled_from([(1, 1), (2, 2), (4, 2), (3, 1), (6, 2)]),
    dims=st.sampled_from([(4, 4), (8, 8), (8, 3), (3, 8)]),
    attention=st.sampled_from(["tree", "tree", "auto"]),
    idle=st.sampled_from([float("nan"), float("inf"), 1e30]),
    span=st.sampled_from(SPANS),
    softcap=st.sampled_from([None, None, 0.7, 30.0]),
    with_sinks=st.booleans(),
    scale=st.sampled_from([None, 1.0, 0.05]),
    is_large=st.booleans(),
)
def test_tree_agrees_with_the_formula(priced, span, softcap, with_sinks, scale, is_large, **case):
    """Any tree and lengths, decode rows beside prefill chunks: what is read once must count for each row as its own."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(costs, "_FLOAT32", COSTS[priced])
        if is_large:
            patch.setattr(partial, "_LARGE", 0)  # every gather goes to the room that gathers share
        case = Case(**case)
        sinks = torch.linspace(-2, 2, case.q.shape[1]) if with_sinks else None
        arguments = {"scale": scale, "span": span, "softcap": softcap, "sinks": sinks}
        out = case.attend(**arguments)
    torch.testing.assert_close(out, case.truth(**arguments).float(), **TOLERANCE)


def _numbers(slots):
    return list(range(slots.start, slots.stop)) if isinstance(slots, slice) else slots.tolist()


@pytest.mark.parametrize("priced", COSTS)
@settings(max_examples=60, deadline=None)
@given(**CASES, span=st.sampled_from(SPANS))
def test_a_plan_reads_every_visible_key_once(priced, span, **case):
    """A key read twice would weigh double, and one left out nothing; on long contexts neither shows in a tolerance."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(costs, "_FLOAT32", COSTS[priced])
        case = Case(**case)
        plan = case.plan(span)
    seen = [Counter() for _ in range(len(case.q))]
    levels = [set() for _ in range(len(case.q))]
    for part in plan.parts:
        slots = _numbers(part.read.slots)
        tokens = range(part.tokens.start, part.tokens.stop)
        for place, token in enumerate(tokens):
            visible = [True] * len(slots)
            if part.read.visible is not None:
                visible = part.read.visible[place].tolist()
            elif part.read.is_causal:
                visible = [key <= place for key in range(len(slots))]
            seen[token].update(slot for slot, is_seen in zip(slots, visible, strict=True) if is_seen)
            assert part.level not in levels[token], "two parts of a query on one level: the later hides the earlier"
            levels[token].add(part.level)
    if plan.padded is not None:
        padded = plan.padded
        tokens = torch.arange(len(case.q))[padded.tokens].tolist()
        bias = torch.zeros(1) if padded.bias is None else padded.bias[:, 0, 0]
        visible = (torch.zeros(padded.num_rows, len(padded.slots) // padded.num_rows) + bias) == 0
        for token, slots, is_seen in zip(tokens, padded.slots.view(padded.num_rows, -1), visible, strict=True):
            seen[token].update(slots[is_seen].tolist())
            assert padded.level not in levels[token]
            levels[token].add(padded.level)
    assert plan.num_levels == max(map(max, levels)) + 1
    for row in case.batch.metadata.rows:
        for token in range(row.query_start, row.query_end):
            position = row.start + token - row.query_start
            wanted = row.table.tensor(span.first_visible(position), position + 1).tolist()
            assert seen[token] == Counter(wanted)


def fan_out(prompt, tails, block_size=16, num_new=1, attention="tree"):
    """Rows that share a prompt of whole blocks, each with a tail of its own behind it."""
    shared = list(range(prompt // block_size))
    next_block = len(shared) + 1  # not contiguous with the prompt
    rows = []
    for number, tail in enumerate(tails):
        own = -(-tail // block_size)
        table = array("I", [*shared, *range(next_block, next_block + own)])
        next_block += own + 1
        rows.append(Row([1] * num_new, prompt + tail - num_new, table, key=number))
    return build_batch(rows, block_size, attention=attention).metadata


SHAPE = Shape(9, 3, 64, 64, torch.float32, CPU)


def test_a_shared_prompt_is_read_once_for_all_rows():
    """The point of it: 8 requests over 1,024 shared tokens read those once, as a view, and each its tail."""
    plan = make_plan(fan_out(1024, [17] * 8, attention="auto"), Span(), SHAPE)
    (part,) = plan.parts
    assert (part.tokens, part.read.slots, part.level) == (slice(0, 8), slice(0, 1024), 0)
    assert plan.shared_keys == 7 * 1024
    assert (plan.padded.num_rows, len(plan.padded.slots), plan.padded.bias) == (8, 8 * 17, None)


def test_a_window_shares_what_all_rows_see_of_a_node():
    """Rows of nearly one length see nearly the same window; the few keys only some see belong to their tails."""
    plan = make_plan(fan_out(1024, [17, 20, 30]), Span(window=512), SHAPE)
    first_seen_by_all = 1024 + 30 - 512
    assert plan.parts[0].read.slots == slice(first_seen_by_all, 1024)


def test_auto_leaves_alone_what_does_not_pay():
    """A tree costs calls and a merge; for a single row, or one shared block, each row for itself is faster."""
    assert make_plan(fan_out(1024, [17], attention="auto"), Span(), SHAPE).shared_keys == 0
    assert make_plan(fan_out(0, [600] * 8, attention="auto"), Span(), SHAPE) is None
    two = make_plan(fan_out(16, [17, 17], attention="auto"), Span(), SHAPE)
    assert two is None or two.shared_keys == 0
    assert make_plan(fan_out(16, [17, 17], attention="tree"), Span(), SHAPE).shared_keys == 16
    assert make_plan(fan_out(1024, [17] * 8, attention="gather"), Span(), SHAPE) is None


def test_auto_never_predicts_worse_than_each_row_for_itself():
    """Wherever the model is right, "auto" is at least as good as "gather"."""
    for tails in ([1], [100] * 3, [16 * number + 1 for number in range(12)]):
        for prompt in (0, 16, 256, 4096):
            metadata = fan_out(prompt, tails, attention="auto")
            plan = make_plan(metadata, Span(), SHAPE)
            assert plan is None or plan.predicted_ns < predicted_by_row_ns(metadata, Span(), SHAPE)


def test_a_long_run_behind_scattered_blocks_is_a_view():
    """Gathering 4,096 keys because the last 32 lie elsewhere would copy what can be read where it is."""
    table = array("I", [*range(100, 356), 7, 3])
    metadata = build_batch([Row([1], 4096 + 20, table)], 16, attention="auto").metadata
    plan = make_plan(metadata, Span(), SHAPE)
    assert plan.parts[0].read.slots == slice(1600, 1600 + 4096)
    assert len(plan.parts[1].read.slots) == 21


@pytest.mark.parametrize("attention", ["tree", "auto"])
def test_layers_do_not_see_each_other_through_the_plan(attention):
    """Results of parts are put in room that all layers of a step share; a layer must find nothing of the one before."""
    case = Case(11, num_rows=6, attention=attention)
    first = case.attend(layer=1)
    k, v = case.k, case.v
    case.k, case.v = 2 * k, 3 * v
    other = case.attend(layer=2)
    case.k, case.v = k, v
    assert not torch.equal(first, other)
    assert torch.equal(case.attend(layer=1), first)
    torch.testing.assert_close(case.attend(layer=2), case.truth().float(), **TOLERANCE)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("seed", range(4))
def test_16_bits_agree_with_the_formula_within_their_rounding(seed, dtype):
    """8 bits of mantissa give 2**-8 relative to values of size about 1; merging in float32 adds nothing to it."""
    case = Case(seed, dtype=dtype, num_rows=6)
    out = case.attend()
    assert out.dtype == dtype
    torch.testing.assert_close(out.double(), case.truth(), atol=0.03, rtol=0.03)


def test_queries_wider_than_the_pool_keep_their_dtype():
    """Keys and values may be stored in fewer bits than the model computes in."""
    case = Case(3, dtype=torch.bfloat16)
    case.q = case.q.float()
    out = case.attend()
    assert out.dtype == torch.float32
    torch.testing.assert_close(out.double(), case.truth(), atol=0.03, rtol=0.03)


@pytest.mark.parametrize("attention", ["gather", "tree", "auto"])
def test_a_row_reads_what_another_row_writes_in_the_same_step(attention):
    """Decision 9: blocks may be shared within the pass that computes them, because writes come before reads."""
    storage = KVStorage(4, 2, [LayerShape(1, 4, 4)])
    storage.keys(0).fill_(float("nan"))
    storage.values(0).fill_(float("nan"))
    q, k, v = torch.randn(3, 5, 1, 4, generator=torch.Generator().manual_seed(1))
    batch = build_batch([Row([1], 4, [3, 1, 2]), Row([1, 1, 1, 1], 0, [3, 1])], 2, attention=attention)
    out = attend(q, k, v, storage, 0, batch.metadata)
    order = [1, 2, 3, 4, 0]
    truth = reference_attention(q[:1], k[order], v[order], torch.tensor([4]))
    torch.testing.assert_close(out[:1], truth.float(), **TOLERANCE)


def test_models_may_hand_over_views():
    """Queries, keys and values are slices of one product or transposed; they are read with the strides they have."""
    case = Case(5, num_rows=6)
    wanted = case.attend()
    num_heads = case.q.shape[1]
    fused = torch.cat([case.q, case.k, case.v], dim=1)
    case.q, case.k, case.v = fused[:, :num_heads], fused[:, num_heads : num_heads + 2], fused[:, num_heads + 2 :]
    assert torch.equal(case.attend(), wanted)
    case.q = case.q.transpose(0, 1).contiguous().transpose(0, 1)
    assert torch.equal(case.attend(), wanted)


def test_large_gathers_share_their_room(monkeypatch):
    """A fresh tensor for each layer and row would cost its pages each time."""
    monkeypatch.setattr(partial, "_LARGE", 0)
    case = Case(7, attention="gather")
    case.attend()
    rooms = dict(case.batch.metadata.workspace)
    assert len(rooms) == 2
    longest = max(row.context_len for row in case.batch.metadata.rows)
    assert all(longest <= len(room) <= 2 * longest + 2 for room in rooms.values())
    case.attend()
    case.attend(layer=2)
    assert {name: id(room) for name, room in case.batch.metadata.workspace.items()} == {
        name: id(room) for name, room in rooms.items()
    }


def test_gather_and_tree_agree_to_rounding():
    """Sums in another order, nothing else: a request's output must not depend on how its batch is attended."""
    for seed in range(5):
        case = Case(seed, num_rows=6, block_size=2)
        by_row = dataclasses.replace(case.batch.metadata, attention="gather", plans={})
        torch.testing.assert_close(case.attend(), case.attend(metadata=by_row), **TOLERANCE)


def test_rows_of_a_node_stand_side_by_side():
    """So that their queries are a slice; rows keep their order otherwise, and nodes nest."""
    tables = [[1, 2, 3, 4, 50], [9], [1, 2, 5, 60], [1, 2, 3, 4, 70], [8, 7], [8, 7, 6]]
    rows = [Row([number], len(table) - 1, table) for number, table in enumerate(tables)]
    batch = build_batch(rows, 1, attention="tree")
    assert batch.input_ids.tolist() == [[0, 3, 2, 1, 4, 5]]
    assert batch.logits_indices.tolist() == [0, 3, 2, 1, 4, 5]
    (root,) = [node for node in batch.metadata.nodes if node.first_row == 0]
    assert (root.last_row, root.start, root.end) == (3, 0, 2)
    (child,) = root.children
    assert (child.first_row, child.last_row, child.start, child.end) == (0, 2, 2, 4)
    other = next(node for node in batch.metadata.nodes if node is not root)
    assert (other.first_row, other.last_row, other.start, other.end) == (4, 6, 0, 1), "before the first query of row 4"
    starts = [row.query_start for row in batch.metadata.rows]
    assert all(before < after for before, after in pairwise(starts))

"""Attention through block tables agrees with formulas in float64, whatever the tables, and never sees idle slots."""

import random
from array import array

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

torch = pytest.importorskip("torch", reason="attention needs torch")

from engine.attention import attend, partial  # noqa: E402
from engine.attention.reference import reference_attention  # noqa: E402
from engine.batch import Row, Span, build_batch  # noqa: E402
from radixkv.storage import KVStorage, LayerShape  # noqa: E402

# float32 has 24 bits: sums of at most 48 terms of size about 1 stay well within 1e-5 of the float64 truth.
TOLERANCE = {"atol": 2e-5, "rtol": 2e-5}

SPANS = [Span(), Span(window=1), Span(window=5), Span(window=100), Span(chunk=1), Span(chunk=7)]


def random_case(seed, block_size, heads, key_dim, value_dim, contiguous, idle):
    """Four requests over disjoint blocks, partly computed: (storage, batch, q, k, v, what each row should read)."""
    num_heads, num_kv_heads = heads
    generator = torch.Generator().manual_seed(seed)
    rng = random.Random(seed)
    lengths = [rng.randint(1, 24) for _ in range(4)]
    starts = [0, lengths[1] - 1, rng.randrange(lengths[2]), rng.randrange(lengths[3])]
    num_blocks = [-(-length // block_size) for length in lengths]
    ids = list(range(sum(num_blocks) + 3))
    if not contiguous:
        rng.shuffle(ids)
    storage = KVStorage(len(ids), block_size, [LayerShape(1, 1, 1), LayerShape(num_kv_heads, key_dim, value_dim)])
    storage.keys(1).fill_(idle)
    storage.values(1).fill_(idle)
    rows, wanted, new_q, new_k, new_v = [], [], [], [], []
    for length, start in zip(lengths, starts, strict=True):
        table = [ids.pop(0) for _ in range(-(-length // block_size))]
        q = torch.randn(length - start, num_heads, key_dim, generator=generator)
        k = torch.randn(length, num_kv_heads, key_dim, generator=generator)
        v = torch.randn(length, num_kv_heads, value_dim, generator=generator)
        slots = torch.tensor([table[p // block_size] * block_size + p % block_size for p in range(length)])
        storage.write(1, slots[:start], k[:start], v[:start])
        rows.append(Row([7] * (length - start), start, array("I", table)))
        wanted.append((q, k, v, torch.arange(start, length)))
        for new, given_tensor in zip((new_q, new_k, new_v), (q, k[start:], v[start:]), strict=True):
            new.append(given_tensor)
    batch = build_batch(rows, block_size)
    return storage, batch, torch.cat(new_q), torch.cat(new_k), torch.cat(new_v), wanted


@settings(max_examples=40)
@given(
    seed=st.integers(0, 2**20),
    block_size=st.sampled_from([1, 2, 4, 16]),
    heads=st.sampled_from([(1, 1), (2, 2), (4, 2), (3, 1), (6, 2)]),
    dims=st.sampled_from([(4, 4), (8, 3), (3, 8)]),
    span=st.sampled_from(SPANS),
    softcap=st.sampled_from([None, None, 0.7, 30.0]),
    with_sinks=st.booleans(),
    scale=st.sampled_from([None, 1.0, 0.05]),
    contiguous=st.booleans(),
    idle=st.sampled_from([float("nan"), float("inf"), 1e30]),
)
def test_gather_agrees_with_the_formula(
    seed, block_size, heads, dims, span, softcap, with_sinks, scale, contiguous, idle
):
    """A028 and A026 for the attention alone: ragged rows at any offset, idle slots full of NaN, Inf or huge numbers."""
    storage, batch, q, k, v, wanted = random_case(seed, block_size, heads, *dims, contiguous, idle)
    sinks = torch.linspace(-2, 2, heads[0]) if with_sinks else None
    out = attend(q, k, v, storage, 1, batch.metadata, scale=scale, span=span, softcap=softcap, sinks=sinks)
    truth = torch.cat([reference_attention(*row, scale, span.window, softcap, sinks, span.chunk) for row in wanted])
    torch.testing.assert_close(out, truth.float(), **TOLERANCE)


def test_explicit_formula_in_pieces_equals_the_whole(monkeypatch):
    """Long prompts are computed in pieces of queries to bound memory; the cut must not show."""
    storage, batch, q, k, v, _ = random_case(3, 4, (4, 2), 8, 8, False, float("nan"))
    arguments = {"softcap": 2.0, "sinks": torch.linspace(-1, 1, 4), "span": Span(window=5)}
    whole = attend(q, k, v, storage, 1, batch.metadata, **arguments)
    monkeypatch.setattr(partial, "_MAX_SCORES", 100)
    pieces = attend(q, k, v, storage, 1, batch.metadata, **arguments)
    torch.testing.assert_close(pieces, whole, **TOLERANCE)


def test_only_the_new_tokens_slots_are_written():
    """B101: cached blocks are shared, and idle ones may be another request's an instant later."""
    storage, batch, q, k, v, _ = random_case(5, 4, (2, 2), 4, 4, False, 1e30)
    before = storage.keys(1).clone(), storage.values(1).clone()
    attend(q, k, v, storage, 1, batch.metadata)
    for pool, old, new in ((storage.keys(1), before[0], k), (storage.values(1), before[1], v)):
        old[batch.metadata.slot_mapping] = new
        assert torch.equal(pool, old)


def test_a_row_reads_what_another_row_writes_in_the_same_step():
    """Decision 9: blocks may be shared within the pass that computes them, because writes come before reads."""
    storage = KVStorage(4, 2, [LayerShape(1, 4, 4)])
    q, k, v = torch.randn(3, 5, 1, 4, generator=torch.Generator().manual_seed(1))
    batch = build_batch([Row([1], 4, [3, 1, 2]), Row([1, 1, 1, 1], 0, [3, 1])], 2)
    out = attend(q, k, v, storage, 0, batch.metadata)
    order = [1, 2, 3, 4, 0]
    truth = reference_attention(q[:1], k[order], v[order], torch.tensor([4]))
    torch.testing.assert_close(out[:1], truth.float(), **TOLERANCE)


def test_bfloat16_agrees_with_the_formula_within_its_rounding():
    """The type most checkpoints come in; 8 bits of mantissa give 2**-8 relative to values of size about 1."""
    storage, batch, q, k, v, wanted = random_case(8, 4, (4, 2), 8, 8, False, 0.0)
    half = KVStorage(storage.num_blocks, 4, storage.layers, torch.bfloat16)
    half.keys(1).copy_(storage.keys(1))
    half.values(1).copy_(storage.values(1))
    out = attend(q.bfloat16(), k.bfloat16(), v.bfloat16(), half, 1, batch.metadata)
    assert out.dtype == torch.bfloat16
    truth = torch.cat([reference_attention(*row) for row in wanted])
    torch.testing.assert_close(out.double(), truth, atol=0.05, rtol=0.05)


@pytest.mark.parametrize("block_size", [1, 2, 4, 16])
def test_batch_lays_rows_end_to_end(block_size):
    """Positions, slots and logits must point at the same token; a mistake here is another request's answer."""
    tables = [[9, 3] + [20] * 30, list(range(40, 80))]
    rows = [Row([5, 6, 7], 0, tables[0]), Row([8], 33, tables[1])]
    if block_size == 1:
        rows[0] = Row([5, 6], 0, tables[0])
    batch = build_batch(rows, block_size)
    ids = [*rows[0].token_ids, 8]
    positions = [*range(len(ids) - 1), 33]
    owner = [0] * (len(ids) - 1) + [1]
    slots = [tables[r][p // block_size] * block_size + p % block_size for r, p in zip(owner, positions, strict=True)]
    assert batch.input_ids.tolist() == [ids]
    assert batch.position_ids.tolist() == [positions]
    assert batch.metadata.slot_mapping.tolist() == slots
    assert batch.logits_indices.tolist() == [len(ids) - 2, len(ids) - 1]
    first = tables[1][0] * block_size
    assert batch.metadata.rows[1].slots == slice(first, first + 34), "ascending blocks are read as a view"


def test_masks_are_made_once_for_all_layers_of_a_step():
    """Made per layer, masks of a long chunk would cost more than the attention."""
    row = build_batch([Row([1] * 5, 3, [0, 1])], 4).metadata.rows[0]
    device = torch.device("cpu")
    assert row.bias(Span(), torch.float32, device) is row.bias(Span(), torch.float32, device)
    assert row.read(Span(window=2), device) is row.read(Span(window=2), device)


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([], "at least one row"),
        ([Row([1], 0, [0]), Row([], 3, [0])], "row 1 has no tokens"),
        ([Row([1], -1, [0])], "starts at -1"),
        ([Row([1, 2], 3, [0])], "needs? 2"),
        ([Row([1], 0, [-1])], "block -1"),
    ],
)
def test_impossible_rows_are_refused(rows, message):
    """A short table would read past its request; a negative block id would count from the pool's end."""
    with pytest.raises(ValueError, match=message):
        build_batch(rows, 4)

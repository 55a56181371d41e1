"""`KVStorage`: the layout that DESIGN.md promises, writes by slot, and block copies that touch nothing else."""

import pytest

torch = pytest.importorskip("torch", reason="storage needs torch")

from radixkv.storage import KVStorage, LayerShape  # noqa: E402

UNIFORM = [LayerShape(2, 4, 4)] * 3
LATENT = [LayerShape(2, 6, 4)] * 3
MIXED = [LayerShape(2, 4, 4), LayerShape(1, 8, 8), LayerShape(1, 8, 8), LayerShape(2, 4, 2)]


def numbered(num_blocks, block_size, layers, dtype=torch.float32):
    """A storage in which every element is another number."""
    storage = KVStorage(num_blocks, block_size, layers, dtype)
    start = 0
    for layer in range(storage.num_layers):
        for view in (storage.keys(layer), storage.values(layer)):
            view.copy_(torch.arange(start, start + view.numel()).view(view.shape))
            start += view.numel()
    return storage


def contents(storage):
    """All keys and values, one clone per layer and kind."""
    return [view(layer).clone() for layer in range(storage.num_layers) for view in (storage.keys, storage.values)]


def test_uniform_layers_are_the_tensor_of_the_design():
    """Kernels and tiers address the pool as (2, layers, blocks, block_size, heads, head_dim): K first, then V."""
    storage = numbered(5, 4, UNIFORM)
    assert storage.data.shape == (2, 3, 5, 4, 2, 4)
    assert storage.data.is_contiguous()
    for layer in range(3):
        assert torch.equal(storage.data[0, layer].flatten(0, 1), storage.keys(layer))
        assert torch.equal(storage.data[1, layer].flatten(0, 1), storage.values(layer))
    storage.data.zero_()
    assert not storage.keys(2).any(), "data must be a view of the pool"


@pytest.mark.parametrize("layers", [LATENT, MIXED], ids=["latent", "mixed"])
def test_layers_that_differ_have_no_such_tensor(layers):
    """A caller that relies on it must hear so, not get a wrong shape."""
    with pytest.raises(ValueError, match="not all alike"):
        _ = numbered(2, 2, layers).data


@pytest.mark.parametrize("layers", [UNIFORM, LATENT, MIXED], ids=["uniform", "latent", "mixed"])
@pytest.mark.parametrize("block_size", [1, 2, 4, 16])
def test_layout_fills_the_buffer_without_gap_or_overlap(layers, block_size):
    """Overlapping layers would overwrite each other; gaps would waste memory that the budget counted."""
    storage = numbered(3, block_size, layers)
    storage.check()
    numbers = torch.cat([part.flatten() for part in contents(storage)])
    assert torch.equal(numbers, torch.arange(len(numbers), dtype=torch.float32)), "layers overlap"
    assert storage.size_bytes == 4 * len(numbers) == 3 * storage.bytes_per_block
    assert storage.bytes_per_block == KVStorage.bytes_per_block_of(layers, block_size, torch.float32)
    assert f"{storage.bytes_per_block} bytes" in storage.show()


@pytest.mark.parametrize("layers", [UNIFORM, LATENT, MIXED], ids=["uniform", "latent", "mixed"])
@pytest.mark.parametrize("block_size", [1, 2, 4, 16])
def test_copy_block_copies_exactly_the_leading_tokens_of_every_layer(layers, block_size):
    """A hit inside a block takes the matching tokens' KV; one slot more would be another request's content."""
    for num_tokens in {0, 1, block_size // 2, block_size}:
        storage = numbered(4, block_size, layers)
        expected = contents(storage)
        for part in expected:
            source, target = 3 * block_size, 1 * block_size
            part[target : target + num_tokens] = part[source : source + num_tokens]
        storage.copy_block(3, 1, num_tokens)
        for got, wanted in zip(contents(storage), expected, strict=True):
            assert torch.equal(got, wanted)


def test_copy_block_copies_bits_not_numbers():
    """NaN payloads and bfloat16 survive: a copy is not a computation."""
    storage = KVStorage(2, 4, UNIFORM, torch.bfloat16)
    bits = storage.data.view(torch.int16)
    bits.copy_(torch.randint(-(2**15), 2**15, bits.shape, generator=torch.Generator().manual_seed(0)))
    storage.copy_block(0, 1, 4)
    assert torch.equal(bits[:, :, 0], bits[:, :, 1])


def test_copying_a_block_to_itself_changes_nothing():
    """A caller need not ask whether copy-on-write found the same block."""
    storage = numbered(2, 4, UNIFORM)
    before = contents(storage)
    storage.copy_block(1, 1, 4)
    assert all(torch.equal(a, b) for a, b in zip(contents(storage), before, strict=True))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [((2, 0, 1), "source=2"), ((0, -1, 1), "target=-1"), ((0, 1, 5), "num_tokens=5"), ((0, 1, -1), "num_tokens=-1")],
)
def test_copy_block_refuses_what_is_not_there(arguments, message):
    """Negative indices would silently count from the end."""
    storage = numbered(2, 4, UNIFORM)
    before = contents(storage)
    with pytest.raises(ValueError, match=message):
        storage.copy_block(*arguments)
    assert all(torch.equal(a, b) for a, b in zip(contents(storage), before, strict=True))


def test_write_puts_each_token_in_its_slot_and_touches_no_other():
    """Slots of a step are scattered over the pool; the neighbours belong to other requests."""
    storage = numbered(4, 2, MIXED)
    expected = contents(storage)
    slots = torch.tensor([6, 1, 3])
    k, v = -torch.rand(3, 1, 8), -torch.rand(3, 1, 8)
    expected[2 * 1][slots], expected[2 * 1 + 1][slots] = k, v
    storage.write(1, slots, k, v)
    assert all(torch.equal(a, b) for a, b in zip(contents(storage), expected, strict=True))


def test_write_takes_transposed_views_and_other_dtypes():
    """Models hand over head-first tensors, and some compute keys in float32 beside bfloat16 values."""
    storage = KVStorage(2, 2, UNIFORM, torch.bfloat16)
    k = torch.rand(2, 3, 4).transpose(0, 1)
    storage.write(0, torch.tensor([0, 2, 3]), k, k.bfloat16())
    assert torch.equal(storage.keys(0)[[0, 2, 3]], k.bfloat16())


@pytest.mark.parametrize(
    ("k_shape", "v_shape"), [((1, 2, 4), (2, 2, 4)), ((2, 2, 4), (2, 2, 5)), ((2, 1, 4), (2, 2, 4))]
)
def test_write_refuses_shapes_that_would_broadcast(k_shape, v_shape):
    """Broadcasting would write one token's keys to several slots and fail nowhere."""
    with pytest.raises(ValueError, match="layer 0 needs"):
        KVStorage(2, 2, UNIFORM).write(0, torch.tensor([0, 1]), torch.zeros(k_shape), torch.zeros(v_shape))


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ((0, 4, UNIFORM), ValueError, "num_blocks=0"),
        ((4, -1, UNIFORM), ValueError, "block_size=-1"),
        ((4, 4, []), ValueError, "layers is empty"),
        ((4, 4, [LayerShape(2, 0, 4)]), ValueError, "layer 0"),
        ((4, 4, UNIFORM, torch.int8), TypeError, "int8"),
    ],
)
def test_impossible_sizes_are_refused(arguments, error, message):
    """The message names the value, since it often comes from a configuration file."""
    with pytest.raises(error, match=message):
        KVStorage(*arguments)


@pytest.mark.parametrize("layers", [UNIFORM, LATENT, MIXED], ids=["uniform", "latent", "mixed"])
def test_blocks_read_come_back_bit_for_bit_in_other_blocks(layers):
    """A request that is swapped out returns to whatever blocks are free then, in any order."""
    storage = numbered(5, 4, layers)
    before = contents(storage)
    saved = storage.read_blocks([3, 0])
    storage.write_blocks([1, 4], saved)
    for got, was in zip(contents(storage), before, strict=True):
        assert torch.equal(got[4:8], was[12:16])
        assert torch.equal(got[16:20], was[0:4])
        assert torch.equal(got[8:16], was[8:16]) and torch.equal(got[:4], was[:4])


def test_what_was_read_does_not_change_with_the_pool():
    """It is a copy: the blocks are given away at once."""
    storage = numbered(2, 4, UNIFORM)
    saved = storage.read_blocks([0])
    kept = [tensor.clone() for tensor in saved]
    storage.copy_block(1, 0, 4)
    assert all(torch.equal(a, b) for a, b in zip(saved, kept, strict=True))


def test_reading_and_writing_refuse_blocks_that_are_not_there():
    """Negative ids would count from the end; data of another number of blocks would broadcast."""
    storage = numbered(2, 4, UNIFORM)
    with pytest.raises(ValueError, match="block id -1"):
        storage.read_blocks([-1])
    saved = storage.read_blocks([0])
    before = contents(storage)
    for block_ids in ([2], [0, 1]):
        with pytest.raises(ValueError, match=r"block id 2|data has shapes"):
            storage.write_blocks(block_ids, saved)
    assert all(torch.equal(a, b) for a, b in zip(contents(storage), before, strict=True))

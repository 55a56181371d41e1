"""Real architectures through block tables give the logits of their own uncached eager forward.

The truth of every test is the model itself: one request alone, eager attention, no cache.
"""

import dataclasses
import functools
import random

import pytest

torch = pytest.importorskip("torch", reason="models need torch")
transformers = pytest.importorskip("transformers", reason="models need transformers")

from engine.batch import Row, Span, build_batch  # noqa: E402
from engine.models import huggingface  # noqa: E402
from engine.models.decoder import Decoder  # noqa: E402
from radixkv.storage import KVStorage  # noqa: E402
from tiny_models import MAX_MODEL_LEN, NATIVE, SUPPORTED, VOCAB_SIZE, WINDOW, model_of, tiny_model  # noqa: E402

# Logits here are of size 0.3 to 11. float32 rounds at 6e-8, and a few layers of sums of about 100 terms, taken in
# another order (flattened rows, fused attention), were seen to differ by 7e-6. A missing key moves them by over 1e-2.
TOLERANCE = {"atol": 1e-4, "rtol": 1e-4}


# Every architecture as it is in transformers, and those of the native family in our own code too.
ROUTES = [*((name, "transformers") for name in SUPPORTED), *((name, "native") for name in NATIVE)]


@functools.cache
def decoder_of(name, model_impl="auto"):
    """The decoder of a tiny model; built once, since nothing here changes it."""
    return Decoder.load(model_of(name), model_impl=model_impl)


def own_logits(model, ids):
    """(length, vocab_size): the model's own eager logits of one request alone."""
    with torch.no_grad():
        return model(input_ids=torch.tensor([ids]), use_cache=False).logits[0].float()


class Pool:
    """Scattered blocks of a storage whose idle slots hold `idle`."""

    def __init__(self, decoder, block_size, num_blocks=200, idle=float("nan"), seed=0):
        self.decoder, self.block_size = decoder, block_size
        self.storage = KVStorage(num_blocks, block_size, decoder.layers, decoder.dtype)
        for layer in range(self.storage.num_layers):
            self.storage.keys(layer).fill_(idle)
            self.storage.values(layer).fill_(idle)
        self.free = list(range(num_blocks))
        random.Random(seed).shuffle(self.free)

    def table(self, num_tokens, shared=()):
        """A block table for so many tokens, the first blocks being those of `shared`."""
        return [*shared, *(self.free.pop() for _ in range(-(-num_tokens // self.block_size) - len(shared)))]

    def run(self, rows):
        """The logits of every new token, one tensor per row."""
        batch = build_batch(rows, self.block_size)
        everywhere = torch.arange(batch.input_ids.shape[1])
        logits = self.decoder.forward(dataclasses.replace(batch, logits_indices=everywhere), self.storage)
        return logits.split([len(row.token_ids) for row in rows])


def prompt(length, seed):
    """Random token ids, the same for the same seed."""
    return random.Random(seed).choices(range(3, VOCAB_SIZE), k=length)


@pytest.mark.parametrize("block_size", [1, 4, 16])
@pytest.mark.parametrize(("name", "model_impl"), ROUTES)
def test_ragged_batch_gives_each_request_its_own_logits(name, model_impl, block_size):
    """A028: a cold batch, then one step mixing decodes, a chunk, a hit on shared blocks and a cold prompt."""
    decoder = decoder_of(name, model_impl)
    assert decoder.model_impl == model_impl
    pool = Pool(decoder, block_size)
    a, b, c = prompt(8, 1), prompt(34, 2), prompt(40, 3)
    d = [*b[:32], 5]  # shares the first 32 tokens of b, and their blocks
    e = prompt(15, 4)
    tables = {"a": pool.table(8), "b": pool.table(34), "c": pool.table(40), "e": pool.table(15)}
    tables["d"] = pool.table(33, shared=tables["b"][: 32 // block_size])

    cold = pool.run([Row(a[:7], 0, tables["a"]), Row(b[:33], 0, tables["b"]), Row(c[:16], 0, tables["c"])])
    mixed = pool.run(
        [
            Row(a[7:], 7, tables["a"]),
            Row(b[33:], 33, tables["b"]),
            Row(c[16:], 16, tables["c"]),
            Row(d[32:], 32, tables["d"]),
            Row(e, 0, tables["e"]),
        ]
    )
    truth = {key: own_logits(model_of(name), ids) for key, ids in {"a": a, "b": b, "c": c, "d": d, "e": e}.items()}
    for got, wanted in zip(cold, (truth["a"][:7], truth["b"][:33], truth["c"][:16]), strict=True):
        torch.testing.assert_close(got, wanted, **TOLERANCE)
    for got, (key, start) in zip(mixed, {"a": 7, "b": 33, "c": 16, "d": 32, "e": 0}.items(), strict=True):
        torch.testing.assert_close(got, truth[key][start:], **TOLERANCE)
    idle = torch.tensor(pool.free)
    keys = pool.storage.keys(0).view(-1, block_size, *pool.storage.keys(0).shape[1:])
    assert keys[idle].isnan().all(), "a block outside all tables was written"


@pytest.mark.parametrize("num_new", [1, 5, 20])
@pytest.mark.parametrize(("name", "model_impl"), [("llama", "transformers"), ("llama", "native"), ("gpt2", "auto")])
def test_positions_continue_behind_a_cached_prefix(name, model_impl, num_new):
    """A027: rotated and learned positions both start at 32 behind 32 cached tokens."""
    decoder = decoder_of(name, model_impl)
    pool = Pool(decoder, 16)
    ids = prompt(32 + num_new, num_new)
    table = pool.table(len(ids))
    pool.run([Row(ids[:32], 0, table)])
    (got,) = pool.run([Row(ids[32:], 32, table)])
    torch.testing.assert_close(got, own_logits(model_of(name), ids)[32:], **TOLERANCE)


@pytest.mark.parametrize("idle", [float("nan"), float("inf"), 1e30])
@pytest.mark.parametrize("name", ["llama", "gemma2", "gpt-oss-sinks"])
def test_idle_slots_never_reach_a_result(name, idle):
    """A026: the same bits as on a pool of zeros; masking alone would not do, as NaN times zero is NaN."""
    decoder = decoder_of(name)
    results = []
    for content in (0.0, idle):
        pool = Pool(decoder, 16, idle=content)
        prompts = [prompt(length, length) for length in (1, 15, 16, 17, 33)]
        tables = [pool.table(len(ids) + 1) for ids in prompts]
        pool.run([Row(ids, 0, table) for ids, table in zip(prompts, tables, strict=True)])
        results.append(pool.run([Row([9], len(ids), table) for ids, table in zip(prompts, tables, strict=True)]))
    for on_zeros, on_idle in zip(*results, strict=True):
        assert torch.equal(on_zeros, on_idle)


@pytest.mark.parametrize("name", ["llama", "mistral-sliding", "deepseek-v3-latent"])
def test_contiguous_and_scattered_tables_agree(name):
    """A view and a gather read the same numbers, so they must give the same answer."""
    decoder = decoder_of(name)
    ids = prompt(40, 7)
    outcomes = []
    for table in ([4, 5, 6], [9, 2, 5]):
        pool = Pool(decoder, 16)
        pool.run([Row(ids[:20], 0, table)])
        outcomes.append(torch.cat([pool.run([Row(ids[20:39], 20, table)])[0], pool.run([Row(ids[39:], 39, table)])[0]]))
    torch.testing.assert_close(*outcomes, **TOLERANCE)
    torch.testing.assert_close(outcomes[0], own_logits(model_of(name), ids)[20:], **TOLERANCE)


@pytest.mark.parametrize("name", [name for name in SUPPORTED if WINDOW in SUPPORTED[name][1].values()])
def test_ignoring_windows_would_show_in_these_tests(name, monkeypatch):
    """Guards the tests themselves: with prompts shorter than the windows, a route without windows would pass."""
    decoder = decoder_of(name, "transformers")
    monkeypatch.setattr(huggingface, "_span_of", lambda module, sliding_window: Span())
    pool = Pool(decoder, 4)
    (got,) = pool.run([Row(prompt(40, 5), 0, pool.table(40))])
    wanted = own_logits(model_of(name), prompt(40, 5))
    torch.testing.assert_close(got[:WINDOW], wanted[:WINDOW], **TOLERANCE)
    assert (got - wanted)[-1].abs().max() > 100 * TOLERANCE["atol"]


@pytest.mark.parametrize("name", ["llama", "gptj", "opt", "cohere2"])
def test_only_the_last_token_of_each_row_gets_logits(name):
    """The vocabulary projection of a long prompt costs more than the rest; one row per request is enough."""
    decoder = decoder_of(name)
    pool = Pool(decoder, 4)
    prompts = [prompt(9, 1), prompt(1, 2), prompt(4, 3)]
    batch = build_batch([Row(ids, 0, pool.table(len(ids))) for ids in prompts], 4)
    logits = decoder.forward(batch, pool.storage)
    assert logits.shape == (3, decoder.vocab_size)
    assert logits.dtype == torch.float32
    for got, ids in zip(logits, prompts, strict=True):
        torch.testing.assert_close(got, own_logits(model_of(name), ids)[-1], **TOLERANCE)


@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
@pytest.mark.parametrize("name", ["llama", "gemma3-text", "gpt2"])
def test_the_model_works_on_its_own_afterwards(name, implementation):
    """The registered name left in the configuration would make ordinary forwards and generate() raise."""
    model = tiny_model(name)
    model.set_attn_implementation(implementation)
    ids = torch.tensor([prompt(20, 1)])
    greedy = {"max_new_tokens": 6, "do_sample": False, "eos_token_id": None}
    before = model.generate(ids, **greedy)
    decoder = Decoder.load(model)
    pool = Pool(decoder, 4)
    pool.run([Row(prompt(5, 2), 0, pool.table(5))])
    assert model.config._attn_implementation == implementation
    assert torch.equal(model.generate(ids, **greedy), before)


def test_a_failing_forward_leaves_the_model_as_it_was():
    """A token id out of range raises inside the model; the next ordinary forward must not notice."""
    model = tiny_model("llama")
    for model_impl in ("transformers", "native"):
        pool = Pool(Decoder.load(model, model_impl=model_impl), 4)
        with pytest.raises(IndexError):
            pool.run([Row([VOCAB_SIZE + 5], 0, pool.table(1))])
        assert model.config._attn_implementation == "eager"
        own_logits(model, [4, 5])


def test_greedy_ids_equal_those_of_generate():
    """The whole path a user takes: prefill, then decode step by step, ids equal to the library's own loop."""
    decoder = decoder_of("qwen3")
    ids = prompt(19, 3)
    wanted = model_of("qwen3").generate(torch.tensor([ids]), max_new_tokens=20, do_sample=False, eos_token_id=None)
    pool = Pool(decoder, 4)
    table = pool.table(39)
    got, new, start = [], ids, 0
    for _ in range(20):
        logits = decoder.forward(build_batch([Row(new, start, table)], 4), pool.storage)
        start += len(new)
        new = [int(logits.argmax())]
        got += new
    assert got == wanted[0, 19:].tolist()


def test_two_decoders_keep_apart():
    """Nothing is kept in a global: steps of two models, interleaved, do not meet."""
    models = [model_of("llama"), model_of("gpt2")]
    decoders = [Decoder.load(model) for model in models]
    pools = [Pool(decoder, 4, seed=seed) for seed, decoder in enumerate(decoders)]
    ids = prompt(12, 9)
    tables = [pool.table(12) for pool in pools]
    for start, end in ((0, 5), (5, 11), (11, 12)):
        parts = [pool.run([Row(ids[start:end], start, table)])[0] for pool, table in zip(pools, tables, strict=True)]
        for part, model in zip(parts, models, strict=True):
            torch.testing.assert_close(part, own_logits(model, ids)[start:end], **TOLERANCE)


def test_a_saved_model_loads_with_its_limits_and_type(tmp_path):
    """A local directory is what users without a hub have; its dtype is kept, or the one asked for taken."""
    model = tiny_model("llama")
    model.generation_config.eos_token_id = [2, 7]
    model.save_pretrained(tmp_path)
    decoder = Decoder.load(tmp_path)
    assert decoder.dtype == torch.float32
    assert decoder.tokenizer is None
    assert decoder.name == str(tmp_path)
    assert (decoder.vocab_size, decoder.max_model_len) == (VOCAB_SIZE, MAX_MODEL_LEN)
    assert decoder.eos_token_ids == {2, 7}
    ids = prompt(12, 1)
    half = Decoder.load(str(tmp_path), dtype="bfloat16")
    assert half.dtype == torch.bfloat16
    pool = Pool(half, 4)
    (got,) = pool.run([Row(ids, 0, pool.table(12))])
    # Against its own bfloat16 eager forward: 8 bits of mantissa over two layers.
    wanted = own_logits(transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16), ids)
    assert ((got - wanted).norm() / wanted.norm()).item() < 0.05


def test_demo_model_behind_a_cached_prefix_equals_the_plain_model(demo_model):
    """The real thing, 30 layers: a hit on 40 tokens, a chunk and a decode step give the plain model's logits."""
    decoder = Decoder.load(demo_model, dtype="float32")
    assert decoder.tokenizer is not None
    assert decoder.eos_token_ids
    messages = [
        {"role": "system", "content": "You answer questions about rivers, in one short sentence and without a list."},
        {"role": "user", "content": "Which river flows through Vienna, Budapest and Belgrade, and where does it end?"},
    ]
    text = decoder.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    ids = decoder.tokenizer(text, add_special_tokens=False).input_ids
    assert len(ids) > 44
    pool = Pool(decoder, 16, num_blocks=12)
    table = pool.table(len(ids))
    pool.run([Row(ids[:40], 0, table)])
    chunk, decode = pool.run([Row(ids[40:-1], 40, table)])[0], pool.run([Row(ids[-1:], len(ids) - 1, table)])[0]
    # Logits of size up to 33, 30 layers of float32 sums in another order: 1e-3 is 20 times what was seen.
    model = transformers.AutoModelForCausalLM.from_pretrained(demo_model, dtype=torch.float32)
    torch.testing.assert_close(torch.cat([chunk, decode]), own_logits(model, ids)[40:], atol=1e-3, rtol=1e-4)

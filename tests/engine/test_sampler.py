"""Sampling against exact probabilities, and its independence of everything but the request and the weights."""

import functools
import math
import random

import pytest

torch = pytest.importorskip("torch", reason="sampling needs torch")
pytest.importorskip("transformers", reason="the engine needs transformers")

from engine import LLM, SamplingParams  # noqa: E402
from engine.models.huggingface import HuggingFaceDecoder  # noqa: E402
from engine.sampler import sample  # noqa: E402
from tiny_models import VOCAB_SIZE, tiny_model  # noqa: E402

LOGITS = [1.0, -0.5, 2.0, 0.0, 2.5, -3.0, 0.7, 1.9]
NUM_DRAWS = 2_000


@functools.cache
def decoder():
    """A tiny model; built once, since nothing here changes it."""
    return HuggingFaceDecoder.load(tiny_model("llama"))


def prompt(length, seed):
    """Random token ids, the same for the same seed."""
    return random.Random(seed).choices(range(3, VOCAB_SIZE), k=length)


def exact_probabilities(temperature, top_k, top_p):
    """By the definitions, in turn: temperature, then the top k, then the smallest set that reaches top p."""
    order = sorted(range(len(LOGITS)), key=lambda token_id: -LOGITS[token_id])
    kept = order[: top_k or None]
    weights = {token_id: math.exp(LOGITS[token_id] / temperature) for token_id in kept}
    total = sum(weights.values())
    nucleus, reached = [], 0.0
    for token_id in kept:
        nucleus.append(token_id)
        reached += weights[token_id] / total
        if reached >= top_p:
            break
    return {token_id: weights[token_id] / total / reached for token_id in nucleus}


def draw(params, seeds, positions):
    """Token ids drawn from `LOGITS`, one for each seed and position."""
    logits = torch.tensor(LOGITS).expand(len(seeds), -1)
    return sample(logits, [params] * len(seeds), seeds, positions)


@pytest.mark.parametrize("over", ["seeds", "positions"])
@pytest.mark.parametrize(
    ("temperature", "top_k", "top_p"),
    [(1.0, 0, 1.0), (0.5, 0, 1.0), (3.0, 0, 1.0), (1.0, 3, 1.0), (1.0, 0, 0.7), (2.0, 5, 0.6), (1.0, 100, 1.0)],
)
def test_draws_follow_the_exact_distribution(temperature, top_k, top_p, over):
    """Over requests and over the tokens of one request; what is cut off is never drawn."""
    params = SamplingParams(temperature=temperature, top_k=top_k, top_p=top_p)
    numbers = list(range(NUM_DRAWS))
    same = [7] * NUM_DRAWS
    drawn = draw(params, numbers, same) if over == "seeds" else draw(params, same, numbers)
    wanted = exact_probabilities(temperature, top_k, top_p)
    assert set(drawn) <= set(wanted)
    for token_id, probability in wanted.items():
        # 4.5 standard deviations of a binomial share: by chance once in 150,000 times.
        tolerance = 4.5 * math.sqrt(probability * (1 - probability) / NUM_DRAWS)
        assert drawn.count(token_id) / NUM_DRAWS == pytest.approx(probability, abs=tolerance)


def test_neighbouring_seeds_and_positions_are_unrelated():
    """Seeds 0, 1, 2 ... are what people type; requests with them must not move in step."""
    params = SamplingParams(temperature=1.0)
    square = [draw(params, [seed] * 200, range(200)) for seed in range(4)]
    chance = sum(probability**2 for probability in exact_probabilities(1.0, 0, 1.0).values())
    for first, second in [(0, 1), (1, 2), (0, 3)]:
        for shift in (0, 1):
            pairs = list(zip(square[first][shift:], square[second], strict=False))
            share = sum(a == b for a, b in pairs) / len(pairs)
            assert share == pytest.approx(chance, abs=4.5 * math.sqrt(chance * (1 - chance) / len(pairs)))


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(),
        SamplingParams(temperature=5.0, top_k=1),
        SamplingParams(temperature=5.0, top_p=1e-9),
        SamplingParams(temperature=1e-6),
        SamplingParams(temperature=5e-324),
    ],
    ids=["greedy", "top_k=1", "tiny top_p", "low temperature", "lowest temperature"],
)
def test_every_way_of_asking_for_the_most_likely_token_gives_it(params):
    """A temperature so low that scores overflow chose the first of all tokens with a positive score."""
    logits = torch.randn(50, VOCAB_SIZE, generator=torch.Generator().manual_seed(0)) * 3
    assert sample(logits, [params] * 50, range(50), [0] * 50) == logits.argmax(-1).tolist()


def test_hidden_tokens_are_never_drawn():
    """A score of minus infinity is how tokens are forbidden."""
    logits = torch.tensor([[0.0, float("-inf"), 1.0, float("-inf")]]).expand(300, -1)
    drawn = sample(logits, [SamplingParams(temperature=50.0)] * 300, range(300), [0] * 300)
    assert set(drawn) == {0, 2}


def test_rows_with_different_params_do_not_meet():
    """Greedy and sampled requests share a step; each row must be what it is alone."""
    logits = torch.randn(6, VOCAB_SIZE, generator=torch.Generator().manual_seed(1))
    params = [
        SamplingParams(),
        SamplingParams(temperature=1.0),
        SamplingParams(temperature=2.0, top_k=4),
        SamplingParams(),
        SamplingParams(temperature=0.7, top_p=0.5),
        SamplingParams(temperature=9.0),
    ]
    together = sample(logits, params, range(6), range(6))
    assert together == [sample(logits[i : i + 1], [params[i]], [i], [i])[0] for i in range(6)]


class TestThroughTheEngine:
    def test_seeded_tokens_are_those_drawn_from_the_model_alone(self):
        """The whole path: drawn by hand from the model's own uncached logits, token by token."""
        params = SamplingParams(max_tokens=10, temperature=1.5, top_k=50, top_p=0.95, seed=11, ignore_eos=True)
        ids = prompt(17, 1)
        wanted = []
        for position in range(params.max_tokens):
            with torch.no_grad():
                logits = decoder().model(torch.tensor([ids + wanted]), use_cache=False).logits[0, -1:].float()
            wanted += sample(logits, [params], [params.seed], [position])
        llm = LLM(decoder(), num_blocks=32)
        for _ in range(2):
            assert llm.generate(ids, params)[0].outputs[0].token_ids == wanted

    def test_seeded_output_depends_on_neither_neighbours_nor_order_nor_cache(self):
        """A request that can be repeated is worth something only if it can be repeated on a busy machine."""
        asked = [
            (prompt(length, length), SamplingParams(max_tokens=9, temperature=2.0, seed=seed, ignore_eos=True))
            for length, seed in ((1, 0), (16, 1), (17, 1), (40, 2), (5, 3))
        ]
        alone = [LLM(decoder(), num_blocks=32).generate(ids, params)[0].outputs[0].token_ids for ids, params in asked]
        for block_size, max_num_seqs in ((1, 64), (4, 2), (16, 3)):
            llm = LLM(decoder(), block_size=block_size, num_blocks=128 // block_size, max_num_seqs=max_num_seqs)
            order = random.Random(block_size).sample(range(len(asked)), len(asked))
            outputs = llm.generate([asked[i][0] for i in order], [asked[i][1] for i in order])
            assert [output.outputs[0].token_ids for output in outputs] == [alone[i] for i in order]

    def test_seeds_differ_and_missing_seeds_are_fresh(self):
        """Two requests without a seed must not say the same, or n answers would be one; nor must two seeds."""
        llm = LLM(decoder(), num_blocks=64)
        seeded = [SamplingParams(max_tokens=16, temperature=3.0, seed=seed, ignore_eos=True) for seed in (1, 2, 1)]
        fresh = [SamplingParams(max_tokens=16, temperature=3.0, ignore_eos=True)] * 2
        one, two, again, *others = [
            output.outputs[0].token_ids for output in llm.generate([[5, 6, 7]] * 5, seeded + fresh)
        ]
        assert one == again != two
        # Of 128 tokens at this temperature, 16 in a row agree by chance less than once in 10**15 times.
        assert others[0] != others[1]

    @pytest.mark.parametrize(
        "params",
        [
            SamplingParams(max_tokens=12, temperature=4.0, top_k=1, ignore_eos=True),
            SamplingParams(max_tokens=12, temperature=4.0, top_p=1e-9, ignore_eos=True),
        ],
        ids=["top_k=1", "tiny top_p"],
    )
    def test_sampling_among_one_token_is_greedy(self, params):
        """Two ways to say the same thing give the same text."""
        llm = LLM(decoder(), num_blocks=32)
        greedy, sampled = llm.generate([prompt(20, 3)] * 2, [SamplingParams(max_tokens=12, ignore_eos=True), params])
        assert greedy.outputs[0].token_ids == sampled.outputs[0].token_ids


@pytest.mark.parametrize(
    ("arguments", "error", "match"),
    [
        ({"max_tokens": 0}, ValueError, "max_tokens is 0"),
        ({"max_tokens": -1}, ValueError, "max_tokens is -1"),
        ({"max_tokens": None}, TypeError, "max_tokens must be an integer, not None"),
        ({"max_tokens": True}, TypeError, "max_tokens must be an integer, not True"),
        ({"max_tokens": 1.5}, TypeError, r"max_tokens must be an integer, not 1\.5"),
        ({"max_tokens": "8"}, TypeError, "max_tokens must be an integer, not '8'"),
        ({"temperature": -0.1}, ValueError, r"temperature is -0\.1"),
        ({"temperature": math.nan}, ValueError, "temperature is nan"),
        ({"temperature": math.inf}, ValueError, "temperature is inf"),
        ({"temperature": None}, TypeError, "temperature must be a number, not None"),
        ({"temperature": False}, TypeError, "temperature must be a number, not False"),
        ({"top_k": -1}, ValueError, "top_k is -1"),
        ({"top_k": 2.0}, TypeError, r"top_k must be an integer, not 2\.0"),
        ({"top_p": 0}, ValueError, "top_p is 0"),
        ({"top_p": 1.01}, ValueError, r"top_p is 1\.01"),
        ({"top_p": math.nan}, ValueError, "top_p is nan"),
        ({"seed": 1.0}, TypeError, r"seed must be an integer, not 1\.0"),
        ({"seed": True}, TypeError, "seed must be an integer, not True"),
    ],
)
def test_params_that_mean_nothing_are_refused_when_made(arguments, error, match):
    """A025: with the value and the rule, long before a request with them could run."""
    with pytest.raises(error, match=match):
        SamplingParams(**arguments)

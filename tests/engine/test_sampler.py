"""Sampling against exact probabilities, and its independence of everything but the request and the weights."""

import dataclasses
import functools
import math
import random
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

torch = pytest.importorskip("torch", reason="sampling needs torch")
transformers = pytest.importorskip("transformers", reason="the engine needs transformers")

from engine import LLM, SamplingParams  # noqa: E402
from engine.models.decoder import Decoder  # noqa: E402
from engine.sampler import Draw, candidates, processed_logits, prompt_logprobs, sample  # noqa: E402
from tiny_models import VOCAB_SIZE, model_of, tiny_model  # noqa: E402

LOGITS = [1.0, -0.5, 2.0, 0.0, 2.5, -3.0, 0.7, 1.9]
NUM_DRAWS = 2_000


@functools.cache
def decoder():
    """A tiny model; built once, since nothing here changes it."""
    return Decoder.load(tiny_model("llama"))


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


def one(params, row=0, seed=0, prompt=(), output=(), ends=()):
    """A draw, of which most tests need few parts."""
    return Draw(row, params, seed, prompt, output, frozenset(ends))


def ids_of(logits, draws):
    """The token ids alone."""
    return [sampled.token_id for sampled in sample(logits, draws)]


def draw(params, seeds, positions):
    """Token ids drawn from `LOGITS`, one for each seed and position."""
    draws = [
        one(params, row, seed, output=[0] * position)
        for row, (seed, position) in enumerate(zip(seeds, positions, strict=True))
    ]
    return ids_of(torch.tensor(LOGITS).expand(len(draws), -1), draws)


def random_logits(num_rows, vocab_size, seed, num_values=None):
    """Normal numbers, or with `num_values` whole ones from 0, so that many are equal."""
    generator = torch.Generator().manual_seed(seed)
    if num_values is None:
        return torch.randn(num_rows, vocab_size, generator=generator) * 3
    return torch.randint(num_values, (num_rows, vocab_size), generator=generator).float()


def exact_logprobs(row):
    """By the definition, in Python's floats."""
    weights = [math.exp(logit) for logit in row.tolist()]
    return [math.log(weight / sum(weights)) for weight in weights]


def by_likelihood(row):
    """Token ids, most likely first, equals by id."""
    return sorted(range(len(row)), key=lambda token_id: (-row[token_id].item(), token_id))


def rank_in(row, token_id):
    """By the definition: 1 and one more for each token that is more likely."""
    return 1 + sum(logit > row[token_id].item() for logit in row.tolist())


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
    logits = random_logits(50, VOCAB_SIZE, seed=0)
    assert ids_of(logits, [one(params, row, seed=row) for row in range(50)]) == logits.argmax(-1).tolist()


def test_hidden_tokens_are_never_drawn():
    """A score of minus infinity is how tokens are forbidden."""
    logits = torch.tensor([[0.0, float("-inf"), 1.0, float("-inf")]]).expand(300, -1)
    drawn = ids_of(logits, [one(SamplingParams(temperature=50.0), row, seed=row) for row in range(300)])
    assert set(drawn) == {0, 2}


def test_draws_that_ask_for_the_most_likely_token_are_one_argmax_whatever_their_number():
    """A step's usual batch: whatever is done for each row costs every token of every request."""

    class Calls(torch.overrides.TorchFunctionMode):
        def __init__(self):
            super().__init__()
            self.names = []

        def __torch_function__(self, function, types, args=(), kwargs=None):
            self.names.append(function.__name__)
            return function(*args, **(kwargs or {}))

    logits = random_logits(40, VOCAB_SIZE, seed=1)
    with Calls() as calls:
        sample(logits, [one(SamplingParams(), row) for row in range(40)])
    assert calls.names.count("numpy") == 1
    assert set(calls.names) <= {"__len__", "__get__", "numpy"}, "nothing is done for each row"


@pytest.mark.parametrize("rows", [[2], [3, 0], [1, 1, 3, 3], [3, 2, 1, 0]], ids=str)
@pytest.mark.parametrize("params", [SamplingParams(), SamplingParams(temperature=1e-6)], ids=["greedy", "sampled"])
def test_a_draw_reads_the_row_it_names(rows, params):
    """Rows may be left out, shared, and read in any order: those of a prompt's log-probabilities lie among them."""
    logits = random_logits(4, VOCAB_SIZE, seed=2)
    most_likely = logits.argmax(-1).tolist()
    assert len(set(most_likely)) == 4
    assert ids_of(logits, [one(params, row) for row in rows]) == [most_likely[row] for row in rows]


def test_draws_from_one_row_are_those_of_their_seeds_alone():
    """Continuation i of n can be had alone with the seed `seed + i`; and n of them must not say the same."""
    logits = random_logits(2, VOCAB_SIZE, seed=3)
    params = SamplingParams(temperature=3.0)
    together = ids_of(logits, [one(params, 1, seed=5 + i) for i in range(20)])
    assert together == [ids_of(logits[1:], [one(params, seed=5 + i)])[0] for i in range(20)]
    assert len(set(together)) > 10


def test_no_draws_give_nothing():
    """A step may hold nothing but the first parts of prompts."""
    assert sample(random_logits(2, VOCAB_SIZE, seed=4), []) == []


SMALL = 7  # tokens in the vocabulary of the tests below: short outputs repeat some of them
TOKENS = st.lists(st.integers(0, SMALL - 1), max_size=6)
PENALTY = st.sampled_from([0.0, 0.0, -2, -0.7, 0.5, 1.3, 2.0])
PARAMS = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.0, 0.0, 0.4, 1.0, 3]),
    top_k=st.sampled_from([0, 0, 1, 3]),
    top_p=st.sampled_from([1.0, 1.0, 0.6]),
    repetition_penalty=st.sampled_from([1.0, 1.0, 0.5, 1.2, 3]),
    presence_penalty=PENALTY,
    frequency_penalty=PENALTY,
    min_tokens=st.sampled_from([0, 0, 1, 2, 6]),
    logprobs=st.sampled_from([None, None, 0, 1, 3, SMALL, SMALL + 1]),
)
# Whole logits make equals common; positive and negative ones are treated differently.
ROW = st.lists(st.sampled_from([-4.0, -1.0, 0.0, 0.5, 1.0, 4.0]), min_size=SMALL, max_size=SMALL)
NUM_ROWS = 3
DRAW = st.builds(
    Draw,
    row=st.integers(0, NUM_ROWS - 1),
    params=PARAMS,
    seed=st.integers(0, 5),
    prompt_token_ids=TOKENS,
    output_token_ids=TOKENS,
    end_token_ids=st.frozensets(st.integers(0, SMALL + 1), max_size=SMALL + 2),
)


@given(rows=st.lists(ROW, min_size=NUM_ROWS, max_size=NUM_ROWS), draws=st.lists(DRAW, max_size=6))
def test_neighbours_in_the_batch_do_not_matter(rows, draws):
    """Greedy and sampled requests share a step, with and without penalties; each must be what it is alone."""
    logits = torch.tensor(rows)
    together = sample(logits, draws)
    alone = [sample(logits[draw.row : draw.row + 1], [draw._replace(row=0)])[0] for draw in draws]
    assert [sampled.token_id for sampled in together] == [sampled.token_id for sampled in alone]
    for ours, wanted in zip(together, alone, strict=True):
        assert (ours.logprobs is None) == (wanted.logprobs is None)
        # A row's sum may be taken in another order beside others: a few roundings in float64.
        assert [(i, p.rank, pytest.approx(p.logprob, abs=1e-12)) for i, p in (ours.logprobs or {}).items()] == [
            (i, p.rank, p.logprob) for i, p in (wanted.logprobs or {}).items()
        ]


@given(rows=st.lists(ROW, min_size=NUM_ROWS, max_size=NUM_ROWS), draws=st.lists(DRAW, max_size=6))
def test_logits_are_left_as_they_were(rows, draws):
    """Several draws read one row, and log-probabilities are taken from it after the penalties were."""
    for dtype in (torch.float32, torch.float64):  # the latter needs no conversion, which would have made a copy
        logits = torch.tensor(rows, dtype=dtype)
        sample(logits, draws)
        for draw in draws:
            processed_logits(logits[draw.row], draw)
            candidates(logits[draw.row], 3)
        prompt_logprobs(logits, [0] * NUM_ROWS, 3)
        assert logits.tolist() == rows


def penalised(row, draw):
    """Steps 1 to 3 by their definitions, one token at a time; None where a token is out of reach."""
    params, scores = draw.params, []
    counts = Counter(draw.output_token_ids)
    for token_id, score in enumerate(row):
        if token_id in draw.prompt_token_ids or token_id in draw.output_token_ids:
            score = score / params.repetition_penalty if score > 0 else score * params.repetition_penalty
        if counts[token_id] > 0:
            score -= params.presence_penalty
        score -= params.frequency_penalty * counts[token_id]
        scores.append(score)
    allowed = set(range(SMALL)) - (draw.end_token_ids if len(draw.output_token_ids) < params.min_tokens else set())
    return [score if token_id in allowed or not allowed else None for token_id, score in enumerate(scores)]


@given(row=ROW, draw=DRAW)
def test_penalties_and_the_least_length_are_what_their_definitions_say(row, draw):
    """In this order: to divide after subtracting, or to count the prompt, gives other tokens."""
    wanted = penalised(row, draw)
    ours = processed_logits(torch.tensor(row), draw).tolist()
    # Half a dozen float64 operations on numbers below 100.
    assert [None if score == -math.inf else pytest.approx(score, abs=1e-12) for score in ours] == wanted


@given(row=ROW, draw=DRAW)
def test_a_token_is_chosen_from_the_processed_logits_alone(row, draw):
    """Greedy or by temperature, top k and top p: these come after all that the tokens so far have changed."""
    plain = dataclasses.replace(
        draw.params, repetition_penalty=1.0, presence_penalty=0.0, frequency_penalty=0.0, min_tokens=0
    )
    processed = processed_logits(torch.tensor(row), draw)
    assert ids_of(torch.tensor([row]), [draw._replace(row=0)]) == ids_of(
        processed[None], [draw._replace(row=0, params=plain)]
    )


@pytest.mark.parametrize("penalty", [0.3, 1.0, 1.1, 2.0])
def test_the_repetition_penalty_is_that_of_transformers(penalty):
    """The same request must say the same in both."""
    logits = random_logits(20, VOCAB_SIZE, seed=5)
    params = SamplingParams(repetition_penalty=penalty)
    processor = transformers.RepetitionPenaltyLogitsProcessor(penalty)
    for row in range(len(logits)):
        ids, output = prompt(row % 5 + 1, row), prompt(row, -row)
        wanted = processor(torch.tensor([ids + output]), logits[row : row + 1])
        ours = processed_logits(logits[row], one(params, prompt=ids, output=output))
        # Theirs is float32: one rounding of the penalty and one of the product.
        torch.testing.assert_close(ours.float(), wanted[0], rtol=2.5e-7, atol=0)
        assert ids_of(logits, [one(params, row, prompt=ids, output=output)]) == wanted.argmax(-1).tolist()


@pytest.mark.parametrize("min_tokens", [1, 4, 16])
def test_the_least_length_is_that_of_transformers(min_tokens):
    """An end is out of reach for tokens 0 to min_tokens - 1 of the output, so that it is token min_tokens at best."""
    ends = {0, 5, VOCAB_SIZE - 1}
    params = SamplingParams(min_tokens=min_tokens)
    for length in range(18):
        ids, output = prompt(3, length), prompt(length, -length)
        processor = transformers.MinNewTokensLengthLogitsProcessor(len(ids), min_tokens, sorted(ends))
        logits = random_logits(1, VOCAB_SIZE, seed=length)
        wanted = processor(torch.tensor([ids + output]), logits)
        drawn = one(params, prompt=ids, output=output, ends=ends)
        assert torch.equal(processed_logits(logits[0], drawn).float(), wanted[0])
        assert wanted.isinf().any() == (length < min_tokens)


@pytest.mark.parametrize("penalty", [1.0, 0.5])
@pytest.mark.parametrize("temperature", [0.0, 1.0, 50.0])
def test_ends_that_are_most_likely_are_not_drawn_before_the_least_length(temperature, penalty):
    """The request would end with fewer tokens than were asked for."""
    logits = torch.tensor([[9.0, 1.0, 8.0, 2.0]])
    params = SamplingParams(temperature=temperature, min_tokens=3, repetition_penalty=penalty)

    def drawn(num_output, ends):
        return {ids_of(logits, [one(params, seed=seed, output=[0] * num_output, ends=ends)])[0] for seed in range(100)}

    assert drawn(2, {0, 2}) <= {1, 3}
    assert 0 in drawn(3, {0, 2})
    assert 0 in drawn(2, set())
    assert 0 in drawn(2, {4, 10**6})  # not in the vocabulary


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("ends", [{0, 1, 2, 3}, {1, 3}], ids=["every token", "every token the model allows"])
def test_where_every_token_ends_the_request_it_ends(ends, temperature):
    """Nothing is left to say before min_tokens; a token the model has forbidden would be worse than a short reply."""
    logits = torch.tensor([[-math.inf, 1.0, -math.inf, 2.0]])
    params = SamplingParams(temperature=temperature, min_tokens=3)
    assert {ids_of(logits, [one(params, seed=seed, ends=ends)])[0] for seed in range(50)} <= {1, 3}


@pytest.mark.parametrize("penalty", [5e-324, 1e-300, 1e300, 1.7e308])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_the_wildest_penalties_leave_something_to_draw(penalty, temperature):
    """Infinite scores would make probabilities NaN; a forbidden token stays forbidden."""
    params = SamplingParams(temperature=temperature, repetition_penalty=penalty)
    for row in ([-4.0, -2.0, -math.inf, -3.0], [1.0, 2.0, -math.inf, 3.0], [0.0, 0.0, -math.inf, 0.0]):
        seen = [0, 1, 2, 3]
        processed = processed_logits(torch.tensor(row), one(params, prompt=seen))
        assert processed.isfinite().tolist() == [True, True, False, True]
        assert {ids_of(torch.tensor([row]), [one(params, seed=i, prompt=seen)])[0] for i in range(30)} <= {0, 1, 3}
        assert ids_of(torch.tensor([[1.0, 2.0, 3.0, -math.inf]]), [one(params, prompt=[2])]) == [
            2 if penalty < 1 else 1
        ]


class TestLogprobs:
    @pytest.mark.parametrize("num_top", [0, 1, 3, 8, 9, 10**6])
    def test_they_are_those_of_the_model_for_the_sampled_token_and_the_most_likely(self, num_top):
        """Before penalties, mask and temperature: what was sampled is judged by the model, not by the request."""
        logits = torch.tensor([LOGITS])
        wanted = exact_logprobs(logits[0])
        order = by_likelihood(logits[0])
        for seed in range(20):
            params = SamplingParams(
                temperature=9.0, repetition_penalty=1.5, presence_penalty=1.0, min_tokens=5, top_k=6, logprobs=num_top
            )
            ((token_id, logprobs),) = sample(logits, [one(params, seed=seed, output=[4, 2, 4], ends=[0])])
            assert list(logprobs) == [token_id, *(i for i in order[:num_top] if i != token_id)]
            for i, logprob in logprobs.items():
                # Float32 logits are exact here; the rest is float64 in both.
                assert logprob == (pytest.approx(wanted[i], abs=1e-12), order.index(i) + 1, None)

    def test_only_those_who_ask_get_them(self):
        """Each as many as its own params say, also from a shared row, and none is a result of its own."""
        logits = random_logits(3, SMALL, seed=6)
        asked = [None, 2, 0, None, 5, 2]
        draws = [one(SamplingParams(logprobs=num), row) for num, row in zip(asked, [0, 2, 2, 2, 1, 0], strict=True)]
        for (token_id, logprobs), draw in zip(sample(logits, draws), draws, strict=True):
            num = draw.params.logprobs
            # Greedy: the sampled token is the first of the most likely.
            wanted = None if num is None else by_likelihood(logits[draw.row])[: max(num, 1)]
            assert (None if logprobs is None else list(logprobs)) == wanted
            if num is not None:
                assert logprobs[token_id].logprob == pytest.approx(
                    exact_logprobs(logits[draw.row])[token_id], abs=1e-12
                )

    def test_those_of_a_whole_vocabulary_are_a_distribution(self):
        """None above 0, also where one token has nearly all; float32 sums gave such a token more than certainty."""
        logits = random_logits(30, 2_000, seed=7)
        logits[torch.arange(30), torch.arange(30)] = torch.linspace(5, 40, 30)
        params = SamplingParams(logprobs=2_000)
        for _, logprobs in sample(logits, [one(params, row) for row in range(30)]):
            assert len(logprobs) == 2_000
            assert all(entry.logprob <= 0 for entry in logprobs.values())
            assert math.fsum(math.exp(entry.logprob) for entry in logprobs.values()) == pytest.approx(1, abs=1e-12)

    @pytest.mark.parametrize("num_values", [1, 2, 5])
    def test_equals_share_a_rank_and_come_by_id(self, num_values):
        """Models in 16 bits say the same of many tokens; which are shown must not depend on the machine."""
        logits = random_logits(20, 30, seed=8, num_values=num_values)
        for num_top in (1, 2, 7, 29, 30):
            params = SamplingParams(temperature=9.0, logprobs=num_top)
            for row, (token_id, logprobs) in enumerate(sample(logits, [one(params, i, seed=i) for i in range(20)])):
                top = by_likelihood(logits[row])[:num_top]
                assert list(logprobs) == [token_id, *(i for i in top if i != token_id)]
                assert {i: entry.rank for i, entry in logprobs.items()} == {
                    i: rank_in(logits[row], i) for i in logprobs
                }

    @pytest.mark.parametrize("num_top", [0, 1, 4, SMALL, SMALL + 5])
    @pytest.mark.parametrize("num_rows", [0, 1, 63, 64, 65, 130])
    def test_those_of_a_prompt_describe_each_token_under_the_row_before_it(self, num_rows, num_top):
        """Lengths round the number of rows that are taken at once."""
        logits = random_logits(num_rows, SMALL, seed=9)
        following = random.Random(num_rows).choices(range(SMALL), k=num_rows)
        described = prompt_logprobs(logits, following, num_top)
        assert len(described) == num_rows
        for row, token_id, logprobs in zip(logits, following, described, strict=True):
            wanted = exact_logprobs(row)
            assert list(logprobs) == [token_id, *(i for i in by_likelihood(row)[:num_top] if i != token_id)]
            for i, logprob in logprobs.items():
                assert logprob == (pytest.approx(wanted[i], abs=1e-12), rank_in(row, i), None)

    def test_rows_and_tokens_of_a_prompt_must_be_as_many(self):
        """One too few would describe tokens that stand elsewhere."""
        with pytest.raises(AssertionError, match="3 rows for 2 tokens"):
            prompt_logprobs(random_logits(3, SMALL, seed=10), [1, 2], 0)

    @pytest.mark.parametrize("num_values", [None, 1, 2, 5])
    @pytest.mark.parametrize("num", [0, 1, 2, 9, 29, 30, 31])
    def test_candidates_are_the_most_likely_first_and_equals_by_id(self, num, num_values):
        """A search that keeps the best few must keep the same ones everywhere."""
        row = random_logits(1, 30, seed=11, num_values=num_values)[0]
        wanted = exact_logprobs(row)
        # Rounded to float32, as the scores of beams are in transformers.
        assert candidates(row, num) == [(i, pytest.approx(wanted[i], abs=1e-6)) for i in by_likelihood(row)[:num]]


class TestThroughTheEngine:
    def test_seeded_tokens_are_those_drawn_from_the_model_alone(self):
        """The whole path: drawn by hand from the model's own uncached logits, token by token."""
        params = SamplingParams(max_tokens=10, temperature=1.5, top_k=50, top_p=0.95, seed=11, ignore_eos=True)
        ids = prompt(17, 1)
        wanted = []
        for _ in range(params.max_tokens):
            with torch.no_grad():
                logits = model_of("llama")(torch.tensor([ids + wanted]), use_cache=False).logits[0, -1:].float()
            wanted += ids_of(logits, [one(params, seed=params.seed, prompt=ids, output=wanted)])
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
        ({"temperature": 10**400}, ValueError, "temperature is 1000"),
        ({"ignore_eos": None}, TypeError, "ignore_eos must be True or False, not None"),
        ({"n": 0}, ValueError, "n is 0; allowed: 1 and more"),
        ({"n": True}, TypeError, "n must be an integer, not True"),
        ({"n": 2.0}, TypeError, r"n must be an integer, not 2\.0"),
        ({"n": None}, TypeError, "n must be an integer, not None"),
        ({"stop": ""}, ValueError, r"stop is \('',\); allowed: strings of one character and more"),
        ({"stop": ["a", ""]}, ValueError, r"stop is \['a', ''\]; allowed: strings of one character"),
        ({"stop": b"a"}, TypeError, "stop must be a string, a sequence of strings or None, not b'a'"),
        ({"stop": ["a", 1]}, TypeError, r"stop must be a string, a sequence of strings or None, not \['a', 1\]"),
        ({"stop": {"a"}}, TypeError, "stop must be .*, not {'a'}"),
        ({"stop": 5}, TypeError, "stop must be .*, not 5"),
        ({"stop_token_ids": [3, -1]}, ValueError, "stop_token_ids has -1; allowed: 0 and more"),
        ({"stop_token_ids": [True]}, TypeError, r"stop_token_ids must be a sequence of integers, not \[True\]"),
        ({"stop_token_ids": [1.0]}, TypeError, r"stop_token_ids must be a sequence of integers, not \[1\.0\]"),
        ({"stop_token_ids": b"ab"}, TypeError, "stop_token_ids must be a sequence of integers, not b'ab'"),
        ({"stop_token_ids": ""}, TypeError, "stop_token_ids must be a sequence of integers, not ''"),
        ({"stop_token_ids": 5}, TypeError, "stop_token_ids must be a sequence of integers, not 5"),
        ({"stop_token_ids": None}, TypeError, "stop_token_ids must be a sequence of integers, not None"),
        ({"include_stop_str_in_output": "no"}, TypeError, "include_stop_str_in_output must be True or False, not 'no'"),
        ({"include_stop_str_in_output": 1}, TypeError, "include_stop_str_in_output must be True or False, not 1"),
        ({"min_tokens": -1}, ValueError, "min_tokens is -1; allowed: 0 to max_tokens, which is 64"),
        ({"min_tokens": 9, "max_tokens": 8}, ValueError, "min_tokens is 9; allowed: 0 to max_tokens, which is 8"),
        ({"min_tokens": 1.0}, TypeError, r"min_tokens must be an integer, not 1\.0"),
        ({"min_tokens": False}, TypeError, "min_tokens must be an integer, not False"),
        ({"repetition_penalty": 0}, ValueError, "repetition_penalty is 0; allowed: above 0"),
        ({"repetition_penalty": -1.5}, ValueError, r"repetition_penalty is -1\.5"),
        ({"repetition_penalty": math.nan}, ValueError, "repetition_penalty is nan"),
        ({"repetition_penalty": math.inf}, ValueError, "repetition_penalty is inf"),
        ({"repetition_penalty": 10**400}, ValueError, "repetition_penalty is 1000"),
        ({"repetition_penalty": True}, TypeError, "repetition_penalty must be a number, not True"),
        ({"repetition_penalty": None}, TypeError, "repetition_penalty must be a number, not None"),
        *(
            ({name: value}, error, f"{name} {words}")
            for name in ("presence_penalty", "frequency_penalty")
            for value, error, words in (
                (-2.01, ValueError, r"is -2\.01; allowed: -2 to 2"),
                (3, ValueError, "is 3; allowed: -2 to 2"),
                (math.nan, ValueError, "is nan"),
                (-math.inf, ValueError, "is -inf"),
                ("1", TypeError, "must be a number, not '1'"),
                (False, TypeError, "must be a number, not False"),
            )
        ),
        *(
            ({name: value}, error, f"{name} {words}")
            for name in ("logprobs", "prompt_logprobs")
            for value, error, words in (
                (-1, ValueError, "is -1; allowed: 0"),
                (1.0, TypeError, r"must be an integer, not 1\.0"),
                (True, TypeError, "must be an integer, not True"),
            )
        ),
    ],
)
def test_params_that_mean_nothing_are_refused_when_made(arguments, error, match):
    """A025: with the value and the rule, long before a request with them could run."""
    with pytest.raises(error, match=match):
        SamplingParams(**arguments)


@pytest.mark.parametrize(
    "arguments",
    [
        {"n": 1},
        {"n": 5, "temperature": 0.0},
        {"max_tokens": 8, "min_tokens": 8},
        {"min_tokens": 0},
        {"repetition_penalty": 5e-324},
        {"repetition_penalty": 2},
        {"presence_penalty": -2, "frequency_penalty": 2.0},
        {"presence_penalty": 2, "frequency_penalty": -2.0},
        {"logprobs": 0, "prompt_logprobs": 10**9},
        {"stop_token_ids": range(3)},
    ],
    ids=str,
)
def test_the_borders_of_what_is_allowed_are_allowed(arguments):
    """A rule that refuses its own border is another rule."""
    params = SamplingParams(**arguments)
    assert {name: getattr(params, name) for name in arguments} == {
        **arguments,
        **({"stop_token_ids": (0, 1, 2)} if "stop_token_ids" in arguments else {}),
    }


@pytest.mark.parametrize(
    ("stop", "kept"), [(None, ()), ([], ()), ("ab", ("ab",)), (["b", "a", "b"], ("b", "a", "b")), (("\n",), ("\n",))]
)
def test_ways_to_say_the_same_are_equal(stop, kept):
    """Params are values: kept in sets, compared, and changed one field at a time."""
    token_ids = [7, 0]
    params = SamplingParams(stop=stop, stop_token_ids=token_ids, min_tokens=2)
    same = SamplingParams(stop=kept, stop_token_ids=(7, 0), min_tokens=2)
    token_ids.append(-1)
    assert params.stop == kept
    assert params.stop_token_ids == (7, 0)
    assert len({params, same}) == 1
    changed = dataclasses.replace(params, max_tokens=3)
    assert changed != params
    assert dataclasses.replace(changed, max_tokens=params.max_tokens) == params
    with pytest.raises(ValueError, match="min_tokens is 2; allowed: 0 to max_tokens, which is 1"):
        dataclasses.replace(params, max_tokens=1)


def test_what_was_said_by_position_before_there_were_more_fields_still_is():
    """New fields come after the old ones."""
    params = SamplingParams(8, 0.5, 3, 0.9, 1, True)
    assert params == SamplingParams(max_tokens=8, temperature=0.5, top_k=3, top_p=0.9, seed=1, ignore_eos=True)


@pytest.mark.parametrize(
    ("arguments", "has"),
    [
        ({}, False),
        ({"temperature": 2.0, "min_tokens": 3, "logprobs": 1}, False),
        ({"repetition_penalty": 0.9}, True),
        ({"presence_penalty": -0.1}, True),
        ({"frequency_penalty": 2}, True),
    ],
)
def test_any_penalty_counts(arguments, has):
    """Without one, a greedy draw needs no more than the largest logit."""
    assert SamplingParams(**arguments).has_penalties is has

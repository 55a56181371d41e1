"""Beam search gives the token ids, order and scores of `generate` of transformers, over real and table-driven models.

`BeamSearch` is driven here by plain uncached forward passes. A table-driven model looks its logits up by position and
last token: both sides then add the very same float32 numbers, on any machine, and a thousand searches take seconds.
"""

import functools
import itertools
import math
import random

import pytest
from hypothesis import given, reject
from hypothesis import strategies as st

torch = pytest.importorskip("torch", reason="the truth of these tests needs torch")
transformers = pytest.importorskip("transformers", reason="the truth of these tests is generate of transformers")

from engine.beam_search import BeamSearch, BeamSearchParams, Extend, Hypothesis  # noqa: E402
from tiny_models import VOCAB_SIZE, tiny_model  # noqa: E402

# The same float32 sums in the same order: both sides were seen to agree to the last bit. Room for four float32 steps of
# 1.2e-7, as a torch that multiplies by a rounded reciprocal where ours divides needs it.
TOLERANCE = {"rel": 5e-7, "abs": 0}
BEAM_WIDTHS = [1, 2, 3, 5]
LENGTH_PENALTIES = [-1, 0, 0.7, 1, 2]
EARLY_STOPPING = [False, True, "never"]
TABLE_VOCAB_SIZE = 12
TABLE_LENGTH = 24
PROMPT = [3, 7, 5]


class TableModel(transformers.PreTrainedModel, transformers.GenerationMixin):
    """Logits looked up by position and last token. Positions keep two orders of the same steps from having one sum."""

    config_class = transformers.PretrainedConfig
    main_input_name = "input_ids"

    def __init__(self, seed, spread):
        super().__init__(transformers.PretrainedConfig(vocab_size=TABLE_VOCAB_SIZE))
        drawn = torch.randn(
            TABLE_LENGTH, TABLE_VOCAB_SIZE, TABLE_VOCAB_SIZE, generator=torch.Generator().manual_seed(seed)
        )
        self.table = torch.nn.Parameter(drawn * spread)  # (position, last token, token)

    def forward(self, input_ids, attention_mask=None, **_):
        positions = torch.arange(input_ids.shape[1])
        return transformers.modeling_outputs.CausalLMOutput(logits=self.table[positions, input_ids])


@functools.cache
def model_of(name):
    """A tiny model with nothing preset for `generate`, above all no EOS; built once, since nothing here changes it."""
    model = TableModel(seed=0, spread=1.5) if name == "table" else tiny_model(name)
    model.generation_config = transformers.GenerationConfig()
    return model


def prompt(length, seed):
    """Random token ids, the same for the same seed."""
    return random.Random(seed).choices(range(3, VOCAB_SIZE), k=length)


def logprobs_after(model, rows, batch_size):
    """(len(rows), vocab): float32 log-probabilities of the next token, uncached.

    Rows are repeated up to the batch of `generate`, which also computes the logits of the last token only: sums taken
    in the same order are the same to the last bit.
    """
    batch = torch.tensor([*rows, *[rows[-1]] * (batch_size - len(rows))])  # (B, T)
    mask = torch.ones_like(batch)
    with torch.no_grad():
        logits = model(input_ids=batch, attention_mask=mask, use_cache=False, logits_to_keep=1).logits[:, -1]
    return logits.float().log_softmax(dim=-1)[: len(rows)]


def most_likely(logprobs, num_candidates):
    """[(token id, log-probability)] of each row, most likely first. logprobs: (R, vocab)."""
    values, token_ids = logprobs.topk(min(num_candidates, logprobs.shape[-1]))
    return [list(zip(*row, strict=True)) for row in zip(token_ids.tolist(), values.tolist(), strict=True)]


class OpenOrderError(Exception):
    """Two candidates have equal float32 sums: `generate` may take either first, so there is nothing to compare."""


def search(model, prompt_ids, params, end_token_ids, max_total_tokens=None):
    """What `BeamSearch` gives when nothing stands between it and the model; OpenOrderError where two sums are equal."""
    beam_search = BeamSearch(params, len(prompt_ids), frozenset(end_token_ids), max_total_tokens)
    rows, sums = [prompt_ids], torch.zeros(1)
    while not beam_search.is_finished:
        logprobs = logprobs_after(model, rows, params.beam_width)
        sums = sums[:, None] + logprobs  # (R, vocab)
        ranked = sums.flatten().topk(min(beam_search.num_candidates + 1, sums.numel())).values
        if (ranked.diff() == 0).any():
            raise OpenOrderError
        extends = beam_search.advance(most_likely(logprobs, beam_search.num_candidates))
        assert len(extends) in (0, params.beam_width)
        rows = [[*rows[parent], token_id] for parent, token_id in extends]
        sums = torch.stack([sums[parent, token_id] for parent, token_id in extends]) if extends else None
    return beam_search.results()


def generate(model, prompt_ids, params, end_token_ids):
    """What transformers gives, as hypotheses; `cumulative_logprob` is the sum of its transition scores."""
    end_token_ids = [] if params.ignore_eos else sorted(end_token_ids)
    config = transformers.GenerationConfig(
        num_beams=params.beam_width,
        num_return_sequences=params.num_return or params.beam_width,
        do_sample=False,
        max_new_tokens=params.max_tokens,
        length_penalty=float(params.length_penalty),
        early_stopping=params.early_stopping,
        eos_token_id=end_token_ids or None,
        pad_token_id=0,
        use_cache=False,
        return_dict_in_generate=True,
        output_scores=True,
    )
    # One beam is greedy search to `generate`, so the routine is named.
    named = {"custom_generate": type(model)._beam_search} if params.beam_width == 1 else {}
    input_ids = torch.tensor([prompt_ids])
    output = model.generate(input_ids, attention_mask=torch.ones_like(input_ids), generation_config=config, **named)
    steps = model.compute_transition_scores(output.sequences, output.scores, output.beam_indices)  # (R, T)
    hypotheses = []
    for row, score in enumerate(output.sequences_scores.tolist()):
        num_tokens = int((output.beam_indices[row] >= 0).sum())
        token_ids = output.sequences[row, len(prompt_ids) :][:num_tokens].tolist()
        reason = "stop" if token_ids[-1] in end_token_ids else "length"
        hypotheses.append(Hypothesis(token_ids, score, steps[row, :num_tokens].sum().item(), reason))
    return hypotheses


def assert_same(got, wanted):
    """Token ids, finish reasons and order are equal, and scores but for rounding."""
    assert [(hypothesis.token_ids, hypothesis.finish_reason) for hypothesis in got] == [
        (hypothesis.token_ids, hypothesis.finish_reason) for hypothesis in wanted
    ]
    assert [hypothesis.score for hypothesis in got] == pytest.approx([item.score for item in wanted], **TOLERANCE)
    # `compute_transition_scores` is summed in another order: half a float32 step for each of up to 12 additions.
    assert [hypothesis.cumulative_logprob for hypothesis in got] == pytest.approx(
        [item.cumulative_logprob for item in wanted], rel=12 * 6e-8
    )


def greedy_path(model, prompt_ids, num_tokens):
    """The likeliest token ids, one after the other."""
    ids = list(prompt_ids)
    for _ in range(num_tokens):
        ids.append(int(logprobs_after(model, [ids], 1).argmax()))
    return ids[len(prompt_ids) :]


@functools.cache
def liked_ends(name, prompt_ids):
    """EOS ids that the model really says: none, one of its greedy path, several from the start and along it."""
    model = model_of(name)
    path = greedy_path(model, prompt_ids, 8)
    first = logprobs_after(model, [prompt_ids], 1).topk(2).indices[0].tolist()
    return [frozenset(), frozenset(path[3:4]), frozenset([first[1], path[4], path[7]])]


NEURAL = ["llama", "gpt2", "mistral-sliding", "qwen3-moe"]
# A quarter of the combinations for each model: 4 shares no factor with the shorter cycles, so each meets every value.
COMBINATIONS = list(itertools.product(BEAM_WIDTHS, LENGTH_PENALTIES, EARLY_STOPPING, range(3)))


@pytest.mark.parametrize("name", NEURAL)
def test_real_architectures_search_as_they_do_in_transformers(name):
    """Widths, penalties, stopping and EOS ids that are really reached; prompts short and longer than a window."""
    model = model_of(name)
    seen = []
    for number, (beam_width, length_penalty, early_stopping, ends) in enumerate(COMBINATIONS[NEURAL.index(name) :: 4]):
        ids = prompt((1, 5, 14)[number % 3], seed=number % 4)
        end_token_ids = liked_ends(name, tuple(ids))[ends]
        params = BeamSearchParams(beam_width, (12, 12, 2, 1)[number % 4], length_penalty, early_stopping)
        wanted = generate(model, ids, params, end_token_ids)
        assert_same(search(model, ids, params, end_token_ids), wanted)
        seen += [(hypothesis.finish_reason, len(hypothesis.token_ids)) for hypothesis in wanted]
    assert {length for reason, length in seen if reason == "length"} == {1, 2, 12}
    assert len({length for reason, length in seen if reason == "stop"}) >= 4


@pytest.mark.parametrize("num_ends", [0, 1, 3])
@pytest.mark.parametrize("early_stopping", EARLY_STOPPING)
@pytest.mark.parametrize("beam_width", BEAM_WIDTHS)
def test_every_combination_searches_as_in_transformers(beam_width, early_stopping, num_ends):
    """The whole product, with max_tokens 1, 2 and 12; ends are said by chance, so at all steps."""
    model = model_of("table")
    end_token_ids = frozenset(range(num_ends))
    reasons = set()
    for ids, length_penalty, max_tokens in itertools.product((PROMPT, [4, 9, 2, 8]), LENGTH_PENALTIES, (1, 2, 12)):
        params = BeamSearchParams(beam_width, max_tokens, length_penalty, early_stopping)
        wanted = generate(model, ids, params, end_token_ids)
        assert_same(search(model, ids, params, end_token_ids), wanted)
        reasons |= {hypothesis.finish_reason for hypothesis in wanted}
    assert reasons == ({"stop", "length"} if num_ends else {"length"})


@given(
    seed=st.integers(0, 2**32 - 1),
    spread=st.sampled_from([0.3, 1.0, 2.0, 4.0]),
    prompt_ids=st.lists(st.integers(0, TABLE_VOCAB_SIZE - 1), min_size=1, max_size=4),
    end_token_ids=st.frozensets(st.integers(0, TABLE_VOCAB_SIZE - 1), max_size=4),
    beam_width=st.integers(1, 8),
    max_tokens=st.integers(1, 20),
    length_penalty=st.sampled_from(LENGTH_PENALTIES) | st.floats(-2, 3),
    early_stopping=st.sampled_from(EARLY_STOPPING),
    ignore_eos=st.booleans(),
    data=st.data(),
)
def test_any_search_is_that_of_transformers(
    seed, spread, prompt_ids, end_token_ids, beam_width, max_tokens, length_penalty, early_stopping, ignore_eos, data
):
    """Random tables, flat and peaked. Up to 8 beams and 4 ends of 12 tokens: more candidates than tokens, too."""
    num_return = data.draw(st.none() | st.integers(1, beam_width), label="num_return")
    params = BeamSearchParams(beam_width, max_tokens, length_penalty, early_stopping, num_return, ignore_eos)
    model = TableModel(seed, spread)
    try:
        got = search(model, prompt_ids, params, end_token_ids)
    except OpenOrderError:
        reject()
    assert_same(got, generate(model, prompt_ids, params, end_token_ids))


@given(
    logits=st.lists(st.floats(-8, 8), min_size=4 * 3 * 3, max_size=4 * 3 * 3),
    end_token_ids=st.frozensets(st.integers(0, 2), max_size=3),
    max_tokens=st.integers(1, 4),
    length_penalty=st.sampled_from(LENGTH_PENALTIES),
    early_stopping=st.sampled_from(EARLY_STOPPING),
)
def test_search_wider_than_all_continuations_finds_the_best_of_all(
    logits, end_token_ids, max_tokens, length_penalty, early_stopping
):
    """Three tokens, at most four steps, and 81 beams: every continuation is written down and scored."""
    # (step, last token, token); the prompt is token 0.
    table = torch.tensor(logits).view(4, 3, 3).log_softmax(dim=-1)

    def continuations(token_ids, logprob):
        """All continuations of a prefix to their end, with their log-probabilities."""
        if len(token_ids) == max_tokens or (token_ids and token_ids[-1] in end_token_ids):
            yield token_ids, logprob
            return
        for token_id in range(3):
            step = table[len(token_ids), token_ids[-1] if token_ids else 0, token_id].item()
            yield from continuations([*token_ids, token_id], logprob + step)

    everything = {tuple(token_ids): logprob for token_ids, logprob in continuations([], 0.0)}
    params = BeamSearchParams(81, max_tokens, length_penalty, early_stopping)
    beam_search = BeamSearch(params, 1, end_token_ids)
    rows = [[0]]
    while not beam_search.is_finished:
        logprobs = torch.stack([table[len(row) - 1, row[-1]] for row in rows])  # (R, 3)
        extends = beam_search.advance(most_likely(logprobs, beam_search.num_candidates))
        rows = [[*rows[parent], token_id] for parent, token_id in extends]
    results = beam_search.results()
    assert {tuple(hypothesis.token_ids) for hypothesis in results} == set(everything)
    assert [hypothesis.score for hypothesis in results] == sorted((h.score for h in results), reverse=True)
    for hypothesis in results:
        logprob = everything[tuple(hypothesis.token_ids)]
        # Four float32 additions and a division against double precision.
        assert hypothesis.cumulative_logprob == pytest.approx(logprob, rel=4 * 6e-8)
        assert hypothesis.score == pytest.approx(logprob / len(hypothesis.token_ids) ** length_penalty, rel=5e-7)
        assert hypothesis.finish_reason == ("stop" if hypothesis.token_ids[-1] in end_token_ids else "length")


def test_never_judges_by_the_length_so_far_where_short_is_favoured():
    """By the longest length, the live beam looks too bad to go on; two steps later it ends as the second best."""
    model = TableModel(seed=384, spread=2.0)
    params = BeamSearchParams(2, 12, length_penalty=-1.0, early_stopping="never")
    got = search(model, PROMPT, params, {0, 1, 2})
    assert_same(got, generate(model, PROMPT, params, {0, 1, 2}))
    assert [hypothesis.token_ids for hypothesis in got] == [[0], [11, 11, 3, 1]]


@pytest.mark.parametrize("early_stopping", [False, True])
def test_one_beam_is_greedy_search(early_stopping):
    """The beam that did not end has the lower sum at the same length, so it cannot improve; only "never" goes on."""
    model = model_of("table")
    for last in range(TABLE_VOCAB_SIZE):
        ids = [3, last]
        path = greedy_path(model, ids, 12)
        ends = [position for position, token_id in enumerate(path) if token_id in (0, 1)]
        wanted = path[: ends[0] + 1] if ends else path
        params = BeamSearchParams(beam_width=1, max_tokens=12, early_stopping=early_stopping)
        (hypothesis,) = search(model, ids, params, {0, 1})
        assert hypothesis.token_ids == wanted


@pytest.mark.parametrize("num_return", [1, 2, 5])
def test_num_return_takes_the_best_and_changes_nothing_else(num_return):
    """Fewer answers are the first of all the answers, as in transformers."""
    model = model_of("table")
    everything = search(model, PROMPT, BeamSearchParams(5, 12), {0})
    params = BeamSearchParams(5, 12, num_return=num_return)
    few = search(model, PROMPT, params, {0})
    assert_same(few, generate(model, PROMPT, params, {0}))
    assert few == everything[:num_return]


@pytest.mark.parametrize(("max_total_tokens", "max_tokens"), [(4, 1), (9, 6), (15, 12), (99, 12), (None, 12)])
@pytest.mark.parametrize("early_stopping", EARLY_STOPPING)
def test_context_of_the_model_is_a_limit_like_max_tokens(max_total_tokens, max_tokens, early_stopping):
    """Also for "never", which judges live beams by the longest they can become."""
    model = model_of("table")
    params = BeamSearchParams(3, 12, 2.0, early_stopping)
    limited = BeamSearchParams(3, max_tokens, 2.0, early_stopping)
    got = search(model, PROMPT, params, {0}, max_total_tokens)
    assert_same(got, generate(model, PROMPT, limited, {0}))


@pytest.mark.parametrize("max_total_tokens", [0, 2, 3])
def test_prompt_that_leaves_no_room_is_refused(max_total_tokens):
    """Zero tokens are no continuation, and have no score."""
    with pytest.raises(ValueError, match=f"max_total_tokens is {max_total_tokens}; allowed: more than the 3"):
        BeamSearch(BeamSearchParams(), 3, frozenset(), max_total_tokens)


@pytest.mark.parametrize(
    ("ends", "ignore_eos", "num_candidates"),
    [(0, False, 3), (1, False, 4), (2, False, 5), (4, False, 7), (4, True, 3)],
)
def test_enough_candidates_are_asked_for_that_ends_cannot_starve_the_beams(ends, ignore_eos, num_candidates):
    """If the likeliest tokens of each of 3 beams are all its ends, 3 other tokens must still be at hand."""
    params = BeamSearchParams(3, early_stopping="never", ignore_eos=ignore_eos)
    assert BeamSearch(params, 1, frozenset(range(ends))).num_candidates == num_candidates
    if not ignore_eos:
        beam_search = BeamSearch(params, 1, frozenset(range(ends)))
        beam = [(token_id, -0.1 - token_id) for token_id in range(num_candidates)]
        assert [token_id for _, token_id in beam_search.advance([beam])] == [ends, ends + 1, ends + 2]


def test_end_ranked_below_the_beam_width_does_not_count():
    """An unlikely EOS of the best beam must not become an answer merely because the beams before it lived on."""
    beam_search = BeamSearch(BeamSearchParams(2, 2), 1, frozenset({9}))
    assert beam_search.advance([[(1, -1.0), (2, -1.5), (9, -1.6), (3, -4.0)]]) == [Extend(0, 1), Extend(0, 2)]
    assert beam_search.advance([[(9, -0.5), (1, -3.0)], [(9, -0.75), (1, -3.0)]]) == []
    assert [hypothesis.token_ids for hypothesis in beam_search.results()] == [[1, 9], [2, 9]]


def test_equal_sums_keep_the_order_of_beams_and_of_candidates():
    """transformers leaves it to `topk`, which promises none; low precision makes equal logits common."""
    beam_search = BeamSearch(BeamSearchParams(3, 2), 1, frozenset())
    equal = [(7, -1.0), (4, -1.0), (8, -1.0), (2, -1.0), (1, -1.0), (0, -1.0)]
    assert beam_search.advance([equal]) == [Extend(0, 7), Extend(0, 4), Extend(0, 8)]
    beam_search.advance([[(5, -2.0), (6, -2.0)], [(3, -1.5), (5, -2.0)], [(2, -1.5), (6, -2.0)]])
    assert [hypothesis.token_ids for hypothesis in beam_search.results()] == [[4, 3], [8, 2], [7, 5]]


def test_equal_scores_keep_the_order_in_which_they_finished():
    """What is finished is not pushed out by its equal."""
    beam_search = BeamSearch(BeamSearchParams(2, 3, length_penalty=0.0, early_stopping="never"), 1, frozenset({0}))
    assert beam_search.advance([[(0, -3.0), (1, -3.0), (2, -4.0), (3, -5.0)]]) == [Extend(0, 1), Extend(0, 2)]
    assert beam_search.advance([[(0, 0.0), (1, -9.0)], [(3, -1.0), (1, -9.0)]]) == []
    assert [hypothesis.token_ids for hypothesis in beam_search.results()] == [[0], [1, 0]]


def test_sums_are_rounded_as_float32_rounds_them():
    """Two sums that differ in double precision are a tie to torch, and stay in the order of beams."""
    beam_search = BeamSearch(BeamSearchParams(2, 2), 1, frozenset())
    beam_search.advance([[(1, -16.0), (2, -16.5)]])
    # One float32 step at 17 is 1.9e-6.
    beam_search.advance([[(5, -1.0000002), (6, -9.0)], [(5, -0.5), (6, -9.0)]])
    assert [hypothesis.token_ids for hypothesis in beam_search.results()] == [[1, 5], [2, 5]]
    assert {hypothesis.cumulative_logprob for hypothesis in beam_search.results()} == {-17.0}


def test_scores_are_those_of_float32_arithmetic_bit_for_bit():
    """Near-ties are decided by the last bit, so sums and quotients must round where torch rounds them."""
    for seed, length_penalty in itertools.product(range(100), (-1.3, 0.7, 1.0, 1.9)):
        logprobs = -10 * torch.rand(3, generator=torch.Generator().manual_seed(seed))  # (step,)
        beam_search = BeamSearch(BeamSearchParams(1, 3, length_penalty), 1, frozenset())
        for logprob in logprobs.tolist():
            beam_search.advance([[(7, logprob)]])
        assert beam_search.results()[0].cumulative_logprob == (logprobs[0] + logprobs[1] + logprobs[2]).item()
        assert beam_search.results()[0].score == ((logprobs[0] + logprobs[1] + logprobs[2]) / 3**length_penalty).item()


def test_live_beam_that_can_only_draw_level_does_not_go_on():
    """What is finished stays in front of its equal, so the steps would be for nothing."""
    beam_search = BeamSearch(BeamSearchParams(1, 9, length_penalty=0.0), 1, frozenset({0}))
    assert beam_search.advance([[(0, -1.0), (1, -1.0)]]) == []


def test_fewer_tokens_than_beams_give_fewer_beams():
    """transformers fills up with copies at -1e9 that come back as answers; here what does not exist is left out."""
    beam_search = BeamSearch(BeamSearchParams(5, 2), 1, frozenset())
    assert beam_search.advance([[(0, -0.5), (1, -1.0)]]) == [Extend(0, 0), Extend(0, 1)]
    assert beam_search.advance([[(0, -0.5), (1, -1.0)], [(1, -0.25), (0, -1.5)]]) == []
    assert [hypothesis.token_ids for hypothesis in beam_search.results()] == [[0, 0], [1, 1], [0, 1], [1, 0]]


def test_forbidden_tokens_are_never_taken():
    """A log-probability of minus infinity is how tokens are forbidden; it is no answer, however few there are."""
    forbidden = -math.inf
    beam_search = BeamSearch(BeamSearchParams(3, 2), 1, frozenset({9}))
    assert beam_search.advance([[(4, -0.5), (5, -1.0), (9, forbidden), (6, forbidden)]]) == [Extend(0, 4), Extend(0, 5)]
    assert beam_search.advance([[(4, forbidden), (9, -0.1)], [(4, forbidden), (5, forbidden)]]) == []
    assert [(hypothesis.token_ids, hypothesis.finish_reason) for hypothesis in beam_search.results()] == [
        ([4, 9], "stop")
    ]


def test_search_ends_when_every_beam_has_ended():
    """Nothing left to continue is an end like any other, with fewer answers than beams."""
    beam_search = BeamSearch(BeamSearchParams(3, 9), 1, frozenset({0, 1}))
    assert beam_search.advance([[(1, -0.5), (0, -1.0)]]) == []
    assert beam_search.is_finished
    assert [hypothesis.token_ids for hypothesis in beam_search.results()] == [[1], [0]]


@pytest.mark.parametrize(
    ("candidates", "match"),
    [
        ([], "0 lists of candidates; allowed: 2"),
        ([[(1, -1.0)]], "1 lists of candidates; allowed: 2"),
        ([[(1, -1.0)]] * 3, "3 lists of candidates; allowed: 2"),
        ([[(1, -1.0)], [(2, -0.5), (5, math.nan)]], "token 5 is nan"),
    ],
)
def test_refused_step_leaves_the_search_as_it_was(candidates, match):
    """Candidates of another step would be scored against the wrong beams; nan has no rank."""
    beam_search = BeamSearch(BeamSearchParams(2, 2), 1, frozenset({2}))
    beam_search.advance([[(4, -0.5), (5, -1.0), (6, -2.0), (7, -3.0)]])
    with pytest.raises(ValueError, match=match):
        beam_search.advance(candidates)
    assert not beam_search.is_finished
    beam_search.advance([[(4, -0.5), (5, -1.0)]] * 2)
    assert [hypothesis.token_ids for hypothesis in beam_search.results()] == [[4, 4], [4, 5]]


def test_results_before_the_end_and_steps_after_it_are_broken_invariants():
    """Half a search has no answers in the sense of the other half."""
    beam_search = BeamSearch(BeamSearchParams(2, 1), 1, frozenset())
    with pytest.raises(AssertionError, match="1 beams are live"):
        beam_search.results()
    beam_search.advance([[(1, -1.0), (2, -2.0)]])
    with pytest.raises(AssertionError, match="the search is over"):
        beam_search.advance([])


@pytest.mark.parametrize(("length_penalty", "lengths"), [(-20.0, [1, 2, 2, 4, 5]), (20.0, [12] * 5)])
def test_extreme_penalties_order_by_length_alone(length_penalty, lengths):
    """transformers cannot keep scores below its -1e9. No such floor here: 4 ** 20 is 1e12, and answers come."""
    params = BeamSearchParams(5, 12, length_penalty, "never")
    results = search(model_of("table"), PROMPT, params, {0, 1, 2})
    assert [len(hypothesis.token_ids) for hypothesis in results] == lengths


@pytest.mark.parametrize(
    ("arguments", "error", "match"),
    [
        ({"beam_width": 0}, ValueError, "beam_width is 0; allowed: 1 and more"),
        ({"beam_width": -3}, ValueError, "beam_width is -3"),
        ({"beam_width": 2.0}, TypeError, r"beam_width must be an integer, not 2\.0"),
        ({"beam_width": True}, TypeError, "beam_width must be an integer, not True"),
        ({"beam_width": None}, TypeError, "beam_width must be an integer, not None"),
        ({"max_tokens": 0}, ValueError, "max_tokens is 0; allowed: 1 and more"),
        ({"max_tokens": "8"}, TypeError, "max_tokens must be an integer, not '8'"),
        ({"max_tokens": None}, TypeError, "max_tokens must be an integer, not None"),
        ({"num_return": 0}, ValueError, "num_return is 0; allowed: 1 and more"),
        ({"num_return": 5}, ValueError, "num_return is 5; allowed: at most beam_width, 4"),
        ({"num_return": False}, TypeError, "num_return must be an integer, not False"),
        ({"num_return": 1.0}, TypeError, r"num_return must be an integer, not 1\.0"),
        ({"length_penalty": math.nan}, ValueError, "length_penalty is nan; allowed: finite"),
        ({"length_penalty": -math.inf}, ValueError, "length_penalty is -inf; allowed: finite"),
        ({"length_penalty": 22}, ValueError, r"length_penalty is 22 with max_tokens 64; allowed: max_tokens \*\* abs"),
        ({"length_penalty": -22}, ValueError, "length_penalty is -22 with max_tokens 64"),
        ({"length_penalty": "1"}, TypeError, "length_penalty must be a number, not '1'"),
        ({"length_penalty": True}, TypeError, "length_penalty must be a number, not True"),
        ({"length_penalty": None}, TypeError, "length_penalty must be a number, not None"),
        ({"early_stopping": "always"}, ValueError, "early_stopping is 'always'; allowed: True, False and 'never'"),
        ({"early_stopping": 1}, TypeError, "early_stopping must be True, False or 'never', not 1"),
        ({"early_stopping": None}, TypeError, "early_stopping must be True, False or 'never', not None"),
        ({"ignore_eos": "no"}, TypeError, "ignore_eos must be True or False, not 'no'"),
    ],
)
def test_params_that_mean_nothing_are_refused_when_made(arguments, error, match):
    """With the value and the rule, long before a search with them could run."""
    with pytest.raises(error, match=match):
        BeamSearchParams(**arguments)


@pytest.mark.parametrize(
    "arguments",
    [
        {"beam_width": 1, "max_tokens": 1, "num_return": 1},
        {"num_return": 4},
        {"length_penalty": 21},
        {"length_penalty": -21.0},
        {"length_penalty": 1000, "max_tokens": 1},
        {"early_stopping": True},
        {"early_stopping": "never"},
        {"ignore_eos": True},
    ],
)
def test_params_at_the_borders_are_taken(arguments):
    """What is allowed is allowed, to the last value."""
    params = BeamSearchParams(**arguments)
    assert {name: getattr(params, name) for name in arguments} == arguments

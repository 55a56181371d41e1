"""The scoring half of beam search: which continuations live on, which count, when it is over. Imports no torch.

Knows token ids and log-probabilities, nothing of models or blocks. What it gives is what `generate(num_beams=...)` of
transformers gives (`_beam_search` in its `generation/utils.py`, release 5.24, is where the rules come from).

Invariants: live beams have equal lengths and stand best first; finished hypotheses stand best first, `beam_width` of
them at most; a search without live beams is over.

It parts from transformers in one way. That pads missing beams with scores of -1e9, which come back as answers where
fewer beams than `beam_width` can live (a vocabulary smaller than that, forbidden tokens) or where a penalty sends real
scores below -1e9; here there are fewer beams, and scores have no floor.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Literal, NamedTuple

_FLOAT32_MAX = (2 - 2**-23) * 2.0**127


@dataclass(frozen=True)
class BeamSearchParams:
    """Checked when made: TypeError or ValueError says what was given and what is allowed.

    beam_width      live beams, and finished hypotheses kept, at most; 1 or more
    max_tokens      output tokens at most, 1 or more
    length_penalty  a score is the sum of log-probabilities / output tokens ** length_penalty: above 0 favours long ones
    early_stopping  when `beam_width` hypotheses are finished: True = the search is over; False = it goes on while the
                    best live beam, were it to end now, would beat the worst of them; "never" = while it could beat
                    it at any length up to max_tokens
    num_return      best hypotheses to give back, beam_width at most; None = beam_width
    ignore_eos      go on after an end-of-sequence token
    """

    beam_width: int = 4
    max_tokens: int = 64
    length_penalty: float = 1.0
    early_stopping: bool | Literal["never"] = False
    num_return: int | None = None
    ignore_eos: bool = False

    def __post_init__(self) -> None:
        for name in ("beam_width", "max_tokens") + (("num_return",) if self.num_return is not None else ()):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int):
                raise TypeError(f"{name} must be an integer, not {value!r}")
            if value < 1:
                raise ValueError(f"{name} is {value}; allowed: 1 and more")
        if self.num_return is not None and self.num_return > self.beam_width:
            raise ValueError(f"num_return is {self.num_return}; allowed: at most beam_width, {self.beam_width}")
        if isinstance(self.length_penalty, bool) or not isinstance(self.length_penalty, (int, float)):
            raise TypeError(f"length_penalty must be a number, not {self.length_penalty!r}")
        if not math.isfinite(self.length_penalty):
            raise ValueError(f"length_penalty is {self.length_penalty}; allowed: finite numbers")
        if abs(self.length_penalty) * math.log(self.max_tokens) > math.log(_FLOAT32_MAX):
            raise ValueError(
                f"length_penalty is {self.length_penalty} with max_tokens {self.max_tokens}; "
                f"allowed: max_tokens ** abs(length_penalty) up to {_FLOAT32_MAX:.1e}"
            )
        if not isinstance(self.early_stopping, (bool, str)):
            raise TypeError(f"early_stopping must be True, False or 'never', not {self.early_stopping!r}")
        if isinstance(self.early_stopping, str) and self.early_stopping != "never":
            raise ValueError(f"early_stopping is {self.early_stopping!r}; allowed: True, False and 'never'")
        if not isinstance(self.ignore_eos, bool):
            raise TypeError(f"ignore_eos must be True or False, not {self.ignore_eos!r}")


class Extend(NamedTuple):
    """A live beam of the next step: live beam `parent` of this one, and one more token."""

    parent: int
    token_id: int


class Hypothesis(NamedTuple):
    """A finished continuation. `token_ids` includes the end-of-sequence token that ended it.

    `score` is `cumulative_logprob` / len(token_ids) ** length_penalty: `sequences_scores` in transformers.
    """

    token_ids: list[int]
    score: float
    cumulative_logprob: float
    finish_reason: Literal["stop", "length"]


class _Beam(NamedTuple):
    """A live beam."""

    token_ids: list[int]
    cumulative_logprob: float


class _Candidate(NamedTuple):
    """A live beam and one more token, with the log-probability of both."""

    parent: int
    token_id: int
    cumulative_logprob: float


class BeamSearch:
    """The beam search over one prompt.

    end_token_ids     tokens that end a hypothesis
    max_total_tokens  prompt and output together at most; None = params.max_tokens is the only limit

    Raises ValueError where the prompt leaves no room for a token.

    >>> params = BeamSearchParams(beam_width=2, max_tokens=2)
    >>> search = BeamSearch(params, num_prompt_tokens=3, end_token_ids=frozenset())
    >>> search.advance([[(7, -0.5), (8, -1.0), (9, -3.0), (4, -5.0)]])
    [Extend(parent=0, token_id=7), Extend(parent=0, token_id=8)]
    >>> search.advance([[(4, -2.0), (5, -2.5)], [(6, -0.25), (4, -3.0)]])
    []
    >>> [(hypothesis.token_ids, hypothesis.score) for hypothesis in search.results()]
    [([8, 6], -0.625), ([7, 4], -1.25)]
    """

    def __init__(
        self,
        params: BeamSearchParams,
        num_prompt_tokens: int,
        end_token_ids: frozenset[int],
        max_total_tokens: int | None = None,
    ) -> None:
        self.params = params
        self.max_tokens = params.max_tokens
        if max_total_tokens is not None:
            if max_total_tokens <= num_prompt_tokens:
                raise ValueError(
                    f"max_total_tokens is {max_total_tokens}; allowed: more than the {num_prompt_tokens} prompt tokens"
                )
            self.max_tokens = min(self.max_tokens, max_total_tokens - num_prompt_tokens)
        self.end_token_ids = frozenset() if params.ignore_eos else end_token_ids
        # Most likely tokens that each live beam must bring, or the whole vocabulary if that is smaller: were all ends
        # among them, `beam_width` others would be left. transformers ranks more of them, which changes nothing.
        self.num_candidates = params.beam_width + len(self.end_token_ids)
        self._live = [_Beam([], 0.0)]
        self._finished: list[Hypothesis] = []

    @property
    def is_finished(self) -> bool:
        """Nothing is left to compute."""
        return not self._live

    def advance(self, candidates: Sequence[Sequence[tuple[int, float]]]) -> list[Extend]:
        """The live beams of the next step, best first; [] when the search is over.

        candidates[i]: (token id, log-probability) of the `num_candidates` most likely tokens after live beam i, most
        likely first. The first step has one live beam, the prompt. Tokens of log-probability -inf are never taken.

        Raises ValueError, and leaves the search as it was, where there is not one list for each live beam or a
        log-probability is not a number. O(n log n + beam_width · output tokens) for n candidates in all.

        1. Rank the continuations of all beams together.
        2. Part them. One that ends counts only among the first `beam_width`, so that a beam cannot end in an unlikely
           token; the first `beam_width` of the others live on. At the last step all end.
        3. Keep the best `beam_width` of the finished hypotheses.
        4. Stop at the last step, and where no live beam can improve them.
        """
        assert not self.is_finished, "the search is over"
        if len(candidates) != len(self._live):
            raise ValueError(f"{len(candidates)} lists of candidates; allowed: {len(self._live)}, one per live beam")
        for token_id, logprob in (candidate for of_beam in candidates for candidate in of_beam):
            if math.isnan(logprob):
                raise ValueError(f"the log-probability of token {token_id} is nan; allowed: numbers and -inf")

        # 1. Equal sums stay in the order of beams, then in the order brought; `torch.topk` leaves that order open.
        ranked = [
            _Candidate(parent, token_id, _float32(beam.cumulative_logprob + logprob))
            for parent, (beam, of_beam) in enumerate(zip(self._live, candidates, strict=True))
            for token_id, logprob in of_beam
            if logprob > -math.inf
        ]
        ranked.sort(key=attrgetter("cumulative_logprob"), reverse=True)

        # 2.
        num_tokens = len(self._live[0].token_ids) + 1
        is_last = num_tokens == self.max_tokens
        living: list[_Candidate] = []
        finished = list(self._finished)
        for rank, candidate in enumerate(ranked):
            is_end = candidate.token_id in self.end_token_ids
            if not (is_end or is_last):
                living.append(candidate)
            elif rank < self.params.beam_width:
                finished.append(
                    Hypothesis(
                        token_ids=[*self._live[candidate.parent].token_ids, candidate.token_id],
                        score=self._score(candidate.cumulative_logprob, num_tokens),
                        cumulative_logprob=candidate.cumulative_logprob,
                        finish_reason="stop" if is_end else "length",
                    )
                )
        living = living[: self.params.beam_width]

        # 3. Equal scores stay in the order in which they finished.
        self._finished = sorted(finished, key=attrgetter("score"), reverse=True)[: self.params.beam_width]

        # 4.
        if living and not self._can_improve(living[0].cumulative_logprob, num_tokens):
            living = []
        self._live = [
            _Beam([*self._live[candidate.parent].token_ids, candidate.token_id], candidate.cumulative_logprob)
            for candidate in living
        ]
        return [Extend(candidate.parent, candidate.token_id) for candidate in living]

    def results(self) -> list[Hypothesis]:
        """The best `num_return` hypotheses of a search that is over, best first; fewer where fewer have finished."""
        assert self.is_finished, f"{len(self._live)} beams are live"
        return self._finished[: self.params.num_return]

    def _can_improve(self, best_logprob: float, num_tokens: int) -> bool:
        """The best of the live beams, of so many tokens, may still finish among the best `beam_width`."""
        if len(self._finished) < self.params.beam_width:
            return True
        if self.params.early_stopping is True:
            return False
        # The length that flatters it most. Unless asked "never", a longer one is not thought of, although it would
        # flatter more where the penalty is above 0.
        if self.params.early_stopping == "never" and self.params.length_penalty > 0:
            num_tokens = self.max_tokens
        return self._score(best_logprob, num_tokens) > self._finished[-1].score

    def _score(self, cumulative_logprob: float, num_tokens: int) -> float:
        """The length-normalised score. num_tokens counts output tokens, an end-of-sequence token included."""
        return _float32(cumulative_logprob / _float32(num_tokens**self.params.length_penalty))


def _float32(number: float) -> float:
    """The float32 nearest to a number.

    Sums and quotients of float32 numbers, taken in double precision and then rounded, are those that float32
    arithmetic gives, bit for bit: near-ties fall as they do in torch.
    """
    return ctypes.c_float(number).value

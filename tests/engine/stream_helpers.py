"""What the tests of streams share: a tiny engine with a tokenizer, a runner that says what it is told, and an audit."""

from __future__ import annotations

from engine import LLM
from engine.logprobs import Sampled
from engine.models.decoder import Decoder
from engine.scheduler import Computed


def make_llm(model, num_tokens=1024, block_size=4, log_interval_s=0.0, **arguments):
    """An engine over a pool of `num_tokens` slots, silent unless asked otherwise."""
    num_blocks = num_tokens // block_size
    return LLM(model, num_blocks=num_blocks, block_size=block_size, log_interval_s=log_interval_s, **arguments)


def load_decoder(folder):
    """The model in a folder, to be shared by several engines."""
    return Decoder.load(folder)


class ScriptedRunner:
    """Says what it is told instead of computing: a continuation with seed s says `scripts[s]`, and then 0.

    before_run: called in each step, with the scheduled work
    """

    def __init__(self, llm, scripts=(), before_run=lambda scheduled: None):
        self.end_token_ids = llm.core.runner.end_token_ids
        self.bytes_per_block = llm.core.runner.bytes_per_block
        self.scripts = dict(enumerate(scripts))
        self.before_run = before_run
        self.num_steps = 0
        llm.core.runner = self

    def next_token(self, sequence):
        """The token at the place that the sequence has come to."""
        script, place = self.scripts.get(sequence.seed, ()), len(sequence.output_token_ids)
        return script[place] if place < len(script) else 0

    def run(self, scheduled, cache):
        """One step."""
        self.num_steps += 1
        self.before_run(scheduled)
        return [
            Computed([Sampled(self.next_token(sequence)) for sequence in work.request.sequences()])
            if work.is_last
            else Computed()
            for work in scheduled
        ]


def assert_idle(llm):
    """Nothing is left of any request: every block is free or evictable, and host memory is empty."""
    llm.cache.check()
    assert not llm.core.has_requests
    assert llm.core.num_requests == 0
    assert llm.cache.request_ids == ()
    assert llm.cache.num_private_blocks == llm.cache.num_protected_blocks == 0
    assert llm.cache.num_free_blocks + llm.cache.num_evictable_blocks == llm.cache.num_blocks
    if llm.core.scheduler.swap is not None:
        assert llm.core.scheduler.swap.size_bytes == 0


def assert_adds_up(deltas, wanted):
    """The deltas of a stream are the pieces of an output: text, tokens and end of each continuation."""
    assert all(isinstance(delta, str) for delta in deltas)
    assert [delta.output is not None for delta in deltas] == [False] * (len(deltas) - 1) + [True]
    for completion in wanted.outputs:
        own = [delta for delta in deltas if delta.continuation == completion.index]
        assert "".join(own) == completion.text
        assert [token_id for delta in own for token_id in delta.token_ids] == completion.token_ids
        assert [delta.finish_reason for delta in own] == [None] * (len(own) - 1) + [completion.finish_reason]
    output = deltas[-1].output
    assert output.outputs == wanted.outputs
    assert output.prompt_token_ids == wanted.prompt_token_ids
    assert {delta.continuation for delta in deltas} == set(range(len(wanted.outputs)))

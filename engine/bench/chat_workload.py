"""What the systems are given to do in `radixkv bench chat`, as token ids, and what that costs at least.

The same ids for every system, drawn from a seed. Chats are spelled out with the markers of the model's template, so
that a prompt extends the last one and its answer exactly, to the token. Imports no torch.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from engine.bench.floor import Work, decode_work, prefill_work

PHASES = ("chat", "single", "grid", "fanout")
_WORDS = """
    harbour lantern meadow granite orchard compass velvet thunder saddle copper willow anchor pebble feather market
    kettle violin canyon glacier bakery ladder parcel tunnel balcony river pencil basket mirror candle carry measure
    wander borrow listen answer polish gather explain repair before after under between slowly brightly seven twelve
    narrow hollow early distant whether perhaps together
"""


@dataclass(frozen=True)
class Settings:
    """Sizes of all that is measured. Tokens unless it says otherwise."""

    conversations: int = 8
    turns: int = 6
    system_tokens: int = 512
    user_tokens: int = 40
    output_tokens: int = 32
    single_conversations: int = 1  # of those, played again with one request in flight
    prompt_lens: tuple[int, ...] = (128, 512, 1024)
    batches: tuple[int, ...] = (1, 8)
    grid_output_tokens: int = 16
    fanouts: tuple[int, ...] = (2, 8, 32, 64)
    fanout_prompt_tokens: int = 1024
    seed: int = 7

    @property
    def max_batch(self) -> int:
        """Requests in flight at most."""
        return max(self.conversations, *self.batches, *self.fanouts)

    @property
    def max_kv_tokens(self) -> int:
        """KV that can be in use at most, with blocks of up to 64 tokens."""
        return self.max_batch * (self.max_model_len + 64)

    @property
    def max_model_len(self) -> int:
        """Tokens of the longest request, and a few for markers."""
        per_turn = self.user_tokens + self.output_tokens + 16
        return max(
            self.system_tokens + self.turns * per_turn,
            max(self.prompt_lens) + self.grid_output_tokens,
            self.fanout_prompt_tokens + 1 + self.output_tokens,
        )


QUICK = Settings(
    conversations=2,
    turns=2,
    system_tokens=24,
    user_tokens=10,
    output_tokens=4,
    single_conversations=1,
    prompt_lens=(16,),
    batches=(1, 2),
    grid_output_tokens=4,
    fanouts=(2,),
    fanout_prompt_tokens=24,
)


@dataclass(frozen=True)
class Vocabulary:
    """Token ids to write texts with.

    words            of each word
    start            of a message, by role; empty where the model has no such markers
    end              of a message
    """

    words: list[list[int]]
    start: dict[str, list[int]] = field(default_factory=lambda: {"system": [], "user": [], "assistant": []})
    end: list[int] = field(default_factory=list)

    @classmethod
    def of(cls, model: str) -> Vocabulary:
        """The vocabulary of a model's directory or hub id; one without a tokenizer has its ids for words."""
        from transformers import AutoConfig, AutoTokenizer

        try:
            tokenizer = AutoTokenizer.from_pretrained(model)
            words = [tokenizer.encode(f" {word}", add_special_tokens=False) for word in _WORDS.split()]
        except (OSError, ValueError, KeyError):  # it has none
            words = []
        if not all(words) or not words:
            # The lowest ids are often special.
            return cls([[token_id] for token_id in range(8, min(4096, AutoConfig.from_pretrained(model).vocab_size))])
        if "<|im_start|>" not in tokenizer.get_vocab():
            return cls(words)
        start, end = (tokenizer.get_vocab()[marker] for marker in ("<|im_start|>", "<|im_end|>"))

        def ids(text: str) -> list[int]:
            return list(tokenizer.encode(text, add_special_tokens=False))

        roles = {role: [start, *ids(f"{role}\n")] for role in ("system", "user", "assistant")}
        return cls(words, roles, [end, *ids("\n")])

    def text(self, num_tokens: int, draw: random.Random) -> list[int]:
        """So many tokens of words drawn at random."""
        token_ids: list[int] = []
        while len(token_ids) < num_tokens:
            token_ids += draw.choice(self.words)
        return token_ids[:num_tokens]

    def message(self, role: str, num_tokens: int, draw: random.Random) -> list[int]:
        """A message of so many tokens, markers included. Raises ValueError if these alone are more."""
        start, end = self.start[role], self.end
        num_markers = len(start) + len(end)
        if num_tokens <= num_markers:
            raise ValueError(f"a message of {num_tokens} tokens; allowed: at least {num_markers + 1}, for its markers")
        return start + self.text(num_tokens - num_markers, draw) + end


@dataclass(frozen=True)
class Cell:
    """One thing that every system does, and what it must do at least.

    name, phase   as in the tables; one of PHASES
    job           what its worker is asked
    turns         of a chat, or 1
    prefill       of all turns: the passes that give first tokens, best reuse assumed
    cold, later   such a pass on turn 1, where nothing is cached, and (mean) on a later one
    step          one decode step, at the mean length
    num_steps     of all turns
    num_outputs   tokens
    """

    name: str
    phase: str
    job: dict[str, Any]
    turns: int
    prefill: Work
    cold: Work
    later: Work | None
    step: Work
    num_steps: int
    num_outputs: int

    @property
    def width(self) -> int:
        """Prompts submitted together."""
        return len(self.job["prompts"]) if self.job["do"] == "batch" else 0


def cells_of(settings: Settings, vocabulary: Vocabulary, phases: tuple[str, ...]) -> Iterator[Cell]:
    """All cells of these phases, in the order in which they are measured."""
    if "chat" in phases:
        yield _chat("chat", "chat", settings, vocabulary, settings.conversations, is_together=True)
    if "single" in phases:
        yield _chat("single", "single", settings, vocabulary, settings.single_conversations, is_together=False)
    if "grid" in phases:
        for num_tokens in settings.prompt_lens:
            for batch in settings.batches:
                name = f"prompt {num_tokens:,}, batch {batch}"
                draw = random.Random(f"{settings.seed}/{name}")
                prompts = [vocabulary.text(num_tokens, draw) for _ in range(batch)]
                yield _batch(name, "grid", prompts, settings.grid_output_tokens, 0)
    if "fanout" in phases:
        draw = random.Random(f"{settings.seed}/fanout")
        shared = vocabulary.text(settings.fanout_prompt_tokens, draw)
        # The last token of each prompt is another one, so that the continuations differ.
        lasts = sorted({token_id for word in vocabulary.words for token_id in word})
        for number in settings.fanouts:
            prompts = [[*shared, lasts[index % len(lasts)]] for index in range(number)]
            yield _batch(f"1 prompt x {number}", "fanout", prompts, settings.output_tokens, len(shared))


def _chat(
    name: str, phase: str, settings: Settings, vocabulary: Vocabulary, conversations: int, *, is_together: bool
) -> Cell:
    """All turns of so many conversations that share the system's message."""
    system = vocabulary.message("system", settings.system_tokens, random.Random(f"{settings.seed}/system"))
    script: dict[str, Any] = {
        "system": system,
        "users": [
            [
                vocabulary.message("user", settings.user_tokens, random.Random(f"{settings.seed}/{index}/{turn}"))
                for turn in range(settings.turns)
            ]
            for index in range(conversations)
        ],
        "before_answer": vocabulary.start["assistant"],
        "after_answer": vocabulary.end,
        "num_output_tokens": settings.output_tokens,
    }
    question = settings.user_tokens + len(vocabulary.start["assistant"])
    # The last token of an answer is sampled, not computed: with the next prompt it is.
    new = 1 + len(vocabulary.end) + question
    per_turn = settings.output_tokens + len(vocabulary.end) + question
    firsts = [system + questions[0] for questions in script["users"]]
    passes: list[list[Work]] = []  # of each turn
    steps = []
    for turn in range(settings.turns):
        prompt_len = len(system) + question + turn * per_turn
        # On turn 1 nothing is cached for all to read: the first prompt brings it, and later ones find what they share
        # with any before, the marker of the question for one.
        cached = [prompt_len - new] * conversations if turn else _found_in_earlier(firsts)
        num_shared = len(system) if turn else 0
        if is_together:
            passes.append([prefill_work([prompt_len] * conversations, cached, num_shared)])
        else:
            passes.append([prefill_work([prompt_len], [num]) for num in cached])
        context_len = prompt_len + settings.output_tokens // 2
        steps.append(
            decode_work([context_len] * conversations, len(system)) if is_together else decode_work([context_len])
        )
    later = [work for turn in passes[1:] for work in turn]
    groups = 1 if is_together else conversations
    return Cell(
        name=name,
        phase=phase,
        job={"do": "chat", "script": script, "together": is_together},
        turns=settings.turns,
        prefill=sum((work for turn in passes for work in turn), Work()),
        cold=passes[0][0],
        later=later[len(later) // 2] if later else None,
        step=steps[len(steps) // 2],
        num_steps=groups * settings.turns * (settings.output_tokens - 1),
        num_outputs=conversations * settings.turns * settings.output_tokens,
    )


def _found_in_earlier(prompts: list[list[int]]) -> list[int]:
    """How many first tokens of each prompt are those of one before it."""
    return [max((_common(prompt, earlier) for earlier in prompts[:at]), default=0) for at, prompt in enumerate(prompts)]


def _common(left: list[int], right: list[int]) -> int:
    pairs = zip(left, right, strict=False)
    return next((at for at, (mine, others) in enumerate(pairs) if mine != others), min(len(left), len(right)))


def _batch(name: str, phase: str, prompts: list[list[int]], num_output_tokens: int, num_shared: int) -> Cell:
    """One batch of prompts whose first tokens, num_shared, are common to all."""
    num_tokens = len(prompts[0])
    prefill = prefill_work([num_tokens] * len(prompts), [0] + [num_shared] * (len(prompts) - 1))
    context_len = num_tokens + num_output_tokens // 2
    return Cell(
        name=name,
        phase=phase,
        job={"do": "batch", "prompts": prompts, "num_output_tokens": num_output_tokens},
        turns=1,
        prefill=prefill,
        cold=prefill,
        later=None,
        step=decode_work([context_len] * len(prompts), num_shared),
        num_steps=num_output_tokens - 1,
        num_outputs=len(prompts) * num_output_tokens,
    )

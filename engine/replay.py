"""Plays conversations turn by turn through an `LLM` and says what the prefix cache saved.

Owns the order of play and the counting; knows nothing about files (`chats`), the command line (`cli`) or torch. The
order is a wave for each turn: turn 1 of every conversation, then turn 2 of every conversation, and so on, as a server
sees them. Each conversation is a `ChatSession`, so a prompt is the last prompt and reply, id by id, and a tail.

With `compare`, each batch of prompts runs twice, once with the cache and once without, the same ids both times. Which
goes first alternates from batch to batch, so that a slow spell of the machine hits both alike. The reply that the chat
continues with is the one made with the cache.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from engine.chats import ChatSession, Conversation

if TYPE_CHECKING:  # rich is an extra, and only tables need it
    from rich.console import Console

    from radixkv.film import Film

HISTORIES = ("generated", "recorded")
MAX_TREE_LINES = 40  # about a screen; a tree of a long replay has thousands


@dataclass(frozen=True, slots=True)
class TurnRecord:
    """One turn of one conversation. Times in seconds; `computed_tokens` = `prompt_tokens` - `cached_tokens`.

    `tpot_s` is None for a reply of one token. `ttft_cold_s` and `same_output` (are the token ids equal?) are None
    unless the turn was compared.
    """

    conversation: str
    turn: int
    prompt_tokens: int
    cached_tokens: int
    computed_tokens: int
    output_tokens: int
    ttft_s: float
    tpot_s: float | None
    ttft_cold_s: float | None = None
    same_output: bool | None = None

    @property
    def hit_rate(self) -> float:
        """The share of the prompt that was not computed."""
        return self.cached_tokens / self.prompt_tokens

    @property
    def speedup(self) -> float | None:
        """How many times sooner the first token came than without the cache; None unless compared."""
        return None if self.ttft_cold_s is None else self.ttft_cold_s / self.ttft_s


@dataclass(frozen=True, slots=True)
class WaveSummary:
    """Turn `turn` over all conversations that had one: median times to the first token, in seconds."""

    turn: int
    num_turns: int
    median_ttft_s: float
    median_ttft_cold_s: float | None
    token_hit_rate: float


@dataclass(frozen=True, slots=True)
class ReplayTotals:
    """Sums and means over all turns. Rates and means are None when there was nothing to take them over.

    `num_full_hits` of `num_later_turns`: turns after a conversation's first that hit all that they share with the turn
    before and that has KV: its prompt and output less the one token that was sampled last, or with recorded history
    its prompt, since the reply on record was never computed.
    """

    num_conversations: int
    num_turns: int
    prompt_tokens: int
    cached_tokens: int
    computed_tokens: int
    output_tokens: int
    token_hit_rate: float | None
    num_later_turns: int
    num_full_hits: int
    mean_tpot_s: float | None
    by_turn: tuple[WaveSummary, ...]
    same_output: bool | None
    seconds: float


@dataclass(frozen=True, slots=True)
class ReplayReport:
    """What a replay showed. `remarks` say, a sentence each, what did not go as asked; `tree` is the cache, drawn."""

    model: str
    dtype: str
    block_size: int
    is_compared: bool
    turns: tuple[TurnRecord, ...]
    totals: ReplayTotals
    remarks: tuple[str, ...]
    tree: str

    def to_json(self) -> dict[str, Any]:
        """The report as `radixkv replay --json` prints it; without the tree."""
        turns = [asdict(record) for record in self.turns]
        totals = asdict(self.totals)
        if not self.is_compared:
            for entry in turns:
                del entry["ttft_cold_s"], entry["same_output"]
            del totals["same_output"]
            for wave in totals["by_turn"]:
                del wave["median_ttft_cold_s"]
        totals["remarks"] = list(self.remarks)
        return {
            "model": self.model,
            "dtype": self.dtype,
            "block_size": self.block_size,
            "turns": turns,
            "totals": totals,
        }

    def _repr_mimebundle_(self, include: object = None, exclude: object = None) -> dict[str, str]:
        """Hit rate and time to the first token by turn as a picture, for notebooks; the totals and the tree as text."""
        from radixkv.render import draw_turns, mime_bundle

        lines = _total_lines(self)
        svg = draw_turns(self.totals.by_turn, remark=f"{self.model}, {self.dtype} · {lines[0]}")
        return mime_bundle(svg, "\n".join([*lines, *self.remarks, *shortened(self.tree)]))


class _Player:
    """One conversation under way: its session, and why it ended early, if it did."""

    def __init__(self, conversation: Conversation, llm: Any) -> None:
        self.conversation = conversation
        self.turns = conversation.turns
        self.session = ChatSession(llm.tokenizer, conversation.system, end_token_ids=llm.eos_token_ids)
        self.is_over = False

    @property
    def name(self) -> str:
        return self.conversation.name


def replay(
    llm: Any,
    conversations: Sequence[Conversation],
    params: Any,
    *,
    history: str = "generated",
    concurrency: int = 1,
    compare: bool = False,
    on_turn: Callable[[TurnRecord], None] | None = None,
    on_batch: Callable[[int, Sequence[str]], None] | None = None,
) -> ReplayReport:
    """The report of playing `conversations` on `llm` with the `SamplingParams` in `params`.

    `history`: what the next turn follows, the model's own reply ("generated") or the one in the file ("recorded"; a
    turn without one continues with the model's own, and a remark says so). `concurrency`: how many conversations of a
    wave are submitted together; with 1, TTFT is one request's own time. `on_turn` is called after each turn,
    `on_batch` with the turn and the names of the conversations before their prompts go to `llm`.

    A conversation ends, with a remark, where prompt and output would not fit the model's context or the pool of
    blocks. Raises ValueError for arguments out of range. The cache of `llm` is used and filled, not emptied first.
    Sampling without a seed differs from run to run, so compare greedily or with a seed.
    """
    if history not in HISTORIES:
        raise ValueError(f"history {history!r} is not one of {', '.join(HISTORIES)}")
    if concurrency < 1:
        raise ValueError(f"concurrency must be at least 1, not {concurrency}")
    if not conversations:
        raise ValueError("there are no conversations to replay")
    names = [conversation.name for conversation in conversations]
    if len(set(names)) < len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"conversations need distinct names, but {twice!r} is there twice")
    if history == "recorded" and not any(turn.assistant for chat in conversations for turn in chat.turns):
        raise ValueError("no reply is recorded in these conversations: use the generated history")

    start_s = time.perf_counter()
    cold_llm = llm.without_cache() if compare else None
    players = [_Player(conversation, llm) for conversation in conversations]
    records: list[TurnRecord] = []
    remarks: list[str] = []
    num_batches = 0
    for turn_index in range(max(len(player.turns) for player in players)):
        wave = [player for player in players if not player.is_over and turn_index < len(player.turns)]
        for first in range(0, len(wave), concurrency):
            batch: list[tuple[_Player, list[int]]] = []
            for player in wave[first : first + concurrency]:
                prompt = player.session.user(player.turns[turn_index].user)
                too_long = _why_too_long(llm, len(prompt), params.max_tokens)
                if too_long is None:
                    batch.append((player, prompt))
                else:
                    player.is_over = True
                    remarks.append(
                        f"{player.name} ended before turn {turn_index + 1} of {len(player.turns)}: {too_long}"
                    )
            if not batch:
                continue
            prompts = [prompt for _, prompt in batch]
            if cold_llm is not None and num_batches == 0:
                # The first pass of a process pays for threads and memory; neither side should.
                _generate(cold_llm, prompts, params)
            cold_first = num_batches % 2 == 1
            cold = _generate(cold_llm, prompts, params) if cold_llm is not None and cold_first else None
            if on_batch is not None:
                on_batch(turn_index + 1, [player.name for player, _ in batch])
            warm = _generate(llm, prompts, params)
            if cold_llm is not None and not cold_first:
                cold = _generate(cold_llm, prompts, params)
            num_batches += 1
            for i, (player, _) in enumerate(batch):
                record = _record(player.name, turn_index + 1, warm[i], cold[i] if cold is not None else None)
                records.append(record)
                remarks.extend(_continue(player, turn_index, warm[i], history))
                if on_turn is not None:
                    on_turn(record)
    remarks.extend(_session_remarks(players))
    return ReplayReport(
        model=llm.model_name,
        dtype=llm.dtype_name,
        block_size=llm.block_size,
        is_compared=compare,
        turns=tuple(records),
        totals=_totals(records, history, time.perf_counter() - start_s),
        remarks=tuple(remarks),
        tree=llm.cache.show(llm.tokenizer.decode),
    )


def _generate(llm: Any, prompts: list[list[int]], params: Any) -> list[Any]:
    return list(llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], params))


def _why_too_long(llm: Any, num_prompt_tokens: int, max_tokens: int) -> str | None:
    """Why a prompt and its output have no room, as a clause; None if they have."""
    num_tokens = num_prompt_tokens + max_tokens
    need = f"a prompt of {num_prompt_tokens} tokens and {max_tokens} for the reply do not fit"
    if num_tokens > llm.max_model_len:
        return f"{need} the model's context of {llm.max_model_len}"
    if math.ceil(num_tokens / llm.block_size) > llm.cache.num_blocks:
        return f"{need} the pool of {llm.cache.num_blocks} blocks of {llm.block_size}"
    return None


def _record(name: str, turn: int, warm: Any, cold: Any | None) -> TurnRecord:
    output = warm.outputs[0]
    num_prompt_tokens = len(warm.prompt_token_ids)
    return TurnRecord(
        conversation=name,
        turn=turn,
        prompt_tokens=num_prompt_tokens,
        cached_tokens=warm.num_cached_tokens,
        computed_tokens=num_prompt_tokens - warm.num_cached_tokens,
        output_tokens=len(output.token_ids),
        ttft_s=warm.metrics.ttft_s,
        tpot_s=warm.metrics.tpot_s,
        ttft_cold_s=None if cold is None else cold.metrics.ttft_s,
        same_output=None if cold is None else list(cold.outputs[0].token_ids) == list(output.token_ids),
    )


def _continue(player: _Player, turn_index: int, warm: Any, history: str) -> list[str]:
    """Puts the reply into the session; gives back remarks."""
    recorded = player.turns[turn_index].assistant
    if history == "recorded" and recorded is not None:
        player.session.assistant_text(recorded)
        return []
    player.session.assistant(warm.outputs[0].token_ids)
    if history == "recorded" and turn_index + 1 < len(player.turns):
        return [f"{player.name}: turn {turn_index + 1} has no recorded reply, so the model's own was kept"]
    return []


def _session_remarks(players: Sequence[_Player]) -> list[str]:
    """Where prompts are not what the template would write; said once for all conversations with the same reason."""
    names: dict[str, list[str]] = {}
    for player in players:
        if player.session.remark is not None:
            names.setdefault(player.session.remark, []).append(player.name)
    return [f"{who[0]}{f' and {len(who) - 1} more' if len(who) > 1 else ''}: {remark}" for remark, who in names.items()]


def _totals(records: Sequence[TurnRecord], history: str, seconds: float) -> ReplayTotals:
    num_prompt_tokens = sum(record.prompt_tokens for record in records)
    num_cached_tokens = sum(record.cached_tokens for record in records)
    before: dict[str, TurnRecord] = {}
    num_later_turns = num_full_hits = 0
    for record in records:
        last = before.get(record.conversation)
        if last is not None:
            num_later_turns += 1
            num_reply_tokens = last.output_tokens - 1 if history == "generated" else 0
            num_full_hits += record.cached_tokens >= last.prompt_tokens + num_reply_tokens
        before[record.conversation] = record
    tpots_s = [record.tpot_s for record in records if record.tpot_s is not None]
    same = [record.same_output for record in records if record.same_output is not None]
    return ReplayTotals(
        num_conversations=len(before),
        num_turns=len(records),
        prompt_tokens=num_prompt_tokens,
        cached_tokens=num_cached_tokens,
        computed_tokens=num_prompt_tokens - num_cached_tokens,
        output_tokens=sum(record.output_tokens for record in records),
        token_hit_rate=num_cached_tokens / num_prompt_tokens if num_prompt_tokens else None,
        num_later_turns=num_later_turns,
        num_full_hits=num_full_hits,
        mean_tpot_s=statistics.fmean(tpots_s) if tpots_s else None,
        by_turn=tuple(_wave_summaries(records)),
        same_output=all(same) if same else None,
        seconds=seconds,
    )


def _wave_summaries(records: Sequence[TurnRecord]) -> list[WaveSummary]:
    waves = []
    for turn in sorted({record.turn for record in records}):
        wave = [record for record in records if record.turn == turn]
        cold_s = [record.ttft_cold_s for record in wave if record.ttft_cold_s is not None]
        waves.append(
            WaveSummary(
                turn=turn,
                num_turns=len(wave),
                median_ttft_s=statistics.median(record.ttft_s for record in wave),
                median_ttft_cold_s=statistics.median(cold_s) if cold_s else None,
                token_hit_rate=sum(r.cached_tokens for r in wave) / sum(r.prompt_tokens for r in wave),
            )
        )
    return waves


# For people -----------------------------------------------------------------------------------------------------------


def print_report(report: ReplayReport, console: Console) -> None:
    """Prints the report: a row for each turn, the totals, the remarks and the tree. Needs rich."""
    from rich.table import Table
    from rich.text import Text

    table = Table(title=f"{report.model}  {report.dtype}  block size {report.block_size}", title_justify="left")
    table.add_column("conversation", overflow="fold")
    headings = ["turn", "prompt", "cached", "hit", "TTFT ms", "TPOT ms", "output"]
    if report.is_compared:
        headings += ["cold TTFT", "speed-up", "same"]
    for heading in headings:
        table.add_column(heading, justify="right", no_wrap=True)
    last_turn = 1
    for record in report.turns:
        if record.turn != last_turn:
            table.add_section()
            last_turn = record.turn
        cells = [
            record.conversation,
            str(record.turn),
            str(record.prompt_tokens),
            str(record.cached_tokens),
            f"{record.hit_rate:.1%}",
            _ms(record.ttft_s),
            _ms(record.tpot_s),
            str(record.output_tokens),
        ]
        if report.is_compared:
            same = {True: "yes", False: "NO", None: "-"}[record.same_output]
            cells += [_ms(record.ttft_cold_s), _times(record.speedup), same]
        table.add_row(*(Text(cell) for cell in cells))  # Text: a name such as "[/b]" is no markup
    console.print(table)
    for line in _total_lines(report):
        console.print(Text(line))
    for remark in report.remarks:
        console.print(Text(f"Remark: {remark}"))
    console.print()
    lines = shortened(report.tree)
    for line in lines:
        console.print(Text(line), no_wrap=True, overflow="ellipsis", crop=True)


def page_of(report: ReplayReport, film: Film) -> str:
    """The report as one HTML page: the life of the cache as a film, hit rate and TTFT by turn, totals and remarks."""
    from radixkv.render import draw_turns

    return film.to_html(
        f"radixkv replay: {report.model}",
        subtitle=f"{report.dtype}, {film.cache.num_blocks:,} blocks of {report.block_size} tokens",
        plots=[draw_turns(report.totals.by_turn)],
        notes=[*_total_lines(report), *(f"Remark: {remark}" for remark in report.remarks)],
    )


def shortened(tree: str, max_lines: int = MAX_TREE_LINES) -> list[str]:
    """The lines of a drawn tree; of a long one, its first `max_lines` and a line that counts the rest."""
    lines = tree.splitlines()
    if len(lines) <= max_lines:
        return lines
    return [*lines[:max_lines], f"... and {len(lines) - max_lines} more lines"]


def _total_lines(report: ReplayReport) -> list[str]:
    totals = report.totals
    if not totals.num_turns:
        return ["No turn was played."]
    lines = [
        f"{totals.num_turns} turns of {totals.num_conversations} conversations in {totals.seconds:.1f} s. "
        f"Of {totals.prompt_tokens} prompt tokens, {totals.cached_tokens} were hits ({totals.token_hit_rate:.1%}) and "
        f"{totals.computed_tokens} were computed.",
    ]
    if totals.num_later_turns:
        lines.append(
            f"{totals.num_full_hits} of {totals.num_later_turns} later turns hit every token that the turn before them "
            "had computed and that they share with it."
        )
    for wave in totals.by_turn:
        line = f"Turn {wave.turn}: hit {wave.token_hit_rate:.1%}, median TTFT {_ms(wave.median_ttft_s)} ms"
        if wave.median_ttft_cold_s is not None:
            line += f", cold {_ms(wave.median_ttft_cold_s)} ms ({_times(wave.median_ttft_cold_s / wave.median_ttft_s)})"
        lines.append(line)
    if totals.mean_tpot_s is not None:
        lines.append(f"Mean TPOT {_ms(totals.mean_tpot_s)} ms.")
    if totals.same_output is not None:
        num_same = sum(record.same_output is True for record in report.turns)
        verdict = "All outputs are" if totals.same_output else f"Only {num_same} of {totals.num_turns} outputs are"
        lines.append(f"{verdict} identical with and without the cache.")
    return lines


def _ms(seconds: float | None) -> str:
    return "-" if seconds is None else f"{seconds * 1000:.1f}"


def _times(ratio: float | None) -> str:
    return "-" if ratio is None else f"{ratio:.1f}x"

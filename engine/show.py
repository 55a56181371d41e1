"""`radixkv show`: the life of a cache under some chats or a trace, without a model. Imports no torch.

Requests are played in order through a `PrefixCache` as an engine would: the prompt is allocated and committed, the
output appended token by token and committed where a block is full, and with `--concurrency` the last few requests still
run when the next one comes. Chats are cut into words, so that the tree can be read; a trace keeps its own tokens, and
where it names blocks of tokens, each stands as one token in a block of its own.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from array import array
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from engine.arguments import at_least, positive
from engine.chats import builtin_chats
from radixkv import PrefixCache
from radixkv.eviction import POLICIES
from radixkv.film import MAX_FRAMES, Film
from radixkv.traces import FORMATS, Trace, load
from radixkv.traces.texts import FORMATS as CHAT_FORMATS

EXAMPLES = """\
  radixkv show                                         the built-in chats; the tree as text
  radixkv show --html film.html                        ... and a page that plays how it came about
  radixkv show my_chats.jsonl --html film.html --num-blocks 64 --concurrency 3
  radixkv show trace.jsonl.gz --requests 100 --html film.html --policy lfu"""

_REQUESTS = 200  # more than anybody watches
_CONVERSATIONS = 8  # rows that one looks at; more of them would keep each other's turns out of a small pool
_SHARE_OF_POOL = 0.75  # of what the play would fill, so that one sees what is evicted

# A word with the space before it, a mark, or white space; the frame of a message is one token. Line feeds stand alone:
# each message ends in one, so the words of a prompt are the first words of every prompt that goes on from it.
_WORD = re.compile(r"<\|[^|>\s]*\|>|\n|[^\S\n]*\w+|[^\S\n]*[^\w\s]|[^\S\n]+")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `radixkv show`."""
    what = parser.add_argument_group("what is played")
    what.add_argument(
        "file", metavar="CHATS_OR_TRACE", nargs="?", help="a file or folder, plain or gzipped (default: built-in chats)"
    )
    what.add_argument("--format", choices=FORMATS, default="auto", help="of the file (default: %(default)s)")
    what.add_argument(
        "--requests",
        metavar="N",
        type=positive,
        default=_REQUESTS,
        help="the first N only (default: %(default)s)",
    )
    what.add_argument(
        "--conversations",
        metavar="N",
        type=positive,
        help=f"of the first N conversations only (default: {_CONVERSATIONS}, or all where requests have times)",
    )
    what.add_argument(
        "--in-file-order",
        action="store_true",
        help="chat after chat, not turn 1 of each, turn 2 of each, ...",
    )
    cache = parser.add_argument_group("the cache")
    cache.add_argument(
        "--num-blocks",
        metavar="N",
        type=positive,
        help="blocks in the pool (default: three quarters of what all requests together would fill)",
    )
    cache.add_argument(
        "--block-size", metavar="N", type=positive, help="tokens a block (default: 16; 1 where a trace names blocks)"
    )
    cache.add_argument("--policy", choices=POLICIES, default="lru", help="which leaf goes first (default: %(default)s)")
    cache.add_argument(
        "--concurrency",
        metavar="N",
        type=positive,
        default=2,
        help="requests that run at once (default: %(default)s)",
    )
    out = parser.add_argument_group("output")
    out.add_argument("--html", metavar="FILE", type=Path, help="write a page that plays the life of the cache")
    out.add_argument(
        "--max-frames",
        metavar="N",
        type=at_least(3),
        default=MAX_FRAMES,
        help="pictures at most (default: %(default)s)",
    )
    out.add_argument("--json", action="store_true", help="print one JSON object instead of text")


# What is played -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Played:
    """One request: its conversation (empty where nobody knows), and the tokens of prompt and output."""

    name: str
    turn: int | None
    prompt: Sequence[int]
    output: Sequence[int]


@dataclass
class Words:
    """Numbers the words of texts in order of appearance, and gives them back."""

    words: list[str] = field(default_factory=list)
    numbers: dict[str, int] = field(default_factory=dict)

    def encode(self, text: str) -> list[int]:
        """The number of each word; `decode` gives the same text again."""
        ids = []
        for word in _WORD.findall(text):
            number = self.numbers.setdefault(word, len(self.words))
            if number == len(self.words):
                self.words.append(word)
            ids.append(number)
        return ids

    def decode(self, token_ids: Sequence[int]) -> str:
        """The text of some words."""
        return "".join(self.words[token_id] for token_id in token_ids)


@dataclass(frozen=True)
class Script:
    """What is to be played: requests in order, how to read their tokens, and sentences on how they were taken."""

    name: str
    requests: list[Played]
    decode: Callable[[Sequence[int]], str] | None
    has_blocks: bool
    notes: list[str]


def script_of(arguments: argparse.Namespace) -> Script:
    """What the command line names, at most `--requests` of it. Raises ValueError if it cannot be played."""
    if arguments.file is None:
        words = Words()
        requests = list(_builtin_requests(words))
        notes = ["The built-in chats, one token a word."]
        decode: Any = words.decode
        name, has_blocks, is_ordered = "built-in chats", False, False
    else:
        trace = load(arguments.file, arguments.format)
        if not trace.has_prefixes:
            raise ValueError(f"{arguments.file} ({trace.format}) tells lengths only, not which prompts start alike")
        name, has_blocks = trace.name, trace.block_size != 1
        is_ordered = len({request.arrival_s for request in trace.requests}) > 1
        if trace.format in CHAT_FORMATS:
            words = Words()
            requests = [_in_words(played, words) for played in _trace_requests(trace)]
            decode = words.decode
            notes = [f"Chats in the format {trace.format}, one token a word."]
        else:
            requests = list(_trace_requests(trace))
            decode = None
            size = f"blocks of {trace.block_size} tokens" if trace.block_size else "segments"
            notes = [f"The trace names {size}: each stands as one token here."] if has_blocks else []
    threads = list(dict.fromkeys(played.name for played in requests))  # requests of none count as one together
    num_threads = arguments.conversations or (len(threads) if is_ordered else _CONVERSATIONS)
    if len(threads) > num_threads:
        notes.append(f"The first {num_threads:,} of {len(threads):,} conversations.")
        kept = set(threads[:num_threads])
        requests = [played for played in requests if played.name in kept]
    if not is_ordered and not arguments.in_file_order and all(played.turn is not None for played in requests):
        requests.sort(key=lambda played: played.turn or 0)
    if len(requests) > arguments.requests:
        notes.append(f"The first {arguments.requests:,} of {len(requests):,} requests.")
    return Script(name, requests[: arguments.requests], decode, has_blocks, notes)


def _builtin_requests(words: Words) -> Iterator[Played]:
    for conversation in builtin_chats():
        said: list[int] = []
        turn = 0
        for message in conversation.messages:
            ids = words.encode(f"<|{message.role}|>\n")
            body = words.encode(f"{message.content}\n")
            if message.role == "assistant":
                turn += 1
                yield Played(conversation.name, turn, said + ids, body)
            said += ids + body


def _trace_requests(trace: Trace) -> Iterator[Played]:
    for request in trace.requests:
        if request.units:
            yield Played(request.thread or "", request.turn, request.units, request.output_units or array("I"))


def _in_words(played: Played, words: Words) -> Played:
    """The same request with words for tokens instead of bytes."""
    # By way of a list: `bytes` of an array would be its memory, four bytes a token.
    texts = (bytes(list(side)).decode("utf-8", "replace") for side in (played.prompt, played.output))
    prompt, output = map(words.encode, texts)
    return Played(played.name, played.turn, prompt, output)


# The play -------------------------------------------------------------------------------------------------------------


def play(
    cache: PrefixCache, requests: Sequence[Played], concurrency: int, before: Callable[[Played], None] | None = None
) -> list[int]:
    """Plays requests through a cache, and gives the hit tokens of each.

    Up to `concurrency` requests run at a time: the eldest ends when one more comes. before: called before each request
    that belongs to a conversation. Raises OutOfBlocks if the pool is too small for that.
    """
    hits = []
    running: deque[str] = deque()
    for index, played in enumerate(requests):
        if len(running) == concurrency:
            cache.free(running.popleft())
        if before is not None and played.name:
            before(played)
        request_id = f"{index + 1} ({played.name})" if played.name else str(index + 1)
        hits.append(cache.allocate(request_id, played.prompt).num_cached_tokens)
        running.append(request_id)
        cache.commit(request_id, len(played.prompt))
        for num_tokens, token_id in enumerate(played.output, start=len(played.prompt) + 1):
            cache.append_token(request_id, token_id)
            cache.commit(request_id, num_tokens)
    while running:
        cache.free(running.popleft())
    return hits


def _num_blocks(script: Script, block_size: int, policy: str, concurrency: int) -> int:
    """A pool of three quarters of what the play would fill; more, if the requests that run at a time need it."""
    needed = [-(-(len(played.prompt) + len(played.output)) // block_size) for played in script.requests]
    without_end = PrefixCache(sum(needed), block_size, policy)
    play(without_end, script.requests, concurrency)
    most = max(sum(needed[index : index + concurrency]) for index in range(len(needed)))
    return max(int(_SHARE_OF_POOL * without_end.num_cached_blocks), most)


def by_turn(requests: Sequence[Played], hits: Sequence[int]) -> list[dict[str, Any]]:
    """Prompt tokens and hits by turn, in order; nothing where the requests have no turns."""
    groups: dict[int, list[int]] = {}
    for index, played in enumerate(requests):
        if played.turn is not None:
            groups.setdefault(played.turn, []).append(index)
    rows = []
    for turn, indices in sorted(groups.items()):
        total, hit = sum(len(requests[index].prompt) for index in indices), sum(hits[index] for index in indices)
        row = {"turn": turn, "requests": len(indices), "total_tokens": total, "hit_tokens": hit}
        rows.append({**row, "token_hit_rate": hit / total if total else None})
    return rows


def run_from_arguments(arguments: argparse.Namespace) -> None:
    """Runs `radixkv show`."""
    if arguments.html is not None:
        check_place(arguments.html, "--html")
    script = script_of(arguments)
    if not script.requests:
        raise ValueError(f"{arguments.file} has no request with a prompt")
    block_size = arguments.block_size or (1 if script.has_blocks else 16)
    num_blocks = arguments.num_blocks or _num_blocks(script, block_size, arguments.policy, arguments.concurrency)
    cache = PrefixCache(num_blocks, block_size, arguments.policy)
    film = None
    if arguments.html is not None:
        film = Film(cache, decode=script.decode, max_frames=arguments.max_frames)
    chapter = None if film is None else lambda played: film.chapter(_chapter(played))
    with film or nullcontext():
        hits = play(cache, script.requests, arguments.concurrency, chapter)
    stats = cache.stats
    summary = (
        f"{stats.requests:,} requests, {stats.prompt_tokens:,} prompt tokens, {stats.token_hit_rate:.1%} of them hits; "
        f"{stats.evicted_blocks:,} blocks evicted; {num_blocks:,} blocks of {block_size}, policy {arguments.policy}"
    )
    turns = [
        f"Turn {row['turn']}: {row['token_hit_rate']:.1%} of {row['total_tokens']:,} prompt tokens were hits."
        for row in by_turn(script.requests, hits)
    ]
    if film is not None:
        size = film.save(arguments.html, f"radixkv: {script.name}", subtitle=summary, notes=[*script.notes, *turns])
        print(f"wrote {arguments.html}: {len(film.frames):,} pictures, {size / 1e6:.1f} MB", file=sys.stderr)
    if arguments.json:
        document = {
            "source": script.name,
            "num_blocks": num_blocks,
            "block_size": block_size,
            "policy": arguments.policy,
            "requests": stats.requests,
            "total_tokens": stats.prompt_tokens,
            "hit_tokens": stats.hit_tokens,
            "token_hit_rate": stats.token_hit_rate,
            "evicted_blocks": stats.evicted_blocks,
            "by_turn": by_turn(script.requests, hits),
            "nodes": cache.tree.num_nodes,
            "cached_blocks": cache.num_cached_blocks,
        }
        print(json.dumps(document, ensure_ascii=False))
        return
    print(f"{script.name}: {summary}")
    for note in script.notes:
        print(note)
    for line in turns:
        print(line)
    print()
    print(cache.show(script.decode))
    if film is None:
        print("\nTo watch it step by step: --html film.html")


def check_place(path: Path, option: str) -> None:
    """Raises ValueError where no file of that name can be: better before the play than after it."""
    if path.is_dir() or not path.parent.is_dir():
        raise ValueError(f"{option} is {str(path)!r}; allowed: the name of a file in a folder that exists")


def _chapter(played: Played) -> str:
    return played.name if played.turn is None else f"{played.name}, turn {played.turn}"

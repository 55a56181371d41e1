"""Text from tokens as they come, and where a stop string ends it. Imports no torch and no transformers.

What a user was shown must not change, and in the end it must be what decoding all tokens at once gives. But tokens are
no pieces of text: one may hold half a character, and a decoder may look at its neighbours. So each step decodes the
last few tokens, a window, and cuts its text in three (the idea of two offsets into the ids is that of Text Generation
Inference and vLLM):

    |     settled before     | settles now |  open  |
    ^ context for the decoder                ^ what later tokens may still change

What stays open depends on the tokenizer, and is known before the first token:

    decoder ByteLevel, WordPiece or none, or Metaspace  U+FFFD at the end: it may be half a character
        or Replace, Fuse and Strip in turn
    the same with ByteFallback      a run of byte tokens: one bad byte makes each of them a U+FFFD
    any other, or a slow tokenizer  the last token's text too: the next token may change it
    with clean-up of spaces         `_CLEAN_UP_REACH` characters too, and a step decodes the whole output
    with a clean-up of its own, or  everything up to `finish()`, and a step decodes the whole output
        ByteFallback among others

For all but the third row, joined `take()`s are exactly `decode(all ids)`. For the third they are too if a token's text
depends on no later token but the next. If not, what was taken stays as it is, and `finish()` adds what then is missing.
The cost of a step does not grow with the output, but for the rows that say so.
"""

from __future__ import annotations

import codecs
import json
import re
import sys
from collections.abc import Sequence
from functools import partial
from typing import Any

# Decoders that give a token's text whatever the tokens after it are, and with one token before it whatever those are.
_LOCAL_DECODERS = re.compile(r"ByteLevel |WordPiece |((Metaspace|Replace) )*(ByteFallback )?(Fuse )?(Strip )?")
_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_REPLACEMENT = "\ufffd"
# A UTF-8 character has three bytes besides its last. Decoders write one U+FFFD for all of them, or one for each.
_MAX_UNFINISHED = 3
# Transformers' clean-up replaces ten strings in turn, of 2, 2, 2, 2, 3, 4, 3, 3, 4 and 4 characters, and no replacement
# is longer. Each can hold back one character less than it has, for the text of a match that has only begun.
_CLEAN_UP_REACH = 19
_CLEAN_UP_HOME = "transformers.tokenization_utils_base"
# Tokens that stay as context when a window is shortened: three bytes tell how the next one is read, and a token mostly
# has one or more. A window of 8 tokens is decoded in 5 µs, one token in 4.
_NUM_CONTEXT_TOKENS = 4


class Detokenizer:
    """The text of one request's output as its tokens come.

    tokenizer            a Hugging Face tokenizer, fast or slow
    stop                 strings that end the text
    include_stop         the text ends after the stop string rather than before
    skip_special_tokens  special tokens are no text

    Every token goes to `append`; the request is over when that returns a stop string, or with `finish`. Characters are
    code points: a family emoji of seven arrives in parts, a code point never does.
    Raises TypeError or ValueError for stop strings that are none.
    """

    def __init__(
        self,
        tokenizer: Any,
        stop: Sequence[str] = (),
        include_stop: bool = False,
        skip_special_tokens: bool = True,
    ) -> None:
        if isinstance(stop, str) or not all(isinstance(string, str) for string in stop):
            raise TypeError(f"stop must be a sequence of strings, not {stop!r}")
        if "" in stop:
            raise ValueError(f"stop is {stop!r}; allowed: strings of one character and more")
        self._decode = partial(tokenizer.decode, skip_special_tokens=skip_special_tokens)
        self._window = _Window(tokenizer, skip_special_tokens)
        self._stop = tuple(stop)
        self._include_stop = include_stop
        self._prefixes = {string[:size] for string in stop for size in range(1, len(string))}
        self._longest_prefix = max(map(len, self._prefixes), default=0)
        self._token_ids: list[int] = []
        self._pieces: list[str] = []  # settled
        self._num_settled = 0  # characters in them
        self._num_taken = 0  # of the pieces
        self._held = ""  # decoded for good, but may begin a stop string
        self._open = ""
        self._is_final = False

    def append(self, token_id: int, may_stop: bool = True) -> str | None:
        """Takes a sampled token, and gives the stop string that is complete now; None if there is none.

        Stop strings are looked for in the text of all tokens so far, without a character that is unfinished. The one
        that begins first wins, and of two that begin together the shorter. With `may_stop=False` none that ends within
        this token counts, now or later. O(token's text + stop strings), where the tokenizer needs no whole decode.
        """
        assert not self._is_final, "a token after the end of the text"
        self._token_ids.append(token_id)
        seen = self._held + self._open
        fresh, self._open = self._window.append(token_id)
        decoded = self._held + fresh
        text = decoded + self._open
        if may_stop and self._stop:
            # A match within what was seen before has been found before, or did not count.
            num_seen = _num_common(seen, text)
            begins = [(text.find(stop, max(0, num_seen + 1 - len(stop))), len(stop), stop) for stop in self._stop]
            if matches := [match for match in begins if match[0] >= 0]:
                begin, size, stop = min(matches)
                self._settle(text[: begin + size if self._include_stop else begin])
                self._is_final = True
                return stop
        sizes = range(min(len(decoded), self._longest_prefix), 0, -1)
        num_held = next((size for size in sizes if decoded[-size:] in self._prefixes), 0)
        self._settle(decoded[: len(decoded) - num_held])
        self._held = decoded[len(decoded) - num_held :]
        return None

    def finish(self) -> None:
        """No more tokens come: what was held back is text now. Does nothing after a stop string, or a second time."""
        if not self._is_final:
            self._settle(self._decode(self._token_ids)[self._num_settled :])
            self._is_final = True

    @property
    def text(self) -> str:
        """All the text that is settled; in the end, all there is."""
        return "".join(self._pieces)

    def take(self) -> str:
        """What has become settled since the last call. It may be shown: it will not change."""
        taken = "".join(self._pieces[self._num_taken :])
        self._num_taken = len(self._pieces)
        return taken

    def _settle(self, text: str) -> None:
        if text:
            self._pieces.append(text)
            self._num_settled += len(text)


class _Window:
    """The last tokens of an output and their text; see the table at the top of the file.

    Its text is `_text`, of which `_num_settled` characters will not change.
    """

    def __init__(self, tokenizer: Any, skip_special_tokens: bool) -> None:
        backend = getattr(tokenizer, "backend_tokenizer", None)
        decoders = [] if backend is None else _decoder_names(backend.decoder)
        is_local = backend is not None and _LOCAL_DECODERS.fullmatch("".join(f"{name} " for name in decoders))
        cleans_up = _cleans_up(tokenizer, backend)
        has_byte_fallback = "ByteFallback" in decoders
        is_opaque = (has_byte_fallback and (cleans_up or not is_local)) or (
            cleans_up and type(tokenizer).clean_up_tokenization.__module__ != _CLEAN_UP_HOME
        )
        self._is_local = bool(is_local)
        self._run = _ByteRun() if has_byte_fallback and not is_opaque else None
        self._reach = sys.maxsize if is_opaque else _CLEAN_UP_REACH if cleans_up else 0
        # Special tokens never reach the decoder: without them, every token of the window has text, or nearly so.
        self._skipped: set[int] = set()
        if skip_special_tokens and backend is not None:
            self._skipped = {token_id for token_id, token in tokenizer.added_tokens_decoder.items() if token.special}
        elif skip_special_tokens:
            self._skipped = set(getattr(tokenizer, "all_special_ids", ()))
        self._tokenizer = tokenizer
        self._decode = partial(tokenizer.decode, skip_special_tokens=skip_special_tokens)
        self._token_ids: list[int] = []
        self._text = ""
        self._num_settled = 0
        self._open = ""

    def append(self, token_id: int) -> tuple[str, str]:
        """The text that settles with a token, and the open text after it as far as it is made of whole characters."""
        # 1. Tokens that the decoder does not get, or whose text is known without it.
        if token_id in self._skipped:
            return "", self._open
        if self._run is not None:
            token = self._tokenizer.convert_ids_to_tokens(token_id)
            if token is None:  # outside the vocabulary: decoders pass over it
                return "", self._open
            if byte := _BYTE_TOKEN.fullmatch(token):
                self._token_ids.append(token_id)
                self._open = self._run.append(int(byte[1], 16))
                return "", self._open
            self._run = _ByteRun()
        self._token_ids.append(token_id)
        text = self._decode(self._token_ids)
        # 2. How much of the text will stay.
        num_finished = len(text)
        if self._run is None:
            num_finished -= min(_MAX_UNFINISHED, len(text) - len(text.rstrip(_REPLACEMENT)))
        num_settled = num_finished - self._reach
        if not self._is_local:
            # A token without text tells nothing of how the one before will read.
            num_common = _num_common(self._text, text) if text != self._text else 0
            num_settled = min(num_settled, num_common - self._reach)
        num_settled = max(num_settled, self._num_settled)
        fresh = text[self._num_settled : num_settled]
        self._text, self._num_settled, self._open = text, num_settled, text[num_settled:num_finished]
        # 3. A shorter window, now and then.
        if not self._reach and len(self._token_ids) >= 2 * _NUM_CONTEXT_TOKENS:
            self._shorten()
        return fresh, self._open

    def _shorten(self) -> None:
        """Keeps the last tokens only, if what follows reads the same after them.

        It does when the text that is not settled is the same, and an unfinished character begins within the window:
        a whole one is seen before it, or the window has three bytes. (A byte that begins a character does so whatever
        stands before it.) Either way there is a token before what follows, as decoders want that strip a first space.
        """
        token_ids = self._token_ids[-_NUM_CONTEXT_TOKENS:]
        text = self._decode(token_ids)
        rest = self._text[self._num_settled :]
        context = text.removesuffix(rest)
        has_start = context.strip(_REPLACEMENT) or len(text) >= _MAX_UNFINISHED
        if text.endswith(rest) and has_start:
            self._token_ids, self._text, self._num_settled = token_ids, text, len(context)


class _ByteRun:
    """Byte tokens in a row. They are text only together: one bad byte makes each of them a U+FFFD."""

    def __init__(self) -> None:
        self._utf8 = codecs.getincrementaldecoder("utf-8")()
        self._text = ""
        self._is_valid = True

    def append(self, byte: int) -> str:
        """The whole characters of the run with this byte; none if a byte was bad."""
        if self._is_valid:
            try:
                self._text += self._utf8.decode(bytes([byte]))
            except UnicodeDecodeError:
                self._text, self._is_valid = "", False
        return self._text


def _decoder_names(decoder: Any) -> list[str]:
    """The decoders of a fast tokenizer in the order in which they run."""
    if type(decoder).__name__ != "Sequence":
        return [] if decoder is None else [type(decoder).__name__]
    names, parts = [], json.loads(decoder.__getstate__())["decoders"]
    while parts:
        part, *parts = parts
        if part["type"] == "Sequence":
            parts = part["decoders"] + parts
        else:
            names.append(part["type"])
    return names


def _cleans_up(tokenizer: Any, backend: Any) -> bool:
    """Whether `decode` removes spaces before punctuation at the end; transformers spares BPE unless it is forced."""
    if not getattr(tokenizer, "clean_up_tokenization_spaces", False):
        return False
    is_bpe = backend is not None and type(backend.model).__name__ == "BPE"
    return not is_bpe or tokenizer.clean_up_tokenization_spaces_for_bpe_even_though_it_will_corrupt_output


def _num_common(a: str, b: str) -> int:
    """Characters that both begin with."""
    if b.startswith(a):
        return len(a)
    return next((i for i, (left, right) in enumerate(zip(a, b, strict=False)) if left != right), min(len(a), len(b)))

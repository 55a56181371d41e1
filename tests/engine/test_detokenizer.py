"""Text as tokens come: the parts that were shown make up `decode` of all tokens, and stop strings end it where they do.

Two models: `decode` of the whole output, and a search for stop strings in that after every token.
"""

from __future__ import annotations

import functools
import random
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("transformers", reason="detokenizing needs a tokenizer")

from chat_helpers import CharTokenizer, make_tokenizer
from tokenizers import AddedToken, Tokenizer, decoders, models
from transformers import AutoTokenizer, PreTrainedTokenizer, PreTrainedTokenizerFast

from engine.detokenizer import Detokenizer

UNKNOWN = "\ufffd"
SPECIAL = ("<s>", "</s>")

# ---------------------------------------------------------------- tokenizers of every kind


def fast(model, decoder, **options):
    """A fast tokenizer with two special tokens at the end of its vocabulary."""
    tokenizer = Tokenizer(model)
    if decoder is not None:
        tokenizer.decoder = decoder
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in SPECIAL])
    tokenizer.add_tokens([AddedToken("<tool>", special=False)])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=SPECIAL[1], **options)


def numbered(tokens):
    """A vocabulary in the order of the tokens."""
    return {token: i for i, token in enumerate(tokens)}


def words(tokens):
    """A model that has nothing but a vocabulary."""
    return models.WordLevel(numbered(["<unk>", *tokens]), unk_token="<unk>")


def bpe(tokens):
    """A BPE model without merges: decoding needs none."""
    return models.BPE(vocab=numbered(["<unk>", *tokens]), merges=[], unk_token="<unk>", byte_fallback=True)


BYTES = [f"<0x{byte:02X}>" for byte in (0x0A, 0x41, 0xC3, 0xA9, 0xE2, 0x82, 0xAC, 0xF0, 0x9F, 0x98, 0x80, 0xFF)]
PIECES = ["▁", "▁a", "a", "▁▁", "b▁", "é", "世", "", UNKNOWN, "<0xZZ>"]
WORDS = ["a", "##a", "##", "b", ".", "'", "don", "##'t", "t", "s", "n't", "do not", "", UNKNOWN, "世"]
PUNCTUATION = ["a", "##'", "##n't", " ", *".?!,'", "n", "t", "n't", "m", "s", "'m", "'s", "'ve", "'v", "e", "'re"]
LLAMA = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]


class SlowTokenizer(PreTrainedTokenizer):
    """A tokenizer in Python: a token that ends in "@@" is joined to the next one."""

    def __init__(self, tokens=(*SPECIAL, "a", "b@@", "@@", "c", "", ".", "'", "m"), **options):
        self._tokens = list(tokens)
        super().__init__(bos_token=SPECIAL[0], eos_token=SPECIAL[1], **options)

    @property
    def vocab_size(self):
        return len(self._tokens)

    def get_vocab(self):
        return numbered(self._tokens)

    def _convert_token_to_id(self, token):
        return self._tokens.index(token)

    def _convert_id_to_token(self, index):
        return self._tokens[index]

    def convert_tokens_to_string(self, tokens):
        return " ".join(tokens).replace("@@ ", "").strip()


class SlowBytes(SlowTokenizer):
    """Bytes in hexadecimal: one U+FFFD for each byte that is part of no character, as SentencePiece does."""

    def __init__(self):
        super().__init__([*SPECIAL, *["41", "C3", "A9", "E2", "82", "AC", "F0", "9F98", "80", "E282", "A941", "FF"]])

    def convert_tokens_to_string(self, tokens):
        parts = [token.encode() if token in SPECIAL else bytes.fromhex(token) for token in tokens]
        hidden = b"".join(parts).decode("utf-8", "surrogateescape")
        return "".join(UNKNOWN if "\udc80" <= letter <= "\udcff" else letter for letter in hidden)


class OwnCleanUp(PreTrainedTokenizerFast):
    """What it removes depends on the very end of the text."""

    def clean_up_tokenization(self, text):
        return text.replace("a", "") if text.endswith(".") else text


def byte_level(**options):
    """Bytes, some pairs that are half of one character and half of the next, and a real U+FFFD."""
    letters = [letter_of(byte) for byte in b"\nA \xc3\xa9\xe2\x82\xac\xf0\x9f\x98\x80\xff"]
    joined = [
        "".join(map(letter_of, part)) for part in (b"\xa9\xe2\x82", b"\xf0\x9f", b"\xef\xbf\xbd", b"\xacA", b" A\xc3")
    ]
    return fast(bpe([*letters, *joined, "世"]), decoders.ByteLevel(), **options)


@functools.cache
def letter_of(byte):
    """The letter that stands for a byte in the vocabulary of a byte-level tokenizer: itself if it can be printed."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    return chr(byte if byte in printable else 256 + sum(other not in printable for other in range(byte)))


FORCED = "clean_up_tokenization_spaces_for_bpe_even_though_it_will_corrupt_output"
KINDS = {
    "byte-level": byte_level,
    "byte-level, a clean-up that transformers ignores": lambda: byte_level(clean_up_tokenization_spaces=True),
    "llama": lambda: fast(bpe([*BYTES, *PIECES]), decoders.Sequence([*LLAMA, decoders.Strip(" ", 1, 0)])),
    "gemma": lambda: fast(bpe([*BYTES, *PIECES]), decoders.Sequence(LLAMA)),
    "nested": lambda: fast(bpe([*BYTES, *PIECES]), decoders.Sequence([decoders.Sequence(LLAMA[:2]), LLAMA[2]])),
    "metaspace": lambda: fast(words(PIECES), decoders.Metaspace()),
    "metaspace, bytes": lambda: fast(words([*BYTES, *PIECES]), decoders.Sequence([decoders.Metaspace(), *LLAMA[1:]])),
    "wordpiece": lambda: fast(words(WORDS), decoders.WordPiece(cleanup=False)),
    "wordpiece, clean-up of tokens": lambda: fast(words(WORDS), decoders.WordPiece(cleanup=True)),
    "no decoder": lambda: fast(words(WORDS), None),
    "suffixes": lambda: fast(words(["a</w>", "b", "c</w>", ""]), decoders.BPEDecoder("</w>")),
    "ctc": lambda: fast(words(["a", "b", "<pad>", "|", "don", "'t"]), decoders.CTC()),
    "slow": SlowTokenizer,
    "slow bytes": SlowBytes,
    "decode and nothing else": CharTokenizer,
    "clean-up": lambda: fast(words(PUNCTUATION), decoders.WordPiece(cleanup=False), clean_up_tokenization_spaces=True),
    "clean-up, forced on BPE": lambda: fast(
        bpe(PUNCTUATION), decoders.Fuse(), clean_up_tokenization_spaces=True, **{FORCED: True}
    ),
    "slow, clean-up": lambda: SlowTokenizer(clean_up_tokenization_spaces=True),
    "clean-up, byte runs": lambda: fast(
        words([*BYTES, *PUNCTUATION]), decoders.Sequence(LLAMA), clean_up_tokenization_spaces=True
    ),
    "byte runs before something else": lambda: fast(
        bpe([*BYTES, *PIECES]), decoders.Sequence([*LLAMA, decoders.Replace("aa", "b")])
    ),
    "a clean-up of its own": lambda: OwnCleanUp(
        tokenizer_object=fast(words(PUNCTUATION), decoders.Fuse())._tokenizer, clean_up_tokenization_spaces=True
    ),
}
# Whole output decoded at each step; and the text of a token may be other when the next has come.
WHOLE = {name for name in KINDS if "clean-up" in name and "ignores" not in name and "tokens" not in name}
WHOLE |= {"byte runs before something else"}
OPAQUE = {"a clean-up of its own", "clean-up, byte runs", "byte runs before something else"}
LATE = {"suffixes", "ctc", "slow", "slow bytes", "decode and nothing else"}
BYTE_RUNS = {"llama", "gemma", "nested", "metaspace, bytes"}


@functools.cache
def tokenizer_of(kind):
    """One tokenizer of each kind; nothing here changes it."""
    return KINDS[kind]()


@functools.cache
def plain_tokenizer(tokens):
    """A tokenizer whose tokens are their own text."""
    return fast(words(tokens), decoders.Fuse())


def outputs(kind):
    """Token ids, special ones and, where decoders pass over them, some outside the vocabulary."""
    tokenizer = tokenizer_of(kind)
    if kind == "decode and nothing else":
        return st.lists(st.sampled_from([97, 98, 0x4E16, 0x1F600]), max_size=30)
    num_outside = 2 if isinstance(tokenizer, PreTrainedTokenizerFast) else 0
    return st.lists(st.integers(0, len(tokenizer) - 1 + num_outside), max_size=30)


def whole(kind, token_ids):
    """The text of all the tokens at once."""
    return tokenizer_of(kind).decode(token_ids, skip_special_tokens=True)


def parts_of(detokenizer, token_ids):
    """What is taken after each token, and in the end."""
    parts = []
    for token_id in token_ids:
        assert detokenizer.append(token_id) is None
        parts.append(detokenizer.take())
    detokenizer.finish()
    return [*parts, detokenizer.take()]


def finished(text):
    """Text without what may be half a character."""
    return text[:-3] + text[-3:].rstrip(UNKNOWN)


# ---------------------------------------------------------------- text


class TestText:
    @pytest.mark.parametrize("kind", KINDS)
    @given(data=st.data())
    def test_what_is_taken_after_each_token_joins_to_the_decode_of_all_of_them(self, kind, data):
        """B090: a user who saw the text grow has the same text as one who waited."""
        token_ids = data.draw(outputs(kind))
        detokenizer = Detokenizer(tokenizer_of(kind))
        parts = parts_of(detokenizer, token_ids)
        assert "".join(parts) == detokenizer.text == whole(kind, token_ids)

    @pytest.mark.parametrize("kind", ["byte-level", "llama", "wordpiece", "slow", "slow bytes", "clean-up"])
    @given(data=st.data())
    def test_special_tokens_can_be_text(self, kind, data):
        """They then stand between bytes that would otherwise be one character."""
        tokenizer = tokenizer_of(kind)
        token_ids = data.draw(outputs(kind))
        detokenizer = Detokenizer(tokenizer, skip_special_tokens=False)
        parts = parts_of(detokenizer, token_ids)
        assert "".join(parts) == detokenizer.text == tokenizer.decode(token_ids, skip_special_tokens=False)

    @pytest.mark.parametrize("kind", sorted(KINDS.keys() - WHOLE - LATE - BYTE_RUNS))
    @given(data=st.data())
    def test_text_is_shown_with_its_token(self, kind, data):
        """Holding back is safe and easy; a user wants each word when it is there."""
        token_ids = data.draw(outputs(kind))
        detokenizer = Detokenizer(tokenizer_of(kind))
        for num, token_id in enumerate(token_ids, 1):
            detokenizer.append(token_id)
            assert detokenizer.text.startswith(finished(whole(kind, token_ids[:num])))

    @pytest.mark.parametrize("kind", sorted(BYTE_RUNS))
    @given(data=st.data())
    def test_text_of_byte_fallback_is_shown_when_its_run_of_bytes_has_ended(self, kind, data):
        """Not before, as one bad byte turns the whole run into U+FFFD; and not after."""
        tokenizer = tokenizer_of(kind)
        token_ids = data.draw(outputs(kind))
        detokenizer = Detokenizer(tokenizer)
        for num, token_id in enumerate(token_ids, 1):
            detokenizer.append(token_id)
            kept = [
                other for other in token_ids[:num] if tokenizer.convert_ids_to_tokens(other) not in (None, *SPECIAL)
            ]
            while kept and tokenizer.convert_ids_to_tokens(kept[-1]) in BYTES:
                kept.pop()
            assert detokenizer.text == whole(kind, kept)

    @pytest.mark.parametrize("kind", ["slow", "slow bytes", "decode and nothing else"])
    @given(data=st.data())
    def test_text_of_other_tokenizers_is_shown_with_the_next_token(self, kind, data):
        """What a tokenizer in Python does to the last token is its own affair; what came before is text."""
        token_ids = data.draw(outputs(kind))
        detokenizer = Detokenizer(tokenizer_of(kind))
        shown, last = "", ""
        for num, token_id in enumerate(token_ids, 1):
            detokenizer.append(token_id)
            text = whole(kind, token_ids[:num])
            if text != last:
                common = next(
                    (i for i, pair in enumerate(zip(last, text, strict=False)) if len({*pair}) == 2), len(last)
                )
                shown, last = finished(text)[:common], text
            assert detokenizer.text.startswith(shown)

    @pytest.mark.parametrize("kind", ["clean-up", "clean-up, forced on BPE"])
    @given(data=st.data())
    def test_a_clean_up_of_spaces_holds_back_no_more_than_it_can_change(self, kind, data):
        """Twenty characters back, no space is removed any more."""
        token_ids = data.draw(outputs(kind))
        detokenizer = Detokenizer(tokenizer_of(kind))
        for num, token_id in enumerate(token_ids, 1):
            detokenizer.append(token_id)
            assert len(detokenizer.text) >= len(whole(kind, token_ids[:num])) - 19

    def test_a_clean_up_removes_a_space_long_after_it_came(self):
        """The space of " n't" goes when its last letter comes, and that of the ' has gone before: four characters."""
        tokenizer = tokenizer_of("clean-up")
        token_ids = tokenizer.convert_tokens_to_ids(["a"] * 12 + ["n", "'", "t"])
        parts = parts_of(Detokenizer(tokenizer), token_ids)
        assert "".join(parts) == " ".join("a" * 12) + "n't"

    @pytest.mark.parametrize(
        "kind", ["a clean-up of its own", "clean-up, byte runs", "byte runs before something else"]
    )
    @given(data=st.data())
    def test_nothing_is_shown_before_the_end_where_nothing_is_sure(self, kind, data):
        """A clean-up that is not known may change the first character with the last token."""
        token_ids = data.draw(outputs(kind))
        *parts, last = parts_of(Detokenizer(tokenizer_of(kind)), token_ids)
        assert not any(parts)
        assert last == whole(kind, token_ids)

    @pytest.mark.parametrize(
        ("output", "parts"),
        [
            (b"", [""]),
            (b"A\n", ["A", "\n", ""]),
            ("é".encode(), ["", "é", ""]),
            ("世A".encode(), ["", "", "世", "A", ""]),
            ("😀".encode(), ["", "", "", "😀", ""]),
            # A zero-width joiner, a skin tone and a combining accent are code points of their own.
            ("👩‍👧".encode(), ["", "", "", "👩", "", "", "\u200d", "", "", "", "👧", ""]),
            ("👍🏽".encode(), ["", "", "", "👍", "", "", "", "🏽", ""]),
            ("e\u0301".encode(), ["e", "", "\u0301", ""]),
            # Cut off at the end.
            (b"A\xe2\x82", ["A", "", "", UNKNOWN]),
            (b"\xf0\x9f\x98", ["", "", "", UNKNOWN]),
            # Never a character: shown when something else follows, or after three more.
            (b"\xe2\x82A", ["", "", UNKNOWN + "A", ""]),
            (b"\xe2\xe2\x82\xac", ["", "", "", UNKNOWN + "€", ""]),
            (b"\xff\xff\xff\xff\xff", ["", "", "", UNKNOWN, UNKNOWN, 3 * UNKNOWN]),
            # A model may write U+FFFD itself.
            (b"\xef\xbf\xbdA", ["", "", "", UNKNOWN + "A", ""]),
            (b"A\xef\xbf\xbd", ["A", "", "", "", UNKNOWN]),
        ],
    )
    def test_a_byte_at_a_time(self, output, parts):
        """Each character comes with its last byte, and never half of it."""
        tokenizer = make_tokenizer(None)
        token_ids = tokenizer.convert_tokens_to_ids([letter_of(byte) for byte in output])
        assert parts_of(Detokenizer(tokenizer), token_ids) == parts

    @pytest.mark.parametrize(
        ("tokens", "parts"),
        [
            (["▁a", "▁a", "▁▁"], ["a", " a", "  ", ""]),
            (["▁", "▁", "a"], ["", " ", "a", ""]),
            (["", "</s>", "▁a"], ["", "", "a", ""]),
            (["</s>", "▁a"], ["", "a", ""]),
            (["a", "<0x0A>", "a"], ["a", "", "\na", ""]),
            (["a", "<0x0A>"], ["a", "", "\n"]),
            (["<0xC3>", "<0xA9>", "a"], ["", "", "éa", ""]),
            (["<0xC3>", "</s>", "<0xA9>", "a"], ["", "", "", "éa", ""]),
            (["<0xC3>", "<0xA9>", "<0xFF>", "a"], ["", "", "", 3 * UNKNOWN + "a", ""]),
            (["<0xC3>", "<0xA9>", "</s>", "<0xFF>", "a"], ["", "", "", "", 3 * UNKNOWN + "a", ""]),
            (["<0xC3>", "", "<0xA9>", "a"], ["", UNKNOWN, "", UNKNOWN + "a", ""]),
        ],
    )
    def test_pieces_with_byte_fallback(self, tokens, parts):
        """The first space is no text, the others are; bytes are text together or not at all."""
        tokenizer = tokenizer_of("llama")
        assert parts_of(Detokenizer(tokenizer), tokenizer.convert_tokens_to_ids(tokens)) == parts

    @pytest.mark.parametrize("num_before", range(8))
    def test_half_a_character_waits_for_the_rest_over_any_number_of_tokens_without_text(self, num_before):
        """A model can have more ids than its tokenizer; the window must not lose the first bytes meanwhile."""
        tokenizer = make_tokenizer(None)
        a, *emoji = tokenizer.convert_tokens_to_ids([letter_of(byte) for byte in b"A\xf0\x9f\x98\x80"])
        outside = [len(tokenizer) + 5] * 20
        parts = parts_of(Detokenizer(tokenizer), [a] * num_before + emoji[:2] + outside + emoji[2:])
        assert parts == ["A"] * num_before + [""] * 23 + ["😀", ""]

    @pytest.mark.parametrize("seed", range(3))
    def test_long_outputs_stay_exact(self, seed):
        """Faults of a window show only when it has moved many times."""
        rng = random.Random(seed)
        for kind in sorted(KINDS.keys() - WHOLE - {"decode and nothing else"}):
            some = rng.sample(range(len(tokenizer_of(kind))), k=5)
            token_ids = rng.choices(some, k=600)
            assert "".join(parts_of(Detokenizer(tokenizer_of(kind)), token_ids)) == whole(kind, token_ids)

    def test_text_that_was_taken_stays_though_a_tokenizer_takes_it_back(self):
        """A decoder that looks further back than told cannot be right both times; what was shown is kept."""

        class Shouting(CharTokenizer):
            def decode(self, ids, **options):
                text = super().decode(ids)
                return text.upper() if "!" in text else text

        detokenizer = Detokenizer(Shouting())
        assert parts_of(detokenizer, map(ord, "abc!")) == ["", "a", "b", "", "C!"]
        assert detokenizer.text == "abC!"

    @pytest.mark.parametrize(
        "text",
        [
            "Plain words, and 12,345 numbers.\n\n\tA tab.",
            "你好，世界！今天天气怎么样？ 𠮷野家",
            "こんにちは世界。カタカナと漢字。",
            "안녕하세요, 세계!",
            "👩‍👩‍👧‍👦 🏳️‍🌈 👍🏽 🇩🇪 😀😀",
            "e\u0301 n\u0303 Z\u0351\u036b\u0343 \u0915\u094d\u0937\u093f நி",
            "مرحبا بالعالم، שלום עולם",
            "a" + UNKNOWN + "b" + UNKNOWN,
        ],
    )
    def test_the_demo_models_own_tokens(self, demo_model, text):
        """B090: a real vocabulary splits characters where it likes, and each is shown with the token that ends it."""
        tokenizer = demo_tokenizer(demo_model)
        token_ids = tokenizer.encode(text)
        detokenizer = Detokenizer(tokenizer)
        parts = parts_of(detokenizer, token_ids)
        assert "".join(parts) == text
        shown = ""
        for num, part in enumerate(parts[:-1], 1):
            shown += part
            assert shown == finished(tokenizer.decode(token_ids[:num]))

    @given(data=st.data())
    def test_any_of_the_demo_models_tokens(self, demo_model, data):
        """Sampling at a high temperature gives sequences that no text has."""
        tokenizer = demo_tokenizer(demo_model)
        token_ids = data.draw(st.lists(st.integers(0, len(tokenizer) - 1), max_size=60))
        parts = parts_of(Detokenizer(tokenizer), token_ids)
        assert "".join(parts) == tokenizer.decode(token_ids, skip_special_tokens=True)


@functools.cache
def demo_tokenizer(directory):
    """The tokenizer of the demo model."""
    return AutoTokenizer.from_pretrained(directory)


# ---------------------------------------------------------------- stop strings


def stopped_by_search(kind, token_ids, stop, min_tokens=0):
    """The stop string, tokens and text up to its begin and end, by a search in the whole text after each token."""
    num_seen = 0
    for num in range(1, len(token_ids) + 1):
        text = whole(kind, token_ids[:num]).rstrip(UNKNOWN)
        matches = [
            (begin, begin + len(string), string)
            for string in stop
            for begin in range(len(text))
            if text.startswith(string, begin) and (not min_tokens or begin + len(string) > num_seen)
        ]
        if matches and num >= min_tokens:
            begin, end, string = min(matches)
            return string, num, text[:begin], text[:end]
        num_seen = max(num_seen, len(text))
    return None


def stopped(detokenizer, token_ids, min_tokens=0):
    """The stop string and the tokens up to it, or None; `take()` is called on the way."""
    parts = []
    for num, token_id in enumerate(token_ids, 1):
        found = detokenizer.append(token_id, may_stop=num >= min_tokens)
        parts.append(detokenizer.take())
        assert "".join(parts) == detokenizer.text
        if found is not None:
            return found, num
    detokenizer.finish()
    assert "".join(parts) + detokenizer.take() == detokenizer.text
    return None


def stops(kind):
    """Stop strings that occur: parts of the text of some tokens, and other short ones of its letters."""
    texts = outputs(kind).map(lambda token_ids: whole(kind, token_ids[:6]).replace(UNKNOWN, ""))
    return st.lists(
        st.tuples(texts, st.integers(0, 5), st.integers(1, 4)).map(lambda cut: cut[0][cut[1] :][: cut[2]]).filter(bool),
        max_size=3,
    )


class TestStop:
    @pytest.mark.parametrize("kind", KINDS)
    @given(data=st.data(), include_stop=st.booleans())
    def test_text_ends_where_a_search_in_the_whole_text_ends_it(self, kind, include_stop, data):
        """At the first token with which the text has a stop string, across tokens and inside them."""
        token_ids, stop = data.draw(outputs(kind)), data.draw(stops(kind))
        detokenizer = Detokenizer(tokenizer_of(kind), stop, include_stop)
        found = stopped(detokenizer, token_ids)
        wanted = stopped_by_search(kind, token_ids, stop)
        if wanted is None:
            assert found is None
            assert detokenizer.text == whole(kind, token_ids)
        else:
            assert found == wanted[:2]
            assert detokenizer.text == wanted[3 if include_stop else 2]

    @pytest.mark.parametrize("kind", ["byte-level", "wordpiece", "llama"])
    @given(data=st.data())
    def test_no_stop_string_within_the_first_tokens_counts(self, kind, data):
        """One that begins there and ends after does: min_tokens is about where the text may end."""
        token_ids, stop = data.draw(outputs(kind)), data.draw(stops(kind))
        min_tokens = data.draw(st.integers(1, 8))
        detokenizer = Detokenizer(tokenizer_of(kind), stop)
        found = stopped(detokenizer, token_ids, min_tokens)
        wanted = stopped_by_search(kind, token_ids, stop, min_tokens)
        assert found == (wanted and wanted[:2])
        assert detokenizer.text == (wanted[2] if wanted else whole(kind, token_ids))

    @pytest.mark.parametrize("kind", ["byte-level", "llama", "slow", "clean-up"])
    @given(data=st.data())
    def test_what_may_begin_a_stop_string_is_held_back_and_nothing_else(self, kind, data):
        """Held back by a fixed length, the last words would lag behind; held back less, a stop string would show."""
        token_ids, stop = data.draw(outputs(kind)), data.draw(stops(kind))
        detokenizer, without_stop = Detokenizer(tokenizer_of(kind), stop), Detokenizer(tokenizer_of(kind))
        for token_id in token_ids:
            detokenizer.append(token_id, may_stop=False)
            without_stop.append(token_id)
            text = without_stop.text
            begins = [text[i:] for i in range(len(text)) if any(s != text[i:] and s.startswith(text[i:]) for s in stop)]
            assert detokenizer.text == text.removesuffix(max(begins, key=len, default=""))
        detokenizer.finish()
        assert detokenizer.text == whole(kind, token_ids)

    @pytest.mark.parametrize(
        ("tokens", "stop", "found", "text"),
        [
            (["one", " END", " two"], ["END"], "END", "one "),
            (["one E", "N", "D!"], ["END"], "END", "one "),
            (["ENENEND"], ["END"], "END", "ENEN"),
            (["E", "N", "E", "N", "D"], ["END"], "END", "EN"),
            # The one that begins first, though another is complete sooner in the same token.
            (["abcd"], ["bc", "abcd"], "abcd", ""),
            # The one that is complete first, though another began before: later tokens are not waited for.
            (["abc", "d"], ["bc", "abcd"], "bc", "a"),
            (["xabc"], ["abc", "ab"], "ab", "x"),
            (["aaa"], ["aa"], "aa", ""),
            (["b", "", "c"], ["bc"], "bc", ""),
            (["世", "界"], ["世界"], "世界", ""),
            (["end"], ["END"], None, "end"),
            (["EN"], ["END"], None, "EN"),
            ([], ["END"], None, ""),
        ],
    )
    def test_which_stop_string_counts(self, tokens, stop, found, text):
        """The rules, one by one."""
        tokenizer = plain_tokenizer(tuple(dict.fromkeys(tokens)))
        detokenizer = Detokenizer(tokenizer, stop)
        end = stopped(detokenizer, tokenizer.convert_tokens_to_ids(tokens))
        assert (end and end[0]) == found
        assert detokenizer.text == text

    @pytest.mark.parametrize(
        ("tokens", "min_tokens", "num_tokens", "text"),
        [
            (["a", "END", "b", "END"], 2, 2, "a"),
            (["a", "END", "b", "END"], 3, 4, "aENDb"),
            (["a", "EN", "D"], 3, 3, "a"),
            (["a", "EN", "D"], 4, None, "aEND"),
            (["a", "ENDEN", "D"], 3, 3, "aEND"),
        ],
    )
    def test_a_stop_string_that_begins_too_early_and_ends_late_enough_counts(
        self, tokens, min_tokens, num_tokens, text
    ):
        """Neither one that was passed over, nor the rest of it, may end the text later."""
        tokenizer = plain_tokenizer(tuple(dict.fromkeys(tokens)))
        detokenizer = Detokenizer(tokenizer, ["END"])
        end = stopped(detokenizer, tokenizer.convert_tokens_to_ids(tokens), min_tokens)
        assert (end and end[1]) == num_tokens
        assert detokenizer.text == text

    def test_held_back_text_comes_as_soon_as_it_is_none_of_a_stop_string(self):
        """The longest beginning of any stop string is held, and what it has in common with the next one still is."""
        tokenizer = plain_tokenizer(tuple("\n-x"))
        token_ids = tokenizer.convert_tokens_to_ids(list("x\n\n-x\n-"))
        parts = parts_of(Detokenizer(tokenizer, ["\n\n--", "-x\n\n"]), token_ids)
        assert parts == ["x", "", "", "", "\n\n", "", "-x\n", "-"]

    def test_half_a_character_is_no_stop_string_and_a_broken_one_is(self):
        """U+FFFD stands for both in the decode of a prefix, but only one of them is text."""
        tokenizer = make_tokenizer(None)
        euro, broken = (
            tokenizer.convert_tokens_to_ids([letter_of(byte) for byte in output])
            for output in (b"\xe2\x82\xac", b"\xe2A")
        )
        assert stopped(Detokenizer(tokenizer, [UNKNOWN]), euro) is None
        assert stopped(Detokenizer(tokenizer, [UNKNOWN]), broken) == (UNKNOWN, 2)
        assert stopped(Detokenizer(tokenizer, [UNKNOWN]), euro[:2]) is None

    def test_a_line_break_of_byte_fallback_stops_at_once(self):
        """It is shown late, since a bad byte may follow; but when it is a stop string, nothing follows."""
        tokenizer = tokenizer_of("llama")
        token_ids = tokenizer.convert_tokens_to_ids(["a", "<0x0A>", "a"])
        detokenizer = Detokenizer(tokenizer, ["\n"])
        assert stopped(detokenizer, token_ids) == ("\n", 2)
        assert detokenizer.text == "a"

    @pytest.mark.parametrize(
        ("tokens", "stop", "found"),
        [
            (["<0xFF>", "<0x41>", "a"], "A", None),
            (["<0x41>", "a", "<0x41>", "a"], "AA", None),
            (["<0xFF>", "a", "<0x0A>", "a"], "\n", ("\n", 3)),
            (["a", "<0xC3>", "<0xA9>", "a"], "aé", ("aé", 3)),
        ],
    )
    def test_a_run_of_bytes_has_stop_strings_unless_a_byte_is_bad(self, tokens, stop, found):
        """Then it has no character at all; and what came before the run is no part of it."""
        tokenizer = tokenizer_of("llama")
        assert stopped(Detokenizer(tokenizer, [stop]), tokenizer.convert_tokens_to_ids(tokens)) == found

    def test_text_that_the_next_token_changes_is_searched_again(self):
        """Half of the stop string then lies where other letters were before."""
        tokenizer = tokenizer_of("slow")
        token_ids = tokenizer.convert_tokens_to_ids(["a", "b@@", "c"])
        detokenizer = Detokenizer(tokenizer, ["bc"])
        assert stopped(detokenizer, token_ids) == ("bc", 3)
        assert detokenizer.text == "a "

    def test_a_run_of_bytes_that_breaks_off_takes_no_stop_string_back_into_account(self):
        """One that did not count is not new when the character after it is complete."""
        tokenizer = tokenizer_of("llama")
        token_ids = tokenizer.convert_tokens_to_ids(["<0x41>", "<0xE2>", "<0x82>", "<0xAC>", "<0x41>"])
        assert stopped(Detokenizer(tokenizer, ["A"]), token_ids, min_tokens=2) == ("A", 5)

    def test_nothing_comes_after_the_end(self):
        """`finish` may be called whatever ended the text, and a token after the end is a bug of the caller."""
        tokenizer = plain_tokenizer(("a", "END"))
        a, end = tokenizer.convert_tokens_to_ids(["a", "END"])
        for ids, text in [([a, end], "a"), ([a], "a")]:
            detokenizer = Detokenizer(tokenizer, ["END"])
            for token_id in ids:
                detokenizer.append(token_id)
            for _ in range(2):
                detokenizer.finish()
                assert detokenizer.text == text
            assert (detokenizer.take(), detokenizer.take()) == (text, "")
            with pytest.raises(AssertionError, match="after the end"):
                detokenizer.append(a)

    @pytest.mark.parametrize(("stop", "error"), [("END", TypeError), ([1], TypeError), (["a", ""], ValueError)])
    def test_what_cannot_be_a_stop_string_is_refused(self, stop, error):
        """A lone string would be read as its letters; an empty one would end every text."""
        with pytest.raises(error, match="stop"):
            Detokenizer(CharTokenizer(), stop)


# ---------------------------------------------------------------- cost


class TestCost:
    @pytest.mark.parametrize(
        ("kind", "tokens"),
        [
            ("byte-level", ["A"]),
            ("byte-level", [letter_of(0xFF)]),
            ("byte-level", [letter_of(0xE2), letter_of(0x82), letter_of(0xAC)]),
            ("byte-level", ["</s>", "</s>", "</s>", "</s>", "</s>", "</s>", "</s>", "</s>", "</s>", "A"]),
            ("byte-level, a clean-up that transformers ignores", ["A"]),
            ("llama", ["▁a"]),
            ("llama", [UNKNOWN]),
            ("llama", ["<0xC3>", "<0xA9>", "a"]),
            ("metaspace", ["▁", "a"]),
            ("wordpiece", ["a", "##a"]),
            ("slow", ["a", "b@@"]),
            ("slow", ["</s>", "</s>", "</s>", "</s>", "</s>", "</s>", "</s>", "</s>", "</s>", "a"]),
            ("slow bytes", ["FF"]),
        ],
    )
    def test_a_step_decodes_a_few_tokens_however_long_the_output_is(self, kind, tokens, monkeypatch):
        """Decoding all tokens at every step would take longer than the model does."""
        sizes = self.sizes_of_decodes(kind, tokens, monkeypatch)
        assert max(sizes) <= 16
        assert len(sizes) <= 2 * 2_000

    def test_a_run_of_bytes_is_decoded_once(self, monkeypatch):
        """It settles as a whole, and some scripts are nothing but such runs."""
        run = ["<0xC3>", "<0xA9>", "</s>"] * 500 + ["a"]
        sizes = self.sizes_of_decodes("llama", run, monkeypatch)
        assert sum(sizes) <= 2 * 2_000

    @staticmethod
    def sizes_of_decodes(kind, tokens, monkeypatch):
        """Tokens in each decode of an output of 2,000 tokens before its end."""
        tokenizer = tokenizer_of(kind)
        decode, sizes = tokenizer.decode, []

        def counting(token_ids, **options):
            sizes.append(len(token_ids))
            return decode(token_ids, **options)

        monkeypatch.setattr(tokenizer, "decode", counting)
        detokenizer = Detokenizer(tokenizer, ["stop", "\n\n"])
        token_ids = tokenizer.convert_tokens_to_ids(tokens)
        for i in range(2_000):
            detokenizer.append(token_ids[i % len(token_ids)])
        return sizes


def test_it_loads_neither_torch_nor_transformers():
    """The server's own process has no use for them but the tokenizer."""
    code = "import engine.detokenizer, sys; print(*{'torch', 'transformers', 'tokenizers', 'numpy'} & set(sys.modules))"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == ""

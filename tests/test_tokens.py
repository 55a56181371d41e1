"""Token ids as bytes: what `pack` takes and refuses, namespaces, and keys that behave like tuples of integers."""

from array import array

import numpy as np
import pytest
from cache_models import common_tokens
from hypothesis import given
from hypothesis import strategies as st

from radixkv import TokenKey
from radixkv.tokens import TOKEN_BYTES, common_prefix, normalize_namespace, pack, unpack

IDS = st.lists(st.sampled_from([0, 1, 255, 256, 257, 65_536, 2**31 - 1, 2**31, 2**32 - 1]), max_size=12)


@given(IDS)
def test_unpacking_gives_the_ids_that_were_packed(ids):
    """Every id up to 2**32 - 1 takes exactly four bytes, on any machine."""
    assert unpack(pack(ids)) == ids
    assert pack(ids) == b"".join(token_id.to_bytes(TOKEN_BYTES, "big") for token_id in ids)


@given(IDS, IDS)
def test_byte_order_is_token_order(left, right):
    """The tree's children are sorted as bytes; their neighbours in that order must be their neighbours as tokens."""
    assert (pack(left) < pack(right)) == (left < right)


@given(IDS, IDS, st.integers(0, 3), st.integers(0, 3))
def test_common_prefix_counts_the_shared_leading_tokens(label, key, before, behind):
    """Bisection over memcmp must agree with comparing one by one, also inside a longer key."""
    data = pack([7] * before + key + [7] * behind)
    start, stop = before * TOKEN_BYTES, (before + len(key)) * TOKEN_BYTES
    assert common_prefix(pack(label), data, start, stop) == common_tokens(tuple(label), tuple(key))


@given(IDS, IDS)
def test_keys_share_tokens_within_a_namespace_only(left, right):
    """A key is the sequence and where it may be found."""
    assert TokenKey(left).common_prefix(TokenKey(right)) == common_tokens(tuple(left), tuple(right))
    assert TokenKey(left, "a").common_prefix(TokenKey(left, "b")) == 0
    assert (TokenKey(left) == TokenKey(right)) == (left == right)


@given(IDS, st.integers(-14, 14), st.integers(-14, 14))
def test_a_key_is_read_like_a_list(ids, start, stop):
    """Slices, indices from the end and iteration are Python's."""
    key = TokenKey(ids, "a")
    assert len(key) == len(ids)
    assert list(key) == ids
    assert key[start:stop] == TokenKey(ids[start:stop], "a")
    if -len(ids) <= start < len(ids):
        assert key[start] == ids[start]
    else:
        with pytest.raises(IndexError):
            key[start]


@pytest.mark.parametrize(
    "token_ids",
    [
        [1, 2, 3], (1, 2, 3), range(1, 4), iter([1, 2, 3]), array("I", [1, 2, 3]), array("q", [1, 2, 3]),
        np.array([1, 2, 3]), np.array([1, 2, 3], dtype=np.uint8), [np.int64(1), np.int32(2), 3],
    ],
    ids=["list", "tuple", "range", "iterator", "array I", "array q", "numpy", "numpy uint8", "numpy scalars"],
)  # fmt: skip
def test_any_sequence_of_integers_is_taken(token_ids):
    """Tokenizers give lists, data sets arrays, models tensors."""
    assert list(TokenKey(token_ids)) == [1, 2, 3]


def test_a_tensor_is_taken():
    """What a model's tokenizer returns with `return_tensors`, one row of it."""
    torch = pytest.importorskip("torch", reason="the tensor to take")
    assert list(TokenKey(torch.tensor([1, 2, 3]))) == [1, 2, 3]
    with pytest.raises(TypeError, match=r"position 0 must be an integer, not \[1, 2\]"):
        TokenKey(torch.tensor([[1, 2]]))


@pytest.mark.parametrize(
    ("token_ids", "kind", "message"),
    [
        ("abc", TypeError, "token_ids must be integers, not str"),
        (b"abcd", TypeError, "token_ids must be integers, not bytes"),
        (bytearray(4), TypeError, "token_ids must be integers, not bytearray"),
        (None, TypeError, "one-dimensional sequence of integers, not None"),
        (5, TypeError, "one-dimensional sequence of integers, not 5"),
        (np.array(5), TypeError, "one-dimensional sequence of integers, not 5"),
        ([1, 2.0], TypeError, "token id at position 1 must be an integer, not 2.0"),
        ([1, None], TypeError, "token id at position 1 must be an integer, not None"),
        ([[1], [2]], TypeError, r"token id at position 0 must be an integer, not \[1\]"),
        (["1"], TypeError, "token id at position 0 must be an integer, not '1'"),
        (array("d", [1.0]), TypeError, "token id at position 0 must be an integer, not 1.0"),
        (np.array([1.5]), TypeError, "token id at position 0 must be an integer, not 1.5"),
        ([1, -1], ValueError, r"token id at position 1 is -1; allowed: 0 <= id < 2\*\*32"),
        ([2**32], ValueError, r"token id at position 0 is 4294967296; allowed: 0 <= id < 2\*\*32"),
        ([0, 2**70], ValueError, r"token id at position 1 is 1180591620717411303424; allowed"),
        (np.array([-1]), ValueError, "token id at position 0 is -1; allowed"),
        (iter([1, -1]), ValueError, "token id at position 1 is -1; allowed"),
        (iter([1, 2, 3.0]), TypeError, "token id at position 2 must be an integer, not 3.0"),
    ],
)
def test_what_is_no_sequence_of_token_ids_is_refused_with_its_position(token_ids, kind, message):
    """A wrong id would silently become another one, and share its cache."""
    with pytest.raises(kind, match=message):
        TokenKey(token_ids)


def test_none_empty_and_missing_namespace_are_the_same_and_numbers_are_refused():
    """B082: a salt that is 0 or '' by mistake must not open another tenant's cache, nor lock out the default one."""
    assert {normalize_namespace(n) for n in (None, "", (), ("",), ("", ""))} == {()}
    assert TokenKey([1]) == TokenKey([1], None) == TokenKey([1], "")
    assert normalize_namespace(" ") == (" ",)
    for wrong in (0, 1, False, 0.0, b"a", ["a"], ("a", 1), ("a", None)):
        with pytest.raises(TypeError, match="namespace must be None, a string or a tuple of strings, not"):
            TokenKey([1], wrong)


def test_parts_of_a_namespace_keep_their_places():
    """B080: salt X, adapter X, both, and neither are four namespaces."""
    four = {normalize_namespace(n) for n in (None, ("X", ""), ("", "X"), ("X", "X"))}
    assert len(four) == 4
    assert normalize_namespace("ab") == normalize_namespace(("ab",)) != normalize_namespace(("a", "b"))


def test_a_key_is_not_copied_and_keeps_its_namespace():
    """Packing costs more than a whole look-up, so a key is passed on; but never under another name."""
    key = TokenKey([1, 2], "a")
    assert TokenKey.of(key) is key
    assert TokenKey.of(key, ("a",)) is key
    assert TokenKey.of([1, 2], "a") == key
    assert len({key, TokenKey([1, 2], "a"), TokenKey([1, 2])}) == 2
    for other in ("b", "", ()):
        with pytest.raises(ValueError, match=r"the key's namespace is \('a',\), the call's"):
            TokenKey.of(key, other)


def test_a_key_compares_with_keys_only_and_slices_without_steps():
    """A list is not equal to its key: it has no namespace."""
    key = TokenKey(range(10))
    assert key != list(range(10))
    assert repr(key) == "TokenKey([0, 1, 2, 3, 4, 5, 6, 7, …], 10 tokens, namespace=())"
    with pytest.raises(ValueError, match="step 1 only, not 2"):
        key[::2]
